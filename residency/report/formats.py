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


def to_json(reports: Sequence[Report]) -> str:
    """Return one JSON document: the report, or {"schema", "exit_code", "reports"} for several."""
    documents = [r.to_dict() for r in reports]
    document: Any = documents[0]
    if len(documents) != 1:
        document = {"schema": "residency.reports/1", "exit_code": worst(reports), "reports": documents}
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


def to_sarif(reports: Sequence[Report]) -> str:
    """Return SARIF 2.1.0 with one run."""
    results, rules = [], {}
    for report in reports:
        for finding in _shown(report):
            rules[finding.rule] = {"id": finding.rule}
            result: dict[str, Any] = {"ruleId": finding.rule, "level": _level(finding), "message": {"text": _advice(finding)}}
            results.append(result | _sarif_place(finding.where))
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


def to_github(reports: Sequence[Report]) -> str:
    """Return workflow commands, one line per finding."""
    lines = []
    for report in reports:
        lines += [_github(_level(f), f.where, f.rule, _advice(f)) for f in _shown(report)]
        lines.append(f"residency: {report.verdict}: {clean(report.launch.name)}")
    return "\n".join(lines)


def _github(level: str, where: Where | None, title: str, text: str) -> str:
    place = ""
    if where is not None and where.file is not None:
        place = f"file={_escape(where.file, value=True)},line={where.line or 1},col={where.column or 1},"
    return f"::{level} {place}title={_escape(title, value=True)}::{_escape(clean(text))}"


def to_junit(reports: Sequence[Report]) -> str:
    """Return a JUnit document: one suite per launch, one case per rule."""
    from xml.sax.saxutils import escape, quoteattr

    suites = []
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


#: What an input that cannot be read stands under where a report names rules.
_INPUT = "residency/input"


def problems_in(form: str, problems: Sequence[Problem], code: int) -> str | None:
    """Return what is wrong with the input in a format for machines; None where the format has no such document."""
    if form == "json":
        rows = [{"message": p.message, "hint": p.hint, "where": p.where.to_dict() if p.where is not None else None} for p in problems]
        return json.dumps({"schema": "residency.error/1", "exit_code": code, "problems": rows}, indent=2)
    told = [(p, f"{p.message} ({p.hint})" if p.hint else p.message) for p in problems]
    if form == "sarif":
        return _sarif([{"ruleId": _INPUT, "level": "error", "message": {"text": clean(text)}} | _sarif_place(p.where) for p, text in told], [{"id": _INPUT}], code)
    if form == "github":
        return "\n".join(_github("error", p.where, _INPUT, text) for p, text in told)
    if form == "junit":
        from xml.sax.saxutils import escape

        errors = "".join(f"<error>{escape(clean(text))}</error>" for _, text in told)
        return (
            f'<?xml version="1.0" encoding="utf-8"?>\n<testsuites><testsuite name="residency" tests="1" failures="0" errors="{len(told)}">'
            f'<testcase classname="residency" name="{_INPUT}">{errors}</testcase></testsuite></testsuites>'
        )
    return None


FORMATS = {"json": to_json, "sarif": to_sarif, "github": to_github, "junit": to_junit}
