"""systemd units: ExecStart=, Environment=, MemoryMax=, as ``systemd.service(5)`` describes them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from residency.errors import InputError, Problem
from residency.launch.toml_file import read_text
from residency.text import clean

from . import Collection, Command, no_command
from .words import Text, split, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from residency.where import Where

_ENTRY = re.compile(r"^[ \t]*([A-Za-z]+)[ \t]*=[ \t]*((?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
_SECTION = re.compile(r"^[ \t]*\[([^\]\n]*)\][ \t]*$", re.MULTILINE)
_SIZE = re.compile(r"([0-9]+)([KMGT]?)")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def read(path: str, *, known: Callable[[str], bool], environ: Mapping[str, str]) -> Collection:
    """Read a unit file. Raises InputError with every problem."""
    del environ  # a unit starts with an environment of its own
    text = read_text(path)
    source = Text(path, text)
    problems: list[Problem] = []
    sections = [(m.start(), m[1]) for m in _SECTION.finditer(text)]
    starts: list[tuple[str, int, int]] = []
    given: dict[str, str] = {}
    given_places: dict[str, Where] = {}
    limit, limit_where = None, None
    for entry in _ENTRY.finditer(text):
        section = next((name for start, name in reversed(sections) if start < entry.start()), "")
        if section != "Service" or text[entry.start() : entry.start(1)].lstrip().startswith(("#", ";")):
            continue
        key, value = entry[1], entry[2]
        if key == "ExecStart":
            if not value.strip():
                starts.clear()  # an empty assignment resets the list
            else:
                starts.append((value, entry.start(2), entry.end(2)))
        elif key == "Environment":
            for word in _split(value, source, entry.start(2), problems):
                name, equals, content = word.partition("=")
                if equals:
                    given[name] = content
                    given_places[name] = source.where(entry.start(2))
        elif key in ("MemoryMax", "MemoryLimit"):
            match = _SIZE.fullmatch(value.strip())
            limit_where = source.where(entry.start(2))
            if match:
                limit = int(match[1]) * 1024 ** _POWERS[match[2]]
            elif value.strip() != "infinity" and not value.strip().endswith("%"):
                problems.append(Problem(message=f"{clean(value.strip())!r} is not a memory limit", where=limit_where))
    commands = []
    for value, start, end in starts:
        words = _split(value.lstrip("-@:+!|"), source, start, problems)
        found = unwrap(words, known)
        if found is None:
            continue
        index, assigned = found
        places = source.places(words, start, end)
        commands.append(
            Command(
                name=path.rsplit("/", 1)[-1], argv=tuple(words[index:]), places=tuple(places[index:]), environ={**given, **assigned},
                environ_places=given_places, host_limit_bytes=limit, host_limit_where=limit_where, inherits=False,
            )
        )  # fmt: skip
    if problems:
        raise InputError(problems)
    if not commands:
        raise no_command(path, "unit")
    return Collection(path=path, commands=tuple(commands))


def _split(value: str, source: Text, start: int, problems: list[Problem]) -> list[str]:
    try:
        return split(value)
    except ValueError as error:
        problems.append(Problem(message=f"cannot be split into words: {str(error).lower()}", where=source.where(start)))
        return []
