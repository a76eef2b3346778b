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

from . import history
from .flags import (
    BUNDLES,
    ENDS_AT_ONCE,
    ENVIRONMENT,
    FALSE,
    FLAGS,
    INFORMATION,
    OPTIONAL_VALUE,
    RANGES_SINCE,
    SILENT,
    SILENT_COUNTS,
    SILENT_NUMBERS,
    SILENT_RANGES,
    SILENT_UNSIGNED,
    SILENT_WORDS,
    SMALLEST,
    THREE_WAY,
    TRUE,
    Flag,
    flag_names,
)
from .ini import config_words
from .version import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Kinds whose repeated flags append.
_APPENDING = ("overrides", "list", "files", "scaled", "metadata")


@dataclass(kw_only=True)
class _Reading(Reading):
    """A reading of one program of one fork."""

    program: str
    fork: str
    given: bool = False  # the version was given, not taken for granted

    def take(self, flag: Flag, value: Any, where: Where) -> None:
        """Set a flag's value; overrides and lists append."""
        if flag.kind in _APPENDING and isinstance(value, list):
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
        if text in ("auto", "-1") and not flag.choices:
            return "auto"
        if text in TRUE or text in FALSE:
            return "on" if text in TRUE else "off"
        raise ValueError(f"expects {'on or off' if flag.choices else 'on, off or auto'}, not {quoted(text)}")
    if kind == "choice":
        if text not in flag.choices:
            close = difflib.get_close_matches(text, flag.choices, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"expects one of {', '.join(flag.choices)}, not {quoted(text)}{hint}")
        return dict(flag.meaning).get(text, text)
    if kind == "list":
        return [part for part in text.split(",") if part]
    if kind == "devices":
        return [] if text == "none" else [part for part in text.split(",") if part]
    if kind == "ratios":
        return ratios(_parts(text))
    if kind == "sizes":
        return _margins(_parts(text))
    if kind == "files":
        return [_file(part) for part in _csv_row(text)]
    if kind == "scaled":
        return [_scaled_file(part) for part in _csv_row(text)]
    if kind == "metadata":
        return [_metadata(part) for part in _csv_row(text)]
    if kind == "overrides":
        return [_override(part) for part in text.split(",") if part]
    raise ValueError("takes no value")


def quoted(text: str) -> str:
    """Return a value in quotes, short and safe for a terminal."""
    return repr(clean(shorten(text)))


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f"expects a whole number, not {quoted(text)}")
    if len(text) > 18:
        raise ValueError(f"cannot be {shorten(text)}: the engine's parser takes whole numbers of 32 bits only")
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


#: A number as ``std::stof`` reads it, and the smallest and largest that fit single precision without loss of digits.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_SMALLEST_SINGLE, _LARGEST_SINGLE = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def _single(text: str) -> float:
    """Return a number that ``std::stof`` takes; raise ValueError where it throws out_of_range."""
    value = float(text)
    written_zero = not re.search(r"[1-9]", re.split(r"[eE]", text)[0])
    if not written_zero and not _SMALLEST_SINGLE <= abs(value) <= _LARGEST_SINGLE:
        raise ValueError(f"cannot be {shorten(text)}: the engine's parser takes numbers of single precision only")
    return value


def _number(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"expects numbers, not {quoted(text)}")
    value = _single(text)
    if value < 0:
        raise ValueError(f"cannot be {shorten(text)}: a share is 0 or more")
    return value


def _parts(text: str) -> list[str]:
    """Return what stands between commas and slashes; like the engine's splitter, nothing for a separator at the end."""
    parts = re.split(r"[,/]+", text)
    return parts[:-1] if len(parts) > 1 and not parts[-1] else parts


def _margins(parts: Sequence[str]) -> list[int]:
    """Return the MiB of ``--fit-target``."""
    if len(parts) > MOST_SHARES:
        raise ValueError(f"has {len(parts)} values, and the engine takes {MOST_SHARES} at most")
    found = [_whole(part) for part in parts]
    if min(found) < 0:
        raise ValueError(f"cannot be {min(found)}: it is MiB to leave free, 0 or more")
    return found


def _csv_row(text: str) -> list[str]:
    """Return the fields of a line of CSV as the engine reads it: a quote inside quotes is written twice."""
    fields, field, inside, index = [], "", False, 0
    while index < len(text):
        char = text[index]
        if char == '"' and inside and text[index + 1 : index + 2] == '"':
            field += char
            index += 1
        elif char == '"' and (inside or not field):
            inside = not inside
        elif char == "," and not inside:
            fields.append(field)
            field = ""
        else:
            field += char
        index += 1
    return [*fields, field]


def _file(text: str) -> str:
    if not text:
        raise ValueError("has an empty path")
    return text


def _scaled_file(text: str) -> str:
    path, colon, scale = text.partition(":")
    if not colon or ":" in scale:
        raise ValueError(f"expects FILE:SCALE, not {quoted(text)}")
    _check_number(scale)
    return _file(path)


def _check_number(text: str) -> None:
    """Raise ValueError where ``std::stof`` throws: it reads what it can from the front."""
    if re.match(r"\s*[+-]?(inf|nan)", text, re.IGNORECASE):
        return
    found = _NUMBER.match(text[:80].lstrip())
    if found is None:
        raise ValueError(f"expects a number, not {quoted(text)}")
    _single(found[0])


#: Types of ``--override-kv``; the parser takes any text for a number and only two words for a truth value.
_METADATA_TYPES = ("int", "float", "bool", "str")


def _metadata(text: str) -> str:
    key, equals, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not equals or not colon or kind not in _METADATA_TYPES:
        raise ValueError(f"expects KEY=TYPE:VALUE with a type of {', '.join(_METADATA_TYPES)}, not {quoted(text)}")
    if len(key.encode(errors="surrogateescape")) > 127:
        raise ValueError(f"takes keys of 127 bytes at most, not {quoted(key)}")
    if kind == "bool" and value not in ("true", "false"):
        raise ValueError(f"expects true or false for {quoted(key)}, not {quoted(value)}")
    if kind == "str" and len(value.encode(errors="surrogateescape")) > 127:
        raise ValueError(f"takes texts of 127 bytes at most for {quoted(key)}")
    return text


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
        raise ValueError(f"expects pattern=device, not {quoted(text)}")
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
                    raise ValueError(f"expects on or off, not {quoted(text)}")
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
    reading = _Reading(version=version, program=program, fork=fork, given=given is not None)
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


#: Since when --lora-scaled takes FILE:SCALE for certain; builds before it took two values, FILE SCALE.
SCALE_IN_VALUE = "0.5.0"


def _as_field(path: str) -> str:
    return f'"{path}"' if "," in path else path


def _looks_like_flag(text: str) -> bool:
    return text.startswith("-") and text != "-1"


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
        if name in OPTIONAL_VALUE and wanted and (index + 1 >= len(argv) or _looks_like_flag(argv[index + 1])):
            return index + 1
        if index + wanted >= len(argv) + (0 if wanted else 1):
            reading.complain(f"{name} needs {'a value' if wanted == 1 else f'{wanted} values'}", where)
        for text in argv[index + 1 : index + 1 + wanted] if inline is None else [inline]:
            try:
                _check_silent(reading, name, text)
            except ValueError as error:
                reading.complain(f"{name} {error}", where)
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
        if flag.kind == "onoff" and not flag.choices and (following is None or _looks_like_flag(following)):
            reading.take(flag, "on", where)  # versions before the three-way flag took no value
            if reading.given and reading.fork == history.UPSTREAM and history.follows("flash-by-default", reading.fork, reading.version):
                since = shown(history.CHANGES["flash-by-default"][history.UPSTREAM].since or "")
                reading.complain(f"{name} needs a value: on, off or auto; it took none before {since}", where)
            return index + 1
        if following is None:
            reading.complain(f"{name} needs a value", where)
            return index + 1
        inline, step = following, 2
        if flag.kind == "scaled" and not version_in(reading.version, SCALE_IN_VALUE, None) and index + 2 < len(argv) and _NUMBER.fullmatch(argv[index + 2]):
            inline, step = f"{_as_field(following)}:{argv[index + 2]}", 3
    else:
        step = 1
    if flag.programs and reading.program not in flag.programs:
        reading.complain(f"{name} is not a flag of {reading.program}; it belongs to {', '.join(flag.programs)}", where)
    try:
        reading.take(flag, convert(flag, inline), where)
    except ValueError as error:
        reading.complain(f"{name} {error}", where)
    return index + step


def _check_silent(reading: _Reading, name: str, text: str) -> None:
    """Raise ValueError at what the engine's parser throws at in the value of a flag without bearing on memory."""
    if name in SILENT_NUMBERS:
        _check_number(text)
    elif name in SILENT_COUNTS:
        value = _leading_whole(text)
        if value is None or not fits_counter(value):
            raise ValueError(f"expects a whole number of 32 bits, not {quoted(text)}")
        if name in SILENT_RANGES and reading.fork == history.UPSTREAM and version_in(reading.version, RANGES_SINCE, None):
            low, high = SILENT_RANGES[name]
            if value < low or (high is not None and value > high):
                raise ValueError(f"cannot be {value}: it is {f'{low} or more' if high is None else f'from {low} to {high}'}")
    elif name in SILENT_UNSIGNED:
        value = _leading_whole(text)
        if value is None or abs(value) >= 2**64:
            raise ValueError(f"expects a whole number of 64 bits, not {quoted(text)}")
    elif name in SILENT_WORDS and reading.fork == history.UPSTREAM and text not in SILENT_WORDS[name]:
        words = SILENT_WORDS[name]
        wanted = "on, off or auto" if words == THREE_WAY else f"one of {', '.join(words)}"
        raise ValueError(f"expects {wanted}, not {quoted(text)}")


def _leading_whole(text: str) -> int | None:
    """Return the whole number at the front of a text, as ``std::stoi`` reads it; None: there is none."""
    found = re.match(r"\s*([+-]?[0-9]+)", text[:80])
    return int(found[1]) if found is not None else None


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
    _load_mode(values, reading)
    _empty_paths(values, reading)
    _sequences(values, reading)
    _follow_conversions(values, reading)
    for key, value in list(values.items()):
        knob = not key.startswith("option:")
        least, meaning = SMALLEST.get(key, (KNOB_TYPES.get(key, 0) if knob else None, ""))
        if least is not None and isinstance(value, int) and not isinstance(value, bool) and value < least:
            _out_of_range(reading, key, value, f"{least} or more" + (f" ({meaning})" if meaning else ""))
            values.pop(key)
    idle = values.get("option:sleep-idle-seconds")
    if isinstance(idle, int) and (idle == 0 or idle < -1):
        _out_of_range(reading, "option:sleep-idle-seconds", idle, "-1 (never) or 1 and more")
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


def _empty_paths(values: dict[str, Any], reading: _Reading) -> None:
    """An empty projector or draft model is none, as in the engine; without a model there is nothing to judge."""
    for key in ("model.mmproj", "model.draft"):
        if values.get(key) == "":
            values.pop(key)
    if values.get("model.path") == "":
        where = reading.places["model.path"]
        reading.complain(f"{where.flag or where.variable or 'model.path'} has an empty path", where)


def _out_of_range(reading: _Reading, key: str, value: int, allowed: str) -> None:
    where = reading.places[key]
    reading.complain(f"{where.flag or where.variable or key} cannot be {value}: it is {allowed}", where)


def _sequences(values: dict[str, Any], reading: _Reading) -> None:
    """Read ``-np`` as each program does: the server's parser throws at 0, and it picks the slots for less than that."""
    value = values.get("context.sequences")
    if not isinstance(value, int) or value > 0:
        return
    if reading.program == "llama-server":
        if value == 0 and history.follows("four-slots", reading.fork, reading.version):
            _out_of_range(reading, "context.sequences", value, "1 or more, or -1 (automatic)")
    elif value < -1:  # taken without a sign: 4294967289, and more than 256 are refused
        _out_of_range(reading, "context.sequences", value, "0 or more")
    values.pop("context.sequences")  # automatic, the same as not given; 0 sequences are made one


def _follow_conversions(values: dict[str, Any], reading: _Reading) -> None:
    """Give numbers outside their usual range the meaning they have in the engine (``src/llama-context.cpp``, 0.5.0)."""
    layers, batch, micro, main, most = (values.get(k) for k in ("layers.on_device", "context.batch", "context.micro_batch", "device.main", "vision.max_tokens"))
    if isinstance(layers, int) and layers < 0:
        values["layers.on_device"] = "auto" if layers == -1 else "all"
    if isinstance(batch, int) and batch < 0:
        batch = values["context.batch"] = 2**31 - 1  # taken without a sign it is beyond every context, and that is the limit
    if isinstance(micro, int) and micro <= 0:
        values["context.micro_batch"] = batch or DEFAULT_BATCH  # 0, and what is beyond the batch, mean the batch
    if isinstance(most, int) and most <= 0:
        values.pop("vision.max_tokens")  # the model's own
    if isinstance(main, int) and main < 0:
        values.pop("device.main")
        if values.get("layers.split") == "none":  # no device at all
            values["device.ids"] = []
            reading.places["device.ids"] = reading.places["device.main"]


#: Tokens of ``-b`` when nothing is said.
DEFAULT_BATCH = 2048


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
    "int": (int,), "layers": (int, str), "flag": (bool,), "switch": (bool,), "list": (list,), "metadata": (list,), "ratios": (list,),
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
