"""Reads a llama.cpp command line and its ``LLAMA_ARG_*`` environment into a Launch.

Order of application in the engine (``common/arg.cpp``, 0.5.0): environment, then command line; the
last one wins, except overrides and list flags, which append.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from residency.engines import patterns
from residency.engines.base import version_in, version_key
from residency.engines.reading import Reading, by_section
from residency.launch.knobs import KNOB_TYPES, Knobs
from residency.launch.model import Launch
from residency.text import clean, shorten
from residency.where import Where

from .flags import (
    BUNDLES,
    ENDS_AT_ONCE,
    ENVIRONMENT,
    FALSE,
    FLAGS,
    INFORMATION,
    SILENT,
    SILENT_COUNTS,
    TRUE,
    Flag,
    flag_names,
)
from .ini import config_words
from .version import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence



@dataclass(kw_only=True)
class _Reading(Reading):
    """A reading of one program of one fork."""

    program: str
    fork: str

    def take(self, flag: Flag, value: Any, where: Where) -> None:
        """Set a flag's value; overrides and lists append."""
        if flag.kind in ("overrides", "list") and isinstance(value, list):
            value = [*self.values.get(flag.target, []), *value]
        self.put(flag.target, value, where)


def convert(flag: Flag, text: str) -> Any:
    """Return the value of a flag from its text; raise ValueError saying what is wrong."""
    kind = flag.kind
    if kind == "int":
        return _counter(text)
    if kind == "layers":
        return text if text in ("auto", "all") else _counter(text)
    if kind in ("text", "path"):
        return text
    if kind == "onoff":
        word = text.casefold()
        if word in ("auto", "-1"):
            return "auto"
        if word in TRUE or word in FALSE:
            return "on" if word in TRUE else "off"
        raise ValueError(f"expects on, off or auto, not {clean(text)!r}")
    if kind == "choice":
        if text not in flag.choices:
            close = difflib.get_close_matches(text, flag.choices, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"expects one of {', '.join(flag.choices)}, not {clean(text)!r}{hint}")
        return dict(flag.meaning).get(text, text)
    if kind == "list":
        return [part for part in text.split(",") if part]
    if kind == "devices":
        return [] if text == "none" else [part for part in text.split(",") if part]
    if kind == "ratios":
        return ratios(re.split(r"[,/]+", text))
    if kind == "sizes":
        return [_whole(part) for part in text.split(",")]
    if kind == "overrides":
        return [_override(part) for part in text.split(",") if part]
    raise ValueError("takes no value")


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(f"expects a whole number, not {clean(text)!r}")
    return int(text)


def _counter(text: str) -> int:
    """Return a whole number the engine's parser takes (``std::stoi``: 32 bits, signed)."""
    value = _whole(text)
    if not fits_counter(value):
        raise ValueError(f"cannot be {value}: the engine's parser takes whole numbers of 32 bits only")
    return value


def fits_counter(value: int) -> bool:
    """Whether the engine's parser takes a number."""
    return -(2**31) <= value < 2**31


def _number(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,18}(\.[0-9]{0,18})?", text):
        raise ValueError(f"expects numbers, not {clean(text)!r}")
    return float(text)


#: One more share than this ends the engine: "got 16 input configs, but system only has 16 devices" (0.5.0).
MOST_SHARES = 15


def ratios(parts: Sequence[str]) -> list[float]:
    """Return the shares of ``--tensor-split``; raise ValueError saying what is wrong."""
    if len(parts) > MOST_SHARES:
        raise ValueError(f"has {len(parts)} shares, and the engine takes {MOST_SHARES} at most")
    return [_number(part) for part in parts]


def _override(text: str) -> dict[str, str]:
    pattern, separator, target = text.rpartition("=")
    if not separator or not pattern or not target:
        raise ValueError(f"expects pattern=device, not {clean(text)!r}")
    wrong = patterns.reason(pattern)
    if wrong is not None:
        raise ValueError(f"has a pattern that is not a regular expression ({wrong}): {patterns.shown(pattern)!r}")
    return {"pattern": pattern, "device": target}


def _pick(reading: _Reading, name: str, where: Where) -> tuple[Flag, bool] | None:
    """Return the flag a name means in this version, or complain and return None."""
    candidates = flag_names(reading.fork).get(name)
    if candidates is None:
        return None
    for flag, negative in candidates:
        if version_in(reading.version, flag.since, flag.until):
            return flag, negative
    flag = candidates[0][0]
    if flag.until is not None and not version_in(reading.version, None, flag.until):
        hint = f"use {flag.instead}" if flag.instead else None
        reading.complain(f"{name} was removed in version {shown(flag.until)}; this is {shown(reading.version)}", where, hint)
    else:
        reading.complain(f"{name} exists since version {shown(flag.since or '?')}; this is {shown(reading.version)}", where)
    return flag, False


@lru_cache(maxsize=16)
def variable_names(version: str) -> dict[str, tuple[Flag, bool]]:
    """Return every variable a version reads -> its flag, and whether the name negates it."""
    names: dict[str, tuple[Flag, bool]] = {}
    for flag in FLAGS:
        if flag.env is not None and version_in(version, flag.since, flag.until):
            full = flag.env if flag.env.startswith("MTMD_") else f"LLAMA_ARG_{flag.env}"
            names.setdefault(full, (flag, False))
            if flag.kind == "switch":
                names[full.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)] = (flag, True)
    return names


def older_flag(argv: Sequence[str], *, version: str, fork: str) -> tuple[str, str] | None:
    """Return the typed flag that was removed the earliest before a version, and when; None: no such flag.

    Somebody who does not say which version starts may well start an older one, and its flags tell.
    """
    names = flag_names(fork)
    found = []
    for typed in argv[1:]:
        name = "--" + typed[2:].partition("=")[0].replace("_", "-") if typed.startswith("--") else typed
        ends = [flag.until for flag, _ in names.get(name, ()) if flag.until is not None]
        if ends and not any(version_in(version, flag.since, flag.until) for flag, _ in names[name]):
            found.append((version_key(max(ends, key=version_key)), name, max(ends, key=version_key)))
    if not found:
        return None
    _, name, until = min(found)
    return name, until


def _environment(reading: _Reading, environ: Mapping[str, str]) -> None:
    """Apply LLAMA_ARG_* variables; variables the engine does not read are none of its business."""
    names = variable_names(reading.version)
    for variable in sorted(v for v in environ if v.startswith(("LLAMA_ARG_", "MTMD_"))):
        found = names.get(variable)
        if found is None:
            continue
        flag, negative = found
        text, where = environ[variable], Where(source="env", variable=variable)
        try:
            if negative:  # set to anything means false
                reading.take(flag, False, where)
            elif flag.kind in ("flag", "switch"):
                word = text.casefold()
                if word not in TRUE and word not in FALSE:
                    raise ValueError(f"expects on or off, not {clean(text)!r}")
                if word in TRUE or flag.kind == "switch":
                    reading.take(flag, word in TRUE, where)
            else:
                reading.take(flag, convert(flag, text), where)
        except ValueError as error:
            reading.complain(f"{variable} {error}", where)


#: Since when every program reads config.ini files, before the environment.
CONFIG_SINCE = "0.5.0"


def _configuration(reading: _Reading, environ: Mapping[str, str]) -> None:
    """Apply the implicit config files; like the engine, pass over what it does not take there."""
    if not version_in(reading.version, CONFIG_SINCE, None):
        return
    words, places = config_words(environ)
    if not words:
        return
    own = _Reading(version=reading.version, program=reading.program, fork=reading.fork)
    argv = [reading.program, *words]
    index = 1
    while index < len(argv):
        index = _step(own, argv, index)
    for target, value in own.values.items():
        at = own.places[target].argv_index
        reading.put(target, value, places[at - 1] if at is not None else own.places[target])
    reading.problems += [replace(p, where=places[p.where.argv_index - 1] if p.where is not None and p.where.argv_index else p.where) for p in own.problems]


def read_argv(
    argv: Sequence[str], environ: Mapping[str, str], *, version: str, given: str | None, fork: str, program: str
) -> Launch:
    """Return the Launch of a llama.cpp command line. Raises InputError with every problem."""
    reading = _Reading(version=version, program=program, fork=fork)
    _configuration(reading, environ)
    _environment(reading, environ)
    from_environment = dict(reading.values)
    for key in [k for k, v in reading.values.items() if isinstance(v, list)]:
        if key in ("layers.overrides", "option:spec-draft-override-tensor"):
            continue
        reading.values.pop(key)  # a list flag on the command line replaces the environment's list
    index = 1
    while index < len(argv):
        index = _step(reading, argv, index)
    for key, value in from_environment.items():
        reading.values.setdefault(key, value)
    launch = _launch(reading, argv, environ, given)
    reading.finish()
    return launch


def _step(reading: _Reading, argv: Sequence[str], index: int) -> int:
    """Read the flag at ``index`` and return the index after it and its values."""
    typed = argv[index]
    where = Where(source="argv", argv_index=index, flag=typed[:80])
    name, inline = typed, None
    if typed.startswith("--"):
        name, equals, value = typed.partition("=")
        inline = value if equals else None
        name = "--" + name[2:].replace("_", "-")
    if name in BUNDLES:
        reading.values["option:hf-repo"] = name.removeprefix("--")
        reading.places["option:hf-repo"] = where
        return index + 1
    if name in INFORMATION:
        reading.starts_nothing = True
        if name in ENDS_AT_ONCE:
            return len(argv)
    if name in SILENT:
        wanted = SILENT[name] if inline is None else 0
        if index + wanted >= len(argv) + (0 if wanted else 1):
            reading.complain(f"{name} needs a value", where)
        elif name in SILENT_COUNTS:
            _check_count(reading, name, argv[index + 1] if inline is None else inline, where)
        return index + 1 + wanted
    picked = _pick(reading, name, where)
    if picked is None:
        _unknown(reading, name, where)
        # Skip what looks like its value, so that one unknown flag gives one complaint.
        follows = index + 1 < len(argv) and not argv[index + 1].startswith("-")
        return index + (2 if inline is None and follows else 1)
    flag, negative = picked
    if flag.kind in ("flag", "switch"):
        if inline is not None:
            reading.complain(f"{name} takes no value", where)
        reading.take(flag, not negative, where)
        return index + 1
    if inline is None:
        following = argv[index + 1] if index + 1 < len(argv) else None
        if flag.kind == "onoff" and (following is None or following.casefold() not in (*TRUE, *FALSE, "auto", "-1")):
            # Versions before the three-way flag took no value; the newer ones read a missing one as "on".
            reading.take(flag, "on", where)
            return index + 1
        if following is None:
            reading.complain(f"{name} needs a value", where)
            return index + 1
        inline, step = following, 2
    else:
        step = 1
    if flag.programs and reading.program not in flag.programs:
        reading.complain(f"{name} is not a flag of {reading.program}; it belongs to {', '.join(flag.programs)}", where)
    try:
        reading.take(flag, convert(flag, inline), where)
    except ValueError as error:
        reading.complain(f"{name} {error}", where)
    return index + step


def _check_count(reading: _Reading, name: str, text: str, where: Where) -> None:
    """Complain about what ``std::stoi`` throws at: no leading digits, or more than 32 bits."""
    found = re.match(r"\s*([+-]?[0-9]+)", text[:40])
    if found is None or not fits_counter(int(found[1])):
        reading.complain(f"{name} expects a whole number of 32 bits, not {clean(shorten(text, 40))!r}", where)


def _unknown(reading: _Reading, name: str, where: Where) -> None:
    if not name.startswith("-"):
        reading.complain(f"{clean(name)!r} is not a flag, and no flag before it takes it as a value", where)
        return
    reading.complain(f"{reading.program} has no flag {clean(name)}", where, name=name, known=(*flag_names(reading.fork), *SILENT))


def _launch(reading: _Reading, argv: Sequence[str], environ: Mapping[str, str], given: str | None) -> Launch:
    values = dict(reading.values)
    if values.get("option:cpu-moe"):
        values["experts.on_host"] = "all"
        reading.places["experts.on_host"] = reading.places["option:cpu-moe"]
    if values.get("option:mmproj-offload") is False and "vision.device" not in values:
        values["vision.device"] = "cpu"
        reading.places["vision.device"] = reading.places["option:mmproj-offload"]
    if values.get("option:mmproj-auto") is False:
        values.pop("model.mmproj", None)
    _load_mode(values, reading)
    for key, smallest in (("context.sequences", -1), ("layers.on_device", -2), ("context.length", 0)):
        value = values.get(key)
        if isinstance(value, int) and value < smallest:
            reading.complain(f"{key} cannot be {value}", reading.places[key])
            values.pop(key)
    if values.get("context.sequences") in (-1, 0):
        values.pop("context.sequences")  # automatic, the same as not given
    if values.get("layers.on_device") in (-1, -2):
        values["layers.on_device"] = "auto" if values["layers.on_device"] == -1 else "all"
    for key, value in list(values.items()):
        if not key.startswith("option:") and isinstance(value, int) and not isinstance(value, bool) and value < KNOB_TYPES.get(key, 0):
            reading.complain(f"{key} cannot be {value}", reading.places[key])
            values.pop(key)
    sections, options = by_section(values, given)
    return Launch(
        engine=reading.fork,
        version=given,
        knobs=Knobs.model_validate(sections),
        options=options,
        places=reading.places,
        program=reading.program,
        argv=tuple(argv),
        environ={k: environ[k] for k in ENVIRONMENT if k in environ},
        name=reading.program,
        starts_nothing=reading.starts_nothing,
    )


def _load_mode(values: dict[str, Any], reading: _Reading) -> None:
    """Fold the older load flags into the one load mode."""
    if "memory.load" in values:
        return
    lock, mapped = values.get("option:mlock"), values.get("option:mmap", True)
    source = next((k for k in ("option:mlock", "option:mmap", "option:direct-io") if k in values), None)
    if source is None:
        return
    if values.get("option:direct-io"):
        mode = "dio"
    elif lock:
        mode = "mmap+mlock" if mapped else "mlock"
    else:
        mode = "mmap" if mapped else "none"
    values["memory.load"] = mode
    reading.places["memory.load"] = reading.places[source]


def _options(fork: str) -> dict[str, Flag]:
    return {f.target[7:]: f for f in FLAGS if f.target.startswith("option:") and (not f.forks or fork in f.forks)}


_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "layers": (int, str), "flag": (bool,), "switch": (bool,), "list": (list,), "ratios": (list,),
    "devices": (list,), "sizes": (list, int), "overrides": (list,),
}  # fmt: skip


#: Words of the kinds that have some of their own.
_KIND_WORDS = {"onoff": ("on", "off", "auto"), "layers": ("auto", "all")}


def _words(flag: Flag) -> tuple[str, ...]:
    return flag.choices or _KIND_WORDS.get(flag.kind, ())


def unknown_words(options: Mapping[str, Any], fork: str) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield the options with closed choices whose word is none of them: name, word, choices. ``--set`` reaches them unchecked."""
    known = _options(fork)
    for name, value in options.items():
        words = _words(known[name]) if name in known else ()
        counted = name in known and known[name].kind == "layers" and isinstance(value, int) and not isinstance(value, bool)
        if words and not counted and value not in words:
            yield name, value, words


def option_problem(name: str, value: Any, *, version: str, fork: str) -> str | None:
    """Return why ``[engine.options] name = value`` of a launch file is wrong, or None."""
    known = _options(fork)
    flag = known.get(name)
    if flag is None:
        close = difflib.get_close_matches(name, known, n=1)
        return "no such option of this engine" + (f"; did you mean {close[0]}?" if close else "")
    if not version_in(version, flag.since, flag.until):
        return f"removed in version {shown(flag.until)}" if flag.until else f"exists since version {shown(flag.since or '?')}"
    wanted = _OPTION_TYPES.get(flag.kind, (str,))
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        return f"expects {' or '.join(t.__name__ for t in wanted)}, not {type(value).__name__}"
    words = _words(flag)
    if words and isinstance(value, str) and value not in words:
        return f"expects one of {', '.join(words)}"
    if flag.kind in ("int", "layers") and isinstance(value, int) and not fits_counter(value):
        return "is more than the engine's parser takes: whole numbers of 32 bits"
    return None


#: Knobs whose flag differs from the table's first name, or needs words of its own.
_SPELLED = {
    ("experts.on_host", "all"): "--cpu-moe",
    ("kv.on_device", False): "--no-kv-offload",
    ("kv.on_device", True): "--kv-offload",
    ("device.kind", "cpu"): "--device none",
    ("vision.device", "cpu"): "--no-mmproj-offload",
    ("context.unified", True): "--kv-unified",
}


def spell(knob: str, value: Any) -> str | None:
    """Return a change as command-line words: ("context.length", 8192) -> "-c 8192"."""
    if isinstance(value, (str, bool)) and (knob, value) in _SPELLED:
        return _SPELLED[knob, value]
    flag = next((f for f in FLAGS if f.target == knob and f.until is None and f.names), None)
    if flag is None:
        return None
    if value is None:
        return f"without {flag.names[0]}"
    if isinstance(value, bool):
        names = flag.names if value else flag.negative
        return names[-1] if names else None
    if isinstance(value, (list, tuple)):
        value = ",".join(str(v) for v in value)
    return f"{flag.names[0]} {value}"
