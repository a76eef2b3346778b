"""A way out: a change that might help, proposed by a rule or an engine, tried by the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A change of one knob, tried before it is offered.

    With ``low`` given the core searches [low, value] in steps for the passing value that changes
    least: the largest one, or the smallest with ``prefer="smallest"``. Otherwise it tries ``value``.
    """

    knob: str  # "context.length" or "option:NAME"
    value: Any
    low: int | None = None
    step: int = 1
    prefer: Literal["largest", "smallest"] = "largest"
    note: str = ""
