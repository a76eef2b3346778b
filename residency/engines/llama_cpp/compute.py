"""Compute buffers: what a reserved graph needs at its peak, per device.

The engine builds its graph for one full micro-batch over the whole cache and packs the tensors of each device with the
allocator of :mod:`.arena`. Here the same is done with sizes alone, for the blocks of :mod:`.blocks` with the operations of :mod:`.graph`.
Laws restated from llama.cpp 0.5.0 (commit 0c1e570): ``src/llama-context.cpp`` (sched_reserve), ``ggml/src/ggml-backend.cpp``
(splits, copies, weights offered to a device).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from .blocks import Block, blocks_of
from .graph import LATE_ROWS, NORM_WITHOUT_WEIGHT, ROTATION_BYTES, SPARSE, Ahead, Graph, Shape, closing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from residency.checkpoint.model import Checkpoint

    from .hparams import HyperParameters

#: States under the logits where scans of a model without attention run on the host, found in seven launches.
STATES_BELOW = 3
#: Stacks that are walked several times cross between devices in every round: states per block, fitted to four launches.
LOOPED: Mapping[str, int] = {"hrm_text": 10}
#: Unmixed streams cross between devices one by one: states per stream, fitted to six launches.
APART_CROSSINGS = 20
#: The embeddings are normed before the first block.
EMBEDDED_NORM = frozenset({"bloom"})
#: Architectures that load factors of the rotation and do not use them.
NO_FACTORS = frozenset({"pangu-embedded", "llada"})
#: Tensors that scale the rotation.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class Spread(NamedTuple):
    """How far an engine's buffer was found below and above the one computed here, as shares of it."""

    below: float
    above: float


#: By the kind of graph and of placement, from launches of models that no law here was drawn from: all but one in a
#: hundred lie inside. ``whole``: one split; ``copies``: pipeline parallelism; ``mixed``: parts of a block or blocks elsewhere.
SPREADS: Mapping[tuple[str, str], Spread] = {
    ("plain", "whole"): Spread(0.04, 0.06), ("plain", "copies"): Spread(0.1, 0.06), ("plain", "mixed"): Spread(0.15, 0.15),
    ("recurrent", "whole"): Spread(0.2, 0.15), ("recurrent", "copies"): Spread(0.1, 0.3), ("recurrent", "mixed"): Spread(0.4, 0.4),
    ("streams", "whole"): Spread(0.05, 0.05), ("streams", "copies"): Spread(0.2, 0.05), ("streams", "mixed"): Spread(0.3, 0.5),
    ("sparse", "whole"): Spread(0.3, 0.3), ("sparse", "copies"): Spread(0.3, 0.4), ("sparse", "mixed"): Spread(0.4, 0.5),
}  # fmt: skip
#: A graph no table here describes, or a back end whose holds and copies were never measured.
UNMEASURED = Spread(0.4, 0.5)
#: The host's buffer, of which only the inputs are computed when no block runs there.
HOST = Spread(0.4, 1.0)
#: Whatever the graph: rounding and small inputs.
STEADY_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Bytes of one compute buffer: what it is not below, what it most likely is, what it stays under."""

    certain: int
    likely: int
    at_most: int

    @classmethod
    def around(cls, likely: int, spread: Spread) -> Band:
        """Return the band of a computed peak."""
        if likely <= 0:
            return cls(certain=0, likely=0, at_most=0)
        return cls(
            certain=max(int(likely * (1 - spread.below)) - STEADY_BYTES, 0), likely=likely,
            at_most=int(likely * (1 + spread.above)) + STEADY_BYTES,
        )  # fmt: skip


def spread_of(hyper: HyperParameters, placement: Placement) -> Spread:
    """Return how well the graphs of this kind are known."""
    if hyper.memory in SPARSE:
        kind = "sparse"
    elif hyper.hyper_streams > 1 or hyper.architecture in LOOPED:
        kind = "streams"
    else:
        kind = "recurrent" if any(hyper.recurrent) else "plain"
    if placement.pipeline:
        where = "copies"
    elif placement.moved or placement.cache_on_host or any(w < 0 for w in placement.where):
        where = "mixed"
    else:
        where = "whole"
    return SPREADS[kind, where]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the parts of a launch run, as far as compute buffers care."""

    devices: int
    where: tuple[int, ...]  # device of every block and of the output; -1 = CPU
    offered: bool  # weights in host memory are copied to device 0 for large batches
    pipeline: bool
    cache_on_host: bool
    copies: int  # of every input under pipeline parallelism
    mask_on_first: bool  # the first device alone converts the mask to half precision
    experts_on_first: bool  # experts in host memory are computed on the first device
    moved: Mapping[int, Mapping[str, int]]  # block -> weight name -> device (-1 = host) for overridden weights


def _without_cache(hyper: HyperParameters, shape: Shape, placement: Placement) -> tuple[Shape, Placement]:
    """Return both as a model without a cache has them: its keys and values never leave the graph, in half precision."""
    if hyper.memory != "none":
        return shape, placement
    return replace(shape, type_k="f16", type_v="f16", flash_here=True), replace(placement, cache_on_host=False)


def buffers(checkpoint: Checkpoint, hyper: HyperParameters, shape: Shape, placement: Placement) -> list[int]:
    """Return the peak bytes of every device's compute buffer."""
    shape, placement = _without_cache(hyper, shape, placement)
    blocks = blocks_of(checkpoint, hyper)  # built by the caller, with the tensors that are stuck
    layer_norm = _is_layer_norm(checkpoint)
    output = checkpoint.by_name.get("output.weight") or checkpoint.by_name.get("token_embd.weight")
    output_bytes = output.nbytes if output is not None else 0
    found = [checkpoint.by_name[name].nbytes for name in FACTORS if name in checkpoint.by_name]
    factors = found[0] if found and hyper.architecture not in NO_FACTORS else 0
    learned = "position_embd.weight" in checkpoint.by_name
    return [
        _device(hyper, shape, placement, blocks, device, layer_norm, output_bytes, factors=factors, learned=learned, embedded_norm=hyper.architecture in EMBEDDED_NORM)
        for device in range(placement.devices)
    ]


def host_buffer(checkpoint: Checkpoint, hyper: HyperParameters, shape: Shape, placement: Placement) -> int:
    """Return the peak of the host's compute buffer: the graph's inputs, and the blocks that run there."""
    shape, placement = _without_cache(hyper, shape, placement)
    copies = placement.copies if placement.pipeline else 1
    state = hyper.embedding * shape.tokens * 4
    windows = {block.windowed for block in blocks_of(checkpoint, hyper) if block.attends}
    graph = Graph(hyper, shape, layer_norm=False)
    inputs = state * (copies + 1) + copies * sum(graph.mask_input_bytes(w) for w in windows)
    if shape.flash and not shape.flash_here and placement.devices:  # attention goes to the host and back
        inputs += 2 * shape.tokens * 4 * max((h * (hyper.head_k + hyper.head_v) for h in hyper.heads), default=0)
    for block in blocks_of(checkpoint, hyper) if placement.pipeline else ():  # a scan without a kernel runs here
        if "ssm_a" in block.on_host:
            inputs += copies * (block.weights["ssm_out"].shape[0] * graph.t4 + hyper.state_s * shape.sequences * 4)
    if (placement.offered and placement.devices) or all(w >= 0 for w in placement.where):
        return inputs
    output = checkpoint.by_name.get("output.weight") or checkpoint.by_name.get("token_embd.weight")
    alone = replace(placement, pipeline=False, cache_on_host=False, offered=False, moved={})
    peak = _device(hyper, shape, alone, blocks_of(checkpoint, hyper), -1, _is_layer_norm(checkpoint), output.nbytes if output is not None else 0)
    return max(inputs, peak)


def _scans(blocks: Sequence[Block], i: int) -> bool:
    """Whether a block is a state-space scan and nothing else."""
    return 0 <= i < len(blocks) and blocks[i].recurrent and not blocks[i].attends and _scanning(blocks[i])


def _scanning(block: Block) -> bool:
    return "ssm_in" in block.weights and ("attn_qkv" not in block.weights or "ssm_conv1d" not in block.weights)


def _is_layer_norm(checkpoint: Checkpoint) -> bool:
    rms = checkpoint.hparam("attention.layer_norm_rms_epsilon")
    plain = checkpoint.hparam("attention.layer_norm_epsilon")
    return isinstance(plain, float) and plain > 0 and not (isinstance(rms, float) and rms > 0)


def _carried(block: Block, moved: Mapping[str, int] | None) -> tuple[object, ...]:
    """What tells blocks of one outline apart: where overridden weights are, and how large their copies."""
    return tuple(sorted((name, to, block.weights[name].nbytes) for name, to in moved.items() if name in block.weights)) if moved else ()


def _device(hyper: HyperParameters, shape: Shape, placement: Placement, blocks: Sequence[Block], device: int, layer_norm: bool, output_bytes: int, *, factors: int = 0, learned: bool = False, embedded_norm: bool = False) -> int:
    where = placement.where
    own = [i for i in range(len(blocks)) if where[i] == device]
    host = [i for i in range(len(blocks)) if where[i] < 0] if device == 0 and placement.offered else []
    foreign_experts = [
        i for i, m in placement.moved.items()
        if i < len(blocks) and where[i] != device and any(
            d == device or (d < 0 and device == 0 and placement.offered) for n, d in m.items() if "exps" in n)
    ]  # fmt: skip
    has_output = where[-1] == device or (where[-1] < 0 and device == 0 and placement.offered)
    if not own and not host and not has_output and not foreign_experts:
        return 0
    graph = Graph(hyper, shape, layer_norm=layer_norm, factors=factors)
    graph.kept = placement.pipeline
    if hyper.architecture == "gemma4" and blocks and "inp_gate" in blocks[0].weights:
        graph.width_beside = blocks[0].weights["inp_gate"].out
    graph.converts = graph.converts and not (placement.mask_on_first and device)
    tape = graph.tape
    size = hyper.embedding * graph.t4
    first_guests = [] if placement.pipeline or host else [i for i in foreign_experts if not own or i < own[0]]  # guests that run first

    def visit(guests: Sequence[int]) -> None:
        for i in guests[:2]:
            graph.foreign = frozenset(n for n, d in placement.moved[i].items() if d < 0)
            if "ffn_down_exps" in blocks[i].weights:
                tape.hold(graph.visiting(blocks[i], size))

    visit(first_guests)
    if hyper.memory in ("dsa", "dsa-window") or hyper.architecture == "qwen4exp":
        sparse = [i for i in (*host, *own) if blocks[i].attends and not blocks[i].windowed]
        graph.leaves = [tape.op(graph.chosen_cells() * graph.t4) for _ in sparse]
    if hyper.architecture == "deepseek4" and any("indexer.attn_q_b" in blocks[i].weights for i in (*host, *own)):
        tape.hold(tape.op(graph.chosen_cells() * graph.t4 // 2))
    small = shape.tokens * (4 * hyper.positions * any(hyper.rotated) + (16 if hyper.memory != "none" else 0))
    if not shape.flash and hyper.memory not in ("none", "recurrent") and not hyper.mla:
        small += shape.tokens * 8 * (hyper.value_row_max - 1)
    run = [*host, *own]
    windows = list(dict.fromkeys(blocks[i].windowed for i in run if blocks[i].attends))  # by first use
    first = run[0] if run else len(blocks)
    normed = -1
    has_norm = bool(run) and ("attn_norm" in blocks[run[0]].weights or hyper.architecture in NORM_WITHOUT_WEIGHT or graph.wide > 1)
    has_x = bool(run) or has_output
    left: list[int] = []
    if any(graph.rotates(blocks[i]) & 1 for i in run[:1]):
        turned = 64  # the largest power of two that divides a key
        while hyper.head_k and hyper.head_k % (2 * turned) == 0:
            turned *= 2
        small += turned * turned * 4
        graph.place_bytes += turned * turned * 4
    if placement.pipeline:
        small += shape.tokens * 16 * max(len(windows) - 1, 0)
        for _ in range(placement.copies - 1):
            if has_x:
                tape.keep(size * (graph.wide if first else 1))
            tape.keep(small)
            if first and run and has_norm:
                tape.keep(size * graph.wide)
            if run and hyper.memory in ("dsa", "dsa-window"):
                tape.keep(shape.cells * shape.tokens * 2)
            for w in windows if run and (shape.flash_here or not shape.flash) else ():
                tape.keep(graph.mask_input_bytes(w))
        x = tape.keep(size * (graph.wide if first else 1)) if has_x else -1
        tape.keep(small)
        if first and run and has_norm:
            normed = tape.keep(size * graph.wide)
        if run and hyper.memory in ("dsa", "dsa-window"):
            graph.index_mask()
        for w in windows if run else ():
            graph.masks[w] = graph.halved(w, tape.keep(graph.mask_input_bytes(w)))
        if learned and not first:  # added to the embeddings on the first device
            tape.keep(placement.copies * size)
        if has_output:
            graph.chosen = tape.keep(shape.rows * 4)
            tape.keep(shape.rows * 4 * (placement.copies - 1))
    else:
        whole = not host and not placement.moved and not placement.cache_on_host  # one split: every input first
        if host and not has_norm:  # the first operation reads its weight first
            graph.foreign = None
            graph.early = graph.copy(blocks[run[0]], "attn_q") or graph.copy(blocks[run[0]], "attn_qkv")
        after_host = bool(first) and where[first - 1] < 0 and not placement.offered and device >= 0 and graph.wide == 1 and has_x
        handed = bool(first) and bool(run) and not host and has_norm and not after_host  # the device before this one did the norm
        if handed:
            normed = tape.op(size)
        late_x = handed and graph.wide == 1  # the state itself is read behind the first attention
        if graph.width_beside and not first and run:
            graph.beside = tape.op(graph.width_beside * len(blocks) * graph.t4)
        x = tape.op(size) if has_x and not late_x and not after_host else -1
        if after_host:
            graph.t4 = shape.rows * 4 if not run and hyper.architecture not in LATE_ROWS else graph.t4
            left = graph.left(blocks[first - 1])
            graph.t4 = shape.tokens * 4
        graph.small = small
        if whole:
            if attending_all := [blocks[i] for i in run if blocks[i].attends]:
                graph.spin = tape.op(ROTATION_BYTES) if graph.rotates(attending_all[-1]) & 2 else -1
            graph.indices = tape.op(small + shape.tokens * 16 * max(len(windows) - 1, 0))
            graph.covers = {False, True}
        if run and whole and (shape.flash_here or not shape.flash):
            for w in windows:
                graph.mask(w)
                if late_x and x < 0:
                    x = tape.op(size)
            if hyper.memory in ("dsa", "dsa-window"):
                graph.index_mask()
        if learned and not first and run and not host:
            x = tape.same(size, x, tape.op(size))
        if late_x and whole and x < 0:
            x = tape.op(size)
        if has_output and whole and (shape.flash_here or not shape.flash or not windows):
            graph.chosen = tape.op(shape.rows * 4)
    kinds: list[tuple[object, ...]] = [
        (id(blocks[i]), True) if i in host else (blocks[i].outline, *_carried(blocks[i], placement.moved.get(i))) for i in run
    ]  # fmt: skip
    last_reader = {blocks[i].windowed: i for i in run if blocks[i].attends}
    last = len(blocks) - 1
    late = hyper.architecture in LATE_ROWS
    attending = [i for i in run if blocks[i].attends]
    if graph.width_beside and run:
        if not first:
            graph.origin = x
            if placement.pipeline:
                graph.beside = tape.keep(graph.width_beside * len(blocks) * graph.t4 * placement.copies)
        elif placement.pipeline:
            tape.keep(graph.width_beside * len(run) * graph.t4 * placement.copies)
        else:
            graph.beside = tape.op(graph.width_beside * len(run) * graph.t4)
    if embedded_norm and not first and run:
        x = tape.op(size, x) if layer_norm else tape.same(size, x)
    if graph.wide > 1 and run:
        x = tape.op(size * graph.wide, x)
    if placement.pipeline and hyper.architecture == "hy_v4" and first:
        for _ in range(placement.copies):
            tape.keep(size * APART_CROSSINGS)
    if placement.pipeline and hyper.architecture == "deepseek4":
        for i in {blocks[j].outline: j for j in own if "indexer.attn_q_b" in blocks[j].weights}.values():
            groups = -(-shape.cells // max(hyper.compress[i], 1))
            for _ in range(2 * placement.copies):
                tape.keep(groups * shape.tokens * 2)
    if hyper.architecture == "minimax-01" and any(blocks[i].recurrent for i in run):
        decay = tape.keep if placement.pipeline else tape.op
        share = shape.tokens // max(shape.sequences, 1)
        for _ in range(placement.copies if placement.pipeline else 1):
            decay(share * share * blocks[0].heads * 4)
    if placement.pipeline:  # a scan without a kernel crosses to the host and back in every block
        for i in own:
            if "ssm_a" in blocks[i].on_host:
                for _ in range(placement.copies):
                    tape.keep(blocks[i].weights["ssm_out"].shape[0] * graph.t4 + hyper.state_s * shape.sequences * 4)

    def ahead(position: int) -> Ahead | None:
        """What the blocks after this one need, up to the next copy of a weight."""
        if placement.cache_on_host or position + 1 == len(run) or run[position + 1] in host:
            return None
        found: dict[bool, None] = {}
        for i in run[position + 1 :]:
            names = placement.moved.get(i)
            copies = {n for n, d in names.items() if d < 0} if names and (device == 0 or not placement.offered) else ()
            if copies and any("exps" not in n and not n.startswith("ffn") for n in copies):
                return Ahead(tuple(found), False)
            if blocks[i].attends:
                found[blocks[i].windowed] = None
            if copies:
                return Ahead(tuple(found), False)
        return Ahead(tuple(found), has_output)

    if not placement.pipeline and not whole:
        graph.ahead = ahead(-1)
        if late_x:
            if blocks[run[0]].attends and not placement.cache_on_host:
                graph.place_rows(blocks[run[0]].windowed)
                if shape.flash_here or not shape.flash:
                    graph.mask(blocks[run[0]].windowed)
            x = tape.op(size)
        graph.arrive()
    if left:
        graph.t4 = shape.rows * 4 if not run and not late else graph.t4
        x = graph.inherit(blocks[first - 1], left)
        graph.t4 = shape.tokens * 4
    if placement.pipeline and own:
        # A scan's states are read before the block ahead of it is laid out to its end, so the gate of that block's scan
        # strays to the device of the states, and back.
        if _scans(blocks, own[0]) and _scans(blocks, own[0] - 1):
            tape.keep(placement.copies * blocks[own[0] - 1].weights["ssm_in"].out * graph.t4)
        if _scans(blocks, own[-1]) and _scans(blocks, own[-1] + 1):
            tape.keep(placement.copies * blocks[own[-1]].weights["ssm_out"].shape[0] * graph.t4)
    mixed = any(hyper.recurrent)
    turning = {*attending[-1:], *last_reader.values()}  # blocks that end the life of an input
    position = 0
    seen: dict[tuple[object, ...], int] = {}
    while position < len(run):
        i = run[position]
        block = blocks[i]
        moved = placement.moved.get(i)
        graph.final = bool(attending) and i == attending[-1]
        graph.departs = bool(host) and i == host[-1]
        graph.ending = i == last and has_output and not placement.pipeline
        graph.last = graph.ending and not late
        graph.cache_foreign = placement.cache_on_host or i in host
        graph.elsewhere = moved is not None and any(
            "exps" in n and (d != device if d >= 0 else placement.offered and placement.experts_on_first and device) for n, d in moved.items()
        )
        graph.absent = frozenset(n for n, d in moved.items() if d < 0) if moved and not placement.offered else frozenset()
        if i in host:
            graph.foreign = None
        elif moved:
            graph.foreign = frozenset(n for n, d in moved.items() if d < 0) if device == 0 and placement.offered else frozenset()
        else:
            graph.foreign = frozenset()
        graph.closing = closing(block, graph.absent or graph.foreign)
        if mixed:
            nxt = blocks[run[position + 1]] if position + 1 < len(run) else None
            early = nxt is not None and nxt.recurrent and (_scanning(nxt) or "shortconv.conv" in nxt.weights)
            graph.strays = early and (placement.cache_on_host or run[position + 1] in host)
            graph.states_next = hyper.state_r * shape.sequences * 4 if early and run[position + 1] not in host else 0
            graph.rotates_next = nxt is not None and nxt.attends
        graph.copies = bool(graph.closing)
        graph.ahead = ahead(position) if graph.closing else None
        ends = [w for w, j in last_reader.items() if j == i] if i in turning else ()
        x = graph.block(block, x, normed=normed if position == 0 else -1, rows=shape.rows if i == last and hyper.architecture not in LATE_ROWS else -1)
        normed = -1
        if graph.width_beside:
            x = graph.joined(block, x, len(blocks))
        for w in ends:
            graph.masks.pop(w, None)
        position += 1
        if position < len(run) - 1:
            # Blocks repeat: once the packing repeats too, whole rounds of it change nothing and are skipped.
            live = [x, *graph.masks.values(), *graph.leaves]
            live += [h for h in (graph.beside, graph.indices, *graph.places.values(), graph.chosen, graph.spin, graph.ahead_state, graph.factors_here) if h >= 0]
            shares = not any(n.startswith("indexer.") for n in blocks[run[position]].weights)
            if graph.top >= 0 and shares:
                live.append(graph.top)
            tape.advance(*live)
            state = (kinds[position], *tape.state(*live))
            before = seen.get(state)
            if before is None:
                seen[state] = position
            else:
                step = position - before
                end = position
                while end < len(run) - 2 and kinds[end] == kinds[end - step] and run[end] not in turning:
                    end += 1
                if graph.copies:  # the last one's successor differs, and with it the inputs that arrive
                    end = max(end - 1, position)
                position += (end - position) // step * step
                seen.clear()
    if foreign_experts and own and not has_output:  # the state has left for the next device
        tape.hold(tape.op(size, x))
    visit([i for i in foreign_experts if i not in first_guests])
    tape.hold(*(h for h in (graph.beside, graph.indices, *graph.places.values(), *(() if hyper.architecture in LATE_ROWS else (graph.chosen,))) if h >= 0))
    # Behind the last recurrent block the engine's free list holds an empty block, which keeps its neighbours apart: the
    # place of the last copied weight is then not found again by what is kept behind it.
    apart = 0
    if run and has_output and late and hyper.memory == "hybrid" and run[-1] not in host and device == 0 and placement.offered and not placement.pipeline:
        apart = max((blocks[run[-1]].weights[n].nbytes for n, d in placement.moved.get(run[-1], {}).items() if d < 0), default=0)
    floor = 0
    if has_output:
        if not run and x < 0:
            x = tape.op(size)
        if graph.wide > 1 and run:
            x = tape.op(hyper.embedding * shape.rows * 4, x)
        if own and not placement.pipeline and any("ssm_a" in blocks[i].on_host for i in own):
            # As above: behind scans on the host the places of single states are not joined, and large logits go above them.
            logits, top = hyper.vocabulary * shape.rows * 4, tape.high()
            if hyper.memory == "recurrent" and not host:
                floor = STATES_BELOW * size + logits
            elif logits > top:
                floor = top + logits
        graph.logits(x, hyper.vocabulary, shape.rows, output_bytes if where[-1] < 0 else 0)
    elif own and own[-1] != last and not foreign_experts:
        tape.hold(tape.op(size, x))
    peak = max(tape.peak() + apart, floor)
    if hyper.architecture in LOOPED and placement.pipeline:
        peak += LOOPED[hyper.architecture] * hyper.layers * size
    return peak
