"""Splitting a command line out of a file, with the place of every word."""

from __future__ import annotations

import re
import shlex
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from residency.engines.base import program_name
from residency.text import clean, shorten
from residency.where import Where

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Words that may stand before the engine's program and start it: wrappers, shells' own words.
_BEFORE = 16
#: Characters a text may have once what it refers to is put in: references can double at every step.
LONGEST = 64 * 1024
#: And all such texts of one file together.
LONGEST_SUM = 4 * 2**20
#: Characters that are searched for the place of a word.
_NEAR = 16 * 1024
_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh", "busybox")
#: What a shell would put in place of a variable and split at white space, with nothing else happening.
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
#: Compose's; what stands behind ``:-`` may hold variables itself.
_INTERPOLATED = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?[-+?])((?:\$\{[^{}]*\}|\$(?!\{)|[^}$])*+))?\}|\$([A-Za-z_][A-Za-z0-9_]*)")
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+ \t-]*")
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

    def index(self, where: Where) -> int:
        """Return the index of a position of this text."""
        return self._lines[min((where.line or 1) - 1, len(self._lines) - 1)] + (where.column or 1) - 1

    def places(self, words: Sequence[str], start: int, end: int) -> list[Where]:
        """Return where each word stands between two indexes; a word that is written differently gets the start."""
        found, at = [], start
        for word in words:
            index = self.text.find(word, at, min(end, at + _NEAR + len(word))) if word else -1
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


class TooLongError(ValueError):
    """A text is too long once what it refers to is put in."""

    def __init__(self) -> None:
        """Say how long one may be."""
        super().__init__(f"with what it refers to this is longer than {LONGEST // 1024} KiB; references that multiply?")


def put_in(pattern: re.Pattern[str], replacement: Callable[[re.Match[str]], str], text: str) -> str:
    """Return the text with every match replaced. Raises TooLongError before the result gets longer than LONGEST."""
    total = 0

    def counted(match: re.Match[str]) -> str:
        nonlocal total
        value = replacement(match)
        total += len(value)
        if total > LONGEST:
            raise TooLongError
        return value

    return pattern.sub(counted, text)


class Found(NamedTuple):
    """An engine's command behind wrappers and shells, and what these assign."""

    words: list[str]
    places: list[Where]
    assigned: dict[str, str]


class NotSimpleError(ValueError):
    """A shell's text names an engine's program, and is more than one command of plain words. Has a position."""

    def __init__(self, message: str, where: Where) -> None:
        """Keep the sentence and where the shell's text stands."""
        super().__init__(message)
        self.where = where


def unwrap(
    words: Sequence[str], places: Sequence[Where], known: Callable[[str], bool], *, source: Text, end: int, environ: Mapping[str, str], depth: int = 4
) -> Found | None:
    """Return the engine's command behind wrappers (env, numactl, exec, ...) and ``sh -c TEXT``; None: there is none.

    ``end`` is where the command ends in the source. Raises NotSimpleError.
    """
    assigned: dict[str, str] = {}
    for index, word in enumerate(words[:_BEFORE]):
        name = program_name(word)
        if known(name):
            return Found(list(words[index:]), list(places[index:]), assigned)
        if _ASSIGNMENT.fullmatch(word):
            variable, _, value = word.partition("=")
            assigned[variable] = value
        at = _script(words, index) if name in _SHELLS else None
        if at is None:
            continue
        where = places[at]
        inner = _simple(words[at], {**environ, **assigned})
        if inner is None or depth == 0:
            for part in (piece for text in words[at:] for piece in re.split(r"[\s;&|<>(){}'\"`$=]+", text)):
                if part and known(program_name(part)):
                    raise NotSimpleError(f"{part} is started by a shell's text that is more than one command of plain words; write the engine's command itself", where)
            return None
        inside = source.places(inner, source.index(where), end) if where.file == source.path else [where] * len(inner)
        found = unwrap(inner, inside, known, source=source, end=end, environ=environ, depth=depth - 1)
        return None if found is None else found._replace(assigned={**assigned, **found.assigned})
    return None


def _script(words: Sequence[str], shell: int) -> int | None:
    """Return where the text of ``sh -c TEXT`` stands."""
    command, at = False, shell + 1
    while at < len(words) and words[at].startswith(("-", "+")):
        option = words[at]
        command = command or (not option.startswith("--") and "c" in option)
        at += 2 if option in ("-o", "+o", "-O") else 1
    return at if command and at < len(words) else None


def _simple(text: str, environ: Mapping[str, str]) -> list[str] | None:
    """Return the words of a shell's text when it is one command of plain words; None: it is more."""
    out: list[str] = []
    quote, at, size = "", 0, 0
    text = text.strip()
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            if text[at + 1 : at + 2] == "\n":
                out.append("" if quote else " ")
            else:
                out.append(text[at : at + 2])
            at += 2
            continue
        if quote != "'" and char == "$":
            variable = _VARIABLE.match(text, at)
            value = environ.get(variable[1] or variable[2]) if variable else None
            if variable is None or value is None or not _PLAIN.fullmatch(value):
                return None
            out.append(value)
            size += len(value)
            if size > LONGEST:
                return None
            at = variable.end()
            continue
        if (quote != "'" and char == "`") or (not quote and (char in ";&|<>()*?[]~{}!\n" or (char == "#" and text[at - 1 : at].isspace()))):
            return None
        if char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        out.append(char)
        at += 1
    try:
        return shlex.split("".join(out))
    except ValueError:
        return None


def expand(text: str, values: Mapping[str, str], *, missing: Callable[[str], None] | None = None) -> str:
    """Replace $NAME and ${NAME}, with ``:-default``, ``:+instead`` or ``:?message``; an unknown name becomes empty.

    ``$$`` is a dollar sign. ``missing`` is told of a name that is required and not there; without it such a word stays.
    Raises TooLongError.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name, how, other = match[1] or match[4], match[2] or "", match[3] or ""
        value = values.get(name)
        there = value is not None and (value != "" or not how.startswith(":"))
        if how.endswith("+"):
            return expand(other, values, missing=missing) if there else ""
        if there:
            return value or ""
        if not how.endswith("?"):
            return expand(other, values, missing=missing)
        if missing is None:
            return match[0]
        said = clean(shorten(other))
        missing(f"the variable {name} is required and not set" + (f": {said}" if said else ""))
        return ""

    return put_in(_INTERPOLATED, replacement, text)
