"""Published launches (``data/cases.toml``) as this package sees them: shared by the tests and ``bench/accuracy.py``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import residency

import shapes  # isort: skip
from gguf_writer import write_gguf  # isort: skip

if TYPE_CHECKING:
    from residency.report import Report

DATA = tomllib.loads((Path(__file__).parent / "data" / "cases.toml").read_text())
CASES: list[dict[str, Any]] = DATA["case"]
MIB = 2**20
#: Printed part -> purposes of the budget.
PARTS = {"model_mib": ("weights", "experts"), "kv": ("kv",), "state": ("state",), "buffers": ("compute",)}


def model(case: dict[str, Any], folder: Path) -> str:
    """Write the header of a case's model and return its path."""
    spec = {**DATA["models"][case["model"]], "replace": case.get("replace", {})}
    own = "extra" in case or "replace" in case
    return shapes.write(folder, case["id"] if own else case["model"], spec, extra=case.get("extra", {}))


def projector(spec: dict[str, Any], folder: Path) -> str:
    """Write a small projector file whose last tensor has the given width."""
    metadata = {
        "general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": spec["type"],
        "clip.vision.projection_dim": spec["width"], "clip.vision.spatial_merge_size": spec["merge"], "clip.vision.embedding_length": 1152,
        "clip.vision.block_count": 2, "clip.vision.attention.head_count": 16, "clip.vision.feed_forward_length": 4304, "clip.vision.patch_size": 16,
        "clip.vision.image_size": 768,
    }  # fmt: skip
    rows: list[Any] = [("v.patch_embd.weight", "F16", (16, 16, 3, 1152)), ("v.patch_embd.weight.1", "F16", (16, 16, 3, 1152)), ("v.position_embd.weight", "F16", (1152, 2304))]
    for i in range(2):
        rows += [(f"v.blk.{i}.ln1.weight", "F32", (1152,)), (f"v.blk.{i}.attn_qkv.weight", "F16", (1152, 3456)), (f"v.blk.{i}.attn_out.weight", "F16", (1152, 1152))]
        rows += [(f"v.blk.{i}.ffn_up.weight", "F16", (1152, 4304)), (f"v.blk.{i}.ffn_down.weight", "F16", (4304, 1152))]
    rows += [("mm.0.weight", "F16", (4608, 4608)), ("mm.2.weight", "F16", (4608, spec["width"]))]
    return write_gguf(folder / f"mmproj-{spec['type']}-{spec['width']}.gguf", metadata, rows)


def judge(case: dict[str, Any], folder: Path) -> Report:
    """Return the report on a case. Raises InputError where the case is one that cannot be read."""
    spec = DATA["machines"][case["machine"]]
    argv = ["llama-server", "-m", model(case, folder), *case["flags"]]
    if "projector" in case:
        argv += ["--mmproj", projector(case["projector"], folder)]
    built = [f"engine.options.{name}={value}" for name, value in case.get("options", {}).items()]
    return residency.validate(argv, engine=case["engine"], machine=spec.get("mapping") or shapes.machine(spec), environ={}, overrides=built)


def amounts(report: Report, pool: str, part: str) -> tuple[float, float, float]:
    """Return certain, likely and at-most MiB of a printed part in a pool."""
    rows = [a for a in report.budget.allocations if a.pool == pool and str(a.purpose) in PARTS[part]]
    return (
        sum(a.certain_bytes for a in rows) / MIB,
        sum(a.likely_bytes for a in rows) / MIB,
        sum(a.at_most_bytes for a in rows) / MIB,
    )


def loud(report: Report, outcome: str) -> list[Any]:
    """Return the findings of one outcome."""
    return [f for f in report.findings if str(f.outcome) == outcome]
