"""Machines: profiles, host probe under cgroups, and what drivers of every temper say."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from residency.data import named
from residency.errors import InputError
from residency.machine import Machine, Pool, resolve_machine
from residency.machine import cuda as cuda_module
from residency.machine.cuda import probe_cuda
from residency.machine.host import probe_host
from residency.machine.profile import machine_from_mapping, to_mapping
from residency.machine.show import render
from residency.machine.sysfs import probe_sysfs
from residency.machine.visible import as_seen

GIB = 2**30


def put(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       33554432 kB\nMemFree:  1000 kB\nMemAvailable:   25165824 kB\nSwapFree: 1048576 kB\n"


# -- profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(named("machines", ".toml")))
def test_every_shipped_profile_reads_and_round_trips(name):
    machine = resolve_machine(name)
    again = machine_from_mapping(json.loads(json.dumps(to_mapping(machine))))
    assert (again.pools, again.devices, again.host, again.host_pool.name) == (machine.pools, machine.devices, machine.host, machine.host_pool.name)
    import tomli

    assert machine_from_mapping(tomli.loads(render(machine, "toml"))).pools == machine.pools


def test_the_gb10_is_one_pool():
    machine = resolve_machine("dgx-spark-gb10")
    assert [(p.name, p.total_bytes, p.free_bytes) for p in machine.pools] == [("unified", 128452956160, 122059919360)]
    (device,) = machine.devices
    assert (device.integrated, device.unified_addressing, device.memory_query) == (True, True, False)
    assert machine.is_unified(device)
    assert machine.host_pool is machine.pools[0]


def test_a_profile_can_extend_another(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "rtx-3090"\nname = "mine"\n[[pools]]\nname = "CUDA0"\nfree = "20GiB"\n')
    machine = resolve_machine(path)
    assert machine.name == "mine"
    assert machine.pool("CUDA0").free_bytes == 20 * GIB
    assert machine.pool("CUDA0").total_bytes == 24124 * 2**20
    assert machine.device("cuda0").compute_capability == "8.6"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "needs at least one pool"),
        ({"pools": [{"name": "host", "total_bytes": 10, "free_bytes": 11}]}, "free is 11 bytes, more than its total of 10"),
        ({"pools": [{"name": "host", "total": "1 gib"}]}, "is not a size"),
        ({"pools": [{"name": "host"}], "devices": [{"name": "X", "kind": "cuda", "pool": "nowhere"}]}, 'pool names "nowhere"'),
        ({"pools": [{"name": "a"}, {"name": "a"}]}, 'two pools are called "a"'),
        ({"pools": 7}, "must be a list of tables"),
        ({"pools": [{"name": "host", "total_bytes": True}]}, "is not a whole number"),
        ({"pools": [{"name": "host", "total_bytes": 2**80}]}, "outside what a machine can have"),
    ],
)
def test_a_bad_profile_is_refused_with_a_reason(document, said):
    with pytest.raises(InputError, match=said):
        machine_from_mapping(document)


def test_a_profile_that_extends_itself_is_refused(tmp_path):
    path = tmp_path / "loop.toml"
    path.write_text(f'extends = "{path}"\n[[pools]]\nname = "host"\n')
    with pytest.raises(InputError, match="the profile extends itself"):
        resolve_machine(path)


# -- host ------------------------------------------------------------------------------------------------------------


def test_the_host_without_limits(tmp_path):
    put(tmp_path, proc__meminfo=MEMINFO)
    pool, host, facts, unknown = probe_host(tmp_path)
    assert (pool.total_bytes, pool.free_bytes, host.swap_free_bytes) == (32 * GIB, 24 * GIB, GIB)
    assert not facts
    assert not unknown


def test_a_cgroup_v2_limit_is_the_pool_and_its_cache_counts_as_free(tmp_path):
    put(
        tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/system.slice/engine.service\n",
        **{
            "sys__fs__cgroup__system.slice__engine.service__memory.max": str(16 * GIB),
            "sys__fs__cgroup__system.slice__engine.service__memory.current": str(10 * GIB),
            "sys__fs__cgroup__system.slice__engine.service__memory.stat": f"anon 1\nactive_file {2 * GIB}\ninactive_file {3 * GIB}\n",
            "sys__fs__cgroup__system.slice__memory.max": "max",
        },
    )  # fmt: skip
    pool, host, facts, _ = probe_host(tmp_path)
    assert (pool.total_bytes, pool.free_bytes, host.cgroup_limit_bytes) == (16 * GIB, 11 * GIB, 16 * GIB)
    assert facts == (f"memory cgroup limits this process to {16 * GIB} bytes",)


def test_the_tightest_limit_of_the_path_counts(tmp_path):
    put(
        tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/a/b\n",
        **{
            "sys__fs__cgroup__a__memory.max": str(8 * GIB), "sys__fs__cgroup__a__memory.current": str(7 * GIB),
            "sys__fs__cgroup__a__b__memory.max": str(12 * GIB), "sys__fs__cgroup__a__b__memory.current": str(GIB),
        },
    )  # fmt: skip
    pool, *_ = probe_host(tmp_path)
    assert (pool.total_bytes, pool.free_bytes) == (8 * GIB, GIB)


def test_a_cgroup_v1_limit(tmp_path):
    put(
        tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="4:memory:/docker/x\n1:name=systemd:/docker/x\n",
        **{
            "sys__fs__cgroup__memory__docker__x__memory.limit_in_bytes": str(4 * GIB),
            "sys__fs__cgroup__memory__docker__x__memory.usage_in_bytes": str(3 * GIB),
            "sys__fs__cgroup__memory__docker__x__memory.stat": f"total_inactive_file {GIB}\n",
            "sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712",
        },
    )  # fmt: skip
    pool, *_ = probe_host(tmp_path)
    assert (pool.total_bytes, pool.free_bytes) == (4 * GIB, 2 * GIB)


def test_a_host_that_cannot_be_read_is_unknown_not_zero(tmp_path):
    pool, _, _, unknown = probe_host(tmp_path)
    assert (pool.total_bytes, pool.free_bytes) == (None, None)
    assert "host memory" in unknown


# -- NVIDIA ----------------------------------------------------------------------------------------------------------


class Status(int):
    name = "CUDA_SUCCESS"


class FakeDriver(types.SimpleNamespace):
    """The driver API of cuda-python for a list of made-up devices."""

    def __init__(self, devices, init=0):
        super().__init__()
        self.devices, self.init = devices, init
        self.CUdevice_attribute = int

    def cuInit(self, _flags):
        return (Status(self.init),)

    def cuDeviceGetCount(self):
        return Status(0), len(self.devices)

    def cuDeviceGet(self, index):
        return Status(0), index

    def cuDeviceGetAttribute(self, number, handle):
        return Status(0), self.devices[handle]["attributes"].get(number, 0)

    def cuDeviceTotalMem(self, handle):
        return Status(0), self.devices[handle]["total"]

    def cuDeviceGetName(self, _size, handle):
        return Status(0), self.devices[handle]["name"].encode() + b"\0\0"

    def cuDeviceGetPCIBusId(self, _size, handle):
        return Status(0), f"0000:0{handle}:00.0".encode()

    def cuDeviceGetUuid(self, handle):
        return Status(0), types.SimpleNamespace(bytes=bytes([handle]) * 16)

    def cuDeviceCanAccessPeer(self, a, b):
        return Status(0), int(self.devices[a].get("peer", False))

    def cuDriverGetVersion(self):
        return Status(0), 13000


CARD = {"name": "NVIDIA H200", "total": 150109880320, "attributes": {75: 9, 76: 0, 41: 1, 83: 1, 89: 1}, "peer": True}
GB10 = {"name": "NVIDIA GB10", "total": 128452956160, "attributes": {75: 12, 76: 1, 18: 1, 41: 1, 83: 1, 88: 1}}


class FakeManagement:
    def __init__(self, free, reason="", tenants=()):
        self.free, self.reason, self.tenants = free, reason, tenants
        self.facts, self.driver_version = [], "580.1"

    def memory(self, _pci, _uuid):
        return cuda_module._Memory(free=self.free, reason=self.reason, tenants=self.tenants, display=False)


@pytest.fixture
def fake(monkeypatch):
    def install(devices, *, free=None, reason="", tenants=(), init=0, child=None):
        driver = FakeDriver(devices, init)
        bindings = types.ModuleType("cuda.bindings")
        bindings.driver = driver
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        monkeypatch.setattr(cuda_module, "driver_fact", lambda: None)
        monkeypatch.setattr(cuda_module, "_Management", lambda: FakeManagement(free, reason, tenants))
        monkeypatch.setattr(cuda_module, "free_in_child", lambda _index: child)

    return install


HOST = Pool(name="host", total_bytes=128452956160, free_bytes=122059919360)


def test_two_cards_with_peer_access(fake):
    fake([CARD, CARD], free=149557477376)
    found = probe_cuda(HOST)
    assert [(p.name, p.total_bytes, p.free_bytes) for p in found.pools] == [("CUDA0", 150109880320, 149557477376), ("CUDA1", 150109880320, 149557477376)]
    first = found.devices[0]
    assert (first.model, first.compute_capability, first.integrated, first.pageable_access, first.peers) == ("NVIDIA H200", "9.0", False, False, ("CUDA1",))
    assert (first.pci_id, first.uuid) == ("0000:00:00.0", "GPU-00000000-0000-0000-0000-000000000000")
    assert found.facts[0] == "2 NVIDIA devices"


def test_a_gb10_shares_the_hosts_pool_and_n_a_is_not_zero(fake):
    fake([GB10], reason="NotSupportedError", child=122059919360)
    found = probe_cuda(HOST)
    assert found.pools == ()
    (device,) = found.devices
    assert (device.pool, device.integrated, device.pageable_access, device.memory_query) == ("host", True, True, False)


def test_free_bytes_from_the_child_hold_a_context_already(fake):
    fake([CARD], reason="NotSupportedError", child=149557477376)
    found = probe_cuda(HOST)
    assert (found.pools[0].free_bytes, found.devices[0].context_bytes) == (149557477376, 0)
    fake([CARD], free=150106472448)
    assert probe_cuda(HOST).devices[0].context_bytes is None


def test_a_driver_that_refuses_the_visible_devices_names_them(fake, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    fake([CARD], init=101)
    (fact,) = probe_cuda(HOST).facts
    assert "does not start" in fact
    assert fact.endswith("(CUDA_VISIBLE_DEVICES=0,0)")


def test_more_free_than_there_is_is_not_believed(fake):
    # Seen in the field: 55372 MiB "free" on a card of 32106 MiB.
    fake([{**CARD, "total": 32106 * 2**20}], free=55372 * 2**20)
    found = probe_cuda(HOST)
    assert found.pools[0].free_bytes is None
    assert "more than it has" in " ".join(found.facts)


def test_free_memory_nobody_tells_is_unknown_with_the_reason(fake):
    fake([CARD], reason="NotSupportedError")
    found = probe_cuda(HOST)
    assert found.pools[0].free_bytes is None
    assert "NotSupportedError" in found.unknown["free memory of CUDA0"]


def test_tenants_are_named(fake):
    fake([CARD], free=GIB, tenants=("pid 7 llama-server 1434 MiB",))
    assert "held by pid 7 llama-server 1434 MiB" in render(Machine(name="m", pools=(HOST,), devices=probe_cuda(HOST).devices), "text")


def test_a_driver_without_devices(fake, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    fake([], init=100)
    assert probe_cuda(HOST).facts == ("an NVIDIA driver is present, but no device is visible (CUDA_VISIBLE_DEVICES=)",)


def test_a_driver_that_throws_is_one_fact(fake, monkeypatch):
    fake([CARD])
    monkeypatch.setattr(FakeDriver, "cuDeviceGetCount", lambda _self: 1 // 0)
    found = probe_cuda(HOST)
    assert found.devices == ()
    assert found.facts == ("the NVIDIA driver does not answer: ZeroDivisionError: integer division or modulo by zero",)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver here")
def test_no_driver_is_one_line():
    assert probe_cuda(HOST).facts == ("no NVIDIA driver on this machine",)


def test_no_cuda_package_is_one_fact(monkeypatch):
    monkeypatch.setattr(cuda_module, "driver_fact", lambda: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "cuda-python is not installed" in probe_cuda(HOST).facts[0]


# -- AMD -------------------------------------------------------------------------------------------------------------


def test_an_amd_card_and_an_amd_apu(tmp_path):
    base = "sys__class__drm__"
    put(
        tmp_path,
        **{
            f"{base}card0__device__vendor": "0x1002\n", f"{base}card0__device__mem_info_vram_total": str(16 * GIB),
            f"{base}card0__device__mem_info_vram_used": str(GIB), f"{base}card0__device__mem_info_gtt_total": str(15 * GIB),
            f"{base}card1__device__vendor": "0x1002\n", f"{base}card1__device__mem_info_vram_total": str(GIB // 2),
            f"{base}card1__device__mem_info_vram_used": "0", f"{base}card1__device__mem_info_gtt_total": str(62 * GIB),
            f"{base}card1-DP-1__device__vendor": "0x1002\n",
        },
    )  # fmt: skip
    pools, devices, unknown = probe_sysfs(tmp_path, Pool(name="host", total_bytes=64 * GIB))
    assert [(p.name, p.total_bytes, p.free_bytes) for p in pools] == [("ROCm0", 16 * GIB, 15 * GIB)]
    assert [(d.name, d.pool, d.integrated) for d in devices] == [("ROCm0", "ROCm0", False), ("ROCm1", "host", True)]
    assert "ceiling of ROCm1" in unknown


# -- a real machine --------------------------------------------------------------------------------------------------


def test_what_a_real_h200_said_reads_back():
    measured = json.loads((Path(__file__).parent.parent / "docs" / "evidence" / "probe-one-h200.json").read_text())
    machine = machine_from_mapping(measured["profile"])
    (device,) = machine.devices
    pool = machine.pool("CUDA0")
    assert pool.total_bytes == measured["driver_with_a_context"]["cuDeviceTotalMem"] == 150109880320
    # A driver context costs what the engine's own real runs show: 523 MiB.
    assert (pool.free_bytes - measured["driver_with_a_context"]["cuMemGetInfo_free"]) / 2**20 == pytest.approx(523, abs=1)
    assert (device.compute_capability, device.integrated, device.pageable_access, device.memory_query) == ("9.0", False, False, True)
    assert measured["checks"]["memory_used_before"] == measured["checks"]["memory_used_after"]
    assert measured["cold_seconds_median"] < 1.5


def test_what_two_real_h200_said_reads_back():
    measured = json.loads((Path(__file__).parent.parent / "docs" / "evidence" / "probe-two-h200.json").read_text())
    machine = machine_from_mapping(measured["profile"])
    assert [(d.name, d.peers, d.pci_id, d.compute_capability) for d in machine.devices] == [
        ("CUDA0", ("CUDA1",), "0000:00:06.0", "9.0"), ("CUDA1", ("CUDA0",), "0000:00:07.0", "9.0"),
    ]  # fmt: skip
    assert [machine.pool(d.pool).total_bytes for d in machine.devices] == [150109880320, 150109880320]
    for said in measured["devices"]:
        assert said["uuid"][0] == said["uuid"][1]
        assert said["free_mib"][0] == pytest.approx(said["free_mib"][1], abs=4)
    for name, child in measured["child_free_bytes"].items():  # the child's own context: 523 MiB
        assert (machine.pool(name).free_bytes - child) / 2**20 == pytest.approx(523, abs=1)
    assert measured["checks"]["memory_used_before"] == measured["checks"]["memory_used_after"] == [["0"], ["0"]]
    assert measured["cold_seconds_median"] < 1.5


# -- the devices a process sees --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "seen"), [
    ("1", [("CUDA0", "CUDA1", ())]), ("1,0", [("CUDA0", "CUDA1", ("CUDA1",)), ("CUDA1", "CUDA0", ("CUDA0",))]),
    ("0,7,1", [("CUDA0", "CUDA0", ())]), ("", []), ("-1", []),
    ("GPU-bded4489", [("CUDA0", "CUDA1", ())]), ("GPU-bded4489-1e8b-de6d-482b-458a37fb3989", [("CUDA0", "CUDA1", ())]),
])  # fmt: skip
def test_visible_devices_as_two_h200_had_them(value, seen):
    measured = json.loads((Path(__file__).parent.parent / "docs" / "evidence" / "probe-two-h200.json").read_text())
    assert len(measured["visible"][value]) == len(seen)
    machine = replace(machine_from_mapping(measured["profile"]), source="profile")
    found = as_seen(machine, {"CUDA_VISIBLE_DEVICES": value})
    assert [(d.name, d.pool, d.peers) for d in found.devices] == seen
    assert [d.pci_id for d in found.devices] == measured["visible"][value]
    assert found.pools == machine.pools


def test_visible_devices_that_cannot_be_told_apart(monkeypatch):
    machine = resolve_machine("2x-rtx-3090")
    with pytest.raises(InputError, match="the machine profile gives none"):
        as_seen(machine, {"CUDA_VISIBLE_DEVICES": "GPU-abc"})
    with pytest.raises(InputError, match="names a device twice, which the driver refuses"):
        as_seen(machine, {"CUDA_VISIBLE_DEVICES": "0,0"})
    assert as_seen(machine, {"HIP_VISIBLE_DEVICES": "0"}) == machine
    # A probe has seen this process's own variable; another process may have another one.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    probed = replace(machine, source="probe")
    assert as_seen(probed, {"CUDA_VISIBLE_DEVICES": "1,0"}) == probed
    assert len(as_seen(probed, {"CUDA_VISIBLE_DEVICES": "1"}).devices) == 1
