"""Split models: whole from any part, and every way in which a set of parts can be wrong."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf_writer import write_gguf, write_split

from residency.checkpoint import read, read_checkpoint

META: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "split",
    "llama.block_count": 13,
    "llama.nextn_predict_layers": 1,
}
PARTS = [[("token_embd.weight", "F32", (256, 10))], *[[(f"blk.{n}.attn_q.weight", "Q8_0", (256, 8))] for n in range(12)]]


@pytest.fixture
def parts(tmp_path: Path) -> list[str]:
    return write_split(tmp_path, "big", META, PARTS)


def faults(path: str, *, fatal: bool | None = True) -> list[tuple[str, str]]:
    found = read_checkpoint(path).faults
    return [(f.code, Path(f.file).name) for f in found if fatal is None or f.fatal == fatal]


def name(number: int, count: int = 13) -> str:
    return f"big-{number:05d}-of-{count:05d}.gguf"


def test_whole(parts: list[str]) -> None:
    model = read_checkpoint(parts[0])
    assert model.faults == ()
    assert [f.shard for f in model.files] == list(range(13))
    assert [f.path for f in model.files] == parts
    assert len(model.tensors) == model.declared_tensors == 13
    assert model.tensor_bytes == 10_240 + 12 * 2176
    assert [t.file for t in model.tensors] == list(range(13))
    assert {t.offset for t in model.tensors} == {0}


@pytest.mark.parametrize("number", [2, 7, 13])
def test_from_any_part(parts: list[str], number: int) -> None:
    model = read_checkpoint(parts[number - 1])
    (fault,) = model.faults
    assert (fault.code, fault.fatal) == ("not-first-shard", False)
    assert name(1) in fault.message
    assert model.architecture == "llama"
    assert model.tensors == read_checkpoint(parts[0]).tensors


def test_relative_path(parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(parts[0]).parent)
    model = read_checkpoint(name(1))
    assert model.faults == ()
    assert model.files[1].path == name(2)


@pytest.mark.parametrize("opened", [1, 3])
def test_missing_second_of_thirteen(parts: list[str], opened: int) -> None:
    Path(parts[1]).unlink()
    model = read_checkpoint(parts[opened - 1])
    (fault,) = [f for f in model.faults if f.fatal]
    assert (fault.code, fault.file) == ("missing-shard", parts[1])
    assert fault.message == f"{name(2)}: part 2 of 13 is missing"
    assert len(model.tensors) == 12


def test_missing_first(parts: list[str]) -> None:
    Path(parts[0]).unlink()
    model = read_checkpoint(parts[4])
    assert ("missing-shard", name(1)) in [(f.code, Path(f.file).name) for f in model.faults]
    assert model.architecture == ""


def test_many_missing_are_summed_up(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "big-00001-of-01000.gguf", {**META, "split.no": {"u16": 0}, "split.count": {"u16": 1000}}, PARTS[0]
    )
    found = [f for f in read_checkpoint(path).faults if f.code == "missing-shard"]
    assert len(found) == 9
    assert "big-00010-of-01000.gguf and 990 more parts are missing" in found[-1].message


def test_extra(parts: list[str]) -> None:
    folder = Path(parts[0]).parent
    shutil.copy(parts[3], folder / name(14))
    shutil.copy(parts[3], folder / name(0))
    shutil.copy(parts[3], folder / name(3, 5))  # another split of the same model may lie there
    shutil.copy(parts[3], folder / "other-00014-of-00013.gguf")
    assert faults(parts[0], fatal=None) == [("extra-shard", name(0)), ("extra-shard", name(14))]
    assert faults(parts[0]) == []


def test_swapped(parts: list[str]) -> None:
    Path(parts[1]).rename(parts[1] + ".x")
    Path(parts[2]).rename(parts[1])
    Path(parts[1] + ".x").rename(parts[2])
    assert faults(parts[0]) == [("swapped-shard", name(2)), ("swapped-shard", name(3))]
    assert ("swapped-shard", name(2)) in faults(parts[1])


def test_same_part_twice(parts: list[str]) -> None:
    shutil.copy(parts[3], parts[2])
    found = faults(parts[0])
    assert ("swapped-shard", name(3)) in found
    assert ("duplicate-tensor", name(4)) in found


def test_truncated(parts: list[str]) -> None:
    os.truncate(parts[5], Path(parts[5]).stat().st_size - 100)
    (fault,) = read_checkpoint(parts[0]).faults
    assert (fault.code, fault.file, fault.subject) == ("truncated", parts[5], "blk.4.attn_q.weight")
    os.truncate(parts[5], 50)
    (fault,) = read_checkpoint(parts[0]).faults
    assert (fault.code, fault.file) == ("unreadable-shard", parts[5])
    assert "key" in fault.message
    os.truncate(parts[5], 0)
    assert faults(parts[0]) == [("unreadable-shard", name(6))]


def test_directory_in_place_of_a_part(parts: list[str]) -> None:
    Path(parts[5]).unlink()
    Path(parts[5]).mkdir()
    (fault,) = read_checkpoint(parts[0]).faults
    assert fault.code == "unreadable-shard"
    assert "is a directory" in fault.message


@pytest.mark.parametrize(
    ("keys", "subject"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture"),
        ({"general.name": "another"}, "general.name"),
        ({"split.count": {"u16": 14}}, "split.count"),
        ({"split.tensors.count": {"i32": 99}}, "split.tensors.count"),
    ],
)
def test_foreign(parts: list[str], keys: dict[str, Any], subject: str) -> None:
    own = {"split.no": {"u16": 6}, "split.count": {"u16": 13}, "split.tensors.count": {"i32": 13}}
    write_gguf(parts[6], {**own, **keys}, PARTS[6])
    (fault,) = read_checkpoint(parts[0]).faults
    assert (fault.code, fault.file, fault.subject) == ("foreign-shard", parts[6], subject)
    assert name(7) in fault.message


def test_foreign_without_a_name_is_found_by_the_count(parts: list[str]) -> None:
    own = {"split.no": {"u16": 6}, "split.count": {"u16": 13}}
    write_gguf(parts[6], own, [*PARTS[6], ("blk.5.attn_k.weight", "F32", (8,))])
    (fault,) = read_checkpoint(parts[0]).faults
    assert fault.code == "tensor-count"
    assert "split.tensors.count says 13, the parts hold 14" in fault.message


def test_other_byte_order(parts: list[str]) -> None:
    own = {"split.no": {"u16": 6}, "split.count": {"u16": 13}}
    write_gguf(parts[6], own, PARTS[6], endian=">")
    assert faults(parts[0]) == [("foreign-shard", name(7))]


def test_joined_with_cat(parts: list[str], tmp_path: Path) -> None:
    for target in (tmp_path / "whole.gguf", tmp_path / "w" / "big-00001-of-00013.gguf"):
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(b"".join(Path(p).read_bytes() for p in parts))
        (fault,) = read_checkpoint(str(target)).faults
        assert (fault.code, fault.fatal) == ("joined-shards", True)
        assert target.name in fault.message
        assert "part 1 of 13" in fault.message


def test_renamed(parts: list[str], tmp_path: Path) -> None:
    Path(parts[0]).rename(tmp_path / "model.gguf")
    (fault,) = read_checkpoint(str(tmp_path / "model.gguf")).faults
    assert (fault.code, fault.fatal) == ("shard-name", True)
    (tmp_path / "model.gguf").rename(tmp_path / "big-00001-of-00012.gguf")
    assert ("shard-name", "big-00001-of-00012.gguf") in faults(str(tmp_path / "big-00001-of-00012.gguf"))


@pytest.mark.parametrize("count", [{"u16": 65_535}, {"u64": 1 << 60}])
def test_absurd_count(tmp_path: Path, count: dict[str, int]) -> None:
    path = write_gguf(tmp_path / name(1), {**META, "split.count": count}, PARTS[0])
    assert faults(path) == [("shard-count", name(1))]


@pytest.mark.parametrize("keys", [{"split.count": "ten"}, {"split.count": -5}, {"split.count": 1, "split.no": 0}])
def test_no_split(tmp_path: Path, keys: dict[str, Any]) -> None:
    model = read_checkpoint(write_gguf(tmp_path / "m.gguf", {**META, **keys}, PARTS[0]))
    assert model.faults == ()
    assert model.files[0].shard is None


def test_metadata_only_first_part(tmp_path: Path) -> None:
    paths = write_split(tmp_path, "big", META, [[], *PARTS])
    model = read_checkpoint(paths[0])
    assert model.faults == ()
    assert len(model.tensors) == 13


def test_cache_sees_every_part(parts: list[str]) -> None:
    first = read(parts[0])
    assert read(parts[0]) is first
    os.truncate(parts[12], Path(parts[12]).stat().st_size - 100)
    assert [f.code for f in read(parts[0]).faults] == ["truncated"]
    Path(parts[12]).unlink()
    assert [f.code for f in read(parts[0]).faults] == ["missing-shard"]
    write_split(Path(parts[0]).parent, "big", META, PARTS)
    assert read(parts[0]).faults == ()
