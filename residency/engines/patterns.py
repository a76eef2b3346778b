"""Placement patterns: regular expressions searched in tensor names, in bounded time whatever is written in them.

Engines search them with ECMAScript rules (``std::regex_search``). Python's own matcher tries every way to match and
cannot be interrupted, so it gets a pattern only when few ways exist; any other runs as an automaton that looks at every
character once. What neither can take is said to be so: :class:`PatternUnknownError`.
"""

from __future__ import annotations

import re
import string
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from residency.text import clean, shorten

if TYPE_CHECKING:
    from collections.abc import Callable

#: Characters of a pattern, groups inside groups, states of an automaton, and sets of states kept at once.
LONGEST, DEEPEST, MOST_STATES, MOST_SETS = 8192, 64, 4096, 2000
#: Ways to match one name that Python's matcher may try, and the characters of a name this counts with.
MOST_WAYS, NAME_LENGTH = 20_000, 64
_REPEAT_MOST = 1000
_CLASSES = {
    "d": frozenset("0123456789"),
    "w": frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"),
    "s": frozenset(" \t\n\r\f\v\xa0\u2028\u2029\ufeff"),
}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
#: Classes named within brackets, as in [[:alpha:]].
_NAMED = {
    "alpha": frozenset(string.ascii_letters), "digit": _CLASSES["d"], "alnum": frozenset(string.ascii_letters + string.digits),
    "lower": frozenset(string.ascii_lowercase), "upper": frozenset(string.ascii_uppercase), "xdigit": frozenset(string.hexdigits),
    "punct": frozenset(string.punctuation), "space": frozenset(" \t\n\r\f\v"), "blank": frozenset(" \t"),
    "d": _CLASSES["d"], "w": _CLASSES["w"], "s": _CLASSES["s"],
}  # fmt: skip


class PatternError(ValueError):
    """It is not a regular expression, and the engine refuses it."""


class PatternUnknownError(ValueError):
    """Whether it matches cannot be told here in bounded time."""


class _Set(NamedTuple):
    """One character: of these, or none of these."""

    chars: frozenset[str]
    negated: bool = False


class _Edge(NamedTuple):
    """The beginning or the end of the name."""

    end: bool


class _Look(NamedTuple):
    """A word boundary or a look-ahead: only Python's matcher takes it."""

    inner: _Node | None


class _Sequence(NamedTuple):
    parts: tuple[_Node, ...]


class _Choice(NamedTuple):
    options: tuple[_Node, ...]


class _Repeat(NamedTuple):
    inner: _Node
    least: int
    most: int | None  # None: no bound


_Node = _Set | _Edge | _Look | _Sequence | _Choice | _Repeat


class _Parser:
    """Reads a pattern by the ECMAScript grammar of the engine's library."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0
        self.foreign = False  # Python reads it otherwise: a quantifier behind another, [[:alpha:]], letters escaped for nothing

    def read(self) -> _Node:
        found = self.choice()
        if self.at < len(self.text):
            raise PatternError(f"there is a {self.text[self.at]!r} too many")
        return found

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def take(self) -> str:
        char = self.peek()
        self.at += 1
        return char

    def choice(self) -> _Node:
        options = [self.sequence()]
        while self.peek() == "|":
            self.at += 1
            options.append(self.sequence())
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def sequence(self) -> _Node:
        parts: list[_Node] = []
        while self.peek() not in ("", "|", ")"):
            atom = self.atom()
            times = 0
            while (bounds := self.quantifier()) is not None:
                times += 1
                if times > DEEPEST:
                    raise PatternUnknownError("it repeats repetitions too often")
                if isinstance(atom, (_Edge, _Look)):
                    raise PatternError("there is nothing to repeat")
                atom = _Repeat(atom, *bounds)
            self.foreign = self.foreign or times > 1
            parts.append(atom)
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def quantifier(self) -> tuple[int, int | None] | None:
        char = self.peek()
        if char in ("*", "+", "?") and char:
            self.at += 1
            bounds: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif char == "{":
            found = re.compile(r"\{([0-9]{1,6})(,([0-9]{0,6}))?\}").match(self.text, self.at)
            if found is None:
                raise PatternError("a { stands where no count follows")
            self.at = found.end()
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else None
            if most is not None and most < least:
                raise PatternError(f"it repeats at least {least} and at most {most} times")
            bounds = (least, most)
        else:
            return None
        if self.peek() == "?":
            self.at += 1
        return bounds

    def atom(self) -> _Node:
        char = self.take()
        if char == "(":
            return self.group()
        if char == "[":
            return self.bracket()
        if char == "\\":
            return self.escape()
        if char == ".":
            return _Set(frozenset("\n\r\u2028\u2029"), negated=True)
        if char in ("^", "$"):
            return _Edge(char == "$")
        if char in ("*", "+", "?", "{"):
            raise PatternError("there is nothing to repeat")
        return _Set(frozenset(char))

    def group(self) -> _Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise PatternUnknownError("its groups are nested too deeply")
        look = False
        if self.peek() == "?":
            self.at += 1
            kind = self.take()
            if kind not in (":", "=", "!") or not kind:
                raise PatternError(f"(?{kind} is no group the engine knows")
            look = kind != ":"
        inner = self.choice()
        if self.take() != ")":
            raise PatternError("a ( is not closed")
        self.depth -= 1
        return _Look(inner) if look else inner

    def escape(self) -> _Node:
        char = self.take()
        if not char:
            raise PatternError("it ends with a backslash")
        if char in "bB":
            return _Look(None)
        if char.isdigit() and char != "0":
            raise PatternUnknownError("it refers back to a group")
        return self.escaped(char)

    def escaped(self, char: str) -> _Set:
        if char.lower() in _CLASSES:
            return _Set(_CLASSES[char.lower()], negated=char.isupper())
        if char in _CONTROLS:
            return _Set(frozenset(_CONTROLS[char]))
        if char in "xu":
            digits = self.text[self.at : self.at + (2 if char == "x" else 4)]
            if not re.fullmatch(r"[0-9a-fA-F]{2}([0-9a-fA-F]{2})?", digits) or len(digits) != (2 if char == "x" else 4):
                raise PatternError(f"\\{char} needs {2 if char == 'x' else 4} hexadecimal digits")
            self.at += len(digits)
            return _Set(frozenset(chr(int(digits, 16))))
        if char == "c" and self.peek().isalpha() and self.peek().isascii():
            self.foreign = True
            return _Set(frozenset(chr(ord(self.take()) % 32)))
        self.foreign = self.foreign or char.isalnum()
        return _Set(frozenset(char))

    def bracket(self) -> _Node:
        negated = self.peek() == "^"
        self.at += negated
        self.foreign = self.foreign or self.peek() == "]"  # closes the brackets at once
        chars: set[str] = set()
        begin = ""
        while True:
            char = self.take()
            if not char:
                raise PatternError("a [ is not closed")
            if char == "]":
                return _Set(frozenset(chars), negated=negated)
            one: str | None = char
            if char == "[" and self.peek() in (":", ".", "="):
                chars |= self.named()
                one = None
            if char == "\\":
                escape = self.take()
                if not escape:
                    raise PatternError("a [ is not closed")
                found = _Set(frozenset("\b")) if escape == "b" else self.escaped(escape)
                if found.negated:
                    raise PatternUnknownError("it has a negated class within brackets")
                chars |= found.chars
                one = next(iter(found.chars)) if len(found.chars) == 1 else None
            ranges = self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", "")
            if one is None and (begin or ranges):
                raise PatternError("a class of characters stands at an end of a range")
            if begin and one is not None:
                if ord(begin) > ord(one):
                    raise PatternError(f"the range {begin}-{one} runs backwards")
                if ord(one) - ord(begin) > 0xFFFF:
                    raise PatternUnknownError("it has a range of too many characters")
                chars |= {chr(code) for code in range(ord(begin), ord(one) + 1)}
                begin = ""
                continue
            begin = ""
            if one is not None:
                chars.add(one)
                if ranges:
                    self.at += 1
                    begin = one

    def named(self) -> frozenset[str]:
        """Read the rest of [:alpha:]."""
        kind = self.take()
        end = self.text.find(kind + "]", self.at)
        found = _NAMED.get(self.text[self.at : end]) if kind == ":" and end >= 0 else None
        if found is None:
            raise PatternUnknownError("it names a class of characters of the engine's library")
        self.at, self.foreign = end + 2, True
        return found


def _ways(node: _Node) -> int:
    """Return an upper bound of the ways in which a backtracking matcher can take a part of one name."""
    if isinstance(node, (_Set, _Edge)):
        return 1
    if isinstance(node, _Look):
        return 1 if node.inner is None else NAME_LENGTH * _ways(node.inner)
    if isinstance(node, _Choice):
        return sum(_ways(option) for option in node.options)
    if isinstance(node, _Sequence):
        ways = 1
        for part in node.parts:
            ways = min(ways * _ways(part), MOST_WAYS + 1)
        return ways
    inner = _ways(node.inner)
    if inner == 1 and isinstance(node.inner, _Set):
        return 1 if node.least == node.most else NAME_LENGTH if node.most is None else min(node.most - node.least + 1, NAME_LENGTH)
    most = node.most if node.most is not None else NAME_LENGTH
    ways = 1
    for _ in range(min(most, NAME_LENGTH)):  # a group of its own length every time
        ways = min(ways * (inner + (node.least != node.most)), MOST_WAYS + 1)
        if ways > MOST_WAYS:
            break
    return ways * (1 if node.least == node.most else 2)


class _Automaton:
    """States numbered from 0; every one has characters that lead on, or leads on by itself."""

    def __init__(self, node: _Node) -> None:
        self.tests: list[_Set | None] = []  # None: a fork
        self.edges: list[_Edge | None] = []
        self.nexts: list[list[int]] = []
        self.accept = self.state()
        self.start = self.build(node, self.accept)
        self.closures: dict[tuple[frozenset[int], bool, bool], frozenset[int]] = {}
        self.steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def state(self, test: _Set | None = None, edge: _Edge | None = None, *nexts: int) -> int:
        if len(self.tests) >= MOST_STATES:
            raise PatternUnknownError("it repeats too much")
        self.tests.append(test)
        self.edges.append(edge)
        self.nexts.append(list(nexts))
        return len(self.tests) - 1

    def build(self, node: _Node, then: int) -> int:
        """Add the states of a part in front of ``then``; return its first."""
        if isinstance(node, _Set):
            return self.state(node, None, then)
        if isinstance(node, _Edge):
            return self.state(None, node, then)
        if isinstance(node, _Look):
            raise PatternUnknownError("it looks ahead or at word boundaries and may take for ever to match")
        if isinstance(node, _Choice):
            return self.state(None, None, *[self.build(option, then) for option in node.options])
        if isinstance(node, _Sequence):
            for part in reversed(node.parts):
                then = self.build(part, then)
            return then
        if node.least > _REPEAT_MOST or (node.most or 0) > _REPEAT_MOST:
            raise PatternUnknownError("it repeats too much")
        if node.most is None:
            fork = self.state(None, None, then)
            self.nexts[fork].append(self.build(node.inner, fork))
            then = fork
        else:
            out = then
            for _ in range(node.most - node.least):
                then = self.state(None, None, self.build(node.inner, then), out)
        for _ in range(node.least):
            then = self.build(node.inner, then)
        return then

    def closure(self, states: frozenset[int], *, first: bool, last: bool) -> frozenset[int]:
        """Return every state reached without a character, at the first or last place of the name."""
        key = (states, first, last)
        found = self.closures.get(key)
        if found is None:
            reached: set[int] = set()
            waiting = list(states)
            while waiting:
                at = waiting.pop()
                if at in reached:
                    continue
                edge = self.edges[at]
                if edge is not None and not (last if edge.end else first):
                    continue
                reached.add(at)
                if self.tests[at] is None:
                    waiting += self.nexts[at]
            found = self.closures[key] = frozenset(reached)
        return found

    def search(self, text: str) -> bool:
        """Whether the pattern is found anywhere in the text."""
        if len(self.steps) > MOST_SETS:
            self.steps.clear()
            self.closures.clear()
        steps, origin = self.steps, frozenset((self.start,))
        current = self.closure(origin, first=True, last=not text)
        for place, char in enumerate(text, 1):
            if self.accept in current:
                return True
            following = steps.get((current, char))
            if following is None:
                found = {n for s in current if (test := self.tests[s]) is not None and (char in test.chars) is not test.negated for n in self.nexts[s]}
                following = steps[current, char] = frozenset(found) | origin
            current = self.closure(following, first=False, last=place == len(text))
        return self.accept in current


@lru_cache(maxsize=512)
def searcher(pattern: str) -> Callable[[str], object]:
    """Return a function that tells whether a pattern is found in a name.

    Raises:
        PatternError: it is not a regular expression.
        PatternUnknownError: it can be matched by neither means.
    """
    if len(pattern) > LONGEST:
        raise PatternUnknownError(f"it is longer than {LONGEST} characters")
    parser = _Parser(pattern)
    node = parser.read()
    if not parser.foreign and _ways(node) <= MOST_WAYS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "[[" and "--" in brackets may mean something else one day
                return re.compile(pattern, re.ASCII).search
        except (re.error, OverflowError, RecursionError):
            pass  # what the engine's grammar takes and Python's does not
    return _Automaton(node).search


def reason(pattern: str) -> str | None:
    """Return why a pattern is not a regular expression; None where it is one, whether or not it can be matched here."""
    try:
        searcher(pattern)
    except PatternError as error:
        return str(error)
    except PatternUnknownError:
        pass
    return None


def shown(pattern: str) -> str:
    """Return a pattern for messages."""
    return clean(shorten(pattern))
