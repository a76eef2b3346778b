"""What the model files hold: the Checkpoint and its parts. Pure values, no reading here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A metadata value that is kept: scalars, or a tuple for an array that some reader wants.
MetaValue = bool | int | float | str | tuple[Any, ...]


class Role(StrEnum):
    """What a tensor is for. One role per tensor, decided from its name alone."""

    EMBEDDING = "embedding"
    LAYER_EMBEDDING = "per-layer-embedding"
    ATTENTION = "attention"
    ROUTER = "router"
    EXPERT = "expert"
    SHARED_EXPERT = "shared-expert"
    FEED_FORWARD = "feed-forward"
    NORM = "norm"
    RECURRENT = "recurrent"
    OUTPUT = "output"
    MTP = "mtp"  # next-token prediction blocks (but their expert towers are EXPERT)
    VISION = "vision"
    AUDIO = "audio"
    OTHER = "other"


class Tensor(NamedTuple):
    """One row of the tensor table."""

    name: str
    type_id: int  # ggml type id as stored in the file
    type_name: str  # "Q4_K"; "type-77" when no table knows it
    shape: tuple[int, ...]  # ggml order: shape[0] is the row length
    nbytes: int  # bytes of the data, without padding
    offset: int  # from the start of the data section of its file
    file: int  # index into Checkpoint.files
    role: Role
    layer: int | None  # block index, None outside blocks
    sized: bool = True  # False: the type is unknown, nbytes is the gap to the next offset

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for n in self.shape:
            count *= n
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something wrong with a model file; rules turn these into findings."""

    code: str  # slug: "missing-shard", "tensor-outside-file", "unknown-type", ...
    message: str  # names the file, and the tensor or key
    file: str
    subject: str | None = None  # tensor or key
    fatal: bool = True  # False: worth a warning, the engine would load it


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFile:
    """One file of the checkpoint."""

    path: str
    size_bytes: int | None  # None for a census, whose files are elsewhere
    data_offset: int
    version: int  # GGUF version
    big_endian: bool = False
    shard: int | None = None  # split.no


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Architecture, hyperparameters and tensor table of a model, over all its shards.

    A census is a Checkpoint saved as JSON; ``source`` tells the two apart.
    """

    path: str  # as the user gave it
    source: Literal["gguf", "census"]
    files: tuple[ModelFile, ...]
    metadata: Mapping[str, MetaValue]  # of the first shard; arrays only where wanted
    array_lengths: Mapping[str, int] = field(default_factory=dict)  # of every array, kept or not
    tensors: tuple[Tensor, ...] = ()
    faults: tuple[Fault, ...] = ()
    declared_tensors: int | None = None  # split.tensors.count, or the header's count
    note: str | None = None  # e.g. "reconstructed from published totals"

    def __post_init__(self) -> None:
        # Checkpoints are shared between judgements; nobody changes what a file says.
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        object.__setattr__(self, "array_lengths", MappingProxyType(dict(self.array_lengths)))

    @cached_property
    def architecture(self) -> str:
        """``general.architecture``, or "" when absent."""
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    @property
    def name(self) -> str:
        """``general.name`` or the file's stem, for headings."""
        value = self.metadata.get("general.name")
        if isinstance(value, str) and value and value != "n/a":
            return value
        return self.path.rsplit("/", 1)[-1].removesuffix(".gguf").removesuffix(".census.json")

    def hparam(self, key: str, default: MetaValue | None = None) -> MetaValue | None:
        """Return metadata ``<architecture>.<key>``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int = 0) -> int:
        """Return ``<architecture>.<key>`` as an int; an array, a text, NaN or infinity counts as absent."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, float) and not isfinite(value):
            return default
        return int(value) if isinstance(value, (int, float)) else default

    @cached_property
    def by_name(self) -> Mapping[str, Tensor]:
        """Tensors by name."""
        return {t.name: t for t in self.tensors}

    @cached_property
    def tensor_bytes(self) -> int:
        """Sum over the tensor table, without padding."""
        return sum(t.nbytes for t in self.tensors)

    def bytes_by(self, attribute: Literal["role", "type_name", "layer"]) -> dict[Any, int]:
        """Return bytes summed by one attribute of the tensors, in order of appearance."""
        sums: dict[Any, int] = {}
        for t in self.tensors:
            key = getattr(t, attribute)
            sums[key] = sums.get(key, 0) + t.nbytes
        return sums
