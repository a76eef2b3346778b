"""The layers of a launch: one source of values each, which knows where every value stands.

A layer holds plain values as nested mappings, section -> key -> value, before any of them is
judged. Files, environment and ``--set`` are read here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tomli

from residency.errors import Problem
from residency.where import DEFAULT, Where

from .knobs import SECTIONS
from .naming import closest, dotted, unknown
from .toml_positions import Path, Positions, Spot

#: ``RESIDENCY_*`` variables that are not knobs; the command line reads them.
RESERVED_VARIABLES = ("RESIDENCY_POLICY", "RESIDENCY_MACHINE", "RESIDENCY_LOG", "RESIDENCY_DEBUG", "RESIDENCY_WAIT")
PREFIX = "RESIDENCY_"
DELIMITER = "__"
_DEEPEST = 16  # levels of a mapping; a launch needs five


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One source. ``values`` are as written: unknown keys and wrong types included."""

    values: dict[str, Any]

    def where(self, path: Path) -> Where:
        """Return where the setting at a path is written, for provenance."""
        raise NotImplementedError

    def problem(self, path: Path, message: str, *, hint: str | None = None, at: str = "value") -> Problem:
        """Return a problem at a path; ``at`` is "value", "key" or "table"."""
        del at  # only a file has more than one place for a setting
        return Problem(message=message, hint=hint, where=self.where(path))

    def spell(self, path: Path) -> str:
        """Return a path in the words of this source."""
        return dotted(path)


@dataclass(frozen=True, kw_only=True)
class FileLayer(Layer):
    """A launch file: its text is kept, and scanned for positions when the first one is asked for."""

    name: str
    text: str

    @cached_property
    def positions(self) -> Positions:
        """The positions of every key and value."""
        return Positions(self.text)

    def where(self, path: Path) -> Where:
        """Return the position of the key."""
        spot = self._spot(path, "key")
        return Where(source="file", file=self.name, line=spot.line, column=spot.column)

    def problem(self, path: Path, message: str, *, hint: str | None = None, at: str = "value") -> Problem:
        """Return a problem with the line and the stretch it is about."""
        spot = self._spot(path, at)
        return Problem(
            message=message,
            hint=hint,
            where=Where(source="file", file=self.name, line=spot.line, column=spot.column),
            line_text=self.positions.line(spot.line),
            span=spot.length,
        )

    def _spot(self, path: Path, at: str) -> Spot:
        found = self.positions
        order = {
            "key": (found.key, found.header),
            "value": (found.value, found.key, found.header),
            "table": (found.header, found.key),
        }
        finders = order[at]
        for length in range(len(path), 0, -1):
            for find in finders:
                spot = find(path[:length])
                if spot is not None:
                    return spot
            finders = order["table"]  # what is not in the file: the nearest table around it
        return Spot(line=1, column=1, length=1)


@dataclass(frozen=True, kw_only=True)
class MappingLayer(Layer):
    """A mapping handed over by a program: there are names, but no lines."""

    name: str

    def where(self, path: Path) -> Where:
        """Return the name of the mapping."""
        del path
        return Where(source="file", file=self.name)


@dataclass(frozen=True, kw_only=True)
class TextLayer(Layer):
    """Settings written one by one: the environment, or ``--set``."""

    places: dict[Path, Where] = field(default_factory=dict)

    def where(self, path: Path) -> Where:
        """Return the variable or flag that set the value, or something inside or around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        inside = (where for known, where in self.places.items() if known[: len(path)] == path)
        return next(inside, DEFAULT)

    def put(self, path: Path, value: Any, where: Where) -> None:
        """Set a value; a later one wins."""
        *parents, last = path
        node = self.values
        for part in parents:
            child = node.get(str(part))
            if not isinstance(child, dict):
                child = node[str(part)] = {}
            node = child
        node[str(last)] = value
        self.places[path] = where


def mapping_layer(mapping: Any, name: str) -> tuple[MappingLayer, list[Problem]]:
    """Return the layer of a mapping; tuples become lists, path objects texts, and None is not asked for."""
    problems: list[Problem] = []
    where = Where(source="file", file=name)

    def plain(value: Any, path: Path) -> Any:
        if len(path) > _DEEPEST:
            problems.append(Problem(message=f"{dotted(path[:2])} is nested too deeply", where=where))
            return None
        if isinstance(value, Mapping):
            made = {}
            for key, item in value.items():
                if not isinstance(key, str):
                    problems.append(Problem(message=f"{dotted(path)}: the key {key!r} is not a text".lstrip(": "), where=where))
                elif item is not None:
                    made[key] = plain(item, (*path, key))
            return made
        if isinstance(value, (list, tuple)):
            return [plain(item, (*path, index)) for index, item in enumerate(value)]
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    if not isinstance(mapping, Mapping):
        problems.append(Problem(message=f"a launch is a mapping of sections, not {type(mapping).__name__}", where=where))
        mapping = {}
    return MappingLayer(values=plain(mapping, ()), name=name), problems


def has_variables(environ: Mapping[str, str]) -> bool:
    """Whether any ``RESIDENCY_*`` variable is set that could be a knob."""
    return next(_variables(environ), None) is not None


def environment_layer(environ: Mapping[str, str]) -> tuple[TextLayer, list[Problem]]:
    """Return the layer of the ``RESIDENCY_*`` variables. An empty variable counts as unset."""
    layer, problems = TextLayer(values={}), []
    seen: dict[Path, str] = {}
    for variable, text in _variables(environ):
        where = Where(source="env", variable=variable)
        path = _variable_path(variable[len(PREFIX) :])
        if path is None:
            problems.append(Problem(message=f"{variable} is not a knob", hint=_variable_hint(variable), where=where))
        elif path in seen:
            problems.append(Problem(message=f"{variable} sets the same knob as {seen[path]}", where=where))
        elif text:
            seen[path] = variable
            layer.put(path, value_of(text, path), where)
    return layer, problems


def override_layer(overrides: Sequence[str]) -> tuple[TextLayer, list[Problem]]:
    """Return the layer of the ``--set knob=value`` texts; of two for one knob the last wins."""
    layer, problems = TextLayer(values={}), []
    where = Where(source="argv", flag="--set")
    for override in overrides:
        knob, equals, text = override.partition("=")
        knob, text = knob.strip(), text.strip()
        path = _override_path(knob)
        if not equals:
            problems.append(Problem(message=f'"{override}" has no value', hint="write --set knob=value", where=where))
        elif path is None:
            message, hint, _ = unknown(tuple(knob.split(".")))
            problems.append(Problem(message=message, hint=hint, where=where))
        else:
            layer.put(path, value_of(text, path), where)
    return layer, problems


def value_of(text: str, path: Path) -> Any:
    """Return what a text means for a knob: a TOML value if it is one the knob takes, else the text itself."""
    parsed: Any = text
    try:
        document = tomli.loads(f"value = {text}\n")
    except (ValueError, RecursionError):  # a huge number raises a bare ValueError
        return text
    if document.keys() == {"value"}:  # more keys: the text holds line ends and was never a value
        parsed = document["value"]
    return text if not _fits(parsed, path) and _fits(text, path) else parsed


def _fits(value: Any, path: Path) -> bool:
    from pydantic import ValidationError

    section, key, *rest = path
    try:
        SECTIONS[str(section)].model_validate({key: {rest[0]: value} if rest else value})
    except ValidationError:
        return False
    return True


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    length = len(PREFIX)
    for variable, text in environ.items():
        if variable[:length].upper() == PREFIX and variable.upper() not in RESERVED_VARIABLES:
            yield variable, text


def _variable_path(name: str) -> Path | None:
    section, *keys = name.lower().split(DELIMITER)
    if section not in SECTIONS or not keys:
        return None
    if (section, keys[0]) == ("engine", "options") and len(keys) > 1:
        # A variable's name has no dashes, an engine's long option has no underscores.
        return (section, "options", DELIMITER.join(keys[1:]).replace("_", "-"))
    return (section, keys[0]) if len(keys) == 1 and keys[0] in SECTIONS[section].model_fields else None


def _variable_hint(variable: str) -> str:
    legal = [f"{section}{DELIMITER}{key}".upper() for section, model in SECTIONS.items() for key in model.model_fields]
    legal += [reserved.removeprefix(PREFIX) for reserved in RESERVED_VARIABLES]
    found = closest(variable[len(PREFIX) :].upper(), legal, cutoff=0.7)
    if found:
        return f"did you mean {PREFIX}{found}?"
    return f"knobs are named like {PREFIX}CONTEXT{DELIMITER}LENGTH"


def _override_path(knob: str) -> Path | None:
    if knob.startswith("option:"):
        knob = "engine.options." + knob.removeprefix("option:")
    section, _, key = knob.partition(".")
    if section not in SECTIONS:
        return None
    option = key.removeprefix("options.")
    if section == "engine" and option != key:
        return (section, "options", option) if option else None
    return (section, key) if key in SECTIONS[section].model_fields else None
