"""From a layout to the Budget: which allocation, in which pool, in which phase."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from residency.budget import Allocation, Budget, Phase, Purpose, Remark, Unknown
from residency.checkpoint.model import Role
from residency.engines import soundness as shared
from residency.machine.model import usable_bytes
from residency.text import clean, shorten
from residency.units import size
from residency.ways import Way

from . import history, soundness
from .companions import companions, counted_by_fit
from .context import pad
from .fit import adjust, enabled, margins
from .hparams import ENGINE_ARCHITECTURES, derived
from .layout import granted, lay_out
from .remarks import could_flash, impossible
from .remarks import remarks as further
from .resolve import program_of, resolve
from .runtime import driver_context, runtime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.checkpoint.model import Checkpoint, Tensor
    from residency.engines.base import Models
    from residency.launch.model import Launch
    from residency.machine.model import Device, Machine, Pool

    from .layout import DeviceBytes, Layout
    from .settings import Settings


def plan(launch: Launch, models: Models, machine: Machine, *, version: str, engine: str = history.UPSTREAM) -> Budget:
    """Return the budget of one launch. Pure."""
    model = models.main
    assert model is not None
    refused = (*soundness.refusals(model, version, engine), *impossible(launch, model, engine, version))
    if models.draft is not None:
        refused += tuple(replace(remark, knob="model.draft") for remark in shared.refusals(models.draft))
    if refused:
        return Budget(allocations=(), remarks=refused)
    settings, devices = resolve(launch, machine, version, engine)
    host = machine.host_pool
    remarks: list[Remark] = []
    if model.architecture not in ENGINE_ARCHITECTURES:
        text = f"the architecture {model.architecture!r} is not one {engine} {version} lists; it is laid out by what its metadata and tensors say"
        remarks.append(Remark(kind="risk", code="unlisted-architecture", knob="model.path", message=text))
    fits = enabled(launch, program_of(launch), version)
    counted = history.follows("fit-counts-encoders", engine, version)
    free = _free(launch, settings, counted_by_fit(launch, models, machine, settings, devices) if counted else {}) if fits else None
    layout = lay_out(model, settings, host_free=host.free_bytes, ceilings=free)
    if fits and _room(layout, free, host) < 0:
        settings, adjusted = _fitted(launch, model, settings, host, free)
        remarks += adjusted
        layout = lay_out(model, settings, host_free=host.free_bytes)
    copies: dict[str, int] = {}
    if layout.facts.get("pipeline_copies") != 1 and not _holds(layout, machine, settings, devices):
        fallback = history.follows("copies-fall-back", engine, version)
        without = replace(settings, pipeline=False)
        other = lay_out(model, without, host_free=host.free_bytes)
        pools = {d.name: d.pool for d in devices}
        copies = {pools[a.device]: a.compute_likely - b.compute_likely for a, b in zip(layout.devices, other.devices, strict=True)}
        if fallback and _holds(other, machine, without, devices):  # else the copies are not what it fails for
            remarks.append(_falls_back(layout, settings))
            settings, layout, copies = without, other, {}
    layout = replace(layout, host_weights=granted(layout.host_weights, machine.host.memlock_bytes))
    rows: list[Allocation] = []
    by_name = {d.name: d for d in devices}  # a launch that is not split uses fewer than it names
    for found in layout.devices:
        rows += _device_rows(by_name[found.device], found, layout, model, chunks=history.follows("compute-in-chunks", engine, version))
    rows += _runtime_rows(model, settings, layout, by_name)
    rows += _host_rows(layout, host.name)
    more, said, untold = companions(launch, models, machine, settings, devices, layout)
    rows += more
    remarks += said
    far, not_told = _remote(launch, machine, rows)
    remarks += far
    most = launch.get("vision.max_tokens")
    if most is not None and models.mmproj is None:
        text = f"images of at most {most} tokens are asked for, and no projector is loaded that could take one"
        remarks.append(Remark(kind="inert", code="no-projector", knob="vision.max_tokens", value=most, message=text))
    remarks += further(launch, model, machine, settings, devices, layout, rows)
    return Budget(
        allocations=tuple(rows),
        remarks=(*remarks, *layout.remarks),
        unknowns=(*layout.unknowns, *untold, *not_told),
        ways=ways(model, settings, layout, devices, rows, machine),
        narrowing=_narrowing(rows),
        facts={"context": layout.resolved.n_ctx, "pipeline_copies_bytes": copies, **{k: v for k, v in layout.facts.items() if isinstance(v, (int, str, bool))}},
    )


def _fitted(launch: Launch, model: Checkpoint, settings: Settings, host: Pool, free: Mapping[str, int] | None) -> tuple[Settings, tuple[Remark, ...]]:
    """Return the settings after the engine's own --fit; nothing that it changes moves what is free."""

    def room(candidate: Settings) -> float:
        return _room(lay_out(model, candidate, host_free=host.free_bytes, ceilings=free), free, host)

    return adjust(
        launch, settings, trained_context=model.integer("context_length"), layers=model.integer("block_count") + 1,
        experts=model.integer("expert_count") > 0, room=room,
    )  # fmt: skip


def _holds(layout: Layout, machine: Machine, settings: Settings, devices: tuple[Device, ...]) -> bool:
    """Whether every device holds the engine's buffers beside the driver context; unknown counts as yes."""
    pools = {d.name: machine.pool(d.pool) for d in devices}
    context = {d.name: driver_context(d)[0][1] for d in settings.devices}
    for found in layout.devices:
        pool = pools.get(found.device)
        free = usable_bytes(pool) if pool is not None else None
        if free is not None and found.weights + found.experts + found.kv + found.state + found.compute_likely + context[found.device] > free:
            return False
    return True


def _falls_back(layout: Layout, settings: Settings) -> Remark:
    most = max(layout.devices, key=lambda d: d.compute_likely)
    text = (
        f"the compute buffers with {settings.copies} pipeline copies do not fit ({size(most.compute_likely)} on {most.device}), so the engine tries again "
        f"without pipelining; prompts are slower then"
    )
    return Remark(kind="risk", code="pipeline-fallback", knob="layers.split", message=text, device=most.device, need_bytes=most.compute_likely,
                  ways=(Way(knob="layers.split", value="none"),))  # fmt: skip


def _free(launch: Launch, settings: Settings, beside: Mapping[str, int]) -> dict[str, int] | None:
    """Return what --fit may fill on every device beside the encoders there; None where a device's free memory is not known."""
    if any(d.free_bytes is None for d in settings.devices):
        return None
    keep = margins(launch, len(settings.devices))
    # The engine reads what is free after the back end has started, so the driver context is gone from it.
    return {d.name: (d.free_bytes or 0) - driver_context(d)[0][1] - kept - beside.get(d.name, 0) for d, kept in zip(settings.devices, keep, strict=False)}


def _room(layout: Layout, free: Mapping[str, int] | None, host: Pool) -> float:
    """Return the bytes left beyond the margin of --fit on the fullest device, negative when they are missing; infinite: not known."""
    if layout.unknowns or free is None:
        return inf  # the engine will see for itself; here there is nothing to compare with
    if not layout.devices:  # the host must hold it all
        total = layout.host.weights + layout.host.experts + layout.host.kv + layout.host.state + layout.host.compute_likely
        return inf if host.free_bytes is None else host.free_bytes - total
    return min(free[d.device] - d.weights - d.experts - d.kv - d.state - d.compute_likely for d in layout.devices)


def _device_rows(device: Device, found: DeviceBytes, layout: Layout, model: Checkpoint, *, chunks: bool) -> list[Allocation]:
    pool = device.pool
    more: dict[str, Any] = {"device": device.name}
    rows = []
    if found.weights:
        rows.append(
            Allocation.exact(pool, Purpose.WEIGHTS, f"weights of {found.layers} layers", Phase.LOAD, found.weights,
                             knob="layers.on_device", largest_name=found.largest_name, largest_bytes=found.largest_bytes, **more)
        )  # fmt: skip
    if found.experts:
        index = next(i for i, d in enumerate(layout.devices) if d is found)
        towers = [t for t in _towers(model) if layout.layer_device[t.layer or 0] == index]
        largest = max(towers, key=lambda t: t.nbytes, default=None)
        rows.append(
            Allocation.exact(pool, Purpose.EXPERTS, "expert weights", Phase.LOAD, found.experts, knob="experts.on_host",
                             largest_name=largest.name if largest else None, largest_bytes=largest.nbytes if largest else None, **more)
        )  # fmt: skip
    if found.kv:
        rows.append(Allocation.exact(pool, Purpose.KV, f"KV cache of {layout.resolved.n_ctx} tokens", Phase.CONTEXT, found.kv, knob="context.length", **more))
    if found.state:
        rows.append(Allocation.exact(pool, Purpose.STATE, "recurrent state", Phase.CONTEXT, found.state, knob="context.sequences", **more))
    if found.compute_at_most:
        one: dict[str, Any] = {} if chunks else {"largest_name": "compute buffer", "largest_bytes": found.compute_likely}
        rows.append(
            Allocation(pool=pool, purpose=Purpose.COMPUTE, name=found.compute_what or "compute buffer", phase=Phase.CONTEXT,
                       certain_bytes=found.compute_certain, likely_bytes=found.compute_likely, at_most_bytes=found.compute_at_most,
                       knob="context.micro_batch", **one, **more)
        )  # fmt: skip
    return rows


def _runtime_rows(model: Checkpoint, settings: Settings, layout: Layout, devices: Mapping[str, Device]) -> list[Allocation]:
    """Return what the process takes beside the engine's buffers; the engine itself budgets none of it."""
    specs = {s.name: s for s in settings.devices}
    rows = []
    for found in runtime(model, settings, layout, tuple(specs[d.device] for d in layout.devices)):
        device = devices[found.device]
        at_context, at_prompt = found.sums
        parts = (
            ("driver context", Phase.BEFORE, found.context),
            ("communicators of the cards", Phase.CONTEXT, at_context),
            ("kernels, workspaces and pools of the first prompt", Phase.FIRST_FORWARD, found.first_prompt),
            ("channels between the cards", Phase.FIRST_FORWARD, at_prompt),
            ("copies of the attention scores of a full context", Phase.RUN_TIME, (0, 0, found.full_context)),
        )
        for name, phase, (certain, likely, most) in parts:
            if most:
                rows.append(
                    Allocation(pool=device.pool, purpose=Purpose.RUNTIME, name=name, phase=phase, certain_bytes=certain, likely_bytes=likely,
                               at_most_bytes=most, device=device.name, accounted=False, evidence=found.evidence)
                )  # fmt: skip
    return rows


def _towers(model: Checkpoint) -> tuple[Tensor, ...]:
    """Return the expert tensors of the blocks."""
    store = derived(model)
    if "towers" not in store:
        store["towers"] = tuple(t for t in model.tensors if t.role is Role.EXPERT and t.layer is not None and t.layer <= model.integer("block_count"))
    found: tuple[Tensor, ...] = store["towers"]
    return found


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


#: Tokens below which a shorter context is no way out: a launch with less is seldom what was meant.
SHORTEST = 4096
#: Tokens of the smallest micro-batch that is a way out, and the step to it.
SMALLEST_MICRO = 128


def ways(model: Checkpoint, settings: Settings, layout: Layout, devices: tuple[Device, ...], rows: Sequence[Allocation], machine: Machine) -> tuple[Way, ...]:
    """Return what can help in this engine, most useful first; the core tries each before it is offered.

    A knob is left out when all it moves is less than what is missing.
    """
    missing, moved = _shortage(rows, machine)

    def enough(*purposes: Purpose) -> bool:
        return not missing or all(sum(moved[pool].get(p, 0) for p in purposes) >= size for pool, size in missing.items())

    context = layout.resolved.n_ctx
    layers = model.integer("block_count") + 1
    found = _spreading(settings)
    if not layout.resolved.flash and enough(Purpose.COMPUTE, Purpose.RUNTIME) and could_flash(model, layout.resolved):
        found.append(Way(knob="context.flash_attention", value="on"))
    if enough(Purpose.KV, Purpose.COMPUTE, Purpose.DRAFT):
        shortest = pad(min(SHORTEST, model.integer("context_length") or SHORTEST), 256)
        found.append(Way(knob="context.length", value=context - 256, low=shortest if context > shortest else 256, step=256))
    if devices:
        if model.integer("expert_count") and enough(Purpose.EXPERTS):  # the attention stays on the device: faster than whole layers less
            found.append(Way(knob="experts.on_host", value=layers - 1, low=1, prefer="smallest", note="slower"))
        else:
            found.append(Way(knob="layers.on_device", value=layers - 1, low=0, note="slower: the other layers run on the CPU"))
    if enough(Purpose.COMPUTE):
        micro = layout.resolved.n_ubatch
        if micro > SMALLEST_MICRO:
            found.append(Way(knob="context.micro_batch", value=(micro - 1) // SMALLEST_MICRO * SMALLEST_MICRO, low=SMALLEST_MICRO, step=SMALLEST_MICRO, note="slower prompts"))
    if layout.resolved.sequences > 1 and enough(Purpose.KV, Purpose.STATE):
        found.append(Way(knob="context.sequences", value=1))
    if layout.host_weights.backing != "mapped" and layout.host_weights.bytes:
        found.append(Way(knob="memory.load", value="mmap", note="weights stay in the file and are read as they are needed"))
    return tuple(found)


#: MiB between the sizes of the prompt cache that are tried.
CACHE_STEP = 64


def _narrowing(rows: Sequence[Allocation]) -> tuple[Way, ...]:
    """Return smaller limits of the server's prompt cache (``--cache-ram``, MiB)."""
    return tuple(
        Way(knob=row.knob, value=row.at_most_bytes // 2**20, low=0, step=CACHE_STEP, note="older conversations are computed again")
        for row in rows
        if row.knob == "option:cache-ram"
    )


def _remote(launch: Launch, machine: Machine, rows: Sequence[Allocation]) -> tuple[list[Remark], tuple[Unknown, ...]]:
    """Say what --rpc servers mean that the machine profile has no device for: a warning, or no verdict where they could make room."""
    asked = launch.options.get("rpc")
    if not asked or launch.get("device.kind") == "cpu" or any(d.kind == "rpc" for d in machine.devices):
        return [], ()
    ids = launch.get("device.ids")
    if ids is not None and not any(name.casefold().startswith("rpc") for name in ids):
        return [], ()  # the servers are connected to and nothing is put there
    servers = clean(shorten(", ".join(asked) if isinstance(asked, list) else str(asked), 80))
    cards = {d.pool for d in machine.accelerators} or {machine.host_pool.name}  # where it takes layers from
    short = {pool: over for pool, over in _shortage(rows, machine)[0].items() if pool in cards}
    told = "machine profile has no device of kind rpc; docs/machines.md shows how to declare one"
    if not short:
        text = f"a part of the model goes to {servers}, and that device is not judged: the {told}"
        return [Remark(kind="risk", code="rpc-not-in-machine", knob="option:rpc", value=servers, message=text)], ()
    pool, over = max(short.items(), key=lambda item: item[1])
    why = f"the {told}, and without its memory {pool} lacks {size(over)}"
    return [], (Unknown(what=f"the memory behind --rpc {servers}", why=why),)


def _spreading(settings: Settings) -> list[Way]:
    """Return the ways to use cards the launch leaves out."""
    count = len(settings.devices)
    if count < 2:
        return []
    if settings.split_mode == "none":
        return [Way(knob="layers.split", value="layer")]
    shares = [*settings.tensor_split[:count], *[0.0] * (count - len(settings.tensor_split))]
    if not any(shares) or all(shares):  # none given: by what is free
        return []
    even = Way(knob="layers.ratio", value=[1] * count)
    alike = len({d.free_bytes for d in settings.devices}) == 1
    return [even] if alike else [even, Way(knob="layers.ratio", value=None, note="by what is free on each card")]


def _shortage(rows: Sequence[Allocation], machine: Machine) -> tuple[dict[str, int], dict[str, dict[Purpose, int]]]:
    """Return the bytes missing per pool, and per pool the likely bytes of every purpose."""
    moved: dict[str, dict[Purpose, int]] = {}
    for row in rows:
        sums = moved.setdefault(row.pool, {})
        sums[row.purpose] = sums.get(row.purpose, 0) + row.likely_bytes
    missing = {}
    for pool in machine.pools:
        usable = pool.free_bytes if pool.free_bytes is not None else pool.total_bytes
        over = sum(moved.get(pool.name, {}).values()) - (usable if usable is not None else 0)
        if usable is not None and over > 0:
            missing[pool.name] = over
    return missing, moved
