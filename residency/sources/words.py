"""Splitting a command line out of a file, with the place of every word."""

from __future__ import annotations

import re
import shlex
from bisect import bisect_right
from typing import TYPE_CHECKING

from residency.engines.base import program_name
from residency.where import Where

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Words that may stand before the engine's program and start it: wrappers, shells' own words.
_BEFORE = 16
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


class Text:
    """A file's text that can say where an index lies."""

    def __init__(self, path: str, text: str) -> None:
        """Keep the text and the starts of its lines."""
        self.path, self.text = path, text
        self._lines = [0, *(m.end() for m in re.finditer("\n", text))]

    def where(self, index: int, flag: str | None = None) -> Where:
        """Return the position of an index."""
        line = bisect_right(self._lines, index) - 1
        return Where(source="file", file=self.path, line=line + 1, column=index - self._lines[line] + 1, flag=flag)

    def places(self, words: Sequence[str], start: int, end: int) -> list[Where]:
        """Return where each word stands between two indexes; a word that is written differently gets the start."""
        found, at = [], start
        for word in words:
            index = self.text.find(word, at, end) if word else -1
            if index < 0:
                found.append(self.where(at, word[:80]))
            else:
                found.append(self.where(index, word[:80]))
                at = index + len(word)
        return found


def split(text: str) -> list[str]:
    """Split a command as a POSIX shell would, comments of whole lines and line continuations removed.

    Raises ValueError for an open quote.
    """
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    return shlex.split(" ".join(line.removesuffix("\\") for line in lines))


def unwrap(words: Sequence[str], known: Callable[[str], bool]) -> tuple[int, dict[str, str]] | None:
    """Return where the engine's program stands behind wrappers (env, numactl, exec, ...), and what they assign."""
    assigned: dict[str, str] = {}
    for index, word in enumerate(words[:_BEFORE]):
        if known(program_name(word)):
            return index, assigned
        if _ASSIGNMENT.fullmatch(word):
            name, _, value = word.partition("=")
            assigned[name] = value
    return None


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace ${NAME}, ${NAME:-default} and $NAME; an unknown name becomes empty, ``$$`` a dollar sign."""

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name = match[1] or match[4]
        value = values.get(name)
        if value is None or (value == "" and match[2] == ":-"):
            return match[3] or ""
        return value

    return re.sub(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?-)([^}]*))?\}|\$([A-Za-z_][A-Za-z0-9_]*)", replacement, text)
