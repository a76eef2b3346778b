"""The report for people: quiet when all is well, complete when it is not (DESIGN 4.4).

A report is built as lines of styled pieces and printed either plain or through rich, which is
imported only when the output is a terminal. Everything that came from files, environment or
plugins passes through :func:`residency.text.clean` first.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from residency.budget import Purpose
from residency.rules.finding import Outcome
from residency.text import clean, shorten
from residency.units import plural, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.budget import PoolSum
    from residency.rules.finding import Finding, Fix

    from .model import Report

Piece = tuple[str, str]  # text, rich style ("" = plain)
Line = list[Piece]

WIDTH = 100
_BAR = 54
_WIDEST = 120  # of the column of names in a plan; what is longer comes from a file
_MARKS = {Outcome.VETO: ("x", "bold red"), Outcome.WARN: ("!", "yellow"), Outcome.CANNOT_TELL: ("?", "bold magenta")}
_HEADS = {"allow": ("ALLOW", "bold green"), "veto": ("VETO", "bold red"), "no-verdict": ("NO VERDICT", "bold magenta")}
_ORDER = [p.value for p in Purpose]


def show_value(value: Any) -> str:
    """Return a knob's value as it would stand in a launch file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{clean(shorten(value, 80))}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(show_value(v) for v in value) + "]"
    if hasattr(value, "model_dump"):
        return clean(str(value.model_dump()))
    return clean(str(value))


def _spread(left: Line, right: str, style: str = "dim") -> Line:
    room = WIDTH - sum(len(t) for t, _ in left) - len(right)
    return [*left, (" " * max(2, room), ""), (right, style)] if right else left


def heading(report: Report) -> Line:
    """Return the first line: verdict, model, engine, machine; what was read and how long it took."""
    word, style = _HEADS[report.verdict]
    main = report.models.main
    model = clean(shorten(main.name)) if main else "starts no engine, only prints" if report.launch.starts_nothing else "no model"
    if report.launch.program is not None and report.launch.name != report.launch.program:
        model = f"{clean(report.launch.name)}: {model}"
    if report.engine_name == "together":
        return [(word, style), ("  ", ""), (f"{clean(report.launch.name)} · {clean(shorten(report.machine.name))}", "bold")]
    names = " · ".join([model, clean(report.engine.label), clean(shorten(report.machine.name))])
    read = ""
    if main is not None:
        files = plural(len(main.files), "shard") if len(main.files) > 1 else "1 file"
        kind = "census, " if main.source == "census" else ""
        read = f"{kind}{files}, {plural(len(main.tensors), 'tensor')}, {report.seconds:.2f} s"
    return _spread([(word, style), ("  ", ""), (names, "bold")], read)


def _place(finding: Finding) -> str:
    if finding.knob is None:
        return ""
    name = finding.knob.removeprefix("option:")
    if finding.where is None or finding.where.source == "default":
        return f"{name} not set" if finding.value is None else f"{name} = {shorten(show_value(finding.value), 120)}"
    typed = f"{clean(str(finding.where))}  "
    return f"{typed}{name}" if finding.value is None else f"{typed}{name} = {shorten(show_value(finding.value), 120)}"


def _wrapped(text: str, indent: str = "  ") -> Iterator[Line]:
    for line in textwrap.wrap(clean(text), WIDTH - len(indent), break_long_words=False, break_on_hyphens=False):
        yield [(indent + line, "")]


def show_fix(fix: Fix) -> list[Line]:
    """Return the lines of one "try"."""
    state = "verified: passes" if fix.verified else "not verified"
    name = fix.knob.removeprefix("option:")
    if fix.value is None and not fix.spelling:
        typed = f"without {name}"
    else:
        typed = clean(fix.spelling) if fix.spelling else f"{name} = {show_value(fix.value)}"
    note = f"; {clean(fix.note)}" if fix.note else ""
    rest = textwrap.wrap(state + note, max(24, WIDTH - 4 - len(typed)), break_long_words=False) or [""]  # a few columns over beat one word alone
    first: Line = [("  try      ", "dim"), (typed, "bold green" if fix.verified else ""), ("  ", ""), (rest[0], "dim")]
    return [first, *([(" " * 13 + line, "dim")] for line in textwrap.wrap(" ".join(rest[1:]), WIDTH - 13))]


def show_finding(finding: Finding) -> Iterator[Line]:
    """Yield the lines of one finding."""
    mark, style = _MARKS[finding.outcome]
    if finding.waived is not None:
        mark, style = "~", "yellow"
    place = _place(finding)
    head: Line = [(f"{mark} ", style), (clean(finding.rule), "bold")]
    if len(finding.rule) + len(place) + 4 > WIDTH:
        yield head
        yield [(f"  {place}", "dim")]
    else:
        yield _spread(head, place)
    yield from _wrapped(finding.message)
    if finding.missing is not None:
        yield [("  missing  ", "dim"), (clean(finding.missing_title or finding.missing), "")]
    if finding.largest_name is not None:
        yield [("  largest  ", "dim"), (f"{clean(finding.largest_name)}  {size(finding.largest_bytes)}", "")]
    if finding.waived is not None:
        waived = finding.waived
        yield [("  waived   ", "dim"), (clean(f"until {waived['until']} by {waived['approved_by']}: {waived['reason']}"), "")]
    for fix in finding.fixes:
        yield from show_fix(fix)


def _purposes(found: PoolSum) -> str:
    sums: dict[str, int] = {}
    for a in found.allocations:
        shown = a.likely_bytes if a.backing != "mapped" else a.at_most_bytes
        label = str(a.purpose) if a.backing != "mapped" else f"{a.purpose} (file cache, not counted)"
        sums[label] = sums.get(label, 0) + shown
    order = sorted(sums, key=lambda k: (_ORDER.index(k.split(" ")[0]), k))
    return "   ".join(f"{k} {size(sums[k])}" for k in order if sums[k])


def show_pool(found: PoolSum, report: Report) -> Iterator[Line]:
    """Yield the compact budget of one pool: a bar against what is usable, then the purposes."""
    if not found.allocations:
        return
    usable = found.usable_bytes
    devices = [d.name for d in report.machine.devices if d.pool == found.pool.name and d.name != found.pool.name]
    name = clean(" + ".join([found.pool.name, *devices]))
    if usable is None:
        yield [(f"{name}  size unknown, needs {size(found.likely_bytes)}", "")]
    else:
        share = found.likely_bytes / usable if usable else 2.0
        over = share > 1
        filled = _BAR if over else round(share * _BAR)
        bar = "#" * filled + (">" if over else "." * (_BAR - filled))
        style = "red" if over else "green"
        word = "free  " if usable == found.pool.free_bytes else "usable"
        yield [(f"{name:<14} {size(usable):>11} {word} |", ""), (bar, style), (f"|  {size(found.likely_bytes)}", "")]
    for line in _wrapped(_purposes(found), "  "):
        yield [(line[0][0], "dim")]


def render(report: Report, *, verbose: bool = False, budget: bool | None = None) -> list[Line]:
    """Return the report as lines.

    Args:
        report: what to show.
        verbose: also list the rules that approved or do not apply, and the machine's facts.
        budget: show the budget per pool; default: when the launch is not simply allowed.
    """
    lines: list[Line] = [heading(report)]
    shown = report.with_outcome(Outcome.CANNOT_TELL, Outcome.VETO, Outcome.WARN)
    main = report.models.main
    if main is not None and main.note and (shown or verbose):
        first, _, more = main.note.partition(". ")
        lines.append([(f"  note: {clean(main.note if verbose or not more else first + '.')}", "dim")])
    if not report.engine.version_given and (shown or verbose or report.launch.version_reason):
        lines.append([(f"  engine version not given: judged as {clean(report.engine.label)}, {clean(report.launch.version_reason or 'the newest known')}", "dim")])
    rank = {Outcome.CANNOT_TELL: 0, Outcome.VETO: 1, Outcome.WARN: 2}
    # A refusal that names a missing capability says why; it comes before those that say how much.
    told: dict[str, str] = {}  # ways out already shown, and the rule they stand under
    for finding in sorted(shown, key=lambda f: (rank[f.outcome], f.missing is None)):
        if not report.allowed:
            lines.append([])
        ways = repr(finding.fixes)
        if len(finding.fixes) > 1 and ways in told:
            lines.extend(show_finding(replace(finding, fixes=())))
            lines.append([("  try      ", "dim"), (f"the same as under {told[ways]}", "")])
        else:
            lines.extend(show_finding(finding))
        told.setdefault(ways, clean(finding.rule))
    if verbose:
        lines.append([])
        for finding in report.with_outcome(Outcome.APPROVE, Outcome.NOT_APPLICABLE):
            mark = "ok" if finding.outcome is Outcome.APPROVE else "--"
            lines.append([(f"{mark} {clean(finding.rule)}", ""), (f"  {clean(finding.message)}", "dim")])
        lines.extend([(f"  {clean(fact)}", "dim")] for fact in report.machine.facts)
    if budget if budget is not None else not report.allowed:
        lines.append([])
        for found in report.pools:
            lines.extend(show_pool(found, report))
    return lines


def show_budget(report: Report) -> list[Line]:
    """Return the whole budget, allocation by allocation, for ``residency plan``."""
    lines: list[Line] = []
    longest = max((len(clean(a.name)) for found in report.pools for a in found.allocations), default=0)
    width = min(max(61, 16 + longest), _WIDEST)
    for found in report.pools:
        if not found.allocations:
            continue
        lines.append([])
        lines.append([(f"{clean(found.pool.name):<{width + 1}}", "bold"), (f"{'certain':>12}{'likely':>12}{'at most':>12}  phase", "dim")])
        for a in found.allocations:
            label = f"  {a.purpose:<13} {clean(a.name)}"
            numbers = "".join(f"{size(n):>12}" for n in (a.certain_bytes, a.likely_bytes, a.at_most_bytes))
            kind = f" ({a.backing})" if a.backing != "device" else ""
            lines.append([(f"{shorten(label, width):<{width + 1}}", ""), (f"{numbers}  {a.phase}{kind}", "")])
        total = "".join(f"{size(n):>12}" for n in (found.certain_bytes, found.likely_bytes, found.at_most_bytes))
        lines.append([(f"  {'sum':<{width - 1}}", "bold"), (total, "bold"), (f"  of {size(found.usable_bytes)} free", "")])
    lines.extend([(f"? {clean(unknown.what)}: {clean(unknown.why)}", "")] for unknown in report.budget.unknowns)
    return lines


def plain(lines: list[Line]) -> str:
    """Return lines as text without any styling."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)
