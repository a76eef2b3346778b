"""Readers of model files. ``read`` is the one that everybody calls: GGUF or census, cached within the process."""

# Paths stay the strings that the user wrote, and os.path costs no import.
# ruff: noqa: PTH116

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Checkpoint

__all__ = ["read", "read_checkpoint"]

#: What tells one state of a file from another; None for a part that is not there.
_Signature = tuple[int, int, int, int, int] | None

_CACHE_ENTRIES = 128
_cache: dict[str, tuple[tuple[tuple[str, _Signature], ...], Checkpoint]] = {}


def read_checkpoint(path: str) -> Checkpoint:
    """Read the headers of a model: a GGUF file, all parts of a split one, or a census.

    Args:
        path: the file, any part of a split model, or a ``*.census.json``.

    Returns:
        The checkpoint. Damage that leaves it readable, missing parts included, is in ``Checkpoint.faults``.

    Raises:
        InputError: the file cannot be opened, is neither GGUF nor census, or its header cannot be followed; the
            message names the key or tensor where reading stopped.
    """
    from .gguf import MAGIC, describe_stranger, open_regular
    from .shards import assemble

    path = os.fspath(path)
    file = open_regular(path)
    try:
        first = file.read(64) or b""
        if first[:4] == MAGIC:
            return assemble(path, file)
        if first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
            from .census import load

            return load(path, file)
        raise describe_stranger(path, first)
    finally:
        file.close()


def read(path: str) -> Checkpoint:
    """Return :func:`read_checkpoint` of the path, from memory while none of its files has changed.

    A hit costs one ``os.stat`` per file of the model. Raises what :func:`read_checkpoint` raises.
    """
    path = os.fspath(path)
    try:
        key = f"{os.path.realpath(path)}\n{path}"
    except OSError:  # the working directory is gone
        key = path
    held = _cache.get(key)
    if held is not None and all(_signature(name) == signature for name, signature in held[0]):
        return held[1]
    before = _signature(path)
    checkpoint = read_checkpoint(path)
    names = {path, *(f.path for f in checkpoint.files if checkpoint.source == "gguf")}
    names |= {f.file for f in checkpoint.faults}
    signatures = tuple((name, _signature(name)) for name in sorted(names))
    if before is not None and (path, before) in signatures:
        while len(_cache) >= _CACHE_ENTRIES:
            _cache.pop(next(iter(_cache)))
        _cache[key] = (signatures, checkpoint)
    return checkpoint


def _signature(path: str) -> _Signature:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
