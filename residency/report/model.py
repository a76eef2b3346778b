"""The Report: verdict, findings, budget. A value; formats are its neighbours in this package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from residency.exits import Exit
from residency.rules.finding import Finding, Outcome

if TYPE_CHECKING:
    from residency.budget import Budget, PoolSum
    from residency.engines.base import EngineView, Models, Verdict
    from residency.launch.model import Launch
    from residency.machine.model import Machine
    from residency.plugins import PluginSet
    from residency.policy.model import Policy

SCHEMA = "residency.report/1"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What residency says about one launch."""

    findings: tuple[Finding, ...]
    budget: Budget
    launch: Launch
    models: Models
    machine: Machine
    engine: EngineView
    engine_name: str
    plugins: PluginSet
    policy: Policy
    seconds: float

    @cached_property
    def verdict(self) -> Verdict:
        """``no-verdict`` wins over ``veto``: a report that is not whole is not a report."""
        if any(f.outcome is Outcome.CANNOT_TELL for f in self.findings):
            return "no-verdict"
        if any(f.outcome is Outcome.VETO and f.waived is None for f in self.findings):
            return "veto"
        return "allow"

    @property
    def exit_code(self) -> Exit:
        """The process exit code of this report."""
        return {"allow": Exit.ALLOWED, "veto": Exit.VETOED, "no-verdict": Exit.NO_VERDICT}[self.verdict]

    @property
    def allowed(self) -> bool:
        """Whether the engine may start."""
        return self.verdict == "allow"

    @cached_property
    def pools(self) -> tuple[PoolSum, ...]:
        """The budget summed per pool."""
        return self.budget.sums(self.machine)

    def with_outcome(self, *outcomes: Outcome) -> tuple[Finding, ...]:
        """Return the findings of these outcomes, in order."""
        return tuple(f for f in self.findings if f.outcome in outcomes)

    def summary(self) -> str:
        """Return one line: the verdict and the first reason."""
        for finding in self.findings:
            if finding.outcome in (Outcome.VETO, Outcome.CANNOT_TELL) and finding.waived is None:
                return f"{self.verdict}: {finding.rule}: {finding.message}"
        return self.verdict

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON report, schema ``residency.report/1`` (DESIGN 4.3)."""
        main = self.models.main
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "exit_code": int(self.exit_code),
            "engine": {
                "name": self.engine_name,
                "version": self.engine.version,
                "version_given": self.engine.version_given,
                "program": self.launch.program,
            },
            "model": {
                "path": main.path if main else self.launch.get("model.path"),
                "name": main.name if main else None,
                "architecture": main.architecture if main else None,
                "files": len(main.files) if main else None,
                "tensors": len(main.tensors) if main else None,
                "bytes": main.tensor_bytes if main else None,
                "source": main.source if main else None,
                "note": main.note if main else None,
            },
            "machine": {
                "name": self.machine.name,
                "source": self.machine.source,
                "devices": [d.name for d in self.machine.devices],
                "facts": list(self.machine.facts),
            },
            "policy": self.policy.name,
            "launch": self.launch.name,
            "seconds": round(self.seconds, 6),
            "findings": [f.to_dict() for f in self.findings],
            "budget": {
                "resolved": {k: v for k, v in self.budget.facts.items() if isinstance(v, (str, int, float, bool, list, dict))},
                "pools": [self._pool(s) for s in self.pools],
            },
        }

    def _pool(self, found: PoolSum) -> dict[str, Any]:
        usable = found.usable_bytes
        margin = self.policy.margin_of(found.pool.name, found.pool.total_bytes or 0)
        return {
            "name": found.pool.name,
            "total_bytes": found.pool.total_bytes,
            "free_bytes": found.pool.free_bytes,
            "usable_bytes": usable,
            "reserve_bytes": found.pool.reserved_bytes + margin,
            "need_bytes": found.likely_bytes,
            "certain_bytes": found.certain_bytes,
            "at_most_bytes": found.at_most_bytes,
            "left_bytes": None if usable is None else usable - margin - found.likely_bytes,
            "allocations": [a.to_dict() for a in found.allocations],
        }
