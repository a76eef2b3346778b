"""Memory that the management tool does not report is known from elsewhere.

What: where the management tool answers "N/A" for a device's memory, the size and the free bytes of its
pool must come from another reading before anything is planned with them.

Why: on a DGX Spark nvidia-smi answers N/A or "Not Supported". Planners that take that for zero, or for
plenty, load until the kernel kills them or the machine hangs (https://github.com/AEON-7/vllm-dflash/issues/1,
https://github.com/zoedolan/Vybn/pull/2259); cudaMemGetInfo and /proc/meminfo answer
(https://github.com/mudler/vllm.cpp/issues/1126).

Fix: probe on the machine itself, or write total and free of the pool into the profile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.units import size

from .limits import filled

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="unified-memory/memory-query")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Look at the pools of devices whose memory query has no answer."""
    findings: list[Finding] = []
    silent = False
    for found in filled(facts):
        devices = [d for d in facts.machine.accelerators if d.pool == found.pool.name and d.memory_query is False]
        if not devices:
            continue
        silent = True
        name, pool = devices[0].name, found.pool
        if pool.total_bytes is None:
            findings.append(
                rule.cannot_tell(
                    f"{name}: the management tool reports no memory (N/A), and no other reading of {pool.name} is given, "
                    f"so {size(found.likely_bytes)} are compared with nothing.", pool=pool.name, need_bytes=found.likely_bytes,
                )
            )
        elif pool.free_bytes is None:
            findings.append(
                rule.warn(
                    f"{name}: the management tool reports no memory (N/A), and how much of the {size(pool.total_bytes)} is free is unknown; "
                    f"the launch is judged by the total.", pool=pool.name, need_bytes=found.likely_bytes, have_bytes=pool.total_bytes,
                )
            )
    if findings:
        return findings
    return rule.approve("the memory is known from another reading") if silent else rule.not_applicable("every device used reports its memory")
