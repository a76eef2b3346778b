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

#: Programs and shell words that start the one behind their options: options that take a value, and how many words stand in between.
# fmt: off
_WRAPPERS: dict[str, tuple[frozenset[str], int]] = {name: (frozenset(options.split()), words) for name, options, words in (
    ("env", "-u --unset", 0), ("exec", "-a", 0), ("command", "", 0), ("nohup", "", 0), ("setsid", "", 0), ("chronic", "", 0),
    ("time", "-o -f --output --format", 0), ("stdbuf", "-i -o -e --input --output --error", 0), ("timeout", "-s -k --signal --kill-after", 1),
    ("sudo", "-u -g -h -p -C -D -R -r -t -T -U --user --group --host --prompt --close-from --chdir --chroot --role --type --command-timeout --other-user", 0),
    ("doas", "-u -C", 0), ("runuser", "-u --user -g --group -G --supp-group", 0), ("gosu", "", 1), ("su-exec", "", 1), ("setpriv", "--reuid --regid --groups", 0),
    ("nice", "-n --adjustment", 0), ("ionice", "-c -n --class --classdata", 0), ("chrt", "-T -P -D", 1), ("taskset", "", 1),
    ("numactl", "-i -p -P -C -N -m -w --interleave --preferred --preferred-many --physcpubind --cpunodebind --membind --weighted-interleave", 0),
    ("prlimit", "", 0), ("cgexec", "-g", 0), ("tini", "-p", 0), ("tini-static", "-p", 0), ("docker-init", "-p", 0), ("dumb-init", "-r --rewrite", 0),
)}
# fmt: on
#: Options with which a wrapper does more than start a program on this machine, in this folder and this file tree.
_ELSEWHERE = {"env": ("-C", "-S", "--chdir", "--split-string"), "sudo": ("-D", "-R", "-h", "--chdir", "--chroot", "--host"), "prlimit": ("-p", "--pid")}
#: Wrappers and shells inside one another.
_BEFORE = 16
#: Characters a text may have once what it refers to is put in: references can double at every step.
LONGEST = 64 * 1024
#: And all such texts of one file together.
LONGEST_SUM = 4 * 2**20
#: Characters that are searched for the place of a word.
_NEAR = 16 * 1024
_SHELLS = ("sh", "bash", "dash", "ash", "zsh", "ksh")
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
    """Return the engine's command behind wrappers (env, numactl, sudo, ...) and ``sh -c TEXT``; None: there is none.

    ``end`` is where the command ends in the source. Raises NotSimpleError.
    """
    assigned: dict[str, str] = {}
    index = 0
    for _ in range(_BEFORE):
        while index < len(words) and _ASSIGNMENT.fullmatch(words[index]):
            variable, _, value = words[index].partition("=")
            assigned[variable] = value
            index += 1
        if index >= len(words):
            return None
        name = program_name(words[index])
        if known(name):
            return Found(list(words[index:]), list(places[index:]), assigned)
        if name == "busybox":
            index += 1
            continue
        if name == "residency":  # residency run OPTIONS -- COMMAND
            index = next((i + 1 for i in range(index, len(words)) if words[i] == "--"), len(words))
            continue
        if name not in _SHELLS:
            if name not in _WRAPPERS:
                return None
            index = _behind(words, places, index, name, known)
            continue
        at = _script(words, index)
        if at is None:
            return None
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


def _behind(words: Sequence[str], places: Sequence[Where], index: int, name: str, known: Callable[[str], bool]) -> int:
    """Return where the program stands that a wrapper starts. Raises NotSimpleError for an option that sends an engine elsewhere."""
    options, between = _WRAPPERS[name]
    at = index + 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        at += 1
        if word == "--":
            break
        long, equals, _ = word.partition("=")
        if long in _ELSEWHERE.get(name, ()) or (not word.startswith("--") and word[:2] in _ELSEWHERE.get(name, ())):
            if not any(known(program_name(part)) for text in words[at - 1 :] for part in text.split()):
                return len(words)
            raise NotSimpleError(f"{name} {clean(shorten(word))} starts its program in a way that is not followed; write the engine's command itself", places[at - 1])
        # a value of its own behind "-u" or "-Eu", none behind "-uroot" or "--user=root"
        last = word if word.startswith("--") else f"-{word[-1]}"
        first = next((i for i, letter in enumerate(word[1:]) if f"-{letter}" in options), None)
        if (word.startswith("--") and not equals and long in options) or (not word.startswith("--") and first == len(word) - 2 and last in options):
            at += 1
    return at + between


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


def expand(
    text: str, values: Mapping[str, str], *, missing: Callable[[str], None] | None = None, unset: Callable[[str], None] | None = None
) -> str:
    """Replace $NAME and ${NAME}, with ``:-default``, ``:+instead`` or ``:?message``; an unknown name becomes empty.

    ``$$`` is a dollar sign. ``missing`` is told of a name that is required and not there; without it such a word stays.
    ``unset`` is told of one that is not there and has no default. Raises TooLongError.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name, how, other = match[1] or match[4], match[2] or "", match[3] or ""
        value = values.get(name)
        there = value is not None and (value != "" or not how.startswith(":"))
        if how.endswith("+"):
            return expand(other, values, missing=missing, unset=unset) if there else ""
        if there:
            return value or ""
        if not how and unset is not None:
            unset(name)
        if not how.endswith("?"):
            return expand(other, values, missing=missing, unset=unset)
        if missing is None:
            return match[0]
        said = clean(shorten(other))
        missing(f"the variable {name} is required and not set" + (f": {said}" if said else ""))
        return ""

    return put_in(_INTERPOLATED, replacement, text)
