"""Truth figures of llama.cpp for the tests beside this file: headers, launches, and what the engine reported."""

from __future__ import annotations

import functools
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

from residency.checkpoint import read
from residency.engines.llama_cpp.settings import DeviceSpec, Override, Settings

from gguf_writer import write_gguf  # isort: skip

DATA = json.loads(gzip.decompress((Path(__file__).parent / "data" / "llama_cpp_truth.json.gz").read_bytes()))
MIB = 2**20
FREE_BYTES = 149_557_477_376  # what the engine saw on the cards of the truth


@functools.cache
def checkpoint(name):
    """Write and read the header of one truth model."""
    return header(name, DATA["models"][name])


def header(name: str, model: dict[str, Any]):
    """Write and read the header of a stored model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.gguf"
        write_gguf(path, model["metadata"], [tuple(t) for t in model["tensors"]])
        return read(str(path))


def made(arch: str, tensors: list[tuple], **hparams: Any):
    """Write and read a made-up header; keys without a dot get the architecture's prefix."""
    metadata = {"general.architecture": arch}
    metadata |= {f"{arch}.{key.replace('__', '.')}": value for key, value in hparams.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.gguf"
        write_gguf(path, metadata, tensors)
        return read(str(path))


def cards(*names: str, free_bytes: int = FREE_BYTES) -> tuple[DeviceSpec, ...]:
    """Return cards like those of the truth."""
    return tuple(
        DeviceSpec(name=n, kind="cuda", free_bytes=free_bytes, compute_capability="9.0", integrated=False, model="NVIDIA H200") for n in names
    )


def settings(stored: dict[str, Any], **more: Any) -> Settings:
    """Return the settings stored with a launch."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()} | more
    values["devices"] = cards(*stored["devices"])
    values["overrides"] = tuple(Override(pattern=p, target=t, origin=o) for p, t, o in stored.get("overrides", ()))
    return Settings(**values)


def dense(layers: int = 4, *, width: int = 256, heads: int = 4, heads_kv: int = 2, inner: int = 512, vocabulary: int = 1000, tied: bool = False):
    """Return the tensors of a plain dense model."""
    head = width // heads
    rows: list[tuple] = [("token_embd.weight", "Q8_0", (width, vocabulary)), ("output_norm.weight", "F32", (width,))]
    if not tied:
        rows.append(("output.weight", "Q8_0", (width, vocabulary)))
    for i in range(layers):
        rows += [
            (f"blk.{i}.attn_norm.weight", "F32", (width,)), (f"blk.{i}.ffn_norm.weight", "F32", (width,)),
            (f"blk.{i}.attn_q.weight", "Q8_0", (width, head * heads)), (f"blk.{i}.attn_k.weight", "Q8_0", (width, head * heads_kv)),
            (f"blk.{i}.attn_v.weight", "Q8_0", (width, head * heads_kv)), (f"blk.{i}.attn_output.weight", "Q8_0", (head * heads, width)),
            (f"blk.{i}.ffn_gate.weight", "Q8_0", (width, inner)), (f"blk.{i}.ffn_up.weight", "Q8_0", (width, inner)),
            (f"blk.{i}.ffn_down.weight", "Q8_0", (inner, width)),
        ]  # fmt: skip
    return rows


def dense_hparams(layers: int = 4, *, width: int = 256, heads: int = 4, heads_kv: int = 2, inner: int = 512, context: int = 8192):
    """Return the metadata of :func:`dense`."""
    return {
        "block_count": layers, "embedding_length": width, "context_length": context, "feed_forward_length": inner,
        "attention__head_count": heads, "attention__head_count_kv": heads_kv, "attention__layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
