"""The resolved settings of one llama.cpp launch: what the engine works with after flags, environment and defaults.

Pure values. Defaults are those of llama-fit-params of llama.cpp 0.5.0 (``common/common.h``, ``common/arg.cpp``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Bytes and elements of one block of every cache type the engine accepts (``ggml/src/ggml.c``, type traits).
CACHE_TYPES: dict[str, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18),
    "q4_1": (32, 20), "iq4_nl": (32, 18), "q5_0": (32, 22), "q5_1": (32, 24),
    "q6_0": (32, 26),  # ik_llama.cpp only
}  # fmt: skip

#: Device kinds served by the CUDA back end's sources.
CUDA_KINDS = frozenset({"cuda", "rocm", "musa"})
#: Device kinds whose buffers are ordinary host memory.
HOST_KINDS = frozenset({"cpu"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """A device the engine may offload to, in the engine's own order."""

    name: str
    kind: str = "cuda"  # cuda | rocm | vulkan | metal | sycl | rpc
    free_bytes: int | None = None  # what the device reports when the model is loaded
    compute_capability: str | None = None  # "9.0"
    integrated: bool | None = None
    model: str | None = None  # product name, for the driver context
    context_bytes: int | None = None  # measured driver context, when the machine's owner knows it


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One ``--override-tensor`` pair: the first pattern found in a tensor's name decides its buffer."""

    pattern: str  # ECMAScript regular expression, searched, not matched
    target: str  # buffer type: CPU, CUDA0, ...
    origin: str = "-ot"  # the flag it came from, for messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything about a launch that moves bytes, as the engine resolved it."""

    devices: tuple[DeviceSpec, ...] = ()  # after --device; empty = CPU only
    n_ctx: int = 0  # tokens over all sequences; 0 = what the model was trained for
    n_seq: int = 1  # slots
    unified: bool = False  # one KV stream for all sequences
    n_batch: int = 2048
    n_ubatch: int = 512
    n_gpu_layers: int = -1  # -1 and below: all
    split_mode: Literal["none", "layer", "row", "tensor"] = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: Literal["auto", "on", "off"] = "auto"
    kv_offload: bool = True
    op_offload: bool = True
    swa_full: bool = False
    overrides: tuple[Override, ...] = ()  # in the engine's order, with -cmoe and -ncmoe expanded (see expert_overrides)
    load_mode: Literal["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"] = "auto"
    lazy_mode: Literal["auto", "on", "off"] = "auto"
    no_host: bool = False  # no pinned host buffers
    repack: bool = True
    load_mtp: bool = False  # next-token blocks are made resident
    n_rs_seq: int = 0  # recurrent rollback states; clamped to 0 where the engine has none
    outputs: Literal["batch", "slots"] = "batch"  # rows of logits: a whole micro-batch, or one per slot
    n_outputs_per_seq: int = 1  # with "slots": 1 + drafted tokens
    embeddings: bool = False
    pipeline: bool | None = None  # None: as the engine decides
    copies: int = 4  # of every input under pipeline parallelism: GGML_SCHED_MAX_COPIES of the build
    copies_with_overrides: bool = False  # pipeline parallelism stays on with placement overrides (older builds)
    output_first: bool = True  # the output layer is the first unit of n_gpu_layers; in older builds the last
    latent: Literal["file", "on", "off"] = "file"  # latent attention cache: as the file says, always, never
    latent_values: bool = False  # the latent cache keeps a row of values, too (builds until January 2026)
    latent_expanded: bool = False  # prompts are computed on the cache expanded to full heads (-mla 2 and 3)
    plain_cells: int = 256  # the context is a multiple of this many cells without flash attention
    cache_rows_per_head: bool = False  # a quantised cache pads every head's row, not that of all heads
    cache_rows_padded: bool = True  # the partial row of a quantised cache tensor is padded at all
    graph_measured: bool = True  # compute buffers of this very graph were compared with the engine's
    graph_of_fork: bool = False  # ... and it is not even the same code
    half_mask: bool = True  # the attention mask reaches the device in half precision
    mask_per_device: bool = True  # ... or else every device converts it, not only the first
    rotated_cache: bool = True  # a quantised cache is rotated
    experts_on_first: bool = False  # experts in host memory are computed on the first device, wherever their layer is
    expert_sum_apart: bool = False  # the sum over the experts takes one more tensor of their size
    prompt_cache: bool = True  # the server keeps earlier prompts in host memory
    checkpoints: bool = True  # ... and checkpoints of windows and states
    scores_cap_bytes: int = 0  # attention works on as many heads at once as stay under this (-amb); 0 = all
    op_offload_min_batch: int = 32  # GGML_OP_OFFLOAD_MIN_BATCH
    allreduce: Literal["nccl", "internal", "none"] = "nccl"  # what sums the cards' parts under split mode tensor (GGML_CUDA_ALLREDUCE)


#: Expert towers, and the dense feed-forward, as the engine's own flags match them (``common/common.h``).
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
DENSE_FFN = r"\.ffn_(up|down|gate)\."


#: The same in builds that did not know fused gate and up projections.
EXPERTS_SPLIT = r"\.ffn_(up|down|gate)_(ch|)exps"


def expert_overrides(*, cpu_moe: bool = False, n_cpu_moe: int = 0, n_cpu_ffn: int = 0, experts: str = EXPERTS) -> tuple[Override, ...]:
    """Return the overrides that ``--cpu-moe``, ``--n-cpu-moe`` and ``--n-cpu-ffn`` stand for.

    The engine appends them in the order of the flags; blocks count from the first, whether or not they are offloaded.
    """
    found = [Override(pattern=experts, target="CPU", origin="-cmoe")] if cpu_moe else []
    found += [Override(pattern=rf"blk\.{i}{experts}", target="CPU", origin="-ncmoe") for i in range(n_cpu_moe)]
    found += [Override(pattern=rf"blk\.{i}{DENSE_FFN}", target="CPU", origin="-ncffn") for i in range(n_cpu_ffn)]
    return tuple(found)
