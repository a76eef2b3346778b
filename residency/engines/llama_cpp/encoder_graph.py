"""Compute graphs of image and audio encoders as shapes, and the buffers the engine reserves for them.

A graph is built from operations that know only shapes, strides and types. It is then ordered, split between the card and
the host and packed as the engine does it. Laws restated from llama.cpp 0.5.0 (0c1e570): ``ggml/src/ggml.c`` (result
shapes, the order in which a graph is visited), ``ggml-backend.cpp`` (which back end runs an operation, copies between
them), ``ggml-alloc.c`` (placing, taking over an operand's place, freeing) and ``ggml-cuda.cu`` (what a card can run).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from .arena import Space
from .blocks import FLASH_HEADS
from .context import quantised_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from residency.checkpoint.model import Tensor

Shape = tuple[int, int, int, int]

WEIGHT, INPUT, LEAF, OP, VIEW, INPLACE, COPY = range(7)

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4}
#: Operations that may take over the place of an operand of their own layout (``ggml_op_can_inplace``).
TAKES_OVER = frozenset({"scale", "add", "mul", "sub", "div", "sqr", "sqrt", "unary", "rope", "rms_norm", "clamp", "soft_max"})
#: Bytes a place is aligned to: on a card, in host memory.
CARD_ALIGNMENT, HOST_ALIGNMENT = 128, 32


class Node:
    """A tensor of the graph: bytes of its own, a look at another one, or a weight that lies elsewhere."""

    __slots__ = ("backend", "kind", "nb", "ne", "op", "root", "sources", "type")

    def __init__(
        self, kind: int, op: str, type_name: str, ne: Shape, nb: Shape, sources: tuple[Node, ...] = (), root: Node | None = None
    ) -> None:
        self.kind, self.op, self.type, self.ne, self.nb = kind, op, type_name, ne, nb
        self.sources, self.root = sources, root
        self.backend = -1

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.ne[1] * self.ne[2] * self.ne[3]

    def contiguous(self, beyond: int = 0) -> bool:
        """Whether the elements lie one behind the other; gaps are allowed up to dimension ``beyond``."""
        step = self.nb[0] if self.type not in SIZES else SIZES[self.type]
        if self.ne[0] != 1 and self.nb[0] != step:
            return False
        step *= self.ne[0]
        for i in (1, 2, 3):
            if self.ne[i] == 1:
                continue
            if i > beyond and self.nb[i] != step:
                return False
            step = self.nb[i] * self.ne[i]
        return True


def _shape(ne: Iterable[int]) -> Shape:
    values = (*ne, 1, 1, 1, 1)
    return values[0], values[1], values[2], values[3]


def _strides(type_name: str, ne: Shape) -> Shape:
    size = SIZES[type_name]
    return size, size * ne[0], size * ne[0] * ne[1], size * ne[0] * ne[1] * ne[2]


class Graph:
    """The operations of one encoder, in the order the engine runs them."""

    def __init__(self, *, flash: bool) -> None:
        self.flash = flash
        self.nodes: list[Node] = []
        self.leafs: list[Node] = []
        self.holds: dict[Node, list[Node]] = {}
        self._seen: set[Node] = set()

    # what is there before the graph runs

    def weight(self, tensor: Tensor) -> Node:
        """A tensor of the file; it lies in the weights' buffer."""
        ne = _shape(tensor.shape)
        if tensor.type_name in SIZES:
            return Node(WEIGHT, "none", tensor.type_name, ne, _strides(tensor.type_name, ne))
        row = tensor.nbytes // max(1, ne[1] * ne[2] * ne[3])
        return Node(WEIGHT, "none", tensor.type_name, ne, (1, row, row * ne[1], row * ne[1] * ne[2]))

    def input(self, *ne: int, type_name: str = "F32") -> Node:
        """A tensor that the program fills: it lies in host memory."""
        return self._new(INPUT, "none", type_name, _shape(ne))

    def leaf(self, *ne: int) -> Node:
        """A tensor nobody fills."""
        return self._new(LEAF, "none", "F32", _shape(ne))

    # operations

    def _new(self, kind: int, op: str, type_name: str, ne: Shape, *sources: Node) -> Node:
        return Node(kind, op, type_name, ne, _strides(type_name, ne), sources)

    def op(self, name: str, ne: Iterable[int], *sources: Node, type_name: str = "F32") -> Node:
        """An operation with a result of its own."""
        return self._new(OP, name, type_name, _shape(ne), *sources)

    def like(self, name: str, a: Node, *others: Node) -> Node:
        """An operation whose result looks like its first operand."""
        return self._new(OP, name, a.type if a.type in SIZES else "F32", a.ne, a, *others)

    def add(self, a: Node, b: Node | None) -> Node:
        """A sum; nothing to add leaves the operand."""
        return a if b is None else self.like("add", a, b)

    def mul(self, a: Node, b: Node | None) -> Node:
        """A product of elements; no factor leaves the operand."""
        return a if b is None else self.like("mul", a, b)

    def scale(self, a: Node) -> Node:
        """A product with a number."""
        return self.like("scale", a)

    def act(self, a: Node) -> Node:
        """An activation, whichever."""
        return self.like("unary", a)

    def act_inplace(self, a: Node) -> Node:
        """An activation whose result is a look at its operand."""
        return Node(INPLACE, "unary", a.type, a.ne, a.nb, (a,), a.root or a)

    def glu(self, a: Node, b: Node) -> Node:
        """A gate of two operands."""
        return self.like("glu", a, b)

    def matmul(self, weight: Node, x: Node) -> Node:
        """A matrix product."""
        return self.op("mul_mat", (weight.ne[1], x.ne[1], x.ne[2], x.ne[3]), weight, x)

    def norm(self, x: Node, weight: Node | None = None, bias: Node | None = None, *, rms: bool = False) -> Node:
        """A norm with its weight and bias, where there are any."""
        return self.add(self.mul(self.like("rms_norm" if rms else "norm", x), weight), bias)

    def cast(self, x: Node, type_name: str) -> Node:
        """A copy of another type."""
        return self.op("cpy", x.ne, x, type_name=type_name)

    def cont(self, x: Node, *ne: int) -> Node:
        """A copy without gaps."""
        return self.op("cont", ne or x.ne, x, type_name=x.type)

    def rows(self, table: Node, index: Node) -> Node:
        """Rows of a table."""
        return self.op("get_rows", (table.ne[0], *index.ne[:3]), table, index, type_name="I32" if table.type == "I32" else "F32")

    def repeat(self, x: Node, *ne: int) -> Node:
        """A tensor repeated to a shape."""
        return self.op("repeat", ne, x, type_name=x.type)

    def concat(self, a: Node, b: Node, axis: int) -> Node:
        """Two tensors, one behind the other."""
        ne = [*a.ne]
        ne[axis] += b.ne[axis]
        return self.op("concat", ne, a, b, type_name=a.type)

    def pad(self, x: Node, *more: int) -> Node:
        """A tensor with zeros around it; ``more`` are the elements each dimension grows by."""
        grown = (*more, 0, 0, 0)
        return self.op("pad", [n + grown[i] for i, n in enumerate(x.ne)], x)

    def pool(self, x: Node, width: int, height: int) -> Node:
        """Means over fields of ``width`` times ``height``."""
        return self.op("pool", ((x.ne[0] - width) // width + 1, (x.ne[1] - height) // height + 1, x.ne[2], x.ne[3]), x)

    def interpolate(self, x: Node, *ne: int) -> Node:
        """An image of another size."""
        return self.op("upscale", ne, x)

    def rope(self, x: Node, position: Node) -> Node:
        """Rotated heads."""
        return self.like("rope", x, position)

    def unfold(self, kernel: Node, x: Node, *, stride: int, pad: int = 0, type_name: str = "F16") -> Node:
        """The fields a two-dimensional convolution looks at, one a row."""
        width, height = ((x.ne[i] + 2 * pad - kernel.ne[i]) // stride + 1 for i in (0, 1))
        return self.op("im2col", (kernel.ne[0] * kernel.ne[1] * kernel.ne[2], width, height, x.ne[3]), kernel, x, type_name=type_name)

    def conv(self, kernel: Node, x: Node, *, stride: int, pad: int = 0, type_name: str | None = None) -> Node:
        """A convolution as unfolding and a matrix product."""
        fields = self.unfold(kernel, x, stride=stride, pad=pad, type_name=type_name or ("F32" if kernel.type == "BF16" else "F16"))
        flat = self.reshape(fields, fields.ne[0], fields.rows)
        product = self.matmul(flat, self.reshape(kernel, prod(kernel.ne[:3]), kernel.ne[3]))
        product = self.reshape(product, *fields.ne[1:], kernel.ne[3])
        return self.cont(self.permute(product, 0, 1, 3, 2))

    def conv_depthwise(self, kernel: Node, x: Node, *, stride: int, pad: int) -> Node:
        """A convolution of every channel on its own."""
        alone = self.reshape(kernel, kernel.ne[0], kernel.ne[1], 1, kernel.ne[2] * kernel.ne[3])
        image = self.reshape(x, x.ne[0], x.ne[1], 1, x.ne[2] * x.ne[3])
        fields = self.unfold(alone, image, stride=stride, pad=pad, type_name="F32" if kernel.type == "BF16" else "F16")
        flat = self.reshape(fields, fields.ne[0], fields.ne[2] * fields.ne[1], x.ne[2], x.ne[3])
        product = self.matmul(self.reshape(alone, alone.ne[0] * alone.ne[1], alone.ne[2], alone.ne[3], 1), flat)
        return self.reshape(product, fields.ne[1], fields.ne[2], x.ne[2], x.ne[3])

    def conv_line(self, kernel: Node, x: Node, *, stride: int, pad: int) -> Node:
        """A one-dimensional convolution."""
        length = (x.ne[0] + 2 * pad - kernel.ne[0]) // stride + 1
        kind = "F32" if kernel.type == "BF16" else "F16"
        fields = self.op("im2col", (kernel.ne[1] * kernel.ne[0], length, x.ne[2], 1), kernel, x, type_name=kind)
        flat = self.reshape(fields, fields.ne[0], fields.ne[2] * fields.ne[1])
        product = self.matmul(flat, self.reshape(kernel, kernel.ne[0] * kernel.ne[1], kernel.ne[2]))
        return self.reshape(product, fields.ne[1], kernel.ne[2], fields.ne[2])

    def conv_direct(self, kernel: Node, x: Node, *, stride: int, pad: int = 0, depthwise: bool = False) -> Node:
        """A convolution that the back end runs as one operation."""
        width, height = ((x.ne[i] + 2 * pad - kernel.ne[i]) // stride + 1 for i in (0, 1))
        return self.op("conv_2d_dw" if depthwise else "conv_2d", (width, height, x.ne[2] if depthwise else kernel.ne[3], x.ne[3]), kernel, x)

    # looks at a tensor

    def view(self, x: Node, ne: Iterable[int], nb: Iterable[int] = ()) -> Node:
        """A part of a tensor; strides are those of ``x`` where none are given."""
        given = (*nb,)
        shape = _shape(ne)
        strides = [*x.nb]
        for i, stride in enumerate(given):
            strides[i + 1] = stride
        for i in range(len(given) + 1, 4):
            if given:
                strides[i] = strides[i - 1] * shape[i - 1]
        return Node(VIEW, "view", x.type, shape, (strides[0], strides[1], strides[2], strides[3]), (x,), x.root or x)

    def reshape(self, x: Node, *ne: int) -> Node:
        """The same bytes in another shape."""
        shape = _shape(ne)
        nb = _strides(x.type, shape) if x.type in SIZES else (x.nb[0], x.nb[1], x.nb[1] * shape[1], x.nb[1] * shape[1] * shape[2])
        return Node(VIEW, "reshape", x.type, shape, nb, (x,), x.root or x)

    def permute(self, x: Node, *axes: int) -> Node:
        """Dimensions in another order; ``axes`` says where each one goes."""
        ne, nb = [1, 1, 1, 1], [1, 1, 1, 1]
        for i, axis in enumerate(axes):
            ne[axis], nb[axis] = x.ne[i], x.nb[i]
        return Node(VIEW, "permute", x.type, (ne[0], ne[1], ne[2], ne[3]), (nb[0], nb[1], nb[2], nb[3]), (x,), x.root or x)

    def transpose(self, x: Node) -> Node:
        """Rows and columns exchanged."""
        return self.permute(x, 1, 0, 2, 3)

    # parts that many encoders share

    def attend(self, q: Node, k: Node, v: Node, mask: Node | None = None, sinks: Node | None = None) -> Node:
        """Attention of heads; the result is one row a token."""
        for node in (q, k, v):
            self.expand(node)
        q, k = self.permute(q, 0, 2, 1, 3), self.permute(k, 0, 2, 1, 3)
        if self.flash:
            v = self.permute(v, 0, 2, 1, 3)
            k, v = self.cast(k, "F16"), self.cast(v, "F16")
            more = (*((self.cast(mask, "F16"),) if mask else ()), *((sinks,) if sinks else ()))
            out = self.op("flash", (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), q, k, v, *more)
            return self.reshape(out, out.ne[0] * out.ne[1], out.ne[2] * out.ne[3])
        v = self.cont(self.permute(v, 1, 2, 0, 3))
        scores = self.matmul(k, q)
        scores = self.like("soft_max", scores, *((mask,) if mask else ()), *((sinks,) if sinks else ()))
        out = self.permute(self.matmul(v, scores), 0, 2, 1, 3)
        return self.cont(out, out.ne[0] * out.ne[1], out.ne[2] * out.ne[3])

    def hold(self, until: Node, *kept: Node) -> None:
        """Keep tensors alive until ``until`` has run: the card runs the operations between as one."""
        self.holds.setdefault(until, []).extend(kept)

    def expand(self, node: Node) -> None:
        """Append everything ``node`` needs, and itself, to the graph: operands first, left to right."""
        seen = self._seen
        if node in seen:
            return
        seen.add(node)
        stack: list[tuple[Node, Iterator[Node]]] = [(node, iter(node.sources))]
        while stack:
            current, rest = stack[-1]
            for source in rest:
                if source not in seen:
                    seen.add(source)
                    stack.append((source, iter(source.sources)))
                    break
            else:
                stack.pop()
                (self.nodes if current.op != "none" else self.leafs).append(current)

    def pack(self, *, card: bool, runs: Callable[[Node], bool] | None = None) -> tuple[int, int]:
        """Return the bytes of the buffers on the device and in host memory.

        Args:
            card: False packs everything into host memory.
            runs: whether the device runs an operation; None: it runs all.
        """
        return _Packing(self, card=card, runs=runs).run()


def pooled(node: Node) -> int:
    """Return the bytes a card's product takes from the pool beside the buffers: see :mod:`.runtime`, which has the law."""
    if node.op != "mul_mat":
        return 0
    matrix, operand = node.sources
    kind = matrix.root.type if matrix.root is not None else matrix.type
    if kind in ("F16", "BF16"):
        return 2 * (operand.ne[0] * operand.rows + node.ne[0] * node.rows)
    return 0 if kind in SIZES else quantised_bytes(operand.ne[0], operand.rows)


def card_runs(node: Node) -> bool:
    """Whether a card of this day has a kernel for an operation on these shapes (``supports_op`` of the CUDA back end)."""
    sources = node.sources
    first = sources[0] if sources else node
    match node.op:
        case "flash":
            q, k, v = sources[:3]
            mask = sources[3] if len(sources) > 3 and sources[3].ne[1] > 1 else None
            if mask is not None and mask.ne[2] != 1:
                return False
            if k.ne[0] in FLASH_HEADS:
                return v.ne[0] == k.ne[0]
            group = q.ne[2] // max(1, k.ne[2])
            return k.ne[0] == 512 == v.ne[0] and group >= 2 and mask is not None and k.ne[1] % 256 == 0
        case "im2col" | "conv_2d":
            return first.contiguous() and sources[1].contiguous()
        case "conv_2d_dw":
            return first.type in ("F16", "F32")
        case "unary" | "group_norm":
            return first.contiguous()
        case "glu":
            return first.contiguous(1)
        case "norm" | "rms_norm" | "sum_rows" | "mean":
            return first.nb[0] == SIZES.get(first.type, first.nb[0])
        case "rope":
            return first.nb[0] == SIZES[first.type] and first.contiguous(2)
        case "mul_mat":
            if any(s.type in SIZES and s.nb[0] != SIZES[s.type] for s in sources):
                return False
            return not (sources[1].type == "F16" and first.type != "F16")
        case "add" | "sub" | "mul" | "div":
            types = {s.type for s in sources}
            return "BF16" not in types or first.type == "BF16"
        case "scale":
            return first.type in ("F32", "BF16")
        case "repeat":
            return first.type in ("F32", "F16")
        case "concat":
            return first.type == sources[1].type
        case "ssm_conv":
            return first.ne[1] % 128 == 0
        case "cpy":
            return {first.type, node.type} != {"I32", "F16"}
    return True


class _Packing:
    """One run over a graph: which back end runs what, what is copied, and where everything lies."""

    CARD, HOST = 0, 1

    def __init__(self, graph: Graph, *, card: bool, runs: Callable[[Node], bool] | None) -> None:
        self.graph, self.card, self.runs = graph, card, runs
        self.spaces = (Space(), Space())
        self.children: dict[Node, int] = {}
        self.views: dict[Node, int] = {}
        self.place: dict[Node, tuple[int, int]] = {}  # (place, size) of what owns its place now

    def run(self) -> tuple[int, int]:
        self._assign()
        steps = self._steps()
        self._count(steps)
        for leaf in self.graph.leafs:
            if leaf.kind != WEIGHT:
                self._take(leaf)
        for node, sources, runs in steps:
            if runs and node.root is None:
                self._put(node, sources)
            for source in sources:
                self._release(source)
        return self.spaces[0].high, self.spaces[1].high

    def _assign(self) -> None:
        card, host = self.CARD, self.HOST
        for leaf in self.graph.leafs:
            leaf.backend = host if not self.card or leaf.kind == INPUT else card if leaf.kind == WEIGHT else -1
        for node in self.graph.nodes:
            if node.root is not None and node.kind == VIEW:
                node.backend = node.root.backend
            else:
                node.backend = card if self.card and (self.runs is None or self.runs(node)) else host
            for source in node.sources:
                if source.backend < 0:
                    source.backend = node.backend

    def _steps(self) -> list[tuple[Node, tuple[Node, ...], bool]]:
        """The graph in order, with what is copied to the other back end in front of the part that needs it."""
        parts: list[tuple[list[Node], list[tuple[Node, tuple[Node, ...]]]]] = []
        copies: dict[tuple[Node, int], Node] = {}
        current = -1
        pending: list[tuple[Node, tuple[Node, ...]]] = []
        for node in self.graph.nodes:
            if node.kind == VIEW:
                (parts[-1][1] if parts else pending).append((node, node.sources))
                continue
            if node.backend != current:
                current = node.backend
                parts.append(([], pending))
                pending = []
            sources = []
            for source in node.sources:
                wanted = source
                if source.backend != current:
                    key = (source, current)
                    if key not in copies:
                        copy = Node(COPY, "copy", source.type, source.ne, source.nb)
                        copy.backend = current
                        copies[key] = copy
                        parts[-1][0].append(source)
                    wanted = copies[key]
                sources.append(wanted)
            parts[-1][1].append((node, tuple(sources)))
        steps: list[tuple[Node, tuple[Node, ...], bool]] = []
        for inputs, nodes in parts:
            backend = next((n.backend for n, _ in nodes if n.kind != VIEW), 0)
            for source in inputs:
                steps.append((source, (source,), False))
                steps.append((copies[source, backend], (), True))
            for node, read in nodes:
                steps.append((node, read, True))
                kept = self.graph.holds.get(node) if self.runs is not None else None
                if kept:
                    steps.append((node, tuple(kept), False))
        return steps

    def _count(self, steps: list[tuple[Node, tuple[Node, ...], bool]]) -> None:
        children, views = self.children, self.views
        for node, sources, runs in steps:
            if runs and node.root is not None:
                views[node.root] = views.get(node.root, 0) + 1
            for source in sources:
                children[source] = children.get(source, 0) + 1

    def _bytes(self, node: Node) -> int:
        if node.type in SIZES:
            size = SIZES[node.type] + sum((n - 1) * stride for n, stride in zip(node.ne, node.nb, strict=True))
        else:
            size = node.nb[3] * node.ne[3]
        align = (CARD_ALIGNMENT, HOST_ALIGNMENT)[node.backend]
        return -(-size // align) * align

    def _take(self, node: Node) -> None:
        size = self._bytes(node)
        self.place[node] = (self.spaces[node.backend].take(size) if size else 0, size)

    def _put(self, node: Node, sources: tuple[Node, ...]) -> None:
        place = self.place
        if node.op in TAKES_OVER:
            for source in sources:
                if (
                    source in place and source.type == node.type and source.ne == node.ne and source.nb == node.nb
                    and self.children[source] == 1 and not self.views.get(source)
                ):  # fmt: skip
                    place[node] = place.pop(source)
                    return
        self._take(node)

    def _release(self, source: Node) -> None:
        children, views = self.children, self.views
        children[source] -= 1
        if children[source] or views.get(source):
            return
        root = source
        if source.root is not None:
            root = source.root
            views[root] -= 1
            if views[root] or children.get(root):
                return
        if root in self.place:
            place, size = self.place.pop(root)
            if size:
                self.spaces[root.backend].free(place, size)
