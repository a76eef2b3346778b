"""The residency knobs: engine-neutral names for what decides where bytes live.

Every knob is optional; ``None`` means "not asked for", which is not the engine's default. Units
stand beside each knob. ``residency schema`` prints this module as JSON Schema.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .sizes import LARGEST, ByteSize, Percent

Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=-LARGEST - 1, le=2 * LARGEST + 1)]  # 64 bits, signed or not: seeds use all of them
Finite = Annotated[float, Field(allow_inf_nan=False)]
Option = bool | Whole | Finite | str | list[str] | list[Whole] | list[Finite]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, whole numbers stay whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

# fmt: off


class EngineKnobs(Section):
    """Which engine starts, and which version of it."""

    name: str | None = Field(default=None, title="Engine", description="Name of the engine.", examples=["llama.cpp", "vllm.cpp", "strata"])
    version: str | None = Field(default=None, title="Engine version", description="Version that will start.", examples=["0.1.35"])
    options: dict[str, Option] | None = Field(default=None, title="Engine options", description="Settings only this engine knows, by its own long name without dashes.", examples=[{"cache-ram": 4096}])


class ModelKnobs(Section):
    """The model files. Every path may also be a census file."""

    path: str | None = Field(default=None, title="Model", description="GGUF file, any shard of a split one, or a census.", examples=["model-00001-of-00003.gguf"])
    mmproj: str | None = Field(default=None, title="Projector", description="Vision or audio projector (mmproj) GGUF.", examples=["mmproj.gguf"])
    draft: str | None = Field(default=None, title="Draft model", description="Draft model GGUF for speculation.", examples=["draft.gguf"])
    adapters: list[str] | None = Field(default=None, title="Adapters", description="LoRA and control-vector GGUF files.", examples=[["lora.gguf"]])


class DeviceKnobs(Section):
    """Where the engine computes."""

    kind: Literal["auto", "cpu", "cuda", "rocm", "metal", "vulkan", "sycl"] | None = Field(default=None, title="Device kind", description="Back end to compute on.", examples=["cuda"])
    ids: list[str] | None = Field(default=None, title="Devices", description="Devices in the engine's order; an empty list means none.", examples=[["CUDA0", "CUDA1"]])
    main: Count | None = Field(default=None, title="Main device", description="Index of the device used when the model is not split.", examples=[0])


class ContextKnobs(Section):
    """How many tokens are held and computed at once."""

    length: Count | None = Field(default=None, title="Context length", description="Tokens over all sequences; 0 = what the model was trained for.", examples=[32768], json_schema_extra={"unit": "tokens"})
    sequences: Positive | None = Field(default=None, title="Sequences", description="Parallel sequences (slots).", examples=[1], json_schema_extra={"unit": "sequences"})
    unified: bool | None = Field(default=None, title="Unified KV", description="One cache shared by all sequences.", examples=[False])
    batch: Positive | None = Field(default=None, title="Batch", description="Tokens per logical batch.", examples=[2048], json_schema_extra={"unit": "tokens"})
    micro_batch: Positive | None = Field(default=None, title="Micro-batch", description="Tokens per physical batch; compute buffers grow with it.", examples=[512], json_schema_extra={"unit": "tokens"})
    prefill: Count | Literal["auto"] | None = Field(default=None, title="Prompt chunk", description="Tokens per prompt chunk, for engines with a separate prompt path.", examples=[4096], json_schema_extra={"unit": "tokens"})
    flash_attention: Literal["auto", "on", "off"] | None = Field(default=None, title="Flash attention", description="Fused attention; off costs memory that grows with the context.", examples=["auto"])
    full_window: bool | None = Field(default=None, title="Full sliding window", description="Keep the whole context for sliding-window layers.", examples=[False])


class KvKnobs(Section):
    """The KV cache."""

    key_type: str | None = Field(default=None, title="Key type", description="Element type of cached keys.", examples=["f16", "q8_0", "int8"])
    value_type: str | None = Field(default=None, title="Value type", description="Element type of cached values.", examples=["f16", "q8_0", "int8"])
    on_device: bool | None = Field(default=None, title="KV on device", description="False keeps the cache in host memory.", examples=[True])
    resident: Count | None = Field(default=None, title="Resident tokens", description="Tokens kept on the device, the rest streamed from host memory; 0 = all.", examples=[32768], json_schema_extra={"unit": "tokens"})
    blocks: Count | None = Field(default=None, title="Blocks", description="Number of cache blocks of a paged cache; 0 = automatic.", examples=[256], json_schema_extra={"unit": "blocks"})
    block_size: Positive | None = Field(default=None, title="Block size", description="Tokens per block of a paged cache.", examples=[32], json_schema_extra={"unit": "tokens"})
    memory: ByteSize | None = Field(default=None, title="KV memory", description="Bytes for the cache pool.", examples=["4GiB"], json_schema_extra={"unit": "bytes"})


class TensorOverride(Section):
    """One placement override; the first whose pattern is found in a tensor's name wins."""

    pattern: str = Field(title="Pattern", description="Regular expression searched in the tensor name.", examples=[r"ffn_.*_exps"])
    device: str = Field(title="Target", description="Device name, or CPU.", examples=["CPU"])


class LayersKnobs(Section):
    """Which layers live on which device."""

    on_device: Count | Literal["all", "auto"] | None = Field(default=None, title="Layers on device", description="Layers computed on accelerators; the output counts as one.", examples=["all", 24], json_schema_extra={"unit": "layers"})
    split: Literal["none", "layer", "row", "tensor", "auto"] | None = Field(default=None, title="Split mode", description="How a model is spread over several devices.", examples=["layer"])
    ratio: list[Share] | None = Field(default=None, title="Split ratio", description="Share of each device, in any unit.", examples=[[3, 1]])
    first: list[Count] | None = Field(default=None, title="First layers", description="First layer of each later device.", examples=[[24]])
    overrides: list[TensorOverride] | None = Field(default=None, title="Overrides", description="Placement by tensor name, first match wins.", examples=[[{"pattern": "exps", "device": "CPU"}]])


class ExpertsKnobs(Section):
    """The experts of a mixture-of-experts model."""

    on_host: Count | Literal["all"] | None = Field(default=None, title="Expert layers on host", description="Layers whose experts stay in host memory, counted from the first.", examples=[0, "all"], json_schema_extra={"unit": "layers"})
    stream: bool | None = Field(default=None, title="Stream experts", description="Bring experts in when a token needs them.", examples=[False])
    slots: Count | None = Field(default=None, title="Expert slots", description="Slots of the store that holds streamed experts.", examples=[4000], json_schema_extra={"unit": "slots"})
    slot_size: ByteSize | None = Field(default=None, title="Slot size", description="Bytes of one slot.", examples=["2490368"], json_schema_extra={"unit": "bytes"})
    cache: Count | Literal["auto"] | None = Field(default=None, title="Expert cache", description="Experts kept in device memory: slots, or what is left over.", examples=["auto"], json_schema_extra={"unit": "experts"})


class VisionKnobs(Section):
    """Images."""

    enabled: bool | None = Field(default=None, title="Vision", description="Whether requests with images must work.", examples=[True])
    device: str | None = Field(default=None, title="Vision device", description="Device of the encoder, or cpu.", examples=["cpu"])
    max_tokens: Positive | None = Field(default=None, title="Image tokens", description="Most tokens one image may take.", examples=[1024], json_schema_extra={"unit": "tokens"})


class SpeculationKnobs(Section):
    """Speculative decoding."""

    kind: str | None = Field(default=None, title="Method", description="Method, in the engine's own word.", examples=["draft-mtp"])
    window: Count | None = Field(default=None, title="Window", description="Tokens drafted at once.", examples=[4], json_schema_extra={"unit": "tokens"})


class MemoryKnobs(Section):
    """How memory is taken."""

    reserve: ByteSize | Percent | None = Field(default=None, title="Reserve", description="Device memory to keep free, per device.", examples=["1800MiB", "5%"], json_schema_extra={"unit": "bytes"})
    load: Literal["auto", "mmap", "none", "mlock", "mmap+mlock", "dio"] | None = Field(default=None, title="Load mode", description="How weights are read.", examples=["mmap"])
    prefault: bool | None = Field(default=None, title="Prefault", description="Read the whole mapping at start.", examples=[False])
    pinned: bool | None = Field(default=None, title="Pinned host memory", description="Whether host copies are page-locked for the device.", examples=[True])


class MachineKnobs(Section):
    """The machine to judge against."""

    profile: str | None = Field(default=None, title="Profile", description="Name or path of a machine profile.", examples=["rtx-3090"])


# fmt: on


class Knobs(Section):
    """A launch file."""

    engine: EngineKnobs = EngineKnobs()
    model: ModelKnobs = ModelKnobs()
    device: DeviceKnobs = DeviceKnobs()
    context: ContextKnobs = ContextKnobs()
    kv: KvKnobs = KvKnobs()
    layers: LayersKnobs = LayersKnobs()
    experts: ExpertsKnobs = ExpertsKnobs()
    vision: VisionKnobs = VisionKnobs()
    speculation: SpeculationKnobs = SpeculationKnobs()
    memory: MemoryKnobs = MemoryKnobs()
    machine: MachineKnobs = MachineKnobs()


#: Every section by name, in the order of a launch file.
SECTIONS: dict[str, type[Section]] = {name: type(field.default) for name, field in Knobs.model_fields.items()}


#: Smallest value of the knobs that must be above zero, for readers of an engine's own command line.
KNOB_TYPES = {"context.batch": 1, "context.micro_batch": 1, "context.sequences": 1, "kv.block_size": 1, "vision.max_tokens": 1}
