"""The JSON documents of vllm.cpp: ``--offload-config``, ``--kv-transfer-config``, ``--speculative-config``.

Every key at every level is known to the engine or refused by it, and so it is here, naming what is legal.
Absent is not default: a document sets only what it names.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

from residency.engines.reading import MOST_PROBLEMS
from residency.launch.sizes import LARGEST
from residency.text import clean

from .environment import VARIABLES

#: Legal keys of ``--offload-config``: nested tables, leaves are the types taken.
OFFLOAD: dict[str, Any] = {
    "offload_backend": str,
    "uva": {"cpu_offload_gb": (int, float), "cpu_offload_params": list},
    "prefetch": {"offload_group_size": int, "offload_num_in_group": int, "offload_prefetch_step": int, "offload_params": list},
    "vllm_cpp": {
        "mmap": {"enabled": bool, "prefault": bool},
        "expert_stream": {"enabled": bool, "slots": int, "slot_bytes": int},
        "device_fit": {"weight_budget_bytes": int},
        "placement": {"cpu_moe": bool, "n_cpu_moe": int, "overrides": list, "fit": bool},
    },
}
KV_TRANSFER = (
    "kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy", "kv_rank", "kv_parallel_size", "kv_ip",
    "kv_port", "kv_buffer_size", "kv_buffer_device", "engine_id",
)  # fmt: skip
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both", "producer", "consumer", "both")
SPECULATIVE = (
    "method", "num_speculative_tokens", "model", "prompt_lookup_min", "prompt_lookup_max", "draft_sample_method",
    "rejection_sample_method",
)  # fmt: skip
METHODS = ("mtp", "dflash", "dspark", "ngram", "draft_model")
_WORDS = {bool: "true or false", int: "a whole number", str: "a text", list: "a list", (int, float): "a number"}


def parse(text: str) -> dict[str, Any]:
    """Return the JSON object of a text; raise ValueError saying what is wrong with it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object")
    return found


def _problems(document: dict[str, Any], legal: dict[str, Any], at: str = "") -> list[str]:
    found: list[str] = []
    for key, value in document.items():
        kind = legal.get(key)
        if len(found) >= MOST_PROBLEMS:
            return [*found, "and there is more"]
        if kind is None:
            close = difflib.get_close_matches(key.replace("-", "_"), legal, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            found.append(f"has no key {clean(at + key)}; legal there: {', '.join(legal)}{hint}")
        elif isinstance(kind, dict):
            if isinstance(value, dict):
                found += _problems(value, kind, f"{at}{key}.")
            else:
                found.append(f"{at}{key} must be an object")
        elif not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            found.append(f"{at}{key} must be {_WORDS[kind]}")
        elif isinstance(value, int) and abs(value) > LARGEST:
            found.append(f"{at}{key} is more than the engine's counters hold")
    return found


def offload_problems(document: dict[str, Any]) -> list[str]:
    """Return everything the engine refuses in an offload document, before it looks at the model."""
    found = _problems(document, OFFLOAD)
    if found:
        return found
    own = document.get("vllm_cpp", {})
    stream, fit, placement = own.get("expert_stream", {}), own.get("device_fit", {}), own.get("placement", {})
    found += [f"vllm_cpp.expert_stream.{key} must be above 0" for key in ("slots", "slot_bytes") if stream.get(key, 1) <= 0]
    if fit.get("weight_budget_bytes", 0) < 0:
        found.append("vllm_cpp.device_fit.weight_budget_bytes must not be negative")
    if placement.get("n_cpu_moe", 0) < 0:
        found.append("vllm_cpp.placement.n_cpu_moe must not be negative")
    if placement.get("fit") and (placement.keys() & {"cpu_moe", "n_cpu_moe", "overrides"}):
        found.append("vllm_cpp.placement.fit excludes a placement by hand in the same document")
    if document.get("offload_backend", "auto") not in ("auto", "uva", "prefetch"):
        found.append("offload_backend must be auto, uva or prefetch")
    return found


def kv_transfer_problems(document: dict[str, Any]) -> list[str]:
    """Return what the engine refuses in a KV transfer document."""
    found = [f"has no key {clean(key)}; legal there: {', '.join(KV_TRANSFER)}" for key in document if key not in KV_TRANSFER][:MOST_PROBLEMS]
    if "kv_connector" not in document:
        found.append("needs kv_connector")
    if document.get("kv_role") not in KV_ROLES:
        found.append(f"needs kv_role, one of {', '.join(KV_ROLES[:3])}")
    return found


def speculative_problems(document: dict[str, Any]) -> list[str]:
    """Return what the engine refuses in a speculation document."""
    found = [f"has no key {clean(key)}; legal there: {', '.join(SPECULATIVE)}" for key in document if key not in SPECULATIVE][:MOST_PROBLEMS]
    if document.get("method") not in METHODS:
        found.append(f"needs method, one of {', '.join(METHODS)}")
    tokens = document.get("num_speculative_tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= LARGEST):
        found.append("num_speculative_tokens must be a whole number above 0")
    return found


def limit_problems(document: dict[str, Any]) -> list[str]:
    """Return what the engine refuses in --limit-mm-per-prompt."""
    return [
        f"{clean(key)} must be a whole number or an object with a count"
        for key, value in document.items()
        if not isinstance(value, dict) and (isinstance(value, bool) or not isinstance(value, int) or value < 0)
    ]


#: Option -> what checks it.
CHECKS = {
    "offload-config": offload_problems,
    "kv-transfer-config": kv_transfer_problems,
    "speculative-config": speculative_problems,
    "limit-mm-per-prompt": limit_problems,
}


def problems(option: str, text: str) -> list[str]:
    """Return everything wrong with the text of one of the JSON options."""
    try:
        return CHECKS[option](parse(text))
    except ValueError as error:
        return [str(error)]


def settings_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return what a sound offload document sets: knob or option -> value."""
    own = document.get("vllm_cpp", {})
    found: dict[str, Any] = {}
    for variable in VARIABLES:
        if variable.json is None:
            continue
        table, _, key = variable.json.partition(".")
        value = own.get(table, {}).get(key)
        if value is None:
            continue
        if variable.target == "memory.load":
            value = "mmap" if value else "none"
        elif isinstance(value, list):
            value = json.dumps(value)
        found[variable.target] = value
    return found


def speculation_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the knobs a sound speculation document sets."""
    found = {"speculation.kind": document.get("method"), "speculation.window": document.get("num_speculative_tokens")}
    if document.get("model"):
        found["option:speculative-model"] = document["model"]
    return {key: value for key, value in found.items() if value is not None}
