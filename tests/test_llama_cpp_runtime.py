"""What a process takes beside the engine's buffers."""

from __future__ import annotations

import dataclasses

from residency.engines.llama_cpp import layout
from residency.engines.llama_cpp.runtime import driver_context, processors_of, runtime
from residency.engines.llama_cpp.settings import DeviceSpec, Settings

from llama_cpp_truth import MIB, cards, checkpoint  # isort: skip

TWO = cards("CUDA0", "CUDA1")


def beside(name, **more):
    chosen = Settings(devices=TWO[:1], n_ctx=4096, **more)
    found = layout.lay_out(checkpoint(name), chosen)
    return runtime(checkpoint(name), chosen, found, chosen.devices)[0]


def test_the_driver_context_of_the_measured_card():
    (least, likely, most), evidence = driver_context(TWO[0])
    assert likely == 523 * MIB
    assert least <= likely <= most
    assert evidence


def test_a_measured_context_beats_the_table():
    measured = dataclasses.replace(TWO[0], context_bytes=300 * MIB)
    assert driver_context(measured)[0] == (300 * MIB,) * 3


def test_an_unknown_card_gets_a_wide_band():
    (least, likely, most), _ = driver_context(DeviceSpec(name="CUDA0", kind="cuda", compute_capability="42.0"))
    assert least < likely < most
    assert most >= 2 * least


def test_processors_by_product_name():
    assert processors_of(TWO[0]) == 132
    assert processors_of(DeviceSpec(name="CUDA0", kind="cuda", model="Something Else")) is None


def test_a_card_that_computes_nothing_pays_its_context_all_the_same():
    chosen = Settings(devices=TWO, n_ctx=4096, tensor_split=(0.0, 1.0))
    found = layout.lay_out(checkpoint("llama31-8b"), chosen)
    first, second = runtime(checkpoint("llama31-8b"), chosen, found, TWO)
    assert first.context == second.context
    assert first.first_prompt == (0, 0, 0)
    assert second.first_prompt[1] > 0


def test_scores_without_flash_attention_cost_pools_and_can_grow_later():
    flash, plain = beside("llama31-8b", flash_attn="on"), beside("llama31-8b", flash_attn="off")
    assert flash.later == 0
    assert plain.later > 0
    assert plain.first_prompt[1] - flash.first_prompt[1] >= 98 * MIB  # the library's workspace and kernels


def test_a_router_of_floats_goes_through_the_library():
    assert beside("qwen3-30b-a3b").first_prompt[1] - beside("llama31-8b").first_prompt[1] >= 90 * MIB


def test_bands_are_ordered():
    for name in ("llama31-8b", "qwen3-30b-a3b", "deepseek-v3", "arch-mamba2-dense"):
        found = beside(name)
        assert found.context[0] <= found.context[1] <= found.context[2]
        assert found.first_prompt[0] <= found.first_prompt[1] <= found.first_prompt[2]
