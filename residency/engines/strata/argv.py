"""Reads a Strata command line, or setup's, into a Launch.

Two dialects share most names. The engine's own (``strata --serve --pack ...``) knows exactly its flags. Setup's
(``setup.sh --context ... --vision gpu``) writes the engine's arguments and fills in its own defaults; a command line
with one of its names, or of its program, is read that way.
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
from residency.launch.sizes import LARGEST
from residency.text import clean
from residency.units import MIB
from residency.where import Where

from .flags import ENVIRONMENT, FLAGS, INFORMATION, KV_ALIASES, KV_WORDS, SETUP, SETUP_DEFAULTS, SILENT, Flag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ENGINE_NAMES: dict[str, Flag] = {name: flag for flag in FLAGS for name in flag.names}
SETUP_NAMES: dict[str, Flag] = {name: flag for flag in FLAGS for name in flag.setup_names}
#: Names only setup has; one of them makes the command line setup's.
ONLY_SETUP = frozenset({*SETUP, *SETUP_NAMES} - set(ENGINE_NAMES))
_VISION_WORDS = ("yes", "no", "none", "gpu", "cpu")


@dataclass(kw_only=True)
class _Reading(Reading):
    setup: bool  # the command line is that of setup, not of the engine


def _whole(text: str, flag: Flag) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(f"expects a whole number, not {clean(text)!r}")
    value = int(text)
    if flag.low is not None and value < flag.low:
        raise ValueError(f"cannot be {value}: the smallest is {flag.low}")
    if flag.high is not None and value > flag.high:
        raise ValueError(f"cannot be {value}: the largest is {flag.high}")
    return value


def convert(flag: Flag, text: str) -> Any:
    """Return the value of a flag from its text; raise ValueError saying what is wrong."""
    kind = flag.kind
    if kind in ("text", "path"):
        return text
    if kind == "choice":
        if text not in flag.choices:
            close = difflib.get_close_matches(text, flag.choices, n=1)
            raise ValueError(f"expects one of {', '.join(flag.choices)}, not {clean(text)!r}" + (f"; did you mean {close[0]}?" if close else ""))
        return text
    if kind == "float":
        if not re.fullmatch(r"-?[0-9]{1,12}(\.[0-9]{0,12})?", text):
            raise ValueError(f"expects a number, not {clean(text)!r}")
        if flag.low is not None and float(text) < flag.low:
            raise ValueError(f"cannot be {clean(text)}: the smallest is {flag.low}")
        return float(text)
    if kind == "mib":
        value = _whole(text, flag) * MIB
        if value > LARGEST:
            raise ValueError(f"{text} MiB is more than any machine has")
        return value
    if kind == "cache":
        slots = -1 if text == "auto" else _whole(text, flag)
        if slots < -1:
            raise ValueError(f"cannot be {slots}")
        return "auto" if slots == -1 else slots
    if kind == "prefill":
        if text == "auto" or re.fullmatch(r"auto:[0-9]{1,9}", text):
            return text
        value = _whole(text, flag)
        if value < 0:
            raise ValueError("cannot be negative")
        return value
    if kind == "split":
        return "auto" if text == "auto" else _numbers(text)
    if kind == "devices":
        return _numbers(text)
    return _whole(text, flag)


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6}){0,15}", text):
        raise ValueError(f'expects "auto" or whole numbers separated by commas, not {clean(text)!r}')
    return [int(part) for part in text.split(",")]


def read_argv(argv: Sequence[str], environ: Mapping[str, str], *, version: str, given: str | None, program: str) -> Launch:
    """Return the Launch of a command line. Raises InputError with every problem."""
    typed = {part.partition("=")[0] for part in argv[1:]}
    reading = _Reading(version=version, setup=program.startswith(("setup", "START-HERE")) or bool(typed & ONLY_SETUP))
    index = 1
    while index < len(argv):
        index = _step(reading, argv, index)
    launch = _launch(reading, argv, environ, given, program)
    reading.finish()
    return launch


def _step(reading: _Reading, argv: Sequence[str], index: int) -> int:
    """Read the flag at ``index`` and return the index after it and its value."""
    typed = argv[index]
    where = Where(source="argv", argv_index=index, flag=typed[:80])
    name, equals, inline = typed.partition("=")
    following = argv[index + 1] if index + 1 < len(argv) else None

    def value() -> tuple[str | None, int]:
        if equals:
            return inline, index + 1
        if following is None:
            reading.complain(f"{name} needs a value", where)
            return None, index + 1
        return following, index + 2

    if name in INFORMATION:
        reading.starts_nothing = True
        return len(argv)
    if name.startswith("@"):
        return _server_key(reading, name, inline, where, index)
    if reading.setup and name == "--vision" and (inline if equals else following) in _VISION_WORDS:
        word, after = value()
        _vision(reading, str(word), where)
        return after
    if reading.setup and name in SETUP:
        return _setup_option(reading, name, where, value, index)
    flag = (SETUP_NAMES.get(name) if reading.setup else None) or ENGINE_NAMES.get(name)
    if flag is None:
        if name in SILENT:
            return index + 1 + (0 if equals else SILENT[name])
        known = [*ENGINE_NAMES, *SILENT, *(ONLY_SETUP if reading.setup else ())]
        what = f"strata has no flag {clean(name)}; it ends with its usage text and exit code 2" if name.startswith("-") else f"{clean(name)!r} is not a flag"
        reading.complain(what, where, name=name, known=known)
        skip = not equals and following is not None and not following.startswith("-")
        return index + (2 if skip else 1)
    if not version_in(reading.version, flag.since, None):
        reading.complain(f"{name} exists since version {flag.since}; {reading.version} ends with its usage text and exit code 2", where)
    if flag.kind == "flag":
        reading.put(flag.target, True, where)
        return index + 1
    text, after = value()
    if text is not None:
        try:
            reading.put(flag.target, convert(flag, text), where)
        except ValueError as error:
            reading.complain(f"{name} {error}", where)
    return after


def _server_key(reading: _Reading, name: str, text: str, where: Where, index: int) -> int:
    """Read a key of the server's configuration (``sources/server_json.py``)."""
    try:
        if name == "@gpus":
            reading.put("option:gpus", _numbers(text), where)
        elif name == "@vision-device":
            reading.put("vision.device", text, where)
        elif name == "@vision-tokens":
            reading.put("vision.max_tokens", int(text[:9]), where)
        elif name == "@lazy-load":
            reading.put("option:lazy-load", True, where)
        else:
            reading.complain(f"{clean(name)!r} is not a flag", where)
    except ValueError:
        reading.complain(f"{clean(name)} cannot be {clean(text)!r}", where)
    return index + 1


def _vision(reading: _Reading, word: str, where: Where) -> None:
    reading.put("vision.enabled", word not in ("no", "none"), where)
    if word == "cpu":
        reading.put("vision.device", "cpu", where)


def _setup_option(reading: _Reading, name: str, where: Where, value: Any, index: int) -> int:
    kind = SETUP[name]
    if kind == "flag":
        return index + 1
    text, after = value()
    if text is None:
        return int(after)
    if name in ("--gpus", "--gpu"):
        if text == "all":
            reading.put("layers.split", reading.values.get("layers.split", "auto"), where)
        else:
            try:
                numbers = _numbers(text)
            except ValueError as error:
                reading.complain(f"{name} {error}", where)
                return int(after)
            reading.put("option:gpus", numbers, where)
            if len(numbers) > 1:
                reading.values.setdefault("layers.split", "auto")
                reading.places.setdefault("layers.split", where)
    elif name == "--low-ram" and text in ("on", "mmap"):
        reading.put("option:mmap-experts", True, where)
    elif name == "--low-ram" and text == "resident":
        reading.put("option:resident-experts", True, where)
        reading.put("option:mmap-experts", True, where)
    elif name == "--kv-streaming" and text == "off":
        reading.put("kv.resident", 0, where)
    elif name == "--vision-tokens" and text.isdigit() and int(text[:9]) > 0:
        reading.put("vision.max_tokens", int(text[:9]), where)
    elif name == "--backend" and text in ("cuda", "hip", "sycl"):
        reading.put("device.kind", {"hip": "rocm"}.get(text, text), where)
    return int(after)


def _launch(reading: _Reading, argv: Sequence[str], environ: Mapping[str, str], given: str | None, program: str) -> Launch:
    values, places = dict(reading.values), dict(reading.places)
    if reading.setup:
        values["option:serve"] = True
        for key, default in SETUP_DEFAULTS.items():
            values.setdefault(key, default)
        for implied in ("option:mtp", "option:expert-profile"):
            values.setdefault(implied, "setup")
    kv = values.pop("option:kv", None)
    if kv is not None:
        key, val = next(pair for pair, word in KV_WORDS.items() if word == KV_ALIASES.get(kv, kv))
        values["kv.key_type"], values["kv.value_type"] = key, val
        places["kv.key_type"] = places["kv.value_type"] = places.pop("option:kv")
    if values.pop("option:mmap-experts", False):
        values["memory.load"] = "mmap"
        places["memory.load"] = places["option:mmap-experts"]
    split = values.get("layers.split")
    if isinstance(split, list):
        values["layers.split"], values["layers.first"] = "layer", split
        places["layers.first"] = places["layers.split"]
    prefill = values.get("context.prefill")
    if isinstance(prefill, str) and prefill.startswith("auto:"):
        values["context.prefill"], values["option:prefill-auto-max"] = "auto", int(prefill[5:])
    sections, options = by_section(values, given)
    return Launch(
        engine="strata", version=given, knobs=Knobs.model_validate(sections), options=options, places=places,
        program=program, argv=tuple(argv), environ={k: environ[k] for k in ENVIRONMENT if k in environ}, name=program,
        starts_nothing=reading.starts_nothing,
    )  # fmt: skip


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "flag": (bool,), "cache": (int, str), "devices": (list, int), "prefill": (int, str), "split": (str, list),
}  # fmt: skip


def option_problem(name: str, value: Any, *, version: str) -> str | None:
    """Return why ``[engine.options] name = value`` of a launch file is wrong, or None."""
    known = {f.target[7:]: f for f in FLAGS if f.target.startswith("option:")}
    flag = known.get(name)
    if flag is None or name in ("kv", "mmap-experts"):
        knob = {n.lstrip("-"): f.target for n, f in ENGINE_NAMES.items()}.get(name)
        knob = {"kv": "kv.key_type and kv.value_type", "mmap-experts": 'memory.load = "mmap"'}.get(name, knob)
        if knob is not None:
            return f"is set with {knob}"
        if f"--{name}" in SILENT:
            return None
        close = difflib.get_close_matches(name, known, n=1)
        return "no such option of this engine" + (f"; did you mean {close[0]}?" if close else "")
    if not version_in(version, flag.since, None):
        return f"exists since version {flag.since}"
    wanted = _TYPES.get(flag.kind, (str,))
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        return f"expects {' or '.join(t.__name__ for t in wanted)}, not {type(value).__name__}"
    if flag.choices and value not in flag.choices:
        return f"expects one of {', '.join(flag.choices)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if flag.low is not None and value < flag.low:
            return f"cannot be {value}: the smallest is {flag.low}"
        if flag.high is not None and value > flag.high:
            return f"cannot be {value}: the largest is {flag.high}"
    return None


def spell(launch: Launch, knob: str, value: Any) -> str | None:
    """Return a change in the words the user typed; sizes in MiB, as the engine counts them."""
    mib = value // MIB if knob == "memory.reserve" and isinstance(value, int) else None
    if launch.program is None:
        return f'memory.reserve = "{mib}MiB"' if mib is not None else None
    setup = bool({part.partition("=")[0] for part in launch.argv[1:]} & ONLY_SETUP)
    if knob == "vision.device" and value == "cpu":
        return "--vision cpu" if setup else '"vision": {"gpu": false} in the server\'s configuration'
    if knob == "layers.first" and value is None:
        return "--layer-split auto"
    if knob == "vision.enabled" and value is False:
        return "without --vision"
    if knob == "memory.load" and value == "mmap":
        return "--mmap-experts"
    flag = next((f for f in FLAGS if f.target == knob), None)
    if flag is None:
        return None
    typed = [n for n in (*flag.setup_names, *flag.names) if any(a.partition("=")[0] == n for a in launch.argv)]
    name = typed[0] if typed else (flag.setup_names[0] if setup and flag.setup_names else flag.names[0])
    if value is None:
        return f"without {name}"
    if isinstance(value, bool):
        return name if value else f"without {name}"
    return f"{name} {mib if mib is not None else value}"
