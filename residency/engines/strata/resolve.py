"""From a Launch to the settings Strata works with.

A launch file stands for a configuration as setup writes it: what it leaves out is setup's choice. The engine's own
command line gets the engine's defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from residency.units import MIB

from .flags import KV_ALIASES, KV_WORDS, SETUP_DEFAULTS
from .geometry import LEAST_RESIDENT, PAGE_CELLS

if TYPE_CHECKING:
    from residency.launch.model import Launch
    from residency.machine.model import Device, Machine

DEFAULT_RESERVE = 700 * MIB  # --vram-reserve-mib
DEFAULT_CONTEXT = 4096
#: What setup writes for Intel cards: up to a context, above it, and on cards under 12 GB.
SYCL_RESERVES, SYCL_CONTEXT, SYCL_SMALL = (1024 * MIB, 2048 * MIB, 300 * MIB), 32768, 12 * 10**9
KV_FLOAT_UP_TO = 8192  # setup writes fp16 up to here, int8 above


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One launch as the engine resolves it."""

    stages: tuple[Device, ...]  # the cards, in the order of the pipeline
    automatic: bool  # the engine finds the split points
    firsts: tuple[int, ...]  # first layer of each later card, when given
    context: int
    kv: str | None  # fp16, int8, q4_0, k8v4; None: a pair it does not have
    resident: int  # cells in VRAM as asked for; 0 = all
    draft_window: int
    prefill: int | str
    prefill_limit: int
    borrow: bool
    window: int
    slots: int
    reserves: tuple[int, ...]
    reserve_given: bool
    cache: int | str
    vision: bool
    vision_device: Device | None  # None: the encoder computes on the host
    mapped: bool
    resident_copy: int | None  # bytes of experts copied to RAM at most; None: none
    table: str
    checkpoints: int
    parked: int
    trimmed: bool
    stream_experts: bool

    @property
    def streams(self) -> bool:
        """Whether part of the KV cache is streamed from host memory."""
        return self.resident > 0 and self.cells < self.context

    @property
    def cells(self) -> int:
        """Cells of each QSA layer kept on the card."""
        if not self.resident or self.stages[0].integrated:
            return self.context
        cells = max(self.resident, LEAST_RESIDENT)
        return min(self.context, -(-cells // PAGE_CELLS) * PAGE_CELLS)


def stages_of(launch: Launch, machine: Machine) -> tuple[Device, ...]:
    """Return the cards the launch runs on, in the engine's order."""
    kind = launch.get("device.kind")
    if kind == "cpu":
        return ()
    ids, gpus = launch.get("device.ids"), launch.options.get("gpus")
    every = tuple(d for d in machine.accelerators if kind in (None, "auto", d.kind))
    if ids is not None:
        found = [machine.device(name) for name in ids]
        cards = tuple(d for d in found if d is not None and d.kind != "cpu")
    elif isinstance(gpus, list):
        cards = tuple(every[i] for i in gpus if i < len(every))
    else:
        cards = tuple(d for d in every if d.kind == every[0].kind)
    later = launch.options.get("split-device")
    if later is not None and cards:
        numbers = later if isinstance(later, list) else [later]
        cards = (cards[0], *(every[i] for i in numbers if i < len(every)))
    split = launch.get("layers.split")
    if split == "none" or (split is None and not (launch.program is None and ids is not None and len(ids) > 1)):
        main = launch.get("device.main") or 0
        return cards[main : main + 1]
    firsts = launch.get("layers.first")
    return cards[: len(firsts) + 1] if firsts else cards


def kv_word(launch: Launch, context: int) -> str | None:
    """Return the engine's word for the pair of cache types, None for a pair it does not have."""
    key, value = launch.get("kv.key_type"), launch.get("kv.value_type")
    if key is None and value is None:
        return "fp16" if launch.program is not None or context <= KV_FLOAT_UP_TO else "int8"
    if key == value == "k8v4":
        return "k8v4"
    key, value = (KV_ALIASES.get(t, t) for t in (key or value, value or key))
    return KV_WORDS.get((key, value))


def resolve(launch: Launch, machine: Machine) -> Settings:
    """Return the settings of a launch. ``stages`` is empty when it has no card."""
    option = launch.options.get
    stages = stages_of(launch, machine)

    def get(knob: str) -> Any:
        value = launch.get(knob)
        return SETUP_DEFAULTS.get(knob) if value is None and launch.program is None else value

    context = launch.get("context.length") or DEFAULT_CONTEXT
    asked = launch.get("memory.reserve")
    reserves = []
    for index, device in enumerate(stages):
        pool = machine.pool(device.pool)
        total = (pool.total_bytes or 0) if pool is not None else 0
        default = DEFAULT_RESERVE
        if device.kind == "sycl" and launch.program is None:
            default = SYCL_RESERVES[2] if 0 < total < SYCL_SMALL else SYCL_RESERVES[context > SYCL_CONTEXT]
        value = default if asked is None else asked if isinstance(asked, int) else int(total * float(asked) / 100)
        later = option("vram-reserve-later-mib")
        reserves.append(later * MIB if index and isinstance(later, int) else value)
    vision = bool(launch.get("vision.enabled"))
    budget = option("resident-budget-gib")
    copy = None
    if option("resident-experts") or option("resident-cpu-experts") or budget:
        copy = int(budget * 2**30) if isinstance(budget, (int, float)) else 2**63 - 1
    firsts = tuple(launch.get("layers.first") or ())
    window = option("mtp-window", 32768)
    return Settings(
        stages=stages,
        automatic=len(stages) > 1 and not firsts,
        firsts=firsts,
        context=context,
        kv=kv_word(launch, context),
        resident=launch.get("kv.resident") or 0,
        draft_window=window if isinstance(window, int) else 32768,
        prefill=get("context.prefill") or 0,
        prefill_limit=int(option("prefill-auto-max") or 8192),
        borrow=not option("no-prefill-borrow") and launch.environ.get("STRATA_SPLIT_OWN") != "1",
        window=get("speculation.window") or 0,
        slots=launch.get("context.sequences") or 1,
        reserves=tuple(reserves),
        reserve_given=asked is not None,
        cache=get("experts.cache") or "auto",
        vision=vision,
        vision_device=_encoder(launch, machine, stages) if vision else None,
        # A resident copy of the experts replaces the arena: the packs are read through the mapping.
        mapped=launch.get("memory.load") == "mmap" or bool(option("resident-experts") or budget) or launch.environ.get("STRATA_ARENA_MMAP") == "1",
        resident_copy=copy,
        table=str(option("ple-io") or "direct"),
        checkpoints=int(option("prompt-cache", 6)),
        parked=int(option("conversation-cache-mib", 0)) * MIB,
        trimmed=bool(option("trim-stage-weights")) or launch.environ.get("STRATA_STAGE_TRIM") == "1",
        stream_experts=bool(option("stream-experts")),
    )


def _encoder(launch: Launch, machine: Machine, stages: tuple[Device, ...]) -> Device | None:
    """Return the card of the image encoder: the named one, else the main card; AMD has a CPU encoder only."""
    wanted = launch.get("vision.device")
    if wanted is not None and wanted.casefold() not in ("gpu", "auto"):
        return None if wanted.casefold() in ("cpu", "none") else machine.device(wanted)
    return stages[0] if stages and stages[0].kind in ("cuda", "metal") else None
