"""Moving something "to the host" frees memory.

What: on a machine where host and device draw from one pool, a setting that keeps layers, experts or the
KV cache on the host is reported when it frees nothing.

Why: such settings were made for cards. On one pool the bytes only change their owner, and the work
moves to the slower side (https://github.com/mudler/vllm.cpp/issues/149). Weights in a file mapping are
another matter: their cache can be dropped, so keeping those on the host does help.

Fix: remove the setting, or read the weights from a file mapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.budget import Purpose
from residency.rules import Finding, Rule

from .limits import filled, shared_by

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="unified-memory/offload", severity="warn")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Look for settings that move bytes from a pool to itself."""
    launch = facts.launch
    shared = [(found, device) for found in filled(facts) if (device := shared_by(found, facts)) is not None]
    if not shared or launch.get("device.kind") == "cpu":
        return rule.not_applicable("no pool is shared by host and device")
    found, device = shared[0]
    if not any(a.device is not None for a in found.allocations):
        return rule.not_applicable("nothing is computed on a device")
    weights = (Purpose.WEIGHTS, Purpose.EXPERTS)
    mapped = any(a.backing == "mapped" and a.at_most_bytes for a in found.allocations if a.purpose in weights)
    layers = launch.get("layers.on_device")
    asked = {
        "experts.on_host": bool(launch.get("experts.on_host")) and not mapped,
        "layers.on_device": isinstance(layers, int) and facts.models.main is not None and layers <= facts.models.main.integer("block_count") and not mapped,
        "layers.overrides": any(o.device.casefold() == "cpu" for o in launch.get("layers.overrides") or ()) and not mapped,
        "kv.on_device": launch.get("kv.on_device") is False,
    }
    moved = {"experts.on_host": "experts", "layers.on_device": "layers", "layers.overrides": "tensors", "kv.on_device": "the KV cache"}
    findings = [
        rule.warn(
            f"{found.pool.name}: keeping {moved[knob]} on the host frees nothing, because host and {device.name} draw from this one pool; "
            f"it only moves the work.", knob=knob, pool=found.pool.name,
        )
        for knob, does in asked.items() if does
    ]
    return findings or rule.approve("nothing is moved from a pool to itself")
