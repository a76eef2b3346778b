"""A model's blocks as their tensors describe them, and which of them the CUDA kernels can attend for.

Laws restated from llama.cpp 0.5.0 (commit 0c1e570): ``ggml/src/ggml-cuda/fattn.cu`` (kernels), ``src/llama-context.cpp``
(resolve: flash attention that nobody asked for), ``src/models/*.cpp`` (which scales a graph applies).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from .hparams import derived

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.checkpoint.model import Checkpoint

    from .hparams import HyperParameters

#: Head sizes of the flash attention kernels with equal keys and values (``fattn.cu``).
FLASH_HEADS = frozenset({40, 64, 72, 80, 96, 112, 128, 256})
#: (keys, values) -> smallest group of query heads per cache head that the kernel takes; the group must be a multiple.
FLASH_UNEQUAL: Mapping[tuple[int, int], tuple[int, int]] = {
    (192, 128): (8, 8), (320, 256): (32, 32), (512, 512): (2, 1), (576, 512): (2, 1),
}  # fmt: skip
#: Cache types the CUDA kernels read (iq4_nl is not among them).
FLASH_TYPES = frozenset({"f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"})


class Weight(NamedTuple):
    """A block's weight: row length, rows, further planes, and its bytes as a copy on the device."""

    shape: tuple[int, ...]
    nbytes: int

    @property
    def out(self) -> int:
        """Elements one token gives after this matrix."""
        return self.shape[1] if len(self.shape) > 1 else 1


@dataclass(frozen=True, eq=False)
class Block:
    """One block as its tensors describe it. Blocks of equal tensors share one object."""

    weights: Mapping[str, Weight]  # "attn_q" -> weight
    biases: frozenset[str]
    scales: frozenset[str]
    heads: int
    heads_kv: int
    head_k: int
    head_v: int
    windowed: bool
    attends: bool
    cached: bool  # attends over a cache
    rotated: bool  # queries and keys
    recurrent: bool
    experts_used: int
    on_host: frozenset[str]  # weights whose operation the CUDA back end lacks
    outline: int  # equal for blocks that differ in the bytes of their weights alone


#: Graphs that apply the scales of a feed-forward (``ffn_down_s`` and its kind in ``src/models``): the others carry them unread.
DENSE_SCALED = frozenset(
    ["bitnet", "cohere2", "cohere2moe", "deepseek32", "dflash", "dots3note", "gemma4", "glm-dsa", "hy_v3", "llama", "llama-embed", "mistral3", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35", "talkie"]
)
SHARED_SCALED = frozenset(
    ["cohere2moe", "deepseek32", "dots3note", "glm-dsa", "hy_v3", "nemotron_h", "nemotron_h_moe", "qwen35moe", "qwen3next", "qwen4exp"]
)
EXPERTS_SCALED = SHARED_SCALED | {"gemma4", "llama", "llama-embed", "mellum", "mistral3", "qwen3moe"}


def scaled(architecture: str, name: str) -> bool:
    """Whether a graph applies this scale."""
    if not name.startswith("ffn_"):
        return True
    return architecture in (EXPERTS_SCALED if "exps" in name else SHARED_SCALED if "shexp" in name else DENSE_SCALED)


def blocks_of(checkpoint: Checkpoint, hyper: HyperParameters, stuck: frozenset[str] = frozenset()) -> tuple[Block, ...]:
    """Return every trunk block, equal ones shared. ``stuck`` names the tensors the CUDA back end leaves in host memory."""
    store = derived(checkpoint)
    known = ("blocks", hyper.mla, hyper.head_k)
    found = store.get(known)
    if found is not None:
        return found  # type: ignore[no-any-return]
    parts: list[list[tuple[str, tuple[int, ...], int]]] = [[] for _ in range(hyper.layers_all)]
    for t in checkpoint.tensors:
        if t.layer is not None and 0 <= t.layer < hyper.layers_all:
            extra = 0
            if t.shape and (t.type_name[:1] not in ("F", "I", "B") or t.type_name.startswith("IQ")):
                missing = -t.shape[0] % 512
                extra = t.nbytes * missing // max(t.elements, 1)
            parts[t.layer].append((t.name.split(".", 2)[-1], t.shape, t.nbytes + extra))
    used = checkpoint.hparam("expert_used_count")
    shared: dict[object, Block] = {}
    outlines: dict[object, int] = {}
    blocks = []
    for i in range(hyper.layers):
        some = used[i] if isinstance(used, tuple) and i < len(used) else used
        count = some if isinstance(some, int) and 0 <= some < 2**16 else 0
        key = (
            tuple(parts[i]), hyper.heads[i], hyper.heads_kv[i], hyper.windowed[i], hyper.attends[i], hyper.recurrent[i], count, hyper.rotated[i],
        )  # fmt: skip
        block = shared.get(key)
        if block is None:
            weights = {n.removesuffix(".weight"): Weight(s, b) for n, s, b in parts[i] if n.endswith(".weight") or "." not in n}
            biases = frozenset(n.removesuffix(".bias") for n, _, _ in parts[i] if n.endswith(".bias"))
            w = hyper.windowed[i]
            outline = outlines.setdefault((tuple(p[:2] for p in parts[i]), *key[1:]), len(outlines))
            block = shared[key] = Block(
                weights=weights, biases=biases, scales=frozenset(n.removesuffix(".scale") for n, _, _ in parts[i] if n.endswith(".scale") and scaled(hyper.architecture, n)), heads=hyper.heads[i], heads_kv=hyper.heads_kv[i],
                head_k=hyper.head_k_window if w else hyper.head_k, head_v=hyper.head_v_window if w else hyper.head_v,
                windowed=w, attends=hyper.attends[i] or (hyper.memory == "none" and hyper.heads[i] > 0), cached=hyper.attends[i], rotated=hyper.rotated[i], recurrent=hyper.recurrent[i], experts_used=count,
                outline=outline,
                on_host=frozenset(n.split(".", 2)[-1].removesuffix(".weight") for n in stuck if n.startswith(f"blk.{i}.")),
            )  # fmt: skip
        blocks.append(block)
    result = tuple(blocks)
    store[known] = result
    return result


def flash_works(blocks: Sequence[Block], type_k: str, type_v: str) -> bool:
    """Whether the CUDA back end has a flash attention kernel for every attention layer (``fattn.cu``)."""
    if (type_k not in FLASH_TYPES or type_v not in FLASH_TYPES) and any(b.cached for b in blocks):
        return False
    for block in dict.fromkeys(blocks):
        if not block.attends or not block.heads_kv:
            continue
        group = block.heads // block.heads_kv if block.heads_kv else 1
        if block.head_k in FLASH_HEADS and block.head_k == block.head_v:
            continue
        least, step = FLASH_UNEQUAL.get((block.head_k, block.head_v), (0, 1))
        if not least or group < least or group % step:
            return False
    return True


def flash_stays(blocks: Sequence[Block], where: Sequence[int], *, cache_on_host: bool) -> bool:
    """Whether attention lands on the device of its layer everywhere: else "auto" turns flash attention off.

    The engine's own check (``src/llama-context.cpp``, 0.5.0, resolve). It trips over scans and short convolutions: one behind
    attention on the host pulls that to its card, and attention behind one goes to the host when its cache is there.
    Found on the engine's library with seven architectures.
    """
    for i, (block, behind) in enumerate(pairwise(blocks)):
        if _stateful(behind) and block.cached and block.heads_kv and where[i] < 0 <= where[i + 1]:
            return False
        if cache_on_host and _stateful(block) and behind.cached and behind.heads_kv and not behind.recurrent and where[i + 1] >= 0:
            return False
    return True


def _stateful(block: Block) -> bool:
    """Whether a block is a scan or a short convolution: delta nets do without the engine's operations for these."""
    return block.recurrent and ("ssm_d" in block.weights or "shortconv.conv" in block.weights)
