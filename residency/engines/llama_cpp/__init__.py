"""The engine llama.cpp: its programs, capabilities and memory layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.engines.base import Capability, CapabilityTable, program_name
from residency.plugins import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.budget import Budget
    from residency.engines.base import Models
    from residency.launch.model import Launch
    from residency.machine.model import Machine

CAPABILITIES = CapabilityTable(
    rows=(
        Capability(id="disk-borrowed-weights", title="weights read in place from the file mapping", platforms=("cpu", "metal"),
                   evidence="llama.cpp 0.5.0, src/llama-model.cpp: mapped buffers for the CPU, buffer_from_host_ptr for Metal"),
        Capability(id="expert-placement", title="experts computed on the CPU", evidence="--cpu-moe, --n-cpu-moe"),
        Capability(id="split-layer", title="split of whole layers over devices", evidence="--split-mode layer"),
        Capability(id="split-row", title="split of weight rows over devices", platforms=("cuda", "rocm", "sycl"), until="0.5.0",
                   evidence="the CUDA back end of 0.5.0 exports no split buffer type: src/llama-model.cpp throws"),
        Capability(id="split-row", title="split of weight rows over devices", platforms=("sycl",), since="0.5.0",
                   evidence="ggml_backend_split_buffer_type in ggml-sycl only"),
        Capability(id="split-tensor", title="tensor-parallel split", platforms=("cuda", "rocm"), since="0.5.0", evidence="--split-mode tensor"),
        Capability(id="kv-on-host", title="KV cache in host memory", evidence="--no-kv-offload"),
        Capability(id="vision-request-path", title="requests with images", evidence="--mmproj"),
        Capability(id="vision-encoder", title="image encoder on this back end", evidence="tools/mtmd"),
    ),
    titles={
        "device-expert-slots": "device-side expert slot store",
        "host-expert-slots": "host expert slot store",
        "kv-streaming": "KV cache streamed from host memory",
    },
)  # fmt: skip


class LlamaCpp:
    """llama.cpp and the programs built with it."""

    name = "llama.cpp"
    aliases = ("llamacpp", "llama-cpp")
    newest = "0.5.0"
    programs = ("llama-server", "llama-cli", "llama-completion", "llama-fit-params", "llama-mtmd-cli", "llama-bench")
    capabilities = CAPABILITIES

    def read(self, argv: Sequence[str], environ: Mapping[str, str], *, version: str | None) -> Launch:
        """Read a command line of one of the programs. See :class:`residency.engines.base.Engine`."""
        from .argv import read_argv
        from .version import normal

        program = program_name(argv[0])
        known = next((p for p in self.programs if program == p or program.startswith(f"{p}-")), "llama-server")
        return read_argv(argv, environ, version=normal(version or self.newest), given=version, fork=self.name, program=known)

    def option_problem(self, name: str, value: Any, *, version: str) -> str | None:
        """Return why an entry of ``[engine.options]`` is wrong, or None."""
        from .argv import option_problem
        from .version import normal

        return option_problem(name, value, version=normal(version), fork=self.name)

    def plan(self, launch: Launch, models: Models, machine: Machine, *, version: str) -> Budget:
        """Lay a launch out. See :class:`residency.engines.base.Engine`."""
        from .plan import plan
        from .version import normal

        return plan(launch, models, machine, version=normal(version))

    def spell(self, launch: Launch, knob: str, value: Any) -> str | None:
        """Return a change in the words of the command line the user typed, or None for a launch file."""
        from .argv import spell

        return spell(knob, value) if launch.program is not None else None


ENGINE = LlamaCpp()


@hookimpl
def residency_engines() -> list[LlamaCpp]:
    """Return this plugin's engine."""
    return [ENGINE]
