"""Census files: exact round trips, hostile documents, the printed table, and the one that ships."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gguf_writer import write_gguf, write_split

from residency.checkpoint import read, read_checkpoint
from residency.checkpoint.census import SCHEMA, census_main, census_tables, dumps, loads, render_census, save
from residency.checkpoint.model import Role
from residency.errors import InputError

if TYPE_CHECKING:
    from residency.checkpoint.model import Checkpoint

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "configs" / "models" / "qwen3.8-2.4t-a95b-ud-q1_0.census.json"

META: dict[str, Any] = {
    "general.architecture": "test",
    "general.name": "a ☃",
    "test.block_count": 2,
    "test.nextn_predict_layers": 1,
    "test.flag": True,
    "test.one": {"f32": 1.0},
    "test.low": {"f64": -math.inf},
    "test.big": {"u64": (1 << 64) - 1},
    "test.small": {"i64": -(1 << 63)},
    "test.list": [1, 2, 3],
    "test.floats": {"array": "f32", "value": [0.1, math.inf]},
    "test.flags": [True, False],
    "test.none": {"array": "i32", "value": []},
    "tokenizer.ggml.tokens": ["a"] * 9,
}
TENSORS = [
    ("token_embd.weight", "Q4_K", (256, 100)),
    ("blk.0.ffn_up_exps.weight", 147, (256, 64), 2432),
    ("blk.0.rows.weight", "Q4_K", (250, 4)),
    ("blk.1.attn_q.weight", "Q8_0", (256, 256)),
    ("blk.1.gone.weight", 31, (32, 4), 72),
]


def same(census: Checkpoint, model: Checkpoint) -> None:
    """Everything but the paths."""
    assert census.metadata == model.metadata
    assert [(k, type(v)) for k, v in census.metadata.items()] == [(k, type(v)) for k, v in model.metadata.items()]
    assert census.array_lengths == model.array_lengths
    assert census.tensors == model.tensors
    assert census.declared_tensors == model.declared_tensors
    assert [f.size_bytes for f in census.files] == [f.size_bytes for f in model.files]
    assert [f.message for f in census.faults] == [f.message for f in model.faults]
    assert dumps(census) == dumps(model)


def test_round_trip(tmp_path: Path) -> None:
    model = read_checkpoint(write_gguf(tmp_path / "m.gguf", META, TENSORS))
    assert {f.code for f in model.faults} == {"unknown-type", "removed-type", "row-not-multiple", "trailing-bytes"} - {
        "trailing-bytes"
    }
    target = str(tmp_path / "m.census.json")
    save(model, target)
    census = read_checkpoint(target)
    assert (census.source, census.path) == ("census", target)
    same(census, model)
    assert [t.role for t in census.tensors] == [Role.EMBEDDING, Role.EXPERT, Role.OTHER, Role.MTP, Role.MTP]


def test_round_trip_of_the_real_file(gemma_path: str, tmp_path: Path) -> None:
    model = read(gemma_path)
    save(model, str(tmp_path / "g.json"))
    same(read_checkpoint(str(tmp_path / "g.json")), model)
    assert (tmp_path / "g.json").stat().st_size < 32_000


def test_round_trip_of_a_split_with_a_hole(tmp_path: Path) -> None:
    paths = write_split(tmp_path, "s", META, [TENSORS[:1], TENSORS[1:2], TENSORS[3:4]])
    Path(paths[1]).unlink()
    model = read_checkpoint(paths[0])
    save(model, str(tmp_path / "s.json"))
    census = read_checkpoint(str(tmp_path / "s.json"))
    same(census, model)
    assert [(f.code, f.file, f.fatal) for f in census.faults] == [("missing-shard", "s-00002-of-00003.gguf", True)]


def test_nothing_of_the_machine_is_stored(tmp_path: Path) -> None:
    model = read_checkpoint(write_gguf(tmp_path / "m.gguf", META, TENSORS))
    assert str(tmp_path) not in dumps(model)


def test_save_is_atomic_and_careful(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", META, TENSORS)
    model = read_checkpoint(path)
    before = Path(path).read_bytes()
    (tmp_path / "alias.json").symlink_to(path)
    for target in (path, str(tmp_path / "new.GGUF"), str(tmp_path / "alias.json")):
        with pytest.raises(InputError, match="is a model file"):
            save(model, target)
    with pytest.raises(InputError, match="is a directory"):
        save(model, str(tmp_path))
    with pytest.raises(InputError, match="cannot be written"):
        save(model, str(tmp_path / "none" / "x.json"))
    assert Path(path).read_bytes() == before
    (tmp_path / "x.json").write_text("old")
    save(model, str(tmp_path / "x.json"))
    assert read_checkpoint(str(tmp_path / "x.json")).tensors == model.tensors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alias.json", "m.gguf", "x.json"]


# ----- hostile documents


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    text = dumps(read_checkpoint(write_gguf(tmp_path / "m.gguf", META, TENSORS)))
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["schema"], "residency.census/9", "schema is 'residency.census/9'"),
        (["schema"], None, "schema is None"),
        (["files"], [], "files is empty"),
        (["files"], {}, "files is a dict, not a list"),
        (["files", 0, "size_bytes"], -1, "files[0].size_bytes is -1"),
        (["files", 0, "path"], 7, "files[0].path is 7, not a text"),
        (["files", 0, "big_endian"], 1, "files[0].big_endian is 1, not true or false"),
        (["metadata"], [], "metadata is a list, not an object"),
        (["metadata", "test.x"], {"a": 1}, "metadata.test.x is a dict"),
        (["metadata", "test.x"], [[1]], "metadata.test.x is a list"),
        (["metadata", "test.x"], None, "metadata.test.x is None"),
        (["metadata", "test.x"], 1 << 64, "metadata.test.x is out of the range"),
        (["array_lengths", "t"], -1, "array_lengths.t is -1"),
        (["totals", "bytes"], 1, "totals.bytes is 1, the rows give"),
        (["totals", "tensors"], 4, "totals.tensors is 4, the rows give 5"),
        (["totals"], None, "totals is None, not an object"),
        (["unknown_types", "type-147"], -2, "unknown_types.type-147 is -2"),
        (["unknown_types"], {}, "tensors[1].type is 'type-147', which no table knows"),
        (["tensors", 0], {}, "tensors[0] is a dict, not a list"),
        (["tensors", 0], [], "tensors[0] has 0 columns"),
        (["tensors", 0, 0], 5, "tensors[0].name is 5, not a text"),
        (["tensors", 0, 0], "x" * 5000, "tensors[0].name is a text of 5000 characters"),
        (["tensors", 0, 0], "blk.1.attn_q.weight", "tensors[3]: the tensor 'blk.1.attn_q.weight' stands twice"),
        (["tensors", 0, 1], ["Q4_K"], "tensors[0].type is a list, not a text"),
        (["tensors", 0, 2], [-256, 100], "tensors[0].shape is -256"),
        (["tensors", 0, 2], [256.0, 100], "tensors[0].shape is 256.0, not a whole number"),
        (["tensors", 0, 2], [True, 100], "tensors[0].shape is True, not a whole number"),
        (["tensors", 0, 2], [1] * 17, "tensors[0].shape has 17 dimensions"),
        (["tensors", 0, 3], -32, "tensors[0].offset is -32"),
        (["tensors", 0, 4], 1, "tensors[0].file is 1, there are 1 files"),
        (["tensors", 1, 5], -1, "tensors[1].bytes is -1"),
        (["tensors", 1], ["a", "type-147", [256], 0, 0], "tensors[1] has no bytes"),
        (["faults", 0, "fatal"], "no", "faults[0].fatal is 'no', not true or false"),
        (["note"], 5, "note is 5, not a text"),
        (["declared_tensors"], "five", "declared_tensors is 'five', not a whole number"),
    ],
)
def test_wrong_fields_are_named(document: dict[str, Any], where: list[Any], value: Any, message: str) -> None:
    place: Any = document
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    with pytest.raises(InputError) as caught:
        loads(json.dumps(document).encode(), "x.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("x.json: ")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"schema": ', "x.json:1:12: is not JSON: Expecting value"),
        (b'{"a": 1}\n{"b": 2}', "x.json:2:1: is not JSON: Extra data"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "a": 2}', "the key 'a' stands twice"),
        (b'{"a": "\xff"}', "is not UTF-8 text"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not a census"),
        (b"{}", "schema is None"),
        (b'{"schema": "\x1b[31m"}', "is not JSON"),
        (b'{"schema": "\\u001b[31m"}', r"schema is '\x1b[31m'"),
    ],
)
def test_not_a_census(raw: bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        loads(raw, "x.json")
    assert message in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    path.write_bytes(b"{")
    os.truncate(path, 1 << 34)
    with pytest.raises(InputError, match="17179869184 bytes of JSON"):
        read_checkpoint(str(path))


def test_absurd_shapes_stay_printable(document: dict[str, Any]) -> None:
    document["tensors"] = [[f"t{n}", "F64", [(1 << 63) - 1] * 16, 0, 0] for n in range(5)]
    document["totals"] = {"tensors": 5, "bytes": 5 * ((1 << 63) - 1)}
    assert "GiB" in render_census(loads(json.dumps(document).encode(), "x.json"))


def test_json_with_a_byte_order_mark(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xef\xbb\xbf\r\n  " + json.dumps(document).encode())
    assert len(read_checkpoint(str(path)).tensors) == 5


# ----- the table


def test_table_of_the_real_file(gemma_path: str) -> None:
    text = render_census(read(gemma_path))
    lines = text.splitlines()
    assert lines[0] == "Gemma 3 270m (gemma3), 1 file, 236 tensors, 0.2297 GiB (246,587,904 bytes)"
    assert "  gemma-3-270m-q4_k_m.gguf  253,113,024 bytes, GGUF v3" in lines
    assert "  embedding           1  178,257,920    0.1660 GiB" in lines
    assert "  Q5_0       81   43,591,680    0.0406 GiB" in lines
    assert "  0-1, 4, 7, 10, 13, 15-17 (9 x)       13  3,995,648    0.0037 GiB" in lines
    assert "  2-3, 5-6, 8-9, 11-12, 14 (9 x)       13  3,596,288    0.0033 GiB" in lines


def test_tables(tmp_path: Path) -> None:
    tables = census_tables(read_checkpoint(write_gguf(tmp_path / "m.gguf", META, TENSORS)))
    assert (tables.tensors, tables.nbytes) == (5, 14_400 + 2432 + 576 + 69_632 + 96)
    assert [(s.key, s.tensors, s.sized) for s in tables.by_type] == [
        ("Q8_0", 1, True),
        ("Q4_K", 2, True),
        ("type-147", 1, False),
        ("Q4_0_4_4", 1, False),
    ]
    assert [(g.layers, g.nbytes, g.experts) for g in tables.layers] == [((0,), 3008, 2432), ((1,), 69_728, 0)]


def test_save_leaves_devices_and_links_what_they_are(tmp_path: Path) -> None:
    model = read_checkpoint(write_gguf(tmp_path / "good.gguf", META, TENSORS[:2]))
    pipe, link, file = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "file.json"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="is no regular file"):
        save(model, str(pipe))
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    link.symlink_to("file.json")
    save(model, str(link))
    assert link.is_symlink()
    assert json.loads(file.read_text())["schema"] == SCHEMA


def test_main(tmp_path: Path) -> None:
    good = write_gguf(tmp_path / "good.gguf", META, TENSORS[:2])
    bad = write_gguf(tmp_path / "bad.gguf", META, TENSORS[:1])
    os.truncate(bad, Path(bad).stat().st_size - 1000)
    code, text = census_main([good])
    assert (code, text.splitlines()[0].split(",")[0]) == (0, "a ☃ (test)")
    code, text = census_main([bad])
    assert code == 1
    assert "x bad.gguf: the file is cut: 1000 bytes are missing" in text
    code, text = census_main([good], str(tmp_path / "o.json"), as_json=True)
    assert (code, json.loads(text)["schema"]) == (0, SCHEMA)
    assert (tmp_path / "o.json").read_text() == text
    code, text = census_main([good, bad], as_json=True)
    assert (code, [d["totals"]["tensors"] for d in json.loads(text)]) == (1, [2, 1])
    with pytest.raises(InputError) as caught:
        census_main([str(tmp_path / "no1"), good, str(tmp_path / "no2")])
    assert len(caught.value.problems) == 2
    with pytest.raises(InputError, match="-o writes the census of one model"):
        census_main([good, bad], "x.json")
    with pytest.raises(InputError, match="at least one"):
        census_main([])


def test_table_is_clean(tmp_path: Path) -> None:
    evil = "\x1b[2J\u202e"
    meta = {"general.architecture": evil, "general.name": evil}
    text = render_census(read_checkpoint(write_gguf(tmp_path / f"{evil}.gguf", meta, [(evil, "F32", (3,))])))
    assert "\x1b" not in text
    assert "\u202e" not in text


# ----- the census that ships


def test_shipped_census_holds_every_published_total() -> None:
    model = read_checkpoint(str(SHIPPED))
    towers = [t for t in model.tensors if t.role is Role.EXPERT]
    assert model.faults == ()
    assert len(model.tensors) == model.declared_tensors == 1702
    assert model.tensor_bytes == 397_245_341_184
    assert [f.shard for f in model.files] == list(range(10))
    assert sum(f.size_bytes or 0 for f in model.files) == 397_256_393_248
    assert len(towers) == 279
    assert sum(t.nbytes for t in towers) == 360_374_599_680
    small = [t for t in towers if t.type_name == "IQ1_XXXS"]
    assert [len(small), {t.nbytes for t in small}, {t.sized for t in small}] == [276, {1_275_068_416}, {False}]
    large = [t for t in towers if t.type_name == "Q2_K"]
    assert [(t.name, t.nbytes) for t in large] == [
        (f"blk.92.ffn_{part}_exps.weight", 2_818_572_288) for part in ("gate", "up", "down")
    ]
    assert model.bytes_by("layer")[92] == 8_940_488_704
    assert model.tensor_bytes - 360_374_599_680 == 36_870_741_504
    assert {
        key: model.integer(key)
        for key in ("block_count", "expert_count", "expert_used_count", "embedding_length", "expert_feed_forward_length")
    } == {
        "block_count": 93, "expert_count": 512, "expert_used_count": 10, "embedding_length": 8192,
        "expert_feed_forward_length": 2048,
    }  # fmt: skip
    # Expanded to BF16: 21.56 and 17.25 GiB are published.
    elements = {
        part: sum(t.elements for t in model.tensors if f".{part}." in t.name) * 2 / (1 << 30)
        for part in ("attn_qkv", "ssm_out")
    }
    assert {k: round(v, 2) for k, v in elements.items()} == {"attn_qkv": 21.56, "ssm_out": 17.25}
    assert model.note is not None
    assert model.note.startswith("Reconstructed, not read from the files.")


def test_shipped_census_lies_inside_its_files() -> None:
    model = read_checkpoint(str(SHIPPED))
    for index, file in enumerate(model.files):
        end = 0
        for tensor in (t for t in model.tensors if t.file == index):
            assert tensor.offset == end
            end += tensor.nbytes
        assert file.size_bytes == file.data_offset + end


def test_shipped_census_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("reconstruct_census", ROOT / "bench" / "reconstruct_census.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert dumps(module.reconstruct()) == SHIPPED.read_text(encoding="utf-8")
