"""Write the census of a checkpoint that is known only by its published totals.

    python bench/reconstruct_census.py [OUTPUT]        default: configs/models/qwen3.8-2.4t-a95b-ud-q1_0.census.json

Every figure under PUBLISHED was printed by somebody who read the files or the model's config. What stands under
FILLED_IN was not: it is a uniform choice of tensor types, found by search, that gives every published total to the
byte. Other choices give some of the totals too, so a single type there proves nothing. The script stops if a
total does not hold. The result is a census like any other, with a note that says what it is.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from reconstruction import ALIGNMENT, Row, full_attention, linear_attention, placed, row, write  # noqa: E402

from residency.checkpoint.model import Checkpoint, MetaValue, ModelFile, Role  # noqa: E402
from residency.checkpoint.roles import first_mtp_block  # noqa: E402

OUTPUT = Path(__file__).parent.parent / "configs" / "models" / "qwen3.8-2.4t-a95b-ud-q1_0.census.json"


class PUBLISHED:
    """Read from the ten files of unsloth/Qwen3.8-2.4T-A95B-GGUF, revision 567d3e6a, in the vllm.cpp tracker (#1123).

    ``NEXT_TOKEN_BLOCK`` is the block's bytes by #1136; the widths of the linear attention follow from the expanded
    sizes given there: attn_qkv 21.56 GiB and ssm_out 17.25 GiB in BF16 are 69 x 8192 x 20480 and 69 x 16384 x 8192
    elements. Heads, head size, vocabulary and the shared expert's width are the model's config.json as quoted by a public
    kernel benchmark; 92 layers, 512 experts, top-10 and the context also stand in NVIDIA's NeMo AutoModel docs.
    """

    TENSORS = 1702
    TABLE_BYTES = 397_245_341_184
    FILE_BYTES = 397_256_393_248
    FILES = 10
    BLOCKS = 93  # the last one predicts the next token
    EMBEDDING = 8192
    EXPERTS = 512
    EXPERTS_USED = 10
    EXPERT_WIDTH = 2048
    SHARED_WIDTH = 2048
    TOWERS = 279
    TOWER_BYTES = 1_275_068_416  # 276 of them, IQ1_XXXS
    TOWER_BYTES_NEXT_TOKEN = 2_818_572_288  # 3 of them, Q2_K
    ALL_TOWERS = 360_374_599_680
    NEXT_TOKEN_BLOCK = 8_940_488_704
    QKV_WIDTH = 20_480
    INNER = 16_384
    HEADS, KV_HEADS, HEAD_SIZE = 64, 4, 256
    VOCABULARY = 248_320
    CONTEXT = 262_144


class FILLED_IN:  # noqa: N801 - a heading, like the one above
    """Not published. Sizes are exact only as a sum; names and shapes are llama.cpp's for this architecture."""

    INTERVAL = 4  # every fourth block attends fully, as in the smaller models of the family
    KEY_HEADS, STATE = 16, 128  # 2 x 16 x 128 + 16384 = 20480
    CONV_KERNEL = 4
    TYPES = {  # noqa: RUF012 - a table
        "token_embd": "Q4_K", "output": "Q4_K", "attn_qkv": "Q5_K", "attn_gate": "Q5_K", "ssm_out": "Q6_K",
        "attn_q": "Q5_K", "attn_k": "Q5_K", "attn_v": "Q5_K", "attn_output": "Q5_K", "ffn_gate_shexp": "Q5_K",
        "ffn_up_shexp": "Q5_K", "ffn_down_shexp": "Q6_K", "nextn.eh_proj": "Q8_0",
    }  # fmt: skip


NOTE = (
    "Reconstructed, not read from the files. Published: 1702 tensors, 397245341184 bytes (files 397256393248 bytes, 10 "
    "shards), 276 expert towers of 1275068416 bytes (IQ1_XXXS) and 3 of 2818572288 (Q2_K), all towers 360374599680, "
    "the next-token block 8940488704, and the dimensions of the model's config. Filled in so that all of these hold: the "
    "types of the other tensors, the head layout of the linear attention, the order of tensors, and where the shards are "
    "cut. See bench/reconstruct_census.py."
)


make = partial(row, FILLED_IN.TYPES)


def block(index: int) -> list[Row]:
    """Return the tensors of one block, in the order llama.cpp names them for qwen35moe."""
    p, f = PUBLISHED, FILLED_IN
    b = f"blk.{index}"
    last = index == p.BLOCKS - 1
    rows = [make(f"{b}.attn_norm.weight", p.EMBEDDING), make(f"{b}.post_attention_norm.weight", p.EMBEDDING)]
    if last or (index + 1) % f.INTERVAL == 0:
        rows += full_attention(make, b, embedding=p.EMBEDDING, heads=p.HEADS, kv_heads=p.KV_HEADS, head_size=p.HEAD_SIZE)
        rows += [make(f"{b}.attn_q_norm.weight", p.HEAD_SIZE), make(f"{b}.attn_k_norm.weight", p.HEAD_SIZE)]
    else:
        rows += linear_attention(make, b, embedding=p.EMBEDDING, convolved=p.QKV_WIDTH, inner=p.INNER, state=f.STATE, kernel=f.CONV_KERNEL)
    rows.append(make(f"{b}.ffn_gate_inp.weight", p.EMBEDDING, p.EXPERTS))
    for name, shape in (
        ("gate", (p.EMBEDDING, p.EXPERT_WIDTH, p.EXPERTS)),
        ("up", (p.EMBEDDING, p.EXPERT_WIDTH, p.EXPERTS)),
        ("down", (p.EXPERT_WIDTH, p.EMBEDDING, p.EXPERTS)),
    ):
        tower = f"{b}.ffn_{name}_exps.weight"
        rows.append(make(tower, *shape, kind="Q2_K") if last else Row(tower, "IQ1_XXXS", shape, p.TOWER_BYTES))
    rows += [
        make(f"{b}.ffn_gate_inp_shexp.weight", p.EMBEDDING),
        make(f"{b}.ffn_gate_shexp.weight", p.EMBEDDING, p.SHARED_WIDTH),
        make(f"{b}.ffn_up_shexp.weight", p.EMBEDDING, p.SHARED_WIDTH),
        make(f"{b}.ffn_down_shexp.weight", p.SHARED_WIDTH, p.EMBEDDING),
    ]
    if last:
        rows += [
            make(f"{b}.nextn.eh_proj.weight", 2 * p.EMBEDDING, p.EMBEDDING),
            make(f"{b}.nextn.enorm.weight", p.EMBEDDING),
            make(f"{b}.nextn.hnorm.weight", p.EMBEDDING),
            make(f"{b}.nextn.shared_head_norm.weight", p.EMBEDDING),
        ]
    return rows


def metadata() -> dict[str, MetaValue]:
    p, f, a = PUBLISHED, FILLED_IN, "qwen35moe"
    return {
        "general.architecture": a,
        "general.type": "model",
        "general.name": "Qwen3.8-2.4T-A95B",
        "general.size_label": "2.4T-A95B",
        f"{a}.block_count": p.BLOCKS,
        f"{a}.nextn_predict_layers": 1,
        f"{a}.context_length": p.CONTEXT,
        f"{a}.embedding_length": p.EMBEDDING,
        f"{a}.attention.head_count": p.HEADS,
        f"{a}.attention.head_count_kv": p.KV_HEADS,
        f"{a}.attention.key_length": p.HEAD_SIZE,
        f"{a}.attention.value_length": p.HEAD_SIZE,
        f"{a}.full_attention_interval": f.INTERVAL,
        f"{a}.expert_count": p.EXPERTS,
        f"{a}.expert_used_count": p.EXPERTS_USED,
        f"{a}.expert_feed_forward_length": p.EXPERT_WIDTH,
        f"{a}.expert_shared_feed_forward_length": p.SHARED_WIDTH,
        f"{a}.ssm.conv_kernel": f.CONV_KERNEL,
        f"{a}.ssm.state_size": f.STATE,
        f"{a}.ssm.group_count": f.KEY_HEADS,
        f"{a}.ssm.time_step_rank": p.INNER // f.STATE,
        f"{a}.ssm.inner_size": p.INNER,
        f"{a}.vocab_size": p.VOCABULARY,
        "split.no": 0,
        "split.count": p.FILES,
        "split.tensors.count": p.TENSORS,
    }


def reconstruct() -> Checkpoint:
    """Return the checkpoint; raises AssertionError when a published total does not hold."""
    p = PUBLISHED
    rows = [make("token_embd.weight", p.EMBEDDING, p.VOCABULARY)]
    for index in range(p.BLOCKS):
        rows += block(index)
    rows += [make("output_norm.weight", p.EMBEDDING), make("output.weight", p.EMBEDDING, p.VOCABULARY)]

    share = p.TABLE_BYTES / p.FILES
    tensors, sizes = placed(rows, p.FILES, first_mtp_block(p.BLOCKS, 1), lambda _, before: min(int(before / share), p.FILES - 1))
    assert all(t.nbytes % ALIGNMENT == 0 for t in tensors)
    header = [0] * p.FILES
    for tensor in tensors:
        header[tensor.file] += len(tensor.name) + 24 + 8 * len(tensor.shape)  # its entry in the tensor table

    # Magic, counts and the three split keys are 153 bytes; the first file's header is the rest of what is published.
    offsets = [-(-(153 + h) // ALIGNMENT) * ALIGNMENT for h in header]
    offsets[0] = p.FILE_BYTES - p.TABLE_BYTES - sum(offsets[1:])
    stem = "Qwen3.8-2.4T-A95B-UD-Q1_0"
    files = tuple(
        ModelFile(
            path=f"{stem}-{n + 1:05d}-of-{p.FILES:05d}.gguf",
            size_bytes=offsets[n] + sizes[n],
            data_offset=offsets[n],
            version=3,
            shard=n,
        )
        for n in range(p.FILES)
    )
    model = Checkpoint(
        path=stem,
        source="census",
        files=files,
        metadata=metadata(),
        array_lengths={"tokenizer.ggml.tokens": p.VOCABULARY},
        tensors=tensors,
        declared_tensors=p.TENSORS,
        note=NOTE,
    )
    check(model)
    return model


def check(model: Checkpoint) -> None:
    """Compare with every published total."""
    p = PUBLISHED
    towers = [t for t in model.tensors if t.role is Role.EXPERT]
    assert len(model.tensors) == p.TENSORS
    assert model.tensor_bytes == p.TABLE_BYTES
    assert sum(f.size_bytes or 0 for f in model.files) == p.FILE_BYTES
    assert len(towers) == p.TOWERS
    assert sum(t.nbytes for t in towers) == p.ALL_TOWERS
    assert sorted({t.nbytes for t in towers}) == [p.TOWER_BYTES, p.TOWER_BYTES_NEXT_TOKEN]
    assert sum(t.nbytes == p.TOWER_BYTES for t in towers) == 276
    assert sum(t.nbytes for t in model.tensors if t.layer == p.BLOCKS - 1) == p.NEXT_TOKEN_BLOCK
    # 38 bytes per 256 values is the type's own figure.
    assert all(t.elements // 256 * 38 == t.nbytes for t in towers if not t.sized)


if __name__ == "__main__":
    write(reconstruct(), OUTPUT)
