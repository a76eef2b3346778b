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


@pytest.fixture
def judge(tmp_path, gemma_path):
    """Write a file, with GEMMA and HERE put in, and return exit code, report and problems of judging it."""

    def judged(name, text):
        path = tmp_path / name
        path.write_text(text.replace("GEMMA", gemma_path).replace("HERE", str(tmp_path)))
        code, out, err = run("validate", "--machine", "rtx-3090", path)
        assert "Traceback" not in err
        return code, out, err.replace(str(tmp_path), "HERE")

    return judged


HUGE = "200000000"  # tokens of context: far over 24 GiB with this model, and 512 far below
POD = "kind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: c\n    command: [llama-server]\n    args: [-m, GEMMA]\n"


def test_systemd_environment_files_win_over_environment(judge, tmp_path):
    unit = "[Service]\nEnvironmentFile=HERE/e\nEnvironment=LLAMA_ARG_CTX_SIZE=512\nExecStart=/usr/bin/llama-server -m GEMMA\n"
    (tmp_path / "e").write_text(f"# comment\n\n; another\n LLAMA_ARG_CTX_SIZE='{HUGE}'  \n")
    code, out, _ = judge("a.service", unit)
    assert code == 1
    assert f"{tmp_path}/e:4:2" in out
    (tmp_path / "e").write_text("LLAMA_ARG_CTX_SIZE=512\n")
    assert judge("a.service", unit.replace("=512", f"={HUGE}"))[0] == 0
    (tmp_path / "e").write_text('LLAMA_ARG_CTX_SIZE="512\n')
    assert judge("a.service", unit)[::2] == (2, "error: HERE/a.service:2:17: EnvironmentFile HERE/e: LLAMA_ARG_CTX_SIZE: the quote is not closed on its line\n")


@pytest.mark.parametrize(
    ("entry", "code", "said"),
    [
        ("EnvironmentFile=HERE/nosuch", 2, "a.service:2:17: EnvironmentFile HERE/nosuch: no such file"),
        ("EnvironmentFile=-HERE/nosuch", 0, ""),
        ("EnvironmentFile=HERE/fifo", 2, "a.service:2:17: EnvironmentFile HERE/fifo: is a pipe, not a text file"),
        ("EnvironmentFile=/dev/zero", 2, "a.service:2:17: EnvironmentFile /dev/zero: is a device, not a text file"),
        ("EnvironmentFile=-etc/a.env", 2, "a.service:2:17: EnvironmentFile etc/a.env cannot be followed"),
        ("EnvironmentFile=-/etc/%H.env", 2, "a.service:2:17: %H is known only where the unit runs; write its value"),
        ("PassEnvironment=LANG LLAMA_ARG_CTX_SIZE", 2, "a.service:2:17: PassEnvironment takes LLAMA_ARG_CTX_SIZE from the service manager"),
        (f"Environment=LLAMA_ARG_CTX_SIZE={HUGE}\nUnsetEnvironment=LLAMA_ARG_CTX_SIZE", 0, ""),
        ("MemoryMax=50%", 0, ""),
        ("MemoryMax=101%", 2, "a.service:2:11: '101%' is not a memory limit"),
        ("MemoryMax=1M", 1, ""),
        ("MemoryMax=1M\nMemoryMax=infinity", 0, ""),
        ("MemoryMax=" + "9" * 5000, 2, "is not a memory limit"),
    ],
)
def test_systemd_settings(entry, code, said, judge, tmp_path):
    import os

    os.mkfifo(tmp_path / "fifo")
    context = "" if "CTX" in entry else "-c 512 "
    found = judge("a.service", f"[Service]\n{entry}\nExecStart=/usr/bin/llama-server -m GEMMA {context}-np 1\n")
    assert found[0] == code, found
    assert said in found[2]


def unit_argv(tmp_path, start, environment="Environment=CTX=512 'ARGS=-c 4096 --alias \"a b\"'"):
    path = tmp_path / "x.service"
    path.write_text(f"[Service]\n{environment}\nExecStart={start}\n")
    return read(path).commands[0].argv


@pytest.mark.parametrize(
    ("start", "argv"),
    [
        ("llama-server $ARGS", ("llama-server", "-c", "4096", "--alias", "a b")),
        ("llama-server -a x${ARGS}", ("llama-server", "-a", 'x-c 4096 --alias "a b"')),
        ("llama-server -c ${CTX} -a $$CTX", ("llama-server", "-c", "512", "-a", "$CTX")),
        (":llama-server -a ${CTX}", ("llama-server", "-a", "${CTX}")),
        ("-@/bin/llama-server chat -c 1", ("/bin/llama-server", "-c", "1")),
        ("!!/bin/llama-server -c 1", ("/bin/llama-server", "-c", "1")),
        ("+-/bin/sh -ec 'A=1 exec llama-server -c $CTX'", ("llama-server", "-c", "512")),
        ("/usr/bin/env A=1 bash -o pipefail -c 'llama-server -a \"x; y\"'", ("llama-server", "-a", "x; y")),
    ],
)
def test_systemd_words(start, argv, tmp_path):
    assert unit_argv(tmp_path, start) == argv


@pytest.mark.parametrize("comment", [" # c", "; c", "# it's \\"])
def test_a_comment_does_not_end_a_continued_line(comment, tmp_path):
    assert unit_argv(tmp_path, f"llama-server \\\n  -m x \\\n{comment}\n -c 1\nUser=me") == ("llama-server", "-m", "x", "-c", "1")


def test_compose_fills_in_from_its_env_file_under_the_callers_environment(tmp_path):
    (tmp_path / ".env").write_text("CTX=4096\n")
    (tmp_path / "c.yaml").write_text("services:\n  s:\n    command: llama-server -c ${CTX:-512}\n")
    assert read(tmp_path / "c.yaml").commands[0].argv == ("llama-server", "-c", "4096")
    assert read(tmp_path / "c.yaml", CTX="8").commands[0].argv == ("llama-server", "-c", "8")


def test_an_undefined_variable_is_told_and_one_of_another_program_is_not(tmp_path):
    with pytest.raises(InputError, match=r"x.service:3:\d+: the variable NONE is not defined in this unit or its environment files"):
        unit_argv(tmp_path, "llama-server $NONE")
    assert unit_argv(tmp_path, "/bin/echo $NONE\nExecStart=llama-server") == ("llama-server",)


@pytest.mark.parametrize("text", ["cd /x && llama-server", "llama-server | tee log", "/bin/llama-server -m $(cat x)", "a; llama-server", "llama-server -c $UNSEEN", "llama-server &"])
def test_a_shell_text_that_is_more_than_a_command_is_told(text, judge):
    said = "is started by a shell's text that is more than one command of plain words"
    code, _, err = judge("a.service", f"[Service]\nExecStart=/bin/sh -c '{text}'\nExecStart=llama-server -m GEMMA -c 512\n")
    assert code == 2
    assert "HERE/a.service:2:" in err
    assert said in err
    for name, yaml in (
        ("k.yaml", POD.replace("[llama-server]", "[sh, -c]").replace("[-m, GEMMA]", f"['{text}']")),
        ("c.yaml", f"services:\n  s:\n    command: [sh, -c, '{text.replace('$', '$$')}']\n"),
        ("l.yaml", f'models:\n  m:\n    cmd: sh -c "{text}"\n'),
    ):
        code, _, err = judge(name, yaml)
        assert (code, said in err) == (2, True), (name, err)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("k.yaml", POD.replace("[llama-server]", "[sh, -c]").replace("[-m, GEMMA]", "['exec llama-server -m GEMMA -c COUNT']")),
        ("c.yaml", "services:\n  s:\n    command: sh -c 'llama-server -m GEMMA -c COUNT'\n"),
        ("l.yaml", 'models:\n  m:\n    cmd: bash -lc "llama-server -m GEMMA -c COUNT"\n'),
        ("i.yaml", POD.replace("containers", "initContainers").replace("GEMMA", "GEMMA, -c, 'COUNT'")),
        ("f.yaml", "services:\n  s:\n    image: ghcr.io/ggml-org/llama.cpp:server\n    command: -m GEMMA\n    env_file: ./e\n"),
        ("g.yaml", "services:\n  s:\n    command: llama-server -m GEMMA\n    env_file: [first, {path: HERE/e}, {path: nosuch, required: false}]\n"),
        ("m.yaml", "x: &x {environment: {LLAMA_ARG_CTX_SIZE: COUNT}}\nservices:\n  s:\n    <<: *x\n    command: llama-server -m GEMMA\n"),
        ("n.yaml", POD + "    envFrom: [{configMapRef: {name: x}}]\n---\nkind: ConfigMap\nmetadata: {name: x}\ndata: {LLAMA_ARG_CTX_SIZE: 'COUNT'}\n"),
    ],
)
def test_what_a_shell_an_init_container_or_a_file_says_is_judged(name, text, judge, tmp_path):
    (tmp_path / "first").write_text("LLAMA_ARG_CTX_SIZE=777\n")
    for count, code in ((HUGE, 1), ("512", 0)):
        (tmp_path / "e").write_text(f'export LLAMA_ARG_CTX_SIZE="{count}" # tokens\n')
        found = judge(name, text.replace("COUNT", count))
        assert found[0] == code, found


def test_compose_environment_wins_over_env_file(judge, tmp_path):
    (tmp_path / "e").write_text(f"LLAMA_ARG_CTX_SIZE={HUGE}\n")
    assert judge("c.yaml", "services:\n  s:\n    command: llama-server -m GEMMA\n    env_file: e\n    environment: {LLAMA_ARG_CTX_SIZE: 512}\n")[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services:\n  s:\n    command: llama-server -m GEMMA\n    env_file: nosuch\n", "4:15: env_file HERE/nosuch: no such file"),
        (POD + "    envFrom: [{configMapRef: {name: big}}]\n", "8:15: envFrom takes variables from configMap big, which cannot be read here"),
        (POD + "    envFrom: [{secretRef: {name: s}}]\n", "8:15: envFrom takes variables from secret s, which cannot be read here"),
        (
            POD + "    env: [{name: LLAMA_ARG_CTX_SIZE, valueFrom: {configMapKeyRef: {name: x, key: y}}}]\n",
            "8:11: LLAMA_ARG_CTX_SIZE comes from a configMapKey, which cannot be read here; write its value under env",
        ),
        (POD + "    resources: {limits: {nvidia.com/gpu: -3}}\n", "8:42: -3 is not a number of devices"),
        (POD + "    resources: {limits: {nvidia.com/gpu: some}}\n", "8:42: some is not a number of devices"),
        (POD + f"    resources: {{limits: {{memory: {'9' * 400}}}}}\n", "is not a memory limit"),
        ("models:\n  a:\n    cmd: llama-server -m GEMMA\n    cmd: llama-server -m x\n", "4:5: the key cmd stands twice; the first is in line 3"),
        ("macros: {a: '${b}', b: '${a}'}\nmodels:\n  m: {cmd: 'llama-server ${a}'}\n", "leads back to itself"),
        ("models:\n  a: {cmd: llama-server}\ngroups:\n  g: {members: [a, a, nosuch]}\n", "4:23: the group g has the member nosuch, which is not a model of this file"),
        ("models:\n  a: {cmd: llama-server}\ngroups:\n  g: {members: [5, [a]]}\n", "4:20: a member of the group g must be a model's name"),
    ],
)
def test_what_cannot_be_seen_or_understood_is_told_with_its_place(text, said, judge):
    code, out, err = judge("x.yaml", text)
    assert (code, out) == (2, "")
    assert said in err, err


def test_a_secret_that_no_engine_reads_does_not_matter(judge):
    assert judge("k.yaml", POD.replace("GEMMA", "GEMMA, -c, '512'") + "    env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: s, key: t}}}]\n")[0] == 0


def test_macros_that_multiply_are_refused_at_once(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("macros:\n" + "".join(f"  m{i}: '{f'${{m{i + 1}}}' * 10}'\n" for i in range(20)) + "  m20: x\nmodels:\n  a:\n    cmd: llama-server ${m0}\n")
    with pytest.raises(InputError, match=r"x.yaml:25:10: with its macros the command is longer than 64 KiB"):
        read(path)


def test_a_member_named_twice_counts_once(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("models:\n  a: {cmd: llama-server}\n  b: {cmd: llama-server}\ngroups:\n  g: {swap: false, members: [a, a, b]}\n")
    assert read(path).groups == (("a", "b"),)


def test_a_preset_section_that_stands_twice_is_told(tmp_path):
    path = tmp_path / "x.ini"
    path.write_text("[m]\nmodel = a\n[n]\nmodel = b\n [m] ; again\nc = 5\n")
    with pytest.raises(InputError, match=r"x.ini:5:2: the section \[m\] stands twice; the engine forgets the one in line 1"):
        read(path)


@pytest.mark.parametrize(
    ("image", "count"),
    [
        ("ghcr.io/ggml-org/llama.cpp:server", 0),
        ("ghcr.io/ggml-org/llama.cpp:full-b6123", 0),
        ("ghcr.io/ggml-org/llama.cpp:light", 0),
        ("ghcr.io/ggml-org/llama.cpp:server-cuda", 2),
        ("ghcr.io/ggml-org/llama.cpp:server-vulkan-b6123", 2),
        ("example.org/llama-server", 2),
    ],
)
def test_an_image_without_a_back_end_sees_no_device(image, count, tmp_path):
    compose = "services:\n  s:\n    image: IMAGE\n    command: -c 512\n    deploy: {resources: {reservations: {devices: [{count: 2}]}}}\n"
    pod = "kind: Pod\nspec:\n  containers:\n  - image: IMAGE\n    args: [-c, '512']\n    resources: {limits: {nvidia.com/gpu: 2}}\n"
    for name, text in (("c.yaml", compose), ("k.yaml", pod)):
        (tmp_path / name).write_text(text.replace("IMAGE", image))
        (command,) = read(tmp_path / name).commands
        assert command.device_count == count, name


def test_compose_fills_in_every_setting_that_is_read(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "services:\n  s:\n    image: ${IMAGE:?which}\n    command: -c ${CTX?} ${MORE:+-a $MORE} ${UNSET+-b} ${A:-${CTX}}\n    mem_limit: ${MEMORY:-3}g\n"
        "    volumes: [{type: bind, source: '${FROM}', target: '${TO}'}]\n    deploy: {resources: {reservations: {devices: [{count: '${CARDS}'}]}}}\n"
    )
    (command,) = read(path, IMAGE="x/llama.cpp:server-cuda", CTX="512", MORE="m", FROM="/srv", TO="/models", CARDS="2").commands
    assert command.argv == ("llama-server", "-c", "512", "-a", "m", "512")
    assert (command.host_limit_bytes, command.mounts, command.device_count) == (3 * 2**30, (("/models", "/srv"),), 2)


def test_a_required_variable_that_is_not_set_is_told(judge):
    code, _, err = judge("c.yaml", "services:\n  s:\n    command: llama-server -m GEMMA -c ${NO_SUCH_CTX:?say how many}\n")
    assert code == 2
    assert "c.yaml:3:14: the variable NO_SUCH_CTX is required and not set: say how many" in err
    code, _, err = judge("c.yaml", "services:\n  s:\n    command: llama-server -m GEMMA -c 512\n  db:\n    image: postgres\n    environment: {P: '${NO_SUCH_CTX:?}'}\n")
    assert code == 0, err


@pytest.mark.parametrize(
    ("written", "size"),
    [("1e9", 10**9), ("1E9", 10**9), ("12e-1", 2), ("1.5Gi", 3 * 2**29), ("1.5G", 1_500_000_000), ("2Ti", 2**41), ("8E", 8 * 10**18), ("1500m", 2), ("64k", 64000), ("123", 123)],
)
def test_kubernetes_quantities(written, size, tmp_path):
    (tmp_path / "k.yaml").write_text(POD + f"    resources: {{limits: {{memory: {written}}}}}\n")
    assert read(tmp_path / "k.yaml").commands[0].host_limit_bytes == size


@pytest.mark.parametrize("written", ["1e99", "16K", "16GB", "1ee3", "9E9E", "16E"])
def test_what_is_no_kubernetes_quantity_is_told(written, judge):
    code, _, err = judge("k.yaml", POD + f"    resources: {{limits: {{memory: {written}}}}}\n")
    assert (code, f"8:34: {written} is not a memory limit" in err) == (2, True), err


def test_a_variable_of_an_optional_file_that_is_absent_is_nothing(tmp_path):
    absent, there = tmp_path / "absent.env", tmp_path / "there.env"
    assert unit_argv(tmp_path, "llama-server -c 512 $MORE -a x${MORE}", f"EnvironmentFile=-{absent}") == ("llama-server", "-c", "512", "-a", "x")
    there.write_text("MORE='-np 1'\n")
    assert unit_argv(tmp_path, "llama-server $MORE $NONE", f"EnvironmentFile=-{there}\nEnvironmentFile=-{tmp_path}/*.none") == ("llama-server", "-np", "1")
    with pytest.raises(InputError, match="the variable NONE is not defined"):
        unit_argv(tmp_path, "llama-server $MORE $NONE", f"EnvironmentFile=-{there}")


def test_llama_swap_macros_of_the_environment(tmp_path):
    path = tmp_path / "l.yaml"
    path.write_text("macros: {base: 'llama-server -m ${env.MODELS}/x.gguf'}\nmodels:\n  a:\n    cmd: ${base} -c ${env.CTX}\n")
    assert read(path, MODELS="/srv", CTX="512").commands[0].argv == ("llama-server", "-m", "/srv/x.gguf", "-c", "512")
    (tmp_path / "e.yaml").write_text("models:\n  a: {cmd: llama-server}\n  b: {cmd: ''}\n")
    with pytest.raises(InputError, match="the model b has an empty cmd"):
        read(tmp_path / "e.yaml")
    (tmp_path / "v.yaml").write_text("models:\n  a:\n    cmd: llama-server\n    env: ['LLAMA_ARG_CTX_SIZE=${env.CTX}']\n")
    assert read(tmp_path / "v.yaml", CTX="512").commands[0].environ == {"LLAMA_ARG_CTX_SIZE": "512"}
    with pytest.raises(InputError, match=r"v.yaml:4:11: the macro \$\{env.CTX\} is not set in the environment"):
        read(tmp_path / "v.yaml")
    with pytest.raises(InputError, match=r"l.yaml:4:10: the macro \$\{env.CTX\} is not set in the environment"):
        read(path, MODELS="/srv")


def test_llama_swap_models_of_other_programs_are_passed_over(judge, tmp_path):
    others = "  b: {cmd: 'docker run --name llama-server image -c 1'}\n  v: {cmd: 'vroom -m x'}\n"
    groups = "groups:\n  g: {swap: false, members: [a, b, c]}\n"
    for count, code in ((HUGE, 1), ("512", 0)):
        own = f"  a: {{cmd: 'llama-server -m GEMMA -c {count}'}}\n  c: {{cmd: 'llama-server -m GEMMA -c 512'}}\n"
        found = judge("l.yaml", "models:\n" + own + others + groups)
        assert found[0] == code, found
    assert read(tmp_path / "l.yaml").groups == (("a", "c"),)
    code, _, err = judge("l.yaml", "models:\n" + others)
    assert code == 2
    assert "l.yaml:2:12: the model b is started by 'docker', which is not a program of an engine" in err


def test_variables_that_are_never_closed_do_not_hang(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("services:\n  s:\n    image: " + "${A:-" * 40000 + "\n    command: llama-server -c ${A:-5${B:-1}2}\n")
    assert read(path).commands[0].argv == ("llama-server", "-c", "512")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_drop_ins_are_merged_after_the_unit_in_the_order_of_their_names(tmp_path):
    unit = write(tmp_path / "x.service", "[Service]\nEnvironment=A=1 B=1\nExecStart=llama-server -c 1 -a ${A}${B}\nMemoryMax=8G\n")
    write(tmp_path / "x.service.d" / "20-b.conf", "[Service]\nEnvironment=B=3\nMemoryMax=2G\n")
    write(tmp_path / "x.service.d" / "10-a.conf", "[Service]\nEnvironment=B=2\nMemoryMax=4G\nExecStart=\nExecStart=llama-server -c 2 -a ${A}${B}\n")
    write(tmp_path / "x.service.d" / "30-c.txt", "[Service]\nEnvironment=B=9\n")
    (command,) = read(unit).commands
    assert command.argv == ("llama-server", "-c", "2", "-a", "13")
    assert command.host_limit_bytes == 2 * 2**30
    assert str(command.host_limit_where) == f"{tmp_path}/x.service.d/20-b.conf:3:11"
    assert str(command.places[1]) == f"{tmp_path}/x.service.d/10-a.conf:5:24"
    write(tmp_path / "x.service.d" / "40-d.conf", "[Service]\nEnvironment=\nEnvironment=A=5 B=\nMemoryMax=\n")
    (command,) = read(unit).commands
    assert (command.argv[-1], command.host_limit_bytes) == ("5", None)
    (tmp_path / "x.service.d" / "40-d.conf").unlink()
    (tmp_path / "x.service.d" / "40-d.conf").symlink_to("/dev/null")
    assert read(unit).commands[0].argv[-1] == "13", "a drop-in that is masked says nothing"


def test_a_drop_in_with_a_second_command_is_told(tmp_path):
    unit = write(tmp_path / "x.service", "[Service]\nExecStart=llama-server -c 1\n")
    extra = write(tmp_path / "x.service.d" / "a.conf", "[Service]\nExecStart=llama-server -c 2\n")
    with pytest.raises(InputError, match=r"x.service.d/a.conf:2:11: this adds a second command, which only Type=oneshot takes"):
        read(unit)
    extra.write_text("[Service]\nType=oneshot\nExecStart=llama-server -c 2\n")
    assert len(read(unit).commands) == 2


@pytest.mark.parametrize("folder", ["a-b@two.service.d", "a-b@.service.d", "a-.service.d", "service.d"])
def test_drop_ins_of_an_instance_its_template_its_prefix_and_every_service(folder, tmp_path):
    write(tmp_path / "a-b@.service", "[Service]\nExecStart=llama-server -c ${C} -a %i\n")
    write(tmp_path / folder / "x.conf", "[Service]\nEnvironment=C=7\n")
    (command,) = read(tmp_path / "a-b@two.service").commands
    assert (command.name, command.argv) == ("a-b@two.service", ("llama-server", "-c", "7", "-a", "two"))


def test_drop_ins_of_the_administrator_count_for_a_unit_of_the_system(tmp_path, monkeypatch):
    from residency.sources import systemd

    etc, usr = tmp_path / "etc", tmp_path / "usr"
    monkeypatch.setattr(systemd, "_SYSTEM", (str(etc), str(usr)))
    unit = write(usr / "x.service", "[Service]\nExecStart=llama-server -c 1 -m %h/m.gguf\n")
    write(usr / "x.service.d" / "o.conf", "[Service]\nExecStart=\nExecStart=llama-server -c 3\n")
    write(etc / "x.service.d" / "o.conf", "[Service]\nExecStart=\nExecStart=llama-server -c 2 -m %h/m.gguf\n")
    assert read(unit).commands[0].argv == ("llama-server", "-c", "2", "-m", "/root/m.gguf")


@pytest.mark.parametrize(
    ("written", "value"),
    [("%i", r"big-m\x2dx"), ("%I", "big/m-x"), ("%n", r"chat-gpu@big-m\x2dx.service"), ("%N", r"chat-gpu@big-m\x2dx"), ("%p", "chat-gpu"), ("%j", "gpu"), ("50%%", "50%"),
     ("%f", "/big/m-x"), ("%h/x", "/root/x"), ("%S", "/var/lib"), ("%q", "%q"), ("7%", "7%")],
)  # fmt: skip
def test_specifiers(written, value, tmp_path):
    write(tmp_path / "chat-gpu@.service", f'[Service]\nUser=llama\nEnvironment="V={written}"\nExecStart=llama-server -a {written} -b $V\n')
    (command,) = read(tmp_path / r"chat-gpu@big-m\x2dx.service").commands
    assert command.argv[2] == value
    assert command.environ == {"V": value}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("ExecStart=llama-server -m /m/%i.gguf", r"a@.service:2:27: %i is the name of an instance, and this is a template; judge a@INSTANCE.service in the same folder"),
        ("ExecStart=llama-server -m %h/m.gguf", r"a@.service:2:27: %h depends on the manager that runs the unit"),
        ("Environment=LLAMA_ARG_MODEL=%H\nExecStart=llama-server", r"a@.service:2:13: %H is known only where the unit runs; write its value"),
        ("Environment=M=%v\nExecStart=llama-server -m $M", r"a@.service:2:13: %v is known only where the unit runs; write its value"),
    ],
)
def test_specifiers_that_cannot_be_known_are_told(entry, said, tmp_path):
    with pytest.raises(InputError, match=said):
        read(write(tmp_path / "a@.service", f"[Service]\n{entry}\n"))


def test_specifiers_that_decide_nothing_do_not_matter(tmp_path):
    unit = write(tmp_path / "a@.service", "[Service]\nEnvironment=HOST=%H\nExecStart=/bin/echo %i\nExecStart=llama-server -c 1\n")
    assert read(unit).commands[0].argv == ("llama-server", "-c", "1")
    home = write(tmp_path / ".config" / "systemd" / "user" / "b.service", "[Service]\nExecStart=llama-server -m %h/m.gguf\n")
    assert read(home).commands[0].argv[2] == f"{tmp_path}/m.gguf"


def test_a_share_of_the_hosts_memory_is_that_of_the_machine(judge, tmp_path, gemma_path):
    unit = f"[Service]\nMemoryMax=25.5%\nExecStart=llama-server -m {gemma_path} -c 512\n"
    machine = {"name": "m", "pools": [{"name": "host", "total_bytes": 2**34}]}
    (case,) = prepare_all(str(write(tmp_path / "x.service", unit)), Inputs(machine=machine)).cases
    assert case.machine.host_pool.total_bytes == int(2**34 * 0.255)
    assert case.machine.host_pool.evidence == f"memory limit at {tmp_path}/x.service:2:11"
    with pytest.raises(InputError, match=r"x.service:2:11: x.service: the memory limit is a share of the host's memory, and the size of that is not known"):
        prepare_all(str(tmp_path / "x.service"), Inputs(machine={"name": "m", "pools": [{"name": "host"}]}))
