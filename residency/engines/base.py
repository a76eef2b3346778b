"""The engine door: what an engine package must provide, and its capability table.

Engines are found through the plugin hook ``residency_engines`` like everything else. An engine
reads its own command line into a Launch, knows what it can do per device platform and version,
and lays a launch out into a Budget. It never touches the machine: it works on values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.budget import Budget
    from residency.checkpoint.model import Checkpoint
    from residency.launch.model import Launch
    from residency.machine.model import Device, Machine


@lru_cache(maxsize=256)
def version_key(text: str) -> tuple[int, ...]:
    """Return the numbers of a version for comparison: "0.1.40.3" -> (0, 1, 40, 3), "b4610" -> (4610,).

    A trailing letter counts as one more step ("0.1.39b" is after "0.1.39"). Pre-release tags are
    not told apart: engine versions in the field are build numbers and dotted triples.
    """
    found: list[int] = []
    for number, letter in re.findall(r"(\d+)([a-z](?![a-z]))?", text.casefold()):
        found.append(int(number))
        if letter:
            found.append(ord(letter) - 96)
    return tuple(found)


def version_in(version: str, since: str | None, until: str | None) -> bool:
    """Whether since <= version < until; an absent bound does not bind."""
    key = version_key(version)
    if since is not None and key < version_key(since):
        return False
    return until is None or key < version_key(until)


def program_name(path: str) -> str:
    """Return the program of argv[0] without folders and ".exe"."""
    name = path.replace("\\", "/").rsplit("/", 1)[-1]
    return name[:-4] if name.casefold().endswith(".exe") else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """One thing an engine can or cannot do, per platform and version range."""

    id: str  # "device-expert-slots"
    title: str  # what messages print: "device-side expert slot store"
    platforms: tuple[str, ...] = ("*",)  # platform ids, see ``platform_of``; "*" = every one
    since: str | None = None
    until: str | None = None  # exclusive
    evidence: str = ""  # link or document
    unverified: str | None = None  # present but its correctness gate fails: why


def platform_of(device: Device | None) -> str:
    """Return the capability platform of a device: "cpu", "cuda-integrated", "cuda-discrete", "cuda", "metal", ...

    ``integrated`` unknown gives the bare kind, which matches only rows written for every cuda device.
    """
    if device is None or device.kind == "cpu":
        return "cpu"
    if device.kind in ("cuda", "rocm", "vulkan", "sycl") and device.integrated is not None:
        return f"{device.kind}-{'integrated' if device.integrated else 'discrete'}"
    return device.kind


@dataclass(frozen=True, kw_only=True)
class CapabilityTable:
    """Every capability an engine has or is known to lack somewhere. Data, read by one function."""

    rows: tuple[Capability, ...]
    titles: Mapping[str, str] = field(default_factory=dict)  # ids the engine has nowhere

    def title(self, capability: str) -> str:
        """Return the human title of a capability id."""
        for row in self.rows:
            if row.id == capability:
                return row.title
        return self.titles.get(capability, capability.replace("-", " "))

    def find(self, capability: str, platform: str, version: str) -> Capability | None:
        """Return the row that grants the capability there, or None."""
        for row in self.rows:
            if row.id != capability or not version_in(version, row.since, row.until):
                continue
            for wanted in row.platforms:
                if wanted in ("*", platform) or platform.startswith(wanted + "-"):
                    return row
        return None

    def known(self, capability: str) -> bool:
        """Whether the table says anything about the id. An id it does not know is *unknown*, not absent."""
        return capability in self.titles or any(row.id == capability for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Models:
    """The checkpoints of a launch: the main model and its companions, read or absent."""

    main: Checkpoint | None = None
    mmproj: Checkpoint | None = None
    draft: Checkpoint | None = None
    adapters: tuple[Checkpoint, ...] = ()  # LoRA, control vectors

    def all(self) -> tuple[Checkpoint, ...]:
        """Return every checkpoint there is."""
        return tuple(c for c in (self.main, self.mmproj, self.draft, *self.adapters) if c is not None)


@runtime_checkable
class Engine(Protocol):
    """What an engine package provides. A class or module-level object with these members."""

    name: str  # "llama.cpp"
    aliases: tuple[str, ...]  # other names accepted by --engine
    newest: str  # the newest version this package knows, used when none is given
    programs: tuple[str, ...]  # program names, without path or ".exe"
    capabilities: CapabilityTable

    def read(self, argv: Sequence[str], environ: Mapping[str, str], *, version: str | None) -> Launch:
        """Read the engine's own command line and environment. argv[0] is the program.

        Raises InputError with every problem found, each with its argv position or variable.
        """
        ...

    def option_problem(self, name: str, value: Any, *, version: str) -> str | None:
        """Return why ``[engine.options] name = value`` of a launch file is wrong, or None."""
        ...

    def plan(self, launch: Launch, models: Models, machine: Machine, *, version: str) -> Budget:
        """Lay the launch out. Pure: reads nothing but its arguments."""
        ...

    # An engine may also have these; the core asks for them by name:
    # ``version_problem(version) -> str | None``: why a text is no version of this engine; None when it is one.
    # ``ordered_version(version) -> str``: the form that ``version_in`` can compare.
    # ``spell(launch, knob, value) -> str | None``: a change in the words the user typed.
    # ``reads: frozenset[str]``: every knob it takes from a launch, or answers with a remark; others are reported as without effect.


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """An engine at one version, as rules see it.

    It has no name a rule could branch on by accident; ``label`` is for messages only.
    """

    label: str  # "vllm.cpp 2026.08"
    version: str
    version_given: bool
    capabilities: CapabilityTable
    reads: frozenset[str] | None = None  # the knobs the engine reads; None: it does not say

    def row(self, capability: str, device: Device | None) -> Capability | None:
        """Return the row that grants a capability on a device, or None."""
        return self.capabilities.find(capability, platform_of(device), self.version)

    def has(self, capability: str, device: Device | None) -> bool:
        """Whether the engine is known to have it there."""
        return self.row(capability, device) is not None

    def lacks(self, capability: str, device: Device | None) -> bool:
        """Whether the engine is known to lack it there; an id its table does not know is not lacking."""
        return self.capabilities.known(capability) and self.row(capability, device) is None

    def title(self, capability: str) -> str:
        """Return the capability's title for messages."""
        return self.capabilities.title(capability)


#: Devices an engine places a launch on, for rules: ("device", "pool") pairs in the engine's order.
Placement = tuple[tuple[str, str], ...]
Verdict = Literal["allow", "veto", "no-verdict"]
