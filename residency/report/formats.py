"""Report formats for machines: json, sarif, github, junit. Each is one string for stdout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from residency.rules.finding import Outcome
from residency.text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from residency.errors import Problem
    from residency.rules.finding import Finding
    from residency.where import Where

    from .model import Report

_BAD = (Outcome.VETO, Outcome.CANNOT_TELL)


def to_json(reports: Sequence[Report], warnings: Sequence[Problem] = ()) -> str:
    """Return one JSON document: the report, or {"schema", "exit_code", "reports"} for several.

    ``warnings``, here and in the other formats: what of the source is not judged or has been assumed.
    """
    documents = [r.to_dict() for r in reports]
    document: Any = documents[0]
    if len(documents) != 1:
        document = {"schema": "residency.reports/1", "exit_code": worst(reports), "reports": documents}
    if warnings:
        document["warnings"] = [_row(p) for p in warnings]
    return json.dumps(document, indent=2, ensure_ascii=True)


def worst(reports: Sequence[Report]) -> int:
    """Return the exit code of several reports: the largest, as 3 wins over 1 wins over 0."""
    return max((int(r.exit_code) for r in reports), default=3)


def _shown(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.outcome in (*_BAD, Outcome.WARN) and f.waived is None]


def _level(finding: Finding) -> str:
    return "warning" if finding.outcome is Outcome.WARN else "error"


def _advice(finding: Finding) -> str:
    tries = [f"{x.spelling or x.knob + ' = ' + str(x.value)}{' (verified)' if x.verified else ''}" for x in finding.fixes]
    return f"{finding.message} Try: {'; '.join(tries)}." if tries else finding.message


def to_sarif(reports: Sequence[Report], warnings: Sequence[Problem] = ()) -> str:
    """Return SARIF 2.1.0 with one run."""
    results, rules = [], {}
    for report in reports:
        for finding in _shown(report):
            rules[finding.rule] = {"id": finding.rule}
            result: dict[str, Any] = {"ruleId": finding.rule, "level": _level(finding), "message": {"text": _advice(finding)}}
            results.append(result | _sarif_place(finding.where))
    if warnings:
        rules[_INPUT] = {"id": _INPUT}
        results += _sarif_problems("warning", warnings)
    return _sarif(results, list(rules.values()), worst(reports))


def _sarif(results: list[dict[str, Any]], rules: list[dict[str, str]], code: int) -> str:
    from residency import __version__

    driver = {"name": "residency", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": results, "invocations": [{"executionSuccessful": code < 2, "exitCode": code}]}
    return json.dumps({"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}, indent=2)


def _sarif_place(where: Where | None) -> dict[str, Any]:
    if where is None or where.file is None:
        return {}
    region = {"startLine": where.line or 1, "startColumn": where.column or 1}
    return {"locations": [{"physicalLocation": {"artifactLocation": {"uri": where.file}, "region": region}}]}


def _escape(text: str, *, value: bool = False) -> str:
    """Escape for a workflow command; property values also escape ':' and ','."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if value else text


def to_github(reports: Sequence[Report], warnings: Sequence[Problem] = ()) -> str:
    """Return workflow commands, one line per finding."""
    lines = [_github("warning", p.where, _INPUT, _told(p)) for p in warnings]
    for report in reports:
        lines += [_github(_level(f), f.where, f.rule, _advice(f)) for f in _shown(report)]
        lines.append(f"residency: {report.verdict}: {clean(report.launch.name)}")
    return "\n".join(lines)


def _github(level: str, where: Where | None, title: str, text: str) -> str:
    place = ""
    if where is not None and where.file is not None:
        place = f"file={_escape(where.file, value=True)},line={where.line or 1},col={where.column or 1},"
    return f"::{level} {place}title={_escape(title, value=True)}::{_escape(clean(text))}"


def to_junit(reports: Sequence[Report], warnings: Sequence[Problem] = ()) -> str:
    """Return a JUnit document: one suite per launch, one case per rule."""
    from xml.sax.saxutils import escape, quoteattr

    suites = []
    if warnings:
        skipped = "".join(
            f'<testcase classname="residency" name="{_INPUT}"><skipped message={quoteattr(clean(f"{p.where}: {_told(p)}" if p.where else _told(p)))}/></testcase>'
            for p in warnings
        )
        suites.append(f'<testsuite name="residency" tests="{len(warnings)}" failures="0" errors="0" skipped="{len(warnings)}">{skipped}</testsuite>')
    for report in reports:
        by_rule: dict[str, list[Finding]] = {}
        for finding in report.findings:
            by_rule.setdefault(finding.rule, []).append(finding)
        cases, failures, errors = [], 0, 0
        for rule, findings in by_rule.items():
            body = ""
            for finding in findings:
                if finding.waived is not None:
                    continue
                text = escape(clean(_advice(finding)))
                if finding.outcome is Outcome.VETO:
                    failures += 1
                    body += f"<failure>{text}</failure>"
                elif finding.outcome is Outcome.CANNOT_TELL:
                    errors += 1
                    body += f"<error>{text}</error>"
                elif finding.outcome is Outcome.NOT_APPLICABLE:
                    body += f"<skipped message={quoteattr(clean(finding.message))}/>"
            cases.append(f"<testcase classname={quoteattr(clean(report.launch.name))} name={quoteattr(rule)}>{body}</testcase>")
        suites.append(
            f'<testsuite name={quoteattr(clean(report.launch.name))} tests="{len(by_rule)}" failures="{failures}" errors="{errors}">'
            + "".join(cases)
            + "</testsuite>"
        )
    return '<?xml version="1.0" encoding="utf-8"?>\n<testsuites>' + "".join(suites) + "</testsuites>"


def _told(problem: Problem) -> str:
    return f"{problem.message} ({problem.hint})" if problem.hint else problem.message


def _row(problem: Problem) -> dict[str, Any]:
    return {"message": problem.message, "hint": problem.hint, "where": problem.where.to_dict() if problem.where is not None else None}


def _sarif_problems(level: str, problems: Sequence[Problem]) -> list[dict[str, Any]]:
    return [{"ruleId": _INPUT, "level": level, "message": {"text": clean(_told(p))}} | _sarif_place(p.where) for p in problems]


#: What an input that cannot be read stands under where a report names rules.
_INPUT = "residency/input"


def problems_in(form: str, problems: Sequence[Problem], code: int) -> str | None:
    """Return what is wrong with the input in a format for machines; None where the format has no such document."""
    if form == "json":
        return json.dumps({"schema": "residency.error/1", "exit_code": code, "problems": [_row(p) for p in problems]}, indent=2)
    if form == "sarif":
        return _sarif(_sarif_problems("error", problems), [{"id": _INPUT}], code)
    if form == "github":
        return "\n".join(_github("error", p.where, _INPUT, _told(p)) for p in problems)
    if form == "junit":
        from xml.sax.saxutils import escape

        errors = "".join(f"<error>{escape(clean(_told(p)))}</error>" for p in problems)
        return (
            f'<?xml version="1.0" encoding="utf-8"?>\n<testsuites><testsuite name="residency" tests="1" failures="0" errors="{len(problems)}">'
            f'<testcase classname="residency" name="{_INPUT}">{errors}</testcase></testsuite></testsuites>'
        )
    return None


FORMATS = {"json": to_json, "sarif": to_sarif, "github": to_github, "junit": to_junit}
