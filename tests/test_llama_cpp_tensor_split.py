"""``--split-mode tensor``: every card's buffers against what the engine's own code asks for, and the launches it dies of."""

from __future__ import annotations

import functools
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

import residency
from residency.engines.llama_cpp import layout, tensor_split
from residency.engines.llama_cpp.hparams import NO_TENSOR_SPLIT
from residency.engines.llama_cpp.settings import Settings

import llama_cpp_truth as truth  # isort: skip
import shapes  # isort: skip
from gguf_writer import write_gguf  # isort: skip

DATA = json.loads(gzip.decompress((Path(__file__).parent / "data" / "llama_cpp_tensor_split.json.gz").read_bytes()))
MIB = 2**20
RUN = [c for c in (*DATA["cases"], *DATA["real"]) if "cards" in c]
STOP = [c for c in DATA["cases"] if c.get("stops")]
by_id = {"ids": lambda c: c["id"]}


@functools.cache
def checkpoint(name):
    return truth.header(name, DATA["models"][name])


def lay(case):
    return layout.lay_out(checkpoint(case["model"]), truth.settings(case["settings"]))


def refused(found):
    return [r.code for r in found.remarks if r.kind == "impossible"]


@pytest.mark.parametrize("case", RUN, **by_id)
def test_weights_and_caches_of_every_card_are_exact(case):
    found = lay(case)
    assert refused(found) == []
    assert found.unknowns == ()
    assert found.resolved.n_ctx == case["n_ctx"]
    assert [d.weights + d.experts for d in found.devices] == [card[0] for card in case["cards"]]
    assert [d.kv + d.state for d in found.devices] == [card[1] for card in case["cards"]]


@pytest.mark.parametrize("case", RUN, **by_id)
def test_every_card_takes_the_whole_compute_buffer(case):
    for device, card in zip(lay(case).devices, case["cards"], strict=True):
        want, have = card[2], device.compute_likely
        assert abs(have - want) <= max(0.1 * want, 16 * MIB)
        assert want - have <= max(0.05 * want, 8 * MIB)
        assert device.compute_certain <= want <= device.compute_at_most


@pytest.mark.parametrize("case", DATA["real"], **by_id)
def test_the_one_device_is_what_the_engine_reported_on_two_cards(case):
    """The engine adds up one device. Only recurrent states are allocated when it does, and one card's count."""
    stored = truth.settings(case["settings"])
    (one,) = layout.lay_out(checkpoint(case["model"]), replace(stored, devices=stored.devices[:1], tensor_split=())).devices
    card = lay(case).devices[0]
    weights, context, compute = case["whole"]
    assert one.weights + one.experts == weights
    assert one.kv + card.state == context
    assert abs(one.compute_likely - compute) <= 0.01 * compute


@pytest.mark.parametrize("case", STOP, **by_id)
def test_launches_that_end_in_an_assertion_are_refused(case):
    found = lay(case)
    assert "tensor-split-stops" in refused(found)
    (remark,) = [r for r in found.remarks if r.code == "tensor-split-stops"]
    assert remark.message.startswith("split mode tensor ends in an assertion: ")
    assert [(w.knob, w.value) for w in remark.ways] == [("layers.split", "layer")]


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        ("gemma3-one-kv-head", {}, "its one key and value head cannot be told from a cut row when it is normed"),
        ("llama-one-kv-head", {"type_k": "q8_0"}, "when it is rotated for a quantised cache"),
        ("llama-heads-of-100", {}, "no flash attention kernel for heads of 100"),
        ("qwen3next", {"tensor_split": (1.0, 2.0)}, "other heads of the values than of the keys"),
        ("rwkv7", {}, "the recurrent state is cut like ssm_out.weight, which the file does not have"),
        ("llama", {"kv_offload": False, "n_seq": 2}, "the caches of several slots are on the host"),
    ],
)  # fmt: skip
def test_the_reason_is_named(model, args, words):
    found = layout.lay_out(checkpoint(model), Settings(devices=truth.cards("CUDA0", "CUDA1"), split_mode="tensor", n_ctx=4096, **args))
    (remark,) = [r for r in found.remarks if r.code == "tensor-split-stops"]
    assert words in remark.message


def test_shares_are_single_precision_as_in_the_engine():
    """0.7 of 4096 is 2867.2; of 10 heads 0.7 and 0.3 give 7.0 in double precision and 6.9999998 in single."""
    assert tensor_split.cut(4096, 1, (0.7, 0.3), 0) == [2867, 1229]
    assert tensor_split.cut(16777217, 1, (1.0, 0.0), 0) == [16777216, 1]  # float32 has no odd numbers up there


def test_layers_of_one_kind_take_turns():
    """Seven heads of 128: three and four, then four and three; windowed layers count for themselves."""
    hparams = truth.dense_hparams(4, width=896, heads=7, heads_kv=7)
    model = truth.made("llama", truth.dense(4, width=896, heads=7, heads_kv=7), **hparams)
    splitter = tensor_split.Splitter(model, layout.latent.adapted(model, Settings()), (0.0, 0.0))
    assert [splitter.tensor(i, "attn_q.weight", (896, 896)).counts for i in range(4)] == [(384, 512), (512, 384), (384, 512), (512, 384)]
    assert splitter.tensor(0, "attn_norm.weight", (896,)) is None
    assert splitter.tensor(0, "ffn_down.weight", (512, 896)) == tensor_split.Cut(0, (256, 256))


def test_no_device_no_split():
    model = truth.made("llama", truth.dense(), **truth.dense_hparams())
    assert "tensor-split-without-devices" in refused(layout.lay_out(model, Settings(split_mode="tensor", n_ctx=4096)))


@pytest.mark.parametrize("architecture", sorted(NO_TENSOR_SPLIT))
def test_an_architecture_without_it_is_named(architecture, tmp_path):
    metadata = {"general.architecture": architecture} | {
        f"{architecture}.{key.replace('__', '.')}": value for key, value in truth.dense_hparams().items()
    }
    path = write_gguf(tmp_path / "made.gguf", metadata, truth.dense())
    machine = shapes.machine({"cards": [[name, "cuda", "NVIDIA H200", "9.0", 143156, 142629] for name in ("CUDA0", "CUDA1")]})
    report = residency.validate(["llama-server", "-m", path, "-sm", "tensor", "-c", "4096"], engine="llama.cpp", machine=machine, environ={})
    (finding,) = [f for f in report.findings if f"plit mode tensor is not implemented for {architecture}." in f.message]
    assert [(w.knob, w.value) for w in finding.ways] == [("layers.split", "layer")]
    assert report.verdict != "allow"


def test_a_fused_tensor_too_small_for_its_heads_cannot_be_told():
    rows = [*truth.dense(2), ("blk.0.attn_qkv.weight", "F32", (256, 32, 4))]  # 256 query rows alone would be more
    chosen = Settings(devices=truth.cards("CUDA0", "CUDA1", "CUDA2", "CUDA3"), n_ctx=512, split_mode="tensor")
    found = layout.lay_out(truth.made("llama", rows, **truth.dense_hparams(2)), chosen)
    assert [u.why for u in found.unknowns] == ["blk.0.attn_qkv.weight has 32 rows, fewer than the heads of the metadata fill"]
