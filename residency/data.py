"""Where the data files that ship with residency are: profiles, censuses, policies."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def configs() -> Path:
    """Return the folder of shipped configuration: inside the wheel, or beside the package in a checkout."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def named(kind: str, suffix: str) -> dict[str, Path]:
    """Return the shipped files of one kind ("machines", "models") by name."""
    return {p.name.removesuffix(suffix): p for p in sorted((configs() / kind).glob(f"*{suffix}"))}
