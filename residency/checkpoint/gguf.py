"""Read the header of one GGUF file: a single pass, a sliding window, no tensor data.

Layout (GGUF specification, versions 2 and 3; the byte order is the one in which the version is a small number):
magic, version u32, tensor count u64, key count u64, the key-value pairs, the tensor table, padding to
``general.alignment``, then the data section from which every tensor offset counts.

Files are hostile. Every length and count is compared with the bytes that are left in the file before it is used, what is
kept in memory is bounded whatever the file says, and nothing here runs longer than the limits below allow.
"""

# Paths stay the strings that the user wrote, and os.path costs no import.
# ruff: noqa: PTH116, PTH119

from __future__ import annotations

import io
import os
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from residency.errors import InputError, Problem
from residency.text import clean
from residency.where import Where

from .model import Fault
from .types import REMOVED, TYPES, data_bytes, type_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .model import MetaValue

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

# Limits of this reader. Each lies far above any published model and keeps a hostile file cheap.
MAX_KEYS = 65_536
MAX_KEY_BYTES = 65_535  # of the specification
MAX_TENSORS = 131_072
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 16
MAX_STRINGS = 1 << 24  # over all string arrays of one file; skipping that many takes about a second
KEEP_ELEMENTS = 65_536
KEEP_STRING_BYTES = 65_536
KEEP_TOKENIZER_STRING_BYTES = 1024  # chat templates tell nothing about memory
KEEP_TOTAL_BYTES = 16 << 20
MAX_FAULTS = 32

# Limits of ggml 0.25.3 (ggml.h): a file beyond them is readable here, and refused there.
GGML_MAX_NAME = 64
GGML_MAX_DIMS = 4

_FIRST_CHUNK = 256 << 10
_LARGEST_CHUNK = 2 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
#: Metadata type id -> struct code.
_SCALARS: dict[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip

#: What people point us at instead of a GGUF: first bytes -> what it is.
_NOT_GGUF: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "this is a Git LFS pointer, the model itself was not downloaded"),
    (b"<!DOCTYPE", "this is an HTML page, probably a failed download"),
    (b"<html", "this is an HTML page, probably a failed download"),
    (b"PK\x03\x04", "this is a zip archive or a PyTorch checkpoint"),
    (b"ggml", "this is a GGML file from before GGUF"),
    (b"lmgg", "this is a GGML file from before GGUF"),
    (b"tjgg", "this is a GGJT file from before GGUF"),
)


class RawTensor(NamedTuple):
    """One entry of a file's tensor table, sized but without a role."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int = 0
    sized: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What one GGUF file says about itself."""

    path: str
    size_bytes: int
    version: int
    big_endian: bool
    data_offset: int
    metadata: Mapping[str, MetaValue]
    array_lengths: Mapping[str, int]
    tensors: tuple[RawTensor, ...]
    faults: tuple[Fault, ...]
    joined: bool = False  # another GGUF starts where this one's data ends


class Faults:
    """Collects the faults of one file and caps their number."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.items: list[Fault] = []
        self.dropped = 0

    def add(self, code: str, message: str, *, subject: str | None = None, fatal: bool = True) -> None:
        """Record one fault; ``message`` is one sentence without the file's name."""
        if len(self.items) >= MAX_FAULTS:
            self.dropped += 1
            return
        text = f"{clean(os.path.basename(self.file))}: {message}"
        self.items.append(Fault(code=code, message=text, file=self.file, subject=subject, fatal=fatal))

    def all(self) -> tuple[Fault, ...]:
        """Return the faults, with a last one that counts what was dropped."""
        if not self.dropped:
            return tuple(self.items)
        message = f"{clean(os.path.basename(self.file))}: {self.dropped} more faults of this file are not listed"
        return (*self.items, Fault(code="more-faults", message=message, file=self.file))


def input_error(path: str, message: str, hint: str | None = None) -> InputError:
    """Return the error for a file that cannot be read at all."""
    return InputError([Problem(message=message, where=Where(source="file", file=path), hint=hint)])


def open_regular(path: str) -> io.FileIO:
    """Open ``path`` for reading if it is a regular, non-empty file; never blocks on a FIFO or device.

    Raises:
        InputError: missing, not permitted, a directory, FIFO, socket or device, or empty.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise input_error(path, f"is {_kind_of(mode)}, not a model file")
        # The file may be swapped for a FIFO after the first look, hence O_NONBLOCK and the second look.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        file = io.FileIO(os.open(path, flags), closefd=True)
    except FileNotFoundError:
        raise input_error(path, "no such file") from None
    except OSError as error:
        raise input_error(path, f"cannot be opened: {error.strerror or error}") from None
    except ValueError:  # an embedded NUL
        raise input_error(path, "is not a possible file name") from None
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise input_error(path, f"is {_kind_of(status.st_mode)}, not a model file")
    if status.st_size == 0:
        file.close()
        raise input_error(path, "is empty")
    return file


def _kind_of(mode: int) -> str:
    for test, kind in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    ):
        if test(mode):
            return kind
    return "no regular file"


class _Window:
    """A part of the file in memory that moves forward; every request is checked against the file's size."""

    def __init__(self, file: io.FileIO, path: str) -> None:
        self.file = file
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.data = b""
        self.base = 0  # file offset of data[0]
        self.at = 0  # index of the next byte, may point past the end of data
        self.chunk = _FIRST_CHUNK
        self.what = "the header"  # being read, for messages
        self.order = "<"
        self.set_order("<")

    def set_order(self, order: str) -> None:
        self.order = order
        self.unpack_u32 = struct.Struct(f"{order}I").unpack_from
        self.unpack_u64 = struct.Struct(f"{order}Q").unpack_from

    @property
    def left(self) -> int:
        """Bytes between here and the end of the file."""
        return self.size - self.base - self.at

    def fail(self, message: str) -> InputError:
        return input_error(self.path, f"{self.what}: {message}")

    def need(self, count: int) -> None:
        """Have ``count`` bytes in memory. Callers bound ``count``; the file's end is checked here."""
        if self.at + count <= len(self.data):
            return
        if count > self.left:
            left = max(0, self.left)
            raise self.fail(f"the file ends here: {count} bytes needed, {left} left")
        self.base += self.at
        self.at = 0
        try:
            self.file.seek(self.base)
            self.data = self.file.read(max(count, self.chunk)) or b""
        except OSError as error:
            raise self.fail(f"cannot be read: {error.strerror or error}") from None
        self.chunk = min(self.chunk * 2, _LARGEST_CHUNK)
        if len(self.data) < count:
            raise self.fail("the file became shorter while it was read")

    def skip(self, count: int) -> None:
        if count > self.left:
            raise self.fail(f"{count} bytes claimed, {max(0, self.left)} are left in the file")
        self.at += count

    def u32(self) -> int:
        self.need(4)
        (value,) = self.unpack_u32(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self) -> int:
        self.need(8)
        (value,) = self.unpack_u64(self.data, self.at)
        self.at += 8
        return int(value)

    def take(self, count: int) -> bytes:
        self.need(count)
        start = self.at
        self.at = start + count
        return self.data[start : self.at]

    def text_length(self, limit: int | None = None) -> int:
        length = self.u64()
        if length > self.left:
            raise self.fail(f"a text of {length} bytes is claimed, {self.left} are left in the file")
        if limit is not None and length > limit:
            raise self.fail(f"a name of {length} bytes, the longest allowed is {limit}")
        return length

    def skip_texts(self, count: int) -> None:
        """Step over ``count`` length-prefixed texts: the one hot loop of this module."""
        what = self.what
        todo = count
        unpack = self.unpack_u64
        while todo:
            self.what = f"{what}, element {count - todo} of {count}"
            if self.left < 0:
                raise self.fail("the element before it reaches past the end of the file")
            self.need(8)
            data, at = self.data, self.at
            done = 0
            try:
                for done in range(todo):  # noqa: B007 - read after the loop was left
                    (length,) = unpack(data, at)
                    at += length + 8
                done = todo
            except (struct.error, OverflowError, IndexError):
                # The next length is not in the window, or the last one was absurd.
                pass
            self.at = at
            todo -= done
        if self.left < 0:
            self.what = f"{what}, element {count - 1} of {count}"
            raise self.fail("reaches past the end of the file")
        self.what = what


def read_header(path: str, file: io.FileIO | None = None) -> Header:
    """Read the header of one GGUF file.

    Raises:
        InputError: the file cannot be opened, is no GGUF, or its header cannot be followed to the end; the message
            names the key or tensor where it stopped. Damage that leaves the header readable is in ``Header.faults``.
    """
    with file if file is not None else open_regular(path) as opened:
        opened.seek(0)
        return _Reader(opened, path).read()


def describe_stranger(path: str, first: bytes) -> InputError:
    """Return the error for a file that starts with ``first`` instead of the magic."""
    for start, what in _NOT_GGUF:
        if first.startswith(start):
            return input_error(path, "is not a GGUF file", what)
    return input_error(path, f"is not a GGUF file: it starts with {first[:4]!r} instead of {MAGIC!r}")


class _Reader:
    """The pass over one file."""

    def __init__(self, file: io.FileIO, path: str) -> None:
        self.window = _Window(file, path)
        self.path = path
        self.faults = Faults(path)
        self.metadata: dict[str, MetaValue] = {}
        self.array_lengths: dict[str, int] = {}
        self.seen: set[str] = set()
        self.strings_left = MAX_STRINGS
        self.kept = 0

    def read(self) -> Header:
        window = self.window
        magic = window.take(min(24, window.size))[:24]
        if magic[:4] != MAGIC:
            raise describe_stranger(self.path, magic)
        window.at = 4
        version = self._version()
        tensor_count = self._count("the tensor count", least_bytes=24, limit=MAX_TENSORS)
        key_count = self._count("the key count", least_bytes=13, limit=MAX_KEYS)
        for index in range(key_count):
            self._pair(index, key_count)
        alignment = self._alignment()
        table = self._tensor_table(tensor_count)
        end = window.base + window.at
        data_offset = -(-end // alignment) * alignment
        tensors, data_end = _lay_out(table, window.size - data_offset, alignment, self.faults)
        joined = self._after(data_offset + data_end, alignment)
        return Header(
            path=self.path,
            size_bytes=window.size,
            version=version,
            big_endian=window.order == ">",
            data_offset=data_offset,
            metadata=self.metadata,
            array_lengths=self.array_lengths,
            tensors=tensors,
            faults=self.faults.all(),
            joined=joined,
        )

    def _version(self) -> int:
        window = self.window
        window.what = "the version"
        version = window.u32()
        if version & 0xFFFF == 0:
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
            window.set_order(">")
        if version == 1:
            raise input_error(self.path, "is GGUF version 1, which no engine reads any more", "convert it again")
        if version not in (2, 3):
            raise input_error(self.path, f"is GGUF version {version}; versions 2 and 3 are known")
        return version

    def _count(self, what: str, *, least_bytes: int, limit: int) -> int:
        window = self.window
        window.what = what
        count = window.u64()
        if count * least_bytes > window.left:
            raise window.fail(f"{count} claimed, but {window.left} bytes are left in the file")
        if count > limit:
            raise window.fail(f"{count} claimed, more than the {limit} this reader follows")
        return count

    def _name(self, limit: int) -> str:
        length = self.window.text_length(limit)
        self.kept += length
        if self.kept > KEEP_TOTAL_BYTES:
            raise self.window.fail(f"the header holds more than {KEEP_TOTAL_BYTES} bytes of names")
        # Two different names must stay different, and printable, whatever bytes they hold.
        return self.window.take(length).decode("utf-8", "backslashreplace")

    def _pair(self, index: int, count: int) -> None:
        window = self.window
        window.what = f"key {index} of {count}"
        key = self._name(MAX_KEY_BYTES)
        shown = clean(key[:128])
        window.what = f'key "{shown}"'
        repeated = key in self.seen
        if repeated:
            self.faults.add("duplicate-key", f'the key "{shown}" stands twice', subject=key)
        self.seen.add(key)
        kind = window.u32()
        value: MetaValue | None
        if kind == _STRING:
            value = self._string(key)
        elif kind == _ARRAY:
            value = self._array(key, repeated=repeated)
        elif kind in _SCALARS:
            value = self._scalars(kind, 1)[0]
        else:
            raise window.fail(f"has value type {kind}, which does not exist")
        if value is not None and not repeated:
            self.metadata[key] = value

    def _string(self, key: str) -> str | None:
        length = self.window.text_length()
        limit = KEEP_TOKENIZER_STRING_BYTES if key.startswith("tokenizer.") else KEEP_STRING_BYTES
        if length > limit or self.kept + length > KEEP_TOTAL_BYTES:
            self.window.skip(length)
            return None
        self.kept += length
        return self.window.take(length).decode("utf-8", "backslashreplace")

    def _scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        code = _SCALARS[kind]
        raw = self.window.take(count * struct.calcsize(f"={code}"))
        values = struct.unpack(f"{self.window.order}{count}{code}", raw)
        return tuple(map(bool, values)) if kind == _BOOL else values

    def _array(self, key: str, *, repeated: bool) -> tuple[Any, ...] | None:
        window = self.window
        kind = window.u32()
        count = window.u64()
        if kind == _ARRAY:
            raise window.fail("is an array of arrays, which engines refuse and no model needs")
        if kind != _STRING and kind not in _SCALARS:
            raise window.fail(f"is an array of value type {kind}, which does not exist")
        size = 8 if kind == _STRING else struct.calcsize(f"={_SCALARS[kind]}")
        if count * size > window.left:
            raise window.fail(f"an array of {count} elements is claimed, {window.left} bytes are left in the file")
        if not repeated:
            self.array_lengths[key] = count
        wanted = not key.startswith("tokenizer.") and count <= KEEP_ELEMENTS
        if kind == _STRING:
            return self._texts(count, wanted=wanted)
        if not wanted or self.kept + count * size > KEEP_TOTAL_BYTES:
            window.skip(count * size)
            return None
        self.kept += count * size
        return self._scalars(kind, count)

    def _texts(self, count: int, *, wanted: bool) -> tuple[str, ...] | None:
        window = self.window
        self.strings_left -= count
        if self.strings_left < 0:
            raise window.fail(f"the header's arrays hold more than the {MAX_STRINGS} texts this reader follows")
        if not wanted:
            window.skip_texts(count)
            return None
        texts: list[str] = []
        for done in range(count):
            length = window.text_length()
            if length > KEEP_STRING_BYTES or self.kept + length + 8 > KEEP_TOTAL_BYTES:
                window.skip(length)
                window.skip_texts(count - done - 1)
                return None
            self.kept += length + 8
            texts.append(window.take(length).decode("utf-8", "backslashreplace"))
        return tuple(texts)

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is int and value > 0 and value & (value - 1) == 0:
            return value
        self.faults.add(
            "bad-alignment",
            f"general.alignment is {clean(str(value)[:64])}, not a power of two; read with {DEFAULT_ALIGNMENT}",
            subject="general.alignment",
        )
        return DEFAULT_ALIGNMENT

    def _tensor_table(self, count: int) -> list[RawTensor]:
        window = self.window
        table: list[RawTensor] = []
        names: set[str] = set()
        for index in range(count):
            window.what = f"tensor {index} of {count}"
            name = self._name(MAX_NAME_BYTES)
            shown = clean(name)
            window.what = f'tensor {index} of {count}, "{shown}"'
            dimensions = window.u32()
            if dimensions > MAX_DIMENSIONS:
                raise window.fail(f"has {dimensions} dimensions")
            shape = struct.unpack(f"{window.order}{dimensions}Q", window.take(8 * dimensions))
            type_id = window.u32()
            offset = window.u64()
            if name in names:
                self.faults.add("duplicate-tensor", f'the tensor "{shown}" stands twice', subject=name)
                continue
            names.add(name)
            if dimensions > GGML_MAX_DIMS:
                message = f'tensor "{shown}" has {dimensions} dimensions, ggml takes {GGML_MAX_DIMS}'
                self.faults.add("too-many-dimensions", message, subject=name)
            if len(name.encode()) >= GGML_MAX_NAME:
                message = f'the tensor name "{shown}" is longer than the {GGML_MAX_NAME - 1} bytes of ggml'
                self.faults.add("long-tensor-name", message, subject=name)
            table.append(RawTensor(name, type_id, shape, offset))
        return table

    def _after(self, data_end: int, alignment: int) -> bool:
        """Look at what follows the tensor data: nothing, stray bytes, or another GGUF."""
        window = self.window
        extra = window.size - data_end
        if extra <= 0:
            return False
        padding = -data_end % alignment
        window.what = "the bytes after the tensor data"
        for start in (data_end, data_end + padding):
            if start + 4 <= window.size:
                window.base, window.at, window.data, window.chunk = start, 0, b"", 4
                if window.take(4) == MAGIC:
                    return True
        if extra > padding:
            self.faults.add("trailing-bytes", f"{extra} bytes follow the last tensor", fatal=False)
        return False


def _lay_out(
    table: list[RawTensor], available: int, alignment: int, faults: Faults
) -> tuple[tuple[RawTensor, ...], int]:
    """Size every tensor and check the places of all of them.

    Args:
        table: the tensor table, sizes not known yet.
        available: bytes of the data section that are in the file (negative when the file ends before it).
        alignment: of the tensor offsets.
        faults: receives what is wrong.

    Returns:
        The table with sizes, in the file's order, and the end of the last tensor, counted from the data section.
    """
    available = max(0, available)
    offsets = sorted({t.offset for t in table})
    following = dict(zip(offsets, [*offsets[1:], max(available, offsets[-1])], strict=True)) if offsets else {}
    sized = [_size(t, following[t.offset], faults) for t in table]
    _report_unsized(sized, faults)

    end = 0  # of the tensors so far, in the order of their offsets
    before: RawTensor | None = None
    cut: list[RawTensor] = []
    for tensor in sorted(sized, key=lambda t: (t.offset, t.nbytes)):
        shown = clean(tensor.name)
        if tensor.offset % alignment:
            message = f'tensor "{shown}" starts at {tensor.offset}, no multiple of {alignment}'
            faults.add("tensor-misaligned", message, subject=tensor.name)
        expected = -(-end // alignment) * alignment
        if before is not None and tensor.offset < end:
            message = f'tensor "{shown}" at {tensor.offset} overlaps "{clean(before.name)}", which ends at {end}'
            faults.add("tensor-overlap", message, subject=tensor.name)
        outside = tensor.offset + max(tensor.nbytes, 1 if _elements(tensor) else 0) > available
        if outside and tensor.offset > expected:
            message = f'tensor "{shown}" at {tensor.offset} + {tensor.nbytes} lies outside the {available} bytes of data'
            faults.add("tensor-outside-file", message, subject=tensor.name)
            continue
        if outside:
            cut.append(tensor)
        elif tensor.offset > expected:
            message = f'{tensor.offset - expected} unused bytes lie before tensor "{shown}"'
            faults.add("tensor-gap", message, subject=tensor.name, fatal=False)
        if tensor.offset + tensor.nbytes >= end:
            end, before = tensor.offset + tensor.nbytes, tensor
    if cut:
        faults.add(
            "truncated",
            f"the file is cut: {end - available} bytes are missing at its end, the first incomplete tensor is "
            f'"{clean(cut[0].name)}" ({len(cut)} of {len(table)} tensors)',
            subject=cut[0].name,
        )
    return tuple(sized), end


def _elements(tensor: RawTensor) -> int:
    count = 1
    for n in tensor.shape:
        count *= n
    return count


def _size(tensor: RawTensor, next_offset: int, faults: Faults) -> RawTensor:
    """Return the tensor with its size: from its type, or from the gap to the next tensor."""
    known = TYPES.get(tensor.type_id)
    if known is None:
        return tensor._replace(nbytes=next_offset - tensor.offset, sized=False)
    elements = _elements(tensor)
    row = tensor.shape[0] if tensor.shape else 1
    if row % known.block:
        faults.add(
            "row-not-multiple",
            f'tensor "{clean(tensor.name)}": rows of {row} elements are no multiple of the {known.name} block '
            f"of {known.block}",
            subject=tensor.name,
        )
    if elements >= 1 << 63:
        message = f'tensor "{clean(tensor.name)}" has more than 2^63 elements'
        faults.add("shape-overflow", message, subject=tensor.name)
    return tensor._replace(nbytes=data_bytes(tensor.type_id, tensor.shape))


def _report_unsized(tensors: list[RawTensor], faults: Faults) -> None:
    """Report every type without a size once, with the first tensor that has it."""
    by_type: dict[int, list[RawTensor]] = {}
    for tensor in tensors:
        if not tensor.sized:
            by_type.setdefault(tensor.type_id, []).append(tensor)
    for type_id, group in by_type.items():
        first = clean(group[0].name)
        if type_id in REMOVED:
            message = f'tensor "{first}" has type {type_id} ({type_name(type_id)}), which ggml removed'
            faults.add("removed-type", message, subject=group[0].name)
        else:
            message = (
                f'tensor "{first}" has type {type_id}, which no table here knows; {len(group)} such tensors are sized '
                f"by the distance to the next one"
            )
            faults.add("unknown-type", message, subject=group[0].name, fatal=False)
