"""From a layout to the Budget: which allocation, in which pool, in which phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.budget import Allocation, Budget, Phase, Purpose
from residency.ways import Way

from .layout import lay_out
from .resolve import resolve

if TYPE_CHECKING:
    from residency.engines.base import Models
    from residency.launch.model import Launch
    from residency.machine.model import Device, Machine

    from .layout import DeviceBytes, Layout


def plan(launch: Launch, models: Models, machine: Machine, *, version: str) -> Budget:
    """Return the budget of one launch. Pure."""
    assert models.main is not None
    settings, devices = resolve(launch, machine, version)
    host = machine.host_pool
    layout = lay_out(models.main, settings, host_free=host.free_bytes)
    rows: list[Allocation] = []
    by_name = {d.name: d for d in devices}  # a launch that is not split uses fewer than it names
    for found in layout.devices:
        rows += _device_rows(by_name[found.device], found, layout)
    rows += _host_rows(layout, host.name)
    return Budget(
        allocations=tuple(rows),
        remarks=layout.remarks,
        unknowns=layout.unknowns,
        ways=ways(models, layout, devices),
        facts={"context": layout.resolved.n_ctx, **{k: v for k, v in layout.facts.items() if isinstance(v, (int, str, bool))}},
    )


def _device_rows(device: Device, found: DeviceBytes, layout: Layout) -> list[Allocation]:
    pool = device.pool
    more: dict[str, Any] = {"device": device.name}
    rows = []
    if found.weights:
        rows.append(
            Allocation.exact(pool, Purpose.WEIGHTS, f"weights of {found.layers} layers", Phase.LOAD, found.weights,
                             knob="layers.on_device", largest_name=found.largest_name, largest_bytes=found.largest_bytes, **more)
        )  # fmt: skip
    if found.experts:
        rows.append(Allocation.exact(pool, Purpose.EXPERTS, "expert weights", Phase.LOAD, found.experts, knob="experts.on_host", **more))
    if found.kv:
        rows.append(Allocation.exact(pool, Purpose.KV, f"KV cache of {layout.resolved.n_ctx} tokens", Phase.CONTEXT, found.kv, knob="context.length", **more))
    if found.state:
        rows.append(Allocation.exact(pool, Purpose.STATE, "recurrent state", Phase.CONTEXT, found.state, knob="context.sequences", **more))
    if found.compute_at_most:
        rows.append(
            Allocation(pool=pool, purpose=Purpose.COMPUTE, name=found.compute_what or "compute buffer", phase=Phase.CONTEXT,
                       certain_bytes=found.compute_certain, likely_bytes=found.compute_likely, at_most_bytes=found.compute_at_most,
                       knob="context.micro_batch", **more)
        )  # fmt: skip
    return rows


def _host_rows(layout: Layout, pool: str) -> list[Allocation]:
    rows = []
    weights = layout.host_weights
    if weights.backing == "mapped":
        if weights.mapped_bytes:
            rows.append(Allocation.mapped(pool, Purpose.WEIGHTS, "weights mapped from the file", weights.mapped_bytes, knob="memory.load"))
    elif weights.bytes:
        rows.append(
            Allocation.exact(pool, Purpose.WEIGHTS, f"weights in {weights.backing} host memory", Phase.LOAD, weights.bytes,
                             backing=weights.backing, knob="memory.load", largest_name=layout.host.largest_name, largest_bytes=layout.host.largest_bytes)
        )  # fmt: skip
    host = layout.host
    if host.kv:
        rows.append(Allocation.exact(pool, Purpose.KV, f"KV cache of {layout.resolved.n_ctx} tokens", Phase.CONTEXT, host.kv, backing="anonymous", knob="context.length"))
    if host.state:
        rows.append(Allocation.exact(pool, Purpose.STATE, "recurrent state", Phase.CONTEXT, host.state, backing="anonymous", knob="context.sequences"))
    if host.compute_at_most:
        rows.append(
            Allocation(pool=pool, purpose=Purpose.COMPUTE, name="compute buffer on the host", phase=Phase.CONTEXT, backing="anonymous",
                       certain_bytes=host.compute_certain, likely_bytes=host.compute_likely, at_most_bytes=host.compute_at_most,
                       knob="context.micro_batch")
        )  # fmt: skip
    return rows


def ways(models: Models, layout: Layout, devices: tuple[Device, ...]) -> tuple[Way, ...]:
    """Return what usually helps in this engine, most useful first; the core tries each before it is offered."""
    assert models.main is not None
    context = layout.resolved.n_ctx
    layers = models.main.integer("block_count") + 1
    found = [Way(knob="context.length", value=context - 256, low=256, step=256)]
    if devices:
        if models.main.integer("expert_count"):
            found.append(Way(knob="experts.on_host", value=layers - 1, low=1, prefer="smallest", note="slower"))
        found.append(Way(knob="layers.on_device", value=layers - 1, low=0, note="slower: the other layers run on the CPU"))
    micro = layout.resolved.n_ubatch
    found += [Way(knob="context.micro_batch", value=m, note="slower prompts") for m in (256, 128) if m < micro]
    if layout.resolved.sequences > 1:
        found.append(Way(knob="context.sequences", value=1))
    return tuple(found)

