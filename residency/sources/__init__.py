"""Files that hold engine command lines: preset INI files, and what others add beside them.

A reader turns a file into :class:`Command` values: an argv, the environment the engine would get,
and for every argument the place in the file it came from. The engine then reads the argv as it
would any other; afterwards positions are moved from "argument 5" to "file:line:column".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from residency.errors import InputError, Problem

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
    folder: str = ""  # relative paths of the command are relative to it; "" = the current folder
    host_limit_bytes: int | None = None  # memory limit the file puts on the process
    host_limit_where: Where | None = None
    device_count: int | None = None  # accelerators the file gives the process
    inherits: bool = True  # whether the process also gets the caller's environment


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Every engine command of one file, and which of them run at the same time."""

    path: str
    commands: tuple[Command, ...]
    together: int | None = None  # at most this many run at once; None: all; 0 = the file does not say


def reader_for(path: str) -> Callable[[str], Collection] | None:
    """Return the reader of a file that holds command lines, by its ending; None: it is not such a file."""
    from importlib import import_module

    ending = PurePath(path).suffix.casefold()
    home = _READERS.get(ending)
    return None if home is None else import_module(home, __name__).read


_READERS = {".ini": ".presets"}


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
    problems: list[Problem] = [
        replace(p, where=_moved(p.where, command) if p.where is not None else command.places[0] if command.places else None)
        for p in error.problems
    ]
    return InputError(problems)
