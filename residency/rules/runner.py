"""Runs rules one by one and fails closed.

Only an explicit approval approves. Whatever else comes back (None, True, an exception,
SystemExit, a generator, somebody else's finding, silence) becomes a finding of outcome
"cannot-tell" that names the rule and its plugin; the other rules still run.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import TYPE_CHECKING

from residency.clock import NoAnswer, time_limit
from residency.errors import describe
from residency.ways import Way
from residency.where import Where

from .finding import Finding, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import date

    from residency.plugins import PluginSet
    from residency.policy.model import Policy

    from .rule import Facts, Rule

#: Seconds one rule may take. Rules are arithmetic on values; a rule that needs longer hangs.
RULE_SECONDS = 5.0


def _broken(rule: Rule, owner: str, what: str) -> Finding:
    return Finding(
        rule=rule.id,
        outcome=Outcome.CANNOT_TELL,
        message=f"The rule gave no verdict: {what}. It comes from plugin {owner}.",
        culprit=owner,
    )


def ask(rule: Rule, facts: Facts, owner: str) -> tuple[Finding, ...]:
    """Ask one rule; return its findings, at least one, whatever it did."""
    assert rule.function is not None
    try:
        answer = rule.function(facts)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a plugin throws must end in "no verdict" with its name
        return (_broken(rule, owner, describe(error)),)
    answers: tuple[object, ...] = tuple(answer) if isinstance(answer, (list, tuple)) else (answer,)
    if not answers:
        return (_broken(rule, owner, "an empty list of findings"),)
    found = []
    for item in answers:
        fault = _fault(item, rule, facts)
        if fault is None:
            assert isinstance(item, Finding)
            # What only the core may say: a fix was tried, a veto is waived, who is to blame.
            claimed = type(item.fixes) is not tuple or item.fixes or item.waived is not None or item.culprit is not None or item.missing_title is not None
            found.append(replace(item, fixes=(), waived=None, culprit=None, missing_title=None) if claimed else item)
        else:
            found.append(_broken(rule, owner, fault))
    return tuple(found)


#: Fields of a finding and the types they may have.
_FIELDS: dict[str, tuple[type, ...]] = {
    "message": (str,), "missing": (str, type(None)), "knob": (str, type(None)), "pool": (str, type(None)),
    "need_bytes": (int, type(None)), "have_bytes": (int, type(None)), "largest_name": (str, type(None)),
    "largest_bytes": (int, type(None)), "ways": (tuple,), "where": (Where, type(None)),
}  # fmt: skip
_VALUES = attrgetter(*_FIELDS)
#: Types the fields were found to have together, all allowed: a report asks this of every answer of every rule.
_SEEN: set[tuple[type, ...]] = set()


def _fault(item: object, rule: Rule, facts: Facts) -> str | None:
    """Return what is wrong with a rule's answer, or None when it is a finding that can be used."""
    if type(item) is not Finding:
        return f"{_shown(item)} is not a finding"
    if item.rule != rule.id:
        return f"it answered for another rule, {_shown(item.rule)}"
    if type(item.outcome) is not Outcome:
        return f"unknown outcome {_shown(item.outcome)}"
    kinds = tuple(map(type, _VALUES(item)))
    if kinds not in _SEEN:
        for (name, allowed), kind in zip(_FIELDS.items(), kinds, strict=True):
            if kind not in allowed:
                return f"its {name} is {_shown(getattr(item, name))}"
        _SEEN.add(kinds)
    for way in item.ways:
        if type(way) is not Way or type(way.knob) is not str or not facts.launch.has(way.knob):
            return f"it offers {_shown(way)}, which changes no setting there is"
        if way.low is not None and not (type(way.low) is int and type(way.value) is int and type(way.step) is int and way.step > 0):
            return f"it offers {_shown(way)}, whose bounds are not whole numbers"
    return None


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a repr that raises is one more thing a plugin can get wrong
        return f"an object of {type(value).__name__} that cannot be shown"
    return text if len(text) <= 60 else text[:57] + "..."


def _fingerprint(facts: Facts) -> tuple[str, ...]:
    """Text of everything mutable a rule can reach; models are compared by their metadata."""
    return (
        repr(facts.launch), repr(facts.machine), repr(facts.budget), repr(facts.policy),
        *(repr(model.metadata) for model in facts.models.all()),
    )  # fmt: skip


def _ask_stranger(rule: Rule, facts: Facts, owner: str, wind: Callable[[float], object]) -> tuple[Finding, ...]:
    """Ask a rule of a third party: within a time, and with the facts compared around it."""
    before = _fingerprint(facts)
    try:
        wind(RULE_SECONDS)
        answers = ask(rule, facts, owner)
        wind(0)
    except NoAnswer as error:  # expired between the rule's end and the clock's
        answers = (_broken(rule, owner, describe(error)),)
    if _fingerprint(facts) != before:
        answers = (*answers, _broken(rule, owner, "it changed the facts other rules judge by"))
    return answers


def run_rules(facts: Facts, plugins: PluginSet) -> tuple[Finding, ...]:
    """Ask every rule once and return all findings, in the order of rule ids.

    A rule of a third party that changes the facts or does not come back is broken, and everything
    after a change is not to be trusted. The rules shipped with residency are tested to do neither.
    """
    findings: list[Finding] = []
    with time_limit(RULE_SECONDS) as wind:
        for rule in plugins.rules:
            owner = plugins.owners.get(rule.id, "unknown")
            if facts.policy.severities.get(rule.id) == "off" and rule.id not in facts.policy.require:
                continue
            findings.extend(ask(rule, facts, owner) if rule.id in plugins.shipped else _ask_stranger(rule, facts, owner, wind))
    findings.extend(_missing(facts.policy, plugins, {finding.rule for finding in findings}))
    if not plugins.rules:
        findings.append(Finding(rule="residency/rules", outcome=Outcome.CANNOT_TELL, message="No rule ran: no plugin brought one."))
    elif not any(f.outcome is Outcome.APPROVE for f in findings) and not any(
        f.outcome in (Outcome.VETO, Outcome.CANNOT_TELL) for f in findings
    ):
        findings.append(Finding(rule="residency/rules", outcome=Outcome.CANNOT_TELL, message="No rule approved the launch; silence is not an approval."))
    findings.extend(
        Finding(rule="residency/plugins", outcome=Outcome.CANNOT_TELL, message=f"{trouble.message}.", culprit=trouble.culprit)
        for trouble in plugins.troubles
    )
    return tuple(findings)


def _missing(policy: Policy, plugins: PluginSet, ran: set[str]) -> Iterator[Finding]:
    known = {rule.id for rule in plugins.rules}
    for required in policy.require:
        if required not in ran:
            why = "it is installed but did not run" if required in known else "no loaded plugin brings it"
            yield Finding(
                rule="residency/policy",
                outcome=Outcome.CANNOT_TELL,
                message=f"The policy {policy.name!r} requires the rule {required}, and {why}.",
                culprit=required,
            )


def apply_policy(findings: tuple[Finding, ...], facts: Facts, plugins: PluginSet, today: date) -> tuple[Finding, ...]:
    """Lower vetoes the policy only wants warned about, mark waived ones, and report stale waivers.

    Findings of the core ("residency/...") and "cannot-tell" are never waived: a broken rule is not
    an accepted risk.
    """
    policy = facts.policy
    defaults = {rule.id: rule.severity for rule in plugins.rules}
    used: set[int] = set()
    judged: list[Finding] = []
    for finding in findings:
        changed = finding
        if finding.outcome is Outcome.VETO:
            if policy.severities.get(finding.rule, defaults.get(finding.rule, "deny")) == "warn":
                changed = replace(finding, outcome=Outcome.WARN)
            for index, waiver in enumerate(policy.waivers):
                if waiver.rule == finding.rule and _matches(waiver.match, finding, facts):
                    used.add(index)
                    if waiver.until >= today and changed.outcome is Outcome.VETO:
                        changed = replace(
                            finding,
                            waived={"reason": waiver.reason, "until": waiver.until.isoformat(), "approved_by": waiver.approved_by},
                        )
        elif finding.outcome is Outcome.CANNOT_TELL and _is_a_rules(finding) and policy.cannot_tell == "warn":
            changed = replace(finding, outcome=Outcome.WARN, message=f"Cannot tell, and the policy accepts that: {finding.message}")
        judged.append(changed)
    judged.extend(policy_remarks(policy, plugins, [pool.name for pool in facts.machine.pools]))
    for index, waiver in enumerate(policy.waivers):
        if waiver.until < today:
            state = f"expired on {waiver.until.isoformat()}"
        elif waiver.rule not in defaults:
            state = "names a rule that is not installed"
        elif index not in used:
            continue  # a waiver for another launch of the fleet; only the fleet's own sweep can call it stale
        elif (waiver.until - today).days <= WAIVER_NOTICE_DAYS:
            state = f"ends on {waiver.until.isoformat()}"
        else:
            continue
        judged.append(Finding(rule="residency/policy", outcome=Outcome.WARN, message=f"The waiver for {waiver.rule} ({waiver.reason}) {state}."))
    return tuple(judged)


def _is_a_rules(finding: Finding) -> bool:
    """Whether a rule said this about the launch, and not the core about rules and plugins."""
    return finding.culprit is None and not finding.rule.startswith("residency/")


def policy_remarks(policy: Policy, plugins: PluginSet, pools: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield what a policy says in vain: severities of rules that are not there, or that must run; margins of pools the machine lacks."""
    known = {rule.id for rule in plugins.rules}
    for rule, level in policy.severities.items():
        if rule not in known:
            close = difflib.get_close_matches(rule, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            message = f"The policy sets a severity for {rule}, and no loaded plugin brings that rule.{hint}"
        elif level == "off" and rule in policy.require:
            message = f"The policy switches {rule} off and requires it; it runs."
        else:
            continue
        yield Finding(rule="residency/policy", outcome=Outcome.WARN, message=message)
    known = {*pools, *ELSEWHERE}
    stems = {found[1] for pool in pools if (found := _NUMBERED.fullmatch(pool))}
    for pool in policy.pool_margins:
        numbered = _NUMBERED.fullmatch(pool)
        if not pools or pool in known or (numbered is not None and numbered[1] in stems):
            continue
        close = difflib.get_close_matches(pool, pools, n=1)
        hint = f" Did you mean {close[0]}?" if close else f" Its pools: {', '.join(pools)}."
        message = f"The policy sets a margin for the pool {pool}, and this machine has none of that name.{hint}"
        yield Finding(rule="residency/policy", outcome=Outcome.WARN, message=message)


#: Names of host pools: a fleet's policy speaks for machines with unified memory and for others.
ELSEWHERE = ("host", "unified")
#: A pool with a number: a fleet has machines with more cards than this one.
_NUMBERED = re.compile(r"(.*?)\d+")
#: Days before its end from which a waiver in use is mentioned.
WAIVER_NOTICE_DAYS = 14


def _matches(patterns: object, finding: Finding, facts: Facts) -> bool:
    values = {
        "model": facts.models.main.name if facts.models.main else "",
        "path": facts.models.main.path if facts.models.main else "",
        "machine": facts.machine.name,
        "engine": facts.launch.engine,
        "knob": finding.knob or "",
        "pool": finding.pool or "",
    }
    assert hasattr(patterns, "items")
    return all(fnmatchcase(values.get(key, ""), pattern) for key, pattern in patterns.items())
