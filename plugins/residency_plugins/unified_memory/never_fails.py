"""Where an allocation cannot fail, something is left for the machine.

What: on memory that host and device share, and under a driver that pages device memory out instead of
failing (WDDM, WSL), the launch leaves a little of the pool.

Why: there no allocation comes back with an error. The system starves, swaps or kills: loading on a DGX
Spark hung the machine (https://github.com/AEON-7/vllm-dflash/issues/1), and an over-commit on shared memory
rebooted another five times. A refusal costs a second, a hung host a drive to it.

Fix: a smaller context, fewer sequences, a smaller checkpoint; or a margin in the policy, which turns
this warning into a refusal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residency.machine.model import usable_bytes
from residency.rules import Finding, Rule
from residency.units import GIB, MIB, size

from .limits import filled, over

if TYPE_CHECKING:
    from residency.budget import PoolSum
    from residency.rules import Facts

rule = Rule(id="unified-memory/never-fails", severity="warn")

#: What a host needs to stay alive beside the engine, and what a desktop's driver starts paging at.
HOST_FLOOR_BYTES = 2 * GIB
PAGING_FLOOR_BYTES = 512 * MIB


def _kind(found: PoolSum, facts: Facts) -> tuple[str, int] | None:
    for device in facts.machine.accelerators:
        if device.pool != found.pool.name:
            continue
        if facts.machine.is_unified(device):
            return f"host and {device.name} share this memory, so running out of it takes the host down instead of failing an allocation", HOST_FLOOR_BYTES
        if device.driver_model == "WDDM" or facts.machine.host.wsl:
            return f"the driver of {device.name} moves memory to the host instead of failing an allocation, and everything becomes slow", PAGING_FLOOR_BYTES
    return None


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Look at what is left of pools whose allocations never fail."""
    findings: list[Finding] = []
    watched = False
    for found in filled(facts):
        # Without the device's ceiling: over that an allocation fails, and the host lives.
        kind, usable = _kind(found, facts), usable_bytes(replace(found.pool, ceiling_bytes=None))
        if kind is None or usable is None:
            continue
        watched = True
        why, floor = kind
        floor = min(floor, (found.pool.total_bytes or usable) // 8)
        left = usable - found.likely_bytes
        if over(found, facts) is None and left < floor:
            findings.append(
                rule.warn(
                    f"{found.pool.name}: {size(left)} of {size(usable)} is left; {why}. Leave {size(floor)}.",
                    pool=found.pool.name, need_bytes=found.likely_bytes + floor, have_bytes=usable,
                )
            )
    if findings:
        return findings
    return rule.approve("enough is left") if watched else rule.not_applicable("allocations fail where memory runs out")
