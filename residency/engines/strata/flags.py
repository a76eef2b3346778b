"""Every flag of Strata that moves bytes, with the version it appeared in; the names of those that do not; setup's names.

Source: ``generate.cpp`` of the 0.1.33 to 0.1.40 generation, its FLAGS.md, ``setup.py``. An unknown flag ends the
engine with its usage text and exit code 2, so a command line is valid for a version, not in general.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "int",
    "float",
    "text",
    "path",
    "flag",  # no value
    "choice",
    "cache",  # slots or "auto"
    "prefill",  # tokens, "auto" or "auto:N"
    "split",  # "auto" or the first layer of each later card
    "devices",  # CUDA indices
    "mib",  # whole MiB, kept in bytes
]

KV_TYPES = ("fp16", "int8", "q4_0", "q4", "k8v4")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: what it sets, what it takes, since when and on which back ends it exists."""

    target: str  # knob ("context.length"), or "option:NAME"
    names: tuple[str, ...]
    kind: Kind
    choices: tuple[str, ...] = ()
    since: str | None = None
    platforms: tuple[str, ...] = ("*",)  # back ends that honour it
    low: int | None = None
    high: int | None = None
    setup_names: tuple[str, ...] = ()  # the same in setup's words


def _f(target: str, names: str, kind: Kind, **more: object) -> Flag:
    return Flag(target, tuple(names.split()), kind, **more)  # type: ignore[arg-type]


GPU = ("cuda", "rocm")

# fmt: off
FLAGS: tuple[Flag, ...] = (
    _f("option:serve", "--serve", "flag"),
    _f("model.path", "--native", "path"),
    _f("option:pack", "--pack", "path"),
    _f("option:ple-gguf", "--ple-gguf", "path"),
    _f("option:mtp", "--mtp", "path"),
    _f("context.length", "--max-context", "int", low=1, high=2**31 - 9, setup_names=("--context",)),
    _f("option:kv", "--kv", "choice", choices=KV_TYPES),
    _f("kv.resident", "--kv-resident", "int", low=0),
    _f("option:mtp-window", "--mtp-window", "int", low=0),
    _f("experts.cache", "--expert-cache", "cache", platforms=(*GPU, "sycl")),
    _f("option:expert-profile", "--expert-profile", "path"),
    _f("option:expert-cache-device1", "--expert-cache-device1", "cache", platforms=GPU),
    _f("option:expert-cache-device2", "--expert-cache-device2", "cache", platforms=GPU),
    _f("option:expert-cache-device3", "--expert-cache-device3", "cache", platforms=GPU),
    _f("option:expert-cache-remote-placement", "--expert-cache-remote-placement", "choice", choices=("stripe", "layer"), platforms=GPU),
    _f("option:peer-device", "--peer-device", "int", low=1, since="0.1.38", platforms=("cuda",)),
    _f("option:peer-reserve-mib", "--peer-reserve-mib", "int", low=0, since="0.1.38", platforms=("cuda",)),
    _f("option:peer-slots", "--peer-slots", "int", low=0, since="0.1.38", platforms=("cuda",)),
    _f("option:peer-prefill-rows", "--peer-prefill-rows", "int", low=-1, since="0.1.38", platforms=("cuda",)),
    _f("memory.reserve", "--vram-reserve-mib", "mib", low=0, setup_names=("--reserve", "--vram-reserve-mib")),
    _f("option:vram-reserve-later-mib", "--vram-reserve-later-mib", "int", low=0, platforms=GPU),
    _f("context.prefill", "--prefill", "prefill"),
    _f("option:no-prefill-borrow", "--no-prefill-borrow", "flag"),
    _f("speculation.window", "--spec", "int", low=0, high=8),
    _f("option:spec-min-p", "--spec-min-p", "float"),
    _f("option:suffix-draft", "--suffix-draft", "int", low=0),
    _f("option:mtp-max-t", "--mtp-max-t", "int", low=0),
    _f("option:pcie-frac", "--pcie-frac", "float", platforms=GPU),
    _f("option:pcie-mode", "--pcie-mode", "choice", choices=("auto", "dma", "kernel", "direct"), platforms=GPU),
    _f("option:pool-workers", "--pool-workers", "int", low=0),
    _f("layers.split", "--layer-split", "split", platforms=GPU),
    _f("option:split-device", "--split-device", "devices", platforms=GPU),
    _f("option:split-skip-if-fits", "--split-skip-if-fits", "flag", since="0.1.31", platforms=GPU),
    _f("option:head-device", "--head-device", "int", low=-1, since="0.1.41", platforms=GPU),
    _f("option:pipeline-windows", "--pipeline-windows", "int", low=1, high=2, platforms=GPU),
    _f("context.sequences", "--batch", "int", low=1, high=8, setup_names=("--parallel",)),
    _f("option:batch-mtp", "--batch-mtp", "flag", since="0.1.39"),
    _f("vision.enabled", "--vision", "flag", platforms=("cuda", "rocm", "metal")),
    _f("option:mmap-experts", "--mmap-experts", "flag"),
    _f("option:resident-cpu-experts", "--resident-cpu-experts", "flag"),
    _f("option:resident-experts", "--resident-experts", "flag"),
    _f("option:resident-budget-gib", "--resident-budget-gib", "float", low=0),
    _f("option:shared-expert-arena", "--shared-expert-arena", "path", platforms=GPU),
    _f("option:ple-io", "--ple-io", "choice", choices=("direct", "mmap", "ram")),
    _f("option:conversation-cache-mib", "--conversation-cache-mib", "int", low=0),
    _f("option:conversation-cache-slots", "--conversation-cache-slots", "int", low=0),
    _f("option:conversation-cache-min-free-mib", "--conversation-cache-min-free-mib", "int", low=0),
    _f("option:prompt-cache", "--prompt-cache", "int", low=0),
    _f("option:rope-scaling", "--rope-scaling", "choice", choices=("none", "linear", "yarn"), platforms=(*GPU, "sycl")),
    _f("option:rope-scale", "--rope-scale", "float", low=1, platforms=(*GPU, "sycl")),
    _f("option:trim-stage-weights", "--trim-stage-weights", "flag", since="0.1.39", platforms=GPU),
    _f("option:live-memory", "--live-memory", "flag", platforms=("cuda",)),
    _f("option:vram-elastic", "--vram-elastic", "flag", platforms=("cuda",)),
    _f("option:vram-segment-mib", "--vram-segment-mib", "int", low=1, platforms=("cuda",)),
    _f("option:stream-experts", "--stream-experts", "flag", platforms=("sycl",)),
    _f("option:cpu-oracle-q8-0", "--cpu-oracle-q8-0", "flag"),
    # Keys of the server's configuration, and what setup was told: no flags of the engine.
    _f("option:lazy-load", "", "flag"),
    _f("option:gpus", "", "devices"),
    _f("option:prefill-auto-max", "", "int", low=256, high=32768),
)

#: Flags without a bearing on memory: name -> number of values.
SILENT: dict[str, int] = {
    "--adapt-every": 1, "--max-new": 1, "--port": 1, "--host": 1, "--no-pool": 0, "--no-capture": 0, "--no-host-worker": 0,
    "--no-ple-prefetch": 0, "--no-split-rows": 0, "--prefill-until": 1, "--short-read": 1, "--remote-expert-opt": 0,
    "--prompt-cache-every": 1, "--prompt-cache-tail": 1, "--prompt-cache-root": 1, "--turn-token": 1, "--head-split": 1,
    "--yarn-orig-ctx": 1, "--yarn-beta-fast": 1, "--yarn-beta-slow": 1, "--yarn-ext-factor": 1, "--yarn-attn-factor": 1,
    "--pool-priority": 1, "--process-priority": 1, "--stage-timing": 0, "--graph-only": 0,
}

#: What ends with the usage text; nothing starts.
INFORMATION = ("-h", "--help", "--version")

#: Options of setup that are not flags of the engine: name -> kind of value. They imply the arguments setup writes.
SETUP: dict[str, str] = {
    "--family": "text", "--model": "text", "--gpu": "int", "--gpus": "gpus", "--low-ram": "low-ram", "--kv-streaming": "switch",
    "--vision-tokens": "int", "--backend": "backend", "--cuda": "int", "--draft-vocab": "text", "--data-dir": "path",
    "--yes": "flag", "--no-start": "flag", "--check": "flag", "--calibrate": "flag", "--setup": "flag",
}
# fmt: on

#: What setup writes when it is not told otherwise, and what a launch file leaves out.
SETUP_DEFAULTS: dict[str, object] = {"context.prefill": "auto", "speculation.window": 4, "experts.cache": "auto"}

#: Environment the engine and its server read that moves bytes.
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "STRATA_STAGE_TRIM", "STRATA_ARENA_PIN_GIB", "STRATA_ARENA_MMAP",
    "STRATA_EXPERT_CACHE_HEADROOM", "STRATA_UMA_HEADROOM_GIB", "STRATA_RESIDENT_PIN", "STRATA_SPLIT_OWN", "STRATA_SPLIT_P2P",
    "STRATA_HEAD_DEVICE", "STRATA_PREFILL_RING",
)  # fmt: skip

#: The engine's word for a pair of cache types, by the pair's neutral names.
KV_WORDS: dict[tuple[str, str], str] = {
    ("fp16", "fp16"): "fp16", ("int8", "int8"): "int8", ("q4_0", "q4_0"): "q4_0", ("int8", "q4_0"): "k8v4",
}  # fmt: skip
KV_ALIASES = {"f16": "fp16", "q8_0": "int8", "q4": "q4_0"}
