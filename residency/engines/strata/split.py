"""Which card owns which layers.

``auto`` tries every placement for two and three cards and keeps the one whose caches hold most of the profiled
experts, ties to the one that leaves the fullest card most room; with more cards the layers follow the room. The
engine weighs hot experts higher, which needs the profile; bytes are what can be known without it.
"""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence



def ranges(firsts: Sequence[int], layers: int) -> tuple[tuple[int, int], ...]:
    """Return the layer range of every stage; firsts = (24,) of 48 layers: ((0, 24), (24, 48))."""
    edges = [0, *firsts, layers]
    return tuple((low, high) for low, high in pairwise(edges))


def plan_split(rooms: Sequence[int], expert_bytes: Sequence[int], session: Callable[[int, int], int]) -> tuple[int, ...]:
    """Return the first layer of each later card.

    Args:
        rooms: bytes each card has for its session and its expert cache.
        expert_bytes: routed experts of every layer.
        session: bytes of the session of layers [low, high).
    """
    layers = len(expert_bytes)
    before = [0, *accumulate(expert_bytes)]
    if len(rooms) > 3 or layers < 2 * len(rooms):
        total = sum(max(1, r) for r in rooms)
        edges: list[int] = []
        placed = 0.0
        for room in rooms[:-1]:
            placed += max(1, room) / total
            edges.append(min(layers - 1, max(len(edges) + 2, round(placed * layers))))
        return tuple(edges)
    sessions: dict[tuple[int, int], int] = {}

    def held(low: int, high: int, room: int) -> tuple[int, int]:
        size = sessions.get((low, high))
        if size is None:
            size = sessions[low, high] = session(low, high)
        wanted = before[high] - before[low]
        return min(wanted, max(0, room - size)), room - size - wanted

    best: tuple[tuple[int, int], tuple[int, ...]] | None = None
    for firsts in combinations(range(2, layers), len(rooms) - 1):
        found = [held(low, high, room) for (low, high), room in zip(ranges(firsts, layers), rooms, strict=True)]
        score = (sum(f[0] for f in found), min(f[1] for f in found))
        if best is None or score > best[0]:
            best = (score, firsts)
    assert best is not None
    return best[1]
