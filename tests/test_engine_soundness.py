"""Hyper-parameters and tensor tables no engine can load are refused by every engine, naming the key or the tensor."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from residency.budget import Allocation, Phase, Purpose
from residency.engines import llama_cpp, soundness, strata, vllm_cpp
from residency.engines.base import Models
from residency.launch.knobs import Knobs
from residency.launch.model import Launch
from residency.machine import resolve_machine

from llama_cpp_truth import DATA, checkpoint, dense, dense_hparams, made  # isort: skip

ENGINES = (*llama_cpp.ENGINES, vllm_cpp.ENGINE, strata.ENGINE)
ODD = (float("nan"), float("inf"), -1, 2**31, 2**63, 2**64 - 1, -(2**63), 1e308, 10**9, "x", 0.5, True, (-1, -1), (2**64 - 1,) * 3, ("a",), (1,) * 100_000)


def planned(engine, model, **sections):
    launch = Launch(engine=engine.name, version=None, knobs=Knobs.model_validate({"context": {"length": 4096}, "model": {"path": model.path}} | sections))
    return engine.plan(launch, Models(main=model), resolve_machine("rtx-3090"), version=engine.newest)


def plain(**changes):
    return made("llama", dense(), **(dense_hparams() | changes))


def codes(budget):
    return [(r.code, r.message) for r in budget.remarks if r.kind == "impossible"]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("key", sorted({*soundness.NUMBERS, *soundness.PER_LAYER, *soundness.LISTS}))
def test_no_value_of_a_key_breaks_an_engine(engine, key):
    began = time.process_time()
    model = plain()
    for value in ODD:
        odd = replace(model, metadata={**model.metadata, f"llama.{key}": value})
        budget = planned(engine, odd)
        assert all(0 <= a.certain_bytes <= a.likely_bytes <= a.at_most_bytes for a in budget.allocations if a.purpose is not Purpose.RESERVE)
        if key in soundness.NUMBERS and key not in soundness.LISTS and not soundness.whole(value, soundness.NUMBERS[key]):
            assert engine is strata.ENGINE or codes(budget)[0][1].startswith(f"llama.{key} is "), value
    assert time.process_time() - began < 1


@pytest.mark.parametrize("engine", ENGINES[:3], ids=lambda e: e.name)
@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"attention__head_count_kv": 1}, "wrong-shape",
         "blk.0.attn_k.weight has the shape [256, 128]; by embedding_length, attention.head_count_kv and attention.key_length it is [256, 64]"),
        ({"block_count": 3}, "wrong-block-count", "llama.block_count is 3, and there are tensors of block 3: the engine finds more tensors than it expects"),
        ({"block_count": 6}, "wrong-block-count", "llama.block_count is 6, and block 4 has no tensors"),
        ({"embedding_length": 128}, "wrong-shape", "token_embd.weight has the shape [256, 1000]; by llama.embedding_length it is [128, 1000]"),
        ({"feed_forward_length": 500}, "wrong-shape",
         "blk.0.ffn_down.weight has the shape [512, 256]; by embedding_length, feed_forward_length it is [500, 256]"),
        ({"attention__key_length": -(2**62)}, "bad-number", f"llama.attention.key_length is {-(2**62)}; a whole number up to 2147483647 is expected"),
        ({"hyper_connection__count": 10**9}, "bad-number", "llama.hyper_connection.count is 1000000000; a whole number up to 64 is expected"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(engine, change, code, message):
    model = plain()
    changed = {f"llama.{key.replace('__', '.')}": value for key, value in change.items()}
    assert codes(planned(engine, replace(model, metadata={**model.metadata, **changed}))) == [(code, message)]


def test_a_missing_embedding_and_an_empty_tensor_are_refused():
    rows = dense()
    without = made("llama", rows[1:], **dense_hparams())
    assert codes(planned(ENGINES[0], without)) == [("missing-tensor", "the tensor token_embd.weight is missing")]
    model = plain()
    empty = replace(model, tensors=(*model.tensors, model.tensors[0]._replace(name="blk.0.attn_norm.bias", shape=(0,))))
    assert codes(planned(ENGINES[0], empty)) == [("empty-tensor", "blk.0.attn_norm.bias has a dimension of 0: [0]")]


def test_a_list_for_a_number_is_refused():
    model = plain()
    odd = replace(model, metadata={**model.metadata, "llama.attention.key_length": (64, 64)})
    assert codes(planned(ENGINES[0], odd)) == [("bad-number", "llama.attention.key_length is a list of 2 values; a whole number up to 2147483647 is expected")]


def test_experts_used_are_at_most_the_experts():
    assert codes(planned(ENGINES[0], plain(expert_used_count=2))) == [("experts-used", "llama.expert_used_count is 2, and llama.expert_count 0")]


@pytest.mark.parametrize("name", sorted(DATA["models"]))
def test_no_model_an_engine_loaded_is_refused(name):
    assert soundness.refusals(checkpoint(name)) == ()


def test_a_full_head_beside_a_cached_latent_is_no_contradiction():
    rows = [("token_embd.weight", "Q8_0", (256, 1000)), ("output_norm.weight", "F32", (256,)), ("blk.0.attn_q.weight", "Q8_0", (256, 4 * 192))]
    keys = {"block_count": 1, "embedding_length": 256, "attention__head_count": 4, "attention__head_count_kv": 1, "attention__key_length": 576,
            "attention__value_length": 512, "attention__key_length_mla": 192, "attention__value_length_mla": 128}  # fmt: skip
    assert soundness.refusals(made("deepseek2", rows, **keys)) == ()


@pytest.mark.parametrize("sizes", [(-1, 0, 0), (2, 1, 3), (0, 3, 2), (0, 0, -5)])
def test_no_allocation_is_negative_or_out_of_order(sizes):
    certain, likely, most = sizes
    with pytest.raises(ValueError, match="are no allocation"):
        Allocation(pool="CUDA0", purpose=Purpose.KV, name="x", phase=Phase.LOAD, certain_bytes=certain, likely_bytes=likely, at_most_bytes=most)
