"""What a tensor is for, from its name alone: tables, first match wins.

Names are those of llama.cpp 0.5.0 (llama-arch.cpp, clip-impl.h) and of the ``gguf`` package's constants.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from .model import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Tensors inside a block: pattern over what follows ``blk.N.``, without the suffix.
_BLOCK_TABLE: tuple[tuple[str, Role], ...] = (
    (r"nextn\.", Role.MTP),
    (r"ffn_norm_exps$", Role.NORM),
    (r".*_(ch)?exps$", Role.EXPERT),
    (r".*_shexp$", Role.SHARED_EXPERT),
    (r"ffn_gate_inp|ffn_gate_tid2eid|exp_probs_b", Role.ROUTER),
    (r"ssm_|time_mix|shortconv\.", Role.RECURRENT),
    # Hyper-connection and per-layer-embedding mixers carry norms of their own; they stay with their part.
    (r"hc_attn_", Role.ATTENTION),
    (r"hc_ffn_|ple_", Role.FEED_FORWARD),
    (r"(.*[_.])?norm(_\d+)?$|layer_output_scale$|attn_sub_norm|ffn_sub_norm", Role.NORM),
    (r"(vis_|cross_)?attn_|indexer", Role.ATTENTION),
    (r"(vis_)?(ffn|down|gate|up)([_.]|$)|channel_mix_|laurel_|altup_|inp_gate$|proj$", Role.FEED_FORWARD),
)

#: Tensors outside blocks: pattern over the whole name, without the suffix.
_GLOBAL_TABLE: tuple[tuple[str, Role], ...] = (
    (r"a\.|mm\.a\.", Role.AUDIO),
    (r"v\.|mm\.|mm\d|resampler\.|model\.image_newline|adapter\.", Role.VISION),
    (r"per_layer_token_embd$", Role.LAYER_EMBEDDING),
    (r"(token_embd|position_embd|token_types)$", Role.EMBEDDING),
    (r"nextn\.|mtp\.|fc$|d2t$", Role.MTP),
    (r"output_hc_", Role.OUTPUT),
    (r"(.*[_.])?norm$", Role.NORM),
    (r"rope_f", Role.ATTENTION),
    # A codec's decoder (wavtokenizer): convolutions around the transformer.
    (r"posnet\.|convnext\.|conv1d", Role.AUDIO),
    (r"output|cls|dense_\d|altup_|per_layer_model_proj", Role.OUTPUT),
)


def _compile(table: Iterable[tuple[str, Role]]) -> tuple[tuple[re.Pattern[str], Role], ...]:
    return tuple((re.compile(pattern), role) for pattern, role in table)


_BLOCK = _compile(_BLOCK_TABLE)
_GLOBAL = _compile(_GLOBAL_TABLE)
_IN_BLOCK = re.compile(r"(?:enc\.|dec\.)?blk\.(\d{1,6})\.(.+)$")
_SUFFIX = re.compile(r"\.(?:weight|bias|scale|input_scale)(?:\.\d+)?$")


@lru_cache(maxsize=4096)
def _look_up(base: str, in_block: bool) -> Role:
    stem = _SUFFIX.sub("", base)
    for pattern, role in _BLOCK if in_block else _GLOBAL:
        if pattern.match(stem):
            return role
    return Role.OTHER


def role_and_layer(name: str, first_mtp_block: int | None = None) -> tuple[Role, int | None]:
    """Return the role and the block index of a tensor.

    Args:
        name: the tensor's name as stored.
        first_mtp_block: index of the first next-token block (``block_count - nextn_predict_layers``), or None when
            the model has none. Every tensor from there on is MTP, except expert towers.
    """
    inside = _IN_BLOCK.match(name)
    if inside is None:
        return _look_up(name, in_block=False), None
    layer = int(inside[1])
    role = _look_up(inside[2], in_block=True)
    if first_mtp_block is not None and layer >= first_mtp_block and role is not Role.EXPERT:
        role = Role.MTP
    return role, layer


def first_mtp_block(block_count: object, nextn_layers: object) -> int | None:
    """Return the index of the first next-token block from the two hyperparameters, None when there is none."""
    if not isinstance(block_count, int) or not isinstance(nextn_layers, int) or nextn_layers <= 0:
        return None
    return max(0, block_count - nextn_layers)
