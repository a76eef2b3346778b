"""Context sizes, caches and refusals: laws with hand-calculated values."""

from __future__ import annotations

import pytest

from residency.engines.llama_cpp import layout
from residency.engines.llama_cpp.hparams import hyper_parameters, read
from residency.engines.llama_cpp.settings import Settings

from llama_cpp_truth import cards, checkpoint, dense, dense_hparams, made  # isort: skip

ONE = cards("CUDA0")


def lay(model, **more):
    return layout.lay_out(model, Settings(devices=ONE, **more))


def plain(arch="llama", **hparams):
    return made(arch, dense(), **(dense_hparams() | hparams))


def test_a_context_over_three_slots_is_cut_and_rounded():
    """5000 tokens over three slots of their own: 1666 each, rounded up to 1792, 5376 cells in all."""
    found = lay(plain(), n_ctx=5000, n_seq=3, unified=False)
    assert found.resolved.n_ctx_seq == 1792
    assert found.resolved.n_ctx == 5376
    assert found.devices[0].kv == 4 * 2 * 2 * 128 * 5376


def test_a_shared_cache_is_one_whole():
    found = lay(plain(), n_ctx=5000, n_seq=3, unified=True)
    assert found.resolved.n_ctx == found.resolved.n_ctx_seq == 5120


def test_no_context_asked_is_the_trained_one():
    assert lay(plain()).resolved.n_ctx == 8192


@pytest.mark.parametrize(("kind", "per_value"), [("f16", 2), ("bf16", 2), ("f32", 4), ("q8_0", 34 / 32), ("q4_0", 18 / 32), ("q5_1", 24 / 32)])
def test_a_cache_type_sets_the_row(kind, per_value):
    """Rows of 128 values: quantised ones cost a partial row up to 512 more on these cards, once per tensor."""
    found = lay(plain(), n_ctx=4096, type_k=kind, type_v=kind, flash_attn="on").devices[0].kv
    extra = 384 * per_value if per_value not in (2, 4) else 0
    tensor = -(-int(128 * 4096 * per_value + extra) // 128) * 128
    assert found == 4 * 2 * tensor


def test_sliding_windows_hold_the_window_and_one_micro_batch():
    model = plain("gemma2", attention__sliding_window=1024, attention__key_length=64, attention__value_length=64)
    found = lay(model, n_ctx=8192)
    assert found.resolved.window_cells == 1536  # 1024 + 512, already a multiple of 256
    assert found.devices[0].kv == 2 * 2 * 2 * 128 * (8192 + 1536)
    whole = lay(model, n_ctx=8192, swa_full=True)
    assert whole.devices[0].kv == 4 * 2 * 2 * 128 * 8192


def test_a_window_is_never_larger_than_the_context():
    model = plain("gemma2", attention__sliding_window=4096, attention__key_length=64, attention__value_length=64)
    assert lay(model, n_ctx=2048).resolved.window_cells == 2048


def test_a_latent_cache_has_keys_only():
    found = lay(checkpoint("deepseek-v3"), n_ctx=4096)
    assert found.devices[0].kv == 61 * 576 * 2 * 4096


def test_a_recurrent_state_does_not_grow_with_the_context():
    model = checkpoint("arch-mamba2-dense")
    small, large = lay(model, n_ctx=512).devices[0], lay(model, n_ctx=65536).devices[0]
    assert small.kv == large.kv == 0
    assert small.state == large.state > 0
    assert lay(model, n_ctx=4096, n_seq=4).devices[0].state == 4 * large.state


def test_a_hybrid_has_both():
    found = lay(checkpoint("qwen35-35b-a3b"), n_ctx=4096).devices[0]
    assert found.kv == 10 * 2 * 512 * 2 * 4096  # every fourth of 40 layers attends
    assert found.state > 0


@pytest.mark.parametrize(
    ("more", "codes"),
    [
        ({"type_v": "q8_0", "flash_attn": "off"}, ["quantised-values-without-flash-attention"]),
        ({"type_k": "q8_0", "flash_attn": "off"}, []),
        ({"type_k": "q8_0", "type_v": "q8_0"}, []),
        ({"split_mode": "tensor", "flash_attn": "off"}, ["tensor-split-without-flash-attention"]),
    ],
)  # fmt: skip
def test_what_the_engine_refuses(more, codes):
    assert [r.code for r in lay(plain(), **more).remarks] == codes


def test_heads_that_a_block_does_not_divide():
    narrow = made("llama", dense(width=96), **dense_hparams(width=96))
    found = lay(narrow, type_k="q8_0", type_v="q8_0")
    assert [r.code for r in found.remarks] == ["cache-block", "cache-block"]
    assert {w.value for r in found.remarks for w in r.ways} == {"f16"}


def test_latent_caches_take_one_type():
    found = lay(checkpoint("deepseek-v3"), type_k="q8_0", flash_attn="on")
    assert [r.code for r in found.remarks] == ["mla-cache-types"]
    assert found.remarks[0].ways[0].value == "q8_0"


def test_a_name_the_tables_do_not_list_is_read_by_its_tensors():
    known, new = lay(plain("llama"), n_ctx=4096), lay(plain("brand-new"), n_ctx=4096)
    assert not new.unknowns
    assert new.devices[0].kv == known.devices[0].kv
    assert new.devices[0].weights == known.devices[0].weights
    assert new.devices[0].compute_at_most > known.devices[0].compute_at_most


@pytest.mark.parametrize(
    "more",
    [
        {"attention__indexer__key_length": 128}, {"hyper_connection__count": 4}, {"attention__compress_ratios": {"array": "u32", "value": [4, 4, 4, 4]}},
        {"attention__head_count": 0, "attention__head_count_kv": 0}, {"attention__sliding_window": 512},
    ],
)  # fmt: skip
def test_a_memory_of_an_unknown_kind_is_unknown_and_not_guessed(more):
    found = lay(plain("brand-new", **more))
    assert [u.what for u in found.unknowns] == ["memory module of architecture brand-new"]


@pytest.mark.parametrize(
    "more",
    [
        {"block_count": 10**9}, {"block_count": 0}, {"attention__head_count": 0}, {"attention__head_count": {"array": "u32", "value": [4]}},
        {"embedding_length": 0}, {"attention__layer_norm_rms_epsilon": float("nan")}, {"context_length": 0}, {"attention__key_length": 2**31},
        {"expert_used_count": 2**31}, {"attention__head_count_kv": -1}, {"rope__dimension_count": "many"}, {"context_length": float("inf")},
        {"attention__sliding_window": {"array": "f32", "value": [float("nan")]}}, {"nextn_predict_layers": 99},
    ],
)  # fmt: skip
@pytest.mark.parametrize("arch", ["llama", "gemma2", "deepseek2", "qwen35", "mamba", "brand-new"])
def test_nonsense_in_a_header_never_raises(arch, more):
    found = read(plain(arch, **more))
    assert found.layers_all <= 4096
    if "context_length" not in more:
        lay(plain(arch, **more))


def test_a_block_without_its_parts_is_unknown():
    rows = [r for r in dense() if r[0] != "blk.2.ffn_up.weight"]
    found = lay(made("llama", rows, **dense_hparams()))
    assert [u.what for u in found.unknowns] == ["compute buffers"]


def test_hyper_parameters_are_read_once():
    model = plain()
    assert hyper_parameters(model) is hyper_parameters(model)
