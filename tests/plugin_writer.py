"""Installed plugin distributions for tests, laid out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def distribution(folder: Path, name: str, entry: str, body: str, version: str = "1.0") -> Path:
    """Lay out an installed distribution by hand: a module and its metadata."""
    module = f"{name.replace('-', '_')}_module"
    (folder / f"{module}.py").write_text(body)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[residency]\n{entry} = {module}\n")
    return folder


RULE = """
from residency import hookimpl
from residency.rules import Rule
rule = Rule(id="{id}", doc="x.")
@rule.check
def check(facts): return rule.{answer}
@hookimpl
def residency_rules(): return [rule]
"""
