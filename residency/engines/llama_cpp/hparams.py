"""Hyper-parameters as the engine reads them: heads per layer, windows, recurrent layers, cache family.

Shapes come from the metadata and from the tensor table. An architecture's *name* counts only where the engine itself
hard-codes something under that name; those facts are the tables below (llama.cpp 0.5.0, commit 0c1e570:
``src/models/*.cpp`` load_arch_hparams, ``src/llama-hparams.cpp``, ``src/llama-model.cpp`` create_memory,
``src/llama-arch.cpp``). Everything else works for a name the engine gains later.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from residency.checkpoint.model import Checkpoint

#: Which memory module the engine builds.
MemoryKind = Literal["none", "attention", "recurrent", "hybrid", "dsa", "dsa-window", "msa", "hybrid-indexer", "dsv4", "unknown"]

#: Every architecture the engine knows by name (``src/llama-arch.cpp``, LLM_ARCH_NAMES).
ENGINE_ARCHITECTURES = frozenset(
    ["clip", "llama", "llama4", "deci", "falcon", "grok", "gpt2", "gptj", "gptneox", "mpt", "baichuan", "starcoder", "refact", "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert", "bloom", "stablelm", "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3next", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen4exp", "phi2", "phi3", "phimoe", "plamo", "plamo2", "plamo3", "codeshell", "orion", "internlm2", "minicpm", "minicpm3", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4-assistant", "gemma-embedding", "starcoder2", "mamba", "mamba2", "maple", "jamba", "falcon-h1", "xverse", "command-r", "cohere2", "cohere2moe", "dbrx", "olmo", "olmo2", "olmoe", "muse-glimmer", "openelm", "arctic", "deepseek", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4", "chatglm", "glm4", "glm4moe", "glm-dsa", "bitnet", "t5", "t5encoder", "jais", "jais2", "nemotron", "nemotron_h", "nemotron_h_moe", "exaone", "exaone4", "exaone-moe", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "granite", "granitemoe", "granitehybrid", "graniteswitch", "granite_swa", "chameleon", "wavtokenizer-dec", "plm", "bailingmoe", "bailingmoe2", "bailingmoe3", "dots1", "dots3note", "arcee", "afmoe", "laguna", "ernie4_5", "ernie4_5-moe", "hunyuan-moe", "hunyuan-dense", "hunyuan_vl", "hy_v3", "hy_v4", "smollm3", "gpt-oss", "lfm2", "lfm2moe", "dream", "smallthinker", "llada", "llada-moe", "seed_oss", "grovemoe", "apertus", "minimax-01", "hrm_text", "minimax-m2", "minimax-m3", "cogvlm", "rnd1", "pangu-embedded", "mistral3", "eagle3", "dflash", "mistral4", "paddleocr", "mimo2", "step35", "spark2_5", "llama-embed", "maincoder", "kimi-linear", "kimi-k3", "glm5-next", "talkie", "mellum", "nanbeige", "qwen3tts", "pockettts"]
)

#: No cache at all (create_memory returns nothing), encoders included.
NO_CACHE = frozenset(
    ["bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert", "modern-bert", "gemma-embedding", "wavtokenizer-dec", "dream", "llada", "llada-moe", "rnd1", "t5encoder", "clip"]
)

#: Only state, no keys and values (llm_arch_is_recurrent).
RECURRENT_ONLY = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})

#: How a hybrid model says which layers are recurrent (llm_arch_is_hybrid and each load_arch_hparams).
#: kv-zero: head_count_kv is 0 there; list: attention.recurrent_layers, else every n-th layer is attention.
HYBRID_RULES: Mapping[str, tuple[Literal["kv-zero", "kv-and-ff-zero", "all", "list"], int]] = {
    "jamba": ("kv-zero", 0), "granitehybrid": ("kv-zero", 0), "plamo2": ("kv-zero", 0), "lfm2": ("kv-zero", 0),
    "lfm2moe": ("kv-zero", 0), "kimi-linear": ("kv-zero", 0), "kimi-k3": ("kv-zero", 0), "bailingmoe3": ("kv-zero", 0),
    "glm5-next": ("kv-zero", 0), "nemotron_h": ("kv-and-ff-zero", 0), "nemotron_h_moe": ("kv-and-ff-zero", 0),
    "falcon-h1": ("all", 0), "qwen3next": ("list", 4), "qwen35": ("list", 4), "qwen35moe": ("list", 4),
    "qwen4exp": ("list", 4), "minimax-01": ("list", 8),
}  # fmt: skip

#: Memory modules that only these names get (create_memory).
SPECIAL_MEMORY: Mapping[str, MemoryKind] = {
    "deepseek32": "dsa", "glm-dsa": "dsa", "hy_v4": "dsa", "dots3note": "dsa-window", "minimax-m3": "msa",
    "deepseek4": "dsv4", "glm5-next": "hybrid-indexer", "qwen4exp": "hybrid-indexer",
}  # fmt: skip

#: State rows that can be rolled back after a rejected draft (llm_arch_supports_rs_rollback).
ROLLBACK = frozenset(
    ["kimi-k3", "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "glm5-next", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe", "bailingmoe3"]
)

#: Flash attention is forced off (llama_init_from_model).
NO_FLASH_ATTENTION = frozenset({"grok"})

#: Positions are added, biased or not used, never rotated.
NO_ROTATION = frozenset(
    ["bloom", "mpt", "refact", "jais", "gpt2", "starcoder", "jamba", "nemotron_h", "nemotron_h_moe", "plamo2"]
)
#: Only layers with a sliding window rotate.
ROTATION_BY_WINDOW = frozenset({"cohere2", "cohere2moe", "exaone-moe", "maple", "muse-glimmer"})
#: Every so many layers one does not rotate: the last of each group, or the first (2nd value), of files with a window (3rd).
#: (llama4 scales the queries of those layers instead, which takes the same place.)
UNROTATED_LAYERS: Mapping[str, tuple[int, bool, bool]] = {
    "smollm3": (4, False, False), "afmoe": (4, False, False), "smallthinker": (4, True, True),
}  # fmt: skip
#: rope.scaling.finetuned says whether there is rotation at all.
ROTATION_BY_KEY = frozenset({"granite", "granitehybrid", "graniteswitch"})

#: Routers that do not divide the chosen experts' weights by their sum (build_moe_ffn), and those where the file says so.
NO_SUM = frozenset({"nomic-bert-moe", "deepseek", "jamba", "llada-moe", "llama4", "olmoe", "gpt-oss", "qwen2moe"})
SUM_BY_KEY = frozenset(
    ["afmoe", "bailingmoe", "bailingmoe2", "bailingmoe3", "cohere2moe", "deepseek2", "deepseek2-ocr", "mistral4", "deepseek32", "deepseek4", "dots1", "dots3note", "exaone-moe", "glm-dsa", "glm4moe", "glm5-next", "hy_v3", "hy_v4", "kimi-k3", "laguna", "minimax-m3", "nemotron_h", "nemotron_h_moe", "step35"]
)

#: Four positions per token (llama_model_rope_type), always or where the file divides the rotated dimensions into sections.
FOUR_POSITIONS = frozenset({"qwen2vl", "paddleocr", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen4exp", "qwen3tts"})
FOUR_POSITIONS_BY_SECTIONS = frozenset({"glm4", "glm4moe", "hunyuan_vl", "bailingmoe3"})

#: Keys that select the multi-head latent cache are read only here; elsewhere they are carried along unread.
MLA_READERS = frozenset(
    ["deepseek2", "deepseek32", "glm-dsa", "hy_v4", "mistral4", "kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next", "dots3note"]
)

#: Refused with --split-mode tensor (``src/llama-model.cpp``, llama_meta_device_get_split_state).
NO_TENSOR_SPLIT = frozenset(
    ["grok", "mpt", "plamo2", "minicpm3", "gemma3n", "mamba", "mamba2", "jamba", "falcon-h1", "olmo2", "olmoe", "deepseek2", "deepseek32", "hy_v4", "dots3note", "glm-dsa", "bitnet", "t5", "nemotron_h", "nemotron_h_moe", "granitehybrid", "minimax-01", "minimax-m2", "minimax-m3", "mistral4", "kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next", "qwen3tts", "qwen4exp"]
)


class Window(NamedTuple):
    """How an architecture uses a sliding window.

    period 0 needs the array ``attention.sliding_window_pattern``; otherwise that key (array or number) is optional.
    """

    period: int
    dense_first: bool = False
    size: int | None = None  # the engine's own value, where it has one
    forced: bool = False  # ``size`` replaces the file's value
    absent: bool = False  # a file without the key has no window


#: Sliding windows (load_swa_pattern calls). An engine architecture that is not here ignores the metadata.
WINDOWS: Mapping[str, Window] = {
    "afmoe": Window(4, absent=True), "cohere2": Window(4), "cohere2moe": Window(4, dense_first=True),
    "exaone4": Window(4, size=4096), "exaone-moe": Window(4, size=128), "gemma2": Window(2, size=4096),
    "gemma3": Window(6, absent=True), "gemma3n": Window(5), "gemma4": Window(0), "gpt-oss": Window(2),
    "granite_swa": Window(0), "laguna": Window(4, dense_first=True, absent=True), "llama4": Window(4, size=8192, forced=True),
    "maple": Window(0), "mellum": Window(4, absent=True), "mimo2": Window(0), "muse-glimmer": Window(4),
    "olmo2": Window(4, absent=True), "plamo3": Window(8, absent=True),
    "smallthinker": Window(4, dense_first=True, size=4096, forced=True, absent=True), "spark2_5": Window(0),
    "step35": Window(0), "dots3note": Window(0), "dflash": Window(0), "gemma4-assistant": Window(0),
    "gemma-embedding": Window(6), "modern-bert": Window(3, dense_first=True, absent=True),
    "lfm2": Window(-1, absent=True), "lfm2moe": Window(-1, absent=True),  # every attention layer
}  # fmt: skip

#: Layers from this index on have no keys and values of their own (gemma3n.cpp).
KV_LAYERS: Mapping[str, int] = {"gemma3n": 20}

#: GLM-5.2 without indexer metadata: layers 0, 1 and then every fourth own an indexer (glm-dsa.cpp).
GLM_INDEXER_CONTEXT = 1048576


@dataclass(frozen=True, kw_only=True)
class HyperParameters:
    """What the engine's memory and graphs need to know, per layer where it differs."""

    architecture: str
    layers_all: int  # block_count, next-token blocks and repeated loops included
    layers: int  # trunk
    context_train: int
    embedding: int
    vocabulary: int
    heads: tuple[int, ...]
    heads_kv: tuple[int, ...]
    feed_forward: tuple[int, ...]
    head_k: int
    head_v: int
    head_k_window: int
    head_v_window: int
    window: int
    windowed: tuple[bool, ...]
    recurrent: tuple[bool, ...]
    attends: tuple[bool, ...]  # the layer has keys and values in the main context
    mla: bool
    memory: MemoryKind
    state_r: int  # floats per sequence and recurrent layer: convolution
    state_s: int  # floats per sequence and recurrent layer: recurrence
    state_extra: tuple[int, ...]  # floats per sequence of further rows, per layer (n-gram history)
    indexer_heads: int
    indexer_key: int  # cache row of the indexer, in elements
    indexer_top: int  # cells an indexer picks per token
    indexer_group: int  # cells that are scored together
    hyper_streams: int  # residual streams (hyper-connections); 0 = one
    indexed: tuple[bool, ...]  # the layer owns an indexer cache
    compress: tuple[int, ...]  # deepseek4 compression ratio per layer
    causal: bool
    unknown: str | None  # why the memory module cannot be told
    positions: int = 1  # per token
    summed: bool = True  # the router divides by the sum of the chosen experts' weights
    rotated: tuple[bool, ...] = ()  # the layer rotates queries and keys

    def key_row(self, layer: int) -> int:
        """Elements of one cached key row."""
        return (self.head_k_window if self.windowed[layer] else self.head_k) * self.heads_kv[layer]

    def value_row(self, layer: int) -> int:
        """Elements of one cached value row with flash attention."""
        return (self.head_v_window if self.windowed[layer] else self.head_v) * self.heads_kv[layer]

    @cached_property
    def value_row_max(self) -> int:
        """Elements of a value row without flash attention: every layer takes the widest."""
        return max((self.value_row(i) for i in range(self.layers_all)), default=0)

    @cached_property
    def any_window(self) -> bool:
        """Whether some layer has a sliding window."""
        return any(self.windowed)


def _per_layer(meta: Callable[[str], Any], key: str, count: int, default: int) -> tuple[int, ...]:
    value = meta(key)
    if isinstance(value, tuple):
        found = tuple(int(v) for v in value[:count])
        return found + (default if not found else 0,) * (count - len(found))
    if isinstance(value, (int, float)):
        return (int(value),) * count
    return (default,) * count


def _windows(arch: str, meta: Callable[[str], Any], layers: int, count: int, recurrent: tuple[bool, ...]) -> tuple[int, tuple[bool, ...], str | None]:
    """Return window size, per-layer flags, and why they cannot be told."""
    none = (False,) * count
    size = meta("attention.sliding_window")
    size = int(size) if isinstance(size, (int, float)) else None
    pattern = meta("attention.sliding_window_pattern")
    rule = WINDOWS.get(arch)
    if rule is None:
        if arch in ENGINE_ARCHITECTURES or not size:
            return 0, none, None
        if not isinstance(pattern, tuple):  # a name the engine gained later: only an explicit pattern is proof
            return 0, none, "a sliding window without a per-layer pattern: whether this architecture uses it is not known"
        rule = Window(0)
    if arch == "exaone4" and layers != 64:
        return 0, none, None
    if rule.absent and not size:
        return 0, none, None
    if arch == "llama4" and size == 0:
        return 0, none, None
    used = rule.size if rule.forced or size is None else size
    if used is None:
        used = 0
    if rule.period < 0:
        return used, tuple(not r for r in recurrent), None
    if isinstance(pattern, tuple):
        flags = tuple(bool(v) for v in pattern[:count])
        return used, flags + (False,) * (count - len(flags)), None
    period = int(pattern) if isinstance(pattern, (int, float)) else rule.period
    if not period and rule.period == 0:
        return used, none, "the per-layer sliding window pattern is missing"
    flags = tuple(
        i < layers and (period == 0 or (i % period != 0 if rule.dense_first else i % period < period - 1)) for i in range(count)
    )
    return used, flags, None


def _recurrent(checkpoint: Checkpoint, arch: str, meta: Callable[[str], Any], layers: int, count: int, kv: tuple[int, ...], ff: tuple[int, ...]) -> tuple[bool, ...]:
    if arch in RECURRENT_ONLY:
        return (True,) * count
    rule, interval = HYBRID_RULES.get(arch, ("", 0))
    if rule == "all":
        return (True,) * count
    if rule == "kv-zero":
        return tuple(k == 0 for k in kv)
    if rule == "kv-and-ff-zero":
        return tuple(i < layers and kv[i] == 0 and ff[i] == 0 for i in range(count))
    if rule == "list":
        value = meta("attention.recurrent_layers")
        if isinstance(value, tuple):
            flags = tuple(bool(v) for v in value[:count])
            return flags + (False,) * (count - len(flags))
        every = meta("full_attention_interval")
        every = int(every) if isinstance(every, (int, float)) and every else interval
        return tuple(i < layers and (i + 1) % every != 0 for i in range(count))
    if arch in ENGINE_ARCHITECTURES:
        return (False,) * count
    found = [False] * count  # a name the engine gained later: a layer with state tensors is recurrent
    for t in checkpoint.tensors:
        if t.layer is not None and 0 <= t.layer < count and (".ssm_" in t.name or ".shortconv." in t.name or ".time_mix_" in t.name):
            found[t.layer] = True
    return tuple(found)


def _state(meta: Callable[[str], Any], arch: str, embedding: int, head_k: int, heads: int) -> tuple[int, int]:
    """Return the floats of convolution and recurrence per sequence and layer (``src/llama-hparams.cpp``)."""

    def number(key: str) -> int:
        value = meta(key)
        return int(value) if isinstance(value, (int, float)) else 0

    wkv, inner, state, groups = number("wkv.head_size"), number("ssm.inner_size"), number("ssm.state_size"), number("ssm.group_count")
    kernel, kda, short = number("ssm.conv_kernel"), number("kda.head_dim"), number("shortconv.l_cache")
    if wkv:
        return (number("token_shift_count") or 2) * embedding, embedding * wkv
    recurrence = kda * kda * heads if kda else head_k * head_k * heads if arch == "minimax-01" else state * inner
    if short:
        return embedding * (short - 1), recurrence
    if kda:
        return 3 * (kernel - 1 if kernel else 3) * heads * kda, recurrence
    return max(kernel - 1, 0) * (inner + 2 * groups * state), recurrence


def _indexed(arch: str, meta: Callable[[str], Any], memory: MemoryKind, layers: int, count: int, recurrent: tuple[bool, ...], context: int) -> tuple[bool, ...]:
    types = meta("attention.indexer.types")
    flags: tuple[bool, ...]
    if isinstance(types, tuple):
        flags = tuple(bool(v) for v in types[:layers])
        flags += (False,) * (layers - len(flags))
    elif isinstance(types, (int, float)) and not isinstance(types, bool):
        flags = (bool(types),) * layers
    elif arch == "glm-dsa" and context >= GLM_INDEXER_CONTEXT:
        flags = tuple(i < 2 or (i - 2) % 4 == 0 for i in range(layers))
    else:
        flags = (arch != "hy_v4",) * layers
    if arch in ("deepseek32", "qwen4exp"):
        flags = (True,) * layers
    if memory == "msa":
        dense = meta("leading_dense_block_count")
        first = int(dense) if isinstance(dense, (int, float)) else 0
        flags = tuple(i >= first for i in range(layers))
    if memory == "hybrid-indexer":
        flags = tuple(f and not recurrent[i] for i, f in enumerate(flags))
    return flags + (False,) * (count - layers)


#: More blocks than any engine takes; a header that says so is not laid out.
MOST_BLOCKS = 4096
#: No size in a header is larger; one that is counts as absent.
LARGEST = 2**40


def _rotated(arch: str, meta: Callable[[str], Any], layers: int, count: int, windowed: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return whether each layer rotates its queries and keys."""
    if arch in NO_ROTATION or (arch in ROTATION_BY_KEY and meta("rope.scaling.finetuned") is False):
        return (False,) * count
    if arch == "baichuan":  # told apart by depth: the larger one has a bias instead
        return (layers == 32,) * count
    if arch in ROTATION_BY_WINDOW:
        lead = meta("leading_dense_block_count") if arch == "cohere2moe" else 0
        dense = int(lead) if isinstance(lead, (int, float)) else 0
        return tuple(w or i < dense for i, w in enumerate(windowed))
    if arch == "exaone4":
        return windowed if any(windowed) else (True,) * count
    if arch in UNROTATED_LAYERS:
        step, first, by_window = UNROTATED_LAYERS[arch]
        if not by_window or any(windowed):
            return tuple((i if first else i + 1) % step != 0 for i in range(count))
    return (True,) * count


def _clean(value: Any) -> Any:
    """Return a metadata value the formulas can take: numbers finite and in range, arrays of numbers only."""
    if isinstance(value, tuple):
        cleaned = tuple(_clean(v) for v in value)
        return cleaned if all(isinstance(v, (int, float)) for v in cleaned) else None
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not -LARGEST < value < LARGEST:
        return None
    return max(value, 0) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def read(checkpoint: Checkpoint) -> HyperParameters:
    """Return the hyper-parameters of a checkpoint. Never raises; what cannot be told is in ``unknown``."""
    arch = checkpoint.architecture
    metadata = checkpoint.metadata

    def meta(key: str) -> Any:
        return _clean(metadata.get(f"{arch}.{key}"))

    def number(key: str, default: int = 0) -> int:
        value = meta(key)
        return int(value) if isinstance(value, (int, float)) else default

    claimed = number("block_count") * max(number("num_loops", 1) if arch == "nanbeige" else 1, 1)
    blocks = number("block_count") if claimed <= MOST_BLOCKS else 0
    nextn = min(number("nextn_predict_layers"), blocks)
    if arch == "deepseek4" and f"blk.{blocks - nextn}.nextn.eh_proj.weight" not in checkpoint.by_name:
        nextn = 0  # the engine probes for the block and counts every block as trunk without it
    count, layers = blocks, blocks - nextn
    loops = number("num_loops", 1) if arch == "nanbeige" else 1
    heads = _per_layer(meta, "attention.head_count", count, 0)
    heads_kv = _per_layer(meta, "attention.head_count_kv", count, 0) if meta("attention.head_count_kv") is not None else heads
    feed = _per_layer(meta, "feed_forward_length", count, 0)
    if loops > 1:
        heads, heads_kv, feed, count, layers = heads * loops, heads_kv * loops, feed * loops, count * loops, layers * loops
    if arch == "graniteswitch":  # one more attention layer, with one head, holds the router
        heads, heads_kv, feed, count = (*heads, 1), (*heads_kv, 1), (*feed, 0), count + 1
    embedding = number("embedding_length")
    if arch == "wavtokenizer-dec":
        embedding = number("features_length", embedding)
    first = heads[0] if heads else 0
    head_k = number("attention.key_length", embedding // first) if first else 0
    head_v = number("attention.value_length", embedding // first) if first else 0
    if arch in ("glm5-next", "kimi-k3"):
        head_v = number("attention.kv_lora_rank", head_v)
    recurrent = _recurrent(checkpoint, arch, meta, layers, count, heads_kv, feed)
    too_many = f"its header claims {claimed} blocks" if claimed > MOST_BLOCKS else None
    window, windowed, unknown = _windows(arch, meta, layers, count, recurrent)
    if arch == "deepseek4":
        window, windowed = number("attention.sliding_window"), (True,) * count
    mla_keys = number("attention.key_length_mla") > 0 and number("attention.value_length_mla") > 0
    mla = mla_keys and (arch in MLA_READERS or arch not in ENGINE_ARCHITECTURES)
    state_r, state_s = _state(meta, arch, embedding, head_k, first)

    memory: MemoryKind
    if arch in NO_CACHE:
        memory = "none"
    elif arch in SPECIAL_MEMORY:
        memory = SPECIAL_MEMORY[arch]
        if arch == "hy_v4" and number("attention.indexer.top_k") == 0:
            memory = "attention"
    elif arch in RECURRENT_ONLY:
        memory = "recurrent"
    elif arch in HYBRID_RULES:
        memory = "hybrid"
    elif arch in ENGINE_ARCHITECTURES:
        memory = "attention"
    elif number("attention.indexer.key_length") or number("hyper_connection.count") or meta("attention.compress_ratios"):
        memory, unknown = "unknown", "its sparse attention keeps caches of a kind this table does not know"
    elif not any(heads) and not state_s:
        memory, unknown = "unknown", "neither attention heads nor a recurrent state in its metadata"
    elif any(recurrent):
        memory = "recurrent" if not any(heads) or all(recurrent) else "hybrid"
    else:
        memory = "attention"
    if memory == "hybrid" and not state_r + state_s and any(recurrent):
        unknown = unknown or "recurrent layers without a known state size"

    if memory in ("none", "recurrent", "unknown"):
        attends = (False,) * count
    elif arch in ("nemotron_h", "nemotron_h_moe"):
        attends = tuple(i < layers and not recurrent[i] and feed[i] == 0 for i in range(count))
    elif arch == "falcon-h1":
        attends = (True,) * count
    elif memory in ("hybrid", "hybrid-indexer"):
        attends = tuple(not recurrent[i] and (i < layers or arch not in HYBRID_RULES) for i in range(count))
        if arch not in ("qwen3next", "qwen35", "qwen35moe", "qwen4exp", "minimax-01", "glm5-next"):
            attends = tuple(not r for r in recurrent)  # the engine's default filter does not stop at the trunk
    else:
        last = KV_LAYERS.get(arch, count)
        if arch == "gemma4":
            last = blocks - number("attention.shared_kv_layers")
        trunk = layers if nextn and layers and memory != "dsv4" else count
        attends = tuple(i < min(last, trunk) for i in range(count))
    if memory in ("recurrent", "hybrid", "hybrid-indexer"):
        recurrent = tuple(r and i < layers for i, r in enumerate(recurrent))
    else:
        recurrent = (False,) * count

    extra = [0] * count
    ple = meta("ple.layers")
    history = max(number("ple.conv_kernel") - 1, 0) * number("ple.ngram_size") * number("hyper_connection.count") * embedding
    if history and isinstance(ple, tuple):
        for i in ple:
            if int(i) < count and recurrent[int(i)]:
                extra[int(i)] = history

    vocabulary = number("vocab_size") or checkpoint.array_lengths.get("tokenizer.ggml.tokens", 0)
    table = checkpoint.by_name.get("output.weight") or checkpoint.by_name.get("token_embd.weight")
    if table is not None and len(table.shape) > 1:
        vocabulary = table.shape[1]
    indexer_key = number("attention.indexer.key_length")
    if arch == "glm5-next" and number("attention.indexer.kpool") > 0:
        indexer_key *= 3
    ratios = meta("attention.compress_ratios")
    causal = meta("attention.causal")
    sections = meta("rope.dimension_sections")
    sectioned = isinstance(sections, tuple) and len(sections) > 1 and sections[0] > 0 and sections[1] > 0
    four = arch in FOUR_POSITIONS or (arch in FOUR_POSITIONS_BY_SECTIONS and sectioned)
    return HyperParameters(
        architecture=arch, layers_all=count, layers=layers, context_train=number("context_length"), embedding=embedding,
        vocabulary=vocabulary, heads=heads, heads_kv=heads_kv, feed_forward=feed, head_k=head_k, head_v=head_v,
        head_k_window=number("attention.key_length_swa", head_k), head_v_window=number("attention.value_length_swa", head_v),
        window=window, windowed=windowed, recurrent=recurrent, attends=attends, mla=mla, memory=memory,
        state_r=state_r, state_s=state_s, state_extra=tuple(extra), indexer_heads=number("attention.indexer.head_count"),
        indexer_key=indexer_key, indexer_top=number("attention.indexer.top_k"),
        indexer_group=max(int(ratios[0]) if isinstance(ratios, tuple) and ratios and ratios[0] else 1, 1),
        hyper_streams=number("hyper_connection.count"), indexed=_indexed(arch, meta, memory, layers, count, recurrent, number("context_length")),
        compress=_per_layer(meta, "attention.compress_ratios", count, 0) if isinstance(ratios, tuple) else (0,) * count,
        causal=causal if isinstance(causal, bool) else True, unknown=too_many or unknown,
        positions=4 if four else 1, summed=arch not in NO_SUM and (arch not in SUM_BY_KEY or meta("expert_weights_norm") is True), rotated=_rotated(arch, meta, layers, count, windowed),
    )  # fmt: skip


#: Values derived once per checkpoint, dropped with it. Keyed by identity: a checkpoint is not hashable.
_DERIVED: dict[int, tuple[weakref.ref[Checkpoint], dict[Any, Any]]] = {}


def derived(checkpoint: Checkpoint) -> dict[Any, Any]:
    """Return the scratch table of a checkpoint, for values that depend on nothing else."""
    key = id(checkpoint)
    found = _DERIVED.get(key)
    if found is not None and found[0]() is checkpoint:
        return found[1]
    table: dict[Any, Any] = {}
    _DERIVED[key] = (weakref.ref(checkpoint, lambda _: _DERIVED.pop(key, None)), table)
    return table


def hyper_parameters(checkpoint: Checkpoint) -> HyperParameters:
    """Return the hyper-parameters of a checkpoint, read once."""
    table = derived(checkpoint)
    found = table.get("hyper-parameters")
    if found is None:
        found = table["hyper-parameters"] = read(checkpoint)
    assert isinstance(found, HyperParameters)
    return found
