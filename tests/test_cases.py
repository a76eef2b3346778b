"""Launches with a published outcome: the verdict, the rule that speaks, and the bytes the engine's own log printed."""

from __future__ import annotations

import pytest

from residency.errors import InputError

import published  # isort: skip
import shapes  # isort: skip

CASES = published.CASES
READ = [c for c in CASES if c["verdict"] != "unread"]
by_id = {"ids": lambda c: c["id"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def report_of(folder):
    known = {}

    def report(case):
        if case["id"] not in known:
            known[case["id"]] = published.judge(case, folder)
        return known[case["id"]]

    return report


@pytest.mark.parametrize("case", READ, **by_id)
def test_the_verdict_and_who_gives_it(case, report_of):
    report = report_of(case)
    vetoes, warnings = published.loud(report, "veto"), published.loud(report, "warn")
    said = " ".join(f.message for f in (*vetoes, *warnings))
    assert report.verdict == case["verdict"], said
    assert {f.rule for f in vetoes} >= set(case.get("rules", ())), said
    assert {f.rule for f in warnings} >= set(case.get("warns", ())), said
    for text in case.get("says", ()):
        assert text in said


@pytest.mark.parametrize("case", [c for c in CASES if c["verdict"] == "unread"], **by_id)
def test_what_cannot_be_read_is_said(case, folder):
    with pytest.raises(InputError) as caught:
        published.judge(case, folder)
    assert all(text in " ".join(p.message for p in caught.value.problems) for text in case["says"])


@pytest.mark.parametrize("case", [c for c in READ if "kv" in c or "kv_total" in c or "state" in c], **by_id)
def test_caches_to_the_printed_digits(case, report_of):
    report = report_of(case)
    for part in ("kv", "state"):
        for pool, want in case.get(part, {}).items():
            assert published.amounts(report, pool, part)[1] == pytest.approx(want, abs=0.0051), f"{pool} {part}"
    if "kv_total" in case:
        total = sum(a.likely_bytes for a in report.budget.allocations if str(a.purpose) == "kv") / published.MIB
        assert total == pytest.approx(case["kv_total"], abs=0.0051)
    for pool, want in case.get("draft_kv", {}).items():
        rows = [a for a in report.budget.allocations if a.pool == pool and str(a.purpose) == "draft" and "cache" in a.name]
        assert sum(a.likely_bytes for a in rows) / published.MIB == pytest.approx(want, abs=0.0051)


@pytest.mark.parametrize("case", [c for c in READ if "buffers" in c], **by_id)
def test_compute_buffers_near_the_printed_ones(case, report_of):
    """Older builds and the fork build other graphs than the measured one: the band says so, and the likely figure is near.

    Copies of host weights are exact, and the rebuilt tables are some percent off: see the sizes of the models.
    """
    report = report_of(case)
    for pool, want in case["buffers"].items():
        certain, likely, most = published.amounts(report, pool, "buffers")
        assert 0.98 * certain <= want <= 1.02 * most, pool
        assert 0.94 * want <= likely <= 1.30 * want, pool


@pytest.mark.parametrize("case", [c for c in READ if "model_mib" in c], **by_id)
def test_weights_lie_where_the_log_says(case, report_of):
    """The tensor tables are rebuilt from hyperparameters and one type per role, so some percent are theirs."""
    for pool, want in case["model_mib"].items():
        assert published.amounts(report_of(case), pool, "model_mib")[1] == pytest.approx(want, rel=0.04), pool


@pytest.mark.parametrize("name", [n for n, m in published.DATA["models"].items() if "file_mib" in m])
def test_the_rebuilt_models_are_of_the_published_size(name):
    spec = published.DATA["models"][name]
    assert shapes.total_mib(spec) == pytest.approx(spec["file_mib"], rel=0.025)


def test_every_miss_has_a_reason():
    assert all(("miss" in c) == (c.get("expected", c["verdict"]) != c["verdict"]) for c in CASES)
    assert len({c["id"] for c in CASES}) == len(CASES)
    assert all(c["link"] and c["outcome"] for c in CASES)


def test_one_card_more_or_less_moves_the_same_launch(folder):
    """The law behind two published twins: copies only with every layer and the output on more than one card."""
    case = next(c for c in CASES if c["id"] == "qwen3-235b-ngl-95-copies")
    assert published.judge(case, folder).verdict == "veto"
    for change in (["-sm", "none"], ["-ngl", "94"], ["--no-kv-offload"]):
        alone = {**case, "flags": [*case["flags"], *change]}
        facts = published.judge(alone, folder).budget.facts
        assert facts["pipeline_copies"] == 1, change
