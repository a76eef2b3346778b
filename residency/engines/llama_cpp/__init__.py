"""The engines llama.cpp and ik_llama.cpp: their programs, capabilities and memory layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from residency.engines.base import Capability, CapabilityTable, program_name
from residency.plugins import hookimpl

from .history import CHANGES, IK, UPSTREAM

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
        Capability(id="split-tensor", title="tensor-parallel split", platforms=("cuda", "rocm"), since="0.0.8738",
                   evidence="https://github.com/ggml-org/llama.cpp/pull/19378, merged in April 2026; a b8863 has it: https://github.com/mixa3607/ML-gfx906/issues/18"),
        Capability(id="pipeline-fallback", title="second try without pipeline copies", since=CHANGES["copies-fall-back"][UPSTREAM].since,
                   evidence=CHANGES["copies-fall-back"][UPSTREAM].evidence),
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

#: Every knob that ``resolve.py``, ``plan.py``, ``companions.py``, ``remarks.py`` and ``layout.py`` take from a launch.
READS = frozenset({
    "model.path", "model.mmproj", "model.draft", "model.adapters", "device.kind", "device.ids", "device.main", "context.length", "context.sequences",
    "context.unified", "context.batch", "context.micro_batch", "context.flash_attention", "context.full_window", "kv.key_type", "kv.value_type",
    "kv.on_device", "layers.on_device", "layers.split", "layers.ratio", "layers.overrides", "experts.on_host", "vision.device", "vision.max_tokens",
    "speculation.kind", "speculation.window", "memory.load",
})  # fmt: skip


class LlamaCpp:
    """llama.cpp and the programs built with it."""

    name = "llama.cpp"
    aliases: tuple[str, ...] = ("llamacpp", "llama-cpp")
    newest = "0.5.0"
    reads: frozenset[str] = READS
    programs: tuple[str, ...] = ("llama-server", "llama-cli", "llama-completion", "llama-fit-params", "llama-mtmd-cli", "llama-bench")
    capabilities = CAPABILITIES

    def read(self, argv: Sequence[str], environ: Mapping[str, str], *, version: str | None) -> Launch:
        """Read a command line of one of the programs. See :class:`residency.engines.base.Engine`."""
        from .argv import older_flag, read_argv
        from .version import last_before, normal

        program = program_name(argv[0])
        known = next((p for p in LlamaCpp.programs if program == p or program.startswith(f"{p}-")), "llama-server")
        if known == "llama-bench":
            from .bench_argv import read_bench

            return read_bench(argv, environ, version=normal(version or self.newest, self.name), given=version, fork=self.name)
        older = older_flag(argv, version=normal(self.newest, self.name), fork=self.name) if version is None else None
        if older is not None:
            name, until = older
            judged = last_before(until)
            launch = read_argv(argv, environ, version=normal(judged, self.name), given=None, fork=self.name, program=known)
            return replace(launch, version=judged, version_reason=f"the newest with {name}")
        return read_argv(argv, environ, version=normal(version or self.newest, self.name), given=version, fork=self.name, program=known)

    def option_problem(self, name: str, value: Any, *, version: str) -> str | None:
        """Return why an entry of ``[engine.options]`` is wrong, or None."""
        from .argv import option_problem
        from .version import normal

        return option_problem(name, value, version=normal(version, self.name), fork=self.name)

    def version_problem(self, version: str) -> str | None:
        """Return why a text is no version of this engine, or None when it is one."""
        from .version import problem

        return problem(version)

    def ordered_version(self, version: str) -> str:
        """Return a version in the form :func:`residency.engines.base.version_in` can compare."""
        from .version import normal

        return normal(version, self.name)

    def plan(self, launch: Launch, models: Models, machine: Machine, *, version: str) -> Budget:
        """Lay a launch out. See :class:`residency.engines.base.Engine`."""
        from .plan import plan
        from .version import normal

        return plan(launch, models, machine, version=normal(version, self.name), engine=self.name)

    def spell(self, launch: Launch, knob: str, value: Any) -> str | None:
        """Return a change in the words of the command line the user typed, or None for a launch file."""
        from .argv import spell

        return spell(knob, value) if launch.program is not None else None


class IkLlamaCpp(LlamaCpp):
    """The fork ik_llama.cpp: the same programs and laws, and what :mod:`.history` says is different.

    Its programs carry llama.cpp's names, so it has to be named: ``--engine ik_llama.cpp``.
    """

    name = IK
    aliases = ("ik-llama.cpp", "ik_llama", "ik-llama", "ikllama")
    newest = "3956"
    programs = ()
    capabilities = CapabilityTable(
        rows=(
            *(row for row in CAPABILITIES.rows if row.id not in ("split-row", "split-tensor", "pipeline-fallback")),
            Capability(id="split-row", title="split of weight rows over devices", platforms=("cuda", "rocm"), evidence="--split-mode row, its README"),
            Capability(id="split-tensor", title="tensor-parallel split", platforms=("cuda",), evidence="--split-mode graph, https://github.com/ikawrakow/ik_llama.cpp/pull/1080"),
            Capability(id="pipeline-fallback", title="second try without pipeline copies", since=CHANGES["copies-fall-back"][IK].since,
                       evidence=CHANGES["copies-fall-back"][IK].evidence),
        ),
        titles=CAPABILITIES.titles,
    )  # fmt: skip


ENGINES = (LlamaCpp(), IkLlamaCpp())


@hookimpl
def residency_engines() -> list[LlamaCpp]:
    """Return this plugin's engines."""
    return list(ENGINES)
