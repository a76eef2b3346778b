"""Split points are valid, one per later card, each card once.

What: the first layers of the later cards rise, lie inside the model, leave every card at least one layer, and are
as many as there are later cards; no card stands for two stages.

Why: a point is the first layer of a card, not a count of layers; "24,12,6" for 24 + 12 + 6 layers is the usual
slip, and it was found only after the start (https://github.com/Niko1221/Strata/issues/644).

Fix: write the first layer of each later card, rising: "24,36,42" puts layers 0-23, 24-35, 36-41 and 42 on over four
cards; or leave the points to the engine.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way
from residency.units import plural

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="layer-split/points")


@rule.check
def check(facts: Facts) -> Finding:
    """Check the first layers against the model and the cards."""
    firsts = facts.launch.get("layers.first")
    if not firsts:
        return rule.not_applicable("no split points are given")
    main, written = facts.models.main, ", ".join(str(f) for f in firsts)
    layers = main.integer("block_count") - main.integer("nextn_predict_layers") if main is not None else 0
    ids = facts.launch.get("device.ids")
    cards = len(ids) if ids is not None else len(facts.machine.accelerators)
    automatic = Way(knob="layers.first", value=None, note="left out, the engine places the split" if cards > 1 else "left out, nothing is split")
    if len(firsts) != cards - 1:
        have = f"There {'is' if len(firsts) == 1 else 'are'} {plural(len(firsts), 'split point')} ({written}) for {plural(cards, 'card')}"
        need = f"{plural(cards, 'card')} take {plural(cards - 1, 'point')}, one for each card after the first" if cards > 1 else "one card needs none"
        return rule.veto(f"{have}; {need}.", knob="layers.first", ways=(automatic,))
    if any(a >= b for a, b in itertools.pairwise(firsts)) or firsts[0] < 1:
        counts = _as_counts(firsts, layers)
        meant: tuple[Way, ...] = ()
        hint = ""
        if counts:
            hint = f" As counts of layers it would be {', '.join(str(c) for c in counts)}."
            meant = (Way(knob="layers.first", value=counts),)
        return rule.veto(f"The split points {written} do not rise; each is the first layer of a card, not a count.{hint}", knob="layers.first", ways=(*meant, automatic))
    if layers and firsts[-1] >= layers:
        return rule.veto(f"The split point {firsts[-1]} is outside the model: its layers are 0 to {layers - 1}.", knob="layers.first", ways=(automatic,))
    return rule.approve(f"split at {written}")


def _as_counts(numbers: list[int], layers: int) -> list[int] | None:
    """Return split points when the numbers read as counts of layers that fit the model."""
    total = sum(numbers)
    if not layers or total > layers:
        return None
    points, place = [], 0
    for number in numbers:
        place += number
        points.append(place)
    points = [p for p in points if p < layers]
    return points or None
