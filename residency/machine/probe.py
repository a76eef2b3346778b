"""Probe: the machine residency runs on, as a Machine. Reads, never allocates on a device."""

from __future__ import annotations

import platform
from pathlib import Path

from .cuda import probe_cuda
from .host import probe_host
from .model import Machine
from .sysfs import probe_sysfs


def probe(root: Path = Path("/")) -> Machine:
    """Return this machine: host pool and devices; what cannot be read is unknown, with the reason.

    Args:
        root: where ``/proc`` and ``/sys`` are looked for; tests give a folder of their own.
    """
    host_pool, host, facts, unknown = probe_host(root)
    cuda = probe_cuda(host_pool)
    other_pools, other_devices, other_unknown = probe_sysfs(root, host_pool)
    return Machine(
        name=platform.node() or "this machine",
        pools=(*cuda.pools, *other_pools, host_pool),
        devices=(*cuda.devices, *other_devices),
        host=host,
        host_pool_name=host_pool.name,
        source="probe",
        facts=(*cuda.facts, *facts),
        driver_version=cuda.driver_version,
        unknown={**unknown, **cuda.unknown, **other_unknown},
    )
