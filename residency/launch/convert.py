"""A launch as a launch file: what an engine's command line asked for, in residency's own names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .sizes import PercentValue

if TYPE_CHECKING:
    from .model import Launch


def to_toml(launch: Launch) -> str:
    """Return the TOML text of a launch; only what was asked for is written."""
    import tomli_w

    sections: dict[str, dict[str, Any]] = launch.knobs.model_dump(exclude_none=True)
    engine = {"name": launch.engine, "version": launch.version, "options": dict(launch.options)}
    sections = {"engine": {key: value for key, value in engine.items() if value}, **{k: v for k, v in sections.items() if v and k != "engine"}}
    return tomli_w.dumps(_plain(sections)).rstrip("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PercentValue) else value
