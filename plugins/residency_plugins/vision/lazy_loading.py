"""Vision and loading on demand go together.

What: a launch that loads the model, or its tower, only when a request comes does not also ask for vision
where the engine cannot do both; and memory a tower will take at its first image is still there then.

Why: an encoder that is loaded late finds what is left, and an engine that unloads itself cannot keep an
encoder beside it: some refuse the pair (https://github.com/Niko1221/Strata/issues/486 is about the memory both
want).

Fix: switch loading on demand off, or vision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.budget import Phase
from residency.rules import Finding, Rule, Way
from residency.units import size

from . import tower

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="vision/lazy-loading")

BOTH = "vision-with-lazy-load"
SETTINGS = ("lazy-load", "lazy_load")


@rule.check
def check(facts: Facts) -> Finding:
    """Look for loading on demand beside vision."""
    if facts.launch.get("vision.enabled") is False or not (tower.wanted(facts) or facts.models.mmproj is not None):
        return rule.not_applicable("the launch does not ask for vision")
    setting = next((s for s in SETTINGS if facts.launch.options.get(s)), None)
    if setting is not None and facts.engine.lacks(BOTH, tower.encoder_device(facts)):
        return rule.veto(
            "The launch asks for vision and for loading on demand, and the engine refuses the two together.",
            knob=f"option:{setting}",
            missing=BOTH,
            ways=(Way(knob=f"option:{setting}", value=False), Way(knob="vision.enabled", value=False, note="text only")),
        )
    late = sum(a.likely_bytes for a in tower.allocations(facts) if a.phase in (Phase.FIRST_FORWARD, Phase.RUN_TIME))
    if late:
        return rule.warn(f"The tower is loaded at the first image and takes {size(late)} then; nothing keeps that free until it comes.", knob="vision.enabled")
    return rule.approve("the tower is loaded at start")
