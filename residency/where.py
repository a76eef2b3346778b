"""Where a value came from: the provenance every diagnostic points at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Source = Literal["file", "argv", "env", "default"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """One position in what the user wrote, or "default" when the user wrote nothing."""

    source: Source
    file: str | None = None
    line: int | None = None  # 1-based
    column: int | None = None  # 1-based, in characters
    argv_index: int | None = None  # 0 is the program name
    variable: str | None = None  # environment variable
    flag: str | None = None  # the flag as typed, e.g. "-ngl"; for messages only

    def to_dict(self) -> dict[str, Any]:
        """Return the ``where`` object of the JSON report (DESIGN 4.3)."""
        return {
            "source": self.source,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "argv_index": self.argv_index,
            "variable": self.variable,
        }

    def __str__(self) -> str:
        if self.source == "file":
            parts = [self.file or "?"]
            if self.line is not None:
                parts.append(str(self.line))
                if self.column is not None:
                    parts.append(str(self.column))
            return ":".join(parts)
        if self.source == "env":
            return f"${self.variable}"
        if self.source == "argv":
            if self.argv_index is None:  # our own command line, where the flag says it all
                return self.flag or "command line"
            return f"argument {self.argv_index}" + (f" ({self.flag})" if self.flag else "")
        return "default"


DEFAULT = Where(source="default")
