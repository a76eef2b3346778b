"""Compares ``residency probe`` with the driver on a machine with NVIDIA cards; prints one JSON document.

Usage: python bench/probe_device.py [OUTPUT.json]

What is compared: device count, names, compute capability, total and free bytes (against the management
tool and the driver), that no memory is left in use behind, that the written profile reads back the same,
and how long a cold probe takes. Needs the NVIDIA management tool ``nvidia-smi``; nothing is allocated.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path


def tool(query: str) -> list[list[str]]:
    """Return rows of the management tool."""
    done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.strip().splitlines()]


def probe(form: str) -> tuple[str, float]:
    """Run the command cold; return its output and wall seconds."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "residency", "probe", "--format", form], capture_output=True, text=True, check=True)
    return done.stdout, time.perf_counter() - started


def main() -> None:
    before = tool("memory.used")
    text, _ = probe("text")
    seconds = []
    for _ in range(5):
        document, wall = probe("json")
        seconds.append(wall)
    toml, _ = probe("toml")
    after = tool("memory.used")
    profile = json.loads(document)
    import tomli

    from residency.machine.profile import machine_from_mapping

    same = machine_from_mapping(tomli.loads(toml)).devices == machine_from_mapping(profile).devices
    rows = tool("name,compute_cap,memory.total,memory.free,pci.bus_id,uuid,driver_version")
    devices = [d for d in profile["devices"] if d["kind"] == "cuda"]
    pools = {p["name"]: p for p in profile["pools"]}
    checks = {"count": len(devices) == len(rows), "profile_reads_back": same, "memory_used_before": before, "memory_used_after": after}
    compared = []
    for device, (name, capability, total, free, pci, uuid, version) in zip(devices, rows, strict=False):
        pool = pools[device["pool"]]
        compared.append(
            {
                "device": device["name"], "name": [device["model"], name], "compute_capability": [device["compute_capability"], capability],
                "total_mib": [pool["total_bytes"] / 2**20, float(total)], "free_mib": [pool["free_bytes"] / 2**20, float(free)],
                "pci": [device["pci_id"], pci], "uuid": [device["uuid"], uuid], "driver": [profile.get("driver_version"), version],
            }
        )  # fmt: skip
    result = {"checks": checks, "devices": compared, "cold_seconds_median": statistics.median(seconds), "cold_seconds": seconds, "text": text, "profile": profile}
    output = json.dumps(result, indent=1)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(output, encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()
