"""llama.cpp preset files: INI sections, one model each (``common/preset.cpp``, 0.5.0).

``[*]`` gives defaults, keys before any header are the section "default", every other header is a
model. A key is an option's name without dashes, long, short or negated, or the name of its
environment variable. A ``;`` or ``#`` ends a value wherever it stands. A repeated header clears
the earlier section; the last of two equal keys wins. The router starts one process per model and
keeps at most ``--models-max`` (4) of them, by count and not by memory.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from residency.engines.llama_cpp.ini import sections, words_of
from residency.errors import InputError, Problem
from residency.launch.toml_file import read_text
from residency.text import clean
from residency.where import Where

from . import Collection, Command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Models the router keeps loaded when nobody says otherwise.
MODELS_MAX = 4


def read(path: str, *, known: Callable[[str], bool], environ: Mapping[str, str]) -> Collection:
    """Read a preset file. Raises InputError with every problem."""
    del known, environ  # every section is a llama-server, with the router's own environment
    problems: list[Problem] = []
    text = read_text(path)
    parts = sections(path, text, problems)
    _no_duplicates(path, text, problems)
    shared = parts.pop("*", {})
    default = parts.pop("default", {})
    commands = []
    for name, entries in parts.items():
        argv, places = ["llama-server"], [Where(source="file", file=path)]
        merged = {**shared, **entries}
        for entry in merged.values():
            words = words_of(entry, problems)
            argv += words
            places += [entry.where, *([entry.value_where] * (len(words) - 1))][: len(words)]
        commands.append(Command(name=name, argv=tuple(argv), places=tuple(places), engine="llama.cpp"))
    if not commands and not problems:
        problems.append(Problem(message="no model: a preset file has one [section] per model", where=Where(source="file", file=path)))
    if problems:
        raise InputError(problems)
    most = MODELS_MAX
    for section in (shared, default):
        limit = section.get("option:models-max")
        if limit is not None and limit.value.isdigit():
            most = int(limit.value)
    return Collection(path=path, commands=tuple(commands), most_at_once=min(most or len(commands), len(commands)))


def _no_duplicates(path: str, text: str, problems: list[Problem]) -> None:
    """Complain about a section that stands twice: the engine forgets the first without a word."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[([^\]]*)\]", line)
        if header is None:
            continue
        name = header[1].strip()
        head, colon, tag = name.rpartition(":")
        name = f"{head}:{tag.upper()}" if colon else name
        if name in lines:
            message = f"the section [{clean(name)}] stands twice; the engine forgets the one in line {lines[name]}"
            where = Where(source="file", file=path, line=number, column=line.index("[") + 1)
            problems.append(Problem(message=message, where=where, line_text=line, span=len(header[0].strip())))
        lines[name] = number
