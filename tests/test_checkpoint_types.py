"""The table of ggml types, against the gguf package and by hand."""

from __future__ import annotations

import gguf
import pytest

from residency.checkpoint.types import (
    KV_TYPES,
    MOST_BYTES,
    REMOVED,
    TYPE_BY_NAME,
    TYPES,
    data_bytes,
    row_bytes,
    type_name,
)


def test_agrees_with_the_gguf_package() -> None:
    differing = {}
    for theirs in gguf.GGMLQuantizationType:
        block, nbytes = gguf.GGML_QUANT_SIZES[theirs]
        ours = TYPES[int(theirs)]
        assert ours.name == theirs.name
        if (ours.block, ours.nbytes) != (block, nbytes):
            differing[ours.name] = ((ours.block, ours.nbytes), (block, nbytes))
    # In C, block_q8_1 is two halves and 32 bytes = 36; the package still counts two floats.
    assert differing in ({"Q8_1": ((32, 36), (32, 40))}, {})


def test_covers_every_id() -> None:
    assert len(TYPES) == 35
    assert set(TYPES) | set(REMOVED) == set(range(43))
    assert not set(TYPES) & set(REMOVED)
    assert all(id_ == kind.id for id_, kind in TYPES.items())


@pytest.mark.parametrize(
    ("kind", "elements", "nbytes"),
    [
        ("f32", 7, 28),
        ("bf16", 7, 14),
        ("q8_0", 4096, 4352),
        ("q4_0", 4096, 2304),
        ("q4_k", 4096, 2304),
        ("q6_k", 4096, 3360),
        ("q1_0", 4096, 576),
        ("q2_0", 4096, 1152),
        ("nvfp4", 4096, 2304),
    ],
)
def test_row_bytes(kind: str, elements: int, nbytes: int) -> None:
    assert row_bytes(TYPE_BY_NAME[kind].id, elements) == nbytes


def test_row_bytes_refuses() -> None:
    with pytest.raises(ValueError, match="100 elements are no multiple of the Q8_0 block of 32"):
        row_bytes(8, 100)
    with pytest.raises(KeyError):
        row_bytes(77, 256)
    with pytest.raises(KeyError):
        row_bytes(4, 256)


def test_names() -> None:
    assert [type_name(n) for n in (12, 31, 43, 77)] == ["Q4_K", "Q4_0_4_4", "type-43", "type-77"]
    assert all(name in TYPE_BY_NAME for name in KV_TYPES)


def test_impossible_shapes_stay_printable() -> None:
    assert data_bytes(0, (1 << 64, 1 << 64, 1 << 64, 1 << 64)) == MOST_BYTES
    assert data_bytes(12, (257, 1)) == 288  # two blocks
    assert data_bytes(0, ()) == 4  # a scalar
