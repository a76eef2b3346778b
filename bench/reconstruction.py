"""What the scripts that write a checkpoint from published totals share: rows, their order in the files, the output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from residency.checkpoint.census import NO_TYPE_ID, dumps
from residency.checkpoint.model import Tensor
from residency.checkpoint.roles import role_and_layer
from residency.checkpoint.types import TYPE_BY_NAME, data_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from residency.checkpoint.model import Checkpoint

#: Bytes a tensor's data is aligned to.
ALIGNMENT = 32


class Row(NamedTuple):
    """One tensor before it has a place."""

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int | None = None  # of a type residency does not know; otherwise they follow from the shape


def base_name(name: str) -> str:
    """Return "attn_q" of "blk.3.attn_q.weight"."""
    base = name.removesuffix(".weight")
    return base.split(".", 2)[2] if base.startswith("blk.") else base


def row(types: Mapping[str, str], name: str, *shape: int, kind: str | None = None) -> Row:
    """Return a tensor of a type by its name; F32 where ``types`` has none."""
    return Row(name, kind or types.get(base_name(name), "F32"), shape)


def linear_attention(make: Callable[..., Row], block: str, *, embedding: int, convolved: int, inner: int, state: int, kernel: int) -> list[Row]:
    """Return the tensors of a block's linear attention, in the order llama.cpp names them for this family."""
    heads = inner // state
    return [
        make(f"{block}.attn_qkv.weight", embedding, convolved),
        make(f"{block}.attn_gate.weight", embedding, inner),
        make(f"{block}.ssm_conv1d.weight", kernel, convolved),
        make(f"{block}.ssm_dt.bias", heads),
        make(f"{block}.ssm_a", heads),
        make(f"{block}.ssm_beta.weight", embedding, heads),
        make(f"{block}.ssm_alpha.weight", embedding, heads),
        make(f"{block}.ssm_norm.weight", state),
        make(f"{block}.ssm_out.weight", inner, embedding),
    ]


def full_attention(make: Callable[..., Row], block: str, *, embedding: int, heads: int, kv_heads: int, head_size: int) -> list[Row]:
    """Return the tensors of a block's full attention; the query carries its output gate, hence twice the width."""
    return [
        make(f"{block}.attn_q.weight", embedding, 2 * heads * head_size),
        make(f"{block}.attn_k.weight", embedding, kv_heads * head_size),
        make(f"{block}.attn_v.weight", embedding, kv_heads * head_size),
        make(f"{block}.attn_output.weight", heads * head_size, embedding),
    ]


def placed(rows: Iterable[Row], count: int, mtp: int | None, file_of: Callable[[Row, int], int]) -> tuple[tuple[Tensor, ...], list[int]]:
    """Return the tensors with their places, and the bytes of every file's data.

    Args:
        rows: the tensors in their order.
        count: how many files there are.
        mtp: the first block that predicts further tokens.
        file_of: the file of a row behind so many bytes of data.
    """
    tensors: list[Tensor] = []
    sizes, before = [0] * count, 0
    for found in rows:
        file = file_of(found, before)
        known = TYPE_BY_NAME.get(found.kind.lower())
        role, layer = role_and_layer(found.name, mtp)
        if known is None:
            assert found.nbytes is not None, found.kind
        nbytes = found.nbytes if known is None else data_bytes(known.id, found.shape)
        type_id = NO_TYPE_ID if known is None else known.id
        tensors.append(Tensor(found.name, type_id, found.kind, found.shape, nbytes, sizes[file], file, role, layer, known is not None))
        sizes[file] += -(-nbytes // ALIGNMENT) * ALIGNMENT
        before += nbytes
    return tuple(tensors), sizes


def write(model: Checkpoint, output: Path) -> None:
    """Write a census to the path of the command line, or to its own."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else output
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(dumps(model), encoding="utf-8")
    print(target)
