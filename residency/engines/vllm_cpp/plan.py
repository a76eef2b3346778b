"""From a launch to the Budget of vllm.cpp.

Order in the engine: documents and flags, fit check, weights (borrowed, or written out), KV pool and
recurrent state, READY; then, at the first forward, the upload of every weight the device needs and the
slot store. READY proves nothing about device weights (https://github.com/mudler/vllm.cpp/issues/1897).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from residency.budget import Allocation, Backing, Budget, Phase, Purpose, Remark, Unknown
from residency.engines import soundness
from residency.engines.base import platform_of, version_in
from residency.units import MIB, size
from residency.ways import Way

from . import lane
from .capabilities import CAPABILITIES
from .memory import (
    batched_tokens,
    bound_bytes,
    expands,
    kv_block_bytes,
    piece_bytes,
    recurrent_layers,
    scratch_bytes,
    slice_bytes,
    state_bytes,
    weights_of,
)
from .remarks import PLACEABLE, pool_blocks, remarks, streams
from .settings import resolve
from .versions import FIT_CHECK, NEWEST, OLDEST, TREES, is_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.checkpoint.model import Checkpoint, Tensor
    from residency.engines.base import Models
    from residency.launch.model import Launch
    from residency.machine.model import Device, Machine, Pool

    from .memory import Group, Weights
    from .settings import Settings

#: Driver context of a device without a measured one; 450 to 523 MiB were measured on discrete cards.
CONTEXT_BYTES = 450 * MIB


def plan(launch: Launch, models: Models, machine: Machine, *, version: str) -> Budget:
    """Return the budget of one launch. Pure."""
    model = models.main
    assert model is not None
    if not is_tree(version):
        why = f"vllm.cpp versions are dates of trees, {OLDEST} to {NEWEST} ({', '.join(TREES)}), not {version!r:.40}"
        return Budget(allocations=(), unknowns=(Unknown(what="what this version can do", why=why),))
    refused = soundness.refusals(model)
    if refused:
        return Budget(allocations=(), remarks=refused)
    settings = resolve(launch, machine, version)
    found = _Layout(launch=launch, models=models, model=model, machine=machine, settings=settings, version=version)
    rows = found.rows()
    budget = Budget(
        allocations=tuple(rows),
        remarks=remarks(launch, model, settings, version),
        unknowns=tuple(_unknowns(launch)),
        ways=found.ways(),
        facts=found.facts(),
    )
    return replace(budget, remarks=(*budget.remarks, *found.fit_remark(budget)))


def _unknowns(launch: Launch) -> list[Unknown]:
    return [
        Unknown(what=f"the memory of the {what} model", why="it is a second engine in the same process, and its size is not modelled")
        for option, what in (("speech-model", "speech"), ("video-dit", "video"))
        if launch.options.get(option)
    ]


@dataclass(frozen=True, kw_only=True)
class _Layout:
    launch: Launch
    models: Models
    model: Checkpoint
    machine: Machine
    settings: Settings
    version: str

    @cached_property
    def weights(self) -> Weights:
        """The tensor table by fate."""
        return weights_of(self.model, self.settings)

    @cached_property
    def recurrent(self) -> frozenset[int]:
        """Blocks with a recurrent state."""
        return recurrent_layers(self.model)

    @cached_property
    def streaming(self) -> bool:
        """Whether the engine leaves the expert towers to the slot store."""
        return streams(self.model, self.settings, self.version)

    @property
    def in_slots(self) -> bool:
        """Whether they stay there: without the alias switch the first forward uploads them all the same."""
        return self.streaming and (self.settings.device is None or self.settings.alias_host)

    @property
    def pool(self) -> Pool | None:
        """The pool the engine computes in."""
        device = self.settings.device
        return self.machine.pool(device.pool) if device is not None else self.machine.host_pool

    @cached_property
    def with_mtp(self) -> bool:
        """Whether the next-token block counts.

        The engine's bound counts it whether or not a speculator loads it. Where that bound is over the device these are
        the figures the engine refuses with; elsewhere the block counts only when it is loaded.
        """
        total = self.pool.total_bytes if self.pool is not None else None
        over = self.settings.device is not None and total is not None and self._bound > total
        return self.settings.speculation == "mtp" or over

    @cached_property
    def placed(self) -> int:
        """Leading layers whose experts stay on the CPU."""
        settings, device = self.settings, self.settings.device
        possible = (
            device is not None
            and self.model.architecture in PLACEABLE
            and CAPABILITIES.find("expert-placement", platform_of(device), self.version) is not None
        )
        if not possible:
            return 0
        return self.model.integer("block_count") if settings.cpu_moe else settings.n_cpu_moe

    def _arena(self) -> int:
        return self.settings.slots * (self.settings.slot_bytes or slice_bytes(self.model))

    def _on_device(self, tensor: Tensor) -> bool:
        return tensor.layer is None or tensor.layer >= self.placed

    @cached_property
    def _bound(self) -> int:
        """What the engine's fit check compares with the device: the whole table, or all but the towers with the arena."""
        if self.streaming:
            return self.weights.bound_without_towers + self._arena()
        if self.placed:
            towers = (*self.weights.experts.tensors, *self.weights.mtp_experts.tensors)
            return self.weights.bound_bytes - sum(t.nbytes for t in towers if not self._on_device(t))
        return self.weights.bound_bytes

    # -- rows -------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Allocation]:
        """Return every allocation."""
        device = self.settings.device
        rows = self._cpu_weights() if device is None else self._device_weights(device)
        return [*self._runtime(device), *rows, *self._vision(device), *self._cache(device), *self._scratch(device)]

    def _dense(self) -> tuple[Group, ...]:
        return (self.weights.dense, self.weights.mtp_dense) if self.with_mtp else (self.weights.dense,)

    def _towers(self) -> tuple[Group, ...]:
        return (self.weights.experts, self.weights.mtp_experts) if self.with_mtp else (self.weights.experts,)

    def _piece(self, tensor: Tensor) -> int:
        return piece_bytes(tensor, self.recurrent, self.settings)

    def _largest(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The largest single tensor, by what the engine's own bound charges for it."""
        largest = max(tensors, key=lambda t: bound_bytes(t, self.settings), default=None)
        if largest is None:
            return {}
        return {"largest_name": largest.name, "largest_bytes": bound_bytes(largest, self.settings), "pieces": len(tensors)}

    def _cpu_weights(self) -> list[Allocation]:
        host = self.machine.host_pool.name
        dense, towers = self._dense(), self._towers()
        everything = (*dense, *towers)
        own = sum(g.own_bytes for g in everything)
        borrowed = sum(g.held_bytes - g.own_bytes for g in everything)
        rows = []
        if own:
            certain = min(own, sum(g.own_file_bytes for g in everything))
            rows.append(
                Allocation(pool=host, purpose=Purpose.WEIGHTS, name="weights the loader writes out as bf16", phase=Phase.LOAD, backing="anonymous",
                           certain_bytes=certain, likely_bytes=own, at_most_bytes=own,
                           knob=None if self.settings.keep_quant else "option:vt-gguf-keep-quant")
            )  # fmt: skip
        if self.settings.mmap:
            rows.append(Allocation.mapped(host, Purpose.WEIGHTS, "weights borrowed from the file", borrowed, knob="memory.load"))
        else:
            rows.append(Allocation.exact(host, Purpose.WEIGHTS, "weights read into memory", Phase.LOAD, borrowed, backing="anonymous",
                                         knob="memory.load", **self._largest([t for g in everything for t in g.tensors])))  # fmt: skip
        if self.in_slots:
            rows.append(self._slots(host, None, "anonymous"))
        return rows

    def _slots(self, pool: str, device: str | None, backing: Backing) -> Allocation:
        slot = self.settings.slot_bytes or slice_bytes(self.model)
        return Allocation.exact(pool, Purpose.EXPERT_CACHE, f"{self.settings.slots} expert slots of {size(slot)}", Phase.FIRST_FORWARD,
                                self._arena(), knob="experts.slots", device=device, backing=backing)  # fmt: skip

    def _device_weights(self, device: Device) -> list[Allocation]:
        settings, host = self.settings, self.machine.host_pool.name
        dense, towers = self._dense(), self._towers()
        checked = device.kind in ("cuda", "rocm")  # metal and vulkan may read the mapping in place
        held = sum(g.held_bytes for g in dense)
        bound = min(held, sum(g.bound_bytes for g in dense)) if checked else 0
        rows = [
            Allocation(pool=device.pool, purpose=Purpose.WEIGHTS, name="weights outside the experts", phase=Phase.FIRST_FORWARD,
                       certain_bytes=bound, likely_bytes=held, at_most_bytes=held, device=device.name, **self._largest([t for g in dense for t in g.tensors]))
        ]  # fmt: skip
        mapped = sum(g.held_bytes - g.own_bytes for g in (*dense, *towers)) if settings.mmap else 0
        if self.in_slots:
            rows.append(self._slots(device.pool, device.name, "device"))
        else:
            staged = [t for g in towers for t in g.tensors if self._on_device(t)]
            if staged:
                held_towers = sum(self._piece(t) for t in staged)
                certain = min(held_towers, sum(bound_bytes(t, settings) for t in staged)) if checked else 0
                rows.append(
                    Allocation(pool=device.pool, purpose=Purpose.EXPERTS, name="expert towers", phase=Phase.FIRST_FORWARD, device=device.name,
                               certain_bytes=certain, likely_bytes=held_towers, at_most_bytes=held_towers, knob="experts.stream", **self._largest(staged))
                )  # fmt: skip
        if mapped:
            rows.append(Allocation.mapped(host, Purpose.WEIGHTS, "file mapping the weights are read from", mapped, knob="memory.load"))
        rows += self._host_copies(device, (*dense, *towers))
        return rows

    def _host_copies(self, device: Device, groups: tuple[Group, ...]) -> list[Allocation]:
        """Host copies of what the loader wrote out and the device then gets a copy of.

        With a pool of its own the host holds them from the load to the first forward. In one pool with the device they
        are freed piece by piece as they are uploaded, unless that is switched off or the back end never does; with the
        alias there is no second copy at all (https://github.com/mudler/vllm.cpp/issues/1299).
        """
        shared, own = self.machine.is_unified(device), sum(g.own_bytes for g in groups)
        written = [t for g in groups for t in g.tensors if expands(t, self.recurrent, self.settings)]
        aliased = self.streaming and self.settings.alias_host and shared
        if not own or aliased:
            return []
        frees = device.kind == "cuda" and self.settings.release_host
        likely = 0 if shared and frees else own
        return [
            Allocation(pool=self.machine.host_pool.name, purpose=Purpose.STAGING, name="host copies of uploaded weights", phase=Phase.LOAD,
                       certain_bytes=0, likely_bytes=likely, at_most_bytes=own, backing="anonymous", device=device.name,
                       knob="option:vt-release-host-weights" if device.kind == "cuda" else None, **self._largest(written))
        ]  # fmt: skip

    def _runtime(self, device: Device | None) -> list[Allocation]:
        if device is None or device.kind not in ("cuda", "rocm"):
            return []
        likely = device.context_bytes if device.context_bytes is not None else CONTEXT_BYTES
        return [
            Allocation(pool=device.pool, purpose=Purpose.RUNTIME, name="driver context", phase=Phase.BEFORE, certain_bytes=0,
                       likely_bytes=likely, at_most_bytes=likely, device=device.name)
        ]  # fmt: skip

    def _vision(self, device: Device | None) -> list[Allocation]:
        tower = self.models.mmproj
        if tower is None:
            return []
        pool, backing = (self.machine.host_pool.name, "anonymous") if device is None else (device.pool, "device")
        return [
            Allocation(pool=pool, purpose=Purpose.VISION, name="vision tower", phase=Phase.LOAD, certain_bytes=0, likely_bytes=tower.tensor_bytes,
                       at_most_bytes=tower.tensor_bytes, knob="model.mmproj", device=device.name if device else None,
                       backing="device" if backing == "device" else "anonymous")
        ]  # fmt: skip

    def _place(self, device: Device | None) -> tuple[str, dict[str, Any]]:
        if device is None:
            return self.machine.host_pool.name, {"backing": "anonymous"}
        return device.pool, {"device": device.name}

    def _cache(self, device: Device | None) -> list[Allocation]:
        pool, more = self._place(device if self.settings.kv_on_device else None)
        blocks = pool_blocks(self.model, self.settings)
        rows = []
        kv = blocks * kv_block_bytes(self.model, self.settings)
        if kv:
            tokens = blocks * self.settings.block_size
            knob = "kv.memory" if self.settings.kv_memory and not self.settings.blocks else "kv.blocks"
            rows.append(Allocation.exact(pool, Purpose.KV, f"KV pool of {tokens} tokens", Phase.CONTEXT, kv, knob=knob, **more))
        certain, likely, most = state_bytes(self.model, self.settings)
        if most:
            pool, more = self._place(device)
            rows.append(
                Allocation(pool=pool, purpose=Purpose.STATE, name=f"recurrent state of {self.settings.sequences} sequences", phase=Phase.CONTEXT,
                           certain_bytes=certain, likely_bytes=likely, at_most_bytes=most, knob="context.sequences", **more)
            )  # fmt: skip
        return rows

    def _scratch(self, device: Device | None) -> list[Allocation]:
        pool, more = self._place(device)
        likely = scratch_bytes(self.model, self.settings, self.tokens())
        return [
            Allocation(pool=pool, purpose=Purpose.COMPUTE, name="activations of one step", phase=Phase.FIRST_FORWARD, certain_bytes=0,
                       likely_bytes=likely, at_most_bytes=3 * likely, knob="context.batch", evidence="estimate; the engine plans none", **more)
        ]  # fmt: skip

    def tokens(self) -> int:
        """Tokens of the longest request."""
        held = pool_blocks(self.model, self.settings) * self.settings.block_size
        asked = self.settings.length or self.model.integer("context_length") or held
        return min(asked, held) or 1

    # -- the engine's own check, facts, ways ---------------------------------------------------------------------------

    def fit_check(self) -> tuple[str, int | None]:
        """Return what the engine's check at load does ("refuses", "passes", "off", "absent") and the budget it compares with."""
        device = self.settings.device
        if device is None or CAPABILITIES.find("load-time-fit-check", platform_of(device), self.version) is None:
            return "absent", None
        budget = self.settings.weight_budget
        if budget == 0 and version_in(self.version, FIT_CHECK, None):
            return "off", None
        if budget is None:
            budget = self.pool.total_bytes if self.pool is not None else None
        if budget is None:
            return "absent", None
        return ("refuses" if self._bound > budget else "passes"), budget

    def fit_remark(self, budget: Budget) -> tuple[Remark, ...]:
        """Return the engine's own refusal where the bytes alone would not explain it."""
        state, limit = self.fit_check()
        device = self.settings.device
        if state != "refuses" or device is None or limit is None:
            return ()
        own = self.settings.weight_budget is not None
        for found in budget.sums(self.machine):
            if found.pool.name == device.pool and not own and found.likely_bytes > (found.pool.total_bytes or 0):
                return ()  # the pool is over anyway, and that says more
        knob = "option:vt-device-weight-budget-bytes"
        what = "the budget set for them" if own else f"all {device.name} has"
        ways = (Way(knob=knob, value=None),) if own else ()
        return (
            Remark(
                kind="impossible", code="fit-check", knob=knob if own else "device.kind", pool=device.pool, device=device.name,
                need_bytes=self._bound, have_bytes=limit, ways=(*ways, Way(knob="device.kind", value="cpu", note="slower")),
                message=f"The engine's check at load counts {size(self._bound)} of weights against {what}, {size(limit)}, and refuses",
            ),
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """Return resolved values for display and for rules."""
        settings, device = self.settings, self.settings.device
        every = (self.weights.dense, self.weights.experts, self.weights.mtp_dense, self.weights.mtp_experts)
        borrowed = sum(g.file_bytes for g in every) if settings.mmap else 0
        state, limit = self.fit_check()
        found: dict[str, Any] = {
            "device": device.name if device is not None else "CPU",
            "context": self.tokens(),
            "kv_tokens": pool_blocks(self.model, settings) * settings.block_size,
            "sequences": settings.sequences,
            "batched_tokens": batched_tokens(self.model, settings, self.tokens()),
            "fit_check": state,
            "fit_bound_bytes": self._bound,
            "prefault": settings.prefault and settings.mmap,
            "prefault_bytes": borrowed if settings.prefault else 0,
            "expert_slots": settings.slots if self.in_slots else 0,
        }
        if limit is not None:
            found["fit_budget_bytes"] = limit
        if device is not None and settings.stream and self.model.integer("expert_count"):
            found["reads_host_memory"] = device.name
            found["lane"] = {c.name: c.holds for c in lane.conditions(self.model, settings, device)}
        return found

    def ways(self) -> tuple[Way, ...]:
        """Return what usually helps, most useful first; the core tries each before it is offered."""
        settings, device = self.settings, self.settings.device
        found: list[Way] = []
        if self.streaming and not self.in_slots:
            found.append(Way(knob="option:vt-qwen35-alias-host-weights", value=None, note="its answers are unverified"))
        if not settings.keep_quant:
            knob = "option:vt-cpu-ref" if settings.cpu_ref else "option:vt-gguf-keep-quant"
            found.append(Way(knob=knob, value=None, note="weights keep the encoding of the file"))
        if device is not None:
            found.append(Way(knob="device.kind", value="cpu", note="slower: experts are read from the file as tokens need them"))
            if not settings.stream and self.model.integer("expert_count") and lane.granted(self.model, replace(settings, stream=True), device, self.version):
                row = CAPABILITIES.find("host-expert-slots", platform_of(device), self.version)
                note = "its answers are unverified" if row is not None and row.unverified else ""
                found.append(Way(knob="experts.stream", value=True, note=note))
            if self.model.integer("expert_count") and not self.placed and not self.machine.is_unified(device):
                found.append(Way(knob="experts.on_host", value="all", note="slower"))
        elif settings.stream:
            found.append(Way(knob="experts.slots", value=settings.slots, low=1))
        blocks = pool_blocks(self.model, settings)
        need = -(-(settings.length or settings.block_size) // settings.block_size)
        if blocks > need:
            found.append(Way(knob="kv.blocks", value=blocks - 1, low=need, note="a smaller KV pool"))
        if settings.sequences > 1:
            found.append(Way(knob="context.sequences", value=settings.sequences - 1, low=1))
        tokens = batched_tokens(self.model, settings, self.tokens())
        if tokens > 256:
            found.append(Way(knob="context.batch", value=tokens // 2, low=256, step=256, note="slower prompts"))
        return tuple(found)

