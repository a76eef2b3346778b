"""Every message of the rules about shared memory, whole."""

# ruff: noqa: ISC004 - long messages are easier to read in pieces

from __future__ import annotations

import pytest

from residency.budget import Allocation, Budget, Phase, Purpose
from residency.checkpoint.model import Checkpoint, Role, Tensor
from residency.engines.base import Capability, CapabilityTable, Models
from residency.policy.model import Margin, Policy
from residency.testing import facts, finding, findings
from residency.units import GIB, MIB

from residency_plugins.unified_memory import (  # isort: skip
    ceiling, double_copy, expert_residency, free_versus_total, host_access, memory_query, never_fails, offload, prefault,
)  # fmt: skip
from residency_plugins.memory_budget import pools

LACKING = CapabilityTable(rows=(), titles={"device-expert-slots": "device-side expert slot store"})


def shared(total=16 * GIB, free=15 * GIB, *, kind="cuda", ceiling_bytes=None, **device):
    pool = {"name": "unified", "total_bytes": total, "free_bytes": free, "ceiling_bytes": ceiling_bytes}
    gpu = {"name": "GPU0", "kind": kind, "pool": "unified", "integrated": True, **device}
    return {"name": "box", "host_pool": "unified", "pools": [{k: v for k, v in pool.items() if v is not None}], "devices": [gpu]}


CARD = {
    "name": "card",
    "pools": [{"name": "GPU0", "total_bytes": 8 * GIB, "free_bytes": 8 * GIB}, {"name": "host", "total_bytes": 32 * GIB, "free_bytes": 30 * GIB}],
    "devices": [{"name": "GPU0", "kind": "cuda", "pool": "GPU0", "integrated": False}],
}


def row(purpose, size_bytes, *, pool="unified", device="GPU0", phase=Phase.LOAD, name="x", **more):
    return Allocation.exact(pool, purpose, name, phase, size_bytes, device=device, **more)


def budget(*rows, **resolved):
    return Budget(allocations=rows, facts=resolved)


def moe(layers=4, tower_bytes=GIB):
    tensors = tuple(
        Tensor(f"blk.{n}.ffn_{part}_exps.weight", 12, "Q4_K", (256, 1), tower_bytes, 0, 0, Role.EXPERT, n)
        for n in range(layers) for part in ("gate", "up", "down")
    )  # fmt: skip
    return Models(main=Checkpoint(path="m", source="gguf", files=(), metadata={"general.architecture": "moe", "moe.block_count": layers}, tensors=tensors))


def towers(size_bytes=12 * GIB, phase=Phase.FIRST_FORWARD, pool="unified"):
    return row(Purpose.EXPERTS, size_bytes, phase=phase, pool=pool, pieces=12, largest_name="blk.0.ffn_gate_exps.weight", largest_bytes=GIB)


def test_towers_over_the_pool_name_what_is_missing_and_where_it_ends():
    # 5 GiB of other weights and 12 towers of 1 GiB in 16 GiB: 11 fit, the twelfth belongs to layer 3.
    given = facts(machine=shared(), models=moe(), capabilities=LACKING, budget=budget(row(Purpose.WEIGHTS, 5 * GIB), towers()))
    found = finding(expert_residency.rule, given)
    assert found.outcome == "veto"
    assert found.message == (
        "GPU0 must hold every expert: 12 expert towers, 12,884,901,888 bytes (12.00 GiB), the largest single allocation 1,073,741,824 bytes, "
        "in a pool of 16.00 GiB, 15.00 GiB of it free. Beside the other weights (5.00 GiB) about 11 of them fit, even with the "
        "whole pool free, so the first forward would fail in layer 3 of 4. The load itself succeeds and says nothing."
    )
    assert (found.need_bytes, found.have_bytes, found.missing) == (17 * GIB, 15 * GIB, "device-expert-slots")
    assert (found.largest_name, found.largest_bytes, found.pool) == ("blk.0.ffn_gate_exps.weight", GIB, "unified")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("refuses", "The engine's own check counts this while it loads and refuses there."),
        ("off", "This version checks that at load, but the check is switched off, so it loads to the end and fails late."),
        ("absent", "The load itself succeeds and says nothing."),
    ],
)
def test_the_engines_own_check_is_mentioned(state, said):
    given = facts(machine=shared(), models=moe(), capabilities=LACKING, budget=budget(row(Purpose.WEIGHTS, 5 * GIB), towers(), fit_check=state))
    assert finding(expert_residency.rule, given).message.endswith(said)


def test_towers_made_resident_while_loading_fail_there():
    given = facts(machine=CARD, models=moe(), capabilities=LACKING, budget=budget(towers(phase=Phase.LOAD, pool="GPU0")))
    assert finding(expert_residency.rule, given).message == (
        "GPU0 must hold every expert: 12 expert towers, 12,884,901,888 bytes (12.00 GiB), the largest single allocation 1,073,741,824 bytes, "
        "in a pool of 8.00 GiB, 8.00 GiB of it free. Beside the other weights (0 B) about 8 of them fit, even with the whole pool "
        "free, so the load would fail in layer 2 of 4."
    )


def test_towers_that_fit_are_approved_and_to_the_byte():
    for extra, outcome in ((0, "approve"), (1, "veto")):
        given = facts(machine=shared(), models=moe(), capabilities=LACKING, budget=budget(row(Purpose.WEIGHTS, 3 * GIB + extra), towers()))
        assert finding(expert_residency.rule, given).outcome == outcome


def test_a_slot_store_or_no_experts_or_too_much_of_the_rest_is_not_this_rules_affair():
    having = CapabilityTable(rows=(Capability(id="device-expert-slots", title="x"),))
    over = budget(row(Purpose.WEIGHTS, 5 * GIB), towers())
    assert finding(expert_residency.rule, facts(machine=shared(), models=moe(), capabilities=having, budget=over)).outcome == "approve"
    unknown = CapabilityTable(rows=())  # says nothing about slots: unknown is not lacking
    assert finding(expert_residency.rule, facts(machine=shared(), models=moe(), capabilities=unknown, budget=over)).outcome == "approve"
    rest = budget(row(Purpose.WEIGHTS, 20 * GIB), towers())
    assert finding(expert_residency.rule, facts(machine=shared(), models=moe(), capabilities=LACKING, budget=rest)).outcome == "approve"
    none = facts(machine=shared(), capabilities=LACKING, budget=budget(row(Purpose.WEIGHTS, GIB)))
    assert finding(expert_residency.rule, none).outcome == "not-applicable"


def test_the_policys_margin_counts_as_for_the_pools():
    policy = Policy(margin=Margin(size_bytes=GIB))
    given = facts(machine=shared(), models=moe(), capabilities=LACKING, policy=policy, budget=budget(row(Purpose.WEIGHTS, 2 * GIB + 1), towers()))
    found = finding(expert_residency.rule, given)
    assert (found.outcome, found.need_bytes, found.have_bytes) == ("veto", 14 * GIB + 1, 14 * GIB)


def copies(size_bytes, at_most=None):
    return Allocation(
        pool="unified", purpose=Purpose.STAGING, name="host copies", phase=Phase.LOAD, certain_bytes=0, likely_bytes=size_bytes,
        at_most_bytes=size_bytes if at_most is None else at_most, device="GPU0", backing="anonymous", knob="memory.load",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "outcome", "message"),
    [
        (
            (row(Purpose.WEIGHTS, 9 * GIB), copies(8 * GIB)), "veto",
            "unified: host and GPU0 draw from one pool, and 8.00 GiB of weights stand in it twice, as the host's copy and as the device's. "
            "The launch needs 17.00 GiB of 15.00 GiB; with one copy it would need 9.00 GiB.",
        ),
        (
            (row(Purpose.WEIGHTS, 5 * GIB), copies(4 * GIB)), "warn",
            "unified: 4.00 GiB of weights stand in one pool twice, as the host's copy and as the copy of GPU0.",
        ),
        (
            (row(Purpose.WEIGHTS, 9 * GIB), copies(0, 8 * GIB)), "warn",
            "unified: up to 8.00 GiB of weights may stand in one pool twice while they are uploaded to GPU0, and there is no room for all of that.",
        ),
        ((row(Purpose.WEIGHTS, 2 * GIB), copies(0, 2 * GIB)), "approve", "every byte once"),
        ((row(Purpose.WEIGHTS, 20 * GIB), copies(8 * GIB)), "approve", "every byte once"),  # too much with one copy, too
    ],
)  # fmt: skip
def test_double_copy(rows, outcome, message):
    found = finding(double_copy.rule, facts(machine=shared(), budget=budget(*rows)))
    assert (found.outcome, found.message) == (outcome, message)


def test_double_copy_does_not_apply_to_a_card():
    rows = (row(Purpose.WEIGHTS, GIB, pool="GPU0"), row(Purpose.STAGING, GIB, pool="host", backing="anonymous"))
    assert finding(double_copy.rule, facts(machine=CARD, budget=budget(*rows))).outcome == "not-applicable"


def test_free_versus_total():
    def ask(need, **more):
        return finding(free_versus_total.rule, facts(machine=shared(**more), budget=budget(row(Purpose.WEIGHTS, need))))

    found = ask(14 * GIB, free=12 * GIB)
    assert (found.outcome, found.need_bytes, found.have_bytes) == ("veto", 14 * GIB, 12 * GIB)
    assert found.message == (
        "unified: the launch needs 14.00 GiB, which the 16.00 GiB of the pool would hold and the 12.00 GiB free now do not. "
        "4.00 GiB are held by page cache or by other processes of host and GPU0, which share it."
    )
    assert ask(12 * GIB, free=12 * GIB).outcome == "approve"
    assert ask(17 * GIB, free=12 * GIB).outcome == "approve"  # fits neither: the pools rule
    unknown = ask(15 * GIB, free=None)
    assert unknown.outcome == "warn"
    assert unknown.message == "unified: how much of the 16.00 GiB is free is unknown, and the launch takes 15.00 GiB of it. The system itself needs some."


def test_a_share_of_the_total_can_be_more_than_is_free():
    # Two nodes of 121.69 GiB with 101.7 GiB free after boot; 0.87 of the total is 105.87 GiB, 0.83 is 101.0.
    machine = shared(total=int(121.69 * GIB), free=int(101.7 * GIB), memory_query=False)
    for share, outcome in ((0.87, "veto"), (0.83, "approve")):
        given = facts(machine=machine, budget=budget(row(Purpose.KV, int(share * 121.69 * GIB))))
        assert finding(free_versus_total.rule, given).outcome == outcome


def test_a_reading_of_more_free_than_total_is_refused():
    # 55,372 MiB free on a card of 32,106 MiB: host memory read through the wrong path.
    from residency.machine.model import Device, Machine, Pool

    card = Pool(name="GPU0", total_bytes=32106 * MIB, free_bytes=55372 * MIB)
    machine = Machine(name="m", pools=(card, Pool(name="host")), devices=(Device(name="GPU0", kind="cuda", pool="GPU0"),))
    found = finding(free_versus_total.rule, facts(machine=machine, budget=budget(row(Purpose.WEIGHTS, GIB, pool="GPU0"))))
    assert (found.outcome, found.message) == ("veto", "GPU0: 54.07 GiB free of 31.35 GiB cannot be; the reading is of another memory.")


def test_memory_query():
    def ask(**more):
        return finding(memory_query.rule, facts(machine=shared(**more), budget=budget(row(Purpose.WEIGHTS, 4 * GIB))))

    assert ask(memory_query=False).outcome == "approve"
    assert ask(memory_query=True).outcome == "not-applicable"
    assert ask().outcome == "not-applicable"  # unknown is not N/A
    half = ask(memory_query=False, free=None)
    assert (half.outcome, half.message) == (
        "warn",
        "GPU0: the management tool reports no memory (N/A), and how much of the 16.00 GiB is free is unknown; the launch is judged by the total.",
    )
    nothing = ask(memory_query=False, free=None, total=None)
    assert (nothing.outcome, nothing.message) == (
        "cannot-tell",
        "GPU0: the management tool reports no memory (N/A), and no other reading of unified is given, so 4.00 GiB are compared with nothing.",
    )


def test_prefault():
    rows = (row(Purpose.WEIGHTS, 5 * GIB), Allocation.mapped("unified", Purpose.WEIGHTS, "file", 20 * GIB))

    def ask(launch=None, **resolved):
        return finding(prefault.rule, facts(machine=shared(), launch=launch, budget=budget(*rows, **resolved)))

    found = ask(prefault_bytes=20 * GIB)
    assert (found.outcome, found.need_bytes, found.have_bytes) == ("warn", 20 * GIB, 10 * GIB)
    assert found.message == (
        "unified: prefault is on by default and reads 20.00 GiB of file mapping into 10.00 GiB that the launch leaves free. "
        "The start reads all of it and keeps only the last part."
    )
    assert ask({"memory": {"prefault": True}}).message.startswith("unified: prefault is asked for and reads 20.00 GiB")
    assert ask({"memory": {"prefault": False}}, prefault_bytes=20 * GIB).outcome == "not-applicable"
    assert ask().outcome == "not-applicable"
    assert ask(prefault_bytes=10 * GIB).outcome == "approve"
    assert ask(prefault_bytes=10 * GIB + 1).outcome == "warn"


def test_ceiling():
    def ask(need, **more):
        return finding(ceiling.rule, facts(machine=shared(**more), budget=budget(row(Purpose.WEIGHTS, need))))

    found = ask(13 * GIB, kind="metal", free=16 * GIB, ceiling_bytes=12 * GIB)
    assert (found.outcome, found.need_bytes, found.have_bytes) == ("veto", 13 * GIB, 12 * GIB)
    assert found.message == (
        "unified: GPU0 may use 12.00 GiB of the 16.00 GiB (the recommended working set), and the launch puts "
        "13.00 GiB there. That 16.00 GiB are free does not help the device."
    )
    assert ask(12 * GIB, kind="metal", free=16 * GIB, ceiling_bytes=12 * GIB).outcome == "approve"
    # What other processes of the host hold does not count against the working set.
    assert ask(11 * GIB, kind="metal", free=12 * GIB, ceiling_bytes=12 * GIB).outcome == "approve"
    # And what is not free is another rule's affair.
    assert ask(13 * GIB, kind="metal", free=11 * GIB, ceiling_bytes=12 * GIB).outcome == "approve"
    unknown = ask(14 * GIB, kind="rocm")
    assert (unknown.outcome, unknown.message) == (
        "warn",
        "unified: how much of the 16.00 GiB GPU0 may use (the carve-out, the GTT limit or the limit of managed allocations) is unknown, "
        "and the launch takes 14.00 GiB.",
    )
    assert ask(13 * GIB, kind="rocm").outcome == "approve"
    assert ask(14 * GIB, kind="cuda").outcome == "approve"


def test_the_host_part_of_a_launch_is_not_under_the_device_s_ceiling():
    machine = shared(kind="metal", free=15 * GIB, ceiling_bytes=8 * GIB)

    def ask(device, host):
        rows = (row(Purpose.WEIGHTS, device * GIB), Allocation.exact("unified", Purpose.KV, "host", Phase.LOAD, host * GIB))
        given = facts(machine=machine, budget=budget(*rows))
        return finding(ceiling.rule, given).outcome, finding(pools.rule, given).outcome

    assert ask(8, 7) == ("approve", "approve")
    assert ask(9, 1) == ("veto", "veto")
    assert ask(8, 8) == ("approve", "veto")  # more than is free
    assert ask(0, 12) == ("approve", "approve")  # computed on the CPU


def test_an_m1_with_8_gib_refuses_what_is_over_its_working_set():
    # 7630 + 400 + 81.63 MiB of buffers against a working set of 5461.34 MiB, on 8 GiB.
    machine = shared(total=8 * GIB, free=8 * GIB, kind="metal", ceiling_bytes=int(5461.34 * MIB))
    rows = (row(Purpose.WEIGHTS, 7630 * MIB), row(Purpose.KV, 400 * MIB), row(Purpose.COMPUTE, 81 * MIB))
    found = finding(ceiling.rule, facts(machine=machine, budget=budget(*rows)))
    assert found.outcome == "veto"
    assert found.message == (
        "unified: GPU0 may use 5.33 GiB of the 8.00 GiB (the recommended working set), and the launch puts "
        "7.92 GiB there. That 8.00 GiB are free does not help the device."
    )


def test_strix_halo_reports_64_gib_and_serves_58():
    machine = shared(total=68_719_476_736, free=68_719_476_736, kind="rocm", ceiling_bytes=62_277_025_792)
    for need, outcome in ((62_277_025_792, "approve"), (62_277_025_793, "veto")):
        assert finding(ceiling.rule, facts(machine=machine, budget=budget(row(Purpose.WEIGHTS, need)))).outcome == outcome


def test_never_fails():
    def ask(need, machine, pool="unified"):
        return finding(never_fails.rule, facts(machine=machine, budget=budget(row(Purpose.WEIGHTS, need, pool=pool))))

    big = shared(total=64 * GIB, free=60 * GIB)
    found = ask(59 * GIB, big)
    assert (found.outcome, found.message) == (
        "warn",
        "unified: 1.00 GiB of 60.00 GiB is left; host and GPU0 share this memory, so running out of it takes the host down instead of "
        "failing an allocation. Leave 2.00 GiB.",
    )
    assert ask(58 * GIB, big).outcome == "approve"
    paged = {**CARD, "devices": [{**CARD["devices"][0], "driver_model": "WDDM"}]}
    found = ask(8 * GIB - 100 * MIB, paged, "GPU0")
    assert (found.outcome, found.message) == (
        "warn",
        "GPU0: 100 MiB of 8.00 GiB is left; the driver of GPU0 moves memory to the host instead of failing an allocation, and everything becomes slow. "
        "Leave 512 MiB.",
    )
    assert ask(8 * GIB, CARD, "GPU0").outcome == "not-applicable"


@pytest.mark.parametrize(
    ("pageable", "need", "outcome", "message"),
    [
        (True, 4, "approve", "kernels of GPU0 read pageable host memory"),
        (None, 4, "warn", "Expert streaming lets the kernels of GPU0 read plain host memory, and whether they can (pageable access) is unknown. The launch fits either way."),
        (None, 20, "cannot-tell", "Expert streaming lets the kernels of GPU0 read plain host memory, and whether they can (pageable access) is unknown. Without it the launch does not fit."),
        (False, 4, "warn", "Expert streaming lets the kernels of GPU0 read plain host memory, and they cannot (no pageable access); the experts are uploaded whole instead."),
        (False, 20, "veto", "Expert streaming lets the kernels of GPU0 read plain host memory, and they cannot (no pageable access); with the whole experts on the device the launch does not fit."),
    ],
)  # fmt: skip
def test_host_access(pageable, need, outcome, message):
    device = {} if pageable is None else {"pageable_access": pageable}
    given = facts(machine=shared(managed_memory=True, **device), budget=budget(row(Purpose.EXPERTS, need * GIB), reads_host_memory="GPU0"))
    found = finding(host_access.rule, given)
    assert (found.outcome, found.message) == (outcome, message)


def test_host_access_is_asked_only_where_kernels_read_host_memory():
    assert finding(host_access.rule, facts(machine=shared(), budget=budget(row(Purpose.EXPERTS, GIB)))).outcome == "not-applicable"


@pytest.mark.parametrize(
    ("launch", "knob", "what"),
    [
        ({"experts": {"on_host": "all"}}, "experts.on_host", "experts"),
        ({"layers": {"on_device": 2}}, "layers.on_device", "layers"),
        ({"layers": {"overrides": [{"pattern": "exps", "device": "CPU"}]}}, "layers.overrides", "tensors"),
        ({"kv": {"on_device": False}}, "kv.on_device", "the KV cache"),
    ],
)
def test_offload_that_frees_nothing(launch, knob, what):
    given = facts(machine=shared(), launch=launch, models=moe(), budget=budget(row(Purpose.WEIGHTS, GIB)))
    found = finding(offload.rule, given)
    assert (found.outcome, found.knob) == ("warn", knob)
    assert found.message == f"unified: keeping {what} on the host frees nothing, because host and GPU0 draw from this one pool; it only moves the work."


def test_offload_to_a_file_mapping_does_free_memory():
    rows = (row(Purpose.WEIGHTS, GIB), Allocation.mapped("unified", Purpose.EXPERTS, "experts", 8 * GIB))
    given = facts(machine=shared(), launch={"experts": {"on_host": "all"}}, models=moe(), budget=budget(*rows))
    assert finding(offload.rule, given).outcome == "approve"


def test_offload_says_nothing_about_a_card():
    given = facts(machine=CARD, launch={"experts": {"on_host": "all"}}, models=moe(), budget=budget(row(Purpose.WEIGHTS, GIB, pool="GPU0")))
    assert [f.outcome for f in findings(offload.rule, given)] == ["not-applicable"]
