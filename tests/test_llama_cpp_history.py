"""What differs by build and by fork: versions, defaults, caches, copies, patterns, and what is remarked."""

from __future__ import annotations

import re

import pytest

import residency
from residency.engines.llama_cpp import ENGINES, history
from residency.engines.llama_cpp.version import normal
from residency.errors import InputError

import published  # isort: skip
import shapes  # isort: skip

MIB = 2**20
ENGINE = ENGINES[0]
TWO = {"cards": [[f"CUDA{i}", "cuda", "NVIDIA GeForce RTX 4090", "8.9", 24080, 23640] for i in range(2)], "host": [65536, 60000]}
ONE = {"cards": TWO["cards"][:1], "host": [65536, 60000]}
R1 = {**published.DATA["models"]["r1-q2"], "layers": 8}
MOE = {**published.DATA["models"]["qwen3-235b"], "layers": 6}
DENSE = published.DATA["models"]["llama-3-8b"]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("builds")

    def report(spec, *flags, engine="llama.cpp", machine=ONE, built=(), name=None, **more):
        path = shapes.write(folder, name or f"{spec['architecture']}-{spec['layers']}", spec)
        return residency.validate(
            ["llama-server", "-m", path, *flags], engine=engine, machine=shapes.machine({**machine, **more}), environ={},
            overrides=[f"engine.options.{k}={v}" for k, v in built],
        )  # fmt: skip

    return report


def kv(report, pool="CUDA0"):
    return sum(a.likely_bytes for a in report.budget.allocations if a.pool == pool and str(a.purpose) == "kv")


def compute(report, pool="CUDA0"):
    return sum(a.likely_bytes for a in report.budget.allocations if a.pool == pool and str(a.purpose) == "compute")


def codes(report):
    return {r.code for r in report.budget.remarks}


# -- versions ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "engine", "ordered"),
    [
        ("b4610", "llama.cpp", "0.0.4610"),
        ("4726 (6dde1782)", "llama.cpp", "0.0.4726"),
        ("0.10434.0", "llama.cpp", "0.0.10434"),
        ("0.5.0", "llama.cpp", "0.5.0"),
        ("2025-05-20", "llama.cpp", "0.0.5427"),  # a day of the table
        ("2025-08-10", "llama.cpp", "0.0.6141"),  # 25 of the 45 days between builds 5913 and 6325: 5913 + 25 x 412 / 45
        ("2025-02-30", "llama.cpp", "0.0.4695"),  # no such day: the middle of the month, 13 of the 18 days from 4615 to 4726
        ("2025-07-26", "ik_llama.cpp", "0.0.3822"),
    ],
)
def test_versions_are_ordered(text, engine, ordered):
    assert normal(text, engine) == ordered


def test_days_and_builds_rise_together():
    for rows in history.BUILDS.values():
        assert list(rows) == sorted(rows)
        assert [b for _, b in rows] == sorted(b for _, b in rows)


def test_every_change_has_both_engines_and_evidence():
    for law, columns in history.CHANGES.items():
        assert set(columns) == {history.UPSTREAM, history.IK}, law
        assert all(change.evidence for change in columns.values()), law


def test_a_capability_is_compared_with_the_ordered_version(judged):
    # Build numbers are larger than any dotted number, and yet older than 0.5.0.
    old = judged(DENSE, "-c", "4096", engine="llama.cpp@b4610", machine=TWO)
    new = judged(DENSE, "-c", "4096", engine="llama.cpp@0.5.0", machine=TWO)
    assert (old.engine.has("pipeline-fallback", None), new.engine.has("pipeline-fallback", None)) == (False, True)


# -- defaults ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "flash"), [("llama.cpp@b6000", False), ("llama.cpp@b6400", True), ("ik_llama.cpp@3822", False), ("ik_llama.cpp@3956", True)])
def test_flash_attention_by_default(engine, flash, judged):
    assert judged(DENSE, "-c", "4096", "-ngl", "99", engine=engine).budget.facts["flash_attn"] is flash


def test_a_bare_flash_flag_and_its_negation(judged):
    assert judged(DENSE, "-c", "4096", "-ngl", "99", "-fa", engine="ik_llama.cpp@3822").budget.facts["flash_attn"] is True
    assert judged(DENSE, "-c", "4096", "-ngl", "99", "-no-fa", engine="ik_llama.cpp").budget.facts["flash_attn"] is False


def test_layers_stay_on_the_host_where_that_is_the_default(judged):
    assert kv(judged(DENSE, "-c", "4096", engine="llama.cpp@b6000")) == 0
    assert kv(judged(DENSE, "-c", "4096", engine="llama.cpp@b6300")) == 4096 * 2048 * 2 * 32


def test_the_output_is_the_last_or_the_first_unit_of_ngl(judged):
    def output(engine):
        report = judged(DENSE, "-c", "4096", "-ngl", "32", engine=engine)
        return kv(report), sum(a.likely_bytes for a in report.budget.allocations if a.pool == "CUDA0" and str(a.purpose) == "weights")

    layer, table = 4096 * 2048 * 2, 128256 * 4096 * 210 // 256
    old_kv, old_weights = output("llama.cpp@b7000")
    new_kv, new_weights = output("llama.cpp@b7500")
    assert (old_kv, new_kv) == (32 * layer, 31 * layer)
    assert new_weights - old_weights == table + 4096 * 4 - (old_weights // 32)  # output and its norm for one block


def test_windows_are_cached_whole_before_they_were_not(judged):
    spec = published.DATA["models"]["command-r7b"]
    flags = ("-c", "32768", "-ngl", "99", "-fa", "on", "-np", "1")
    row = 2 * 1024 * 2
    assert kv(judged(spec, *flags, engine="llama.cpp@b5400")) == 32 * 32768 * row
    assert kv(judged(spec, *flags, engine="llama.cpp@b5500")) == (8 * 32768 + 24 * 4608) * row
    assert kv(judged(spec, *flags, engine="ik_llama.cpp")) == 32 * 32768 * row


def test_logits_for_slots_or_for_the_whole_micro_batch(judged):
    flags = ("-c", "4096", "-ngl", "99", "-np", "1", "-fa", "on")
    old, new = (compute(judged(DENSE, *flags, engine=f"llama.cpp@{v}")) for v in ("b9000", "b9500"))
    assert old - new > 128256 * 512 * 4 // 2


# -- latent attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "flags", "per_token"),
    [
        ("ik_llama.cpp", ("-mla", "3"), 576 * 2),
        ("ik_llama.cpp", ("-mla", "1", "-no-fa"), (576 + 512) * 2),  # a transposed copy of the values beside it
        ("ik_llama.cpp", ("-mla", "0"), 128 * (192 + 128) * 2),
        ("ik_llama.cpp@3822", (), 128 * (192 + 128) * 2),
        ("ik_llama.cpp", (), 576 * 2),
        ("llama.cpp", (), 128 * (192 + 128) * 2),  # the file has no keys of latent attention
    ],
)
def test_what_a_token_costs_per_layer(engine, flags, per_token, judged):
    report = judged(R1, "-c", "2048", "-ngl", "99", *flags, engine=engine, machine=published.DATA["machines"]["4x-a100"])
    assert sum(kv(report, f"CUDA{i}") for i in range(4)) == 8 * 2048 * per_token


def test_a_file_made_for_latent_attention_had_values_beside_it_for_a_while(judged):
    spec = {**R1, "heads_kv": 1, "head_k": 192}
    extra = {"deepseek2.attention.key_length_mla": 192, "deepseek2.attention.value_length_mla": 128, "deepseek2.attention.key_length": 576,
             "deepseek2.attention.value_length": 512}  # fmt: skip

    def total(engine, tmp):
        path = shapes.write(tmp, "latent", spec, extra=extra)
        machine = shapes.machine(published.DATA["machines"]["4x-a100"])
        report = residency.validate(["llama-server", "-m", path, "-c", "2048", "-ngl", "99", "-fa", "on", "-np", "1"], engine=engine, machine=machine, environ={})
        return sum(kv(report, f"CUDA{i}") for i in range(4))

    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        assert total("llama.cpp@b7000", Path(folder)) == 8 * 2048 * (576 + 512) * 2
        assert total("llama.cpp@b8000", Path(folder)) == 8 * 2048 * 576 * 2


def test_scores_are_capped(judged):
    flags = ("-c", "16384", "-ngl", "99", "-mla", "1", "-no-fa", "-ub", "512")
    machine = published.DATA["machines"]["4x-a100"]
    whole = compute(judged(R1, *flags, engine="ik_llama.cpp", machine=machine, built=(("sched-max-copies", 1),)))
    capped = compute(judged(R1, *flags, "-amb", "512", engine="ik_llama.cpp", machine=machine, built=(("sched-max-copies", 1),)))
    scores = 128 * 512 * 16384 * 4
    assert whole > scores
    assert whole - capped == pytest.approx(scores - 512 * MIB, rel=0.02)


# -- copies ------------------------------------------------------------------------------------------------------------------


def test_copies_of_host_experts_count_every_tower_and_copy(judged):
    flags = ("-c", "2048", "-ngl", "99", "-fa", "-ot", "exps=CPU")
    towers = 6 * (2 * 4096 * 1536 * 128 * 110 // 256 + 4096 * 1536 * 128 * 144 // 256)
    at = {n: compute(judged(MOE, *flags, engine="ik_llama.cpp@3822", machine=TWO, built=(("sched-max-copies", n),))) for n in (2, 4)}
    assert at[4] - at[2] == pytest.approx(2 * towers, rel=0.02)
    assert compute(judged(MOE, *flags, engine="ik_llama.cpp@3956", machine=TWO)) < towers


def test_an_unnamed_build_of_the_fork_is_warned_of(judged):
    flags = ("-c", "2048", "-ngl", "99", "-ot", "exps=CPU")
    assert "older-build-copies" in codes(judged(MOE, *flags, engine="ik_llama.cpp", machine=TWO))
    assert "older-build-copies" not in codes(judged(MOE, *flags, engine="ik_llama.cpp@3956", machine=TWO))
    assert "older-build-copies" not in codes(judged(MOE, *flags, engine="ik_llama.cpp", machine=ONE))


def test_a_second_try_without_copies_is_a_warning_where_the_engine_makes_one(judged):
    flags = ("-c", "65536", "-ngl", "99", "-np", "1", "-ub", "2048", "-fa", "on", "-ts", "1,1")

    def most(*built):
        sums = judged(DENSE, *flags, engine="llama.cpp@b7000", machine=TWO, built=built).budget.allocations
        return max(sum(a.likely_bytes for a in sums if a.pool == f"CUDA{i}") for i in range(2)) / MIB

    free = (most() + most(("sched-max-copies", 1))) / 2
    machine = {"cards": [[f"CUDA{i}", "cuda", "NVIDIA GeForce RTX 4090", "8.9", 24080, free] for i in range(2)], "host": [65536, 60000]}
    new = judged(DENSE, *flags, engine="llama.cpp@b7000", machine=machine)
    old = judged(DENSE, *flags, engine="llama.cpp@b6500", machine=machine)
    assert ("pipeline-fallback" in codes(new), new.verdict) == (True, "allow")
    assert new.budget.facts["pipeline_copies"] == 1
    assert ("pipeline-fallback" in codes(old), old.verdict) == (False, "veto")
    assert "layer-split/pipeline-copies" in {f.rule for f in old.findings if str(f.outcome) == "veto"}


# -- patterns, types, architectures ----------------------------------------------------------------------------------------


def test_a_pattern_that_knows_fused_experts(judged):
    spec = {**published.DATA["models"]["qwen35-397b"], "layers": 4}
    flags = ("-c", "2048", "-ngl", "99", "-cmoe")

    def experts(engine):
        return sum(a.likely_bytes for a in judged(spec, *flags, engine=engine).budget.allocations if a.pool == "CUDA0" and str(a.purpose) == "experts")

    assert experts("llama.cpp@8284") == 4 * 4096 * 2048 * 512 * 144 // 256
    assert experts("llama.cpp@8300") == 0


def test_a_type_of_the_fork_is_sized_by_the_gap_and_refused_upstream(tmp_path):
    from gguf_writer import write_gguf

    metadata, tensors = shapes.Shape({**DENSE, "layers": 2}).build()
    rows = [(n, 138, s, 4096 * 14336 * 110 // 256) if n == "blk.1.ffn_up.weight" else (n, t, s) for n, t, s in tensors]
    path = write_gguf(tmp_path / "iq3_k.gguf", metadata, rows)
    machine = shapes.machine(ONE)
    fork = residency.validate(["llama-server", "-m", path, "-c", "2048", "-ngl", "99"], engine="ik_llama.cpp", machine=machine, environ={})
    upstream = residency.validate(["llama-server", "-m", path, "-c", "2048", "-ngl", "99"], engine="llama.cpp", machine=machine, environ={})
    assert (fork.verdict, upstream.verdict) == ("allow", "veto")
    assert "unknown-tensor-type" in codes(upstream)


@pytest.mark.parametrize(("engine", "verdict"), [("llama.cpp@b5000", "veto"), ("llama.cpp@b5100", "allow"), ("llama.cpp", "allow")])
def test_an_architecture_newer_than_the_build(engine, verdict, judged):
    report = judged(MOE, "-c", "2048", engine=engine)
    assert report.verdict == verdict
    assert ("architecture-too-new" in codes(report)) is (verdict == "veto")


def test_the_forks_flags_are_not_upstreams(judged):
    with pytest.raises(InputError, match="has no flag -mla"):
        judged(DENSE, "-mla", "3")
    assert judged(DENSE, "-c", "4096", "-ngl", "99", "-fmoe", "-rtr", "-ctk", "q6_0", "-fa", engine="ik_llama.cpp").verdict == "allow"
    with pytest.raises(InputError, match="q6_0"):
        judged(DENSE, "-ctk", "q6_0")


# -- remarks -----------------------------------------------------------------------------------------------------------------


def test_a_split_for_devices_that_are_not_there(judged):
    none = {"host": [65536, 60000]}
    report = judged(DENSE, "-c", "4096", "-ts", "64,36", machine=none)
    assert (report.verdict, "split-without-devices" in codes(report)) == ("veto", True)
    assert judged(DENSE, "-c", "4096", "-ts", "64,0", machine=none).verdict == "allow"
    assert "no-device" in codes(judged(DENSE, "-c", "4096", "-ngl", "20", machine=none))
    assert judged(DENSE, "-c", "4096", "-dev", "none", "-ngl", "20", machine=none).verdict == "allow"


def test_shares_of_devices_that_are_not_there_are_ignored(judged):
    assert "ratio-beyond-devices" in codes(judged(DENSE, "-c", "4096", "-ts", "3,2,1", machine=TWO))
    assert "ratio-beyond-devices" not in codes(judged(DENSE, "-c", "4096", "-ts", "3,2,0", machine=TWO))


@pytest.mark.parametrize(
    ("engine", "flash", "cells"),
    [("llama.cpp@b6000", "off", 5024), ("llama.cpp@b6000", "on", 5120), ("llama.cpp@b7000", "off", 5120), ("ik_llama.cpp", "off", 5024)],
)
def test_a_context_is_rounded_up(engine, flash, cells, judged):
    assert kv(judged(DENSE, "-c", "5001", "-ngl", "99", "-np", "1", "-fa", flash, engine=engine)) == cells * 2048 * 2 * 32


def test_an_override_behind_the_catch_all(judged):
    late = judged(MOE, "-c", "4096", "-ngl", "99", "-ot", "exps=CPU", "-ot", r"blk\.[01]\.ffn_.*=CUDA0")
    early = judged(MOE, "-c", "4096", "-ngl", "99", "-ot", r"blk\.[01]\.ffn_.*=CUDA0", "-ot", "exps=CPU")
    text = next(r.message for r in late.budget.remarks if r.code == "override-shadowed")
    assert text.startswith("6 of 10 tensors")  # three towers of two blocks; norm and router are still free
    assert "override-shadowed" not in codes(early)


@pytest.mark.parametrize(
    ("engine", "flags", "rows"),
    [
        ("llama.cpp", (), {"prompt cache", "context checkpoints, 32 per slot"}),
        ("llama.cpp", ("--swa-full",), {"prompt cache"}),
        ("llama.cpp@b6500", (), {"context checkpoints, 32 per slot"}),
        ("llama.cpp@b6000", (), set()),
        ("ik_llama.cpp@3822", (), set()),
    ],
)
def test_what_the_server_keeps_in_host_memory(engine, flags, rows, judged):
    report = judged(published.DATA["models"]["command-r7b"], "-c", "8192", "-ngl", "99", "-np", "1", *flags, engine=engine)
    assert {a.name for a in report.budget.allocations if str(a.phase) == "run-time" and a.pool == "host"} == rows


def test_context_beyond_training(judged):
    assert "context-beyond-training" in codes(judged(DENSE, "-c", "262144", "-np", "1", "-ctk", "q4_0", "-ctv", "q4_0"))
    assert "context-beyond-training" not in codes(judged(DENSE, "-c", "131072", "-np", "1"))
    assert "context-beyond-training" not in codes(judged(DENSE, "-c", "262144", "-np", "1", "--rope-scaling", "yarn"))


def test_layers_left_behind(judged):
    left = judged(DENSE, "-c", "8192", "-np", "1", "-ngl", "20")
    assert "layers-left-on-host" in codes(left)
    text = next(r.message for r in left.budget.remarks if r.code == "layers-left-on-host")
    assert "13 of 32 layers" in text  # 20 units, one of them the output
    assert "layers-left-on-host" not in codes(judged(DENSE, "-c", "8192", "-np", "1", "-ngl", "0"))
    full = {"cards": [["CUDA0", "cuda", "card", "8.9", 5000, 4900]], "host": [65536, 60000]}
    assert "layers-left-on-host" not in codes(judged(DENSE, "-c", "8192", "-np", "1", "-ngl", "20", machine=full))


def test_experts_on_the_host_under_a_row_split(judged):
    report = judged(MOE, "-c", "2048", "-ngl", "99", "-sm", "row", "-ot", "exps=CPU", engine="llama.cpp@b6500", machine=TWO)
    assert "experts-on-host-in-split" in codes(report)
    assert "experts-on-host-in-split" not in codes(judged(MOE, "-c", "2048", "-ngl", "99", "-ot", "exps=CPU", machine=TWO))


@pytest.mark.parametrize(("limit", "warned"), [(-1, False), (64 * MIB, True), (2**40, False), (None, True)])
def test_locked_memory_beyond_its_limit(limit, warned, judged):
    host = {} if limit is None else {"memlock_bytes": limit}
    report = judged(MOE, "-c", "2048", "-ngl", "99", "-cmoe", "--load-mode", "mlock", more={"host": host})
    assert ("memory-lock-limit" in codes(report)) is warned
    assert report.verdict == "allow"


@pytest.mark.parametrize(
    ("limit", "backing", "certain"), [(-1, "locked", True), (2**40, "locked", True), (8 * MIB, "mapped", False), (None, "mapped", False)]
)
def test_a_mapping_counts_as_locked_only_under_a_limit_that_allows_it(limit, backing, certain, judged):
    """Build 10068 with a limit of 8 MiB: "failed to mlock", "after previously locking 0 bytes", and it serves."""
    host = {} if limit is None else {"memlock_bytes": limit}
    machine = {**ONE, "host": [65536, 4000]}  # the experts are 6.3 GiB
    report = judged(MOE, "-c", "2048", "-ngl", "99", "-cmoe", "--load-mode", "mmap+mlock", "--cache-ram", "0", machine=machine, more={"host": host})
    (weights,) = [a for a in report.budget.allocations if a.pool == "host" and str(a.purpose) == "weights"]
    assert weights.backing == backing
    assert (weights.certain_bytes > 4000 * MIB) is certain
    assert weights.certain_bytes == (weights.at_most_bytes if certain else 0)
    assert ("memory-lock-limit" in codes(report)) is not certain
    assert report.verdict == ("veto" if certain else "allow")


def test_anonymous_weights_over_the_lock_limit_are_still_there(judged):
    def backing(limit):
        flags = ("-c", "2048", "-ngl", "0", "-dev", "none", "--load-mode", "mlock")
        report = judged(DENSE, *flags, more={"host": {"memlock_bytes": limit}})
        (weights,) = [a for a in report.budget.allocations if a.pool == "host" and str(a.purpose) == "weights"]
        return weights.backing, weights.certain_bytes

    assert [backing(8 * MIB)[0], backing(-1)[0]] == ["anonymous", "locked"]
    assert backing(8 * MIB)[1] == backing(-1)[1] > 4000 * MIB


@pytest.mark.parametrize("knob", ["kv.key_type", "kv.value_type"])
@pytest.mark.parametrize(("word", "engine", "offered"), [("q9_0", "llama.cpp", "q8_0"), ("", "llama.cpp", "f16"), ("q6_0", "llama.cpp", "q8_0"), ("q7_2", "ik_llama.cpp", None)])
def test_a_cache_type_that_is_none_is_refused(knob, word, engine, offered, tmp_path):
    path = shapes.write(tmp_path, "dense", DENSE)
    report = residency.validate(
        ["llama-server", "-m", path, "-c", "4096"], engine=engine, machine=shapes.machine(ONE), environ={}, overrides=[f"{knob}={word}"],
    )  # fmt: skip
    vetoes = [f for f in report.findings if str(f.outcome) == "veto"]
    assert [(f.rule, f.knob) for f in vetoes] == [("kv-cache/types", knob)]
    assert f"{knob} is {word!r}, and the engine's cache types are f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1" in vetoes[0].message
    if offered is not None:
        assert [f.value for f in vetoes[0].fixes] == [offered]


def test_cache_types_in_other_words_are_taken(judged):
    report = judged(DENSE, "-c", "4096", built=())
    same = residency.validate(list(report.launch.argv), machine=shapes.machine(ONE), environ={}, overrides=["kv.key_type=FP16", "kv.value_type=f16"])
    assert same.verdict == "allow"
    assert kv(same) == kv(report)


@pytest.mark.parametrize("kind", ["draft-mpt", "", "ngram-mod,", " none"])
def test_a_kind_of_speculation_that_is_none_is_refused(kind, judged):
    report = judged(DENSE, "-c", "4096", "--spec-type", kind)
    vetoes = [f for f in report.findings if str(f.outcome) == "veto"]
    assert [(f.rule, f.knob) for f in vetoes] == [("settings/possible", "speculation.kind")]
    assert judged(DENSE, "-c", "4096", "--spec-type", "ngram-mod").verdict == "allow"


@pytest.mark.parametrize(
    ("setting", "word"),
    [("option:spec-draft-type-k", "q9_0"), ("option:spec-draft-type-v", ""), ("option:lazy-mode", "never"), ("option:fit", "bogus"), ("option:spec-draft-ngl", "most"), ("option:fit", "false"), ("option:spec-draft-type-k", "8"), ("vision.device", "")],
)
def test_no_word_outside_closed_choices_becomes_the_default(setting, word, tmp_path):
    path = shapes.write(tmp_path, "dense", DENSE)
    name = setting.replace("option:", "engine.options.")
    arguments = {"machine": shapes.machine(ONE), "environ": {}, "overrides": [f"{name}={word}"]}
    argv = ["llama-server", "-m", path, "-md", path, "-c", "4096"]
    if setting.startswith("option:"):  # refused while the input is read
        with pytest.raises(residency.InputError, match=f"--set: {re.escape(name)}: expects "):
            residency.validate(argv, **arguments)
        return
    report = residency.validate(argv, **arguments)
    vetoes = [f for f in report.findings if str(f.outcome) == "veto"]
    assert [(f.rule, f.knob) for f in vetoes] == [("settings/possible", setting)]
    assert f"is '{word}'".casefold() in vetoes[0].message.casefold()


def test_a_launch_file_is_read_with_the_words_of_an_option():
    problem = ENGINE.option_problem
    assert problem("fit", "bogus", version="0.5.0") == "expects one of on, off"
    assert problem("spec-draft-ngl", "", version="0.5.0") == "expects one of auto, all"
    assert [problem("fit", "off", version="0.5.0"), problem("spec-draft-ngl", 4, version="0.5.0"), problem("lazy-mode", "on", version="0.5.0")] == [None] * 3


def test_quantised_values_without_flash_attention_offer_flash_attention_first(judged):
    report = judged(DENSE, "-c", "4096", "-fa", "off", "-ctv", "q8_0")
    (veto,) = [f for f in report.findings if str(f.outcome) == "veto"]
    assert [(f.knob, f.value, f.verified) for f in veto.fixes] == [("context.flash_attention", "on", True), ("kv.value_type", "f16", True)]


def offered(report, rule="memory-budget/pools"):
    """The fixes of the first veto of a rule, by knob."""
    veto = next(f for f in report.findings if f.rule == rule and str(f.outcome) == "veto")
    return [(f.knob, f.value, f.verified) for f in veto.fixes]


def test_a_card_left_out_is_offered(judged):
    cards = {"cards": [[f"CUDA{i}", "cuda", "NVIDIA GeForce RTX 4090", "8.9", 4096, 4000] for i in range(2)], "host": [65536, 60000]}

    def judge(*flags):
        return judged(DENSE, "-np", "1", "-c", "4096", "-ngl", "99", "--fit", "off", *flags, machine=cards)

    assert judge().verdict == "allow"
    assert offered(judge("-ts", "0,1"))[0] == ("layers.ratio", [1, 1], True)
    assert offered(judge("-ts", "1"))[0] == ("layers.ratio", [1, 1], True)
    assert offered(judge("-sm", "none", "-mg", "1"))[0] == ("layers.split", "layer", True)


@pytest.mark.parametrize(
    ("flags", "code", "knob"),
    [
        (("-cmoe",), "no-experts", "experts.on_host"),
        (("-ncmoe", "3"), "no-experts", "experts.on_host"),
        (("-ub", "4096"), "micro-batch-over-batch", "context.micro_batch"),
        (("-ub", "512", "-b", "256"), "micro-batch-over-batch", "context.micro_batch"),
        (("--swa-full",), "no-window", "context.full_window"),
        (("-sm", "row"), "split-of-one", "layers.split"),
    ],
)
def test_settings_that_move_nothing_are_named(flags, code, knob, judged):
    report = judged(DENSE, "-c", "4096", *flags)
    assert code in codes(report)
    assert [f.knob for f in report.findings if f.rule == "settings/inert" and str(f.outcome) == "warn"] == [knob]


def test_settings_that_do_something_are_not_called_inert(judged):
    assert not codes(judged(MOE, "-c", "4096", "-ngl", "99", "-cmoe", "-ub", "2048")) & {"no-experts", "micro-batch-over-batch"}
    assert not codes(judged(DENSE, "-c", "4096", "-ncmoe", "0", "-b", "4096", "-ub", "4096", "-sm", "layer")) & {"no-experts", "micro-batch-over-batch", "split-of-one"}
    assert "split-of-one" not in codes(judged(DENSE, "-c", "4096", "-sm", "row", engine="llama.cpp@b6500", machine=TWO))
    assert "no-window" not in codes(judged(published.DATA["models"]["command-r7b"], "-c", "4096", "-ngl", "99", "--swa-full"))


def test_no_context_too_short_to_be_meant_is_offered(judged):
    """With 8 GiB of cache at 65536 tokens the card holds the model and a cache of fewer than 4096 tokens, 512 MiB."""
    room = compute(judged(DENSE, "-c", "1024", "-np", "1")) + sum(
        a.likely_bytes for a in judged(DENSE, "-c", "1024", "-np", "1").budget.allocations if a.pool == "CUDA0" and str(a.purpose) != "compute"
    )
    card = {"cards": [["CUDA0", "cuda", "NVIDIA GeForce RTX 4090", "8.9", 24080, room / MIB + 150]], "host": [65536, 60000]}
    flags = ("-np", "1", "-ngl", "99", "--fit", "off")
    assert judged(DENSE, "-c", "1024", *flags, machine=card).verdict == "allow"
    assert "context.length" not in [knob for knob, _, _ in offered(judged(DENSE, "-c", "65536", *flags, machine=card))]
    (short,) = [value for knob, value, _ in offered(judged(DENSE, "-c", "4096", *flags, machine=card)) if knob == "context.length"]
    assert 1024 <= short < 4096


def test_page_locked_memory_the_host_will_hardly_give(judged):
    flags = ("-c", "2048", "-ngl", "99", "-cmoe", "--load-mode", "none")
    needed = 6 * (2 * 4096 * 1536 * 128 * 110 // 256 + 4096 * 1536 * 128 * 144 // 256) / MIB
    small = {"cards": ONE["cards"], "host": [needed * 1.6, needed * 1.5]}
    assert "pinned-memory" in codes(judged(MOE, *flags, machine=small, more={"host": {"system": "windows"}}))
    assert "pinned-memory" not in codes(judged(MOE, *flags, machine=small, more={"host": {"system": "linux"}}))


def test_a_launch_short_of_memory_without_flash_attention_is_offered_it_first(judged):
    report = judged(DENSE, "-c", "131072", "-np", "1", "-ngl", "99", "-fa", "off")
    (veto,) = [f for f in report.findings if f.rule == "memory-budget/pools" and f.outcome == "veto"]
    assert veto.ways[0].knob == "context.flash_attention"


def test_scores_without_flash_attention(judged):
    flags = ("-c", "32768", "-np", "1", "-ngl", "99")
    report = judged(DENSE, *flags, "-fa", "off")
    text = next(r.message for r in report.budget.remarks if r.code == "attention-scores")
    assert "2.00 GiB of attention scores" in text  # 32 heads x 512 x 32768 x 4
    assert "attention-scores" not in codes(judged(DENSE, *flags, "-fa", "on"))


# -- the largest single allocation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "verdict"), [("llama.cpp@b6000", "veto"), ("llama.cpp@b7000", "allow")])
def test_one_buffer_above_the_drivers_limit(engine, verdict, judged):
    machine = {"cards": [["Vulkan0", "vulkan", "card", "", 24000, 23500]], "host": [65536, 60000], "device": {"largest_allocation_bytes": 2**31}}
    report = judged(DENSE, "-c", "40960", "-np", "1", "-ngl", "99", "-fa", "off", engine=engine, machine=machine)
    assert report.verdict == verdict
    found = next((f for f in report.findings if f.rule == "devices/largest-allocation" and str(f.outcome) == "veto"), None)
    assert (found is not None) is (verdict == "veto")
    if found is not None:
        assert found.have_bytes == 2**31 < found.need_bytes
        assert any(fix.knob == "context.flash_attention" and fix.verified for fix in found.fixes)


def test_a_tensor_above_the_drivers_limit_is_refused_whatever_the_build(judged):
    machine = {"cards": [["Vulkan0", "vulkan", "card", "", 24000, 23500]], "host": [65536, 60000], "device": {"largest_allocation_bytes": 2**28}}
    report = judged(DENSE, "-c", "4096", "-np", "1", "-ngl", "99", machine=machine)
    found = next(f for f in report.findings if f.rule == "devices/largest-allocation" and str(f.outcome) == "veto")
    assert found.largest_name == "output.weight"
    assert found.need_bytes == 128256 * 4096 * 210 // 256


def test_the_limit_is_read_from_a_profile():
    machine = published.DATA["machines"]["mi60-vulkan"]
    from residency.machine.profile import machine_from_mapping, to_mapping

    read = machine_from_mapping(shapes.machine(machine))
    assert read.devices[0].largest_allocation_bytes == 4 * 2**30
    assert machine_from_mapping(to_mapping(read)) == read


def test_a_command_line_of_the_forks_own_flags(judged):
    flags = ("-c", "4096", "-ngl", "99", "-ger", "-no-mmad", "-no-gr", "-smf32", "-grt", "f16", "-sas", "-vq", "-ooae", "-crs", "0.5", "-gr", "-mqkv", "-ser", "6,1",
             "-cuda", "fusion=1", "--jinja", "-khad", "-wgt", "1")  # fmt: skip
    with pytest.raises(InputError, match="has no flag -wgt"):
        judged(MOE, *flags, engine="ik_llama.cpp", machine=TWO)
    assert judged(MOE, *flags[:-2], "-ot", "exps=CPU", engine="ik_llama.cpp", machine=TWO).verdict == "allow"


def test_the_offload_policy_keeps_experts_off_the_device(judged):
    flags = ("-c", "4096", "-ngl", "99", "-ot", "exps=CPU", "-ub", "128")
    tower = 4096 * 1536 * 128 * 110 // 256
    copied, kept = (compute(judged(MOE, *flags, *more, engine="ik_llama.cpp")) for more in ((), ("-op", "26,0,27,0,29,0")))
    assert copied - kept > tower // 2


def test_split_mode_graph_spreads_every_tensor(judged):
    report = judged(MOE, "-c", "4096", "-ngl", "99", "-sm", "graph", engine="ik_llama.cpp", machine=TWO)
    assert report.verdict == "allow"
    assert "graph-split" in codes(report)
    shares = [sum(a.likely_bytes for a in report.budget.allocations if a.pool == f"CUDA{i}" and str(a.purpose) == "experts") for i in range(2)]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)
    with pytest.raises(InputError, match="expects one of none, layer, row, tensor"):
        judged(MOE, "-sm", "graph")
