"""The launch file as JSON Schema, and the words and tables made from it."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from .knobs import SECTIONS, Knobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REQUIRED = {"EngineKnobs": ["name"], "ModelKnobs": ["path"]}
_ABSENT = {
    "engine.version": "newest version residency knows",
    "engine.options": "no engine options",
    "model.mmproj": "no projector",
    "model.draft": "no draft model",
    "model.adapters": "no adapters",
    "layers.overrides": "no overrides",
    "machine.profile": "probe this machine",
}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a launch file, as TOML editors use it.

    Beyond the standard words, a knob may have ``unit``, and ``x-unset`` says what its absence means
    (``default`` is null throughout: no value stands for "not asked for").
    """
    found: dict[str, Any] = json.loads(json.dumps(_schema()))  # callers may change theirs
    return found


@cache
def _schema() -> dict[str, Any]:
    made = Knobs.model_json_schema()
    definitions = made["$defs"]
    for name, section in SECTIONS.items():
        definition = definitions[section.__name__]
        definition["title"] = f"[{name}]"
        for key, knob in definition["properties"].items():
            _without_null(knob)
            unset = _ABSENT.get(f"{name}.{key}", "engine default")
            if key in _REQUIRED.get(section.__name__, ()):
                continue
            knob["default"] = None
            knob["x-unset"] = unset
            knob["description"] += f" Unset: {unset}."
        if section.__name__ in _REQUIRED:
            definition["required"] = _REQUIRED[section.__name__]
    for name, reference in made["properties"].items():
        reference.pop("default", None)
        reference["description"] = definitions[SECTIONS[name].__name__]["description"]
    return {
        "$schema": DIALECT,
        "title": "residency launch file",
        "description": "What is about to be launched, in engine-neutral names.",
        "type": "object",
        "additionalProperties": False,
        "required": ["engine", "model"],
        "properties": made["properties"],
        "$defs": definitions,
    }


def _without_null(knob: dict[str, Any]) -> None:
    """Take the null branch out: TOML has no null."""
    branches = [branch for branch in knob.pop("anyOf", []) if branch != {"type": "null"}]
    if len(branches) == 1:
        knob.update({key: value for key, value in branches[0].items() if key not in knob})
    elif branches:
        knob["anyOf"] = branches
    if knob["default"] is None:
        del knob["default"]


def lookup(path: Sequence[str | int]) -> Mapping[str, Any] | None:
    """Return the schema of what stands at a path, or None where nothing may stand."""
    schema = _schema()
    node: Mapping[str, Any] = schema
    for part in path:
        step = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
        if step is None and isinstance(part, str) and isinstance(node.get("additionalProperties"), dict):
            step = node["additionalProperties"]
        if step is None:
            return None
        if "$ref" in step:
            step = schema["$defs"][step["$ref"].rpartition("/")[2]]
        node = step
    return node


_PLAIN = {
    "boolean": ("true or false", "true or false values"),
    "string": ("a text", "texts"),
    "number": ("a finite number", "finite numbers"),
    "object": ("a table", "tables"),
}
_FORMATS = {
    "byte-size": ('a size such as "4GiB" or a whole number of bytes', "sizes"),
    "percent": ('a percentage such as "5%"', "percentages"),
}


def describe(schema: Mapping[str, Any], *, unit: str | None = None, many: bool = False) -> str:
    """Say in plain words what a schema asks for: "a whole number of tokens ≥ 0, or "auto"."""
    unit = schema.get("unit", unit)
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]][many]
    if "anyOf" in schema:
        branches = [describe(branch, unit=unit, many=many) for branch in schema["anyOf"]]
        return ", ".join(branches[:-1]) + ", or " + branches[-1]
    if "enum" in schema:
        return ("one of " if len(schema["enum"]) > 2 else "") + _choices(schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    kind = schema.get("type", "object")
    if kind == "array":
        return ("lists of " if many else "a list of ") + describe(schema["items"], unit=unit, many=True)
    if "$ref" in schema or kind == "object":
        return _PLAIN["object"][many]
    if kind == "integer":
        words = ("whole numbers" if many else "a whole number") + (f" of {unit}" if unit else "")
    else:
        words = _PLAIN[kind][many]
    least = schema.get("minimum")
    return words if least is None or least < 0 else f"{words} ≥ {least:g}"


def _choices(values: Sequence[Any]) -> str:
    shown = [json.dumps(value) for value in values]
    return ", ".join(shown[:-1]) + " or " + shown[-1]


def markdown_table() -> str:
    """Return every knob as Markdown: one heading and table per section. ``docs/launch-files.md`` holds it."""
    lines = []
    for name, section in SECTIONS.items():
        definition = lookup([name])
        assert definition is not None
        lines += [f"### [{name}]", "", (section.__doc__ or "").strip(), ""]
        lines += ["| knob | value | example | meaning | unset |", "| --- | --- | --- | --- | --- |"]
        for key, knob in definition["properties"].items():
            unset = knob.get("x-unset", "required")
            meaning = knob["description"].removesuffix(f" Unset: {unset}.")
            examples = ", ".join(f"`{_toml(example)}`" for example in knob["examples"])
            cells = [f"`{name}.{key}`", describe(knob), examples, meaning, unset]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
