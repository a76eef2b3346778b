"""No card is over while another has room.

What: on a model spread over cards, the card that is over its memory is named with the allocation that
comes too late, in the engine's order, and with what the other cards still have.

Why: the sum over cards often suffices while one card does not, and the last allocation there fails after
everything else was loaded (https://github.com/Niko1221/Strata/issues/486). The split is then the lever, not the
model (https://github.com/ggml-org/llama.cpp/issues/22592).

Fix: give the full card a smaller share, count every card the launch may use, with the ratio offered, or let the engine place the split itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from residency.budget import Purpose
from residency.rules import Finding, Rule, Way
from residency.units import size

from .cards import card_sums

if TYPE_CHECKING:
    from residency.budget import PoolSum
    from residency.rules import Facts

rule = Rule(id="layer-split/card-budget")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Look for a card that is over beside one that is not."""
    used = card_sums(facts)
    if len(used) < 2:
        return rule.not_applicable("one card")
    sums = _reachable(facts, used)
    room = {s.pool.name: s.usable_bytes for s in sums}
    if any(room[s.pool.name] is None for s in used):
        return rule.not_applicable("how much a card holds is unknown; memory-budget/pools says which")
    left = {s.pool.name: (room[s.pool.name] or 0) - s.likely_bytes for s in sums if room[s.pool.name] is not None}
    spare = {name: free for name, free in left.items() if free > 0}
    findings = []
    for found in used:
        name = found.pool.name
        over = -left[name]
        if over <= 0 or sum(spare.values()) < over:
            continue
        late = found.first_over(room[name] or 0)
        assert late is not None
        others = ", ".join(f"{other} has {size(free)} left" for other, free in spare.items())
        findings.append(
            rule.veto(
                f"{name} is {size(over)} over, while {others}: {late[0].name} ({size(late[0].likely_bytes)}) comes when {size(late[1])} of "
                f"{size(room[name])} are taken. The cards together would hold the launch; the split does not fit them.",
                pool=name, need_bytes=found.likely_bytes, have_bytes=room[name], knob="layers.first" if facts.launch.get("layers.first") else "layers.ratio",
                ways=_ways(facts, sums, room),
            )
        )  # fmt: skip
    return findings or rule.approve(", ".join(f"{s.pool.name} {size(max(0, left[s.pool.name]))} left" for s in used))


def _reachable(facts: Facts, used: tuple[PoolSum, ...]) -> tuple[PoolSum, ...]:
    """Return the sums of the cards the launch may use, those it puts nothing on included, in the order of a ratio's shares."""
    by_pool = {s.pool.name: s for s in facts.budget.sums(facts.machine)}
    ids = facts.launch.get("device.ids")
    if ids is not None:
        devices = [d for name in ids if (d := facts.machine.device(name)) is not None]
    else:
        kinds = {d.kind for d in facts.machine.accelerators if any(d.pool == s.pool.name for s in used)}
        devices = [d for d in facts.machine.accelerators if d.kind in kinds and d.integrated is not True]
    found = [by_pool[pool] for pool in dict.fromkeys(d.pool for d in devices) if pool in by_pool]
    return tuple(found) if {s.pool.name for s in used} <= {s.pool.name for s in found} else used


def _ways(facts: Facts, sums: tuple[PoolSum, ...], room: dict[str, int | None]) -> tuple[Way, ...]:
    if facts.launch.get("layers.first"):
        return (Way(knob="layers.first", value=None, note="the engine places the split"),)
    left_to_engine = (Way(knob="layers.ratio", value=None, note="by what is free on each card"),) if facts.launch.get("layers.ratio") else ()
    # What a ratio moves are weights and caches; buffers and driver contexts stay on every card.
    moved = (Purpose.WEIGHTS, Purpose.EXPERTS, Purpose.KV, Purpose.STATE)
    spaces = [max(0, (room[s.pool.name] or 0) - sum(a.likely_bytes for a in s.allocations if a.purpose not in moved)) for s in sums]
    if not sum(spaces):
        return left_to_engine
    shares = [100 * space / sum(spaces) for space in spaces]
    short = min(range(len(spaces)), key=lambda i: spaces[i])
    parts = (1.0, 0.75, 0.5)  # of its space for the shortest card: whole layers do not divide evenly
    ratios = [[round(share * part if i == short else share) for i, share in enumerate(shares)] for part in parts]
    total = sum(a.likely_bytes for s in sums for a in s.allocations if a.purpose in moved)
    # The first follows the spaces themselves; the others load the larger cards more, which may be more than they hold.
    fitting = [r for n, r in enumerate(ratios) if not n or all(total * part <= space * sum(r) for part, space in zip(r, spaces, strict=True))]
    lowest = [_lowest(ratio) for ratio in fitting if sum(ratio)]
    if len(set(room.values())) == 1:  # a card that was left empty shows none of the buffers it would have to hold
        lowest = [[1] * len(sums), *(ratio for ratio in lowest if len(set(ratio)) > 1)]
    return (*(Way(knob="layers.ratio", value=ratio) for ratio in lowest), *left_to_engine)


def _lowest(ratio: list[int]) -> list[int]:
    """Return a ratio in its lowest terms; shares that differ by rounding alone are the same."""
    if max(ratio) - min(ratio) <= 1:
        return [1] * len(ratio)
    divisor = math.gcd(*ratio)
    return [share // divisor for share in ratio]
