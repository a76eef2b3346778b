"""Every launch of Strata with a public outcome gets the right verdict (docs/cases-strata.md lists them)."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from functools import lru_cache
from pathlib import Path

import pytest

from residency import validate
from residency.checkpoint.census import dumps

ROOT = Path(__file__).parent.parent
CASES = tomllib.loads((Path(__file__).parent / "data" / "strata_cases.toml").read_text(encoding="utf-8"))["case"]


@lru_cache(maxsize=1)
def reconstruction():
    name = "reconstruct_strata_census"
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def census(tmp_path_factory):
    """Return the path of a variant's census, written once."""
    folder = tmp_path_factory.mktemp("census")

    def path_of(variant):
        path = folder / f"{variant.lower()}.census.json"
        if not path.exists():
            path.write_text(dumps(reconstruction().reconstruct(variant, variant)), encoding="utf-8")
        return str(path)

    return path_of


def machine(case):
    kind, unified = case.get("kind", "cuda"), case.get("unified", False)
    prefix = {"cuda": "CUDA", "rocm": "ROCm", "sycl": "SYCL"}[kind]
    pools, devices = [], []
    for index, (total, capability, *free) in enumerate(case["cards"]):
        name = f"{prefix}{index}"
        pool = "unified" if unified else name
        pools.append({"name": pool, "total_bytes": total * 2**20, "free_bytes": (free[0] if free else total - 400) * 2**20})
        devices.append({"name": name, "kind": kind, "pool": pool, "integrated": unified, **({"compute_capability": capability} if capability else {})})
    if unified:
        return {"name": case["id"], "host_pool": "unified", "pools": pools, "devices": devices}
    gib = int(case["host"].removesuffix("GiB"))
    pools.append({"name": "host", "total_bytes": gib * 2**30, "free_bytes": (gib - 4) * 2**30})
    return {"name": case["id"], "pools": pools, "devices": devices}


def judged(case, census, **more):
    launch = {
        "engine": {"name": "strata", "version": case["version"], "options": case.get("options", {})},
        "model": {"path": census(case["model"])},
        **case["launch"],
    }
    return validate(launch, machine=machine(case), environ={}, **more)


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_verdict(case, census):
    report = judged(case, census)
    said = [(f.rule, str(f.outcome), f.message) for f in report.findings if str(f.outcome) in ("veto", "warn", "cannot-tell")]
    assert report.verdict == case["verdict"], said
    refused = {f.rule for f in report.findings if f.outcome == "veto"}
    assert refused >= set(case.get("rules", ())), said
    assert {f.rule for f in report.findings if f.outcome == "warn"} >= set(case.get("warns", ())), said


#: Expert caches as start-up logs give them, MiB, and how near the plan must come.
MEASURED = [
    ("23", sum, 20_869, 0.01),  # 10,790 slots over both cards
    ("3", sum, 20_209 * 42_939_187_200 / 24_576 / 2**20, 0.05),  # pairs, at the mean blob
    ("30", sum, 1_589 * 1_382_400 / 2**20, 0.02),
    ("30-streamed", sum, 3_872 * 1_382_400 / 2**20, 0.02),
    ("7", sum, 7.38 * 1024, 0.10),
    ("9", sum, 1_040 * 35_546_726_400 / 24_576 / 2**20, 0.05),
    ("32", sum, 17.02 * 1024, 0.10),
    # Read as the first card's: two caches of 8 GiB would leave half of two 24 GB cards empty.
    ("5", max, 6.38 * 1024, 0.10),
    ("4", max, 16.0 * 1024, 0.10),
]


@pytest.mark.parametrize(("case_id", "over_cards", "measured_mib", "within"), MEASURED, ids=[m[0] for m in MEASURED])
def test_the_cache_is_as_large_as_the_log_says(case_id, over_cards, measured_mib, within, census):
    case = next(c for c in CASES if c["id"] == case_id)
    planned = over_cards(judged(case, census).budget.facts["expert_cache_bytes"].values()) / 2**20
    assert abs(planned - measured_mib) <= within * measured_mib, planned


def test_the_session_grows_with_the_context_as_reported(census):
    # RTX 4090 Laptop, IQ3_S, int8, not streamed: from 131,072 to 262,144 tokens the cache shrank from 7.38 to 5.47 GiB.
    case = next(c for c in CASES if c["id"] == "7")
    longer = {**case, "launch": {**case["launch"], "context": {"length": 262144}}}
    small, large = (sum(judged(c, census).budget.facts["expert_cache_bytes"].values()) for c in (longer, case))
    assert abs((large - small) / 2**20 - 1956) < 0.01 * 1956


def test_every_case_is_listed_in_the_documentation():
    page = (ROOT / "docs" / "cases-strata.md").read_text(encoding="utf-8")
    assert [c["id"] for c in CASES if f"| {c['id']} |" not in page] == []
