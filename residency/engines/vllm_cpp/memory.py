"""Bytes of vllm.cpp: what is borrowed, expanded, staged, and what the engine's own bound charges.

Sources: the engine's fit check and its test, ``gguf_keep_quant.cpp``, ``kv_cache_interface.cpp``,
``runner.cpp`` and ``qwen3_5_common.cpp`` (trees of July to October 2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.checkpoint.model import Role
from residency.checkpoint.roles import first_mtp_block

if TYPE_CHECKING:
    from residency.checkpoint.model import Checkpoint, Tensor

    from .settings import Settings

#: Bytes of an expanded element (bf16) and of a cached one by the type asked for.
EXPANDED = 2
KV_BYTES = {"auto": 2, "bfloat16": 2, "bf16": 2, "f16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1}
_FLOATS = frozenset({"F32", "F16", "BF16", "F64"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tensors with one fate."""

    tensors: tuple[Tensor, ...]
    bound_bytes: int  # what the engine's fit check charges
    held_bytes: int  # what they take where they are computed on
    own_bytes: int  # of that, bytes the loader writes itself and cannot borrow from the file
    own_file_bytes: int  # what those take in the file

    @property
    def largest(self) -> Tensor | None:
        """The largest single tensor."""
        return max(self.tensors, key=lambda t: t.nbytes, default=None)

    @property
    def file_bytes(self) -> int:
        """Bytes in the file."""
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The tensor table of a model, sorted by fate."""

    dense: Group  # everything but expert towers and the next-token block
    experts: Group  # routed-expert towers, one allocation each where they are staged
    mtp_dense: Group  # the next-token block, which only a speculator loads
    mtp_experts: Group

    @property
    def bound_bytes(self) -> int:
        """The engine's bound over the whole table."""
        return sum(g.bound_bytes for g in (self.dense, self.experts, self.mtp_dense, self.mtp_experts))

    @property
    def bound_without_towers(self) -> int:
        """The engine's bound over everything but ``*_exps`` tensors."""
        return self.dense.bound_bytes + self.mtp_dense.bound_bytes


def expanded_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor written out as bf16."""
    return tensor.elements * EXPANDED


def bound_bytes(tensor: Tensor, settings: Settings) -> int:
    """Return what the fit check charges: the file's bytes or bf16, the smaller; bf16 exactly where nothing is kept."""
    if not settings.keep_quant and tensor.type_name not in _FLOATS:
        return expanded_bytes(tensor)
    if not (settings.keep_quant or settings.keep_f16 or settings.nvfp4):
        return expanded_bytes(tensor)
    return min(tensor.nbytes, expanded_bytes(tensor)) if tensor.sized else tensor.nbytes


def recurrent_layers(model: Checkpoint) -> frozenset[int]:
    """Return the blocks with a recurrent state instead of a KV cache."""
    return frozenset(t.layer for t in model.tensors if t.role is Role.RECURRENT and t.layer is not None)


def attention_layers(model: Checkpoint, *, speculating: bool) -> int:
    """Return how many layers keep a KV cache; the next-token block counts when a speculator runs."""
    first = first_mtp_block(model.integer("block_count"), model.integer("nextn_predict_layers"))
    recurrent = recurrent_layers(model)
    layers = {
        t.layer for t in model.tensors
        if t.layer is not None and (".attn_k." in t.name or ".attn_kv_a_mqa." in t.name or (".attn_qkv." in t.name and t.layer not in recurrent))
    }  # fmt: skip
    return len([n for n in layers if speculating or first is None or n < first])


def expands(tensor: Tensor, recurrent: frozenset[int], settings: Settings) -> bool:
    """Whether the loader writes a tensor out as bf16 instead of keeping the file's encoding.

    The joint projection and the output of a gated delta net are transformed, an embedding is kept only as
    F16; with keep-quant off every quantised tensor is written out.
    """
    if tensor.type_name in _FLOATS:
        return tensor.type_name == "F16" and not settings.keep_f16
    if not settings.keep_quant:
        return True
    if tensor.role in (Role.EMBEDDING, Role.LAYER_EMBEDDING):
        return True
    return tensor.layer in recurrent and (".attn_qkv." in tensor.name or ".ssm_out." in tensor.name)


def piece_bytes(tensor: Tensor, recurrent: frozenset[int], settings: Settings) -> int:
    """Return what one tensor takes where it is computed on."""
    return expanded_bytes(tensor) if expands(tensor, recurrent, settings) else tensor.nbytes


def weights_of(model: Checkpoint, settings: Settings) -> Weights:
    """Sort a model's tensor table."""
    first = first_mtp_block(model.integer("block_count"), model.integer("nextn_predict_layers"))
    recurrent = recurrent_layers(model)
    fates: dict[tuple[bool, bool], list[Tensor]] = {(expert, mtp): [] for expert in (False, True) for mtp in (False, True)}
    for tensor in model.tensors:
        mtp = tensor.role is Role.MTP or (first is not None and tensor.layer is not None and tensor.layer >= first)
        fates[tensor.role is Role.EXPERT, mtp].append(tensor)

    def group(rows: list[Tensor]) -> Group:
        own = [t for t in rows if expands(t, recurrent, settings)]
        written, in_file = sum(expanded_bytes(t) for t in own), sum(t.nbytes for t in own)
        return Group(
            tensors=tuple(rows), bound_bytes=sum(bound_bytes(t, settings) for t in rows),
            held_bytes=sum(t.nbytes for t in rows) - in_file + written, own_bytes=written, own_file_bytes=in_file,
        )  # fmt: skip

    return Weights(
        dense=group(fates[False, False]), experts=group(fates[True, False]),
        mtp_dense=group(fates[False, True]), mtp_experts=group(fates[True, True]),
    )  # fmt: skip


def slice_bytes(model: Checkpoint) -> int:
    """Return the largest gate, up or down slice of one expert in the first layer that has experts."""
    experts = model.integer("expert_count")
    towers = [t for t in model.tensors if t.role is Role.EXPERT and t.layer is not None]
    if not experts or not towers:
        return 0
    first = min(t.layer for t in towers if t.layer is not None)
    return max(t.nbytes // experts for t in towers if t.layer == first)


def kv_block_bytes(model: Checkpoint, settings: Settings) -> int:
    """Return the bytes of one block over all attention layers.

    Ordinary: block_size x Hkv x (Dk + Dv) x element. Latent: block_size x (rank + rope) x element, once.
    """
    element = 4 if settings.kv_f32 else KV_BYTES.get(settings.kv_type, 2)
    layers = attention_layers(model, speculating=settings.speculation == "mtp")
    rank = model.integer("attention.kv_lora_rank")
    if rank:
        per_token = rank + model.integer("rope.dimension_count")
    else:
        heads = model.integer("attention.head_count")
        head = model.integer("embedding_length") // heads if heads else 0
        per_head = model.integer("attention.key_length", head) + model.integer("attention.value_length", head)
        per_token = model.integer("attention.head_count_kv", heads) * per_head
    return layers * settings.block_size * per_token * element


def state_bytes(model: Checkpoint, settings: Settings) -> tuple[int, int, int]:
    """Return the recurrent state, certain, likely and at most: both parts bf16; the large one f32; both f32.

    Per linear layer and slot: conv_dim x (kernel - 1) + Hv x Dv x Dk elements, conv_dim = 2 x key_dim +
    value_dim; slots = sequences x (1 + drafted tokens).
    """
    first = first_mtp_block(model.integer("block_count"), model.integer("nextn_predict_layers"))
    layers = len([n for n in recurrent_layers(model) if first is None or n < first])
    value, heads, state = model.integer("ssm.inner_size"), model.integer("ssm.time_step_rank"), model.integer("ssm.state_size")
    if not layers or not value:
        return 0, 0, 0
    channels = value + 2 * model.integer("ssm.group_count") * state
    conv = channels * max(0, model.integer("ssm.conv_kernel", 4) - 1)
    matrix = heads * (value // heads) * state if heads else value * state
    slots = settings.sequences * (1 + (settings.window if settings.speculation == "mtp" else 0))
    low, middle, high = (layers * slots * (conv * a + matrix * b) for a, b in ((2, 2), (2, 4), (4, 4)))
    if settings.gdn_bf16 is True:
        return low, low, low
    if settings.gdn_bf16 is False:
        return high, high, high
    return low, middle, high


def batched_tokens(model: Checkpoint, settings: Settings, tokens: int) -> int:
    """Return the tokens of one step: as asked, else 2048 for dense models, 4096 or 8192 for experts, never above what can be asked."""
    automatic = 2048 if not model.integer("expert_count") else 8192 if settings.sequences >= 32 else 4096
    wanted = max(settings.batch or automatic, settings.sequences)
    return min(wanted, max(1, tokens * settings.sequences))


def scratch_bytes(model: Checkpoint, settings: Settings, tokens: int) -> int:
    """Return an estimate of one step's activations: a few rows per token and the logits of every sequence.

    The engine's pool rounds up and never gives back; there is no formula for it, so this is an estimate.
    """
    width = model.integer("embedding_length")
    heads = model.integer("attention.head_count") * model.integer("attention.key_length", 128)
    inner = max(model.integer("feed_forward_length"), model.integer("expert_used_count") * model.integer("expert_feed_forward_length"))
    per_token = 4 * width + 3 * heads + 3 * inner + 2 * model.integer("ssm.inner_size")
    vocabulary = model.integer("vocab_size") or model.array_lengths.get("tokenizer.ggml.tokens", 0)
    return batched_tokens(model, settings, tokens) * per_token * EXPANDED + settings.sequences * vocabulary * 4
