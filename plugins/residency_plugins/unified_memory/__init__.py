"""Rules about memory that host and device share, or that a device must hold whole."""

from __future__ import annotations

from residency.plugins import hookimpl


@hookimpl
def residency_rules() -> list[object]:
    """Return this plugin's rules."""
    from . import (
        ceiling,
        double_copy,
        expert_residency,
        free_versus_total,
        host_access,
        memory_query,
        never_fails,
        offload,
        prefault,
    )  # fmt: skip

    return [
        expert_residency.rule, double_copy.rule, free_versus_total.rule, memory_query.rule, prefault.rule, ceiling.rule,
        never_fails.rule, host_access.rule, offload.rule,
    ]  # fmt: skip
