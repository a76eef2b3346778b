"""The settings a launch of vllm.cpp works with: what was asked for, then the documents, then the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from residency.engines.base import version_in

from .argv import option_text
from .documents import parse, settings_of, speculation_of
from .environment import BY_OPTION, VARIABLES, read_value
from .versions import DEVICE_SELECTION

if TYPE_CHECKING:
    from residency.launch.model import Launch
    from residency.machine.model import Device, Machine

#: Blocks of the KV pool when nothing sizes it, and tokens per block: 8,192 tokens for the whole server.
DEFAULT_BLOCKS, DEFAULT_BLOCK_SIZE = 256, 32
#: Sequences at once by default: the server's own default since the tree of August, and the engine's, which the server
#: had before and every other program still has.
SERVER_SEQUENCES, ENGINE_SEQUENCES = 32, 8
#: Order in which ``--device auto`` looks for an accelerator.
AUTO = ("cuda", "rocm", "metal", "vulkan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything about a launch that moves bytes."""

    device: Device | None  # None: the CPU
    length: int | None  # --max-model-len; None: what the model was trained for, fitted to the pool
    sequences: int
    batch: int | None  # --max-num-batched-tokens; None: automatic
    blocks: int | None
    block_size: int
    kv_memory: int | None
    kv_type: str
    kv_on_device: bool
    kv_f32: bool
    mmap: bool
    prefault: bool
    stream: bool
    slots: int
    slot_bytes: int | None
    weight_budget: int | None  # None: the device's total
    cpu_moe: bool
    n_cpu_moe: int
    placement_fit: bool
    keep_quant: bool
    keep_f16: bool
    nvfp4: bool
    cpu_ref: bool
    alias_host: bool
    release_host: bool
    gdn_bf16: bool | None  # None: as the model says
    speculation: str | None
    window: int
    language_only: bool
    offload: str | None  # weight offload asked for: "uva" or "prefetch"
    kv_connector: str | None


class Asked:
    """Looks a setting up: knob or option, then what the launch's documents say, then the default."""

    def __init__(self, launch: Launch) -> None:
        """Read the documents once; a sound one is assumed (see ``option_problem`` and ``read_argv``)."""
        self.launch = launch
        self.offload_document: dict[str, Any] = parse(launch.options.get("offload-config") or "{}")
        speculation = parse(launch.options.get("speculative-config") or "{}")
        # Of a command line the documents are folded into the launch already, where a change of one setting can undo it.
        self.documents = {} if launch.program is not None else {**settings_of(self.offload_document), **speculation_of(speculation)}

    def get(self, target: str, default: Any = None) -> Any:
        """Return the value of a knob or "option:NAME"."""
        told = self.launch.options.get(target[7:]) if target.startswith("option:") else self.launch.get(target)
        variable = BY_OPTION.get(target[7:]) if target.startswith("option:") else None
        if told is None and variable is None:
            # A launch file may name the variable of a knob as an option.
            variable = next((v for v in VARIABLES if v.target == target and v.option in self.launch.options), None)
            told = self.launch.options.get(variable.option) if variable is not None else None
        if told is not None and variable is not None:
            told = read_value(variable, option_text(told))
        if told is None:
            told = self.documents.get(target)
        return default if told is None else told


def device_of(launch: Launch, machine: Machine) -> Device | None:
    """Return the one device the engine computes on; None: the CPU. ``auto`` takes an accelerator first."""
    kind = launch.get("device.kind") or "auto"
    if kind == "cpu":
        return None
    ids = launch.get("device.ids")
    if ids is not None:
        found = [d for name in ids if (d := machine.device(name)) is not None]
        return next((d for d in found if d.kind != "cpu"), None)
    for wanted in AUTO if kind == "auto" else (kind,):
        for device in machine.accelerators:
            if device.kind == wanted:
                return device
    return None


def resolve(launch: Launch, machine: Machine, version: str) -> Settings:
    """Return the settings of a launch at one version."""
    asked = Asked(launch)
    get = asked.get
    server = launch.program in (None, "vllm-server") and version_in(version, DEVICE_SELECTION, None)
    sequences = SERVER_SEQUENCES if server else ENGINE_SEQUENCES
    uva = asked.offload_document.get("uva", {}).get("cpu_offload_gb", 0)
    prefetch = asked.offload_document.get("prefetch", {}).get("offload_group_size", 0)
    backend = asked.offload_document.get("offload_backend")
    offload = "uva" if uva or backend == "uva" else "prefetch" if prefetch or backend == "prefetch" else None
    connector = parse(launch.options.get("kv-transfer-config") or "{}").get("kv_connector")
    on_host = get("experts.on_host", 0)
    cpu_moe = bool(get("option:vt-cpu-moe", False)) or on_host == "all"
    cpu_ref = bool(get("option:vt-cpu-ref", False))
    return Settings(
        device=device_of(launch, machine),
        length=get("context.length") or None,
        sequences=get("context.sequences", sequences),
        batch=get("context.batch") or None,
        blocks=get("kv.blocks") or None,
        block_size=get("kv.block_size", DEFAULT_BLOCK_SIZE),
        kv_memory=get("kv.memory") or None,
        kv_type=get("kv.key_type", "auto"),
        kv_on_device=get("kv.on_device", True),
        kv_f32=bool(get("option:vt-kv-cache-f32", False)),
        mmap=get("memory.load", "mmap") in ("mmap", "auto") and not cpu_ref,
        prefault=get("memory.prefault", True),
        stream=bool(get("experts.stream", False)),
        slots=get("experts.slots", 64) or 64,
        slot_bytes=get("experts.slot_size") or None,
        weight_budget=get("option:vt-device-weight-budget-bytes"),
        cpu_moe=cpu_moe,
        n_cpu_moe=on_host if isinstance(on_host, int) else 0,
        placement_fit=bool(get("option:vt-placement-fit", False)),
        keep_quant=bool(get("option:vt-gguf-keep-quant", True)) and not cpu_ref,
        keep_f16=bool(get("option:vt-gguf-keep-f16", True)) and not cpu_ref,
        nvfp4=bool(get("option:vt-gguf-nvfp4-fp4", True)) and not cpu_ref,
        cpu_ref=cpu_ref,
        alias_host=bool(get("option:vt-qwen35-alias-host-weights", True)),
        release_host=bool(get("option:vt-release-host-weights", True)),
        gdn_bf16=get("option:vt-gdn-state-bf16"),
        speculation=get("speculation.kind"),
        window=get("speculation.window", 1),
        language_only=bool(launch.options.get("language-model-only")),
        offload=offload,
        kv_connector=connector,
    )
