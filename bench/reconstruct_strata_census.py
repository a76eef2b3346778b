"""Write the census of Swift 1.5 / Flash-Next IQ3_XXS, which is known by its geometry and its published totals.

    python bench/reconstruct_strata_census.py [OUTPUT]        default: configs/models/swift-1.5-iq3_xxs.census.json

What stands under PUBLISHED was printed by somebody who read the files, the engine's sources or its setup. What stands
under FILLED_IN was not: types and shapes chosen so that the totals hold to the digits given. The other variants are the
same geometry in another quantisation, for tests. The script stops if a total does not hold.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent)]

from reconstruction import ALIGNMENT, Row, base_name, full_attention, linear_attention, placed, row, write  # noqa: E402

from residency.checkpoint.model import Checkpoint, MetaValue, ModelFile, Role  # noqa: E402
from residency.checkpoint.roles import first_mtp_block  # noqa: E402

OUTPUT = Path(__file__).parent.parent / "configs" / "models" / "swift-1.5-iq3_xxs.census.json"


class PUBLISHED:
    """Geometry: ``include/strata/kernels/qsa.hpp`` (qsa_real_shapes) and the session code. Totals: ``setup.py``, MODELS."""

    LAYERS, INTERVAL = 48, 4
    EMBEDDING, VOCABULARY, CONTEXT = 2560, 248_320, 262_144
    HEADS, KV_HEADS, HEAD_SIZE, ROTATED = 24, 2, 256, 64
    INDEXER = 128
    INNER, STATE, CONVOLUTION = 6144, 128, 10_240  # (128 x 48 x 128 + 10240 x 3) x 4 bytes of state per layer
    EXPERTS, EXPERTS_USED = 512, 10
    DRAFT_EXPERT_BLOB = 1_382_400
    TABLE_GB = 28.8
    DENSE_WITH_ARENA_GB, ARENA = 3.4, 1_538_035_200
    EXPERTS_GB = {"IQ3_XXS": 42.9, "IQ3_S": 50.3, "IQ2_XS": 35.5, "Q2_0": 34.0, "IQ1_M": 23.4, "UD-IQ4_XS": 59.5, "UD-Q4_K_XL": 77.0}  # noqa: RUF012 - a table
    DOWNLOAD_GB = {"IQ3_XXS": 75.8}  # noqa: RUF012 - a table


class Variant(NamedTuple):
    """Types of the expert towers: of most layers, and of the first so many, where the packs mix."""

    gate_up: str
    down: str
    better_gate_up: tuple[str, int] = ("", 0)
    better_down: tuple[str, int] = ("", 0)
    experts: int = 512
    width: int = 640


class FILLED_IN:  # noqa: N801 - a heading, like the one above
    """Not published."""

    VARIANTS = {  # noqa: RUF012 - a table
        "IQ3_XXS": Variant("IQ3_XXS", "Q2_0", ("IQ3_S", 10)),
        "IQ3_S": Variant("IQ3_S", "Q2_0", ("IQ4_XS", 1), ("IQ4_NL", 18)),
        "IQ2_XS": Variant("IQ2_XS", "Q2_0", ("IQ3_XXS", 6)),
        "Q2_0": Variant("Q2_0", "Q2_0"),
        "IQ1_M": Variant("IQ1_M", "IQ2_XXS", ("IQ2_XXS", 19), experts=256, width=1024),
        "UD-IQ4_XS": Variant("IQ3_S", "IQ4_NL", ("IQ4_XS", 13)),
        "UD-Q4_K_XL": Variant("Q4_K", "Q5_0", ("Q5_K", 1), ("Q8_0", 12)),
    }
    SHARED_WIDTH = 640
    TYPES = {  # noqa: RUF012 - a table
        "token_embd": "Q6_K", "output": "Q6_K", "attn_qkv": "Q4_K", "attn_gate": "Q4_K", "ssm_out": "Q5_K", "attn_q": "Q5_K",
        "attn_k": "Q5_K", "attn_v": "Q5_K", "attn_output": "Q5_K", "ffn_gate_shexp": "Q6_K", "ffn_up_shexp": "Q6_K",
        "ffn_down_shexp": "Q8_0", "per_layer_token_embd": "F16", "indexer.attn_k": "F16",
    }  # fmt: skip
    DRAFT_TYPES = {"attn_q": "F16", "nextn.eh_proj": "F16"}  # noqa: RUF012 - a table; the rest is Q8_0
    TABLE_ROWS = 5_625_000


NOTE = (
    "Reconstructed, not read from the files. Published: the geometry (48 layers, 12 of them attending fully, 512 experts, "
    "widths of attention and state), experts 42.9 GB, n-gram table 28.8 GB, download 75.8 GB, dense weights about 1.86 GB, "
    "draft experts 512 x 1382400 bytes. Filled in so that these hold: the types of all tensors, the experts' width, which "
    "layers carry the better types, tensor names and order. See bench/reconstruct_strata_census.py."
)


make = partial(row, FILLED_IN.TYPES)


def block(index: int, v: Variant) -> list[Row]:
    """Return the tensors of one block; the last one drafts."""
    p, b, draft = PUBLISHED, f"blk.{index}", index == PUBLISHED.LAYERS
    rows = [make(f"{b}.attn_norm.weight", p.EMBEDDING), make(f"{b}.post_attention_norm.weight", p.EMBEDDING)]
    if draft or (index + 1) % p.INTERVAL == 0:
        rows += full_attention(make, b, embedding=p.EMBEDDING, heads=p.HEADS, kv_heads=p.KV_HEADS, head_size=p.HEAD_SIZE)
        rows.append(make(f"{b}.indexer.attn_k.weight", p.EMBEDDING, p.INDEXER))
    else:
        rows += linear_attention(make, b, embedding=p.EMBEDDING, convolved=p.CONVOLUTION, inner=p.INNER, state=p.STATE, kernel=4)
    gate_up = v.better_gate_up[0] if index < v.better_gate_up[1] else v.gate_up
    down = v.better_down[0] if index < v.better_down[1] else v.down
    experts, width = v.experts, v.width
    if draft:
        gate_up = down = "Q2_0"
        experts, width = p.EXPERTS, 640
    rows += [
        make(f"{b}.ffn_gate_inp.weight", p.EMBEDDING, experts),
        make(f"{b}.ffn_gate_exps.weight", p.EMBEDDING, width, experts, kind=gate_up),
        make(f"{b}.ffn_up_exps.weight", p.EMBEDDING, width, experts, kind=gate_up),
        make(f"{b}.ffn_down_exps.weight", width, p.EMBEDDING, experts, kind=down),
        make(f"{b}.ffn_gate_shexp.weight", p.EMBEDDING, FILLED_IN.SHARED_WIDTH),
        make(f"{b}.ffn_up_shexp.weight", p.EMBEDDING, FILLED_IN.SHARED_WIDTH),
        make(f"{b}.ffn_down_shexp.weight", FILLED_IN.SHARED_WIDTH, p.EMBEDDING),
    ]
    if draft:
        rows += [make(f"{b}.nextn.eh_proj.weight", 2 * p.EMBEDDING, p.EMBEDDING), make(f"{b}.nextn.enorm.weight", p.EMBEDDING)]
        dense = {r.name: r for r in rows if len(r.shape) == 2 and "gate_inp" not in r.name}
        rows = [r._replace(kind=FILLED_IN.DRAFT_TYPES.get(base_name(r.name), "Q8_0")) if r.name in dense else r for r in rows]
    return rows


def metadata(v: Variant, name: str) -> dict[str, MetaValue]:
    p, a = PUBLISHED, "qwen4exp"
    return {
        "general.architecture": a,
        "general.type": "model",
        "general.name": name,
        f"{a}.block_count": p.LAYERS + 1,
        f"{a}.nextn_predict_layers": 1,
        f"{a}.context_length": p.CONTEXT,
        f"{a}.embedding_length": p.EMBEDDING,
        f"{a}.attention.head_count": p.HEADS,
        f"{a}.attention.head_count_kv": p.KV_HEADS,
        f"{a}.attention.key_length": p.HEAD_SIZE,
        f"{a}.attention.value_length": p.HEAD_SIZE,
        f"{a}.rope.dimension_count": p.ROTATED,
        f"{a}.full_attention_interval": p.INTERVAL,
        f"{a}.expert_count": v.experts,
        f"{a}.expert_used_count": p.EXPERTS_USED,
        f"{a}.expert_feed_forward_length": v.width,
        f"{a}.expert_shared_feed_forward_length": FILLED_IN.SHARED_WIDTH,
        f"{a}.ssm.conv_kernel": 4,
        f"{a}.ssm.state_size": p.STATE,
        f"{a}.ssm.group_count": (p.CONVOLUTION - p.INNER) // 2 // p.STATE,
        f"{a}.ssm.time_step_rank": p.INNER // p.STATE,
        f"{a}.ssm.inner_size": p.INNER,
        f"{a}.vocab_size": p.VOCABULARY,
        "split.no": 0,
        "split.count": 2,
    }


def reconstruct(variant: str = "IQ3_XXS", name: str = "Swift 1.5 IQ3_XXS") -> Checkpoint:
    """Return the checkpoint of a variant; raises AssertionError when a published total does not hold."""
    p, v = PUBLISHED, FILLED_IN.VARIANTS[variant]
    rows = [make("token_embd.weight", p.EMBEDDING, p.VOCABULARY)]
    for index in range(p.LAYERS + 1):
        rows += block(index, v)
    rows += [make("output_norm.weight", p.EMBEDDING), make("output.weight", p.EMBEDDING, p.VOCABULARY)]
    rows.append(make("per_layer_token_embd.weight", p.EMBEDDING, FILLED_IN.TABLE_ROWS))
    # the n-gram table is the second shard
    tensors, sizes = placed(rows, 2, first_mtp_block(p.LAYERS + 1, 1), lambda found, _: int(found.name.startswith("per_layer")))
    stem = f"Qwen3.8-Flash-Next-GSQ-RCO-{variant}"
    header = 64 * len(rows) // ALIGNMENT * ALIGNMENT
    files = tuple(
        ModelFile(path=f"{stem}-{n + 1:05d}-of-00002.gguf", size_bytes=header + sizes[n], data_offset=header, version=3, shard=n) for n in range(2)
    )
    model = Checkpoint(
        path=stem, source="census", files=files, metadata={**metadata(v, name), "split.tensors.count": len(rows)},
        tensors=tensors, declared_tensors=len(rows), note=NOTE,
    )  # fmt: skip
    check(model, variant)
    return model


def check(model: Checkpoint, variant: str) -> None:
    """Compare with every published total, to the digits it was given."""
    p = PUBLISHED
    towers = [t for t in model.tensors if t.role is Role.EXPERT]
    draft = [t for t in towers if t.layer == p.LAYERS]
    routed = sum(t.nbytes for t in towers) - sum(t.nbytes for t in draft)
    assert round(routed / 1e9, 1) == p.EXPERTS_GB[variant], routed
    assert sum(t.nbytes for t in draft) == p.EXPERTS * p.DRAFT_EXPERT_BLOB
    assert round(sum(t.nbytes for t in model.tensors if t.role is Role.LAYER_EMBEDDING) / 1e9, 1) == p.TABLE_GB
    dense = sum(
        t.nbytes for t in model.tensors
        if t.layer is not None and t.layer < p.LAYERS and t.role in (Role.ATTENTION, Role.RECURRENT, Role.SHARED_EXPERT) and t.type_name not in ("F32", "F16")
    )  # fmt: skip
    assert round((dense + p.ARENA) / 1e9, 1) == p.DENSE_WITH_ARENA_GB, dense
    if variant in p.DOWNLOAD_GB:
        assert round(model.tensor_bytes / 1e9, 1) == p.DOWNLOAD_GB[variant], model.tensor_bytes


if __name__ == "__main__":
    write(reconstruct(), OUTPUT)
