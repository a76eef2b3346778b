"""Every setting does something.

What: a setting that is accepted and has no effect on this launch is reported.

Why: somebody set it for a reason. ``--fit`` with a fixed layer count does nothing and the load runs out
of memory (https://github.com/ggml-org/llama.cpp/issues/27872); a utilisation fraction that sizes
nothing (https://github.com/mudler/vllm.cpp/issues/1165) leaves the cache at its default.

Fix: remove the setting, or the one that disarms it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.text import sentence

from .claims import unclaimed

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="settings/inert", severity="warn")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Pass on what the engine's model calls inert."""
    found = [
        rule.warn(sentence(remark.message), knob=remark.knob, value=remark.value)
        for remark in facts.budget.remarks
        if remark.kind == "inert" and unclaimed(remark)
    ]
    return found or rule.approve("no setting without effect")
