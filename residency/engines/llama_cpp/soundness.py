"""What llama.cpp refuses in a file before it places anything: names, counts and types it does not take.

Limits from ``src/llama-hparams.h`` and ``src/llama-model-loader.cpp``, llama.cpp 0.5.0 (0c1e570).
Checked before any formula runs, so that a hostile header cannot make the formulas allocate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.engines import soundness as shared
from residency.engines.base import version_in
from residency.engines.soundness import refuse

from . import history
from .hparams import ENGINE_ARCHITECTURES, derived

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from residency.budget import Remark
    from residency.checkpoint.model import Checkpoint

#: A model of any kind has these.
_NEEDED = ("block_count", "embedding_length")

#: Since when a tensor type exists (``ggml/include/ggml.h``); a lower bound for the newest.
TYPE_SINCE = {34: "0.0.3642", 35: "0.0.3642", 39: "0.0.6096", 40: "0.0.7600", 41: "0.0.7600", 42: "0.0.7600"}


#: Tensor type ids a fork added; their sizes are the gaps between offsets (``ggml.h`` of ik_llama.cpp: IQ3_K 138, IQ3_K_R4 338, ...).
FORK_TYPES: Mapping[str, range] = {history.IK: range(97, 400)}


def refusals(checkpoint: Checkpoint, version: str, engine: str = history.UPSTREAM) -> tuple[Remark, ...]:
    """Return why the engine would refuse the file; empty when it would not. Depends on the file and engine alone."""
    store = derived(checkpoint)
    key = ("refusals", engine, version)
    if key not in store:
        store[key] = _refusals(checkpoint, version, engine)
    found: tuple[Remark, ...] = store[key]
    return found


def _refusals(checkpoint: Checkpoint, version: str, engine: str) -> tuple[Remark, ...]:
    found = [*_architecture(checkpoint, version, engine)]
    if not found:
        found += [*shared.refusals(checkpoint)] or [*_experts(checkpoint)]
    found += _types(checkpoint, version, engine)
    return tuple(found)


def _architecture(checkpoint: Checkpoint, version: str, engine: str) -> Iterator[Remark]:
    arch = checkpoint.architecture
    if not arch:
        yield refuse("no-architecture", "the model file has no key general.architecture, so the engine cannot tell what it is")
    elif arch == "clip":
        yield refuse("projector-as-model", "this file is a projector (general.architecture is clip); it belongs to --mmproj, not to --model")
    elif arch not in ENGINE_ARCHITECTURES:
        missing = [key for key in _NEEDED if checkpoint.hparam(key) is None]
        if missing:
            yield refuse(
                "unknown-architecture",
                f"general.architecture is {arch!r}, which {engine} {version} does not know, and the file has no {arch}.{missing[0]}",
            )
    else:
        since = history.ARCHITECTURE_SINCE.get(arch) if engine == history.UPSTREAM else None
        if since is not None and not version_in(version, since.since, None):
            build = (since.since or "").removeprefix("0.0.")
            text = f"the architecture {arch} can be loaded since build {build}; this is {version.removeprefix('0.0.')}"
            yield refuse("architecture-too-new", text)
        for key in _NEEDED:
            if checkpoint.hparam(key) is None:
                yield refuse("missing-key", f"the model file has no key {arch}.{key}")
                return


def _experts(checkpoint: Checkpoint) -> Iterator[Remark]:
    """What ``src/llama-model.cpp``, load_hparams, asserts about the experts."""
    arch, count, used = checkpoint.architecture, checkpoint.integer("expert_count"), checkpoint.hparam("expert_used_count", 0)
    most = max(used, default=0) if isinstance(used, tuple) else used
    if not isinstance(most, int) or arch not in ENGINE_ARCHITECTURES:
        return
    if most > count:
        yield refuse("experts-used", f"{arch}.expert_used_count is {most}, and {arch}.expert_count {count}")
    elif count and not most:
        yield refuse("experts-used", f"{arch}.expert_count is {count}, and {arch}.expert_used_count is absent or 0")


def _types(checkpoint: Checkpoint, version: str, engine: str) -> Iterator[Remark]:
    said: set[int] = set()
    for tensor in checkpoint.tensors:
        if tensor.type_id in said:
            continue
        if tensor.type_id in FORK_TYPES.get(engine, ()):
            continue
        since = TYPE_SINCE.get(tensor.type_id) if engine == history.UPSTREAM else None
        if not tensor.sized:
            said.add(tensor.type_id)
            yield refuse(
                "unknown-tensor-type",
                f"{tensor.name} has the type {tensor.type_name} (id {tensor.type_id}), which {engine} {version} does not have",
            )
        elif since is not None and not version_in(version, since, None):
            said.add(tensor.type_id)
            yield refuse(
                "tensor-type-too-new",
                f"{tensor.name} has the type {tensor.type_name} (id {tensor.type_id}), which {engine} {version} does not have yet",
            )
