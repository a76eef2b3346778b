"""Image and sound encoders: weights and buffers of an ``mmproj`` file, on the one device that carries it.

The engine reserves each encoder's graph for a warm-up image (or 3000 frames of sound) at load and grows the buffers at
run time for a larger one. The graphs are those of :mod:`.encoders`, packed by :mod:`.encoder_graph`. Laws restated from
llama.cpp 0.5.0 (0c1e570), ``tools/mtmd/clip.cpp``: load_hparams (limits of image tokens, warm-up sizes), load_tensors
(which weights an encoder takes), warmup (flash attention on trial) and ``tools/mtmd/mtmd-image.cpp`` (largest images).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Literal, NamedTuple

from .encoder_graph import card_runs, pooled
from .encoders import AUDIO, VISION, Encoder, UnsuitableError
from .hparams import derived

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.checkpoint.model import Checkpoint, Tensor

Flash = Literal["auto", "on", "off"]
#: Where an encoder runs: a card of the CUDA back end, another device, or the processor.
Where = Literal["card", "device", "host"]


class Limits(NamedTuple):
    """What the engine hard-codes for a projector; tokens are image tokens after merging."""

    merge: int = 1  # patches per token and side, where the file does not say
    merge_key: str = "projector.scale_factor"  # where the file says it; "" where nobody asks
    warm_up: int | None = None  # tokens of the warm-up image; None: the file's image size
    most: int | None = None  # tokens of the largest image, which --image-max-tokens changes
    pixels: bool = False  # the file says how many pixels the largest image has
    at_limit: bool = False  # the warm-up image is the largest one
    asked: bool = True  # --image-max-tokens counts


_SPATIAL = "spatial_merge_size"
_FIXED = Limits(merge_key="")
#: By projector. The others take the file's image size, one patch a token.
LIMITS = {
    "minicpmv4_6": Limits(4), "internvl": Limits(), "nemotron_v2_vl": Limits(), "idefics3": Limits(), "gemma3": Limits(4),
    "gemma3nv": Limits(), "llama4": Limits(), "step3vl": Limits(4), "lfm2": Limits(most=256, at_limit=True),
    "phi4": Limits(merge_key="", warm_up=256, pixels=True, asked=False), "pixtral": Limits(1, _SPATIAL, 256, 1024),
    "lightonocr": Limits(1, _SPATIAL, 256), "dots_ocr": Limits(warm_up=2116, pixels=True, asked=False),
    "dots3note_v": Limits(1, _SPATIAL, 2116, pixels=True, asked=False), "kimivl": Limits(1, warm_up=256, most=1024),
    "kimik25": Limits(most=4096, pixels=True, at_limit=True), "deepseek4v": Limits(1, warm_up=256, most=384),
    "gemma4v": Limits(3, warm_up=256, most=1120), "gemma4uv": Limits(3, warm_up=256, most=1120),
    "qwen2vl_merger": Limits(2, _SPATIAL, 2116, 4096), "qwen2.5vl_merger": Limits(2, _SPATIAL, 2116, 4096),
    "qwen3vl_merger": Limits(2, _SPATIAL, 2116, 4096), "ling3vl": Limits(2, _SPATIAL, 2116, 4096),
    "minimax_m3": Limits(2, _SPATIAL, 256, 576), "muse-glimmer": Limits(2, _SPATIAL, 1024, 4096),
    "mimovl": Limits(2, _SPATIAL, 2116, pixels=True, asked=False), "youtuvl": Limits(2, _SPATIAL, 256, 62500),
    "glm4v": Limits(2, _SPATIAL, 2116, 4096), "glm5v": Limits(2, _SPATIAL, 2116, pixels=True),
    "paddleocr": Limits(2, "", 784, pixels=True, asked=False), "hunyuanvl": Limits(2, _SPATIAL, 1024, 16384, pixels=True),
    "exaone4_5": Limits(2, _SPATIAL, 2116, pixels=True, asked=False),
}  # fmt: skip
#: Frames of the sound that is encoded at load.
WARM_UP_FRAMES = 3000
#: Image tokens that are encoded at once where the encoder takes several images (``--mtmd-batch-max-tokens``).
BATCH_TOKENS = 1024
BATCHED = frozenset({"gemma4v", "internvl"})
#: Projectors that end every row of image tokens with a token of its own.
LINE_ENDS = frozenset({"pixtral", "hunyuanvl"})
#: For them a tall image takes most; it is taken to be at most so many times as tall as wide.
TALLEST = 64
#: Sides of tiles, in pixels: LFM2-VL; DeepSeek-OCR and its second version, beside the overview of 1024.
LFM2_TILE, OCR_TILE, OCR2_TILE = 512, 640, 768
#: Sounds that are encoded whole; the largest is taken to last five minutes. The others are cut into pieces of 30 s, dots3.note's of 60 s.
WHOLE_SOUND = frozenset({"qwen3a", "mimo_audio", "lfm2a", "granite_speech", "parakeet", "gemma4ua"})
FIVE_MINUTES, MINUTE = 30_000, 6_000
#: What the sound encoder loads of the image encoder's tensors when both are in one file.
SHARED = ("v.class_embd", "v.patch_embd.bias", "v.patch_embd.weight", "v.patch_embd.weight.1", "v.norm_embd.weight", "v.norm_embd.bias")
#: Numbers the engine reads itself; they take no place on the device.
SCALARS = (".input_max", ".input_min", ".output_max", ".output_min", "a.mel_filters", "a.window")
_BLOCK = re.compile(r"[va]\.(?:blk|deepstack)\.(\d{1,6})\.")


@dataclass(frozen=True, kw_only=True)
class Tower:
    """Bytes of a file's encoders on their device, and of their inputs in host memory."""

    weights_bytes: int
    warm_up_bytes: int  # compute buffers reserved at load
    largest_bytes: int  # compute buffers after the largest image
    input_bytes: int  # host memory beside a device: inputs of the warm-up image, and what the device cannot run
    largest_input_bytes: int  # the same after the largest image
    projector: str
    warm_up_tokens: int
    most_tokens: int
    largest_name: str
    largest_weight_bytes: int
    unknown: tuple[str, ...] = ()  # encoders whose buffers cannot be told
    warm_up_pool_bytes: int = 0  # what the widest product of the warm-up image takes on a card beside the buffers
    largest_pool_bytes: int = 0  # the same of the largest image
    widths: tuple[tuple[str, int], ...] = ()  # "vision" or "audio" and the width of the embeddings its encoder puts out


class _Size(NamedTuple):
    """An image to build a graph for."""

    width: int
    height: int
    batch: int = 1


def projector(model: Checkpoint, side: str) -> str:
    """Return the projector of the file's image or sound encoder, "" where it names none."""
    value = model.metadata.get("clip.projector_type") or model.metadata.get(f"clip.{side}.projector_type", "")
    if value == "qwen2.5o":
        return "qwen2.5vl_merger" if side == "vision" else "qwen2a"
    return value if isinstance(value, str) else ""


def sides(model: Checkpoint) -> tuple[str, ...]:
    """Return which encoders the engine sets up: "vision", "audio" or both."""
    flags = [side for side in ("vision", "audio") if model.metadata.get(f"clip.has_{side}_encoder") is True]
    if projector(model, "vision") == "gemma3nv" and "vision" in flags:
        return ("vision",)
    return tuple(flags)


def measure(
    model: Checkpoint, *, flash: Flash | bool = "auto", where: Where = "card", most_tokens: int | None = None, batch_tokens: int = BATCH_TOKENS
) -> Tower | None:
    """Return the bytes of the encoders of an ``mmproj`` file, or None when it has none.

    Args:
        model: the projector file.
        flash: flash attention in the encoder; "auto" tries it and gives it up where a card has no kernel for it.
        where: what the encoder runs on.
        most_tokens: ``--image-max-tokens``; it changes the largest image, and for a few projectors the warm-up image.
        batch_tokens: image tokens encoded at once where an encoder takes several images (``--mtmd-batch-max-tokens``).
    """
    mode: Flash = ("on" if flash else "off") if isinstance(flash, bool) else flash
    known: dict[object, Tower | None] = derived(model).setdefault("encoders", {})  # every way out that is tried asks again
    asked = (mode, where, most_tokens, batch_tokens)
    if asked not in known:
        known[asked] = _together(model, mode, where, most_tokens, batch_tokens)
    return known[asked]


def _together(model: Checkpoint, mode: Flash, where: Where, most_tokens: int | None, batch_tokens: int) -> Tower | None:
    towers = [_measure(model, side, mode, where, most_tokens, batch_tokens) for side in sides(model)]
    if not towers:
        return None
    biggest = max(towers, key=lambda t: t.largest_weight_bytes)
    first = towers[0]
    return Tower(
        weights_bytes=sum(t.weights_bytes for t in towers),
        warm_up_bytes=sum(t.warm_up_bytes for t in towers),
        largest_bytes=sum(t.largest_bytes for t in towers),
        input_bytes=sum(t.input_bytes for t in towers),
        largest_input_bytes=sum(t.largest_input_bytes for t in towers),
        projector=" and ".join(dict.fromkeys(t.projector for t in towers)),
        warm_up_tokens=first.warm_up_tokens,
        most_tokens=first.most_tokens,
        largest_name=biggest.largest_name,
        largest_weight_bytes=biggest.largest_weight_bytes,
        unknown=tuple(name for t in towers for name in t.unknown),
        warm_up_pool_bytes=sum(t.warm_up_pool_bytes for t in towers),
        largest_pool_bytes=sum(t.largest_pool_bytes for t in towers),
        widths=tuple(row for t in towers for row in t.widths),
    )


#: Keys every encoder needs, and those of one side; "%s" is the side (``clip.cpp``, load_hparams).
REQUIRED = (
    "clip.%s.embedding_length", "clip.%s.attention.head_count", "clip.%s.feed_forward_length", "clip.%s.block_count", "clip.%s.projection_dim",
    "clip.%s.attention.layer_norm_epsilon",
)  # fmt: skip
REQUIRED_OF = {"vision": ("clip.vision.image_size", "clip.vision.patch_size"), "audio": ("clip.audio.num_mel_bins",)}
#: Key -> least and most value the engine takes.
RANGES = {"clip.vision.image_size": (0, 8192), "clip.vision.patch_size": (1, 65535), "clip.vision.embedding_length": (1, 2**31 - 1)}


def beyond_range(model: Checkpoint) -> str | None:
    """Return which number of an encoder the engine does not take, or None."""
    for side in sides(model):
        for key, value in _numbers(model, side):
            low, high = RANGES.get(key, (-(2**31), 2**32))
            if value is not None and not low <= value <= high:
                return f"{key} is {value}, and the engine takes {low} to {high}"
    return None


def lacking(model: Checkpoint) -> str | None:
    """Return what the engine looks for in vain, or None."""
    if not sides(model):
        return "it says of no image or sound encoder that it is there"
    return next((f"it lacks the number {key}" for side in sides(model) for key, value in _numbers(model, side) if value is None), None)


def _numbers(model: Checkpoint, side: str) -> Iterator[tuple[str, int | float | None]]:
    for key in (*(k % side for k in REQUIRED), *REQUIRED_OF.get(side, ())):
        value = model.metadata.get(key)
        yield key, value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def limits_asked(model: Checkpoint) -> bool:
    """Whether the image encoder takes its least and its most tokens from the command line, and refuses less at most than at least."""
    kind = projector(model, "vision")
    limits = LIMITS.get(kind)
    return kind != "deepseek4v" and limits is not None and limits.asked and limits.most is not None


def weights(model: Checkpoint, side: str) -> list[Tensor]:
    """Return the tensors that one encoder of the file loads."""
    both = len([s for s in ("vision", "audio") if model.metadata.get(f"clip.has_{s}_encoder") is True]) > 1

    blocks = model.metadata.get(f"clip.{side}.block_count")
    limit = blocks if isinstance(blocks, int) and projector(model, side) != "gemma3nv" else None

    def loaded(tensor: Tensor) -> bool:
        name = tensor.name
        if name.endswith(SCALARS):
            return False
        block = _BLOCK.match(name) if limit is not None else None
        if block is not None and limit is not None and int(block[1]) >= limit:
            return False
        sound = name.startswith(("a.", "mm.a."))
        return sound or not both or name in SHARED if side == "audio" else not sound

    return [t for t in model.tensors if loaded(t)]


def _measure(model: Checkpoint, side: str, flash: Flash, where: Where, most_tokens: int | None, batch_tokens: int) -> Tower:
    kind = projector(model, side)
    own = weights(model, side)
    biggest = max(own, key=lambda t: t.nbytes, default=None)
    unknown: tuple[str, ...] = ()
    warm_card = warm_host = most_card = most_host = warm_pool = most_pool = width = 0
    tokens = (0, 0)
    try:
        patch, merge, warm, largest, tokens = _sizes(model, side, kind, most_tokens, batch_tokens)
        warm_card, warm_host, warm_pool, width, settled = _buffers(model, side, kind, flash, where, warm, patch, merge)
        most_card, most_host, most_pool = warm_card, warm_host, warm_pool
        for size in largest:
            card, host, pool, _, _ = _buffers(model, side, kind, settled, where, size, patch, merge)
            most_card, most_host, most_pool = max(most_card, card), max(most_host, host), max(most_pool, pool)
    except (UnsuitableError, ArithmeticError, LookupError, TypeError, ValueError):  # damaged files; the engine refuses them, too
        unknown = (kind or side,)
    on_host = where == "host"
    return Tower(
        weights_bytes=sum(t.nbytes for t in own),
        warm_up_bytes=warm_host if on_host else warm_card,
        largest_bytes=most_host if on_host else most_card,
        input_bytes=0 if on_host else warm_host,
        largest_input_bytes=0 if on_host else most_host,
        projector=kind or "unknown",
        warm_up_tokens=tokens[0],
        most_tokens=max(tokens),
        largest_name=biggest.name if biggest else "",
        largest_weight_bytes=biggest.nbytes if biggest else 0,
        unknown=unknown,
        warm_up_pool_bytes=warm_pool,
        largest_pool_bytes=most_pool,
        widths=((side, width),) if width else (),
    )


def _number(model: Checkpoint, key: str) -> int:
    value = model.metadata.get(f"clip.vision.{key}")
    return int(value) if isinstance(value, (int, float)) and 0 < value < 2**31 else 0


def _sizes(model: Checkpoint, side: str, kind: str, asked: int | None, batch_tokens: int = BATCH_TOKENS) -> tuple[int, int, _Size, list[_Size], tuple[int, int]]:
    """Return patch, merge, the warm-up image, larger images, and image tokens of both."""
    if side == "audio":
        bins = model.metadata.get("clip.audio.num_mel_bins")
        bins = 640 if kind == "gemma4ua" else int(bins) if isinstance(bins, (int, float)) and 0 < bins <= 256 else 0
        frames = FIVE_MINUTES if kind in WHOLE_SOUND else MINUTE if kind == "dots3note_a" else 0
        table = model.by_name.get("a.position_embd.weight")
        if kind == "lfm2a" and table is not None:
            frames = min(frames, 2 * table.shape[-1])
        return 1, 1, _Size(WARM_UP_FRAMES, bins), [_Size(frames, bins)] if frames else [], (0, 0)
    limits = LIMITS.get(kind, _FIXED)
    patch, pixels = _number(model, "patch_size"), _number(model, "image_size")
    merge = (_number(model, limits.merge_key) if limits.merge_key else 0) or limits.merge
    if kind in ("deepseekocr", "deepseekocr2"):
        patch, pixels, merge = 16, 1024, 4
    if kind == "gemma4uv":
        patch, merge = patch * merge, 1
    patch = max(1, patch)
    cell = patch * merge
    custom = asked if asked and asked > 0 and limits.asked and (limits.most or limits.pixels) else None
    most = custom or limits.most
    area = most * cell * cell if most else 0
    if limits.pixels and (not custom or kind in ("kimik25", "hunyuanvl")):
        area = _number(model, "image_max_pixels") or area
    if kind == "deepseek4v" and custom:
        area = max(custom, 16) * cell * cell
    if limits.warm_up:
        warm_side = isqrt(min(limits.warm_up, area // (cell * cell)) if kind == "deepseek4v" else limits.warm_up) * cell
    else:
        warm_side = isqrt(area) if limits.at_limit and area else pixels
    warm = _Size(warm_side, warm_side)
    largest = [_box(area // (cell * cell), cell)] if area else []
    if area and kind in LINE_ENDS:
        across = max(1, isqrt(area // (cell * cell) // TALLEST))
        largest.append(_Size(across * cell, area // (cell * cell) // across * cell))
    tokens = max(1, warm_side // cell) ** 2
    if kind == "lightonocr":
        edge = (_number(model, "preproc_image_size") or pixels) // cell
        largest = [_box(min(edge * edge, asked) if asked and asked > 0 else edge * edge, cell)]
    elif kind == "lfm2":
        largest.append(_Size(LFM2_TILE, LFM2_TILE))
    elif kind in ("resampler", "minicpmv4_6"):  # the overview keeps its aspect ratio, rounded to whole cells
        largest = [_Size(pixels + cell, pixels + cell)]
    elif kind == "deepseekocr":
        tiles = _number(model, "preproc_max_tiles") or 9
        largest = [_Size(OCR_TILE, OCR_TILE * tiles), _Size(pixels, pixels, max(1, batch_tokens // 273))]
    elif kind == "deepseekocr2":
        largest = [_Size(OCR2_TILE, OCR2_TILE, max(1, batch_tokens // 144)), _Size(pixels, pixels, max(1, batch_tokens // 257))]
    elif kind == "granite4_vision":
        largest = [_Size(pixels, pixels * (1 + _most_tiles(model, pixels)))]
    if kind in BATCHED and tokens <= batch_tokens // 2:
        largest.append(_Size(warm_side, warm_side, batch_tokens // tokens))
    most_tokens = max([tokens, *((s.width // cell) * (s.height // cell) * s.batch for s in largest)])
    return patch, merge, warm, largest, (tokens, most_tokens)


def _box(tokens: int, cell: int) -> _Size:
    """The squarest image of about so many tokens."""
    side = max(1, isqrt(tokens))
    across = max(range(side, side * 3 // 4, -1), key=lambda n: (tokens // n * n, n))
    return _Size(across * cell, max(1, tokens // across) * cell)


def _most_tiles(model: Checkpoint, pixels: int) -> int:
    points = model.metadata.get("clip.vision.image_grid_pinpoints")
    if not isinstance(points, tuple) or not pixels:
        return 1
    return max((int(a) // pixels * (int(b) // pixels) for a, b in zip(points[::2], points[1::2], strict=False)), default=1)


def _buffers(model: Checkpoint, side: str, kind: str, flash: Flash, where: Where, size: _Size, patch: int, merge: int) -> tuple[int, int, int, int, Flash]:
    """Return the bytes of the buffers on the device and in host memory after a graph was reserved, of a card's pool, the width of the result, and what became of "auto"."""
    build = (VISION if side == "vision" else AUDIO).get(kind)
    if build is None or size.width <= 0 or size.height <= 0:
        raise UnsuitableError(kind)

    def graph(*, flash: bool) -> tuple[Encoder, int]:
        encoder = Encoder(model, kind, side=side, flash=flash, size=(size.width, size.height), patch=patch, merge=merge, batch=size.batch)
        if not encoder.embedding:
            raise UnsuitableError("embedding_length")
        result = build(encoder)
        encoder.expand(result)
        return encoder, result.ne[0]

    runs = card_runs if where == "card" else None
    first, width = graph(flash=flash != "off")
    found = [first.pack(card=where != "host", runs=runs)]
    settled: Flash = "on" if flash == "auto" else flash
    if flash == "auto" and where == "card" and not all(card_runs(n) for n in first.nodes if n.op == "flash"):
        # tried first, and what was reserved for the trial stays
        found.append(graph(flash=False)[0].pack(card=True, runs=runs))
        settled = "off"
    pool = max((pooled(n) for n in first.nodes), default=0) if where == "card" else 0
    return max(card for card, _ in found), max(host for _, host in found), pool, width, settled

