"""llama.cpp preset files: INI sections, one model each (``common/preset.cpp``, 0.5.0).

``[*]`` gives defaults, keys before any header are the section "default", every other header is a
model. A key is an option's name without dashes, long, short or negated, or the name of its
environment variable. A ``;`` or ``#`` ends a value wherever it stands. A repeated header clears
the earlier section; the last of two equal keys wins. The router starts one process per model and
keeps at most ``--models-max`` (4) of them, by count and not by memory.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, NamedTuple

from residency.engines.llama_cpp.argv import FALSE, TRUE, flag_names
from residency.engines.llama_cpp.flags import FLAGS, SILENT, Flag
from residency.errors import InputError, Problem
from residency.launch.toml_file import read_text
from residency.text import clean
from residency.where import Where

from . import Collection, Command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Models the router keeps loaded when nobody says otherwise.
MODELS_MAX = 4
#: Keys of the router itself, without bearing on memory.
_ROUTER = ("load-on-startup", "stop-timeout", "dedup-cache-models")
_HEADER = re.compile(r"\s*\[([^\]]*)\]\s*(?:[;#].*)?")
_ENTRY = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*=\s*([^;#]*)")
_BLANK = re.compile(r"\s*(?:[;#].*)?")


class _Entry(NamedTuple):
    key: str
    value: str
    where: Where
    value_where: Where
    line: str


def read(path: str, *, known: Callable[[str], bool], environ: Mapping[str, str]) -> Collection:
    """Read a preset file. Raises InputError with every problem."""
    del known, environ  # every section is a llama-server, with the router's own environment
    problems: list[Problem] = []
    sections = _sections(path, read_text(path), problems)
    shared = sections.pop("*", {})
    default = sections.pop("default", {})
    commands = []
    for name, entries in sections.items():
        argv, places = ["llama-server"], [Where(source="file", file=path)]
        merged = {**shared, **entries}
        for entry in merged.values():
            words = _words(entry, problems)
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


def _sections(path: str, text: str, problems: list[Problem]) -> dict[str, dict[str, _Entry]]:
    sections: dict[str, dict[str, _Entry]] = {"default": {}}
    current = sections["default"]
    for number, line in enumerate(text.splitlines(), 1):
        if _BLANK.fullmatch(line):
            continue
        header = _HEADER.fullmatch(line)
        if header:
            name = header[1].strip()
            head, colon, tag = name.rpartition(":")
            current = sections[f"{head}:{tag.upper()}" if colon else name] = {}
            continue
        entry = _ENTRY.match(line)
        if entry is None:
            column = len(line) - len(line.lstrip()) + 1
            where = Where(source="file", file=path, line=number, column=column)
            problems.append(Problem(message="neither [section] nor key = value; the engine refuses the whole file", where=where, line_text=line, span=len(line.strip())))
            continue
        at = Where(source="file", file=path, line=number, column=entry.start(1) + 1, flag=entry[1])
        value_at = Where(source="file", file=path, line=number, column=entry.start(2) + 1)
        current[_canonical(entry[1])] = _Entry(entry[1], entry[2].strip(), at, value_at, line)
    return sections


def _canonical(key: str) -> str:
    """Return one name for all names of an option, so that the last of two equal ones wins."""
    named = _flag_of(key)
    return named[0].target if named else key


def _flag_of(key: str) -> tuple[Flag, bool] | None:
    """Return the flag a key names, and whether the name negates it."""
    folded = key.replace("_", "-") if not key.startswith("LLAMA_ARG_") else key
    names = flag_names("llama.cpp")
    for dashes in ("--", "-"):
        if dashes + folded in names:
            return names[dashes + folded][0]
    if key.startswith("LLAMA_ARG_"):
        for flag in FLAGS:
            if flag.env == key[10:]:
                return flag, False
    return None


def _words(entry: _Entry, problems: list[Problem]) -> list[str]:
    """Return the command-line words of one entry, or report why there are none."""
    key, value = entry.key, entry.value
    if key in _ROUTER or key == "version":
        return []
    named = _flag_of(key)
    if named is None:
        silent = next((d + key for d in ("--", "-") if d + key in SILENT), None)
        if silent is not None or key.startswith("LLAMA_ARG_"):
            return []
        known = [n.lstrip("-") for n in (*flag_names("llama.cpp"), *SILENT)]
        close = difflib.get_close_matches(key, known, n=1)
        problems.append(
            Problem(message=f"{clean(key)} is not an option", where=entry.where, line_text=entry.line, span=len(key), hint=f"did you mean {close[0]}?" if close else None)
        )
        return []
    flag, negative = named
    if flag.target.startswith("option:models-"):
        return []
    if flag.kind in ("flag", "switch"):
        word = value.casefold()
        if word not in TRUE and word not in FALSE:
            problems.append(Problem(message=f"{clean(key)} expects on or off, not {clean(value)!r}", where=entry.value_where, line_text=entry.line, span=max(1, len(value))))
            return []
        wanted = (word in TRUE) != negative
        if wanted:
            return [flag.names[-1]]
        return [flag.negative[-1]] if flag.negative else []
    return [flag.names[-1], value]
