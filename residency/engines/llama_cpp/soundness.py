"""What llama.cpp refuses in a file before it places anything: names, counts and types it does not take.

Limits from ``src/llama-hparams.h`` and ``src/llama-model-loader.cpp``, llama.cpp 0.5.0 (0c1e570).
Checked before any formula runs, so that a hostile header cannot make the formulas allocate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.budget import Remark
from residency.engines.base import version_in

from . import history
from .hparams import ENGINE_ARCHITECTURES, derived

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from residency.checkpoint.model import Checkpoint

MAX_LAYERS, MAX_EXPERTS, MAX_SEQUENCES = 512, 1024, 256
#: No dimension, head count or context of a real model is larger.
MAX_DIMENSION = 2**31 - 1

#: Numeric keys the formulas use; each must be a number in range when present.
_NUMBERS = {
    "block_count": MAX_LAYERS, "nextn_predict_layers": MAX_LAYERS, "leading_dense_block_count": MAX_LAYERS,
    "expert_count": MAX_EXPERTS, "expert_used_count": MAX_EXPERTS, "expert_shared_count": MAX_EXPERTS,
    "embedding_length": MAX_DIMENSION, "context_length": MAX_DIMENSION, "vocab_size": MAX_DIMENSION,
    "expert_feed_forward_length": MAX_DIMENSION, "expert_shared_feed_forward_length": MAX_DIMENSION,
    "attention.key_length": MAX_DIMENSION, "attention.value_length": MAX_DIMENSION,
    "attention.key_length_mla": MAX_DIMENSION, "attention.value_length_mla": MAX_DIMENSION,
    "attention.key_length_swa": MAX_DIMENSION, "attention.value_length_swa": MAX_DIMENSION,
    "attention.kv_lora_rank": MAX_DIMENSION, "attention.q_lora_rank": MAX_DIMENSION,
    "attention.sliding_window": 2**32 - 1, "attention.shared_kv_layers": MAX_LAYERS, "num_loops": MAX_LAYERS,
    "ssm.state_size": MAX_DIMENSION, "ssm.inner_size": MAX_DIMENSION, "ssm.conv_kernel": MAX_DIMENSION,
    "ssm.group_count": MAX_DIMENSION, "ssm.time_step_rank": MAX_DIMENSION, "full_attention_interval": MAX_LAYERS,
    "attention.indexer.key_length": MAX_DIMENSION, "attention.indexer.head_count": MAX_DIMENSION,
    "attention.indexer.top_k": MAX_DIMENSION, "rope.dimension_count": MAX_DIMENSION,
    "wkv.head_size": MAX_DIMENSION, "token_shift_count": MAX_DIMENSION, "shortconv.l_cache": MAX_DIMENSION,
    "kda.head_dim": MAX_DIMENSION, "hyper_connection.count": MAX_DIMENSION,
}  # fmt: skip
#: Keys that may be one number or one per layer.
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
#: A model of any kind has these.
_NEEDED = ("block_count", "embedding_length")

#: Since when a tensor type exists (``ggml/include/ggml.h``); a lower bound for the newest.
TYPE_SINCE = {34: "0.0.3642", 35: "0.0.3642", 39: "0.0.6096", 40: "0.0.7600", 41: "0.0.7600", 42: "0.0.7600"}


#: Tensor type ids a fork added; their sizes are the gaps between offsets (``ggml.h`` of ik_llama.cpp: IQ3_K 138, IQ3_K_R4 338, ...).
FORK_TYPES: Mapping[str, range] = {history.IK: range(97, 400)}


def refusals(checkpoint: Checkpoint, version: str, engine: str = history.UPSTREAM) -> tuple[Remark, ...]:
    """Return why the engine would refuse the file; empty when it would not. Depends on the file and engine alone."""
    store = derived(checkpoint)
    key = ("refusals", engine, version)
    if key not in store:
        store[key] = _refusals(checkpoint, version, engine)
    found: tuple[Remark, ...] = store[key]
    return found


def _refusals(checkpoint: Checkpoint, version: str, engine: str) -> tuple[Remark, ...]:
    found = [*_architecture(checkpoint, version, engine)]
    if not found:
        found += _numbers(checkpoint)
    found += _types(checkpoint, version, engine)
    return tuple(found)


def _refuse(code: str, message: str) -> Remark:
    return Remark(kind="impossible", code=code, message=message, knob="model.path")


def _architecture(checkpoint: Checkpoint, version: str, engine: str) -> Iterator[Remark]:
    arch = checkpoint.architecture
    if not arch:
        yield _refuse("no-architecture", "the model file has no key general.architecture, so the engine cannot tell what it is")
    elif arch == "clip":
        yield _refuse("projector-as-model", "this file is a projector (general.architecture is clip); it belongs to --mmproj, not to --model")
    elif arch not in ENGINE_ARCHITECTURES:
        missing = [key for key in _NEEDED if checkpoint.hparam(key) is None]
        if missing:
            yield _refuse(
                "unknown-architecture",
                f"general.architecture is {arch!r}, which {engine} {version} does not know, and the file has no {arch}.{missing[0]}",
            )
    else:
        since = history.ARCHITECTURE_SINCE.get(arch) if engine == history.UPSTREAM else None
        if since is not None and not version_in(version, since.since, None):
            build = (since.since or "").removeprefix("0.0.")
            text = f"the architecture {arch} can be loaded since build {build}; this is {version.removeprefix('0.0.')}"
            yield _refuse("architecture-too-new", text)
        for key in _NEEDED:
            if checkpoint.hparam(key) is None:
                yield _refuse("missing-key", f"the model file has no key {arch}.{key}")
                return


def _numbers(checkpoint: Checkpoint) -> Iterator[Remark]:
    arch = checkpoint.architecture
    for key, most in _NUMBERS.items():
        value = checkpoint.hparam(key)
        if value is not None and not isinstance(value, tuple) and not _whole(value, most):
            yield _refuse("bad-number", f"{arch}.{key} is {value!r:.40}; a whole number up to {most} is expected")
    layers = checkpoint.hparam("block_count")
    for key in _PER_LAYER:
        value = checkpoint.hparam(key)
        values = value if isinstance(value, tuple) else (value,)
        if value is None:
            continue
        if not all(_whole(v, MAX_DIMENSION) for v in values):
            yield _refuse("bad-number", f"{arch}.{key} is {value!r:.40}; whole numbers are expected")
        elif isinstance(value, tuple) and isinstance(layers, int) and len(value) < layers:
            yield _refuse("short-array", f"{arch}.{key} has {len(value)} entries for {layers} layers")


def _whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _types(checkpoint: Checkpoint, version: str, engine: str) -> Iterator[Remark]:
    said: set[int] = set()
    for tensor in checkpoint.tensors:
        if tensor.type_id in said:
            continue
        if tensor.type_id in FORK_TYPES.get(engine, ()):
            continue
        since = TYPE_SINCE.get(tensor.type_id) if engine == history.UPSTREAM else None
        if not tensor.sized:
            said.add(tensor.type_id)
            yield _refuse(
                "unknown-tensor-type",
                f"{tensor.name} has the type {tensor.type_name} (id {tensor.type_id}), which {engine} {version} does not have",
            )
        elif since is not None and not version_in(version, since, None):
            said.add(tensor.type_id)
            yield _refuse(
                "tensor-type-too-new",
                f"{tensor.name} has the type {tensor.type_name} (id {tensor.type_id}), which {engine} {version} does not have yet",
            )
