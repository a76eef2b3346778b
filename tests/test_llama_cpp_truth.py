"""The byte model against what the engine itself reported, launch by launch."""

from __future__ import annotations

import time

import pytest

from residency.engines.llama_cpp import layout
from residency.engines.llama_cpp.runtime import runtime

from llama_cpp_truth import DATA, MIB, cards, checkpoint, settings  # isort: skip

SPLIT = [c for c in DATA["cases"] if "Meta()" not in c["buffers"]]
RAN = [c for c in DATA["cases"] if "used_mib" in c]
by_id = {"ids": lambda c: c["id"]}


def lay(case, **more):
    return layout.lay_out(checkpoint(case["model"]), settings(case["settings"], **more))


def engine(case, device, part):
    index = ("model", "context", "compute").index(part)
    return case["buffers"].get(device, (0, 0, 0))[index]


def host(case, part):
    index = ("model", "context", "compute").index(part)
    return sum(v[index] for k, v in case["buffers"].items() if k.endswith("|host"))


@pytest.mark.parametrize("case", SPLIT, **by_id)
def test_weights_and_caches_are_exact(case):
    found = lay(case)
    assert found.resolved.n_ctx == case["n_ctx"]
    assert not found.unknowns
    for device in found.devices:
        assert device.weights + device.experts == engine(case, device.device, "model"), device.device
        assert device.kv + device.state == engine(case, device.device, "context"), device.device
    assert found.host.kv + found.host.state == host(case, "context")


@pytest.mark.parametrize("case", SPLIT, **by_id)
def test_compute_buffers_are_close_and_never_short(case):
    for device in lay(case).devices:
        want = engine(case, device.device, "compute")
        have = device.compute_likely
        assert abs(have - want) <= max(0.1 * want, 16 * MIB), device.device
        assert want - have <= max(0.05 * want, 8 * MIB), device.device
        assert device.compute_certain <= want <= device.compute_at_most, device.device


@pytest.mark.parametrize("case", SPLIT, **by_id)
def test_the_hosts_compute_buffer_is_inside_its_band(case):
    found = lay(case).host
    assert found.compute_certain <= host(case, "compute") <= found.compute_at_most


@pytest.mark.parametrize("case", RAN, **by_id)
def test_device_memory_after_the_first_prompt(case):
    """One card at a time; what the driver reports against context + model + caches + compute + first prompt."""
    chosen = settings(case["settings"])
    found = layout.lay_out(checkpoint(case["model"]), chosen)
    beside = runtime(checkpoint(case["model"]), chosen, found, chosen.devices)
    for i, (device, more) in enumerate(zip(found.devices, beside, strict=True)):
        idle, want = case["used_mib"]["idle"][i], case["used_mib"]["prompt"][i]
        own = device.weights + device.experts + device.kv + device.state + device.compute_likely
        have = idle + (own + more.context[1] + more.first_prompt[1]) / MIB
        assert abs(have - want) <= min(0.03 * want, 150)
        assert want - have <= 32


@pytest.mark.parametrize("case", DATA["boundary"], ids=lambda c: f"{c['model']} {' '.join(c['flags'])} {c['free_mib']}")
def test_the_largest_context_that_served_fits_and_the_smallest_that_died_does_not(case):
    model = checkpoint(case["model"])

    def need(context: int) -> float:
        chosen = settings(case["settings"], n_ctx=context)
        found = layout.lay_out(model, chosen)
        (device,) = found.devices
        (more,) = runtime(model, chosen, found, cards("CUDA0"))
        own = device.weights + device.experts + device.kv + device.state + device.compute_likely
        return (own + more.context[1] + more.first_prompt[1]) / MIB

    assert need(int(case["largest_ok_context"] * 0.97)) <= case["free_mib"] < need(int(case["smallest_failing_context"] * 1.03))


def test_a_launch_is_laid_out_in_milliseconds():
    for case in SPLIT[:20]:
        lay(case)  # headers are read once
    start = time.perf_counter()
    for case in SPLIT[:20]:
        lay(case)
    assert (time.perf_counter() - start) / 20 < 0.02  # 3 ms on the machine of the figures, with room for a slow one
