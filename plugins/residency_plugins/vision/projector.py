"""The projector file is a projector.

What: the file named as projector is one (its architecture says so), and it has an image encoder where
images are wanted.

Why: a folder holds the model, its draft and its projector under similar names. The engine reads the
wrong one to its end, or refuses it after the weights are loaded. A projector can also be for audio
alone. https://github.com/mudler/vllm.cpp/issues/821 lists what an engine checks here.

Fix: name the projector file; its name usually begins with "mmproj".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way
from residency.text import clean

from . import tower

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="vision/projector")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Look at the architecture of the projector and of the model."""
    findings: list[Finding] = []
    file, main = facts.models.mmproj, facts.models.main
    ways = (Way(knob="model.mmproj", value=None, note="text only"),)
    if main is not None and tower.is_projector(main):
        findings.append(rule.veto(f"{clean(main.path)} is a projector, not a language model.", knob="model.path"))
    if file is not None and not tower.is_projector(file):
        what = f'a model of architecture "{clean(file.architecture)}"' if file.architecture else "a file that names no architecture"
        findings.append(rule.veto(f"{clean(file.path)} is not a projector but {what}.", knob="model.mmproj", ways=ways))
    elif file is not None and tower.wanted(facts) and not tower.vision_bytes(file):
        findings.append(rule.veto(f"{clean(file.path)} has no image encoder, and the launch asks for vision.", knob="model.mmproj", ways=ways))
    elif file is not None and tower.projector_type(file) == "qwen3vl_merger" and _half_a_pair(file.by_name):
        findings.append(
            rule.veto(f"{clean(file.path)} has one half of the patch embedding's pair and lacks the other.", knob="model.mmproj", ways=ways)
        )
    if findings:
        return findings
    return rule.approve("a projector") if file is not None else rule.not_applicable("the launch names no projector file")


def _half_a_pair(names: object) -> bool:
    """Whether one of the two temporal patch embeddings is missing (images of two frames are embedded by both)."""
    assert hasattr(names, "__contains__")
    return ("v.patch_embd.weight" in names) != ("v.patch_embd.weight.1" in names)
