"""What only the engine's model can see about a launch that is neither refused nor too large: dangers, and settings that do nothing."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from residency.budget import Remark
from residency.checkpoint.model import Role
from residency.engines.base import version_in
from residency.text import clean, shorten
from residency.units import plural, size
from residency.ways import Way

from . import blocks, history
from .argv import MOST_SHARES, fits_counter, unknown_words
from .context import pad
from .flags import choices
from .hparams import NO_FLASH_ATTENTION, hyper_parameters
from .layout import lock_granted
from .resolve import SPECULATION_KINDS, cache_type

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from residency.budget import Allocation
    from residency.checkpoint.model import Checkpoint
    from residency.launch.model import Launch
    from residency.machine.model import Device, Machine

    from .context import Resolved
    from .layout import Layout
    from .settings import Settings

GIB = 2**30
#: Flags that stretch the positions a model can take, so that a longer context than it was trained for is meant.
STRETCHING = ("--rope-scaling", "--rope-scale", "--rope-freq-scale", "--rope-freq-base", "--yarn-orig-ctx", "--override-kv")
#: Share of the host's memory that is seldom granted as page-locked memory: by system; Windows gives out half.
PINNED_SHARE = {"windows": 0.5}
PINNED_SHARE_OTHER = 0.9


def remarks(
    launch: Launch, model: Checkpoint, machine: Machine, settings: Settings, devices: Sequence[Device], layout: Layout,
    rows: Sequence[Allocation],
) -> Iterator[Remark]:  # fmt: skip
    """Yield the remarks on one launch that was laid out."""
    yield from _no_device(launch, settings)
    yield from _trained_context(launch, model, layout)
    yield from _left_on_host(launch, machine, layout, rows, devices)
    yield from _scores(model, settings, layout)
    yield from _experts_in_split(settings, layout)
    yield from _pinned(machine, rows)
    yield from _locked(launch, machine, layout)
    yield from _buffer_owner(settings, layout)
    yield from _older_copies(launch, settings, layout)
    yield from _without_effect(launch, model, settings)
    if settings.graph_of_fork and settings.split_mode == "tensor":
        text = "split mode graph is laid out like llama.cpp's split mode tensor; no log of it was compared"
        yield Remark(kind="unverified", code="graph-split", knob="layers.split", value="graph", message=text)


#: Knobs the engine's parser takes as 32-bit numbers; a launch file can say more.
COUNTERS = (
    "context.length", "context.sequences", "context.batch", "context.micro_batch", "layers.on_device", "experts.on_host", "device.main",
    "vision.max_tokens", "speculation.window",
)  # fmt: skip
#: LLAMA_MAX_SEQ, and since when the context is refused with more ("n_seq_max must be <= 256"; builds with a cache per sequence).
MAX_SEQUENCES = 256


def impossible(launch: Launch, model: Checkpoint, engine: str, version: str) -> Iterator[Remark]:
    """Yield what the engine's parser, its loader or its context refuses whatever the model is."""
    late = next((fault for fault in model.faults if fault.code == "not-first-shard"), None)
    if late is not None and launch.get("model.path") == model.path:
        yield Remark(kind="impossible", code="not-first-shard", knob="model.path", value=model.path, ways=(Way(knob="model.path", value=model.files[0].path),),
                     message="the engine loads a split model by its first part, and this is another one")  # fmt: skip
    for knob in ("kv.key_type", "kv.value_type"):
        value, names = launch.get(knob), choices(knob, engine)
        if value is not None and cache_type(value) not in names:
            close = difflib.get_close_matches(cache_type(value), names, n=1) or ["f16"]
            yield Remark(kind="impossible", code="cache-type-unknown", knob=knob, value=value, ways=(Way(knob=knob, value=close[0]),),
                         message=f"{knob} is {clean(shorten(value, 40))!r}, and the engine's cache types are {', '.join(names)}")  # fmt: skip
    kinds = launch.get("speculation.kind")
    unknown = [kind for kind in kinds.split(",") if kind not in SPECULATION_KINDS] if kinds is not None else []
    if unknown and engine == history.UPSTREAM and version_in(version, "0.5.0", None):
        yield Remark(kind="impossible", code="speculation-unknown", knob="speculation.kind", value=kinds,
                     message=f"speculation.kind is {clean(shorten(unknown[0], 40))!r}, and the engine's kinds are {', '.join(SPECULATION_KINDS)}")  # fmt: skip
    for name, word, words in unknown_words(launch.options, engine):
        yield Remark(kind="impossible", code="option-unknown-word", knob=f"option:{name}", value=word,
                     message=f"{name} is {clean(shorten(str(word), 40))!r}, and the engine takes {', '.join(words)}")  # fmt: skip
    if launch.get("vision.device") == "":
        yield Remark(kind="impossible", code="no-device-name", knob="vision.device", value="", message="vision.device is '', which names no device",
                     ways=(Way(knob="vision.device", value="cpu"),))  # fmt: skip
    for knob in COUNTERS:
        value = launch.get(knob)
        if isinstance(value, int) and not fits_counter(value):
            yield Remark(kind="impossible", code="beyond-counter", knob=knob, value=value,
                         message=f"{knob} is {value}, and the engine's parser takes whole numbers of 32 bits only")  # fmt: skip
    shares = launch.get("layers.ratio") or ()
    if len(shares) > MOST_SHARES:
        yield Remark(kind="impossible", code="too-many-shares", knob="layers.ratio", value=list(shares),
                     message=f"the split ratio has {len(shares)} shares, and the engine takes {MOST_SHARES} at most")  # fmt: skip
    sequences = launch.get("context.sequences")
    if isinstance(sequences, int) and sequences > MAX_SEQUENCES and history.follows("streams", engine, version):
        yield Remark(kind="impossible", code="too-many-sequences", knob="context.sequences", value=sequences,
                     message=f"{sequences} sequences are asked for, and the engine takes {MAX_SEQUENCES} at most",
                     ways=(Way(knob="context.sequences", value=MAX_SEQUENCES),))  # fmt: skip


def _no_device(launch: Launch, settings: Settings) -> Iterator[Remark]:
    ratio = [r for r in launch.get("layers.ratio") or () if r]
    extra = [r for r in (launch.get("layers.ratio") or ())[len(settings.devices) :] if r]
    if settings.devices and extra:
        text = f"the split ratio has shares for {len(ratio)} devices and the engine sees {len(settings.devices)}: the rest of it is ignored"
        yield Remark(kind="inert", code="ratio-beyond-devices", knob="layers.ratio", value=list(launch.get("layers.ratio") or ()), message=text)
    if settings.devices or launch.get("device.kind") == "cpu" or launch.get("device.ids") == []:
        return
    if len(ratio) > 1:
        yield Remark(
            kind="impossible", code="split-without-devices", knob="layers.ratio", value=list(launch.get("layers.ratio") or ()),
            message=f"the split ratio is for {len(ratio)} devices, and the engine sees none: the whole model would run on the CPU",
            ways=(Way(knob="device.kind", value="cpu", note="if the CPU is meant"),),
        )  # fmt: skip
    elif isinstance(launch.get("layers.on_device"), int) and launch.get("layers.on_device") > 0:
        text = "layers are to be offloaded, and the engine sees no device to offload them to: everything runs on the CPU"
        yield Remark(kind="inert", code="no-device", knob="layers.on_device", value=launch.get("layers.on_device"), message=text)


def _without_effect(launch: Launch, model: Checkpoint, settings: Settings) -> Iterator[Remark]:
    """Settings the engine takes and that move nothing with this model or these devices."""
    on_host, micro = launch.get("experts.on_host"), launch.get("context.micro_batch")
    if on_host and not any(t.role is Role.EXPERT for t in model.tensors):
        yield Remark(kind="inert", code="no-experts", knob="experts.on_host", value=on_host, message="the model has no experts, so none stay in host memory")
    if settings.split_mode == "row" and len(settings.devices) == 1:
        text = f"split mode row spreads a model over several devices, and the engine sees one, {settings.devices[0].name}"
        yield Remark(kind="inert", code="split-of-one", knob="layers.split", value="row", message=text)
    if isinstance(micro, int) and micro > settings.n_batch:
        text = f"a micro-batch of {micro} is more than the batch of {settings.n_batch}, and the engine lowers it to that"
        yield Remark(kind="inert", code="micro-batch-over-batch", knob="context.micro_batch", value=micro, message=text)
    if launch.get("context.full_window") and not any(hyper_parameters(model).windowed):
        yield Remark(kind="inert", code="no-window", knob="context.full_window", value=True, message="the model has no sliding window that could be kept whole")


def _trained_context(launch: Launch, model: Checkpoint, layout: Layout) -> Iterator[Remark]:
    trained = model.integer("context_length")
    each = layout.resolved.n_ctx_seq
    if not trained or each <= pad(trained, 256) or any(a.split("=")[0] in STRETCHING for a in launch.argv):
        return
    text = f"a sequence may grow to {each} tokens and the model was trained for {trained}: beyond that answers degrade, and the memory is paid for"
    yield Remark(kind="risk", code="context-beyond-training", knob="context.length", value=launch.get("context.length"), message=text)


def _left_on_host(
    launch: Launch, machine: Machine, layout: Layout, rows: Sequence[Allocation], devices: Sequence[Device]
) -> Iterator[Remark]:
    """Layers left on the CPU although a device has room for them: a layer count that was meant as "all"."""
    wanted = launch.get("layers.on_device")
    host = layout.host
    if not isinstance(wanted, int) or not wanted or not layout.devices or not host.layers:
        return
    used = {d.name for d in devices}
    pools = {d.pool for d in machine.accelerators if d.name in used} - {machine.host_pool.name}
    room = 0
    for name in pools:
        pool = machine.pool(name)
        if pool is None or pool.free_bytes is None:
            return
        room += max(0, pool.free_bytes - sum(r.at_most_bytes for r in rows if r.pool == name))
    # What -ngl itself left behind: weights of those layers without experts, which overrides may keep there on purpose.
    left = host.kv + host.state + (host.weights if not host.experts else 0)
    if left and room > left + left // 4:
        kept = f" and {size(host.kv)} of KV cache, page-locked where the driver grants it," if host.kv else ""
        text = (
            f"{host.layers} of {len(layout.layer_device) - 1} layers{kept} stay on the host, and {size(room)} would still be free on the device: "
            f"the count {wanted} is below the model's {len(layout.layer_device)} (blocks and output)"
        )
        yield Remark(kind="risk", code="layers-left-on-host", knob="layers.on_device", value=wanted, message=text,
                     pool=machine.host_pool.name, ways=(Way(knob="layers.on_device", value="all"),))  # fmt: skip


def could_flash(model: Checkpoint, resolved: Resolved) -> bool:
    """Whether the model and the cards can do flash attention, used or not."""
    hyper = hyper_parameters(model)
    if hyper.architecture in NO_FLASH_ATTENTION or not any(hyper.attends):
        return False
    return blocks.flash_works(blocks.blocks_of(model, hyper), resolved.type_k, resolved.type_v)


def _scores(model: Checkpoint, settings: Settings, layout: Layout) -> Iterator[Remark]:
    """Attention scores without flash attention, on every device that attends."""
    resolved = layout.resolved
    hyper = hyper_parameters(model)
    if resolved.flash or not any(hyper.attends):
        return
    scores = max(hyper.heads, default=0) * min(resolved.n_ctx, resolved.n_ubatch) * resolved.n_ctx_seq * 4
    holding = [d for d in layout.devices if d.compute_likely >= scores > 0]
    if scores >= GIB and holding:
        text = (
            f"without flash attention every device that attends holds {size(scores)} of attention scores (heads x micro-batch x context x 4 bytes), "
            f"{size(scores * len(holding))} on {plural(len(holding), 'device')} in all"
        )
        if settings.flash_attn == "auto" and could_flash(model, resolved):
            text = f"the engine turns flash attention off by itself, because scans and attention lie on different sides of host and device; {text}"
            yield Remark(kind="risk", code="attention-scores", knob="context.flash_attention", message=text, ways=(Way(knob="context.flash_attention", value="on"),))
            return
        yield Remark(kind="risk", code="attention-scores", knob="context.flash_attention", message=text)


def _experts_in_split(settings: Settings, layout: Layout) -> Iterator[Remark]:
    if settings.split_mode in ("row", "tensor") and len(layout.devices) and layout.host.experts:
        text = (
            f"split mode {settings.split_mode} with {size(layout.host.experts)} of experts on the CPU: measured at a seventh of the speed of split mode layer, "
            f"and crashes were reported"
        )
        yield Remark(kind="risk", code="experts-on-host-in-split", knob="layers.split", value=settings.split_mode, message=text,
                     ways=(Way(knob="layers.split", value="layer"),))  # fmt: skip


def _pinned(machine: Machine, rows: Sequence[Allocation]) -> Iterator[Remark]:
    pinned = sum(r.likely_bytes for r in rows if r.backing == "pinned")
    total = machine.host_pool.total_bytes
    system = "windows" if machine.host.wsl else machine.host.system or ""
    share = PINNED_SHARE.get(system, PINNED_SHARE_OTHER)
    if total and pinned > total * share:
        text = (
            f"{size(pinned)} of weights are to be page-locked and the host has {size(total)}: more than {share:.0%} is seldom granted, "
            f"and the engine then falls back to pageable memory and copies slowly"
        )
        yield Remark(kind="risk", code="pinned-memory", knob="memory.load", message=text, pool=machine.host_pool.name)


def _locked(launch: Launch, machine: Machine, layout: Layout) -> Iterator[Remark]:
    """``mlock`` beyond RLIMIT_MEMLOCK is refused as a whole: the engine warns and goes on unlocked (seen with build 10068)."""
    if launch.get("memory.load") not in ("mlock", "mmap+mlock"):
        return
    wanted = layout.host_weights.bytes
    limit = machine.host.memlock_bytes
    free = machine.host_pool.free_bytes
    if not wanted or lock_granted(wanted, limit):
        return
    known = f"RLIMIT_MEMLOCK is {size(limit)}" if limit is not None else "RLIMIT_MEMLOCK is unknown here and must allow it, so they are not counted as locked"
    room = f"; {size(free)} is free" if free is not None else ""
    text = f"{size(wanted)} of weights in host memory are to be locked, and {known}{room}: refused, the engine goes on without the lock, and what is not locked can be paged out"
    yield Remark(kind="risk", code="memory-lock-limit", knob="memory.load", value=launch.get("memory.load"), message=text, pool=machine.host_pool.name)


def _buffer_owner(settings: Settings, layout: Layout) -> Iterator[Remark]:
    """Page-locked weights come from the first device that offers such memory, whoever computes with them."""
    kinds = [d.kind for d in settings.devices]
    if layout.host_weights.backing != "pinned" or layout.host_weights.bytes < GIB or len(kinds) < 2 or kinds[0] != "vulkan":
        return
    text = (
        f"{size(layout.host_weights.bytes)} of host memory for weights is allocated through {settings.devices[0].name}, the first device, and counts there "
        f"as shared memory; another device reads it slowly"
    )
    yield Remark(kind="risk", code="host-buffer-owner", knob="device.ids", message=text, device=settings.devices[0].name,
                 ways=(Way(knob="memory.load", value="mmap"),))  # fmt: skip


def _older_copies(launch: Launch, settings: Settings, layout: Layout) -> Iterator[Remark]:
    """A fork's builds are seldom named, and the older ones keep pipeline copies of every expert on the host."""
    copied = layout.host.experts * settings.copies
    asked = launch.options.get("sched-max-copies")
    if not settings.graph_of_fork or launch.version is not None or asked is not None or not copied:
        return
    if len(settings.devices) < 2 or settings.split_mode != "layer" or not settings.kv_offload or min(layout.layer_device) < 0:
        return
    text = (
        f"the build is not given; one from before November 2025 with {settings.copies} scheduler copies asks for {size(copied)} of compute buffer on "
        f"{settings.devices[0].name} here, copies of the experts in host memory"
    )
    yield Remark(kind="risk", code="older-build-copies", knob="engine.version", message=text, device=settings.devices[0].name,
                 ways=(Way(knob="layers.on_device", value=len(layout.layer_device) - 1, note="the output on the CPU turns pipelining off"),))  # fmt: skip
