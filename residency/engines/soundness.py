"""What no engine can load: hyper-parameters out of range, and tensor tables that contradict them.

Every bound is an engine's own limit or far above what any model has; it is looked at before a formula runs, so that a
hostile header neither makes the formulas allocate nor turns bytes negative. Contradictions are looked for only where an
architecture is plain: the shapes restated here are those llama.cpp 0.5.0 demands (``src/models/*.cpp``, load_arch_tensors:
"has wrong shape", "wrong number of tensors", "missing tensor"), and hold in every header it was measured with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from residency.budget import Remark
from residency.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.checkpoint.model import Checkpoint

MAX_LAYERS, MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
#: Streams and loops drive the size of a graph; models have up to 8.
MAX_STREAMS = 64
#: No dimension, head count or context of a real model is larger.
MAX_DIMENSION = 2**31 - 1
#: The engines' word for "no window" is the largest 32-bit number.
MAX_WINDOW = 2**32 - 1

#: Numeric keys that formulas use; each must be a whole number from 0 to this when present.
NUMBERS = {
    "block_count": MAX_LAYERS, "nextn_predict_layers": MAX_LAYERS, "leading_dense_block_count": MAX_LAYERS,
    "expert_count": MAX_EXPERTS, "expert_used_count": MAX_EXPERTS, "expert_shared_count": MAX_EXPERTS,
    "embedding_length": MAX_DIMENSION, "context_length": MAX_DIMENSION, "vocab_size": MAX_DIMENSION, "features_length": MAX_DIMENSION,
    "expert_feed_forward_length": MAX_DIMENSION, "expert_shared_feed_forward_length": MAX_DIMENSION,
    "attention.key_length": MAX_DIMENSION, "attention.value_length": MAX_DIMENSION,
    "attention.key_length_mla": MAX_DIMENSION, "attention.value_length_mla": MAX_DIMENSION,
    "attention.key_length_swa": MAX_DIMENSION, "attention.value_length_swa": MAX_DIMENSION,
    "attention.kv_lora_rank": MAX_DIMENSION, "attention.q_lora_rank": MAX_DIMENSION,
    "attention.sliding_window": MAX_WINDOW, "attention.shared_kv_layers": MAX_LAYERS, "num_loops": MAX_STREAMS,
    "ssm.state_size": MAX_DIMENSION, "ssm.inner_size": MAX_DIMENSION, "ssm.conv_kernel": MAX_DIMENSION,
    "ssm.group_count": MAX_DIMENSION, "ssm.time_step_rank": MAX_DIMENSION, "full_attention_interval": MAX_LAYERS,
    "attention.indexer.key_length": MAX_DIMENSION, "attention.indexer.head_count": MAX_DIMENSION,
    "attention.indexer.top_k": MAX_DIMENSION, "attention.indexer.kpool": MAX_DIMENSION, "rope.dimension_count": MAX_DIMENSION,
    "wkv.head_size": MAX_DIMENSION, "token_shift_count": MAX_DIMENSION, "shortconv.l_cache": MAX_DIMENSION,
    "kda.head_dim": MAX_DIMENSION, "hyper_connection.count": MAX_STREAMS, "ple.conv_kernel": MAX_DIMENSION, "ple.ngram_size": MAX_DIMENSION,
}  # fmt: skip
#: Keys that may be one number or one per layer, with their bound; an array has an entry for every layer.
PER_LAYER = {"attention.head_count": MAX_DIMENSION, "attention.head_count_kv": MAX_DIMENSION, "feed_forward_length": MAX_DIMENSION}
#: Keys that may be one number or a list of any length.
LISTS = {
    "attention.sliding_window_pattern": MAX_DIMENSION, "attention.compress_ratios": MAX_DIMENSION, "attention.indexer.types": MAX_DIMENSION,
    "attention.recurrent_layers": MAX_DIMENSION, "expert_used_count": MAX_EXPERTS, "ple.layers": MAX_LAYERS,
}  # fmt: skip
#: Entries of a list: one per layer, or one per layer and stream.
MAX_ENTRIES = MAX_LAYERS * MAX_STREAMS

#: Architectures whose tables are as plain as ``contradictions`` takes them to be.
PLAIN = frozenset(
    ["afmoe", "baichuan", "bailingmoe2", "command-r", "cohere2moe", "dbrx", "deepseek", "deepseek2", "ernie4_5-moe", "exaone-moe", "gemma2", "gemma3", "gpt-oss", "gptneox", "granite", "granite_swa", "grok", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "internlm2", "jais", "jais2", "laguna", "llama", "mamba", "mamba2", "mellum", "minicpm", "minimax-m2", "mistral3", "mpt", "olmo2", "pangu-embedded", "phi3", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vl", "qwen3vlmoe", "qwen4exp", "seed_oss", "smollm3", "starcoder", "starcoder2", "xverse"]
)
#: Of these, the query projection carries a gate beside the queries.
GATED = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})


def refuse(code: str, message: str) -> Remark:
    """Return the remark that the engine refuses the model file."""
    return Remark(kind="impossible", code=code, message=message, knob="model.path")


def refusals(checkpoint: Checkpoint) -> tuple[Remark, ...]:
    """Return why no engine loads the file; empty when one would. Depends on the file alone."""
    return tuple(bad_numbers(checkpoint)) or tuple(contradictions(checkpoint))


def whole(value: Any, most: int) -> bool:
    """Whether a metadata value is a whole number from 0 to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _listed(value: Any, most: int) -> bool:
    return whole(value, most) or isinstance(value, bool)


def bad_numbers(checkpoint: Checkpoint) -> Iterator[Remark]:
    """Yield a refusal for every hyper-parameter that is no number in its range."""
    arch = checkpoint.architecture
    for key, most in NUMBERS.items():
        value = checkpoint.hparam(key)
        if value is None or whole(value, most) or (isinstance(value, tuple) and key in LISTS):
            continue
        what = f"a list of {len(value)} values" if isinstance(value, tuple) else shown(value)
        yield refuse("bad-number", f"{clean(arch)}.{key} is {what}; a whole number up to {most} is expected")
    layers = checkpoint.hparam("block_count")
    for key, most in PER_LAYER.items():
        value = checkpoint.hparam(key)
        if value is None:
            continue
        values = value if isinstance(value, tuple) else (value,)
        if len(values) > MAX_ENTRIES or not all(whole(v, most) for v in values):
            yield refuse("bad-number", f"{clean(arch)}.{key} is {shown(value)}; whole numbers up to {most} are expected")
        elif isinstance(value, tuple) and isinstance(layers, int) and len(value) < layers:
            yield refuse("short-array", f"{clean(arch)}.{key} has {len(value)} entries for {layers} layers")
    for key, most in LISTS.items():
        value = checkpoint.hparam(key)
        if value is None or (key in NUMBERS and not isinstance(value, tuple)):
            continue
        values = value if isinstance(value, tuple) else (value,)
        if len(values) > MAX_ENTRIES or not all(_listed(v, most) for v in values):
            yield refuse("bad-number", f"{clean(arch)}.{key} is {shown(value)}; up to {MAX_ENTRIES} whole numbers are expected")


def shown(value: Any) -> str:
    """Return a metadata value for messages, at most 40 characters of it."""
    return f"{clean(repr(value[:8] if isinstance(value, tuple) else value)):.40}"


def contradictions(checkpoint: Checkpoint) -> Iterator[Remark]:
    """Yield where the tensor table is not that of the hyper-parameters; nothing for a file that is faulty already."""
    if any(fault.fatal for fault in checkpoint.faults):
        return
    empty = next((t for t in checkpoint.tensors if 0 in t.shape), None)
    if empty is not None:
        yield refuse("empty-tensor", f"{clean(empty.name)} has a dimension of 0: {list(empty.shape)}")
    if checkpoint.architecture not in PLAIN:
        return
    yield from _blocks(checkpoint)
    wrong = next(_shapes(checkpoint), None)  # one says it: the same number is wrong in every block
    if wrong is not None:
        yield wrong


def _blocks(checkpoint: Checkpoint) -> Iterator[Remark]:
    arch, claimed = checkpoint.architecture, checkpoint.integer("block_count")
    held = {t.layer for t in checkpoint.tensors if t.layer is not None and t.name.startswith("blk.")}
    trunk = claimed - checkpoint.integer("nextn_predict_layers")
    beyond = max(held, default=-1)
    if beyond >= claimed:
        yield refuse("wrong-block-count", f"{arch}.block_count is {claimed}, and there are tensors of block {beyond}: the engine finds more tensors than it expects")
    absent = next((i for i in range(trunk) if i not in held), None)
    if absent is not None:
        yield refuse("wrong-block-count", f"{arch}.block_count is {claimed}, and block {absent} has no tensors")
    hyper = "output_hc_norm.weight" in checkpoint.by_name  # several residual streams end in a norm of their own
    for name in ("token_embd.weight", *(() if hyper else ("output_norm.weight",))):
        if name not in checkpoint.by_name:
            yield refuse("missing-tensor", f"the tensor {name} is missing")


def _shapes(checkpoint: Checkpoint) -> Iterator[Remark]:
    arch, number = checkpoint.architecture, checkpoint.integer
    width, experts = number("embedding_length"), number("expert_count")
    count = number("block_count") - number("nextn_predict_layers")  # next-token blocks may be of another making

    def layered(key: str, default: list[int]) -> list[int]:
        value = checkpoint.hparam(key)
        if isinstance(value, tuple):
            return [int(v) for v in value[:count]]
        return [int(value)] * count if isinstance(value, int) else default

    heads = layered("attention.head_count", [0] * count)
    heads_kv = layered("attention.head_count_kv", heads)
    inner = layered("feed_forward_length", [0] * count)
    first = heads[0] if heads else 0
    own_key, own_value = (number(f"attention.{part}_length", width // first if first else 0) for part in ("key", "value"))
    keys, values = {own_key}, {own_value}
    for kind in ("swa", "mla"):  # windowed layers, and full heads where the plain key is the cached latent
        keys.add(number(f"attention.key_length_{kind}", own_key))
        values.add(number(f"attention.value_length_{kind}", own_value))

    def wrong(name: str, shape: tuple[int, ...], expected: set[tuple[int, ...]], why: str) -> Remark:
        wanted = " or ".join(str(list(e)) for e in sorted(expected))
        return refuse("wrong-shape", f"{name} has the shape {list(shape)}; by {why} it is {wanted}")

    table = checkpoint.by_name
    embedding = table.get("token_embd.weight")
    if embedding is not None and embedding.shape[:1] != (width,):
        yield wrong(embedding.name, embedding.shape, {(width, *embedding.shape[1:])}, f"{arch}.embedding_length")
    for i in range(count):
        times = (1, 2) if arch in GATED else (1,)
        laws: tuple[tuple[str, set[tuple[int, ...]], str], ...] = (
            ("attn_q", {(width, heads[i] * k * n) for k in keys for n in times}, "attention.head_count and attention.key_length"),
            ("attn_k", {(width, heads_kv[i] * k) for k in keys}, "attention.head_count_kv and attention.key_length"),
            ("attn_v", {(width, heads_kv[i] * v) for v in values}, "attention.head_count_kv and attention.value_length"),
            ("ffn_down", {(inner[i], width)}, "feed_forward_length"),
            ("ffn_gate_inp", {(width, experts)}, "expert_count"),
        )
        for name, expected, why in laws:
            tensor = table.get(f"blk.{i}.{name}.weight")
            if tensor is not None and tensor.shape not in expected:
                yield wrong(tensor.name, tensor.shape, expected, f"embedding_length, {why}")
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"):
            tensor = table.get(f"blk.{i}.{name}.weight")
            if tensor is not None and tensor.shape[2:] != (experts,):
                yield wrong(tensor.name, tensor.shape, {(*tensor.shape[:2], experts)}, "expert_count")
