"""Guards for engines that run inside a Python process, without importing them.

``llama_cpp_argv`` turns the keyword arguments of ``llama_cpp.Llama`` (llama-cpp-python) into the command line that
makes the same launch, ``xllamacpp_argv`` those of an xllamacpp parameter object; ``guarded`` wraps a constructor.

    from llama_cpp import Llama
    from residency.hooks.embedded import guarded

    model = guarded(Llama)(model_path="model.gguf", n_ctx=32768, n_gpu_layers=-1)   # raises LaunchVetoed

Keyword names: llama-cpp-python 0.3, ``llama_cpp/llama.py``; xllamacpp 0.2, ``CommonParams``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from residency.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: ggml type ids that llama-cpp-python takes for ``type_k`` and ``type_v``.
_CACHE_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}
#: ``split_mode`` numbers of the C API.
_SPLIT_MODES = {0: "none", 1: "layer", 2: "row", 3: "tensor"}


def _number(flag: str) -> Callable[[Any], list[str]]:
    return lambda value: [flag, str(int(value))]


def _when(flag: str, *, value: bool) -> Callable[[Any], list[str]]:
    return lambda given: [flag] if bool(given) is value else []


def _named(flag: str, names: Mapping[int, str], keyword: str, what: str) -> Callable[[Any], list[str]]:
    def words(value: Any) -> list[str]:
        name = names.get(int(value))
        if name is None:
            raise InputError(f"{keyword}={value} is not a {what} of the engine")
        return [flag, name]

    return words


_LLAMA: Mapping[str, Callable[[Any], list[str]]] = {
    "model_path": lambda value: ["-m", str(value)],
    "n_ctx": _number("-c"),
    "n_batch": _number("-b"),
    "n_ubatch": _number("-ub"),
    "n_gpu_layers": lambda value: ["-ngl", "all" if int(value) < 0 else str(int(value))],
    "split_mode": _named("-sm", _SPLIT_MODES, "split_mode", "split mode"),
    "main_gpu": _number("-mg"),
    "tensor_split": lambda value: ["-ts", ",".join(f"{float(v):g}" for v in value)],
    "flash_attn": lambda value: ["-fa", "on" if value else "off"],
    "type_k": _named("-ctk", _CACHE_TYPES, "type_k", "cache type"),
    "type_v": _named("-ctv", _CACHE_TYPES, "type_v", "cache type"),
    "offload_kqv": _when("-nkvo", value=False),
    "op_offload": _when("--no-op-offload", value=False),
    "swa_full": _when("--swa-full", value=True),
    "embedding": _when("--embedding", value=True),
    "lora_path": lambda value: ["--lora", str(value)],
}


def llama_cpp_argv(arguments: Mapping[str, Any]) -> list[str]:
    """Return the command line equal to ``Llama(**arguments)``; keywords without bearing on memory are passed over.

    The library's own defaults are filled in: no layer on the device, 512 tokens, batches of 512, no --fit.
    """
    filled = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512, "n_gpu_layers": 0, "flash_attn": False, "swa_full": True, **arguments}
    if "model_path" not in arguments:
        raise InputError("Llama(...) is called without model_path")
    argv = ["llama-completion"]
    for name, words in _LLAMA.items():
        value = filled.get(name)
        if value is not None:
            argv += words(value)
    mapped, locked = filled.get("use_mmap", True), filled.get("use_mlock", False)
    argv += ["-lm", {(True, False): "mmap", (True, True): "mmap+mlock", (False, True): "mlock"}.get((bool(mapped), bool(locked)), "none")]
    return [*argv, "--fit", "off"]


#: Attributes of xllamacpp's CommonParams, dotted; the rest has no bearing on memory.
_XLLAMACPP: Mapping[str, Callable[[Any], list[str]]] = {
    "model.path": lambda value: ["-m", str(value)] if value else [],
    "n_ctx": lambda value: ["-c", str(int(value))] if int(value) else [],
    "n_parallel": _number("-np"),
    "n_batch": _number("-b"),
    "n_ubatch": _number("-ub"),
    "n_gpu_layers": lambda value: ["-ngl", str(int(value))] if int(value) >= 0 else [],
    "main_gpu": _number("-mg"),
    "no_kv_offload": _when("-nkvo", value=True),
    "swa_full": _when("--swa-full", value=True),
    "embedding": _when("--embedding", value=True),
    "mmproj.path": lambda value: ["--mmproj", str(value)] if value else [],
}


def xllamacpp_argv(parameters: Any) -> list[str]:
    """Return the server command line equal to an xllamacpp parameter object; attributes it lacks are passed over."""
    argv = ["llama-server"]
    for path, words in _XLLAMACPP.items():
        value = parameters
        for part in path.split("."):
            value = getattr(value, part, None)
        if value is not None:
            argv += words(value)
    if "-m" not in argv:
        raise InputError("the parameters name no model")
    return argv


def guarded(constructor: Callable[..., Any], *, argv: Callable[[Mapping[str, Any]], list[str]] = llama_cpp_argv, **options: Any) -> Callable[..., Any]:
    """Return the constructor behind a guard: raises LaunchVetoed before it is called unless the launch is allowed.

    Args:
        constructor: called with the same arguments when the launch is allowed. Positional arguments: the first is
            the model path, as in ``Llama(path)``.
        argv: turns keyword arguments into a command line.
        options: engine, machine, policy and the rest of :func:`residency.validate`.
    """

    @functools.wraps(constructor)
    def call(*positional: Any, **arguments: Any) -> Any:
        from residency.api import guard

        named = {**({"model_path": positional[0]} if positional else {}), **arguments}
        guard(argv(named), **{"engine": "llama.cpp", **options})
        return constructor(*positional, **arguments)

    return call
