"""``--fit``: what the engine changes by itself before it loads (``common/fit.cpp``, 0.5.0).

If every device keeps its margin, nothing. Else, when the context was not asked for, the context is
lowered, down to ``--fit-ctx``; then, when neither layers, split nor overrides were touched, experts
go to the CPU and layers follow. An explicit value is never changed. The engine searches with its own
measurements; this search ends at a value that fits by the model's figures, so the value may differ
a little while the verdict does not.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING

from residency.budget import Remark
from residency.engines.base import version_in

from .settings import expert_overrides

if TYPE_CHECKING:
    from collections.abc import Callable

    from residency.launch.model import Launch

    from .settings import Settings

#: Since which build ``--fit`` exists and is on by default.
FIT_SINCE = "0.0.7406"
#: Free memory kept per device, MiB, and the smallest context it goes down to.
FIT_TARGET_MIB, FIT_CONTEXT = 1024, 4096
#: Programs that do not fit.
WITHOUT_FIT = ("llama-bench",)


def enabled(launch: Launch, program: str, version: str) -> bool:
    """Whether the engine may change anything."""
    return program not in WITHOUT_FIT and version_in(version, FIT_SINCE, None) and launch.options.get("fit") != "off"


def margins(launch: Launch, devices: int) -> tuple[int, ...]:
    """Return the bytes to keep free per device."""
    target = launch.options.get("fit-target")
    values = [target] if isinstance(target, int) else list(target or [FIT_TARGET_MIB])
    values = values * max(devices, 1) if len(values) == 1 else [*values, *[FIT_TARGET_MIB] * devices]
    return tuple(v * 2**20 for v in values[: max(devices, 1)])


def adjust(
    launch: Launch, settings: Settings, *, trained_context: int, layers: int, experts: bool, room: Callable[[Settings], float]
) -> tuple[Settings, tuple[Remark, ...]]:
    """Return the settings after ``--fit`` and what it changed. Called only when the settings do not fit as they are.

    Args:
        launch: tells what was asked for explicitly.
        settings: before fitting.
        trained_context: tokens the model was trained for.
        layers: blocks and output.
        experts: whether the model has experts.
        room: bytes that settings leave the fullest device beyond its margin; negative where they do not.
    """

    def fits(candidate: Settings) -> bool:
        return room(candidate) >= 0

    remarks: list[Remark] = []
    if launch.get("context.length") is None and not settings.n_ctx:
        settings, changed = _context(launch, settings, trained_context, fits)
        remarks += changed
        if fits(settings):
            return settings, tuple(remarks)
    fixed = _fixed(launch)
    if fixed is not None:
        if launch.options.get("fit") == "on" or "fit-target" in launch.options:
            remarks.append(
                Remark(kind="inert", code="fit-is-disarmed", knob="option:fit", message=f"--fit can change nothing here, because {fixed} is set")
            )
        return settings, tuple(remarks)
    return _layers(settings, layers, room, experts=experts, remarks=remarks)


def _fixed(launch: Launch) -> str | None:
    if launch.get("layers.on_device") not in (None, "auto"):
        return "the number of layers on the device"
    if any(launch.get("layers.ratio") or ()):
        return "the split ratio"
    if launch.get("layers.overrides") or launch.get("experts.on_host") or launch.options.get("n-cpu-ffn"):
        return "a placement override"
    if launch.get("layers.split") in ("row", "tensor"):
        return f"split mode {launch.get('layers.split')}"
    return None


def _context(launch: Launch, settings: Settings, trained: int, fits: Callable[[Settings], bool]) -> tuple[Settings, list[Remark]]:
    smallest = launch.options.get("fit-ctx")
    streams = 1 if settings.unified else settings.n_seq
    step = 256 * streams
    most = trained * streams
    low = min(smallest if isinstance(smallest, int) else FIT_CONTEXT, trained) * streams
    if low >= most or not fits(replace(settings, n_ctx=low)):
        lowest = replace(settings, n_ctx=low) if low < most else settings
    else:
        first, last = low // step, most // step
        while last - first > max(1, (most - low) // step // 64):  # to 1/64 of the range: the engine interpolates, too
            middle = (first + last) // 2
            if fits(replace(settings, n_ctx=middle * step)):
                first = middle
            else:
                last = middle
        lowest = replace(settings, n_ctx=max(first * step, low))
    if lowest is settings:
        return settings, []
    text = f"the context is not set and the model's own {most} tokens do not fit, so --fit lowers it to about {lowest.n_ctx}"
    return lowest, [Remark(kind="risk", code="fit-lowers-context", knob="context.length", message=text)]


def _layers(
    settings: Settings, layers: int, room: Callable[[Settings], float], *, experts: bool, remarks: list[Remark]
) -> tuple[Settings, tuple[Remark, ...]]:
    def with_experts(count: int) -> Settings:
        return replace(settings, overrides=expert_overrides(n_cpu_moe=count))

    def with_layers(count: int) -> Settings:
        return replace(settings, n_gpu_layers=count)

    left = room(settings)
    if experts:
        most = room(with_experts(layers - 1))
        if most >= 0:
            count = _smallest((0, left), (layers - 1, most), lambda n: room(with_experts(n)))
            message = f"the experts do not fit on the device, so --fit leaves those of about {count} layers on the CPU (slower)"
            return with_experts(count), (*remarks, Remark(kind="risk", code="fit-moves-experts", knob="experts.on_host", message=message))
        left, settings = most, with_experts(layers - 1)
    most = room(with_layers(0))
    if most >= 0:
        count = layers - _smallest((0, left), (layers, most), lambda n: room(with_layers(layers - n)))
        message = f"not every layer fits on the device, so --fit leaves about {layers - count} of {layers} on the CPU (slower)"
        return with_layers(count), (*remarks, Remark(kind="risk", code="fit-moves-layers", knob="layers.on_device", message=message))
    return settings, tuple(remarks)


def _smallest(below: tuple[int, float], above: tuple[int, float], room: Callable[[int], float]) -> int:
    """Return the smallest number that leaves room, between one that does not and one that does, each with its room.

    Bytes are nearly linear in the number, so it is guessed from the room at both ends; every fifth time it is halved.
    """
    (low, short), (high, left) = below, above
    turn = 0
    while high - low > 1:
        middle = (low + high) // 2
        turn += 1
        if turn % 5 and short < 0 <= left < inf:
            middle = min(max(low + ceil((high - low) * -short / (left - short)), low + 1), high - 1)
        found = room(middle)
        if found >= 0:
            high, left = middle, found
        else:
            low, short = middle, found
    return high
