"""Compute buffers of graphs no law was fitted to, against what the engine's own library reserves for them."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import pytest

from residency.engines.llama_cpp import blocks, graph, layout
from residency.engines.llama_cpp.hparams import hyper_parameters
from residency.engines.llama_cpp.settings import Settings

from llama_cpp_truth import MIB, cards, dense, dense_hparams, header, made, settings  # isort: skip

DATA = json.loads(gzip.decompress((Path(__file__).parent / "data" / "llama_cpp_compute.json.gz").read_bytes()))


@functools.cache
def checkpoint(name):
    """Return the header of one model."""
    return header(name, DATA["models"][name])


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda c: c["id"])
def test_compute_buffers_follow_from_the_graph(case):
    found = layout.lay_out(checkpoint(case["model"]), settings(case["settings"]))
    have = {d.device: d.compute_likely for d in found.devices}
    for device, want in case["compute"].items():
        assert abs(have[device] - want) <= max(0.02 * want, 2 * MIB), device


def test_the_last_copied_weight_of_a_block_is_the_last_one_the_graph_reads():
    hyper = hyper_parameters(checkpoint("qwen2moe-moe"))
    block = blocks.blocks_of(checkpoint("qwen2moe-moe"), hyper)[-1]
    assert graph.closing(block, frozenset()) == ""
    assert graph.closing(block, frozenset({"ffn_up_exps", "ffn_gate_exps"})) == "ffn_up_exps"
    assert graph.closing(block, frozenset({"ffn_up_exps", "ffn_down_exps"})) == "ffn_down_exps"
    assert graph.closing(block, None) == "ffn_gate_inp_shexp"  # the whole block: the shared expert's gate comes last


@pytest.mark.parametrize(
    ("arch", "layers", "more", "rotated"),
    [
        ("llama", 4, {}, [True] * 4),
        ("bloom", 2, {}, [False] * 2),
        ("smollm3", 8, {}, [True, True, True, False] * 2),
        ("smallthinker", 4, {"attention__sliding_window": 128}, [False, True, True, True]),
        ("smallthinker", 4, {"attention__sliding_window": 0}, [True] * 4),
        ("cohere2", 4, {"attention__sliding_window": 128}, [True, True, True, False]),
        ("baichuan", 32, {}, [True] * 32),
        ("baichuan", 40, {}, [False] * 40),
        ("granite", 2, {"rope__scaling__finetuned": False}, [False] * 2),
    ],
)
def test_which_layers_rotate(arch, layers, more, rotated):
    assert list(hyper_parameters(made(arch, dense(layers), **dense_hparams(layers), **more)).rotated) == rotated


def test_four_positions_per_token_where_the_rotation_has_sections():
    def positions(arch, *sections):
        more = {"rope__dimension_sections": list(sections)} if sections else {}
        return hyper_parameters(made(arch, dense(), **dense_hparams(), **more)).positions

    assert [positions("llama"), positions("qwen2vl"), positions("glm4"), positions("glm4", 8, 12, 12, 0), positions("llama", 8, 12, 12, 0)] == [
        1, 4, 1, 4, 1,
    ]  # fmt: skip


def test_a_model_without_a_cache_needs_no_kernel_for_the_cache_type():
    """The keys and values of a diffusion model stay in the graph in half precision, whatever the launch says."""
    model = checkpoint("dream-dense")
    stored = DATA["cases"][0]["settings"] | {"n_gpu_layers": 99}
    plain = layout.lay_out(model, settings(stored)).devices[0].compute_likely
    assert layout.lay_out(model, settings(stored, type_k="iq4_nl", type_v="iq4_nl", flash_attn="on")).devices[0].compute_likely == plain
    assert layout.lay_out(model, settings(stored, kv_offload=False)).devices[0].compute_likely == plain


def convolving(*kinds):
    """Return a made-up lfm2: "A" attends, "C" convolves."""
    rows = [("token_embd.weight", "Q8_0", (256, 1000)), ("token_embd_norm.weight", "F32", (256,))]
    for i, kind in enumerate(kinds):
        rows += [(f"blk.{i}.{n}.weight", "F32", (256,)) for n in ("attn_norm", "ffn_norm")]
        rows += [(f"blk.{i}.ffn_{n}.weight", "Q8_0", s) for n, s in (("gate", (256, 512)), ("up", (256, 512)), ("down", (512, 256)))]
        if kind == "A":
            rows += [(f"blk.{i}.attn_{n}.weight", "Q8_0", s) for n, s in (("q", (256, 256)), ("k", (256, 128)), ("v", (256, 128)), ("output", (256, 256)))]
        else:
            rows += [(f"blk.{i}.shortconv.{n}.weight", t, s) for n, t, s in (("conv", "F32", (3, 256)), ("in_proj", "Q8_0", (256, 768)), ("out_proj", "Q8_0", (256, 256)))]
    return made(
        "lfm2", rows, block_count=len(kinds), embedding_length=256, context_length=8192, feed_forward_length=512, attention__head_count=4,
        attention__head_count_kv=[2 if kind == "A" else 0 for kind in kinds], attention__layer_norm_rms_epsilon=1e-5, shortconv__l_cache=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "more", "stays"),
    [
        ("ACAC", {}, True),
        ("ACAC", {"kv_offload": False}, False),  # block 2 attends behind a convolution, its cache is on the host
        ("AC", {"kv_offload": False}, True),  # nothing attends behind the convolution
        ("ACAC", {"kv_offload": False, "flash_attn": "on"}, True),  # asked for, so not looked into
        ("CACC", {"n_gpu_layers": 3}, False),  # block 1 attends on the host, block 2 convolves on the card
        ("CACC", {"n_gpu_layers": 2}, True),  # the border lies between two convolutions
        ("CACC", {"n_gpu_layers": 4}, True),  # ... before the attention
    ],
)
def test_flash_attention_that_nobody_asked_for_goes_off_beside_scans_on_the_other_side(kinds, more, stays):
    chosen = Settings(devices=cards("CUDA0"), n_ctx=4096, **more)
    assert layout.lay_out(convolving(*kinds), chosen).resolved.flash is stays
