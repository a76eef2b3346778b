"""A fleet's own rules."""

from __future__ import annotations

from residency import hookimpl


@hookimpl
def residency_rules() -> list[object]:
    """Return this plugin's rules."""
    from . import shared_context

    return [shared_context.rule]
