"""Errors that end a run before there is a verdict, and the one that says "vetoed".

Every input problem is a :class:`Problem`: a value with its position. Readers gather all
problems of one input and raise them together, so a user fixes a file once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .text import clean, columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .report import Report
    from .where import Where

_BEFORE, _MARKED, _AFTER = 100, 60, 100  # characters shown of a line before, under and after the caret


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing wrong with an input, where it stands, and what was probably meant."""

    message: str  # one sentence, no position in it
    where: Where | None = None
    line_text: str | None = None  # the user's own line, for the caret
    span: int = 1  # characters the caret covers
    hint: str | None = None  # e.g. 'did you mean "context.length"?'

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where is not None else self.message
        if self.hint:
            head += f"; {self.hint}"
        head = clean(head)
        if self.line_text is None or self.where is None or self.where.column is None:
            return head
        number = str(self.where.line)
        start = self.where.column - 1
        end = start + min(max(1, self.span), _MARKED)
        left = max(0, start - _BEFORE)  # a file of one endless line: show the part around the caret
        before = ("..." if left else "") + clean(self.line_text[left:start], keep="\t")
        marked = clean(self.line_text[start:end])
        after = clean(self.line_text[end : end + _AFTER], keep="\t")
        # Tabs are kept so that the caret lines up whatever the terminal's tab width is.
        lead = "".join("\t" if char == "\t" else " " * columns(char) for char in before)
        caret = "^" * max(1, columns(marked))
        return f"{head}\n  {number} | {before}{marked}{after}\n  {' ' * len(number)} | {lead}{caret}"


class ResidencyError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(ResidencyError):
    """The input cannot be read: usage, TOML, unknown key, missing file. Exit code 2."""

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        if isinstance(problems, str):
            problems = [Problem(message=problems)]
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class LaunchVetoed(ResidencyError):  # noqa: N818 - the name is part of the public contract
    """Raised by :func:`residency.guard` unless the launch is allowed."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(report.summary())


def describe(error: BaseException) -> str:
    """Return "TypeError: text" of an exception, on one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - an exception whose text raises is still one with a name
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
