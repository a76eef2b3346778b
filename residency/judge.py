"""Judging: values in, a Report out. Everything has been read before this module is called."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from residency.budget import Allocation, Budget, Phase, Purpose, Unknown
from residency.engines.base import EngineView
from residency.errors import describe
from residency.report.model import Report
from residency.rules.finding import Finding, Fix, Outcome
from residency.rules.rule import Facts
from residency.rules.runner import apply_policy, run_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import date

    from residency.engines.base import Engine, Models
    from residency.launch.model import Launch
    from residency.machine.model import Machine
    from residency.plugins import PluginSet
    from residency.policy.model import Policy
    from residency.ways import Way

#: Re-evaluations one report may spend on looking for ways out. At about 2 ms each this keeps a
#: refusal well under half a second.
TRIALS = 96
#: Verified ways out offered per finding; more would be a menu, not advice.
OFFERED = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch with everything needed to judge it."""

    launch: Launch
    models: Models
    machine: Machine
    engine: Engine
    policy: Policy
    plugins: PluginSet
    whole: Machine | None = None  # the machine without the limits of this launch's container or variables

    @property
    def version(self) -> str:
        """The engine version judged: the one given, else the newest known."""
        return self.launch.version or self.engine.newest

    @property
    def view(self) -> EngineView:
        """The engine as rules see it."""
        ordered = getattr(self.engine, "ordered_version", None)
        return EngineView(
            label=f"{self.engine.name} {self.version}",
            version=ordered(self.version) if ordered is not None else self.version,
            version_given=self.launch.version is not None and self.launch.version_reason is None,
            capabilities=self.engine.capabilities,
        )


def plan(case: Case) -> Budget:
    """Return the budget of a case; an engine that breaks ends in an unknown, never in an approval."""
    if case.models.main is None:
        why = "the launch names no model file" if case.launch.get("model.path") is None else "its file was not read"
        return Budget(allocations=(), unknowns=(Unknown(what="the model", why=why),))
    try:
        budget = case.engine.plan(case.launch, case.models, case.machine, version=case.version)
    except Exception as error:  # noqa: BLE001 - an engine plugin's fault must end in "no verdict", with its name
        return Budget(
            allocations=(),
            unknowns=(Unknown(what=f"the memory plan of {case.engine.name}", why=f"its model failed: {describe(error)}"),),
        )
    return _with_reserve(budget, case)


def _with_reserve(budget: Budget, case: Case) -> Budget:
    """Add the launch's own reserve on every device pool, unless the engine has placed it itself."""
    reserve = case.launch.get("memory.reserve")
    if not reserve or any(a.purpose is Purpose.RESERVE for a in budget.allocations):
        return budget
    pools = {d.pool: d for d in case.machine.accelerators}
    rows = []
    for name in dict.fromkeys(a.pool for a in budget.allocations):
        pool = case.machine.pool(name)
        if pool is None or name not in pools:
            continue
        size = reserve if isinstance(reserve, int) else int((pool.total_bytes or 0) * float(reserve) / 100)
        rows.append(
            Allocation.exact(name, Purpose.RESERVE, "reserve asked for", Phase.RUN_TIME, size, knob="memory.reserve")
        )
    return replace(budget, allocations=(*budget.allocations, *rows))


def _facts(case: Case, budget: Budget) -> Facts:
    return Facts(
        launch=case.launch, models=case.models, machine=case.machine,
        engine=case.view, budget=budget, policy=case.policy,
    )  # fmt: skip


def _evaluate(case: Case, today: date) -> tuple[Budget, tuple[Finding, ...]]:
    if case.launch.starts_nothing:  # --version, --help: there is nothing to judge, and nothing that could be broken
        said = "the command line only asks the program for information; no model is loaded"
        return Budget(allocations=()), (Finding(rule="residency/launch", outcome=Outcome.APPROVE, message=said),)
    budget = plan(case)
    facts = _facts(case, budget)
    return budget, apply_policy(run_rules(facts, case.plugins), facts, case.plugins, today)


def refuses(findings: Iterable[Finding]) -> bool:
    """Whether these findings keep the engine from starting."""
    return any(f.outcome is Outcome.CANNOT_TELL or (f.outcome is Outcome.VETO and f.waived is None) for f in findings)


def judge(case: Case, *, today: date | None = None, started: float | None = None, ways_out: bool = True) -> Report:
    """Return the report on one launch.

    Args:
        case: the launch and everything read for it.
        today: the date waivers are compared with; default: the clock's.
        started: ``time.perf_counter()`` when reading began, for the elapsed time shown.
        ways_out: whether to search for changes that pass (costs re-evaluations when refused).
    """
    started = time.perf_counter() if started is None else started
    if today is None:
        from datetime import date as calendar

        today = calendar.today()  # noqa: DTZ011 - a waiver ends at the fleet's local midnight
    budget, findings = _evaluate(case, today)
    findings = tuple(_completed(f, case) for f in findings)
    if ways_out and any(f.outcome in (Outcome.VETO, Outcome.WARN) and f.ways for f in findings):
        findings = _with_fixes(case, findings, today)
    return Report(
        findings=findings, budget=budget, launch=case.launch, models=case.models, machine=case.machine,
        engine=case.view, engine_name=case.engine.name, plugins=case.plugins, policy=case.policy,
        seconds=time.perf_counter() - started,
    )  # fmt: skip


def _completed(finding: Finding, case: Case) -> Finding:
    """Fill in what the core knows: the knob's value and position, the capability's title."""
    changes: dict[str, Any] = {}
    if finding.knob is not None and finding.where is None:
        changes["where"] = case.launch.where(finding.knob)
        if finding.value is None:
            changes["value"] = case.launch.setting(finding.knob)
    if finding.missing is not None and finding.missing_title is None:
        changes["missing_title"] = case.view.title(finding.missing)
    return replace(finding, **changes) if changes else finding


class _Trials:
    """Re-evaluates the launch with one change, remembering what was tried and how much is left."""

    def __init__(self, case: Case, today: date, left: int = TRIALS) -> None:
        self.case, self.today, self.left = case, today, left
        self.known: dict[tuple[str, str], tuple[Finding, ...]] = {}
        self.over: dict[tuple[str, str], int] = {}

    def findings(self, knob: str, value: Any) -> tuple[Finding, ...] | None:
        """Return the findings of the changed launch, or None when the trials are used up."""
        key = (knob, repr(value))
        if key not in self.known:
            if self.left <= 0:
                return None
            self.left -= 1
            changed = replace(self.case, launch=self.case.launch.with_value(knob, value))
            budget, self.known[key] = _evaluate(changed, self.today)
            self.over[key] = _excess(budget, changed)
        return self.known[key]

    def excess(self, knob: str, value: Any) -> int:
        """Return by how many bytes the fullest pool of a launch tried before is over; negative: what is left."""
        return self.over.get((knob, repr(value)), 0)

    def passes(self, knob: str, value: Any) -> bool:
        """Whether the changed launch is allowed."""
        findings = self.findings(knob, value)
        return findings is not None and not refuses(findings)

    def silences(self, knob: str, value: Any, rule: str, pool: str | None) -> bool:
        """Whether the changed launch at least no longer has this veto."""
        findings = self.findings(knob, value)
        return findings is not None and not any(
            f.rule == rule and f.pool == pool and f.outcome in (Outcome.VETO, Outcome.CANNOT_TELL) for f in findings
        )


def _excess(budget: Budget, case: Case) -> int:
    rooms = [
        found.likely_bytes - usable + case.policy.margin_of(found.pool.name, found.pool.total_bytes or 0)
        for found in budget.sums(case.machine)
        if found.allocations and (usable := found.usable_bytes) is not None
    ]
    return max(rooms, default=0)


#: Steps guessed from the bytes before plain halving takes over; memory is nearly linear in most knobs.
_GUESSES = 6


def nearest_passing(way: Way, passes: Callable[[int], bool], excess: Callable[[int], int] = lambda _value: 0) -> int | None:
    """Return the passing multiple of the way's step nearest to its preferred end; None if there is none.

    Assumes that passing is monotone between the two ends; the caller verifies the value itself. ``excess`` tells by
    how many bytes a value tried before is over, so that the next one can be guessed instead of halved.
    """
    assert way.low is not None
    low, high = -(-way.low // way.step), int(way.value) // way.step
    if low > high:
        return None
    # "safe" is the end that passes if anything does; "wanted" is the end the user would rather have.
    safe, wanted = (low, high) if way.prefer == "largest" else (high, low)
    if passes(wanted * way.step):
        return wanted * way.step
    if not passes(safe * way.step):
        return None
    guesses = 0
    while abs(wanted - safe) > 1:
        over, under = excess(wanted * way.step), -excess(safe * way.step)
        middle = (safe + wanted) // 2
        if guesses < _GUESSES and over > 0 and under > 0:
            guess = safe + round((wanted - safe) * under / (over + under))
            middle = min(max(guess, min(safe, wanted) + 1), max(safe, wanted) - 1)
            guesses += 1
        if passes(middle * way.step):
            safe = middle
            # A guess that passes is usually the answer: look at its neighbour before anything else.
            step = 1 if wanted > safe else -1
            if guesses and abs(wanted - safe) > 1:
                if passes((safe + step) * way.step):
                    safe += step
                else:
                    wanted = safe + step
        else:
            wanted = middle
    return safe * way.step


def nearest(case: Case, *, today: date | None = None) -> tuple[Fix, ...]:
    """Return single changes with which the launch is allowed, each the nearest of its kind, most useful first.

    For a launch that is allowed as it is: how far its context could still be raised.
    """
    if today is None:
        from datetime import date as calendar

        today = calendar.today()  # noqa: DTZ011 - as in judge
    budget, findings = _evaluate(case, today)
    allowed = not refuses(findings)
    ways = [way for finding in findings for way in finding.ways] if not allowed else []
    trials = _Trials(case, today)
    spell = getattr(case.engine, "spell", None)
    found: dict[str, Fix] = {}
    for way in (*budget.ways, *ways):
        if way.knob in found or (allowed and way.knob != "context.length"):
            continue
        value = way.value
        if allowed:
            value = _furthest(way, trials)
        elif way.low is not None:
            value = nearest_passing(way, lambda v, k=way.knob: trials.passes(k, v), lambda v, k=way.knob: trials.excess(k, v))  # type: ignore[misc]
        if value is None or not trials.passes(way.knob, value):
            continue
        spelling = spell(case.launch, way.knob, value) if spell is not None else None
        found[way.knob] = Fix(knob=way.knob, value=value, verified=True, note=way.note if not allowed else "largest that passes", spelling=spelling or "")
    return tuple(found.values())


def _furthest(way: Way, trials: _Trials) -> int | None:
    """Return the largest passing value above what the launch has, by doubling and then narrowing; None: no room."""
    start = int(way.value) // way.step * way.step
    reach = start
    for _ in range(16):
        if not trials.passes(way.knob, reach * 2):
            break
        reach *= 2
    wider = replace(way, low=reach, value=reach * 2)
    found = nearest_passing(wider, lambda v: trials.passes(way.knob, v), lambda v: trials.excess(way.knob, v))
    return found if found is not None and found > start else None


def _with_fixes(case: Case, findings: tuple[Finding, ...], today: date) -> tuple[Finding, ...]:
    trials = _Trials(case, today)
    spell = getattr(case.engine, "spell", None)
    done = []
    for finding in findings:
        if finding.outcome is Outcome.VETO and finding.ways and finding.waived is None:
            fixes: list[Fix] = list(finding.fixes)
            partial: list[Fix] = []
            for way in finding.ways:
                if len(fixes) >= OFFERED:
                    break
                fix = _try(way, finding, trials)
                if fix is not None:
                    spelling = spell(case.launch, fix.knob, fix.value) if spell is not None else None
                    fix = replace(fix, spelling=spelling or "")
                    (fixes if fix.verified else partial).append(fix)
            done.append(replace(finding, fixes=(*fixes, *partial[: OFFERED - len(fixes)])))
        elif finding.outcome is Outcome.WARN and finding.ways:
            fixes = [fix for way in finding.ways[:OFFERED] if (fix := _ease(way, finding, trials)) is not None]
            done.append(replace(finding, fixes=tuple(replace(f, spelling=(spell(case.launch, f.knob, f.value) if spell else None) or "") for f in fixes)))
        else:
            done.append(finding)
    return tuple(done)


def _ease(way: Way, finding: Finding, trials: _Trials) -> Fix | None:
    """Return the way as a fix if the changed launch is allowed and this rule no longer warns; None otherwise."""
    found = trials.findings(way.knob, way.value)
    said = (Outcome.WARN, Outcome.VETO, Outcome.CANNOT_TELL)
    if found is None or refuses(found) or any(f.rule == finding.rule and f.pool == finding.pool and f.outcome in said for f in found):
        return None
    return Fix(knob=way.knob, value=way.value, verified=True, note=way.note)


def _try(way: Way, finding: Finding, trials: _Trials) -> Fix | None:
    """Return the way as a fix if it passes, or at least removes this veto; None if it does not help."""
    value = way.value
    if way.low is not None:

        def helps(candidate: int) -> bool:
            return trials.passes(way.knob, candidate)

        def removes(candidate: int) -> bool:
            return trials.silences(way.knob, candidate, finding.rule, finding.pool)

        value = nearest_passing(way, helps, lambda candidate: trials.excess(way.knob, candidate))
        if value is None:
            value = nearest_passing(way, removes)
        if value is None:
            return None
    if trials.passes(way.knob, value):
        return Fix(knob=way.knob, value=value, verified=True, note=way.note)
    if trials.silences(way.knob, value, finding.rule, finding.pool):
        note = f"{way.note}; " if way.note else ""
        return Fix(knob=way.knob, value=value, verified=False, note=f"{note}answers this refusal, others remain")
    return None
