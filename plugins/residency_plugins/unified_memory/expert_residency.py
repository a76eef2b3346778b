"""A device that must hold every expert has room for every expert, or a slot store for some.

What: the expert towers that the engine makes resident on a device fit its pool beside everything else, or
the engine has a device-side expert slot store, which holds a few experts at a time.

Why: routed experts are most of a large model, and a token needs a few of them. An engine without slots
on the device makes each tower resident whole, all experts of one matrix of one layer in one allocation,
often only at the first request: a 370 GiB model loaded for 26 minutes and died in layer 16 of 93
(https://github.com/mudler/vllm.cpp/issues/1123; the missing store is
https://github.com/mudler/vllm.cpp/issues/1124).

Fix: compute on the CPU, where experts can be read from the file as tokens need them; keep experts on the
host where the engine can; or take a smaller checkpoint. A larger pool helps only when it holds them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.budget import Phase, Purpose
from residency.checkpoint.model import Role
from residency.rules import Finding, Rule
from residency.units import plural, size

from .limits import filled, over

if TYPE_CHECKING:
    from residency.budget import Allocation, PoolSum
    from residency.machine.model import Device
    from residency.rules import Facts

    from .limits import Over

rule = Rule(id="unified-memory/expert-residency")

STORE = "device-expert-slots"
_CHECK = {
    "refuses": "The engine's own check counts this while it loads and refuses there.",
    "off": "This version checks that at load, but the check is switched off, so it loads to the end and fails late.",
    "absent": "The load itself succeeds and says nothing.",
}


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Compare the expert towers of every device with its pool."""
    findings: list[Finding] = []
    resident = 0
    for found in filled(facts):
        for towers in found.allocations:
            device = facts.machine.device(towers.device or "")
            if towers.purpose is not Purpose.EXPERTS or towers.backing != "device" or device is None:
                continue
            resident += towers.likely_bytes
            exceeded = over(found, facts)
            if exceeded is None or not facts.engine.lacks(STORE, device):
                continue
            placeable = facts.engine.has("expert-placement", device) or any(way.knob == "experts.on_host" for way in facts.budget.ways)
            if placeable and not facts.launch.get("experts.stream"):
                continue  # the engine can keep experts off the device; memory-budget/pools offers how many
            if found.certain_bytes - towers.certain_bytes > exceeded.have_bytes:
                continue  # it would not fit without any expert; memory-budget/pools says what is too large
            findings.append(_refusal(found, towers, device, exceeded, facts))
    if findings:
        return findings
    return rule.approve(f"{size(resident)} of experts on devices") if resident else rule.not_applicable("no expert becomes resident on a device")


def _refusal(found: PoolSum, towers: Allocation, device: Device, exceeded: Over, facts: Facts) -> Finding:
    pool = found.pool
    free = f", {size(pool.free_bytes)} of it free" if pool.free_bytes is not None else ""
    counted = plural(towers.pieces, "expert tower") if towers.pieces > 1 else "the expert towers"
    largest = f", the largest single allocation {towers.largest_bytes:,} bytes" if towers.largest_bytes is not None else ""
    message = (
        f"{device.name} must hold every expert: {counted}, {towers.likely_bytes:,} bytes ({size(towers.likely_bytes)}){largest}, "
        f"in a pool of {size(pool.total_bytes)}{free}."
    )
    message += _where_it_ends(found, towers, facts)
    if towers.phase is Phase.FIRST_FORWARD:
        message += " " + _CHECK.get(str(facts.budget.facts.get("fit_check")), _CHECK["absent"])
    if any(way.knob == "experts.stream" and way.value is True for way in facts.budget.ways):
        message += " Expert streaming, which keeps them in host memory here, is off."
    return rule.veto(
        message,
        pool=pool.name,
        need_bytes=exceeded.need_bytes,
        have_bytes=exceeded.have_bytes,
        knob="device.kind",
        missing=STORE,
        largest_name=towers.largest_name,
        largest_bytes=towers.largest_bytes,
        ways=facts.budget.ways,
    )


def _where_it_ends(found: PoolSum, towers: Allocation, facts: Facts) -> str:
    """Return how many towers fit beside the other weights, were the whole pool free, and where the rest fails."""
    model, total = facts.models.main, found.pool.total_bytes
    if model is None or total is None:
        return ""
    weights = [a for a in found.allocations if a.purpose is Purpose.WEIGHTS]
    other = sum(a.likely_bytes for a in weights)
    stored = sum(a.certain_bytes for a in weights)
    written = f" once written out, {size(stored)} as the file stores them" if other > stored else ""
    pieces = sorted((t for t in model.tensors if t.role is Role.EXPERT and t.layer is not None), key=lambda t: t.layer or 0)
    if len(pieces) > towers.pieces:  # the next-token block's own towers stay out where nothing speculates
        first = model.integer("block_count") - model.integer("nextn_predict_layers")
        pieces = [t for t in pieces if t.layer is not None and t.layer < first]
    if len(pieces) != towers.pieces:
        return ""  # some of them stay elsewhere, and which is the engine's affair
    in_file = sum(t.nbytes for t in pieces)
    committed, fit = other, 0
    for tensor in pieces:
        piece = tensor.nbytes * towers.likely_bytes // in_file if in_file else 0  # an engine may write them out wider
        if committed + piece > total:
            layers = model.integer("block_count")
            when = "the first forward would fail" if towers.phase is Phase.FIRST_FORWARD else "the load would fail"
            return (
                f" Beside the other weights ({size(other)}{written}) about {fit} of them fit, even with the whole pool free, "
                f"so {when} in layer {tensor.layer} of {layers}."
            )
        committed, fit = committed + piece, fit + 1
    return ""
