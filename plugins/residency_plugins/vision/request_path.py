"""An image in a request reaches the tower.

What: an engine that is to answer requests with images has a path for them, on the device it computes on.

Why: an engine can load a tower, hold it, and have no forward that uses it: the launch looks right, takes the
memory, and no image is ever answered (https://github.com/mudler/vllm.cpp/issues/821). "Not implemented" and "not
configured" look the same from outside (https://github.com/mudler/vllm.cpp/issues/758).

Fix: run this model without vision, or with an engine that answers images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way

from . import tower

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="vision/request-path")

PATH = "vision-request-path"


@rule.check
def check(facts: Facts) -> Finding:
    """Ask the engine's capabilities for a request path."""
    if not tower.wanted(facts):
        return rule.not_applicable("the launch does not ask for vision")
    if not facts.engine.lacks(PATH, tower.encoder_device(facts)):
        return rule.approve("requests with images have a path")
    return rule.veto(
        "The launch asks for vision, and the engine has no path for images of this model: the tower would be loaded and never used.",
        knob="vision.enabled",
        missing=PATH,
        ways=(Way(knob="vision.enabled", value=False, note="text only"),),
    )
