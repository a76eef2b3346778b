"""Where every key and value of a TOML document stands.

The parser gives values without positions. This scanner reads the same text a second time, only
when something has to be pointed at. It expects text the parser has accepted, so it looks for the
ends of things and never for errors; TOML 1.0 and 1.1 are alike to it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Keys and array indexes from the document down to one value: ("layers", "overrides", 0, "device").
Path = tuple[str | int, ...]

_BLANK = re.compile(r"[ \t]*+")
_GAP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*+")
_BARE = re.compile(r"""[^\s.=\[\]{}"'#,]++""")
_SCALAR = re.compile(
    r'''
      """(?:[^"\\]++|\\.|"{1,2}(?!"))*+"{3,5}     # up to two quotes may stand right before the closing three
    | \'\'\'(?:[^']++|'{1,2}(?!'))*+'{3,5}
    | "(?:[^"\\]++|\\.)*+"
    | '[^']*+'
    | \d{4}-\d\d-\d\d[ ]\d\d:[^\s,\]}#]*+         # the one scalar with a space inside
    | [^\s,\]}#]++
    ''',
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_ESCAPES = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A stretch of one line: line and column are 1-based and count characters."""

    line: int
    column: int
    length: int


class Positions:
    """The positions of one document. A path that is not in the document has none."""

    def __init__(self, text: str) -> None:
        """Scan ``text``, which a TOML parser has accepted, without its byte order mark."""
        self._text = text
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        scanner = _Scanner(text)
        # Only text the parser did not accept ends in an error. What was found up to there is still true,
        # and a diagnostic without a caret is better than none.
        with suppress(AttributeError, IndexError):
            scanner.document()
        self._keys, self._values, self._headers = scanner.keys, scanner.values, scanner.headers

    def key(self, path: Path) -> Spot | None:
        """Return where a key is first written: in a header, a dotted key or an inline table."""
        return self._spot(self._keys.get(path))

    def value(self, path: Path) -> Spot | None:
        """Return where a value stands; of one over several lines, its first line."""
        return self._spot(self._values.get(path))

    def header(self, path: Path) -> Spot | None:
        """Return where ``[table]`` or the element of ``[[array]]`` is opened, brackets included."""
        return self._spot(self._headers.get(path))

    def keys(self) -> Iterator[Path]:
        """Return every path that a key stands for, in the order of the text."""
        return iter(self._keys)

    def values(self) -> Iterator[Path]:
        """Return every path that has a value: scalars, arrays, inline tables and what is inside them."""
        return iter(self._values)

    def line(self, number: int) -> str:
        """Return the text of a line, without its end."""
        if not 1 <= number <= len(self._lines):
            return ""
        start = self._lines[number - 1]
        end = self._lines[number] if number < len(self._lines) else len(self._text)
        return self._text[start:end].rstrip("\r\n")

    def _spot(self, span: tuple[int, int] | None) -> Spot | None:
        if span is None:
            return None
        start, end = span
        line = bisect_right(self._lines, start)
        column = start - self._lines[line - 1] + 1
        length = min(end - start, len(self.line(line)) - column + 1)
        return Spot(line=line, column=column, length=max(1, length))


class _Scanner:
    """One walk over the text. Offsets are collected; lines and columns are worked out on demand."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.keys: dict[Path, tuple[int, int]] = {}
        self.values: dict[Path, tuple[int, int]] = {}
        self.headers: dict[Path, tuple[int, int]] = {}
        self._elements: dict[Path, int] = {}  # array of tables -> elements opened so far

    def document(self) -> None:
        table: Path = ()
        self._skip(_GAP)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._value(self._key(table))
            self._skip(_GAP)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self.at = pattern.match(self.text, self.at).end()  # type: ignore[union-attr]  # both match the empty text

    def _header(self) -> Path:
        start = self.at
        is_array = self.text.startswith("[[", start)
        self.at += 2 if is_array else 1
        parts = list(self._parts())
        self.at += 2 if is_array else 1
        path: Path = ()
        for index, (name, span) in enumerate(parts):
            path = (*path, name)
            self.keys.setdefault(path, span)
            if index == len(parts) - 1 and is_array:
                self._elements[path] = self._elements.get(path, 0) + 1
            if path in self._elements:  # a header below an array of tables means its last element
                path = (*path, self._elements[path] - 1)
        self.headers.setdefault(path, (start, self.at))
        return path

    def _key(self, table: Path) -> Path:
        """Read ``key.key =`` and return the path it assigns to."""
        path = table
        for name, span in self._parts():
            path = (*path, name)
            self.keys.setdefault(path, span)
        self.at += 1  # the equals sign
        self._skip(_BLANK)
        return path

    def _parts(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Read a key's parts and stop at what follows them."""
        while True:
            self._skip(_BLANK)
            start = self.at
            quote = self.text[start]
            if quote in "\"'":
                self.at = _SCALAR.match(self.text, start).end()  # type: ignore[union-attr]  # caught by Positions
                name = self.text[start + 1 : self.at - 1]
                if quote == '"' and "\\" in name:
                    name = _ESCAPE.sub(_unescape, name)
            else:
                self.at = _BARE.match(self.text, start).end()  # type: ignore[union-attr]  # the same
                name = self.text[start : self.at]
            yield name, (start, self.at)
            self._skip(_BLANK)
            if self.text[self.at] != ".":
                return
            self.at += 1

    def _value(self, path: Path) -> None:
        """Read one value and everything inside it, without recursion."""
        containers: list[_Container] = []
        while True:
            start = self.at
            if self.text[start] in "[{":
                containers.append(_Container(path, start, is_array=self.text[start] == "["))
                self.at += 1
            else:
                self.at = _SCALAR.match(self.text, start).end()  # type: ignore[union-attr]  # caught by Positions
                self.values.setdefault(path, (start, self.at))
            while containers:
                self._skip(_GAP)
                char = self.text[self.at]
                if char == ",":
                    self.at += 1
                elif char in "]}":
                    self.at += 1
                    closed = containers.pop()
                    self.values.setdefault(closed.path, (closed.start, self.at))
                else:
                    break
            if not containers:
                return
            container = containers[-1]
            if container.is_array:
                path = (*container.path, container.count)
                container.count += 1
            else:
                path = self._key(container.path)


class _Container:
    """An array or inline table that is still open."""

    __slots__ = ("count", "is_array", "path", "start")

    def __init__(self, path: Path, start: int, *, is_array: bool) -> None:
        self.path = path
        self.start = start
        self.is_array = is_array
        self.count = 0


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPES.get(code, code)
