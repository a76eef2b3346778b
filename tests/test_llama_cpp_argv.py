"""llama.cpp command lines: names, versions, environment, and the words problems are told in."""

from __future__ import annotations

import time

import pytest

from residency.engines.llama_cpp import ENGINES
from residency.engines.llama_cpp.version import last_before, normal, shown
from residency.errors import InputError

ENGINE = ENGINES[0]


def read(*argv, version=None, **environ):
    return ENGINE.read(["llama-server", *argv], environ, version=version)


def problems(*argv, version=None, **environ):
    with pytest.raises(InputError) as error:
        read(*argv, version=version, **environ)
    return [str(p) for p in error.value.problems]


@pytest.mark.parametrize(
    ("text", "ordered"),
    [("b4610", "0.0.4610"), ("4610 (6dde1782)", "0.0.4610"), ("0.10434.0", "0.0.10434"), ("0.5.0", "0.5.0"), ("v0.5.1", "0.5.1")],
)
def test_versions_become_one_order(text, ordered):
    assert normal(text) == ordered


def test_versions_as_people_write_them():
    assert (shown("0.0.4610"), shown("0.5.0"), last_before("0.5.0"), last_before("0.0.10092")) == ("b4610", "0.5.0", "b10434", "b10091")


def test_every_way_to_write_a_flag():
    launch = read("--ctx_size=8192", "-ub", "256", "-ub", "1024", "--no-kv-offload", "-ts", "3/1", "-ot", "a=CPU,b=CUDA0", "-ot", "c=CPU", "-dev", "none")
    assert (launch.get("context.length"), launch.get("context.micro_batch"), launch.get("kv.on_device")) == (8192, 1024, False)
    assert launch.get("layers.ratio") == [3.0, 1.0]
    assert [(o.pattern, o.device) for o in launch.get("layers.overrides")] == [("a", "CPU"), ("b", "CUDA0"), ("c", "CPU")]
    assert launch.get("device.ids") == []
    assert (launch.where("context.length").argv_index, launch.where("context.micro_batch").argv_index) == (1, 4)


def test_the_command_line_wins_over_the_environment_and_both_have_positions():
    launch = read("-c", "4096", LLAMA_ARG_CTX_SIZE="8192", LLAMA_ARG_N_GPU_LAYERS="12", LLAMA_ARG_NO_KV_OFFLOAD="x")
    assert (launch.get("context.length"), launch.get("layers.on_device"), launch.get("kv.on_device")) == (4096, 12, False)
    assert launch.where("layers.on_device").variable == "LLAMA_ARG_N_GPU_LAYERS"
    assert problems(LLAMA_ARG_CTX_SIZE="many") == ["$LLAMA_ARG_CTX_SIZE: LLAMA_ARG_CTX_SIZE expects a whole number, not 'many'"]


def test_a_flag_of_an_older_version_tells_the_version_when_nobody_else_does():
    launch = read("--no-mmap", "-c", "4096")
    assert (launch.version, launch.version_reason, launch.get("memory.load")) == ("b10434", "the newest with --no-mmap", "none")
    assert read("--draft-max", "3").version == "b10091"
    assert read("-c", "4096").version is None


def test_flags_of_different_versions_contradict_each_other():
    assert problems("--no-mmap", "--lazy-mode", "on") == ["argument 2 (--lazy-mode): --lazy-mode exists since version 0.5.0; this is b10434"]


def test_a_given_version_is_believed():
    assert problems("--no-mmap", version="0.5.0") == ["argument 1 (--no-mmap): --no-mmap was removed in version 0.5.0; this is 0.5.0; use --load-mode"]
    assert problems("--lazy-mode", "on", version="b10434") == ["argument 1 (--lazy-mode): --lazy-mode exists since version 0.5.0; this is b10434"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ctx-sise", "4096"], "llama-server has no flag --ctx-sise; did you mean --ctx-size?"),
        (["stray"], "'stray' is not a flag, and no flag before it takes it as a value"),
        (["-c"], "-c needs a value"),
        (["-c", "1e9"], "-c expects a whole number, not '1e9'"),
        (["-ot", "no-target"], "-ot expects pattern=device, not 'no-target'"),
        (["-ot", "(=CPU"], "-ot has a pattern that is not a regular expression"),
        (["-ctk", "q8"], "-ctk expects one of f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1, not 'q8'; did you mean q8_0?"),
        (["-sm", "rows"], "-sm expects one of none, layer, row, tensor, not 'rows'; did you mean row?"),
        (["-fa", "maybe"], "argument 1 (-fa): -fa expects on, off or auto, not 'maybe'"),
        (["-fit", "maybe"], "argument 1 (-fit): -fit expects on or off, not 'maybe'"),
        (["-fit", "auto"], "-fit expects on or off, not 'auto'"),
        (["-fit"], "-fit needs a value"),
        (["--swa-full=1"], "--swa-full takes no value"),
    ],
)
def test_problems_name_the_flag_and_what_was_meant(argv, said):
    assert said in problems(*argv)[0]


def test_all_problems_in_one_run():
    assert len(problems("--nope", "x", "-c", "many", "-ctk", "q9", "-b", "0")) == 4


def test_flags_without_bearing_on_memory_are_silent():
    assert read("--temp", "0.7", "--jinja", "--host", "0.0.0.0", "-t", "8", "--chat-template-kwargs", '{"a": 1}', "--metrics").options == {}


def test_the_implicit_config_files_are_read_below_the_environment(tmp_path):
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "config.ini").write_text("ctx-size = 8192 ; for everybody\n[*]\nub = 1024\nnot-an-option = 1\n[model-x]\nc = 1\n")
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    launch = read("-m", "x.gguf", **home)
    assert (launch.get("context.length"), launch.get("context.micro_batch")) == (8192, 1024)
    where = launch.where("context.length")
    assert (where.file, where.line, where.column) == (str(folder / "config.ini"), 1, 1)
    assert read("-m", "x.gguf", **home, LLAMA_ARG_CTX_SIZE="4096").get("context.length") == 4096
    assert read("-c", "2048", **home).get("context.length") == 2048
    assert read("-m", "x.gguf", version="b10434", **home).get("context.length") is None


def test_llama_bench_is_judged_by_its_largest_run():
    argv = ["llama-bench", "-m", "x.gguf", "-p", "512,4096", "-n", "0", "-d", "0,16384", "-ub", "256,1024", "-fa", "0,1", "-ngl", "99", "-nkvo", "0", "-mmp", "0", "-r", "3"]
    launch = ENGINE.read(argv, {}, version=None)
    assert launch.program == "llama-bench"
    assert [launch.get(k) for k in ("context.length", "context.micro_batch", "context.flash_attention", "kv.on_device", "memory.load")] == [20480, 1024, "off", True, "none"]
    with pytest.raises(InputError, match="llama-bench has no flag --ctx-size"):
        ENGINE.read(["llama-bench", "-m", "x.gguf", "--ctx-size", "4096"], {}, version=None)
    with pytest.raises(InputError, match="-p expects numbers, not 'many'"):
        ENGINE.read(["llama-bench", "-m", "x.gguf", "-p", "many"], {}, version=None)


@pytest.mark.parametrize("flag", ["-c", "-ngl", "-np", "-ub", "-ncmoe", "-mg", "--cache-ram"])
@pytest.mark.parametrize("value", ["9999999999", "4294967296", "2147483648", "-2147483649"])
def test_numbers_beyond_32_bits_are_refused(flag, value):
    assert f"cannot be {value}: the engine's parser takes whole numbers of 32 bits only" in problems("-m", "x.gguf", flag, value)[0]


@pytest.mark.parametrize(("flag", "value"), [("-t", "99999999999"), ("--port", "x"), ("-n", "2147483648")])
def test_numbers_without_bearing_on_memory_are_checked_as_the_engine_does(flag, value):
    assert "expects a whole number of 32 bits" in problems("-m", "x.gguf", flag, value)[0]
    assert read("-m", "x.gguf", "-t", "8x", "-n", "-1").get("model.path") == "x.gguf"  # std::stoi stops at the x


def test_a_split_ratio_has_fifteen_shares_at_most():
    """0.5.0 says of sixteen: got 16 input configs, but system only has 16 devices."""
    assert len(read("-m", "x.gguf", "-ts", ",".join("1" * 15)).get("layers.ratio")) == 15
    assert "-ts has 16 shares, and the engine takes 15 at most" in problems("-m", "x.gguf", "-ts", ",".join("1" * 16))[0]


@pytest.mark.parametrize(
    ("arguments", "nothing"),
    [(("--version",), True), (("--help",), True), (("-m", "x.gguf", "--list-devices", "--no-such-flag"), True), (("-m", "x.gguf"), False)],
)
def test_command_lines_that_start_nothing(arguments, nothing):
    assert read(*arguments).starts_nothing is nothing


@pytest.mark.parametrize("version", ["banana", "-1", "1", "", "v", "b12", "0.5.0.1.2.3", "2025-13"])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_versions_that_cannot_be_read(engine, version):
    assert engine.version_problem(version).startswith("builds are written b4610, versions 0.5.0")


@pytest.mark.parametrize("version", ["b4610", "4610", "4610 (6dde1782)", "b10434", "0.10434.0", "0.5.0", "v0.5.1", "0.5", "2025-06", "2025-06-15"])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_versions_that_can_be_read(engine, version):
    assert engine.version_problem(version) is None


def test_a_name_that_is_like_no_other_gets_no_suggestion():
    assert "did you mean" not in problems("-m", "x.gguf", "--foo")[0]
    assert problems("-m", "x.gguf", "-nlg", "4")[0].endswith("did you mean -ngl?")
    assert problems("-m", "x.gguf", "--cxt-size", "4")[0].endswith("did you mean --ctx-size?")


def test_many_problems_are_counted_not_told():
    began = time.process_time()
    found = problems("-m", "x.gguf", *[f"--unknown{i}" for i in range(20_000)])
    assert len(found) == 51
    assert found[-1] == "19950 more problems of the same command line"
    assert time.process_time() - began < 2


def test_flash_attention_without_a_value_is_that_of_older_builds():
    launch = read("-fa", "-c", "512")
    assert (launch.get("context.flash_attention"), launch.get("context.length")) == ("on", 512)
    assert (read("-fa", "-1").get("context.flash_attention"), read("-fa").get("context.flash_attention")) == ("auto", "on")


def started(program, *argv, version=None):
    return ENGINE.read([program, "-m", "x.gguf", *argv], {}, version=version)


@pytest.mark.parametrize(
    ("program", "argv", "version", "sequences"),
    [
        ("llama-server", ("-np", "-7"), None, None),
        ("llama-server", ("-np", "-1"), None, None),
        ("llama-server", ("-np", "0"), "b4610", None),
        ("llama-cli", ("-np", "0"), None, None),
        ("llama-fit-params", ("-np", "3"), None, 3),
    ],
)
def test_slots_that_each_program_takes(program, argv, version, sequences):
    assert started(program, *argv, version=version).get("context.sequences") == sequences


def test_slots_that_no_program_takes():
    assert problems("-m", "x.gguf", "-np", "0") == ["argument 3 (-np): -np cannot be 0: it is 1 or more, or -1 (automatic)"]
    assert problems("-m", "x.gguf", LLAMA_ARG_N_PARALLEL="0") == ["$LLAMA_ARG_N_PARALLEL: LLAMA_ARG_N_PARALLEL cannot be 0: it is 1 or more, or -1 (automatic)"]
    with pytest.raises(InputError, match="-np cannot be -7: it is 0 or more"):  # 4294967289 without its sign
        started("llama-cli", "-np", "-7")


@pytest.mark.parametrize(
    ("argv", "knob", "value"),
    [
        (("-ub", "0"), "context.micro_batch", 2048),  # 0 is the batch
        (("-ub", "0", "-b", "1024"), "context.micro_batch", 1024),
        (("-ub", "-1", "-b", "1024"), "context.micro_batch", 1024),
        (("-b", "-1"), "context.batch", 2147483647),  # more than any context, which is the limit
        (("-ngl", "-5"), "layers.on_device", "all"),
        (("-ngl", "-1"), "layers.on_device", "auto"),
        (("-ts", "1e-30,1"), "layers.ratio", [1e-30, 1.0]),
        (("-ts", "3,1/"), "layers.ratio", [3.0, 1.0]),
        (("-ts", ".5,+1."), "layers.ratio", [0.5, 1.0]),
        (("-mg", "-1"), "device.main", None),
        (("-mg", "-1", "-sm", "none"), "device.ids", []),
        (("--image-max-tokens", "-1"), "vision.max_tokens", None),
        (("--mmproj", ""), "model.mmproj", None),
        (("-md", ""), "model.draft", None),
    ],
)
def test_numbers_outside_their_usual_range_mean_what_the_engine_makes_of_them(argv, knob, value):
    assert read("-m", "x.gguf", *argv).get(knob) == value


def test_margins_are_separated_by_commas_or_slashes():
    assert read("-fitt", "1024/2048").options == {"fit-target": [1024, 2048]}
    assert problems("-fitt", "-5") == ["argument 1 (-fitt): -fitt cannot be -5: it is MiB to leave free, 0 or more"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("-c", "-1"), "-c cannot be -1: it is 0 or more (0 is what the model was trained for)"),
        (("-c", "99999999999999999999"), "-c cannot be 99999999999999999999: the engine's parser takes whole numbers of 32 bits only"),
        (("-b", "0"), "-b cannot be 0: it is 1 or more"),
        (("-ncmoe", "-1"), "-ncmoe cannot be -1: it is 0 or more"),
        (("-ncffn", "-1"), "-ncffn cannot be -1: it is 0 or more"),
        (("--spec-draft-n-max", "-1"), "--spec-draft-n-max cannot be -1: it is 0 or more"),
        (("-cms", "-1"), "-cms cannot be -1: it is 0 or more"),
        (("--sleep-idle-seconds", "0"), "--sleep-idle-seconds cannot be 0: it is -1 (never) or 1 and more"),
        (("-ts", "1e-50,1"), "-ts cannot be 1e-50: the engine's parser takes numbers of single precision only"),
        (("-ts", "1,-1"), "-ts cannot be -1: a share is 0 or more"),
        (("--temp", "abc"), "--temp expects a number, not 'abc'"),
        (("--top-p", "1e99"), "--top-p cannot be 1e99: the engine's parser takes numbers of single precision only"),
        (("--rope-scaling", "foo"), "--rope-scaling expects one of none, linear, yarn, not 'foo'"),
        (("--reasoning", "maybe"), "--reasoning expects on, off or auto, not 'maybe'"),
        (("--prio", "4"), "--prio cannot be 4: it is from -1 to 3"),
        (("--repeat-last-n", "-1"), "--repeat-last-n cannot be -1: it is 0 or more"),
        (("--seed", "x"), "--seed expects a whole number of 64 bits, not 'x'"),
        (("--control-vector-layer-range", "1", "x"), "--control-vector-layer-range expects a whole number of 32 bits, not 'x'"),
        (("--override-kv", "foo"), "--override-kv expects KEY=TYPE:VALUE with a type of int, float, bool, str, not 'foo'"),
        (("--override-kv", "a=int:1,b=bool:yes"), "--override-kv expects true or false for 'b', not 'yes'"),
        (("--override-kv", "a=str:" + "x" * 128), "--override-kv takes texts of 127 bytes at most for 'a'"),
        (("--lora-scaled", "x.gguf"), "--lora-scaled expects FILE:SCALE, not 'x.gguf'"),
        (("--lora-scaled", "x.gguf:much"), "--lora-scaled expects a number, not 'much'"),
        (("--control-vector-scaled", "x.gguf:1:2"), "--control-vector-scaled expects FILE:SCALE, not 'x.gguf:1:2'"),
        (("--lora", "a.gguf,"), "--lora has an empty path"),
    ],
)
def test_values_the_engine_refuses(argv, said):
    assert problems("-m", "x.gguf", *argv) == [f"argument 3 ({argv[0]}): {said}"]


def test_values_the_engine_takes_though_they_look_odd():
    """The parser of --override-kv is satisfied with any text for a number, and every text is a Jinja template."""
    argv = ("--temp", "-.5e1x", "--top-p", "inf", "--seed", "-1", "--chat-template", "nope", "--override-kv", "llama.context_length=int:abc", "-co", "on", "-co")
    assert read("-m", "x.gguf", *argv).options == {"override-kv": ["llama.context_length=int:abc"]}
    assert read("--repeat-last-n", "-1", version="b4610").options == {}  # the range is newer


def test_every_flag_that_names_an_adapter():
    launch = read("--lora", 'a.gguf,"b,c.gguf"', "--lora-scaled", "d.gguf:0.5,e.gguf:-1e-1", "--control-vector", "f.gguf", "--control-vector-scaled", "g.gguf:2")
    assert launch.get("model.adapters") == ["a.gguf", "b,c.gguf", "d.gguf", "e.gguf", "f.gguf", "g.gguf"]


def test_a_scale_was_a_value_of_its_own_in_older_builds():
    launch = read("--lora-scaled", "a,b.gguf", "0.5", "--control-vector-scaled", "c.gguf:2", "-c", "512", version="b4610")
    assert (launch.get("model.adapters"), launch.get("context.length")) == (["a,b.gguf", "c.gguf"], 512)
    assert "expects FILE:SCALE" in problems("--lora-scaled", "a.gguf", "0.5", version="0.5.0")[0]


def test_an_empty_model_path():
    assert problems("-m", "") == ["argument 1 (-m): -m has an empty path"]
    assert problems(LLAMA_ARG_MODEL="") == ["$LLAMA_ARG_MODEL: LLAMA_ARG_MODEL has an empty path"]
    assert read("-m", "x.gguf", LLAMA_ARG_MODEL="").get("model.path") == "x.gguf"


@pytest.mark.parametrize("argv", [("-c", "9" * 5000), ("-c", "x" * 5000), ("-ts", "1e" + "9" * 5000), ("-ot", "x" * 5000), ("--temp", "x" * 5000), ("-fa", "x" * 5000)])
def test_long_values_are_shortened(argv):
    found = problems("-m", "x.gguf", *argv)
    assert len(found) == 1
    assert len(found[0]) < 250
    assert "..." in found[0]


def test_llama_bench_with_numbers_outside_their_usual_range():
    def bench(*argv):
        return ENGINE.read(["llama-bench", "-m", "x.gguf", *argv], {}, version=None)

    assert bench("-ub", "0,256").get("context.micro_batch") == 2048
    assert bench("-ub", "0", "-b", "4096").get("context.micro_batch") == 4096
    with pytest.raises(InputError, match="-p cannot be 99999999999999999999: the engine's parser takes whole numbers of 32 bits only"):
        bench("-p", "9" * 20)


def test_every_adapter_of_a_preset_counts():
    from residency.engines.llama_cpp.ini import sections, words_of

    problems = []
    entries = sections("p.ini", "lora = a.gguf\nlora-scaled = b.gguf:2\ncontrol-vector = c.gguf\nswa-full = " + "x" * 5000, problems)["default"]
    words = [word for entry in entries.values() for word in words_of(entry, problems)]
    assert words == ["--lora", "a.gguf", "--lora-scaled", "b.gguf:2", "--control-vector", "c.gguf"]
    assert problems[0].message == f"swa-full expects on or off, not '{'x' * 57}...'"


def test_no_mmproj_keeps_a_projector_that_is_named():
    # common/arg.cpp, 0.5.0: the flag stops the download beside -hf; a file that is named is loaded all the same
    assert read("-m", "m.gguf", "--mmproj", "p.gguf", "--no-mmproj").get("model.mmproj") == "p.gguf"


def test_a_bare_fa_is_of_builds_before_it_took_a_value():
    assert read("-fa", "-ngl", "9").get("context.flash_attention") == "on"  # the version is not known
    assert read("-fa", "-ngl", "9", version="b6000").get("context.flash_attention") == "on"
    with pytest.raises(InputError, match="-fa needs a value: on, off or auto; it took none before b6325"):
        read("-fa", "-ngl", "9", version="b10434")
