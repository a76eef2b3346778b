"""What a refusal offers, what an offer says, and what a launch or a policy says in vain: real values, on a shipped census."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import residency
from residency.budget import Allocation, Budget, Phase, Purpose
from residency.engines.llama_cpp import ENGINES
from residency.judge import ALIKE, Fix, _apart, nearest
from residency.launch.knobs import Knobs
from residency.plugins import load_plugins
from residency.report.text import plain, show_budget
from residency.rules.finding import Outcome
from residency.testing import facts, findings

ROOT = Path(__file__).parent.parent
CENSUS = str(ROOT / "configs" / "models" / "llama-3.1-8b-q4_k_m.census.json")
LAUNCH = str(ROOT / "configs" / "launches" / "llama-server-llama-3.1-8b.toml")
GIB = 2**30
RULES = {r.id: r for r in load_plugins().rules}


def box(*cards, host=64, more=()):
    """Return a machine of CUDA cards of so many GiB, all free."""
    pools = [{"name": f"CUDA{i}", "total_bytes": int(c * GIB), "free_bytes": int(c * GIB)} for i, c in enumerate(cards)]
    devices = [{"name": p["name"], "kind": "cuda", "pool": p["name"], "integrated": False, "compute_capability": "8.6"} for p in pools]
    for device, size in more:
        pools.append({"name": device["name"], "total_bytes": size * GIB, "free_bytes": size * GIB})
        devices.append({**device, "pool": device["name"]})
    pools.append({"name": "host", "total_bytes": host * GIB, "free_bytes": host * GIB})
    return {"name": "box", "pools": pools, "devices": devices}


def judged(*flags, machine, **more):
    return residency.validate(["llama-server", "-m", CENSUS, *flags], machine=machine, environ={}, **more)


def said(report, rule, outcome="warn"):
    return [f.message for f in report.findings if f.rule == rule and str(f.outcome) == outcome]


def offers(report, rule):
    """Return (spelling, verified, note) of every way the first veto of a rule offers."""
    veto = next(f for f in report.findings if f.rule == rule and f.outcome is Outcome.VETO)
    return [(f.spelling, f.verified, f.note) for f in veto.fixes]


# -- ratios count every card ---------------------------------------------------------------------------------------------------


def test_a_ratio_that_leaves_a_card_empty_is_answered_with_all_of_them():
    """4.6 GiB of weights and 16 GiB of cache, none of it on the third card of 8."""
    report = judged("-c", "131072", "-np", "1", "-fit", "off", "-ts", "3,2", machine=box(9, 9, 9))
    (message,) = said(report, "layer-split/card-budget", "veto")
    assert "while CUDA1 has" in message
    assert "CUDA2 has 8.75 GiB left" in message, message
    assert offers(report, "layer-split/card-budget") == [("-ts 1,1,1", True, ""), ("-ts 32,24,35", True, ""), ("without -ts", True, "by what is free on each card")]
    assert all(len(f.value) == 3 for v in report.findings for f in v.fixes if f.knob == "layers.ratio" and f.value is not None)
    assert judged("-c", "131072", "-np", "1", "-fit", "off", "-ts", "1,1,1", machine=box(9, 9, 9)).verdict == "allow"


def test_a_card_the_launch_does_not_name_is_not_counted():
    report = judged("-c", "131072", "-np", "1", "-fit", "off", "-ts", "3,2", "-dev", "CUDA1,CUDA0", machine=box(11, 14, 9))
    assert not any("CUDA2" in m for m in said(report, "layer-split/card-budget", "veto"))
    for finding in report.findings:
        assert all(len(f.value) == 2 for f in finding.fixes if f.knob == "layers.ratio" and f.value is not None)


def test_shares_follow_the_order_of_the_named_devices():
    rows = [Allocation.exact(pool, Purpose.WEIGHTS, "weights", Phase.LOAD, size * GIB, device=pool) for pool, size in (("CUDA0", 1), ("CUDA1", 12))]
    given = {"machine": box(20, 10), "budget": Budget(allocations=tuple(rows))}
    (veto,) = findings(RULES["layer-split/card-budget"], facts(**given, launch={"device": {"ids": ["CUDA1", "CUDA0"]}}))
    assert next(w.value for w in veto.ways) == [33, 67]
    (veto,) = findings(RULES["layer-split/card-budget"], facts(**given))
    assert next(w.value for w in veto.ways) == [67, 33]


def fix(value, *, verified, knob="layers.ratio"):
    return Fix(knob=knob, value=value, verified=verified)


def test_offers_that_nearly_repeat_each_other_are_one_and_those_that_pass_come_first():
    assert ALIKE == 0.05
    given = [fix([49, 51], verified=False), fix([48, 52], verified=False), fix([36, 52], verified=False), fix(8192, verified=True, knob="context.length")]
    assert [f.value for f in _apart(given)] == [8192, [49, 51]]
    assert [f.value for f in _apart([fix([49, 51], verified=True), fix([1, 1], verified=True), fix([36, 52], verified=True)])] == [[49, 51], [36, 52]]
    assert [f.value for f in _apart([fix(4096, verified=True), fix(8192, verified=True)])] == [4096, 8192]
    assert [f.value for f in _apart([fix([0, 0], verified=True), fix([0, 1], verified=True), fix(None, verified=True)])] == [[0, 0], [0, 1], None]


def test_no_offer_that_fails_stands_before_one_that_passes():
    for flags, cards in ((("-ts", "3,1"), (8, 8, 8)), (("-ts", "1,9"), (8, 3)), (("-sm", "none"), (4, 4))):
        for finding in judged("-c", "65536", "-np", "1", "-fit", "off", *flags, machine=box(*cards)).findings:
            verified = [f.verified for f in finding.fixes]
            assert verified == sorted(verified, reverse=True)


# -- the last resort, and what remains -----------------------------------------------------------------------------------------


def test_the_cpu_is_tried_when_nothing_else_passes():
    flags = ("-c", "131072", "-np", "1", "-fit", "off")
    report = judged(*flags, machine=box(1))
    assert offers(report, "memory-budget/pools") == [("--device none", True, "slower: everything runs on the CPU")]
    assert judged(*flags, "--device", "none", machine=box(1)).verdict == "allow"
    assert [f.knob for f in nearest(case(*flags, machine=box(1)))] == ["device.kind"]
    # With anything better the CPU is not offered, and where the host does not hold the launch either it does not pass.
    assert offers(judged(*flags, machine=box(2)), "memory-budget/pools") == [("-ngl 1", True, "slower: the other layers run on the CPU")]
    assert not any(v for _, v, _ in offers(judged(*flags, machine=box(1, host=8)), "memory-budget/pools"))


def case(*flags, machine):
    from residency.api import Inputs, prepare

    return prepare(["llama-server", "-m", CENSUS, *flags], Inputs(machine=machine, environ={}))


def test_an_offer_that_is_not_enough_says_what_remains_and_stands_behind_what_passes():
    """The split is one fault, 16 GiB of cache in a host of 8 the other."""
    report = judged("-c", "131072", "-np", "1", "-fit", "off", "-ts", "7,1", "-nkvo", machine=box(4, 4, host=8))
    assert offers(report, "layer-split/card-budget") == [
        ("-c 19456", True, ""),
        ("-ts 1,1", False, "answers this refusal, then host lacks 8.08 GiB"),
    ]
    (host,) = [f for f in report.findings if f.pool == "host" and f.outcome is Outcome.VETO]
    assert host.need_bytes - host.have_bytes == pytest.approx(8.08 * GIB, abs=0.01 * GIB)


# -- a context longer than the trained one ---------------------------------------------------------------------------------------


def test_an_offered_context_beyond_the_trained_one_says_so():
    (found,) = nearest(case("-c", "4096", "-np", "1", machine=box(80)))
    assert found.value > 131072
    assert found.note == "largest that passes; more than the 131072 tokens the model was trained for"
    (found,) = nearest(case("-c", "4096", "-np", "1", "-fit", "off", machine=box(12)))
    assert (found.value < 131072, found.note) == (True, "largest that passes")
    offered = {f.knob: f for v in judged("-c", "1048576", "-np", "1", machine=box(40)).findings for f in v.fixes}["context.length"]
    assert (offered.value > 131072, offered.verified) == (True, True)
    assert offered.note == "more than the 131072 tokens the model was trained for"


# -- the prompt cache and the plan ------------------------------------------------------------------------------------------------


def test_a_prompt_cache_that_reaches_over_the_host_is_offered_smaller():
    report = judged("-c", "8192", "-np", "1", machine=box(24, host=4))
    (warning,) = [f for f in report.findings if f.rule == "memory-budget/pools" and f.outcome is Outcome.WARN]
    assert (warning.pool, warning.knob) == ("host", "option:cache-ram")
    assert [(f.spelling, f.verified) for f in warning.fixes] == [("-cram 4032", True)]
    assert said(judged("-c", "8192", "-np", "1", "-cram", "4032", machine=box(24, host=4)), "memory-budget/pools") == []
    assert len(said(judged("-c", "8192", "-np", "1", "-cram", "4096", machine=box(24, host=4)), "memory-budget/pools")) == 1


def test_a_plan_does_not_cut_names_off():
    report = judged("-c", "8192", "-np", "1", machine=box(24))
    name = "workspaces and pools of the first image of an encoder with a long name"
    row = Allocation.exact("CUDA0", Purpose.RUNTIME, name, Phase.RUN_TIME, 2**20, device="CUDA0")
    text = plain(show_budget(replace(report, budget=replace(report.budget, allocations=(*report.budget.allocations, row)))))
    assert f"  runtime       {name}      1.0 MiB     1.0 MiB     1.0 MiB  run-time" in text, text
    starts = {line.index("certain") for line in text.splitlines() if " certain " in line}
    assert len(starts) == 1
    hostile = plain(show_budget(replace(report, budget=Budget(allocations=(replace(row, name="x" * 5000),)))))
    assert max(map(len, hostile.splitlines())) < 200


# -- said in vain -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "hint"),
    [("NOPE", " Its pools: CUDA0, host."), ("CUDA", " Did you mean CUDA0?"), ("hots", " Did you mean host?"), ("CUDA7", None), ("unified", None), ("host", None)],
)
def test_a_margin_of_a_pool_that_is_not_there_is_said(pool, hint):
    report = judged("-c", "8192", "-np", "1", machine=box(24), policy={"margins": {pool: "5%"}})
    expected = [] if hint is None else [f"The policy sets a margin for the pool {pool}, and this machine has none of that name.{hint}"]
    assert said(report, "residency/policy") == expected
    assert report.verdict == "allow"


def file(engine="llama.cpp", **sections):
    given = {"engine": {"name": engine}, "model": {"path": CENSUS}, "context": {"length": 8192, **sections.pop("context", {})}, **sections}
    return residency.validate(given, machine=box(24), environ={})


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("kv.memory", "1GiB"), ("kv.blocks", 4), ("kv.block_size", 32), ("kv.resident", 512), ("experts.stream", True), ("experts.slots", 3),
        ("experts.slot_size", "100"), ("experts.cache", 5), ("context.prefill", 512), ("memory.pinned", True), ("memory.prefault", True),
    ],
)  # fmt: skip
def test_a_knob_the_engine_does_not_read_is_named(knob, value):
    section, _, key = knob.partition(".")
    report = file(**{section: {key: value}})
    warnings = [f for f in report.findings if f.rule == "settings/inert"]
    assert [(f.outcome, f.knob) for f in warnings] == [(Outcome.WARN, knob)]
    assert warnings[0].message.startswith(f"This engine does not read {knob}: ")
    assert report.verdict == "allow"


def test_values_that_ask_for_nothing_and_knobs_the_core_reads_are_not_named():
    report = file(experts={"stream": False, "cache": "auto"}, kv={"resident": 0}, memory={"reserve": "100MiB"}, vision={"enabled": False})
    assert said(report, "settings/inert", "approve") == ["no setting without effect"]


def test_an_image_limit_without_a_projector_is_named():
    assert said(file(vision={"max_tokens": 100}), "settings/inert") == ["Images of at most 100 tokens are asked for, and no projector is loaded that could take one."]


def test_what_an_engine_reads_are_knobs():
    from residency.engines.strata import Strata
    from residency.engines.strata.conflicts import NOTHING_HERE
    from residency.engines.vllm_cpp import VllmCpp

    known = {f"{section}.{key}" for section, table in Knobs() for key in type(table).model_fields}
    for engine in (*ENGINES, VllmCpp(), Strata()):
        assert engine.reads <= known, engine.name
        folder = Path(__import__(type(engine).__module__, fromlist=["x"]).__file__).parent
        source = "".join(p.read_text() for p in folder.glob("*.py") if p.name != "__init__.py")
        # "experts.cache" and the like: a knob that is listed is named somewhere in the engine's own code.
        unnamed = {k for k in engine.reads if f'"{k}"' not in source and not k.startswith("model.")}
        assert unnamed <= {"speculation.kind"}, (engine.name, unnamed)
    assert set(NOTHING_HERE) <= Strata.reads, "those get a remark of their own"


# -- remote devices ----------------------------------------------------------------------------------------------------------------


REMOTE = ("-np", "1", "-fit", "off", "--rpc", "10.0.0.2:50052")


def test_rpc_without_a_device_for_it_is_warned_about():
    report = judged("-c", "8192", *REMOTE, machine=box(24))
    assert said(report, "settings/risks") == [
        ("A part of the model goes to 10.0.0.2:50052, and that device is not judged: the machine profile has no device of kind rpc; "
        "docs/machines.md shows how to declare one.")
    ]
    assert report.exit_code == 0
    assert said(judged("-c", "8192", *REMOTE, "-dev", "CUDA0", machine=box(24)), "settings/risks") == []


def test_rpc_without_a_device_for_it_gives_no_verdict_where_it_could_make_room():
    """20.87 GiB on 8: 12.87 are missing."""
    report = judged("-c", "131072", *REMOTE, machine=box(8))
    assert report.exit_code == 3
    assert said(report, "memory-budget/pools", "cannot-tell") == [
        ("the memory behind --rpc 10.0.0.2:50052 is unknown: the machine profile has no device of kind rpc; docs/machines.md shows how to declare one, "
        "and without its memory CUDA0 lacks 12.87 GiB.")
    ]


def test_a_declared_rpc_device_is_judged():
    with_remote = box(8, more=[({"name": "RPC0", "kind": "rpc"}, 16)])
    report = judged("-c", "131072", *REMOTE, machine=with_remote)
    assert report.exit_code == 0
    assert said(report, "settings/risks") == []
    assert sum(a.likely_bytes for a in report.budget.allocations if a.pool == "RPC0") > 8 * GIB


# -- the example ------------------------------------------------------------------------------------------------------------------


def test_the_llama_cpp_example_runs_out_of_the_box():
    report = residency.validate(LAUNCH, environ={})
    assert report.exit_code == 1
    assert [(f.knob, f.value, f.verified) for v in report.findings if v.rule == "memory-budget/pools" for f in v.fixes] == [
        ("context.length", 54016, True),
        ("layers.on_device", 17, True),
    ]
    assert report.models.main.tensor_bytes == 4_912_898_048
    assert residency.validate(LAUNCH, environ={}, overrides=["context.length=54016"]).exit_code == 0
    assert residency.validate(LAUNCH, environ={}, overrides=["context.length=54272"]).exit_code == 1
