"""Runs rules one by one and fails closed.

Only an explicit approval approves. Whatever else comes back (None, True, an exception,
SystemExit, a generator, somebody else's finding, silence) becomes a finding of outcome
"cannot-tell" that names the rule and its plugin; the other rules still run.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from residency.errors import describe

from .finding import Finding, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import date

    from residency.plugins import PluginSet
    from residency.policy.model import Policy

    from .rule import Facts, Rule

#: Seconds one rule may take. Rules are arithmetic on values; a rule that needs longer hangs.
RULE_SECONDS = 5.0


class RuleTimeout(BaseException):
    """Raised inside a rule that does not come back."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[Callable[[float], object]]:
    """Let the body interrupt what takes longer than some seconds; yields what winds the clock: ``wind(seconds)``, 0 stops it.

    Works in the main thread on POSIX when nobody else uses SIGALRM; elsewhere winding does nothing.
    """
    usable = (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    )
    if not usable:
        yield lambda _seconds: None
        return

    def expire(_number: int, _frame: object) -> None:
        raise RuleTimeout(f"no answer within {seconds:g} s")

    signal.signal(signal.SIGALRM, expire)
    try:
        yield lambda wound: signal.setitimer(signal.ITIMER_REAL, wound)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


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
    except (Exception, SystemExit, RuleTimeout) as error:  # noqa: BLE001 - whatever a plugin throws must end in "no verdict" with its name
        return (_broken(rule, owner, describe(error)),)
    answers: tuple[object, ...] = tuple(answer) if isinstance(answer, (list, tuple)) else (answer,)
    if not answers:
        return (_broken(rule, owner, "an empty list of findings"),)
    found: list[Finding] = []
    for item in answers:
        if type(item) is not Finding:
            found.append(_broken(rule, owner, f"{item!r:.60} is not a finding"))
        elif item.rule != rule.id:
            found.append(_broken(rule, owner, f"it answered for another rule, {item.rule!r:.60}"))
        elif type(item.outcome) is not Outcome:
            found.append(_broken(rule, owner, f"unknown outcome {item.outcome!r:.60}"))
        else:
            found.append(item)
    return tuple(found)


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
    except RuleTimeout as error:  # expired between the rule's end and the clock's
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
        elif finding.outcome is Outcome.CANNOT_TELL and finding.culprit is None and policy.cannot_tell == "warn":
            changed = replace(finding, outcome=Outcome.WARN, message=f"Cannot tell, and the policy accepts that: {finding.message}")
        judged.append(changed)
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
