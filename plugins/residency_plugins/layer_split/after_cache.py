"""What comes after a cache that takes what is left fits into the reserve.

What: some engines give an expert cache all memory that is free, less a reserve. Whatever is allocated
later (windows, graphs, library handles, the first images of an encoder in another process) has to live
in that reserve, on every card by itself. Certain and likely bytes over the reserve are refused by
memory-budget/pools. Here the margin is judged: the most that has been measured. It is refused when three
things come together: a split over several cards, memory of another process that the engine does not
budget, and a version without a check at start-up that would notice. Otherwise it is a warning.

Why: on two 22 GB cards such a launch failed with an allocation of 1,538,035,200 bytes and once took the host
down with it, with tens of GiB pinned (https://github.com/Niko1221/Strata/issues/486). That allocation is the
first large one and does not depend on the context; what differed from the stable launch was the reserve and
the images. A fork with four cards needed about 1,500 MiB of reserve at large contexts and died before it was
ready with the default of 700; the versions that check at start-up came with
https://github.com/Niko1221/Strata/issues/496.

Fix: raise the reserve, or put the image encoder on the CPU or on another card. Less context is a weak lever:
the message says how much of the card depends on it. A fleet that accepts the risk sets this rule to "warn" or
waives it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way
from residency.units import MIB, size

from .cards import after_cache, card_sums, device_of, listed

if TYPE_CHECKING:
    from residency.rules import Facts

    from .cards import AfterCache

rule = Rule(id="layer-split/after-cache")

CAPABILITY = "startup-vram-budget"
STEP = 64 * MIB


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Compare what follows the cache with the reserve, card by card."""
    cards = after_cache(facts)
    if not cards:
        return rule.not_applicable("no cache takes what is left")
    split = len(card_sums(facts)) > 1
    findings = []
    for card in cards:
        if card.late_bytes("at_most") <= card.reserve_bytes:
            continue
        outside = any(a.purpose == "vision" for a in (*card.outside, *card.late)) or bool(card.outside)
        unchecked = facts.engine.lacks(CAPABILITY, device_of(facts, card.found.pool.name))
        findings.append(_refusal(card, facts) if split and outside and unchecked else _warning(card, unchecked=unchecked))
    if not any(str(f.outcome) == "veto" for f in findings):
        shown = ", ".join(f"{c.found.pool.name} up to {size(c.late_bytes('at_most'))} of {size(c.reserve_bytes)}" for c in cards)
        findings.append(rule.approve(f"after the cache: {shown}"))
    return findings


def _refusal(card: AfterCache, facts: Facts) -> Finding:
    pool, reserve, most = card.found.pool.name, card.reserve_bytes, card.late_bytes("at_most")
    default = " by default" if facts.launch.get("memory.reserve") is None else ""
    fixed = [a for a in card.found.allocations if not a.greedy and a.accounted and a.pieces == 1]
    largest = max(fixed, key=lambda a: a.certain_bytes, default=None)
    grows = sum(a.certain_bytes for a in card.found.allocations if a.knob == "context.length")
    margin = ", ".join(f"{a.name} up to {size(a.at_most_bytes)}" for a in card.late)
    message = (
        f"{pool}: what comes after the expert cache may need {size(most)}, and the cache leaves it only the reserve, {size(reserve)}{default}. "
        f"Certain is {size(card.late_bytes('certain'))}, likely {size(card.late_bytes('likely'))}; the rest is margin: {margin}. "
        f"This version has no check at start-up that would notice."
    )
    if card.outside:
        message += f" Not counted by the engine at all: {listed(card.outside, 'likely')}, which starts first."
    if largest is not None:
        message += (
            f" The largest single allocation, {largest.name} of {largest.certain_bytes} bytes, competes with that and with whatever an earlier run still holds."
        )
    pinned = sum(a.certain_bytes for a in facts.budget.allocations if a.backing == "pinned")
    if pinned:
        message += f" This failure has hung a host ({size(pinned)} of its memory would be pinned), so the margin decides."
    message += f" Context is a weak lever: only {size(grows)} here grow with it."
    low = facts.budget.facts.get("low_bytes")
    enough = most + (low if isinstance(low, int) else 0)  # what the engine's own log does not call low
    ways = [Way(knob="memory.reserve", value=8 * enough, low=enough, step=STEP, prefer="smallest")]
    if any(a.knob == "vision.device" for a in (*card.late, *card.outside)):
        ways += [Way(knob="vision.device", value="cpu", note="pictures take seconds instead of tenths"), Way(knob="vision.enabled", value=False, note="text only")]
    context = facts.budget.facts.get("context")
    if isinstance(context, int):
        ways.append(Way(knob="context.length", value=context - 1024, low=4096, step=1024, note="gives up far more than a larger reserve does"))
    return rule.veto(
        message, pool=pool, need_bytes=most, have_bytes=reserve, knob="memory.reserve", missing=CAPABILITY,
        largest_name=largest.name if largest else None, largest_bytes=largest.certain_bytes if largest else None, ways=tuple(ways),
    )  # fmt: skip


def _warning(card: AfterCache, *, unchecked: bool) -> Finding:
    pool, reserve, most = card.found.pool.name, card.reserve_bytes, card.late_bytes("at_most")
    wanted = -(-most // STEP) * STEP
    how = "this version does not check that at start-up" if unchecked else "start-up checks for it"
    return rule.warn(
        f"{pool}: after the expert cache come likely {size(card.late_bytes('likely'))} and at most {size(most)} ({listed(card.late)}); "
        f"the reserve is {size(reserve)}, and {how}. A reserve of {wanted // MIB} MiB covers it.",
        pool=pool, need_bytes=most, have_bytes=reserve, knob="memory.reserve",
    )  # fmt: skip
