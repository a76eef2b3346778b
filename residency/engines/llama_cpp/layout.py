"""Which bytes land on which device: layers, tensors, caches and compute buffers of one launch.

Laws restated from llama.cpp 0.5.0 (commit 0c1e570): ``src/llama-model.cpp`` (layers to devices),
``src/llama-model-loader.cpp`` (tensors to buffers), ``src/llama-arch.cpp`` (tensor classes),
``ggml/src/ggml-alloc.c`` and ``ggml/src/ggml-cuda/ggml-cuda.cu`` (padding).
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from residency.budget import Remark, Unknown
from residency.checkpoint.model import Role
from residency.engines import patterns
from residency.units import plural
from residency.ways import Way

from . import compute, latent, tensor_split
from . import context as contexts
from .blocks import blocks_of, flash_stays, flash_works
from .graph import Shape
from .graph import plain as is_plain
from .hparams import (
    ENGINE_ARCHITECTURES,
    NO_FLASH_ATTENTION,
    NO_TENSOR_SPLIT,
    ROLLBACK,
    HyperParameters,
    derived,
)
from .settings import CACHE_TYPES, CUDA_KINDS, EXPERTS, Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from residency.checkpoint.model import Checkpoint

    from .settings import DeviceSpec, Override


class BufferRules(NamedTuple):
    """How a back end sizes tensors in its buffers."""

    align: int  # every tensor starts at a multiple of this
    quant_row: int  # quantised rows that are no multiple of this take one partial row more; 0 = no such rule


#: Per device kind. Vulkan, Metal and SYCL report their own alignment; 128 and 32 are what common drivers answer.
#: A remote device answers with the rules of what serves it; the ones here are those of a CPU server (measured, build 10434).
BUFFER_RULES: Mapping[str, BufferRules] = {
    "cuda": BufferRules(128, 512), "rocm": BufferRules(128, 512), "musa": BufferRules(128, 512),
    "cpu": BufferRules(32, 0), "rpc": BufferRules(32, 0), "metal": BufferRules(32, 0), "vulkan": BufferRules(64, 0),
    "sycl": BufferRules(128, 512),
}  # fmt: skip

#: Names (without suffix) of the input class: always in host memory unless an override says otherwise.
INPUT_NAMES = frozenset({"token_embd", "position_embd", "token_types", "per_layer_token_embd"})
#: Loaded by no graph: the engine skips them.
SKIPPED_NAMES = frozenset({"masked_embd_centroids", "masked_embd_ordering"})
#: Names of the output class: on the device of the output layer.
OUTPUT_NAMES = frozenset(
    ["output", "output_norm", "cls", "cls.output", "cls.norm", "dense_2", "dense_3", "dec.output_norm", "enc.output_norm", "output_hc_fn", "output_hc_base", "output_hc_scale", "output_hc_norm", "output_hc_down", "output_hc_up", "output_res_score", "altup_proj", "altup_unembd_proj", "nextn.post_projection", "fc", "d2t", "markov_w1", "markov_w2", "conf_proj", "selector_predecessor", "selector_successor", "selector_hidden"]
)
#: One per file, but every device that holds a layer gets a copy.
PER_DEVICE_NAMES = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short"})
#: The output norm of these carries the embedding norm's name (LLM_TENSOR_OUTPUT_NORM_LFM2).
OUTPUT_NORM_AS_EMBEDDING_NORM = frozenset({"lfm2", "lfm2moe"})
#: Without output.weight these make no output of the embedding table: encoders.
NO_OUTPUT = frozenset(
    ["bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert", "modern-bert", "t5encoder", "clip", "eagle3", "dflash"]
)
#: Lazy tables stay in the file whatever the load mode when larger than this (``--lazy-mode auto``).
LAZY_BYTES = 4 * 2**30
LAZY = {"gemma4": "per_layer_token_embd.weight", "qwen4exp": "per_layer_token_embd.weight"}

INPUT, OUTPUT, ALL_DEVICES, SKIPPED = -1, -2, -3, -4

#: Tensor types the CUDA back end has no matrix product for: such tensors stay in host memory without a word.
NO_CUDA_PRODUCT = frozenset({"TQ1_0", "TQ2_0", "I8", "I16", "I64", "F64"})
#: State sizes of the Mamba-2 scan kernel; Mamba-1 has one for 16 only (``ggml-cuda.cu``, supports_op, SSM_SCAN).
SCAN_STATES = frozenset({96, 128, 256})
SCAN_STATE_1, KERNEL_STEP = 16, 128


class Row(NamedTuple):
    """One tensor, ready for placing."""

    name: str
    place: int  # block index, or INPUT, OUTPUT, ALL_DEVICES, SKIPPED
    expert: bool
    nbytes: int
    quant_extra: int  # bytes of the partial row on back ends with the 512 rule
    offset: int
    file: int
    type_name: str
    stuck: bool  # the CUDA back end cannot run its operation: host memory whatever the layer's device

    def size(self, rules: BufferRules) -> int:
        """Bytes in a buffer with these rules."""
        return contexts.pad(self.nbytes + (self.quant_extra if rules.quant_row else 0), rules.align)


#: Types of the tensor table that are not quantised.
_PLAIN = frozenset({"F32", "F16", "BF16", "I8", "I16", "I32", "I64", "F64"})


def _stuck(checkpoint: Checkpoint, name: str, type_name: str, shape: tuple[int, ...]) -> bool:
    """Whether the CUDA back end refuses the operation the engine probes for this tensor (weight_buft_supported)."""
    if type_name in NO_CUDA_PRODUCT:
        return len(shape) > 1
    stem, _, suffix = name.rpartition(".")
    if suffix == "ssm_a" and f"{stem}.ssm_d" in checkpoint.by_name:  # a scan, not the product of a delta net
        inner = checkpoint.integer("ssm.inner_size")
        heads = shape[1] if len(shape) > 1 else 1
        if shape[:1] == (1,):
            return not (checkpoint.integer("ssm.state_size") in SCAN_STATES and inner // max(heads, 1) % 16 == 0)
        groups = checkpoint.integer("ssm.group_count") or 1
        return not (shape[:1] == (SCAN_STATE_1,) and inner == heads and heads % KERNEL_STEP == 0 and groups == 1)
    if name.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight", ".ple_conv1d.weight")):
        return len(shape) > 1 and shape[1] % KERNEL_STEP != 0
    return type_name == "BF16" and len(shape) == 1  # sums and products of float32 with bfloat16


def _rows(checkpoint: Checkpoint, hyper: HyperParameters) -> tuple[Row, ...]:
    found = []
    arch = hyper.architecture
    names = checkpoint.by_name
    tied = "output.weight" not in names and arch not in NO_OUTPUT and arch != "codeshell"
    for t in checkpoint.tensors:
        stem = t.name.rsplit(".", 1)[0]
        layer = t.layer
        if layer is not None:
            place = layer
        elif stem in INPUT_NAMES:
            place = INPUT
        elif stem in OUTPUT_NAMES or (arch in OUTPUT_NORM_AS_EMBEDDING_NORM and stem == "token_embd_norm"):
            place = OUTPUT
        elif stem in PER_DEVICE_NAMES:
            place = ALL_DEVICES
        elif stem in SKIPPED_NAMES:
            place = SKIPPED
        else:
            place = 0
        extra = 0
        if t.type_name not in _PLAIN and t.shape and t.shape[0] % 512:
            missing = 512 - t.shape[0] % 512
            extra = t.nbytes * missing // max(t.elements, 1)
        row = Row(t.name, place, t.role is Role.EXPERT, t.nbytes, extra, t.offset, t.file, t.type_name, _stuck(checkpoint, t.name, t.type_name, t.shape))
        found.append(row)
        if tied and t.name == "token_embd.weight":
            found.append(row._replace(place=OUTPUT))
        if arch == "codeshell" and t.name == "output.weight" and "token_embd.weight" not in names:
            found.append(row._replace(place=INPUT))
    return tuple(found)


_FLOAT = struct.Struct("f")


def _f32(value: float) -> float:
    rounded: float = _FLOAT.unpack(_FLOAT.pack(value))[0]
    return rounded


def layer_devices(hyper: HyperParameters, settings: Settings, devices: Sequence[DeviceSpec], host_free: int | None = None) -> tuple[int, ...]:
    """Return the device index of every block and, last, of the output; -1 is the CPU.

    Blocks count from the last one down, the output first; shares are compared in float32 as the engine does.
    """
    count = hyper.layers_all
    wanted = settings.n_gpu_layers if settings.n_gpu_layers >= 0 else count + 1
    start = max(count + (1 if settings.output_first else 0) - wanted, 0)
    active = min(wanted, count + 1) if devices else 0
    shares = list(settings.tensor_split[: len(devices)]) + [0.0] * (len(devices) - len(settings.tensor_split))
    if not any(shares):
        shares = [float(d.free_bytes if d.free_bytes is not None else host_free or 1) for d in devices]
    points: list[float] = []
    total = 0.0
    for share in shares:
        total = _f32(total + _f32(share))
        points.append(total)
    if total:
        points = [_f32(p / total) for p in points]
    last = len(devices) - 1
    # Block numbers are exact in float32; only their quotient is rounded.
    held = [min(bisect_right(points, _f32(i / active)), last) if last else 0 for i in range(min(active, count + 1 - start))]
    return (*[-1] * start, *held, *[-1] * (count + 1 - start - len(held)))


def used_devices(settings: Settings) -> tuple[tuple[DeviceSpec, ...], Remark | None]:
    """Return the devices the model may use after ``--split-mode none`` and ``--main-gpu``."""
    if settings.split_mode != "none" or not settings.devices:
        return settings.devices, None
    if settings.main_gpu < 0:
        return (), None
    if settings.main_gpu >= len(settings.devices):
        return (), Remark(
            kind="impossible", code="main-gpu-out-of-range", knob="device.main", value=settings.main_gpu,
            message=f"the main GPU is number {settings.main_gpu}, and the engine sees {plural(len(settings.devices), 'device')}, numbered from 0",
            ways=(Way(knob="device.main", value=0),),
        )  # fmt: skip
    return (settings.devices[settings.main_gpu],), None


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """What one device (or the host) carries."""

    device: str  # device name, or "host"
    weights: int = 0
    experts: int = 0
    kv: int = 0
    state: int = 0
    compute_certain: int = 0
    compute_likely: int = 0
    compute_at_most: int = 0
    compute_what: str = ""  # which peak decides, for messages
    largest_name: str | None = None
    largest_bytes: int = 0
    tensors: int = 0
    layers: int = 0  # blocks that live here


@dataclass(frozen=True, kw_only=True)
class HostWeights:
    """Weights in host memory, by what backs them."""

    backing: str  # "pinned" | "anonymous" | "mapped" | "locked"
    bytes: int  # in buffers
    mapped_bytes: int = 0  # span of the files that the mapping covers
    lazy_bytes: int = 0  # tables that stay in the file and are read on demand


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One launch laid out."""

    devices: tuple[DeviceBytes, ...]  # in the engine's order
    host: DeviceBytes
    host_weights: HostWeights
    resolved: contexts.Resolved
    layer_device: tuple[int, ...]  # per block, then the output; -1 = CPU
    remarks: tuple[Remark, ...] = ()
    unknowns: tuple[Unknown, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)


class _Group(NamedTuple):
    """Rows that go to the same place, summed per buffer rules."""

    weights: int
    experts: int
    largest: Row | None
    number: int


class _Table:
    """Everything about a checkpoint's tensors that does not depend on the launch."""

    def __init__(self, checkpoint: Checkpoint, hyper: HyperParameters) -> None:
        self.rows = _rows(checkpoint, hyper)
        self.by_place: dict[int, list[int]] = {}
        for index, row in enumerate(self.rows):
            self.by_place.setdefault(row.place, []).append(index)
        self.stuck = {place: [i for i in found if self.rows[i].stuck] for place, found in self.by_place.items()}
        self.stuck_names = frozenset(r.name for r in self.rows if r.stuck)
        self.sizes: dict[BufferRules, list[int]] = {}
        self.groups: dict[tuple[int, BufferRules, bool | None], _Group] = {}
        self.matches: dict[str, frozenset[int]] = {}

    def group(self, place: int, rules: BufferRules, stuck: bool | None = None) -> _Group:
        """Return the sums of one place: all rows, or only those that are stuck in host memory, or the others."""
        key = (place, rules, stuck)
        found = self.groups.get(key)
        if found is None:
            indices = self.by_place.get(place, ())
            found = self.groups[key] = self.sum((i for i in indices if stuck is None or self.rows[i].stuck is stuck), rules)
        return found

    def sum(self, indices: Iterable[int], rules: BufferRules) -> _Group:
        """Return the sums of some rows in buffers with these rules."""
        sizes = self.sizes.get(rules)
        if sizes is None:
            sizes = self.sizes[rules] = [row.size(rules) for row in self.rows]
        weights = experts = count = 0
        largest: Row | None = None
        for i in indices:
            row = self.rows[i]
            count += 1
            if row.expert:
                experts += sizes[i]
            else:
                weights += sizes[i]
            if largest is None or row.nbytes > largest.nbytes:
                largest = row
        return _Group(weights, experts, largest, count)

    def matching(self, pattern: str) -> frozenset[int]:
        """Return the rows a pattern is found in. Raises what :func:`residency.engines.patterns.searcher` raises."""
        found = self.matches.get(pattern)
        if found is None:
            block = _ONE_BLOCK.fullmatch(pattern)
            if block is not None and pattern.endswith(EXPERTS):
                experts = self.matching(EXPERTS)
                found = frozenset(i for i in self.by_place.get(int(block[1]), ()) if i in experts)
            else:
                search = patterns.searcher(pattern)
                found = frozenset(i for i, row in enumerate(self.rows) if search(row.name))
            self.matches[pattern] = found
        return found


_ONE_BLOCK = re.compile(r"blk\\\.([0-9]{1,4})\\\.ffn_\(up\|down\|gate\|gate_up\)_\(ch\|\)exps")


def _table(checkpoint: Checkpoint, hyper: HyperParameters) -> _Table:
    store = derived(checkpoint)
    found = store.get("rows")
    if found is None:
        found = store["rows"] = _Table(checkpoint, hyper)
    assert isinstance(found, _Table)
    return found


@dataclass(slots=True)
class _Sums:
    weights: int = 0
    experts: int = 0
    count: int = 0
    largest: Row | None = None

    @property
    def name(self) -> str | None:
        return self.largest.name if self.largest is not None else None

    @property
    def nbytes(self) -> int:
        return self.largest.nbytes if self.largest is not None else 0

    def add(self, group: _Group) -> None:
        self.weights += group.weights
        self.experts += group.experts
        self.count += group.number
        if group.largest is not None and (self.largest is None or group.largest.nbytes > self.largest.nbytes):
            self.largest = group.largest


def _override_targets(overrides: Sequence[Override], table: _Table, remarks: list[Remark], unknowns: list[Unknown]) -> dict[int, str]:
    """Return the overridden rows with their targets: the first pattern that matches wins."""
    taken: dict[int, str] = {}
    for override in overrides:
        try:
            found = table.matching(override.pattern)
        except patterns.PatternError as error:
            remarks.append(Remark(
                kind="impossible", code="override-pattern", knob="layers.overrides", value=override.pattern,
                message=f'the override pattern "{patterns.shown(override.pattern)}" is not a regular expression: {error}',
            ))  # fmt: skip
            continue
        except patterns.PatternUnknownError as error:
            unknowns.append(Unknown(what=f'which tensors the override pattern "{patterns.shown(override.pattern)}" matches', why=str(error)))
            continue
        fresh = 0
        lost = [i for i in found if taken.get(i, override.target) != override.target]
        for index in found:
            if index not in taken:
                taken[index] = override.target
                fresh += 1
        if not found and override.origin == "-ot":
            remarks.append(Remark(
                kind="inert", code="override-matches-nothing", knob="layers.overrides", value=override.pattern,
                message=f'the override pattern "{override.pattern}" matches no tensor of this model',
            ))  # fmt: skip
        elif found and not fresh and override.origin == "-ot":
            remarks.append(Remark(
                kind="inert", code="override-shadowed", knob="layers.overrides", value=override.pattern,
                message=f'every tensor the override pattern "{override.pattern}" matches was already taken by an earlier pattern',
            ))  # fmt: skip
        elif lost and override.origin == "-ot" and 2 * sum(table.rows[i].nbytes for i in lost) > sum(table.rows[i].nbytes for i in found):
            remarks.append(Remark(
                kind="inert", code="override-shadowed", knob="layers.overrides", value=override.pattern,
                message=f'{len(lost)} of {len(found)} tensors the override pattern "{override.pattern}" matches, most of its bytes, were already '
                "taken by an earlier pattern: the first match wins",
            ))  # fmt: skip
    return taken


def _place(
    checkpoint: Checkpoint, hyper: HyperParameters, settings: Settings, devices: Sequence[DeviceSpec],
    where: Sequence[int], remarks: list[Remark], unknowns: list[Unknown],
) -> tuple[list[_Sums], _Sums, list[Row], dict[int, str]]:  # fmt: skip
    """Return per-device sums, the host's sums, the rows in host memory, and the overridden rows."""
    table = _table(checkpoint, hyper)
    rules = [BUFFER_RULES.get(d.kind, BUFFER_RULES["cpu"]) for d in devices]
    sums = [_Sums() for _ in devices]
    host = _Sums()
    host_rows: list[Row] = []
    cpu = BUFFER_RULES["cpu"]
    cuda = [d.kind in CUDA_KINDS for d in devices]
    taken = _override_targets(settings.overrides, table, remarks, unknowns) if settings.overrides else {}
    by_name = {d.name: i for i, d in enumerate(devices)}
    # The engine looks every target up while it reads the command line, by the exact names of the devices' own buffers.
    for name in dict.fromkeys(o.target for o in settings.overrides if o.target != "CPU" and o.target not in by_name):
        named = [n for n in ("CPU", *by_name) if n.casefold() == name.casefold()]
        remarks.append(Remark(
            kind="impossible", code="override-target", knob="layers.overrides", value=name,
            message=f'the override target "{name}" is no buffer of this launch: {", ".join(["CPU", *by_name])}' + (f"; it is spelled {named[0]}" if named else ""),
        ))  # fmt: skip

    def target(name: str) -> int:
        return by_name.get(name, -1)

    def assign(device: int, indices: list[int]) -> None:
        if device < 0:
            host.add(table.sum(indices, cpu))
            host_rows.extend(table.rows[i] for i in indices)
        else:
            sums[device].add(table.sum(indices, rules[device]))

    elsewhere: dict[str, list[int]] = {}  # rows that overrides move, by their target
    skipped_from = hyper.layers_all if settings.load_mtp or hyper.architecture == "graniteswitch" else hyper.layers
    for place, indices in table.by_place.items():
        if place == SKIPPED or skipped_from <= place < hyper.layers_all:
            continue
        chosen: Sequence[int]
        if place == INPUT:
            chosen = (-1,)
        elif place == OUTPUT:
            chosen = (where[-1],)
        elif place == ALL_DEVICES:
            chosen = sorted(set(where[: hyper.layers])) or (-1,)
        else:
            chosen = (where[min(place, len(where) - 1)],)
        moved = [i for i in indices if i in taken] if taken else []
        if not moved:
            for device in chosen:
                if device < 0:
                    host.add(table.group(place, cpu))
                    host_rows += [table.rows[i] for i in indices]
                elif cuda[device] and table.stuck[place]:
                    sums[device].add(table.group(place, rules[device], stuck=False))
                    host.add(table.group(place, cpu, stuck=True))
                    host_rows += [table.rows[i] for i in table.stuck[place]]
                else:
                    sums[device].add(table.group(place, rules[device]))
            continue
        gone = set(moved)
        rest = [i for i in indices if i not in gone]
        if any(cuda[d] for d in chosen if d >= 0):
            assign(-1, [i for i in rest if table.rows[i].stuck])
            rest = [i for i in rest if not table.rows[i].stuck]
        for device in chosen:
            assign(device, rest)
        for i in moved:
            elsewhere.setdefault(taken[i], []).append(i)
    for name, indices in elsewhere.items():
        assign(target(name), indices)
    _drop_second_table(host, host_rows, cpu)
    return sums, host, host_rows, taken


def _drop_second_table(host: _Sums, host_rows: list[Row], cpu: BufferRules) -> None:
    """A tied table needed as input and as output in the same buffer is one copy."""
    for name in ("token_embd.weight", "output.weight"):
        twice = [r for r in host_rows if r.name == name]
        if len(twice) > 1:
            host.weights -= twice[1].size(cpu)
            host.count -= 1
            host_rows.remove(twice[1])


def _host_weights(settings: Settings, devices: Sequence[DeviceSpec], hyper: HyperParameters, rows: Sequence[Row]) -> HostWeights:
    mode = settings.load_mode
    if mode == "auto":
        mode = "none" if any(d.integrated for d in devices) else "mmap"
    lazy_name = LAZY.get(hyper.architecture)
    lazy = sum(r.nbytes for r in rows if r.name == lazy_name)
    if settings.lazy_mode == "off" or (settings.lazy_mode == "auto" and lazy <= LAZY_BYTES):
        lazy = 0
    total = sum(contexts.pad(r.nbytes, 32) for r in rows) - lazy
    if mode in ("mmap", "mmap+mlock"):
        spans: dict[int, tuple[int, int]] = {}
        for r in rows:
            low, high = spans.get(r.file, (r.offset, r.offset + r.nbytes))
            spans[r.file] = (min(low, r.offset), max(high, r.offset + r.nbytes))
        return HostWeights(
            backing="locked" if mode == "mmap+mlock" else "mapped", bytes=total, lazy_bytes=lazy,
            mapped_bytes=sum(high - low for low, high in spans.values()),
        )  # fmt: skip
    pinned = bool(devices) and not settings.no_host and any(d.kind in ("cuda", "rocm", "sycl", "vulkan") for d in devices)
    backing = "pinned" if pinned else "locked" if mode == "mlock" else "anonymous"
    return HostWeights(backing=backing, bytes=total, lazy_bytes=lazy)


def lock_granted(wanted: int, limit: int | None) -> bool | None:
    """Return whether so many bytes can be locked under RLIMIT_MEMLOCK (-1: no limit); None: the limit is not known."""
    return None if limit is None else limit == -1 or limit >= wanted


def granted(weights: HostWeights, limit: int | None) -> HostWeights:
    """Return weights with the lock the system grants: beyond the limit, or when it is not known, they stay what they are without."""
    if weights.backing != "locked" or lock_granted(weights.bytes, limit):
        return weights
    return replace(weights, backing="mapped" if weights.mapped_bytes else "anonymous")


def refusals(hyper: HyperParameters, settings: Settings) -> list[Remark]:
    """Return why the engine would not create the context (``src/llama-context.cpp``, llama_init_from_model)."""
    found: list[Remark] = []

    def refuse(code: str, message: str, knob: str, value: object, **more: object) -> None:
        found.append(Remark(kind="impossible", code=code, message=message, knob=knob, value=value, **more))  # type: ignore[arg-type]

    quantised_k = CACHE_TYPES[settings.type_k][0] > 1
    quantised_v = CACHE_TYPES[settings.type_v][0] > 1
    one_type = hyper.memory == "dsv4" or (hyper.mla and settings.latent == "file" and not settings.latent_values)
    if one_type and settings.type_k != settings.type_v:
        refuse(
            "mla-cache-types", f"the latent attention cache has one type: keys are {settings.type_k}, values {settings.type_v}",
            "kv.value_type", settings.type_v, ways=(Way(knob="kv.value_type", value=settings.type_k),),
        )  # fmt: skip
    on = (Way(knob="context.flash_attention", value="on"),) if hyper.architecture not in NO_FLASH_ATTENTION else ()
    if quantised_v and (settings.flash_attn == "off" or hyper.architecture in NO_FLASH_ATTENTION):
        refuse(
            "quantised-values-without-flash-attention",
            f"values of type {settings.type_v} need flash attention, which is off", "kv.value_type", settings.type_v,
            ways=(*on, Way(knob="kv.value_type", value="f16")),
        )  # fmt: skip
    if settings.flash_attn != "off" and hyper.architecture not in NO_FLASH_ATTENTION:
        for quantised, type_name, heads, knob in (
            (quantised_k, settings.type_k, (hyper.head_k, hyper.head_k_window), "kv.key_type"),
            (quantised_v, settings.type_v, (hyper.head_v, hyper.head_v_window), "kv.value_type"),
        ):
            block = CACHE_TYPES[type_name][0]
            odd = [heads[1] if w else heads[0] for w in hyper.windowed[: hyper.layers] if (heads[1] if w else heads[0]) % block]
            if quantised and odd:
                refuse(
                    "cache-block", f"type {type_name} packs {block} values, which does not divide the head size {odd[0]}",
                    knob, type_name, ways=(Way(knob=knob, value="f16"),),
                )  # fmt: skip
    if settings.split_mode == "tensor" and not settings.graph_of_fork:
        layers = (Way(knob="layers.split", value="layer"),)
        if hyper.architecture in NO_TENSOR_SPLIT:
            refuse("tensor-split-architecture", f"split mode tensor is not implemented for {hyper.architecture}", "layers.split", "tensor", ways=layers)
        if not settings.devices:
            refuse("tensor-split-without-devices", "split mode tensor needs a device, and the engine sees none", "layers.split", "tensor", ways=layers)
        if settings.flash_attn == "off":
            refuse("tensor-split-without-flash-attention", "split mode tensor needs flash attention, which is off", "layers.split", "tensor", ways=(*on, *layers))
    return found


def _copied_bytes(checkpoint: Checkpoint, hyper: HyperParameters, moved: Mapping[int, Mapping[str, int]]) -> int:
    """Bytes of the weights that overrides keep in host memory: inputs of the device's graph, one set per pipeline copy."""
    names = {f"blk.{place}.{name}.weight" for place, found in moved.items() for name, to in found.items() if to < 0}
    return sum(row.nbytes for row in _table(checkpoint, hyper).rows if row.name in names) if names else 0


def _cut_rows(checkpoint: Checkpoint, hyper: HyperParameters, splitter: tensor_split.Splitter, rules: Sequence[BufferRules]) -> list[tuple[int, ...]]:
    """Return every row's bytes on every card."""
    found = []
    for row in _table(checkpoint, hyper).rows:
        tensor = checkpoint.by_name[row.name]
        taken = None
        if tensor.layer is not None:
            taken = splitter.tensor(row.place, row.name.split(".", 2)[-1], tensor.shape)
        elif row.name in ("output.weight", "output.bias"):
            counts = splitter.output(tensor.shape[-1] if tensor.shape else 1)
            taken = tensor_split.Cut(max(len(tensor.shape) - 1, 0), counts) if counts is not None else None
        found.append(
            tuple(row.size(r) for r in rules) if taken is None
            else tuple(tensor_split.sliced(row.nbytes, tensor_split.block_of(row.type_name), tensor.shape, taken, j, r.align, r.quant_row) for j, r in enumerate(rules))
        )  # fmt: skip
    return found


def _shared(checkpoint: Checkpoint, settings: Settings, host_free: int | None) -> Layout:
    """Lay out ``--split-mode tensor``: as on one device, then every layer cut between the cards."""
    devices = settings.devices
    count = len(devices)
    alone = replace(settings, devices=devices[:1], tensor_split=(), pipeline=False)
    one, _ = _lay_out(checkpoint, alone, host_free, None)
    hyper = latent.adapted(checkpoint, settings)
    (whole,) = one.devices
    where = one.layer_device
    rules = tuple(BUFFER_RULES.get(d.kind, BUFFER_RULES["cpu"]) for d in devices)
    shares = (*settings.tensor_split[:count], *(0.0,) * (count - len(settings.tensor_split)))
    store = derived(checkpoint)
    key = ("tensor split", hyper.mla, shares, rules)
    if key not in store:
        splitter = tensor_split.Splitter(checkpoint, hyper, shares)
        store[key] = splitter, _cut_rows(checkpoint, hyper, splitter, rules)
    splitter, parts = store[key]
    _, _, host_rows, taken = _place(checkpoint, hyper, alone, devices[:1], where, [], [])
    gone = {(r.name, r.place) for r in host_rows if r.place != ALL_DEVICES or all(w < 0 for w in where[: hyper.layers])}
    last = hyper.layers_all if settings.load_mtp or hyper.architecture == "graniteswitch" else hyper.layers
    away = {SKIPPED, INPUT, *((OUTPUT,) if where[-1] < 0 else ())}
    weights, experts = [0] * count, [0] * count
    for row, sizes in zip(_table(checkpoint, hyper).rows, parts, strict=True):
        if row.place in away or last <= row.place < hyper.layers_all or (row.name, row.place) in gone:
            continue
        into = experts if row.expert else weights
        for j, size in enumerate(sizes):
            into[j] += size
    kv, state = [0] * count, [0] * count
    rollback = settings.n_rs_seq if hyper.architecture in ROLLBACK else 0
    for j, rule in enumerate(rules):
        quant_row = rule.quant_row if settings.cache_rows_padded else 0
        caches = contexts.layer_caches(
            hyper, one.resolved, rollback=rollback, align=rule.align, quant_row=quant_row,
            latent_values=settings.latent_values, per_head=settings.cache_rows_per_head,
        )
        for i, cache in enumerate(caches):
            if where[i] >= 0 and settings.kv_offload:
                kv[j] += splitter.cache_bytes(i, j, one.resolved, cache.kv, rule.align, quant_row)
                state[j] += splitter.state_bytes(i, j, one.resolved, cache.state, rollback, rule.align)
    found = tuple(
        replace(
            whole, device=d.name, weights=weights[j], experts=experts[j], kv=kv[j], state=state[j],
            compute_what=f"{whole.compute_what}, whole on every card" if count > 1 else whole.compute_what,
        )
        for j, d in enumerate(devices)
    )  # fmt: skip
    problem = None if settings.graph_of_fork or hyper.architecture in NO_TENSOR_SPLIT else _stops(checkpoint, hyper, settings, splitter, one.resolved, where, host_rows, taken)
    stop = () if problem is None else (
        Remark(
            kind="impossible", code="tensor-split-stops", knob="layers.split", value="tensor",
            message=f"split mode tensor ends in an assertion: {problem}", ways=(Way(knob="layers.split", value="layer"),),
        ),
    )  # fmt: skip
    return replace(one, devices=found, remarks=(*stop, *one.remarks))


def _stops(
    checkpoint: Checkpoint, hyper: HyperParameters, settings: Settings, splitter: tensor_split.Splitter,
    resolved: contexts.Resolved, where: Sequence[int], host_rows: Sequence[Row], taken: Mapping[int, str],
) -> str | None:  # fmt: skip
    """Return why the engine's one device cannot run the graph of ``--split-mode tensor``, or nothing."""
    rows = _table(checkpoint, hyper).rows
    cards = {d.name for d in settings.devices}
    for index, name in taken.items():
        if name in cards:
            return f"{rows[index].name} is given to {name} alone"
    blocks = [b for b, w in zip(blocks_of(checkpoint, hyper), where, strict=False) if w >= 0]
    cuda = all(d.kind in CUDA_KINDS for d in settings.devices)
    if cuda and blocks and hyper.architecture not in tensor_split.ALL_WHOLE and not flash_works(blocks, settings.type_k, settings.type_v):
        sizes = sorted({f"{b.head_k}" if b.head_k == b.head_v else f"{b.head_k} and {b.head_v}" for b in blocks if b.heads_kv})
        return (
            f"the cards have no flash attention kernel for heads of {', '.join(sizes)} with keys of type {settings.type_k} and values of type "
            f"{settings.type_v}, and the host cannot attend for them"
        )
    moved: dict[int, set[str]] = {}
    for row in host_rows:
        if 0 <= row.place < len(where) and where[row.place] >= 0:
            moved.setdefault(row.place, set()).add(row.name.split(".", 2)[-1])
    turned = [settings.rotated_cache and CACHE_TYPES[t][0] > 1 for t in (settings.type_k, settings.type_v)]
    return splitter.stops(tensor_split.Launch(
        type_k=settings.type_k, type_v=settings.type_v, turned=(turned[0], turned[1]), roped=all(b.rotated for b in blocks),
        cache_here=settings.kv_offload or hyper.memory == "none", streams=resolved.streams,
        hosted=[w < 0 for w in where[: hyper.layers]], moved={i: frozenset(names) for i, names in moved.items()},
    ))  # fmt: skip


def _cut(checkpoint: Checkpoint, settings: Settings, host_free: int | None) -> Layout:
    try:
        return _shared(checkpoint, settings, host_free)
    except tensor_split.ContradictionError as error:
        one, _ = _lay_out(checkpoint, replace(settings, split_mode="layer", pipeline=False), host_free, None)
        return replace(one, unknowns=(*one.unknowns, Unknown(what="what each card holds under split mode tensor", why=str(error))))


def lay_out(checkpoint: Checkpoint, settings: Settings, *, host_free: int | None = None, ceilings: Mapping[str, int] | None = None) -> Layout:
    """Lay one launch out. Pure; bytes are exact for weights and caches, a band for compute buffers.

    With ``ceilings``, bytes by device, compute buffers are left at 0 once the rest alone is over one of them.
    """
    store: dict[tuple[Settings, int | None], Layout] = derived(checkpoint).setdefault("layouts", {})
    known = store.get((settings, host_free))
    if known is None:
        known = _cut(checkpoint, settings, host_free) if settings.split_mode == "tensor" and settings.devices else None
        known, whole = (known, True) if known is not None else _lay_out(checkpoint, settings, host_free, ceilings)
        if whole:
            if len(store) >= MOST_LAYOUTS:
                store.clear()
            store[settings, host_free] = known
    return known


#: Layouts of one checkpoint kept for a launch that is tried with many changes.
MOST_LAYOUTS = 256


def _lay_out(checkpoint: Checkpoint, settings: Settings, host_free: int | None, ceilings: Mapping[str, int] | None) -> tuple[Layout, bool]:
    """Return the layout, and whether its compute buffers were computed."""
    hyper = latent.adapted(checkpoint, settings)
    remarks: list[Remark] = [*latent.refusals(checkpoint, settings)]
    unknowns: list[Unknown] = []
    if hyper.unknown:
        unknowns.append(Unknown(what=f"memory module of architecture {hyper.architecture}", why=hyper.unknown))
    devices, problem = used_devices(settings)
    if problem is not None:
        remarks.append(problem)
    where = layer_devices(hyper, settings, devices, host_free)
    flash = settings.flash_attn != "off" and hyper.architecture not in NO_FLASH_ATTENTION
    remarks += refusals(hyper, settings)
    blocks = blocks_of(checkpoint, hyper, _table(checkpoint, hyper).stuck_names)
    here = all(d.kind in CUDA_KINDS for d in devices)
    kernels = not here or flash_works(blocks, settings.type_k, settings.type_v)
    quantised_v = CACHE_TYPES[settings.type_v][0] > 1
    if flash and settings.flash_attn == "auto" and not quantised_v and settings.split_mode != "tensor":
        if not kernels:
            on_device = [b for i, b in enumerate(blocks) if where[i] >= 0]
            flash = flash_works(on_device, settings.type_k, settings.type_v)
        flash = flash and flash_stays(blocks, where, cache_on_host=not settings.kv_offload)
    resolved = contexts.resolve(hyper, settings, flash=flash)
    sums, host, host_rows, taken = _place(checkpoint, hyper, settings, devices, where, remarks, unknowns)

    rollback = settings.n_rs_seq if hyper.architecture in ROLLBACK else 0
    kv = [0] * (len(devices) + 1)
    state = [0] * (len(devices) + 1)
    tables: dict[BufferRules, tuple[contexts.LayerCache, ...]] = {}
    for i in range(hyper.layers_all):
        device = where[i] if settings.kv_offload else -1
        rules = BUFFER_RULES.get(devices[device].kind, BUFFER_RULES["cpu"]) if device >= 0 else BUFFER_RULES["cpu"]
        table = tables.get(rules)
        if table is None:
            table = tables[rules] = contexts.layer_caches(
                hyper, resolved, rollback=rollback, align=rules.align, quant_row=rules.quant_row if settings.cache_rows_padded else 0,
                latent_values=settings.latent_values, per_head=settings.cache_rows_per_head,
            )
        kv[device] += table[i].kv
        state[device] += table[i].state

    shape = Shape(
        tokens=contexts.pad(min(resolved.n_ctx, resolved.n_ubatch), resolved.sequences), rows=resolved.n_outputs,
        sequences=resolved.sequences, streams=resolved.streams, cells=resolved.n_ctx_seq, window_cells=resolved.window_cells,
        flash=flash, flash_here=kernels, type_k=settings.type_k, type_v=settings.type_v, scores_cap=settings.scores_cap_bytes,
        rotated=settings.rotated_cache, half_mask=settings.half_mask, sum_apart=settings.expert_sum_apart,
        fuses=settings.split_mode != "tensor" or settings.graph_of_fork,
    )  # fmt: skip
    moved: dict[int, dict[str, int]] = {}
    if taken:
        by_name = {d.name: i for i, d in enumerate(devices)}
        rows = _table(checkpoint, hyper).rows
        for index, name in taken.items():
            row = rows[index]
            if row.place >= 0 and row.name.endswith(".weight"):
                to = by_name.get(name, -1)
                if to != where[min(row.place, len(where) - 1)]:
                    moved.setdefault(row.place, {})[row.name.split(".", 2)[-1].removesuffix(".weight")] = to
    pipeline = (
        len(devices) > 1 and settings.split_mode == "layer" and settings.kv_offload and all(w >= 0 for w in where)
        and (not settings.overrides or settings.copies_with_overrides)
    )  # fmt: skip
    pipeline = pipeline if settings.pipeline is None else settings.pipeline
    offered = settings.op_offload and shape.tokens >= settings.op_offload_min_batch and (settings.split_mode != "tensor" or settings.graph_of_fork)
    copied = _copied_bytes(checkpoint, hyper, moved) * settings.copies if pipeline and offered else 0
    placement = compute.Placement(
        devices=len(devices), where=where, offered=offered and not copied, pipeline=pipeline, copies=settings.copies,
        experts_on_first=settings.experts_on_first, mask_on_first=not settings.mask_per_device,
        cache_on_host=not settings.kv_offload, moved=moved,
    )  # fmt: skip
    spread = compute.spread_of(hyper, placement) if here and hyper.architecture in ENGINE_ARCHITECTURES else compute.UNMEASURED
    if settings.graph_of_fork or (not settings.graph_measured and not is_plain(hyper)):
        spread = compute.UNMEASURED
    over = ceilings is not None and any(sums[i].weights + sums[i].experts + kv[i] + state[i] > ceilings[d.name] for i, d in enumerate(devices))
    try:
        peaks, host_peak = ([0] * len(devices), 0) if over else (compute.buffers(checkpoint, hyper, shape, placement), compute.host_buffer(checkpoint, hyper, shape, placement))
    except (LookupError, ArithmeticError) as error:  # a block lacks what every graph of its kind has
        peaks, host_peak = [0] * len(devices), 0
        unknowns.append(Unknown(what="compute buffers", why=f"the blocks of this file are not those of {hyper.architecture}: {error}"))
    for i, peak in enumerate(peaks):
        if any(w == i for w in where[: hyper.layers]):
            peaks[i] = max(peak, latent.expanded(checkpoint, hyper, settings, resolved, first=i == 0))
    bands = [compute.Band.around(peak, spread) for peak in peaks]
    if copied:  # exact, whatever the graph
        bands[0] = compute.Band(certain=bands[0].certain + copied, likely=bands[0].likely + copied, at_most=bands[0].at_most + copied)
    on_host = compute.Band.around(host_peak, compute.HOST)
    what = f"compute buffer of a {shape.tokens}-token micro-batch"
    if placement.pipeline:
        what += f" with {settings.copies} pipeline copies of its inputs"
    if copied:
        what += " and of the experts in host memory"
    counts = [0] * (len(devices) + 1)
    for i in range(hyper.layers):
        counts[where[i]] += 1
    found = tuple(
        DeviceBytes(
            device=d.name, weights=sums[i].weights, experts=sums[i].experts, kv=kv[i], state=state[i], tensors=sums[i].count,
            largest_name=sums[i].name, largest_bytes=sums[i].nbytes, layers=counts[i],
            compute_certain=bands[i].certain, compute_likely=bands[i].likely, compute_at_most=bands[i].at_most, compute_what=what,
        )
        for i, d in enumerate(devices)
    )  # fmt: skip
    layout = Layout(
        devices=found,
        host=DeviceBytes(
            device="host", weights=host.weights, experts=host.experts, kv=kv[-1], state=state[-1], tensors=host.count,
            largest_name=host.name, largest_bytes=host.nbytes, layers=counts[-1],
            compute_certain=on_host.certain, compute_likely=on_host.likely, compute_at_most=on_host.at_most, compute_what=what,
        ),
        host_weights=_host_weights(settings, devices, hyper, host_rows),
        resolved=resolved, layer_device=where, remarks=tuple(remarks), unknowns=tuple(unknowns),
        facts={"n_ctx": resolved.n_ctx, "n_ctx_seq": resolved.n_ctx_seq, "flash_attn": flash, "overridden": len(taken), "pipeline_copies": settings.copies if pipeline else 1},
    )  # fmt: skip
    return layout, not over
