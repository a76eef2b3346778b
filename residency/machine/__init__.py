"""The machine: probed, or declared in a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .model import Device, Host, Machine, Pool

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["Device", "Host", "Machine", "Pool", "resolve_machine"]


def resolve_machine(source: str | PathLike[str] | Machine | Mapping[str, Any] | None) -> Machine:
    """Return the machine a caller means: a Machine, a mapping, a profile's path or name, or None / "probe"."""
    if isinstance(source, Machine):
        return source
    if source is None or source == "probe":
        from .probe import probe

        return probe()
    from .profile import load_machine, machine_from_mapping

    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return load_machine(str(source))
    if not isinstance(source, Mapping):
        raise TypeError(f"a machine is a name, a path, a mapping, a Machine or None, not {type(source).__name__}")
    return machine_from_mapping(source)
