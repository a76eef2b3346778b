"""``python -m residency``."""

from __future__ import annotations

from residency.cli import entry

entry()
