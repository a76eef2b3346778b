"""The ggml tensor types: id, name, block and byte sizes. One table, read by everybody who sizes anything.

Source: ggml 0.25.3 as shipped with llama.cpp 0.5.0 (ggml.h and the type traits of ggml.c), ids 0 to 42. Two figures
differ from the ``gguf`` package 0.19.0: ``Q8_1`` is 36 bytes in C (the package says 40; the type never stands in a
file), and ``Q2_0`` (42) is missing there. Forks use ids of their own (IQ1_XXXS, the KT and TQ3 families): those are
not in this table and have no size that can be known from the id.
"""

from __future__ import annotations

from typing import NamedTuple


class GgmlType(NamedTuple):
    """One ggml type: ``block`` elements take ``nbytes`` bytes."""

    id: int
    name: str
    block: int
    nbytes: int


# fmt: off
TYPES: dict[int, GgmlType] = {row[0]: GgmlType(*row) for row in (
    (0,  "F32",       1,   4), (1,  "F16",       1,   2), (2,  "Q4_0",     32,  18), (3,  "Q4_1",     32,  20),
    (6,  "Q5_0",     32,  22), (7,  "Q5_1",     32,  24), (8,  "Q8_0",     32,  34), (9,  "Q8_1",     32,  36),
    (10, "Q2_K",    256,  84), (11, "Q3_K",    256, 110), (12, "Q4_K",    256, 144), (13, "Q5_K",    256, 176),
    (14, "Q6_K",    256, 210), (15, "Q8_K",    256, 292), (16, "IQ2_XXS", 256,  66), (17, "IQ2_XS",  256,  74),
    (18, "IQ3_XXS", 256,  98), (19, "IQ1_S",   256,  50), (20, "IQ4_NL",   32,  18), (21, "IQ3_S",   256, 110),
    (22, "IQ2_S",   256,  82), (23, "IQ4_XS",  256, 136), (24, "I8",        1,   1), (25, "I16",       1,   2),
    (26, "I32",       1,   4), (27, "I64",       1,   8), (28, "F64",       1,   8), (29, "IQ1_M",   256,  56),
    (30, "BF16",      1,   2), (34, "TQ1_0",   256,  54), (35, "TQ2_0",   256,  66), (39, "MXFP4",    32,  17),
    (40, "NVFP4",    64,  36), (41, "Q1_0",    128,  18), (42, "Q2_0",     64,  18),
)}
# fmt: on

#: What an impossible shape is sized as: sums over a hostile table stay printable.
MOST_BYTES = (1 << 63) - 1

#: Ids ggml once had and took back: no engine of today reads such a tensor.
REMOVED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

#: Every type by its lower-case name, as command lines spell them ("q8_0").
TYPE_BY_NAME: dict[str, GgmlType] = {t.name.lower(): t for t in TYPES.values()}

#: Types an engine of the llama.cpp family takes for the KV cache (llama.cpp 0.5.0, common/arg.cpp).
KV_TYPES: tuple[str, ...] = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def type_name(type_id: int) -> str:
    """Return the type's name; a removed id keeps its old name, an unknown one is "type-N"."""
    known = TYPES.get(type_id)
    if known is not None:
        return known.name
    return REMOVED.get(type_id, f"type-{type_id}")


def row_bytes(type_id: int, elements: int) -> int:
    """Return the bytes of ``elements`` consecutive elements.

    Raises:
        KeyError: the id is removed or unknown.
        ValueError: ``elements`` is no multiple of the type's block.
    """
    kind = TYPES[type_id]
    blocks, rest = divmod(elements, kind.block)
    if rest:
        raise ValueError(f"{elements} elements are no multiple of the {kind.name} block of {kind.block}")
    return blocks * kind.nbytes


def data_bytes(type_id: int, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor's data; a broken row is rounded up to a whole block, and 2^63 - 1 is the most.

    Raises:
        KeyError: the id is removed or unknown.
    """
    kind = TYPES[type_id]
    elements = 1
    for n in shape:
        elements *= n
    return min(-(-elements // kind.block) * kind.nbytes, MOST_BYTES)
