"""What every reader of an engine's command line keeps while it reads."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from residency.errors import InputError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from residency.where import Where

#: Problems told one by one; a command line with more of them is something else altogether.
MOST_PROBLEMS = 50
#: How alike two names must be, without their dashes, for one to be offered for the other.
ALIKE = 0.65


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known flag that a name most looks like; None when none is near."""
    bare: dict[str, str] = {}
    for other in known:
        bare.setdefault(other.lstrip("-"), other)
    close = difflib.get_close_matches(name[:80].lstrip("-"), bare, n=1, cutoff=ALIKE)
    return bare[close[0]] if close else None


def by_section(values: Mapping[str, Any], version: str | None) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return values by target as knobs by section, with the engine's version as it was given, and as options by name."""
    sections: dict[str, dict[str, Any]] = {}
    options: dict[str, Any] = {}
    for target, value in values.items():
        if target.startswith("option:"):
            options[target.removeprefix("option:")] = value
        else:
            section, _, knob = target.partition(".")
            sections.setdefault(section, {})[knob] = value
    sections.setdefault("engine", {})["version"] = version
    return sections, options


@dataclass
class Reading:
    """Values by target ("context.length", "option:NAME"), their places, and every problem found."""

    version: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Where] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    untold: int = 0  # problems beyond the most that are told
    starts_nothing: bool = False  # the command line asks for information only

    def complain(self, message: str, where: Where, hint: str | None = None, *, name: str | None = None, known: Iterable[str] = ()) -> None:
        """Note a problem and read on: all of them are reported in one run.

        With ``name``, the nearest of the ``known`` names is offered as what was probably meant.
        """
        if len(self.problems) >= MOST_PROBLEMS:
            self.untold += 1
            return
        if name is not None and hint is None:
            close = nearest(name, known)
            hint = f"did you mean {close}?" if close else None
        self.problems.append(Problem(message=message, where=where, hint=hint))

    def finish(self) -> None:
        """Raise InputError with every problem that was found; nothing when there is none."""
        if self.untold:
            self.problems.append(Problem(message=f"{self.untold} more problems of the same command line"))
        if self.problems:
            raise InputError(self.problems)

    def put(self, target: str, value: Any, where: Where) -> None:
        """Set a value; a later one wins."""
        self.values[target] = value
        self.places[target] = where
