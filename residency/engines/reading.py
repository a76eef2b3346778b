"""What every reader of an engine's command line keeps while it reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from residency.errors import Problem

if TYPE_CHECKING:
    from residency.where import Where


@dataclass
class Reading:
    """Values by target ("context.length", "option:NAME"), their places, and every problem found."""

    version: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Where] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def complain(self, message: str, where: Where, hint: str | None = None) -> None:
        """Note a problem and read on: all of them are reported in one run."""
        self.problems.append(Problem(message=message, where=where, hint=hint))

    def put(self, target: str, value: Any, where: Where) -> None:
        """Set a value; a later one wins."""
        self.values[target] = value
        self.places[target] = where
