"""Byte sizes and percentages: full match, exact units, whole bytes.

``pydantic.ByteSize`` reads "80%" as 80 bytes and "1G" as 10**9; a gate cannot.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema

UNITS = {
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
LARGEST = 2**63 - 1  # what an engine's own counters can hold
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,12})?) ?(KiB|MiB|GiB|TiB|kB|MB|GB|TB)", re.ASCII)
_PLAIN = re.compile(r"[0-9]{1,20}", re.ASCII)
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%", re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes of "22GiB", "1.5 GiB" or "2490368"; raise ValueError saying what is wrong."""
    if _PLAIN.fullmatch(text):
        return int(text)
    match = _SIZE.fullmatch(text)
    if match is None:
        if _PERCENT.fullmatch(text):
            raise ValueError(f'"{text}" is a percentage, not a size in bytes')
        units = ", ".join(UNITS)
        raise ValueError(f'"{text}" is not a size: a number, then one of {units} (exact letters)')
    exact = Decimal(match[1]) * UNITS[match[2]]
    if exact != int(exact):
        raise ValueError(f'"{text}" is not a whole number of bytes')
    return int(exact)


def _size(value: Any) -> Any:
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f'a size is a text like "22GiB" or a whole number of bytes, not {type(value).__name__}')
    return value


class PercentValue(float):
    """A share in percent. A type of its own, so that 80 % can never be taken for 80 bytes."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{float(self):g}%"

    def __repr__(self) -> str:
        return f"PercentValue({float(self):g})"


def _percent(value: Any) -> PercentValue:
    if isinstance(value, PercentValue):
        return value
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) > 100:
        shown = f'"{value}"' if isinstance(value, str) else type(value).__name__
        raise ValueError(f'{shown} is not a percentage from "0%" to "100%"')
    return PercentValue(match[1])


ByteSize = Annotated[
    int,
    BeforeValidator(_size),
    Field(ge=0, le=LARGEST),
    WithJsonSchema({
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": LARGEST},
            {"type": "string", "pattern": r"^[0-9]{1,20}(\.[0-9]{1,12})? ?(KiB|MiB|GiB|TiB|kB|MB|GB|TB)$|^[0-9]{1,20}$"},
        ],
        "format": "byte-size",
    }),
]
Percent = Annotated[
    PercentValue,
    PlainValidator(_percent),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^[0-9]{1,3}(\.[0-9]{1,6})? ?%$", "format": "percent"}),
]
