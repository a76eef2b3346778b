"""Image and sound encoders against the bytes llama.cpp itself reports for them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path

import pytest

import residency
from residency.checkpoint import read
from residency.engines.llama_cpp import vision
from residency.engines.llama_cpp.encoders import AUDIO, VISION
from residency.engines.llama_cpp.runtime import beside_encoder
from residency.engines.llama_cpp.settings import DeviceSpec

from gguf_writer import write_gguf  # isort: skip
from llama_cpp_truth import dense, dense_hparams  # isort: skip

DATA = json.loads((Path(__file__).parent / "data" / "llama_cpp_vision.json").read_text())
#: Towers of published models, every projector the engine knows; its own figures, see "origin" and "what" in the file.
TOWERS = json.loads(gzip.decompress((Path(__file__).parent / "data" / "llama_cpp_towers.json.gz").read_bytes()))
#: Encoders that really ran, read through the driver.
REAL = json.loads(gzip.decompress((Path(__file__).parent / "data" / "llama_cpp_real.json.gz").read_bytes()))
MIB = 2**20
CARD = DeviceSpec(name="CUDA0", kind="cuda", compute_capability="9.0", model="NVIDIA H200")


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    found = {}
    for name, model in DATA["mmproj"].items():
        metadata = {key: ({"array": v["array"], "value": v["value"]} if "array" in v else v) for key, v in model["metadata"].items()}
        path = folder / f"{name}.gguf"
        write_gguf(path, metadata, [tuple(t) for t in model["tensors"]])
        found[name] = str(path)
    return found


FLASH = {-1: "auto", 0: "off", 1: "on"}


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda c: c["id"])
def test_a_tower_takes_what_the_engine_reports(case, towers):
    where = "card" if case["gpu"] else "host"
    tower = vision.measure(read(towers[case["mmproj"]]), flash=FLASH[case["flash_attn"]], where=where, most_tokens=case["image_max_tokens"] or None)
    have = tower.weights_bytes + tower.warm_up_bytes
    assert {"CUDA0": have, "CPU": tower.input_bytes} == case["bytes"] if case["gpu"] else {"CPU": have} == case["bytes"]


def write_tower(path, tower):
    """Write a tower's header; a row with a fourth entry stands for that many tensors."""
    tensors = [(r[0].replace("#", str(i)), r[1], tuple(r[2])) for r in tower["rows"] for i in range(r[3] if len(r) > 3 else 1)]
    write_gguf(path, tower["metadata"], tensors)
    return read(str(path))


def by_tower(cases):
    grouped = defaultdict(list)
    for case in cases:
        grouped[case["mmproj"]].append(case)
    return grouped


def run_of(case):
    return {"flash": FLASH[case["flash_attn"]], "where": "card" if case.get("gpu", 1) else "host", "most_tokens": case["image_max_tokens"] or None}


CASES, LARGEST = by_tower(TOWERS["cases"]), by_tower(TOWERS["largest"])


@pytest.mark.parametrize("name", TOWERS["towers"])
def test_every_encoder_takes_what_the_engine_reports(name, tmp_path):
    model = write_tower(tmp_path / "mmproj.gguf", TOWERS["towers"][name])
    assert len(CASES[name]) == 8
    for case in CASES[name]:
        found = vision.measure(model, **run_of(case))
        have = found.weights_bytes + found.warm_up_bytes
        assert ({"CUDA0": have, "CPU": found.input_bytes} if case["gpu"] else {"CPU": have}) == case["bytes"], case
        assert found.unknown == ()


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_image_takes_what_the_engine_reserves_for_it(name, tmp_path):
    model = write_tower(tmp_path / "mmproj.gguf", TOWERS["towers"][name])
    for case in LARGEST[name]:
        found = vision.measure(model, **run_of(case))
        assert {"CUDA0": found.largest_bytes, "CPU": found.largest_input_bytes} == case["compute"], case


def test_every_projector_of_the_engine_is_among_the_towers():
    seen = {tower["metadata"].get(f"clip.{prefix}projector_type", {}).get("str") for tower in TOWERS["towers"].values() for prefix in ("", "vision.", "audio.")}
    assert set(VISION) | set(AUDIO) <= seen | {"qwen2.5o"}


def test_an_encoder_nobody_knows_cannot_be_told(tmp_path, gemma_path):
    tower = json.loads(json.dumps(TOWERS["towers"]["smolvlm-256m"]))
    tower["metadata"]["clip.projector_type"] = {"str": "idefics9"}
    model = write_tower(tmp_path / "mmproj.gguf", tower)
    found = vision.measure(model)
    assert found.unknown == ("idefics9",)
    assert found.weights_bytes == model.tensor_bytes
    argv = ["llama-server", "-m", str(gemma_path), "-c", "4096", "--mmproj", str(tmp_path / "mmproj.gguf")]
    unknowns = residency.validate(argv, machine="rtx-3090", environ={}).budget.unknowns
    assert [u.what for u in unknowns] == ["buffers of the idefics9 encoder"]


@pytest.mark.parametrize(("key", "value"), [
    ("embedding_length", {"u32": 64}), ("block_count", {"u32": 1 << 19}), ("attention.head_count", {"u32": 0}), ("patch_size", {"u32": 0}),
    ("image_size", {"str": "many"}), ("projector.scale_factor", {"f32": float("nan")}), ("feature_layer", {"array": "str", "value": ["x"]}),
])  # fmt: skip
@pytest.mark.parametrize("name", ["smolvlm-256m", "granite-vision-4.1", "qwen3-vl-2b", "mimo-v2.5", "deepseek-ocr"])
def test_a_damaged_projector_file_stops_nothing(name, key, value, tmp_path):
    tower = json.loads(json.dumps(TOWERS["towers"][name]))
    tower["metadata"][f"clip.vision.{key}"] = value
    found = vision.measure(write_tower(tmp_path / "mmproj.gguf", tower))
    assert found.weights_bytes > 0
    assert found.unknown or found.warm_up_bytes > 0


def test_the_largest_image_is_an_upper_bound(towers, gemma_path):
    machine = "rtx-3090"
    argv = ["llama-server", "-m", str(gemma_path), "-c", "4096", "--mmproj", towers["qwen2.5vl-7b"]]
    rows = [a for p in residency.validate(argv, machine=machine, environ={}).budget.allocations for a in [p] if a.purpose == "vision" and a.device == "CUDA0"]
    image = next(a for a in rows if "image buffer" in a.name)
    # 4096 tokens are 16384 patches: the window mask alone is 16384 x 16384 floats, 1 GiB.
    assert image.at_most_bytes > image.likely_bytes + 2**30
    assert image.likely_bytes == pytest.approx(739025920, rel=0.01)


def test_the_encoder_goes_where_it_is_told(towers, gemma_path):
    argv = ["llama-server", "-m", str(gemma_path), "-c", "4096", "--mmproj", towers["gemma3-4b"], "--no-mmproj-offload"]
    rows = [a for a in residency.validate(argv, machine="rtx-3090", environ={}).budget.allocations if a.purpose == "vision"]
    assert {a.pool for a in rows} == {"host"}
    assert sum(a.likely_bytes for a in rows) == pytest.approx(977011136, rel=0.016)


def test_fit_leaves_room_for_the_encoder(towers, gemma_path):
    # 22,500 MiB kept free leave room for 32,768 tokens, and with the tower's 932 MiB on the card for the smallest context only.
    def context(*more):
        argv = ["llama-server", "-m", str(gemma_path), "-fit", "on", "--fit-target", "22500", *more]
        return residency.validate(argv, machine="rtx-3090", environ={}).budget.facts["context"]

    alone, beside, elsewhere = context(), context("--mmproj", towers["gemma3-4b"]), context("--mmproj", towers["gemma3-4b"], "--no-mmproj-offload")
    assert (alone, beside, elsewhere) == (32768, 4096, 32768)


@pytest.mark.parametrize("run", [r for r in REAL["encoders"] if r["mmproj"] in TOWERS["towers"]], ids=lambda r: f"{r['mmproj']}/fa{r['flash_attn']}")
def test_memory_in_use_after_the_first_image_and_the_largest(run, tmp_path):
    found = vision.measure(write_tower(tmp_path / "tower.gguf", TOWERS["towers"][run["mmproj"]]), flash="auto" if run["flash_attn"] < 0 else "off", where="card")
    certain, likely, most = beside_encoder(CARD, found.warm_up_pool_bytes, found.largest_pool_bytes)
    loaded, first, *_, last = (*run["used_mib"], run["used_mib"][-1])
    assert found.weights_bytes + found.warm_up_bytes + certain == pytest.approx(loaded * MIB, abs=4 * MIB)
    # float32 weights are converted for flash attention by rules of their own, which these figures lack
    assert -20 <= (found.weights_bytes + found.warm_up_bytes + likely) / MIB - first <= 32
    assert (found.weights_bytes + found.largest_bytes + most) / MIB >= last


@pytest.mark.parametrize(
    ("name", "width", "said"),
    [
        ("internvl3-8b", 4096, "The image encoder puts out embeddings of 3584, and the model takes 4096: they were not made for each other."),
        ("internvl3-8b", 3584, None),
        ("voxtral-mini-3b", 4096, "The sound encoder puts out embeddings of 3072, and the model takes 4096: they were not made for each other."),
        ("voxtral-mini-3b", 3072, None),
        ("qwen3-vl-8b", 4096, "The image encoder puts out embeddings of 16384, and the model takes 4096: they were not made for each other."),
        ("qwen2.5-omni-7b", 2048, (
            "The image encoder puts out embeddings of 3584, and the model takes 2048: they were not made for each other; "
            "the sound encoder puts out embeddings of 3584, and the model takes 2048: they were not made for each other."
        )),
    ],
)  # fmt: skip
def test_embeddings_of_another_width_are_refused_once(name, width, said, tmp_path):
    write_tower(tmp_path / "tower.gguf", TOWERS["towers"][name])
    metadata = {f"llama.{k.replace('__', '.')}": v for k, v in dense_hparams(2, width=width, heads=width // 128, heads_kv=1, inner=256).items()}
    write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama", **metadata}, dense(2, width=width, heads=width // 128, heads_kv=1, inner=256))
    argv = ["llama-server", "-m", str(tmp_path / "model.gguf"), "--mmproj", str(tmp_path / "tower.gguf"), "-c", "512"]
    report = residency.validate(argv, machine="rtx-3090", environ={})
    assert [f.message for f in report.findings if f.outcome == "veto"] == ([said] if said else [])


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("gemma3-4b", ["--image-min-tokens", "2000"], None),  # its images have one size, whatever is asked
        ("qwen2-vl-2b", ["--image-min-tokens", "2000", "--image-max-tokens", "64"], "An image is to have at least 2000 tokens and can have 64 at most: the engine refuses the projector."),
        ("qwen2-vl-2b", ["--image-min-tokens", "100000"], "An image is to have at least 100000 tokens and can have 4096 at most: the engine refuses the projector."),
        ("qwen2-vl-2b", ["--image-min-tokens", "64"], None),
    ],
)
def test_an_image_cannot_have_more_tokens_at_least_than_at_most(name, flags, said, tmp_path):
    width = 2560 if name == "gemma3-4b" else 1536
    write_tower(tmp_path / "tower.gguf", TOWERS["towers"][name])
    metadata = {f"llama.{k.replace('__', '.')}": v for k, v in dense_hparams(2, width=width, heads=width // 128, heads_kv=1, inner=256).items()}
    write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama", **metadata}, dense(2, width=width, heads=width // 128, heads_kv=1, inner=256))
    argv = ["llama-server", "-m", str(tmp_path / "model.gguf"), "--mmproj", str(tmp_path / "tower.gguf"), "-c", "512", *flags]
    report = residency.validate(argv, machine="rtx-3090", environ={})
    assert [f.message for f in report.findings if f.outcome == "veto"] == ([said] if said else [])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("clip.vision.block_count", None, "it lacks the number clip.vision.block_count"),
        ("clip.vision.projection_dim", {"str": "x"}, "it lacks the number clip.vision.projection_dim"),
        ("clip.vision.patch_size", {"u32": 0}, "clip.vision.patch_size is 0, and the engine takes 1 to 65535"),
        ("clip.vision.image_size", {"u32": 100000}, "clip.vision.image_size is 100000, and the engine takes 0 to 8192"),
        ("clip.has_vision_encoder", {"bool": False}, "it says of no image or sound encoder that it is there"),
        ("clip.has_vision_encoder", {"bool": True}, None),
    ],
)
def test_a_projector_file_the_engine_refuses(key, value, said, tmp_path):
    tower = TOWERS["towers"]["qwen3-vl-8b"]
    metadata = {k: v for k, v in {**tower["metadata"], key: value}.items() if v is not None}
    written = write_tower(tmp_path / "tower.gguf", {**tower, "metadata": metadata})
    assert (vision.beyond_range(written) or vision.lacking(written)) == said


def test_a_model_that_takes_several_levels_says_so(tmp_path):
    write_tower(tmp_path / "tower.gguf", TOWERS["towers"]["qwen3-vl-8b"])
    hparams = dense_hparams(2, width=4096, heads=32, heads_kv=1, inner=256) | {"n_deepstack_layers": 3}
    metadata = {f"qwen3vl.{k.replace('__', '.')}": v for k, v in hparams.items()}
    write_gguf(tmp_path / "model.gguf", {"general.architecture": "qwen3vl", **metadata}, dense(2, width=4096, heads=32, heads_kv=1, inner=256))
    argv = ["llama-server", "-m", str(tmp_path / "model.gguf"), "--mmproj", str(tmp_path / "tower.gguf"), "-c", "512"]
    report = residency.validate(argv, machine="rtx-3090", environ={})
    assert not [f.message for f in report.findings if f.rule == "vision/embedding-width" and f.outcome == "veto"]


def test_a_projector_that_does_not_fit_can_be_left_out(tmp_path):
    write_tower(tmp_path / "tower.gguf", TOWERS["towers"]["internvl3-8b"])
    metadata = {f"llama.{k.replace('__', '.')}": v for k, v in dense_hparams(2, width=4096, heads=32, heads_kv=1, inner=256).items()}
    write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama", **metadata}, dense(2, width=4096, heads=32, heads_kv=1, inner=256))
    argv = ["llama-server", "-m", str(tmp_path / "model.gguf"), "--mmproj", str(tmp_path / "tower.gguf"), "-c", "512"]
    (veto,) = [f for f in residency.validate(argv, machine="rtx-3090", environ={}).findings if f.outcome == "veto"]
    assert [(fix.knob, fix.value, fix.verified) for fix in veto.fixes] == [("model.mmproj", None, True)]
