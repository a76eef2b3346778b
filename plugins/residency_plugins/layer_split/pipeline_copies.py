"""Copies for pipelining do not fill a card.

What: with pipeline parallelism an engine keeps several copies of every input that crosses cards. When a card is over
and the copies are what puts it over, they are named.

Why: with experts on the host the copies include them: 1.1 TB of compute buffer were asked for on two 24 GB cards, and
51.7 GB on another launch, where the engine then tried again without
(https://github.com/ggml-org/llama.cpp/issues/22592 collects such reports).

Fix: leave one layer off the cards, split by something other than layers, or build with one scheduler copy; any of the
three turns pipelining off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.budget import Purpose
from residency.rules import Finding, Rule, Way
from residency.units import size

from .cards import card_sums

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="layer-split/pipeline-copies")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Compare the compute buffers with and without the copies."""
    copies = facts.budget.facts.get("pipeline_copies")
    if not isinstance(copies, int) or copies < 2:
        return rule.not_applicable("no pipeline copies")
    findings = []
    known = facts.budget.facts.get("pipeline_copies_bytes")
    for found in card_sums(facts):
        usable = found.usable_bytes
        compute = sum(a.likely_bytes for a in found.allocations if a.purpose is Purpose.COMPUTE)
        extra = known.get(found.pool.name, 0) if isinstance(known, dict) else compute
        if usable is None or found.likely_bytes <= usable or found.likely_bytes - extra > usable:
            continue
        falls_back = facts.engine.has("pipeline-fallback", None)
        text = (
            f"{found.pool.name}: {size(compute)} of compute buffers hold {copies} copies of what crosses cards, and {size(usable - found.likely_bytes + compute)} "
            f"are left for them."
        )
        details = {"pool": found.pool.name, "need_bytes": found.likely_bytes, "have_bytes": usable, "knob": "layers.split"}
        if falls_back:
            findings.append(rule.warn(f"{text} The engine tries again without pipelining.", **details))
        else:
            findings.append(rule.veto(text, **details, ways=(Way(knob="layers.split", value="none"), Way(knob="context.micro_batch", value=128, note="slower prompts"))))
    return findings or rule.approve(f"{copies} copies fit")
