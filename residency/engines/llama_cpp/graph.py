"""The graph of one device, built with sizes alone: every block's operations in the order the engine adds them.

Laws restated from llama.cpp 0.5.0 (commit 0c1e570): ``src/llama-graph.cpp`` (build_attn, build_ffn, build_moe_ffn),
``src/models/*.cpp``, ``ggml/src/ggml-cuda/ggml-cuda.cu`` (holds of fused operations), ``fattn.cu`` (float16 copies).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .arena import Tape
from .context import row_bytes
from .settings import CACHE_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .blocks import Block
    from .hparams import HyperParameters

#: A sum over experts is run as one operation up to this many (MOE_WEIGHTED_REDUCTION_MAX_EXPERTS).
FUSED_EXPERTS = 15


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a reserved graph."""

    tokens: int
    rows: int  # rows of logits
    sequences: int
    streams: int
    cells: int  # of one stream
    window_cells: int
    flash: bool  # flash attention is used
    flash_here: bool  # ... and the device has the kernel
    type_k: str
    type_v: str
    half_mask: bool = True  # the mask arrives in half precision
    rotated: bool = True  # a quantised cache is rotated
    sum_apart: bool = False  # the sum over the experts takes one more tensor of their size
    fuses: bool = True  # the back end runs the router, and the sum over the experts, as one operation each
    scores_cap: int = 0  # bytes of attention scores held at once (-amb of ik_llama.cpp); 0 = all heads


class Ahead(NamedTuple):
    """Inputs that the last split of a block receives for what follows it."""

    windows: tuple[bool, ...]  # masks and cache rows, by first use
    rows: bool  # the rows of the result


#: Weights of a block in the order of their use, the last first.
LAST_USED = (
    "post_ffw_norm", "ffn_gate_inp_shexp", "ffn_down_shexp", "ffn_down", "ffn_down_exps", "ffn_up_exps", "ffn_gate_up_exps",
    "ffn_gate_exps", "ffn_gate_inp", "attn_output", "ssm_out", "shortconv.out_proj",
)  # fmt: skip


def closing(block: Block, foreign: frozenset[str] | None) -> str:
    """Return the last weight of a block that is copied from host memory, or nothing."""
    if foreign is not None and not foreign:
        return ""
    weights = block.weights
    for name in LAST_USED:
        if name in weights and (foreign is None or name in foreign) and not (name == "ffn_down" and "ffn_norm_exps" in weights):
            return name
    return ""


class Graph:
    """Builds one device's tape."""

    def __init__(self, hyper: HyperParameters, shape: Shape, *, layer_norm: bool, factors: int = 0) -> None:
        self.tape = Tape()
        self.hyper = hyper
        self.shape = shape
        self.layer_norm = layer_norm
        self.masks: dict[bool | None, int] = {}  # by window; None is an indexer's own
        self.foreign: frozenset[str] | None = frozenset()  # weights of the current block in host memory; None = all
        self.cache_foreign = False
        self.converts = shape.flash and not shape.half_mask  # the mask arrives as float32 and is converted here
        self.elsewhere = False  # the current block's experts are computed on another device
        self.absent: frozenset[str] = frozenset()  # weights of the current block the host multiplies with: results arrive
        self.indices = -1  # positions and cache rows, until the last attention
        self.places: dict[bool, int] = {}  # cache rows by window, where ``indices`` lacks them
        self.covers: set[bool] = set()  # the caches whose rows ``indices`` has
        self.chosen = -1  # rows of the result, until they are picked
        self.wide = max(hyper.hyper_streams, 1)  # residual streams side by side
        self.leaves: list[int] = []  # per sparse block: a table of chosen cells, there from the start
        self.top = -1  # the cells the last indexer chose
        self.factors = factors  # bytes of the factors the rotation takes from the file
        self.factors_here = -1  # ... copied to this device for the blocks in host memory
        self.closing = ""  # the block's last weight to be copied: its split also receives the inputs of what follows
        self.copies = False  # the current block copies weights
        self.ahead: Ahead | None = None  # ... which are these
        self.spin = -1  # the values' rotation, until the last attention's result is turned back
        self.waiting = -1  # the residual of the last block, whose rows are picked before the attention's result is projected
        self.early: tuple[int, ...] = ()  # the copy of the first weight, where no norm comes before it
        self.input = -1  # the block's, where its router reads that
        self.routed: tuple[int, int] | None = None
        self.fed = -1  # a parallel block's feed-forward
        self.width_beside = 0  # elements that every block takes in beside the state (gemma4)
        self.beside = -1  # ... for all blocks: as they arrive, then with what the first state gives
        self.origin = -1  # the first state, while that is still to be done
        self.small = 0  # bytes of the indices
        self.place_bytes = shape.tokens * 4 * hyper.positions * any(hyper.rotated)  # ... of which positions
        self.positions = False  # the indices are still to be copied, in the split of the first rotation
        self.picking = False  # the rows of the result are picked right behind the attention
        self.kept = False  # what comes back from the host has copies that are kept
        self.departs = False  # the current block is the last in host memory
        self.ending = False  # ... and the result is picked on this device, now or later
        self.states_next = 0  # bytes of the next block's convolution states, where they are read before this block ends
        self.ahead_state = -1
        self.strays = False  # states in host memory are read behind the attention, which is then computed there
        self.rotates_next = False  # the next block attends, and rotates
        self.last = False  # the current block is the trunk's last
        self.final = False  # the current block is the last one that attends
        self.t4 = shape.tokens * 4

    # -- pieces ---------------------------------------------------------------------------------------------------

    def copy(self, block: Block, name: str) -> tuple[int, ...]:
        """The copy of a host weight that the device makes for one operation, or nothing."""
        if self.foreign is None or name in self.foreign:
            weight = block.weights.get(name)
            if weight is not None:
                copied = (self.tape.op(weight.nbytes),)
                # a bias or a scale begins a split of its own; the scales of experts are views, which do not
                if name == self.closing and name not in block.biases and (name not in block.scales or "exps" in name):
                    self.arrive()
                return copied
        return ()

    def arrive(self) -> None:
        """Copy the inputs of what follows into the split that begins here."""
        ahead, self.closing = self.ahead, ""
        if ahead is None:
            return
        for windowed in ahead.windows:
            if self.small:
                self.place_rows(windowed)
            if self.shape.flash_here or not self.shape.flash:
                self.mask(windowed)
        if ahead.rows and self.chosen < 0:
            self.chosen = self.tape.op(4 * self.shape.rows)

    def small_copy(self, name: str, nbytes: int) -> tuple[int, ...]:
        """The copy of a bias or a scale that goes with a host weight."""
        if self.foreign is not None and name not in self.foreign:
            return ()
        copied = (self.tape.op(nbytes),)
        if name == self.closing:
            self.arrive()
        return copied

    def product(self, block: Block, name: str, source: int, *, ready: tuple[int, ...] = ()) -> int:
        """A matrix product with its bias. ``ready``: the weight's copy, if it is there already."""
        shape = block.weights[name].shape
        size = (shape[1] if len(shape) > 1 else 1) * self.t4
        scaled, biased = name in block.scales, name in block.biases
        if not self.foreign and self.foreign is not None and not ready:  # no copies: the usual case
            if name in self.absent:
                self.tape.hold(source)
                return self.back(name, size)
            result = self.tape.op(size, source)
            if scaled:
                result = self.tape.same(size, result)
            return self.tape.same(size, result) if biased else result
        copied = ready or self.copy(block, name)
        picks = bool(copied) and self.last and name == "attn_output" and self.chosen < 0  # in the last split before the rows are picked
        if picks and not scaled and not biased:
            self.chosen = self.tape.op(4 * self.shape.rows)
        turns = self.positions and not self.factors and name in ("attn_q", "attn_qkv") and (
            "attn_q_norm" not in block.weights or self.hyper.architecture in NORM_AFTER_ROTATION
        )
        if turns and not scaled and not biased:
            self.place_positions()
        result = self.tape.op(size, *copied, source)
        if scaled:
            small = self.small_copy(name, 4)
            if picks and not biased:
                self.chosen = self.tape.op(4 * self.shape.rows)
            if turns and not biased:
                self.place_positions()
            result = self.tape.same(size, result, *small)
        if biased:
            small = self.small_copy(name, block.weights[name].out * 4)
            if picks:
                self.chosen = self.tape.op(4 * self.shape.rows)
            if turns:
                self.place_positions()
            result = self.tape.same(size, result, *small)
        return result

    def place_positions(self) -> None:
        """Copy the positions into the split that rotates first."""
        self.positions = False
        self.indices = self.tape.op(self.place_bytes)

    def place_rows(self, windowed: bool) -> None:
        """Copy the positions and the rows of one cache, what is not there yet."""
        if self.indices < 0:
            self.indices = self.tape.op(self.small)
            self.covers.add(windowed)
        elif self.hyper.memory != "none" and windowed not in self.covers and windowed not in self.places:
            self.places[windowed] = self.tape.op(self.small - self.place_bytes)

    def norm(self, block: Block, name: str, source: int, size: int) -> int:
        """A norm over ``source``: one tensor, its weight and bias applied in place."""
        tape = self.tape
        biased = name in block.biases
        if not biased and not self.layer_norm and not self.foreign and self.foreign is not None:  # no copies: the usual case
            first = tape.same(size, source)
            return tape.same(size, first) if name in block.weights else first
        first = tape.op(size, source) if biased or self.layer_norm else tape.same(size, source)
        if name in block.weights:
            copied = self.copy(block, name)
            if self.positions and name == "attn_q_norm" and not self.factors:
                self.place_positions()
            first = tape.same(size, first, *copied)
        if biased:
            first = tape.same(size, first)
        return first

    def mask(self, windowed: bool) -> int:
        """The attention mask on the device, copied at first use."""
        found = self.masks.get(windowed)
        if found is None:
            found = self.masks[windowed] = self.halved(windowed, self.tape.op(self.mask_input_bytes(windowed)))
        return found

    def halved(self, windowed: bool, source: int) -> int:
        """The mask as attention reads it, from the one that arrived."""
        if not self.converts:
            return source
        return self.tape.op(self.mask_bytes(windowed), source)

    def mask_input_bytes(self, windowed: bool) -> int:
        """Bytes of one mask as it arrives."""
        return self.mask_bytes(windowed) * (2 if self.converts else 1)

    def mask_bytes(self, windowed: bool) -> int:
        """Bytes of one mask: float16 with flash attention, float32 without."""
        s = self.shape
        cells = s.window_cells if windowed else s.cells
        if self.hyper.memory == "none":
            cells = s.tokens
        return cells * s.tokens * (2 if s.flash else 4)

    # -- attention ------------------------------------------------------------------------------------------------

    def attend(self, block: Block, q: int, k: int, v: int, *, key_row: int, value_row: int, out: int, latent: bool = False, sparse: tuple[int, int] | None = None) -> int:
        """Attention over the cache; ``out`` is elements per token of the result."""
        tape, s = self.tape, self.shape
        cells = (s.window_cells if block.windowed else s.cells) * s.streams
        if self.hyper.memory == "none":
            cells = s.tokens
        cache: list[int] = []
        if self.hyper.memory != "none":
            tape.hold(k, v) if k != v else tape.hold(k)  # the rows go into the cache here
        if self.final and self.indices >= 0:
            tape.hold(self.indices)
            tape.hold(*self.places.values())
            self.indices = -1
            self.places = {}
        if s.flash and self.cache_foreign and self.strays:
            tape.hold(*{q, k, v})  # the cache is read where it is
            self.early = self.copy(block, "attn_output")
            return tape.op(out * self.t4)
        if self.hyper.memory != "none":
            if self.cache_foreign and (s.flash_here or not s.flash):
                pick = (self.waiting >= 0 or self.picking or (self.ending and self.foreign is not None)) and self.chosen < 0
                cache.append(tape.op(row_bytes(s.type_k, key_row) * cells))
                if not s.flash and self.hyper.memory not in SPARSE:
                    self.mask(block.windowed)  # in the order of use
                cache.append(tape.op(row_bytes(s.type_k if latent else s.type_v, key_row if latent else value_row) * cells))
                if pick:
                    self.chosen = tape.op(4 * s.rows)
        else:
            cache = [k, v]
        if s.flash:
            size = out * self.t4
            if not s.flash_here:  # runs on the host: only the result comes back
                picked = (self.mask_for(block, sparse),) if sparse is not None and self.hyper.memory in SPARSE else ()
                tape.hold(q, *picked)
                result = tape.op(size)
                if self.ending and self.chosen < 0:
                    self.chosen = tape.op(4 * s.rows)
                return result
            mask = self.mask_for(block, sparse)
            if self.hyper.memory == "none":
                cache = [tape.op(key_row * cells * 2, k), tape.op(value_row * cells * 2, v)]
            else:  # float32 is converted before, other types behind the result
                keys, values = cache[:1], cache[1:]
                if s.type_k == "f32":
                    keys = [tape.op(key_row * cells * 2, *keys)]
                elif s.type_k != "f16":
                    size = -(-size // 128) * 128 + key_row * cells * 2
                if (s.type_k if latent else s.type_v) == "f32":
                    values = [tape.op(value_row * cells * 2, *values)]
                elif s.type_v != "f16" and not latent:
                    size = -(-size // 128) * 128 + value_row * cells * 2
                cache = [*keys, *values]
            return tape.op(size, tape.view(q), *cache, mask)
        scores = block.heads * cells // s.streams * self.t4
        if s.scores_cap:
            scores = min(scores, max(s.scores_cap, scores // max(block.heads, 1)))
        flat = tape.op(value_row * cells * CACHE_TYPES[s.type_k][1], *cache[1:]) if latent else -1
        kq = tape.op(scores, tape.view(q), *cache[:1])
        kq = tape.same(scores, kq, self.mask_for(block, sparse))
        if latent:
            return tape.op(out * self.t4, flat, kq)
        return tape.op(out * self.t4, tape.view(tape.op(out * self.t4, kq, *cache[1:])))

    def mask_for(self, block: Block, sparse: tuple[int, int] | None) -> int:
        """The mask a block attends through: plain, or made by its indexer."""
        memory = self.hyper.memory
        if sparse is not None and not block.windowed:
            if memory in ("dsa", "dsa-window"):
                return self.sparse_mask(block, *sparse)
            if "indexer.q_proj" in block.weights and memory == "hybrid-indexer":
                return self.pooled_scores(block, sparse[1])
            if "indexer.q_proj" in block.weights and memory == "msa" and self.shape.flash:
                return self.block_mask(block, sparse[1])
            if "indexer.attn_q_b" in block.weights:
                return self.sparse_mask(block, *sparse)
        return self.mask(block.windowed)

    def attention(self, block: Block, n: int, *, beside: bool = False, rows: int = -1, origin: int = -1) -> int:
        """Plain multi-head attention from the normed input to the output projection.

        ``beside``: the graph reaches what follows the attention after the feed-forward, whose result is left in ``fed``.
        ``origin``: the block's input, where the feed-forward has a norm of its own.
        """
        tape, t4, w = self.tape, self.t4, block.weights
        q_out, k_out, v_out = block.heads * block.head_k, block.heads_kv * block.head_k, block.heads_kv * block.head_v
        rope = block.rotated
        gate = -1
        early, self.early = self.early, ()
        if "attn_qkv" in w:
            qkv = self.product(block, "attn_qkv", n, ready=early)
            q, k, v = tape.view(qkv), tape.view(qkv), tape.view(qkv)
        else:
            q = self.product(block, "attn_q", n, ready=early)
            if w["attn_q"].out >= 2 * q_out and "attn_gate" not in w:
                gate = q
            q = tape.view(q)
            k = v = -1
        late = self.hyper.architecture in NORM_AFTER_ROTATION
        normed = q
        if late and rope and self.positions and not self.factors:
            self.place_positions()
        if "attn_q_norm" in w and not late:
            normed = self.norm(block, "attn_q_norm", q, q_out * t4)
        ahead = self.factored(block) if rope else ()
        q = tape.same(q_out * t4, normed) if rope else normed
        if "attn_q_norm" in w and late:
            q = self.norm(block, "attn_q_norm", q, q_out * t4)
        rotated = self.rotates(block)
        fused = "attn_qkv" in w  # parts of one product are copied out first
        if rotated & 1:
            if fused and not rope and "attn_q_norm" not in w:
                q = tape.op(q_out * t4, q)
            q = tape.op(q_out * t4, tape.view(q))
        closing, ahead_of = self.closing, self.ahead
        if self.foreign is None and self.hyper.memory == "none":  # no cache to write to: the mask comes with the last weight
            self.closing, self.ahead = "attn_v", Ahead((block.windowed,), False)
        for part in "kv" if self.hyper.any_window or self.hyper.memory == "none" else "vk":
            if part == "v":
                if v < 0:
                    v = self.product(block, "attn_v", n, ready=ahead) if "attn_v" in w else -1
                if rotated & 2 and v >= 0:
                    if self.foreign is None and self.spin < 0:
                        self.spin = tape.op(ROTATION_BYTES)
                    if fused:
                        v = tape.op(v_out * t4, v)
                    v = tape.op(v_out * t4, tape.view(v))
                continue
            if k < 0:
                k = tape.view(self.product(block, "attn_k", n)) if "attn_k" in w else -1
            if k >= 0:
                k = self.turned(block, "attn_k_norm", k, k_out * t4, rope=rope)
                if rotated & 1:
                    if fused and not rope and "attn_k_norm" not in w:
                        k = tape.op(k_out * t4, k)
                    k = tape.op(k_out * t4, tape.view(k))
        self.closing, self.ahead = closing, ahead_of
        if self.departs and self.factors_here >= 0:
            tape.hold(self.factors_here)  # the device's own blocks have their own
            self.factors_here = -1
        if k >= 0 and v < 0:
            v = k
        out = block.heads * block.head_v
        if k < 0:  # shares another layer's cache
            k = v = q
        cur = self.attend(block, q, k, v, key_row=k_out, value_row=v_out, out=out, sparse=(n, n))
        self.read_ahead()
        if self.input >= 0 and "ffn_gate_inp" in w:
            self.routed = self.route(block, self.input)
            self.input = -1
        if self.waiting >= 0:
            self.chosen = self.chosen if self.chosen >= 0 else tape.op(4 * rows)
            self.waiting = tape.op(self.hyper.embedding * rows * 4, self.waiting, self.chosen)
        if beside:
            whole = self.t4
            apart = "ffn_norm_exps" in w
            if origin >= 0 and not apart:
                n = self.norm(block, "attn_norm", origin, self.hyper.embedding * t4)
            if rows > 0:
                self.chosen = self.chosen if self.chosen >= 0 else tape.op(4 * rows)
                n = tape.op(self.hyper.embedding * rows * 4, origin if apart else n, self.chosen)
                self.t4 = rows * 4
            if apart:
                self.waiting = n if rows > 0 else -1
                n = self.norm(block, "ffn_norm_exps", n if rows > 0 else origin, self.hyper.embedding * self.t4)
                order, weights = self.route(block, n)
                self.fed = self.experts(block, n, order, weights)
            else:
                self.fed = self.feed(block, n)
            self.t4 = whole
        if rotated & 2:
            spin = (self.spin,) if self.final and self.spin >= 0 else ()
            cur = tape.op(out * t4, tape.view(cur), *spin)
        cur = tape.view(cur)
        if gate >= 0:
            g = tape.op(out * t4, tape.view(gate))
            g = tape.same(out * t4, g)
            cur = tape.same(out * t4, cur, g)
        elif "attn_gate" in w:
            g = self.product(block, "attn_gate", n)
            g = tape.same(w["attn_gate"].out * t4, g)
            cur = tape.same(out * t4, cur, g)
        return cur

    def factored(self, block: Block) -> tuple[int, ...]:
        """Factors of the rotation in host memory: each rotation begins a split, which brings the next weight along.

        Not the first one, whose split brings the factors themselves.
        """
        if self.foreign is not None or not self.factors:
            return ()
        if self.factors_here >= 0:
            return self.copy(block, "attn_v")
        if self.positions:
            self.place_positions()
        self.factors_here = self.tape.op(self.factors)
        return ()

    def rotates(self, block: Block) -> int:
        """Bits: keys (1) and values (2) of a quantised cache are rotated first (``src/llama-kv-cache.cpp``)."""
        s = self.shape
        if self.hyper.memory == "none" or not s.rotated or (self.hyper.memory == "hybrid" and self.hyper.any_window):
            return 0
        plain = not self.hyper.mla or self.hyper.memory in SPARSE  # the graph of a latent cache alone does not rotate
        bits = 1 if plain and CACHE_TYPES[s.type_k][0] > 1 and block.head_k % 64 == 0 else 0
        if not self.hyper.mla and CACHE_TYPES[s.type_v][0] > 1 and block.head_v % 64 == 0:
            bits |= 2
        return bits

    def turned(self, block: Block, norm: str, source: int, size: int, *, rope: bool) -> int:
        """Head norm and rotation of queries or keys."""
        cur = source
        late = self.hyper.architecture in NORM_AFTER_ROTATION
        if rope and late:
            cur = self.tape.same(size, cur)
        if norm in block.weights:
            cur = self.norm(block, norm, cur, size)
        if rope and not late:
            cur = self.tape.same(size, cur)
        return cur

    # -- sparse attention -----------------------------------------------------------------------------------------

    def chosen_cells(self) -> int:
        """Cells an indexer picks per token."""
        pool = {"qwen4exp": 3}.get(self.hyper.architecture, 0)
        return min(self.hyper.indexer_top + pool, self.shape.cells)

    def index_mask(self) -> int:
        """The indexer's own mask, float16."""
        found = self.masks.get(None)
        if found is None:
            found = self.masks[None] = self.tape.op(self.shape.cells * self.shape.tokens * 2)
        return found

    def sparse_mask(self, block: Block, source: int, n: int) -> int:
        """The mask of the cells an indexer picks (``src/models/deepseek32.cpp``; shared by its relatives)."""
        tape, t4, hyper, s = self.tape, self.t4, self.hyper, self.shape
        mask = self.mask(False)
        name = "indexer.attn_q_b" if "indexer.attn_q_b" in block.weights else "indexer.q_proj"
        if name in block.weights:
            size = block.weights[name].out * t4
            q = tape.op(size, *self.copy(block, name), source)
            q = tape.op(size, tape.view(q))
            if hyper.architecture != "hy_v4":
                q = tape.op(size, tape.view(q))
            weights = tape.op(hyper.indexer_heads * t4, n)
            score = tape.op(s.cells * t4, tape.view(q), weights, self.index_mask())
            top = tape.op(self.chosen_cells() * t4, score)
            self.top = tape.op(self.chosen_cells() * t4, top)
        zero = tape.op(self.mask_bytes(False), mask)
        leaf = (self.leaves.pop(),) if self.leaves else ()
        tape.hold(*leaf, *((self.top,) if self.top >= 0 else ()))
        return tape.op(self.mask_bytes(False), tape.view(zero), mask)

    def pooled_scores(self, block: Block, n: int) -> int:
        """qwen4exp: every indexer head scores every group of cells at once."""
        tape, t4, hyper, s = self.tape, self.t4, self.hyper, self.shape
        mask = self.mask(False)
        keys = tape.op(hyper.indexer_key * s.cells * s.streams)
        size = block.weights["indexer.q_proj"].out * t4
        q = tape.op(size, *self.copy(block, "indexer.q_proj"), n)
        q = tape.same(size, tape.op(size, tape.view(q)))
        groups = -(-s.cells // hyper.indexer_group)
        scores = tape.op(hyper.indexer_heads * groups * t4, tape.view(q), keys)
        kept = tape.op(hyper.indexer_heads * groups * t4, tape.view(scores))
        one = tape.op(groups * t4, tape.view(kept))
        wide = tape.op(s.cells * t4, one)
        turned = tape.op(s.cells * t4, tape.view(wide))
        floats = tape.op(s.cells * t4, mask)
        turned = tape.same(s.cells * t4, turned, floats)
        top = tape.op(self.chosen_cells() * t4, turned)
        zero = tape.op(self.mask_bytes(False), mask)
        leaf = (self.leaves.pop(),) if self.leaves else ()
        tape.hold(top, *leaf)
        return tape.op(self.mask_bytes(False), tape.view(zero), mask)

    def block_mask(self, block: Block, n: int) -> int:
        """minimax-m3: blocks of cells per head group, spread to a mask of its own per group."""
        tape, t4, hyper, s = self.tape, self.t4, self.hyper, self.shape
        mask = self.mask(False)
        groups = max(hyper.indexer_heads, 1)
        q = tape.op(block.weights["indexer.q_proj"].out * t4, n)
        spread = tape.op(groups * s.cells * t4, q)
        turned = tape.op(groups * s.cells * t4, tape.view(spread))
        floats = tape.op(s.cells * t4, mask)
        return tape.op(groups * s.cells * t4 // 2, tape.view(turned), floats)

    def latent(self, block: Block, n: int) -> int:
        """Multi-head latent attention, absorbed or decompressed."""
        tape, t4, w, hyper = self.tape, self.t4, block.weights, self.hyper
        heads = block.heads
        if "attn_q_a" in w:
            q = self.product(block, "attn_q_a", n)
            q = low_q = self.norm(block, "attn_q_a_norm", q, w["attn_q_a"].out * t4)
            q = self.product(block, "attn_q_b", q)
            q_width = w["attn_q_b"].out
        else:
            low_q = n
            q = self.product(block, "attn_q", n)
            q_width = w["attn_q"].out
        mqa = w["attn_kv_a_mqa"]
        rank = w["attn_kv_a_norm"].shape[0]
        turned = mqa.out - rank
        nope = q_width // heads - turned
        if "attn_k_b" in w and hyper.mla:
            absorbed = tape.op(rank * heads * t4, *self.copy(block, "attn_k_b"), tape.view(q))
            if turned:
                q_pe = tape.op(turned * heads * t4, tape.view(q))
                q = tape.op((rank + turned) * heads * t4, tape.view(absorbed), q_pe)
            else:
                q = absorbed
            kv = self.product(block, "attn_kv_a_mqa", n)
            low = self.norm(block, "attn_kv_a_norm", tape.view(kv), rank * t4)
            key = low
            if turned:
                k_pe = tape.op(turned * t4, tape.view(kv))
                key = tape.op(mqa.out * t4, tape.view(low), k_pe)
            if self.rotates(block) & 1:
                q = tape.op((rank + turned) * heads * t4, tape.view(q))
                key = tape.op(mqa.out * t4, tape.view(key))
            cur = self.attend(
                block, q, key, key, key_row=mqa.out, value_row=rank, out=rank * heads, latent=True, sparse=(low_q, n),
            )  # fmt: skip
            out = w["attn_v_b"].shape[1] * heads
            cur = tape.op(out * t4, *self.copy(block, "attn_v_b"), tape.view(cur))
            return tape.view(tape.op(out * t4, tape.view(cur)))
        kv = self.product(block, "attn_kv_a_mqa", n)
        q_pe = tape.op(turned * heads * t4, tape.view(q))
        low = self.norm(block, "attn_kv_a_norm", tape.view(kv), rank * t4)
        k_pe = tape.op(turned * t4, tape.view(kv))
        both = tape.op(w["attn_kv_b"].out * t4, *self.copy(block, "attn_kv_b"), low)
        value = w["attn_kv_b"].out - nope * heads
        v = tape.op(value * t4, tape.view(both))
        q = tape.op(q_width * t4, tape.view(q), q_pe)
        wide = tape.op(turned * heads * t4, k_pe)
        k = tape.op(q_width * t4, tape.view(both), wide)
        return tape.view(self.attend(block, q, k, v, key_row=block.head_k * block.heads_kv, value_row=block.head_v * block.heads_kv, out=value))

    # -- feed-forward ---------------------------------------------------------------------------------------------

    def dense(self, block: Block, n: int, up: str = "ffn_up", gate: str = "ffn_gate", down: str = "ffn_down") -> int:
        """A dense feed-forward."""
        tape, t4, w = self.tape, self.t4, block.weights
        inner = w[down].shape[0]
        if down in self.absent and up in self.absent:
            tape.hold(n)
            return self.back(down, w[down].out * t4)
        if gate in w:
            a = self.product(block, gate, n)
            b = self.product(block, up, n)
            cur = tape.op(inner * t4, a, b)
        else:
            cur = self.product(block, up, n)
            cur = tape.op(inner * t4, cur) if w[up].out == 2 * inner else tape.same(inner * t4, cur)
        return self.product(block, down, cur)

    def route(self, block: Block, n: int) -> tuple[int, int]:
        """The router: chosen experts and their weights. The back end runs it as one, so all of it lives until its end."""
        tape, t4 = self.tape, self.t4
        count = block.weights["ffn_gate_inp"].out
        logits = self.product(block, "ffn_gate_inp", n)
        probs = tape.op(count * t4, logits)
        extra: tuple[int, ...] = ()
        if "exp_probs_b" in block.biases or "exp_probs_b" in block.weights:
            extra = (tape.op(count * t4, probs),)
        order = tape.op(count * t4, *(extra or (probs,)))
        weights = tape.op(block.experts_used * t4, tape.view(probs), tape.view(order))
        sums: tuple[int, ...] = ()
        if self.hyper.summed:
            sums = (tape.op(t4, weights),)
            sums = (*sums, tape.op(t4, *sums))
        scaled = tape.op(block.experts_used * t4, weights, *sums[1:])
        if self.shape.fuses:
            tape.hold(logits, probs, *extra, order, weights, *sums[:1])
        return order, scaled

    def visiting(self, block: Block, size: int) -> int:
        """The experts of a block of another device; what they need is copied behind their first weight."""
        first = next((n for n in ("ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps") if n in block.weights), "")
        copied = self.copy(block, first)
        n = self.tape.op(size)
        order = self.tape.op(block.weights["ffn_gate_inp"].out * self.t4)
        weights = self.tape.op(block.experts_used * self.t4)
        return self.experts(block, n, order, weights, first=copied)

    def back(self, name: str, size: int) -> int:
        """The result of a product on the host, with which a split begins."""
        result = self.tape.op(size)
        if name == self.closing:
            self.arrive()
        return result

    def chosen_product(self, block: Block, name: str, size: int, x: int, chosen: int, first: tuple[int, ...] = ()) -> int:
        """A product with the matrices of the chosen experts, and their bias."""
        if name in self.absent:
            self.tape.hold(x, chosen)
            return self.back(name, size)
        result = self.tape.op(size, *(first or self.copy(block, name)), x, chosen)
        if name not in block.biases:
            return result
        matrix = block.weights[name]
        return self.tape.same(size, result, *self.small_copy(name, matrix.out * matrix.shape[-1] * 4), chosen)

    def experts(self, block: Block, n: int, order: int, weights: int, *, suffix: str = "_exps", first: tuple[int, ...] = ()) -> int:
        """The chosen experts and their weighted sum. ``first`` is a copy of the first weight that is there already."""
        tape, t4, w = self.tape, self.t4, block.weights
        used = max(block.experts_used, 1)
        down = w["ffn_down" + suffix]
        inner = down.shape[0] * used * t4
        chosen = tape.view(order)
        x = tape.view(n)
        if self.hyper.architecture == "llama4":  # inputs are weighted, one copy per chosen expert
            whole = self.hyper.embedding * used * t4
            x = tape.same(whole, tape.op(whole, x), weights)
        if "ffn_down" + suffix in self.absent and not self.absent.isdisjoint(("ffn_up" + suffix, "ffn_gate_up" + suffix)):
            tape.hold(x, chosen)
            if self.hyper.architecture == "llama4":  # every expert's results arrive as a view of those of all
                views = [tape.op(t4 * used * down.shape[1] - (used - 1) * down.shape[1] * 4) for _ in range(used - 1)]
                last = self.back("ffn_down" + suffix, t4 * used * down.shape[1] - (used - 1) * down.shape[1] * 4)
                return tape.op(down.shape[1] * t4, *views, last)
            return self.weighted(block, self.back("ffn_down" + suffix, down.shape[1] * used * t4), weights, suffix)
        if "ffn_gate_up" + suffix in w:
            both = self.chosen_product(block, "ffn_gate_up" + suffix, 2 * inner, x, chosen, first)
            cur = tape.op(inner, tape.view(both), tape.view(both))
        elif "ffn_gate" + suffix in w:
            a = self.chosen_product(block, "ffn_gate" + suffix, inner, x, chosen, first)
            b = self.chosen_product(block, "ffn_up" + suffix, inner, x, chosen)
            cur = tape.op(inner, a, b)
        else:
            cur = self.chosen_product(block, "ffn_up" + suffix, inner, x, chosen, first)
            cur = tape.same(inner, cur)
        return self.weighted(block, self.chosen_product(block, "ffn_down" + suffix, down.shape[1] * used * t4, cur, chosen), weights, suffix)

    def weighted(self, block: Block, cur: int, weights: int, suffix: str = "_exps") -> int:
        """The weighted sum of what the chosen experts gave."""
        tape, t4 = self.tape, self.t4
        used = max(block.experts_used, 1)
        down = block.weights["ffn_down" + suffix]
        size = down.shape[1] * used * t4
        if self.hyper.architecture == "llama4":
            return tape.op(down.shape[1] * t4, tape.view(cur))
        fused = self.shape.fuses and 2 <= used <= FUSED_EXPERTS
        scaled = cur
        if "ffn_down" + suffix in block.scales:
            scaled = tape.op(size, cur) if fused else tape.same(size, cur)
        whole = tape.same(size, scaled, weights) if scaled != cur or not fused else tape.op(size, cur, weights)
        if self.shape.sum_apart:
            whole = tape.op(size, whole, cur)
        total = tape.op(down.shape[1] * t4, tape.view(whole))  # every further sum takes over the place of the one before
        if fused:
            tape.hold(cur, weights)
        return total

    def joined(self, block: Block, x: int, blocks: int) -> int:
        """A block's own input beside the state, gated by the state and added to it."""
        tape = self.tape
        size, small = self.hyper.embedding * self.t4, self.width_beside * self.t4
        gate = tape.same(small, self.product(block, "inp_gate", x))
        if self.origin >= 0:  # behind the first gate: the first state, projected for all blocks
            wide = small * blocks
            projected = tape.same(wide, tape.op(wide, self.origin))
            projected = tape.op(wide, tape.view(projected))
            projected = tape.same(wide, projected, self.beside)
            self.beside, self.origin = tape.op(wide, tape.view(projected)), -1
        own = (tape.view(self.beside),) if self.beside >= 0 else ()
        cur = self.product(block, "proj", tape.same(small, gate, *own))
        return tape.same(size, x, self.norm(block, "post_norm", cur, size))

    def left(self, block: Block) -> list[int]:
        """What arrives of a block of the host whose end, which has no weights, is computed here: see :meth:`inherit`."""
        tape, w = self.tape, block.weights
        size = self.hyper.embedding * self.t4
        found = []
        if self.sums_here(block):
            used = max(block.experts_used, 1)
            found = [tape.op(w["ffn_down_exps"].shape[1] * used * self.t4), tape.op(used * self.t4)]
        elif "post_ffw_norm" not in w and "ffn_down_shexp" in w:
            found = [tape.op(size), tape.op(size)]
        else:
            found = [tape.op(size)]
        if not w.keys() & {"post_ffw_norm", "ffn_norm", "post_attention_norm", "attn_output_norm"} and "ffn_down" in w:
            found.append(tape.op(size))  # the attention's result, beside the feed-forward's
        return [*found, tape.op(size)]

    def sums_here(self, block: Block) -> bool:
        """Whether the weighted sum of a host's experts is computed where the next weight is."""
        w = block.weights
        return "ffn_down_exps" in w and "ffn_gate_inp" in w and not w.keys() & {"post_ffw_norm", "ffn_down_shexp", "ffn_down"}

    def inherit(self, block: Block, left: Sequence[int]) -> int:
        """The end of a block of the host: sums."""
        size = self.hyper.embedding * self.t4
        cur, *rest = left
        if self.sums_here(block):
            cur, rest = self.weighted(block, cur, rest[0]), rest[1:]
        for other in rest:
            cur = self.tape.same(size, cur, other)
        return cur

    def feed(self, block: Block, n: int) -> int:
        """Whatever feed-forward the block has."""
        tape, t4, w = self.tape, self.t4, block.weights
        if "ffn_gate_inp" not in w or not block.experts_used or self.hyper.architecture in WITHOUT_EXPERTS:
            return self.dense(block, n) if "ffn_down" in w else n
        order, weights = self.routed or self.route(block, n)
        self.routed = None
        size = self.hyper.embedding * t4
        cur = tape.op(size, n, order, weights) if self.elsewhere else self.experts(block, n, order, weights)
        if "ffn_down_shexp" in w:
            shared = self.dense(block, n, "ffn_up_shexp", "ffn_gate_shexp", "ffn_down_shexp")
            if "ffn_gate_inp_shexp" in w:
                g = self.product(block, "ffn_gate_inp_shexp", n)
                shared = tape.same(size, shared, g)
            cur = tape.same(size, cur, shared)
        elif "ffn_down" in w:
            dense = self.dense(block, n)
            cur = tape.same(size, dense, cur) if self.hyper.architecture in DENSE_FIRST else tape.same(size, cur, dense)
        return cur

    # -- recurrent ------------------------------------------------------------------------------------------------

    def delta_net(self, block: Block, n: int) -> int:
        """A gated delta net (qwen3next, qwen35)."""
        tape, t4, w, hyper, s = self.tape, self.t4, block.weights, self.hyper, self.shape
        kernel, mixed = w["ssm_conv1d"].shape[0], w["ssm_conv1d"].shape[1]
        inner = w["ssm_out"].shape[0]
        key = (mixed - inner) // 2
        rows, state = hyper.state_r * s.sequences * 4, hyper.state_s * s.sequences * 4
        host = self.foreign is None  # the states are host tensors too, copied behind the weight of the split that reads them
        old = -1 if host else tape.op(rows)
        copied = self.copy(block, "attn_qkv")
        if host:
            old = tape.op(rows)
        qkv = self.product(block, "attn_qkv", n, ready=copied)
        joined = tape.op(mixed * (s.tokens + (kernel - 1) * s.sequences) * 4, old, tape.view(qkv))
        last = -1 if host else tape.op(state)
        conv = tape.op(mixed * t4, *self.copy(block, "ssm_conv1d"), joined)
        conv = tape.same(mixed * t4, conv)
        repeats = hyper.architecture == "qwen3next" and key != inner  # repeated to every value head before the net
        q = tape.same(key * t4, tape.op(key * t4, tape.view(conv)))
        if repeats:
            q = tape.view(tape.op(inner * t4, tape.view(q)))
        k = tape.same(key * t4, tape.op(key * t4, tape.view(conv)))
        if repeats:
            k = tape.view(tape.op(inner * t4, tape.view(k)))
        one = w["ssm_a"].shape[-1] * t4 if "ssm_a" in w else 0
        joint = self.product(block, "ssm_ba", n) if "ssm_ba" in w else -1
        alpha = joint if joint >= 0 else self.product(block, "ssm_alpha", n) if "ssm_alpha" in w else n
        if joint >= 0:
            gate = tape.op(one, tape.view(joint))
            gate = tape.same(one, gate, *self.small_copy("ssm_dt", one // s.tokens))
        else:
            gate = tape.op(one, *self.small_copy("ssm_dt", one // s.tokens), tape.view(alpha))
        gate = tape.same(one, tape.same(one, gate), *self.copy(block, "ssm_a"))
        copied = () if joint >= 0 else self.copy(block, "ssm_beta")
        if host:
            last = tape.op(state)
        if joint >= 0:
            beta = tape.same(one, tape.op(one, tape.view(joint)))
        else:
            beta = tape.op(one, tape.view(self.product(block, "ssm_beta", n, ready=copied) if "ssm_beta" in w else n))
        net = tape.op(inner * t4 + state, q, k, tape.view(conv), tape.view(gate), beta, tape.view(last))
        if self.cache_foreign and not host and self.rotates_next and self.indices < 0 and self.small:
            self.place_positions()  # the split that begins behind the new state reaches into the next block
        out = tape.op(inner * t4, *self.copy(block, "ssm_norm"), tape.view(net))
        z = self.product(block, "attn_gate", n) if "attn_gate" in w else tape.op(inner * t4, n)
        gate = tape.op(inner * t4, tape.view(z))
        out = tape.same(inner * t4, out, gate)
        return tape.view(out)

    def scan(self, block: Block, n: int) -> int:
        """A state-space block (Mamba-1 and Mamba-2)."""
        tape, t4, w, hyper, s = self.tape, self.t4, block.weights, self.hyper, self.shape
        kernel, mixed = w["ssm_conv1d"].shape[0], w["ssm_conv1d"].shape[1]
        inner = w["ssm_out"].shape[0]
        host = self.foreign is None
        copied = self.copy(block, "ssm_in") if host else ()
        old = self.take_ahead(hyper.state_r * s.sequences * 4)
        both = self.product(block, "ssm_in", n, ready=copied)
        joined = tape.op(mixed * (s.tokens + (kernel - 1) * s.sequences) * 4, old, tape.view(both))
        conv = tape.op(mixed * t4, *self.copy(block, "ssm_conv1d"), joined)
        if "ssm_conv1d" in block.biases:
            conv = tape.same(mixed * t4, conv, *self.small_copy("ssm_conv1d", mixed * 4))
        conv = tape.same(mixed * t4, conv)
        state = hyper.state_s * s.sequences * 4
        if "ssm_x" in w:
            x = self.product(block, "ssm_x", conv)
            dt = tape.op(w["ssm_dt"].shape[0] * t4 if "ssm_dt" in w else inner * t4, tape.view(x))
            dt = self.product(block, "ssm_dt", dt) if "ssm_dt" in w else dt
            normed = (tape.op(w[name].shape[0] * t4, tape.view(x)) for name in ("ssm_b_norm", "ssm_c_norm") if name in w)
            sources: tuple[int, ...] = (tape.view(conv), dt, tape.view(x), *normed)
        else:
            sources = (tape.view(conv), tape.op(w["ssm_a"].shape[-1] * t4 if "ssm_a" in w else 0, tape.view(both)))
        if self.cache_foreign or "ssm_a" in block.on_host:  # runs on the host, and its result comes back
            tape.hold(*sources)
            after = (tape.op(state),) if not self.cache_foreign and not self.kept else ()
            y = tape.op(0 if self.kept else inner * t4)
            tape.hold(*after)
        else:
            y = tape.view(tape.op(inner * t4 + state, *sources))
        self.read_ahead()
        z = tape.op(inner * t4, tape.view(both))
        copied = self.copy(block, "ssm_d")
        skip = tape.same(inner * t4, conv, *copied) if "ssm_x" in w else tape.op(inner * t4, *copied, tape.view(conv))
        cur = tape.op(inner * t4, z, tape.same(inner * t4, y, skip))
        if "ssm_norm" in w:
            cur = self.norm(block, "ssm_norm", tape.view(cur), inner * t4)
        return cur

    def read_ahead(self) -> None:
        """Read the next block's states: most graphs place that before they lay this block out to its end."""
        if self.states_next and self.ahead_state < 0 and not self.cache_foreign:
            self.ahead_state = self.tape.op(self.states_next)

    def take_ahead(self, size: int) -> int:
        """Return the block's convolution state, read already or now."""
        found, self.ahead_state = self.ahead_state, -1
        return found if found >= 0 else self.tape.op(size)

    def short_conv(self, block: Block, n: int) -> int:
        """A gated short convolution (lfm2)."""
        tape, t4, s = self.tape, self.t4, self.shape
        width, state = self.hyper.embedding, self.hyper.state_r * s.sequences * 4
        host = self.cache_foreign
        old = -1 if host else self.take_ahead(state)
        both = self.product(block, "shortconv.in_proj", n)
        b = tape.op(width * t4, tape.view(both), tape.view(both))
        if host:
            old = self.take_ahead(state)
        joined = tape.op(width * t4 + state, old, tape.view(b))
        self.read_ahead()
        conv = tape.op(width * t4, *self.copy(block, "shortconv.conv"), joined)
        return tape.same(width * t4, tape.view(both), conv)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def block(self, block: Block, x: int, *, normed: int = -1, rows: int = -1) -> int:
        """One block; returns its output. ``normed`` is the norm a device before this one already computed."""
        tape, w = self.tape, block.weights
        size = self.hyper.embedding * self.t4
        if block.attends and self.small and not self.final:
            if self.foreign is None:
                # copied with the weight that is last before the rotation
                self.positions = self.indices < 0 and block.rotated
            elif not self.cache_foreign:
                self.place_rows(block.windowed)  # a split copies its inputs when it begins
            elif self.indices < 0:
                self.indices = tape.op(self.place_bytes)
        if block.attends and not self.cache_foreign and self.foreign is not None and (self.shape.flash_here or not self.shape.flash):
            self.mask(block.windowed)
        if self.wide > 1:
            return self.streamed(block, x)
        n = x
        second = "attn_norm_2" in w  # the attention's own norm, beside the feed-forward's
        if second:
            n = self.norm(block, "attn_norm_2", x, size)
        elif "attn_norm" in w or self.hyper.architecture in NORM_WITHOUT_WEIGHT:
            if normed >= 0:
                n = tape.same(size, normed, *self.copy(block, "attn_norm")) if "attn_norm" in w else normed
            else:
                n = self.norm(block, "attn_norm", x, size)
        feeds = "ffn_down" in w or "ffn_gate_inp" in w
        inner_norm = next((name for name in ("ffn_norm", "post_attention_norm", "attn_output_norm") if name in w), None)
        if inner_norm is None and self.hyper.architecture in NORM_WITHOUT_WEIGHT:
            inner_norm = "ffn_norm"
        parallel = inner_norm is None and "post_ffw_norm" not in w and feeds
        mixed = True
        if block.recurrent and block.attends and "ssm_in" in w:  # both side by side
            attended = self.attention(block, n)
            again = self.norm(block, "attn_norm", x, size) if "attn_norm" in w else x
            scanned = self.scan(block, again)
            ready, self.early = self.early, ()
            a = self.product(block, "attn_output", attended, ready=ready)
            o = tape.same(size, a, self.product(block, "ssm_out", scanned))
        elif block.recurrent:
            o = self.recurrent(block, n)
        elif "attn_kv_a_mqa" in w:
            o = self.product(block, "attn_output", self.gated(block, self.latent(block, n), n))
        elif "attn_q" in w or "attn_qkv" in w:
            beside = (parallel or "ffn_norm_exps" in w) and "attn_output" in w and self.hyper.architecture not in ATTENTION_FIRST
            second = second or "ffn_norm_exps" in w
            if self.hyper.architecture in ROUTED_FIRST:
                self.input = x
            if rows > 0 and not beside and RESIDUAL_FIRST.get(self.hyper.architecture, 0) & 2:
                self.waiting = x
            self.picking = beside and rows > 0
            o = self.attention(block, n, beside=beside, rows=rows, origin=x if second else -1)
            if "ffn_norm_exps" in w:  # experts on a norm of the block's input, the dense part behind them
                o, fed = self.product(block, "attn_output", o), self.fed
                if rows > 0:
                    size = self.hyper.embedding * rows * 4
                    o, x = tape.op(size, o, self.chosen), self.waiting
                    self.chosen = self.waiting = -1
                    self.t4, whole = rows * 4, self.t4
                mid = tape.same(size, o, x)
                dense = tape.same(size, self.dense(block, self.norm(block, "ffn_norm", mid, size)), mid)
                if rows > 0:
                    self.t4 = whole
                return tape.same(size, fed, dense)
            if beside:
                h = self.fed
                if self.hyper.architecture in RESIDUAL_BEFORE_ATTENTION:
                    if rows > 0:
                        size = self.hyper.embedding * rows * 4
                        x = tape.op(size, x, self.chosen)
                    h = tape.same(size, h, x)
                    o = self.product(block, "attn_output", o)
                    if rows > 0:
                        o = tape.op(size, o, self.chosen)
                        self.chosen = -1
                    return tape.same(size, h, o)
                o = self.product(block, "attn_output", o)
                if rows > 0:
                    size = self.hyper.embedding * rows * 4
                    o = tape.op(size, o, self.chosen)
                    h = tape.same(size, h, o)
                    x = tape.op(size, x, self.chosen)
                    self.chosen = -1
                    return tape.same(size, h, x)
                return tape.same(size, tape.same(size, h, o), x)
            ready, self.early = self.early, ()
            o = self.product(block, "attn_output", o, ready=ready) if "attn_output" in w else o
        else:
            o, mixed = n, False
        if "post_attention_norm" in w and ("ffn_norm" in w or "post_ffw_norm" in w) and mixed:
            o = self.norm(block, "post_attention_norm", o, size)
            inner_norm = "ffn_norm" if "ffn_norm" in w else None
        if not feeds:
            return tape.same(size, o, x)
        if not mixed:
            h = self.feed(block, n)
            return tape.same(size, h, x)
        if rows > 0:
            small = self.hyper.embedding * rows * 4
            chosen = (self.chosen if self.chosen >= 0 else tape.op(4 * rows),)
            o = tape.op(small, o, *chosen)
            x, self.waiting = self.waiting if self.waiting >= 0 else tape.op(small, x, *chosen), -1
            if parallel:
                n = tape.op(small, n, *chosen)
            self.chosen = -1
            before = self.t4
            self.t4 = rows * 4
            size = small
        if parallel:
            h = self.feed(block, n)
            h = tape.same(size, o, h)
            h = tape.same(size, h, x)
        else:
            first = RESIDUAL_FIRST.get(self.hyper.architecture, 0)
            mid = tape.same(size, x, o) if first & 2 else tape.same(size, o, x)
            m = self.norm(block, inner_norm, mid, size) if inner_norm else mid
            h = self.feed(block, m)
            if "post_ffw_norm" in w:
                h = self.norm(block, "post_ffw_norm", h, size)
            h = tape.same(size, mid, h) if first & 1 else tape.same(size, h, mid)
        if rows > 0:
            self.t4 = before
        return h

    def streamed(self, block: Block, x: int) -> int:
        """A block between several residual streams (hyper-connections)."""
        n, gates = self.gather(block, "hc_attn", x)
        w = block.weights
        if "attn_norm" in w:
            n = self.norm(block, "attn_norm", n, self.hyper.embedding * self.t4)
        o = self.mixer(block, n)
        x = self.scatter(o, x, gates)
        n, gates = self.gather(block, "hc_ffn", x)
        if "ffn_norm" in w:
            n = self.norm(block, "ffn_norm", n, self.hyper.embedding * self.t4)
        return self.scatter(self.feed(block, n), x, gates)

    def gather(self, block: Block, name: str, x: int) -> tuple[int, int]:
        """Mix the streams into one input; returns it and the gates."""
        tape = self.tape
        one = self.hyper.embedding * self.t4
        whole = one * self.wide
        apart = self.hyper.architecture == "hy_v4"  # mixed stream by stream, on a copy
        flat = tape.op(whole, x) if apart else x
        normed = tape.op(whole, x)
        gates = tape.op(self.wide * (self.wide + 2) * self.t4, normed)
        if name + "_up" in block.weights:
            wide = tape.op(whole, gates)
            return tape.op(one, tape.view(normed), tape.view(wide)), gates
        if apart:
            mixed = tape.op(one, tape.view(flat), gates)
            part = tape.op(one, tape.view(flat), gates)
            return tape.op(one, tape.same(one, mixed, part)), gates
        return tape.op(one, x, gates), gates

    def scatter(self, o: int, x: int, gates: int) -> int:
        """Add a result to every stream."""
        tape = self.tape
        one = self.hyper.embedding * self.t4
        whole = one * self.wide
        if self.hyper.architecture != "hy_v4":
            return tape.op(whole, o, x, gates)
        flat = tape.op(whole, x)
        out = tape.op(one, o)
        joined = tape.same(one, tape.op(one, out, gates), tape.view(flat))
        for streams in range(2, self.wide + 1):
            part = tape.op(one, out, gates, flat)
            joined = tape.op(one * streams, joined, part)
        return tape.op(whole, joined)

    def mixer(self, block: Block, n: int) -> int:
        """Attention or recurrence up to the output projection."""
        w = block.weights
        if block.recurrent:
            return self.recurrent(block, n)
        if "attn_kv_a_mqa" in w:
            return self.product(block, "attn_output", self.gated(block, self.latent(block, n), n))
        if "attn_kv" in w and "attn_output_b" in w:
            return self.compressed(block, n)
        return self.product(block, "attn_output", self.attention(block, n))

    def gated(self, block: Block, cur: int, n: int) -> int:
        """A gate on the attention's result, where the block has one."""
        if "attn_gate" not in block.weights or "attn_kv_a_mqa" not in block.weights:
            return cur
        size = block.weights["attn_gate"].out * self.t4
        g = self.tape.same(size, self.product(block, "attn_gate", n))
        return self.tape.same(size, cur, g)

    def compressed(self, block: Block, n: int) -> int:
        """deepseek4: one latent per token, compressed caches beside a window, grouped output projection."""
        tape, t4, w, hyper, s = self.tape, self.t4, block.weights, self.hyper, self.shape
        q = self.product(block, "attn_q_a", n)
        low = self.norm(block, "attn_q_a_norm", q, w["attn_q_a"].out * t4)
        size = w["attn_q_b"].out * t4
        q = self.product(block, "attn_q_b", low)
        q = tape.op(size, tape.view(q))
        q = tape.op(size, tape.view(q))
        kv = self.product(block, "attn_kv", n)
        kv = tape.op(w["attn_kv"].out * t4, kv)
        mask = self.mask(True)
        ratio = 4 if "indexer.attn_q_b" in w else 128 if "attn_compressor_kv" in w else 0
        cells = s.window_cells
        if ratio:
            groups = -(-s.cells // ratio)
            cells += -(-groups // 256) * 256
            both = w["attn_compressor_kv"].out * t4
            tape.hold(tape.op(both, n), tape.op(both, n))
            if ratio == 4:
                wide = w["indexer.attn_q_b"].out * t4
                i = tape.op(wide, *self.copy(block, "indexer.attn_q_b"), low)
                i = tape.op(wide, tape.view(i))
                i = tape.op(wide, tape.view(i))
                score = tape.op(groups * t4, tape.view(i), self.compressed_mask(groups))
                top = tape.op(min(hyper.indexer_top, groups) * t4, score)
                tape.hold(tape.op(min(hyper.indexer_top, groups) * t4, top))
            mask = tape.op(cells * s.tokens * (2 if s.flash else 4), mask)
            keys = tape.op(cells * s.streams * hyper.head_k * 2)
        else:
            keys = -1
        extra = (keys,) if keys >= 0 else ()
        if s.flash:
            cur = tape.op(size, tape.view(q), mask, *extra)
        else:
            scores = block.heads * cells * t4
            kq = tape.same(scores, tape.op(scores, tape.view(q), *extra), mask)
            cur = tape.op(size, tape.view(tape.op(size, kq)))
        cur = tape.op(size, tape.view(cur))
        a = tape.op(w["attn_output_b"].shape[0] * t4, *self.copy(block, "attn_output_a"), tape.view(cur))
        tape.hold(kv)
        return self.product(block, "attn_output_b", tape.view(a))

    def compressed_mask(self, groups: int) -> int:
        """The indexer's mask over compressed cells."""
        found = self.masks.get(None)
        if found is None:
            found = self.masks[None] = self.tape.op(groups * self.shape.tokens * 2)
        return found

    def recurrent(self, block: Block, n: int) -> int:
        """A recurrent mixer up to its output projection."""
        w = block.weights
        if "shortconv.conv" in w:
            return self.product(block, "shortconv.out_proj", self.short_conv(block, n))
        if "ssm_out" in w and "attn_qkv" in w and "ssm_conv1d" in w:
            return self.tape.view(self.product(block, "ssm_out", self.delta_net(block, n)))
        if "ssm_in" in w:
            return self.product(block, "ssm_out", self.scan(block, n))
        tape, t4 = self.tape, self.t4
        wide = sum(x.out for k, x in w.items() if len(x.shape) > 1 and not k.startswith("ffn")) or self.hyper.embedding
        inner = tape.op(wide * t4 + self.hyper.state_s * self.shape.sequences * 4, n)
        return tape.op(self.hyper.embedding * t4, inner)

    def logits(self, x: int, vocabulary: int, rows: int, copy: int = 0) -> None:
        """Final norm and logits, both results."""
        tape = self.tape
        late = self.hyper.architecture in LATE_ROWS
        size = self.hyper.embedding * (self.t4 if late else rows * 4)
        n = tape.same(size, x) if not self.layer_norm else tape.op(size, x)
        n = tape.result(size, n)
        if late:
            chosen = self.chosen if self.chosen >= 0 else tape.op(4 * rows)
            self.chosen = -1
            n = tape.keep(self.hyper.embedding * rows * 4, n, chosen)
        if self.hyper.architecture in NO_LOGITS:
            return
        weight = (tape.op(copy),) if copy else ()
        tape.keep(vocabulary * rows * 4, n, *weight)


#: Graphs that end with the state: what they give is pooled, and no vocabulary is asked.
NO_LOGITS = frozenset(
    ["bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert", "gemma-embedding", "llama-embed", "t5encoder"]
)
#: A 64 x 64 Hadamard matrix that turns values.
ROTATION_BYTES = 64 * 64 * 4
#: Memory modules with an indexer beside the attention.
SPARSE = frozenset({"dsa", "dsa-window", "msa", "hybrid-indexer", "dsv4"})
#: Queries and keys are normed after the rotation.
NORM_AFTER_ROTATION = frozenset({"hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "maincoder", "talkie"})
#: The residual stands first in the sum, so its place is the one taken over. Bits: after the feed-forward (1), after the mixer (2).
RESIDUAL_FIRST: Mapping[str, int] = {"phi3": 1, "phimoe": 1, "openelm": 2, "jamba": 3, "lfm2": 3, "lfm2moe": 3}
#: Rows of the result are picked after the last block: draft heads read every token's state, which is a result too.
LATE_ROWS = frozenset(
    ["bailingmoe3", "cohere2moe", "gemma4", "hy_v3", "nemotron_h", "gpt-oss", "qwen35", "qwen35moe", "qwen3next", "step35"]
)
#: Attention and feed-forward side by side: these sum in another order than feed-forward, attention, residual.
ATTENTION_FIRST = frozenset({"phi2"})
RESIDUAL_BEFORE_ATTENTION = frozenset({"command-r", "cohere2", "cohere2moe", "gptneox"})
#: The router reads the block's input, so it runs before the attention's result is projected.
ROUTED_FIRST = frozenset({"smallthinker"})
#: Graphs that know no experts, though the loader takes them: such a block has no feed-forward.
WITHOUT_EXPERTS = frozenset({"refact"})
#: The dense part stands first in the sum with the experts.
DENSE_FIRST = frozenset({"grok"})
#: The norms of a block have no weights.
NORM_WITHOUT_WEIGHT = frozenset({"olmo", "talkie"})


def plain(hyper: HyperParameters) -> bool:
    """Whether the graph is attention and feed-forward only: those have changed least between builds."""
    return hyper.memory not in SPARSE and hyper.hyper_streams <= 1 and not any(hyper.recurrent)
