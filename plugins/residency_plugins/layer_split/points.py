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

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="layer-split/points")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Check the first layers against the model and the cards."""
    firsts = facts.launch.get("layers.first")
    if not firsts:
        return rule.not_applicable("no split points are given")
    main, written = facts.models.main, ", ".join(str(f) for f in firsts)
    layers = main.integer("block_count") - main.integer("nextn_predict_layers") if main is not None else 0
    ids = facts.launch.get("device.ids")
    cards = len(ids) if ids is not None else len(facts.machine.accelerators)
    automatic = Way(knob="layers.first", value=None, note="the engine places the split")
    wrong = []
    if any(a >= b for a, b in itertools.pairwise(firsts)) or firsts[0] < 1:
        counts = _as_counts(firsts, layers)
        meant: tuple[Way, ...] = ()
        hint = ""
        if counts:
            hint = f" As counts of layers it would be {', '.join(str(c) for c in counts)}."
            meant = (Way(knob="layers.first", value=counts),)
        wrong.append(rule.veto(f"The split points {written} do not rise; each is the first layer of a card, not a count.{hint}", knob="layers.first", ways=(*meant, automatic)))
    elif layers and firsts[-1] >= layers:
        wrong.append(rule.veto(f"The split point {firsts[-1]} is outside the model: its layers are 0 to {layers - 1}.", knob="layers.first", ways=(automatic,)))
    if len(firsts) != cards - 1:
        need = "needs none" if cards < 2 else f"needs {cards - 1}"
        wrong.append(rule.veto(f"There are {len(firsts)} split points for {cards} cards, which {need}: one for each card after the first.", knob="layers.first", ways=(automatic,)))
    return wrong or rule.approve(f"split at {written}")


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
