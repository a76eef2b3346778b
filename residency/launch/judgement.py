"""What is wrong with a layer, in plain words: pydantic's errors turned into problems."""

from __future__ import annotations

import math
from datetime import date, time
from typing import TYPE_CHECKING, Any

from residency.text import clean, shorten

from .knobs import Knobs
from .naming import closest, dotted, quoted, unknown
from .schema import describe, lookup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

    from residency.errors import Problem

    from .layers import Layer
    from .toml_positions import Path

_NAMES = (("engine", "name"), ("model", "path"), ("model", "mmproj"), ("model", "draft"), ("machine", "profile"))


#: Unknown keys for which the key that was meant is looked for; the search costs a third of a millisecond each.
_MOST_GUESSED = 200


def judge(layer: Layer) -> tuple[list[Problem], set[str]]:
    """Return every problem of a layer, and the sections and knobs its unknown keys were probably meant for."""
    from pydantic import ValidationError

    problems, meant = _empty_names(layer), set[str]()
    try:
        Knobs.model_validate(layer.values)
    except ValidationError as error:
        grouped: dict[Path, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            grouped.setdefault(_known(detail), []).append(detail)
        for path, details in grouped.items():
            if details[0]["type"] == "extra_forbidden" and len(problems) >= _MOST_GUESSED:
                problems.append(layer.problem(path, f"{dotted(path)} is not known", at="key"))
            elif details[0]["type"] == "extra_forbidden":
                message, hint, guess = unknown(path, is_table=isinstance(_at(layer.values, path), dict))
                problems.append(layer.problem(path, message, hint=hint, at="key"))
                meant.update([guess] if guess else [])
            else:
                problems.append(_explain(layer, path, details))
    return problems, meant


def missing(layer: Layer, knob: str) -> Problem:
    """Return the problem of a required knob that no source gives, at the nearest table of the file."""
    path = tuple(knob.split("."))
    hint = f'write {path[1]} = "..." under [{path[0]}]'
    return layer.problem(path, f"{knob} is missing", hint=hint, at="table")


def show(value: Any) -> str:
    """Return a value as one would write it in a launch file, short and safe for a terminal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        try:
            return shorten(str(value))
        except ValueError:  # beyond the interpreter's limit on digits
            return f"a number of {math.ceil(value.bit_length() * math.log10(2))} digits"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (date, time)):  # a datetime is a date
        return f"the date or time {value.isoformat()}"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an empty list" if not value else shorten("[" + ", ".join(show(item) for item in value[:8]) + "]")
    return clean(shorten(repr(value)))


def _known(detail: ErrorDetails) -> Path:
    """Return the part of an error's location that stands in the source; the rest names branches of a type."""
    location = detail["loc"]
    if detail["type"] == "extra_forbidden":
        return location
    length = 1
    while length < len(location) and lookup(location[: length + 1]) is not None:
        length += 1
        # Inside a value of several possible types the next part is the name of the type.
        if length == 2 and location[:2] != ("engine", "options") and "anyOf" in (lookup(location[:2]) or {}):
            break
        if length == 3 and location[:2] == ("engine", "options"):
            break
    return location[:length]


def _explain(layer: Layer, path: Path, details: list[ErrorDetails]) -> Problem:
    name, first = layer.spell(path), details[0]
    value = _at(layer.values, path)
    if first["type"] == "missing":
        return layer.problem(path[:-1], f"{dotted(path[:-1])} has no {path[-1]}", at="table")
    if len(path) == 1:
        return layer.problem(path, f"{name} is a section and must be a table, not {show(value)}", hint=f"write [{path[0]}]")
    if first["type"] == "value_error" and len(details) == 1 and isinstance(value, str):
        return layer.problem(path, f"{name}: {first['msg'].removeprefix('Value error, ')}")
    schema = lookup(path)
    if schema is None:
        return layer.problem(path, f"{name}: {first['msg']}")
    message = f"{name} must be {describe(schema)}, not {show(value)}"
    return layer.problem(path, message, hint=_hint(schema, value, details))


def _hint(schema: Mapping[str, Any], value: Any, details: list[ErrorDetails]) -> str | None:
    if isinstance(value, str):
        choices = [c for branch in (schema, *schema.get("anyOf", ())) for c in branch.get("enum", [branch.get("const")]) if c]
        found = closest(value.lower(), choices)
        if found:
            return f'did you mean "{found}"?'
        if value.isascii() and value.isdecimal() and any(d["type"] == "int_type" for d in details):
            return "leave the quotes out"
    limit = next((d["ctx"]["le"] for d in details if d["type"] == "less_than_equal"), None)
    return f"the largest is {limit}" if limit is not None else None


def _empty_names(layer: Layer) -> list[Problem]:
    problems = []
    for path in _NAMES:
        value = _at(layer.values, path)
        if isinstance(value, str) and (not value or "\0" in value):
            what = "is empty" if not value else "holds a NUL character"
            problems.append(layer.problem(path, f"{layer.spell(path)} {what}"))
    adapters = _at(layer.values, ("model", "adapters"))
    if isinstance(adapters, list) and "" in adapters:
        problems.append(layer.problem(("model", "adapters"), f"{layer.spell(('model', 'adapters'))} has an empty path"))
    return problems


def _at(values: Any, path: Path) -> Any:
    for part in path:
        if isinstance(part, int):
            if not isinstance(values, list) or part >= len(values):
                return None
            values = values[part]
        elif isinstance(values, dict):
            values = values.get(part)
        else:
            return None
    return values

