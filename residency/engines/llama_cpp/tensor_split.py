"""``--split-mode tensor``: every card computes its share of every layer.

The engine sees one device. Matrices are cut between the cards, heads with their caches; what no rule names is held by
every card whole, and every card takes a compute buffer of the one device's size.
Laws restated from llama.cpp 0.5.0 (commit 0c1e570): ``src/llama-model.cpp`` (split states: which axis, which grain),
``ggml/src/ggml-backend-meta.cpp`` (buffers of the cards). No figure of a single card was measured.
"""

from __future__ import annotations

from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from residency.checkpoint.types import TYPE_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .hparams import HyperParameters

#: Cut into columns, with their biases and whatever has one value per head.
ATTENTION = frozenset({"attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate", "attn_output", "attn_sinks"})
RECURRENCE = frozenset({"ssm_dt", "ssm_a", "ssm_alpha", "ssm_beta", "ssm_ba", "ssm_conv1d", "ssm_out"})
FEED_FORWARD = frozenset(
    ["ffn_up", "ffn_gate", "ffn_gate_up", "ffn_down", "ffn_up_exps", "ffn_gate_exps", "ffn_gate_up_exps", "ffn_down_exps"]
)
#: Biases of row-cut matrices are added once, by every card.
WHOLE = frozenset({"attn_output.bias", "ffn_down.bias", "ffn_down_exps.bias"})
#: Cut along the row; the others along the columns.
BY_ROW = frozenset({"attn_output", "ssm_out", "ffn_down", "ffn_down_exps"})
#: Delta nets whose attention carries a gate in the query matrix, and whose values come in groups of the keys.
GATED_QUERY = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})
#: Every tensor is whole on every card.
ALL_WHOLE = frozenset({"hrm_text"})
#: The recurrent state is whole on every card.
STATE_WHOLE = frozenset({"lfm2", "lfm2moe"})
#: Columns the kernels like to have at once.
KERNEL_COLUMNS = 128


class Segment(NamedTuple):
    """``times`` equal runs of ``size`` elements, each cut at multiples of ``grain``."""

    size: int
    times: int
    grain: int


def cut(size: int, grain: int, shares: Sequence[float], turn: int) -> list[int]:
    """Return how many of ``size`` elements every card takes; ``turn`` moves the rounding on by so many cards."""
    count = len(shares)
    sums = list(accumulate(shares[(j + turn) % count] for j in range(count)))
    found = [0] * count
    low = 0
    for j in range(count - 1):
        high = int(size * sums[j] / sums[-1]) if sums[-1] else size * (j + 1) // count
        high -= high % max(grain, 1)
        found[(j + turn) % count] = high - low
        low = high
    found[(count - 1 + turn) % count] = size - low
    return found


def portions(segments: Sequence[Segment], shares: Sequence[float], turn: int) -> list[float]:
    """Return every card's share of a tensor."""
    taken = [0] * len(shares)
    for segment in segments:
        for j, part in enumerate(cut(segment.size, segment.grain, shares, turn)):
            taken[j] += part * segment.times
    whole = sum(taken)
    return [t / whole for t in taken] if whole else [0.0] * len(shares)


class Splitter:
    """The cuts of one model between ``len(shares)`` cards. ``types``: tensor name -> type name."""

    def __init__(self, hyper: HyperParameters, shares: Sequence[float], types: Mapping[str, str], sizes: Mapping[str, int]) -> None:
        self.hyper = hyper
        self.shares = tuple(shares)
        self.types = types
        self.sizes = sizes  # "ssm.state_size" and the like
        self.turns: list[int] = []
        seen: dict[tuple[bool, bool], int] = {}
        for i in range(hyper.layers_all):  # layers of one kind take turns, so that rounding favours no card
            kind = (hyper.recurrent[i], hyper.windowed[i])
            self.turns.append(seen.get(kind, 0) % len(self.shares))
            seen[kind] = seen.get(kind, 0) + 1

    def _block(self, layer: int, *names: str) -> int:
        for name in names:
            kind = self.types.get(f"blk.{layer}.{name}.weight")
            if kind is not None:
                known = TYPE_BY_NAME.get(kind.lower())
                return known.block if known is not None else 1
        return 1

    def _heads(self, layer: int) -> tuple[int, int, int, int]:
        """Return the grains of queries, keys, values and of one value per head."""
        hyper = self.hyper
        window = hyper.windowed[layer]
        head_k = (hyper.head_k_window if window else hyper.head_k) or 1
        head_v = (hyper.head_v_window if window else hyper.head_v) or 1
        group = max(hyper.heads[layer] // max(hyper.heads_kv[layer], 1), 1)
        columns = self._block(layer, "attn_output", "ssm_out")
        while columns < KERNEL_COLUMNS and columns * len(self.shares) < group * head_k:
            columns *= 2
        query = lcm(group * head_k, columns)
        key = query // group
        return query, key, key // head_k * head_v, query // head_k

    def _recurrent(self, layer: int, stem: str, length: int) -> list[Segment]:
        state, groups = self.sizes.get("ssm.state_size", 0) or 1, self.sizes.get("ssm.group_count", 0)
        values = self.sizes.get("ssm.time_step_rank", 0)
        grain = lcm(lcm(self._block(layer, "ssm_out"), KERNEL_COLUMNS), state)
        unit = {"ssm_dt": grain // state, "ssm_a": grain // state, "ssm_alpha": grain // state, "ssm_beta": grain // state, "ssm_ba": 2 * grain // state}
        one = unit.get(stem, grain)
        run = groups if stem in unit else state * groups
        if self.hyper.architecture in GATED_QUERY and run and values and self.hyper.architecture != "qwen3next" and length % run == 0:
            return [Segment(run, length // run, one)]
        if self.hyper.architecture == "qwen3next" and stem in ("attn_qkv", "ssm_conv1d") and length > 2 * run:
            return [Segment(run, 2, one), Segment(length - 2 * run, 1, one)]
        return [Segment(length, 1, one)]

    def segments(self, layer: int, name: str, shape: Sequence[int]) -> list[Segment] | None:
        """Return how a block's tensor is cut; None: every card holds it whole. ``name`` is without the block's prefix."""
        stem, _, suffix = name.rpartition(".")
        stem = stem or name
        if name in WHOLE or not shape or self.hyper.architecture in ALL_WHOLE or layer >= len(self.turns):
            return None
        length = shape[0] if suffix == "bias" or stem in BY_ROW or len(shape) == 1 else shape[1]
        if stem in FEED_FORWARD:
            inner = self.hyper.feed_forward[layer]
            grain = lcm(self._block(layer, "ffn_down", "ffn_down_exps"), KERNEL_COLUMNS)
            twice = stem in ("ffn_gate_up", "ffn_gate_up_exps") or (stem == "ffn_up" and length == 2 * inner)
            return [Segment(length // 2, 2, grain)] if twice else [Segment(length, 1, grain)]
        if stem in RECURRENCE or (stem in ATTENTION and self.hyper.recurrent[layer]):
            return self._recurrent(layer, stem, length)
        if stem not in ATTENTION:
            return None
        query, key, value, head = self._heads(layer)
        if self.hyper.architecture in GATED_QUERY and stem in ("attn_q", "attn_qkv"):
            query *= 2
        if stem == "attn_qkv":
            keys, values = self.hyper.key_row(layer), self.hyper.value_row(layer)
            return [Segment(length - keys - values, 1, query), Segment(keys, 1, key), Segment(values, 1, value)]
        grain = {"attn_k": key, "attn_v": value, "attn_sinks": head}.get(stem, query)
        return [Segment(length, 1, grain)]

    def tensor(self, layer: int, name: str, shape: Sequence[int]) -> list[float]:
        """Return every card's share of a block's tensor."""
        segments = self.segments(layer, name, shape)
        return [1.0] * len(self.shares) if segments is None else portions(segments, self.shares, self.turns[layer])

    def output(self, vocabulary: int) -> list[float]:
        """Return every card's share of the output matrix."""
        if self.hyper.architecture in ALL_WHOLE or self.hyper.memory == "dsv4":
            return [1.0] * len(self.shares)
        return portions([Segment(vocabulary, 1, 1)], self.shares, self.hyper.layers % len(self.shares))

    def cache(self, layer: int) -> list[float]:
        """Return every card's share of a layer's keys and values."""
        hyper = self.hyper
        if hyper.mla or hyper.memory in ("dsv4", "dsa", "dsa-window") or hyper.architecture in ALL_WHOLE:
            return [1.0] * len(self.shares)
        _, key, value, _ = self._heads(layer)
        parts = [Segment(hyper.key_row(layer), 1, key), Segment(hyper.value_row(layer), 1, value)]
        return portions(parts, self.shares, self.turns[layer])

    def state(self, layer: int) -> list[float]:
        """Return every card's share of a layer's recurrent state: by key heads."""
        if self.hyper.architecture in STATE_WHOLE or self.hyper.architecture in ALL_WHOLE:
            return [1.0] * len(self.shares)
        state, groups = self.sizes.get("ssm.state_size", 0) or 1, self.sizes.get("ssm.group_count", 0)
        grain = lcm(lcm(self._block(layer, "ssm_out"), KERNEL_COLUMNS), state)
        return portions([Segment(max(state * groups, 1), 1, grain)], self.shares, self.turns[layer])
