"""The launch: what was asked for, read from a file, the environment and ``--set``.

Names are imported when first used: reading needs pydantic, and ``residency --version`` must not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .model import Launch

if TYPE_CHECKING:
    from .knobs import Knobs
    from .reader import merge_overrides, read_launch_file, read_launch_mapping
    from .schema import json_schema, markdown_table

_HOMES = {
    "Knobs": ".knobs",
    "json_schema": ".schema",
    "markdown_table": ".schema",
    "merge_overrides": ".reader",
    "read_launch_file": ".reader",
    "read_launch_mapping": ".reader",
}

__all__ = [
    "Knobs",
    "Launch",
    "json_schema",
    "markdown_table",
    "merge_overrides",
    "read_launch_file",
    "read_launch_mapping",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)
