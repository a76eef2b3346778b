"""Vision towers against the bytes llama.cpp itself reports for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import residency
from residency.checkpoint import read
from residency.engines.llama_cpp import vision

from gguf_writer import write_gguf  # isort: skip

DATA = json.loads((Path(__file__).parent / "data" / "llama_cpp_vision.json").read_text())


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
