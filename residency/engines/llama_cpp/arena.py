"""Best-fit packing of a compute graph's tensors, as the engine's graph allocator does it.

Law restated from llama.cpp 0.5.0 (commit 0c1e570), ``ggml/src/ggml-alloc.c``: tensors are placed in graph order, freed
after their last use; the smallest free block that fits is taken, the open end last; an element-wise operation takes
over its operand's place when nothing else needs it. The peak of the open end is the buffer's size.
"""

from __future__ import annotations

from bisect import bisect_left

#: Free space behind the last block: no limit.
_OPEN = 1 << 62


class Space:
    """One buffer while it is planned: best fit among the gaps, the open end last. Sizes are bytes, aligned by the caller."""

    __slots__ = ("high", "lengths", "starts")

    def __init__(self) -> None:
        self.high = 0
        self.starts, self.lengths = [0], [_OPEN]

    def take(self, size: int) -> int:
        """Return the place of a new tensor."""
        starts, lengths = self.starts, self.lengths
        best, best_length = -1, _OPEN
        for i, length in enumerate(lengths):  # the open end comes last and is longer than any gap
            if size <= length <= best_length:
                best, best_length = i, length
        place = starts[best]
        if best_length == size:
            del starts[best], lengths[best]
        else:
            starts[best] += size
            lengths[best] -= size
        self.high = max(self.high, place + size)
        return place

    def free(self, place: int, size: int) -> None:
        """Give a tensor's place back."""
        starts, lengths = self.starts, self.lengths
        i = bisect_left(starts, place)  # the open end is the last gap, so there is always one behind
        if i and starts[i - 1] + lengths[i - 1] == place:
            lengths[i - 1] += size
            if starts[i] == place + size:
                lengths[i - 1] += lengths.pop(i)
                del starts[i]
        elif starts[i] == place + size:
            starts[i] = place
            lengths[i] += size
        else:
            starts.insert(i, place)
            lengths.insert(i, size)


class Tape:
    """A compute graph as one device sees it: only sizes, order and uses.

    Sizes are bytes. ``op``, ``same`` and ``view`` return a handle; handles stay valid until :meth:`peak`.
    """

    __slots__ = (
        "_done", "_kinds", "_owner", "_places", "_roots", "_sizes", "_sources", "_space", "_uses", "_views", "align",
    )  # fmt: skip

    def __init__(self, align: int = 128) -> None:
        self.align = align
        self._kinds: list[int] = []  # 0 plain, 1 may take over an operand, 2 view, 3 end of a hold, 4 never freed, 5 = 1 and 4
        self._sizes: list[int] = []
        self._sources: list[tuple[int, ...]] = []
        self._roots: list[int] = []
        self._uses: list[int] = []
        self._views: list[int] = []
        self._places: list[int] = []
        self._owner: list[bool] = []
        self._space = Space()
        self._done = 0

    def _add(self, kind: int, size: int, sources: tuple[int, ...], root: int) -> int:
        handle = len(self._kinds)
        self._kinds.append(kind)
        self._sizes.append(-(-size // self.align) * self.align)
        self._sources.append(sources)
        self._roots.append(root if root >= 0 else handle)
        self._uses.append(0)
        self._views.append(0)
        uses = self._uses
        for s in sources:
            uses[s] += 1
        return handle

    def op(self, size: int, *sources: int) -> int:
        """A tensor of its own."""
        return self._add(0, size, sources, -1)

    def same(self, size: int, *sources: int) -> int:
        """A tensor that takes over the place of an operand of the same size, when it is that operand's only use."""
        return self._add(1, size, sources, -1)

    def view(self, source: int) -> int:
        """Another look at a tensor. Nothing may take over the place of a tensor through a view."""
        roots = self._roots
        root, handle = roots[source], len(roots)
        roots.append(root)
        self._kinds.append(2)
        self._sizes.append(0)
        self._sources.append((source,))
        self._uses.append(0)
        self._views.append(0)
        self._uses[source] += 1
        self._views[root] += 1
        return handle

    def keep(self, size: int, *sources: int) -> int:
        """A tensor that is never freed: the copies of pipeline parallelism."""
        return self._add(4, size, sources, -1)

    def result(self, size: int, *sources: int) -> int:
        """A result: never freed, but it may take over an operand's place as :meth:`same` does."""
        return self._add(5, size, sources, -1)

    def hold(self, *sources: int) -> None:
        """Keep tensors alive until here: operations that the back end runs as one."""
        self._add(3, 0, sources, -1)

    def peak(self) -> int:
        """Pack what is left and return the bytes of the buffer."""
        self.advance()
        return self._space.high

    def high(self) -> int:
        """Pack what is left, all of it still in use, and return the height so far."""
        uses = [h for h, n in enumerate(self._uses) if n == 0 and self._kinds[h] != 3]
        self.advance(*uses[-1:])
        return self._space.high

    def state(self, *live: int) -> tuple[object, ...]:
        """What decides how the graph is packed from here on: free blocks, and the places of what lives."""
        return (tuple(self._space.starts), tuple(self._space.lengths), tuple(self._places[self._roots[h]] for h in live))

    def advance(self, *live: int) -> None:
        """Pack the part of the graph that is not packed yet; ``live`` is used later."""
        sizes, kinds, roots, uses, views = self._sizes, self._kinds, self._roots, self._uses, self._views
        places, owner = self._places, self._owner
        fresh = len(kinds) - len(places)
        places += [-1] * fresh
        owner += [False] * fresh
        for h in live:
            uses[h] += 1
        take, free = self._space.take, self._space.free
        for handle in range(self._done, len(kinds)):
            sources = self._sources[handle]
            kind = kinds[handle]
            if kind != 2 and kind != 3:  # noqa: PLR1714 - the hot loop
                size = sizes[handle]
                taken = -1
                if kind == 1 or kind == 5:  # noqa: PLR1714
                    for s in sources:
                        if owner[s] and uses[s] == 1 and not views[s] and sizes[s] == size and kinds[s] < 4:
                            taken = s
                            break
                if taken >= 0:
                    places[handle] = places[taken]
                    owner[taken] = False
                    owner[handle] = True
                elif size:
                    places[handle] = take(size)
                    owner[handle] = True
            for s in sources:
                uses[s] -= 1
                if uses[s] or views[s]:
                    continue
                if kinds[s] == 2:
                    root = roots[s]
                    views[root] -= 1
                    if not views[root] and not uses[root] and owner[root] and kinds[root] < 4:
                        owner[root] = False
                        free(places[root], sizes[root])
                elif owner[s] and kinds[s] < 4:
                    owner[s] = False
                    free(places[s], sizes[s])
        for h in live:
            uses[h] -= 1
        self._done = len(kinds)
