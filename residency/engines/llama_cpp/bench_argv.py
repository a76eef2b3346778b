"""llama-bench's command line: its flags take lists, and every combination is one run.

What is judged is the worst of them: the longest context, the largest batches, the most layers. The context is the
prompt, the generated tokens and the depth together (``tools/llama-bench/llama-bench.cpp``, 0.5.0).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from residency.engines import patterns
from residency.engines.reading import Reading, by_section
from residency.launch.knobs import Knobs
from residency.launch.model import Launch
from residency.text import clean, shorten
from residency.where import Where

from .argv import DEFAULT_BATCH, fits_counter, quoted, ratios
from .flags import ENVIRONMENT, FALSE, KV_TYPES, TRUE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def _numbers(text: str) -> list[int]:
    """Return the numbers of "512", "256,512", and the ends of ranges "0-512", "128-1024*2"."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(-?[0-9]{1,12})(?:-([0-9]{1,12})(?:[+*][0-9]{1,6})?)?", part)
        if match is None:
            if re.fullmatch(r"-?[0-9]+", part):
                raise ValueError(f"cannot be {shorten(part)}: the engine's parser takes whole numbers of 32 bits only")
            raise ValueError(f"expects numbers, not {quoted(part)}")
        value = int(match[2] or match[1])
        if not fits_counter(value):
            raise ValueError(f"cannot be {value}: the engine's parser takes whole numbers of 32 bits only")
        found.append(value)
    return found


def _largest(text: str) -> int:
    return max(_numbers(text))


def _micro(text: str) -> int:
    """Return the largest micro-batch; 0 stands for the batch, which is the largest of all."""
    numbers = _numbers(text)
    return 0 if min(numbers) <= 0 else max(numbers)


def _switches(text: str) -> list[bool]:
    words = [part.casefold() for part in text.split(",")]
    if any(word not in TRUE and word not in FALSE for word in words):
        raise ValueError(f"expects 0 or 1, not {quoted(text)}")
    return [word in TRUE for word in words]


def _flash(text: str) -> str:
    words = [part.casefold() for part in text.split(",")]
    if any(word not in (*TRUE, *FALSE, "auto") for word in words):
        raise ValueError(f"expects on, off or auto, not {quoted(text)}")
    return "off" if any(word in FALSE for word in words) else "on" if "auto" not in words else "auto"


def _cache_type(text: str) -> str:
    parts = text.split(",")
    for part in parts:
        if part not in KV_TYPES:
            raise ValueError(f"expects one of {', '.join(KV_TYPES)}, not {quoted(part)}")
    return min(parts, key=KV_TYPES.index)  # the table begins with the widest types


def _first(text: str) -> str:
    return text.split(",", maxsplit=1)[0]


def _ratios(text: str) -> list[float]:
    return ratios(re.split(r"[/;]", _first(text)))


def _overrides(text: str) -> list[dict[str, str]]:
    found = []
    for part in text.split(";"):
        pattern, separator, device = part.rpartition("=")
        if not separator or not pattern or not device:
            raise ValueError(f"expects pattern=device, not {quoted(part)}")
        wrong = patterns.reason(pattern)
        if wrong is not None:
            raise ValueError(f"has a pattern that is not a regular expression ({wrong}): {patterns.shown(pattern)!r}")
        found.append({"pattern": pattern, "device": device})
    return found


#: Flag names -> what they set, and how their text is read. "prompt", "generate" and "depth" make up the context.
_FLAGS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "-m --model": ("model.path", _first), "-p --n-prompt": ("prompt", _largest), "-n --n-gen": ("generate", _largest),
    "-d --n-depth": ("depth", _largest), "-b --batch-size": ("context.batch", _largest), "-ub --ubatch-size": ("context.micro_batch", _micro),
    "-ctk --cache-type-k": ("kv.key_type", _cache_type), "-ctv --cache-type-v": ("kv.value_type", _cache_type),
    "-ngl --n-gpu-layers": ("layers.on_device", _largest), "-ncmoe --n-cpu-moe": ("experts.on_host", lambda t: min(_numbers(t))),
    "-sm --split-mode": ("layers.split", _first), "-mg --main-gpu": ("device.main", _largest), "-ts --tensor-split": ("layers.ratio", _ratios),
    "-fa --flash-attn": ("context.flash_attention", _flash), "-ot --override-tensor": ("layers.overrides", _overrides),
    "-nkvo --no-kv-offload": ("kv.on_device", lambda t: not all(_switches(t))),
    "-mmp --mmap": ("memory.load", lambda t: "mmap" if all(_switches(t)) else "none"),
    "-lm --load-mode": ("memory.load", _first), "-embd --embeddings": ("option:embedding", lambda t: any(_switches(t))),
    "-nopo --no-op-offload": ("option:op-offload", lambda t: not any(_switches(t))), "-dev --device": ("device.ids", lambda t: _first(t).split("/")),
    "-pg": ("pair", lambda t: sum(_numbers(t))),
}  # fmt: skip
_BY_NAME = {name: entry for names, entry in _FLAGS.items() for name in names.split()}
_INFORMATION = ("-h", "--help", "--list-devices")
_VALUELESS = ("-v", "--verbose", "--progress", "--no-warmup")
_SILENT = ("-r", "--repetitions", "-o", "--output", "-oe", "--output-err", "-t", "--threads", "--prio", "--delay", "-C", "--cpu-mask", "--cpu-strict",
           "--poll", "--numa", "-rpc", "--rpc", "-hf", "-hff", "--hf-repo", "--hf-file", "-hft", "-fitt", "-fitc")  # fmt: skip
#: What it runs when nothing is said: 512 tokens of prompt, 128 generated.
_PROMPT, _GENERATED = 512, 128


def read_bench(argv: Sequence[str], environ: Mapping[str, str], *, version: str, given: str | None, fork: str) -> Launch:
    """Return the Launch of the largest run of a llama-bench command line. Raises InputError with every problem."""
    reading = Reading(version=version)
    index = 1
    while index < len(argv):
        typed = argv[index]
        where = Where(source="argv", argv_index=index, flag=typed[:80])
        index += 1
        if typed in _INFORMATION:
            reading.starts_nothing = True
            break
        if typed in _VALUELESS:
            continue
        entry = _BY_NAME.get(typed)
        if entry is None and typed not in _SILENT:
            reading.complain(f"llama-bench has no flag {clean(typed)}", where, name=typed, known=(*_BY_NAME, *_SILENT))
            if index < len(argv) and not argv[index].startswith("-"):
                index += 1
            continue
        if index >= len(argv):
            reading.complain(f"{typed} needs a value", where)
            break
        if entry is not None:
            target, convert = entry
            try:
                reading.put(target, convert(argv[index]), where)
            except ValueError as error:
                reading.complain(f"{typed} {error}", where)
        index += 1
    return _launch(reading, argv, environ, given, fork)


def _launch(reading: Reading, argv: Sequence[str], environ: Mapping[str, str], given: str | None, fork: str) -> Launch:
    values = reading.values
    prompt, generated = values.pop("prompt", _PROMPT), values.pop("generate", _GENERATED)
    length = max(prompt, generated, values.pop("pair", 0)) + values.pop("depth", 0)
    values["context.length"] = length
    reading.places.setdefault("context.length", reading.places.get("prompt", Where(source="default")))
    if values.get("layers.on_device", 0) < 0:
        values["layers.on_device"] = "all"
    if values.get("context.micro_batch") == 0:
        values["context.micro_batch"] = values.get("context.batch", DEFAULT_BATCH)
    sections, options = by_section(values, given)
    knobs = Knobs()
    try:
        knobs = Knobs.model_validate(sections)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            knob = ".".join(str(part) for part in detail["loc"][:2])
            where = reading.places.get(knob, Where(source="default"))
            reading.complain(f"{where.flag or knob} cannot be {clean(shorten(str(detail['input'])))}", where)
    reading.finish()
    return Launch(
        engine=fork, version=given, knobs=knobs, options=options, places=reading.places, program="llama-bench", argv=tuple(argv),
        environ={k: environ[k] for k in ENVIRONMENT if k in environ}, name="llama-bench",
        starts_nothing=reading.starts_nothing,
    )  # fmt: skip
