"""The expert-streaming lane on a device: six conditions, each a predicate of its own.

Twice a bug came from using one of these for another (https://github.com/mudler/vllm.cpp/issues/2507), and
"unified memory" is none of them: a DGX Spark is physically unified and its kernels still get buffers of
their own. All six are needed; one that is unknown is not granted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.checkpoint.model import Role
from residency.engines.base import version_in

from .versions import DEVICE_LANE

if TYPE_CHECKING:
    from residency.checkpoint.model import Checkpoint
    from residency.machine.model import Device

    from .settings import Settings

#: Architectures (as a GGUF names them) whose loader declares that it streams routed experts.
STREAMING_ARCHITECTURES = frozenset({"qwen35moe", "glm-dsa", "maple"})
#: Encodings that are never kept as they are in an expert tower.
_PLAIN = frozenset({"F32", "BF16", "F64", "I8", "I16", "I32", "I64"})


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the lane: True, False, or None when it is not known."""

    name: str
    holds: bool | None
    why: str  # what is the case, for messages


def bounded_memory(device: Device) -> Condition:
    """Whether the platform allocates bounded device memory."""
    return Condition("bounded-device-memory", device.kind in ("cuda", "rocm"), f"{device.kind} allocates {'' if device.kind in ('cuda', 'rocm') else 'no '}bounded device memory")


def host_memory_readable(device: Device) -> Condition:
    """Whether the device's kernels read plain host memory: integrated and pageable, both known."""
    facts = (device.integrated, device.pageable_access)
    if False in facts:
        what = "the device is not integrated" if device.integrated is False else "its kernels cannot read pageable host memory"
        return Condition("host-memory-readable", False, what)
    if None in facts:
        what = "whether the device is integrated" if device.integrated is None else "whether its kernels read pageable host memory"
        return Condition("host-memory-readable", None, f"{what} is unknown")
    return Condition("host-memory-readable", True, "its kernels read pageable host memory")


def factory_known(model: Checkpoint) -> Condition:
    """Whether a loader for this architecture is known here."""
    name = model.architecture
    return Condition("factory-known", True if name else None, f"architecture {name}" if name else "the model names no architecture")


def factory_streams(model: Checkpoint) -> Condition:
    """Whether that loader declares that it streams routed experts."""
    streams = model.architecture in STREAMING_ARCHITECTURES
    return Condition("factory-streams", streams, f"the loader of {model.architecture} {'streams' if streams else 'does not stream'} routed experts")


def streaming_requested(settings: Settings) -> Condition:
    """Whether streaming was asked for."""
    return Condition("streaming-requested", settings.stream, "expert streaming is on" if settings.stream else "expert streaming is off")


def towers_kept(model: Checkpoint, settings: Settings) -> Condition:
    """Whether every expert tower of *this file* keeps its encoding; one that does not takes the whole lane away."""
    for tensor in model.tensors:
        if tensor.role is not Role.EXPERT or not tensor.name.endswith("_exps.weight"):
            continue
        if tensor.type_name == "F16":
            kept = settings.keep_f16
        elif tensor.type_name == "NVFP4":
            kept = not settings.nvfp4 and settings.keep_quant
        else:
            kept = settings.keep_quant and tensor.type_name not in _PLAIN
        if not kept:
            return Condition("towers-kept", False, f"{tensor.name} ({tensor.type_name}) is not kept in its encoding")
    return Condition("towers-kept", True, "every expert tower keeps its encoding")


def conditions(model: Checkpoint, settings: Settings, device: Device) -> tuple[Condition, ...]:
    """Return all six conditions in the order the engine needs them."""
    return (
        bounded_memory(device), host_memory_readable(device), factory_known(model), factory_streams(model),
        streaming_requested(settings), towers_kept(model, settings),
    )  # fmt: skip


def granted(model: Checkpoint, settings: Settings, device: Device, version: str) -> bool:
    """Whether the engine leaves the towers out of device memory. The alias switch is a separate matter (``plan.py``)."""
    return version_in(version, DEVICE_LANE, None) and all(c.holds is True for c in conditions(model, settings, device))
