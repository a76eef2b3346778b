"""systemd units: ExecStart=, Environment=, EnvironmentFile=, MemoryMax=, as ``systemd.service(5)`` describes them.

Drop-ins (``NAME.service.d/*.conf``) are read after the unit in the order of their names, specifiers (``%i``) are put in
where they can be known: ``systemd.unit(5)``.
"""

from __future__ import annotations

import glob
import os
import re
from bisect import bisect_left
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from residency.errors import InputError, Problem
from residency.launch.toml_file import read_text
from residency.text import clean, shorten
from residency.where import DEFAULT

from . import Collection, Command, no_command
from .environment import matters, read_variables
from .words import LONGEST, LONGEST_SUM, NotSimpleError, Text, TooLongError, put_in, split, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from residency.where import Where

#: A line that ends with a backslash goes on; comments in between are no part of it and do not end it.
_ENTRY = re.compile(r"^[ \t]*([A-Za-z]+)[ \t]*=[ \t]*((?:[^\n]*\\\n(?:[ \t]*[#;][^\n]*\n)*+)*+[^\n]*)$", re.MULTILINE)
_COMMENT = re.compile(r"\n[ \t]*[#;][^\n]*(?=\n)")
_SECTION = re.compile(r"^[ \t]*\[([^\]\n]*)\][ \t]*$", re.MULTILINE)
_SIZE = re.compile(r"([0-9]{1,20})([KMGT]?)")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,2})?)%")
_PREFIXES = "-@:+!|"
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OWN_WORD = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_MOST_FILES = 64
#: Where the system manager looks for units and their drop-ins, the strongest first.
_SYSTEM = ("/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
_USER = ("/etc/systemd/user", "/run/systemd/user", "/usr/local/lib/systemd/user", "/usr/lib/systemd/user")
#: Every specifier there is; any other letter behind a per cent sign stays as it is.
_SPECIFIER = re.compile(r"%([%aAbBCdDEfgGhHiIjJlLmMnNoprsStTuUvVwWyYP])")
#: Folders of the system manager; those of a user's manager hang on that user's environment.
_OF_SYSTEM = {"h": "/root", "u": "root", "U": "0", "t": "/run", "S": "/var/lib", "C": "/var/cache", "L": "/var/log", "E": "/etc"}


class _Name:
    """A unit's name and what specifiers make of it."""

    def __init__(self, path: str) -> None:
        self.path = PurePath(path)
        self.fragment = PurePath(os.path.abspath(path))  # noqa: PTH100 - text paths; the file of an instance is its template's
        real = PurePath(os.path.realpath(path))
        if os.path.islink(path) and (real.name == self.path.name or "@." in real.name):  # noqa: PTH114 - one of multi-user.target.wants, say
            self.fragment = real.with_name(self.path.name)
        self.full = self.path.name
        self.prefix, self.at, instance = self.full.removesuffix(".service").partition("@")
        self.instance = instance or None
        self.template = f"{self.prefix}@.service" if self.at else None
        self.system: bool | None = None  # whether the system manager runs it; None: not known
        folder = str(self.fragment.parent)
        if folder in _SYSTEM:
            self.system = True
        elif folder in _USER or folder.endswith("/systemd/user"):
            self.system = False

    def folders(self) -> list[str]:
        """Return the folders where drop-ins may lie, the strongest first."""
        own = str(self.path.parent)
        known = next((group for group in (_SYSTEM, _USER) if str(self.fragment.parent) in group), ())
        places = dict.fromkeys((*known, own, str(self.fragment.parent)))
        names = [self.full, *([self.template] if self.template and self.template != self.full else [])]
        parts = self.prefix.split("-")
        names += ["-".join(parts[:n]) + "-.service" for n in range(len(parts) - 1, 0, -1)]
        return [str(PurePath(place, f"{name}.d")) for place in places for name in names] + [str(PurePath(place, "service.d")) for place in places]

    def value(self, letter: str) -> str | None:
        """Return what a specifier stands for; None: it cannot be known here."""
        last = self.prefix.rsplit("-", 1)[-1]
        instance = self.instance if self.at else ""
        known = {
            "%": "%", "n": self.full, "N": self.full.removesuffix(".service"), "p": self.prefix, "P": _unescaped(self.prefix), "j": last,
            "J": _unescaped(last), "i": instance, "I": None if instance is None else _unescaped(instance),
            "f": "/" + _unescaped(self.instance or self.prefix).lstrip("/") if instance is not None else None,
            "y": str(self.fragment), "Y": str(self.fragment.parent),
        }  # fmt: skip
        if letter in known:
            return known[letter]
        folder = str(self.fragment.parent)
        if letter == "h" and folder.endswith("/.config/systemd/user"):
            return folder.removesuffix("/.config/systemd/user")
        return _OF_SYSTEM.get(letter) if self.system else None


def _unescaped(text: str) -> str:
    """Undo systemd's escaping of a name: a dash stands for a slash, a code in hexadecimal for its character."""
    return re.sub(r"\\x([0-9a-fA-F]{2})", lambda m: chr(int(m[1], 16)), text.replace("-", "/"))


class _Unit:
    """What the settings of one [Service] section add up to."""

    def __init__(self, name: _Name) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self.starts: list[tuple[str, int, int, Text]] = []
        self.several = False  # whether Type=oneshot lets it start several commands
        self.given: dict[str, str] = {}
        self.given_places: dict[str, Where] = {}
        self.unknown: dict[str, Problem] = {}  # variables whose value holds what cannot be known here
        self.files: list[tuple[str, Where]] = []
        self.passed: list[tuple[str, Where]] = []
        self.unset: set[str] = set()
        self.size = 0  # characters of texts with their specifiers put in
        self.folder: str | None = None  # WorkingDirectory=
        self.folder_where: Where | None = None
        self.older: tuple[int | None, float | None, Where | None] = (None, None, None)  # MemoryLimit=, which MemoryMax= replaces
        self.absent = False  # whether an optional file is not there, so that its variables may be missing
        self.limit: int | None = None
        self.share: float | None = None
        self.limit_where: Where | None = None

    def complain(self, message: str, where: Where) -> None:
        self.problems.append(Problem(message=message, where=where))

    def specified(self, text: str, where: Where) -> tuple[str, Problem | None]:
        """Return a text with its specifiers put in, and the problem of those that cannot be known."""
        lost: list[str] = []

        def put(match: re.Match[str]) -> str:
            value = self.name.value(match[1])
            if value is None:
                lost.append(match[0])
            return match[0] if value is None else value

        try:
            done = put_in(_SPECIFIER, put, text)
        except TooLongError as error:
            return "", Problem(message=str(error), where=where)
        self.size += len(done)
        if self.size > LONGEST_SUM:
            return "", Problem(message=f"the unit's texts come to more than {LONGEST_SUM // 2**20} MiB", where=where)
        if not lost:
            return done, None
        if lost[0] in ("%i", "%I", "%f"):
            example = f"{self.name.prefix}@INSTANCE.service"
            return done, Problem(message=f"{lost[0]} is the name of an instance, and this is a template; judge {clean(example)} in the same folder", where=where)
        if lost[0][1] in _OF_SYSTEM:
            whose = "a user's manager" if self.name.system is False else "the manager that runs the unit"
            return done, Problem(message=f"{lost[0]} depends on {whose}, which cannot be seen here; write the path itself", where=where)
        return done, Problem(message=f"{lost[0]} is known only where the unit runs; write its value", where=where)

    def setting(self, key: str, value: str, start: int, end: int, source: Text) -> None:
        """Apply one assignment; an empty one resets a list."""
        where = source.where(start)
        empty = not value.strip()
        if key == "ExecStart":
            if empty:
                self.starts.clear()
            else:
                if self.starts and not self.several:
                    self.complain("this adds a second command, which only Type=oneshot takes; write an empty ExecStart= above it to replace the first", where)
                    return
                self.starts.append((value, start, end, source))
        elif key == "Environment":
            if empty:
                self.given.clear()
                self.unknown.clear()
            for word in _split(value, source, start, self.problems):
                name, equals, content = word.partition("=")
                if equals:
                    self.given[name], problem = self.specified(content, where)
                    self.given_places[name] = where
                    self.unknown.pop(name, None)
                    if problem is not None:
                        self.unknown[name] = problem
        elif key == "EnvironmentFile":
            if empty:
                self.files.clear()
            else:
                self.files.append((value.strip(), where))
        elif key == "UnsetEnvironment":
            if empty:
                self.unset.clear()
            self.unset.update(value.split())
        elif key == "PassEnvironment":
            if empty:
                self.passed.clear()
            self.passed += ((name, where) for name in value.split())
        elif key == "WorkingDirectory":
            self.folder, self.folder_where = value.strip().removeprefix("-"), where
        elif key in ("RootDirectory", "RootImage") and not empty:
            self.complain(f"{key} gives the process a file tree of its own, which is not followed here", where)
        elif key == "MemoryMax":
            self.limit, self.share, self.limit_where = self._memory(value.strip(), where)
        elif key == "MemoryLimit":
            self.older = self._memory(value.strip(), where)

    def working(self) -> tuple[str | None, str | None]:
        """Return what relative paths are relative to, or why that is not known."""
        text = self.folder
        if not text:
            if self.name.system:
                return "/", None
            whose = "that of its user's manager" if self.name.system is False else "/ or, in a user's manager, that user's home"
            home = self.name.value("h") if self.name.system is False else None
            return home, None if home else f"WorkingDirectory= is not set, so its folder is {whose}"
        if text == "~":
            return None, "WorkingDirectory=~ is the home of the unit's user, which cannot be seen here"
        path, problem = self.specified(text, self.folder_where or DEFAULT)
        if problem is not None or not path.startswith("/"):
            return None, f"WorkingDirectory={clean(shorten(text))} cannot be followed here"
        return path, None

    def _memory(self, value: str, where: Where) -> tuple[int | None, float | None, Where | None]:
        size, share = _SIZE.fullmatch(value), _SHARE.fullmatch(value)
        if size and int(size[1]):
            return int(size[1]) * 1024 ** _POWERS[size[2]], None, where
        if size or value in ("", "infinity", "100%"):  # systemd passes a limit of nothing over
            return None, None, None
        if share and float(share[1]) <= 100:
            return None, float(share[1]) / 100, where
        self.complain(f"{clean(shorten(value))!r} is not a memory limit", where)
        return None, None, None

    def environment(self) -> tuple[dict[str, str], dict[str, Where]]:
        """Return what the process gets: Environment=, over it the files in their order, less UnsetEnvironment=."""
        values, places = dict(self.given), dict(self.given_places)
        for text, where in self.files:
            optional = text.startswith("-")
            path, problem = self.specified(text.removeprefix("-"), where)
            if problem is not None or not path.startswith("/"):
                self.problems.append(problem or Problem(message=f"EnvironmentFile {clean(path)} cannot be followed; it must be an absolute path", where=where))
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
                for name in more:
                    self.unknown.pop(name, None)
        for name in self.unset:
            self.unknown.pop(name, None)
        self.problems += [problem for name, problem in self.unknown.items() if matters(name)]
        for name, where in self.passed:
            if matters(name):
                self.complain(f"PassEnvironment takes {clean(name)} from the service manager, which cannot be seen here; write it under Environment=", where)
        return {k: v for k, v in values.items() if k not in self.unset}, places


def _drop_ins(name: _Name) -> list[str]:
    """Return the drop-ins of a unit in the order they apply: by file name, the strongest of two of one name."""
    found: dict[str, str] = {}
    for folder in name.folders():
        for path in sorted(glob.glob(glob.escape(folder) + "/*.conf")):  # noqa: PTH207 - text paths
            found.setdefault(path.rsplit("/", 1)[-1], path)
    ordered = [found[file] for file in sorted(found)]
    return [path for path in ordered if os.path.realpath(path) != os.devnull][:_MOST_FILES]


def _fragment(path: str) -> str:
    """Return the file of a unit: its own, or the template of ``name@instance.service`` beside it."""
    name = _Name(path)
    if name.template is None or os.path.lexists(path):
        return path
    template = str(name.path.with_name(name.template))
    return template if os.path.lexists(template) else path


def _settings(text: str) -> list[tuple[str, str, str, int, int]]:
    """Return section, key, value, start and end of every assignment of a file."""
    starts, names = [-1], [""]
    for header in _SECTION.finditer(text):
        starts.append(header.start())
        names.append(header[1])
    rows = []
    for entry in _ENTRY.finditer(text):
        section = names[bisect_left(starts, entry.start()) - 1]
        if not text[entry.start() : entry.start(1)].lstrip().startswith(("#", ";")):
            rows.append((section, entry[1], entry[2], entry.start(2), entry.end(2)))
    return rows


def read(path: str, *, known: Callable[[str], bool], environ: Mapping[str, str]) -> Collection:
    """Read a unit file and its drop-ins. Raises InputError with every problem."""
    del environ  # a unit starts with an environment of its own
    name = _Name(path)
    fragment = _fragment(path)
    name.fragment = name.fragment.with_name(PurePath(fragment).name)
    files = []
    for file in (fragment, *_drop_ins(name)):
        text = read_text(file)
        files.append((Text(file, text), _settings(text)))
    for _, rows in files:
        for section, key, value, _, _ in rows:
            of_system = (section, key) in (("Service", "User"), ("Service", "DynamicUser")) or (key == "WantedBy" and "multi-user.target" in value.split())
            if name.system is None and section in ("Service", "Install") and of_system and value.strip():
                name.system = True
    unit = _Unit(name)
    every = [(source, row) for source, rows in files for row in rows if row[0] == "Service"]
    unit.several = next((row[2].strip() for _, row in reversed(every) if row[1] == "Type"), "") == "oneshot"
    for source, (_, key, value, start, end) in every:
        unit.setting(key, value, start, end, source)
    if unit.limit_where is None:
        unit.limit, unit.share, unit.limit_where = unit.older
    given, places = unit.environment()
    commands = []
    for value, start, end, source in unit.starts:
        command = _command(unit, value, start, end, source, known, given, places)
        if command is not None:
            commands.append(command)
    if unit.problems:
        raise InputError(unit.problems)
    if not commands:
        raise no_command(path, "unit")
    return Collection(path=path, commands=tuple(commands))


def _command(
    unit: _Unit, value: str, start: int, end: int, source: Text, known: Callable[[str], bool], given: Mapping[str, str], given_places: Mapping[str, Where]
) -> Command | None:
    line = value.lstrip(_PREFIXES)
    prefixes = value[: len(value) - len(line)]
    raw = _split(line, source, start, unit.problems)
    at = source.places(raw, start, end)
    if "@" in prefixes:  # the second word is what the process is called
        del raw[1:2], at[1:2]
    done = [unit.specified(word, where) for word, where in zip(raw, at, strict=True)]
    lost = [problem for _, problem in done if problem is not None]
    raw = [word for word, _ in done]
    words, places, undefined = (raw, at, []) if ":" in prefixes else _expanded(raw, at, given, unit.unknown, lenient=unit.absent)
    try:
        found = unwrap(words, places, known, source=source, end=end, environ=given)
    except NotSimpleError as error:
        unit.complain(str(error), error.where)
        return None
    if found is None:
        return None
    unit.problems += lost + undefined
    folder, no_folder = unit.working()
    return Command(
        name=unit.name.full, argv=tuple(found.words), places=tuple(found.places), environ={**given, **found.assigned} if found.assigned else given,
        environ_places=given_places, host_limit_bytes=unit.limit, host_limit_share=unit.share, host_limit_where=unit.limit_where, folder=folder,
        no_folder=no_folder, inherits=False,
    )  # fmt: skip


def _expanded(
    raw: list[str], at: list[Where], values: Mapping[str, str], unknown: Mapping[str, Problem], *, lenient: bool
) -> tuple[list[str], list[Where], list[Problem]]:
    """Put in variables: $NAME as a word of its own gives any number of words, ${NAME} stays in its word.

    ``lenient``: one that is not defined is nothing, as for systemd, and no problem. ``unknown``: those whose value is
    not known.
    """
    words: list[str] = []
    places: list[Where] = []
    problems: list[Problem] = []
    size = 0

    def value_of(name: str, where: Where) -> str:
        if name in unknown and not matters(name):  # those that matter are told anyway
            problems.append(unknown[name])
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
            try:
                more = [put_in(_VARIABLE, lambda m, w=where: "$" if m[1] is None else value_of(m[1], w), word)]  # type: ignore[misc]
            except TooLongError as error:
                problems.append(Problem(message=str(error), where=where))
                break
        size += sum(map(len, more))
        if size > LONGEST:
            problems.append(Problem(message=f"from here on the command is longer than {LONGEST // 1024} KiB; variables that multiply?", where=where))
            break
        words += more
        places += [where] * len(more)
    return words, places, problems


def _split(value: str, source: Text, start: int, problems: list[Problem]) -> list[str]:
    try:
        return split(_COMMENT.sub("", value))
    except ValueError as error:
        problems.append(Problem(message=f"cannot be split into words: {str(error).lower()}", where=source.where(start)))
        return []
