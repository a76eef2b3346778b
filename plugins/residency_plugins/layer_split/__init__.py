"""Rules about models spread over several cards, and about caches that take what is left."""

from __future__ import annotations

from residency.plugins import hookimpl


@hookimpl
def residency_rules() -> list[object]:
    """Return this plugin's rules."""
    from . import (
        after_cache,
        card_budget,
        end_cards,
        mode,
        peers,
        pipeline_copies,
        points,
        reserve,
        row_cache,
        small_card,
        stale_tenant,
    )

    return [
        module.rule
        for module in (after_cache, card_budget, end_cards, mode, peers, pipeline_copies, points, reserve, row_cache, small_card, stale_tenant)
    ]
