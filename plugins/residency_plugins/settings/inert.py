"""Every setting does something.

What: a setting that is accepted and has no effect on this launch is reported, and so is a knob of a launch file that
the engine has nothing for.

Why: somebody set it for a reason. ``--fit`` with a fixed layer count does nothing and the load runs out
of memory (https://github.com/ggml-org/llama.cpp/issues/27872); a utilisation fraction that sizes
nothing (https://github.com/mudler/vllm.cpp/issues/1165) leaves the cache at its default.

Fix: remove the setting, or the one that disarms it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.rules import Finding, Rule
from residency.text import sentence

from .claims import unclaimed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.rules import Facts

rule = Rule(id="settings/inert", severity="warn")

#: Knobs that the core or a rule reads, whatever the engine.
READ_HERE = frozenset({"engine.name", "engine.version", "engine.options", "machine.profile", "memory.reserve", "vision.enabled", "vision.device"})
#: Values that ask for what an engine without the setting does anyway.
NOTHING_ASKED: dict[str, tuple[object, ...]] = {
    "context.full_window": (False,), "kv.on_device": (True,), "kv.resident": (0,), "kv.blocks": (0,), "layers.on_device": ("all", "auto"),
    "layers.split": ("none", "auto"), "experts.on_host": (0,), "experts.stream": (False,), "experts.slots": (0,), "experts.cache": (0, "auto"),
    "context.prefill": ("auto",), "context.flash_attention": ("auto",),
}  # fmt: skip
#: What to say of a knob beyond that the engine has no such setting.
MEANT = {
    "layers.first": "the points of its split cannot be set", "experts.stream": "it does not stream experts", "kv.resident": "its cache is never streamed",
}  # fmt: skip


def _unread(facts: Facts) -> Iterator[tuple[str, Any]]:
    """Yield the knobs that are set, ask for something and are read by nobody; none for an engine that does not say what it reads."""
    reads = facts.engine.reads
    if reads is None:
        return
    for section, table in facts.launch.knobs:
        for key, value in table:
            if value is None:
                continue
            knob = f"{section}.{key}"
            if knob not in reads and knob not in READ_HERE and value not in NOTHING_ASKED.get(knob, ()):
                yield knob, value


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Pass on what the engine's model calls inert, and name the knobs the engine does not read."""
    found = [
        rule.warn(sentence(remark.message), knob=remark.knob, value=remark.value)
        for remark in facts.budget.remarks
        if remark.kind == "inert" and unclaimed(remark)
    ]
    spoken = {remark.knob for remark in facts.budget.remarks}
    found += [
        rule.warn(f"This engine does not read {knob}: {MEANT.get(knob, 'it has no such setting')}, so it changes nothing.", knob=knob, value=value)
        for knob, value in _unread(facts)
        if knob not in spoken
    ]
    return found or rule.approve("no setting without effect")
