"""On shared memory what counts is what is free, and free is not total.

What: a launch that fits the total of a pool shared by host and device, but not what is free there, is
refused with both numbers and with what may hold the difference: page cache, or other processes. So is a
reading that cannot be true.

Why: some engines size themselves by a share of the total. On a DGX Spark 0.87 of 121.69 GiB is more
than is ever free after boot (https://github.com/MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks/issues/47), and
copying the weights fills the pool with page cache, which the driver's "free" leaves out. A card
misread as shared memory showed more free than it has (https://github.com/ggml-org/llama.cpp/issues/17536).

Fix: stop what holds the memory. Page cache can be dropped by an administrator (sync, then 3 into
/proc/sys/vm/drop_caches); then probe again. Or make the launch smaller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.units import size

from .limits import answered, filled, over, shared_by

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="unified-memory/free-versus-total")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Look for launches that fit the total and not the free bytes."""
    findings: list[Finding] = []
    shared = False
    for found in filled(facts):
        pool, device = found.pool, shared_by(found, facts)
        total, free = pool.total_bytes, pool.free_bytes
        if total is not None and free is not None and free > total:
            findings.append(
                rule.veto(f"{pool.name}: {size(free)} free of {size(total)} cannot be; the reading is of another memory.", pool=pool.name, have_bytes=total)
            )
            continue
        if device is None:
            continue
        shared = True
        exceeded = over(found, facts)
        if exceeded is None:
            if free is None and total is not None and found.likely_bytes * 10 > total * 9:
                findings.append(
                    rule.warn(
                        f"{pool.name}: how much of the {size(total)} is free is unknown, and the launch takes {size(found.likely_bytes)} of it. "
                        f"The system itself needs some.", pool=pool.name, need_bytes=found.likely_bytes, have_bytes=total,
                    )
                )
            continue
        if total is None or free is None or exceeded.need_bytes > total - pool.reserved_bytes:
            continue  # it fits neither, and memory-budget/pools says so
        if exceeded.need_bytes <= free - pool.reserved_bytes:
            continue  # it is free, and a ceiling or the policy's margin is the narrower limit
        findings.append(
            rule.veto(
                f"{pool.name}: the launch needs {size(exceeded.need_bytes)}, which the {size(total)} of the pool would hold and the "
                f"{size(free)} free now do not. {size(total - free)} are held by page cache or by other processes of host and {device.name}, which share it.",
                pool=pool.name, need_bytes=exceeded.need_bytes, have_bytes=exceeded.have_bytes, ways=facts.budget.ways,
            )
        )
    return answered(rule, findings, shared=shared, well="fits what is free")
