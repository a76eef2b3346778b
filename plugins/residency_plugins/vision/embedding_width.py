"""What the projector puts out is as wide as the model's embeddings.

What: the width of the projector's last tensor equals the model's embedding length. The width is read from
the tensor's shape; nothing is multiplied by a merge factor, and a tower that feeds several layers at
once may be wider by whole multiples.

Why: a projector of the 4B model beside the 12B model has the right name and the wrong width, and is
refused after the load, or aborts at the first image. The check is easy to get wrong the other way: a
tool multiplied the projection by the square of the merge factor and refused a projector that matched
(https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/1665).

Fix: take the projector that was converted from the same checkpoint as the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.checkpoint.model import Role
from residency.rules import Finding, Rule, Way

from . import tower

if TYPE_CHECKING:
    from residency.checkpoint.model import Checkpoint
    from residency.rules import Facts

rule = Rule(id="vision/embedding-width")

#: Last tensor of a projector by type: name, and the axis of its output width (ggml order: 0 is the row length).
LAST: dict[str, tuple[str, int]] = {
    "mlp": ("mm.2.weight", 1),
    "gemma3": ("mm.input_projection.weight", 0),  # stored transposed
    "qwen2vl_merger": ("mm.2.weight", 1),
    "qwen2.5vl_merger": ("mm.2.weight", 1),
    "qwen3vl_merger": ("mm.2.weight", 1),
    "pixtral": ("mm.2.weight", 1),
    "internvl": ("mm.3.weight", 1),
    "idefics3": ("mm.model.fc.weight", 1),
}


def output_widths(file: Checkpoint) -> frozenset[int]:
    """Return the width the projector puts out; where its type is not in the table, every width it could be."""
    named = LAST.get(tower.projector_type(file) or "")
    if named is not None:
        tensor = file.by_name.get(named[0])
        if tensor is not None and len(tensor.shape) > named[1]:
            return frozenset({tensor.shape[named[1]]})
    joining = [t for t in file.tensors if t.role is Role.VISION and t.name.startswith(("mm.", "mm_", "resampler.", "adapter."))]
    widths = {n for t in joining for n in t.shape}
    declared = tower.number(file, "clip.vision.projection_dim")
    return frozenset(widths | {declared} if declared else widths)


@rule.check
def check(facts: Facts) -> Finding:
    """Compare the projector's output with the model's embedding length."""
    file, main = facts.models.mmproj, facts.models.main
    if file is None or main is None or not tower.is_projector(file):
        return rule.not_applicable("the launch names no projector file")
    told = [remark for remark in facts.budget.remarks if remark.code == "projector-width"]
    if told:  # the engine's model builds the encoder's graph, so it knows
        text = "; ".join(remark.message for remark in told)
        return rule.veto(f"{text[:1].upper()}{text[1:]}.", knob="model.mmproj", ways=told[0].ways)
    if not tower.vision_bytes(file):
        return rule.not_applicable("the projector has no image encoder")
    width, widths = main.integer("embedding_length"), output_widths(file)
    if not width or not widths:
        return rule.not_applicable("a width is not stated")
    deep = main.integer("n_deepstack_layers")
    legal = {width * (1 + n) for n in range(deep + 1)}
    if widths & legal:
        return rule.approve(f"embeddings of {width}")
    if len(widths) == 1:
        message = f"The projector puts out embeddings of {min(widths)}, and the model takes {width}: they were not made for each other."
    else:
        message = f"The model takes embeddings of {width}, and no tensor of the projector has that width: they were not made for each other."
    return rule.veto(message, knob="model.mmproj", ways=(Way(knob="model.mmproj", value=None, note="text only"),))
