"""A device on shared memory may use less of it than there is.

What: where a device may take only a part of the pool it shares with the host (a firmware carve-out, a GTT
limit, a recommended working set, the limit of managed allocations), the launch stays under that part.

Why: the total is the machine's and the ceiling is the device's. An M1 with 8 GiB accepts every buffer of
a model that is over its working set, and the first graph fails (https://github.com/mozilla-ai/llamafile/issues/42);
Strix Halo reports 64 GiB and serves 58 (https://github.com/mudler/vllm.cpp/issues/2518).

Fix: make the launch smaller, raise the ceiling where the system lets you (carve-out in the firmware, GTT
size, wired limit), or compute on the CPU, for which the ceiling does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.units import size

from .limits import answered, filled, over, shared_by

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="unified-memory/ceiling")

#: What the ceiling is called, by device kind.
CALLED = {
    "metal": "the recommended working set",
    "rocm": "the carve-out, the GTT limit or the limit of managed allocations",
    "vulkan": "the largest heap",
    "cuda": "the limit for the device",
}
#: Share of the total from which an unknown ceiling is worth a warning; the lowest seen is 65 % (M1 with 8 GiB).
SUSPECT_PERCENT = {"metal": 65, "rocm": 85, "vulkan": 70}


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Compare the launch with the ceiling of each shared pool."""
    findings: list[Finding] = []
    shared = False
    for found in filled(facts):
        pool, device = found.pool, shared_by(found, facts)
        used = any(a.device is not None for a in found.allocations)
        if device is None or not used or pool.total_bytes is None:
            continue
        shared = True
        called = CALLED.get(device.kind, "the limit for the device")
        if pool.ceiling_bytes is None:
            percent = SUSPECT_PERCENT.get(device.kind)
            if percent is not None and over(found, facts) is None and found.likely_bytes * 100 > pool.total_bytes * percent:
                findings.append(
                    rule.warn(
                        f"{pool.name}: how much of the {size(pool.total_bytes)} {device.name} may use ({called}) is unknown, and the launch takes "
                        f"{size(found.likely_bytes)}.", pool=pool.name, need_bytes=found.likely_bytes, have_bytes=pool.total_bytes,
                    )
                )
            continue
        exceeded, free = over(found, facts), pool.free_bytes if pool.free_bytes is not None else pool.total_bytes
        if exceeded is None or exceeded.need_bytes > free - pool.reserved_bytes or exceeded.have_bytes >= free - pool.reserved_bytes:
            continue  # it is under the ceiling, or what is free is the narrower limit, and others say so
        findings.append(
            rule.veto(
                f"{pool.name}: {device.name} may use {size(pool.ceiling_bytes)} of the {size(pool.total_bytes)} ({called}), and the launch puts "
                f"{size(found.likely_bytes - found.host_bytes)} there. That {size(free)} are free does not help the device.",
                pool=pool.name, need_bytes=exceeded.need_bytes, have_bytes=exceeded.have_bytes, ways=facts.budget.ways,
            )
        )
    return answered(rule, findings, shared=shared, well="under the ceiling, or none is known")
