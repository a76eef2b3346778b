"""``--split-mode tensor``: every card computes its share of every layer.

The engine sees one device. Matrices are cut between the cards, heads with their caches; what no rule names is held by
every card whole, and every card takes a compute buffer of the one device's size.
Laws restated from llama.cpp 0.5.0 (commit 0c1e570): ``src/llama-model.cpp`` (which axis, which grain),
``ggml/src/ggml-backend-meta.cpp`` (buffers of the cards). Compared card by card with what the engine's own code asks
its buffers for (``tests/data/llama_cpp_tensor_split.json.gz``).
"""

from __future__ import annotations

import struct
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Literal, NamedTuple

from residency.checkpoint.types import TYPE_BY_NAME

from .context import pad, row_bytes
from .settings import CACHE_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.checkpoint.model import Checkpoint

    from .context import Resolved
    from .hparams import HyperParameters

#: What decides the grain of a cut.
Kind = Literal["queries", "keys", "values", "fused", "heads", "output", "gate", "per-head", "pairs", "inner", "columns", "one", "groups", "group-rows", "ranks"]


class Rule(NamedTuple):
    """Along which axis a block's tensor is cut, and the tensors whose type gives the least grain (the first there is)."""

    axis: int
    kind: Kind
    after: tuple[str, ...] = ()  # none: its own type


_ROWS_OUT = ("attn_output.weight", "ssm_out.weight")
_DOWN = ("ffn_down.weight", "ffn_down_exps.weight")
#: By the name behind the block's prefix. Whatever is not here is whole on every card.
RULES: Mapping[str, Rule] = {
    "attn_q.weight": Rule(1, "queries", _ROWS_OUT), "attn_q.bias": Rule(0, "queries", _ROWS_OUT),
    "attn_k.weight": Rule(1, "keys", _ROWS_OUT), "attn_k.bias": Rule(0, "keys", _ROWS_OUT),
    "attn_v.weight": Rule(1, "values", _ROWS_OUT), "attn_v.bias": Rule(0, "values", _ROWS_OUT),
    "attn_qkv.weight": Rule(1, "fused", _ROWS_OUT), "attn_qkv.bias": Rule(0, "fused", _ROWS_OUT),
    "attn_q_norm.weight": Rule(1, "one", _ROWS_OUT[:1]), "attn_k_norm.weight": Rule(1, "one", _ROWS_OUT[:1]),
    "attn_sinks.weight": Rule(0, "heads", _ROWS_OUT[:1]), "attn_output.weight": Rule(0, "output"),
    "attn_gate.weight": Rule(1, "gate", _ROWS_OUT),
    "ssm_dt.bias": Rule(0, "per-head", _ROWS_OUT[1:]), "ssm_a": Rule(0, "per-head", _ROWS_OUT[1:]),
    "ssm_alpha.weight": Rule(1, "per-head", _ROWS_OUT[1:]), "ssm_beta.weight": Rule(1, "per-head", _ROWS_OUT[1:]),
    "ssm_ba.weight": Rule(1, "pairs", _ROWS_OUT[1:]), "ssm_conv1d.weight": Rule(1, "inner", _ROWS_OUT[1:]),
    "ssm_out.weight": Rule(0, "inner"),
    "ffn_up.weight": Rule(1, "columns", _DOWN), "ffn_up.bias": Rule(0, "columns", _DOWN),
    "ffn_up_exps.weight": Rule(1, "columns", _DOWN), "ffn_up_exps.bias": Rule(0, "columns", _DOWN),
    "ffn_gate.weight": Rule(1, "columns", _DOWN), "ffn_gate.bias": Rule(0, "columns", _DOWN),
    "ffn_gate_exps.weight": Rule(1, "columns", _DOWN), "ffn_gate_exps.bias": Rule(0, "columns", _DOWN),
    "ffn_gate_up.weight": Rule(1, "columns", _DOWN), "ffn_gate_up_exps.weight": Rule(1, "columns", _DOWN),
    "ffn_down.weight": Rule(0, "columns", _DOWN), "ffn_down_exps.weight": Rule(0, "columns", _DOWN),
}  # fmt: skip
#: Further rules of deepseek4, before the others: whole groups of heads for the grouped output projection.
GROUPED: Mapping[str, Rule] = {
    "attn_sinks.weight": Rule(0, "groups", ("attn_output_a.weight",)), "attn_q_b.weight": Rule(1, "group-rows", ("attn_output_a.weight",)),
    "attn_output_a.weight": Rule(2, "one"), "attn_output_b.weight": Rule(0, "ranks"),
    "ffn_up_shexp.weight": Rule(1, "columns", ("ffn_down_shexp.weight",)), "ffn_gate_shexp.weight": Rule(1, "columns", ("ffn_down_shexp.weight",)),
    "ffn_down_shexp.weight": Rule(0, "columns", ("ffn_down_shexp.weight",)),
}  # fmt: skip
#: Delta nets whose attention carries a gate in the query matrix.
GATED_QUERY = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})
#: Every tensor is whole on every card.
ALL_WHOLE = frozenset({"hrm_text"})
#: The recurrent state is whole on every card.
STATE_WHOLE = frozenset({"lfm2", "lfm2moe"})
#: Columns the kernels like to have at once.
KERNEL_COLUMNS = 128
#: Architectures whose graph joins what is cut with what every card holds whole, and what it is.
JOINED = {"chameleon": "the logits with the mask of the image tokens"}
#: Blocks are walked more than once, so none may stay on the host.
WALKED_AGAIN = frozenset({"hrm_text"})
#: Cards the engine's one device is made of at most (GGML_BACKEND_META_MAX_DEVICES).
MOST_CARDS = 16
#: Held whole, but worked on heads that are cut.
ON_HEADS = frozenset({"attn_q_norm.weight", "attn_k_norm.weight", "ssm_norm.weight"})
#: Heads of multiples of this are rotated for a quantised cache.
ROTATED_HEAD = 64
#: Router and experts do not read one norm.
NORM_APART = frozenset({"gemma4", "smallthinker"})
#: The end of a cut run: its input may be gathered, so it alone may lie elsewhere.
LAST = frozenset({"attn_output.weight", "attn_output_b.weight", "ssm_out.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight"})
#: Metadata the cuts depend on beside the hyper-parameters.
KEYS = (
    "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.conv_kernel", "attention.output_group_count", "attention.output_lora_rank",
    "attention.kv_lora_rank",
)  # fmt: skip


class Segment(NamedTuple):
    """``times`` equal runs of ``size`` elements, each cut at multiples of ``grain``."""

    size: int
    times: int
    grain: int


class ContradictionError(ValueError):
    """A tensor's shape and the file's metadata cannot both be right."""


class Cut(NamedTuple):
    """How many elements along an axis every card takes."""

    axis: int
    counts: tuple[int, ...]


def _f32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def cut(size: int, grain: int, shares: Sequence[float], turn: int) -> list[int]:
    """Return how many of ``size`` elements every card takes; ``turn`` moves the rounding on by so many cards.

    In float32 with shares, in whole numbers without, as the engine does.
    """
    count = len(shares)
    sums = list(accumulate((_f32(shares[(j + turn) % count]) for j in range(count)), lambda a, b: _f32(a + b)))
    found = [0] * count
    low = 0
    for j in range(count - 1):
        high = int(_f32(_f32(_f32(size) * sums[j]) / sums[-1])) if sums[-1] else size * (j + 1) // count
        high -= high % max(grain, 1)
        found[(j + turn) % count] = high - low
        low = high
    found[(count - 1 + turn) % count] = size - low
    return found


def block_of(type_name: str) -> tuple[int, int]:
    """Return elements and bytes of a block; (1, 0) for a type no table knows."""
    known = TYPE_BY_NAME.get(type_name.lower())
    return (known.block, known.nbytes) if known is not None else (1, 0)


def sliced(nbytes: int, block: tuple[int, int], shape: Sequence[int], taken: Cut, card: int, align: int, quant_row: int) -> int:
    """Return the bytes a card's part of a tensor takes in its buffer.

    ``nbytes``: of the whole tensor. ``block``: elements and bytes of a block of its type. See ``layout.BufferRules`` for the last two.
    """
    count = taken.counts[card]
    part = nbytes * count // max(shape[taken.axis] if taken.axis < len(shape) else 1, 1)
    row = count if taken.axis == 0 else shape[0]
    if quant_row and block[0] > 1 and row % quant_row:
        part += (quant_row - row % quant_row) // block[0] * block[1]
    return pad(part, align)


class Splitter:
    """The cuts of one model between ``len(shares)`` cards."""

    def __init__(self, checkpoint: Checkpoint, hyper: HyperParameters, shares: Sequence[float]) -> None:
        self.hyper = hyper
        self.shares = tuple(shares)
        self.tensors = checkpoint.by_name
        self.sizes = {key: max(checkpoint.integer(key), 0) for key in KEYS}
        self.turns: list[int] = []
        seen: dict[tuple[bool, bool], int] = {}
        for i in range(hyper.layers_all):  # layers of one kind take turns, so that rounding favours no card
            kind = (hyper.recurrent[i], hyper.windowed[i])
            self.turns.append(seen.get(kind, 0) % len(self.shares))
            seen[kind] = seen.get(kind, 0) + 1
        self._cuts: dict[tuple[tuple[Segment, ...], int], tuple[int, ...]] = {}
        self.cut_names: list[dict[str, Cut]] = [{} for _ in self.turns]  # per block: what is cut, and how
        for tensor in checkpoint.tensors:
            if tensor.layer is not None:
                name = tensor.name.split(".", 2)[-1]
                taken = self.tensor(tensor.layer, name, tensor.shape)
                if taken is not None:
                    self.cut_names[tensor.layer][name] = taken

    def _counts(self, segments: tuple[Segment, ...], turn: int) -> tuple[int, ...]:
        found = self._cuts.get((segments, turn))
        if found is None:
            taken = [0] * len(self.shares)
            for segment in segments:
                for j, part in enumerate(cut(segment.size, segment.grain, self.shares, turn)):
                    taken[j] += part * segment.times
            found = self._cuts[segments, turn] = tuple(taken)
        return found

    def _block(self, layer: int, name: str, after: Sequence[str]) -> int:
        for source in after or (name,):
            tensor = self.tensors.get(f"blk.{layer}.{source}")
            if tensor is not None:
                return block_of(tensor.type_name)[0]
        return 1

    def _grains(self, kind: Kind, layer: int, block: int, rows: int) -> tuple[int, ...]:
        """Return the grain of every segment; the last one holds for further segments."""
        hyper, sizes = self.hyper, self.sizes
        if kind == "columns":
            return (lcm(block, KERNEL_COLUMNS),)
        if hyper.recurrent[layer]:
            head = sizes["ssm.state_size"] or 1
            grain = lcm(block, KERNEL_COLUMNS, head)
            one = grain // head
            return ({"fused": grain, "gate": grain, "inner": grain, "per-head": one, "pairs": 2 * one}.get(kind, 1),)
        window = hyper.windowed[layer]
        head_k = (hyper.head_k_window if window else hyper.head_k) or 1
        head_v = (hyper.head_v_window if window else hyper.head_v) or 1
        group = max(hyper.heads[layer] // max(hyper.heads_kv[layer], 1), 1)
        if kind in ("groups", "group-rows"):
            heads = hyper.heads[layer] // (sizes["attention.output_group_count"] or 1)
            return (heads if kind == "groups" else heads * head_k,)
        if kind == "ranks":
            return (sizes["attention.output_lora_rank"],)
        columns = block
        while columns < KERNEL_COLUMNS and columns * len(self.shares) < group * head_k:
            columns *= 2
        query = lcm(group * head_k, columns)
        heads = query // head_k
        key = query // group
        value = key // head_k * head_v
        asked = lcm(2 * group * head_k, columns) if hyper.architecture in GATED_QUERY else query
        if kind == "fused":
            return (asked, key) if hyper.architecture in GATED_QUERY or self._equal_rows(layer) else (asked, key, value)
        if kind == "gate":
            return (heads if rows == hyper.heads[layer] else query,)
        return ({"queries": asked, "keys": key, "values": value, "heads": heads, "output": heads * head_v}.get(kind, 1),)

    def _equal_rows(self, layer: int) -> bool:
        return self.hyper.key_row(layer) == self.hyper.value_row(layer)

    def _runs(self, name: str, layer: int, length: int) -> list[tuple[int, int]]:
        """Return the runs of a tensor that are cut one by one: elements, times."""
        hyper, sizes = self.hyper, self.sizes
        fused = name in ("attn_qkv.weight", "attn_qkv.bias")
        whole = [(length, 1)]
        if hyper.architecture in GATED_QUERY:
            if fused and not hyper.recurrent[layer]:
                row = hyper.value_row(layer)
                return [(length - 2 * row, 1), (row, 2)]
            groups, values = sizes["ssm.group_count"], sizes["ssm.time_step_rank"]
            key = sizes["ssm.state_size"] * groups
            if name in ("ffn_gate_up.weight", "ffn_gate_up_exps.weight"):
                return [(length // 2, 2)]
            if hyper.architecture == "qwen3next":  # every key head beside its value heads
                return [(key, 2), (length - 2 * key, 1)] if name in ("attn_qkv.weight", "ssm_conv1d.weight") else whole
            run = {"ssm_dt.bias": groups, "ssm_a": groups, "ssm_alpha.weight": groups, "ssm_beta.weight": groups}.get(name, 0)
            if name in ("attn_qkv.weight", "ssm_conv1d.weight", "attn_gate.weight", "ssm_out.weight"):
                run = key
            return [(run, length // run)] if run and values and length % run == 0 else whole
        if fused:
            keys, values = hyper.key_row(layer), hyper.value_row(layer)
            first = length - keys - values
            return [(first, 1), (keys, 2)] if keys == values else [(first, 1), (keys, 1), (values, 1)]
        if name in ("ffn_gate_up.weight", "ffn_gate_up_exps.weight"):
            return [(length // 2, 2)]
        if name.startswith("ffn_up") and length == 2 * hyper.feed_forward[layer]:  # the gate is fused into it
            return [(length // 2, 2)]
        return whole

    def tensor(self, layer: int, name: str, shape: Sequence[int]) -> Cut | None:
        """Return how a block's tensor is cut; None: every card holds it whole. ``name`` is without the block's prefix."""
        hyper = self.hyper
        if not shape or hyper.architecture in ALL_WHOLE or not 0 <= layer < len(self.turns):
            return None
        rule = (GROUPED.get(name) if hyper.memory == "dsv4" else None) or RULES.get(name)
        if rule is None:
            return None
        axis = rule.axis
        if axis >= len(shape):
            if name.endswith("_norm.weight") or axis > 2:
                return None
            shape = (*shape, *(1,) * (axis + 1 - len(shape)))
        if name.endswith("_norm.weight") and shape[1] == 1:
            return None
        length = shape[axis]
        grains = self._grains(rule.kind, layer, self._block(layer, name, rule.after), length)
        runs = self._runs(name, layer, length)
        if any(size < 0 for size, _ in runs):
            raise ContradictionError(f"blk.{layer}.{name} has {length} rows, fewer than the heads of the metadata fill")
        segments = tuple(Segment(n, times, grains[min(i, len(grains) - 1)]) for i, (n, times) in enumerate(runs))
        return Cut(axis, self._counts(segments, self.turns[layer]))

    def output(self, vocabulary: int) -> tuple[int, ...] | None:
        """Return every card's rows of the output matrix, or None: whole on every card."""
        if self.hyper.architecture in ALL_WHOLE or self.hyper.memory == "dsv4":
            return None
        return self._counts((Segment(vocabulary, 1, 1),), self.hyper.layers % len(self.shares))

    def cache(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return every card's elements of a row of keys and of a row of values, or None: whole on every card."""
        hyper = self.hyper
        if hyper.mla or hyper.memory in ("dsv4", "dsa", "dsa-window") or hyper.architecture in ALL_WHOLE:
            return None
        block = self._block(layer, "attn_output.weight", ())
        (key,), (value,) = (self._grains(kind, layer, block, 0) for kind in ("keys", "values"))
        turn = self.turns[layer]
        return (
            self._counts((Segment(hyper.key_row(layer), 1, key),), turn), self._counts((Segment(hyper.value_row(layer), 1, value),), turn)
        )  # fmt: skip

    def cache_bytes(self, layer: int, card: int, resolved: Resolved, whole: int, align: int, quant_row: int) -> int:
        """Return the bytes of a layer's keys and values on a card; ``whole``: those of a cache that is not cut."""
        rows = self.cache(layer) if whole else None
        if rows is None:
            return whole
        cells = (resolved.window_cells if self.hyper.windowed[layer] else resolved.n_ctx_seq) * resolved.streams
        total = 0
        for type_name, counts in zip((resolved.type_k, resolved.type_v), rows, strict=True):
            length = sum(counts)
            total += sliced(row_bytes(type_name, length) * cells, CACHE_TYPES[type_name], (length, cells), Cut(0, counts), card, align, quant_row)
        return total

    def state_bytes(self, layer: int, card: int, resolved: Resolved, whole: int, rollback: int, align: int) -> int:
        """Return the bytes of a layer's recurrent state on a card; ``whole``: those of a state that is not cut."""
        rows = self.state(layer) if whole else None
        if rows is None:
            return whole
        planes = max(resolved.sequences, 1) * (1 + rollback)
        return sum(pad(4 * counts[card] * planes, align) for counts in rows)

    def state(self, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return every card's floats of a recurrent layer's convolution and recurrence, per sequence, or None: whole."""
        hyper, sizes = self.hyper, self.sizes
        if hyper.architecture in STATE_WHOLE or hyper.architecture in ALL_WHOLE or hyper.memory == "dsv4":
            return None
        head = sizes["ssm.state_size"] or 1
        grain = lcm(self._block(layer, "ssm_out.weight", ()), KERNEL_COLUMNS, head)
        kernel = max(sizes["ssm.conv_kernel"] - 1, 0)
        groups, values = sizes["ssm.group_count"], sizes["ssm.time_step_rank"]
        key = head * groups
        convolution, recurrence = [(hyper.state_r, 1)], [(hyper.state_s, 1)]
        if hyper.architecture == "qwen3next":
            convolution = [(key * kernel, 2), (hyper.state_r - 2 * key * kernel, 1)]
        elif hyper.architecture in GATED_QUERY and groups and values:
            convolution = [(key * kernel, 2 + values // groups)]
            recurrence = [(key * head, values // groups)]
        turn = self.turns[layer]
        return (
            self._counts(tuple(Segment(n, times, grain * kernel) for n, times in convolution), turn),
            self._counts(tuple(Segment(n, times, grain * head) for n, times in recurrence), turn),
        )  # fmt: skip

    # -- launches that end in an assertion -----------------------------------------------------------------------

    def stops(self, launch: Launch) -> str | None:
        """Why a launch ends in an assertion when the model is loaded, its graphs are built or first run; None: it does not."""
        hyper = self.hyper
        if len(self.shares) > MOST_CARDS:
            return f"more than {MOST_CARDS} cards"
        partly = any(launch.hosted) and not all(launch.hosted)
        partly |= any(name.startswith("attn_") for names in launch.moved.values() for name in names)
        if hyper.architecture in WALKED_AGAIN and partly:
            return "blocks that are walked more than once lie on the host in part"
        if not launch.cache_here and launch.streams > 1:
            return "the caches of several slots are on the host"
        if hyper.architecture in ALL_WHOLE:
            return None
        if hyper.architecture in JOINED and "output.weight" in self.tensors:
            return JOINED[hyper.architecture]
        for layer in range(min(hyper.layers, len(launch.hosted))):
            if not launch.hosted[layer]:
                cuts = self.cut_names[layer]
                moved = launch.moved.get(layer, frozenset())
                found = self._lacks(layer, cuts) or self._uneven(layer, cuts, launch.hosted) or self._apart(layer, cuts, launch) or self._misplaced(layer, cuts, moved)
                if found is not None:
                    return f"block {layer}: {found}"
        return None

    def _lacks(self, layer: int, cuts: Mapping[str, Cut]) -> str | None:
        """Whether a tensor to cut by is missing, or a cut goes through a block of a type."""
        hyper = self.hyper
        for name, taken in cuts.items():
            after = (GROUPED if hyper.memory == "dsv4" and name in GROUPED else RULES)[name].after
            if after and not any(f"blk.{layer}.{source}" in self.tensors for source in after):
                return f"{name} is cut like {after[0]}, which the file does not have"
            if taken.axis == 0:
                block = self._block(layer, name, ())
                if any(count % block for count in taken.counts):
                    return f"{name} is cut inside a block of {block} values"
        if hyper.recurrent[layer] and hyper.architecture not in STATE_WHOLE and f"blk.{layer}.ssm_out.weight" not in self.tensors:
            return "the recurrent state is cut like ssm_out.weight, which the file does not have"
        if hyper.attends[layer] and self.cache(layer) is not None:
            if f"blk.{layer}.attn_output.weight" not in self.tensors:
                return "the cache is cut like attn_output.weight, which the file does not have"
            if f"blk.{layer}.attn_kv_a_mqa.weight" in self.tensors:
                return "the cache is cut, and its keys are not"
        return None

    def _uneven(self, layer: int, cuts: Mapping[str, Cut], hosted: Sequence[bool]) -> str | None:
        """Whether the cards would take parts that do not belong together."""
        hyper = self.hyper
        if hyper.memory == "attention" and not hyper.attends[layer] and "attn_q.weight" in cuts and True in hyper.attends:
            source = hyper.attends.index(False) - (2 if hyper.windowed[layer] else 1)  # the last block of its kind with a cache
            if source >= 0 and hosted[source]:
                return f"it shares the cache of block {source}, which is on the host"
            rows = self.cache(source) if source >= 0 else None
            if rows is not None and not _alike(cuts["attn_q.weight"].counts, rows[0]):
                return f"the cards take other heads of the queries than of the cache of block {source}, which it shares"
        for name, of in (("attn_q_norm.weight", "attn_q.weight"), ("attn_k_norm.weight", "attn_k.weight")):
            if name in cuts and of in cuts and not _alike(cuts[name].counts, cuts[of].counts):
                return f"the cards take other heads of {of} than of its norm"
        if hyper.architecture == "qwen3next" and "ssm_out.weight" in cuts and "attn_qkv.weight" in cuts:
            head = self.sizes["ssm.state_size"] or 1
            grain = lcm(self._block(layer, "ssm_out.weight", ()), KERNEL_COLUMNS, head)
            if not _alike(self._counts((Segment(head * self.sizes["ssm.group_count"], 1, grain),), self.turns[layer]), cuts["ssm_out.weight"].counts):
                return "the cards take other heads of the values than of the keys"
        return None

    def _apart(self, layer: int, cuts: Mapping[str, Cut], launch: Launch) -> str | None:
        """Whether caches on the host, or a single head of keys and values, meet what is cut."""
        hyper = self.hyper
        if hyper.recurrent[layer]:
            return None if launch.cache_here else "its state is on the host"
        heads = (hyper.head_k_window, hyper.head_v_window) if hyper.windowed[layer] else (hyper.head_k, hyper.head_v)
        turned = [t and head % ROTATED_HEAD == 0 for t, head in zip(launch.turned, heads, strict=True)]
        if "attn_qkv.weight" in cuts and not launch.cache_here and not (turned[1] and (turned[0] or launch.roped)):
            return "keys and values come out of one matrix, and the cache is on the host"
        if hyper.heads_kv[layer] != 1 or not hyper.heads[layer] or (hyper.memory != "none" and self.cache(layer) is None):
            return None
        if f"blk.{layer}.attn_k_norm.weight" in self.tensors:
            work = "it is normed"
        elif hyper.memory == "none":
            work = "there is no cache"
        elif turned[0] or (turned[1] and "attn_qkv.weight" in cuts):
            work = "it is rotated for a quantised cache"
        elif "f32" in (launch.type_k, launch.type_v):
            work = "it is converted from a cache of type f32"
        else:
            return None
        return f"its one key and value head cannot be told from a cut row when {work}"

    def _misplaced(self, layer: int, cuts: Mapping[str, Cut], moved: frozenset[str]) -> str | None:
        """Whether parts of the block in host memory leave results whole where others are cut."""
        if self.hyper.recurrent[layer] and any(name.startswith("shortconv.") for name in moved):
            return "its convolution is in host memory, and the state is not"
        heads = {name for name in cuts if not name.startswith("ffn_")}
        attends = heads - LAST
        if self.hyper.recurrent[layer]:
            attends.discard("attn_qkv.weight")  # joined with the states, which takes the whole for a part
        if self.hyper.memory == "none" and heads <= moved:  # no cache: all of the attention may be elsewhere
            attends = set()
        for name in sorted(moved):
            if (name in ON_HEADS and attends) or name in attends:
                return f"{name} is in host memory, and what it works with is cut"
            if name in cuts and name not in LAST and name.startswith("ffn_"):
                rest = [n for n in cuts if n not in moved and n.startswith("ffn_") and _tower(n) == _tower(name)]
                if rest:
                    return f"{name} is in host memory, and {rest[0]} is cut"
        norm = next((n for n in ("ffn_norm.weight", "post_attention_norm.weight", "attn_output_norm.weight", "attn_norm.weight") if f"blk.{layer}.{n}" in self.tensors), "")
        if norm in moved and "ffn_down_exps.weight" in cuts and self.hyper.architecture not in NORM_APART:
            chooses = next((n for n in ("exp_probs_b.bias", "exp_probs_b") if f"blk.{layer}.{n}" in self.tensors), "")
            if "ffn_down_exps.weight" not in moved:
                return f"{norm} is in host memory, and the experts read it on the cards"
            if chooses and chooses not in moved:
                return f"{norm} is in host memory, and {chooses} is not"
        return None


def _tower(name: str) -> str:
    return "exps" if "_exps" in name else "shexp" if "_shexp" in name else ""


def _alike(these: Sequence[int], those: Sequence[int]) -> bool:
    """Whether two tensors are cut in the same proportions."""
    whole, other = sum(these), sum(those)
    return all(a * other == b * whole for a, b in zip(these, those, strict=True))


class Launch(NamedTuple):
    """What a launch does with the blocks, as far as the cuts must agree with it."""

    type_k: str
    type_v: str
    turned: tuple[bool, bool]  # keys, values of 64 and its multiples are rotated
    roped: bool  # keys are rotated by their position
    cache_here: bool  # caches are on the cards
    streams: int
    hosted: Sequence[bool]  # per block: the host has it
    moved: Mapping[int, frozenset[str]]  # names in host memory although their block is on the cards
