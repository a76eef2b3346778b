"""The engine knows this type of projector.

What: where the engine's list of projector types is known, the file's type is on it.

Why: each family of vision models joins its tower to the language model in its own way. An engine that
knows one type refuses the others at load (https://github.com/mudler/vllm.cpp/issues/821), and a newer file on
an older build stops with "unknown projector type".

Fix: take the projector made for this engine, or run without vision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way
from residency.text import clean

from . import tower

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="vision/projector-type")

PREFIX = "projector-"


@rule.check
def check(facts: Facts) -> Finding:
    """Look the type up among the engine's capabilities."""
    file = facts.models.mmproj
    if file is None or not tower.is_projector(file):
        return rule.not_applicable("the launch names no projector file")
    listed = sorted({row.id.removeprefix(PREFIX) for row in facts.engine.capabilities.rows if row.id.startswith(PREFIX)})
    if not listed:
        return rule.not_applicable("the engine's list of projector types is not known")
    kind, device = tower.projector_type(file), tower.encoder_device(facts)
    if kind is None:
        return rule.veto(f"{clean(file.path)} does not say what type of projector it is.", knob="model.mmproj",
                         ways=(Way(knob="model.mmproj", value=None, note="text only"),))  # fmt: skip
    if facts.engine.has(PREFIX + kind, device):
        return rule.approve(f"projector of type {clean(kind)}")
    return rule.veto(
        f"{clean(file.path)} is a projector of type {clean(kind)}, and the engine knows {', '.join(listed)}.",
        knob="model.mmproj",
        ways=(Way(knob="model.mmproj", value=None, note="text only"),),
    )
