"""Variables a process gets from elsewhere: files of KEY=VALUE lines, as systemd and compose read them."""

from __future__ import annotations

import re
from collections import ChainMap
from typing import TYPE_CHECKING

from residency.errors import InputError, Problem
from residency.launch.toml_file import read_text
from residency.where import Where

from .words import LONGEST_SUM, expand

if TYPE_CHECKING:
    from collections.abc import Mapping

_LINE = re.compile(r"([ \t]*)([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*(?:(=)[ \t]*(.*))?", re.DOTALL)
#: Compose takes what a shell would, too.
_EXPORTED = re.compile(r"([ \t]*)(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_.-]*)[ \t]*(?:(=)[ \t]*(.*))?", re.DOTALL)
#: Variables an engine, or the runtime under it, may read: those whose value decides about memory.
_READ = re.compile(
    r"(?:LLAMA_(?!API_KEY|ARG_API_KEY)|MTMD_|VT_|VLLM_|STRATA_|CUDA_|NVIDIA_VISIBLE_DEVICES$|GGML_|HIP_|ROCR_|HSA_|GPU_|ZE_|ONEAPI_|SYCL_|HF_HOME$|HOME$|XDG_|OS$)"
)


def matters(name: str) -> bool:
    """Whether an engine may read a variable."""
    return _READ.match(name) is not None


def read_variables(path: str, *, host: Mapping[str, str] | None = None, raw: bool = False) -> tuple[dict[str, str], dict[str, Where]]:
    """Return the variables of a file and where each stands.

    ``host``: read it as compose does, which fills in variables of its caller and ends a value at `` #``. None: as
    systemd does (``systemd.exec(5)``, EnvironmentFile=). ``raw``: as ``docker run --env-file`` does, with quotes and
    dollar signs as a part of the value. Raises InputError for a file that cannot be read.
    """
    values: dict[str, str] = {}
    places: dict[str, Where] = {}
    problems: list[Problem] = []
    shape = _LINE if host is None or raw else _EXPORTED
    size, caller = 0, dict(host or {})
    lines = iter(enumerate(read_text(path).split("\n"), 1))
    for number, first in lines:
        line = first.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith(("#", ";")):
            continue
        parts = [line]
        while host is None and parts[-1].endswith("\\"):
            parts[-1:] = [parts[-1][:-1], next(lines, (0, ""))[1]]
        line = "".join(parts)
        match = shape.fullmatch(line)
        if match is None:
            continue  # as systemd does, and Docker with less patience
        name = match[2]
        where = Where(source="file", file=path, line=number, column=len(match[1]) + 1)
        if match[3] is None:
            if host is not None and name in host:
                values[name], places[name] = host[name], where
            continue
        try:
            values[name] = match[4] if raw else _unquoted(match[4]) if host is None else _composed(match[4], ChainMap(values, caller))
            places[name] = where
            size += len(values[name])
            if size > LONGEST_SUM:
                problems.append(Problem(message=f"the variables of this file come to more than {LONGEST_SUM // 2**20} MiB", where=where))
                break
        except ValueError as error:
            problems.append(Problem(message=f"{name}: {error}", where=where, line_text=line))
    if problems:
        raise InputError(problems)
    return values, places


def _unquoted(text: str) -> str:
    """Return a value without its quotes and escapes; white space at the end belongs to it only in quotes."""
    kept: list[str] = []
    quote, solid, at = "", 0, 0
    while at < len(text):
        char = text[at]
        if char == quote:
            quote, solid = "", len(kept)
        elif not quote and char in "'\"":
            quote, solid = char, len(kept)
        else:
            if char == "\\" and quote != "'" and at + 1 < len(text):
                at += 1
                char = text[at]
            kept.append(char)
            if quote or not char.isspace():
                solid = len(kept)
        at += 1
    if quote:
        raise ValueError("the quote is not closed on its line")
    return "".join(kept[:solid])


def _composed(text: str, values: Mapping[str, str]) -> str:
    if not text.startswith(("'", '"')):
        return expand(re.split(r"(?:^|\s)#", text, maxsplit=1)[0].rstrip(), values)
    match = re.match(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"", text)
    if match is None:
        raise ValueError("the quote is not closed on its line")
    return match[1] if match[1] is not None else expand(re.sub(r"\\([\\\"$])", r"\1", match[2]), values)
