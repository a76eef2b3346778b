"""Every message of the layer-split rules, whole, on literal facts; and the report of the launch that began it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from residency import validate
from residency.budget import Allocation, Budget, Phase, Purpose
from residency.engines.base import Capability, CapabilityTable, Models
from residency.machine import resolve_machine
from residency.plugins import load_plugins
from residency.policy.model import Policy
from residency.testing import facts, findings

ROOT = Path(__file__).parent.parent
MIB, GIB = 2**20, 2**30
RULES = {r.id: r for r in load_plugins().rules}


def machine(*cards, **devices):
    """Return a machine of cards given as GiB, or (total, free); keyword "CUDA1" changes a device."""
    pools, found = [], []
    for index, card in enumerate(cards):
        total, free = card if isinstance(card, tuple) else (card, card)
        name = f"CUDA{index}"
        pools.append({"name": name, "total_bytes": int(total * GIB), "free_bytes": int(free * GIB)})
        found.append({"name": name, "kind": "cuda", "pool": name, "integrated": False, **devices.get(name, {})})
    pools.append({"name": "host", "total_bytes": 128 * GIB, "free_bytes": 120 * GIB})
    return resolve_machine({"name": "test", "pools": pools, "devices": found})


def row(pool, purpose, name, size, phase=Phase.LOAD, **more):
    return Allocation.exact(pool, purpose, name, phase, int(size), device=pool if pool != "host" else None, **more)


def band(pool, purpose, name, certain, likely, at_most, phase=Phase.WARM_UP, **more):
    return Allocation(pool=pool, purpose=purpose, name=name, phase=phase, certain_bytes=certain, likely_bytes=likely, at_most_bytes=at_most, device=pool, **more)


def greedy_card(pool, *, encoder=True, most=900 * MIB, reserve=700 * MIB):
    """One card of 20 GiB: weights, an encoder process, a cache that takes what is left, and what comes after it."""
    before = [row(pool, Purpose.VISION, "encoder", GIB, Phase.BEFORE, accounted=False, knob="vision.device")] if encoder else []
    used = sum(a.likely_bytes for a in before) + 2 * GIB
    return [
        *before,
        row(pool, Purpose.WEIGHTS, "arena", 2 * GIB),
        band(pool, Purpose.EXPERT_CACHE, "cache", MIB, 20 * GIB - used - reserve, 20 * GIB - used - reserve, Phase.LOAD, greedy=True),
        band(pool, Purpose.COMPUTE, "handles", 50 * MIB, 200 * MIB, most, accounted=False),
    ]


NO_CHECK = CapabilityTable(rows=(Capability(id="startup-vram-budget", title="check at start", since="2.0"),))


def said(rule, **given):
    """Return [(outcome, message)] of a rule."""
    return [(str(f.outcome), f.message) for f in findings(RULES[rule], facts(**given))]


# After the cache


def after(cards, *, version="1.0", reserve=700 * MIB, launch=None, cards_in=2):
    rows = [a for index in range(cards) for a in greedy_card(f"CUDA{index}", encoder=not index, reserve=reserve)]
    rows.append(row("host", Purpose.EXPERTS, "experts", 40 * GIB, backing="pinned"))
    budget = Budget(allocations=tuple(rows), in_order=True, facts={"reserve_bytes": {f"CUDA{i}": reserve for i in range(cards)}})
    return {"machine": machine(*[20] * cards_in), "budget": budget, "capabilities": NO_CHECK, "version": version, "launch": launch}


def test_after_the_cache_a_split_without_a_check_is_refused():
    assert said("layer-split/after-cache", **after(2)) == [
        (
            "veto",
            ("CUDA0: what comes after the expert cache may need 900 MiB, and the cache leaves it only the reserve, 700 MiB by default. Certain is 50 MiB, "
            "likely 200 MiB; the rest is margin: handles up to 900 MiB. This version has no check at start-up that would notice. Not counted by the engine "
            "at all: encoder 1.00 GiB, which starts first. The largest single allocation, arena of 2147483648 bytes, competes with that and with whatever an "
            "earlier run still holds. This failure has hung a host (40.00 GiB of its memory would be pinned), so the margin decides. Context is a weak lever: "
            "only 0 B here grow with it."),
        ),
        (
            "warn",
            ("CUDA1: after the expert cache come likely 200 MiB and at most 900 MiB (handles 900 MiB); the reserve is 700 MiB, and this version does not check "
            "that at start-up. A reserve of 960 MiB covers it."),
        ),
    ]


def test_after_the_cache_a_version_that_checks_is_warned():
    assert [m for _, m in said("layer-split/after-cache", **after(2, version="2.0"))] == [
        ("CUDA0: after the expert cache come likely 200 MiB and at most 900 MiB (handles 900 MiB); the reserve is 700 MiB, and start-up checks for it. "
        "A reserve of 960 MiB covers it."),
        ("CUDA1: after the expert cache come likely 200 MiB and at most 900 MiB (handles 900 MiB); the reserve is 700 MiB, and start-up checks for it. "
        "A reserve of 960 MiB covers it."),
        "after the cache: CUDA0 up to 900 MiB of 700 MiB, CUDA1 up to 900 MiB of 700 MiB",
    ]


def test_after_the_cache_one_card_is_warned_and_a_large_reserve_approved():
    assert [o for o, _ in said("layer-split/after-cache", **after(1, cards_in=1))] == ["warn", "approve"]
    assert said("layer-split/after-cache", **after(2, reserve=900 * MIB)) == [("approve", "after the cache: CUDA0 up to 900 MiB of 900 MiB, CUDA1 up to 900 MiB of 900 MiB")]
    assert said("layer-split/after-cache", budget=Budget(allocations=())) == [("not-applicable", "no cache takes what is left")]


# Cards


def two(first, second, *, ends=(), mach=None, launch=None, extra=None):
    rows = [row("CUDA0", Purpose.WEIGHTS, "weights", first * GIB, knob="layers.ratio"), row("CUDA1", Purpose.WEIGHTS, "weights", second * GIB, knob="layers.ratio"), *ends]
    return {"machine": mach or machine(10, 10), "budget": Budget(allocations=tuple(rows), facts=extra or {}), "launch": launch}


def test_card_budget():
    assert said("layer-split/card-budget", **two(6, 12)) == [
        (
            "veto",
            ("CUDA1 is 2.00 GiB over, while CUDA0 has 4.00 GiB left: weights (12.00 GiB) comes when 0 B of 10.00 GiB are taken. "
            "The cards together would hold the launch; the split does not fit them."),
        )
    ]
    assert said("layer-split/card-budget", **two(6, 8)) == [("approve", "CUDA0 4.00 GiB left, CUDA1 2.00 GiB left")]
    assert said("layer-split/card-budget", **two(9, 12)) == [("approve", "CUDA0 1.00 GiB left, CUDA1 0 B left")], "no split holds it: not this rule's"
    assert said("layer-split/card-budget", budget=Budget(allocations=())) == [("not-applicable", "one card")]


def test_card_budget_offers_a_ratio_that_fits(gemma_path, tmp_path):
    small = {
        "name": "uneven",
        "pools": [{"name": "CUDA0", "total": "12GiB", "free": "11GiB"}, {"name": "CUDA1", "total": "4GiB", "free": "700MiB"}, {"name": "host", "total": "64GiB", "free": "60GiB"}],
        "devices": [{"name": n, "kind": "cuda", "pool": n, "integrated": False} for n in ("CUDA0", "CUDA1")],
    }
    report = validate(["llama-server", "-m", gemma_path, "-c", "32768", "-np", "1", "-ts", "1,9"], machine=small, environ={})
    veto = next(f for f in report.findings if f.rule == "layer-split/card-budget")
    assert (veto.outcome, veto.pool) == ("veto", "CUDA1")
    assert any(f.verified and f.knob == "layers.ratio" for f in veto.fixes), veto.fixes


def test_card_budget_offers_no_ratio_that_leaves_another_card_over():
    """18 GiB on two cards of 10: half the share for one of them would leave 12 on the other."""
    veto = findings(RULES["layer-split/card-budget"], facts(**two(6, 12)))[0]
    assert [(w.knob, w.value) for w in veto.ways] == [("layers.ratio", [1, 1])]
    roomy = findings(RULES["layer-split/card-budget"], facts(**two(1, 12)))[0]  # 13 GiB: 7.4 and 5.6, or 8.7 and 4.3
    assert [w.value for w in roomy.ways] == [[1, 1], [19, 25], [1, 2]]


def test_end_cards():
    head = row("CUDA1", Purpose.DRAFT, "draft layer", GIB, Phase.CONTEXT)
    encoder = row("CUDA1", Purpose.VISION, "encoder", GIB, Phase.BEFORE)
    assert said("layer-split/end-cards", **two(6, 11)) == [("approve", "what only one card holds fits there")], "layers are not an extra"
    assert said("layer-split/end-cards", **two(6, 9, ends=(head, encoder))) == [
        ("veto", "CUDA1 is over by 1.00 GiB because of what only this card holds: encoder 1.00 GiB and draft layer 1.00 GiB. Without it 1.00 GiB would be left.")
    ]
    assert said("layer-split/end-cards", **two(6, 7, ends=(head,))) == [("approve", "what only one card holds fits there")]


def test_stale_tenant():
    held = machine((24, 1), 24, CUDA0={"tenants": ["pid 41 server 23.0 GiB"]})
    assert said("layer-split/stale-tenant", **two(6, 6, mach=held)) == [
        (
            "veto",
            ("CUDA0: 23.00 GiB of 24.00 GiB are held before the launch by pid 41 server 23.0 GiB; 1.00 GiB are free and the launch needs 6.00 GiB for certain. "
            "It would fit the empty card, so this is not a question of model or context: an earlier run that has not let go yet is the usual reason. "
            "The first large allocation, weights of 6442450944 bytes, is where it fails."),
        )
    ]
    assert said("layer-split/stale-tenant", **two(6, 6, mach=machine((24, 12), 24))) == [("warn", "CUDA0: 12.00 GiB of 24.00 GiB are held before the launch.")]
    assert said("layer-split/stale-tenant", **two(30, 6, mach=machine((24, 23), 24))) == [("approve", "the cards are empty, or how full they are is unknown")]


def points(first, cards=2):
    ids = [f"CUDA{i}" for i in range(cards)]
    from residency.checkpoint.model import Checkpoint

    model = Checkpoint(path="m", source="census", files=(), metadata={"general.architecture": "a", "a.block_count": 48})
    return said("layer-split/points", launch={"layers": {"first": first}, "device": {"ids": ids}}, machine=machine(*[10] * cards), models=Models(main=model))


def test_points():
    assert points([24]) == [("approve", "split at 24")]
    assert points([24, 12, 6], 4) == [
        ("veto", "The split points 24, 12, 6 do not rise; each is the first layer of a card, not a count. As counts of layers it would be 24, 36, 42.")
    ]
    assert points([48]) == [("veto", "The split point 48 is outside the model: its layers are 0 to 47.")]
    assert points([16, 32]) == [("veto", "There are 2 split points (16, 32) for 2 cards; 2 cards take 1 point, one for each card after the first.")]
    assert points([24, 24], 3)[0] == ("veto", "The split points 24, 24 do not rise; each is the first layer of a card, not a count. As counts of layers it would be 24.")
    assert said("layer-split/points") == [("not-applicable", "no split points are given")]


def test_mode():
    table = CapabilityTable(rows=(Capability(id="split-layer", title="split by layers"),), titles={"split-row": "split by rows"})
    given = {"machine": machine(10, 10), "capabilities": table}
    answer = findings(RULES["layer-split/mode"], facts(launch={"layers": {"split": "row"}}, **given))
    assert [(str(f.outcome), f.message, f.missing) for f in answer] == [
        ("veto", "A split by row over 2 cards is not there on the cuda back end of this version.", "split-row")
    ]
    assert said("layer-split/mode", launch={"layers": {"split": "auto"}}, **given) == [("approve", "split by auto")]
    assert said("layer-split/mode", launch={"layers": {"split": "tensor"}}, **given) == [("approve", "split by tensor")], "unknown is not absent"
    assert said("layer-split/mode") == [("not-applicable", "no split is asked for")]


def test_small_card():
    chunks = {"prompt_chunk_by_device": {"CUDA0": 8192, "CUDA1": 512}}
    assert said("layer-split/small-card", **two(6, 6, mach=machine(32, 10), extra=chunks)) == [
        ("warn", "CUDA1 can lend buffers for prompt chunks of 512 tokens, the other cards for 8192; the smallest decides for all, and prompts slow down with it.")
    ]
    assert said("layer-split/small-card", **two(6, 3, mach=machine(32, 10))) == [
        ("warn", "CUDA1 holds 10.00 GiB, another card 32.00 GiB; per-card buffers are the same on both, so the small one is the first to be full.")
    ]
    assert said("layer-split/small-card", **two(6, 6)) == [("approve", "cards of like size")]


def test_reserve():
    def shown(**device):
        given = after(1, cards_in=1)
        given["machine"] = machine(20, CUDA0=device)
        return said("layer-split/reserve", **given)

    assert shown(display_attached=True) == [("warn", "CUDA0: the reserve is 700 MiB, and the card drives a display: 1500 MiB have been needed there.")]
    assert shown(driver_model="WDDM") == [
        ("warn", "CUDA0: the reserve is 700 MiB, and its driver does not fail a full card but moves memory to the host: 1536 MiB have been needed there.")
    ]
    assert shown() == [("approve", "CUDA0 keeps 700 MiB")]


def test_pipeline_copies():
    big = row("CUDA1", Purpose.COMPUTE, "compute", 8 * GIB, Phase.CONTEXT)
    given = two(6, 6, ends=(big,), extra={"pipeline_copies": 4})
    text = "CUDA1: 8.00 GiB of compute buffers hold 4 copies of what crosses cards, and 4.00 GiB are left for them."
    assert said("layer-split/pipeline-copies", **given) == [("veto", text)]
    table = CapabilityTable(rows=(Capability(id="pipeline-fallback", title="retry"),))
    assert said("layer-split/pipeline-copies", **given, capabilities=table) == [("warn", f"{text} The engine tries again without pipelining.")]
    assert said("layer-split/pipeline-copies", **two(6, 6)) == [("not-applicable", "no pipeline copies")]


def test_row_cache():
    cache = row("CUDA0", Purpose.KV, "KV cache", 5 * GIB, Phase.CONTEXT)
    assert said("layer-split/row-cache", **two(6, 6, ends=(cache,), launch={"layers": {"split": "row"}})) == [
        ("veto", "CUDA0 is over by 1.00 GiB because the whole cache, 5.00 GiB, stays on the main card while rows are spread.")
    ]
    assert said("layer-split/row-cache", **two(4, 6, ends=(cache,), launch={"layers": {"split": "row"}})) == [("approve", "the cache, 5.00 GiB, fits on CUDA0")]
    assert said("layer-split/row-cache") == [("not-applicable", "no split by rows")]


def test_peers():
    launch = {"layers": {"split": "tensor"}}
    apart = machine(10, 10, CUDA0={"peers": []}, CUDA1={"peers": []})
    together = machine(10, 10, CUDA0={"peers": ["CUDA1"]}, CUDA1={"peers": ["CUDA0"]})
    assert said("layer-split/peers", launch=launch, machine=apart) == [
        ("warn", "CUDA0 and CUDA1 cannot reach each other directly, so every layer of this split goes through host memory.")
    ]
    assert said("layer-split/peers", launch=launch, machine=together) == [("approve", "every card reaches every other")]
    assert said("layer-split/peers", launch=launch, machine=machine(10, 10)) == [("approve", "whether the cards reach each other is unknown; none is assumed")]
    assert said("layer-split/peers", launch={"layers": {"split": "layer"}}, machine=apart) == [("not-applicable", "no split that exchanges data in every layer")]


def test_every_rule_of_the_plugin_is_covered_here():
    text = Path(__file__).read_text(encoding="utf-8")
    assert [r for r in RULES if r.startswith("layer-split/") and f'"{r}"' not in text] == []


@pytest.mark.parametrize("rule", [r for r in RULES.values() if r.id.startswith("layer-split/")], ids=lambda r: r.id)
def test_every_rule_links_to_a_public_report(rule):
    assert re.search(r"https://github\.com/[\w.-]+/[\w.-]+/issues/\d+", rule.doc.split("Why:", 1)[1])


# The launch that began it


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "residency", *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


EXPECTED = """\
VETO  Swift 1.5 IQ3_XXS · strata 0.1.35 · 2 x RTX 2080 Ti 22 GB  census, 2 shards, 836 tensors, TIME
  note: Reconstructed, not read from the files.

x layer-split/after-cache                                                     memory.reserve not set
  CUDA0: what comes after the expert cache may need 1.09 GiB, and the cache leaves it only the
  reserve, 700 MiB by default. Certain is 74 MiB, likely 268 MiB; the rest is margin: verify window,
  graphs, library handles, side streams, first use up to 925 MiB, image encoder's first images up to
  191 MiB. This version has no check at start-up that would notice. Not counted by the engine at
  all: image encoder process 1.12 GiB, which starts first. The largest single allocation, weight
  arena of 1538035200 bytes, competes with that and with whatever an earlier run still holds. This
  failure has hung a host (43.83 GiB of its memory would be pinned), so the margin decides. Context
  is a weak lever: only 262 MiB here grow with it.
  missing  start-up check of free VRAM that stops with the missing MiB
  largest  weight arena  1.43 GiB
  try      memory.reserve = "1408MiB"  verified: passes
  try      vision.device = "cpu"  verified: passes; pictures take seconds instead of tenths
  try      vision.enabled = false  verified: passes; text only
  try      context.length = 76800  verified: passes; gives up far more than a larger reserve does

! layer-split/after-cache                                                     memory.reserve not set
  CUDA1: after the expert cache come likely 194 MiB and at most 851 MiB (graphs, library handles,
  side streams, first use 851 MiB); the reserve is 700 MiB, and this version does not check that at
  start-up. A reserve of 896 MiB covers it.

CUDA0            21.19 GiB free   |######################################################|  21.19 GiB
  weights 3.17 GiB   expert-cache 15.47 GiB   kv 456 MiB   state 56 MiB   compute 268 MiB   vision
  1.12 GiB   runtime 256 MiB   reserve 432 MiB
CUDA1            21.19 GiB free   |######################################################|  21.19 GiB
  weights 3.65 GiB   expert-cache 15.00 GiB   kv 456 MiB   state 56 MiB   compute 290 MiB   vision
  3.0 MiB   draft 1.01 GiB   runtime 256 MiB   reserve 506 MiB
host            120.00 GiB free   |####################..................................|  43.83 GiB
  weights 497 MiB   experts 39.99 GiB   kv 3.35 GiB
"""


def test_the_whole_report():
    done = run("validate", "configs/launches/strata-262144.toml")
    assert re.sub(r"\d\.\d\d s$", "TIME", done.stdout, count=1, flags=re.MULTILINE) == EXPECTED
    assert done.returncode == 1


def test_its_stable_twin_is_one_line():
    done = run("validate", "configs/launches/strata-204800.toml")
    assert done.returncode == 0
    assert re.fullmatch(r"ALLOW  Swift 1\.5 IQ3_XXS · strata 0\.1\.35 · 2 x RTX 2080 Ti 22 GB  census, 2 shards, 836 tensors, \d\.\d\d s\n", done.stdout)


def test_json_names_the_arena_and_offers_verified_values():
    report = json.loads(run("validate", "--format", "json", "configs/launches/strata-262144.toml").stdout)
    veto = next(f for f in report["findings"] if f["outcome"] == "veto")
    assert veto["largest"] == {"name": "weight arena", "bytes": 1538035200}
    assert veto["missing"]["capability"] == "startup-vram-budget"
    assert (veto["pool"], veto["have_bytes"], veto["need_bytes"]) == ("CUDA0", 700 * MIB, 637 * MIB + 863 * MIB * 131072 // 393216 + 200_000_000)
    assert [(f["knob"], f["value"], f["verified"]) for f in veto["fixes"]] == [
        ("memory.reserve", 1408 * MIB, True),
        ("vision.device", "cpu", True),
        ("vision.enabled", False, True),
        ("context.length", 76800, True),
    ]
    cards = {p["name"]: p for p in report["budget"]["pools"]}
    arena = [a for a in cards["CUDA1"]["allocations"] if a["name"] == "weight arena"]
    assert arena[0]["certain_bytes"] == 1538035200
    assert cards["CUDA0"]["left_bytes"] == cards["CUDA1"]["left_bytes"] == 0, "the cache takes the rest"


LAUNCH = str(ROOT / "configs" / "launches" / "strata-262144.toml")


def test_every_offered_value_passes_by_itself():
    for change in ("memory.reserve=1408MiB", "vision.device=cpu", "vision.enabled=false", "context.length=76800"):
        assert validate(LAUNCH, environ={}, overrides=[change]).allowed, change
    assert not validate(LAUNCH, environ={}, overrides=["memory.reserve=1100MiB"]).allowed
    assert not validate(LAUNCH, environ={}, overrides=["context.length=204800"]).allowed, "the context is not the lever"
    assert validate(LAUNCH, environ={}, engine="strata@0.1.38").allowed, "the version is"


def test_a_fleet_can_relax_it():
    relaxed = validate(LAUNCH, environ={}, policy=Policy(severities={"layer-split/after-cache": "warn"}))
    assert relaxed.allowed
    assert any(f.rule == "layer-split/after-cache" and f.outcome == "warn" for f in relaxed.findings)
    shipped = str(ROOT / "configs" / "policies" / "recommend-only.toml")
    assert validate(LAUNCH, environ={}, policy=shipped).allowed
    too_long = ["kv.resident=0", "context.length=4194304"]
    assert not validate(LAUNCH, environ={}, policy=shipped, overrides=too_long).allowed, "what the engine refuses stays refused"
    assert validate(LAUNCH, environ={}, policy=shipped, overrides=["kv.resident=0", "kv.key_type=fp16", "kv.value_type=fp16", "context.length=262144"]).allowed


def test_a_waiver_covers_it():
    waiver = {"rule": "layer-split/after-cache", "reason": "seen to work here", "until": date(2999, 1, 1), "approved_by": "ops", "match": {"pool": "CUDA0"}}
    report = validate(LAUNCH, environ={}, policy={"waivers": [waiver]})
    assert report.allowed
    assert [f.waived["approved_by"] for f in report.findings if f.waived] == ["ops"]


def test_a_margin_is_met_by_the_reserve():
    twin = str(ROOT / "configs" / "launches" / "strata-204800.toml")
    assert validate(twin, environ={}, policy={"margin": "1GiB"}).allowed
    assert not validate(twin, environ={}, policy={"margin": "4GiB"}).allowed
