"""A tiny GGUF writer of our own, for tests: any version and byte order, damage on request, data as a hole.

It knows nothing of the package's reader, and its type sizes are given per call or taken from ``SIZES``; so reader and
writer cannot be wrong together unless both were written wrong.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

#: ggml.h: name -> (id, block, bytes). What tests use, not all there is.
SIZES: dict[str, tuple[int, int, int]] = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50), "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82), "IQ4_XS": (23, 256, 136), "I8": (24, 1, 1), "I16": (25, 1, 2), "I32": (26, 1, 4),
    "I64": (27, 1, 8), "F64": (28, 1, 8), "IQ1_M": (29, 256, 56), "BF16": (30, 1, 2), "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66), "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18),
}  # fmt: skip

#: Metadata value types: name -> (id, struct code).
SCALARS: dict[str, tuple[int, str]] = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip

Tensor = tuple[str, str | int, tuple[int, ...] | list[int]] | tuple[str, str | int, tuple[int, ...] | list[int], int]


def text(value: str | bytes, endian: str = "<") -> bytes:
    """Return a length-prefixed text."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack(f"{endian}Q", len(raw)) + raw


def typed(value: Any) -> tuple[str, Any]:
    """Return (type name, value); ``{"u16": 3}`` and ``{"array": "f32", "value": []}`` say it outright."""
    if isinstance(value, dict):
        if "array" in value:
            return f"array {value['array']}", value["value"]
        ((kind, inner),) = value.items()
        return kind, inner
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int):
        return ("u32" if 0 <= value < 1 << 32 else "i32" if -(1 << 31) <= value < 0 else "u64"), value
    if isinstance(value, float):
        return "f32", value
    if isinstance(value, (str, bytes)):
        return "str", value
    inner = typed(value[0])[0] if value else "i32"
    return f"array {inner}", list(value)


def pair(key: str, value: Any, endian: str = "<") -> bytes:
    """Return one key-value pair."""
    kind, value = typed(value)
    head = text(key, endian)
    if kind == "str":
        return head + struct.pack(f"{endian}I", 8) + text(value, endian)
    if kind.startswith("array "):
        inner = kind.removeprefix("array ")
        if inner == "str":
            body = b"".join(text(v, endian) for v in value)
            return head + struct.pack(f"{endian}IIQ", 9, 8, len(value)) + body
        number, code = SCALARS[inner]
        return head + struct.pack(f"{endian}IIQ{len(value)}{code}", 9, number, len(value), *value)
    number, code = SCALARS[kind]
    return head + struct.pack(f"{endian}I{code}", number, value)


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's data."""
    if len(tensor) == 4:
        return tensor[3]
    _, block, nbytes = SIZES[str(tensor[1])]
    count = 1
    for n in tensor[2]:
        count *= n
    return -(-count // block) * nbytes


def build(
    metadata: dict[str, Any] | list[tuple[str, Any]],
    tensors: list[Tensor],
    *,
    version: int = 3,
    endian: str = "<",
    alignment: int = 32,
    offsets: dict[str, int] | None = None,
    tensor_count: int | None = None,
    key_count: int | None = None,
    magic: bytes = b"GGUF",
) -> tuple[bytes, int]:
    """Return the header, padded, and the size of the whole file.

    A tensor is (name, type, shape), or (name, type id, shape, bytes) for a type of one's own. ``offsets`` moves single
    tensors, the two counts lie.
    """
    pairs = list(metadata.items()) if isinstance(metadata, dict) else metadata
    if alignment != 32 and not any(k == "general.alignment" for k, _ in pairs):
        pairs = [*pairs, ("general.alignment", alignment)]
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if key_count is None else key_count,
    )
    parts = [magic, struct.pack(f"{endian}IQQ", version, *counts)]
    parts += [pair(k, v, endian) for k, v in pairs]
    place = 0
    for tensor in tensors:
        name, kind, shape = tensor[:3]
        offset = (offsets or {}).get(name, place)
        number = kind if isinstance(kind, int) else SIZES[kind][0]
        info = struct.pack(f"{endian}I{len(shape)}QIQ", len(shape), *shape, number, offset)
        parts.append(text(name, endian) + info)
        place += -(-size_of(tensor) // alignment) * alignment
    header = b"".join(parts)
    header += b"\0" * (-len(header) % alignment)
    return header, len(header) + place


def write_gguf(
    path: str | Path,
    metadata: dict[str, Any] | list[tuple[str, Any]],
    tensors: list[Tensor],
    *,
    sparse: bool = True,
    **options: Any,
) -> str:
    """Write a GGUF and return its path. The data is zeros, a hole in the file where ``sparse``."""
    header, size = build(metadata, tensors, **options)
    with Path(path).open("wb") as file:
        file.write(header)
        if sparse:
            file.truncate(size)
        else:
            file.write(b"\0" * (size - len(header)))
    return str(path)


def write_split(folder: Path, prefix: str, metadata: dict[str, Any], parts: list[list[Tensor]], **options: Any) -> list[str]:
    """Write a split model as llama-gguf-split does: metadata in the first part only."""
    total = sum(len(tensors) for tensors in parts)
    paths = []
    for number, tensors in enumerate(parts):
        keys = {
            **(metadata if number == 0 else {}),
            "split.no": {"u16": number},
            "split.count": {"u16": len(parts)},
            "split.tensors.count": {"i32": total},
        }
        path = folder / f"{prefix}-{number + 1:05d}-of-{len(parts):05d}.gguf"
        paths.append(write_gguf(path, keys, tensors, **options))
    return paths
