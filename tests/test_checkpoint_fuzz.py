"""Thousands of damaged headers: the reader answers or raises InputError, quickly and within bounded memory."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gguf_writer import build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from residency.checkpoint import read_checkpoint
from residency.checkpoint.census import dumps, loads, render_census
from residency.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A slow machine may stall a single round; the promise is that none loops over what a file claims.
SECONDS_PER_ROUND = 5.0
INTERESTING = [0, 1, 2, 7, 8, 9, 10, 31, 32, 255, 256, 1 << 15, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
               1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 9, (1 << 64) - 1]  # fmt: skip


@pytest.fixture(scope="module")
def seed_header(gemma_path: str) -> bytes:
    """The real model's keys and tensor table with a vocabulary of 40 instead of 262,144 entries."""
    model = read_checkpoint(gemma_path)
    keys = {
        **model.metadata,
        "tokenizer.ggml.tokens": [f"token {n}" for n in range(40)],
        "tokenizer.ggml.scores": {"array": "f32", "value": [0.5] * 40},
        "gemma3.some.list": [1, 2, 3],
    }
    header, size = build(keys, [(t.name, t.type_name, t.shape) for t in model.tensors])
    # The data section is 6.5 MB off in the real file, and the same here in length.
    assert size - len(header) == 246_587_904
    return header


def mutate(rng: random.Random, header: bytes) -> bytes:
    """Damage a header in one to four places."""
    data = bytearray(header)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            raw = struct.pack("<Q", rng.choice(INTERESTING))
            data[at : at + 8] = raw
        elif kind == 3:
            data[at : at + 4] = struct.pack("<I", rng.choice(INTERESTING) & 0xFFFFFFFF)
        elif kind == 4:
            del data[at : at + rng.randint(1, 64)]
        elif kind == 5:
            other = rng.randrange(len(data))
            data[at:at] = data[other : other + rng.randint(1, 64)]
        else:
            del data[at:]
        if not data:
            data = bytearray(b"G")
    return bytes(data)


def judge(path: Path) -> bool:
    """Read one file; True when it could be read. Whatever was read can be printed and saved."""
    start = time.monotonic()
    try:
        model = read_checkpoint(str(path))
    except InputError:
        return False
    finally:
        assert time.monotonic() - start < SECONDS_PER_ROUND
    render_census(model)
    assert loads(dumps(model).encode(), "x").tensors == model.tensors
    return True


@pytest.fixture
def bounded() -> Iterator[None]:
    """Fail when Python held more than 64 MiB at any moment of the test."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_thousands_of_damaged_headers(seed_header: bytes, tmp_path: Path) -> None:
    """Only the first part of the header is damaged half of the time: that is where the reader decides most."""
    rng = random.Random(20260101)
    path = tmp_path / "m.gguf"
    readable = 0
    rounds = 3000
    for number in range(rounds):
        if number % 2:
            head = rng.randrange(64, 2000)
            data = mutate(rng, seed_header[:head]) + seed_header[head:]
        else:
            data = mutate(rng, seed_header)
        path.write_bytes(data)
        if number % 3:
            os.truncate(path, len(data) + 246_587_904)
        readable += judge(path)
    # Both ends are reached: a test that only ever sees one of them shows nothing.
    assert rounds * 0.05 < readable < rounds * 0.95


def test_memory_is_bounded(seed_header: bytes, tmp_path: Path, bounded: None) -> None:
    rng = random.Random(7)
    path = tmp_path / "m.gguf"
    for _ in range(150):
        data = mutate(rng, seed_header)
        path.write_bytes(data)
        # Behind the header lies 64 GiB of nothing, so that large claims are covered by the file.
        os.truncate(path, 64 << 30)
        judge(path)


def test_the_full_real_header(gemma_path: str, tmp_path: Path) -> None:
    with Path(gemma_path).open("rb") as file:
        header = file.read(read_checkpoint(gemma_path).files[0].data_offset)
    rng = random.Random(11)
    path = tmp_path / "m.gguf"
    for _ in range(40):
        path.write_bytes(mutate(rng, header))
        os.truncate(path, 253_113_024)
        judge(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(edits=st.lists(st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4))
def test_hypothesis_overwrites(seed_header: bytes, tmp_path: Path, edits: list[tuple[int, bytes]]) -> None:
    data = bytearray(seed_header)
    for at, raw in edits:
        data[at : at + len(raw)] = raw
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    judge(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(raw=st.binary(max_size=200), version=st.sampled_from([2, 3]), endian=st.sampled_from("<>"))
def test_hypothesis_anything_after_the_version(tmp_path: Path, raw: bytes, version: int, endian: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack(f"{endian}I", version) + raw)
    judge(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ["files", "metadata", "array_lengths", "unknown_types", "tensors", "totals", "faults", "note", "declared_tensors"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(field=st.sampled_from(FIELDS), value=JSON)
def test_hypothesis_census_fields(field: str, value: object) -> None:
    import json

    document = {
        "schema": "residency.census/1",
        "files": [{"path": "x", "data_offset": 0, "version": 3}],
        "metadata": {},
        "tensors": [["a", "F32", [4], 0, 0]],
        "totals": {"tensors": 1, "bytes": 16},
        field: value,
    }
    try:
        model = loads(json.dumps(document, allow_nan=False).encode("utf-8", "surrogatepass"), "x.json")
    except InputError:
        return
    render_census(model)
    assert loads(dumps(model).encode(), "x.json") == model
