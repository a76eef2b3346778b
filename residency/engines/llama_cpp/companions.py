"""What stands beside the model: projector, draft model, next-token context, adapters, host caches.

Laws restated from llama.cpp 0.5.0 (0c1e570): ``common/speculative.cpp`` (draft and next-token contexts),
``tools/server/server-context.cpp`` (prompt cache, checkpoints), ``src/llama-adapter.cpp``, ``tools/mtmd/clip.cpp``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from residency.budget import Allocation, Phase, Purpose, Remark, Unknown
from residency.checkpoint.model import Role
from residency.ways import Way

from .context import row_bytes
from .hparams import hyper_parameters
from .layout import granted, lay_out
from .resolve import cache_type, program_of, speculation
from .runtime import beside_encoder, runtime
from .settings import CUDA_KINDS, DeviceSpec, Override, Settings, expert_overrides
from .vision import BATCH_TOKENS, beyond_range, lacking, limits_asked, measure

if TYPE_CHECKING:
    from residency.budget import Backing
    from residency.checkpoint.model import Checkpoint
    from residency.engines.base import Models
    from residency.launch.model import Launch
    from residency.machine.model import Device, Machine

    from .layout import Layout
    from .vision import Tower, Where

MIB = 2**20
#: Defaults of the server: prompt cache in MiB, context checkpoints per slot.
CACHE_RAM_MIB, CHECKPOINTS = 8192, 32

Rows = tuple[list[Allocation], list[Remark]]


def companions(
    launch: Launch, models: Models, machine: Machine, settings: Settings, devices: tuple[Device, ...], layout: Layout
) -> tuple[list[Allocation], list[Remark], tuple[Unknown, ...]]:
    """Return the allocations of everything beside the model, what is to be said about it, and what cannot be told."""
    rows: list[Allocation] = []
    remarks: list[Remark] = []
    unknowns: tuple[Unknown, ...] = ()
    if models.draft is not None:
        more, unknowns = _draft(launch, models.draft, machine, settings, layout)
        rows += more
    elif "draft-mtp" in speculation(launch):
        more, said = _next_token(launch, models, machine, settings, devices, layout)
        rows += more
        remarks += said
    if models.adapters:
        rows += _adapters(models, machine, devices, layout)
    if models.mmproj is not None:
        more, said, untold = vision(launch, models, machine, settings, devices)
        rows += more
        remarks += said
        unknowns += untold
    elif launch.options.get("mmproj-url") and launch.options.get("mmproj-auto") is not False:
        unknowns += (Unknown(what="the projector", why="the launch fetches it when it starts; name the file with --mmproj"),)
    if program_of(launch) in ("llama-server", "llama-cli"):
        more, said = _host_caches(launch, models, machine, settings, layout)
        rows += more
        remarks += said
    return rows, remarks, unknowns


def _draft(
    launch: Launch, draft: Checkpoint, machine: Machine, settings: Settings, layout: Layout
) -> tuple[list[Allocation], tuple[Unknown, ...]]:
    """A draft model: own weights and context of the target's length; split and batch are the target's."""
    option = launch.options.get
    named = option("spec-draft-device")
    specs = settings.devices
    if named is not None:
        known = {s.name.casefold(): s for s in settings.devices}
        specs = tuple(
            known.get(n.casefold()) or DeviceSpec(name=d.name, kind=d.kind, compute_capability=d.compute_capability)
            for n in named
            if (d := machine.device(n)) is not None
        )
    layers = option("spec-draft-ngl")
    on_host = option("spec-draft-n-cpu-moe")
    listed = option("spec-draft-override-tensor") or []
    own = replace(
        settings,
        devices=specs,
        n_ctx=layout.resolved.n_ctx,
        n_gpu_layers=layers if isinstance(layers, int) and layers >= 0 else -1,
        split_mode="layer" if len(specs) == 1 else settings.split_mode,
        type_k=cache_type(option("spec-draft-type-k")),
        type_v=cache_type(option("spec-draft-type-v")),
        overrides=(
            *(Override(pattern=o["pattern"], target=o["device"]) for o in listed),
            *expert_overrides(cpu_moe=bool(option("spec-draft-cpu-moe")), n_cpu_moe=on_host if isinstance(on_host, int) else 0),
        ),
        n_rs_seq=0,
        load_mtp=False,
        outputs="slots",
        n_outputs_per_seq=1,
    )
    found = lay_out(draft, own, host_free=machine.host_pool.free_bytes)
    by_name = {d.name: d for d in machine.devices}
    rows = []
    for part in (*found.devices, found.host):
        device = by_name.get(part.device)
        pool = device.pool if device is not None else machine.host_pool.name
        mapped = device is None and granted(found.host_weights, machine.host.memlock_bytes).backing == "mapped"
        more: dict[str, Any] = {"knob": "model.draft", "device": device.name if device else None, "backing": "device" if device else "anonymous"}
        weights, cache = part.weights + part.experts, part.kv + part.state
        if weights and mapped:
            rows.append(Allocation.mapped(pool, Purpose.DRAFT, "draft weights mapped from the file", found.host_weights.mapped_bytes, knob="model.draft"))
        elif weights:
            rows.append(Allocation.exact(pool, Purpose.DRAFT, "draft weights", Phase.LOAD, weights, **more))
        if cache:
            rows.append(Allocation.exact(pool, Purpose.DRAFT, f"draft cache of {found.resolved.n_ctx} tokens", Phase.CONTEXT, cache, **more))
        if part.compute_likely:
            rows.append(
                Allocation(pool=pool, purpose=Purpose.DRAFT, name="draft compute buffer", phase=Phase.CONTEXT, certain_bytes=part.compute_certain,
                           likely_bytes=part.compute_likely, at_most_bytes=part.compute_at_most, **more)
            )  # fmt: skip
    known = {s.name: s for s in specs}
    for beside in runtime(draft, own, found, tuple(known[d.device] for d in found.devices), second=True):
        certain, likely, most = beside.first_prompt
        if most:
            rows.append(
                Allocation(pool=by_name[beside.device].pool, purpose=Purpose.RUNTIME, name="workspaces and pools of the draft model", phase=Phase.FIRST_FORWARD,
                           certain_bytes=certain, likely_bytes=likely, at_most_bytes=most + beside.full_context, device=beside.device, accounted=False)
            )  # fmt: skip
    return rows, tuple(replace(u, what=f"{u.what} of the draft model") for u in found.unknowns)


def _next_token(
    launch: Launch, models: Models, machine: Machine, settings: Settings, devices: tuple[Device, ...], layout: Layout
) -> Rows:
    """A second context on the same weights that attends with the next-token blocks only."""
    model = models.main
    assert model is not None
    hyper = hyper_parameters(model)
    blocks = range(hyper.layers, hyper.layers_all)
    if not blocks:
        text = "speculation by next-token prediction is asked for, and the model file has no next-token block"
        return [], [Remark(kind="impossible", code="mtp-absent", knob="speculation.kind", message=text)]
    resolved = layout.resolved
    key, value = cache_type(launch.options.get("spec-draft-type-k")), cache_type(launch.options.get("spec-draft-type-v"))
    rows = []
    for block in blocks:
        index = layout.layer_device[block] if settings.kv_offload else -1
        device = _device(layout.devices[index].device, devices) if index >= 0 else None
        pool = device.pool if device is not None else machine.host_pool.name
        more: dict[str, Any] = {"knob": "speculation.kind", "device": device.name if device else None, "backing": "device" if device else "anonymous"}
        cells = resolved.n_ctx_seq * resolved.streams
        size = cells * (row_bytes(key, hyper.key_row(block)) + (0 if hyper.mla else row_bytes(value, hyper.value_row(block))))
        rows.append(Allocation.exact(pool, Purpose.DRAFT, f"next-token cache of {resolved.n_ctx} tokens", Phase.CONTEXT, size, **more))
        # One block that picks only the slots' rows: bound by its attention, five rows of the embedding and the mask.
        # Measured for a 27B model, 4096 tokens per micro-batch: 4500.13 MiB against 4496 here.
        peak = 5 * hyper.embedding * resolved.n_ubatch * 4 + resolved.n_ctx_seq * resolved.n_ubatch * (2 if resolved.flash else 4)
        rows.append(
            Allocation(pool=pool, purpose=Purpose.DRAFT, name="next-token compute buffer", phase=Phase.CONTEXT, certain_bytes=peak * 3 // 4,
                       likely_bytes=peak, at_most_bytes=peak * 5 // 4 + 16 * MIB, **more)
        )  # fmt: skip
    return rows, []


def _device(name: str, devices: tuple[Device, ...]) -> Device | None:
    return next((d for d in devices if d.name == name), None)


def _adapters(models: Models, machine: Machine, devices: tuple[Device, ...], layout: Layout) -> list[Allocation]:
    """Adapter tensors lie where the weight they change lies; they are loaded after ``--fit`` and not counted by it."""
    sums: dict[str | None, int] = {}
    for adapter in models.adapters:
        for tensor in adapter.tensors:
            layer = tensor.layer if tensor.layer is not None else len(layout.layer_device) - 1
            index = layout.layer_device[min(layer, len(layout.layer_device) - 1)]
            name = layout.devices[index].device if index >= 0 else None
            sums[name] = sums.get(name, 0) + tensor.nbytes
    rows = []
    for name, size in sums.items():
        device = _device(name, devices) if name is not None else None
        pool = device.pool if device is not None else machine.host_pool.name
        backing: Backing = "device" if device is not None else "anonymous"
        rows.append(
            Allocation.exact(pool, Purpose.WEIGHTS, "adapter weights", Phase.CONTEXT, size, knob="model.adapters", device=name, backing=backing, accounted=False)
        )
    return rows


def _encoders(launch: Launch, tower: Checkpoint, machine: Machine, settings: Settings, devices: tuple[Device, ...]) -> tuple[Device | None, Tower | None]:
    """Return the device that carries the encoders (None: the processor) and their bytes."""
    wanted = launch.get("vision.device")
    device = None
    if wanted not in ("cpu", "none"):
        device = machine.device(wanted) if wanted else (devices[0] if devices else None)
    where: Where = "host" if device is None else "card" if device.kind in CUDA_KINDS else "device"
    batch = launch.options.get("mtmd-batch-max-tokens")
    found = measure(tower, flash=settings.flash_attn, where=where, most_tokens=launch.get("vision.max_tokens"),
                    batch_tokens=batch if isinstance(batch, int) and batch > 0 else BATCH_TOKENS)  # fmt: skip
    return device, found


def counted_by_fit(launch: Launch, models: Models, machine: Machine, settings: Settings, devices: tuple[Device, ...]) -> dict[str, int]:
    """Return the bytes that ``--fit`` leaves free on a device for the encoders; the server alone does."""
    if models.mmproj is None or program_of(launch) != "llama-server":
        return {}
    device, found = _encoders(launch, models.mmproj, machine, settings, devices)
    if device is None or found is None:
        return {}
    return {device.name: found.weights_bytes + (0 if launch.options.get("warmup") is False else found.warm_up_bytes)}


def _damaged(tower: Checkpoint) -> list[Remark]:
    if tower.architecture != "clip":
        return []
    ways = (Way(knob="model.mmproj", value=None, note="text only"),)
    if reason := beyond_range(tower):
        return [Remark(kind="impossible", code="projector-damaged", knob="model.mmproj", message=f"the engine refuses the projector file: {reason}", ways=ways)]
    # What is missing may be missing in a header that was made up to try something.
    reason = lacking(tower)
    return [Remark(kind="risk", code="projector-damaged", knob="model.mmproj", message=f"the engine would refuse the projector file: {reason}", ways=ways)] if reason else []


def _misfits(model: Checkpoint, found: Tower) -> list[Remark]:
    """Return the encoders whose embeddings the model does not take (``tools/mtmd/mtmd.cpp``, 0.5.0: the launch throws)."""
    width, deep = model.integer("embedding_length"), model.integer("n_deepstack_layers")
    remarks = []
    for side, out in found.widths:  # a model that takes features of several levels says so
        if width and out != width * (1 + deep):
            text = f"the {'sound' if side == 'audio' else 'image'} encoder puts out embeddings of {out}, and the model takes {width}: they were not made for each other"
            remarks.append(Remark(kind="impossible", code="projector-width", knob="model.mmproj", message=text, ways=(Way(knob="model.mmproj", value=None, note="text only"),)))
    return remarks


def vision(
    launch: Launch, models: Models, machine: Machine, settings: Settings, devices: tuple[Device, ...]
) -> tuple[list[Allocation], list[Remark], tuple[Unknown, ...]]:
    """Return the projector's allocations: all on one device, outside any layer split; what is to be said, and what cannot be told."""
    tower = models.mmproj
    assert tower is not None
    device, found = _encoders(launch, tower, machine, settings, devices)
    pool = device.pool if device is not None else machine.host_pool.name
    backing: Backing = "device" if device is not None else "anonymous"
    more: dict[str, Any] = {"device": device.name if device is not None else None, "backing": backing}
    if found is None:
        if not any(t.role in (Role.VISION, Role.AUDIO) for t in tower.tensors):
            return [], [], ()
        return [Allocation.exact(pool, Purpose.VISION, "projector weights", Phase.CONTEXT, tower.tensor_bytes, knob="model.mmproj", **more)], _damaged(tower), ()
    misfits = [*_damaged(tower), *(_misfits(models.main, found) if models.main is not None else ())]
    least = launch.options.get("image-min-tokens")
    most = launch.get("vision.max_tokens") or found.most_tokens
    if isinstance(least, int) and most and least > most and limits_asked(tower):
        text = f"an image is to have at least {least} tokens and can have {most} at most: the engine refuses the projector"
        misfits.append(Remark(kind="impossible", code="image-tokens", knob="option:image-min-tokens", value=least, message=text,
                              ways=(Way(knob="option:image-min-tokens", value=most),)))  # fmt: skip
    rows = [
        Allocation.exact(pool, Purpose.VISION, f"{found.projector} tower weights", Phase.CONTEXT, found.weights_bytes, knob="vision.device",
                         largest_name=found.largest_name, largest_bytes=found.largest_weight_bytes, **more),
    ]  # fmt: skip
    unknowns = tuple(
        Unknown(what=f"buffers of the {name} encoder", why="its graph is none this version knows, or the file's shapes do not fit it", pool=pool)
        for name in found.unknown
    )
    if not found.warm_up_bytes:
        return rows, misfits, unknowns
    warm_up = 0 if launch.options.get("warmup") is False else found.warm_up_bytes  # without warm-up the first image allocates it
    what = f"image buffer ({found.warm_up_tokens} tokens, up to {found.most_tokens})" if found.most_tokens else "sound buffer"
    rows.append(
        Allocation(pool=pool, purpose=Purpose.VISION, name=f"{found.projector} {what}",
                   phase=Phase.WARM_UP if warm_up else Phase.RUN_TIME, certain_bytes=warm_up, likely_bytes=found.warm_up_bytes,
                   at_most_bytes=found.largest_bytes, knob="vision.max_tokens", **more)
    )  # fmt: skip
    if device is not None:
        spec = next((d for d in settings.devices if d.name == device.name), DeviceSpec(name=device.name, kind=device.kind, compute_capability=device.compute_capability))
        certain, likely, most = beside_encoder(spec, found.warm_up_pool_bytes, found.largest_pool_bytes)
        if most:
            rows.append(
                Allocation(pool=pool, purpose=Purpose.RUNTIME, name="workspaces and pools of the first image" if found.most_tokens else "workspaces and pools of the first sound",
                           phase=Phase.RUN_TIME, certain_bytes=certain, likely_bytes=likely, at_most_bytes=most, device=device.name, accounted=False)
            )  # fmt: skip
        rows.append(
            Allocation(pool=machine.host_pool.name, purpose=Purpose.VISION, name="image inputs on the host",
                       phase=Phase.WARM_UP if warm_up else Phase.RUN_TIME, certain_bytes=found.input_bytes if warm_up else 0,
                       likely_bytes=found.input_bytes, at_most_bytes=found.largest_input_bytes, backing="anonymous", knob="vision.max_tokens")
        )  # fmt: skip
    return rows, misfits, unknowns


def _host_caches(launch: Launch, models: Models, machine: Machine, settings: Settings, layout: Layout) -> Rows:
    """The server's prompt cache and context checkpoints: nothing at start, up to their limits in use."""
    host = machine.host_pool
    rows: list[Allocation] = []
    remarks: list[Remark] = []
    limit = launch.options.get("cache-ram")
    mib = limit if isinstance(limit, int) else CACHE_RAM_MIB
    one = sum(d.kv + d.state for d in (*layout.devices, layout.host))
    # Without an explicit limit the cache holds what conversations leave behind: not more than a few contexts' worth.
    size = mib * MIB if mib >= 0 else host.total_bytes or 0
    if isinstance(limit, int) and limit > 0 and host.total_bytes is not None and size > host.total_bytes:
        remarks.append(
            Remark(
                kind="fails-late", code="host-prompt-cache", knob="option:cache-ram", value=limit, pool=host.name, need_bytes=size, have_bytes=host.total_bytes,
                message=f"the prompt cache may grow to {limit} MiB and {host.name} has {host.total_bytes // MIB} MiB in all: the process is killed when conversations fill it",
            )
        )  # fmt: skip
    if size and one and (settings.prompt_cache or isinstance(limit, int)):
        rows.append(
            Allocation(pool=host.name, purpose=Purpose.KV, name="prompt cache", phase=Phase.RUN_TIME, certain_bytes=0, likely_bytes=0,
                       at_most_bytes=size, backing="anonymous", knob="option:cache-ram")
        )  # fmt: skip
    count = launch.options.get("ctx-checkpoints")
    count = count if isinstance(count, int) else CHECKPOINTS
    kept = _checkpoint_bytes(models, layout, windows=not settings.swa_full) if settings.checkpoints else 0
    if count > 0 and kept:
        rows.append(
            Allocation(pool=host.name, purpose=Purpose.STATE, name=f"context checkpoints, {count} per slot", phase=Phase.RUN_TIME, certain_bytes=0,
                       likely_bytes=0, at_most_bytes=count * kept, backing="anonymous", knob="option:ctx-checkpoints")
        )  # fmt: skip
    return rows, remarks


def _checkpoint_bytes(models: Models, layout: Layout, *, windows: bool) -> int:
    """Bytes one checkpoint of every slot keeps: recurrent states and windowed caches."""
    model = models.main
    assert model is not None
    hyper = hyper_parameters(model)
    resolved = layout.resolved
    state = sum(d.state for d in (*layout.devices, layout.host))
    rows = sum(
        row_bytes(resolved.type_k, hyper.key_row(i)) + row_bytes(resolved.type_v, hyper.value_row(i))
        for i in range(hyper.layers)
        if hyper.windowed[i] and hyper.attends[i]
    )
    return state + (rows * resolved.window_cells * resolved.streams if hyper.any_window and windows else 0)
