"""Under a row split the cache and the small tensors do not fill the main card.

What: a split by rows spreads the large matrices; the KV cache and everything small stay on the main card. When that
card is over because of them, they are named.

Why: half the weights and a whole 10 GiB cache on one card loaded and then failed at the first request, with room on
the other cards (https://github.com/ggml-org/llama.cpp/issues/22592 lists the planner's view).

Fix: split by layers, which spreads the cache too, or give the main card a smaller share of the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.budget import Purpose
from residency.rules import Finding, Rule, Way
from residency.units import size

from .cards import card_sums

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="layer-split/row-cache")


@rule.check
def check(facts: Facts) -> Finding:
    """Look where the cache lies under a row split."""
    if facts.launch.get("layers.split") != "row":
        return rule.not_applicable("no split by rows")
    sums = card_sums(facts)
    cache = {s.pool.name: sum(a.likely_bytes for a in s.allocations if a.purpose in (Purpose.KV, Purpose.STATE)) for s in sums}
    holding = [s for s in sums if cache[s.pool.name]]
    if len(sums) < 2 or len(holding) != 1:
        return rule.not_applicable("the cache is not on one card of several")
    found, held = holding[0], cache[holding[0].pool.name]
    usable = found.usable_bytes
    if usable is not None and found.likely_bytes > usable >= found.likely_bytes - held:
        return rule.veto(
            f"{found.pool.name} is over by {size(found.likely_bytes - usable)} because the whole cache, {size(held)}, stays on the main card while rows are spread.",
            pool=found.pool.name, need_bytes=found.likely_bytes, have_bytes=usable, knob="layers.split", ways=(Way(knob="layers.split", value="layer"),),
        )  # fmt: skip
    return rule.approve(f"the cache, {size(held)}, fits on {found.pool.name}")
