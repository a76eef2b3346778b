"""The memory module: keys, values and recurrent state, in bytes per layer.

Laws restated from llama.cpp 0.5.0 (commit 0c1e570): ``src/llama-context.cpp`` (effective context),
``src/llama-kv-cache*.cpp``, ``src/llama-memory-recurrent.cpp``, ``src/llama-memory-hybrid*.cpp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .settings import CACHE_TYPES

if TYPE_CHECKING:
    from .hparams import HyperParameters
    from .settings import Settings

#: Cells are allocated in multiples of this many tokens.
CELL_STEP = 256
#: deepseek4 compresses every 4th or every 128th token (``src/llama-kv-cache-dsv4.h``).
SPARSE_RATIO, HEAVY_RATIO = 4, 128


def pad(size: int, step: int) -> int:
    """Round up to a multiple."""
    return -(-size // step) * step


def quantised_bytes(width: int, rows: int) -> int:
    """Bytes of activations quantised to 8 bits for one matrix product (``ggml/src/ggml-cuda/quantize.cu``: 36 bytes per 32)."""
    return rows * pad(width, 512) * 36 // 32


def row_bytes(type_name: str, elements: int) -> int:
    """Bytes of a row of a cache type; elements must be whole blocks (the engine asserts it)."""
    block, size = CACHE_TYPES[type_name]
    return elements // block * size


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The effective context, after the engine's rounding."""

    n_ctx: int  # cells over all sequences
    n_ctx_seq: int  # cells of one stream
    streams: int
    sequences: int
    n_batch: int
    n_ubatch: int
    n_outputs: int  # rows of logits in a reserved graph
    flash: bool
    window_cells: int  # cells of one stream of the windowed cache
    type_k: str
    type_v: str


def resolve(hyper: HyperParameters, settings: Settings, *, flash: bool) -> Resolved:
    """Return the effective context (``src/llama-context.cpp``).

    ``n_ctx`` is rounded up to 256, then per sequence again: three slots of 5000 tokens give 5376 cells.
    """
    sequences = max(settings.n_seq, 1)
    asked = settings.n_ctx or hyper.context_train
    batch = min(asked, settings.n_batch) if hyper.causal else settings.n_batch
    ubatch = min(batch, settings.n_ubatch or batch)
    step = CELL_STEP if flash else settings.plain_cells
    total = pad(asked, step)
    if settings.unified:
        each, streams = total, 1
    else:
        each, streams = pad(total // sequences, step), sequences
        total = each * sequences
    rows = batch if settings.outputs == "batch" or settings.embeddings else sequences * settings.n_outputs_per_seq
    tokens = min(total, ubatch)
    share = sequences if settings.unified and hyper.memory != "dsv4" else 1
    window_cells = each if settings.swa_full else min(each, pad(min(each, hyper.window * share + ubatch), step))
    return Resolved(
        n_ctx=total, n_ctx_seq=each, streams=streams, sequences=sequences, n_batch=batch, n_ubatch=ubatch,
        n_outputs=min(tokens, rows, batch), flash=flash, window_cells=window_cells,
        type_k=settings.type_k, type_v=settings.type_v,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """Bytes of one layer's cache tensors on a device with the given rules."""

    kv: int
    state: int


def _tensor(type_name: str, elements: int, cells: int, align: int, quant_row: int) -> int:
    """Bytes a cache tensor takes: rows, the pad of quantised rows, the buffer's alignment."""
    block, size = CACHE_TYPES[type_name]
    total = elements // block * size * cells
    if quant_row and block > 1 and total and elements % quant_row:
        total += (quant_row - elements % quant_row) // block * size
    return pad(total, align)


def layer_caches(
    hyper: HyperParameters, resolved: Resolved, *, rollback: int, align: int, quant_row: int, latent_values: bool = False, per_head: bool = False
) -> tuple[LayerCache, ...]:
    """Return every layer's cache bytes. ``rollback`` is the number of spare recurrent states.

    ``align`` and ``quant_row`` are the device's buffer rules (see ``layout.BUFFER_RULES``).
    ``latent_values``: a latent cache keeps a row of values beside its keys. ``per_head``: the partial row of quantised
    keys is that of one head, and values have none.
    """
    found = []
    known: dict[tuple[object, ...], LayerCache] = {}
    widest = hyper.value_row_max
    streams = resolved.sequences if hyper.memory == "dsv4" else resolved.streams
    type_k, type_v = resolved.type_k, resolved.type_v
    planes = max(resolved.sequences, 1) * (1 + rollback)
    for i in range(hyper.layers_all):
        key = (
            hyper.attends[i], hyper.windowed[i], hyper.heads_kv[i], hyper.recurrent[i], hyper.indexed[i],
            hyper.compress[i], hyper.state_extra[i],
        )  # fmt: skip
        cache = known.get(key)
        if cache is None:
            kv = state = 0
            if hyper.attends[i]:
                cells = (resolved.window_cells if hyper.windowed[i] else resolved.n_ctx_seq) * streams
                heads = max(hyper.heads_kv[i], 1) if per_head else 1
                kv += _tensor(type_k, hyper.key_row(i) // heads, cells * heads, align, quant_row)
                if (not hyper.mla or latent_values) and hyper.memory != "dsv4":
                    kv += _tensor(type_v, hyper.value_row(i) if resolved.flash else widest, cells, align, 0 if per_head else quant_row)
            if hyper.recurrent[i]:
                for floats in (hyper.state_r, hyper.state_s, hyper.state_extra[i]):
                    state += pad(4 * floats * planes, align)
            if hyper.memory in ("dsa", "dsa-window", "msa", "hybrid-indexer") and hyper.indexed[i] and hyper.indexer_key:
                cells = resolved.n_ctx_seq * streams
                kv += _tensor(type_k, hyper.indexer_key, cells, align, quant_row)
                if hyper.memory == "msa":  # this indexer cache is not key-only: one value head beside it
                    kv += _tensor(type_v, hyper.head_v, cells, align, quant_row)
            if hyper.memory == "dsv4":
                kv, state = _compressed(hyper, resolved, i, kv, planes, align, quant_row)
            cache = known[key] = LayerCache(kv=kv, state=state)
        found.append(cache)
    return tuple(found)


def _compressed(hyper: HyperParameters, resolved: Resolved, layer: int, kv: int, planes: int, align: int, quant_row: int) -> tuple[int, int]:
    """Add deepseek4's compressed caches and compressor state (``src/llama-kv-cache-dsv4.cpp``)."""
    state = 0
    ratio = hyper.compress[layer]
    if ratio in (SPARSE_RATIO, HEAVY_RATIO):
        cells = pad(-(-resolved.n_ctx_seq // ratio), CELL_STEP) * resolved.sequences
        kv += _tensor(resolved.type_k, hyper.head_k * hyper.heads_kv[layer], cells, align, quant_row)
        length, width = (2 * ratio, 2 * hyper.head_k) if ratio == SPARSE_RATIO else (ratio, hyper.head_k)
        state += 2 * pad(4 * length * width * planes, align)
        if ratio == SPARSE_RATIO:
            kv += _tensor(resolved.type_k, hyper.indexer_key, cells, align, quant_row)
            state += 2 * pad(4 * length * 2 * hyper.indexer_key * planes, align)
    return kv, state
