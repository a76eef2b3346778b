"""The machine: pools of physical memory and the devices that draw from them.

On a card with its own memory the pool carries the card's name. On unified memory a device and
the host name the *same* pool, so every byte is counted once without a special case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Physical memory. ``None`` is *unknown*, never zero."""

    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None  # before the launch; page cache that can be dropped counts as free
    reserved_bytes: int = 0  # kept back by the machine's owner (display, other tenants)
    ceiling_bytes: int | None = None  # usable ceiling below the reported total (GTT, working set, managed)
    evidence: str | None = None


def usable_bytes(pool: Pool, *, host_bytes: int = 0) -> int | None:
    """Return what a launch may take from a pool, in bytes: what is free less what is reserved. None: unknown.

    A ceiling is a device's (working set, GTT): what other processes of the host hold does not count
    against it, and neither does what the launch's own host part takes (``host_bytes``).
    """
    free = pool.free_bytes if pool.free_bytes is not None else pool.total_bytes
    if free is None:
        return None
    room = max(0, free - pool.reserved_bytes)
    return room if pool.ceiling_bytes is None else min(room, pool.ceiling_bytes + host_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Something that computes and draws from a pool. Predicates: True, False or None (unknown)."""

    name: str  # the engine-neutral name: CUDA0, ROCm0, Vulkan0, Metal, CPU
    kind: str  # cuda | rocm | metal | vulkan | sycl | cpu
    pool: str
    model: str | None = None
    compute_capability: str | None = None
    pci_id: str | None = None
    uuid: str | None = None
    integrated: bool | None = None
    unified_addressing: bool | None = None
    managed_memory: bool | None = None
    pageable_access: bool | None = None  # kernels can read plain host memory
    host_page_tables: bool | None = None
    concurrent_managed_access: bool | None = None
    display_attached: bool | None = None
    memory_query: bool | None = None  # the management tool answers; False = N/A
    driver_model: str | None = None  # WDDM | TCC | None
    peers: tuple[str, ...] | None = None  # devices it can reach directly; None = unknown
    tenants: tuple[str, ...] = ()  # other processes that hold its memory, "pid 123 llama-server 1.4 GiB"
    context_bytes: int | None = None  # measured driver context, if known
    largest_allocation_bytes: int | None = None  # the driver's limit for one allocation (Vulkan: maxMemoryAllocationSize)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Facts of the host that are not a pool's size."""

    memlock_bytes: int | None = None  # RLIMIT_MEMLOCK; -1 = unlimited
    swap_free_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    container: bool | None = None
    wsl: bool | None = None
    system: str | None = None  # linux | darwin | windows


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Pools, devices and host facts; probed, or declared in a profile."""

    name: str
    pools: tuple[Pool, ...]
    devices: tuple[Device, ...] = ()
    host_pool_name: str = "host"
    host: Host = field(default_factory=Host)
    source: str = "profile"  # profile | probe
    facts: tuple[str, ...] = ()  # one clear sentence each: "no NVIDIA driver", ...
    driver_version: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)  # fact -> reason it is unknown

    def pool(self, name: str) -> Pool | None:
        """Return the pool of that name."""
        return self._pools.get(name)

    @cached_property
    def _pools(self) -> Mapping[str, Pool]:
        return {p.name: p for p in reversed(self.pools)}  # every rule asks; of two with one name the first counts

    def device(self, name: str) -> Device | None:
        """Return the device of that name; case counts for nothing."""
        folded = name.casefold()
        return next((d for d in self.devices if d.name.casefold() == folded), None)

    @cached_property
    def host_pool(self) -> Pool:
        """The pool plain host memory comes from: the one named so, else the only pool there is."""
        found = self.pool(self.host_pool_name)
        if found is not None:
            return found
        shared = [p for p in self.pools if any(d.pool == p.name and d.integrated for d in self.devices)]
        if len(self.pools) == 1:
            return self.pools[0]
        if shared:
            return shared[0]
        return Pool(name=self.host_pool_name)

    def is_unified(self, device: Device) -> bool:
        """Whether the device draws from the same pool as the host."""
        return device.pool == self.host_pool.name

    @cached_property
    def accelerators(self) -> tuple[Device, ...]:
        """Every device that is not the CPU."""
        return tuple(d for d in self.devices if d.kind != "cpu")
