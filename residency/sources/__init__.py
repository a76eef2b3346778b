"""Files that hold engine command lines: preset INI, llama-swap, compose, Kubernetes, systemd.

A reader turns a file into :class:`Command` values: an argv, the environment the engine would get,
and for every argument the place in the file it came from. The engine then reads the argv as it
would any other; afterwards positions are moved from "argument 5" to "file:line:column".
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Protocol

from residency.errors import InputError, Problem
from residency.text import clean, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from residency.launch.model import Launch
    from residency.where import Where


@dataclass(frozen=True, kw_only=True)
class Command:
    """One engine command line found in a file."""

    name: str  # of the section, service or model
    argv: tuple[str, ...]
    places: tuple[Where, ...]  # one per argument
    environ: Mapping[str, str] = field(default_factory=dict)
    environ_places: Mapping[str, Where] = field(default_factory=dict)
    engine: str | None = None  # when the file says it
    mounts: tuple[tuple[str, str], ...] = ()  # (path the process sees, path here)
    hidden: tuple[tuple[str, str], ...] = ()  # (path the process sees, what lies there and cannot be seen from here)
    contained: bool = False  # in a container: what no mount holds is the image's own
    folder: str | None = None  # what relative paths are relative to, as the process sees it
    no_folder: str | None = None  # why that is not known; with neither it is the caller's own
    host_limit_bytes: int | None = None  # memory limit the file puts on the process
    host_limit_share: float | None = None  # the same as a share of the host's memory
    host_limit_where: Where | None = None
    device_count: int | None = None  # accelerators the file gives the process, the first ones
    first_device: int = 0  # how many of them other containers of the same pod have got
    device_where: Where | None = None
    device_names: str | None = None  # or those that NVIDIA_VISIBLE_DEVICES would name so
    facts: tuple[str, ...] = ()  # what was found of the devices it is given, one sentence each
    assumption: Problem | None = None  # what has been assumed of them and may be otherwise
    inherits: bool = True  # whether the process also gets the caller's environment


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Every engine command of one file, and which of them run at the same time."""

    path: str
    commands: tuple[Command, ...]
    groups: tuple[tuple[str, ...], ...] = ()  # names that run at the same time
    most_at_once: int | None = None  # any that many of all run at the same time
    warnings: tuple[Problem, ...] = ()  # what is not judged or assumed, and would not be expected


class Reader(Protocol):
    """What a reader module provides as ``read``."""

    def __call__(self, path: str, *, known: Callable[[str], bool], environ: Mapping[str, str]) -> Collection:
        """Read a file. ``known`` tells whether a program belongs to an engine; raises InputError."""
        ...


_READERS = {".ini": ".presets", ".json": ".server_json", ".yaml": ".yaml_file", ".yml": ".yaml_file", ".service": ".systemd"}


def reader_for(path: str) -> Reader | None:
    """Return the reader of a file that holds command lines, by its ending; None: it is not such a file."""
    from importlib import import_module

    home = _READERS.get(PurePath(path).suffix.casefold())
    if home is None:
        return None
    read: Reader = import_module(home, __name__).read
    return read


def placed(launch: Launch, command: Command) -> Launch:
    """Return the launch with its positions moved into the file the command came from."""
    moved = {key: _moved(where, command) for key, where in launch.places.items()}
    return replace(launch, places=moved, name=command.name)


def _moved(where: Where, command: Command) -> Where:
    if where.source == "argv" and where.argv_index is not None and where.argv_index < len(command.places):
        return command.places[where.argv_index]
    if where.source == "env" and where.variable is not None:
        return command.environ_places.get(where.variable, where)
    return where


def placed_error(error: InputError, command: Command) -> InputError:
    """Return the error with its positions moved into the file the command came from."""
    first = command.places[0] if command.places else None
    problems = [replace(p, where=_moved(p.where, command) if p.where is not None else first) for p in error.problems]
    return InputError([replace(p, message=f"{command.name}: {p.message}") for p in problems])


def here(path: str, command: Command) -> str:
    """Return where a path the process will see lies on this machine, by the command's folder and mounts.

    Raises InputError for one that cannot be seen from here.
    """
    if not path.startswith("/"):
        if command.no_folder is not None:
            raise InputError(f"{clean(shorten(path))} is a relative path, and {command.no_folder}; write the whole path")
        if command.folder is not None:
            path = posixpath.join(command.folder, path)
    if not command.contained and not command.mounts:
        return path
    path = posixpath.normpath(path)
    holders = [(inside, outside, True) for inside, outside in command.mounts] + [(inside, what, False) for inside, what in command.hidden]
    for inside, outside, seen in sorted(holders, key=lambda holder: -len(holder[0])):
        if path == inside or path.startswith(inside.rstrip("/") + "/"):
            if not seen:
                raise InputError(f"{clean(shorten(path))} lies in {outside}, which cannot be seen from here; judge a census of the model instead")
            return outside.rstrip("/") + path[len(inside.rstrip("/")) :] or "/"
    if command.contained:
        raise InputError(f"no mount holds {clean(shorten(path))}: in the container it is the image's own file, which cannot be seen from here")
    return path


def no_command(path: str, what: str) -> InputError:
    """Return the error for a file without any engine command."""
    return InputError([Problem(message=f"{path}: no command of a known engine in this {what}")])
