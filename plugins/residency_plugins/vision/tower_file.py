"""A launch that wants vision names a tower.

What: when requests with images must work, the launch names a projector file, or the model carries a
vision tower of its own.

Why: without one the server starts, answers text, and refuses the first image: "This server was started
without the vision encoder" (https://github.com/Niko1221/Strata/issues/486 lists the launch that wants it). A model
converted to GGUF leaves its tower in a second file, which is easy to forget
(https://github.com/mudler/vllm.cpp/issues/821).

Fix: name the projector file of this model, or do not ask for vision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way

from . import tower

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="vision/tower-file")


@rule.check
def check(facts: Facts) -> Finding:
    """Look for a tower where vision is wanted."""
    if not tower.wanted(facts):
        return rule.not_applicable("the launch does not ask for vision")
    if facts.models.main is None:
        return rule.not_applicable("there is no model")
    if tower.present(facts):
        return rule.approve("a tower is there")
    if facts.budget.facts.get("tower_elsewhere"):
        return rule.not_applicable("the engine gets the tower from somewhere else")
    return rule.veto(
        "The launch asks for vision, names no projector file, and the model has no vision tower of its own.",
        knob="model.mmproj",
        ways=(Way(knob="vision.enabled", value=False, note="text only"),),
    )
