"""What the engine refuses, ignores or does not vouch for, beside the bytes. One function per subject, joined by ``remarks``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from residency.budget import Remark
from residency.checkpoint.model import Role
from residency.engines.base import platform_of, version_in
from residency.text import clean
from residency.units import size
from residency.ways import Way

from . import lane
from .capabilities import CAPABILITIES, PARITY
from .environment import BY_NAME, UNREAD, read_value
from .flags import KV_TYPES
from .memory import KV_BYTES, kv_block_bytes
from .settings import DEFAULT_BLOCKS
from .versions import DEVICE_LANE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.checkpoint.model import Checkpoint
    from residency.launch.model import Launch

    from .settings import Settings

#: Architectures whose expert layers can be placed on the CPU.
PLACEABLE = frozenset({"qwen3moe", "qwen35moe", "nemotron_h_moe", "deepseek2", "kimi-linear"})


def pool_blocks(model: Checkpoint, settings: Settings) -> int:
    """Return the blocks of the KV pool: as asked, else bytes over block bytes, else the default."""
    if settings.blocks:
        return settings.blocks
    if settings.kv_memory:
        block = kv_block_bytes(model, settings)
        return settings.kv_memory // block if block else DEFAULT_BLOCKS
    return DEFAULT_BLOCKS


def streams(model: Checkpoint, settings: Settings, version: str) -> bool:
    """Whether routed experts come through the slot store in this launch."""
    if not settings.stream:
        return False
    if settings.device is None:
        known = CAPABILITIES.find("host-expert-slots", "cpu", version) is not None
        return known and model.architecture in lane.STREAMING_ARCHITECTURES and lane.towers_kept(model, settings).holds is True
    return lane.granted(model, settings, settings.device, version)


def remarks(launch: Launch, model: Checkpoint, settings: Settings, version: str) -> tuple[Remark, ...]:
    """Return everything to remark on a launch."""
    return (
        *_variables(launch, version), *_documents(settings), *_speculation(model, settings), *_device(launch, settings),
        *_model(launch), *_cache(launch, model, settings), *_experts(launch, model, settings, version),
    )  # fmt: skip


def _variables(launch: Launch, version: str) -> Iterator[Remark]:
    for name, text in launch.environ.items():
        option = f"option:{name.lower().replace('_', '-')}"
        if name in UNREAD:
            yield Remark(kind="inert", code="unread-variable", knob=option, message=f"{name} does nothing: {UNREAD[name]}")
            continue
        variable = BY_NAME.get(name)
        if variable is None:
            continue
        if not version_in(version, variable.since, None):
            yield Remark(kind="inert", code="variable-too-new", knob=variable.target,
                         message=f"{name} does nothing: the engine reads it since the tree of {variable.since}, and this is {version}")  # fmt: skip
        elif read_value(variable, text) is None:
            yield Remark(kind="inert", code="ignored-variable", knob=variable.target,
                         message=f"{name}={clean(text)!r} is not a value the engine takes, so it is ignored and the setting stays as it is without it")  # fmt: skip
        elif variable.grammar == "first" and text.casefold() in ("false", "off", "no"):
            yield Remark(kind="risk", code="first-character", knob=variable.target, value=text,
                         message=f"{name}={clean(text)} turns it ON: only the first character counts, and off is an empty value or one that begins with 0")  # fmt: skip


def _documents(settings: Settings) -> Iterator[Remark]:
    if settings.offload is not None:
        yield Remark(
            kind="impossible", code="weight-offload", knob="option:offload-config", capability="weight-offload",
            message=f"Weight offload ({settings.offload}) is accepted by the parser and refused for every model: the loader never asks the offloader",
            ways=(Way(knob="option:offload-config", value=None),),
        )  # fmt: skip
    if settings.kv_connector == "OffloadingConnector":
        yield Remark(
            kind="impossible", code="kv-offload", knob="option:kv-transfer-config", capability="kv-offload-disk",
            message="The offloading connector is refused on every device: its worker half is missing, and attention would read KV that was never written",
            ways=(Way(knob="option:kv-transfer-config", value=None),),
        )  # fmt: skip


def _speculation(model: Checkpoint, settings: Settings) -> Iterator[Remark]:
    method = settings.speculation
    more: dict[str, Any] = {"kind": "impossible", "knob": "speculation.kind", "ways": (Way(knob="speculation.kind", value=None),)}
    if method == "draft_model":
        yield Remark(code="draft-model", message="A separate draft model parses and is refused at load", **more)
    if method == "dspark":
        yield Remark(code="dspark-gguf", message="This kind of speculation has no GGUF target", **more)
    if method == "mtp" and not any(t.role is Role.MTP for t in model.tensors):
        yield Remark(code="no-mtp-head", message="The model has no next-token block; it was converted without one", **more)


def _device(launch: Launch, settings: Settings) -> Iterator[Remark]:
    device = settings.device
    kind = launch.get("device.kind")
    if kind not in (None, "auto", "cpu", "cuda"):
        yield Remark(
            kind="impossible", code="device-name", knob="device.kind", value=kind, capability="device-selection",
            message=f"The engine knows the device names auto, cpu and cuda; {kind} is reached through auto only",
            ways=(Way(knob="device.kind", value="auto"), Way(knob="device.kind", value="cpu")),
        )  # fmt: skip
    if len(launch.get("device.ids") or ()) > 1:
        yield Remark(kind="inert", code="one-device", knob="device.ids",
                     message=f"The engine computes on one device; of those named it uses {device.name if device else 'none'}")  # fmt: skip
    if launch.get("layers.split") not in (None, "none", "auto"):
        split = launch.get("layers.split")
        yield Remark(kind="impossible", code="no-split", knob="layers.split", value=split, capability=f"split-{split}",
                     message="The engine computes on one device and has no split of any kind",
                     ways=(Way(knob="layers.split", value=None),))  # fmt: skip
    if device is not None and device.kind in ("metal", "vulkan"):
        yield Remark(kind="risk", code="back-end-incomplete", knob="device.kind", device=device.name,
                     message=f"The {device.kind} back end lacks operations (experts above all) and has no check that weights fit; "
                             "a missing operation stops the first request, or the layer runs on the CPU")  # fmt: skip


def _model(launch: Launch) -> Iterator[Remark]:
    path = launch.get("model.path") or ""
    shard = re.search(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", path)
    if shard is not None and int(shard[1]) != 1:
        first = path[: shard.start(1)] + "00001" + path[shard.end(1) :]
        yield Remark(kind="impossible", code="not-first-shard", knob="model.path",
                     message=f"The engine takes a split model by its first shard, and this is shard {int(shard[1])}",
                     ways=(Way(knob="model.path", value=first),))  # fmt: skip


def _cache(launch: Launch, model: Checkpoint, settings: Settings) -> Iterator[Remark]:
    # A command line cannot say these; a launch file can.
    if settings.kv_type not in KV_BYTES or launch.get("kv.value_type") not in (None, settings.kv_type):
        asked = f"keys {settings.kv_type}, values {launch.get('kv.value_type') or settings.kv_type}"
        yield Remark(kind="impossible", code="kv-type", knob="kv.key_type", value=settings.kv_type,
                     message=f"The cache has one type, of {', '.join(KV_TYPES)}, and not {clean(asked)}",
                     ways=(Way(knob="kv.key_type", value=None),))  # fmt: skip
    if settings.block_size % 16:
        yield Remark(kind="impossible", code="block-size", knob="kv.block_size", message=f"A block of {settings.block_size} tokens is not a multiple of 16",
                     ways=(Way(knob="kv.block_size", value=-(-settings.block_size // 16) * 16),))  # fmt: skip
    if launch.get("memory.load") not in (None, "auto", "mmap", "none"):
        yield Remark(kind="impossible", code="load-mode", knob="memory.load", message="The engine borrows weights from the file mapping or reads them; it has no other load mode",
                     ways=(Way(knob="memory.load", value="mmap"),))  # fmt: skip
    if launch.options.get("gpu-memory-utilization") is not None:
        tokens = pool_blocks(model, settings) * settings.block_size
        yield Remark(kind="inert", code="utilization", knob="option:gpu-memory-utilization",
                     message=f"The utilisation fraction sizes nothing; the KV pool holds {tokens} tokens for all sequences together")  # fmt: skip
    if settings.kv_memory and not settings.blocks and kv_block_bytes(model, settings) > settings.kv_memory:
        yield Remark(kind="impossible", code="below-one-block", knob="kv.memory",
                     message=f"{size(settings.kv_memory)} of KV memory is less than one block of {size(kv_block_bytes(model, settings))}",
                     ways=(Way(knob="kv.memory", value=None),))  # fmt: skip
        return
    tokens = pool_blocks(model, settings) * settings.block_size
    if settings.length is not None and settings.length > tokens:
        need = -(-settings.length // settings.block_size)
        yield Remark(
            kind="impossible", code="pool-below-length", knob="context.length", value=settings.length,
            message=f"One request may take {settings.length} tokens and the KV pool holds {tokens}, so the engine refuses to start",
            ways=(Way(knob="kv.blocks", value=need, note="a larger KV pool"), Way(knob="context.length", value=tokens)),
        )  # fmt: skip


def _experts(launch: Launch, model: Checkpoint, settings: Settings, version: str) -> Iterator[Remark]:
    device = settings.device
    if settings.cpu_moe or settings.n_cpu_moe:
        knob = "option:vt-cpu-moe" if "vt-cpu-moe" in launch.options else "experts.on_host"
        if not model.integer("expert_count"):
            yield Remark(kind="impossible", code="placement-dense", knob=knob, message="Experts are to be placed on the CPU, and the model has none",
                         ways=(Way(knob=knob, value=None),))  # fmt: skip
        elif device is None:
            yield Remark(kind="inert", code="placement-on-cpu", knob=knob, message="Experts are placed on the CPU, where everything is computed anyway")
        elif device.integrated:
            yield Remark(kind="inert", code="placement-unified", knob=knob,
                         message=f"Placing experts on the CPU gains nothing on {device.name}: host and device draw from one pool")  # fmt: skip
        elif model.architecture not in PLACEABLE or CAPABILITIES.find("expert-placement", platform_of(device), version) is None:
            yield Remark(kind="inert", code="placement-unsupported", knob=knob,
                         message=f"Placing experts on the CPU is ignored without a word for {clean(model.architecture)} on this device")  # fmt: skip
        else:
            yield Remark(kind="unverified", code="placement-unrun", knob=knob, message="no model has been run end to end with experts placed on the CPU")
    if not settings.stream or not model.integer("expert_count"):
        if settings.stream:
            yield Remark(kind="inert", code="streaming-dense", knob="experts.stream", message="Expert streaming is on, and the model has no experts")
        return
    if streams(model, settings, version):
        if device is not None:
            if settings.alias_host:
                yield Remark(kind="unverified", code="lane-parity", knob="experts.stream", device=device.name,
                             message=f"expert streaming on {device.name}: {PARITY}")  # fmt: skip
            else:
                yield Remark(kind="inert", code="lane-without-alias", knob="experts.stream", device=device.name,
                             message="Expert streaming is granted at load, but host weights are not aliased to the device, so the first forward uploads the whole towers")  # fmt: skip
        return
    if device is None:
        yield Remark(kind="inert", code="streaming-unsupported", knob="experts.stream",
                     message=f"Expert streaming is on, and the loader of {clean(model.architecture)} does not stream; experts are read in place")  # fmt: skip
        return
    why = [c.why for c in lane.conditions(model, settings, device) if c.holds is not True]
    if not version_in(version, DEVICE_LANE, None):
        why.insert(0, f"engines before the tree of {DEVICE_LANE} stream on the CPU only")
    yield Remark(
        kind="inert", code="streaming-not-granted", knob="experts.stream", device=device.name,
        message=f"Expert streaming is on and not granted on {device.name}, so the whole towers are uploaded: {'; '.join(map(clean, why))}",
    )  # fmt: skip
