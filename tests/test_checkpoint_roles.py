"""Roles of tensors, from names of published models."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

from residency.checkpoint.model import Role
from residency.checkpoint.roles import first_mtp_block, role_and_layer


@pytest.mark.parametrize(
    ("name", "role", "layer"),
    [
        ("token_embd.weight", Role.EMBEDDING, None),
        ("per_layer_token_embd.weight", Role.LAYER_EMBEDDING, None),
        ("token_embd_norm.weight", Role.NORM, None),
        ("output.weight", Role.OUTPUT, None),
        ("output_norm.weight", Role.NORM, None),
        ("rope_freqs.weight", Role.ATTENTION, None),
        ("blk.0.attn_q.weight", Role.ATTENTION, 0),
        ("blk.12.attn_q_norm.weight", Role.NORM, 12),
        ("blk.12.attn_k_b.weight", Role.ATTENTION, 12),
        ("blk.3.ffn_down.weight", Role.FEED_FORWARD, 3),
        ("blk.3.ffn_down_exps.weight", Role.EXPERT, 3),
        ("blk.3.ffn_gate_up_exps.weight", Role.EXPERT, 3),
        ("blk.3.ffn_down_exps.scale", Role.EXPERT, 3),
        ("blk.3.ffn_up_chexps.weight", Role.EXPERT, 3),
        ("blk.3.ffn_norm_exps.weight", Role.NORM, 3),
        ("blk.3.ffn_up_shexp.weight", Role.SHARED_EXPERT, 3),
        ("blk.3.ffn_gate_inp_shexp.weight", Role.SHARED_EXPERT, 3),
        ("blk.3.ffn_gate_inp.weight", Role.ROUTER, 3),
        ("blk.3.exp_probs_b.bias", Role.ROUTER, 3),
        ("blk.3.post_ffw_norm_1.weight", Role.NORM, 3),
        ("blk.3.ssm_out.weight", Role.RECURRENT, 3),
        ("blk.3.ssm_a", Role.RECURRENT, 3),
        ("blk.3.ssm_dt.bias", Role.RECURRENT, 3),
        ("blk.3.time_mix_lerp_w.weight", Role.RECURRENT, 3),
        ("blk.3.shortconv.conv.weight", Role.RECURRENT, 3),
        ("blk.3.indexer.k_norm.bias", Role.NORM, 3),
        ("blk.3.indexer.proj.weight", Role.ATTENTION, 3),
        ("blk.3.nextn.eh_proj.weight", Role.MTP, 3),
        ("dec.blk.5.cross_attn_k.weight", Role.ATTENTION, 5),
        ("v.blk.3.attn_q.weight", Role.VISION, None),
        ("v.patch_embd.weight.1", Role.VISION, None),
        ("mm.0.weight", Role.VISION, None),
        ("a.blk.3.ffn_up.weight", Role.AUDIO, None),
        ("mm.a.mlp.1.weight", Role.AUDIO, None),
        ("something.else", Role.OTHER, None),
        ("blk.3.something_else.weight", Role.OTHER, 3),
    ],
)
def test_role(name: str, role: Role, layer: int | None) -> None:
    assert role_and_layer(name) == (role, layer)


def test_next_token_blocks() -> None:
    first = first_mtp_block(93, 1)
    assert first == 92
    assert role_and_layer("blk.91.attn_q.weight", first) == (Role.ATTENTION, 91)
    assert role_and_layer("blk.92.attn_q.weight", first) == (Role.MTP, 92)
    assert role_and_layer("blk.92.ffn_up_shexp.weight", first) == (Role.MTP, 92)
    assert role_and_layer("blk.92.ffn_gate_exps.weight", first) == (Role.EXPERT, 92)
    assert first_mtp_block(93, 0) is None
    assert first_mtp_block(None, 1) is None
    assert first_mtp_block("93", 1) is None


def test_no_known_tensor_is_other() -> None:
    """Every name the gguf package or the llama.cpp architecture tests can produce has a role."""
    names = {n.replace("{bid}", "7").replace("{xid}", "1") + ".weight" for n in gguf.TENSOR_NAMES.values()}
    names |= set(json.loads(Path(__file__).with_name("data").joinpath("tensor_names.json").read_text())["names"])
    other = {n for n in names if role_and_layer(n)[0] is Role.OTHER}
    assert other == {"hrm.z_l_init"}
