"""Prefault does not read more into memory than memory holds.

What: when the engine reads the whole file mapping before it starts (prefault), the mapping fits what the
launch leaves free of the host's pool.

Why: prefault is meant to warm the cache. With a mapping larger than the cache each page pushes an
earlier one out: hundreds of GiB are read to keep the last ones, and the first requests read them all
again. Prefault is on by default in engines that document it as off
(https://github.com/mudler/vllm.cpp/issues/1109).

Fix: switch prefault off; pages are then read as tokens need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way
from residency.units import size

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="unified-memory/prefault")


@rule.check
def check(facts: Facts) -> Finding:
    """Compare the mapping that is read ahead with the room for it."""
    asked = facts.launch.get("memory.prefault")
    planned = facts.budget.facts.get("prefault_bytes")
    host = facts.machine.host_pool
    found = next((s for s in facts.budget.sums(facts.machine) if s.pool.name == host.name), None)
    mapped = 0
    if isinstance(planned, int):
        mapped = planned
    elif asked and found is not None:
        mapped = sum(a.at_most_bytes for a in found.allocations if a.backing == "mapped")
    if not mapped or asked is False:
        return rule.not_applicable("nothing is read ahead")
    if found is None or (usable := found.usable_bytes) is None:
        return rule.not_applicable("the size of the host's pool is unknown")
    room = max(0, usable - found.likely_bytes)
    if mapped <= room:
        return rule.approve(f"{size(mapped)} read ahead into {size(room)}")
    how = "asked for" if asked else "on by default"
    return rule.warn(
        f"{host.name}: prefault is {how} and reads {size(mapped)} of file mapping into {size(room)} that the launch leaves free. "
        f"The start reads all of it and keeps only the last part.",
        pool=host.name, need_bytes=mapped, have_bytes=room, knob="memory.prefault",
        ways=(Way(knob="memory.prefault", value=False, note="pages are read as tokens need them"),),
    )
