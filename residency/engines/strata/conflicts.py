"""What the engine's own parser and its back ends refuse, and what they silently turn off: remarks, judged by rules.

Source: the checks after the argument loop of ``generate.cpp``, each ending in exit code 2; ``setup.py`` and
``server.py`` where named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.budget import Remark
from residency.engines.base import version_in
from residency.ways import Way

from .flags import FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.budget import RemarkKind
    from residency.launch.model import Launch
    from residency.machine.model import Machine

    from .geometry import Geometry
    from .resolve import Settings

RESIDENT_ON_SPLIT = "0.1.40"  # the resident copy works on a split
STREAMED_K8V4 = "0.1.40"  # k8v4 keys and values can be streamed (711)
LEAST_COMPUTE = (7, 5)
EXPERIMENTAL_COMPUTE = (6, 0)  # with the CUDA 12 build


def remarks(launch: Launch, machine: Machine, settings: Settings, model: Geometry, version: str) -> tuple[Remark, ...]:
    """Return every remark about the settings, before any byte is counted."""
    return (
        *_command_line(launch, settings),
        *_pairs(launch, settings, version),
        *_split(launch, settings, machine, version),
        *_cache_and_context(launch, machine, settings, model, version),
        *_back_end(launch, machine, settings),
        *_without_effect(launch),
    )


#: Knobs of a launch file this engine has nothing for, with the values that ask for nothing.
NOTHING_HERE: dict[str, tuple[Any, ...]] = {
    "context.batch": (), "context.micro_batch": (), "context.flash_attention": ("auto", "on"), "context.full_window": (False,),
    "context.unified": (), "kv.on_device": (True,), "kv.blocks": (), "kv.block_size": (), "kv.memory": (), "layers.on_device": ("all", "auto"),
    "layers.ratio": (), "layers.overrides": (), "experts.on_host": (0,), "experts.stream": (False,), "experts.slots": (), "experts.slot_size": (),
    "memory.prefault": (False,), "memory.pinned": (True,), "model.draft": (), "model.adapters": (),
}  # fmt: skip


def _without_effect(launch: Launch) -> Iterator[Remark]:
    for knob, asks_nothing in NOTHING_HERE.items():
        value = launch.get(knob)
        if value is not None and value not in asks_nothing:
            yield _remark("inert", "no-such-setting", knob, f"This engine has nothing that {knob} would set, so it changes nothing")


def _remark(kind: RemarkKind, code: str, knob: str, message: str, *ways: Way, **more: Any) -> Remark:
    return Remark(kind=kind, code=code, knob=knob, message=message, ways=ways, **more)


def _command_line(launch: Launch, settings: Settings) -> Iterator[Remark]:
    """What a served model needs; a launch file stands for what setup writes, which has all of it."""
    if launch.program is None:
        return
    option = launch.options.get
    if not option("serve"):
        if settings.firsts or settings.automatic:
            yield _remark("conflict", "split-needs-serve", "layers.split", "A layer split needs --serve; the engine refuses it with exit code 2")
        return
    if settings.window < 2:
        yield _remark("conflict", "serve-needs-window", "speculation.window", "--serve needs a speculation window of at least 2 (--spec); the engine refuses it with exit code 2")
    if not settings.prefill:
        yield _remark("conflict", "serve-needs-chunk", "context.prefill", "--serve needs a prompt chunk above 0 (--prefill auto); the engine refuses it with exit code 2")
    if not option("mtp"):
        yield _remark("conflict", "serve-needs-draft", "option:mtp", "--serve needs the draft layer's folder (--mtp); the engine refuses it with exit code 2")
    if len(settings.stages) > 1 and not option("expert-profile"):
        yield _remark("conflict", "split-needs-profile", "layers.split", "A layer split needs --expert-profile; the engine refuses it with exit code 2")


def _pairs(launch: Launch, settings: Settings, version: str) -> Iterator[Remark]:
    """Pairs of settings that exclude each other."""
    option = launch.options.get
    resident = option("resident-experts") or option("resident-cpu-experts")
    helpers = [n for n in (1, 2, 3) if option(f"expert-cache-device{n}") not in (None, 0)]
    split = len(settings.stages) > 1
    name = "resident-experts" if option("resident-experts") else "resident-cpu-experts"
    if settings.mapped and option("shared-expert-arena"):
        yield _remark("conflict", "mapped-and-shared", "option:shared-expert-arena", "Mapped experts and a shared expert arena exclude each other")
    if option("resident-cpu-experts") and not settings.mapped:
        yield _remark("conflict", "resident-needs-map", f"option:{name}", "A resident copy of experts for the CPU needs the experts mapped from their file", Way(knob="memory.load", value="mmap"))
    if resident and split and not version_in(version, RESIDENT_ON_SPLIT, None):
        yield _remark("conflict", "resident-and-split", f"option:{name}", f"A resident copy of experts and a layer split exclude each other before {RESIDENT_ON_SPLIT}",
                      Way(knob=f"option:{name}", value=None))  # fmt: skip
    if option("resident-budget-gib") and split:
        yield _remark("conflict", "budget-and-split", "option:resident-budget-gib", "A RAM budget for experts and a layer split exclude each other", Way(knob="option:resident-budget-gib", value=None))
    if resident and helpers:
        yield _remark("conflict", "resident-and-helper", f"option:{name}", "A resident copy of experts and helper caches on other cards exclude each other")
    if resident and option("shared-expert-arena"):
        yield _remark("conflict", "resident-and-shared", f"option:{name}", "A resident copy of experts and a shared expert arena exclude each other")
    for number in helpers:
        if number > 1 and number - 1 not in helpers:
            yield _remark("conflict", "helper-order", f"option:expert-cache-device{number}", f"Helper cache {number} needs helper cache {number - 1}")
    if option("peer-device") and (split or helpers):
        other = "a layer split" if split else "helper caches"
        yield _remark("conflict", "peer-and-split", "option:peer-device", f"A peer device and {other} exclude each other", Way(knob="option:peer-device", value=None))
    if option("cpu-oracle-q8-0") and settings.cache not in (0, None):
        yield _remark("conflict", "oracle-and-cache", "option:cpu-oracle-q8-0", "The CPU check path and an expert cache exclude each other")
    for elastic in ("live-memory", "vram-elastic"):
        if option(elastic) and (split or helpers or settings.slots > 1):
            yield _remark("conflict", "elastic-and-split", f"option:{elastic}", f"{elastic} works with one card and one slot only", Way(knob=f"option:{elastic}", value=None))
    if option("lazy-load") and settings.vision:
        yield _remark("conflict", "lazy-and-vision", "vision.enabled", "The server refuses lazy loading together with the image encoder", Way(knob="option:lazy-load", value=None))
    if option("ple-io") == "ram" and launch.environ.get("OS") == "Windows_NT":
        yield _remark("conflict", "table-in-ram", "option:ple-io", "The n-gram table cannot be locked in RAM on Windows", Way(knob="option:ple-io", value="direct"))


def _split(launch: Launch, settings: Settings, machine: Machine, version: str) -> Iterator[Remark]:
    split = launch.get("layers.split")
    cards = len(settings.stages)
    if settings.firsts and settings.firsts[0] == 1 and cards > 1:  # below that the points do not rise at all
        yield _remark("impossible", "split-too-early", "layers.first", "The second card cannot start before layer 2: the n-gram table is read on the first card, in layer 1", Way(knob="layers.first", value=None, note="left out, the engine places the split"))
    if split == "auto" and cards == 1:
        yield _remark("inert", "split-of-one", "layers.split", "There is one card to split over, so the engine runs without a split")
    if launch.options.get("split-skip-if-fits") and settings.firsts:
        yield _remark("conflict", "skip-needs-auto", "option:split-skip-if-fits", "Skipping the split needs automatic split points", Way(knob="option:split-skip-if-fits", value=None))
    windows = launch.options.get("pipeline-windows")
    if windows and (cards < 2 or settings.slots > 1):
        yield _remark("inert", "windows-off", "option:pipeline-windows", "Pipelined windows are off without a split or with several slots")
    if settings.trimmed and cards > 1 and settings.automatic:
        yield _remark("inert", "trim-needs-points", "option:trim-stage-weights", "Trimmed stage weights need given split points; with automatic ones every card keeps a full dense copy")
    if cards > 1 and settings.stages[0].kind == "rocm" and machine.host.system == "windows":
        yield _remark("impossible", "split-amd-windows", "layers.split", "AMD on Windows runs a model on one card only", Way(knob="layers.split", value="none"))
    del version


def _cache_and_context(launch: Launch, machine: Machine, settings: Settings, model: Geometry, version: str) -> Iterator[Remark]:
    if settings.kv is None:
        pair = f"{launch.get('kv.key_type')} keys with {launch.get('kv.value_type')} values"
        yield _remark("impossible", "cache-pair", "kv.key_type", f"There is no cache of {pair}; there are fp16, int8 and q4_0 for both, and int8 keys with q4_0 values",
                      Way(knob="kv.value_type", value=launch.get("kv.key_type")), Way(knob="kv.key_type", value=launch.get("kv.value_type")))  # fmt: skip
    elif settings.kv == "k8v4" and settings.streams and not version_in(version, STREAMED_K8V4, None):
        yield _remark("conflict", "streamed-k8v4", "kv.resident", f"int8 keys with q4_0 values cannot be streamed before {STREAMED_K8V4}",
                      Way(knob="kv.value_type", value="int8"), Way(knob="kv.resident", value=0))  # fmt: skip
    if settings.streams and machine.host.wsl:
        yield _remark("fails-late", "streaming-in-wsl", "kv.resident", "The WSL driver pins about 1 GB in all, so the host copy of the KV cache cannot be pinned there", Way(knob="kv.resident", value=0))
    if settings.resident:
        if settings.stages[0].integrated:
            yield _remark("inert", "streaming-unified", "kv.resident", "On unified memory there is nothing to stream from, so the whole KV cache stays where it is")
        elif settings.resident >= settings.context:
            yield _remark("inert", "nothing-streamed", "kv.resident", f"{settings.resident} resident tokens are the whole context of {settings.context}, so nothing is streamed")
    scale = launch.options.get("rope-scale")
    reach = int(model.trained_context * scale) if isinstance(scale, (int, float)) and launch.options.get("rope-scaling") in ("linear", "yarn") else model.trained_context
    if model.trained_context and settings.context > reach:
        how = "no RoPE extension is set" if reach == model.trained_context else f"the RoPE extension reaches {reach}"
        yield _remark("impossible", "context-past-rope", "context.length", f"{settings.context} tokens are more than the {model.trained_context} the model was trained for, and {how}",
                      Way(knob="context.length", value=reach))  # fmt: skip


def _back_end(launch: Launch, machine: Machine, settings: Settings) -> Iterator[Remark]:
    kind = settings.stages[0].kind
    for flag in FLAGS:
        asked = launch.options.get(flag.target[7:]) if flag.target.startswith("option:") else launch.get(flag.target)
        if asked in (None, False, 0, "none") or flag.target in ("layers.split", "vision.enabled") or "*" in flag.platforms:
            continue
        if kind not in flag.platforms and not (flag.target == "experts.cache" and asked == "auto"):
            yield _remark("unknown-setting", "not-on-this-back-end", flag.target, f"The {kind} back end has no {flag.names[0]}", Way(knob=flag.target, value=None))
    if settings.vision and kind == "sycl":
        yield _remark("impossible", "vision-sycl", "vision.enabled", "The sycl port takes no images yet", Way(knob="vision.enabled", value=False))
    if settings.vision and kind == "rocm" and machine.host.system == "windows":
        yield _remark("impossible", "vision-amd-windows", "vision.enabled", "There is no image encoder for AMD on Windows", Way(knob="vision.enabled", value=False))
    for device in settings.stages:
        if device.kind != "cuda" or device.compute_capability is None:
            continue
        major, _, minor = device.compute_capability.partition(".")
        found = (int(major), int(minor or 0)) if (major + minor).isdigit() else LEAST_COMPUTE
        if found < EXPERIMENTAL_COMPUTE:
            yield _remark("impossible", "card-too-old", "device.ids", f"{device.name} has compute capability {device.compute_capability}; the oldest any build runs on is 6.0", device=device.name)
        elif found < LEAST_COMPUTE:
            yield _remark("risk", "experimental-card", "device.ids", f"{device.name} has compute capability {device.compute_capability}; below 7.5 only the experimental CUDA 12 build runs", device=device.name)
