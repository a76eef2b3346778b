"""Multi-head latent attention as an engine runs it, which is not always as the file was converted.

llama.cpp goes by the keys ``key_length_mla`` and ``value_length_mla`` of the file. ik_llama.cpp makes latent attention
of files without them, and full heads of files with them, by ``-mla``
(https://github.com/ikawrakow/ik_llama.cpp/pull/235 and /pull/260).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residency.budget import Remark

from .hparams import derived, hyper_parameters

if TYPE_CHECKING:
    from residency.checkpoint.model import Checkpoint

    from .context import Resolved
    from .hparams import HyperParameters
    from .settings import Settings

#: float32 bytes per head, cell and key element that a prompt on expanded heads takes beside the chunk of :func:`expanded`:
#: fitted to four published logs (ik_llama.cpp issues 437, 450 and 655), between 1 % below and 2 % above them.
FLOAT = 4


def adapted(checkpoint: Checkpoint, settings: Settings) -> HyperParameters:
    """Return the hyper-parameters with the cache the engine builds."""
    hyper = hyper_parameters(checkpoint)
    rank = checkpoint.integer("attention.kv_lora_rank")
    if settings.latent == "file" or not rank or hyper.mla is (settings.latent == "on"):
        return hyper
    store = derived(checkpoint)
    found: HyperParameters | None = store.get(("latent", settings.latent))
    if found is None:
        if settings.latent == "on":
            turned = checkpoint.integer("rope.dimension_count")
            found = replace(hyper, mla=True, head_k=rank + turned, head_v=rank, heads_kv=(1,) * hyper.layers_all)
        else:
            key, value = head_sizes(checkpoint)
            found = replace(hyper, mla=False, head_k=key, head_v=value, heads_kv=hyper.heads)
        store["latent", settings.latent] = found
    return found


def head_sizes(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the elements of one full key head and one full value head."""
    return (
        checkpoint.integer("attention.key_length_mla") or checkpoint.integer("attention.key_length"),
        checkpoint.integer("attention.value_length_mla") or checkpoint.integer("attention.value_length"),
    )


def refusals(checkpoint: Checkpoint, settings: Settings) -> tuple[Remark, ...]:
    """Return why the engine cannot run the file's attention: it was converted for latent attention alone."""
    if settings.latent != "off" or not hyper_parameters(checkpoint).mla:
        return ()
    if any(t.name.endswith("attn_kv_b.weight") for t in checkpoint.tensors):
        return ()
    text = "the file was converted for latent attention alone (it has no attn_kv_b), and this launch runs full heads"
    return (Remark(kind="impossible", code="latent-file", knob="model.path", message=text),)


def expanded(checkpoint: Checkpoint, hyper: HyperParameters, settings: Settings, resolved: Resolved, *, first: bool) -> int:
    """Return the peak of a prompt computed on heads expanded from the latent cache, bytes.

    As many heads as ``-amb`` allows are expanded to float32 at once, then to half precision. On the first device the
    float32 mask still stands when attention begins, and is larger than that chunk for a large micro-batch.
    """
    if not settings.latent_expanded or not hyper.mla or not checkpoint.integer("attention.kv_lora_rank"):
        return 0
    key, value = head_sizes(checkpoint)
    heads = max(hyper.heads, default=0)
    cells, tokens = resolved.n_ctx_seq * resolved.streams, min(resolved.n_ctx, resolved.n_ubatch)
    turned = checkpoint.integer("rope.dimension_count")
    whole = heads * (key - turned + value) * cells * FLOAT
    chunk = min(whole, max(settings.scores_cap_bytes, whole // max(heads, 1))) if settings.scores_cap_bytes else whole
    mask = cells * tokens * 2
    return heads * key * cells * FLOAT + mask + max(chunk, 2 * mask if first else 0)
