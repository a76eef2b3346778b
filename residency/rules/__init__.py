"""Rules: what a rule is, what it says, and the runner that asks every rule by itself."""

from __future__ import annotations

from residency.ways import Way

from .finding import Finding, Fix, Outcome
from .rule import Facts, Rule

__all__ = ["Facts", "Finding", "Fix", "Outcome", "Rule", "Way"]
