"""The budget: which bytes land in which pool, in the order the engine makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from .machine.model import usable_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .machine.model import Machine, Pool
    from .ways import Way


class Purpose(StrEnum):
    """What an allocation is for (DESIGN 4.3)."""

    WEIGHTS = "weights"
    EXPERTS = "experts"
    EXPERT_CACHE = "expert-cache"
    KV = "kv"
    STATE = "state"
    COMPUTE = "compute"
    VISION = "vision"
    DRAFT = "draft"
    STAGING = "staging"
    RUNTIME = "runtime"
    RESERVE = "reserve"


class Phase(StrEnum):
    """When an allocation happens; the order of the members is the order of time."""

    BEFORE = "before"  # before the engine's own first allocation (encoder process, driver context)
    LOAD = "load"
    CONTEXT = "context"
    WARM_UP = "warm-up"
    FIRST_FORWARD = "first-forward"
    RUN_TIME = "run-time"


Backing = Literal["device", "anonymous", "pinned", "locked", "mapped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """One allocation, or a group the engine makes together.

    ``certain <= likely <= at_most``. Memory mapped from a file (``backing="mapped"``) is page
    cache the kernel may drop, so its certain and likely bytes are 0 and ``at_most`` is its size. A
    row of purpose ``RESERVE`` runs the other way: it is what the rest leaves of the reserve.
    """

    pool: str
    purpose: Purpose
    name: str
    phase: Phase
    certain_bytes: int
    likely_bytes: int
    at_most_bytes: int
    device: str | None = None
    backing: Backing = "device"
    knob: str | None = None  # the knob that moves it most
    largest_name: str | None = None  # the largest tensor in it; an allocation of its own when there are several pieces
    largest_bytes: int | None = None
    pieces: int = 1
    accounted: bool = True  # False: the engine itself does not budget these bytes
    greedy: bool = False  # it takes what is left: free memory less the reserve, read when it is made
    evidence: str | None = None  # where the figure comes from

    def __post_init__(self) -> None:
        """Refuse bytes that cannot be: a negative sum would hide a pool that is over. Raises ValueError."""
        certain, likely, most = self.certain_bytes, self.likely_bytes, self.at_most_bytes
        if certain < 0 or likely < 0 or most < 0 or (self.purpose is not Purpose.RESERVE and not certain <= likely <= most):
            raise ValueError(f"{self.name} in {self.pool}: certain {certain}, likely {likely}, at most {most} bytes are no allocation")

    @classmethod
    def exact(cls, pool: str, purpose: Purpose, name: str, phase: Phase, size_bytes: int, **more: Any) -> Allocation:
        """Return an allocation whose three numbers are the same."""
        return cls(
            pool=pool, purpose=purpose, name=name, phase=phase,
            certain_bytes=size_bytes, likely_bytes=size_bytes, at_most_bytes=size_bytes, **more,
        )

    @classmethod
    def mapped(cls, pool: str, purpose: Purpose, name: str, size_bytes: int, **more: Any) -> Allocation:
        """Return file-backed memory: page cache that may be dropped."""
        return cls(
            pool=pool, purpose=purpose, name=name, phase=Phase.LOAD,
            certain_bytes=0, likely_bytes=0, at_most_bytes=size_bytes, backing="mapped", **more,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of DESIGN 4.3."""
        return {
            "purpose": str(self.purpose),
            "name": self.name,
            "phase": str(self.phase),
            "device": self.device,
            "backing": self.backing,
            "certain_bytes": self.certain_bytes,
            "likely_bytes": self.likely_bytes,
            "at_most_bytes": self.at_most_bytes,
        }


RemarkKind = Literal[
    "impossible",  # the engine refuses to start with this: veto
    "fails-late",  # it starts and dies later: veto
    "inert",  # accepted, does nothing: warn
    "unknown-setting",  # this version does not know it: veto
    "conflict",  # two settings exclude each other: veto
    "risk",  # works, with a known danger: warn
    "unverified",  # works, but its correctness is not established: warn
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """Something only the engine's own model can see about a launch; rules judge it."""

    kind: RemarkKind
    code: str  # slug: "override-matches-nothing", ...
    message: str
    knob: str | None = None
    value: Any = None
    pool: str | None = None
    device: str | None = None
    capability: str | None = None  # missing capability, if that is the reason
    need_bytes: int | None = None
    have_bytes: int | None = None
    ways: tuple[Way, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """A required fact the engine model does not have; ends in "cannot tell"."""

    what: str  # "memory module of architecture foo"
    why: str
    pool: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSum:
    """One pool's totals."""

    pool: Pool
    certain_bytes: int
    likely_bytes: int
    at_most_bytes: int
    allocations: tuple[Allocation, ...]

    @property
    def usable_bytes(self) -> int | None:
        """What the launch may take here; a ceiling is compared with the devices' part alone. None: unknown."""
        return usable_bytes(self.pool, host_bytes=self.host_bytes)

    @property
    def host_bytes(self) -> int:
        """Likely bytes that no accelerator uses."""
        return sum(a.likely_bytes for a in self.allocations if a.device in (None, "CPU"))

    @property
    def reserve_bytes(self) -> int:
        """Likely bytes that are only kept free; what else may need them is counted here too."""
        return sum(a.likely_bytes for a in self.allocations if a.purpose is Purpose.RESERVE)

    def first_over(self, limit_bytes: int, *, number: Literal["certain", "likely", "at_most"] = "likely") -> tuple[Allocation, int] | None:
        """Return the first allocation that does not fit under the limit, and what stood before it."""
        committed = 0
        for allocation in self.allocations:
            size = getattr(allocation, f"{number}_bytes")
            if committed + size > limit_bytes:
                return allocation, committed
            committed += size
        return None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """All allocations in the engine's order, what the engine's model remarks, and what it cannot tell."""

    allocations: tuple[Allocation, ...]
    remarks: tuple[Remark, ...] = ()
    unknowns: tuple[Unknown, ...] = ()
    ways: tuple[Way, ...] = ()  # changes that move bytes in this engine, most useful first
    narrowing: tuple[Way, ...] = ()  # changes that move "at most" bytes alone, tried for the warning about them
    in_order: bool = False  # the allocations already stand in the order of time
    facts: Mapping[str, Any] = field(default_factory=dict)  # resolved values for display: n_ctx, layers per device, ...

    @cached_property
    def ordered(self) -> tuple[Allocation, ...]:
        """Allocations by phase, then in the order given."""
        if self.in_order:
            return self.allocations
        rank = {phase: i for i, phase in enumerate(Phase)}
        return tuple(sorted(self.allocations, key=lambda a: rank[a.phase]))

    def sums(self, machine: Machine) -> tuple[PoolSum, ...]:
        """Return one sum per pool of the machine, in the machine's order."""
        known = self.__dict__.get("_sums")  # every rule about pools asks for the same sums
        if known is not None and known[0] is machine:
            found_before: tuple[PoolSum, ...] = known[1]
            return found_before
        sums = self._sum(machine)
        self.__dict__["_sums"] = (machine, sums)
        return sums

    def _sum(self, machine: Machine) -> tuple[PoolSum, ...]:
        found: dict[str, list[Allocation]] = {pool.name: [] for pool in machine.pools}
        for allocation in self.ordered:
            found.setdefault(allocation.pool, []).append(allocation)
        from .machine.model import Pool

        return tuple(
            PoolSum(
                pool=machine.pool(name) or Pool(name=name),
                certain_bytes=sum(a.certain_bytes for a in rows),
                likely_bytes=sum(a.likely_bytes for a in rows),
                at_most_bytes=sum(a.at_most_bytes for a in rows),
                allocations=tuple(rows),
            )
            for name, rows in found.items()
        )
