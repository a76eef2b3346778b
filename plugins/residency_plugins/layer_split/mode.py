"""The engine can split a model the way it is asked to.

What: the split mode exists in this version, on the back end of the cards.

Why: row and tensor splits need buffers and collectives that back ends have or have not, and one that was dropped
ends the load with an error, or worse, is ignored (https://github.com/ggml-org/llama.cpp/issues/22592 lists what
planners run into).

Fix: take the split by layers, which every back end with several cards has, or one card.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way

from .cards import card_sums, device_of

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="layer-split/mode")


@rule.check
def check(facts: Facts) -> Finding:
    """Ask the capability table for the mode."""
    mode = facts.launch.get("layers.split")
    if mode in (None, "none"):
        return rule.not_applicable("no split is asked for")
    ids = facts.launch.get("device.ids")
    cards = [d for name in ids if (d := facts.machine.device(name)) is not None] if ids else list(facts.machine.accelerators)
    if len(cards) < 2:
        return rule.not_applicable("one card")
    capability = f"split-{'layer' if mode == 'auto' else mode}"
    device = device_of(facts, cards[0].pool)
    if facts.engine.lacks(capability, device):
        return rule.veto(
            f"A split by {'layer' if mode == 'auto' else mode} over {len(cards)} cards is not there on the {cards[0].kind} back end of this version.",
            knob="layers.split", missing=capability,
            ways=(Way(knob="layers.split", value="layer"), Way(knob="layers.split", value="none", note="one card")),
        )  # fmt: skip
    held = len(card_sums(facts))
    return rule.approve(f"split by {mode}" + (f" over {held} cards" if held else ""))
