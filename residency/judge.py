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
from residency.units import size
from residency.ways import Way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import date

    from residency.engines.base import Engine, Models
    from residency.launch.model import Launch
    from residency.machine.model import Machine
    from residency.plugins import PluginSet
    from residency.policy.model import Policy

#: Re-evaluations one report may spend on looking for ways out. At about 2 ms each this keeps a
#: refusal well under half a second.
TRIALS = 96
#: Verified ways out offered per finding; more would be a menu, not advice.
OFFERED = 4
#: Ratios whose shares differ by less than this are one offer, not two.
ALIKE = 0.05
#: What is left when nothing else passes; tried for an engine that reads the knob.
LAST_RESORTS = (
    Way(knob="layers.on_device", value=0, note="slower: every layer runs on the CPU"),
    Way(knob="device.kind", value="cpu", note="slower: everything runs on the CPU"),
)


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

    def with_value(self, knob: str, value: Any) -> Case:
        """Return this case with one knob changed; a file the launch no longer names is gone with its knob."""
        models = self.models
        if knob == "model.mmproj" and value is None:
            models = replace(models, mmproj=None)
        elif knob == "model.draft" and value is None:
            models = replace(models, draft=None)
        return replace(self, launch=self.launch.with_value(knob, value), models=models)

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
            reads=getattr(self.engine, "reads", None),
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
        findings = _with_fixes(case, findings, budget, today)
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
        self.beyond: dict[tuple[str, str], bool] = {}

    def findings(self, knob: str, value: Any) -> tuple[Finding, ...] | None:
        """Return the findings of the changed launch, or None when the trials are used up."""
        key = (knob, repr(value))
        if key not in self.known:
            if self.left <= 0:
                return None
            self.left -= 1
            changed = self.case.with_value(knob, value)
            budget, self.known[key] = _evaluate(changed, self.today)
            self.over[key] = _excess(budget, changed)
            self.beyond[key] = any(r.code == BEYOND_TRAINING for r in budget.remarks)
        return self.known[key]

    def excess(self, knob: str, value: Any) -> int:
        """Return by how many bytes the fullest pool of a launch tried before is over; negative: what is left."""
        return self.over.get((knob, repr(value)), 0)

    def noted(self, note: str, knob: str, value: Any) -> str:
        """Return the note on a value tried before, with what its user should know about it."""
        model = self.case.models.main
        if knob != "context.length" or model is None or not self.beyond.get((knob, repr(value))):
            return note
        return f"{note}; " * bool(note) + f"more than the {model.integer('context_length')} tokens the model was trained for"

    def remaining(self, knob: str, value: Any) -> str:
        """Return what still refuses a changed launch that was tried before: the pool that lacks most, else the first rule."""
        left = [f for f in self.findings(knob, value) or () if refuses((f,))]
        short = [(f.need_bytes - f.have_bytes, f.pool) for f in left if f.pool is not None and f.need_bytes is not None and f.have_bytes is not None]
        worst, pool = max(short, default=(0, None))
        if pool is not None and worst > 0:
            return f"{pool} lacks {size(worst)}"
        first = min(left, key=lambda f: f.outcome is Outcome.CANNOT_TELL)
        return f"{first.rule} {'cannot tell' if first.outcome is Outcome.CANNOT_TELL else 'still refuses'}"

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


#: Code of the remark with which an engine's model says that a context is longer than the model was trained for.
BEYOND_TRAINING = "context-beyond-training"


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
    ways = [*(way for finding in findings for way in finding.ways), *_last_resorts(case, budget)] if not allowed else []
    resorts = {way.knob for way in LAST_RESORTS}
    trials = _Trials(case, today)
    spell = getattr(case.engine, "spell", None)
    found: dict[str, Fix] = {}
    for way in (*budget.ways, *ways):
        if way.knob in found or (allowed and way.knob != "context.length") or (way in LAST_RESORTS and found.keys() - resorts):
            continue
        value = way.value
        if allowed:
            value = _furthest(way, trials)
        elif way.low is not None:
            value = nearest_passing(way, lambda v, k=way.knob: trials.passes(k, v), lambda v, k=way.knob: trials.excess(k, v))  # type: ignore[misc]
        if value is None or not trials.passes(way.knob, value):
            continue
        spelling = spell(case.launch, way.knob, value) if spell is not None else None
        found[way.knob] = Fix(knob=way.knob, value=value, verified=True, spelling=spelling or "",
                              note=trials.noted(way.note if not allowed else "largest that passes", way.knob, value))  # fmt: skip
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


def _with_fixes(case: Case, findings: tuple[Finding, ...], budget: Budget, today: date) -> tuple[Finding, ...]:
    trials = _Trials(case, today)
    fixes = [_fixes(finding, finding.ways, trials) if _asks(finding) else () for finding in findings]
    if refuses(findings) and not any(fix.verified for found in fixes for fix in found):
        last = _last_resorts(case, budget)
        fixes = [(*_fixes(finding, last, trials, partial=False), *found)[:OFFERED] if _asks(finding) else () for finding, found in zip(findings, fixes, strict=True)]
    # What passes answers every refusal, so a refusal without such an answer of its own takes those of the others.
    passing = [fix for found in fixes for fix in found if fix.verified]
    done = []
    for finding, found in zip(findings, fixes, strict=True):
        if _asks(finding):
            offered = found if any(fix.verified for fix in found) else _apart([*passing, *found])
            done.append(replace(finding, fixes=tuple(_spelled(fix, case) for fix in (*finding.fixes, *offered)[:OFFERED])))
        elif finding.outcome is Outcome.WARN and finding.ways:
            eased = [fix for way in finding.ways[:OFFERED] if (fix := _ease(way, finding, trials)) is not None]
            done.append(replace(finding, fixes=tuple(_spelled(fix, case) for fix in eased)))
        else:
            done.append(finding)
    return tuple(done)


def _asks(finding: Finding) -> bool:
    """Whether ways out of a finding are looked for because it refuses."""
    return finding.outcome is Outcome.VETO and bool(finding.ways) and finding.waived is None


def _last_resorts(case: Case, budget: Budget) -> tuple[Way, ...]:
    """Return the ways onto the CPU that this engine has, for a launch that uses an accelerator."""
    reads = case.view.reads or frozenset()
    cards = {device.name for device in case.machine.accelerators}
    return tuple(way for way in LAST_RESORTS if way.knob in reads) if any(a.device in cards for a in budget.allocations) else ()


def _fixes(finding: Finding, ways: Iterable[Way], trials: _Trials, *, partial: bool = True) -> tuple[Fix, ...]:
    """Return the ways that pass, then those that at least answer this finding."""
    found: list[Fix] = []
    for way in ways:
        if sum(fix.verified for fix in found) >= OFFERED:
            break
        fix = _try(way, finding, trials)
        if fix is not None and (partial or fix.verified):
            found.append(fix)
    return _apart(found)


def _apart(fixes: Iterable[Fix]) -> tuple[Fix, ...]:
    """Return fixes with those that pass first, and without those that nearly repeat another."""
    kept: list[Fix] = []
    for fix in sorted(fixes, key=lambda f: not f.verified):
        if not any(_alike(fix, other) for other in kept):
            kept.append(fix)
    return tuple(kept[:OFFERED])


def _alike(one: Fix, other: Fix) -> bool:
    if one.knob != other.knob:
        return False
    if one.value == other.value or not (one.verified or other.verified):  # of what only helps, one value of a setting is enough
        return True
    shares = [_shares(fix.value) for fix in (one, other)]
    return bool(shares[0]) and len(shares[0]) == len(shares[1]) and all(abs(a - b) < ALIKE for a, b in zip(*shares, strict=True))


def _shares(value: Any) -> list[float]:
    """Return a ratio's parts of one; empty for whatever is no ratio."""
    numbers = value if isinstance(value, (list, tuple)) and all(isinstance(v, (int, float)) for v in value) else []
    return [v / sum(numbers) for v in numbers] if sum(numbers) else []


def _spelled(fix: Fix, case: Case) -> Fix:
    spell = getattr(case.engine, "spell", None)
    return replace(fix, spelling=(spell(case.launch, fix.knob, fix.value) if spell is not None else None) or "")


def _ease(way: Way, finding: Finding, trials: _Trials) -> Fix | None:
    """Return the way as a fix if the changed launch is allowed and this rule no longer warns; None otherwise."""
    said = (Outcome.WARN, Outcome.VETO, Outcome.CANNOT_TELL)

    def eases(candidate: Any) -> bool:
        found = trials.findings(way.knob, candidate)
        return found is not None and not refuses(found) and not any(f.rule == finding.rule and f.pool == finding.pool and f.outcome in said for f in found)

    value = nearest_passing(way, eases) if way.low is not None else way.value
    if (value is None and way.low is not None) or not eases(value):
        return None
    return Fix(knob=way.knob, value=value, verified=True, note=way.note)


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
        return Fix(knob=way.knob, value=value, verified=True, note=trials.noted(way.note, way.knob, value))
    if trials.silences(way.knob, value, finding.rule, finding.pool):
        note = f"{way.note}; " if way.note else ""
        left = f"{note}answers this refusal, then {trials.remaining(way.knob, value)}"
        return Fix(knob=way.knob, value=value, verified=False, note=trials.noted(left, way.knob, value))
    return None
