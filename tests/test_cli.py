"""The command line as a user meets it: verdicts, exit codes, whole outputs, damaged files, odd environments."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from gguf_writer import write_gguf, write_split
from plugin_writer import RULE, distribution

from residency import validate
from residency.checkpoint import read
from residency.cli import main
from residency.report.text import plain, render

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(a) for a in arguments])
    return code, out.getvalue(), err.getvalue()


def process(*arguments: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "residency", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, **more)


def steady(text: str) -> str:
    """The text without elapsed time."""
    return re.sub(r"\d+\.\d\d s", "0.00 s", text)


def test_allowed_is_one_line(gemma_path):
    code, out, err = run("validate", "--machine", "cpu-only-32gb", "--", "llama-server", "-m", gemma_path, "-c", "4096")
    assert (code, err) == (0, "")
    assert steady(out) == "ALLOW  Gemma 3 270m · llama.cpp 0.5.0 · CPU only, 32 GB                  1 file, 236 tensors, 0.00 s\n"


@pytest.mark.parametrize("argv", [
    ("llama-server", "--version"), ("llama-cli", "-h"), ("llama-bench", "--help"), ("llama-server", "-m", "no-such.gguf", "--list-devices"),
    ("strata-server", "--help"), ("vllm-cli", "--help"),
])  # fmt: skip
def test_a_program_that_only_prints_is_allowed(argv):
    code, out, err = run("validate", "--machine", "cpu-only-32gb", "--", *argv)
    assert (code, err) == (0, "")
    assert out.startswith("ALLOW  starts no engine, only prints · ")


def test_too_much_context_is_vetoed_with_need_have_and_the_largest_that_passes(gemma_path):
    arguments = ("--machine", "cpu-only-32gb", "--", "llama-server", "-m", str(gemma_path), "-c", "200000000")
    code, out, _ = run("validate", *arguments)
    assert code == 1
    # Three full layers and fifteen windowed ones, K and V of 256 halves each; four slots share one cache:
    # windows of 512 x 4 + 512 tokens, padded to 2560 cells.
    cache = 200000000 // 256 * 256 + 0
    need = cache * 3 * 2 * 256 * 2 + 2560 * 15 * 2 * 256 * 2
    assert "28.00 GiB is free" in out
    assert f"KV cache of {cache} tokens wants {need / 2**30:.2f} GiB" in out
    assert "argument 3 (-c)  context.length = 200000000" in out
    best = int(re.search(r"try +-c (\d+) +verified", out)[1])
    assert run("validate", *arguments[:-1], str(best))[0] == 0
    assert run("validate", *arguments[:-1], str(best + 256))[0] == 1


def test_json_is_one_document_and_nothing_else(gemma_path):
    code, out, err = run("validate", "--format", "json", "--machine", "rtx-3090", "--", "llama-server", "-m", gemma_path, "-c", "4096")
    report = json.loads(out)
    assert (code, err, report["schema"], report["verdict"], report["exit_code"]) == (0, "", "residency.report/1", "allow", 0)
    assert set(report) >= {"engine", "model", "machine", "findings", "budget"}
    card = next(p for p in report["budget"]["pools"] if p["name"] == "CUDA0")
    weights = [a for a in card["allocations"] if a["purpose"] == "weights"]
    # Tied embeddings: the card holds every tensor, the token table as the output. CUDA's rule by hand: quantised rows that
    # are no multiple of 512 take (512 - n % 512) elements more, once per tensor; every tensor starts at a multiple of 128.
    packed = {"Q8_0": (32, 34), "Q5_0": (32, 22), "Q4_K": (256, 144), "Q6_K": (256, 210)}
    want = 0
    for t in read(str(gemma_path)).tensors:
        block, size = packed.get(t.type_name, (1, 0))
        want += -(-(t.nbytes + -t.shape[0] % 512 // block * size) // 128) * 128
    assert sum(a["certain_bytes"] for a in weights) == want == 246624128


@pytest.mark.parametrize("form", ["sarif", "github", "junit"])
def test_other_formats_name_the_rule(form, gemma_path):
    code, out, _ = run("validate", "--format", form, "--machine", "rtx-3090", "--", "llama-server", "-m", gemma_path, "-c", "200000000")
    assert code == 1
    assert "memory-budget/pools" in out
    if form == "sarif":
        document = json.loads(out)
        assert document["runs"][0]["results"][0]["level"] == "error"
    if form == "junit":
        from xml.etree import ElementTree as ET

        assert int(ET.fromstring(out)[0].attrib["failures"]) == out.count("<failure>") >= 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["validate", "nope.toml"], "error: nope.toml: no such file\n"),
        (["validate", "--", "llama-server", "-m", "nope.gguf"], "error: argument 1 (-m): nope.gguf: no such file\n"),
        (["validate"], "error: give a launch file, or an engine's command line after --\n"),
        (["validate", "--"], "error: nothing follows --; an engine's command line is expected there\n"),
        (["validate", "--", "llama-server", "--ctx-sze", "4096"], "error: argument 1 (--ctx-sze): llama-server has no flag --ctx-sze; did you mean --ctx-size?\n"),
        (["explain", "memory-budget/pool"], 'error: no rule is called "memory-budget/pool"; did you mean "memory-budget/pools"?\n'),
        (["validate", "--machine", "rtx3090", "--", "llama-server"], 'error: no machine profile is called "rtx3090"; did you mean "rtx-3090"?\n'),
    ],
)
def test_bad_input_is_exit_2_and_a_sentence(arguments, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out, err) == (2, "", said)


def test_one_run_reports_profile_and_model(tmp_path):
    profile = tmp_path / "m.toml"
    profile.write_text('[[pools]]\nname = "host"\ntotl = "1GiB"\n')
    code, _, err = run("validate", "--machine", profile, "--", "llama-server", "-m", tmp_path / "x.gguf")
    assert code == 2
    assert f'{profile}:3:1: pools[0].totl is not a key of a profile; did you mean "total"?' in err
    assert "x.gguf: no such file" in err


def test_control_characters_never_reach_the_terminal(tmp_path):
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    path = tmp_path / "evil.gguf"
    write_gguf(path, {"general.architecture": f"llama{evil}", "general.name": evil}, [(f"blk.0.{evil}", "F32", (8,))])
    for arguments in (["validate", "--machine", "cpu-only-32gb", "-v", "--", "llama-server", "-m", path], ["census", path], ["validate", f"{evil}.toml"]):
        _, out, err = run(*arguments)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", out + err)


LLAMA = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 256, "llama.attention.head_count": 4,
    "llama.feed_forward_length": 512, "llama.context_length": 4096,
}  # fmt: skip
TENSORS = [
    ("token_embd.weight", "F16", (256, 100)), ("blk.0.attn_q.weight", "F16", (256, 256)), ("blk.0.attn_k.weight", "F16", (256, 256)),
    ("blk.0.attn_v.weight", "F16", (256, 256)), ("blk.0.attn_output.weight", "F16", (256, 256)), ("blk.0.attn_norm.weight", "F32", (256,)),
    ("blk.0.ffn_up.weight", "F16", (256, 512)), ("blk.0.ffn_gate.weight", "F16", (256, 512)), ("blk.0.ffn_down.weight", "F16", (512, 256)),
    ("blk.0.ffn_norm.weight", "F32", (256,)), ("output_norm.weight", "F32", (256,)),
]  # fmt: skip


def patched(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) >= 1
    path.write_bytes(data.replace(old, new, 1))


def damage_unknown_type(path: Path) -> str:
    write_gguf(path, LLAMA, [*TENSORS, ("blk.0.extra.weight", 200, (32,), 64)])
    return "blk.0.extra.weight"


def damage_unknown_architecture(path: Path) -> str:
    write_gguf(path, {**LLAMA, "general.architecture": "lama"}, TENSORS)
    return "general.architecture is 'lama'"


def damage_cut(path: Path) -> str:
    write_gguf(path, LLAMA, TENSORS)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 400_000)
    return "blk.0."


def damage_cut_header(path: Path) -> str:
    write_gguf(path, LLAMA, TENSORS)
    with path.open("r+b") as file:
        file.truncate(300)
    return "the file ends here"


def damage_string_length(path: Path) -> str:
    write_gguf(path, LLAMA, TENSORS)
    patched(path, struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 2**63) + b"llama")
    return "general.architecture"


def damage_tensor_count(path: Path) -> str:
    write_gguf(path, LLAMA, TENSORS)
    patched(path, struct.pack("<IQ", 3, len(TENSORS)), struct.pack("<IQ", 3, 2**60))
    return str(2**60)


def damage_duplicate_tensor(path: Path) -> str:
    write_gguf(path, LLAMA, [*TENSORS, ("blk.0.attn_q.weight", "F16", (256, 256))])
    return "blk.0.attn_q.weight"


def damage_wrong_magic(path: Path) -> str:
    path.write_bytes(b"GGML" + bytes(100))
    return "GGUF"


def damage_empty(path: Path) -> str:
    path.touch()
    return "empty"


def damage_directory(path: Path) -> str:
    path.mkdir()
    return "directory"


def damage_fifo(path: Path) -> str:
    os.mkfifo(path)
    return "FIFO"


def damage_huge_block_count(path: Path) -> str:
    write_gguf(path, {**LLAMA, "llama.block_count": {"u32": 2**32 - 1}}, TENSORS)
    return "llama.block_count"


def damage_text_for_a_number(path: Path) -> str:
    write_gguf(path, {**LLAMA, "llama.attention.head_count": "many"}, TENSORS)
    return "llama.attention.head_count"


def damage_missing_key(path: Path) -> str:
    write_gguf(path, {k: v for k, v in LLAMA.items() if k != "llama.block_count"}, TENSORS)
    return "llama.block_count"


def damage_projector_as_model(path: Path) -> str:
    write_gguf(path, {"general.architecture": "clip"}, [("v.blk.0.ln1.weight", "F32", (64,))])
    return "projector"


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__.removeprefix("damage_"))
def test_a_damaged_file_is_refused_by_name_without_a_traceback(damage, tmp_path):
    path = tmp_path / "model.gguf"
    named = damage(path)
    before = sorted(tmp_path.iterdir())
    done = process("validate", "--machine", "cpu-only-32gb", "--", "llama-server", "-m", path, "-c", "512")
    said = done.stdout + done.stderr
    assert done.returncode in (1, 2), said
    assert named in " ".join(said.split()), said
    assert "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before, "nothing is written next to the model files"


def test_a_missing_shard_is_named(tmp_path):
    paths = write_split(tmp_path, "m", LLAMA, [[t] for t in TENSORS[:10]] + [[t] for t in TENSORS[10:]] + [[("a.weight", "F32", (8,))], [("b.weight", "F32", (8,))]])
    assert len(paths) == 13
    Path(paths[1]).unlink()
    code, out, _ = run("validate", "--machine", "cpu-only-32gb", "--", "llama-server", "-m", paths[0], "-c", "512")
    assert code == 1
    assert "m-00002-of-00013.gguf" in " ".join(out.split())


def test_shards_joined_with_cat_are_named(tmp_path):
    paths = write_split(tmp_path, "m", LLAMA, [TENSORS[:5], TENSORS[5:]])
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(Path(p).read_bytes() for p in paths))
    code, out, _ = run("validate", "--machine", "cpu-only-32gb", "--", "llama-server", "-m", joined, "-c", "512")
    assert code == 1
    assert "joined.gguf" in out


def test_no_home_no_colour_no_terminal_ascii_output(gemma_path, tmp_path):
    environ = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = process("validate", "--machine", "cpu-only-32gb", "--", "llama-server", "-m", gemma_path, "-c", "4096", env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ALLOW  Gemma 3 270m")


def test_ten_thousand_variables_do_not_matter(gemma_path):
    environ = {**os.environ, **{f"VARIABLE_{i}": "x" for i in range(10_000)}}
    done = process("validate", "--machine", "cpu-only-32gb", "--", "llama-server", "-m", gemma_path, "-c", "4096", env=environ)
    assert done.returncode == 0, done.stderr


def test_an_unknown_residency_variable_is_refused(gemma_path):
    environ = {**os.environ, "RESIDENCY_CONTEX__LENGTH": "3"}
    done = process("validate", "--machine", "cpu-only-32gb", "--", "llama-server", "-m", gemma_path, env=environ)
    assert done.returncode == 2
    assert "did you mean RESIDENCY_CONTEXT__LENGTH" in done.stderr


def test_a_reader_that_goes_away_is_no_approval(gemma_path):
    command = [sys.executable, "-m", "residency", "rules"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.stdout.close()
    assert "Traceback" not in started.stderr.read()
    started.wait(timeout=30)
    started.stderr.close()


def test_help_says_what_each_command_does():
    code, out, _ = run("--help")
    assert code == 0
    for word in ("validate", "plan", "census", "probe", "rules", "explain", "schema", "plugins", "exit codes"):
        assert word in out


def test_schema_is_a_json_schema():
    code, out, _ = run("schema")
    assert code == 0
    assert json.loads(out)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_offers_every_command(shell):
    code, out, _ = run("completion", shell)
    assert code == 0
    assert "validate" in out
    assert "census" in out


def test_several_launches_together(gemma_path, tmp_path):
    for name, context in (("a", 4096), ("b", 8192)):
        (tmp_path / f"{name}.toml").write_text(
            f'[engine]\nname = "llama.cpp"\n[model]\npath = "{gemma_path}"\n[context]\nlength = {context}\n[machine]\nprofile = "rtx-3090"\n'
        )
    code, out, _ = run("validate", "--together", "--format", "json", tmp_path / "a.toml", tmp_path / "b.toml")
    assert code == 0
    reports = json.loads(out)["reports"]
    need = [next(p["need_bytes"] for p in r["budget"]["pools"] if p["name"] == "CUDA0") for r in reports]
    assert len(need) == 3
    assert need[2] == need[0] + need[1]


def test_presets_check_each_model_and_the_worst_combination(gemma_path, tmp_path):
    presets = tmp_path / "models.ini"
    presets.write_text(f"[*]\nmodels-max = 2\nmodel = {gemma_path}\nn-gpu-layers = 99\n[one]\nc = 6000000\n[two]\nc = 6000000 # big\n[three]\nctx-size = 4096\n")
    code, out, _ = run("validate", "--machine", "rtx-4090", "--format", "json", presets)
    reports = json.loads(out)["reports"]
    assert [r["launch"] for r in reports[:3]] == ["one", "two", "three"]
    assert reports[3]["launch"] == "2 launches at once: one + two"
    assert code == 1
    presets.write_text(f"[a]\nmodel = {gemma_path}\ncttx-size = 4096\n")
    code, _, err = run("validate", "--machine", "rtx-4090", presets)
    assert code == 2
    assert f"{presets}:3:1: cttx-size is not an option; did you mean ctx-size?" in err


def test_fit_gives_the_largest_context_of_an_allowed_launch_and_ways_out_of_a_refused_one(gemma_path):
    arguments = ("--machine", "cpu-only-32gb", "--", "llama-server", "-m", str(gemma_path), "-c")
    code, out, _ = run("fit", *arguments, "4096")
    assert code == 0
    beyond = "more than the 32768 tokens the model was trained for"
    best = int(re.fullmatch(rf"-c (\d+)  largest that passes; {beyond}\n", out)[1])
    assert run("validate", *arguments, str(best))[0] == 0
    assert run("validate", *arguments, str(best + 256))[0] == 1
    assert run("fit", *arguments, "200000000")[:2] == (0, f"-c {best}  {beyond}\n")


def test_convert_writes_a_launch_file_that_judges_the_same(gemma_path, tmp_path):
    argv = ["llama-server", "-m", str(gemma_path), "-c", "8192", "-np", "2", "-ctk", "q8_0", "-ot", r"blk\.1\..*=CPU", "--swa-full", "--cache-ram", "100", "-ts", "3,1"]
    code, out, _ = run("convert", "--", *argv)
    assert code == 0
    path = tmp_path / "launch.toml"
    path.write_text(out)
    needs = []
    for source in ([str(path)], ["--", *argv]):
        _, report, _ = run("plan", "--format", "json", "--machine", "2x-h200", *source)
        needs.append([p["need_bytes"] for p in json.loads(report)["budget"]["pools"]])
    assert needs[0] == needs[1]


def test_convert_writes_only_what_was_asked_for():
    import tomli

    argv = ["llama-server", "-m", 'a "b"\x7f\\c.gguf', "-ot", "exps=CPU,x=CUDA0", "-ts", "3,1", "--swa-full", "--cache-ram", "100"]
    assert tomli.loads(run("convert", "--engine", "llama.cpp@b6123", "--", *argv)[1]) == {
        "engine": {"name": "llama.cpp", "version": "b6123", "options": {"cache-ram": 100}},
        "model": {"path": 'a "b"\x7f\\c.gguf'},
        "context": {"full_window": True},
        "layers": {"ratio": [3.0, 1.0], "overrides": [{"pattern": "exps", "device": "CPU"}, {"pattern": "x", "device": "CUDA0"}]},
    }


def test_convert_keeps_a_share_a_share():
    import tomli

    from residency.api import read_launch
    from residency.launch.convert import to_toml
    from residency.plugins import load_plugins

    source = {"engine": {"name": "llama.cpp"}, "model": {"path": "m.gguf"}, "memory": {"reserve": "5%"}}
    launch, _ = read_launch(source, engine=None, environ={}, plugins=load_plugins())
    assert tomli.loads(to_toml(launch)) == source


def test_unreadable_input_is_a_json_document_too(tmp_path):
    code, out, err = run("validate", "--format", "json", "--machine", "rtx-3090", "--", "llama-server", "-m", tmp_path / "x.gguf")
    document = json.loads(out)
    assert (code, document["schema"], document["exit_code"]) == (2, "residency.error/1", 2)
    assert document["problems"][0]["where"]["argv_index"] == 1
    assert "no such file" in err


def test_a_model_given_as_a_launch_is_told_how(gemma_path):
    code, _, err = run("validate", gemma_path)
    assert code == 2
    assert f"is a model file, not a text file; a model is judged as part of a launch: residency validate -- llama-server -m {gemma_path}" in err


def test_a_misspelt_program_is_recognised():
    assert run("validate", "--", "llama-servr", "-m", "x")[2] == 'error: "llama-servr" is not a program of an engine residency knows; did you mean llama-server?\n'


def test_thousands_of_problems_are_counted_not_printed(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("".join(f"[nothing{i}]\n" for i in range(3000)))
    code, _, err = run("validate", path)
    assert code == 2
    assert err.count("error:") <= 51


def test_closed_streams_leave_the_exit_code_alone(gemma_path):
    command = f"exec {sys.executable} -m residency validate --machine cpu-only-32gb -- llama-server -m {gemma_path} -c"
    for streams in (">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        for context, code in (("4096", 0), ("200000000", 1), ("x", 2)):
            assert subprocess.run(["/bin/sh", "-c", f"{command} {context} {streams}"], timeout=60, check=False, capture_output=True).returncode == code


def test_an_optimising_interpreter_keeps_the_explanations():
    done = process("rules", env={**os.environ, "PYTHONOPTIMIZE": "2"})
    assert "memory-budget/pools" in done.stdout
    assert "Every pool holds what the launch puts into it." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [({"machine": 5}, "machine"), ({"machine": []}, "machine"), ({"policy": 5}, "policy"), ({"engine": 5}, "engine"), ({"environ": ["a"]}, "environment"), ({"overrides": "a=1"}, "overrides")],
)
def test_misuse_is_a_type_error_that_says_what_is_wanted(arguments, kind, gemma_path):
    import residency

    with pytest.raises(TypeError, match=kind):
        residency.validate(["llama-server", "-m", str(gemma_path)], **{"environ": {}, "machine": "rtx-3090", **arguments})
    with pytest.raises(TypeError, match="a source is"):
        residency.validate(None)


def test_long_names_do_not_flood_the_terminal(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {**LLAMA, "general.name": "x" * 300_000}, TENSORS)
    _, out, _ = run("validate", "--machine", "cpu-only-32gb", "--", "llama-server", "-m", path, "-c", "512")
    assert max(len(line) for line in out.splitlines()) < 240


def test_a_plugin_that_leaves_a_thread_behind_does_not_hold_the_verdict(tmp_path):
    body = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n" + RULE.format(id="a/b", answer='approve("fine")')
    distribution(tmp_path, "left-behind", "left", body)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = process("rules", env=environ)
    assert "a/b" in done.stdout
    assert done.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")  # noqa: PTH110
def test_output_that_cannot_be_written_is_no_verdict():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "residency", "explain", "memory-budget/pools"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == "residency: the output could not be written: no space left, so no verdict\n"


def test_a_working_directory_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f'cd "{gone}" && rmdir "{gone}" && exec "{sys.executable}" -m residency validate --machine cpu-only-32gb -- llama-server -m x.gguf'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (2, "error: argument 1 (-m): x.gguf: no such file\n")


def test_devices_that_are_not_there_are_one_refusal(gemma_path):
    names = ",".join(["CUDA0", "CUDA0", *(f"CUDA{n}" for n in range(2, 2000))])
    code, out, _ = run("validate", "--machine", "2x-rtx-3090", "--", "llama-server", "-m", gemma_path, "-c", "512", "--device", names)
    flat = " ".join(out.split())
    assert code == 1
    assert "There are no devices CUDA2, CUDA3, CUDA4, CUDA5, CUDA6 and 1993 more on 2 x RTX 3090 24 GB; there is: CUDA0, CUDA1." in flat
    assert "Named twice: the device CUDA0." in flat
    assert len(out) < 5000


def test_many_unknown_keys_are_told_quickly(tmp_path):
    path = tmp_path / "many.toml"
    path.write_text('[engine]\nname = "llama.cpp"\n' + "".join(f"k{n} = 1\n" for n in range(20_000)))
    started = time.perf_counter()
    code, _, err = run("validate", path)
    assert code == 2
    assert err.count("error: ") <= 60
    assert time.perf_counter() - started < 5


def test_ways_out_that_two_rules_share_are_shown_once(gemma_path):
    machine = {"name": "box", "host_pool": "unified", "pools": [{"name": "unified", "total_bytes": 1 << 30, "free_bytes": 850 << 20}],
               "devices": [{"name": "Metal", "kind": "metal", "pool": "unified", "integrated": True}]}  # fmt: skip
    report = validate(["llama-server", "-m", str(gemma_path), "-c", "65536", "-ngl", "99", "-fit", "off"], machine=machine)
    text = plain(render(report))
    assert "x memory-budget/pools" in text
    assert "x unified-memory/free-versus-total" in text
    assert text.count("  try      the same as under memory-budget/pools") == 1


def test_input_errors_in_every_format_for_machines(tmp_path):
    path = tmp_path / "a,b.toml"
    path.write_text('[engine]\nname = "llama.cpp"\n[model]\npath = "x.gguf"\n[context]\nlenght = 5\n')
    documents = {form: run("validate", "--format", form, path)[:2] for form in ("json", "sarif", "github", "junit")}
    assert {code for code, _ in documents.values()} == {2}
    problem = json.loads(documents["json"][1])["problems"][0]
    assert (problem["where"]["line"], problem["hint"]) == (6, "did you mean context.length?")
    sarif = json.loads(documents["sarif"][1])["runs"][0]
    assert sarif["invocations"] == [{"executionSuccessful": False, "exitCode": 2}]
    assert sarif["results"][0]["locations"][0]["physicalLocation"]["region"] == {"startLine": 6, "startColumn": 1}
    assert documents["github"][1].startswith(f"::error file={str(path).replace(',', '%2C')},line=6,col=1,title=residency/input::")
    assert '<testcase classname="residency" name="residency/input"><error>' in documents["junit"][1]


@pytest.mark.parametrize(("change", "said"), [
    ("engine.options.nosuch=1", "error: --set: engine.options.nosuch: no such option of this engine\n"),
    ("engine.options.fit=maybe", "error: --set: engine.options.fit: expects one of on, off\n"),
])  # fmt: skip
def test_options_set_beside_a_command_line_are_checked(gemma_path, change, said):
    arguments = ("--machine", "cpu-only-32gb", "--set", change, "--", "llama-server", "-m", gemma_path, "-c", "512")
    assert run("validate", *arguments) == (2, "", said)


def test_a_model_the_engine_would_fetch_is_no_verdict():
    code, out, _ = run("validate", "--machine", "cpu-only-32gb", "--", "llama-server", "-hf", "ggml-org/gemma-3-270m-GGUF")
    assert code == 3
    assert "--hf-repo downloads one when the engine starts: fetch it first and give its path." in " ".join(out.split())


def test_what_is_hidden_from_the_engine_holds_nothing(gemma_path, monkeypatch):
    arguments = ("plan", "--format", "json", "--machine", "2x-rtx-3090", "--", "llama-server", "-m", gemma_path, "-c", "512", "-ngl", "99")

    def filled(value):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        pools = json.loads(run(*arguments)[1])["budget"]["pools"]
        return [p["name"] for p in pools if any(a["device"] for a in p["allocations"])]

    assert filled("0,1") == ["CUDA0", "CUDA1"]
    assert filled("1") == ["CUDA1"]
    assert filled("") == []


def test_nothing_to_fit_where_nothing_starts():
    assert run("fit", "--machine", "2x-rtx-3090", "--", "llama-server", "--version") == (0, "starts no engine, only prints: nothing to change\n", "")


def test_each_container_has_its_own_limit_and_all_share_the_machine(tmp_path, gemma_path):
    service = "  {0}:\n    image: ghcr.io/ggml-org/llama.cpp:server\n    command: -m {1} -c {2}\n    volumes: ['{3}:{3}']\n    mem_limit: {4}\n"
    path = tmp_path / "compose.yaml"

    def judged(small, big):
        texts = [service.format(name, gemma_path, context, Path(gemma_path).parent, limit) for name, context, limit in (small, big)]
        path.write_text("services:\n" + "".join(texts))
        return run("validate", "--machine", "cpu-only-32gb", path)

    code, out, _ = judged(("small", 4096, "1g"), ("big", 2_000_000, "20g"))
    assert (code, "2 launches at once: small + big" in out) == (0, True)
    assert judged(("small", 2_000_000, "1g"), ("big", 4096, "20g"))[0] == 1  # over its own limit
    assert judged(("small", 3_500_000, "20g"), ("big", 4_500_000, "20g"))[0] == 1  # each fits, both do not
    assert [line.split()[0] for line in run("validate", "--machine", "cpu-only-32gb", path)[1].splitlines() if "Gemma" in line] == ["ALLOW", "ALLOW"]


@pytest.mark.parametrize("command", ["validate", "plan", "fit", "run"])
@pytest.mark.parametrize("option", ["--machine", "--engine", "--policy"])
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_option_judges_nothing(gemma_path, command, option, value):
    code, out, err = run(command, option, value, "--", "llama-server", "-m", gemma_path, "-c", "512")
    assert (code, out) == (2, "")
    assert err.endswith(f"residency {command}: argument {option}: the value is empty\n")


@pytest.mark.parametrize("arguments", [("rules", "--policy="), ("plugins", "--policy", ""), ("convert", "--engine", "", "launch.toml")])
def test_an_empty_option_is_refused_by_every_command(arguments):
    code, _, err = run(*arguments)
    assert (code, err.splitlines()[-1].partition(": ")[2]) == (2, f"argument {arguments[1].rstrip('=')}: the value is empty")


@pytest.mark.parametrize("flag", ["--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"])
def test_files_of_every_adapter_flag_are_read_and_counted(gemma_path, tmp_path, flag):
    adapter = tmp_path / "adapter.gguf"
    write_gguf(adapter, {"general.type": "adapter"}, [("direction.1", "F32", (640,)), ("direction.2", "F32", (640,))])
    scale = ":0.5" if flag.endswith("scaled") else ""
    arguments = ("--machine", "rtx-4090", "--format", "json", "--", "llama-server", "-m", gemma_path, "-c", "512", flag)
    code, out, _ = run("plan", *arguments, f"{adapter}{scale}")
    rows = [a for pool in json.loads(out)["budget"]["pools"] for a in pool["allocations"] if a["name"] == "adapter weights"]
    assert (code, [(a["device"], a["certain_bytes"], a["at_most_bytes"]) for a in rows]) == (0, [("CUDA0", 2 * 640 * 4, 2 * 640 * 4)])
    code, _, err = run("plan", *arguments, f"{tmp_path}/none.gguf{scale}")
    assert (code, err) == (2, f"error: argument 5 ({flag}): {tmp_path}/none.gguf: no such file\n")


def test_long_paths_and_numbers_of_presets_are_shortened(tmp_path):
    presets = tmp_path / "models.ini"
    presets.write_text(f"[a]\nmodel = {'x' * 3000}\n[b]\nmodel = m.gguf\nc = {'9' * 3000}\n")
    code, _, err = run("validate", "--machine", "rtx-4090", presets)
    assert code == 2
    assert f"{'9' * 57}...: the engine's parser takes whole numbers of 32 bits only" in err
    assert max(map(len, err.splitlines())) < 500
    presets.write_text(f"[a]\nmodel = {'x' * 3000}\n")
    code, _, err = run("validate", "--machine", "rtx-4090", presets)
    assert (code, f"{'x' * 297}...: cannot be opened" in err) == (2, True)
    assert max(map(len, err.splitlines())) < 500


def test_a_converted_file_names_its_model_from_wherever_it_is_saved(tmp_path):
    text = process("convert", Path(__file__).parent.parent / "configs" / "launches" / "llama-server-llama-3.1-8b.toml").stdout
    saved = tmp_path / "elsewhere.toml"
    saved.write_text(text)
    assert process("validate", "--machine", "rtx-3090", str(saved)).returncode == 0
