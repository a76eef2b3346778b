"""Every pool holds what the launch puts into it.

What: the launch's allocations are added up per pool, in the order the engine makes them, and compared
with what is free there. Never the sum over pools: 10 GiB free on one card do not help the other.
Certain bytes over the free bytes are refused without argument; likely bytes plus the policy's margin
are refused with the band shown; at-most bytes are a warning.

Why: an engine reports the allocation that failed, seldom its size, and often only at the first
request. Loading a model for 26 minutes to die on the first token
(https://github.com/mudler/vllm.cpp/issues/1123), or taking a two-card host down with the last 1.4 GiB
(https://github.com/Niko1221/Strata/issues/486), costs far more than half a second of arithmetic.
Planners want exactly this per device (https://github.com/ggml-org/llama.cpp/issues/22592).

Fix: lower what the failing allocation depends on: context, sequences, micro-batch, layers or experts
on the device; or free memory that another process holds. The values offered as verified were
re-evaluated and pass.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from residency.budget import Phase
from residency.rules import Finding, Rule
from residency.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.budget import Allocation, PoolSum
    from residency.rules import Facts

rule = Rule(id="memory-budget/pools")

_WHEN = {
    Phase.BEFORE: "before the engine itself allocates anything",
    Phase.LOAD: "while the weights are loaded",
    Phase.CONTEXT: "after the weights are loaded, when the context is created",
    Phase.WARM_UP: "after the load, during warm-up",
    Phase.FIRST_FORWARD: "after a clean load, at the first forward",
    Phase.RUN_TIME: "after a clean start, while requests run",
}


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Compare every pool's sum with what is free there."""
    findings = [rule.cannot_tell(f"{unknown.what} is unknown: {unknown.why}.", pool=unknown.pool) for unknown in facts.budget.unknowns]
    if findings:
        return findings
    sums = [found for found in facts.budget.sums(facts.machine) if found.allocations]
    if not sums:
        if any(remark.kind in ("impossible", "conflict", "unknown-setting") for remark in facts.budget.remarks):
            return rule.not_applicable("the engine refuses this launch before it allocates anything")
        return rule.cannot_tell("The engine's memory plan is empty, so nothing was compared.")
    for found in sums:
        findings += _judge(found, facts)
    if not any(str(f.outcome) in ("veto", "cannot-tell") for f in findings):
        shown = ", ".join(f"{f.pool.name} {size(f.likely_bytes)} of {size(f.usable_bytes)}" for f in sums)
        findings.append(rule.approve(shown))
    return findings


def _judge(found: PoolSum, facts: Facts) -> list[Finding]:
    usable = found.usable_bytes
    name = found.pool.name
    if usable is None:
        if found.likely_bytes == 0:
            return []
        return [rule.cannot_tell(f"{name}: the launch puts {size(found.likely_bytes)} there, and how much it holds is unknown.", pool=name)]
    margin = facts.policy.margin_of(name, found.pool.total_bytes or 0)
    greedy = any(a.greedy for a in found.allocations)
    if greedy:  # what such an engine leaves free by itself counts towards the margin
        margin = max(0, margin - found.reserve_bytes)
    limit = max(0, usable - margin)
    if found.certain_bytes > usable:
        return [_refusal(found, facts, usable, usable, "certain")]
    if found.likely_bytes > limit:
        return [_refusal(found, facts, usable, limit, "likely")]
    return [] if greedy else list(_warnings(found, facts, usable))  # there the band is judged against the reserve: layer-split/after-cache


def _refusal(found: PoolSum, facts: Facts, usable: int, limit: int, number: str) -> Finding:
    over = found.first_over(limit, number=number)  # type: ignore[arg-type]
    assert over is not None
    failing, committed = over
    name = found.pool.name
    need = found.certain_bytes if number == "certain" else found.likely_bytes
    free = "free" if found.pool.free_bytes is not None else "in all (how much of it is free is unknown)"
    kept = f", {size(usable - limit)} of it kept as the policy's margin" if limit < usable else ""
    ceiling = ""
    if found.pool.ceiling_bytes is not None and usable < (found.pool.free_bytes or found.pool.total_bytes or 0) - found.pool.reserved_bytes:
        free, ceiling = "usable", f" (the device may take {size(found.pool.ceiling_bytes)} of the {size(found.pool.total_bytes)})"
    what = failing.name if failing.pieces == 1 else f"{failing.name} ({failing.pieces} pieces)"
    amount = getattr(failing, f"{number}_bytes")
    before = f"with {size(committed)} already taken" if committed else "as the first allocation"
    likely = sum(a.likely_bytes for a in itertools.takewhile(lambda a: a is not failing, found.allocations))
    if committed and size(likely) != size(committed):
        before += f" at the least, likely {size(likely)}"
    when = f"It fails {_WHEN[failing.phase]}"
    if failing.phase is Phase.FIRST_FORWARD and facts.budget.facts.get("fit_check") == "refuses":
        when = "The engine's own check counts this while it loads and refuses there; without it the first forward would fail"
    message = (
        f"{name}: the launch needs {size(need)} and {size(usable)} is {free}{ceiling}{kept}. "
        f"{when}: {what} {'wants' if failing.pieces == 1 else 'want'} {size(amount)} {before}."
    )
    if found.likely_bytes != found.certain_bytes or found.at_most_bytes != found.likely_bytes:
        message += f" Certain {size(found.certain_bytes)}, likely {size(found.likely_bytes)}, at most {size(found.at_most_bytes)}."
    largest_bytes, largest_name = max(_largest(a) for a in found.allocations)
    return rule.veto(
        message,
        pool=name,
        need_bytes=need,
        have_bytes=limit,
        knob=_knob(failing, found),
        largest_name=largest_name,
        largest_bytes=largest_bytes,
        ways=facts.budget.ways,
    )


def _largest(allocation: Allocation) -> tuple[int, str]:
    """Return the largest thing asked for at once: one of several pieces, or the whole."""
    if allocation.pieces > 1 and allocation.largest_bytes is not None:
        return allocation.largest_bytes, allocation.largest_name or allocation.name
    return allocation.likely_bytes, allocation.name


def _knob(failing: Allocation, found: PoolSum) -> str | None:
    if failing.knob is not None:
        return failing.knob
    movable = [a for a in found.allocations if a.knob is not None]
    return max(movable, key=lambda a: a.likely_bytes).knob if movable else None


def _warnings(found: PoolSum, facts: Facts, usable: int) -> Iterator[Finding]:
    """Yield what is no reason to refuse: a band that reaches over the pool, and a mapping that cannot stay cached."""
    name = found.pool.name
    mapped = sum(a.at_most_bytes for a in found.allocations if a.backing == "mapped")
    held = found.at_most_bytes - mapped
    if held > usable:
        peak = max((a for a in found.allocations if a.backing != "mapped"), key=lambda a: a.at_most_bytes - a.likely_bytes)
        yield rule.warn(
            f"{name}: likely {size(found.likely_bytes)} of {size(usable)}, but it can take up to {size(held)}; "
            f"the widest band is that of {peak.name}.",
            pool=name, need_bytes=held, have_bytes=usable, knob=peak.knob, ways=tuple(way for way in facts.budget.narrowing if way.knob == peak.knob),
        )  # fmt: skip
    left = max(0, usable - found.likely_bytes)
    if mapped > left:
        yield rule.warn(
            f"{name}: {size(mapped)} of weights are read from the file mapping and {size(left)} is left "
            f"to cache them. It runs, but it will read from disk again and again.",
            pool=name, need_bytes=found.likely_bytes + mapped, have_bytes=usable,
        )  # fmt: skip
