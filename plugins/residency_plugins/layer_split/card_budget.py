"""No card is over while another has room.

What: on a model spread over cards, the card that is over its memory is named with the allocation that
comes too late, in the engine's order, and with what the other cards still have.

Why: the sum over cards often suffices while one card does not, and the last allocation there fails after
everything else was loaded (https://github.com/Niko1221/Strata/issues/486). The split is then the lever, not the
model (https://github.com/ggml-org/llama.cpp/issues/22592).

Fix: give the full card a smaller share, with the ratio offered, or let the engine place the split itself.
"""

from __future__ import annotations

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
    sums = card_sums(facts)
    if len(sums) < 2:
        return rule.not_applicable("one card")
    room = {s.pool.name: s.usable_bytes for s in sums}
    if any(r is None for r in room.values()):
        return rule.not_applicable("how much a card holds is unknown; memory-budget/pools says which")
    left = {s.pool.name: (room[s.pool.name] or 0) - s.likely_bytes for s in sums}
    spare = {name: free for name, free in left.items() if free > 0}
    findings = []
    for found in sums:
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
    return findings or rule.approve(", ".join(f"{name} {size(max(0, free))} left" for name, free in left.items()))


def _ways(facts: Facts, sums: tuple[PoolSum, ...], room: dict[str, int | None]) -> tuple[Way, ...]:
    if facts.launch.get("layers.first"):
        return (Way(knob="layers.first", value=None, note="the engine places the split"),)
    # What a ratio moves are weights and caches; buffers and driver contexts stay on every card.
    moved = (Purpose.WEIGHTS, Purpose.EXPERTS, Purpose.KV, Purpose.STATE)
    spaces = [max(0, (room[s.pool.name] or 0) - sum(a.likely_bytes for a in s.allocations if a.purpose not in moved)) for s in sums]
    if not sum(spaces):
        return (Way(knob="layers.ratio", value=None),)
    shares = [100 * space / sum(spaces) for space in spaces]
    short = min(range(len(spaces)), key=lambda i: spaces[i])
    parts = (1.0, 0.75, 0.5)  # of its space for the shortest card: whole layers do not divide evenly
    ratios = [[round(share * part if i == short else share) for i, share in enumerate(shares)] for part in parts]
    total = sum(a.likely_bytes for s in sums for a in s.allocations if a.purpose in moved)
    # The first follows the spaces themselves; the others load the larger cards more, which may be more than they hold.
    fitting = [r for n, r in enumerate(ratios) if not n or all(total * part <= space * sum(r) for part, space in zip(r, spaces, strict=True))]
    return tuple(Way(knob="layers.ratio", value=ratio) for ratio in fitting)
