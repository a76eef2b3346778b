"""The first and the last card hold what only they hold.

What: output head, draft layer, image encoder and their like live on one card of a split. When a card is over, and
would fit without them, they are named.

Why: an even split is not even: the last card also runs the head and the draft layer, the first one shares with the
encoder. Two of five identical buffers sat on different cards in a published inventory
(https://github.com/ggml-org/llama.cpp/issues/22592); a split planned without them fails on one card
(https://github.com/Niko1221/Strata/issues/486).

Fix: move layers away from that card, put the encoder elsewhere, or do without the draft layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.budget import Purpose
from residency.rules import Finding, Rule, Way
from residency.units import size

from .cards import card_sums, listed

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="layer-split/end-cards")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Look for what one card has and the others have not."""
    sums = card_sums(facts)
    if len(sums) < 2:
        return rule.not_applicable("one card")
    counts: dict[str, int] = {}
    for found in sums:
        for name in {a.name for a in found.allocations}:
            counts[name] = counts.get(name, 0) + 1
    # Where cards hold weights under the same names, one that stands on one card only is an extra; else names differ by layer.
    comparable = any(counts[a.name] == len(sums) for found in sums for a in found.allocations if a.purpose is Purpose.WEIGHTS)
    extras = (Purpose.DRAFT, Purpose.VISION, Purpose.WEIGHTS) if comparable else (Purpose.DRAFT, Purpose.VISION)
    findings = []
    for found in sums:
        usable = found.usable_bytes
        alone = tuple(a for a in found.allocations if counts[a.name] == 1 and a.purpose in extras and a.likely_bytes)
        extra = sum(a.likely_bytes for a in alone)
        if usable is None or not extra or found.likely_bytes <= usable or found.likely_bytes - extra > usable:
            continue
        ways = [Way(knob="layers.first", value=None)] if facts.launch.get("layers.first") else []
        if any(a.purpose is Purpose.VISION for a in alone):
            ways.append(Way(knob="vision.device", value="cpu"))
        findings.append(
            rule.veto(
                f"{found.pool.name} is over by {size(found.likely_bytes - usable)} because of what only this card holds: {listed(alone, 'likely')}. "
                f"Without it {size(usable - found.likely_bytes + extra)} would be left.",
                pool=found.pool.name, need_bytes=found.likely_bytes, have_bytes=usable, knob="layers.ratio", ways=tuple(ways),
            )
        )  # fmt: skip
    return findings or rule.approve("what only one card holds fits there")
