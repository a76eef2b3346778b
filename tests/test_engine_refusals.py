"""Launches an engine refuses are refused, once, with a way out that can be written down."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import residency
from residency.checkpoint import census
from residency.engines.strata import ENGINE as STRATA
from residency.engines.vllm_cpp import ENGINE as VLLM

from gguf_writer import write_gguf  # isort: skip
from llama_cpp_truth import dense, dense_hparams  # isort: skip

MODELS = Path(__file__).parent.parent / "configs" / "models"
QWEN = str(MODELS / "qwen3.8-2.4t-a95b-ud-q1_0.census.json")
SWIFT = str(MODELS / "swift-1.5-iq3_xxs.census.json")
KEYS = {"general.architecture": "llama"} | {f"llama.{k.replace('__', '.')}": v for k, v in dense_hparams().items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    write_gguf(path, KEYS, dense())
    return str(path)


def judged(*argv, machine="rtx-3090", engine=None, environ=None):
    return residency.validate(list(argv), machine=machine, engine=engine, environ=environ or {})


def vetoes(report):
    return [(f.knob, f.message, [(x.knob, x.value, x.spelling) for x in f.fixes if x.verified]) for f in report.findings if f.outcome == "veto"]


def test_more_sequences_than_the_engine_has(model):
    report = judged("llama-server", "-m", model, "-np", "257")
    assert vetoes(report) == [
        ("context.sequences", "257 sequences are asked for, and the engine takes 256 at most.", [("context.sequences", 256, "-np 256")])
    ]
    assert judged("llama-server", "-m", model, "-np", "256").allowed


def test_a_launch_file_with_more_than_the_engine_counts(model):
    report = residency.validate({"engine": {"name": "llama.cpp"}, "model": {"path": model}, "context": {"length": 2**32}}, machine="rtx-3090", environ={})
    assert vetoes(report)[0][:2] == ("context.length", f"context.length is {2**32}, and the engine's parser takes whole numbers of 32 bits only.")
    ratio = {"engine": {"name": "llama.cpp"}, "model": {"path": model}, "layers": {"ratio": [1.0] * 16}}
    assert vetoes(residency.validate(ratio, machine="rtx-3090", environ={}))[0][1] == "The split ratio has 16 shares, and the engine takes 15 at most."


def test_a_main_device_that_is_not_there_is_one_fault(model):
    report = judged("llama-server", "-m", model, "-sm", "none", "-mg", "99")
    assert vetoes(report) == [("device.main", "The main GPU is number 99, and the engine sees 1 device, numbered from 0.", [("device.main", 0, "-mg 0")])]


def test_a_split_model_is_given_by_its_first_part(tmp_path):
    parts = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    rows = dense()
    split = {"split.count": 2, "split.tensors.count": len(rows)}
    write_gguf(parts[0], KEYS | split | {"split.no": 0}, rows[:10])
    write_gguf(parts[1], {"general.architecture": "llama"} | split | {"split.no": 1}, rows[10:])
    assert judged("llama-server", "-m", str(parts[0])).allowed
    found = vetoes(judged("llama-server", "-m", str(parts[1])))
    text = "The engine loads a split model by its first part, and this is another one."
    assert found == [("model.path", text, [("model.path", str(parts[0]), f"-m {parts[0]}")])]


@pytest.mark.parametrize("pattern", ["(([a-z0-9_.])+)+!", "(.*)*(.*)*(.*)*(.*)*(.*)*x$"])
def test_a_pattern_that_would_match_for_ever(model, pattern):
    began = time.process_time()
    report = judged("llama-server", "-m", model, "-ot", f"{pattern}=CPU")
    assert any("matches no tensor of this model" in f.message for f in report.findings)
    assert time.process_time() - began < 1


def test_a_pattern_nobody_can_foresee_gives_no_verdict(model):
    report = judged("llama-server", "-m", model, "-ot", r"(a)\1=CPU")
    assert report.verdict == "no-verdict"
    assert any("it refers back to a group" in f.message for f in report.findings)


def test_the_check_at_load_is_told_the_same_way_by_every_rule():
    report = judged("vllm-server", "--model", QWEN, "--device", "cuda", "--max-num-seqs", "1", "--max-model-len", "512",
                    machine="dgx-spark-gb10", engine="vllm.cpp@2026.09")  # fmt: skip
    said = {f.rule: f.message for f in report.findings if f.outcome == "veto"}
    assert sorted(said) == ["memory-budget/pools", "unified-memory/expert-residency"]
    assert all("The engine's own check counts this while it loads and refuses there" in text for text in said.values())
    assert not any("clean load" in text for text in said.values())
    assert "61.39 GiB once written out, 33.33 GiB as the file stores them" in said["unified-memory/expert-residency"]
    old = judged("vllm-server", "--model", QWEN, "--device", "cuda", "--max-num-seqs", "1", "--max-model-len", "512",
                 machine="dgx-spark-gb10", engine="vllm.cpp@2026.08")  # fmt: skip
    assert "after a clean load, at the first forward" in {f.rule: f.message for f in old.findings}["memory-budget/pools"]


def test_a_variable_is_spelled_as_one():
    launch = VLLM.read(["vllm-server", "--model", "m.gguf"], {}, version=None)
    assert VLLM.spell(launch, "memory.prefault", False) == "VT_GGUF_PREFAULT=0 (environment)"
    assert VLLM.spell(launch, "memory.load", "none") == "VT_GGUF_MMAP=0 (environment)"
    assert VLLM.spell(launch, "device.kind", "cpu") == "--device cpu"


def test_split_points_for_one_card_are_one_fault():
    words = ("--serve", "--native", SWIFT, "--mtp", "rt", "--spec", "4", "--prefill", "auto", "--expert-profile", "p")
    for point in ("24", "1", "60"):
        found = [v for v in vetoes(judged("strata", *words, "--layer-split", point)) if v[0] == "layers.first"]
        assert [v[1] for v in found] == [f"There is 1 split point ({point}) for 1 card; one card needs none."]
    launch = STRATA.read(["strata", *words, "--layer-split", "24"], {}, version=None)
    assert STRATA.spell(launch, "layers.first", None) == "--layer-split auto"
    assert launch.with_value("layers.first", None).get("layers.first") is None


@pytest.mark.parametrize("engine", [VLLM, STRATA], ids=lambda e: e.name)
def test_versions(engine):
    for version in ("banana", "-1", "1", ""):
        assert engine.version_problem(version) is not None
    assert engine.version_problem(engine.newest) is None
    assert STRATA.version_problem("0.1.39b") is None
    assert STRATA.version_problem("0.1.40.3") is None


@pytest.mark.parametrize(("engine", "argv"), [(VLLM, ["vllm-server", "--version"]), (VLLM, ["vllm-cli", "-h"]), (STRATA, ["strata", "--help"])])
def test_information_starts_nothing(engine, argv):
    assert engine.read(argv, {}, version=None).starts_nothing


def test_a_refusal_with_many_trials_stays_quick(tmp_path):
    path = tmp_path / "swift.census.json"
    path.write_text(json.dumps(json.loads(Path(SWIFT).read_text(encoding="utf-8"))), encoding="utf-8")
    assert census.load(str(path)).architecture == "qwen4exp"
    began = time.process_time()
    report = judged("llama-server", "-m", str(path), "-np", "1", "-sm", "none", "-fa", "off", "-ctk", "q8_0", "-c", "1000000", "-lm", "mlock", machine="rtx-6000-ada")
    assert report.verdict == "veto"
    assert time.process_time() - began < 2  # 0.5 s on an idle machine


def test_a_draft_model_is_checked_like_the_model(model, tmp_path):
    draft = tmp_path / "draft.gguf"
    write_gguf(draft, KEYS | {"llama.attention.head_count_kv": 1}, dense())
    found = vetoes(judged("llama-server", "-m", model, "-md", str(draft)))
    assert [(knob, text) for knob, text, _ in found] == [
        ("model.draft", "blk.0.attn_k.weight has the shape [256, 128]; by embedding_length, attention.head_count_kv and attention.key_length it is [256, 64].")
    ]
    report = judged("llama-server", "-m", model, "-md", model, "-otd", r"(a)\1=CPU")
    assert report.verdict == "no-verdict"
