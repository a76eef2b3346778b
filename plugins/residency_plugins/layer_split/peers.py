"""Direct access between cards is not assumed where it is absent.

What: a split by rows or tensors exchanges data in every layer. Where the machine says the cards cannot reach each
other directly, that is reported; a split by whole layers hands over rarely and needs none.

Why: without peer access every exchange goes through host memory; consumer cards lose it with a driver update, and a
bridge that is plugged in is not one that is used (https://github.com/Niko1221/Strata/issues/486 has one that gains
nothing).

Fix: split by layers, or check that the cards see each other (the driver's topology listing says so).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="layer-split/peers", severity="warn")


@rule.check
def check(facts: Facts) -> Finding:
    """Look for cards of a fine-grained split that cannot reach each other."""
    if facts.launch.get("layers.split") not in ("row", "tensor"):
        return rule.not_applicable("no split that exchanges data in every layer")
    ids = facts.launch.get("device.ids")
    cards = [d for name in ids if (d := facts.machine.device(name)) is not None] if ids else list(facts.machine.accelerators)
    if len(cards) < 2:
        return rule.not_applicable("one card")
    if any(d.peers is None for d in cards):
        return rule.approve("whether the cards reach each other is unknown; none is assumed")
    apart = [(a.name, b.name) for i, a in enumerate(cards) for b in cards[i + 1 :] if b.name not in (a.peers or ())]
    if apart:
        first, second = apart[0]
        return rule.warn(f"{first} and {second} cannot reach each other directly, so every layer of this split goes through host memory.", knob="layers.split")
    return rule.approve("every card reaches every other")
