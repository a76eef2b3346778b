"""From settings to the Budget: every allocation of a start, in the order the engine makes them.

Order and sizes: ``generate.cpp`` and ``server.py`` of the 0.1.33 to 0.1.40 generation. The expert cache is greedy: it
takes the free memory less the reserve at the moment it is made. What comes before it only makes it smaller; what comes
after it has to live in the reserve. So the sum of a card always fits exactly until something after the cache does not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from residency.budget import Allocation, Budget, Phase, Purpose, Remark, Unknown
from residency.engines import soundness
from residency.engines.base import version_in
from residency.machine.model import usable_bytes
from residency.units import GIB, KIB, MIB
from residency.ways import Way

from .conflicts import remarks
from .geometry import VISION_TABLE_BYTES, geometry
from .resolve import resolve
from .split import plan_split, ranges

if TYPE_CHECKING:
    from residency.engines.base import Models
    from residency.launch.model import Launch
    from residency.machine.model import Device, Machine

    from .geometry import Geometry
    from .resolve import Settings

#: Driver context of the engine on one card, modules loaded eagerly (about 30 MB of it). No published figure;
#: the expert cache absorbs a difference.
CONTEXT_BYTES = 256 * MIB
#: Image encoder on a card: weights of the 27-layer tower in BF16; measured with its context at 1,024 image tokens;
#: from there to the 1.4 GB the documentation says to keep.
ENCODER_WEIGHTS, ENCODER_LOADED, ENCODER_GROWTH = 907_543_008, 1_200_000_000, 200_000_000
DRAFT_HEAD_BYTES = (133 * MIB, 213 * MIB)  # smallest vocabulary subset; largest seen bound at start
DRAFT_HEAD_RESERVED = "0.1.28"  # since then the cache leaves room for it
WINDOW_BYTES = 96 * MIB  # kept by the planner on every later card
WINDOW_MEASURED = 74 * MIB
PIPELINE_WINDOW_BYTES = 160 * MIB  # per card with --pipeline-windows 2
SLOT_BYTES = 170_000_000  # of every further slot, beside its session
SLOT_FIRST_USE = 256 * MIB  # a second slot died on first use with 217 MiB left and worked with 512
OWN_PROMPT_BYTES, PROMPT_TOKEN_BYTES = 160 * MIB, 680 * KIB  # prompt buffers that are not borrowed; per chunk token
LENT_SCRATCH = 96 * MIB  # GEMM scratch and workspace inside the loan
BORROW_ON_SPLIT = "0.1.30"  # before, a split's prompt path had buffers of its own
OWN_CHUNK = 2048  # what "auto" means then
CHUNKS = (32768, 16384, 8192, 6144, 4096, 3072, 2048, 1024, 512, 256)
RING_SLOTS, STREAM_FROM = 96, 1024
LENT_SHARE, KEPT_SLOTS = 0.9, 128
LEAST_RESERVE = 300 * MIB  # what 0.1.38 lowers a default reserve to
SELF_LOWERING = "0.1.38"
HELPER_RESERVE = 512 * MIB  # STRATA_REMOTE_RESERVE_MIB
RESIDENT_HEADROOM = 4 * GIB  # STRATA_RESIDENT_HEADROOM_GIB
UNIFIED_HEADROOM = 6 * GIB  # STRATA_UMA_HEADROOM_GIB
SYCL_HEADROOM = 1 / 6
CHECKPOINT_BYTES = 118_000_000
#: What the reserve lost between the cache and READY, per card: smallest measured (8 GB card, 32,768 tokens), and the
#: most, by context. On one card 637 MiB at 131,072 and more; a fork on four cards needed about 1,500 at 524,288.
AFTER_LIKELY = 268 * MIB
AFTER_AT_MOST = ((32_768, 402 * MIB), (131_072, 637 * MIB))
AFTER_ON_SPLIT = (524_288, 1500 * MIB)
LOW_BYTES = 256 * MIB  # below this the engine's own log says LOW


def after_at_most(context: int, cards: int) -> int:
    """Return the most that one card has been seen to need after its expert cache, bytes, between measured points."""
    points = (*AFTER_AT_MOST, AFTER_ON_SPLIT) if cards > 1 else AFTER_AT_MOST
    if context <= points[0][0]:
        return points[0][1]
    for (low, small), (high, large) in itertools.pairwise(points):
        if context <= high:
            return small + (large - small) * (context - low) // (high - low)
    return points[-1][1]


@dataclass
class _Sheet:
    """Rows in order, with what each pool has taken so far."""

    rows: list[Allocation] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)

    def add(self, row: Allocation) -> None:
        if row.at_most_bytes or row.likely_bytes:
            self.rows.append(row)
            self.used[row.pool] = self.used.get(row.pool, 0) + row.likely_bytes

    def exact(self, device: Device, purpose: Purpose, name: str, phase: Phase, size: int, **more: Any) -> None:
        self.add(Allocation.exact(device.pool, purpose, name, phase, size, device=device.name, **more))


def plan(launch: Launch, models: Models, machine: Machine, *, version: str) -> Budget:
    """Return the budget of one launch. Pure."""
    assert models.main is not None
    refused = soundness.refusals(models.main)
    if refused:
        return Budget(allocations=(), remarks=refused)
    model = geometry(models.main)
    settings = resolve(launch, machine)
    if not settings.stages or settings.stages[0].kind in ("cpu", "vulkan"):
        text = "It computes on a GPU: CUDA, ROCm, SYCL or Metal; the CPU only takes experts that missed"
        return Budget(allocations=(), remarks=(Remark(kind="impossible", code="needs-gpu", knob="device.kind", message=text),))
    found = remarks(launch, machine, settings, model, version)
    if settings.kv is None:
        return Budget(allocations=(), remarks=found)
    if model.layers < 1 or model.experts < 1 or model.kv_values < 0 or model.state_bytes < 0:
        return _unknown(found, f"the layout of architecture {models.main.architecture!r}", "its metadata gives no layers or no experts")
    if model.arena_bytes is None and settings.stages[0].kind != "metal":
        return _unknown(found, f"the weight arena of architecture {models.main.architecture!r}", "its size stands in the pack's index, and no such pack has been seen")
    return _Layout(launch, machine, settings, model, version, models).budget(found)


def _unknown(found: tuple[Remark, ...], what: str, why: str) -> Budget:
    return Budget(allocations=(), remarks=found, unknowns=(Unknown(what=what, why=why),))


class _Layout:
    """One launch being laid out, card by card, in the engine's order."""

    def __init__(self, launch: Launch, machine: Machine, settings: Settings, model: Geometry, version: str, models: Models) -> None:
        self.launch, self.machine, self.settings, self.model, self.version = launch, machine, settings, model, version
        self.models, self.sheet = models, _Sheet()
        assert settings.kv is not None
        self.kv: str = settings.kv
        self.cell = model.cell_bytes(settings.kv)
        self.remarks: list[Remark] = []
        self.facts: dict[str, Any] = {}
        self.ranges: tuple[tuple[int, int], ...] = ()
        self.last = settings.stages[-1]

    def budget(self, found: tuple[Remark, ...]) -> Budget:
        self.encoder()
        for device in self.settings.stages:
            self.weights(device)
        if self.last.kind == "metal":
            self.metal()
        else:
            self.ranges = self.split()
            self.sessions()
            self.draft_and_head()
            self.host()
            self.caches()
        return Budget(
            allocations=tuple(self.sheet.rows), remarks=(*found, *self.remarks), ways=self.ways(), in_order=True,
            facts={"context": self.settings.context, "kv": self.kv, "low_bytes": LOW_BYTES, "tower_elsewhere": self.settings.vision and self.models.mmproj is None, **self.facts},
        )  # fmt: skip

    def usable(self, device: Device) -> int | None:
        pool = self.machine.pool(device.pool)
        return None if pool is None else usable_bytes(pool)

    # Before the first layer

    def encoder(self) -> None:
        """The server starts the image encoder's process before the engine; on a card it is outside all accounting."""
        if not self.settings.vision:
            return
        device = self.settings.vision_device
        tower = self.models.mmproj.tensor_bytes if self.models.mmproj is not None else ENCODER_WEIGHTS
        if device is None:
            self.sheet.add(Allocation.exact(self.machine.host_pool.name, Purpose.VISION, "image encoder on the CPU", Phase.BEFORE, tower,
                                            device="CPU", backing="anonymous", knob="vision.device", accounted=False))  # fmt: skip
            return
        likely = max(tower, ENCODER_LOADED if self.models.mmproj is None else tower + ENCODER_LOADED - ENCODER_WEIGHTS)
        self.sheet.add(
            Allocation(pool=device.pool, purpose=Purpose.VISION, name="image encoder process", phase=Phase.BEFORE, certain_bytes=tower,
                       likely_bytes=likely, at_most_bytes=likely, device=device.name, knob="vision.device", accounted=False,
                       evidence="a process of its own, started by the server before the engine; about 1.2 GB at 1,024 image tokens")
        )  # fmt: skip

    def weights(self, device: Device) -> None:
        """Driver context, then the weight arena (the first large allocation) and the dense copy."""
        stages, model = self.settings.stages, self.model
        share = 1.0
        if self.settings.trimmed and self.settings.firsts and len(stages) > 1:
            low, high = self._given()[stages.index(device)]
            share = (high - low) / model.layers
        context = CONTEXT_BYTES if device.context_bytes is None else device.context_bytes
        self.sheet.add(
            Allocation(pool=device.pool, purpose=Purpose.RUNTIME, name="driver context", phase=Phase.BEFORE, certain_bytes=device.context_bytes or 0,
                       likely_bytes=context, at_most_bytes=context, device=device.name)
        )  # fmt: skip
        if model.arena_bytes:
            self.sheet.exact(device, Purpose.WEIGHTS, "weight arena", Phase.LOAD, int(model.arena_bytes * share),
                             evidence="pool size of the pack's index; the first large allocation on every card")  # fmt: skip
        self.sheet.exact(device, Purpose.WEIGHTS, "dense weights", Phase.LOAD, int(model.dense_bytes * share), pieces=model.dense_pieces,
                         largest_name=model.dense_largest[0], largest_bytes=model.dense_largest[1])  # fmt: skip
        if self.settings.vision:
            table = (self.settings.context + 64) * VISION_TABLE_BYTES
            self.sheet.exact(device, Purpose.VISION, "image position table", Phase.LOAD, table, knob="context.length")

    def _given(self) -> tuple[tuple[int, int], ...]:
        firsts, layers = self.settings.firsts, self.model.layers
        rising = all(a < b for a, b in zip((0, *firsts), (*firsts, layers), strict=True))
        if not rising or len(firsts) != len(self.settings.stages) - 1:
            return ranges([i * layers // len(self.settings.stages) for i in range(1, len(self.settings.stages))], layers)
        return ranges(firsts, layers)

    # Sessions, draft, head

    def session(self, low: int, high: int) -> dict[str, int]:
        return self.model.session_bytes(low, high, kv=self.kv, cells=self.settings.cells, context=self.settings.context)

    def draft_bytes(self) -> dict[str, int]:
        s, m = self.settings, self.model
        ring = s.draft_window + 4 * s.window + 64 if s.streams and s.draft_window else s.context
        head = DRAFT_HEAD_BYTES[1]
        return {"layer": m.draft_expert_bytes + m.draft_dense_bytes, "kv": self.cell * min(ring, s.context), "head": head}

    def split(self) -> tuple[tuple[int, int], ...]:
        stages, layers = self.settings.stages, self.model.layers
        if len(stages) == 1:
            return ((0, layers),)
        if not self.settings.automatic:
            found = self._given()
        else:
            rooms = []
            for index, device in enumerate(stages):
                room = (self.usable(device) or 0) - self.sheet.used.get(device.pool, 0) - self.settings.reserves[index]
                if index:
                    room -= WINDOW_BYTES
                if index == len(stages) - 1:
                    room -= sum(self.draft_bytes().values()) + self.model.head_bytes
                rooms.append(room)
            firsts = plan_split(rooms, self.model.expert_layer_bytes, lambda low, high: sum(self.session(low, high).values()))
            found = ranges(firsts, layers)
        self.facts["split"] = ",".join(str(low) for low, _ in found[1:])
        return found

    def sessions(self) -> None:
        s = self.settings
        amount = f"{s.cells} of {s.context} tokens" if s.streams else f"{s.context} tokens"
        knob = "kv.resident" if s.streams else "context.length"
        for device, (low, high) in zip(s.stages, self.ranges, strict=True):
            parts = self.session(low, high)
            self.sheet.exact(device, Purpose.KV, f"KV cache, {amount}", Phase.CONTEXT, parts["kv"] * s.slots, knob=knob, pieces=s.slots)
            self.sheet.exact(device, Purpose.KV, "indexer keys, never streamed", Phase.CONTEXT, parts["indexer"] * s.slots, knob="context.length", pieces=s.slots)
            self.sheet.exact(device, Purpose.KV, "RoPE, page and score tables", Phase.CONTEXT, parts["tables"] * s.slots, knob="context.length", pieces=3 * s.slots)
            state = parts["state"] * s.slots + SLOT_BYTES * (s.slots - 1)
            self.sheet.exact(device, Purpose.STATE, "recurrent state", Phase.CONTEXT, state, knob="context.sequences", pieces=s.slots)

    def draft_and_head(self) -> None:
        draft, device = self.draft_bytes(), self.last
        self.sheet.exact(device, Purpose.WEIGHTS, "output head", Phase.CONTEXT, self.model.head_bytes)
        self.sheet.exact(device, Purpose.DRAFT, "draft layer", Phase.CONTEXT, draft["layer"], knob="speculation.window", pieces=3)
        self.sheet.exact(device, Purpose.DRAFT, "draft layer's KV cache", Phase.CONTEXT, draft["kv"], knob="option:mtp-window")

    # Host

    def host(self) -> None:
        s, m, host = self.settings, self.model, self.machine.host_pool.name
        experts = sum(m.expert_layer_bytes)
        unified = self.machine.is_unified(self.last)
        if s.mapped:
            self.sheet.add(Allocation.mapped(host, Purpose.EXPERTS, "experts mapped from the file", experts, knob="memory.load"))
        elif not s.stream_experts:
            self.sheet.add(Allocation.exact(host, Purpose.EXPERTS, "host expert arena", Phase.CONTEXT, experts,
                                            backing="anonymous" if unified else "pinned", knob="memory.load"))  # fmt: skip
        if s.streams:
            cells = (sum(m.attention) + 1) * self.cell * s.context
            self.sheet.add(Allocation.exact(host, Purpose.KV, "host copy of the KV cache", Phase.CONTEXT, cells, backing="pinned", knob="context.length"))
        self.sheet.add(Allocation.exact(host, Purpose.WEIGHTS, "token embedding", Phase.LOAD, m.embedding_bytes, backing="pinned"))
        if s.table == "ram":
            self.sheet.add(Allocation.exact(host, Purpose.WEIGHTS, "n-gram table", Phase.LOAD, m.table_bytes, backing="locked", knob="option:ple-io"))
        elif s.table == "mmap":
            self.sheet.add(Allocation.mapped(host, Purpose.WEIGHTS, "n-gram table mapped from the file", m.table_bytes, knob="option:ple-io"))
        later = s.checkpoints * CHECKPOINT_BYTES + s.parked
        if later:
            self.sheet.add(Allocation(pool=host, purpose=Purpose.STATE, name="prompt checkpoints and parked conversations", phase=Phase.RUN_TIME,
                                      certain_bytes=0, likely_bytes=0, at_most_bytes=later, backing="anonymous", knob="option:prompt-cache"))  # fmt: skip

    # The cache and what follows it

    def caches(self) -> None:
        s, m = self.settings, self.model
        sizes: list[int] = []
        reserves: dict[str, int] = {}
        for index, (device, (low, high)) in enumerate(zip(s.stages, self.ranges, strict=True)):
            if device is self.last and version_in(self.version, DRAFT_HEAD_RESERVED, None):
                self._draft_head(device)
            own = self._own_prompt(index)
            kept = own + (WINDOW_BYTES if index else 0) + self._pipeline()
            reserve = self._reserve(index, device, kept)
            reserves[device.pool] = reserve
            experts = sum(m.expert_layer_bytes[low:high])
            usable = self.usable(device)
            room = max(0, usable - self.sheet.used.get(device.pool, 0) - reserve - kept) if usable is not None else 0
            if device.kind == "sycl" and s.cache == "auto" and "STRATA_EXPERT_CACHE_HEADROOM" not in self.launch.environ:
                room = int(room * (1 - SYCL_HEADROOM))
            sizes.append(self._cache(device, index, experts, room))
            self._after(index, device, reserve, own)
        for device, size in zip(s.stages, sizes, strict=True):
            self._resident_copy(device, size)
        self._helpers(reserves)
        self._slots_first_use(reserves)
        self._chunk(sizes)
        self.facts["reserve_bytes"] = reserves
        self.facts["expert_cache_bytes"] = dict(zip((d.name for d in s.stages), sizes, strict=True))

    def _draft_head(self, device: Device) -> None:
        small, large = DRAFT_HEAD_BYTES
        self.sheet.add(Allocation(pool=device.pool, purpose=Purpose.DRAFT, name="draft head", phase=Phase.CONTEXT, certain_bytes=small, likely_bytes=large,
                                  at_most_bytes=large, device=device.name, knob="option:draft-vocab"))  # fmt: skip

    def _own_prompt(self, index: int) -> int:
        """Bytes of prompt buffers that are not lent by the cache."""
        s = self.settings
        staging = self.cell * s.context if s.streams else 0
        split_owns = len(s.stages) > 1 and not version_in(self.version, BORROW_ON_SPLIT, None)
        if not s.borrow or split_owns:
            chunk = s.prefill if isinstance(s.prefill, int) else OWN_CHUNK
            return OWN_PROMPT_BYTES + PROMPT_TOKEN_BYTES * chunk + staging
        if len(s.stages) == 1 and isinstance(s.cache, int) and s.cache and not index:
            return OWN_PROMPT_BYTES + PROMPT_TOKEN_BYTES * 512 + staging  # steps down to what is left beside a given cache
        return 0

    def _pipeline(self) -> int:
        return PIPELINE_WINDOW_BYTES if self.launch.options.get("pipeline-windows") == 2 and len(self.settings.stages) > 1 else 0

    def _reserve(self, index: int, device: Device, kept: int) -> int:
        """Return the reserve in force: on unified memory never below its headroom; lowered by itself where nobody set it."""
        reserve = self.settings.reserves[index]
        if device.integrated or self.machine.is_unified(device):
            return max(reserve, UNIFIED_HEADROOM)
        usable = self.usable(device)
        if not self.settings.reserve_given and version_in(self.version, SELF_LOWERING, None) and usable is not None:
            room = usable - self.sheet.used.get(device.pool, 0) - kept - KEPT_SLOTS * self.model.largest_expert_bytes
            reserve = max(LEAST_RESERVE, min(reserve, room))
        return reserve

    def _cache(self, device: Device, index: int, experts: int, room: int) -> int:
        s, blob = self.settings, self.model.largest_expert_bytes
        greedy = not isinstance(s.cache, int) or s.cache == 0
        size = min(experts, room)
        if isinstance(s.cache, int) and s.cache:
            average = sum(self.model.expert_layer_bytes) // (self.model.layers * self.model.experts)
            asked = min(experts, s.cache * average)
            size = min(asked, room) if len(s.stages) > 1 and not index else asked
        size = max(size, blob)
        self.sheet.add(
            Allocation(pool=device.pool, purpose=Purpose.EXPERT_CACHE, name="expert cache", phase=Phase.LOAD, certain_bytes=blob if greedy else size,
                       likely_bytes=size, at_most_bytes=size, device=device.name, knob="memory.reserve" if greedy else "experts.cache", greedy=greedy)
        )  # fmt: skip
        return size

    def _after(self, index: int, device: Device, reserve: int, own: int) -> None:
        """What lives in the reserve: windows, graphs, handles, side streams, first use, the encoder's first images."""
        s, sheet = self.settings, self.sheet
        greedy = not isinstance(s.cache, int) or s.cache == 0
        if own:
            sheet.exact(device, Purpose.COMPUTE, "prompt buffers of their own", Phase.WARM_UP, own, knob="context.prefill")
        if index:
            sheet.exact(device, Purpose.COMPUTE, "verify window", Phase.WARM_UP, WINDOW_BYTES, knob="speculation.window")
        if self._pipeline():
            sheet.exact(device, Purpose.COMPUTE, "second verify window", Phase.WARM_UP, self._pipeline(), knob="option:pipeline-windows")
        first = WINDOW_MEASURED if not index else 0
        first_late = len(sheet.rows)
        at_most = after_at_most(s.context, len(s.stages)) - (WINDOW_MEASURED if index else 0)
        likely = AFTER_LIKELY - (WINDOW_MEASURED if index else 0)
        name = "graphs, library handles, side streams, first use" if index else "verify window, graphs, library handles, side streams, first use"
        sheet.add(
            Allocation(pool=device.pool, purpose=Purpose.COMPUTE, name=name, phase=Phase.WARM_UP, certain_bytes=first, likely_bytes=likely,
                       at_most_bytes=at_most, device=device.name, knob="memory.reserve", accounted=False,
                       evidence="reserve less what start-up logs report free at READY, seven launches")
        )  # fmt: skip
        most = at_most
        if device is self.last and not version_in(self.version, DRAFT_HEAD_RESERVED, None):
            small, large = DRAFT_HEAD_BYTES
            sheet.add(Allocation(pool=device.pool, purpose=Purpose.DRAFT, name="draft head", phase=Phase.WARM_UP, certain_bytes=small, likely_bytes=small,
                                 at_most_bytes=large, device=device.name, knob="option:draft-vocab", accounted=False))  # fmt: skip
            most += large
        if s.vision_device is device:
            sheet.add(
                Allocation(pool=device.pool, purpose=Purpose.VISION, name="image encoder's first images", phase=Phase.RUN_TIME, certain_bytes=0,
                           likely_bytes=0, at_most_bytes=ENCODER_GROWTH, device=device.name, knob="vision.device", accounted=False,
                           evidence="measured about 1.2 GB, documented to need 1.4 GB; it grows at its first images")
            )  # fmt: skip
            most += ENCODER_GROWTH
        used = sum(a.likely_bytes for a in sheet.rows[first_late:])
        if greedy and reserve > used:
            sheet.add(Allocation(pool=device.pool, purpose=Purpose.RESERVE, name="rest of the reserve", phase=Phase.RUN_TIME, certain_bytes=0,
                                 likely_bytes=reserve - used, at_most_bytes=max(0, reserve - most), device=device.name, knob="memory.reserve"))  # fmt: skip

    def _helpers(self, reserves: dict[str, int]) -> None:
        """Expert caches on cards that no stage runs on, in their order."""
        free = [d for d in self.machine.accelerators if d not in self.settings.stages]
        average = sum(self.model.expert_layer_bytes) // (self.model.layers * self.model.experts)
        for number in (1, 2, 3):
            asked = self.launch.options.get(f"expert-cache-device{number}")
            if asked in (None, 0):
                continue
            if number > len(free):
                text = f"A helper cache on card {number} needs a card that no stage runs on, and there are {len(free)}"
                self.remarks.append(Remark(kind="impossible", code="helper-without-card", knob=f"option:expert-cache-device{number}", message=text))
                continue
            device = free[number - 1]
            self.sheet.exact(device, Purpose.RUNTIME, "driver context", Phase.BEFORE, CONTEXT_BYTES if device.context_bytes is None else device.context_bytes)
            size = max(0, (self.usable(device) or 0) - self.sheet.used.get(device.pool, 0) - HELPER_RESERVE)
            size = min(sum(self.model.expert_layer_bytes), size if asked == "auto" or not isinstance(asked, int) else asked * average)
            self.sheet.exact(device, Purpose.EXPERT_CACHE, "helper's expert cache", Phase.LOAD, size, knob=f"option:expert-cache-device{number}")
            reserves.setdefault(device.pool, HELPER_RESERVE)

    def _resident_copy(self, device: Device, cached: int) -> None:
        """Experts copied to RAM after the cache was filled: with a budget the most used ones, else those no card holds."""
        if self.settings.resident_copy is None or device is not self.last:
            return
        size, host = sum(self.model.expert_layer_bytes), self.machine.host_pool.name
        if self.launch.options.get("resident-budget-gib"):
            size = min(self.settings.resident_copy, size)
            row = Allocation.exact(host, Purpose.EXPERTS, "resident copy of experts", Phase.WARM_UP, size, backing="locked", knob="option:resident-budget-gib")
        else:  # as many as the RAM holds above a headroom
            size = max(0, size - max(cached, sum(a.likely_bytes for a in self.sheet.rows if a.purpose is Purpose.EXPERT_CACHE)))
            room = usable_bytes(self.machine.host_pool)
            if room is not None:
                size = max(0, min(size, room - self.sheet.used.get(host, 0) - RESIDENT_HEADROOM))
            row = Allocation(pool=host, purpose=Purpose.EXPERTS, name="resident copy of experts", phase=Phase.WARM_UP, certain_bytes=0, likely_bytes=size,
                             at_most_bytes=size, backing="locked", knob="option:resident-experts")  # fmt: skip
        self.sheet.add(row)

    def _slots_first_use(self, reserves: dict[str, int]) -> None:
        """Beside a cache of given size nothing is cut, and a further slot takes its buffers at its first request."""
        s = self.settings
        if s.slots < 2 or not (isinstance(s.cache, int) and s.cache) or len(s.stages) > 1:
            return
        pool = s.stages[0].pool
        need = after_at_most(s.context, 1) + SLOT_FIRST_USE
        if reserves[pool] < need:
            text = (f"Beside an expert cache of {s.cache} slots, which is never cut, {reserves[pool] // MIB} MiB of reserve are left for start-up and the first use of slot 2; "
                    f"together they have taken {need // MIB} MiB, and the start succeeds before the request dies")  # fmt: skip
            self.remarks.append(
                Remark(kind="fails-late", code="slot-first-use", knob="memory.reserve", message=text, pool=pool, need_bytes=need, have_bytes=reserves[pool],
                       ways=(Way(knob="memory.reserve", value=4 * GIB, low=reserves[pool], step=64 * MIB, prefer="smallest"), Way(knob="context.sequences", value=1)))
            )  # fmt: skip

    def _loan(self, chunk: int) -> int:
        s = self.settings
        ring = self.model.largest_expert_bytes * (RING_SLOTS if chunk >= STREAM_FROM else 8)
        return PROMPT_TOKEN_BYTES * chunk + LENT_SCRATCH + ring + (self.cell * s.context if s.streams else 0)

    def _chunk(self, sizes: list[int]) -> None:
        """The prompt chunk every card's loan allows; the smallest card decides for all."""
        s = self.settings
        if not s.borrow or any(a.name == "prompt buffers of their own" for a in self.sheet.rows):
            return
        blob = self.model.largest_expert_bytes
        lendable = [max(0, int(min(size * LENT_SHARE, size - KEPT_SLOTS * blob))) for size in sizes]
        by_card: dict[str, int] = {}
        for device, limit in zip(s.stages, lendable, strict=True):
            by_card[device.name] = next((c for c in CHUNKS if c <= s.prefill_limit and self._loan(c) <= limit), 0)
        self.facts["prompt_chunk_by_device"] = by_card
        wanted = s.prefill
        if not isinstance(wanted, int):
            chunk = self.facts["prompt_chunk"] = min(by_card.values())
            if not chunk and not any(self.usable(d) is None for d in s.stages):
                small = min(s.stages, key=lambda d: by_card[d.name])
                text = f"{small.name}'s expert cache is too small to lend buffers even for the smallest prompt chunk, {CHUNKS[-1]} tokens; the start may end there"
                self.remarks.append(Remark(kind="risk", code="no-chunk", knob="context.prefill", message=text, pool=small.pool, device=small.name))
            return
        chunk = wanted
        while chunk > CHUNKS[-1] and any(self._loan(chunk) > limit for limit in lendable):
            chunk //= 2
        self.facts["prompt_chunk"] = chunk
        for device in s.stages:
            usable = self.usable(device)
            if usable is not None and PROMPT_TOKEN_BYTES * wanted > usable:
                text = f"A prompt chunk of {wanted} tokens needs {PROMPT_TOKEN_BYTES * wanted // MIB} MiB of buffers on every card, more than the {usable // MIB} MiB of {device.name} hold with nothing else on them"
                self.remarks.append(
                    Remark(kind="fails-late", code="chunk-past-card", knob="context.prefill", message=text, pool=device.pool, device=device.name,
                           need_bytes=PROMPT_TOKEN_BYTES * wanted, have_bytes=usable, ways=tuple(Way(knob="context.prefill", value=c) for c in CHUNKS if c <= chunk))
                )  # fmt: skip
                return
        if chunk < wanted:
            small = min(s.stages, key=lambda d: by_card[d.name])
            text = f"The prompt chunk of {wanted} tokens does not fit what {small.name}'s expert cache can lend, so the engine halves it to {chunk}"
            self.remarks.append(Remark(kind="inert", code="chunk-halved", knob="context.prefill", message=text, device=small.name))

    # Metal

    def metal(self) -> None:
        """A separate engine: no expert cache, no experts on the CPU; everything lies under the working-set limit."""
        m, s, device = self.model, self.settings, self.last
        self.ranges = ((0, m.layers),)
        self.sheet.exact(device, Purpose.EXPERTS, "experts", Phase.LOAD, sum(m.expert_layer_bytes), pieces=3 * m.layers,
                         largest_name="experts of one layer", largest_bytes=max(m.expert_layer_bytes))  # fmt: skip
        self.sheet.exact(device, Purpose.WEIGHTS, "output head and embedding", Phase.LOAD, m.head_bytes + m.embedding_bytes, pieces=2)
        parts = m.session_bytes(0, m.layers, kv=self.kv, cells=s.context, context=s.context)
        self.sheet.exact(device, Purpose.KV, f"KV cache, {s.context} tokens", Phase.CONTEXT, parts["kv"] + parts["indexer"], knob="context.length")
        self.sheet.exact(device, Purpose.STATE, "recurrent state", Phase.CONTEXT, parts["state"])

    # Ways out

    def ways(self) -> tuple[Way, ...]:
        """Changes that move bytes, by their effect; the core tries each before it is offered."""
        s = self.settings
        found = []
        if s.vision_device is not None:
            found.append(Way(knob="vision.device", value="cpu", note="pictures take seconds instead of tenths"))
        if not s.streams and s.context > 2 * 32768 and not self.last.integrated:
            found.append(Way(knob="kv.resident", value=32768, note="the rest of the KV cache is streamed from pinned host memory"))
        if self.kv == "fp16":
            found.append(Way(knob="kv.value_type", value="int8"))
        if not s.mapped and self.last.kind in ("cuda", "rocm"):
            found.append(Way(knob="memory.load", value="mmap", note="experts that miss are read from the disk"))
        if s.table == "ram":
            found.append(Way(knob="option:ple-io", value="direct"))
        if isinstance(s.cache, int) and s.cache:
            found.append(Way(knob="experts.cache", value="auto"))
        if s.slots > 1:
            found.append(Way(knob="context.sequences", value=1))
        if s.reserves[0] > LEAST_RESERVE:
            found.append(Way(knob="memory.reserve", value=s.reserves[0], low=LEAST_RESERVE, step=64 * MIB))
        enough = after_at_most(s.context, len(s.stages)) + LOW_BYTES + (ENCODER_GROWTH if s.vision_device is not None else 0)
        found.append(Way(knob="memory.reserve", value=8 * GIB, low=max(*s.reserves, enough), step=64 * MIB, prefer="smallest", note="the expert cache shrinks by as much"))
        found.append(Way(knob="context.length", value=s.context - 1024, low=4096, step=1024))
        return tuple(found)
