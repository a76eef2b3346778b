"""Which layer, tensor and cache goes where: laws with hand-calculated values."""

from __future__ import annotations

import pytest

from residency.engines.llama_cpp import layout, tensor_split
from residency.engines.llama_cpp.hparams import hyper_parameters
from residency.engines.llama_cpp.settings import DeviceSpec, Override, Settings, expert_overrides

from llama_cpp_truth import DATA, MIB, cards, checkpoint, dense, dense_hparams, made, settings  # isort: skip

TWO = cards("CUDA0", "CUDA1")
Q8_ROW = 34 / 32


def model(layers=4, **more):
    return made("llama", dense(layers, **more), **dense_hparams(layers))


def where(layers, **more):
    chosen = Settings(devices=TWO, **more)
    return layout.layer_devices(hyper_parameters(model(layers)), chosen, TWO)


def test_three_to_one_puts_25_and_8_of_33_units():
    found = where(32, tensor_split=(3.0, 1.0))
    assert [found.count(0), found.count(1)] == [25, 8]
    assert found == tuple([0] * 25 + [1] * 8)


def test_even_shares_give_the_odd_unit_to_the_first():
    assert where(32, tensor_split=(1.0, 1.0)).count(0) == 17


def test_shares_follow_free_memory_without_a_ratio():
    big, small = cards("CUDA0", free_bytes=30 * 2**30)[0], cards("CUDA1", free_bytes=10 * 2**30)[0]
    found = layout.layer_devices(hyper_parameters(model(7)), Settings(devices=(big, small)), (big, small))
    assert found == (0, 0, 0, 0, 0, 0, 1, 1)


def test_layers_count_from_the_last_and_the_output_comes_first():
    assert where(4, n_gpu_layers=1, tensor_split=(1.0, 0.0)) == (-1, -1, -1, -1, 0)
    assert where(4, n_gpu_layers=3, tensor_split=(1.0, 0.0)) == (-1, -1, 0, 0, 0)
    assert where(4, n_gpu_layers=0) == (-1,) * 5


def test_a_ratio_of_zero_to_one_leaves_the_first_card_empty():
    found = layout.lay_out(model(), Settings(devices=TWO, tensor_split=(0.0, 1.0)))
    assert found.devices[0].weights == found.devices[0].kv == found.devices[0].compute_likely == 0
    assert found.devices[1].layers == 4


def test_one_card_by_number_and_a_number_that_is_not_there():
    found = layout.lay_out(model(), Settings(devices=TWO, split_mode="none", main_gpu=1))
    assert [d.device for d in found.devices] == ["CUDA1"]
    found = layout.lay_out(model(), Settings(devices=TWO, split_mode="none", main_gpu=2))
    assert [r.code for r in found.remarks] == ["main-gpu-out-of-range"]


def test_the_embedding_table_stays_on_the_host_and_a_tied_output_is_a_second_copy():
    table = int(256 * 1000 * Q8_ROW)
    apart = layout.lay_out(model(), Settings(devices=TWO[:1]))
    tied = layout.lay_out(model(tied=True), Settings(devices=TWO[:1]))
    assert apart.host.weights == tied.host.weights == table
    assert apart.devices[0].weights == tied.devices[0].weights  # the copy takes what output.weight took


def test_a_tied_table_on_the_host_is_one_copy():
    found = layout.lay_out(model(tied=True), Settings(devices=TWO[:1], n_gpu_layers=0))
    norms = 9 * 1024
    blocks = 4 * int(Q8_ROW * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512))
    assert found.host.weights == int(256 * 1000 * Q8_ROW) + norms + blocks


def test_rows_that_are_no_multiple_of_512_take_a_partial_row_more():
    """256 wide rows of q8_0: one missing half row of 256 values per tensor, 272 bytes, then up to 128."""
    found = layout.lay_out(model(), Settings(devices=TWO[:1])).devices[0]

    def on_card(rows, width=256):
        extra = 272 if width % 512 else 0
        return -(-(int(width * rows * Q8_ROW) + extra) // 128) * 128

    block = 2 * 1024 + 2 * on_card(256) + 2 * on_card(128) + 2 * on_card(512) + on_card(256, 512)
    assert found.weights == 4 * block + 1024 + on_card(1000)


def test_the_first_override_that_matches_wins():
    overrides = (Override(pattern=r"blk\.0\.ffn_.*", target="CPU"), Override(pattern=r"ffn_up", target="CUDA1"))
    found = layout.lay_out(model(), Settings(devices=TWO, tensor_split=(1.0, 0.0), overrides=overrides))
    up = int(256 * 512 * Q8_ROW)
    norm = 1024
    assert found.host.weights == int(256 * 1000 * Q8_ROW) + 3 * up + norm
    assert found.devices[1].weights == 3 * (-(-(up + 272) // 128) * 128)
    assert not found.remarks


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        ((Override(pattern="nothing_like_it", target="CPU"),), ["override-matches-nothing"]),
        ((Override(pattern="ffn", target="CPU"), Override(pattern="ffn_up", target="CPU")), ["override-shadowed"]),
        ((Override(pattern="(", target="CPU"),), ["override-pattern"]),
        ((Override(pattern="ffn", target="CUDA7"),), ["override-target"]),
        (expert_overrides(cpu_moe=True), []),  # the engine's own patterns may match nothing
    ],
)  # fmt: skip
def test_overrides_are_remarked_on(overrides, codes):
    found = layout.lay_out(model(), Settings(devices=TWO, overrides=overrides))
    assert [r.code for r in found.remarks] == codes


def test_experts_of_the_first_layers_go_to_the_host():
    moe = checkpoint("qwen3-30b-a3b")
    all_on = layout.lay_out(moe, Settings(devices=TWO[:1], n_ctx=4096))
    some = layout.lay_out(moe, Settings(devices=TWO[:1], n_ctx=4096, overrides=expert_overrides(n_cpu_moe=12)))
    every = layout.lay_out(moe, Settings(devices=TWO[:1], n_ctx=4096, overrides=expert_overrides(cpu_moe=True)))
    assert all_on.host.experts == 0
    assert every.devices[0].experts == 0
    # 768 wide rows are no multiple of 512: on the card each down tensor takes 256 values more.
    assert 0 < all_on.devices[0].experts - every.host.experts <= 48 * 256
    # Down projections of this file mix two encodings, so a quarter of the layers is only about a quarter of the bytes.
    assert some.host.experts == pytest.approx(every.host.experts / 4, rel=0.15)
    assert 0 < some.host.experts + some.devices[0].experts - every.host.experts <= 36 * 256


@pytest.mark.parametrize(
    ("mode", "more", "backing"),
    [("mmap", {}, "mapped"), ("mmap+mlock", {}, "locked"), ("none", {}, "pinned"), ("none", {"no_host": True}, "anonymous"), ("mlock", {"no_host": True}, "locked")],
)  # fmt: skip
def test_host_weights_are_backed_by_the_load_mode(mode, more, backing):
    found = layout.lay_out(model(), Settings(devices=TWO[:1], load_mode=mode, n_gpu_layers=2, **more)).host_weights
    assert found.backing == backing
    assert found.bytes > 0
    assert (found.mapped_bytes > 0) == mode.startswith("mmap")


def test_without_devices_everything_is_on_the_host():
    found = layout.lay_out(model(), Settings(devices=()))
    assert found.devices == ()
    assert found.host.layers == 4
    assert found.host.kv == 4 * 2 * 2 * 128 * 8192
    assert found.host.compute_likely > 0


def test_a_cache_kept_on_the_host_leaves_the_card_empty_of_it():
    found = layout.lay_out(model(), Settings(devices=TWO[:1], kv_offload=False))
    assert found.devices[0].kv == 0
    assert found.host.kv == 4 * 2 * 2 * 128 * 8192


@pytest.mark.parametrize("kind", ["vulkan", "metal", "rpc", "sycl", "rocm", "something-new"])
def test_other_back_ends_are_laid_out_with_a_wider_band(kind):
    device = DeviceSpec(name="X0", kind=kind, free_bytes=8 * 2**30)
    found = layout.lay_out(model(), Settings(devices=(device,))).devices[0]
    assert found.kv == 4 * 2 * 2 * 128 * 8192
    assert found.compute_certain < found.compute_likely < found.compute_at_most
    if kind != "rocm":
        assert found.compute_at_most >= found.compute_likely * 1.5


def test_two_cards_hold_four_copies_of_the_inputs_and_an_override_ends_that():
    plain = layout.lay_out(model(), Settings(devices=TWO, tensor_split=(1.0, 1.0), n_ctx=8192))
    override = (Override(pattern=r"blk\.0\.ffn_up", target="CUDA1"),)
    other = layout.lay_out(model(), Settings(devices=TWO, tensor_split=(1.0, 1.0), n_ctx=8192, overrides=override))
    mask = 8192 * 512 * 2
    assert plain.devices[0].compute_likely - other.devices[0].compute_likely >= 3 * mask - MIB


def test_split_mode_tensor_cuts_heads_and_columns_and_keeps_the_rest_whole():
    """What the engine reports for its one virtual device, then half of it each; norms twice."""
    (case,) = [c for c in DATA["cases"] if "Meta()" in c["buffers"]]
    model, context, compute = case["buffers"]["Meta()"]
    first, second = layout.lay_out(checkpoint(case["model"]), settings(case["settings"])).devices
    assert first.kv == second.kv == context // 2
    norms = 65 * 4096 * 4  # 32 blocks with two each, and the last one
    assert first.weights + second.weights == model + norms
    assert first.compute_likely == second.compute_likely == compute


@pytest.mark.parametrize(
    ("size", "grain", "shares", "turn", "expected"),
    [
        (1024, 128, (0.0, 0.0), 0, [512, 512]),
        (1024, 128, (3.0, 1.0), 0, [768, 256]),
        (1000, 128, (1.0, 1.0), 0, [384, 616]),  # 500, rounded down to a multiple of 128
        (1000, 128, (1.0, 1.0), 1, [616, 384]),  # the next layer rounds the other way
        (100, 128, (1.0, 1.0), 0, [0, 100]),
    ],
)  # fmt: skip
def test_cuts_are_rounded_down_to_the_grain(size, grain, shares, turn, expected):
    assert tensor_split.cut(size, grain, shares, turn) == expected


def test_split_mode_tensor_of_an_architecture_without_it():
    mamba = checkpoint("arch-mamba2-dense")
    found = layout.lay_out(mamba, Settings(devices=TWO, split_mode="tensor"))
    assert "tensor-split-architecture" in [r.code for r in found.remarks]
