"""A tower that is held is used.

What: memory taken by a vision tower that no request can use is reported.

Why: a switch for "language only" can set limits to zero and keep the tower
(https://github.com/mudler/vllm.cpp/issues/607), and an engine without a path for images holds it all the same
(https://github.com/mudler/vllm.cpp/issues/821). On a card that is nearly full that gigabyte is context.

Fix: do not name the projector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.units import size

from . import tower
from .request_path import PATH

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="vision/paid-for-nothing", severity="warn")


@rule.check
def check(facts: Facts) -> Finding:
    """Look for a tower that is held and cannot be used."""
    held = sum(a.likely_bytes for a in tower.allocations(facts))
    if not held or facts.models.mmproj is None:
        return rule.not_applicable("no memory is taken for vision")
    device = tower.encoder_device(facts)
    if facts.engine.lacks(PATH, device):
        if tower.wanted(facts):
            return rule.not_applicable("vision is asked for; vision/request-path answers")
        why = "the engine has no path for images of this model"
    elif facts.launch.get("vision.enabled") is False or facts.launch.options.get("language-model-only"):
        why = "vision is switched off"
    else:
        return rule.approve(f"{size(held)} for vision")
    return rule.warn(f"The vision tower takes {size(held)}, and no request can use it: {why}.", knob="model.mmproj", need_bytes=held)
