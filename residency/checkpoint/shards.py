"""Assemble a checkpoint from one file, or from all files of a split model, whichever of them is named.

Splits (llama.cpp 0.5.0, llama-model-loader.cpp): every part has ``split.no`` (from 0) and ``split.count``; the first one
carries the metadata, ``split.tensors.count`` is the total. Parts are named ``PREFIX-%05d-of-%05d.gguf``, counted from 1,
and an engine finds the others by that name alone.
"""

# Paths stay the strings that the user wrote, and os.path costs no import.
# ruff: noqa: PTH116, PTH118, PTH119, PTH208

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from residency.errors import InputError
from residency.text import clean

from .gguf import Faults, Header, read_header
from .model import Checkpoint, Fault, ModelFile, Tensor
from .roles import first_mtp_block, role_and_layer
from .types import type_name

if TYPE_CHECKING:
    import io

    from .model import MetaValue

#: PREFIX-00002-of-00010.gguf
_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

MAX_SHARDS = 1024

#: Keys that, where a later shard repeats them, must agree with the first.
_IDENTITY = ("general.architecture", "general.name", "general.uuid", "general.basename")


def assemble(path: str, file: io.FileIO | None = None) -> Checkpoint:
    """Read the model that ``path`` is, or is a part of.

    Args:
        path: a GGUF file, any part of a split one.
        file: the same file, already open; it is closed.

    Raises:
        InputError: this very file cannot be read. Whatever is wrong with its siblings is a fault.
    """
    given = read_header(path, file)
    count = _count(given)
    if count <= 1:
        return _single(path, given)
    if count > MAX_SHARDS:
        faults = Faults(path)
        faults.add("shard-count", f"split.count is {count}, at most {MAX_SHARDS} is followed", subject="split.count")
        return _build(path, {0: given}, faults.items)
    if given.joined:
        faults = Faults(path)
        faults.add(
            "joined-shards",
            f"this is part {_number(given) + 1} of {count} with another GGUF behind it: the parts were joined with "
            f"cat, which no engine can read; keep them apart or use llama-gguf-split --merge",
        )
        return _build(path, {_number(given): given}, list(faults.items))
    return _split(path, given, count)


def shard_paths(path: str, count: int) -> list[str] | None:
    """Return the paths of all ``count`` parts, or None when the name does not follow the convention."""
    folder, base = os.path.split(path)
    match = _SHARD_NAME.fullmatch(base)
    if match is None:
        return None
    return [os.path.join(folder, f"{match['prefix']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]


def _count(header: Header) -> int:
    value = header.metadata.get("split.count", 0)
    return value if type(value) is int else 0


def _number(header: Header) -> int:
    value = header.metadata.get("split.no", 0)
    return value if type(value) is int else 0


def _single(path: str, header: Header) -> Checkpoint:
    faults = Faults(path)
    if header.joined:
        faults.add("joined-files", "another GGUF follows the tensor data; engines do not read it", fatal=False)
    match = _SHARD_NAME.fullmatch(os.path.basename(path))
    if match is not None and int(match["count"]) > 1:
        message = f"named as part of {int(match['count'])}, but its header has no split.count"
        faults.add("shard-name", message, fatal=False)
    return _build(path, {0: header}, faults.items)


def _split(path: str, given: Header, count: int) -> Checkpoint:
    faults = Faults(path)
    number = _number(given)
    base = os.path.basename(path)
    match = _SHARD_NAME.fullmatch(base)
    paths = shard_paths(path, count)
    if match is None or paths is None:
        message = f"its header says part {number + 1} of {count}, but a name without -%05d-of-%05d hides the others"
        faults.add("shard-name", message)
        return _build(path, {number: given}, faults.items)
    if int(match["count"]) != count:
        message = f"named as one of {int(match['count'])} parts, its header says {count}"
        faults.add("shard-name", message, subject="split.count")
    named = int(match["number"]) - 1
    if named != number:
        message = f"named as part {named + 1}, its header says part {number + 1}"
        faults.add("swapped-shard", message, subject="split.no")
    elif named != 0:
        message = f"this is part {named + 1} of {count}; an engine must be given part 1, {clean(_base(paths[0]))}"
        faults.add("not-first-shard", message, fatal=False)

    headers: dict[int, Header] = {}
    missing: list[int] = []
    problems: list[Fault] = []
    for index, sibling in enumerate(paths):
        if index == named and int(match["count"]) == count:
            headers[index] = given
            continue
        try:
            os.stat(sibling)
        except OSError:
            missing.append(index)
            continue
        try:
            headers[index] = read_header(sibling)
        except InputError as error:
            message = "; ".join(p.message for p in error.problems)
            problems.append(Fault(code="unreadable-shard", message=f"{clean(_base(sibling))}: {message}", file=sibling))
    if not headers:
        headers[number] = given
    problems += _missing(paths, missing)
    problems += _extra(path, paths)
    first = headers[min(headers)]
    for index, header in headers.items():
        if header is not given:
            problems += _check_place(header, index, count)
        if header is not first:
            problems += _check_identity(header, first)
        if header.joined:
            message = f"{clean(_base(header.path))}: another GGUF follows the tensor data of this part"
            problems.append(Fault(code="joined-shards", message=message, file=header.path))
    return _build(path, headers, [*faults.items, *problems], complete=not missing and len(headers) == count)


def _base(path: str) -> str:
    return os.path.basename(path)


def _missing(paths: list[str], missing: list[int]) -> list[Fault]:
    """Report missing parts, the first few by name and the rest as a number."""
    shown = missing if len(missing) <= 16 else missing[:8]
    faults = [
        Fault(
            code="missing-shard",
            message=f"{clean(_base(paths[i]))}: part {i + 1} of {len(paths)} is missing",
            file=paths[i],
        )
        for i in shown
    ]
    if len(shown) < len(missing):
        message = f"{clean(_base(paths[missing[8]]))} and {len(missing) - 9} more parts are missing"
        faults.append(Fault(code="missing-shard", message=message, file=paths[missing[8]]))
    return faults


def _extra(path: str, paths: list[str]) -> list[Fault]:
    """Report files named like parts of this very set with a number outside it."""
    folder, base = os.path.split(path)
    match = _SHARD_NAME.fullmatch(base)
    assert match is not None
    try:
        names = sorted(os.listdir(folder or "."))
    except OSError:
        return []
    expected = {_base(p) for p in paths}
    faults = []
    for name in names:
        other = _SHARD_NAME.fullmatch(name)
        if other is None or other["prefix"] != match["prefix"] or name in expected:
            continue
        if int(other["count"]) == len(paths):
            message = f"{clean(name)}: part {int(other['number'])} of a model of {len(paths)} parts"
            faults.append(Fault(code="extra-shard", message=message, file=os.path.join(folder, name), fatal=False))
    return faults[:8]


def _check_place(header: Header, index: int, count: int) -> list[Fault]:
    """Check that a part found by its name says the same about itself."""
    faults = Faults(header.path)
    if _count(header) != count:
        message = f"its header says {_count(header)} parts, this model has {count}"
        faults.add("foreign-shard", message, subject="split.count")
    elif _number(header) != index:
        message = f"named as part {index + 1}, its header says part {_number(header) + 1}"
        faults.add("swapped-shard", message, subject="split.no")
    return faults.items


def _check_identity(header: Header, first: Header) -> list[Fault]:
    """Check that a part comes from the same model as the first one, as far as it says so."""
    faults = Faults(header.path)
    if header.big_endian != first.big_endian:
        faults.add("foreign-shard", "has another byte order than the first part")
    for key in (*_IDENTITY, "split.tensors.count"):
        mine, theirs = header.metadata.get(key), first.metadata.get(key)
        if mine is not None and theirs is not None and mine != theirs:
            message = f"{key} is {clean(repr(mine)[:80])}, the first part says {clean(repr(theirs)[:80])}"
            faults.add("foreign-shard", message, subject=key)
    return faults.items


def _build(path: str, headers: dict[int, Header], faults: list[Fault], *, complete: bool = False) -> Checkpoint:
    """Put the headers together: metadata of the first, tensors of all."""
    order = sorted(headers)
    split = len(order) > 1 or _count(headers[order[0]]) > 1
    first = headers[order[0]]
    declared = _declared(first, split=split)
    arch = first.metadata.get("general.architecture", "")
    mtp = first_mtp_block(
        first.metadata.get(f"{arch}.block_count"), first.metadata.get(f"{arch}.nextn_predict_layers")
    )
    tensors: list[Tensor] = []
    owner: dict[str, str] = {}
    for position, index in enumerate(order):
        header = headers[index]
        faults = [*faults, *header.faults]
        repeated = Faults(header.path)
        for raw in header.tensors:
            if raw.name in owner:
                message = f'the tensor "{clean(raw.name)}" is also in {clean(_base(owner[raw.name]))}'
                repeated.add("duplicate-tensor", message, subject=raw.name)
                continue
            owner[raw.name] = header.path
            role, layer = role_and_layer(raw.name, mtp)
            name, type_id, shape, offset, nbytes, sized = raw
            kind = type_name(type_id)
            tensors.append(Tensor(name, type_id, kind, shape, nbytes, offset, position, role, layer, sized))
        faults += repeated.all()
    if split and complete and declared is not None and declared != len(tensors):
        message = f"{clean(_base(first.path))}: split.tensors.count says {declared}, the parts hold {len(tensors)}"
        faults.append(Fault(code="tensor-count", message=message, file=first.path, subject="split.tensors.count"))
    return Checkpoint(
        path=path,
        source="gguf",
        files=tuple(_model_file(headers[i], i if split else None) for i in order),
        metadata=first.metadata,
        array_lengths=first.array_lengths,
        tensors=tuple(tensors),
        faults=tuple(faults),
        declared_tensors=declared,
    )


def _declared(first: Header, *, split: bool) -> int | None:
    if not split:
        return len(first.tensors)
    value: MetaValue | None = first.metadata.get("split.tensors.count")
    return value if type(value) is int else None


def _model_file(header: Header, shard: int | None) -> ModelFile:
    return ModelFile(
        path=header.path,
        size_bytes=header.size_bytes,
        data_offset=header.data_offset,
        version=header.version,
        big_endian=header.big_endian,
        shard=shard,
    )
