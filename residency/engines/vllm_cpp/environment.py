"""Environment variables of vllm.cpp that move bytes, each with its own grammar. Data and one reader per grammar.

Source: the engine's environment reference and residency documents, August to October 2026. A variable
wins over the same setting in ``--offload-config``, which wins over the built-in default.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from .versions import DEVICE_LANE, FIT_CHECK, STREAMING

Grammar = Literal["switch", "first", "armed", "count", "digits", "natural", "text"]


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable: its name, the knob or option it sets, and how its text is read."""

    name: str
    target: str
    grammar: Grammar
    since: str | None = None
    default: Any = None
    json: str | None = None  # path in the vllm_cpp half of --offload-config

    @property
    def option(self) -> str:
        """Name of the variable as an engine option of a launch file: vt-gguf-mmap."""
        return self.name.lower().replace("_", "-")


# fmt: off
VARIABLES: tuple[Variable, ...] = (
    Variable("VT_GGUF_MMAP", "memory.load", "switch", default="mmap", json="mmap.enabled"),
    Variable("VT_GGUF_PREFAULT", "memory.prefault", "switch", default=True, json="mmap.prefault"),
    Variable("VT_MOE_EXPERT_STREAM", "experts.stream", "first", since=STREAMING, default=False, json="expert_stream.enabled"),
    Variable("VT_MOE_EXPERT_STREAM_SLOTS", "experts.slots", "count", since=STREAMING, default=64, json="expert_stream.slots"),
    Variable("VT_MOE_EXPERT_STREAM_SLOT_BYTES", "experts.slot_size", "count", since=STREAMING, json="expert_stream.slot_bytes"),
    Variable("VT_DEVICE_WEIGHT_BUDGET_BYTES", "option:vt-device-weight-budget-bytes", "digits", since=FIT_CHECK, json="device_fit.weight_budget_bytes"),
    Variable("VT_CPU_MOE", "option:vt-cpu-moe", "switch", since=FIT_CHECK, default=False, json="placement.cpu_moe"),
    Variable("VT_N_CPU_MOE", "experts.on_host", "natural", since=FIT_CHECK, json="placement.n_cpu_moe"),
    Variable("VT_PLACEMENT_OVERRIDES", "option:vt-placement-overrides", "text", since=FIT_CHECK, json="placement.overrides"),
    Variable("VT_PLACEMENT_FIT", "option:vt-placement-fit", "switch", since=DEVICE_LANE, json="placement.fit"),
    Variable("VT_GGUF_KEEP_QUANT", "option:vt-gguf-keep-quant", "switch", default=True),
    Variable("VT_GGUF_KEEP_F16", "option:vt-gguf-keep-f16", "switch", default=True),
    Variable("VT_GGUF_NVFP4_FP4", "option:vt-gguf-nvfp4-fp4", "switch", default=True),
    Variable("VT_CPU_REF", "option:vt-cpu-ref", "switch", default=False),
    Variable("VT_QWEN35_GROUPED_MOE", "option:vt-qwen35-grouped-moe", "switch", default=True),
    Variable("VT_QWEN35_ALIAS_HOST_WEIGHTS", "option:vt-qwen35-alias-host-weights", "switch", since=DEVICE_LANE, default=True),
    Variable("VT_DSV4_EXL3_HOST_BUDGET", "option:vt-dsv4-exl3-host-budget", "armed", default=True),
    Variable("VT_KV_CACHE_F32", "option:vt-kv-cache-f32", "switch", default=False),
    Variable("VT_DEVICE_KV_CACHE", "kv.on_device", "switch", default=True),
    Variable("VT_GDN_STATE_BF16", "option:vt-gdn-state-bf16", "switch"),
    Variable("VT_MOE_HOST_FREE", "option:vt-moe-host-free", "switch", default=True),
    Variable("VT_RELEASE_HOST_WEIGHTS", "option:vt-release-host-weights", "switch", default=True),
    Variable("VT_DIRECT_DEVICE_LOAD", "option:vt-direct-device-load", "switch", default=True),
    Variable("VT_ASYNC_EXECUTOR", "option:vt-async-executor", "switch", default=False),
)
# fmt: on

BY_NAME = {variable.name: variable for variable in VARIABLES}
BY_OPTION = {variable.option: variable for variable in VARIABLES}

#: Documented once, read by nothing (its documentation row was removed).
UNREAD = {"VT_QWEN35_STAGE_MIN_FREE_FRAC": "the engine documents it and reads it nowhere (https://github.com/mudler/vllm.cpp/issues/2385)"}


def read_value(variable: Variable, text: str) -> Any:
    """Return the value a text has for the engine, or None when the engine ignores it.

    ``switch``: empty, 0, false, off mean off, everything else on. ``first``: only the first character counts;
    empty or 0 mean off, so "false" means on. ``armed``: only a leading 0 means off. ``count``: a positive
    whole number. ``digits``: decimal digits and nothing else, 0 included. ``natural``: a whole number, 0 included.
    """
    if variable.grammar == "text":
        return text or None
    if variable.grammar == "switch":
        value: Any = text.casefold() not in ("", "0", "false", "off")
    elif variable.grammar == "first":
        value = not (text == "" or text[0] == "0")
    elif variable.grammar == "armed":
        value = not text.startswith("0")
    elif re.fullmatch(r"[0-9]{1,19}", text) and int(text) < 2**63:
        value = int(text)
        if variable.grammar == "count" and value == 0:
            return None
    else:
        return None
    if variable.target == "memory.load":
        return "mmap" if value else "none"
    return value
