"""NVIDIA devices through cuda-python: the driver API only, no context, nothing allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .model import Device, Pool


@dataclass(frozen=True, kw_only=True)
class CudaProbe:
    """What the driver said."""

    pools: tuple[Pool, ...] = ()
    devices: tuple[Device, ...] = ()
    facts: tuple[str, ...] = ()
    driver_version: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


def probe_cuda(host: Pool) -> CudaProbe:  # noqa: ARG001 - needed to recognise a shared pool
    """Return the NVIDIA devices; one clear fact when there are none or none can be read."""
    from ctypes.util import find_library

    if find_library("cuda") is None:
        return CudaProbe(facts=("no NVIDIA driver on this machine",))
    return CudaProbe(facts=("an NVIDIA driver is present; its devices are not read by this version",))
