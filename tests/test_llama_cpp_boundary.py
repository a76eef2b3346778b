"""Where the line is drawn, through the front door: launches that served on a real card, and their neighbours that died.

One H200 with 24,000 or 12,000 MiB left free; contexts bisected to 2,048 tokens. Several of the failing ones load
cleanly and die at the first forward.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import residency

from gguf_writer import write_gguf  # isort: skip

DATA = json.loads(gzip.decompress((Path(__file__).parent / "data" / "llama_cpp_launches.json.gz").read_bytes()))
MIB = 2**20


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("headers")

    def path(name):
        file = folder / f"{name}.gguf"
        if not file.exists():
            model = DATA["models"][name]
            write_gguf(file, model["metadata"], [tuple(t) for t in model["tensors"]])
        return str(file)

    return path


def card(free_mib):
    return {
        "name": "one card", "pools": [{"name": "CUDA0", "total_bytes": 150109880320, "free_bytes": free_mib * MIB},
                                      {"name": "host", "total_bytes": 270334464000, "free_bytes": 262144000000}],
        "devices": [{"name": "CUDA0", "kind": "cuda", "pool": "CUDA0", "model": "NVIDIA H200", "compute_capability": "9.0", "integrated": False}],
    }  # fmt: skip


@pytest.mark.parametrize("case", DATA["boundary"], ids=lambda c: f"{c['model']} {' '.join(c['flags'])} in {c['free_mib']} MiB")
def test_the_line_is_where_the_hardware_draws_it(case, path_of):
    def report(context):
        argv = ["llama-fit-params", "-m", path_of(case["model"]), *case["flags"], "-c", str(context)]
        return residency.validate(argv, engine="llama.cpp", machine=card(case["free_mib"]), environ={})

    assert report(int(case["largest_ok_context"] * 0.95)).verdict == "allow"
    refused = report(int(case["smallest_failing_context"] * 1.05))
    assert refused.verdict == "veto"
    finding = next(f for f in refused.findings if f.rule == "memory-budget/pools" and str(f.outcome) == "veto")
    assert finding.pool == "CUDA0"
    assert finding.need_bytes > case["free_mib"] * MIB


#: Launches through the command line: every kind of placement the truth holds, one of each.
KINDS = ("-ot", "-ncmoe", "-fa off", "-ctk q8_0", "-ngl 16", "-ts 3,1", "-sm none", "-np 4", "-nkvo", "-ub 2048")
SOME = {kind: next(c for c in DATA["cases"] if kind in c["args"] and "used_mib" not in c and "tensor" not in c["args"]) for kind in KINDS if any(kind in c["args"] for c in DATA["cases"])}


@pytest.mark.parametrize("kind", SOME)
def test_a_command_line_gives_the_engines_bytes(kind, path_of):
    case = SOME[kind]
    free = 149557477376
    machine = {
        "name": "two cards", "pools": [{"name": n, "total_bytes": 150109880320, "free_bytes": free} for n in ("CUDA0", "CUDA1")]
        + [{"name": "host", "total_bytes": 270334464000, "free_bytes": 270334464000}],
        "devices": [{"name": n, "kind": "cuda", "pool": n, "model": "NVIDIA H200", "compute_capability": "9.0", "integrated": False} for n in ("CUDA0", "CUDA1")],
    }  # fmt: skip
    report = residency.validate(["llama-fit-params", "-m", path_of(case["model"]), *case["args"].split()], engine="llama.cpp", machine=machine, environ={})
    for device in ("CUDA0", "CUDA1"):
        rows = [a for a in report.budget.allocations if a.pool == device]
        want = case["buffers"].get(device, [0, 0, 0])
        assert sum(a.likely_bytes for a in rows if str(a.purpose) in ("weights", "experts")) == want[0], device
        assert sum(a.likely_bytes for a in rows if str(a.purpose) in ("kv", "state")) == want[1], device


def test_the_kinds_are_there():
    assert len(SOME) >= 7
