"""The engine vllm.cpp: its programs, capabilities and memory layout.

Versions are dates of trees, see :mod:`residency.engines.vllm_cpp.versions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.plugins import hookimpl

from .capabilities import CAPABILITIES
from .versions import NEWEST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.budget import Budget
    from residency.engines.base import Models
    from residency.launch.model import Launch
    from residency.machine.model import Machine

#: Every knob that ``settings.py``, ``plan.py`` and ``remarks.py`` take from a launch.
READS = frozenset({
    "model.path", "model.mmproj", "device.kind", "device.ids", "context.length", "context.sequences", "context.batch", "kv.key_type", "kv.value_type",
    "kv.on_device", "kv.blocks", "kv.block_size", "kv.memory", "layers.split", "experts.on_host", "experts.stream", "experts.slots", "experts.slot_size",
    "speculation.kind", "speculation.window", "memory.load", "memory.prefault",
})  # fmt: skip


class VllmCpp:
    """vllm.cpp: vllm-server and vllm-cli."""

    name = "vllm.cpp"
    aliases = ("vllmcpp", "vllm-cpp")
    newest = NEWEST
    reads = READS
    programs = ("vllm-server", "vllm-cli")
    capabilities = CAPABILITIES

    def read(self, argv: Sequence[str], environ: Mapping[str, str], *, version: str | None) -> Launch:
        """Read a command line of one of the programs. See :class:`residency.engines.base.Engine`."""
        from residency.engines.base import program_name

        from .argv import read_argv

        program = program_name(argv[0])
        known = next((p for p in self.programs if program == p or program.startswith(f"{p}-")), "vllm-server")
        return read_argv(argv, environ, version=version or self.newest, given=version, program=known)

    def option_problem(self, name: str, value: Any, *, version: str) -> str | None:
        """Return why an entry of ``[engine.options]`` is wrong, or None."""
        from .argv import option_problem

        return option_problem(name, value, version=version)

    def version_problem(self, version: str) -> str | None:
        """Return why a text is no version of this engine, or None when it is one."""
        from .versions import problem

        return problem(version)

    def plan(self, launch: Launch, models: Models, machine: Machine, *, version: str) -> Budget:
        """Lay a launch out. See :class:`residency.engines.base.Engine`."""
        from .plan import plan

        return plan(launch, models, machine, version=version)

    def spell(self, launch: Launch, knob: str, value: Any) -> str | None:
        """Return a change in the words of the command line the user typed, or None for a launch file."""
        from .argv import spell

        return spell(knob, value) if launch.program is not None else None


ENGINE = VllmCpp()


@hookimpl
def residency_engines() -> list[VllmCpp]:
    """Return this plugin's engine."""
    return [ENGINE]
