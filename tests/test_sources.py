"""Files that hold engine commands: every command is found, with positions, limits and what runs together."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from residency.api import Inputs, prepare_all
from residency.cli import main
from residency.errors import InputError
from residency.sources import reader_for

CONFIGS = Path(__file__).parent.parent / "configs"


def known(program: str) -> bool:
    return program in ("llama-server", "llama-cli")


def read(path, **environ):
    return reader_for(str(path))(str(path), known=known, environ=environ)


def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(a) for a in arguments])
    return code, out.getvalue(), err.getvalue()


def test_llama_swap_macros_comments_env_and_groups():
    found = read(CONFIGS / "services" / "llama-swap.yaml")
    chat, embed = found.commands
    assert chat.argv == ("llama-server", "--port", "5800", "--no-webui", "-m", "/models/Qwen3-30B-A3B-Q4_K_M.gguf", "-c", "32768", "-ngl", "99", "--n-cpu-moe", "12")
    assert (chat.places[6].line, chat.places[6].column) == (14, 7)
    assert embed.environ == {"CUDA_VISIBLE_DEVICES": "0"}
    assert embed.environ_places["CUDA_VISIBLE_DEVICES"].line == 19
    assert found.groups == (("embed", "qwen-30b"),)


def test_compose_image_variables_mounts_limit_and_devices():
    found = read(CONFIGS / "services" / "compose.yaml")
    (chat,) = found.commands
    assert chat.argv == ("llama-server", "-m", "/models/Qwen3-30B-A3B-Q4_K_M.gguf", "-c", "32768", "--host", "0.0.0.0", "--port", "8080")
    assert (chat.host_limit_bytes, chat.device_count) == (48 * 2**30, 1)
    assert chat.host_limit_where.line == 16
    assert chat.mounts == (("/models", "/srv/models"),)
    assert chat.environ == {"LLAMA_ARG_N_GPU_LAYERS": "99"}
    assert read(CONFIGS / "services" / "compose.yaml", CONTEXT="8192").commands[0].argv[4] == "8192"


def test_kubernetes_args_env_limits_and_host_paths():
    found = read(CONFIGS / "services" / "kubernetes.yaml")
    (chat,) = found.commands
    assert chat.name == "chat/server"
    assert chat.argv == ("llama-server", "-m", "/models/Qwen3-30B-A3B-Q4_K_M.gguf", "-c", "32768", "--cache-ram", "4096")
    assert (chat.host_limit_bytes, chat.device_count) == (16 * 2**30, 1)
    assert chat.mounts == (("/models", "/srv/models"),)
    assert (chat.places[3].line, chat.places[3].column) == (12, 36)


@pytest.mark.parametrize("name", ["llama-server.service", "llama-server-pre.service"])
def test_systemd_units(name):
    found = read(CONFIGS / "hooks" / name)
    (server,) = found.commands
    assert server.argv[:3] == ("/usr/local/bin/llama-server", "-m", "/srv/models/Qwen3-30B-A3B-Q4_K_M.gguf")
    assert server.host_limit_bytes == 48 * 2**30
    assert server.places[3].flag == "-c"


def test_a_fault_is_found_with_line_and_column(gemma_path):
    path = CONFIGS / "services" / "faulty-llama-swap.yaml"
    code, out, err = run("validate", "--machine", "rtx-3090", path)
    assert (code, out) == (2, "")
    assert err == f"error: {path}:7:7: gemma: llama-server has no flag --ctx-sise; did you mean --ctx-size?\n"


@pytest.fixture
def models(tmp_path, gemma_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "gemma.gguf").symlink_to(gemma_path)
    return tmp_path


def test_the_memory_limit_of_a_pod_is_the_host_pool(models):
    pod = models / "pod.yaml"
    pod.write_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: c\n    command: [llama-server]\n"
        "    args: [-m, /m/gemma.gguf, -c, '4096', --cache-ram, '40960']\n    resources: {limits: {memory: 16Gi}}\n"
        f"    volumeMounts: [{{name: v, mountPath: /m}}]\n  volumes: [{{name: v, hostPath: {{path: {models}/models}}}}]\n"
    )
    code, out, _ = run("validate", "--machine", "2x-h200", "--format", "json", pod)
    report = json.loads(out)
    assert code == 1
    veto = next(f for f in report["findings"] if f["outcome"] == "veto")
    assert veto["message"].startswith("The prompt cache may grow to 40960 MiB and host has 16384 MiB in all")
    assert veto["where"]["line"] == 8
    assert report["machine"]["devices"] == [], "a pod with limits and no nvidia.com/gpu sees no card"


def test_a_group_is_judged_together(models):
    swap = models / "swap.yaml"
    command = f"llama-server -m {models}/models/gemma.gguf -c"
    swap.write_text(f"models:\n  a: {{cmd: '{command} 5000000'}}\n  b: {{cmd: '{command} 5000000'}}\ngroups:\n  g: {{swap: false, members: [a, b]}}\n")
    code, out, _ = run("validate", "--machine", "rtx-3090", "--format", "json", swap)
    reports = json.loads(out)["reports"]
    assert [r["verdict"] for r in reports] == ["allow", "allow", "veto"]
    assert code == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models:\n  a: {cmd: 'llama-server\n", "3:1: not valid YAML: found unexpected end of stream"),
        ("a: [1, 2", "1:9: not valid YAML"),
        ("a: &x [*x]\n", "too many nodes|recursive|not valid YAML"),
        ("[]", "neither a llama-swap, compose nor Kubernetes file"),
        ("", "neither a llama-swap, compose nor Kubernetes file"),
        ("services: {db: {image: postgres}}", "no command of a known engine"),
        ("models:\n  a: {cmd: 'vroom -m x'}\n", "2:12: the model a is started by 'vroom', which is not a program"),
        ("models:\n  a: {cmd: 'llama-server -m ${nowhere}'}\n", "the macro \\$\\{nowhere\\} is not defined"),
        ("models:\n  a: {cmd: \"llama-server -m 'x\"}\n", "the command cannot be split: no closing quotation"),
        ("models:\n  a: {ttl: 5}\n", "the model a has no cmd"),
        ("{" * 5000, "nested too deeply|not valid YAML"),
        ("kind: Pod\nspec: {containers: [{args: 7, image: 'llama.cpp:server', resources: {limits: {memory: lots}}}]}", "lots is not a memory limit"),
    ],
)
def test_broken_files_are_exit_2_with_a_sentence(text, said, tmp_path):
    import re

    path = tmp_path / "x.yaml"
    path.write_text(text)
    code, out, err = run("validate", "--machine", "rtx-3090", path)
    assert (code, out) == (2, "")
    assert re.search(said, err), err
    assert "Traceback" not in err


def test_aliases_that_double_at_every_level_do_not_hang(tmp_path):
    path = tmp_path / "bomb.yaml"
    path.write_text("a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)))
    with pytest.raises(InputError, match="too many nodes"):
        prepare_all(str(path), Inputs(machine="rtx-3090"))
