"""TOML files of people: read with care, parsed once, pointed into.

A file is refused before it can hurt: a pipe that never ends, a device, a gigabyte, another encoding.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from residency.errors import InputError, Problem
from residency.where import Where

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST_FILE = 2**20  # bytes; launch files and policies have a few KiB


def load_toml(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Callable[[tuple[str | int, ...]], Problem]]:
    """Read a TOML file.

    Returns the document, and a function from a path of keys and indexes to a Problem without message
    that stands at that key, or at the nearest table around it.

    Raises:
        InputError: the file cannot be read or is not valid TOML.
    """
    from .layers import FileLayer

    name = os.fspath(path)
    text = read_text(name)
    layer = FileLayer(values=parse(text, name), name=name, text=text)
    return layer.values, lambda at: layer.problem(at, "", at="key")


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_REASONS = {
    errno.ENOENT: "no such file",
    errno.EACCES: "may not be read (permission denied)",
    errno.ENOTDIR: "no such file: a part of the path is not a folder",
    errno.ELOOP: "symbolic links lead in a circle",
    errno.ENAMETOOLONG: "the name is too long",
}


def read_text(name: str) -> str:
    """Return the text of a regular file of UTF-8, without its byte order mark."""
    where = Where(source="file", file=name)
    try:
        # Not waiting for a writer: a pipe is refused, not read.
        handle = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        try:
            kind = stat.S_IFMT(os.fstat(handle).st_mode)
            if kind != stat.S_IFREG:
                message = f"is {_KINDS.get(kind, 'not a file')}, not a text file"
                raise InputError([Problem(message=message, where=where)])
            with os.fdopen(handle, "rb", closefd=False) as file:
                data = file.read(LARGEST_FILE + 1)
        finally:
            os.close(handle)
    except OSError as error:
        # A socket cannot be opened, a folder cannot on some systems: say what it is.
        message = f"is {_kind_of(name)}, not a text file" if _kind_of(name) else _REASONS.get(error.errno or 0, str(error.strerror))
        raise InputError([Problem(message=message, where=where)]) from None
    except ValueError:  # a NUL, or a character the file system's encoding lacks
        raise InputError([Problem(message="no file can have this name", where=where)]) from None
    if data[:4] == b"GGUF":
        hint = f"a model is judged as part of a launch: residency validate -- llama-server -m {name}"
        raise InputError([Problem(message="is a model file, not a text file", where=where, hint=hint)])
    if len(data) > LARGEST_FILE:
        raise InputError([Problem(message=f"is larger than {LARGEST_FILE // 2**20} MiB, more than a file written by people", where=where)])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError([_not_utf8(data, error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0), name)]) from None


def _kind_of(name: str) -> str | None:
    try:
        return _KINDS.get(stat.S_IFMT(Path(name).stat().st_mode))
    except (OSError, ValueError):
        return None


def _not_utf8(data: bytes, offset: int, name: str) -> Problem:
    line = data.count(b"\n", 0, offset) + 1
    before = data[data.rfind(b"\n", 0, offset) + 1 : offset].decode("utf-8-sig", errors="replace")
    where = Where(source="file", file=name, line=line, column=len(before) + 1)
    hint = "this looks like UTF-16; save it as UTF-8" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "save the file as UTF-8"
    return Problem(message=f"byte {offset} (0x{data[offset]:02x}) is not UTF-8", where=where, hint=hint)


_PLAINER = {
    "Cannot overwrite a value": "this key has a value already",
    "Cannot declare": "this table is declared twice",
}
_DIGITS = re.compile(r"[0-9_]{4000,}")


def parse(text: str, name: str) -> dict[str, Any]:
    """Return the document of a text. Raises InputError at the line and column of a syntax error."""

    def problem(message: str, line: int | None = None, column: int | None = None) -> InputError:
        where = Where(source="file", file=name, line=line, column=column)
        shown = None
        if line is not None:
            lines = text.split("\n")
            shown = lines[line - 1].removesuffix("\r") if line <= len(lines) else ""
        return InputError([Problem(message=message, where=where, line_text=shown)])

    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        known = next((plain for start, plain in _PLAINER.items() if error.msg.startswith(start)), None)
        reason = known or error.msg[:1].lower() + error.msg[1:]
        raise problem(f"not valid TOML: {reason}", error.lineno, error.colno) from None
    except RecursionError:
        raise problem("nested too deeply for a launch file") from None
    except ValueError:  # the interpreter's limit on the digits of a number
        digits = _DIGITS.search(text)
        start = digits.start() if digits else 0
        line = text.count("\n", 0, start) + 1
        raise problem("a number has too many digits", line, start - text.rfind("\n", 0, start)) from None
