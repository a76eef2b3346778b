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

from .context import pad

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
#: Metadata the cuts depend on beside the hyper-parameters.
KEYS = (
    "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.conv_kernel", "attention.output_group_count", "attention.output_lora_rank",
)  # fmt: skip


class Segment(NamedTuple):
    """``times`` equal runs of ``size`` elements, each cut at multiples of ``grain``."""

    size: int
    times: int
    grain: int


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


def sliced(type_name: str, shape: Sequence[int], taken: Cut, align: int, quant_row: int) -> tuple[int, ...]:
    """Return the bytes every card's part of a tensor takes in its buffer; see ``layout.BufferRules`` for the last two."""
    known = TYPE_BY_NAME.get(type_name.lower())
    block, size = (known.block, known.nbytes) if known is not None else (1, 0)
    found = []
    for count in taken.counts:
        part = [*shape, *(1,) * (taken.axis + 1 - len(shape))]
        part[taken.axis] = count
        rows = 1
        for n in part[1:]:
            rows *= n
        nbytes = part[0] // block * size * rows
        if quant_row and block > 1 and part[0] % quant_row:
            nbytes += (quant_row - part[0] % quant_row) // block * size
        found.append(pad(nbytes, align))
    return tuple(found)


class Splitter:
    """The cuts of one model between ``len(shares)`` cards."""

    def __init__(self, checkpoint: Checkpoint, hyper: HyperParameters, shares: Sequence[float]) -> None:
        self.hyper = hyper
        self.shares = tuple(shares)
        self.types = {name: t.type_name for name, t in checkpoint.by_name.items()}
        self.sizes = {key: max(checkpoint.integer(key), 0) for key in KEYS}
        self.turns: list[int] = []
        seen: dict[tuple[bool, bool], int] = {}
        for i in range(hyper.layers_all):  # layers of one kind take turns, so that rounding favours no card
            kind = (hyper.recurrent[i], hyper.windowed[i])
            self.turns.append(seen.get(kind, 0) % len(self.shares))
            seen[kind] = seen.get(kind, 0) + 1
        self._cuts: dict[tuple[tuple[Segment, ...], int], tuple[int, ...]] = {}

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
            kind = self.types.get(f"blk.{layer}.{source}")
            if kind is not None:
                known = TYPE_BY_NAME.get(kind.lower())
                return known.block if known is not None else 1
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
            total += sliced(type_name, (0, cells), Cut(0, (counts[card],)), align, quant_row)[0]
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
