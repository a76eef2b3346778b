"""What changed between the builds of llama.cpp and of its fork ik_llama.cpp, as data with evidence.

A law that a version does not follow yet, or no longer, is a row here; :func:`follows` is its only reader. Build numbers
of pull requests are those of the day they were merged, by :data:`BUILDS`, so a row may be off by some builds.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from residency.engines.base import version_in

if TYPE_CHECKING:
    from collections.abc import Mapping

UPSTREAM, IK = "llama.cpp", "ik_llama.cpp"


class Change(NamedTuple):
    """Since when an engine follows a law; None: it never has."""

    since: str | None
    evidence: str


#: Laws by name. What llama.cpp 0.5.0 does is the state after every change of its column.
CHANGES: Mapping[str, Mapping[str, Change]] = {
    # The server's --fit leaves room for the image and sound encoders on their device.
    "fit-counts-encoders": {
        UPSTREAM: Change("0.5.0", "tools/server/server-context.cpp of 0.5.0; the builds before it were not looked into"),
        IK: Change(None, "it has no --fit"),
    },
    # Every layer is offloaded unless -ngl says otherwise; before, none.
    "all-layers": {
        UPSTREAM: Change("0.0.6240", "default of -ngl, summer 2025"),
        IK: Change(None, "its README: -ngl is given in every example; the default stays 0"),
    },
    # The output layer is the first unit of -ngl; before, the last, so that -ngl equal to the blocks leaves it on the CPU.
    "output-first": {
        UPSTREAM: Change("0.0.7450", "https://github.com/ggml-org/llama.cpp/pull/18148"),
        IK: Change(None, "31 of 94 layers on the host with -ngl 63: https://github.com/ikawrakow/ik_llama.cpp/issues/437"),
    },
    # The server starts four slots with one shared cache.
    "four-slots": {
        UPSTREAM: Change("0.0.7000", "https://github.com/ggml-org/llama.cpp/pull/16736"),
        IK: Change(None, "n_slots=1 in its logs"),
    },
    # A cache per sequence; before, all sequences share one, and -c is its size.
    "streams": {
        UPSTREAM: Change("0.0.5913", "https://github.com/ggml-org/llama.cpp/pull/14363"),
        IK: Change(None, "one llama_kv_cache, src/llama.cpp"),
    },
    # Flash attention is decided by the engine when nothing is said; before, off.
    "flash-by-default": {
        UPSTREAM: Change("0.0.6325", "https://github.com/mybigday/llama.node/pull/102: flash_attn_type since b6325"),
        IK: Change("0.0.3950", "https://github.com/ikawrakow/ik_llama.cpp/pull/863"),
    },
    # Sliding-window layers keep the window only; before, the whole context.
    "window-cache": {
        UPSTREAM: Change("0.0.5427", "https://github.com/ggml-org/llama.cpp/pull/13194"),
        IK: Change(None, "https://github.com/ikawrakow/ik_llama.cpp/issues/1607: every layer keeps the full context"),
    },
    # The context is a multiple of 256 cells; before, without flash attention, of 32.
    "cells-of-256": {
        UPSTREAM: Change("0.0.6980", "https://github.com/ggml-org/llama.cpp/pull/17046; until then https://github.com/ggml-org/llama.cpp/pull/7257"),
        IK: Change(None, "get_padding in src/llama.cpp"),
    },
    # Multi-head latent attention caches the latent, for files converted with it.
    "latent-cache": {
        UPSTREAM: Change("0.0.5130", "https://github.com/ggml-org/llama.cpp/pull/12801"),
        IK: Change("0.0.0", "-mla, https://github.com/ikawrakow/ik_llama.cpp/pull/235"),
    },
    # ... and keeps no values beside it; before, a row of values as well.
    "latent-without-values": {
        UPSTREAM: Change("0.0.7830", "https://github.com/ggml-org/llama.cpp/pull/19067"),
        IK: Change("0.0.0", "kv^T: not used, https://github.com/ikawrakow/ik_llama.cpp/issues/437"),
    },
    # The server reserves logits for its slots; before, for every token of a micro-batch.
    "slot-logits": {
        UPSTREAM: Change("0.0.9440", "https://github.com/ggml-org/llama.cpp/pull/23861"),
        IK: Change(None, "2502.00 MiB on the last card of https://github.com/ikawrakow/ik_llama.cpp/issues/437 are 4096 rows of logits"),
    },
    # A latent cache may be quantised where prompts run on expanded heads (-mla 2); before, it is float16 whatever is asked.
    "quantised-latent": {
        UPSTREAM: Change("0.0.0", "kv-cache types are what is asked for"),
        IK: Change("0.0.3620", "https://github.com/ikawrakow/ik_llama.cpp/pull/260: not yet in March 2025"),
    },
    # A cache tensor's rows are single heads, so that quantised rows shorter than 512 are padded; upstream pads whole rows.
    "cache-rows-per-head": {
        UPSTREAM: Change(None, "src/llama-kv-cache.cpp: three dimensions, a row of all heads first"),
        IK: Change("0.0.3600", "82.00 MiB in https://github.com/ikawrakow/ik_llama.cpp/issues/103, October 2024, are unpadded; 3038.02 MiB on the card and 3038.00 on the host for 31 layers: https://github.com/ikawrakow/ik_llama.cpp/issues/437"),
    },
    # ... and before that a cache tensor is one row, which needs no padding.
    "cache-rows-padded": {
        UPSTREAM: Change("0.0.0", "measured with 0.5.0; the builds with one-row tensors were not looked up"),
        IK: Change("0.0.3600", "see above"),
    },
    # Keys and values of a quantised cache are rotated before they are stored.
    "rotated-cache": {
        UPSTREAM: Change("0.0.8600", "https://github.com/ggml-org/llama.cpp/pull/21277 names its predecessor 21038"),
        IK: Change(None, "only with -khad"),
    },
    # Experts kept in host memory are computed on the device of their layer; before, all on the first device.
    "experts-on-own-device": {
        UPSTREAM: Change("0.0.0", "measured with 0.5.0; earlier builds were not measured"),
        IK: Change(None, "896.03 MiB of compute buffer on the second card of https://github.com/ikawrakow/ik_llama.cpp/issues/437: attention alone"),
    },
    # The attention mask comes to the device in half precision; before, as float32 and is converted there.
    "half-mask": {
        UPSTREAM: Change("0.0.10434", "measured; 12710.31 MiB in https://github.com/LostRuins/koboldcpp/issues/1882 are four float32 masks and one float16"),
        IK: Change(None, "1072.05 MiB on the host in https://github.com/ikawrakow/ik_llama.cpp/issues/437 are a float32 mask and the embeddings"),
    },
    # Every device converts the float32 mask for itself; before, the first one does and hands on the half-precision one.
    "mask-per-device": {
        UPSTREAM: Change("0.0.0", "equal buffers on both cards of a public log of 2026-07-11 with 4 GiB of mask"),
        IK: Change(None, "896.03 MiB on the second card of https://github.com/ikawrakow/ik_llama.cpp/issues/437 hold 512 MiB of mask"),
    },
    # The weighted sum over the chosen experts is one operation; before, one more tensor of their size.
    "expert-sum-in-one": {
        UPSTREAM: Change("0.0.0", "measured with 0.5.0; earlier builds were not measured"),
        IK: Change(None, "fitted to the logs of https://github.com/ikawrakow/ik_llama.cpp/issues/437 and /issues/629"),
    },
    # The pattern of --cpu-moe and --n-cpu-moe knows experts whose gate and up projections are one tensor.
    "fused-gate-in-pattern": {
        UPSTREAM: Change("0.0.8290", "https://github.com/ggml-org/llama.cpp/issues/20431: build 8284 misses them"),
        IK: Change(None, "not looked up"),
    },
    # The graphs are those that were measured: of 0.5.0 and build 10434; others are as far as their logs were compared.
    "graph-measured": {
        UPSTREAM: Change("0.0.10434", "compute buffers of 716 launches, and of seven with two local rpc servers"),
        IK: Change(None, "compute buffers of twelve published logs, 5 % below to 29 % above"),
    },
    # A placement override turns the copies for pipelining off.
    "no-copies-with-overrides": {
        UPSTREAM: Change("0.0.5450", "has_tensor_overrides() in src/llama-context.cpp, mid 2025"),
        IK: Change("0.0.3956", "https://github.com/ikawrakow/ik_llama.cpp/pull/879"),
    },
    # When the buffers with copies do not fit, the engine tries again without.
    "copies-fall-back": {
        UPSTREAM: Change("0.0.6850", "https://github.com/ggml-org/llama.cpp/pull/16748"),
        IK: Change("0.0.3956", "https://github.com/ikawrakow/ik_llama.cpp/pull/879"),
    },
    # A compute buffer larger than the back end's largest buffer is made of several; before, it is one allocation.
    "compute-in-chunks": {
        UPSTREAM: Change("0.0.6570", "https://github.com/ggml-org/llama.cpp/pull/15815"),
        IK: Change(None, "forked before"),
    },
    # The server keeps states of earlier prompts in host memory (--cache-ram).
    "prompt-cache": {
        UPSTREAM: Change("0.0.6720", "https://github.com/ggml-org/llama.cpp/pull/16391"),
        IK: Change("0.0.3980", "https://github.com/ikawrakow/ik_llama.cpp/pull/954"),
    },
    # The server keeps checkpoints of windows and recurrent states in host memory (--ctx-checkpoints).
    "context-checkpoints": {
        UPSTREAM: Change("0.0.6170", "https://github.com/ggml-org/llama.cpp/pull/15293"),
        IK: Change("0.0.3980", "after the prompt cache; no earlier log has them"),
    },
    # A split over remote devices keeps copies: build 10434 reserves none for them (measured), 0.5.0 does.
    "remote-copies": {
        UPSTREAM: Change("0.5.0", "measured with two local rpc servers"),
        IK: Change(None, "not measured"),
    },
}  # fmt: skip

#: Day -> build, from version lines of public logs and release names; between two days builds are spread evenly.
BUILDS: Mapping[str, tuple[tuple[str, int], ...]] = {
    UPSTREAM: (
        ("2023-08-19", 1000), ("2024-01-30", 2000), ("2024-08-13", 3580), ("2025-02-02", 4615), ("2025-02-20", 4726),
        ("2025-04-23", 5172), ("2025-05-20", 5427), ("2025-07-16", 5913), ("2025-08-30", 6325), ("2025-11-16", 7079),
        ("2025-11-27", 7166), ("2025-12-15", 7406), ("2026-03-11", 8284), ("2026-04-02", 8639), ("2026-05-22", 9272),
        ("2026-07-09", 9943), ("2026-08-16", 10437), ("2026-08-28", 10621),
    ),
    IK: (("2024-08-01", 3370), ("2025-05-23", 3705), ("2025-07-26", 3822), ("2025-10-31", 3956)),
}  # fmt: skip

#: Since which build an architecture can be loaded. A name that is not here is taken to be known to every build.
ARCHITECTURE_SINCE: Mapping[str, Change] = {
    "gemma3": Change("0.0.4879", "https://github.com/AOSC-Dev/aosc-os-abbs/pull/10063: first build with Gemma 3"),
    "qwen3": Change("0.0.5092", "https://github.com/ggml-org/llama.cpp/pull/12828; b5026 lacks it: https://github.com/SciSharp/LLamaSharp/issues/1173"),
    "qwen3moe": Change("0.0.5092", "https://github.com/ggml-org/llama.cpp/pull/12828"),
    "qwen3vl": Change("0.0.6880", "https://github.com/ggml-org/llama.cpp/pull/16780"),
    "qwen3vlmoe": Change("0.0.6880", "https://github.com/ggml-org/llama.cpp/pull/16780"),
    "qwen3next": Change("0.0.7186", "https://github.com/ggml-org/llama.cpp/pull/16095"),
    "qwen35": Change("0.0.7980", "https://github.com/ggml-org/llama.cpp/pull/19468"),
    "qwen35moe": Change("0.0.7980", "https://github.com/ggml-org/llama.cpp/pull/19468"),
    "gemma4": Change("0.0.8639", "https://github.com/ggml-org/llama.cpp/pull/21309, in b8639"),
}  # fmt: skip


@lru_cache(maxsize=512)
@lru_cache(maxsize=1024)
def follows(law: str, engine: str, version: str) -> bool:
    """Whether an engine follows a law of :data:`CHANGES` at a (normalised) version."""
    since = CHANGES[law][engine].since
    return since is not None and version_in(version, since, None)


def build_of(day: str, engine: str) -> int:
    """Return the build of a day, "2025-06" or "2025-06-15"; a month alone means its middle."""
    rows = [(_days(known), build) for known, build in BUILDS[engine]]
    wanted = _days(day)
    pairs = list(pairwise(rows))
    (day0, build0), (day1, build1) = next((pair for pair in pairs if wanted < pair[1][0]), pairs[-1])
    return max(1, build0 + (wanted - day0) * (build1 - build0) // (day1 - day0))


def _days(day: str) -> int:
    from datetime import date

    year, month, *rest = (int(part) for part in day.split("-"))
    return date(year, month, rest[0] if rest else 15).toordinal()
