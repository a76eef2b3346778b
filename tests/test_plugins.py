"""Plugins through the real door: entry points of installed distributions, found by a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_writer import RULE, distribution

ROOT = Path(__file__).parent.parent


def run(folder: Path, *arguments: str, **more) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *([os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [])])
    environ = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-m", "residency", *arguments], capture_output=True, text=True, env=environ, timeout=60, check=False, **more)


def validate(folder: Path, gemma_path, *arguments: str) -> tuple[int, dict]:
    done = run(folder, "validate", "--machine", "cpu-only-32gb", "--format", "json", *arguments, "--", "llama-server", "-m", str(gemma_path), "-c", "4096")
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_veto_of_an_installed_plugin_counts(tmp_path, gemma_path):
    distribution(tmp_path, "acme", "acme", RULE.format(id="acme/no", answer='veto("No.")'))
    code, report = validate(tmp_path, gemma_path)
    assert code == 1
    assert [f["rule"] for f in report["findings"] if f["outcome"] == "veto"] == ["acme/no"]


def test_two_distributions_with_one_plugin_name_are_both_refused(tmp_path, gemma_path):
    distribution(tmp_path, "acme", "acme", RULE.format(id="acme/no", answer='veto("No.")'))
    distribution(tmp_path, "zzz", "acme", RULE.format(id="zzz/yes", answer="approve()"))
    code, report = validate(tmp_path, gemma_path)
    assert code == 3
    said = " ".join(f["message"] for f in report["findings"] if f["rule"] == "residency/plugins")
    assert "acme (acme 1.0)" in said
    assert "acme (zzz 1.0)" in said


@pytest.mark.parametrize(("body", "said"), [("import nowhere_at_all", "ModuleNotFoundError"), ("raise SystemExit(0)", "SystemExit"), ("def x(:", "SyntaxError")])
def test_a_plugin_that_does_not_import_refuses_and_the_others_still_run(tmp_path, gemma_path, body, said):
    distribution(tmp_path, "broken", "broken", body)
    distribution(tmp_path, "acme", "acme", RULE.format(id="acme/no", answer='veto("No.")'))
    code, report = validate(tmp_path, gemma_path)
    assert code == 3
    troubles = [f["message"] for f in report["findings"] if f["rule"] == "residency/plugins"]
    assert len(troubles) == 1
    assert "broken" in troubles[0]
    assert said in troubles[0]
    assert "acme/no" in [f["rule"] for f in report["findings"] if f["outcome"] == "veto"]


def test_a_distribution_cannot_take_a_shipped_plugins_name(tmp_path, gemma_path):
    distribution(tmp_path, "aaa", "memory-budget", RULE.format(id="aaa/yes", answer="approve()"))
    code, report = validate(tmp_path, gemma_path)
    assert code == 3
    messages = " ".join(f["message"] for f in report["findings"])
    assert "memory-budget" in messages
    assert "requires the rule memory-budget/pools" in messages


def test_the_allow_list_keeps_code_from_being_imported(tmp_path, gemma_path):
    marker = tmp_path / "imported"
    distribution(tmp_path, "acme", "acme", f"open({str(marker)!r}, 'w').close()\n" + RULE.format(id="acme/no", answer='veto("No.")'))
    policy = tmp_path / "policy.toml"
    policy.write_text("plugins = []\n")
    code, _report = validate(tmp_path, gemma_path, "--policy", str(policy))
    assert code == 0
    assert not marker.exists()
    listed = run(tmp_path, "plugins", "--policy", str(policy)).stdout
    assert "not allowed: not on the policy's list" in listed


def test_the_allow_list_pins_the_version(tmp_path, gemma_path):
    distribution(tmp_path, "acme", "acme", RULE.format(id="acme/no", answer='veto("No.")'), version="2.0")
    policy = tmp_path / "policy.toml"
    policy.write_text('require = ["acme/no"]\n[[plugins]]\nname = "acme"\nversion = "1.0"\n')
    code, report = validate(tmp_path, gemma_path, "--policy", str(policy))
    assert code == 3
    assert "requires the rule acme/no" in " ".join(f["message"] for f in report["findings"])


def test_the_example_fleet_plugin_installs_and_vetoes(tmp_path, gemma_path):
    target = tmp_path / "site"
    build = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([*build, str(ROOT / "plugins" / "fleet_example")], check=True, timeout=120, capture_output=True)
    assert "fleet-example/shared-context" in run(target, "rules").stdout
    machine = ("--machine", "2x-h200", "--format", "json")
    done = run(target, "validate", *machine, "--", "llama-server", "-m", str(gemma_path), "-c", "262144")
    assert done.returncode == 1
    veto = next(f for f in json.loads(done.stdout)["findings"] if f["outcome"] == "veto")
    assert veto["rule"] == "fleet-example/shared-context"
    assert veto["message"] == "The launch makes a context of 262144 tokens; a shared host of this fleet allows 131072."
    assert veto["where"]["argv_index"] == 3
    assert veto["fixes"] == [{"knob": "context.length", "value": 131072, "verified": True, "note": "more than the 32768 tokens the model was trained for", "spelling": "-c 131072"}]
    assert run(target, "validate", *machine, "--", "llama-server", "-m", str(gemma_path), "-c", "131072").returncode == 0


def test_a_rule_author_can_test_a_rule_on_literal_facts():
    from residency.budget import Budget
    from residency.rules import Rule
    from residency.testing import facts, finding

    rule = Rule(id="a/b", doc="x.")

    @rule.check
    def check(given):
        return rule.veto("too long") if given.budget.facts["context"] > 100 else rule.approve()

    assert finding(rule, facts(budget=Budget(allocations=(), facts={"context": 101}))).outcome == "veto"
    assert finding(rule, facts(budget=Budget(allocations=(), facts={"context": 100}))).outcome == "approve"
