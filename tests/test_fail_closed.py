"""The promise: nothing but an explicit approval approves. Every trap of the plugin library has a case here."""

from __future__ import annotations

import sys
import types

import pytest

from residency.budget import Allocation, Budget, Phase, Purpose
from residency.engines.base import CapabilityTable, Models
from residency.judge import Case, judge
from residency.launch.knobs import Knobs
from residency.launch.model import Launch
from residency.machine.model import Machine, Pool
from residency.plugins import Plugin, PluginSet, build_manager, collect, hookimpl
from residency.policy.model import Policy
from residency.rules import Finding, Outcome, Rule


class TinyEngine:
    """An engine whose every launch takes one MiB of host memory."""

    name, aliases, newest, programs = "tiny", (), "1.0", ("tiny-server",)
    capabilities = CapabilityTable(rows=())

    def read(self, argv, environ, *, version):
        return Launch(engine="tiny", version=version, knobs=Knobs())

    def option_problem(self, name, value, *, version):
        return None

    def plan(self, launch, models, machine, *, version):
        return Budget(allocations=(Allocation.exact("host", Purpose.WEIGHTS, "w", Phase.LOAD, 2**20),))


def rule_that(function, rule_id="test/rule", **more):
    rule = Rule(id=rule_id, doc="A rule.\n\nWhat: x\n\nWhy: y\n\nFix: z", **more)
    rule.check(lambda facts: function(rule, facts))
    return rule


def approving(rule_id="test/approves"):
    return rule_that(lambda rule, _facts: rule.approve(), rule_id)


def module(name, **hooks):
    made = types.ModuleType(name)
    for hook, function in hooks.items():
        setattr(made, hook, function)
    return made


def rules_plugin(name, *rules):
    @hookimpl
    def residency_rules():
        return list(rules)

    return module(name, residency_rules=residency_rules)


def verdict_of(*modules, require=(), manager=None, plugin_set=None, policy=None):
    manager = manager or build_manager()
    for plugin in modules:
        manager.register(plugin, name=plugin.__name__)
    found = plugin_set or collect(manager)
    case = Case(
        launch=Launch(engine="tiny", version=None, knobs=Knobs()),
        models=Models(main=_checkpoint()),
        machine=Machine(name="m", pools=(Pool(name="host", total_bytes=2**30, free_bytes=2**30),)),
        engine=TinyEngine(),
        policy=policy or Policy(require=tuple(require)),
        plugins=found,
    )
    return judge(case)


def _checkpoint():
    from residency.checkpoint.model import Checkpoint

    return Checkpoint(path="m.gguf", source="gguf", files=(), metadata={})


def culprits(report):
    return " ".join(f"{f.rule} {f.message}" for f in report.with_outcome(Outcome.CANNOT_TELL))


def test_all_approve_is_an_approval():
    assert verdict_of(rules_plugin("good", approving())).exit_code == 0


@pytest.mark.parametrize(
    ("what", "answer", "said"),
    [
        ("raises", lambda rule, facts: 1 // 0, "ZeroDivisionError"),
        ("exits as a success", lambda rule, facts: sys.exit(0), "SystemExit"),
        ("returns None", lambda rule, facts: None, "None is not a finding"),
        ("returns True", lambda rule, facts: True, "True is not a finding"),
        ("returns a text", lambda rule, facts: "approve", "'approve' is not a finding"),
        ("returns an empty list", lambda rule, facts: [], "empty list"),
        ("is a generator", lambda rule, facts: (x for x in [rule.approve()]), "generator"),
        ("answers for another rule", lambda rule, facts: Finding(rule="test/approves", outcome=Outcome.APPROVE), "answered for another rule"),
        ("invents an outcome", lambda rule, facts: Finding(rule="test/rule", outcome="fine"), "unknown outcome 'fine'"),
        ("changes the facts", lambda rule, facts: facts.launch.options.update(x=1) or rule.approve(), "changed the facts"),
    ],
)
def test_a_rule_that_does_not_answer_is_named_and_refuses(what, answer, said):
    ran = []
    last = rule_that(lambda rule, facts: ran.append(1) or rule.approve(), "test/zzz-last")
    report = verdict_of(rules_plugin("bad", rule_that(answer), approving(), last))
    assert report.exit_code == 3, what
    assert said in culprits(report)
    assert "test/rule" in culprits(report)
    assert ran == [1], "the other rules still run"


def test_a_subclass_of_finding_does_not_approve():
    class Sly(Finding):
        pass

    report = verdict_of(rules_plugin("sly", rule_that(lambda rule, facts: Sly(rule="test/rule", outcome=Outcome.APPROVE))))
    assert report.exit_code == 3


def test_a_rule_that_never_returns_is_interrupted(monkeypatch):
    monkeypatch.setattr("residency.rules.runner.RULE_SECONDS", 0.05)

    def forever(rule, facts):
        while True:
            pass

    report = verdict_of(rules_plugin("slow", rule_that(forever), approving()))
    assert report.exit_code == 3
    assert "no answer within 0.05 s" in culprits(report)


def test_a_plugin_that_raises_while_listing_rules_is_named_and_others_run():
    @hookimpl
    def residency_rules():
        raise OSError("no licence")

    report = verdict_of(module("thrower", residency_rules=residency_rules), rules_plugin("good", approving()))
    assert report.exit_code == 3
    assert "thrower" in culprits(report)
    assert "no licence" in culprits(report)
    assert report.with_outcome(Outcome.APPROVE), "the good plugin's rule ran"


@pytest.mark.parametrize("brought", [None, 7, "test/rule"])
def test_a_plugin_that_brings_no_list_is_refused(brought):
    @hookimpl
    def residency_rules():
        return brought

    report = verdict_of(module("odd", residency_rules=residency_rules), rules_plugin("good", approving()))
    assert report.exit_code == 3
    assert "odd" in culprits(report)


@pytest.mark.parametrize("kind", [{"wrapper": True}, {"hookwrapper": True}])
def test_a_wrapper_cannot_erase_a_veto(kind):
    @hookimpl(**kind)
    def residency_rules():
        yield
        return []

    vetoing = rule_that(lambda rule, facts: rule.veto("No."))
    report = verdict_of(rules_plugin("honest", vetoing), module("eraser", residency_rules=residency_rules))
    assert report.exit_code == 3
    assert "eraser" in culprits(report)
    assert "wrappers are refused" in culprits(report)
    assert report.with_outcome(Outcome.VETO), "the real veto is still reported"


def test_a_wrapper_that_yields_twice_is_refused_before_it_runs():
    @hookimpl(wrapper=True)
    def residency_rules():
        yield
        yield

    assert verdict_of(module("twice", residency_rules=residency_rules), rules_plugin("good", approving())).exit_code == 3


def test_a_misspelt_hook_is_refused():
    @hookimpl
    def residency_rulez():
        return []

    report = verdict_of(module("misspelt", residency_rulez=residency_rulez), rules_plugin("good", approving()))
    assert report.exit_code == 3
    assert "residency_rulez" in culprits(report)


def test_a_blocked_plugin_leaves_its_required_rule_missing():
    manager = build_manager()
    manager.set_blocked("guardian")
    assert manager.register(rules_plugin("guardian", rule_that(lambda r, f: r.veto("No."), "guardian/rule")), name="guardian") is None
    report = verdict_of(rules_plugin("good", approving()), manager=manager, require=["guardian/rule"])
    assert report.exit_code == 3
    assert "requires the rule guardian/rule" in culprits(report)


def test_a_required_rule_that_nobody_brings_refuses():
    report = verdict_of(rules_plugin("good", approving()), require=["fleet/seal"])
    assert report.exit_code == 3
    assert "no loaded plugin brings it" in culprits(report)


def test_switching_a_required_rule_off_does_not_work():
    policy = Policy(require=("test/approves",), severities={"test/approves": "off"})
    report = verdict_of(rules_plugin("good", approving()), policy=policy)
    assert report.exit_code == 0
    assert [f.rule for f in report.with_outcome(Outcome.APPROVE)] == ["test/approves"]


def test_two_rules_with_one_id_refuse_and_name_both():
    report = verdict_of(rules_plugin("one", approving()), rules_plugin("two", approving()))
    assert report.exit_code == 3
    assert "one" in culprits(report)
    assert "two" in culprits(report)


def test_no_rules_is_no_verdict():
    report = verdict_of()
    assert report.exit_code == 3
    assert "No rule ran" in culprits(report)


def test_only_not_applicable_is_no_verdict():
    report = verdict_of(rules_plugin("shy", rule_that(lambda rule, facts: rule.not_applicable("not mine"))))
    assert report.exit_code == 3
    assert "silence is not an approval" in culprits(report)


def test_a_rule_without_a_check_is_refused():
    report = verdict_of(rules_plugin("hollow", Rule(id="hollow/rule", doc="x")), rules_plugin("good", approving()))
    assert report.exit_code == 3
    assert "without a check" in culprits(report)


def test_an_engine_that_breaks_gives_no_verdict(monkeypatch):
    def broken(self, launch, models, machine, *, version):
        raise KeyError("block_count")

    monkeypatch.setattr(TinyEngine, "plan", broken)
    pools = __import__("residency_plugins.memory_budget.pools", fromlist=["rule"]).rule
    report = verdict_of(rules_plugin("good", approving(), pools))
    assert report.exit_code == 3
    assert "block_count" in culprits(report)


def test_three_wins_over_one():
    vetoing = rule_that(lambda rule, facts: rule.veto("No."), "test/a-veto")
    crashing = rule_that(lambda rule, facts: 1 // 0, "test/b-crash")
    report = verdict_of(rules_plugin("both", vetoing, crashing))
    assert report.exit_code == 3
    assert report.with_outcome(Outcome.VETO)


def test_a_waiver_never_covers_a_crash():
    from datetime import date

    from residency.policy.model import Waiver

    waiver = Waiver(rule="test/rule", reason="we know", until=date(2999, 1, 1), approved_by="fleet")
    policy = Policy(require=(), waivers=(waiver,))
    assert verdict_of(rules_plugin("bad", rule_that(lambda r, f: 1 // 0)), policy=policy).exit_code == 3
    assert verdict_of(rules_plugin("bad", rule_that(lambda r, f: r.veto("No.")), approving()), policy=policy).exit_code == 0


def test_an_expired_waiver_lets_the_veto_return():
    from datetime import date

    from residency.policy.model import Waiver

    waiver = Waiver(rule="test/rule", reason="we know", until=date(2001, 1, 1), approved_by="fleet")
    report = verdict_of(rules_plugin("bad", rule_that(lambda r, f: r.veto("No.")), approving()), policy=Policy(require=(), waivers=(waiver,)))
    assert report.exit_code == 1
    assert any("expired on 2001-01-01" in f.message for f in report.findings)


def test_shipped_rules_do_not_change_the_facts_and_explain_themselves():
    from residency.plugins import load_plugins

    found = load_plugins()
    assert not found.troubles
    assert found.shipped == {r.id for r in found.rules}
    for rule in found.rules:
        assert [w for w in ("What:", "Why:", "Fix:") if f"\n\n{w}" not in rule.doc] == [], rule.id
        assert rule.doc.split("\n", 1)[0].endswith("."), rule.id


def test_a_trouble_of_any_plugin_refuses():
    trouble = collect(build_manager(), [Plugin(name="x", distribution="y", version="1", state="failed", detail="ImportError")])
    assert isinstance(trouble, PluginSet)
    from residency.plugins import Trouble

    broken = PluginSet(rules=(approving(),), owners={"test/approves": "good"}, troubles=(Trouble(culprit="x", message="plugin x did not load"),))
    report = verdict_of(plugin_set=broken)
    assert report.exit_code == 3
    assert "plugin x did not load" in culprits(report)


def test_explain_reads_a_shipped_rule_from_where_it_stands():
    from residency.cli import _shipped_text
    from residency.plugins import load_plugins

    found = load_plugins()
    assert {r.id: _shipped_text(r.id) for r in found.rules if r.id in found.shipped} == {r.id: r.doc for r in found.rules if r.id in found.shipped}


@pytest.mark.parametrize(
    "launch",
    ["configs/launches/dgx-spark-qwen3.8-2.4t.toml", "configs/launches/strata-262144.toml", "configs/launches/strata-204800.toml"],
)
def test_shipped_rules_leave_the_facts_as_they_are(launch):
    from pathlib import Path

    from residency.api import Inputs, prepare
    from residency.judge import _facts, plan
    from residency.rules.runner import _fingerprint, run_rules

    case = prepare(str(Path(__file__).parent.parent / launch), Inputs(environ={}))
    facts = _facts(case, plan(case))
    before = _fingerprint(facts)
    assert len(run_rules(facts, case.plugins)) >= len(case.plugins.rules)
    assert _fingerprint(facts) == before


class Rude(BaseException):
    """Neither an Exception nor SystemExit."""


class Unshowable:
    def __repr__(self):
        raise ValueError("no")


def silent(_facts):
    raise MuteError


class MuteError(Exception):
    def __str__(self):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda rule, facts: (_ for _ in ()).throw(Rude("x")), "Rude: x"),
        (lambda rule, facts: (_ for _ in ()).throw(GeneratorExit()), "GeneratorExit"),
        (lambda rule, facts: silent(facts), "MuteError"),
        (lambda rule, facts: Unshowable(), "cannot be shown"),
        (lambda rule, facts: rule.veto(7), "its message is 7"),
        (lambda rule, facts: rule.veto("x", need_bytes="many"), "its need_bytes is 'many'"),
        (lambda rule, facts: rule.veto("x", ways=("context.length",)), "changes no setting there is"),
        (lambda rule, facts: rule.veto("x", ways=(way("no.such", 1),)), "changes no setting there is"),
        (lambda rule, facts: rule.veto("x", ways=(way("context.length", 10, low="1"),)), "whose bounds are not whole numbers"),
        (lambda rule, facts: rule.veto("x", ways=[way("context.length", 10)]), "its ways is"),
    ],
    ids=["base-exception", "generator-exit", "mute", "unshowable", "number-as-message", "text-as-bytes", "text-as-way", "no-such-knob", "odd-bound", "list-of-ways"],
)
def test_odd_answers_cost_the_rule_its_voice_and_not_the_report(answer, said):
    report = verdict_of(rules_plugin("odd", rule_that(answer), approving()))
    assert report.exit_code == 3
    assert said in culprits(report)
    assert report.with_outcome(Outcome.APPROVE)
    report.to_dict()


def way(knob, value, **more):
    from residency.rules import Way

    return Way(knob=knob, value=value, **more)


def test_a_rule_cannot_waive_itself_or_forge_a_verified_fix():
    from residency.rules import Fix

    forged = (Fix(knob="context.length", value=1, verified=True),)
    waived = {"reason": "me", "until": "2999-01-01", "approved_by": "me"}
    report = verdict_of(rules_plugin("sly", rule_that(lambda rule, facts: rule.veto("No.", waived=waived, fixes=forged)), approving()))
    assert report.exit_code == 1
    (veto,) = report.with_outcome(Outcome.VETO)
    assert (veto.waived, veto.fixes) == (None, ())


def test_no_policy_turns_silence_into_an_approval():
    policy = Policy(require=(), cannot_tell="warn", severities={"test/approves": "off"})
    assert verdict_of(rules_plugin("good", approving()), policy=policy).exit_code == 3


def test_an_engine_cannot_take_another_engines_name_alias_or_program():
    @hookimpl
    def residency_engines():
        class Thief(TinyEngine):
            name, aliases, programs = "thief", ("tiny",), ()

        class Burglar(TinyEngine):
            name, aliases, programs = "burglar", (), ("tiny-server",)

        return [TinyEngine(), Thief(), Burglar()]

    manager = build_manager()
    manager.register(module("engines", residency_engines=residency_engines), name="engines")
    found = collect(manager)
    assert [e.name for e in found.engines] == ["tiny"]
    assert [t.message for t in found.troubles] == [
        "an engine of plugin engines takes the name tiny, which belongs to tiny",
        "an engine of plugin engines takes the program tiny-server, which belongs to tiny",
    ]


def test_a_hook_that_never_ends_is_interrupted(monkeypatch):
    monkeypatch.setattr("residency.plugins.PLUGIN_SECONDS", 0.05)

    @hookimpl
    def residency_rules():
        while True:
            pass

    @hookimpl
    def residency_engines():
        from itertools import repeat

        return repeat(TinyEngine())

    report = verdict_of(module("slow", residency_rules=residency_rules, residency_engines=residency_engines), rules_plugin("good", approving()))
    assert report.exit_code == 3
    assert "no answer within 0.05 s" in culprits(report)
    assert "more than 1000 things" in culprits(report)


def test_reports_share_nothing_that_a_caller_could_change(gemma_path):
    import residency

    report = residency.validate(["llama-server", "-m", str(gemma_path), "-c", "4096"], machine="cpu-only-32gb", environ={})
    with pytest.raises(AttributeError):
        report.plugins.rules[0].severity = "warn"
    for mapping in (report.models.main.metadata, report.models.main.array_lengths, report.plugins.owners):
        with pytest.raises(TypeError):
            mapping["x"] = 1
    with pytest.raises(ValueError, match="has a check already"):
        report.plugins.rules[0].check(lambda facts: None)


def test_a_policy_that_speaks_in_vain_is_told_so():
    policy = Policy(require=("test/approves",), severities={"test/approve": "warn", "test/approves": "off"})
    report = verdict_of(rules_plugin("good", approving()), policy=policy)
    assert report.exit_code == 0
    said = [f.message for f in report.with_outcome(Outcome.WARN)]
    assert said == [
        "The policy sets a severity for test/approve, and no loaded plugin brings that rule. Did you mean test/approves?",
        "The policy switches test/approves off and requires it; it runs.",
    ]
