"""The engine's INI files: presets and ``config.ini`` (``common/preset.cpp``, 0.5.0).

``[section]`` and ``key = value``; a ``;`` or ``#`` ends a value wherever it stands. A key is an option's name without
dashes, long, short or negated, or the name of its environment variable. A repeated header clears the earlier section;
the last of two equal keys wins. An unknown key is an error in a preset file and passed over in ``config.ini``.
"""

from __future__ import annotations

import difflib
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from residency.errors import Problem
from residency.text import clean, shorten
from residency.where import Where

from .flags import FALSE, FLAGS, SILENT, TRUE, Flag, flag_names

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Keys of the router itself, without bearing on memory.
_ROUTER = ("load-on-startup", "stop-timeout", "dedup-cache-models")
_HEADER = re.compile(r"\s*\[([^\]]*)\]\s*(?:[;#].*)?")
_ENTRY = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*=\s*([^;#]*)")
_BLANK = re.compile(r"\s*(?:[;#].*)?")


class Entry(NamedTuple):
    """One key = value, and where both stand."""

    key: str
    value: str
    where: Where
    value_where: Where
    line: str


def sections(path: str, text: str, problems: list[Problem]) -> dict[str, dict[str, Entry]]:
    """Return the sections of a file; keys before any header are in "default"."""
    found: dict[str, dict[str, Entry]] = {"default": {}}
    current = found["default"]
    for number, line in enumerate(text.splitlines(), 1):
        if _BLANK.fullmatch(line):
            continue
        header = _HEADER.fullmatch(line)
        if header:
            name = header[1].strip()
            head, colon, tag = name.rpartition(":")
            current = found[f"{head}:{tag.upper()}" if colon else name] = {}
            continue
        entry = _ENTRY.match(line)
        if entry is None:
            column = len(line) - len(line.lstrip()) + 1
            where = Where(source="file", file=path, line=number, column=column)
            problems.append(Problem(message="neither [section] nor key = value; the engine refuses the whole file", where=where, line_text=line, span=len(line.strip())))
            continue
        at = Where(source="file", file=path, line=number, column=entry.start(1) + 1, flag=entry[1])
        value_at = Where(source="file", file=path, line=number, column=entry.start(2) + 1)
        current[_canonical(entry[1])] = Entry(entry[1], entry[2].strip(), at, value_at, line)
    return found


def _canonical(key: str) -> str:
    """Return one name for all names of an option, so that the last of two equal ones wins."""
    named = _flag_of(key)
    if named is None:
        return key
    # Four flags name adapters, and each counts.
    return named[0].target if named[0].target != "model.adapters" else named[0].names[0]


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


def words_of(entry: Entry, problems: list[Problem]) -> list[str]:
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
        close = difflib.get_close_matches(key[:80], known, n=1)
        problems.append(
            Problem(message=f"{clean(shorten(key))} is not an option", where=entry.where, line_text=entry.line, span=len(key), hint=f"did you mean {close[0]}?" if close else None)
        )
        return []
    flag, negative = named
    if flag.target.startswith("option:models-"):
        return []
    if flag.kind in ("flag", "switch"):
        word = value.casefold()
        if word not in TRUE and word not in FALSE:
            problems.append(Problem(message=f"{clean(shorten(key))} expects on or off, not {clean(shorten(value))!r}", where=entry.value_where, line_text=entry.line, span=max(1, len(value))))
            return []
        wanted = (word in TRUE) != negative
        if wanted:
            return [flag.names[-1]]
        return [flag.negative[-1]] if flag.negative else []
    return [flag.names[-1], value]


def config_files(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files every program reads before its environment, the later one winning."""
    home = environ.get("XDG_CONFIG_HOME") or (os.path.join(environ["HOME"], ".config") if environ.get("HOME") else "")  # noqa: PTH118 - text paths
    return ("/etc/llama.cpp/config.ini", *((os.path.join(home, "llama.cpp", "config.ini"),) if home else ()))  # noqa: PTH118 - the same


def config_words(environ: Mapping[str, str]) -> tuple[list[str], list[Where]]:
    """Return what the implicit config files say as command-line words, with their places. A file that is absent says nothing."""
    from residency.launch.toml_file import read_text

    words: list[str] = []
    places: list[Where] = []
    for path in config_files(environ):
        if not os.path.isfile(path):  # noqa: PTH113 - text paths
            continue
        ignored: list[Problem] = []  # the engine warns about unknown keys here and goes on
        parts = sections(path, read_text(path), ignored)
        for entry in {**parts.get("*", {}), **parts.get("default", {})}.values():
            more = words_of(entry, ignored)
            words += more
            places += [entry.where, *([entry.value_where] * (len(more) - 1))][: len(more)]
    return words, places
