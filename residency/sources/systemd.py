"""systemd units: ExecStart=, Environment=, EnvironmentFile=, MemoryMax=, as ``systemd.service(5)`` describes them."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from residency.errors import InputError, Problem
from residency.launch.toml_file import read_text
from residency.text import clean, shorten

from . import Collection, Command, no_command
from .environment import matters, read_variables
from .words import NotSimpleError, Text, split, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from residency.where import Where

#: A line that ends with a backslash goes on; comments in between are no part of it and do not end it.
_ENTRY = re.compile(r"^[ \t]*([A-Za-z]+)[ \t]*=[ \t]*((?:[^\n]*\\\n(?:[ \t]*[#;][^\n]*\n)*+)*+[^\n]*)$", re.MULTILINE)
_COMMENT = re.compile(r"\n[ \t]*[#;][^\n]*(?=\n)")
_SECTION = re.compile(r"^[ \t]*\[([^\]\n]*)\][ \t]*$", re.MULTILINE)
_SIZE = re.compile(r"([0-9]{1,20})([KMGT]?)")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_PREFIXES = "-@:+!|"
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OWN_WORD = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_MOST_FILES = 64


class _Unit:
    """What the settings of one [Service] section add up to."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.source = path, Text(path, text)
        self.problems: list[Problem] = []
        self.starts: list[tuple[str, int, int]] = []
        self.given: dict[str, str] = {}
        self.given_places: dict[str, Where] = {}
        self.files: list[tuple[str, Where]] = []
        self.unset: set[str] = set()
        self.absent = False  # whether an optional file is not there, so that its variables may be missing
        self.limit: int | None = None
        self.limit_where: Where | None = None

    def complain(self, message: str, where: Where) -> None:
        self.problems.append(Problem(message=message, where=where))

    def setting(self, key: str, value: str, start: int, end: int) -> None:
        """Apply one assignment; an empty one resets a list."""
        where = self.source.where(start)
        if key == "ExecStart":
            if not value.strip():
                self.starts.clear()
            else:
                self.starts.append((value, start, end))
        elif key == "Environment":
            if not value.strip():
                self.given.clear()
            for word in _split(value, self.source, start, self.problems):
                name, equals, content = word.partition("=")
                if equals:
                    self.given[name], self.given_places[name] = content, where
        elif key == "EnvironmentFile":
            if not value.strip():
                self.files.clear()
            else:
                self.files.append((value.strip(), where))
        elif key == "UnsetEnvironment":
            self.unset.update(value.split())
        elif key == "PassEnvironment":
            for name in value.split():
                if matters(name):
                    self.complain(f"PassEnvironment takes {clean(name)} from the service manager, which cannot be seen here; write it under Environment=", where)
        elif key in ("MemoryMax", "MemoryLimit"):
            self._memory(key, value.strip(), where)

    def _memory(self, key: str, value: str, where: Where) -> None:
        self.limit, self.limit_where = None, where
        match = _SIZE.fullmatch(value)
        if match:
            self.limit = int(match[1]) * 1024 ** _POWERS[match[2]]
        elif value in ("", "infinity", "100%"):
            self.limit_where = None
        elif re.fullmatch(r"[0-9.]+%", value):
            self.complain(f"{key}={clean(value)} is a share of a machine that the unit does not name; write the limit in bytes (K, M, G, T)", where)
        else:
            self.complain(f"{clean(shorten(value))!r} is not a memory limit", where)

    def environment(self) -> tuple[dict[str, str], dict[str, Where]]:
        """Return what the process gets: Environment=, over it the files in their order, less UnsetEnvironment=."""
        values, places = dict(self.given), dict(self.given_places)
        for text, where in self.files:
            optional, path = text.startswith("-"), text.removeprefix("-")
            if not path.startswith("/") or "%" in path:
                self.complain(f"EnvironmentFile {clean(path)} cannot be followed; it must be an absolute path without specifiers", where)
                continue
            paths = sorted(glob.glob(path))[:_MOST_FILES] if any(c in path for c in "*?[") else [path]  # noqa: PTH207 - text paths
            if not optional and not paths:
                self.complain(f"EnvironmentFile {clean(path)}: no such file", where)
            self.absent = self.absent or (optional and not any(os.path.lexists(p) for p in paths))
            for one in paths:
                if optional and not os.path.lexists(one):
                    continue
                try:
                    more, at = read_variables(one)
                except InputError as error:
                    self.problems += [replace(p, message=f"EnvironmentFile {clean(one)}: {p.message}", where=where, line_text=None) for p in error.problems]
                    continue
                values.update(more)
                places.update(at)
        return {k: v for k, v in values.items() if k not in self.unset}, places


def read(path: str, *, known: Callable[[str], bool], environ: Mapping[str, str]) -> Collection:
    """Read a unit file. Raises InputError with every problem."""
    del environ  # a unit starts with an environment of its own
    text = read_text(path)
    unit = _Unit(path, text)
    sections = [(m.start(), m[1]) for m in _SECTION.finditer(text)]
    for entry in _ENTRY.finditer(text):
        section = next((name for start, name in reversed(sections) if start < entry.start()), "")
        if section != "Service" or text[entry.start() : entry.start(1)].lstrip().startswith(("#", ";")):
            continue
        unit.setting(entry[1], entry[2], entry.start(2), entry.end(2))
    given, places = unit.environment()
    commands = []
    for value, start, end in unit.starts:
        command = _command(unit, value, start, end, known, given, places)
        if command is not None:
            commands.append(command)
    if unit.problems:
        raise InputError(unit.problems)
    if not commands:
        raise no_command(path, "unit")
    return Collection(path=path, commands=tuple(commands))


def _command(
    unit: _Unit, value: str, start: int, end: int, known: Callable[[str], bool], given: Mapping[str, str], given_places: Mapping[str, Where]
) -> Command | None:
    line = value.lstrip(_PREFIXES)
    prefixes = value[: len(value) - len(line)]
    raw = _split(line, unit.source, start, unit.problems)
    at = unit.source.places(raw, start, end)
    if "@" in prefixes:  # the second word is what the process is called
        del raw[1:2], at[1:2]
    words, places, undefined = (raw, at, []) if ":" in prefixes else _expanded(raw, at, given, lenient=unit.absent)
    try:
        found = unwrap(words, places, known, source=unit.source, end=end, environ=given)
    except NotSimpleError as error:
        unit.complain(str(error), error.where)
        return None
    if found is None:
        return None
    unit.problems += undefined
    return Command(
        name=unit.path.rsplit("/", 1)[-1], argv=tuple(found.words), places=tuple(found.places), environ={**given, **found.assigned},
        environ_places=given_places, host_limit_bytes=unit.limit, host_limit_where=unit.limit_where, inherits=False,
    )  # fmt: skip


def _expanded(raw: list[str], at: list[Where], values: Mapping[str, str], *, lenient: bool) -> tuple[list[str], list[Where], list[Problem]]:
    """Put in variables: $NAME as a word of its own gives any number of words, ${NAME} stays in its word.

    ``lenient``: one that is not defined is nothing, as for systemd, and no problem.
    """
    words: list[str] = []
    places: list[Where] = []
    problems: list[Problem] = []

    def value_of(name: str, where: Where) -> str:
        if name not in values and not lenient:
            message = f"the variable {name} is not defined in this unit or its environment files"
            problems.append(Problem(message=message, where=where))
        return values.get(name, "")

    for word, where in zip(raw, at, strict=True):
        own = _OWN_WORD.fullmatch(word)
        if own:
            try:
                more = split(value_of(own[1], where))
            except ValueError as error:
                problems.append(Problem(message=f"the variable {own[1]} cannot be split into words: {str(error).lower()}", where=where))
                more = []
        else:
            more = [_VARIABLE.sub(lambda m, w=where: "$" if m[1] is None else value_of(m[1], w), word)]  # type: ignore[misc]
        words += more
        places += [where] * len(more)
    return words, places, problems


def _split(value: str, source: Text, start: int, problems: list[Problem]) -> list[str]:
    try:
        return split(_COMMENT.sub("", value))
    except ValueError as error:
        problems.append(Problem(message=f"cannot be split into words: {str(error).lower()}", where=source.where(start)))
        return []
