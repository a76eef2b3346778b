"""The Strata engine: command lines, conflicts, sizes against hand calculation and against start-up logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residency import validate
from residency.engines.strata import ENGINE
from residency.engines.strata.flags import FLAGS
from residency.engines.strata.geometry import geometry
from residency.engines.strata.plan import after_at_most
from residency.engines.strata.split import plan_split, ranges
from residency.errors import InputError

MIB = 2**20
CENSUS = str(Path(__file__).parent.parent / "configs" / "models" / "swift-1.5-iq3_xxs.census.json")


def read(*words, version="0.1.40", environ=None):
    return ENGINE.read(["strata", *words], environ or {}, version=version)


def complaint(*words, version="0.1.40"):
    with pytest.raises(InputError) as caught:
        read(*words, version=version)
    return str(caught.value)


SERVED = ("--serve", "--native", "m.gguf", "--mtp", "rt", "--spec", "4", "--prefill", "auto", "--expert-profile", "p.bin")


def test_the_engines_own_words():
    launch = read(*SERVED, "--max-context", "131072", "--kv", "k8v4", "--kv-resident", "32768", "--vram-reserve-mib", "1800", "--layer-split", "24,36",
                  "--mmap-experts", "--prefill", "auto:16384", "--batch", "2")  # fmt: skip
    assert launch.get("model.path") == "m.gguf"
    assert launch.get("context.length") == 131072
    assert (launch.get("kv.key_type"), launch.get("kv.value_type")) == ("int8", "q4_0")
    assert launch.get("memory.reserve") == 1800 * MIB
    assert (launch.get("layers.split"), launch.get("layers.first")) == ("layer", [24, 36])
    assert launch.get("memory.load") == "mmap"
    assert (launch.get("context.prefill"), launch.options["prefill-auto-max"]) == ("auto", 16384)
    assert launch.where("memory.reserve").argv_index == 18


def test_setups_words_and_defaults():
    launch = read("--context", "262144", "--reserve", "1800", "--gpus", "2,3", "--vision", "cpu", "--low-ram", "mmap")
    assert launch.get("context.length") == 262144
    assert launch.get("memory.reserve") == 1800 * MIB
    assert launch.options["gpus"] == [2, 3]
    assert (launch.get("vision.enabled"), launch.get("vision.device")) == (True, "cpu")
    assert (launch.get("context.prefill"), launch.get("speculation.window"), launch.get("experts.cache")) == ("auto", 4, "auto")
    assert launch.get("layers.split") == "auto"
    assert launch.get("memory.load") == "mmap"


@pytest.mark.parametrize(
    ("words", "version", "said"),
    [
        (("--max-contxt", "5"), "0.1.40", "strata has no flag --max-contxt; it ends with its usage text and exit code 2"),
        (("--peer-device", "1"), "0.1.37", "--peer-device exists since version 0.1.38; 0.1.37 ends with its usage text and exit code 2"),
        (("--spec", "9"), "0.1.40", "--spec cannot be 9: the largest is 8"),
        (("--kv", "int4"), "0.1.40", "--kv expects one of fp16, int8, q4_0, q4, k8v4, not 'int4'; did you mean int8?"),
        (("--kv",), "0.1.40", "--kv needs a value"),
        (("--layer-split", "a,b"), "0.1.40", "--layer-split expects \"auto\" or whole numbers separated by commas, not 'a,b'"),
        (("--pcie-frac", "much"), "0.1.40", "--pcie-frac expects a number, not 'much'"),
        (("--vram-reserve-mib", "-1"), "0.1.40", "--vram-reserve-mib cannot be -1: the smallest is 0"),
        (("@gpus=x",), "0.1.40", "@gpus cannot be 'x'"),
        (("word",), "0.1.40", "'word' is not a flag"),
    ],
)
def test_what_the_parser_refuses(words, version, said):
    assert said in complaint(*words, version=version)


def test_every_problem_of_a_command_line_is_reported():
    said = complaint("--nope", "--spec", "9", "--kv", "int4")
    assert said.count("\n") >= 2
    assert all(part in said for part in ("--nope", "--spec", "--kv"))


def test_options_of_a_launch_file():
    assert ENGINE.option_problem("pcie-frac", 0.35, version="0.1.35") is None
    assert ENGINE.option_problem("pcie-frac", "x", version="0.1.35") == "expects int or float, not str"
    assert ENGINE.option_problem("vram-reserve-mib", 700, version="0.1.35") == "is set with memory.reserve"
    assert ENGINE.option_problem("kv", "int8", version="0.1.35") == "is set with kv.key_type and kv.value_type"
    assert ENGINE.option_problem("peer-device", 1, version="0.1.35") == "exists since version 0.1.38"
    assert ENGINE.option_problem("pool-worker", 1, version="0.1.35") == "no such option of this engine; did you mean pool-workers?"
    assert ENGINE.option_problem("pipeline-windows", 3, version="0.1.35") == "cannot be 3: the largest is 2"


def test_no_flag_stands_twice():
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))


# Sizes


@pytest.fixture(scope="module")
def model():
    from residency.checkpoint import read as read_checkpoint

    return geometry(read_checkpoint(CENSUS))


def test_bytes_per_cell_are_those_of_setup(model):
    assert [model.cell_bytes(kv) for kv in ("fp16", "int8", "k8v4", "q4_0")] == [2048, 1056, 816, 576]


def test_session_bytes_by_hand(model):
    parts = model.session_bytes(0, 48, kv="int8", cells=32768, context=262144)
    assert parts["kv"] == 12 * 1056 * 32768 == 396 * MIB
    assert parts["indexer"] == 12 * 128 * 262144 == 384 * MIB
    assert parts["state"] == 36 * (128 * 48 * 128 + 10240 * 3) * 4
    assert model.session_bytes(0, 3, kv="int8", cells=4, context=4)["kv"] == 1056 * 4, "a stage carves at least one"


def test_the_context_alone_moves_57_mib_per_card(model):
    def half(context):
        return sum(model.session_bytes(0, 24, kv="int8", cells=32768, context=context).values())

    assert round((half(262144) - half(204800)) / MIB) == 57


def test_what_follows_the_cache_lies_between_measured_points():
    assert after_at_most(32768, 1) == 402 * MIB
    assert after_at_most(131072, 2) == 637 * MIB
    assert after_at_most(1048576, 1) == 637 * MIB
    assert after_at_most(524288, 4) == 1500 * MIB
    assert after_at_most(262144, 2) == 637 * MIB + 863 * MIB * 131072 // 393216


def test_split_planning():
    assert ranges((24, 36), 48) == ((0, 24), (24, 36), (36, 48))
    assert plan_split([100, 100], [10] * 20, lambda low, high: 0) == (10,)
    assert plan_split([150, 50], [10] * 20, lambda low, high: 0) == (15,)
    assert plan_split([40, 40, 40, 40], [10] * 16, lambda low, high: 0) == (4, 8, 12)
    assert plan_split([-5, 100], [10] * 8, lambda low, high: 1) == (2,)


@pytest.mark.parametrize(("total", "context", "mib"), [("32GiB", 32768, 1024), ("32GiB", 65536, 2048), ("8GiB", 32768, 300)])
def test_the_reserve_setup_writes_for_intel_cards(total, context, mib):
    from residency.engines.strata.resolve import resolve
    from residency.launch.reader import read_launch_mapping
    from residency.machine import resolve_machine

    machine = resolve_machine({"name": "m", "pools": [{"name": "SYCL0", "total": total}], "devices": [{"name": "SYCL0", "kind": "sycl", "pool": "SYCL0"}]})
    launch = read_launch_mapping({"engine": {"name": "strata"}, "model": {"path": "m"}, "context": {"length": context}}, environ={})
    assert resolve(launch, machine).reserves == (mib * MIB,)


# Conflicts


TWO = {
    "name": "two cards",
    "pools": [{"name": n, "total": "24GiB", "free": "23GiB"} for n in ("CUDA0", "CUDA1")] + [{"name": "host", "total": "128GiB", "free": "120GiB"}],
    "devices": [{"name": n, "kind": "cuda", "pool": n, "integrated": False, "compute_capability": "8.6"} for n in ("CUDA0", "CUDA1")],
}


def refusals(*words, version="0.1.40", machine=TWO, options=None):
    argv = ["strata", *words] if words else None
    source = argv or {"engine": {"name": "strata", "version": version}}
    report = validate(source, engine=f"strata@{version}", machine=machine, environ={})
    return {f.message: str(f.outcome) for f in report.findings if f.outcome in ("veto", "warn", "cannot-tell")}


M = ("--native", CENSUS)
BASE = ("--serve", *M, "--mtp", "rt", "--spec", "4", "--prefill", "auto", "--expert-profile", "p", "--expert-cache", "auto", "--max-context", "65536", "--kv", "int8")


@pytest.mark.parametrize(
    ("words", "version", "said"),
    [
        (("--serve", *M, "--mtp", "rt", "--prefill", "auto"), "0.1.40", "--serve needs a speculation window of at least 2 (--spec); the engine refuses it with exit code 2."),
        (("--serve", *M, "--mtp", "rt", "--spec", "4"), "0.1.40", "--serve needs a prompt chunk above 0 (--prefill auto); the engine refuses it with exit code 2."),
        (("--serve", *M, "--spec", "4", "--prefill", "auto"), "0.1.40", "--serve needs the draft layer's folder (--mtp); the engine refuses it with exit code 2."),
        ((*M, "--layer-split", "auto"), "0.1.40", "A layer split needs --serve; the engine refuses it with exit code 2."),
        ((*BASE, "--mmap-experts", "--shared-expert-arena", "/dev/shm/a"), "0.1.40", "Mapped experts and a shared expert arena exclude each other."),
        ((*BASE, "--resident-cpu-experts"), "0.1.40", "A resident copy of experts for the CPU needs the experts mapped from their file."),
        ((*BASE, "--resident-experts", "--mmap-experts", "--layer-split", "24"), "0.1.39", "A resident copy of experts and a layer split exclude each other before 0.1.40."),
        ((*BASE, "--peer-device", "1", "--layer-split", "24"), "0.1.38", "A peer device and a layer split exclude each other."),
        ((*BASE, "--expert-cache-device2", "5"), "0.1.40", "Helper cache 2 needs helper cache 1."),
        ((*BASE, "--kv", "k8v4", "--kv-resident", "32768"), "0.1.39", "int8 keys with q4_0 values cannot be streamed before 0.1.40."),
        ((*BASE, "--max-context", "524288"), "0.1.40", "524288 tokens are more than the 262144 the model was trained for, and no RoPE extension is set."),
        ((*BASE, "--max-context", "524288", "--rope-scaling", "linear", "--rope-scale", "1.5"), "0.1.40",
         "524288 tokens are more than the 262144 the model was trained for, and the RoPE extension reaches 393216."),
        ((*BASE, "--layer-split", "1"), "0.1.40", "The second card cannot start before layer 2: the n-gram table is read on the first card, in layer 1."),
        ((*BASE, "--layer-split", "24", "--split-skip-if-fits"), "0.1.40", "Skipping the split needs automatic split points."),
        ((*BASE, "--stream-experts"), "0.1.40", "The cuda back end has no --stream-experts."),
        ((*BASE, "--vram-elastic", "--batch", "2"), "0.1.40", "vram-elastic works with one card and one slot only."),
    ],
)  # fmt: skip
def test_conflicts_of_the_parser(words, version, said):
    assert refusals(*words, version=version).get(said) == "veto"


def test_what_is_lifted_later_is_allowed():
    assert not refusals(*BASE, "--kv", "k8v4", "--kv-resident", "32768", version="0.1.40")
    assert not refusals(*BASE, "--resident-experts", "--mmap-experts", "--layer-split", "24", version="0.1.40")
    assert "--serve" not in str(refusals("--context", "65536", "--kv", "int8", *M))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--kv-resident", "65536"), "65536 resident tokens are the whole context of 65536, so nothing is streamed."),
        (("--pipeline-windows", "2"), "Pipelined windows are off without a split or with several slots."),
    ],
)
def test_settings_without_effect(words, said):
    assert refusals(*BASE, *words).get(said) == "warn"


def test_knobs_this_engine_has_nothing_for():
    launch = {"engine": {"name": "strata", "version": "0.1.40"}, "model": {"path": CENSUS}, "context": {"length": 65536, "micro_batch": 512},
              "experts": {"on_host": 0, "stream": False}, "layers": {"on_device": "all", "ratio": [1.0, 2.0]}, "memory": {"prefault": False}}  # fmt: skip
    said = {f.knob: f.message for f in validate(launch, machine=TWO, environ={}).findings if f.rule == "settings/inert" and f.outcome == "warn"}
    assert said == {
        "context.micro_batch": "This engine has nothing that context.micro_batch would set, so it changes nothing.",
        "layers.ratio": "This engine has nothing that layers.ratio would set, so it changes nothing.",
    }


def test_a_cpu_is_not_enough():
    machine = {"name": "host only", "pools": [{"name": "host", "total": "64GiB", "free": "60GiB"}]}
    said = refusals(*BASE, machine=machine)
    assert said == {"It computes on a GPU: CUDA, ROCm, SYCL or Metal; the CPU only takes experts that missed.": "veto"}


def test_an_unknown_architecture_ends_in_no_verdict(gemma_path):
    report = validate(["strata", *BASE[:1], "--native", gemma_path, *BASE[3:]], machine=TWO, environ={})
    assert report.exit_code == 3


# The server's configuration


CONFIG = {
    "engine": "strata", "model_name": "swift", "exe": "engine/strata", "gpu": [0, 1], "layer_split": "auto",
    "args": ["--native", CENSUS, "--expert-profile", "p", "--expert-cache", "auto", "--prefill", "auto", "--spec", "4",
             "--mtp", "rt", "--max-context", "262144", "--kv", "int8", "--kv-resident", "32768", "--vision", "--vram-reserve-mib", "700"],
    "vision": {"exe": "v", "mmproj": "m", "gpu": True, "max_tokens": 1024},
}  # fmt: skip


def config_report(tmp_path, **changes):
    from residency.api import Inputs, prepare_all
    from residency.judge import judge

    path = tmp_path / "strata-swift.json"
    path.write_text(json.dumps({**CONFIG, **changes}, indent=1))
    prepared = prepare_all(str(path), Inputs(engine="strata@0.1.35", machine="2x-rtx-2080-ti-22gb", environ={}))
    return judge(prepared.cases[0])


def test_a_servers_configuration_is_judged_like_the_launch_it_makes(tmp_path):
    report = config_report(tmp_path)
    veto = next(f for f in report.findings if f.outcome == "veto")
    assert veto.rule == "layer-split/after-cache"
    assert veto.where.file.endswith("strata-swift.json")
    assert (tmp_path / "strata-swift.json").read_text().splitlines()[veto.where.line - 1].strip() == '"--vram-reserve-mib",'
    assert config_report(tmp_path, vision={"gpu": False}).allowed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"args": "x"}, '"args" must be a list of strings'),
        ({"gpu": "all"}, '"gpu" must be a card\'s number or a list of them'),
        ({"layer_split": {}}, '"layer_split" must be "auto" or the first layer of each later card'),
        ({"vision": True}, '"vision" must be a table'),
        ({"parallel": "2"}, '"parallel" must be a whole number'),
        ({"env": []}, '"env" must be a table of strings'),
        ({"args": ["--nope"]}, "strata has no flag --nope"),
    ],
)
def test_a_wrong_configuration_is_reported_with_its_place(tmp_path, changes, said):
    with pytest.raises(InputError) as caught:
        config_report(tmp_path, **changes)
    assert said in str(caught.value)
    assert "strata-swift.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 5000, '{"args": [1]}', "nan", '{"a": 1' + " " * 9])
def test_what_is_no_configuration_is_refused(tmp_path, text):
    from residency.api import Inputs, prepare_all

    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError):
        prepare_all(str(path), Inputs(machine="2x-rtx-2080-ti-22gb", environ={}))


# Anything may be typed


WORDS = [name for flag in FLAGS for name in flag.names] + ["--context", "--gpus", "--vision", "@gpus=1", "--low-ram", "nonsense", "--adapt-every"]
VALUES = ["0", "-1", "1", "2", "8", "65536", "262144", "999999999999999999", "auto", "auto:4096", "24", "24,12", "1.5", "int8", "k8v4", "mmap", "", "yarn", "\x1b[2J"]


@given(st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(VALUES)), max_size=6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_command_line_ends_in_a_report_or_a_problem(pairs, served):
    argv = ["strata", *(BASE if served else M), *(word for pair in pairs for word in pair)]
    report, said = None, ""
    try:
        report = validate(argv, engine="strata@0.1.41", machine=TWO, environ={})
    except InputError as error:
        said = str(error)
    assert "\x1b" not in said
    assert report is not None or said
    findings = report.findings if report is not None else ()
    assert [f.message for f in findings if "its model failed" in f.message] == []
    assert all(0 <= a.certain_bytes <= a.likely_bytes for a in (report.budget.allocations if report is not None else ()))


def test_a_count_of_blocks_without_tensors_is_not_believed():
    from residency.checkpoint.model import Checkpoint

    lying = Checkpoint(path="m", source="gguf", files=(), metadata={"general.architecture": "qwen4exp", "qwen4exp.block_count": 2**40, "qwen4exp.expert_count": 8})
    assert geometry(lying).layers == 0
