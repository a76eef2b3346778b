"""For authors of rules: run one rule on literal facts, without files, machine or plugins.

Example::

    from residency.testing import facts, finding
    from my_plugin import my_rule

    def test_refuses_a_large_context():
        answer = finding(my_rule.rule, facts(launch={"context": {"length": 262144}}))
        assert answer.outcome == "veto"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.budget import Budget
from residency.engines.base import CapabilityTable, EngineView, Models
from residency.launch.knobs import Knobs
from residency.launch.model import Launch
from residency.machine import resolve_machine
from residency.policy import DEFAULT_POLICY
from residency.rules.rule import Facts
from residency.rules.runner import ask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residency.machine import Machine
    from residency.policy import Policy
    from residency.rules.finding import Finding
    from residency.rules.rule import Rule

_MACHINE = {"name": "test", "pools": [{"name": "host", "total_bytes": 2**34, "free_bytes": 2**34}]}


def facts(
    *,
    launch: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    machine: Machine | Mapping[str, Any] | str | None = None,
    budget: Budget | None = None,
    models: Models | None = None,
    capabilities: CapabilityTable | None = None,
    version: str = "1.0",
    policy: Policy | None = None,
) -> Facts:
    """Return facts with everything not given left empty.

    Args:
        launch: knobs in the shape of a launch file, ``{"context": {"length": 8192}}``.
        options: settings only the engine knows.
        machine: a profile's name, a mapping, or a Machine; default: 16 GiB of host memory and no device.
        budget: what the engine's plan would be.
        models: the checkpoints.
        capabilities: what the engine can do; default: nothing is known.
        version: the engine's version.
        policy: default: the default policy.
    """
    return Facts(
        launch=Launch(engine="test", version=version, knobs=Knobs.model_validate(dict(launch or {})), options=dict(options or {})),
        models=models or Models(),
        machine=resolve_machine(machine if machine is not None else _MACHINE),
        engine=EngineView(label=f"test {version}", version=version, version_given=True, capabilities=capabilities or CapabilityTable(rows=())),
        budget=budget or Budget(allocations=()),
        policy=policy or DEFAULT_POLICY,
    )


def findings(rule: Rule, given: Facts) -> tuple[Finding, ...]:
    """Return everything a rule says; a rule that breaks says "cannot-tell", as in a real run."""
    return ask(rule, given, "test")


def finding(rule: Rule, given: Facts) -> Finding:
    """Return the one finding of a rule; raises ValueError when it says more than one thing."""
    found = findings(rule, given)
    if len(found) != 1:
        raise ValueError(f"the rule said {len(found)} things: {[f.message for f in found]}")
    return found[0]
