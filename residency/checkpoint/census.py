"""A census: a checkpoint saved as a small JSON file, without weights, accepted wherever a model path is.

The document is meant to be read and compared by people too: one tensor a line, types by name, and totals that the
loader adds up again, so that an edited row cannot pass unnoticed. Roles and layers are not stored; they follow from the
names, as for a GGUF.
"""

# Paths stay the strings that the user wrote, and os.path costs no import.
# ruff: noqa: PTH105, PTH108, PTH112, PTH119, PTH120, PTH123

from __future__ import annotations

import json
import math
import os
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

from residency.errors import InputError, Problem
from residency.exits import Exit
from residency.text import clean, shorten
from residency.where import Where

from .gguf import MAGIC, MAX_DIMENSIONS, MAX_NAME_BYTES, MAX_TENSORS, input_error, open_regular
from .model import Checkpoint, Fault, ModelFile, Role, Tensor
from .roles import first_mtp_block, role_and_layer
from .types import TYPE_BY_NAME, TYPES, data_bytes

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .model import MetaValue

SCHEMA = "residency.census/1"

#: A census of a large model is under 1 MiB. JSON takes up to 20 times its size in memory.
MAX_CENSUS_BYTES = 16 << 20

#: ``type_id`` of a type whose number is not known, only its name.
NO_TYPE_ID = -1

#: GGUF counts, shapes and offsets are unsigned 64-bit, and a damaged file may hold any of them.
_LARGEST_INTEGER = (1 << 64) - 1


# ----- writing


def dumps(checkpoint: Checkpoint) -> str:
    """Return the census of a checkpoint as JSON text. Equal checkpoints give equal text."""
    strangers = {t.type_name: t.type_id for t in checkpoint.tensors if t.type_id not in TYPES}
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "note": checkpoint.note,
        "totals": {"tensors": len(checkpoint.tensors), "bytes": checkpoint.tensor_bytes},
        "declared_tensors": checkpoint.declared_tensors,
        "unknown_types": strangers,
    }
    lines = [f"  {_dump(key)}: {_dump(value)}" for key, value in head.items()]
    lines.append(_block("files", (_dump(_file_row(f)) for f in checkpoint.files)))
    lines.append(_block("faults", (_dump(_fault_row(f)) for f in checkpoint.faults)))
    metadata = (f"{_dump(k)}: {_dump(_encode(v))}" for k, v in checkpoint.metadata.items())
    lines.append(_block("metadata", metadata, "{}"))
    lengths = (f"{_dump(k)}: {v}" for k, v in checkpoint.array_lengths.items())
    lines.append(_block("array_lengths", lengths, "{}"))
    columns = ["name", "type", "shape", "offset", "file", "bytes, where the type does not tell"]
    lines.append(f"  {_dump('tensor_columns')}: {_dump(columns)}")
    lines.append(_block("tensors", (_dump(_tensor_row(t)) for t in checkpoint.tensors)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def save(checkpoint: Checkpoint, output: str) -> None:
    """Write the census to ``output``, whole or not at all. An existing census is replaced, a GGUF never; a link stays one.

    Raises:
        InputError: ``output`` is or is named like a GGUF, is no regular file, or cannot be written.
    """
    if output.lower().endswith(".gguf") or _is_gguf(output):
        raise input_error(output, "is a model file; a census is never written over one")
    if os.path.isdir(output):
        raise input_error(output, "is a directory; name the census file")
    if os.path.exists(output) and not os.path.isfile(output):  # noqa: PTH110, PTH113 - a device would be replaced by a file
        raise input_error(output, "is no regular file; name the census file")
    text = dumps(checkpoint)
    temporary = None
    target = os.path.realpath(output)
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".census-", dir=os.path.dirname(target))
        with open(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # noqa: PTH101 - as above; mkstemp made it private
        os.replace(temporary, target)
    except (OSError, ValueError) as error:
        if temporary is not None and os.path.exists(temporary):  # noqa: PTH110 - as above
            os.unlink(temporary)
        reason = getattr(error, "strerror", None) or str(error)
        raise input_error(output, f"cannot be written: {reason}") from None


def _is_gguf(path: str) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(4) == MAGIC
    except InputError:
        return False


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _block(key: str, rows: Iterable[str], brackets: str = "[]") -> str:
    body = ",\n".join(f"    {row}" for row in rows)
    return f"  {_dump(key)}: {brackets[0]}" + (f"\n{body}\n  " if body else "") + brackets[1]


def _encode(value: MetaValue) -> Any:
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _file_row(file: ModelFile) -> dict[str, Any]:
    return {
        "path": os.path.basename(file.path),
        "size_bytes": file.size_bytes,
        "data_offset": file.data_offset,
        "version": file.version,
        "big_endian": file.big_endian,
        "shard": file.shard,
    }


def _fault_row(fault: Fault) -> dict[str, Any]:
    return {
        "code": fault.code,
        "message": fault.message,
        "file": os.path.basename(fault.file),
        "subject": fault.subject,
        "fatal": fault.fatal,
    }


def _tensor_row(tensor: Tensor) -> list[Any]:
    row: list[Any] = [tensor.name, tensor.type_name, list(tensor.shape), tensor.offset, tensor.file]
    if tensor.type_id not in TYPES or data_bytes(tensor.type_id, tensor.shape) != tensor.nbytes:
        row.append(tensor.nbytes)
    return row


# ----- reading


def load(path: str, file: io.FileIO | None = None) -> Checkpoint:
    """Read a census file.

    Args:
        path: the file's name; ``Checkpoint.path``.
        file: the same file, already open; it is closed.

    Raises:
        InputError: no such file, too large, not JSON, not a census, or a field of a wrong type or out of range; the
            message names the field.
    """
    with file if file is not None else open_regular(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > MAX_CENSUS_BYTES:
            raise input_error(path, f"is {size} bytes of JSON; a census has at most {MAX_CENSUS_BYTES}")
        opened.seek(0)
        raw = opened.read(MAX_CENSUS_BYTES) or b""
    return loads(raw, path)


def loads(raw: bytes, path: str) -> Checkpoint:
    """Return the checkpoint of a census document; ``path`` names it in messages. Raises as :func:`load`."""
    try:
        document = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise input_error(path, "is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        where = Where(source="file", file=path, line=error.lineno, column=error.colno)
        raise InputError([Problem(message=f"is not JSON: {error.msg}", where=where)]) from None
    except RecursionError:
        raise input_error(path, "is JSON nested too deeply for a census") from None
    except ValueError as error:  # our hooks, and integers of thousands of digits
        raise input_error(path, f"is not a census: {clean(str(error)[:200])}") from None
    try:
        return _checkpoint(document, path)
    except _WrongField as error:
        raise input_error(path, f"is not a sound census: {clean(str(error))}") from None


class _WrongField(Exception):  # noqa: N818 - private, becomes an InputError in loads
    """Carries the sentence about one field."""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError("the key " + next(repr(k[:80]) for k in names if names.count(k) > 1) + " stands twice")
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _checkpoint(document: Any, path: str) -> Checkpoint:
    top = _mapping(document, "the document")
    schema = top.get("schema")
    if schema != SCHEMA:
        raise _WrongField(f"schema is {_show(schema)}, not {SCHEMA!r}")
    files = tuple(_read_file(row, f"files[{i}]") for i, row in enumerate(_list(top.get("files"), "files")))
    if not files:
        raise _WrongField("files is empty")
    metadata = {
        key: _decode(value, f"metadata.{shorten(key, 80)}")
        for key, value in _mapping(top.get("metadata"), "metadata").items()
    }
    lengths = {
        key: _integer(value, f"array_lengths.{shorten(key, 80)}")
        for key, value in _mapping(top.get("array_lengths", {}), "array_lengths").items()
    }
    strangers = {
        name: _integer(value, f"unknown_types.{shorten(name, 80)}", least=NO_TYPE_ID)
        for name, value in _mapping(top.get("unknown_types", {}), "unknown_types").items()
    }
    faults = tuple(_read_fault(row, f"faults[{i}]") for i, row in enumerate(_list(top.get("faults", []), "faults")))
    tensors = _read_tensors(_list(top.get("tensors"), "tensors"), len(files), strangers, metadata)
    _check_totals(top.get("totals"), tensors)
    declared = top.get("declared_tensors")
    note = top.get("note")
    return Checkpoint(
        path=path,
        source="census",
        files=files,
        metadata=metadata,
        array_lengths=lengths,
        tensors=tensors,
        faults=faults,
        declared_tensors=None if declared is None else _integer(declared, "declared_tensors"),
        note=None if note is None else _text(note, "note", most=65_536),
    )


def _read_tensors(
    rows: list[Any], files: int, strangers: Mapping[str, int], metadata: Mapping[str, MetaValue]
) -> tuple[Tensor, ...]:
    if len(rows) > MAX_TENSORS:
        raise _WrongField(f"tensors has {len(rows)} rows, more than {MAX_TENSORS}")
    arch = metadata.get("general.architecture", "")
    mtp = first_mtp_block(metadata.get(f"{arch}.block_count"), metadata.get(f"{arch}.nextn_predict_layers"))
    tensors: list[Tensor] = []
    seen: set[str] = set()
    for index, item in enumerate(rows):
        at = f"tensors[{index}]"
        row = _list(item, at)
        if len(row) not in (5, 6):
            raise _WrongField(f"{at} has {len(row)} columns instead of 5 or 6")
        name = _text(row[0], f"{at}.name", most=MAX_NAME_BYTES * 4)
        if name in seen:
            raise _WrongField(f"{at}: the tensor {_show(name)} stands twice")
        seen.add(name)
        kind = _text(row[1], f"{at}.type")
        known = TYPE_BY_NAME.get(kind.lower())
        if known is not None:
            type_id, kind = known.id, known.name
        elif kind in strangers:
            type_id = strangers[kind]
        else:
            raise _WrongField(f"{at}.type is {_show(kind)}, which no table knows and unknown_types does not list")
        sizes = _list(row[2], f"{at}.shape")
        if len(sizes) > MAX_DIMENSIONS:
            raise _WrongField(f"{at}.shape has {len(sizes)} dimensions")
        shape = tuple(_integer(n, f"{at}.shape") for n in sizes)
        offset = _integer(row[3], f"{at}.offset")
        file = _integer(row[4], f"{at}.file")
        if file >= files:
            raise _WrongField(f"{at}.file is {file}, there are {files} files")
        if len(row) == 6:
            nbytes = _integer(row[5], f"{at}.bytes")
        elif known is not None:
            nbytes = data_bytes(known.id, shape)
        else:
            raise _WrongField(f"{at} has no bytes, and the size of {_show(kind)} is not known")
        role, layer = role_and_layer(name, mtp)
        tensors.append(Tensor(name, type_id, kind, shape, nbytes, offset, file, role, layer, known is not None))
    return tuple(tensors)


def _check_totals(value: Any, tensors: tuple[Tensor, ...]) -> None:
    """Compare the totals the census states with its rows."""
    totals = _mapping(value, "totals")
    for key, found in (("tensors", len(tensors)), ("bytes", sum(t.nbytes for t in tensors))):
        # Sums of absurd shapes may pass 2^63: compare, do not range-check.
        if totals.get(key) != found:
            raise _WrongField(f"totals.{key} is {_show(totals.get(key))}, the rows give {found}")


def _read_file(value: Any, at: str) -> ModelFile:
    row = _mapping(value, at)
    size, shard = row.get("size_bytes"), row.get("shard")
    return ModelFile(
        path=_text(row.get("path"), f"{at}.path", most=4096),
        size_bytes=None if size is None else _integer(size, f"{at}.size_bytes"),
        data_offset=_integer(row.get("data_offset"), f"{at}.data_offset"),
        version=_integer(row.get("version"), f"{at}.version"),
        big_endian=_boolean(row.get("big_endian", False), f"{at}.big_endian"),
        shard=None if shard is None else _integer(shard, f"{at}.shard"),
    )


def _read_fault(value: Any, at: str) -> Fault:
    row = _mapping(value, at)
    subject = row.get("subject")
    return Fault(
        code=_text(row.get("code"), f"{at}.code"),
        message=_text(row.get("message"), f"{at}.message", most=8192),
        file=_text(row.get("file"), f"{at}.file", most=4096),
        subject=None if subject is None else _text(subject, f"{at}.subject", most=MAX_NAME_BYTES * 4),
        fatal=_boolean(row.get("fatal"), f"{at}.fatal"),
    )


def _decode(value: Any, at: str, *, nested: bool = False) -> MetaValue:
    if isinstance(value, dict):
        text = value.get("float")
        if len(value) == 1 and text in ("inf", "-inf", "nan"):
            return float(text)
    elif isinstance(value, list) and not nested:
        return tuple(_decode(item, at, nested=True) for item in value)
    elif isinstance(value, (bool, float, str)):
        return value
    elif isinstance(value, int):
        if -(1 << 63) <= value < 1 << 64:
            return value
        raise _WrongField(f"{at} is out of the range of 64 bits")
    raise _WrongField(f"{at} is {_show(value)}, which no metadata value is")


def _show(value: object) -> str:
    return shorten(repr(value)[:200], 60) if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"


def _mapping(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongField(f"{at} is {_show(value)}, not an object")
    return value


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise _WrongField(f"{at} is {_show(value)}, not a list")
    return value


def _text(value: Any, at: str, *, most: int = 256) -> str:
    if not isinstance(value, str):
        raise _WrongField(f"{at} is {_show(value)}, not a text")
    if len(value) > most:
        raise _WrongField(f"{at} is a text of {len(value)} characters, at most {most} are possible")
    return value


def _boolean(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise _WrongField(f"{at} is {_show(value)}, not true or false")
    return value


def _integer(value: Any, at: str, *, least: int = 0) -> int:
    if type(value) is not int:
        raise _WrongField(f"{at} is {_show(value)}, not a whole number")
    if not least <= value <= _LARGEST_INTEGER:
        raise _WrongField(f"{at} is {value if abs(value) < 1 << 200 else 'huge'}, not in {least} .. 2^64 - 1")
    return value


# ----- the table for people


class Share(NamedTuple):
    """Part of a checkpoint: all tensors of one role, type or group of layers."""

    key: str
    tensors: int
    nbytes: int
    sized: bool = True


class LayerGroup(NamedTuple):
    """Layers that hold the same bytes under the same roles and types."""

    layers: tuple[int, ...]
    tensors: int  # per layer
    nbytes: int  # per layer
    experts: int  # bytes of them, per layer


class Tables(NamedTuple):
    """What ``residency census`` prints, before it is text."""

    tensors: int
    nbytes: int
    by_role: tuple[Share, ...]  # largest first
    by_type: tuple[Share, ...]  # largest first
    layers: tuple[LayerGroup, ...]  # by first layer
    largest: tuple[Tensor, ...]


def census_tables(checkpoint: Checkpoint, *, largest: int = 10) -> Tables:
    """Sum a checkpoint by role, by type and by layer."""
    by_layer: dict[int, list[Tensor]] = {}
    for tensor in checkpoint.tensors:
        if tensor.layer is not None:
            by_layer.setdefault(tensor.layer, []).append(tensor)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for layer in sorted(by_layer):
        group = by_layer[layer]
        signature = tuple(sorted((t.role.value, t.type_name, t.nbytes) for t in group))
        groups.setdefault(signature, []).append(layer)
    return Tables(
        tensors=len(checkpoint.tensors),
        nbytes=checkpoint.tensor_bytes,
        by_role=_shares(checkpoint.tensors, lambda t: t.role.value),
        by_type=_shares(checkpoint.tensors, lambda t: t.type_name),
        layers=tuple(
            LayerGroup(
                layers=tuple(layers),
                tensors=len(signature),
                nbytes=sum(nbytes for _, _, nbytes in signature),
                experts=sum(nbytes for role, _, nbytes in signature if role == Role.EXPERT.value),
            )
            for signature, layers in groups.items()
        ),
        largest=tuple(sorted(checkpoint.tensors, key=lambda t: (-t.nbytes, t.name))[:largest]),
    )


def _shares(tensors: Iterable[Tensor], key_of: Callable[[Tensor], str]) -> tuple[Share, ...]:
    counts: dict[str, int] = {}
    sums: dict[str, int] = {}
    unsized: set[str] = set()
    for tensor in tensors:
        key = key_of(tensor)
        counts[key] = counts.get(key, 0) + 1
        sums[key] = sums.get(key, 0) + tensor.nbytes
        if not tensor.sized:
            unsized.add(key)
    rows = (Share(key, counts[key], nbytes, key not in unsized) for key, nbytes in sums.items())
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.key)))


def render_census(checkpoint: Checkpoint) -> str:
    """Return the census as plain lines for a terminal: no colour, no control character, newline at the end."""
    tables = census_tables(checkpoint)
    plural = "" if len(checkpoint.files) == 1 else "s"
    name = clean(shorten(checkpoint.name, 80))
    arch = clean(shorten(checkpoint.architecture, 40)) or "no architecture"
    files = f"{len(checkpoint.files)} file{plural}, {tables.tensors} tensors"
    lines = [f"{name} ({arch}), {files}, {_size(tables.nbytes)} ({tables.nbytes:,} bytes)"]
    if checkpoint.note:
        lines.append(f"note: {clean(checkpoint.note)}")
    lines += ["", *_file_lines(checkpoint)]
    for title, shares in (("role", tables.by_role), ("type", tables.by_type)):
        rows = [(clean(s.key) + ("" if s.sized else " *"), s.tensors, s.nbytes) for s in shares]
        lines += ["", *_table(title, "tensors", rows)]
    if any(not share.sized for share in tables.by_type):
        lines.append("  * no table knows this type; its bytes are the distance to the next tensor")
    if tables.layers:
        layer_rows = [(f"{_ranges(g.layers)} ({len(g.layers)} x)", g.tensors, g.nbytes) for g in tables.layers]
        lines += ["", *_table("layers, each", "tensors", layer_rows[:24])]
        if len(layer_rows) > 24:
            lines.append(f"  and {len(layer_rows) - 24} more kinds of layer")
    largest = [(f"{clean(shorten(t.name, 60))}  {clean(t.type_name)}", "x".join(map(str, t.shape)), t.nbytes)
               for t in tables.largest]  # fmt: skip
    if largest:
        lines += ["", *_table("largest", "shape", largest)]
    if checkpoint.faults:
        lines.append("")
        lines += [f"{'x' if f.fatal else '!'} {clean(f.message)}  [{clean(f.code)}]" for f in checkpoint.faults]
    return "\n".join(lines) + "\n"


def _file_lines(checkpoint: Checkpoint) -> list[str]:
    rows = []
    for file in checkpoint.files:
        size = "size unknown" if file.size_bytes is None else f"{file.size_bytes:,} bytes"
        order = ", big endian" if file.big_endian else ""
        rows.append(f"  {clean(os.path.basename(file.path))}  {size}, GGUF v{file.version}{order}")
    if len(rows) > 16:
        rows = [*rows[:15], f"  and {len(rows) - 15} more"]
    return ["files", *rows]


def _table(title: str, middle: str, rows: Sequence[tuple[str, object, int]]) -> list[str]:
    first = max([len(title), *(len(row[0]) for row in rows)])
    second = max([len(middle), *(len(str(row[1])) for row in rows)])
    third = max([5, *(len(f"{row[2]:,}") for row in rows)])
    head = f"{title:<{first + 2}}  {middle:>{second}}  {'bytes':>{third}}"
    return [head, *(f"  {a:<{first}}  {b!s:>{second}}  {c:>{third},}  {_size(c):>12}" for a, b, c in rows)]


def _size(nbytes: int) -> str:
    """Return GiB with as many digits as tell something; MiB and KiB would hide the scale in a column."""
    gib = nbytes / (1 << 30)
    return f"{gib:.2f} GiB" if gib >= 10 else f"{gib:.4f} GiB"


def _ranges(numbers: Sequence[int]) -> str:
    """Return "0-2, 4-6, 8" for sorted numbers, shortened in the middle when it gets long."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    if len(texts) > 6:
        texts = [*texts[:3], "...", texts[-1]]
    return ", ".join(texts)


# ----- the command


def census_main(paths: Sequence[str], output: str | None = None, *, as_json: bool = False) -> tuple[Exit, str]:
    """Do what ``residency census FILE... [-o OUTPUT]`` does.

    Args:
        paths: model or census files, at least one.
        output: where the census of the one path goes.
        as_json: return the census document (of several paths: a JSON list of them) instead of the table.

    Returns:
        The exit code (1 when a file is damaged so that an engine would refuse it) and the text for stdout.

    Raises:
        InputError: a file cannot be read, or the output cannot be written; all of them in one error.
    """
    from residency.checkpoint import read

    if not paths:
        raise InputError("census: name at least one model file")
    if output is not None and len(paths) > 1:
        raise InputError(f"census: -o writes the census of one model, {len(paths)} files are named")
    checkpoints: list[Checkpoint] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            checkpoints.append(read(path))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    texts = [dumps(c) if as_json else render_census(c) for c in checkpoints]
    if as_json:
        text = texts[0] if len(texts) == 1 else "[\n" + ",\n".join(t.rstrip() for t in texts) + "\n]\n"
    else:
        text = "\n".join(texts)
    if output is not None:
        save(checkpoints[0], output)
        if not as_json:
            text += f"\ncensus written to {clean(output)}\n"
    damaged = any(fault.fatal for c in checkpoints for fault in c.faults)
    return (Exit.VETOED if damaged else Exit.ALLOWED), text
