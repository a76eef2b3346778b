"""Host and device do not hold the same bytes twice in one pool.

What: on a machine where host and device draw from one pool, a host copy that stays beside the device's
copy of the same weights is counted twice, because it takes memory twice.

Why: an engine written for cards with memory of their own uploads weights and forgets that the source
lies in the same memory. Dense weights resident twice on unified memory:
https://github.com/mudler/vllm.cpp/issues/1299.

Fix: let the engine free or alias the host copy (the setting named in the message), read weights in place
from a file mapping, whose cache the kernel can drop, or compute on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.budget import Purpose
from residency.rules import Finding, Rule
from residency.units import size

from .limits import answered, filled, held, over, shared_by

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="unified-memory/double-copy")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Look for host copies in a pool that the device draws from too."""
    findings: list[Finding] = []
    shared = False
    for found in filled(facts):
        device = shared_by(found, facts)
        if device is None:
            continue
        shared = True
        copies = [a for a in found.allocations if a.purpose is Purpose.STAGING and a.backing != "mapped" and a.device is not None]
        twice, most = held(copies), sum(a.at_most_bytes for a in copies)
        if not most:
            continue
        knob = next((a.knob for a in copies if a.knob is not None), None)
        exceeded = over(found, facts)
        if exceeded is not None and twice and found.likely_bytes - twice <= exceeded.have_bytes:
            findings.append(
                rule.veto(
                    f"{found.pool.name}: host and {device.name} draw from one pool, and {size(twice)} of weights stand in it twice, as the host's "
                    f"copy and as the device's. The launch needs {size(exceeded.need_bytes)} of {size(exceeded.have_bytes)}; with one copy "
                    f"it would need {size(found.likely_bytes - twice)}.",
                    pool=found.pool.name, need_bytes=exceeded.need_bytes, have_bytes=exceeded.have_bytes, knob=knob, ways=facts.budget.ways,
                )
            )
        elif exceeded is None and twice:
            findings.append(
                rule.warn(
                    f"{found.pool.name}: {size(twice)} of weights stand in one pool twice, as the host's copy and as the copy of {device.name}.",
                    pool=found.pool.name, knob=knob,
                )
            )
        elif exceeded is None and found.likely_bytes - twice + most > exceeded_room(found.pool.total_bytes):
            findings.append(
                rule.warn(
                    f"{found.pool.name}: up to {size(most)} of weights may stand in one pool twice while they are uploaded to {device.name}, and "
                    f"there is no room for all of that.",
                    pool=found.pool.name, need_bytes=found.likely_bytes - twice + most, have_bytes=found.pool.total_bytes, knob=knob,
                )
            )
    return answered(rule, findings, shared=shared, well="every byte once")


def exceeded_room(total_bytes: int | None) -> int:
    """Return the total, or a number no need reaches when it is unknown."""
    return total_bytes if total_bytes is not None else 2**63
