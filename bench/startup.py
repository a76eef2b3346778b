"""Times cold processes: ``--version``, ``explain`` and ``validate`` of a local file.

Usage: python bench/startup.py MODEL.gguf [RUNS]

Prints the median wall time of RUNS (9) processes after one that is not counted, with the limits this
project set itself: 80 ms, 80 ms, 350 ms.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path


def median_ms(command: list[str], runs: int) -> float:
    """Return the median wall time of a command in milliseconds."""
    walls = []
    for counted in range(-1, runs):
        started = time.perf_counter()
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if counted >= 0:
            walls.append(time.perf_counter() - started)
    return statistics.median(walls) * 1e3


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    program = str(Path(sysconfig.get_path("scripts")) / "residency")
    runs = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    rows = [
        ("residency --version", [program, "--version"], 80),
        ("residency explain memory-budget/pools", [program, "explain", "memory-budget/pools"], 80),
        ("residency validate (probe, local file)", [program, "validate", "--", "llama-server", "-m", sys.argv[1], "-c", "4096"], 350),
    ]
    for label, command, limit in rows:
        print(f"{label:<40} {median_ms(command, runs):7.0f} ms   limit {limit} ms")


if __name__ == "__main__":
    main()
