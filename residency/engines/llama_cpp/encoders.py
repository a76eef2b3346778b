"""The graph of every image and audio encoder the engine knows, one function a family.

Each function says which operations an encoder runs, in the engine's order and with the engine's shapes; weights are
named as in the ``mmproj`` file, and what a file does not have is not run. Laws restated from llama.cpp 0.5.0 (0c1e570):
``tools/mtmd/clip.cpp`` (build_vit, build_attn, build_ffn and their like) and ``tools/mtmd/models/``.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

from .encoder_graph import VIEW, Graph, Node
from .graph import FUSED_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from residency.checkpoint.model import Checkpoint

#: Feed-forward weights that old files hold the wrong way round are exchanged for these projectors.
SWAPPED = frozenset({
    "mlp", "ldp", "ldpv2", "qwen2vl_merger", "qwen2.5vl_merger", "exaone4_5", "adapter", "gemma3", "idefics3", "resampler",
    "minicpmv4_6",
})  # fmt: skip
#: Encoders whose every product is clamped before and after (Gemma 4).
CLAMPED = frozenset({"gemma4v", "gemma4a"})


#: More experts a token than any model has: the file is damaged.
MOST_EXPERTS = 1024


class UnsuitableError(Exception):
    """The file's shapes do not fit the encoder it names; the engine would refuse it, too."""


class Encoder(Graph):
    """A graph with the shape of one encoder: its metadata, its weights, and the image it is built for.

    Args:
        model: the projector file.
        kind: the projector's name, as :data:`ENCODERS` has it.
        side: "vision" or "audio".
        merge: patches per token and side.
        size: width and height of the image; frames and mel bins of a sound.
        batch: images encoded at once.
        tiles: tiles of one image that are encoded together, the overview among them.
    """

    def __init__(
        self, model: Checkpoint, kind: str, *, side: str, flash: bool, size: tuple[int, int], patch: int, merge: int, batch: int = 1, tiles: int = 1
    ) -> None:
        super().__init__(flash=flash)
        self.model, self.kind, self.side = model, kind, side
        self.prefix = "v" if side == "vision" else "a"
        self.width, self.height, self.patch, self.merge = *size, patch, max(1, merge)
        self.batch, self.tiles = batch, tiles
        self.columns, self.lines = size[0] // patch, size[1] // patch
        self.patches = self.columns * self.lines
        self.embedding = self.number("embedding_length")
        self.heads = self.number("attention.head_count")
        self.heads_kv = self.number("attention.head_count_kv", self.heads)
        self.head = self.number("attention.head_dim") or (self.embedding // self.heads if self.heads else 0)
        self.layers = self.number("block_count")
        self._weights: dict[str, Node] = {}

    def number(self, key: str, default: int = 0) -> int:
        """Return a metadata number of this encoder."""
        value = self.model.metadata.get(f"clip.{self.side}.{key}")
        return int(value) if isinstance(value, (int, float)) and 0 < value < 2**20 else default

    def numbers(self, key: str) -> tuple[int, ...]:
        """Return a metadata array of this encoder."""
        value = self.model.metadata.get(f"clip.{self.side}.{key}")
        return tuple(int(v) for v in value) if isinstance(value, tuple) and all(isinstance(v, (int, float)) for v in value) else ()

    def w(self, name: str) -> Node | None:
        """Return a weight of the file, or None."""
        found = self._weights.get(name)
        if found is None:
            tensor = self.model.by_name.get(name)
            if tensor is None:
                return None
            found = self._weights[name] = self.weight(tensor)
        return found

    def need(self, name: str) -> Node:
        """Return a weight the engine insists on."""
        found = self.w(name)
        if found is None:
            raise UnsuitableError(name)
        return found

    def of(self, layer: int, name: str) -> Node | None:
        """Return a weight of a block."""
        return self.w(f"{self.prefix}.blk.{layer}.{name}")

    # parts

    def mm(self, weight: Node, x: Node) -> Node:
        """A product with a weight, clamped where the encoder does so."""
        if weight.ne[0] != x.ne[0]:
            raise UnsuitableError(self.kind)
        if self.kind in CLAMPED:
            return self.like("clamp", self.matmul(weight, self.like("clamp", x)))
        return self.matmul(weight, x)

    def scaled(self, name: str, x: Node) -> Node:
        """A product with ``name.weight`` of every element, and ``name.bias`` added."""
        return self.add(self.mul(x, self.need(f"{name}.weight")), self.w(f"{name}.bias"))

    def linear(self, name: str, x: Node) -> Node:
        """A product with ``name.weight`` and its bias, where there is one."""
        return self.add(self.mm(self.need(f"{name}.weight"), x), self.w(f"{name}.bias"))

    def normed(self, name: str, x: Node, *, rms: bool = False) -> Node:
        """A norm with ``name.weight`` and ``name.bias``, where there are any."""
        return self.norm(x, self.w(f"{name}.weight"), self.w(f"{name}.bias"), rms=rms)

    def feed(
        self, x: Node, up: Node, up_bias: Node | None, down: Node | None, down_bias: Node | None,
        gate: Node | None = None, gate_bias: Node | None = None, *, squared: bool = False,
    ) -> Node:  # fmt: skip
        """A feed-forward network."""
        wide = self.add(self.mm(up, x), up_bias)
        if gate is not None:
            wide = self.glu(self.add(self.mm(gate, x), gate_bias), wide)
        else:
            wide = self.act(wide)
            if squared:
                wide = self.like("sqr", wide)
        return self.add(self.mm(down, wide) if down is not None else wide, down_bias)

    def mlp(self, x: Node, up: str, down: str, *, squared: bool = False) -> Node:
        """A feed-forward network of two named layers."""
        return self.feed(x, self.need(f"{up}.weight"), self.w(f"{up}.bias"), self.need(f"{down}.weight"), self.w(f"{down}.bias"), squared=squared)

    def layer_feed(self, layer: int, x: Node) -> Node:
        """The feed-forward network of a block."""
        if self.of(layer, "ffn_gate_exps.weight") is not None:
            return self.experts(layer, x)
        up, down = (self.need(f"{self.prefix}.blk.{layer}.ffn_{n}.weight") for n in ("up", "down"))
        up_bias, down_bias = (self.of(layer, f"ffn_{n}.bias") for n in ("up", "down"))
        if self.kind in SWAPPED and down.ne[0] == self.embedding:
            up, down, up_bias, down_bias = down, up, down_bias, up_bias
        return self.feed(x, up, up_bias, down, down_bias, self.of(layer, "ffn_gate.weight"), self.of(layer, "ffn_gate.bias"))

    def experts(self, layer: int, x: Node) -> Node:
        """A mixture of experts with a sigmoid router."""
        name = f"{self.prefix}.blk.{layer}"
        gate, up, down = (self.need(f"{name}.ffn_{n}_exps.weight") for n in ("gate", "up", "down"))
        tokens, count = x.ne[1], gate.ne[2]
        used = min(count, self.number("expert_used_count", 1))
        if used > MOST_EXPERTS:
            raise UnsuitableError(name)
        chance = self.act(self.mm(self.need(f"{name}.ffn_gate_inp.weight"), x))
        chosen = self.op("top_k", (used, tokens), self.add(chance, self.w(f"{name}.exp_probs_b.weight")), type_name="I32")
        share = self.reshape(self.rows(self.reshape(chance, 1, count, tokens), chosen), used, tokens)
        share = self.like("div", share, self.op("sum_rows", (1, tokens), share))
        share = self.reshape(share, 1, used, tokens)
        x = self.reshape(x, x.ne[0], 1, tokens)
        first = self.op("mul_mat_id", (gate.ne[1], used, tokens), gate, x, chosen)
        second = self.op("mul_mat_id", (up.ne[1], used, tokens), up, x, chosen)
        wide = self.mul(self.act(first), second)
        parts = self.op("mul_mat_id", (down.ne[1], used, tokens), down, wide, chosen)
        weighted = self.mul(parts, share)
        out: Node | None = None
        for _ in range(used):
            one = self.view(weighted, (weighted.ne[0], tokens), (weighted.nb[2],))
            out = one if out is None else self.add(out, one)
        if out is None:
            raise UnsuitableError(name)
        if used == 1:
            return self.cont(out)
        if used <= FUSED_EXPERTS:
            self.hold(out, parts, share)
        return out

    def image(self, channels: int = 3) -> Node:
        """The image as the program fills it in."""
        return self.input(self.width, self.height, channels, self.batch)

    def embed(self) -> Node:
        """Patches as rows."""
        x = self.conv(self.need("v.patch_embd.weight"), self.image(), stride=self.patch)
        x = self.cont(self.transpose(self.reshape(x, self.patches, self.embedding, self.batch)))
        return self.add(x, self.w("v.patch_embd.bias"))

    def embed_pair(self) -> Node:
        """Patches of two frames, the second the first one's copy, in the order of merged tokens."""
        image = self.image()
        first, second = self.need("v.patch_embd.weight"), self.need("v.patch_embd.weight.1")
        x = self.add(self.conv(first, image, stride=self.patch), self.conv(second, image, stride=self.patch))
        return self.by_token(self.permute(x, 1, 2, 0, 3))

    def by_token(self, x: Node, merge: int = 2) -> Node:
        """Patches in the order of the tokens they are merged into."""
        x = self.cont(x, self.embedding * merge, self.columns // merge, self.lines, 1)
        x = self.reshape(x, self.embedding * merge, self.columns // merge, merge, self.lines // merge)
        return self.cont(self.permute(x, 0, 2, 1, 3), self.embedding, self.patches, 1)

    def positions(self) -> Node:
        """The learned positions, of as many patches as the image has."""
        table = self.need(f"{self.prefix}.position_embd.weight")
        own = isqrt(table.ne[1])
        if own == self.columns == self.lines:
            return table
        x = self.permute(self.reshape(table, self.embedding, own, own), 2, 0, 1, 3)
        x = self.permute(self.interpolate(x, self.columns, self.lines, self.embedding), 1, 2, 0, 3)
        return self.cont(x, self.embedding, self.patches)

    def rope_pair(self, first: Node, second: Node) -> Callable[[Node], Node]:
        """Two halves of a head rotated by two positions."""
        return lambda x: self.rope(self.rope(x, first), second)

    def transform(
        self, x: Node, tokens: int, *, rms: bool = False, learned: Node | None = None, add_position: Callable[[Node], Node] | None = None,
        masks: Sequence[Node | None] = (), last_norm: str | None = None, seen: Callable[[Node, int], None] | None = None,
    ) -> Node:  # fmt: skip
        """The transformer most encoders share.

        ``last_norm`` is the norm behind it, "" for none; ``seen`` gets what every block's attention leaves.
        """
        batch = x.ne[2]
        if learned is not None:
            x = self.add(x, learned)
        x = self.reshape(x, self.embedding, tokens * batch)
        if self.w(f"{self.prefix}.pre_ln.weight") is not None:
            x = self.normed(f"{self.prefix}.pre_ln", x, rms=rms)
        for layer in range(self.layers):
            rest = x
            cur = self.normed(f"{self.prefix}.blk.{layer}.ln1", x, rms=rms)
            q, k, v = self.heads_of(layer, cur, tokens, batch, rms=rms)
            if add_position is not None:
                q, k = add_position(q), add_position(k)
            if self.kind == "gemma4v":
                v = self.like("rms_norm", v)
            cur = self.attend(q, k, v, masks[layer] if layer < len(masks) else None)
            cur = self.mul(self.linear(f"{self.prefix}.blk.{layer}.attn_out", cur), self.of(layer, "ls1.weight"))
            post = self.of(layer, "attn_post_norm.weight")
            if post is not None:
                cur = self.norm(cur, post, rms=rms)
            rest = x = self.add(cur, rest)
            if seen is not None:
                seen(x, layer)
            cur = self.layer_feed(layer, self.normed(f"{self.prefix}.blk.{layer}.ln2", x, rms=rms))
            post = self.of(layer, "ffn_post_norm.weight")
            if post is not None:
                cur = self.norm(cur, post, rms=rms)
            cur = self.mul(cur, self.of(layer, "ls2.weight"))
            x = self.mul(self.add(rest, cur), self.of(layer, "out_scale.weight"))
        if self.side == "audio" and self.kind in HALVED:
            x = self.cont(self.transpose(x))
            x = self.op("pool", ((x.ne[0] - 2) // 2 + 1, *x.ne[1:]), x)
            x = self.cont(self.transpose(x))
        last = f"{self.prefix}.post_ln" if last_norm is None else last_norm
        if self.w(f"{last}.weight") is not None:
            x = self.normed(last, x, rms=rms)
        return self.reshape(x, self.embedding, x.ne[1] // batch, batch)

    def heads_of(self, layer: int, x: Node, tokens: int, batch: int, *, rms: bool) -> tuple[Node, Node, Node]:
        """Queries, keys and values of a block, by heads."""
        name = f"{self.prefix}.blk.{layer}"
        q_norm, k_norm = self.of(layer, "attn_q_norm.weight"), self.of(layer, "attn_k_norm.weight")
        if self.of(layer, "attn_qkv.weight") is not None:
            q, k, v = self.parts_of(self.linear(f"{name}.attn_qkv", x), tokens, batch, self.heads, self.heads)
            q = self.norm(q, q_norm, rms=rms) if q_norm else q
            k = self.norm(k, k_norm, rms=rms) if k_norm else k
            return q, k, v
        q, k, v = (self.linear(f"{name}.attn_{part}", x) for part in "qkv")
        each = q_norm is not None and q_norm.ne[0] == self.head
        if not each:
            q = self.norm(q, q_norm, rms=rms) if q_norm else q
            k = self.norm(k, k_norm, rms=rms) if k_norm else k
        q = self.reshape(q, self.head, self.heads, tokens, batch)
        k, v = (self.reshape(t, self.head, self.heads_kv, tokens, batch) for t in (k, v))
        if each:
            q = self.norm(q, q_norm, rms=rms) if q_norm else q
            k = self.norm(k, k_norm, rms=rms) if k_norm else k
        return q, k, v

    def parts_of(self, joined: Node, tokens: int, batch: int, heads: int, heads_kv: int, head: int = 0) -> tuple[Node, Node, Node]:
        """Looks at the queries, keys and values of a joined product."""
        head = head or self.head
        row = 4 * head
        strides = (row, joined.nb[1], joined.nb[1] * tokens)
        q, k, v = (self.view(joined, (head, n, tokens, batch), strides) for n in (heads, heads_kv, heads_kv))
        return q, k, v

    def merge_patches(self, x: Node) -> Node:
        """Squares of patches, one row a token."""
        factor, width = self.merge, x.ne[0]
        columns, lines = self.columns, self.lines
        if factor < 2:
            raise UnsuitableError("scale_factor")
        x = self.reshape(x, width, columns, lines)
        more = (-columns % factor, -lines % factor)
        if any(more):
            x = self.pad(x, 0, *more)
            columns, lines = columns + more[0], lines + more[1]
        x = self.permute(self.reshape(x, width * factor, columns // factor, lines), 0, 2, 1, 3)
        x = self.permute(self.cont(x, width * factor**2, lines // factor, columns // factor), 0, 2, 1, 3)
        return self.cont(x, x.ne[0], x.ne[1] * x.ne[2])

    def index(self, count: int, lines: int = 1) -> Node:
        """Whole numbers that the program fills in."""
        return self.input(count, lines, type_name="I32")


#: Sound encoders that average two tokens after the last block.
HALVED = frozenset({"qwen2a", "voxtral", "musicflamingo"})


# image encoders


def siglip(e: Encoder) -> Node:
    """Gemma 3, Idefics 3 and SmolVLM, LFM2-VL, Janus, Phi 4."""
    x = e.embed()
    learned = e.positions() if e.kind in ("lfm2", "phi4") else e.w("v.position_embd.weight")
    x = e.transform(x, e.patches, learned=learned)
    if e.kind == "gemma3":
        x = e.cont(e.transpose(x), e.columns, e.columns, e.embedding, 1)
        x = e.pool(x, e.merge, e.merge)
        x = e.cont(e.transpose(e.reshape(x, x.ne[0] * x.ne[0], e.embedding, 1)))
        x = e.norm(x, e.need("mm.soft_emb_norm.weight"), rms=True)
        turned = e.transpose(e.need("mm.input_projection.weight"))
        return e.matmul(e.cont(turned), x)
    if e.kind == "idefics3":
        return e.mm(e.need("mm.model.fc.weight"), e.merge_patches(x))
    if e.kind == "lfm2":
        x = e.merge_patches(x)
        weight = e.w("mm.input_norm.weight")
        x = e.norm(x, weight) if weight is not None else x
        x = e.add(x, e.w("mm.input_norm.bias"))
        return e.mlp(x, "mm.1", "mm.2")
    return e.mlp(x, "mm.0", "mm.1" if e.kind == "janus_pro" else "mm.2")


def llava(e: Encoder) -> Node:
    """LLaVA 1.5 and 1.6, Granite Vision, MobileVLM, GLM-Edge, Yi-VL."""
    class_row = e.w("v.class_embd")
    tokens = e.patches + (class_row is not None)
    features = e.numbers("feature_layer")
    deepest = max(features, default=-1)
    last = deepest if deepest >= 0 else e.layers if e.kind == "adapter" else e.layers - 1
    x = e.embed()
    if class_row is not None:
        x = e.concat(x, class_row, 1)
    x = e.add(x, e.rows(e.need("v.position_embd.weight"), e.index(tokens)))
    if e.w("v.pre_ln.weight") is not None:
        x = e.normed("v.pre_ln", x)
    stack = []
    for layer in range(last):
        if layer in features:
            stack.append(x)
        cur = e.normed(f"v.blk.{layer}.ln1", x)
        q, k, v = (e.reshape(e.linear(f"v.blk.{layer}.attn_{part}", cur), e.head, e.heads, tokens) for part in "qkv")
        x = e.add(e.linear(f"v.blk.{layer}.attn_out", e.attend(q, k, v)), x)
        x = e.add(x, e.layer_feed(layer, e.normed(f"v.blk.{layer}.ln2", x)))
    if e.w("v.post_ln.weight") is not None:
        x = e.normed("v.post_ln", x)
    if last in features:
        stack.append(x)
    if stack:
        x = stack[0]
        for more in stack[1:]:
            x = e.concat(x, more, 0)
    if e.kind == "adapter":
        return _glm_edge(e, x)
    x = e.rows(e.reshape(x, x.ne[0], x.ne[1]), e.index(e.patches))
    if e.kind == "ldp":
        return _mobile(e, x)
    if e.kind == "ldpv2":
        x = e.linear("mm.model.mlp.2", e.act(e.linear("mm.model.mlp.0", x)))
        x = e.pool(e.cont(e.permute(x, 1, 0, 2, 3), 24, 24, x.ne[0], x.ne[2]), 2, 2)
        near = e.cont(e.permute(e.conv_depthwise(e.need("mm.model.peg.0.weight"), x, stride=1, pad=1), 1, 2, 0, 3))
        near = e.add(near, e.w("mm.model.peg.0.bias"))
        near = e.add(near, e.cont(e.permute(x, 1, 2, 0, 3)))
        return e.reshape(near, near.ne[0], near.ne[1] * near.ne[2], near.ne[3])
    x = e.linear("mm.0", x)
    if e.w("mm.3.weight") is not None:
        x = e.act(e.add(e.mul(e.norm(x), e.w("mm.1.weight")), e.w("mm.1.bias")))
        x = e.norm(e.linear("mm.3", x))
        return e.add(e.mul(x, e.w("mm.4.weight")), e.w("mm.4.bias"))
    x = e.act(x)
    return e.linear("mm.2", x) if e.w("mm.2.weight") is not None else x


def _glm_edge(e: Encoder, x: Node) -> Node:
    side = isqrt(x.ne[1])
    x = e.conv(e.need("adapter.conv.weight"), e.cont(e.permute(x, 1, 0, 2, 3), side, side, x.ne[0]), stride=2)
    x = e.cont(e.permute(e.reshape(x, x.ne[0] * x.ne[1], x.ne[2], 1), 1, 0, 2, 3))
    x = e.add(x, e.need("adapter.conv.bias"))
    x = e.act_inplace(e.normed("adapter.linear.norm1", e.mm(e.need("adapter.linear.linear.weight"), x)))
    gate = e.mm(e.need("adapter.linear.gate.weight"), x)
    wide = e.mm(e.need("adapter.linear.dense_h_to_4h.weight"), x)
    x = e.mm(e.need("adapter.linear.dense_4h_to_h.weight"), e.glu(gate, wide))
    return e.concat(e.concat(e.need("adapter.boi"), x, 1), e.need("adapter.eoi"), 1)


def _mobile(e: Encoder, x: Node) -> Node:
    """Two blocks of depthwise convolutions with a gate over all patches."""
    x = e.linear("mm.model.mlp.3", e.act(e.linear("mm.model.mlp.1", x)))
    start = e.cont(e.permute(x, 1, 0, 2, 3), 24, 24, x.ne[0], x.ne[2])
    x = start
    for block in (1, 2):
        name = f"mm.model.mb_block.{block}.block"
        x = e.conv_depthwise(e.need(f"{name}.0.0.weight"), x, stride=block, pad=1)
        x = e.normed(f"{name}.0.1", e.cont(e.permute(x, 1, 2, 0, 3)))
        swish = e.act(e.cont(e.permute(x, 2, 0, 1, 3)))
        x = e.pool(swish, swish.ne[0], swish.ne[1])
        x = e.reshape(x, x.ne[0] * x.ne[1] * x.ne[2], x.ne[3])
        x = e.act(e.linear(f"{name}.1.fc2", e.act(e.linear(f"{name}.1.fc1", x))))
        x = e.mul(swish, e.reshape(x, 1, 1, x.ne[0], x.ne[1]))
        width, height = x.ne[:2]
        x = e.cont(e.permute(e.reshape(x, width * height, x.ne[2], x.ne[3]), 1, 0, 2, 3))
        x = e.mm(e.need(f"{name}.2.0.weight"), x)
        x = e.normed(f"{name}.2.1", e.reshape(x, x.ne[0], width, height, x.ne[3]))
        if block == 1:
            x = e.add(start, e.cont(e.permute(x, 2, 0, 1, 3)))
    return e.reshape(x, x.ne[0], x.ne[1] * x.ne[2], x.ne[3])


def qwen(e: Encoder) -> Node:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL, EXAONE 4.5: rotated positions, some with windows."""
    third = e.kind == "qwen3vl_merger"
    rms = e.kind in ("qwen2.5vl_merger", "exaone4_5")
    x = e.embed_pair()
    if third:
        x = e.add(x, e.w("v.patch_embd.bias"))
        x = e.add(x, e.by_token(e.positions()))
    position = e.index(e.patches * 4)
    every = 0 if third else e.number("n_wa_pattern")
    if e.kind != "exaone4_5" and e.w("v.pre_ln.weight") is not None:
        x = e.normed("v.pre_ln", x, rms=rms)
    mask = None
    if every:
        x, mask = _windows(e, x)
    deep: Node | None = None
    for layer in range(e.layers):
        name = f"v.blk.{layer}"
        cur = e.normed(f"{name}.ln1", x, rms=rms)
        if third or e.kind == "exaone4_5":
            q, k, v = e.parts_of(e.linear(f"{name}.attn_qkv", cur), e.patches, 1, e.heads, e.heads if third else e.heads_kv)
        else:
            q, k, v = (e.reshape(e.linear(f"{name}.attn_{part}", cur), e.head, e.heads, e.patches) for part in "qkv")
        q, k = e.rope(q, position), e.rope(k, position)
        windowed = mask is not None and (layer + 1) % every != 0
        x = e.add(e.linear(f"{name}.attn_out", e.attend(q, k, v, mask if windowed else None)), x)
        x = e.add(x, e.layer_feed(layer, e.normed(f"{name}.ln2", x, rms=rms)))
        if third and e.w(f"v.deepstack.{layer}.fc1.weight") is not None:
            square = e.merge**2
            feature = e.normed(f"v.deepstack.{layer}.norm", e.reshape(x, e.embedding * square, e.patches // square, 1))
            feature = e.mlp(feature, f"v.deepstack.{layer}.fc1", f"v.deepstack.{layer}.fc2")
            deep = feature if deep is None else e.concat(deep, feature, 0)
    if e.kind == "exaone4_5" or e.w("v.post_ln.weight") is not None:
        x = e.normed("v.post_ln", x, rms=rms)
    x = e.mlp(e.reshape(x, e.embedding * 4, e.patches // 4, 1), "mm.0", "mm.2")
    if every:
        x = e.rows(e.reshape(x, x.ne[0], e.patches // 4), e.index(e.patches // 4))
        x = e.reshape(x, x.ne[0], e.patches // 4, 1)
    return e.concat(x, deep, 0) if deep is not None else x


def _windows(e: Encoder, x: Node) -> tuple[Node, Node]:
    """Patches in the order of their windows, and the mask of the windows."""
    order = e.index(e.patches // 4)
    mask = e.input(e.patches, e.patches)
    if e.flash:
        mask = e.cast(mask, "F16")
    x = e.rows(e.reshape(x, e.embedding * 4, e.patches // 4), order)
    return e.reshape(x, e.embedding, e.patches, 1), mask


def ling(e: Encoder) -> Node:
    """Ling 3 VL: as Qwen3-VL, with the merger's norm in front."""
    x = e.add(e.embed_pair(), e.w("v.patch_embd.bias"))
    learned = e.by_token(e.positions())
    position = e.index(e.patches * 4)
    x = e.transform(x, e.patches, learned=learned, add_position=lambda t: e.rope(t, position))
    x = e.normed("mm.input_norm", x)
    return e.mlp(e.reshape(x, e.embedding * 4, e.patches // 4, 1), "mm.0", "mm.2")


def pixtral(e: Encoder) -> Node:
    """Pixtral, Mistral Small 3.1, LightOnOCR."""
    lines, columns = e.index(e.patches), e.index(e.patches)
    x = e.transform(e.embed(), e.patches, rms=True, add_position=e.rope_pair(lines, columns))
    merger = e.w("mm.patch_merger.weight")
    if merger is not None:
        x = e.norm(x, e.need("mm.input_norm.weight"), rms=True)
        x = _unfold_tokens(e, x)
        x = e.mm(merger, x)
    x = e.mlp(x, "mm.1", "mm.2")
    stop = e.w("v.token_embd.img_break")
    if stop is None:
        return x
    down, across = e.lines // e.merge, e.columns // e.merge
    grid = e.reshape(x, x.ne[0], across, down)
    rows = e.add(e.scale(e.leaf(x.ne[0], 1, down)), stop)
    grid = e.concat(grid, rows, 1)
    return e.view(grid, (x.ne[0], across * down + down - 1))


def _unfold_tokens(e: Encoder, x: Node) -> Node:
    """Squares of patches as a convolution with an empty kernel looks at them."""
    x = e.cont(e.permute(e.reshape(x, e.embedding, e.columns, e.lines), 2, 0, 1, 3))
    more = (-e.columns % e.merge, -e.lines % e.merge)
    if e.kind == "deepseek4v" and any(more):
        x = e.pad(x, *more)
    kernel = Node(VIEW, "view", x.type, (e.merge, e.merge, x.ne[2], 1), (x.nb[0], 0, 0, 0), (x,), x.root or x)
    x = e.unfold(kernel, x, stride=e.merge, type_name="F32")
    return e.reshape(x, x.ne[0], x.ne[1] * x.ne[2])


def dots(e: Encoder) -> Node:
    """dots.ocr and dots3.note."""
    position = e.index(e.patches * 4)
    x = e.transform(e.embed(), e.patches, rms=True, add_position=lambda t: e.rope(t, position), last_norm="mm.post_norm")
    x = e.merge_patches(e.normed("mm.input_norm", x))
    return e.mlp(x, "mm.0", "mm.2")


def internvl(e: Encoder) -> Node:
    """InternVL 2, 2.5, 3."""
    rms = e.embedding == 3200 and e.layers == 45
    start = e.need("v.class_embd")
    x = e.concat(e.embed(), e.repeat(start, start.ne[0], 1, e.batch, 1), 1)
    x = e.transform(x, e.patches + 1, rms=rms, learned=e.need("v.position_embd.weight"))
    x = e.cont(e.view(x, (e.embedding, e.patches, e.batch), (x.nb[1], x.nb[2])))
    f = e.merge
    x = e.permute(e.reshape(x, e.embedding * f, e.lines // f, e.columns, e.batch), 0, 2, 1, 3)
    x = e.permute(e.cont(x, e.embedding * f * f, e.lines // f, e.columns // f, e.batch), 0, 2, 1, 3)
    x = e.cont(x, e.embedding * f * f, x.ne[1] * x.ne[2], x.ne[3])
    return e.mlp(e.normed("mm.model.mlp.0", x), "mm.model.mlp.1", "mm.model.mlp.3")


def nemotron(e: Encoder) -> Node:
    """Nemotron Nano V2 VL."""
    start = e.need("v.class_embd")
    tokens = e.patches + start.ne[1]
    x = e.add(e.embed(), e.need("v.position_embd.weight"))
    x = e.transform(e.concat(start, x, 1), tokens)
    x = e.merge_patches(e.view(x, (e.embedding, e.patches), (x.nb[1],)))
    return e.mlp(e.norm(x, e.need("mm.model.mlp.0.weight"), rms=True), "mm.model.mlp.1", "mm.model.mlp.3", squared=True)


def llama4(e: Encoder) -> Node:
    """Llama 4."""
    tokens = e.patches + 1
    lines, columns = e.index(tokens), e.index(tokens)
    weight = e.need("v.patch_embd.weight")
    kernel = e.reshape(weight, e.patch, e.patch, 3, e.embedding)
    x = e.unfold(kernel, e.image(), stride=e.patch, type_name="F32")
    x = e.reshape(e.mm(weight, x), e.embedding, e.patches)
    x = e.concat(x, e.need("v.class_embd"), 1)
    x = e.transform(x, tokens, learned=e.need("v.position_embd.weight"), add_position=e.rope_pair(columns, lines))
    x = e.view(x, (e.embedding, e.patches), (x.nb[1],))
    f = e.merge
    x = e.permute(e.reshape(x, e.embedding * f, e.columns // f, e.lines, 1), 0, 2, 1, 3)
    x = e.cont(x, e.embedding * f * f, e.columns // f, e.lines // f, 1)
    x = e.cont(x, e.embedding * f * f, e.patches // f // f)
    for name in ("mm.model.mlp.1", "mm.model.mlp.2"):
        x = e.act(e.mm(e.need(f"{name}.weight"), x))
    return e.mm(e.need("mm.model.fc.weight"), x)


def kimi(e: Encoder) -> Node:
    """Kimi-VL and Kimi K2.5."""
    lines, columns = e.index(e.patches), e.index(e.patches)
    later = e.kind == "kimik25"
    if later:
        table = e.need("v.position_embd.weight")
        if (e.columns, e.lines) == table.ne[1:3]:
            learned = e.cont(table, e.embedding, e.patches)
        else:
            learned = e.interpolate(e.permute(table, 2, 1, 0, 3), e.lines, e.columns, e.embedding)
            learned = e.cont(e.permute(learned, 2, 1, 0, 3), e.embedding, e.patches)
        x = e.transform(e.add(e.embed(), learned), e.patches, add_position=e.rope_pair(columns, lines))
    else:
        learned = e.positions()
        x = e.transform(e.embed(), e.patches, learned=learned, add_position=e.rope_pair(columns, lines))
    x = e.merge_patches(x)
    wide, tokens = x.ne[:2]
    x = e.view(x, (e.embedding, tokens * e.merge**2), (4 * e.embedding,))
    x = e.normed("mm.input_norm", x)
    return e.mlp(e.view(x, (wide, tokens), (4 * wide,)), "mm.1", "mm.2")


def resampler(e: Encoder) -> Node:
    """MiniCPM-V up to 4.5: a few queries look at all patches."""
    out = e.need("resampler.proj.weight").ne[0]
    omega = e.input(out // 4)
    down, across = e.input(1, e.patches), e.input(1, e.patches)
    learned = e.rows(e.need("v.position_embd.weight"), e.index(e.patches))
    x = e.transform(e.embed(), e.patches, learned=learned)
    q = e.need("resampler.query")
    v = e.mm(e.need("resampler.kv.weight"), x)
    q, v = e.normed("resampler.ln_q", q), e.normed("resampler.ln_kv", v)
    wide = e.repeat(omega, omega.ne[0], e.patches)
    halves = []
    for axis in (across, down):
        angle = e.mul(wide, axis)
        halves.append(e.concat(e.like("sin", angle), e.like("cos", angle), 0))
    k = e.add(v, e.concat(halves[0], halves[1], 0))
    queries = q.ne[1]
    q = e.reshape(e.linear("resampler.attn.q", q), 128, out // 128, queries)
    k, v = (e.reshape(e.linear(f"resampler.attn.{part}", t), 128, out // 128, e.patches) for part, t in (("k", k), ("v", v)))
    x = e.linear("resampler.attn.out", e.attend(q, k, v))
    return e.mm(e.need("resampler.proj.weight"), e.normed("resampler.ln_post", x))


def minicpm46(e: Encoder) -> Node:
    """MiniCPM-V 4.6: a merger between the blocks and one behind them."""
    once = e.merge == 2
    half = (e.lines // 2) * (e.columns // 2)
    out = half if once else (e.lines // 4) * (e.columns // 4)
    learned = e.rows(e.need("v.position_embd.weight"), e.index(e.patches))
    mask = None
    inner: list[Node] = []
    if not once:
        window, back = e.index(e.patches), e.index(e.patches)
        mask = e.input(e.patches, e.patches)
        if e.flash:
            mask = e.cast(mask, "F16")
        inner = [e.index(half) for _ in range(4)]
    last = [e.index(out) for _ in range(4)]
    x = e.add(e.embed(), learned)
    if e.w("v.pre_ln.weight") is not None:
        x = e.normed("v.pre_ln", x)

    def blocks(x: Node, first: int, end: int, tokens: int) -> Node:
        for layer in range(first, end):
            name = f"v.blk.{layer}"
            cur = e.normed(f"{name}.ln1", x)
            q, k, v = (e.reshape(e.linear(f"{name}.attn_{part}", cur), e.head, e.heads, tokens) for part in "qkv")
            cur = e.mul(e.linear(f"{name}.attn_out", e.attend(q, k, v)), e.of(layer, "ls1.weight"))
            x = e.add(cur, x)
            x = e.add(x, e.mul(e.layer_feed(layer, e.normed(f"{name}.ln2", x)), e.of(layer, "ls2.weight")))
        return x

    def gather(x: Node, indices: list[Node], mean: bool) -> tuple[Node, Node | None]:
        parts = [e.rows(x, i) for i in indices]
        total = None
        if mean:
            total = parts[0]
            for part in parts[1:]:
                total = e.add(total, part)
            total = e.scale(total)
        joined = parts[0]
        for part in parts[1:]:
            joined = e.concat(joined, part, 0)
        return joined, total

    if once:
        x = blocks(x, 0, e.layers, e.patches)
    else:
        at = next(iter(e.numbers("wa_layer_indexes")), 0)
        x = blocks(x, 0, at + 1, e.patches)
        cur = e.rows(e.normed("v.vit_merger.ln1", x), window)
        q, k, v = (e.reshape(e.linear(f"v.vit_merger.attn_{part}", cur), e.head, e.heads, e.patches) for part in "qkv")
        cur = e.linear("v.vit_merger.attn_out", e.attend(q, k, v, mask))
        x = e.add(e.rows(cur, back), x)
        joined, mean = gather(x, inner, mean=True)
        x = e.add(e.mlp(e.normed("v.vit_merger.ds_ln", joined), "v.vit_merger.ds_ffn_up", "v.vit_merger.ds_ffn_down"), mean)
        x = blocks(x, at + 1, e.layers, half)
    if e.w("v.post_ln.weight") is not None:
        x = e.normed("v.post_ln", x)
    joined, _ = gather(x, last, mean=False)
    return e.mlp(e.normed("mm.input_norm", joined), "mm.up", "mm.down")


def glm4v(e: Encoder) -> Node:
    """GLM-4.1V, GLM-4.5V, GLM-OCR and GLM-5V."""
    x = e.add(e.embed_pair(), e.need("v.patch_embd.bias"))
    position = e.index(e.patches * 4)
    if e.w("v.norm_embd.weight") is not None:
        x = e.normed("v.norm_embd", x, rms=True)
    learned = e.by_token(e.positions()) if e.w("v.position_embd.weight") is not None else None
    x = e.transform(x, e.patches, rms=True, learned=learned, add_position=lambda t: e.rope(t, position))
    tokens = e.patches // e.merge**2
    x = e.cont(e.permute(e.reshape(x, e.embedding, e.merge, e.merge, tokens), 2, 0, 1, 3))
    x = e.conv(e.need("mm.patch_merger.weight"), x, stride=e.merge)
    x = e.add(e.reshape(x, x.ne[2], tokens), e.need("mm.patch_merger.bias"))
    x = e.act(e.normed("mm.post_norm", e.mm(e.need("mm.model.fc.weight"), x)))
    return e.feed(x, e.need("mm.up.weight"), e.w("mm.up.bias"), e.need("mm.down.weight"), e.w("mm.down.bias"), e.w("mm.gate.weight"), e.w("mm.gate.bias"))


def cogvlm(e: Encoder) -> Node:
    """CogVLM: norms behind attention and feed-forward."""
    tokens = e.patches + 1
    x = e.add(e.concat(e.embed(), e.need("v.class_embd"), 1), e.need("v.position_embd.weight"))
    for layer in range(e.layers):
        name = f"v.blk.{layer}"
        q, k, v = e.parts_of(e.linear(f"{name}.attn_qkv", x), tokens, 1, e.heads, e.heads)
        cur = e.normed(f"{name}.ln1", e.linear(f"{name}.attn_out", e.attend(q, k, v)))
        x = e.add(cur, x)
        x = e.add(e.normed(f"{name}.ln2", e.layer_feed(layer, x)), x)
    x = e.mm(e.need("mm.model.fc.weight"), e.view(x, (e.embedding, e.patches), (x.nb[1],)))
    x = e.act_inplace(e.normed("mm.post_fc_norm", x))
    wide = e.mm(e.need("mm.up.weight"), x)
    x = e.mm(e.need("mm.down.weight"), e.glu(e.mm(e.need("mm.gate.weight"), x), wide))
    return e.concat(e.concat(e.need("v.boi"), x, 1), e.need("v.eoi"), 1)


def gemma4(e: Encoder) -> Node:
    """Gemma 4."""
    x = e.conv(e.need("v.patch_embd.weight"), e.scale(e.image()), stride=e.patch)
    x = e.cont(e.transpose(e.reshape(x, e.patches, e.embedding, e.batch)))
    across, down = e.index(e.patches), e.index(e.patches)
    x = _table_positions(e, x, across, down)
    x = e.transform(x, e.patches, rms=True, add_position=e.rope_pair(across, down))
    x = e.pool(e.cont(e.transpose(x), e.columns, e.lines, e.embedding, e.batch), e.merge, e.merge)
    x = e.reshape(x, (e.columns // e.merge) * (e.lines // e.merge), e.embedding, e.batch)
    x = e.scale(e.cont(e.transpose(x)))
    bias, scale = e.w("v.std_bias"), e.w("v.std_scale")
    if bias is not None and scale is not None:
        x = e.mul(e.like("sub", x, bias), scale)
    return e.mm(e.need("mm.input_projection.weight"), e.like("rms_norm", x))


def _table_positions(e: Encoder, x: Node, across: Node, down: Node) -> Node:
    """Positions looked up in two tables, one for columns and one for rows."""
    table = e.need("v.position_embd.weight")
    tables = [e.view(table, (e.embedding, table.ne[1]), (table.nb[1],)) for _ in range(2)]
    added = [e.rows(t, index) for t, index in zip(tables, (across, down), strict=True)]
    return e.add(e.add(x, added[0]), added[1])


def gemma4_unified(e: Encoder) -> Node:
    """Gemma 4's image side without an encoder."""
    x = e.unfold(e.leaf(e.patch, e.patch, 3), e.image(), stride=e.patch, type_name="F32")
    x = e.normed("v.patch_norm.1", e.reshape(x, x.ne[0], x.rows))
    x = e.add(e.matmul(e.need("v.patch_embd.weight"), x), e.w("v.patch_embd.bias"))
    x = e.normed("v.patch_norm.2", x)
    x = _table_positions(e, x, e.index(e.patches), e.index(e.patches))
    return e.mm(e.need("mm.input_projection.weight"), e.like("rms_norm", e.normed("v.patch_norm.3", x)))


def hunyuan(e: Encoder) -> Node:
    """Hunyuan-VL and HunyuanOCR."""
    learned = e.input(e.embedding, e.patches)
    x = e.transform(e.embed(), e.patches, learned=learned)
    x = e.norm(x, e.need("mm.pre_norm.weight"), rms=True)
    x = e.cont(e.permute(e.reshape(x, e.embedding, e.columns, e.lines), 2, 0, 1, 3))
    for name, stride in (("mm.0", e.merge), ("mm.2", 1)):
        x = e.conv(e.need(f"{name}.weight"), x, stride=stride)
        bias = e.w(f"{name}.bias")
        x = e.add(x, e.reshape(bias, 1, 1, bias.ne[0]) if bias else None)
        x = e.act(x) if stride > 1 or name == "mm.0" else x
    wide, across, down = x.ne[2], e.columns // e.merge, e.lines // e.merge
    line_end = e.repeat(e.reshape(e.need("v.image_newline"), 1, 1, wide, 1), 1, down, wide, 1)
    x = e.permute(e.concat(x, line_end, 0), 1, 2, 0, 3)
    x = e.linear("mm.model.fc", e.cont(x, wide, (across + 1) * down))
    begin, end = e.need("mm.image_begin"), e.need("mm.image_end")
    x = e.concat(e.reshape(begin, begin.ne[0], 1), x, 1)
    x = e.concat(x, e.reshape(end, end.ne[0], 1), 1)
    return e.norm(x, e.need("mm.post_norm.weight"), rms=True)


def paddleocr(e: Encoder) -> Node:
    """PaddleOCR-VL."""
    position = e.index(e.patches * 4)
    learned = e.positions()
    x = e.transform(e.embed(), e.patches, learned=learned, add_position=lambda t: e.rope(t, position))
    return e.mlp(e.merge_patches(e.normed("mm.input_norm", x)), "mm.1", "mm.2")


def step3(e: Encoder) -> Node:
    """Step3-VL."""
    lines, columns = e.index(e.patches), e.index(e.patches)
    x = e.embed()
    x = e.transform(x, e.patches, learned=e.positions(), add_position=e.rope_pair(columns, lines))
    x = e.cont(e.permute(x, 1, 0, 2, 3), e.columns, e.lines, e.embedding)
    for name in ("mm.0", "mm.1"):
        x = e.conv(e.need(f"{name}.weight"), x, stride=2, pad=1)
        bias = e.w(f"{name}.bias")
        if bias is not None:
            width, height, channels, _ = x.ne
            x = e.cont(e.transpose(e.reshape(x, width * height, channels)))
            x = e.cont(e.transpose(e.add(x, bias)))
            x = e.reshape(x, width, height, channels)
    x = e.reshape(x, x.ne[0] * x.ne[1], x.ne[2], x.ne[3])
    return e.matmul(e.need("mm.model.fc.weight"), e.cont(e.permute(x, 1, 0, 2, 3)))


def youtu(e: Encoder) -> Node:
    """Youtu-VL."""
    p, across, down = e.patch, e.columns // 2, e.lines // 2
    x = e.permute(e.reshape(e.image(), across * 2 * p, 2 * p, down, 3), 1, 2, 3, 0)
    x = e.permute(e.cont(x, 2 * p * 3, across, 2 * p, down), 0, 2, 1, 3)
    x = e.permute(e.cont(x, 2 * p * 3, p, 2, down * across), 1, 0, 2, 3)
    x = e.permute(e.cont(x, p, 3, p, down * across * 4), 2, 0, 1, 3)
    x = e.cont(x, 3 * p * p, down * across * 4, 1)
    x = e.add(e.mm(e.need("v.patch_embd.weight"), x), e.w("v.patch_embd.bias"))
    x = e.reshape(x, e.embedding, e.patches)
    position = e.index(e.patches * 4)
    if e.w("v.pre_ln.weight") is not None:
        x = e.normed("v.pre_ln", x)
    full = e.numbers("wa_layer_indexes")
    mask = None
    if full:
        x, mask = _windows(e, x)
    for layer in range(e.layers):
        name = f"v.blk.{layer}"
        cur = e.normed(f"{name}.ln1", x)
        q, k, v = (e.reshape(e.linear(f"{name}.attn_{part}", cur), e.head, e.heads, e.patches) for part in "qkv")
        q, k = e.rope(q, position), e.rope(k, position)
        x = e.add(e.linear(f"{name}.attn_out", e.attend(q, k, v, None if layer in full else mask)), x)
        cur = e.normed(f"{name}.ln2", x)
        x = e.add(x, e.mlp(cur, f"{name}.ffn_up", f"{name}.ffn_down"))
    if full:
        x = e.rows(e.reshape(x, e.embedding * 4, e.patches // 4), e.index(e.patches // 4))
        x = e.reshape(x, e.embedding, e.patches, 1)
    if e.w("v.post_ln.weight") is not None:
        x = e.normed("v.post_ln", x)
    x = e.norm(x, e.need("mm.input_norm.weight"), rms=True)
    return e.mlp(e.reshape(x, e.embedding * 4, e.patches // 4, 1), "mm.0", "mm.2")


def minimax(e: Encoder) -> Node:
    """MiniMax-M3."""
    image = e.image()
    first, second = e.need("v.patch_embd.weight"), e.need("v.patch_embd.weight.1")
    x = e.add(e.conv(first, image, stride=e.patch), e.conv(second, image, stride=e.patch))
    x = e.by_token(e.permute(x, 1, 2, 0, 3), e.merge)
    lines, columns = e.index(e.patches), e.index(e.patches)
    x = e.transform(x, e.patches, add_position=e.rope_pair(lines, columns))
    x = e.mlp(x, "mm.1", "mm.2")
    square = e.merge**2
    return e.mlp(e.reshape(x, x.ne[0] * square, e.patches // square), "mm.merger.fc1", "mm.merger.fc2")


def muse(e: Encoder) -> Node:
    """Muse Glimmer: three blocks of windows, one of the whole image."""
    columns, lines, order, back, gather = (e.index(e.patches) for _ in range(5))
    mask = e.input(e.patches, e.patches)
    x = e.rows(e.add(e.embed(), e.positions()), order)
    masks = [None if layer == e.layers - 1 or (layer + 1) % 4 == 0 else mask for layer in range(e.layers)]
    x = e.transform(x, e.patches, add_position=e.rope_pair(columns, lines), masks=masks)
    x = e.rows(e.rows(x, back), gather)
    square, tokens = e.merge**2, (e.columns // e.merge) * (e.lines // e.merge)
    x = e.cont(e.permute(e.reshape(x, e.embedding, square, tokens), 1, 0, 2, 3))
    x = e.reshape(x, e.embedding * square, tokens)
    x = e.act(e.mm(e.need("mm.0.weight"), x))
    x = e.act(e.mm(e.need("mm.1.weight"), x))
    return e.mm(e.need("mm.2.weight"), x)


def mimo(e: Encoder) -> Node:
    """MiMo-VL: windows by rows and by columns, with sinks."""
    square = e.merge**2
    units = e.patches // square
    joined = e.need("v.blk.0.attn_qkv.weight").ne[1]
    head = joined // (e.heads + 2 * e.heads_kv)
    x = e.embed_pair()
    by_row, by_column = e.index(e.patches * 4), e.index(e.patches * 4)
    wanted = e.input(units)
    order = e.cast(wanted, "I32")
    back = e.op("argsort", wanted.ne, wanted, type_name="I32")
    mask = e.input(e.patches, e.patches)
    if e.flash:
        mask = e.cast(mask, "F16")

    def reorder(x: Node, index: Node) -> Node:
        return e.reshape(e.rows(e.reshape(x, e.embedding * square, units), index), e.embedding, e.patches, 1)

    modes = e.numbers("wa_pattern_mode")
    if len(modes) != e.layers:
        raise UnsuitableError("wa_pattern_mode")
    before = -1
    for layer, mode in enumerate(modes):
        name = f"v.blk.{layer}"
        if mode == 1 and before != 1:
            x = reorder(x, order)
        elif mode != 1 and before == 1:
            x = reorder(x, back)
        cur = e.linear(f"{name}.attn_qkv", e.normed(f"{name}.ln1", x, rms=True))
        q, k, v = e.parts_of(cur, e.patches, 1, e.heads, e.heads_kv, head)
        position = by_column if mode == 1 else by_row
        q, k = e.rope(q, position), e.rope(k, position)
        full = mode == -1
        cur = e.attend(q, k, v, None if full else mask, None if full else e.need(f"{name}.attn_sinks"))
        x = e.add(e.linear(f"{name}.attn_out", cur), x)
        x = e.add(x, e.layer_feed(layer, e.normed(f"{name}.ln2", x, rms=True)))
        before = mode
    if before == 1:
        x = reorder(x, back)
    x = e.reshape(e.normed("v.post_ln", x), e.embedding * square, units, 1)
    return e.feed(x, e.need("mm.0.weight"), None, e.need("mm.2.weight"), None)


def deepseek4(e: Encoder) -> Node:
    """DeepSeek-V4 Vision: an aligner and rows of separators."""
    position = e.index(e.patches * 4)
    x = e.transform(e.embed(), e.patches, rms=True, add_position=lambda t: e.rope(t, position))
    x = e.mlp(_unfold_tokens(e, x), "mm.1", "mm.2")
    for name in ("v.token_embd.img_start", "v.token_embd.img_end", "v.image_newline", "v.token_embd.img_pad"):
        x = e.concat(x, e.reshape(e.need(name), x.ne[0], 1), 1)
    across, down = -(-e.columns // e.merge), -(-e.lines // e.merge)
    pairs = (down + 1) // 2 * (across + 1)
    return e.rows(x, e.index(2 + 2 * pairs + pairs % 2 * 2))


def _segment(e: Encoder, x: Node) -> Node:
    """The convolutional part of DeepSeek-OCR: windows, relative positions, a neck."""
    wide, layers = e.number("sam.embedding_length"), e.number("sam.block_count")
    heads, window = e.number("sam.head_count"), e.number("window_size")
    if not (wide and heads and window):
        raise UnsuitableError("sam")
    head = wide // heads

    def conv(name: str, x: Node, stride: int, pad: int = 0) -> Node:
        kernel = e.need(name)
        return e.conv(kernel, x, stride=stride, pad=pad, type_name="F16" if kernel.type == "F16" else "F32")

    kernel = e.need("v.sam.patch_embd.weight")
    x = e.add(conv("v.sam.patch_embd.weight", x, kernel.ne[0]), e.reshape(e.need("v.sam.patch_embd.bias"), 1, 1, wide))
    x = e.cont(e.permute(x, 1, 2, 0, 3))
    near, far = e.index(window, window), e.index(x.ne[1], x.ne[2])
    table = e.need("v.sam.pos_embd.weight")
    if table.ne[1] != x.ne[1]:
        learned = e.interpolate(e.cont(e.permute(table, 2, 0, 1, 3)), x.ne[1], x.ne[1], wide)
        x = e.add(x, e.cont(e.permute(learned, 1, 2, 0, 3)))
    else:
        x = e.add(x, table)

    def relative(table: Node, index: Node, side: int) -> Node:
        if 2 * side - 1 != table.ne[1]:
            t = e.reshape(e.cont(e.permute(table, 1, 0, 2, 3)), table.ne[1], 1, table.ne[0])
            t = e.reshape(e.interpolate(t, 2 * side - 1, 1, table.ne[0]), 2 * side - 1, table.ne[0])
            table = e.cont(e.permute(t, 1, 0, 2, 3))
        return e.reshape(e.rows(table, e.reshape(index, side * side)), table.ne[0], side, side)

    for layer in range(layers):
        name = f"v.sam.blk.{layer}"
        rest = x
        cur = e.normed(f"{name}.pre_ln", x)
        columns, lines, images = cur.ne[1:4]
        whole = layer in (2, 5, 8, 11)
        index = far if whole else near
        more = (-columns % window, -lines % window)
        if not whole:
            if any(more):
                cur = e.pad(cur, 0, *more)
            across, down = (columns + more[0]) // window, (lines + more[1]) // window
            cur = e.cont(e.permute(e.reshape(cur, wide * window, across, window, down * images), 0, 2, 1, 3))
            cur = e.reshape(cur, wide, window, window, across * down * images)
        w, h, b = cur.ne[1:4]
        cur = e.add(e.matmul(e.need(f"{name}.attn.qkv.weight"), cur), e.w(f"{name}.attn.qkv.bias"))
        cur = e.reshape(cur, wide, 3, w * h, b)
        q, k, v = (e.reshape(e.cont(e.view(cur, (wide, w * h, b), (cur.nb[2], cur.nb[3]))), head, heads, w * h, b) for _ in range(3))
        across_w = relative(e.need(f"{name}.attn.pos_w.weight"), index, w)
        across_h = relative(e.need(f"{name}.attn.pos_h.weight"), index, h)
        turned = e.reshape(e.cont(e.permute(q, 0, 2, 1, 3)), head, w, h, b * heads)
        by_w = e.matmul(across_w, e.cont(e.permute(turned, 0, 2, 1, 3)))
        by_w = e.reshape(e.cont(e.permute(by_w, 0, 2, 1, 3)), w, 1, w * h, heads * b)
        by_w = e.repeat(by_w, w, h, w * h, heads * b)
        by_h = e.reshape(e.matmul(across_h, turned), 1, h, w * h, heads * b)
        mask = e.reshape(e.add(by_w, by_h), w * h, w * h, heads, b)
        if e.flash:
            mask = e.cast(mask, "F16")
        cur = e.linear(f"{name}.attn.out", e.attend(q, k, v, mask))
        cur = e.reshape(e.cont(cur), wide, w, h, b)
        if not whole:
            cur = e.cont(e.permute(e.reshape(cur, wide * window, window, across, down * images), 0, 2, 1, 3))
            cur = e.reshape(cur, wide, columns + more[0], lines + more[1], images)
            cur = e.cont(e.view(cur, (wide, columns, lines, images), cur.nb[1:]))
        x = e.add(cur, rest)
        x = e.add(e.mlp(e.normed(f"{name}.post_ln", x), f"{name}.mlp.lin1", f"{name}.mlp.lin2"), x)
    x = e.cont(e.permute(x, 2, 0, 1, 3))
    for part, pad in ((0, 0), (2, 1)):
        x = e.cont(e.permute(conv(f"v.sam.neck.{part}.weight", x, 1, pad), 1, 2, 0, 3))
        x = e.cont(e.permute(e.normed(f"v.sam.neck.{part + 1}", x), 2, 0, 1, 3))
    x = conv("v.sam.net_3.weight", conv("v.sam.net_2.weight", x, 2, 1), 2, 1)
    e.expand(x)
    return x


def deepseek_ocr(e: Encoder) -> Node:
    """DeepSeek-OCR: rows of tiles, a segmenting part and a transformer behind it."""
    x = e.input(e.width, e.height, 3, e.batch)
    tiles = e.height // e.width
    x = e.reshape(x, e.width * e.width, tiles, 3, e.batch)
    x = e.reshape(e.cont(e.permute(x, 0, 2, 1, 3)), e.width, e.width, 3, tiles * e.batch)
    seen = _segment(e, x)
    images, patches = tiles * e.batch, seen.ne[0] * seen.ne[1]
    x = e.cont(e.permute(e.reshape(seen, patches, seen.ne[2], seen.ne[3]), 1, 0, 2, 3))
    table = e.need("v.position_embd.weight")
    tokens, wanted, own = table.ne[1], isqrt(patches), isqrt(table.ne[1] - 1)
    if wanted != own:
        old = e.view(table, (table.ne[0], own * own), (table.nb[1],))
        start = e.view(table, (table.ne[0], 1), (table.nb[1],))
        grown = e.interpolate(old, wanted, wanted, table.ne[0])
        table = e.concat(e.reshape(grown, e.embedding, wanted * wanted, 1), start, 1)
        tokens = wanted * wanted + 1
    x = e.concat(e.repeat(e.need("v.class_embd"), e.embedding, 1, images, 1), x, 1)
    numbers = e.cast(e.op("arange", (tokens,)), "I32")
    x = e.transform(x, tokens, learned=e.rows(table, numbers))
    e.expand(x)
    seen = e.cont(e.permute(seen, 1, 2, 0, 3))
    seen = e.reshape(seen, seen.ne[0], patches, images)
    x = e.view(x, (e.embedding, patches, images), (x.nb[1], x.nb[2]))
    x = e.matmul(e.need("mm.model.fc.weight"), e.concat(x, seen, 0))
    x = e.add(x, e.w("mm.model.fc.bias"))
    side, wide = isqrt(patches), x.ne[0]
    x = e.cont(e.permute(e.reshape(x, wide * side, side, tiles, e.batch), 0, 2, 1, 3))
    x = e.reshape(x, wide, side * tiles, side, e.batch)
    x = e.concat(x, e.repeat(e.need("v.image_newline"), wide, 1, side, e.batch), 1)
    return e.reshape(x, wide, (side * tiles + 1) * side, e.batch)


def deepseek_ocr2(e: Encoder) -> Node:
    """DeepSeek-OCR 2: learned queries behind the patches."""
    seen = _segment(e, e.image())
    x = e.cont(e.permute(e.reshape(seen, seen.ne[0] * seen.ne[1], seen.ne[2], seen.ne[3]), 1, 0, 2, 3))
    queries = x.ne[1]
    if queries not in (144, 256):
        raise UnsuitableError("image size")
    query = e.cast(e.need(f"v.resample_query_{768 if queries == 144 else 1024}.weight"), "F32")
    x = e.concat(x, e.repeat(query, query.ne[0], queries, x.ne[2]), 1)
    mask = e.input(x.ne[1], x.ne[1])
    position = e.cast(e.op("arange", (x.ne[1],)), "I32")
    x = e.transform(x, x.ne[1], rms=True, add_position=lambda t: e.rope(t, position), masks=[mask] * e.layers)
    x = e.cont(e.view(x, (x.ne[0], queries, x.ne[2]), (x.nb[1], x.nb[2])))
    e.expand(x)
    return e.add(e.matmul(e.need("mm.model.fc.weight"), x), e.w("mm.model.fc.bias"))


def yasa(e: Encoder) -> Node:
    """Yasa 2: convolutions only."""

    def channels(x: Node, weight: Node | None, op: str) -> Node:
        return x if weight is None else e.like(op, x, e.reshape(weight, 1, 1, weight.ne[0], 1))

    def norm(x: Node, name: str) -> Node:
        x = e.cont(e.permute(x, 2, 1, 0, 3))
        centred = e.like("sub", x, e.op("mean", (1, *x.ne[1:]), x))
        spread = e.op("mean", (1, *x.ne[1:]), e.mul(centred, centred))
        spread = e.like("sqrt", e.like("clamp", spread))
        x = e.cont(e.permute(e.like("div", centred, spread), 2, 1, 0, 3))
        return channels(channels(x, e.w(f"{name}.weight"), "mul"), e.w(f"{name}.bias"), "add")

    def response(x: Node, name: str) -> Node:
        width, height, count, batch = x.ne
        power = e.reshape(e.mul(x, x), width * height, count, 1, batch)
        power = e.like("sqrt", e.op("sum_rows", (1, count, 1, batch), power))
        turned = e.cont(e.permute(power, 1, 0, 2, 3))
        mean = e.like("clamp", e.op("mean", (1, *turned.ne[1:]), turned))
        share = e.cont(e.permute(e.like("div", power, mean), 0, 2, 1, 3))
        changed = e.mul(x, share)
        changed = channels(channels(changed, e.w(f"{name}.weight"), "mul"), e.w(f"{name}.bias"), "add")
        return e.add(x, changed)

    x = channels(e.conv(e.need("v.patch_embd.weight"), e.image(), stride=e.patch), e.w("v.patch_embd.bias"), "add")
    x = norm(x, "v.patch_ln")
    for stage in range(64):
        name = f"v.stage.{stage}"
        down = e.w(f"{name}.down.conv.weight")
        if down is None and e.w(f"{name}.blk.0.dw.weight") is None:
            break
        if down is not None:
            x = channels(e.conv(down, norm(x, f"{name}.down.ln"), stride=2), e.w(f"{name}.down.conv.bias"), "add")
        for block in range(256):
            own = f"{name}.blk.{block}"
            kernel = e.w(f"{own}.dw.weight")
            if kernel is None:
                break
            rest = x
            x = channels(e.conv_depthwise(kernel, x, stride=1, pad=3), e.w(f"{own}.dw.bias"), "add")
            x = norm(x, f"{own}.ln")
            width, height, _, batch = x.ne
            for part in ("pw1", "pw2"):
                rows = e.cont(e.permute(e.reshape(x, width * height, x.ne[2], batch), 1, 0, 2, 3))
                rows = e.matmul(e.need(f"{own}.{part}.weight"), rows)
                bias = e.w(f"{own}.{part}.bias")
                rows = e.add(rows, e.reshape(bias, bias.ne[0], 1, 1) if bias else None)
                x = e.reshape(e.cont(e.permute(rows, 1, 0, 2, 3)), width, height, rows.ne[0], batch)
                if part == "pw1":
                    x = response(e.act(x), f"{own}.grn")
            x = e.add(rest, x)
    width, height, count, batch = x.ne
    rows = e.cont(e.permute(e.reshape(x, width * height, count, batch), 1, 0, 2, 3))
    table = e.w("v.vision_pos_embed")
    if table is not None and rows.ne[1] == table.ne[1]:
        rows = e.add(rows, e.reshape(table, table.ne[0], table.ne[1], 1))
    x = e.cont(e.permute(rows, 1, 0, 2, 3))
    x = e.reshape(x, width, height, x.ne[1], x.ne[2])
    x = e.pool(x, max(1, width // min(8, width)), max(1, height // min(8, height)))
    x = e.reshape(x, x.ne[0] * x.ne[1], x.ne[2], x.ne[3])
    return e.mlp(e.cont(e.permute(x, 1, 0, 2, 3)), "mm.0", "mm.2")


def mobilenet(e: Encoder) -> Node:
    """Gemma 3n: MobileNet V5."""

    def norm(x: Node, name: str) -> Node:
        x = e.cont(e.permute(x, 2, 1, 0, 3))
        x = e.norm(x, e.w(name), rms=True)
        return e.cont(e.permute(x, 2, 1, 0, 3))

    def maybe(x: Node, name: str) -> Node:
        return norm(x, name) if e.w(name) is not None else x

    def same(x: Node, kernel: int, stride: int) -> Node:
        more = [max(0, (-(-n // stride) - 1) * stride + kernel - n) for n in x.ne[:2]]
        return e.pad(x, *more) if any(more) else x

    def edge(x: Node, name: str, stride: int) -> Node:
        kernel = e.need(f"{name}.conv_exp.weight")
        cur = e.conv_direct(kernel, same(x, 3, 2), stride=2) if stride == 2 else e.conv_direct(kernel, x, stride=1, pad=1)
        cur = e.act(maybe(cur, f"{name}.bn1.weight"))
        cur = maybe(e.conv_direct(e.need(f"{name}.conv_pwl.weight"), cur, stride=1), f"{name}.bn2.weight")
        return e.add(cur, x) if stride == 1 and x.ne[2] == cur.ne[2] and x.ne[0] == cur.ne[0] else cur

    def inverted(x: Node, name: str, stride: int) -> Node:
        cur = x
        kernel = e.w(f"{name}.dw_start.conv.weight")
        if kernel is not None:
            cur = maybe(e.conv_depthwise(kernel, cur, stride=1, pad=kernel.ne[0] // 2), f"{name}.dw_start.bn.weight")
        kernel = e.w(f"{name}.pw_exp.conv.weight")
        if kernel is not None:
            cur = e.act(maybe(e.conv_direct(kernel, cur, stride=1), f"{name}.pw_exp.bn.weight"))
        kernel = e.w(f"{name}.dw_mid.conv.weight")
        if kernel is not None:
            side = kernel.ne[0]
            cur = same(cur, side, stride) if stride > 1 else cur
            cur = e.conv_depthwise(kernel, cur, stride=stride, pad=0 if stride > 1 else side // 2)
            cur = e.act(maybe(cur, f"{name}.dw_mid.bn.weight"))
        kernel = e.w(f"{name}.pw_proj.conv.weight")
        if kernel is not None:
            cur = maybe(e.conv_direct(kernel, cur, stride=1), f"{name}.pw_proj.bn.weight")
        cur = e.mul(cur, e.w(f"{name}.layer_scale.gamma"))
        return e.add(cur, x) if x.ne[:3] == cur.ne[:3] else cur

    def attention(x: Node, name: str) -> Node:
        cur = maybe(x, f"{name}.norm.weight")
        q = e.conv_direct(e.need(f"{name}.attn.query.proj.weight"), cur, stride=1)
        kv = []
        for part in ("key", "value"):
            from_ = cur
            kernel = e.w(f"{name}.attn.{part}.down_conv.weight")
            if kernel is not None:
                from_ = e.conv_depthwise(kernel, same(cur, kernel.ne[0], 2), stride=2, pad=0)
                from_ = maybe(from_, f"{name}.attn.{part}.norm.weight")
            kv.append(e.conv_direct(e.need(f"{name}.attn.{part}.proj.weight"), from_, stride=1))
        k, v = kv
        width, height, _, batch = cur.ne
        head, tokens, seen = k.ne[2], width * height, k.ne[0] * k.ne[1]
        heads = q.ne[2] // head
        q = e.reshape(e.reshape(q, tokens, head * heads, batch), tokens, head, heads, batch)
        q = e.cont(e.permute(q, 1, 0, 2, 3))
        k = e.cont(e.permute(e.reshape(e.reshape(k, seen, head, batch), seen, head, 1, batch), 1, 0, 2, 3))
        v = e.cont(e.reshape(e.reshape(v, seen, head, batch), seen, head, 1, batch))
        scores = e.like("soft_max", e.scale(e.matmul(k, q)))
        out = e.cont(e.permute(e.matmul(v, scores), 1, 0, 2, 3))
        out = e.cont(e.reshape(e.reshape(out, tokens, head * heads, batch), width, height, head * heads, batch))
        cur = e.conv_direct(e.need(f"{name}.attn.output.proj.weight"), out, stride=1)
        if x.ne[0] == cur.ne[0] and x.ne[2] == cur.ne[2]:
            cur = e.add(e.mul(cur, e.w(f"{name}.layer_scale.gamma")), x)
        return cur

    x = e.conv_direct(e.need("v.conv_stem.conv.weight"), same(e.image(), 3, 2), stride=2)
    x = e.act(maybe(e.add(x, e.w("v.conv_stem.conv.bias")), "v.conv_stem.bn.weight"))
    ends: list[Node] = []
    for stage in range(4):
        for block in range(512):
            name, stride = f"v.blk.{stage}.{block}", 2 if block == 0 else 1
            if e.w(f"{name}.conv_exp.weight") is not None:
                x = edge(x, name, stride)
            elif e.w(f"{name}.attn.query.proj.weight") is not None:
                x = attention(x, name)
            elif e.w(f"{name}.dw_start.conv.weight") is not None or e.w(f"{name}.pw_exp.conv.weight") is not None:
                x = inverted(x, name, stride)
            else:
                break
        ends.append(x)
    high = ends[2]
    parts = [p if p.ne[0] >= high.ne[0] and p.ne[1] >= high.ne[1] else _upscale(e, p, high.ne[0] // p.ne[0]) for p in ends[2:]]
    x = e.concat(parts[0], parts[1], 2)
    for part, active in (("pw_exp", True), ("pw_proj", False)):
        kernel = e.w(f"v.msfa.ffn.{part}.conv.weight")
        if kernel is not None:
            x = maybe(e.conv_direct(kernel, x, stride=1), f"v.msfa.ffn.{part}.bn.weight")
            x = e.act(x) if active else x
    if x.ne[0] > 16:
        x = e.pool(x, x.ne[0] // 16, x.ne[0] // 16)
    x = maybe(x, "v.msfa.norm.weight")
    width, height, count, batch = x.ne
    x = e.cont(e.permute(e.permute(x, 2, 1, 0, 3), 0, 2, 1, 3))
    x = e.scale(e.cont(e.reshape(x, count, width * height, batch)))
    x = e.norm(x, e.w("mm.soft_emb_norm.weight"), rms=True)
    return e.like("rms_norm", e.mm(e.need("mm.input_projection.weight"), x))


def _upscale(e: Encoder, x: Node, factor: int) -> Node:
    return e.interpolate(x, x.ne[0] * factor, x.ne[1] * factor, x.ne[2], x.ne[3])


def granite(e: Encoder) -> Node:
    """Granite Vision 4.1: windows of queries look at several blocks' results."""
    side = e.width // e.patch
    patches, tiles = side * side, e.height // e.width
    x = e.image()
    if tiles > 1:
        x = e.cont(e.permute(e.reshape(x, e.width**2, tiles, 3, 1), 0, 2, 1, 3))
        x = e.reshape(x, e.width, e.width, 3, tiles)
    x = e.conv(e.need("v.patch_embd.weight"), x, stride=e.patch)
    x = e.cont(e.transpose(e.reshape(x, patches, e.embedding, tiles)))
    x = e.add(e.add(x, e.w("v.patch_embd.bias")), e.need("v.position_embd.weight"))
    outs = []
    for layer in range(e.layers):
        name = f"v.blk.{layer}"
        cur = e.normed(f"{name}.ln1", x)
        q, k, v = (e.reshape(e.linear(f"{name}.attn_{part}", cur), e.head, e.heads, patches, tiles) for part in "qkv")
        cur = e.reshape(e.linear(f"{name}.attn_out", e.attend(q, k, v)), e.embedding, patches, tiles)
        x = e.add(cur, x)
        x = e.add(x, e.layer_feed(layer, e.normed(f"{name}.ln2", x)))
        outs.append(x)
    window, queries = e.number("projector.window_side"), e.number("projector.query_side")
    offsets = e.numbers("projector.spatial_offsets")
    features = e.numbers("feature_layer")
    if not (window and queries) or len(offsets) != len(features) or any(not 0 <= f < e.layers for f in features):
        raise UnsuitableError("projector")
    count = side // window
    fresh, windows = count * queries, count * count * tiles
    joined: Node | None = None
    for block, (feature, offset) in enumerate(zip(features, offsets, strict=True)):
        name = f"v.proj_blk.{block}"
        x = e.normed(f"{name}.norm", outs[feature])
        wide = x.ne[0]
        enc = e.reshape(e.rows(x, e.index(patches, tiles)), wide, window**2, windows)
        if offset >= 0:
            d = e.rows(x, e.index(fresh**2, tiles))
        else:
            d = e.cont(e.permute(e.reshape(x, wide, side, side, tiles), 2, 0, 1, 3))
            d = e.pool(e.reshape(d, side, side, wide * tiles), side // fresh, side // fresh)
            d = e.cont(e.permute(e.reshape(d, fresh, fresh, wide, tiles), 1, 2, 0, 3))
            d = e.reshape(d, wide, fresh**2, tiles)
        d = e.reshape(e.rows(d, e.index(fresh**2, tiles)), wide, queries**2, windows)
        asked = e.add(d, e.need(f"{name}.query"))
        enc = e.add(enc, e.need(f"{name}.img_pos"))
        x = e.normed(f"{name}.post_norm", asked)

        def heads(part: str, x: Node, name: str = name, wide: int = wide) -> Node:
            flat = e.linear(f"{name}.{part}", e.reshape(x, x.ne[0], x.ne[1] * x.ne[2]))
            return e.reshape(flat, 64, wide // 64, x.ne[1], windows)

        for part, other in (("self_attn", None), ("cross_attn", enc)):
            looked = other if other is not None else x
            q, k, v = heads(f"{part}_q", x), heads(f"{part}_k", looked), heads(f"{part}_v", looked)
            cur = e.linear(f"{name}.{part}_out", e.attend(q, k, v))
            cur = e.reshape(cur, wide, x.ne[1], windows)
            x = e.normed(f"{name}.{part}_norm", e.add(cur, x))
        cur = e.mlp(e.reshape(x, wide, queries**2 * windows), f"{name}.ffn_up", f"{name}.ffn_down")
        x = e.normed(f"{name}.ffn_norm", e.add(e.reshape(cur, wide, queries**2, windows), x))
        x = e.rows(e.reshape(x, wide, queries**2 * count * count, tiles), e.index(fresh**2, tiles))
        x = e.linear(f"{name}.linear", x)
        joined = x if joined is None else e.concat(joined, x, 0)
    if joined is None:
        raise UnsuitableError("feature_layer")
    return joined


# sound encoders


def whisper(e: Encoder) -> Node:
    """Ultravox, Voxtral, Qwen2-Audio, GLM-ASR, MERaLiON, Music Flamingo."""
    tokens = e.width // 2
    x = e.act(e.add(e.conv_line(e.need("a.conv1d.1.weight"), e.image(1), stride=1, pad=e.need("a.conv1d.1.weight").ne[0] // 2), e.w("a.conv1d.1.bias")))
    x = e.act(e.add(e.conv_line(e.need("a.conv1d.2.weight"), x, stride=2, pad=e.need("a.conv1d.2.weight").ne[0] // 2), e.w("a.conv1d.2.bias")))
    x = e.cont(e.transpose(x))
    table = e.need("a.position_embd.weight")
    learned = e.view(table, (table.ne[0], tokens), (table.nb[1],))
    x = e.transform(x, tokens, learned=learned)
    if e.kind in ("ultravox", "voxtral", "meralion"):
        x = _stack(e, x)
    if e.kind == "ultravox":
        x = e.mm(e.need("mm.a.mlp.1.weight"), e.norm(x, e.need("mm.a.norm_pre.weight"), rms=True))
        x = e.op("glu", (x.ne[0] // 2, *x.ne[1:]), x)
        return e.mm(e.need("mm.a.mlp.2.weight"), e.norm(x, e.need("mm.a.norm_mid.weight"), rms=True))
    if e.kind == "qwen2a":
        return e.linear("mm.a.fc", x)
    if e.kind == "meralion":
        x = e.act(e.linear("mm.a.mlp.0", e.normed("mm.a.norm_pre", x)))
        gate = e.act(e.linear("mm.a.mlp.1", x))
        return e.linear("mm.a.mlp.3", e.mul(gate, e.linear("mm.a.mlp.2", x)))
    if e.kind == "glma":
        x = _stack(e, e.normed("mm.a.norm_pre", x))
        x = e.mlp(x, "mm.a.mlp.1", "mm.a.mlp.2")
        return e.concat(e.concat(e.need("v.boi"), x, 1), e.need("v.eoi"), 1)
    return e.mlp(x, "mm.a.mlp.1", "mm.a.mlp.2")


def _stack(e: Encoder, x: Node) -> Node:
    """Several tokens as one row."""
    factor = e.number("projector.stack_factor")
    if factor <= 1:
        return x
    count = x.ne[0] * x.rows
    row = e.embedding * factor
    padded = -(-count // row) * row
    if padded > count:
        x = e.pad(e.view(x, (count,)), padded - count)
    return e.view(x, (row, padded // row), (4 * row,))


def qwen3_audio(e: Encoder) -> Node:
    """Qwen3-ASR and Qwen3-Omni: chunks of a hundred frames."""
    raw = e.image(1)
    chunks = e.width // 100
    x = e.cont(e.view(raw, (100, e.height, 1, chunks), (e.width * 4, 400, 400)))
    x = _three_convolutions(e, x)
    x = e.add(x, e.w("a.conv_out.bias"))
    table = e.need("a.position_embd.weight")
    own = e.view(table, (table.ne[0], x.ne[1] // chunks), (table.nb[1],))
    x = e.add(x, e.repeat(own, table.ne[0], x.ne[1]))
    return e.mlp(e.transform(x, x.ne[1]), "mm.a.mlp.1", "mm.a.mlp.2")


def _three_convolutions(e: Encoder, x: Node) -> Node:
    for part in (1, 2, 3):
        x = e.conv(e.need(f"a.conv2d.{part}.weight"), x, stride=2, pad=1)
        bias = e.w(f"a.conv2d.{part}.bias")
        x = e.act(e.add(x, e.reshape(bias, 1, 1, x.ne[2], 1) if bias else None))
    x = e.cont(e.permute(x, 2, 0, 1, 3))
    x = e.reshape(x, x.ne[0] * x.ne[1], x.ne[2] * x.ne[3])
    return e.matmul(e.need("a.conv_out.weight"), x)


def dots_audio(e: Encoder) -> Node:
    """dots3.note's sound side."""
    x = _three_convolutions(e, e.image(1))
    position = e.index(x.ne[1])
    x = e.transform(x, x.ne[1], rms=True, add_position=lambda t: e.rope(t, position))
    return e.mlp(e.normed("mm.a.norm_pre", x), "mm.a.mlp.1", "mm.a.mlp.3")


def gemma4_sound(e: Encoder) -> Node:
    """Gemma 4's sound side without an encoder."""
    x = e.cont(e.permute(e.image(1), 1, 0, 2, 3))
    return e.mm(e.need("mm.a.input_projection.weight"), e.like("rms_norm", x))


def _gated(e: Encoder, x: Node, *, packed: bool = False) -> Node:
    """Half of a row gated by the other half, turned."""
    half = x.ne[0] // 2
    one = e.view(x, (half, x.ne[1]), (x.nb[1],))
    other = e.view(x, (half, x.ne[1]), (x.nb[1],))
    gate = e.act(e.cont(other) if packed else other)
    return e.cont(e.transpose(e.mul(one, gate)))


def _half_step(e: Encoder, x: Node, norm: str, up: str, down: str) -> Node:
    return e.add(x, e.scale(e.mlp(e.normed(norm, x), up, down)))


def conformer(e: Encoder) -> Node:
    """LFM2-Audio."""
    offsets = (((e.width + 1) // 2 + 1) // 2 + 1) // 2 * 2 - 1
    relative = e.input(512, offsets)
    e.expand(relative)
    x = e.cont(e.transpose(e.image(1)))
    x = e.act_inplace(e.add(e.conv(e.need("a.conv1d.0.weight"), x, stride=2, pad=1), e.w("a.conv1d.0.bias")))
    for deep, flat in ((2, 3), (5, 6)):
        x = e.add(e.conv_direct(e.need(f"a.conv1d.{deep}.weight"), x, stride=2, pad=1, depthwise=True), e.w(f"a.conv1d.{deep}.bias"))
        x = e.act_inplace(e.add(e.conv_direct(e.need(f"a.conv1d.{flat}.weight"), x, stride=1), e.w(f"a.conv1d.{flat}.bias")))
    x = e.cont(e.permute(x, 0, 2, 1, 3))
    x = e.linear("a.pre_encode.out", e.reshape(x, x.ne[0] * x.ne[1], x.ne[2]))
    for layer in range(e.layers):
        name = f"a.blk.{layer}"
        rest = _half_step(e, x, f"{name}.ffn_norm", f"{name}.ffn_up", f"{name}.ffn_down")
        cur = e.normed(f"{name}.ln1", rest)
        q, k, v = (e.linear(f"{name}.attn_{part}", cur) for part in "qkv")
        tokens = q.ne[1]
        q, k, v = (e.reshape(t, e.head, e.heads, tokens) for t in (q, k, v))
        by_key = e.permute(e.add(q, e.need(f"{name}.pos_bias_u")), 0, 2, 1, 3)
        by_place = e.permute(e.add(q, e.need(f"{name}.pos_bias_v")), 0, 2, 1, 3)
        k, v = e.cont(e.permute(k, 0, 2, 1, 3)), e.cont(e.permute(v, 1, 2, 0, 3))
        content = e.cont(e.permute(e.matmul(by_key, k), 1, 0, 2, 3))
        place = e.mm(e.need(f"{name}.linear_pos.weight"), relative)
        place = e.permute(e.reshape(place, e.head, e.heads, place.ne[1]), 0, 2, 1, 3)
        place = e.cont(e.permute(e.matmul(by_place, place), 1, 0, 2, 3))
        length, rows, heads = place.ne[:3]
        place = e.reshape(e.pad(place, 1), rows, length + 1, heads)
        place = e.view(place, (rows, length, heads), (place.nb[1], place.nb[2]))
        place = e.cont(place, length, rows, heads)
        place = e.view(place, (content.ne[0], rows, heads), (place.nb[1], place.nb[2]))
        scores = e.like("soft_max", e.scale(e.add(content, place)))
        out = e.permute(e.matmul(scores, v), 2, 0, 1, 3)
        rest = e.add(rest, e.linear(f"{name}.attn_out", e.cont(out, out.ne[0] * out.ne[1], out.ne[2])))
        cur = _gated(e, e.linear(f"{name}.conv_pw1", e.normed(f"{name}.norm_conv", rest)))
        cur = e.pad(e.like("roll", e.pad(cur, 4)), 4)
        cur = _depthwise_line(e, name, cur)
        cur = e.act(e.scaled(f"{name}.conv_norm", cur))
        rest = e.add(rest, e.linear(f"{name}.conv_pw2", cur))
        rest = _half_step(e, rest, f"{name}.ffn_norm_1", f"{name}.ffn_up_1", f"{name}.ffn_down_1")
        x = e.normed(f"{name}.ln2", rest)
    x = e.normed("mm.a.mlp.0", x)
    return e.mlp(x, "mm.a.mlp.1", "mm.a.mlp.3")


def gemma4_audio(e: Encoder) -> Node:
    """Gemma 4's sound encoder: chunks of twelve frames that see twelve more."""
    x = e.cont(e.transpose(e.image(1)))
    for part in (0, 1):
        x = e.add(e.conv(e.need(f"a.conv1d.{part}.weight"), x, stride=2, pad=1), e.w(f"a.conv1d.{part}.bias"))
        weight = e.w(f"a.conv1d.{part}.norm.weight")
        if weight is not None:
            x = e.norm(e.cont(e.permute(x, 1, 2, 0, 3)), weight)
            x = e.cont(e.permute(x, 2, 0, 1, 3))
        x = e.act(x)
    x = e.cont(e.permute(x, 1, 2, 0, 3))
    x = e.linear("a.input_projection", e.reshape(x, x.ne[0] * x.ne[1], x.ne[2]))
    tokens, chunk, seen, places = x.ne[1], 12, 24, 13
    blocks = -(-tokens // chunk)
    padded = blocks * chunk
    relative, mask = e.input(e.heads * e.head, places), e.input(seen, chunk, blocks)

    def half(x: Node, name: str, part: str) -> Node:
        cur = e.norm(x, e.need(f"{name}.ffn_norm{part}.weight"), rms=True)
        cur = e.feed(cur, e.need(f"{name}.ffn_up{part}.weight"), None, e.need(f"{name}.ffn_down{part}.weight"), None)
        post = e.w(f"{name}.ffn_post_norm{part}.weight")
        cur = e.norm(cur, post, rms=True) if post is not None else cur
        return e.add(x, e.scale(cur))

    def context(t: Node) -> Node:
        t = e.pad(t, 0, 0, seen * blocks - tokens)
        return e.cont(e.view(t, (e.head, e.heads, seen, blocks), (t.nb[1], t.nb[2], chunk * t.nb[2])))

    for layer in range(e.layers):
        name = f"a.blk.{layer}"
        rest = half(x, name, "")
        weight = e.w(f"{name}.attn_pre_norm.weight") or e.w(f"{name}.ln1.weight")
        cur = e.norm(rest, weight, rms=True) if weight is not None else rest
        q, k, v = (e.reshape(e.mm(e.need(f"{name}.attn_{part}.weight"), cur), e.head, e.heads, tokens) for part in "qkv")
        turned = []
        for t, factor in ((q, "per_dim_scale"), (k, "per_dim_k_scale")):
            weight = e.w(f"{name}.{factor}.weight")
            turned.append(e.mul(e.scale(t), e.reshape(weight, e.head, 1, 1) if weight else None))
        q, k = turned
        q = e.reshape(e.pad(q, 0, 0, padded - tokens), e.head, e.heads, chunk, blocks)
        q = e.cont(e.permute(q, 0, 3, 1, 2))
        k = e.cont(e.permute(context(k), 0, 3, 1, 2))
        v = e.cont(e.permute(context(v), 1, 3, 0, 2))
        scores = e.matmul(k, q)
        weight = e.w(f"{name}.attn_k_rel.weight")
        if weight is not None:
            place = e.reshape(e.matmul(weight, relative), e.head, e.heads, places)
            place = e.matmul(e.cont(e.permute(place, 0, 2, 1, 3)), e.reshape(q, e.head, padded, e.heads))
            place = e.pad(e.reshape(place, places, chunk, blocks, e.heads), seen + 1 - places)
            place = e.reshape(place, (seen + 1) * chunk, blocks, e.heads)
            place = e.cont(e.view(place, (chunk * seen, blocks, e.heads), (place.nb[1], place.nb[2])))
            scores = e.add(scores, e.reshape(place, seen, chunk, blocks, e.heads))
        scores = e.add(e.scale(e.act(e.scale(scores))), mask)
        cur = e.matmul(v, e.like("soft_max", scores))
        cur = e.cont(e.cont(e.permute(cur, 0, 2, 3, 1)), e.head * e.heads, padded)
        if padded > tokens:
            cur = e.cont(e.view(cur, (e.head * e.heads, tokens), (cur.nb[1],)))
        cur = e.linear(f"{name}.attn_out", cur)
        post = e.w(f"{name}.attn_post_norm.weight")
        rest = e.add(rest, e.norm(cur, post, rms=True) if post is not None else cur)
        weight = e.w(f"{name}.conv_norm.weight")
        if weight is not None:
            cur = e.mm(e.need(f"{name}.conv_pw1.weight"), e.norm(rest, weight, rms=True))
            cur = _depthwise_line(e, name, e.pad(_gated(e, cur, packed=True), 4))
            inner = e.w(f"{name}.norm_conv.weight")
            cur = e.act(e.norm(cur, inner, rms=True) if inner is not None else cur)
            rest = e.add(rest, e.mm(e.need(f"{name}.conv_pw2.weight"), cur))
        rest = half(rest, name, "_1")
        weight = e.w(f"{name}.ln2.weight")
        x = e.norm(rest, weight, rms=True) if weight is not None else rest
    if e.w("a.pre_encode.out.weight") is not None:
        x = e.linear("a.pre_encode.out", x)
    x = e.norm(x, e.w("mm.a.soft_emb_norm.weight"), rms=True)
    last = e.w("mm.a.input_projection.weight")
    return e.mm(last, x) if last is not None else x


def granite_speech(e: Encoder) -> Node:
    """Granite Speech: a conformer with relative positions, and queries that look at windows of it."""
    frames, chunk, kernel = e.width, e.number("chunk_size"), e.number("conv_kernel_size")
    if not chunk:
        raise UnsuitableError("chunk_size")
    blocks = -(-frames // chunk)
    padded = blocks * chunk
    features = e.numbers("feature_layer")
    distances = e.index(chunk * chunk)
    mask = e.input(chunk, chunk, 1, blocks) if frames % chunk else None
    x = e.linear("a.input_projection", e.cont(e.transpose(e.image(1))))
    joined = x if 0 in features else None
    for layer in range(e.layers):
        name = f"a.blk.{layer}"
        rest = _half_step(e, x, f"{name}.ffn_norm", f"{name}.ffn_up", f"{name}.ffn_down")
        cur = e.normed(f"{name}.ln1", rest)
        if padded > frames:
            cur = e.pad(cur, 0, padded - frames)
        q, k, v = (e.reshape(e.mm(e.need(f"{name}.attn_{part}.weight"), cur), e.head, e.heads, chunk, blocks) for part in "qkv")
        content = e.matmul(e.cont(e.permute(k, 0, 2, 1, 3)), e.permute(q, 0, 2, 1, 3))
        place = e.reshape(e.rows(e.need(f"{name}.attn_rel_pos_emb"), distances), e.head, chunk, chunk)
        place = e.matmul(e.reshape(place, e.head, chunk, 1, chunk), e.permute(q, 0, 1, 3, 2))
        place = e.cont(e.permute(place, 0, 2, 3, 1))
        scores = e.like("soft_max", e.add(content, place), *((mask,) if mask else ()))
        out = e.permute(e.matmul(e.cont(e.permute(v, 1, 2, 0, 3)), scores), 0, 2, 1, 3)
        out = e.cont(out, e.embedding, padded)
        if padded > frames:
            out = e.view(out, (e.embedding, frames), (out.nb[1],))
        rest = e.add(rest, e.linear(f"{name}.attn_out", out))
        cur = _gated(e, e.linear(f"{name}.conv_pw1", e.normed(f"{name}.norm_conv", rest)))
        cur = _depthwise_line(e, name, e.pad(cur, kernel // 2 * 2))
        cur = e.act(e.scaled(f"{name}.conv_norm", cur))
        rest = e.add(rest, e.linear(f"{name}.conv_pw2", cur))
        rest = _half_step(e, rest, f"{name}.ffn_norm_1", f"{name}.ffn_up_1", f"{name}.ffn_down_1")
        x = e.normed(f"{name}.ln2", rest)
        if features and layer + 1 in features:
            joined = x if joined is None else e.concat(joined, x, 0)
        if layer + 1 == e.layers // 2:
            middle = e.like("soft_max", e.linear("a.enc_ctc_out", x))
            x = e.add(x, e.linear("a.enc_ctc_out_mid", middle))
    if joined is not None:
        x = e.concat(joined, x, 0)
    window, rate = e.number("projector.window_size"), e.number("projector.downsample_rate")
    heads = e.number("projector.head_count")
    if not (window and rate and heads):
        raise UnsuitableError("projector")
    asked, windows = window // rate, -(-frames // window)
    if windows * window > frames:
        x = e.pad(x, 0, windows * window - frames)
    x = e.reshape(x, x.ne[0], window, windows)
    query = e.normed("a.proj_norm", e.need("a.proj_query"))
    query = e.repeat(e.reshape(query, e.embedding, asked, 1), e.embedding, asked, windows)
    for layer in range(2):
        name = f"a.proj_blk.{layer}"
        for part in ("self_attn", "cross_attn"):
            looked, count = (query, asked) if part == "self_attn" else (x, window)
            q, k, v = (e.linear(f"{name}.{part}_{letter}", t) for letter, t in (("q", query), ("k", looked), ("v", looked)))
            q = e.reshape(q, e.embedding // heads, heads, asked, windows)
            k, v = (e.reshape(t, e.embedding // heads, heads, count, windows) for t in (k, v))
            cur = e.reshape(e.linear(f"{name}.{part}_out", e.attend(q, k, v)), e.embedding, asked, windows)
            query = e.normed(f"{name}.{part}_norm", e.add(cur, query))
        query = e.normed(f"{name}.ffn_norm", e.add(e.mlp(query, f"{name}.ffn_up", f"{name}.ffn_down"), query))
    return e.linear("a.proj_linear", e.reshape(query, e.embedding, asked * windows))


def mimo_audio(e: Encoder) -> Node:
    """MiMo's sound tokenizer: a transformer, codes, and a local transformer over groups of codes."""
    x = e.act(e.add(e.conv_line(e.need("a.conv1d.1.weight"), e.image(1), stride=1, pad=e.need("a.conv1d.1.weight").ne[0] // 2), e.w("a.conv1d.1.bias")))
    x = e.act(e.add(e.conv_line(e.need("a.conv1d.2.weight"), x, stride=2, pad=e.need("a.conv1d.2.weight").ne[0] // 2), e.w("a.conv1d.2.bias")))
    x = e.cont(e.transpose(x))
    tokens = x.ne[1]
    position = e.index(tokens)
    whole, near = e.input(tokens, tokens), e.input(tokens, tokens)
    modes, group = e.numbers("wa_pattern_mode"), e.number("local_group_size")
    if len(modes) != e.layers or e.layers < 3 or not group:
        raise UnsuitableError("wa_pattern_mode")
    kept: dict[int, Node] = {}
    x = e.transform(
        x, tokens, add_position=lambda t: e.rope(t, position), masks=[whole if m == -1 else near for m in modes], last_norm="",
        seen=lambda node, layer: kept.update({layer: node}),
    )  # fmt: skip
    x = e.normed("a.post_ln", e.add(e.reshape(x, e.embedding, tokens), kept[2]))
    x = e.act(e.conv_line(e.need("a.downsample.conv.weight"), e.cont(e.transpose(x)), stride=2, pad=0))
    rest = e.normed("a.downsample.norm", e.cont(e.transpose(x)))
    codebook, table = e.need("a.rvq.codebook.weight"), e.need("mm.a.code_embd.weight")
    codes = []
    for bins in e.numbers("rvq.codebook_size"):
        own = e.cont(e.view(codebook, (codebook.ne[0], bins), (codebook.nb[1],)))
        length = e.op("sum_rows", (1, bins), e.like("sqr", own))
        length = e.cont(e.transpose(length))
        scores = e.like("sub", e.scale(e.matmul(own, rest)), length)
        codes.append(e.op("argmax", (scores.ne[1],), scores, type_name="I32"))
        rest = e.like("sub", rest, e.rows(own, codes[-1]))
    total: Node | None = None
    for code in codes:
        rows = e.rows(e.cont(e.view(table, table.ne[:2], (table.nb[1],))), code)
        total = rows if total is None else e.add(total, rows)
    if total is None:
        raise UnsuitableError("rvq.codebook_size")
    x = total
    groups = -(-x.ne[1] // group)
    padded = groups * group
    if padded != x.ne[1]:
        x = e.pad(x, 0, padded - x.ne[1])
    position, mask = e.index(padded), e.input(padded, padded)
    for layer in range(e.number("local_block_count")):
        name = f"mm.a.local_blk.{layer}"
        cur = e.norm(x, e.need(f"{name}.ln1.weight"), rms=True)
        q, k, v = (e.reshape(e.linear(f"{name}.attn_{part}", cur), e.head, e.heads, padded) for part in "qkv")
        q, k = e.rope(q, position), e.rope(k, position)
        x = e.add(x, e.mm(e.need(f"{name}.attn_out.weight"), e.attend(q, k, v, mask)))
        cur = e.norm(x, e.need(f"{name}.ln2.weight"), rms=True)
        x = e.add(x, e.feed(cur, e.need(f"{name}.ffn_up.weight"), None, e.need(f"{name}.ffn_down.weight"), None, e.need(f"{name}.ffn_gate.weight")))
    x = e.norm(x, e.need("mm.a.local_norm.weight"), rms=True)
    x = e.reshape(x, e.embedding * group, groups)
    return e.feed(x, e.need("mm.a.mlp.1.weight"), None, e.need("mm.a.mlp.2.weight"), None)


def parakeet(e: Encoder) -> Node:
    """Parakeet: a conformer that sees the whole sound."""
    x = e.cont(e.transpose(e.image(1)))
    x = e.act(e.add(e.conv(e.need("a.conv1d.0.weight"), x, stride=2, pad=1), e.w("a.conv1d.0.bias")))
    for deep, flat in ((2, 3), (5, 6)):
        x = e.add(e.conv_direct(e.need(f"a.conv1d.{deep}.weight"), x, stride=2, pad=1, depthwise=True), e.w(f"a.conv1d.{deep}.bias"))
        x = e.act(e.add(e.conv(e.need(f"a.conv1d.{flat}.weight"), x, stride=1), e.w(f"a.conv1d.{flat}.bias")))
    x = e.cont(e.permute(x, 0, 2, 1, 3))
    x = e.linear("a.pre_encode.out", e.reshape(x, x.ne[0] * x.ne[1], x.ne[2]))
    tokens, half = x.ne[1], e.embedding // 2
    if tokens > 8192:
        raise UnsuitableError("local attention")
    offsets = 2 * tokens - 1
    mask, waves, places = e.input(tokens, tokens), e.input(half), e.input(1, offsets)
    angle = e.mul(e.repeat(waves, half, offsets), places)
    relative = e.concat(e.reshape(e.like("sin", angle), 1, half, offsets), e.reshape(e.like("cos", angle), 1, half, offsets), 0)
    relative = e.reshape(e.cont(relative), e.embedding, offsets)
    for layer in range(e.layers):
        name = f"a.blk.{layer}"
        cur = e.feed(e.scaled(f"{name}.ffn_norm", e.norm(x)), e.need(f"{name}.ffn_up.weight"), None, e.need(f"{name}.ffn_down.weight"), None)
        rest = e.add(x, e.scale(cur))
        cur = e.scaled(f"{name}.ln1", e.norm(rest))
        q, k, v = (e.reshape(e.mm(e.need(f"{name}.attn_{part}.weight"), cur), e.head, e.heads, tokens) for part in "qkv")
        place = e.reshape(e.mm(e.need(f"{name}.linear_pos.weight"), relative), e.head, e.heads, offsets)
        place = e.cont(e.permute(place, 0, 2, 1, 3))
        by_key = e.add(q, e.need(f"{name}.pos_bias_u"))
        content = e.matmul(e.permute(k, 0, 2, 1, 3), e.permute(by_key, 0, 2, 1, 3))
        by_place = e.cont(e.permute(e.add(q, e.need(f"{name}.pos_bias_v")), 0, 2, 1, 3))
        shift = e.matmul(place, by_place)
        shift = e.cont(e.reshape(e.pad(shift, 1), tokens, offsets + 1, e.heads))
        shift = e.cont(e.view(shift, (tokens, offsets, e.heads), (offsets * 4, shift.nb[2])))
        shift = e.cont(e.view(shift, (*content.ne[:2], e.heads), (shift.nb[1], shift.nb[2])))
        scores = e.like("soft_max", e.add(e.scale(e.add(content, shift)), mask))
        out = e.permute(e.matmul(scores, e.cont(e.permute(v, 1, 2, 0, 3))), 2, 0, 1, 3)
        rest = e.add(rest, e.mm(e.need(f"{name}.attn_out.weight"), e.cont(out, e.embedding, tokens)))
        cur = e.mm(e.need(f"{name}.conv_pw1.weight"), e.scaled(f"{name}.norm_conv", e.norm(rest)))
        cur = _gated(e, cur)
        kernel = e.need(f"{name}.conv_dw.weight")
        cur = e.pad(cur, (e.number("conv_kernel_size") - 1) // 2 * 2)
        cur = e.op("ssm_conv", (kernel.ne[1], cur.ne[0] - kernel.ne[0] + 1, cur.ne[2]), cur, kernel)
        cur = e.like("div", e.like("sub", cur, e.need(f"{name}.conv_norm_mean")), e.like("sqrt", e.need(f"{name}.conv_norm_var")))
        cur = e.act(e.scaled(f"{name}.conv_norm", cur))
        rest = e.add(rest, e.mm(e.need(f"{name}.conv_pw2.weight"), cur))
        cur = e.feed(e.scaled(f"{name}.ffn_norm_1", e.norm(rest)), e.need(f"{name}.ffn_up_1.weight"), None, e.need(f"{name}.ffn_down_1.weight"), None)
        x = e.scaled(f"{name}.ln2", e.norm(e.add(rest, e.scale(cur))))
    x = e.norm(x, e.need("mm.a.norm_pre.weight"), rms=True)
    return e.feed(x, e.need("mm.a.mlp.1.weight"), None, e.need("mm.a.mlp.2.weight"), None, squared=True)


def _depthwise_line(e: Encoder, name: str, x: Node) -> Node:
    kernel = e.need(f"{name}.conv_dw.weight")
    x = e.op("ssm_conv", (kernel.ne[1], x.ne[0] - kernel.ne[0] + 1, x.ne[2]), x, kernel)
    return e.add(x, e.w(f"{name}.conv_dw.bias"))


#: Graphs by projector, for images.
VISION: Mapping[str, Callable[[Encoder], Node]] = {
    "gemma3": siglip, "idefics3": siglip, "lfm2": siglip, "janus_pro": siglip, "phi4": siglip,
    "mlp": llava, "ldp": llava, "ldpv2": llava, "adapter": llava,
    "qwen2vl_merger": qwen, "qwen2.5vl_merger": qwen, "qwen3vl_merger": qwen, "exaone4_5": qwen, "ling3vl": ling,
    "pixtral": pixtral, "lightonocr": pixtral, "dots_ocr": dots, "dots3note_v": dots, "internvl": internvl,
    "nemotron_v2_vl": nemotron, "llama4": llama4, "kimivl": kimi, "kimik25": kimi, "resampler": resampler,
    "minicpmv4_6": minicpm46, "glm4v": glm4v, "glm5v": glm4v, "cogvlm": cogvlm, "gemma4v": gemma4, "gemma4uv": gemma4_unified,
    "gemma3nv": mobilenet, "hunyuanvl": hunyuan, "paddleocr": paddleocr, "step3vl": step3, "youtuvl": youtu,
    "minimax_m3": minimax, "muse-glimmer": muse, "mimovl": mimo, "deepseek4v": deepseek4, "deepseekocr": deepseek_ocr,
    "deepseekocr2": deepseek_ocr2, "yasa2": yasa, "granite4_vision": granite,
}  # fmt: skip
#: Graphs by projector, for sounds.
AUDIO: Mapping[str, Callable[[Encoder], Node]] = {
    "ultravox": whisper, "voxtral": whisper, "qwen2a": whisper, "glma": whisper, "meralion": whisper, "musicflamingo": whisper,
    "qwen3a": qwen3_audio, "dots3note_a": dots_audio, "gemma4ua": gemma4_sound, "lfm2a": conformer,
    "gemma4a": gemma4_audio, "granite_speech": granite_speech, "mimo_audio": mimo_audio, "parakeet": parakeet,
}  # fmt: skip
