"""NVIDIA devices through cuda-python: the driver's attributes, the management library's memory figures.

Nothing is allocated on a device and no context is left behind. Free memory comes from the management
library; where that answers N/A (GB10) a short child process asks the driver, which needs a context of
its own for the moment. The order of devices is the driver's, so CUDA_VISIBLE_DEVICES and
CUDA_DEVICE_ORDER are honoured as the engine will honour them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residency.text import clean

from .model import Device, Pool

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Driver API attribute numbers (cuda.h, CUDA 13).
_ATTRIBUTES = {
    "integrated": 18, "unified_addressing": 41, "managed_memory": 83, "pageable_access": 88,
    "concurrent_managed_access": 89, "host_page_tables": 100,
}  # fmt: skip
_MAJOR, _MINOR = 75, 76
#: The shared pool of an integrated device reports the host's memory to within this.
_SAME_MEMORY_BYTES = 2**28
_CHILD_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class CudaProbe:
    """What the driver said."""

    pools: tuple[Pool, ...] = ()
    devices: tuple[Device, ...] = ()
    facts: tuple[str, ...] = ()
    driver_version: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


def driver_fact() -> str | None:
    """Return why there is no usable NVIDIA driver, or None when its library loads. Costs no CUDA import."""
    if sys.platform == "darwin":
        return "no NVIDIA driver: CUDA does not exist on macOS"
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(name)
    except OSError as error:
        text = str(error)
        if "No such file" in text or "not found" in text or "cannot open" in text:
            return "no NVIDIA driver on this machine"
        return f"the NVIDIA driver library cannot be loaded: {clean(text)}"
    return None


def probe_cuda(host: Pool) -> CudaProbe:
    """Return the NVIDIA devices; one clear fact when there are none or they cannot be read.

    Args:
        host: the host's pool, to recognise a device that shares it.
    """
    fact = driver_fact()
    if fact is not None:
        return CudaProbe(facts=(fact,))
    try:
        from cuda.bindings import driver
    except ImportError:
        return CudaProbe(facts=("an NVIDIA driver is present, but cuda-python is not installed, so its devices are unknown",))
    try:
        return _Probe(driver, host).run()
    except Exception as error:  # noqa: BLE001 - a broken driver throws whatever it likes, and is one fact
        from residency.errors import describe

        return CudaProbe(facts=(f"the NVIDIA driver does not answer: {clean(describe(error))}",))


class _Probe:
    """One look at all devices."""

    def __init__(self, driver: Any, host: Pool) -> None:
        self.driver, self.host = driver, host
        self.facts: list[str] = []
        self.unknown: dict[str, str] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the result of a driver call; None, with the reason noted, when it fails."""
        status, *values = getattr(self.driver, name)(*arguments)
        if int(status) != 0:
            self.unknown[name] = f"the driver answers {getattr(status, 'name', status)}"
            return None
        return values[0] if len(values) == 1 else tuple(values)

    def run(self) -> CudaProbe:
        (status,) = self.driver.cuInit(0)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = f" (CUDA_VISIBLE_DEVICES={clean(visible)})" if visible is not None else ""
        if int(status) == 100:
            return CudaProbe(facts=(f"an NVIDIA driver is present, but no device is visible{shown}",))
        if int(status) != 0:
            return CudaProbe(facts=(f"the NVIDIA driver does not start: {getattr(status, 'name', status)}{shown}",))
        count = self.call("cuDeviceGetCount") or 0
        management = _Management()
        handles = [self.call("cuDeviceGet", i) for i in range(count)]
        found = [self.device(i, handle, handles, management) for i, handle in enumerate(handles)]
        pools = tuple(pool for _, pool in found if pool is not None)
        self.facts.insert(0, f"{count} NVIDIA device{'s' if count != 1 else ''}{shown}")
        self.facts += management.facts
        return CudaProbe(
            pools=pools, devices=tuple(device for device, _ in found), facts=tuple(self.facts),
            driver_version=management.driver_version or self._version(), unknown=self.unknown,
        )  # fmt: skip

    def _version(self) -> str | None:
        number = self.call("cuDriverGetVersion")
        return f"CUDA {number // 1000}.{number % 1000 // 10}" if number else None

    def device(self, index: int, handle: Any, handles: list[Any], management: _Management) -> tuple[Device, Pool | None]:
        attributes: dict[str, Any] = {
            name: bool(value) if (value := self.call("cuDeviceGetAttribute", self._attribute(number), handle)) is not None else None
            for name, number in _ATTRIBUTES.items()
        }
        major, minor = (self.call("cuDeviceGetAttribute", self._attribute(n), handle) for n in (_MAJOR, _MINOR))
        total = self.call("cuDeviceTotalMem", handle)
        pci = _decoded(self.call("cuDeviceGetPCIBusId", 32, handle))
        uuid = _uuid(self.call("cuDeviceGetUuid", handle))
        name = f"CUDA{index}"
        memory = management.memory(pci, uuid)
        free, evidence, context = memory.free, "management library (NVML), no context", None
        if free is None:
            # The child's context is gone from this figure already, so the engine's own must not be taken again.
            free, evidence, context = free_in_child(index), "driver in a child process, less a driver context", 0
            if free is None:
                self.unknown[f"free memory of {name}"] = f"the management library answers {memory.reason}, and the driver did not answer either"
        if free is not None and total is not None and free > total:
            self.facts.append(f"{name} reports {free} bytes free of {total}: more than it has, so its free memory is not believed")
            free = None
        shared = attributes["integrated"] is True and (
            self.host.total_bytes is None or total is None or abs(total - self.host.total_bytes) <= _SAME_MEMORY_BYTES
        )
        if attributes["integrated"] is False and total is not None and total == self.host.total_bytes:
            self.facts.append(f"{name} calls itself discrete but reports exactly the host's memory")
        peers = tuple(
            f"CUDA{other}" for other, peer in enumerate(handles) if other != index and self.call("cuDeviceCanAccessPeer", handle, peer)
        )
        device = Device(
            name=name, kind="cuda", pool=self.host.name if shared else name, model=_decoded(self.call("cuDeviceGetName", 128, handle)),
            compute_capability=f"{major}.{minor}" if major is not None and minor is not None else None, pci_id=pci, uuid=uuid,
            display_attached=memory.display, memory_query=memory.free is not None, peers=peers, tenants=memory.tenants,
            context_bytes=None if shared or free is None else context, **attributes,
        )  # fmt: skip
        pool = None if shared else Pool(name=name, total_bytes=total, free_bytes=free, evidence=f"total: driver; free: {evidence}")
        return device, pool

    def _attribute(self, number: int) -> Any:
        return self.driver.CUdevice_attribute(number)


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """What the management library knows of one device."""

    free: int | None = None
    display: bool | None = None
    tenants: tuple[str, ...] = ()
    reason: str = ""


class _Management:
    """The management library (NVML), or the reason it is not there."""

    def __init__(self) -> None:
        self.facts: list[str] = []
        self.driver_version: str | None = None
        self._library: Any = None
        try:
            from cuda.bindings import nvml

            nvml.init_v2()
            self.driver_version = str(nvml.system_get_driver_version())
            self._library = nvml
        except Exception as error:  # noqa: BLE001 - absent, too old or broken: one fact
            from residency.errors import describe

            self.facts.append(f"the management library is not usable: {clean(describe(error))}")

    def memory(self, pci: str | None, uuid: str | None) -> _Memory:
        """Return free bytes, display and tenants of a device; what cannot be read is None."""
        library = self._library
        if library is None:
            return _Memory(reason="nothing")
        handle = None
        for getter, key in (("device_get_handle_by_uuid", uuid), ("device_get_handle_by_pci_bus_id_v2", pci)):
            if key is not None and handle is None:
                handle, _ = _asked(lambda g=getter, k=key: getattr(library, g)(k))
        if handle is None:
            return _Memory(reason="nothing for this device")
        info, reason = _asked(lambda: library.device_get_memory_info_v2(handle))
        free = int(info.free) if info is not None else None
        display, _ = _asked(lambda: bool(int(library.device_get_display_active(handle))))
        return _Memory(free=free or None, display=display, tenants=self._tenants(handle), reason=reason)

    def _tenants(self, handle: Any) -> tuple[str, ...]:
        found = []
        for kind in ("compute", "graphics"):
            processes, _ = _asked(lambda k=kind: list(getattr(self._library, f"device_get_{k}_running_processes_v3")(handle)))
            for process in processes or ():
                pid = int(process.pid)
                if pid == os.getpid():
                    continue
                used = int(getattr(process, "used_gpu_memory", 0) or 0)
                size = f" {used / 2**20:.0f} MiB" if 0 < used < 2**60 else ""
                text = f"pid {pid} {_program(pid)}{size}"
                if text not in found:
                    found.append(text)
        return tuple(found)


def _asked(question: Any) -> tuple[Any, str]:
    """Return (answer, "") or (None, reason) of a management call."""
    try:
        return question(), ""
    except Exception as error:  # noqa: BLE001 - each figure may be refused by itself
        return None, type(error).__name__


def _program(pid: int) -> str:
    try:
        return clean(Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return "(name not readable)"


def _decoded(value: Any) -> str | None:
    if isinstance(value, bytes):
        return clean(value.split(b"\0", 1)[0].decode("utf-8", "replace").strip()) or None
    return clean(str(value)) if value else None


def _uuid(value: Any) -> str | None:
    raw = getattr(value, "bytes", None)
    if not isinstance(raw, bytes) or len(raw) < 16:
        return None
    text = raw[:16].hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_CHILD = """
import sys
from cuda.bindings import driver as d
d.cuInit(0)
_, device = d.cuDeviceGet(int(sys.argv[1]))
status, context = d.cuDevicePrimaryCtxRetain(device)
if int(status) == 0:
    d.cuCtxSetCurrent(context)
    status, free, total = d.cuMemGetInfo()
    if int(status) == 0:
        print(free)
    d.cuDevicePrimaryCtxRelease(device)
"""


def free_in_child(index: int) -> int | None:
    """Return the free bytes the driver reports, asked by a process that ends at once; None when it does not answer."""
    import subprocess

    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and text
            [sys.executable, "-c", _CHILD, str(index)], capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.strip()
    return int(text) if done.returncode == 0 and text.isdigit() else None
