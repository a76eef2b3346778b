"""A rule: one module, one rule, facts in, finding out."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .finding import Finding, Fix, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from residency.budget import Budget
    from residency.engines.base import EngineView, Models
    from residency.launch.model import Launch
    from residency.machine.model import Machine
    from residency.policy.model import Policy

    Check = Callable[["Facts"], "Finding | Sequence[Finding]"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything a rule may look at. Frozen; probing and reading happened before."""

    launch: Launch
    models: Models
    machine: Machine
    engine: EngineView
    budget: Budget
    policy: Policy


@lru_cache(maxsize=1024)
def _nothing_to_say(rule: str, reason: str) -> Finding:
    """Most rules have nothing to say about most launches, in the same words."""
    return Finding(rule=rule, outcome=Outcome.NOT_APPLICABLE, message=reason)


def _doc_of(file: str | None) -> str:
    """Return a module's docstring from its source: an interpreter that optimises throws docstrings away."""
    try:
        source = Path(file or "").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    match = re.match(r'"""(.*?)"""', source, re.DOTALL)
    return match[1] if match else ""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule and its id ``<plugin>/<slug>``.

    The docstring of the module it stands in is its explanation: first line what it says, then paragraphs starting with ``What:``, ``Why:`` and ``Fix:``.

    Use::

        rule = Rule(id="fleet-example/no-weekend-launches")

        @rule.check
        def check(facts: Facts) -> Finding:
            ...
            return rule.approve()
    """

    id: str
    severity: str = "deny"  # "deny" or "warn": what a veto of this rule means by default
    doc: str = ""
    function: Check | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.doc:
            frame = sys._getframe(2)  # noqa: SLF001 - the one way to find the module a rule stands in
            text = frame.f_globals.get("__doc__") or _doc_of(frame.f_globals.get("__file__"))
            object.__setattr__(self, "doc", inspect.cleandoc(text))

    def check(self, function: Check) -> Check:
        """Decorate the rule's one function; there is no second one."""
        if self.function is not None:
            raise ValueError(f"the rule {self.id} has a check already")
        object.__setattr__(self, "function", function)
        return function

    def approve(self, message: str = "") -> Finding:
        """Return an approval; the only value that approves."""
        return Finding(rule=self.id, outcome=Outcome.APPROVE, message=message)

    def not_applicable(self, reason: str) -> Finding:
        """Return "this rule has nothing to say here", with the reason."""
        return _nothing_to_say(self.id, reason)

    def veto(self, message: str, **details: Any) -> Finding:
        """Return a refusal. ``details`` are the fields of Finding: knob, pool, need_bytes, missing, ways, ..."""
        return Finding(rule=self.id, outcome=Outcome.VETO, message=message, **details)

    def warn(self, message: str, **details: Any) -> Finding:
        """Return a warning: allowed, but said."""
        return Finding(rule=self.id, outcome=Outcome.WARN, message=message, **details)

    def cannot_tell(self, message: str, **details: Any) -> Finding:
        """Return "a fact this rule needs is unknown", naming the fact."""
        return Finding(rule=self.id, outcome=Outcome.CANNOT_TELL, message=message, **details)


__all__ = ["Facts", "Finding", "Fix", "Outcome", "Rule"]
