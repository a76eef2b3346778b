"""The engine Strata: its flags, capabilities and memory layout."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from residency.engines.base import Capability, CapabilityTable
from residency.plugins import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.budget import Budget
    from residency.engines.base import Models
    from residency.launch.model import Launch
    from residency.machine.model import Machine

_REPOSITORY = "https://github.com/Niko1221/Strata"

CAPABILITIES = CapabilityTable(
    rows=(
        Capability(id="startup-vram-budget", title="start-up check of free VRAM that stops with the missing MiB", since="0.1.38",
                   evidence=f"{_REPOSITORY}/issues/496, /issues/486: 0.1.38 lowers a default reserve or stops with what is short, and allocation errors tell the free VRAM"),
        Capability(id="device-expert-slots", title="device-side expert slot store", platforms=("cuda", "rocm", "sycl"), evidence="--expert-cache"),
        Capability(id="host-expert-slots", title="host expert slot store", platforms=("cuda", "rocm", "sycl"), evidence="host expert arena"),
        Capability(id="kv-streaming", title="KV cache streamed from host memory", platforms=("cuda-discrete", "rocm-discrete"), evidence="--kv-resident"),
        Capability(id="split-layer", title="split of whole layers over devices", platforms=("cuda", "rocm"), evidence="--layer-split"),
        Capability(id="vision-request-path", title="requests with images", platforms=("cuda", "rocm", "metal", "cpu"), evidence="--vision; the encoder is a process of its own and may compute on the CPU"),
        Capability(id="vision-encoder", title="image encoder on this back end", platforms=("cuda", "metal", "cpu"), evidence="strata-vision: on AMD a CPU encoder on Linux, none on Windows"),
        Capability(id="split-points", title="split at chosen layers", platforms=("cuda", "rocm"), evidence="--layer-split K[,K2..]"),
        Capability(id="split-staged-copies", title="hand-over between cards through host memory", platforms=("cuda", "rocm"),
                   evidence="docs/MULTI_GPU.md: no peer access needed or used"),
        Capability(id="expert-mmap", title="experts read from the file mapping", platforms=("cuda", "rocm"), evidence="--mmap-experts"),
        Capability(id="rope-extension", title="context beyond the trained length", platforms=("cuda", "rocm", "sycl"), evidence="--rope-scaling"),
    ),
    titles={
        "split-row": "split of weight rows over devices",
        "split-tensor": "tensor-parallel split",
        "disk-borrowed-weights": "weights read in place from the file mapping",
    },
)  # fmt: skip

#: Every knob that ``resolve.py`` and ``plan.py`` take from a launch, and those ``conflicts.py`` says it has nothing for.
READS = frozenset({
    "model.path", "model.mmproj", "model.draft", "model.adapters", "device.kind", "device.ids", "device.main", "context.length", "context.sequences",
    "context.batch", "context.micro_batch", "context.prefill", "context.flash_attention", "context.full_window", "context.unified", "kv.key_type",
    "kv.value_type", "kv.on_device", "kv.resident", "kv.blocks", "kv.block_size", "kv.memory", "layers.on_device", "layers.split", "layers.ratio",
    "layers.first", "layers.overrides", "experts.on_host", "experts.stream", "experts.slots", "experts.slot_size", "experts.cache", "vision.enabled",
    "vision.device", "vision.max_tokens", "speculation.kind", "speculation.window", "memory.reserve", "memory.load", "memory.prefault", "memory.pinned",
})  # fmt: skip


class Strata:
    """Strata, its server and its setup."""

    name = "strata"
    aliases = ("strata-engine",)
    newest = "0.1.41"
    reads = READS
    programs = ("strata", "START-HERE.bat")
    capabilities = CAPABILITIES

    def read(self, argv: Sequence[str], environ: Mapping[str, str], *, version: str | None) -> Launch:
        """Read a command line of the engine or of its setup. See :class:`residency.engines.base.Engine`."""
        from residency.engines.base import program_name

        from .argv import read_argv

        return read_argv(argv, environ, version=version or self.newest, given=version, program=program_name(argv[0]))

    def option_problem(self, name: str, value: Any, *, version: str) -> str | None:
        """Return why an entry of ``[engine.options]`` is wrong, or None."""
        from .argv import option_problem

        return option_problem(name, value, version=version)

    def version_problem(self, version: str) -> str | None:
        """Return why a text is no version of this engine, or None when it is one."""
        if re.fullmatch(r"v?\d{1,3}\.\d{1,4}(\.\d{1,6}){0,2}[a-z]?", version.strip()):
            return None
        return f"its versions are written like {self.newest}"

    def plan(self, launch: Launch, models: Models, machine: Machine, *, version: str) -> Budget:
        """Lay a launch out. See :class:`residency.engines.base.Engine`."""
        from .plan import plan

        return plan(launch, models, machine, version=version)

    def spell(self, launch: Launch, knob: str, value: Any) -> str | None:
        """Return a change in the words of the command line the user typed."""
        from .argv import spell

        return spell(launch, knob, value)


ENGINE = Strata()


@hookimpl
def residency_engines() -> list[Strata]:
    """Return this plugin's engine."""
    return [ENGINE]
