"""A launch as a launch file: what an engine's command line asked for, in residency's own names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .sizes import PercentValue

if TYPE_CHECKING:
    from .model import Launch


def to_toml(launch: Launch) -> str:
    """Return the TOML text of a launch; only what was asked for is written."""
    sections: dict[str, dict[str, Any]] = launch.knobs.model_dump(exclude_none=True)
    engine = {"name": launch.engine, **({"version": launch.version} if launch.version else {})}
    lines = ["[engine]", *(f"{key} = {_value(value)}" for key, value in engine.items())]
    if launch.options:
        lines += ["", "[engine.options]", *(f"{_key(name)} = {_value(value)}" for name, value in launch.options.items())]
    for name, knobs in sections.items():
        if name == "engine" or not knobs:
            continue
        tables = {key: value for key, value in knobs.items() if isinstance(value, list) and value and isinstance(value[0], dict)}
        plain = {key: value for key, value in knobs.items() if key not in tables}
        if plain:
            lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in plain.items())]
        for key, rows in tables.items():
            for row in rows:
                lines += ["", f"[[{name}.{key}]]", *(f"{k} = {_value(v)}" for k, v in row.items())]
    return "\n".join(lines)


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, PercentValue):
        return json.dumps(str(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    # A JSON string with its escapes is a TOML basic string.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
