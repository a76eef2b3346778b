"""The engine accepts the settings it is given.

What: no two settings exclude each other, none is unknown to this version, and none is one that the
engine refuses, or takes and then dies of.

Why: an engine of one version ignores what another refuses, and some refuse only after the weights
are loaded. Knowing it beforehand costs nothing. An example is a split mode whose buffers the back end
no longer has: https://github.com/ggml-org/llama.cpp/issues/22592 lists what planners run into.

Fix: the message names the setting and what to use instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.text import sentence

from .claims import unclaimed

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="settings/possible")

_KINDS = ("impossible", "conflict", "unknown-setting", "fails-late")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Pass on what the engine's model calls impossible."""
    found = [
        rule.veto(
            sentence(remark.message), knob=remark.knob, value=remark.value, pool=remark.pool, missing=remark.capability,
            need_bytes=remark.need_bytes, have_bytes=remark.have_bytes, ways=remark.ways,
        )
        for remark in facts.budget.remarks
        if remark.kind in _KINDS and unclaimed(remark)
    ]  # fmt: skip
    return found or rule.approve("nothing the engine refuses")
