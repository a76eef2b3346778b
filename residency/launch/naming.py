"""Names of knobs: how they are written, and which one was probably meant."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from residency.text import clean, shorten

from .knobs import SECTIONS, TensorOverride

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_LONGEST = 64  # characters of a name that are compared; the longest legal one has 22

# What other programs call a knob, in lower case with underscores.
# fmt: off
_ELSEWHERE = {
    "ctx": "context.length", "ctx_size": "context.length", "n_ctx": "context.length", "num_ctx": "context.length",
    "max_model_len": "context.length", "max_seq_len": "context.length",
    "parallel": "context.sequences", "n_parallel": "context.sequences", "slots": "context.sequences",
    "batch_size": "context.batch", "n_batch": "context.batch",
    "ubatch": "context.micro_batch", "ubatch_size": "context.micro_batch", "n_ubatch": "context.micro_batch",
    "flash_attn": "context.flash_attention", "swa_full": "context.full_window", "kv_unified": "context.unified",
    "ngl": "layers.on_device", "gpu_layers": "layers.on_device", "n_gpu_layers": "layers.on_device",
    "split_mode": "layers.split", "tensor_split": "layers.ratio", "override_tensor": "layers.overrides",
    "main_gpu": "device.main", "devices": "device.ids",
    "cache_type_k": "kv.key_type", "type_k": "kv.key_type", "cache_type_v": "kv.value_type", "type_v": "kv.value_type",
    "kv_offload": "kv.on_device",
    "cpu_moe": "experts.on_host", "n_cpu_moe": "experts.on_host",
    "model_draft": "model.draft", "lora": "model.adapters", "file": "model.path",
    "mmap": "memory.load", "mlock": "memory.load",
}
_SECTIONS_ELSEWHERE = {"gpu": "device", "devices": "device", "cache": "kv", "ctx": "context", "moe": "experts"}
# fmt: on


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as a TOML reader would write it: ``layers.overrides[0]."odd key"``."""
    shown = ""
    for part in path:
        if isinstance(part, int):
            shown += f"[{part}]"
        else:
            shown += "." if shown else ""
            shown += shorten(part) if _BARE.fullmatch(part) else quoted(part)
    return shown


def quoted(text: str) -> str:
    """Return a text in quotes, short and safe for a terminal."""
    return '"' + clean(shorten(text)).replace('"', '\\"') + '"'


def closest(name: str, legal: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the legal name most like ``name``, or None."""
    from difflib import get_close_matches

    found = get_close_matches(name[:_LONGEST], legal, n=1, cutoff=cutoff)
    return found[0] if found else None


def unknown(path: Sequence[str | int], *, is_table: bool = False) -> tuple[str, str | None, str | None]:
    """Describe a key that does not exist.

    Returns the message, a hint, and the section or knob that was probably meant.
    """
    *parents, key = path
    name = str(key)
    if is_table and not parents:
        guess = _SECTIONS_ELSEWHERE.get(name.lower()) or closest(name.lower(), SECTIONS)
        hint = f"did you mean [{guess}]?" if guess else f"sections are {', '.join(SECTIONS)}"
        return f"[{dotted(path)}] is not a section", hint, guess
    message = f"{dotted(path)} is not a knob"
    if len(parents) > 1:  # inside an override
        guess = closest(name, TensorOverride.model_fields)
        legal = ", ".join(TensorOverride.model_fields)
        return message, f"did you mean {dotted([*parents, guess])}?" if guess else f"an override has {legal}", None
    section = str(parents[0]) if parents else None
    guess = _knob_like(section, name)
    if guess:
        return message, f"did you mean {guess}?", guess.partition(" or ")[0]
    if section == "engine":
        return message, "an engine's own settings stand under [engine.options]", None
    if section in SECTIONS:
        return message, f"[{section}] has {', '.join(SECTIONS[section].model_fields)}", None
    return message, f"sections are {', '.join(SECTIONS)}", None


def _knob_like(section: str | None, name: str) -> str | None:
    """Return the knob meant: the same key of another section, another program's word for it, a slip of the pen."""
    folded = name.strip("-").replace("-", "_").lower()
    here = SECTIONS[section].model_fields if section in SECTIONS else {}
    if folded in here:
        return f"{section}.{folded}"
    near = closest(folded, here, cutoff=0.75)
    if near:
        return f"{section}.{near}"
    if section not in SECTIONS and section is not None:
        meant = _SECTIONS_ELSEWHERE.get(section.lower()) or closest(section.lower(), SECTIONS)
        return _knob_like(meant, name) if meant else _knob_like(None, name)
    same = [f"{other}.{folded}" for other, model in SECTIONS.items() if folded in model.model_fields]
    if same:
        return " or ".join(same)
    if folded in _ELSEWHERE:
        return _ELSEWHERE[folded]
    near = closest(folded, here)
    if near:
        return f"{section}.{near}"
    keys = {key: f"{other}.{key}" for other, model in SECTIONS.items() for key in model.model_fields}
    near = closest(folded, keys, cutoff=0.75)
    return keys[near] if near else None
