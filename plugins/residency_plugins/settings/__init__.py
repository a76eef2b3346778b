"""Rules about settings: impossible, without effect, risky."""

from __future__ import annotations

from residency.plugins import hookimpl


@hookimpl
def residency_rules() -> list[object]:
    """Return this plugin's rules."""
    from . import inert, possible, risks

    return [possible.rule, inert.rule, risks.rule]
