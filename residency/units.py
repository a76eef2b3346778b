"""Bytes for people: GiB and MiB with the digits that matter."""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30


def size(count: int | None) -> str:
    """Return "119.63 GiB", "523 MiB", "12 KiB" or "unknown"."""
    if count is None:
        return "unknown"
    sign, count = ("-", -count) if count < 0 else ("", count)
    if count >= GIB:
        return f"{sign}{count / GIB:.2f} GiB"
    if count >= 10 * MIB:
        return f"{sign}{count / MIB:.0f} MiB"
    if count >= MIB:
        return f"{sign}{count / MIB:.1f} MiB"
    if count >= KIB:
        return f"{sign}{count / KIB:.0f} KiB"
    return f"{sign}{count} B"


def plural(count: int, noun: str) -> str:
    """Return "1 shard", "10 shards"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
