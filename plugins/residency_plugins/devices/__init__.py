"""Rules about the devices a launch names."""

from __future__ import annotations

from residency.plugins import hookimpl


@hookimpl
def residency_rules() -> list[object]:
    """Return this plugin's rules."""
    from . import exist, largest_allocation

    return [exist.rule, largest_allocation.rule]
