"""Vision towers: weights and image buffers of an ``mmproj`` file, on the one device that carries it.

The engine reserves the encoder's graph for a square warm-up image at load and grows it at run time
for a larger one. The graph is packed here with sizes alone, as :mod:`.compute` does for the model.
Laws restated from llama.cpp 0.5.0 (0c1e570), ``tools/mtmd/clip.cpp``: graph_reserve, build_vit, the
projectors' token limits and warm-up sizes. Compared with the bytes the engine reports for two towers
(with and without flash attention, card and CPU): within 1.7 % of the total.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from residency.checkpoint.model import Role

from .arena import Tape
from .compute import FLASH_HEADS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residency.checkpoint.model import Checkpoint


class Projector(NamedTuple):
    """What the engine hard-codes for a projector type; tokens are image tokens after merging."""

    warm_up_tokens: int | None = None  # None: the file's image size
    most_tokens: int | None = None  # largest image; None: no image is larger than the warm-up
    warm_up_pixels: int | None = None
    merge: int = 1  # patches per token and side, where the file does not say


#: By ``clip.projector_type``. Types that are not here take the file's image size.
PROJECTORS: Mapping[str, Projector] = {
    "qwen2vl_merger": Projector(46 * 46, 4096, merge=2), "qwen2.5vl_merger": Projector(46 * 46, 4096, merge=2),
    "qwen3vl_merger": Projector(46 * 46, 4096, merge=2), "qwen2.5o": Projector(46 * 46, 4096, merge=2),
    "ling3vl": Projector(46 * 46, 4096, merge=2), "glm4v": Projector(46 * 46, 4096, merge=2),
    "dots_ocr": Projector(46 * 46, 4096, merge=2), "dots3note": Projector(46 * 46, 4096, merge=2),
    "mimovl": Projector(46 * 46, 4096, merge=2), "glm5v": Projector(46 * 46, 4096, merge=2),
    "exaone4.5": Projector(46 * 46, 4096, merge=2), "gemma4v": Projector(256, 1120, merge=3),
    "pixtral": Projector(256, 1024, merge=1), "kimivl": Projector(256, 1024, merge=2),
    "lightonocr": Projector(256, 1024, merge=2), "lfm2": Projector(256, 256, merge=2),
    "kimik25": Projector(4096, 4096, merge=2), "phi4": Projector(16 * 16, 1024), "youtuvl": Projector(16 * 16, 62500, merge=2),
    "minimax-m3": Projector(16 * 16, 576, merge=2), "hunyuanvl": Projector(32 * 32, 16384, merge=2),
    "muse-glimmer": Projector(32 * 32, 4096, merge=2), "paddleocr": Projector(28 * 28, 1024, merge=2),
    "deepseek-ocr": Projector(warm_up_pixels=1024), "deepseek4v": Projector(256, 256),
}  # fmt: skip

#: Images a tower takes when neither the file nor the table says (``clip.cpp``).
DEFAULT_PIXELS, DEFAULT_PATCH = 224, 14


@dataclass(frozen=True, kw_only=True)
class Tower:
    """Bytes of one encoder on its device, and of its inputs in host memory."""

    weights_bytes: int
    warm_up_bytes: int  # compute buffer reserved at load
    largest_bytes: int  # compute buffer after the largest image
    input_bytes: int  # image, positions and masks kept in host memory, warm-up image
    projector: str
    warm_up_tokens: int
    most_tokens: int
    largest_name: str
    largest_weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    """The shape of the vision transformer, from metadata and tensor names."""

    embedding: int
    feed_forward: int
    heads: int
    layers: int
    patch: int
    gated: bool
    norm_bias: bool
    fused_qkv: bool
    rotary: bool
    convolutions: int
    window_every: int  # every n-th layer sees the whole image, the others a window; 0 = no windows
    merges: bool
    projections: tuple[int, ...]  # widths of the projector's layers, one per token


def _number(model: Checkpoint, key: str, default: int) -> int:
    value = model.metadata.get(f"clip.vision.{key}")
    return int(value) if isinstance(value, (int, float)) and 0 < value < 2**20 else default


def _encoder(model: Checkpoint) -> _Encoder | None:
    names = model.by_name
    first = names.get("v.blk.0.ln1.weight")
    patch_weight = names.get("v.patch_embd.weight")
    embedding = _number(model, "embedding_length", first.shape[0] if first else 0)
    layers = sum(1 for i in range(512) if f"v.blk.{i}.ln1.weight" in names or f"v.blk.{i}.attn_out.weight" in names)
    up = names.get("v.blk.0.ffn_up.weight") or names.get("v.blk.0.ffn_down.weight")
    if not embedding or not layers:
        return None
    kind = str(model.metadata.get("clip.projector_type", model.metadata.get("clip.vision.projector_type", "")))
    widths = tuple(t.shape[1] for t in model.tensors if t.name.startswith("mm.") and t.name.endswith(".weight") and len(t.shape) == 2)
    return _Encoder(
        embedding=embedding,
        feed_forward=_number(model, "feed_forward_length", max(up.shape) if up else 4 * embedding),
        heads=_number(model, "attention.head_count", max(1, embedding // 64)),
        layers=layers,
        patch=_number(model, "patch_size", patch_weight.shape[0] if patch_weight else DEFAULT_PATCH),
        gated="v.blk.0.ffn_gate.weight" in names,
        norm_bias="v.blk.0.ln1.bias" in names,
        fused_qkv="v.blk.0.attn_qkv.weight" in names,
        rotary="v.position_embd.weight" not in names,
        convolutions=1 + ("v.patch_embd.weight.1" in names),
        window_every=_number(model, "n_wa_pattern", 0),
        merges=kind.startswith("qwen"),
        projections=widths,
    )


def flash_supported(model: Checkpoint) -> bool:
    """Whether the card has a flash attention kernel for the tower's heads; "auto" turns it off otherwise."""
    shape = _encoder(model)
    return shape is not None and shape.embedding // shape.heads in FLASH_HEADS


def measure(model: Checkpoint, *, flash: bool, most_tokens: int | None = None) -> Tower | None:
    """Return the bytes of the vision tower of an ``mmproj`` file, or None when it has none that is understood.

    Args:
        model: the projector file.
        flash: flash attention in the encoder.
        most_tokens: ``--image-max-tokens``; it changes the largest image, not what is reserved at load.
    """
    shape = _encoder(model)
    if shape is None:
        return None
    kind = str(model.metadata.get("clip.projector_type", model.metadata.get("clip.vision.projector_type", "")))
    known = PROJECTORS.get(kind, Projector())
    merge = _number(model, "spatial_merge_size", _number(model, "projector.scale_factor", known.merge))
    pixels = known.warm_up_pixels or _number(model, "image_size", DEFAULT_PIXELS)
    side = isqrt(known.warm_up_tokens) * merge if known.warm_up_tokens else max(1, pixels // shape.patch)
    warm_up_tokens = (side // merge) ** 2
    most = known.most_tokens or warm_up_tokens
    if most_tokens is not None and known.most_tokens is not None:
        most = most_tokens
    largest_side = max(side, isqrt(max(most - 1, 0)) * merge + merge) if most > warm_up_tokens else side
    vision = [t for t in model.tensors if t.role is not Role.AUDIO]
    biggest = max(vision, key=lambda t: t.nbytes)
    warm_up = _peak(shape, side, flash=flash)
    return Tower(
        weights_bytes=sum(t.nbytes for t in vision),
        warm_up_bytes=warm_up,
        largest_bytes=warm_up if largest_side == side else max(warm_up, _peak(shape, largest_side, flash=flash)),
        input_bytes=_inputs(shape, side),
        projector=kind or "unknown",
        warm_up_tokens=warm_up_tokens,
        most_tokens=max(most, warm_up_tokens),
        largest_name=biggest.name,
        largest_weight_bytes=biggest.nbytes,
    )


def _inputs(shape: _Encoder, side: int) -> int:
    """Bytes of the graph's inputs: three float planes, four position numbers per patch, window order and mask."""
    patches = side * side
    size = (side * shape.patch) ** 2 * 3 * 4
    if shape.rotary:
        size += patches * 4 * 4
    if shape.window_every:
        size += patches * patches * 4 + 2 * (patches // 4) * 4
    return size


def _peak(shape: _Encoder, side: int, *, flash: bool) -> int:
    """Pack the encoder's graph for a square image of ``side`` patches and return the buffer's bytes."""
    tape = Tape()
    patches = side * side
    row = shape.embedding * patches * 4
    raw = tape.op((side * shape.patch) ** 2 * 3 * 4)
    position = tape.op(patches * 16) if shape.rotary else -1

    def convolve() -> int:
        unfolded = tape.op(patches * 3 * shape.patch * shape.patch * 2, raw)  # float16, as the kernel's weights
        return tape.op(row, unfolded)

    x = convolve()
    for _ in range(1, shape.convolutions):
        x = tape.same(row, x, convolve())
    x = tape.op(row, tape.view(x))
    if shape.merges:
        x = tape.op(row, tape.view(x))
    mask = order = -1
    if shape.window_every:
        order = tape.op(patches)
        x = tape.op(row, tape.view(x), order)
        mask = tape.op(patches * patches * 4)
    for layer in range(min(shape.layers, 4)):  # layers repeat: the packing is the same from the second on
        x = _block(tape, shape, x, patches, row, position, mask if layer % 2 == 0 or not shape.window_every else -1, flash=flash)
    if mask >= 0:
        tape.hold(mask, position)
    x = tape.op(row, x)
    for width in shape.projections:
        x = tape.op(width * patches * 4 // (4 if shape.merges else 1), x)
    return tape.peak()


def _block(tape: Tape, shape: _Encoder, x: int, patches: int, row: int, position: int, mask: int, *, flash: bool) -> int:
    """One transformer block: attention, then feed-forward, each with its residual."""

    def norm(source: int) -> int:
        result = tape.same(row, tape.op(row, source))
        return tape.same(row, result) if shape.norm_bias else result

    def product(size: int, source: int) -> int:
        return tape.same(size, tape.op(size, source))

    rest = x
    cur = norm(x)
    if shape.fused_qkv:
        joined = product(3 * row, cur)
        q, k, v = (tape.op(row, tape.view(joined)) for _ in range(3))
    else:
        q, k, v = (product(row, cur) for _ in range(3))
    if shape.rotary and position >= 0:
        q, k = tape.op(row, tape.view(q), position), tape.op(row, tape.view(k), position)
    if flash:
        halves = [tape.op(row // 2, tape.view(k)), tape.op(row // 2, tape.view(v))]
        if mask >= 0:
            halves.append(tape.op(patches * patches * 2, mask))
        out = tape.op(row, tape.view(q), *halves)
    else:
        turned = tape.op(row, tape.view(v))
        scores = patches * patches * shape.heads * 4
        kq = tape.op(scores, tape.view(k), tape.view(q))
        kq = tape.same(scores, kq, *([mask] if mask >= 0 else []))
        tape.hold(v)  # measured: the values stay beside their transposed copy
        out = tape.op(row, turned, kq)
        out = tape.op(row, tape.view(out))
    x = tape.same(row, product(row, out), rest)
    rest = x
    cur = norm(x)
    wide = shape.feed_forward * patches * 4
    up = product(wide, cur)
    up = tape.op(wide, product(wide, cur), up) if shape.gated else tape.same(wide, up)
    return tape.same(row, product(row, up), rest)
