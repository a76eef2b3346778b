"""Reads a vllm-server or vllm-cli command line, its JSON documents and its environment into a Launch.

Precedence in the engine: environment, then ``--offload-config``, then the built-in default. A fault in a
flag or a document is a usage fault there ("invalid argument"), never a failed load; so it is an
unreadable input here, not a veto.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from residency.engines.base import version_in
from residency.engines.reading import Reading, by_section
from residency.launch.knobs import Knobs
from residency.launch.model import Launch
from residency.text import clean
from residency.where import Where

from .documents import parse, problems, settings_of, speculation_of
from .environment import BY_NAME, BY_OPTION, UNREAD, VARIABLES, read_value
from .flags import DEVICES, FLAGS, FOREIGN, INFORMATION, KV_TYPES, SILENT, Flag
from .versions import is_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAMES: dict[str, tuple[Flag, bool]] = {
    **{name: (flag, False) for flag in FLAGS for name in flag.names},
    **{name: (flag, True) for flag in FLAGS for name in flag.negative},
}
#: Flags that may be given once; of the others the last one counts.
_ONCE = ("option:enable-prefix-caching",)
#: Prefixes of the variables kept with the launch, so that what the engine ignores can be reported.
_PREFIXES = ("VT_", "VLLM_CPP_")


@dataclass(kw_only=True)
class _Reading(Reading):
    program: str


def convert(flag: Flag, text: str) -> Any:
    """Return the value of a flag from its text; raise ValueError saying what is wrong."""
    if flag.kind == "int":
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ValueError(f"expects a whole number, not {clean(text)!r}")
        value = int(text)
        if value < flag.least:
            raise ValueError(f"cannot be {value}")
        if flag.target == "kv.block_size" and value % 16:
            raise ValueError(f"must be a multiple of 16, not {value}")
        return value
    if flag.kind == "float":
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"expects a number, not {clean(text)!r}") from None
    for kind, legal in (("device", DEVICES), ("kv-type", KV_TYPES)):
        if flag.kind == kind and text not in legal:
            raise ValueError(f"expects one of {', '.join(legal)}, not {clean(text)!r}")
    if flag.kind == "json":
        found = problems(flag.target[7:], text)
        if found:
            raise ValueError("; ".join(found))
    return text


def read_argv(argv: Sequence[str], environ: Mapping[str, str], *, version: str, given: str | None, program: str) -> Launch:
    """Return the Launch of a command line. Raises InputError with every problem."""
    reading = _Reading(version=version, program=program)
    index = 1
    while index < len(argv):
        index = _step(reading, argv, index)
    documents = _documents(reading)
    _environment(reading, environ)
    for target, (value, where) in documents.items():
        if target not in reading.values:
            reading.put(target, value, where)
    if "model.path" not in reading.values and "option:speech-model" not in reading.values and not reading.starts_nothing:
        reading.complain("--model is missing", Where(source="argv", argv_index=0))
    reading.finish()
    return _launch(reading, argv, environ, given)


def _step(reading: _Reading, argv: Sequence[str], index: int) -> int:
    """Read the flag at ``index``; return the index after it and its value."""
    name = argv[index]
    where = Where(source="argv", argv_index=index, flag=name[:80])
    if name in INFORMATION:
        reading.starts_nothing = True
        return len(argv)
    if name in SILENT:
        if index + SILENT[name] >= len(argv):
            reading.complain(f"{name} needs a value", where)
        return index + 1 + SILENT[name]
    known = _NAMES.get(name)
    if known is None:
        return _unknown(reading, argv, index, where)
    flag, negative = known
    step = 1 if flag.kind == "flag" else 2
    if not version_in(reading.version, flag.since, None) and is_tree(reading.version):
        reading.complain(f"{name} exists since the tree of {flag.since}; this is {reading.version}", where)
        return index + step
    if flag.target in _ONCE and flag.target in reading.values:
        reading.complain(f"{name}: this setting is given twice, and the engine takes it once", where)
    if flag.kind == "flag":
        reading.put(flag.target, not negative, where)
        return index + 1
    if index + 1 >= len(argv):
        reading.complain(f"{name} needs a value", where)
        return index + 1
    try:
        reading.put(flag.target, convert(flag, argv[index + 1]), where)
    except ValueError as error:
        reading.complain(f"{name} {error}", where)
    return index + 2


def _unknown(reading: _Reading, argv: Sequence[str], index: int, where: Where) -> int:
    name, _, rest = argv[index].partition("=")
    follows = index + 1 < len(argv) and not argv[index + 1].startswith("-")
    skip = 2 if follows and not rest and name.startswith("-") else 1
    if name in FOREIGN:
        reading.complain(f"{reading.program} has no flag {name} and stops at it", where, FOREIGN[name])
    elif name in _NAMES or name in SILENT:
        reading.complain(f"{reading.program} does not take {clean(name)}=VALUE; the value is an argument of its own", where)
    elif not name.startswith("-"):
        reading.complain(f"{clean(name)!r} is not a flag, and no flag before it takes it as a value", where)
    else:
        reading.complain(f"{reading.program} has no flag {clean(name)} and stops at it", where, name=name, known=(*_NAMES, *SILENT))
    return index + skip


def _documents(reading: _Reading) -> dict[str, tuple[Any, Where]]:
    """Return what the JSON documents set, each with the position of its document."""
    found: dict[str, tuple[Any, Where]] = {}
    for option, fold in (("offload-config", settings_of), ("speculative-config", speculation_of)):
        text = reading.values.get(f"option:{option}")
        if text is not None:
            where = reading.places[f"option:{option}"]
            found |= {target: (value, where) for target, value in fold(parse(text)).items()}
    return found


def _environment(reading: _Reading, environ: Mapping[str, str]) -> None:
    """Apply the variables this tree reads; a text the engine ignores leaves the setting alone."""
    for variable in VARIABLES:
        text = environ.get(variable.name)
        if text is None or not version_in(reading.version, variable.since, None):
            continue
        value = read_value(variable, text)
        if value is not None:
            reading.put(variable.target, value, Where(source="env", variable=variable.name))


def _launch(reading: _Reading, argv: Sequence[str], environ: Mapping[str, str], given: str | None) -> Launch:
    values = reading.values
    if "kv.key_type" in values:
        values["kv.value_type"] = values["kv.key_type"]
        reading.places["kv.value_type"] = reading.places["kv.key_type"]
    if values.get("context.batch") == 0:
        values.pop("context.batch")  # 0 is the engine's word for automatic
    sections, options = by_section(values, given)
    return Launch(
        engine="vllm.cpp",
        version=given,
        knobs=Knobs.model_validate(sections),
        options=options,
        places=reading.places,
        program=reading.program,
        argv=tuple(argv),
        environ={k: environ[k] for k in sorted(environ) if k in BY_NAME or k in UNREAD or (k.startswith(_PREFIXES) and len(k) < 80)},
        name=reading.program,
        starts_nothing=reading.starts_nothing,
    )


_OPTIONS = {flag.target[7:]: flag for flag in FLAGS if flag.target.startswith("option:")}


def option_problem(name: str, value: Any, *, version: str) -> str | None:
    """Return why ``[engine.options] name = value`` of a launch file is wrong, or None.

    Options are the long flags without dashes, and every variable under its own name: ``vt-gguf-mmap``.
    """
    variable = BY_OPTION.get(name)
    if variable is not None:
        if not version_in(version, variable.since, None):
            return f"{variable.name} exists since the tree of {variable.since}"
        if isinstance(value, list):
            return "expects one value"
        return None if read_value(variable, option_text(value)) is not None else f"the engine ignores {variable.name}={clean(str(value))}"
    flag = _OPTIONS.get(name)
    if flag is None:
        close = difflib.get_close_matches(name, [*_OPTIONS, *BY_OPTION], n=1)
        return "no such option of this engine" + (f"; did you mean {close[0]}?" if close else "")
    if not version_in(version, flag.since, None):
        return f"exists since the tree of {flag.since}"
    if flag.kind == "flag":
        return None if isinstance(value, bool) else "expects true or false"
    if isinstance(value, (bool, list)) or (flag.kind == "json" and not isinstance(value, str)):
        return "expects a text" if flag.kind == "json" else "expects one value"
    try:
        convert(flag, str(value))
    except ValueError as error:
        return str(error)
    return None


def option_text(value: Any) -> str:
    """Return an option's value as the text of its variable."""
    return str(int(value)) if isinstance(value, bool) else str(value)


_ENVIRONMENT = " (environment)"  # a variable is no argument
_SPELLED = {
    ("experts.on_host", "all"): f"VT_CPU_MOE=1{_ENVIRONMENT}", ("memory.load", "none"): f"VT_GGUF_MMAP=0{_ENVIRONMENT}",
    ("memory.load", "mmap"): f"VT_GGUF_MMAP=1{_ENVIRONMENT}",
}  # fmt: skip


def spell(knob: str, value: Any) -> str | None:
    """Return a change in the engine's words: ("device.kind", "cpu") -> "--device cpu"; variables as NAME=value (environment)."""
    if isinstance(value, str) and (knob, value) in _SPELLED:
        return _SPELLED[knob, value]
    if knob == "speculation.kind" and value is None:
        return "without --speculative-config"
    flag = next((f for f in FLAGS if f.target == knob), None)
    if flag is not None:
        if value is None:
            return f"without {flag.names[0]}"
        if isinstance(value, bool):
            names = flag.names if value else flag.negative
            return names[0] if names else None
        return f"{flag.names[0]} {value}"
    variable = next((v for v in VARIABLES if v.target == knob), None)
    if variable is None:
        return None
    return (f"without {variable.name}" if value is None else f"{variable.name}={option_text(value)}") + _ENVIRONMENT
