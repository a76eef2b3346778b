"""Reading launches: precedence, provenance, and every way an input can be wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import pytest

from residency.errors import InputError
from residency.launch import Knobs, Launch, merge_overrides, read_launch_file, read_launch_mapping
from residency.launch.sizes import PercentValue
from residency.where import DEFAULT, Where

HEAD = '[engine]\nname = "llama.cpp"\n[model]\npath = "m.gguf"\n'
BASE = {"engine": {"name": "llama.cpp"}, "model": {"path": "m.gguf"}}


@pytest.fixture
def write(tmp_path):
    def made(text, name="launch.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return made


def read(path, environ=None, overrides=()):
    return read_launch_file(path, environ=environ or {}, overrides=overrides)


def problems(path, environ=None, overrides=()):
    with pytest.raises(InputError) as caught:
        read(path, environ, overrides)
    assert all(ord(char) >= 32 or char in "\n\t" for char in str(caught.value))
    return caught.value.problems


def places(found):
    return [(problem.where.line, problem.where.column, problem.span) for problem in found]


def only(path, environ=None, overrides=()):
    found = problems(path, environ, overrides)
    assert len(found) == 1, [str(problem) for problem in found]
    return found[0]


# --- values and where they come from -------------------------------------------------------------


def test_a_whole_file(write):
    path = write(
        HEAD + '[context]\nlength = 4096\n[memory]\nreserve = "5%"\n[kv]\nmemory = "1.5 GiB"\n[engine.options]\nswa-full = true\n'
        '[[layers.overrides]]\npattern = "exps"\ndevice = "CPU"\n'
    )
    launch = read(path)
    assert (launch.engine, launch.version, launch.name) == ("llama.cpp", None, str(path))
    assert launch.get("context.length") == 4096
    assert launch.get("kv.memory") == 1_610_612_736
    assert isinstance(launch.get("memory.reserve"), PercentValue)
    assert launch.get("memory.reserve") == 5.0
    assert launch.options == {"swa-full": True}
    assert launch.get("layers.overrides")[0].pattern == "exps"
    assert launch.get("context.batch") is None
    assert type(launch.knobs) is Knobs
    assert launch.where("context.length") == Where(source="file", file=str(path), line=6, column=1)
    assert launch.where("option:swa-full") == Where(source="file", file=str(path), line=12, column=1)
    assert launch.where("layers.overrides").line == 13
    assert launch.where("context.batch") is DEFAULT


def test_precedence_set_over_environment_over_file(write):
    path = write(HEAD + "[context]\nlength = 1\nbatch = 1\nmicro_batch = 1\n[engine.options]\na = 1\nb = 1\nc = 1\n")
    environ = {
        "RESIDENCY_CONTEXT__BATCH": "2",
        "residency_context__micro_batch": "2",
        "RESIDENCY_ENGINE__OPTIONS__B": "2",
        "RESIDENCY_ENGINE__OPTIONS__C": "2",
        "RESIDENCY_ENGINE__OPTIONS__NO_MMAP": "true",
    }
    launch = read(path, environ, ["context.micro_batch=3", "engine.options.c=3", "context.micro_batch = 4"])
    assert [launch.get(f"context.{key}") for key in ("length", "batch", "micro_batch")] == [1, 2, 4]
    assert launch.options == {"a": 1, "b": 2, "c": 3, "no-mmap": True}
    assert launch.where("context.length").source == "file"
    assert launch.where("context.batch") == Where(source="env", variable="RESIDENCY_CONTEXT__BATCH")
    assert launch.where("context.micro_batch") == Where(source="argv", flag="--set")
    assert [launch.where(f"option:{name}").source for name in "abc"] == ["file", "env", "argv"]
    assert launch.where("engine.options").source == "argv"


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        ("context.length", "4096", 4096),
        ("context.length", "0x10", 16),
        ("context.unified", "true", True),
        ("context.prefill", "auto", "auto"),
        ("context.prefill", "512", 512),
        ("layers.on_device", "all", "all"),
        ("layers.ratio", "[3, 1.5]", [3.0, 1.5]),
        ("device.ids", '["CUDA0", "CUDA1"]', ["CUDA0", "CUDA1"]),
        ("kv.memory", "4GiB", 2**32),
        ("kv.memory", "4096", 4096),
        ("memory.reserve", "5%", PercentValue(5)),
        ("engine.version", "0.10", "0.10"),
        ("engine.version", "2026-08-01", "2026-08-01"),
        ("engine.version", '"1"', "1"),
        ("model.mmproj", "123", "123"),
        ("model.mmproj", "a = b # c", "a = b # c"),
        ("model.mmproj", "1\nx = 2", "1\nx = 2"),
        ("layers.overrides", '[{pattern = "e", device = "CPU"}]', None),
    ],
)
def test_texts_become_what_the_knob_takes(knob, text, value):
    section, key = knob.split(".")
    for launch in (
        read_launch_mapping(BASE, environ={f"RESIDENCY_{section}__{key}".upper(): text}),
        read_launch_mapping(BASE, environ={}, overrides=[f"{knob}={text}"]),
    ):
        found = launch.get(knob)
        if value is None:
            assert (found[0].pattern, found[0].device) == ("e", "CPU")
        else:
            assert found == value
            assert type(found) is type(value)


def test_required_knobs_may_come_from_anywhere(write):
    launch = read(write("[context]\nlength = 1\n"), {"RESIDENCY_ENGINE__NAME": "strata"}, ["model.path=x.gguf"])
    assert (launch.engine, launch.get("model.path")) == ("strata", "x.gguf")


def test_files_are_relative_to_the_launch_file_and_only_its_own(write, tmp_path):
    path = write(
        '[engine]\nname = "e"\n[model]\npath = "m.gguf"\nmmproj = "/abs/p.gguf"\ndraft = "../d.gguf"\nadapters = ["a/l.gguf"]\n[machine]\nprofile = "mine.toml"\n'
    )
    launch = read(path)
    assert launch.get("model.path") == str(tmp_path / "m.gguf")
    assert launch.get("model.mmproj") == "/abs/p.gguf"
    assert launch.get("model.draft") == f"{tmp_path}/../d.gguf"
    assert launch.get("model.adapters") == [f"{tmp_path}/a/l.gguf"]
    assert launch.get("machine.profile") == str(tmp_path / "mine.toml")
    launch = read(path, {"RESIDENCY_MODEL__PATH": "other.gguf"}, ["machine.profile=rtx-3090"])
    assert launch.get("model.path") == "other.gguf"
    assert launch.get("machine.profile") == "rtx-3090"
    assert read(write(HEAD + '[machine]\nprofile = "rtx-3090"\n')).get("machine.profile") == "rtx-3090"


def test_a_file_in_the_current_folder_keeps_its_paths_short(write, tmp_path, monkeypatch):
    write(HEAD)
    monkeypatch.chdir(tmp_path)
    assert read("launch.toml").get("model.path") == "m.gguf"


def test_a_mapping(tmp_path):
    launch = read_launch_mapping(
        {"engine": {"name": "e"}, "model": {"path": tmp_path / "m.gguf"}, "device": {"ids": ("CUDA0",), "kind": None}}, environ={}, name="mine"
    )
    assert launch.get("model.path") == str(tmp_path / "m.gguf")
    assert launch.get("device.ids") == ["CUDA0"]
    assert launch.get("device.kind") is None
    assert launch.where("device.ids") == Where(source="file", file="mine")
    assert "device.kind" not in launch.places


def test_byte_order_mark_and_carriage_returns(write):
    path = write(b"\xef\xbb\xbf" + HEAD.replace("\n", "\r\n").encode() + b"[context]\r\nlength = 7\r\n")
    launch = read(path)
    assert launch.get("context.length") == 7
    assert (launch.where("context.length").line, launch.where("context.length").column) == (6, 1)


# --- several errors in one run -------------------------------------------------------------------


def test_three_errors_three_positions(write):
    found = problems(write(HEAD + '[context]\nlenght = 4096\nbatch = "many"\n[kv]\nlength = 3\n'))
    assert [str(problem).split(": ", 1)[1] for problem in found] == [
        "context.lenght is not a knob; did you mean context.length?\n  6 | lenght = 4096\n    | ^^^^^^",
        'context.batch must be a whole number of tokens ≥ 1, not "many"\n  7 | batch = "many"\n    |         ^^^^^^',
        "kv.length is not a knob; did you mean context.length?\n  9 | length = 3\n    | ^^^^^^",
    ]


def test_positions_in_dotted_keys_inline_tables_arrays_of_tables_quoted_keys_tabs(write):
    text = (
        'engine = { name = "llama.cpp", optoins = {} }\n'
        'model."pa\\u0074h" = 5\n'
        "context . lenght\t= 1\n"
        "[[layers.overrides]]\n"
        '\tpattern\t=\t"e"\n'
        "\tdevice\t=\t7\n"
        "[[layers.overrides]]\n"
        'pattern = "e"\n'
        "'devcie' = 'CPU'\n"
        "[device]\n"
        "ids = [\n"
        '  "CUDA0", # first\n'
        "  1,\n"
        "]\n"
    )
    expected = [(1, 32, 7), (2, 21, 1), (3, 11, 6), (6, 11, 1), (7, 1, 20), (9, 1, 8), (13, 3, 1)]
    for end in ("\n", "\r\n"):
        found = problems(write(text.replace("\n", end)))
        assert places(found) == expected
        assert all("\r" not in problem.line_text for problem in found)
    assert [problem.message for problem in found] == [
        "engine.optoins is not a knob",
        "model.path must be a text, not 5",
        "context.lenght is not a knob",
        "layers.overrides[0].device must be a text, not 7",
        "layers.overrides[1] has no device",
        "layers.overrides[1].devcie is not a knob",
        "device.ids[1] must be a text, not 1",
    ]
    assert found[5].hint == "did you mean layers.overrides[1].device?"


def test_errors_of_file_environment_and_set_come_together(write):
    found = problems(write(HEAD + "[vision]\nenabled = 1\n"), {"RESIDENCY_KV__MEMORY": "80%"}, ["context.lenght=1", "nothing"])
    assert [str(problem.where).rpartition("/")[2] for problem in found] == ["launch.toml:6:11", "$RESIDENCY_KV__MEMORY", "--set", "--set"]
    assert found[1].message == 'kv.memory: "80%" is a percentage, not a size in bytes'
    assert found[2].hint == "did you mean context.length?"
    assert found[3].hint == "write --set knob=value"


def test_a_value_that_is_overridden_must_still_be_legal(write):
    assert only(write(HEAD + "[context]\nlength = -1\n"), {}, ["context.length=5"]).where.line == 6


def test_a_flood_of_errors_is_cut_off(write):
    found = problems(write(HEAD + "[context]\n" + "".join(f"x{index} = 1\n" for index in range(3000))))
    assert len(found) == 101
    assert found[100].message == "2900 more problems are not shown"


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ('[context]\nlength = "4096"', 'context.length must be a whole number of tokens ≥ 0, not "4096"', "leave the quotes out"),
        ("[context]\nlength = 4.5", "context.length must be a whole number of tokens ≥ 0, not 4.5", None),
        ("[context]\nlength = true", "context.length must be a whole number of tokens ≥ 0, not true", None),
        ("[context]\nlength = 2020-01-01", "context.length must be a whole number of tokens ≥ 0, not the date or time 2020-01-01", None),
        ("[context]\nlength = []", "context.length must be a whole number of tokens ≥ 0, not an empty list", None),
        ("[context]\nlength = { a = 1 }", "context.length must be a whole number of tokens ≥ 0, not a table", None),
        ("[context]\nlength = nan", "context.length must be a whole number of tokens ≥ 0, not nan", None),
        ("[context]\nlength = 9223372036854775808", None, "the largest is 9223372036854775807"),
        ('[device]\nkind = "cud"', None, 'did you mean "cuda"?'),
        ('[context]\nprefill = "aut"', 'context.prefill must be a whole number of tokens ≥ 0, or "auto", not "aut"', 'did you mean "auto"?'),
        ("[layers]\nratio = [1, inf]", "layers.ratio[1] must be a finite number ≥ 0, not inf", None),
        ("[layers]\nfirst = [1, -2]", "layers.first[1] must be a whole number ≥ 0, not -2", None),
        ("[engine.options]\nx = inf", None, None),
        ("[engine.options]\nx = { y = 1 }", None, None),
        ('[memory]\nreserve = "1800MB of it"', None, None),
        ('[kv]\nmemory = "1G"', 'kv.memory: "1G" is not a size: a number, then one of KiB, MiB, GiB, TiB, kB, MB, GB, TB (exact letters)', None),
        ("[context]\nn_ctx = 1", "context.n_ctx is not a knob", "did you mean context.length?"),
        ("[layers]\nn-gpu-layers = 1", "layers.n-gpu-layers is not a knob", "did you mean layers.on_device?"),
        ("[context]\n__proto__ = 1", "context.__proto__ is not a knob", None),
        ('[context]\n"a\\nb\\u001b[31m" = 1', 'context."a\\nb\\x1b[31m" is not a knob', None),
        ("[gpu]\nx = 1", "[gpu] is not a section", "did you mean [device]?"),
        ("[contex]\nlength = 1", "[contex] is not a section", "did you mean [context]?"),
        ("[engine.optins]\nx = 1", "engine.optins is not a knob", "did you mean engine.options?"),
        ("[kv]\ndevices = 1", "kv.devices is not a knob", None),
    ],
)  # fmt: skip
def test_one_error(write, line, message, hint):
    problem = only(write(HEAD + line + "\n"))
    if message is not None:
        assert problem.message == message
    if hint is not None:
        assert problem.hint == hint
    assert problem.where.line in (5, 6)


def test_a_section_that_is_no_table(write):
    found = problems(write("context = 5\n[[kv]]\nx = 1\n" + HEAD))
    assert [problem.message for problem in found] == [
        "context is a section and must be a table, not 5",
        "kv is a section and must be a table, not [a table]",
    ]
    assert places(found) == [(1, 11, 1), (2, 3, 2)]


def test_a_knob_outside_every_section(write):
    assert str(only(write("length = 5\n" + HEAD))).endswith(
        ":1:1: length is not a knob; did you mean context.length?\n  1 | length = 5\n    | ^^^^^^"
    )


# --- required knobs ------------------------------------------------------------------------------


def test_an_empty_file_lacks_both(write):
    found = problems(write(""))
    assert [problem.message for problem in found] == ["engine.name is missing", "model.path is missing"]
    assert places(found) == [(1, 1, 1), (1, 1, 1)]


def test_missing_points_at_the_nearest_table(write):
    found = problems(write('# c\n[engine]\nversion = "1"\nmodel.x = 1\n[model]\nmmproj = "p"\n'.replace("model.x = 1\n", "")))
    assert places(found) == [(2, 1, 8), (4, 1, 7)]
    assert found[0].hint == 'write name = "..." under [engine]'


def test_a_slip_of_the_pen_is_not_also_missing(write):
    assert only(write('[engin]\nname = "e"\n[model]\npath = "m"\n')).message == "[engin] is not a section"
    assert only(write('[engine]\nnmae = "e"\n[model]\npath = "m"\n')).hint == "did you mean engine.name?"


def test_empty_names_are_refused(write):
    found = problems(write('[engine]\nname = ""\n[model]\npath = "a\\u0000b"\n'))
    assert [problem.message for problem in found] == ["engine.name is empty", "model.path holds a NUL character"]
    found = problems(write('[engine]\nname = "e"\n[model]\npath = "m"\nadapters = ["a", ""]\n'))
    assert [problem.message for problem in found] == ["model.adapters has an empty path"]


# --- the environment and --set -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("RESIDENCY_CONTXT__LENGTH", "did you mean RESIDENCY_CONTEXT__LENGTH?"),
        ("RESIDENCY_CONTEXT__LENGHT", "did you mean RESIDENCY_CONTEXT__LENGTH?"),
        ("RESIDENCY_CONTEXT_LENGTH", "did you mean RESIDENCY_CONTEXT__LENGTH?"),
        ("residency_context__lenght", "did you mean RESIDENCY_CONTEXT__LENGTH?"),
        ("RESIDENCY_POLCY", "did you mean RESIDENCY_POLICY?"),
        ("RESIDENCY_", "knobs are named like RESIDENCY_CONTEXT__LENGTH"),
        ("RESIDENCY_CONTEXT", None),
        ("RESIDENCY_LAYERS__OVERRIDES__0__PATTERN", None),
        ("RESIDENCY_ENGINE__NAME__X", None),
    ],
)
def test_unknown_variables(variable, hint):
    for value in ("1", ""):
        with pytest.raises(InputError) as caught:
            read_launch_mapping(BASE, environ={variable: value})
        (problem,) = caught.value.problems
        assert problem.message == f"{variable} is not a knob"
        assert problem.where == Where(source="env", variable=variable)
        assert hint is None or problem.hint == hint


def test_reserved_and_empty_and_foreign_variables_are_left_alone():
    environ = dict.fromkeys(["RESIDENCY_POLICY", "RESIDENCY_MACHINE", "RESIDENCY_LOG", "RESIDENCYX", "XRESIDENCY_Y"], "x")
    launch = read_launch_mapping(BASE, environ={**environ, "RESIDENCY_CONTEXT__LENGTH": ""})
    assert launch.get("context.length") is None
    assert launch.get("machine.profile") is None
    assert read_launch_mapping(BASE, environ={"RESIDENCY_MACHINE__PROFILE": "x"}).get("machine.profile") == "x"


def test_one_knob_in_two_spellings_is_refused():
    with pytest.raises(InputError, match="residency_context__length sets the same knob as RESIDENCY_CONTEXT__LENGTH"):
        read_launch_mapping(BASE, environ={"RESIDENCY_CONTEXT__LENGTH": "1", "residency_context__length": "1"})


def test_the_process_environment_is_not_read(monkeypatch):
    monkeypatch.setenv("RESIDENCY_CONTEXT__LENGTH", "5")
    monkeypatch.setenv("CONTEXT", "not json")
    assert read_launch_mapping(BASE, environ={}).get("context.length") is None


def test_ten_thousand_variables_cost_next_to_nothing():
    environ = {f"VARIABLE_{index}": "x" * 100 for index in range(10_000)}
    read_launch_mapping(BASE, environ={})
    start = time.perf_counter()
    read_launch_mapping(BASE, environ=environ)
    assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize("text", ["=1", "x=1", "context=1", "context.=1", "engine.options.=1", "context.length.x=1", "", "\x1b[2J=\x1b"])
def test_bad_overrides(text):
    with pytest.raises(InputError) as caught:
        read_launch_mapping(BASE, environ={}, overrides=[text])
    assert len(caught.value.problems) == 1
    assert "\x1b" not in str(caught.value)


def test_bad_texts_are_shown_as_given():
    with pytest.raises(InputError) as caught:
        read_launch_mapping(BASE, environ={"RESIDENCY_CONTEXT__LENGTH": "many\udc80\x1b"}, overrides=["context.batch=" + "9" * 5000])
    shown = str(caught.value)
    assert 'not "many\\udc80\\x1b"' in shown
    assert "context.batch must be a whole number of tokens ≥ 1" in shown
    assert len(shown) < 500


# --- a launch read from an engine's own command line ---------------------------------------------


def engine_launch():
    return Launch(
        engine="llama.cpp",
        version=None,
        knobs=Knobs.model_validate({"context": {"length": 100}, "kv": {"key_type": "q8_0"}}),
        options={"repack": False},
        places={
            "context.length": Where(source="argv", argv_index=1, flag="-c"),
            "kv.key_type": Where(source="env", variable="LLAMA_ARG_CACHE_TYPE_K"),
            "option:repack": Where(source="argv", argv_index=3, flag="--no-repack"),
        },
        program="llama-server",
        argv=("llama-server", "-c", "100", "--no-repack"),
    )


def test_nothing_to_merge_returns_the_launch_itself():
    launch = engine_launch()
    assert merge_overrides(launch, {"HOME": "/", "RESIDENCY_POLICY": "p"}, []) is launch


def test_the_engine_wins_over_variables_and_set_wins_over_all():
    environ = {
        "RESIDENCY_CONTEXT__LENGTH": "200",
        "RESIDENCY_KV__KEY_TYPE": "f16",
        "RESIDENCY_CONTEXT__BATCH": "64",
        "RESIDENCY_ENGINE__NAME": "strata",
        "RESIDENCY_ENGINE__VERSION": "b1",
        "RESIDENCY_ENGINE__OPTIONS__REPACK": "true",
        "RESIDENCY_ENGINE__OPTIONS__SWA_FULL": "true",
    }
    launch = merge_overrides(engine_launch(), environ, [])
    assert [launch.get(k) for k in ("context.length", "kv.key_type", "context.batch")] == [100, "q8_0", 64]
    assert (launch.engine, launch.version, launch.get("engine.name")) == ("llama.cpp", "b1", None)
    assert launch.options == {"repack": False, "swa-full": True}
    assert launch.where("context.length").flag == "-c"
    assert launch.where("context.batch").variable == "RESIDENCY_CONTEXT__BATCH"
    assert launch.where("option:repack").flag == "--no-repack"
    assert launch.argv[0] == "llama-server"
    launch = merge_overrides(launch, environ, ["context.length=300", "engine.version=b2", "option:repack=true"])
    assert (launch.get("context.length"), launch.version, launch.options["repack"]) == (300, "b2", True)
    assert str(launch.where("context.length")) == "--set"
    assert str(launch.where("option:repack")) == "--set"


def test_the_engine_of_a_command_line_cannot_be_replaced():
    assert merge_overrides(engine_launch(), {}, ["engine.name=llama.cpp"]).engine == "llama.cpp"
    with pytest.raises(InputError, match=r'engine\.name cannot be changed to "strata": this is a command line of llama\.cpp'):
        merge_overrides(engine_launch(), {}, ["engine.name=strata"])


def test_errors_of_variables_and_set_come_together_for_a_command_line():
    with pytest.raises(InputError) as caught:
        merge_overrides(engine_launch(), {"RESIDENCY_X": "1", "RESIDENCY_CONTEXT__BATCH": "0"}, ["kv.memory=80%"])
    assert [str(problem.where) for problem in caught.value.problems] == ["$RESIDENCY_X", "$RESIDENCY_CONTEXT__BATCH", "--set"]


# --- files that are no launch files --------------------------------------------------------------


def test_no_such_file(tmp_path):
    problem = only(tmp_path / "gone.toml")
    assert str(problem) == f"{tmp_path}/gone.toml: no such file"


def test_what_is_not_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert only(tmp_path).message == "is a folder, not a text file"
    assert only(tmp_path / "pipe").message == "is a pipe, not a text file"
    assert only("/dev/zero").message == "is a device, not a text file"


def test_names_no_file_can_have(tmp_path):
    assert only("a\0b").message == "no file can have this name"
    assert only("x" * 5000).message == "the name is too long"
    (tmp_path / "file").touch()
    assert only(tmp_path / "file" / "x").message == "no such file: a part of the path is not a folder"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert only(tmp_path / "loop").message == "symbolic links lead in a circle"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(write):
    path = write(HEAD)
    path.chmod(0)
    assert only(path).message == "may not be read (permission denied)"


def test_size_and_encoding(write):
    assert only(write(HEAD + "#" * 2**20)).message == "is larger than 1 MiB, more than a file written by people"
    problem = only(write(b'[engine]\nname = "\xc3\xa9\xff"\n'))
    assert (problem.message, problem.where.line, problem.where.column) == ("byte 19 (0xff) is not UTF-8", 2, 10)
    assert only(write("[engine]".encode("utf-16"))).hint == "this looks like UTF-16; save it as UTF-8"


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("a = 1\nb = \n", 2, 5),
        ("a = 1\r\nb = \r\n", 2, 5),
        ("[engine\nname = 1", 1, 8),
        ('a = "x\n', 1, 7),
        ("\ta\x00 = 1", 1, 3),
        ("a = '\x1b[31m'", 1, 6),
        ("a = 1\rb = 2", 1, 6),
        ("a = " + "9" * 5000, 1, 5),
        ("\n a = 1_" + "9" * 5000, 2, 6),
        ("{", 1, 1),
        ("a = 2024-13-45", 1, 9),
    ],
)
def test_syntax_errors_have_line_and_column(write, text, line, column):
    problem = only(write(text))
    assert (problem.where.line, problem.where.column) == (line, column)
    assert str(problem).splitlines()[2].endswith("^")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (HEAD + 'path = "n"\n', 5, "not valid TOML: this key has a value already"),
        (HEAD + "[model]\n", 5, "not valid TOML: this table is declared twice"),
    ],
)
def test_duplicates(write, text, line, message):
    problem = only(write(text))
    assert (problem.where.line, problem.message) == (line, message)


@pytest.mark.parametrize(
    "text",
    [
        "a = 1\na = 2\n",
        "[a]\n[a]\n",
        "a = " + "[" * 100_000,
        "a = " + "[" * 100_000 + "]" * 100_000,
        "a = " + "{a=" * 50_000 + "1" + "}" * 50_000,
        "[" + ".".join("a" * 5000) + "]",
        "a = " + "[" * 300 + "]" * 300,
        "[context]\nlength = " + "9" * 400,
        "[context]\nlength = 0x" + "f" * 100_000,
        "[layers]\nratio = [0x" + "f" * 100_000 + "]",
        "[engine.options]\nx = 0x" + "f" * 100_000,
        "[memory]\nreserve = -0.0",
        "[kv]\nmemory = 99999999999999999999999",
        "[kv]\nmemory = '99999999999999999999TiB'",
        "[constructor.prototype]\n__class__ = 1",
        '"" = 1\n[""]\n',
        '["\\u202e"]\n"\\u2028" = 1',
        "x" * 1000 + " = 1",
        "".join(f"[x{index}]\n" for index in range(2000)),
    ],
)
def test_hostile_text_ends_in_problems(write, text):
    start = time.perf_counter()
    found = problems(write(text))
    assert time.perf_counter() - start < 2
    assert len("\n".join(map(str, found))) < 200_000


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {1: 2},
        {"engine": {1: 2}},
        {"engine": {"name": date(2020, 1, 1)}, "model": {"path": b"x"}},
        {"engine": object()},
        {**BASE, "layers": {"overrides": [{"pattern": {"a": [1]}}]}},
        {**BASE, "layers": {"overrides": {"pattern": 1}}},
        [("engine", {})],
        None,
    ],
)
def test_hostile_mappings_end_in_problems(mapping):
    with pytest.raises(InputError):
        read_launch_mapping(mapping, environ={})


def test_a_mapping_that_holds_itself():
    mapping = {**BASE, "context": {}}
    mapping["context"]["length"] = mapping
    with pytest.raises(InputError, match="nested too deeply"):
        read_launch_mapping(mapping, environ={})


# --- cost and examples ---------------------------------------------------------------------------


def test_importing_the_package_does_not_import_pydantic():
    code = "import residency.launch, sys; print([m for m in sys.modules if m.split('.')[0] in ('pydantic', 'pydantic_settings', 'tomli')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted((Path(__file__).parent.parent / "configs" / "launches").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_launch_files_are_legal(path):
    launch = read(path)
    assert launch.engine
    assert launch.where("engine.name").line is not None
