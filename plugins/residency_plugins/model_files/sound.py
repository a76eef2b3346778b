"""The model files are complete and sound.

What: every shard is there, belongs to the same model and is as long as its tensor table says; every
tensor lies inside its file, and its type and shape agree with its size.

Why: an engine that finds a missing or cut shard finds it after minutes of loading, or not at all:
the last tensors of a truncated download are garbage, not an error. A shard's header costs a
millisecond to read. Reported as https://github.com/ggml-org/llama.cpp/issues/11975 (a tensor type
the engine does not know) and in many "data is not within the file bounds" threads.

Fix: download the named file again; for a type the engine does not know, use the build that wrote it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.text import sentence
from residency.units import plural

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="model-files/sound")

_KNOBS = ("model.path", "model.mmproj", "model.draft")
#: Options by which an engine fetches a model by itself.
_DOWNLOADS = ("hf-repo", "model-url", "docker-repo")
#: Faults shown one by one; the rest is counted, so that a shredded file does not fill the screen.
_SHOWN = 5


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Turn the faults of every file into findings."""
    if facts.models.main is None:
        fetched = next((name for name in _DOWNLOADS if facts.launch.options.get(name)), None)
        said = f" --{fetched} downloads one when the engine starts: fetch it first and give its path." if fetched else ""
        return rule.cannot_tell(f"The launch names no local model file, so there is nothing to judge it by.{said}", knob="model.path")
    findings: list[Finding] = []
    for knob, model in zip(_KNOBS, (facts.models.main, facts.models.mmproj, facts.models.draft), strict=True):
        if model is None:
            continue
        fatal = [f for f in model.faults if f.fatal]
        mild = [f for f in model.faults if not f.fatal]
        findings += [rule.veto(sentence(fault.message), knob=knob) for fault in fatal[:_SHOWN]]
        if len(fatal) > _SHOWN:
            findings.append(rule.veto(f"{plural(len(fatal) - _SHOWN, 'more fault')} of the same files.", knob=knob))
        findings += [rule.warn(sentence(fault.message), knob=knob) for fault in mild[:_SHOWN]]
        if len(mild) > _SHOWN:
            findings.append(rule.warn(f"{plural(len(mild) - _SHOWN, 'more remark')} on the same files.", knob=knob))
    if not any(str(f.outcome) == "veto" for f in findings):
        findings.append(rule.approve(f"{plural(sum(len(m.files) for m in facts.models.all()), 'file')} read, all tensors accounted for."))
    return findings
