"""What the layout needs to know of a model: layers, experts, and the sizes of caches and states per token.

Formulas are those of ``include/strata/kernels/qsa.hpp`` and the session code of the 0.1.33 to 0.1.40 generation. A
quarter of the layers attends fully ("QSA"), the rest keeps a recurrent state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.checkpoint.model import Role

if TYPE_CHECKING:
    from residency.checkpoint.model import Checkpoint

#: Bytes of the weight arena of the packs that have been seen, by architecture: the pool size of the pack's
#: ``index.txt`` less what is served from the GGUF. The same for IQ2_XS and IQ3_XXS, at any context (issue 486 and an
#: independent operator's notes give the same number to the byte).
WEIGHT_ARENA_BYTES = {"qwen4exp": 1_538_035_200}

#: Tensors every card keeps as stored in the GGUF ("native dense projections"); the small float ones are in the arena.
_DENSE = (Role.ATTENTION, Role.RECURRENT, Role.SHARED_EXPERT, Role.FEED_FORWARD)
_FLOAT = ("F32", "F16", "BF16")

#: Bits of one cached value, and bytes of scale per group: (bytes, values) of a block.
_BLOCKS = {"fp16": ((2, 1), (2, 1)), "int8": ((66, 64), (66, 64)), "q4_0": ((18, 32), (18, 32)), "k8v4": ((66, 64), (18, 32))}

INDEXER_BYTES = 128  # pooled indexer keys per cell and QSA layer: 512 B per page of 4 cells, never streamed
ROPE_BYTES = 256  # RoPE table, per cell, once per card with a session
PAGE_BYTES, SCORE_BYTES = 1, 4  # page table per cell and QSA layer; block scores per cell
VISION_TABLE_BYTES = 12  # position table, per cell, on every card
PAGE_CELLS = 4
LEAST_RESIDENT = 20_480  # cells --kv-resident is raised to


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of one model; bytes unless named otherwise."""

    layers: int
    attention: tuple[bool, ...]  # per layer: attends fully
    kv_values: int  # elements of keys and values per cell and layer
    state_bytes: int  # recurrent state of one other layer
    expert_layer_bytes: tuple[int, ...]  # routed experts per layer
    experts: int  # per layer
    largest_expert_bytes: int  # one expert's blob, the largest of all layers
    dense_bytes: int
    dense_pieces: int
    dense_largest: tuple[str, int]
    head_bytes: int
    embedding_bytes: int
    table_bytes: int  # n-gram table (per-layer embedding)
    draft_expert_bytes: int
    draft_dense_bytes: int
    trained_context: int
    arena_bytes: int | None

    def cell_bytes(self, kv: str) -> int:
        """Return bytes of one cell's keys and values in one layer: 2048 in fp16, 1056 in int8 for 2 heads of 256."""
        half = self.kv_values // 2
        return sum(half // values * size for size, values in _BLOCKS[kv])

    def qsa_layers(self, low: int, high: int) -> int:
        """Return how many layers of [low, high) attend fully; a stage carves at least one."""
        return max(1, sum(self.attention[low:high]))

    def session_bytes(self, low: int, high: int, *, kv: str, cells: int, context: int) -> dict[str, int]:
        """Return the session of layers [low, high) on one card, by part."""
        qsa = self.qsa_layers(low, high)
        recurrent = (high - low) - sum(self.attention[low:high])
        return {
            "kv": qsa * self.cell_bytes(kv) * cells,
            "indexer": qsa * INDEXER_BYTES * context,
            "tables": (ROPE_BYTES + SCORE_BYTES + qsa * PAGE_BYTES) * context,
            "state": recurrent * self.state_bytes,
        }


#: Sizes of the draft layer where the model file does not hold it: 512 experts of 1,382,400 B and about 111 MiB.
DRAFT_EXPERT_BYTES = 512 * 1_382_400
DRAFT_DENSE_BYTES = 111 * 2**20


def geometry(model: Checkpoint) -> Geometry:
    """Return the geometry of a checkpoint."""
    draft_layers = model.integer("nextn_predict_layers")
    held = 1 + max((t.layer for t in model.tensors if t.layer is not None), default=-1)  # a count alone proves nothing
    layers = max(0, min(model.integer("block_count") - draft_layers, held))
    interval = model.integer("full_attention_interval", 4) or 4
    heads, size = model.integer("attention.head_count_kv"), model.integer("attention.key_length")
    inner, state = model.integer("ssm.inner_size"), model.integer("ssm.state_size")
    groups, kernel = model.integer("ssm.group_count"), model.integer("ssm.conv_kernel", 4)
    convolution = inner + 2 * groups * state
    experts = model.integer("expert_count")
    expert_bytes = [0] * layers
    dense = pieces = head = embedding = table = draft_experts = draft_dense = 0
    largest = ("", 0)
    for tensor in model.tensors:
        layer, role, size_bytes = tensor.layer, tensor.role, tensor.nbytes
        if layer is not None and layer >= layers:
            if role is Role.EXPERT:
                draft_experts += size_bytes
            else:
                draft_dense += size_bytes
        elif role is Role.EXPERT and layer is not None:
            expert_bytes[layer] += size_bytes
        elif role in _DENSE and layer is not None and tensor.type_name not in _FLOAT:
            dense, pieces = dense + size_bytes, pieces + 1
            if size_bytes > largest[1]:
                largest = (tensor.name, size_bytes)
        elif role is Role.OUTPUT:
            head += size_bytes
        elif role is Role.EMBEDDING:
            embedding += size_bytes
        elif role is Role.LAYER_EMBEDDING:
            table += size_bytes
    return Geometry(
        layers=layers,
        attention=tuple((i + 1) % interval == 0 for i in range(layers)),
        kv_values=2 * heads * size,
        state_bytes=(inner * state + convolution * (kernel - 1)) * 4,
        expert_layer_bytes=tuple(expert_bytes),
        experts=experts,
        largest_expert_bytes=max(expert_bytes, default=0) // experts if experts else 0,
        dense_bytes=dense, dense_pieces=pieces, dense_largest=largest,
        head_bytes=head, embedding_bytes=embedding, table_bytes=table,
        draft_expert_bytes=draft_experts or DRAFT_EXPERT_BYTES,
        draft_dense_bytes=draft_dense or DRAFT_DENSE_BYTES,
        trained_context=model.integer("context_length"),
        arena_bytes=WEIGHT_ARENA_BYTES.get(model.architecture),
    )  # fmt: skip
