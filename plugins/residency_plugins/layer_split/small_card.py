"""A small second card does not throttle the others.

What: where the cards of a split work on a prompt together, the smallest one's buffers decide the prompt chunk for
all. A card whose chunk is half of the others' or less is named.

Why: a 10 GB card beside a 32 GB one made prompts 6.2 times slower, because its cache could lend buffers for 512
tokens only (https://github.com/Niko1221/Strata/issues/448).

Fix: run on the large card alone, or let the small one hold experts as a helper instead of layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.units import size

from .cards import card_sums, device_of

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="layer-split/small-card", severity="warn")

FAR_APART = 2.5  # times the smallest card's memory


@rule.check
def check(facts: Facts) -> Finding:
    """Compare the chunk every card allows; where the engine has no chunk, the cards' sizes."""
    sums = card_sums(facts)
    if len(sums) < 2:
        return rule.not_applicable("one card")
    chunks = facts.budget.facts.get("prompt_chunk_by_device")
    totals = {s.pool.name: s.pool.total_bytes for s in sums}
    known = {name: total for name, total in totals.items() if total}
    smallest = min(known, key=lambda name: known[name], default=None)
    if isinstance(chunks, dict) and len(chunks) > 1:
        low = min(chunks, key=lambda name: chunks[name])
        high = max(chunks.values())
        smaller = smallest is not None and _pool(facts, low) == smallest and known[smallest] < max(known.values())
        if smaller and chunks[low] * 2 <= high:
            return rule.warn(f"{low} can lend buffers for prompt chunks of {chunks[low]} tokens, the other cards for {high}; the smallest decides for all, and prompts slow down with it.",
                             pool=_pool(facts, low), knob="context.prefill")  # fmt: skip
        return rule.approve(f"prompt chunks of {chunks[low]} tokens")
    if smallest is not None and max(known.values()) > FAR_APART * known[smallest] and facts.launch.get("layers.ratio") is None:
        return rule.warn(f"{smallest} holds {size(known[smallest])}, another card {size(max(known.values()))}; per-card buffers are the same on both, so the small one is the first to be full.",
                         pool=smallest, knob="layers.ratio")  # fmt: skip
    return rule.approve("cards of like size")


def _pool(facts: Facts, name: str) -> str:
    device = facts.machine.device(name) or device_of(facts, name)
    return device.pool if device is not None else name
