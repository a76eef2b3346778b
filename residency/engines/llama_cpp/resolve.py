"""From a Launch to the settings llama.cpp works with: programs, versions and their defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from . import history
from .context import CELL_STEP
from .settings import EXPERTS, EXPERTS_SPLIT, DeviceSpec, Override, Settings, expert_overrides

if TYPE_CHECKING:
    from residency.launch.model import Launch
    from residency.machine.model import Device, Machine

#: Programs that reserve logits for a whole batch; the server and the chat client only for their slots
#: (``tools/server/server-context.cpp``, 0.5.0).
BATCH_OUTPUTS = ("llama-fit-params", "llama-completion", "llama-bench", "llama-mtmd-cli")
#: Programs that pick four slots with one shared cache when ``-np`` is not given.
AUTO_SLOTS = ("llama-server",)
#: Cells a context is a multiple of without flash attention, in builds that tell the two apart.
OLD_PLAIN_CELLS = 32
#: Copies of a build for pipeline parallelism (GGML_SCHED_MAX_COPIES).
COPIES = 4
#: ``-mla`` of ik_llama.cpp when nothing is said, with flash attention on by default; earlier builds say 0.
LATENT_BY_DEFAULT = 3

#: How other engines' and people's words map to the engine's cache types.
CACHE_WORDS = {"int8": "q8_0", "fp16": "f16", "bfloat16": "bf16", "fp32": "f32"}


def devices_of(launch: Launch, machine: Machine) -> tuple[Device, ...]:
    """Return the devices the engine will use, in its order (``src/llama.cpp``, 0.5.0).

    Without a list: every discrete device; integrated ones only when there is no discrete one.
    """
    kind = launch.get("device.kind")
    if kind == "cpu":
        return ()
    ids = launch.get("device.ids")
    if ids is not None:
        found = [machine.device(name) for name in ids]
        return tuple(d for d in found if d is not None and d.kind != "cpu")
    every = [d for d in machine.accelerators if kind in (None, "auto", d.kind)]
    discrete = [d for d in every if d.integrated is not True]
    return tuple(discrete or every)


def program_of(launch: Launch) -> str:
    """Return the engine program whose defaults apply; a launch file means the server."""
    known = (*BATCH_OUTPUTS, *AUTO_SLOTS, "llama-cli")
    program = launch.program or "llama-server"
    return next((p for p in known if program == p or program.startswith(f"{p}-")), "llama-server")


def resolve(launch: Launch, machine: Machine, version: str, engine: str = history.UPSTREAM) -> tuple[Settings, tuple[Device, ...]]:
    """Return the engine's settings for a launch, and the machine's devices they refer to."""

    def follows(law: str) -> bool:
        return history.follows(law, engine, version)

    devices = devices_of(launch, machine)
    program = program_of(launch)
    option = launch.options.get
    sequences = launch.get("context.sequences")
    unified = launch.get("context.unified")
    if sequences is None:
        automatic = program in AUTO_SLOTS and follows("four-slots")
        sequences = 4 if automatic else 1
        unified = automatic if unified is None else unified
    if not follows("streams"):
        unified = True
    length = launch.get("context.length") or 0
    per_slot = option("kv-unified-per-slot")
    if not length and isinstance(per_slot, int):
        length = sequences * per_slot
    layers = launch.get("layers.on_device")
    if layers in (None, "auto", "all"):
        explicit = layers is not None or follows("all-layers")
        layers = -1 if explicit else 0
    outputs: Literal["batch", "slots"] = "batch" if program in BATCH_OUTPUTS or not follows("slot-logits") else "slots"
    copies = option("sched-max-copies")
    flash = launch.get("context.flash_attention") or ("auto" if follows("flash-by-default") else "off")
    if option("no-flash-attn"):
        flash = "off"
    embeddings = bool(option("embedding") or option("rerank"))
    batch = launch.get("context.batch") or 2048
    ubatch = launch.get("context.micro_batch") or 512
    if embeddings:
        batch = min(batch, ubatch)
    drafted = drafted_tokens(launch)
    remote = any(d.kind == "rpc" for d in devices)
    settings = Settings(
        devices=tuple(_spec(d, machine) for d in devices),
        n_ctx=length,
        n_seq=sequences,
        unified=bool(unified),
        n_batch=batch,
        n_ubatch=ubatch,
        n_gpu_layers=layers,
        split_mode=_split(launch),
        tensor_split=tuple(launch.get("layers.ratio") or ()),
        main_gpu=launch.get("device.main") or 0,
        type_k=_key_type(launch, flash, quantised=follows("quantised-latent")),
        type_v=cache_type(launch.get("kv.value_type")),
        flash_attn=cast("Any", flash),
        kv_offload=launch.get("kv.on_device") is not False,
        op_offload=option("op-offload", True) is not False and not _offload_forbidden(option("offload-policy")),
        swa_full=bool(launch.get("context.full_window")) or not follows("window-cache"),
        overrides=_overrides(launch, EXPERTS if follows("fused-gate-in-pattern") else EXPERTS_SPLIT),
        load_mode=launch.get("memory.load") or "auto",
        lazy_mode=cast("Any", option("lazy-mode", "auto")),
        no_host=bool(option("no-host")),
        repack=option("repack", True) is not False,
        load_mtp="draft-mtp" in speculation(launch),
        n_rs_seq=drafted if any(k in _ROLLBACK_KINDS for k in speculation(launch)) else 0,
        outputs=outputs,
        n_outputs_per_seq=1 + drafted,
        embeddings=embeddings,
        pipeline=False if (remote and not follows("remote-copies")) or copies == 1 else None,
        copies=copies if isinstance(copies, int) and copies > 0 else COPIES,
        copies_with_overrides=not follows("no-copies-with-overrides"),
        output_first=follows("output-first"),
        plain_cells=CELL_STEP if follows("cells-of-256") else OLD_PLAIN_CELLS,
        cache_rows_per_head=follows("cache-rows-per-head"),
        cache_rows_padded=follows("cache-rows-padded"),
        prompt_cache=follows("prompt-cache"),
        checkpoints=follows("context-checkpoints"),
        half_mask=follows("half-mask"),
        mask_per_device=follows("mask-per-device"),
        graph_measured=follows("graph-measured"),
        graph_of_fork=engine != history.UPSTREAM,
        rotated_cache=follows("rotated-cache") or bool(option("k-cache-hadamard")),
        experts_on_first=not follows("experts-on-own-device"),
        expert_sum_apart=not follows("expert-sum-in-one"),
        **_latent(launch, engine, version, flash),
        op_offload_min_batch=_minimum_batch(launch),
        allreduce=_allreduce(launch, machine),
    )
    return settings, devices


def _allreduce(launch: Launch, machine: Machine) -> Literal["nccl", "internal", "none"]:
    """Return what sums the cards' parts under split mode tensor (``ggml/src/ggml-cuda/ggml-cuda.cu``, comm_init, 0.5.0)."""
    word = launch.environ.get("GGML_CUDA_ALLREDUCE")
    if word is None:
        return "internal" if "windows" in (machine.host.system or "").casefold() else "nccl"
    return "nccl" if word == "nccl" else "internal" if word == "internal" else "none"


#: Speculation that rolls the recurrent state back, so that the target keeps spare states.
_ROLLBACK_KINDS = ("draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark")
#: Every kind of speculation (``common/speculative.cpp``, 0.5.0).
SPECULATION_KINDS = (
    "none", "draft-simple", "draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod",
    "ngram-cache",
)  # fmt: skip
#: Tokens drafted at once by default (``common/common.h``, 0.5.0).
_DRAFTED = {"ngram-mod": 64, "ngram-simple": 48, "ngram-map-k": 48, "ngram-map-k4v": 48, "ngram-cache": 8}


def speculation(launch: Launch) -> tuple[str, ...]:
    """Return the kinds of speculation asked for; a draft model alone means the simple kind."""
    kind = launch.get("speculation.kind")
    kinds = tuple(k for k in (kind or "").split(",") if k and k != "none")
    if not kinds and launch.get("model.draft"):
        return ("draft-simple",)
    return kinds


def drafted_tokens(launch: Launch) -> int:
    """Return the tokens drafted at once, 0 without speculation."""
    kinds = speculation(launch)
    if not kinds:
        return 0
    window = launch.get("speculation.window")
    return max(window if window is not None and k.startswith("draft-") else _DRAFTED.get(k, 3) for k in kinds)


def cache_type(name: str | None) -> str:
    """Return the engine's name of a cache type; default f16."""
    folded = "f16" if name is None else name.casefold()
    return CACHE_WORDS.get(folded, folded)


def _key_type(launch: Launch, flash: str, *, quantised: bool) -> str:
    """Return the type of cached keys: ``-mla 2`` without flash attention once stored float16 whatever was asked."""
    asked = cache_type(launch.get("kv.key_type"))
    return "f16" if not quantised and launch.options.get("mla") == 2 and flash == "off" else asked


def _latent(launch: Launch, engine: str, version: str, flash: str) -> dict[str, Any]:
    """Return the settings of multi-head latent attention.

    llama.cpp goes by the file. ik_llama.cpp goes by ``-mla``: 0 full heads; 1 keys in latent form, and without flash
    attention values too; 2 and 3 keys only, and prompts are computed on full heads expanded from it, as many at once as
    ``-amb`` (MiB) allows.
    """
    if engine != history.IK:
        values = history.follows("latent-cache", engine, version) and not history.follows("latent-without-values", engine, version)
        return {"latent": "file" if history.follows("latent-cache", engine, version) else "off", "latent_values": values}
    asked = launch.options.get("mla")
    mode = asked if isinstance(asked, int) else LATENT_BY_DEFAULT if history.follows("flash-by-default", engine, version) else 0
    cap = launch.options.get("attn-max-batch")
    return {
        "latent": "on" if mode > 0 else "off", "latent_expanded": mode > 1 and flash != "off",
        "latent_values": mode == 1 and flash == "off",  # a transposed copy of the latent, for values
        "scores_cap_bytes": cap * 2**20 if isinstance(cap, int) and cap > 0 else 0,
    }  # fmt: skip


def _spec(device: Device, machine: Machine) -> DeviceSpec:
    pool = machine.pool(device.pool)
    free = pool.free_bytes if pool is not None and pool.free_bytes is not None else (pool.total_bytes if pool else None)
    return DeviceSpec(
        name=device.name, kind=device.kind, free_bytes=free,
        compute_capability=device.compute_capability, integrated=device.integrated, model=device.model,
        context_bytes=device.context_bytes,
    )  # fmt: skip


def _split(launch: Launch) -> Literal["none", "layer", "row", "tensor"]:
    mode = launch.get("layers.split")
    return "layer" if mode in (None, "auto") else cast("Any", mode)


def _overrides(launch: Launch, experts: str) -> tuple[Override, ...]:
    """Return every override in the engine's order: -ot, then what -cmoe, -ncmoe and -ncffn stand for."""
    listed = launch.get("layers.overrides") or ()
    on_host = launch.get("experts.on_host")
    return (
        *(Override(pattern=o.pattern, target=o.device) for o in listed),
        *expert_overrides(
            cpu_moe=on_host == "all",
            n_cpu_moe=on_host if isinstance(on_host, int) else 0,
            n_cpu_ffn=int(launch.options.get("n-cpu-ffn") or 0),
            experts=experts,
        ),
    )


#: Operations of ``-op`` of ik_llama.cpp: every one, and products with the chosen experts.
_EVERY_OPERATION, _EXPERT_PRODUCT = "-1", "27"


def _offload_forbidden(policy: Any) -> bool:
    """Whether ``-op`` keeps weights in host memory from being copied to a device for large batches."""
    words = policy.split(",") if isinstance(policy, str) else []
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    return "0" in (pairs.get(_EVERY_OPERATION), pairs.get(_EXPERT_PRODUCT))


def _minimum_batch(launch: Launch) -> int:
    text = launch.environ.get("GGML_OP_OFFLOAD_MIN_BATCH", "")
    return int(text) if text.isdigit() and len(text) < 10 else 32
