"""Several launches on one machine at the same time: their sum per pool is what must fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from residency.budget import Budget
from residency.engines.base import CapabilityTable
from residency.judge import Case, judge, plan
from residency.launch.knobs import Knobs
from residency.launch.model import Launch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.budget import Allocation
    from residency.engines.base import Models
    from residency.machine.model import Machine
    from residency.report.model import Report

#: The one rule that means something about a sum.
RULE = "memory-budget/pools"


@dataclass(kw_only=True)
class _Sum:
    """Stands in for an engine: its plan is the sum of plans made before."""

    budget: Budget
    name: str = "together"
    aliases: tuple[str, ...] = ()
    newest: str = ""
    programs: tuple[str, ...] = ()
    capabilities: CapabilityTable = field(default_factory=lambda: CapabilityTable(rows=()))

    def read(self, argv: Sequence[str], environ: Mapping[str, str], *, version: str | None) -> Launch:
        """Not a door for command lines."""
        raise NotImplementedError

    def option_problem(self, name: str, value: Any, *, version: str) -> str | None:
        """Return nothing: a sum has no options."""
        del name, value, version
        return None

    def plan(self, launch: Launch, models: Models, machine: Machine, *, version: str) -> Budget:
        """Return the sum."""
        del launch, models, machine, version
        return self.budget


def heaviest(cases: Sequence[Case], most: int | None) -> list[tuple[Case, Budget]]:
    """Return the launches of the worst combination: for every pool, the ``most`` that need most of it."""
    planned = [(case, plan(case)) for case in cases]
    if most is None or most >= len(planned):
        return planned
    chosen: dict[int, None] = {}
    for pool in cases[0].machine.pools:
        need = [sum(a.likely_bytes for a in b.allocations if a.pool == pool.name) for _, b in planned]
        ranked = sorted(range(len(planned)), key=lambda i: -need[i])[:most]
        if not chosen or sum(need[i] for i in ranked) > sum(need[i] for i in chosen):
            chosen = dict.fromkeys(ranked)
    return [planned[i] for i in sorted(chosen)]


def judge_together(cases: Sequence[Case], *, most: int | None = None) -> Report:
    """Return the report on launches that run at the same time; at most ``most`` of them at once."""
    picked = heaviest(cases, most)
    rows: list[Allocation] = []
    for case, budget in picked:
        rows += [replace(a, name=f"{case.launch.name}: {a.name}", knob=None) for a in budget.ordered]
    merged = Budget(
        allocations=tuple(rows),
        in_order=True,
        unknowns=tuple(u for _, b in picked for u in b.unknowns),
    )
    first = cases[0]
    names = " + ".join(case.launch.name for case, _ in picked)
    rules = tuple(r for r in first.plugins.rules if r.id == RULE)
    together = Case(
        launch=Launch(engine="together", version="", knobs=Knobs(), name=f"{len(picked)} launches at once: {names}"),
        models=first.models,
        machine=first.whole or first.machine,
        engine=_Sum(budget=merged),
        policy=replace(first.policy, require=(RULE,)),
        plugins=replace(first.plugins, rules=rules),
    )
    return judge(together, ways_out=False)
