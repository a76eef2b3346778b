"""What a process takes beside the engine's buffers."""

from __future__ import annotations

import dataclasses

import pytest

from residency.engines.llama_cpp import layout
from residency.engines.llama_cpp.context import pad
from residency.engines.llama_cpp.resolve import resolve
from residency.engines.llama_cpp.runtime import driver_context, processors_of, runtime
from residency.engines.llama_cpp.settings import DeviceSpec, Settings
from residency.launch.knobs import Knobs
from residency.launch.model import Launch
from residency.machine.profile import machine_from_mapping

from llama_cpp_truth import MIB, cards, checkpoint, dense, dense_hparams, made  # isort: skip

TWO = cards("CUDA0", "CUDA1")


def beside(name, **more):
    chosen = Settings(devices=TWO[:1], n_ctx=4096, **more)
    found = layout.lay_out(checkpoint(name), chosen)
    return runtime(checkpoint(name), chosen, found, chosen.devices)[0]


def test_the_driver_context_of_the_measured_card():
    (least, likely, most), evidence = driver_context(TWO[0])
    assert likely == 527 * MIB
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
    assert flash.full_context == 0
    # 32 heads x 512 tokens x 2 bytes for each of 4096 cells, less those of the first prompt's 2048
    assert plain.full_context == 32 * 512 * 2 * (4096 - 2048)
    assert plain.first_prompt[1] - flash.first_prompt[1] >= 98 * MIB  # the library's workspace and kernels


def test_a_router_of_floats_goes_through_the_library():
    assert beside("qwen3-30b-a3b").first_prompt[1] - beside("llama31-8b").first_prompt[1] >= 90 * MIB


def test_bands_are_ordered():
    for name in ("llama31-8b", "qwen3-30b-a3b", "deepseek-v3", "arch-mamba2-dense"):
        found = beside(name)
        assert found.context[0] <= found.context[1] <= found.context[2]
        assert found.first_prompt[0] <= found.first_prompt[1] <= found.first_prompt[2]


def test_experts_of_floats_are_sorted_in_single_precision():
    rows = [*dense(), *((f"blk.{i}.ffn_gate_exps.weight", "F16", (256, 8192, 4)) for i in range(4))]
    model = made("qwen3moe", rows, **dense_hparams(), expert_count=4, expert_used_count=2)
    plain = made("qwen3moe", dense(), **dense_hparams())
    chosen = Settings(devices=TWO[:1], n_ctx=4096)
    with_experts, without = (runtime(m, chosen, layout.lay_out(m, chosen), chosen.devices)[0].first_prompt[1] for m in (model, plain))
    sorted_rows = 4 * 2 * (256 + 8192) * 512  # float32, two experts per token, activations and result
    smallest = 132 * 128 * 128 * 4 + 512 * 512 * 36 // 32  # partial sums over the whole card, 512 quantised rows
    assert with_experts - without == 98 * MIB + pad(sorted_rows, 2 * MIB) - pad(smallest, 2 * MIB)


@pytest.mark.parametrize(("environ", "system", "mib"), [({}, None, 796), ({"GGML_CUDA_ALLREDUCE": "internal"}, None, 32), ({}, "Windows", 32), ({"GGML_CUDA_ALLREDUCE": "none"}, None, 0)])
def test_split_mode_tensor_pays_for_what_sums_the_parts(environ, system, mib):
    launch = Launch(engine="llama.cpp", version="0.5.0", knobs=Knobs.model_validate({"layers": {"split": "tensor"}}), environ=environ)
    machine = machine_from_mapping({
        "name": "two", "pools": [{"name": n, "total": "80GiB"} for n in ("CUDA0", "CUDA1", "host")], "host": {"system": system} if system else {},
        "devices": [{"name": n, "kind": "cuda", "pool": n, "compute_capability": "9.0"} for n in ("CUDA0", "CUDA1")],
    })  # fmt: skip
    chosen, _ = resolve(launch, machine, "0.5.0")
    model = checkpoint("llama31-8b")
    found = runtime(model, chosen, layout.lay_out(model, chosen), chosen.devices)
    assert [sum(likely for _, likely, _ in card.sums) for card in found] == [mib * MIB] * 2
