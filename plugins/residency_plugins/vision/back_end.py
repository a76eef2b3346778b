"""The back end the encoder is put on has an encoder.

What: the device of the vision encoder exists, and the engine's back end for it can compute an encoder.

Why: back ends grow one operation at a time, and the encoder comes late: there are builds that encode on
the CPU only, and others that do not encode at all. The start succeeds, the first image does not
(https://github.com/mudler/vllm.cpp/issues/821).

Fix: put the encoder on the CPU where that works, or run without vision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way
from residency.text import clean

from . import tower

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="vision/back-end")

ENCODER = "vision-encoder"


@rule.check
def check(facts: Facts) -> Finding:
    """Ask the engine's capabilities for an encoder on that device."""
    if not tower.wanted(facts) and facts.models.mmproj is None:
        return rule.not_applicable("the launch does not ask for vision")
    if facts.launch.get("vision.enabled") is False:
        return rule.not_applicable("vision is switched off")
    asked = facts.launch.get("vision.device")
    to_cpu = Way(knob="vision.device", value="cpu", note="slower images")
    off = Way(knob="vision.enabled", value=False, note="text only")
    if asked is not None and asked.casefold() not in ("cpu", "none", "gpu", "auto") and facts.machine.device(asked) is None:
        there = ", ".join(d.name for d in facts.machine.accelerators) or "none"
        return rule.veto(f"The encoder is to run on {clean(asked)}, and {clean(facts.machine.name)} has no such device; there is: {there}.",
                         knob="vision.device", ways=(to_cpu,))  # fmt: skip
    device = tower.encoder_device(facts)
    name = device.name if device is not None else "the CPU"
    if not facts.engine.lacks(ENCODER, device):
        return rule.approve(f"encoder on {name}")
    message = f"The back end of {name} has no image encoder"
    if tower.wanted(facts):
        return rule.veto(f"{message}, and the launch asks for vision.", knob="vision.device", missing=ENCODER, ways=(to_cpu, off))
    return rule.not_applicable(f"{message}, and no image is asked for")
