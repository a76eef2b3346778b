"""What a process takes on a device beside the engine's own buffers: driver context, kernel modules, pools.

The engine budgets none of this. Measured on H200s (driver 580, CUDA 13.0, llama.cpp 0.5.0, commit 0c1e570, two hundred
launches of 42 models read through the driver): 523 or 527 MiB when the back end starts, then 78 to 438 MiB at the first
full prompt batch, and without flash attention more as the context fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from residency.checkpoint.model import Role

from .context import pad, quantised_bytes
from .hparams import derived, hyper_parameters
from .settings import CUDA_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residency.checkpoint.model import Checkpoint

    from .hparams import HyperParameters
    from .layout import Layout
    from .settings import DeviceSpec, Settings

MIB = 2**20


class ContextRow(NamedTuple):
    """Driver context of a compute capability: MiB per multiprocessor, and the least, likely and most MiB of a card."""

    per_processor: float
    least: int
    likely: int
    most: int
    evidence: str


#: The context grows with the multiprocessors of the card (local memory of every resident thread).
#: Rows without a measurement of their own scale the nearest one; their bands say so.
CONTEXTS: Mapping[str, ContextRow] = {
    "6.1": ContextRow(3.0, 60, 150, 300, "scaled from 8.x"),
    "7.0": ContextRow(3.6, 200, 300, 450, "scaled from 8.x"),
    "7.5": ContextRow(3.0, 90, 170, 300, "scaled from 8.x"),
    "8.0": ContextRow(3.9, 300, 420, 550, "scaled from 9.0"),
    "8.6": ContextRow(3.1, 80, 256, 330, "256 MiB on an RTX 3090, 82 processors: github.com/invoke-ai/InvokeAI/issues/9413"),
    "8.7": ContextRow(3.1, 50, 150, 300, "scaled from 8.6"),
    "8.9": ContextRow(3.1, 80, 300, 480, "107 MiB on an RTX 4060 Ti, 34 processors: github.com/ggml-org/llama.cpp/pull/23604"),
    "9.0": ContextRow(3.99, 500, 527, 570, "523 and 527 MiB on H200s, 132 processors, measured"),
    "10.0": ContextRow(3.5, 400, 560, 750, "scaled from 9.0 and 12.0"),
    "12.0": ContextRow(2.95, 100, 350, 600, "555 MiB on an RTX PRO 6000, 188 processors: github.com/ggml-org/llama.cpp/pull/23604"),
    "12.1": ContextRow(3.0, 100, 200, 400, "scaled from 12.0"),
}  # fmt: skip
UNKNOWN_CONTEXT = ContextRow(3.2, 100, 300, 600, "typical of the cards above")

#: Multiprocessors by a part of the product name; vendors' data sheets. The first match counts.
PROCESSORS: tuple[tuple[str, int], ...] = (
    ("RTX PRO 6000", 188), ("RTX 5090", 170), ("RTX 5080", 84), ("RTX 5070 Ti", 70), ("RTX 5070", 48), ("RTX 5060 Ti", 36),
    ("RTX 6000 Ada", 142), ("RTX 4090 D", 114), ("RTX 4090", 128), ("RTX 4080 SUPER", 80), ("RTX 4080", 76),
    ("RTX 4070 Ti SUPER", 66), ("RTX 4070 Ti", 60), ("RTX 4070 SUPER", 56), ("RTX 4070", 46), ("RTX 4060 Ti", 34),
    ("RTX 4060", 24), ("L40S", 142), ("L40", 142), ("L4", 58), ("RTX A6000", 84), ("A40", 84), ("A10G", 80), ("A10", 72),
    ("RTX 3090 Ti", 84), ("RTX 3090", 82), ("RTX 3080 Ti", 80), ("RTX 3080", 68), ("RTX 3070", 46), ("RTX 3060", 28),
    ("A100", 108), ("A30", 56), ("V100", 80), ("T4", 40), ("RTX 2080 Ti", 68), ("RTX 2080", 46), ("H200", 132), ("H100 PCIe", 114),
    ("H100", 132), ("GH200", 132), ("B200", 148), ("P40", 30), ("GTX 1080 Ti", 28), ("GB10", 48), ("Orin", 16),
)  # fmt: skip

#: MiB at the first prompt whatever the model does: kernels loaded on first use, launch state, graphs. H200, measured.
KERNELS_MIB = (50, 66, 90)
#: MiB when a product goes through cuBLAS: 32 MiB of workspace (compute capability 9.0, else 4 MiB) and its kernels. H200, measured.
CUBLAS_MIB = (70, 98, 120)
#: ... by a second model of the process, which finds kernels loaded: the workspace and a handle, not measured.
SECOND_CUBLAS_MIB = (32, 44, 120)
CUBLAS_WORKSPACE_MIB = {9: 32}
CUBLAS_WORKSPACE_OTHER_MIB = 4
#: Partial sums of one matrix product spread over the whole card (``mmq.cuh``): processors x 128 x 128 floats.
PARTIAL_BYTES = 128 * 128 * 4
#: The pool takes memory from the driver in steps of this many bytes.
POOL_STEP = 2 * MIB
#: Host weights on their way to the device, MiB. H200, measured with half the blocks on the host.
OFFERED_MIB = (4, 20, 56)
#: The driver gives out memory in steps of 2 MiB, so every buffer loses up to one. Half of the launches whose context was
#: the longest that a model without slack (4) allows died by 2 to 8 MiB, so the likely figure lies on the safe side of that.
BUFFER_STEP_MIB = (1, 12, 20)
#: What adds up the cards' parts under split mode tensor, MiB per card: with the context, and more at the first prompt.
#: Two H200s, NCCL 2.28 without NVLS, measured. A build without NCCL falls back to the engine's own sums.
SUMS_MIB = {"nccl": ((0, 388, 450), (0, 408, 500)), "internal": ((0, 32, 48), (0, 0, 16)), "none": ((0, 0, 16), (0, 0, 16))}
#: ... and pools and kernels of tensors that are cut. Two H200s, measured: 14 to 42 MiB.
CUT_MIB = (4, 36, 60)
#: float types whose products are cuBLAS products at a large batch.
_FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeBytes:
    """Bytes beside the engine's buffers on one device; each a (certain, likely, at most) triple."""

    device: str
    context: tuple[int, int, int]  # when the back end starts
    first_prompt: tuple[int, int, int]  # at the first full prompt batch
    full_context: int  # more that the pool takes after that when the context is filled, at most
    sums: tuple[tuple[int, int, int], tuple[int, int, int]] = ((0, 0, 0), (0, 0, 0))  # what adds up the cards' parts: with the context, at the first prompt
    evidence: str


def processors_of(device: DeviceSpec) -> int | None:
    """Return the multiprocessors of a card known by its product name."""
    if device.model is None:
        return None
    folded = device.model.casefold()
    return next((count for name, count in PROCESSORS if name.casefold() in folded), None)


def driver_context(device: DeviceSpec) -> tuple[tuple[int, int, int], str]:
    """Return the driver context of a process on a device, in bytes, and where the figure comes from."""
    if device.context_bytes is not None:
        return (device.context_bytes,) * 3, "measured on this machine"
    if device.kind not in CUDA_KINDS:
        return (0, 64 * MIB, 256 * MIB), "no measurement for this kind of device"
    row = CONTEXTS.get(device.compute_capability or "", UNKNOWN_CONTEXT)
    processors = processors_of(device)
    if device.compute_capability == "9.0" or processors is None:
        return (row.least * MIB, row.likely * MIB, row.most * MIB), row.evidence
    likely = int(row.per_processor * processors)
    return (int(likely * 0.8) * MIB, likely * MIB, int(likely * 1.25) * MIB), f"{row.evidence}; {processors} processors"


def _uses_cublas(checkpoint: Checkpoint) -> bool:
    """Whether some block has a float matrix (a router, a float model), which goes to cuBLAS at a large batch."""
    store = derived(checkpoint)
    if "uses-cublas" not in store:
        store["uses-cublas"] = _has_float_matrix(checkpoint)
    return bool(store["uses-cublas"])


def _has_float_matrix(checkpoint: Checkpoint) -> bool:
    return any(
        t.layer is not None and len(t.shape) > 1 and t.type_name in _FLOAT_TYPES and t.shape[1] > 1
        and not t.name.endswith(("conv1d.weight", "ssm_a", "ape.weight", "norm.weight"))
        for t in checkpoint.tensors
    )  # fmt: skip


class _Operands(NamedTuple):
    """Bytes per token that the widest product takes from the pool."""

    quantised: int  # activations in 8 bits, for a quantised matrix
    plain: int  # activations and result in half precision, for a matrix of 16-bit floats; sorted by expert in single precision for experts


def _operands(checkpoint: Checkpoint, used: int) -> _Operands:
    """Return the pool bytes per token of the widest product of a block; experts take each token ``used`` times, one matrix per head each head's part."""
    store = derived(checkpoint)
    if "operands" not in store:
        quantised = plain = 0
        for t in checkpoint.tensors:
            if t.layer is None or len(t.shape) < 2 or not t.name.endswith(".weight"):
                continue
            times = 1 if len(t.shape) == 2 else used if t.role is Role.EXPERT else t.shape[2]
            if t.type_name not in _FLOAT_TYPES:
                quantised = max(quantised, quantised_bytes(t.shape[0], times))
            elif t.role is Role.EXPERT or t.type_name != "F32":
                plain = max(plain, (4 if t.role is Role.EXPERT else 2) * times * (t.shape[0] + t.shape[1]))
        store["operands"] = _Operands(quantised, plain)
    found: _Operands = store["operands"]
    return found


def _scores(hyper: HyperParameters, tokens: int, cells: int) -> int:
    """Pool bytes of attention without flash attention over so many cells: scores and result of a micro-batch in half precision."""
    heads = max(hyper.heads, default=0)
    return 2 * heads * tokens * (pad(cells, 256) + max(hyper.head_v, hyper.head_v_window))


def runtime(
    checkpoint: Checkpoint, settings: Settings, layout: Layout, devices: tuple[DeviceSpec, ...], *, second: bool = False
) -> tuple[RuntimeBytes, ...]:
    """Return what each device of a layout carries beside the engine's buffers.

    ``devices`` are those of the layout, in its order. ``second``: another model of this process has loaded the kernels already. A device that holds and computes nothing still pays its context:
    the engine starts the back end on every device it lists.
    """
    hyper = hyper_parameters(checkpoint)
    resolved = layout.resolved
    tokens = min(resolved.n_ctx, resolved.n_ubatch)
    float_products = _uses_cublas(checkpoint)
    counts = checkpoint.hparam("expert_used_count")
    used = max((c for c in (counts if isinstance(counts, tuple) else (counts,)) if isinstance(c, int)), default=0)
    operands = _operands(checkpoint, max(used, 1))
    plain = any(hyper.attends) and not resolved.flash and settings.kv_offload  # a cache on the host is attended there
    attention = _scores(hyper, tokens, min(resolved.n_ctx_seq, max(resolved.n_batch, tokens))) if plain else 0
    full = _scores(hyper, tokens, resolved.n_ctx_seq) if plain else 0
    found = []
    for spec, there in zip(devices, layout.devices, strict=True):
        context, evidence = driver_context(spec)
        if there.compute_likely <= 0 and not there.tensors:
            found.append(RuntimeBytes(device=spec.name, context=context, first_prompt=(0, 0, 0), full_context=0, evidence=evidence))
            continue
        processors = processors_of(spec) or 132
        partial = processors * PARTIAL_BYTES if spec.kind == "cuda" else 0
        pool = max(operands.quantised * tokens, operands.plain * tokens, quantised_bytes(hyper.embedding, tokens) + partial)
        first = pad(max(pool, attention), POOL_STEP)
        low, likely, high = (0, 0, 0) if second else _bytes(KERNELS_MIB)
        low += first // 2
        likely += first
        high += first * 2
        later = pad(max(pool, full), POOL_STEP) - first
        saved = _spared(spec)
        if float_products or plain:
            at_least, probably, at_most = _bytes(SECOND_CUBLAS_MIB if second else CUBLAS_MIB)
            low += at_least - min(saved, at_least)
            likely += probably - saved
            high += at_most - saved
        if layout.host.layers and settings.op_offload:
            low += OFFERED_MIB[0] * MIB
            likely += OFFERED_MIB[1] * MIB
            high += OFFERED_MIB[2] * MIB
        sums = ((0, 0, 0), (0, 0, 0))
        if settings.split_mode == "tensor" and len(devices) > 1 and spec.kind in CUDA_KINDS:
            low += CUT_MIB[0] * MIB
            likely += CUT_MIB[1] * MIB
            high += CUT_MIB[2] * MIB
            at_context, at_prompt = SUMS_MIB[settings.allreduce]
            sums = (_bytes(at_context), _bytes(at_prompt))
        low += BUFFER_STEP_MIB[0] * MIB
        likely += BUFFER_STEP_MIB[1] * MIB
        high += BUFFER_STEP_MIB[2] * MIB
        found.append(RuntimeBytes(device=spec.name, context=context, first_prompt=(low, likely, high), full_context=later, sums=sums, evidence=evidence))
    return tuple(found)


def beside_encoder(device: DeviceSpec, warm_up: int, largest: int) -> tuple[int, int, int]:
    """Return what the first image takes beside an encoder's buffers, and at most the largest: its context has a cuBLAS and a pool of its own.

    Measured on an H200 with sixteen encoders in thirty launches: 98 MiB and the pool of the widest product, 104 to 208 MiB in all, up to
    293 MiB after the largest image.

    Args:
        device: what the encoder runs on.
        warm_up: pool bytes of the widest product of the warm-up image.
        largest: the same of the largest image.
    """
    if device.kind not in CUDA_KINDS:
        return 0, 0, 0
    _, likely, high = (mib * MIB - _spared(device) for mib in CUBLAS_MIB)
    step = BUFFER_STEP_MIB[1] * MIB
    return 0, likely + pad(warm_up, POOL_STEP) + step, high + pad(largest, POOL_STEP) + 2 * step


def _spared(device: DeviceSpec) -> int:
    """Bytes of cuBLAS workspace that a card takes less than one of compute capability 9.0."""
    major = int((device.compute_capability or "9").split(".")[0])
    return (CUBLAS_WORKSPACE_MIB[9] - CUBLAS_WORKSPACE_MIB.get(major, CUBLAS_WORKSPACE_OTHER_MIB)) * MIB


def _bytes(mib: tuple[int, int, int]) -> tuple[int, int, int]:
    low, likely, high = mib
    return low * MIB, likely * MIB, high * MIB

