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
        ('include: ["\\0"]\n', "1:11: not valid YAML: a text with a NUL character"),
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
        path.write_text(text.replace("GEMMA", gemma_path).replace("HERE", str(tmp_path)).replace("MODELS", str(Path(gemma_path).parent)))
        code, out, err = run("validate", "--machine", "rtx-3090", path)
        assert "Traceback" not in err
        return code, out, err.replace(str(tmp_path), "HERE")

    return judged


HUGE = "200000000"  # tokens of context: far over 24 GiB with this model, and 512 far below
POD = (
    "kind: Pod\nmetadata: {name: p}\nspec:\n  volumes: [{name: v, hostPath: {path: MODELS}}]\n  containers:\n  - name: c\n"
    "    volumeMounts: [{name: v, mountPath: MODELS}]\n    command: [llama-server]\n    args: [-m, GEMMA]\n"
)
VOLUMES = "    volumes: ['MODELS:MODELS']\n"


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
    assert unit_argv(tmp_path, "/bin/echo $NONE\nType=oneshot\nExecStart=llama-server") == ("llama-server",)


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
        ("c.yaml", "services:\n  s:\n    command: sh -c 'llama-server -m GEMMA -c COUNT'\n" + VOLUMES),
        ("l.yaml", 'models:\n  m:\n    cmd: bash -lc "llama-server -m GEMMA -c COUNT"\n'),
        ("i.yaml", POD.replace("containers", "initContainers").replace("GEMMA", "GEMMA, -c, 'COUNT'")),
        ("f.yaml", "services:\n  s:\n    image: ghcr.io/ggml-org/llama.cpp:server\n    command: -m GEMMA\n    env_file: ./e\n" + VOLUMES),
        ("g.yaml", "services:\n  s:\n    command: llama-server -m GEMMA\n    env_file: [first, {path: HERE/e}, {path: nosuch, required: false}]\n" + VOLUMES),
        ("m.yaml", "x: &x {environment: {LLAMA_ARG_CTX_SIZE: COUNT}}\nservices:\n  s:\n    <<: *x\n    command: llama-server -m GEMMA\n" + VOLUMES),
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
    assert judge("c.yaml", "services:\n  s:\n    command: llama-server -m GEMMA\n    env_file: e\n    environment: {LLAMA_ARG_CTX_SIZE: 512}\n" + VOLUMES)[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services:\n  s:\n    command: llama-server -m GEMMA\n    env_file: nosuch\n", "4:15: env_file HERE/nosuch: no such file"),
        (POD + "    envFrom: [{configMapRef: {name: big}}]\n", "10:15: envFrom takes variables from configMap big, which cannot be read here"),
        (POD + "    envFrom: [{secretRef: {name: s}}]\n", "10:15: envFrom takes variables from secret s, which cannot be read here"),
        (
            POD + "    env: [{name: LLAMA_ARG_CTX_SIZE, valueFrom: {configMapKeyRef: {name: x, key: y}}}]\n",
            "10:11: LLAMA_ARG_CTX_SIZE comes from a configMapKey, which cannot be read here; write its value under env",
        ),
        (POD + "    resources: {limits: {nvidia.com/gpu: -3}}\n", "10:42: -3 is not a number of devices"),
        (POD + "    resources: {limits: {nvidia.com/gpu: some}}\n", "10:42: some is not a number of devices"),
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
        served = text.replace("-c 512", "--server -c 512").replace("[-c,", "[--server, -c,") if ":full" in image else text
        (tmp_path / name).write_text(served.replace("IMAGE", image))
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
    code, _, err = judge("c.yaml", "services:\n  s:\n    command: llama-server -m GEMMA -c 512\n    volumes: ['MODELS:MODELS']\n  db:\n    image: postgres\n    environment: {P: '${NO_SUCH_CTX:?}'}\n")
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
    assert (code, f"10:34: {written} is not a memory limit" in err) == (2, True), err


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
    assert "l.yaml:2:12: the model b runs the image image, whose program residency does not know" in err


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
    unit = write(tmp_path / "a@.service", "[Service]\nEnvironment=HOST=%H\nType=oneshot\nExecStart=/bin/echo %i\nExecStart=llama-server -c 1\n")
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


# -- compose: extends, include, devices ------------------------------------------------------------------------------


def test_a_service_extends_one_of_the_same_file(tmp_path):
    path = write(
        tmp_path / "c.yaml",
        "services:\n  base:\n    image: x/llama.cpp:server-cuda\n    command: -c 1\n    environment: {A: 1, B: 1}\n    volumes: [/a:/models, /x:/x]\n"
        "    mem_limit: 1g\n    gpus: all\n  own:\n    extends: base\n    command: -c 2\n    environment: [B=2, C=3]\n    volumes: [/b:/models]\n",
    )
    own = read(path).commands[1]
    assert own.argv == ("llama-server", "-c", "2")
    assert own.environ == {"A": "1", "B": "2", "C": "3"}
    assert dict(own.mounts) == {"/models": "/b", "/x": "/x"}
    assert (own.host_limit_bytes, own.device_count, own.device_names) == (2**30, None, None)
    assert (own.places[1].line, own.environ_places["A"].line, own.environ_places["B"].line) == (11, 5, 12)


def test_a_service_extends_one_of_another_file(tmp_path):
    write(tmp_path / "lib" / "e", "LLAMA_ARG_CTX_SIZE=5\n")
    write(
        tmp_path / "lib" / "base.yaml",
        "services:\n  deep: {image: x/llama.cpp:server, command: '-c ${CTX}'}\n  base: {extends: {service: deep}, env_file: e, volumes: [./m:/models]}\n",
    )
    path = write(tmp_path / "c.yaml", "services:\n  own:\n    extends: {file: lib/base.yaml, service: base}\n    env_file: [own]\n")
    write(tmp_path / "own", "N=1\n")
    write(tmp_path / ".env", "CTX=77\n")
    (own,) = read(path).commands
    assert own.argv == ("llama-server", "-c", "77")
    assert own.places[2].file == f"{tmp_path}/lib/base.yaml"
    assert dict(own.mounts) == {"/models": f"{tmp_path}/lib/m"}
    assert own.environ == {"LLAMA_ARG_CTX_SIZE": "5", "N": "1"}


def test_what_is_reset_or_replaced_is_not_merged(tmp_path):
    path = write(
        tmp_path / "c.yaml",
        "services:\n  base: {image: 'x/llama.cpp:server', mem_limit: 1g, environment: {A: 1}, volumes: [/a:/a]}\n"
        "  own: {extends: base, mem_limit: !reset null, environment: !override {B: 2}, volumes: null}\n",
    )
    own = read(path).commands[1]
    assert (own.host_limit_bytes, own.environ, own.mounts) == (None, {"B": "2"}, (("/a", "/a"),))


def test_files_are_included_with_their_own_folder_and_variables(tmp_path):
    write(tmp_path / "team" / ".env", "CTX=5\nOTHER=6\n")
    write(tmp_path / "team" / "c.yaml", "include: [more.yaml]\nservices:\n  a: {image: x/llama.cpp:server, command: '-c ${CTX} -np ${OTHER}', volumes: ['./m:/m']}\n")
    write(tmp_path / "team" / "more.yaml", "services:\n  b: {image: x/llama.cpp:server, command: -c 9}\n")
    write(tmp_path / "team" / "over.yaml", "services:\n  a: {mem_limit: 2g}\n")
    write(tmp_path / ".env", "CTX=3\n")
    path = write(tmp_path / "c.yaml", "include:\n  - path: [team/c.yaml, team/over.yaml]\nservices:\n  own: {image: x/llama.cpp:server, command: '-c ${CTX}'}\n")
    found = read(path)
    own, a, b = found.commands
    assert own.argv == ("llama-server", "-c", "3")
    assert a.argv == ("llama-server", "-c", "3", "-np", "6"), "the including project's variables win"
    assert (a.mounts, a.host_limit_bytes) == ((("/m", f"{tmp_path}/team/m"),), 2 * 2**30)
    assert (b.argv[2], b.places[2].file) == ("9", f"{tmp_path}/team/more.yaml")
    assert found.groups == (("own", "a", "b"),)


def test_an_include_may_name_its_folder_and_variables(tmp_path):
    write(tmp_path / "vars", "CTX=12\n")
    write(tmp_path / "lib" / "c.yaml", "services:\n  a: {image: x/llama.cpp:server, command: '-c ${CTX}', volumes: ['./m:/m']}\n")
    path = write(tmp_path / "c.yaml", "include: [{path: lib/c.yaml, project_directory: ., env_file: vars}]\n")
    (a,) = read(path).commands
    assert (a.argv[2], a.mounts) == ("12", (("/m", f"{tmp_path}/m"),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services:\n  a: {extends: b}\n  b: {extends: a}\n", "c.yaml:3:16: extends leads in a circle: a > b > a"),
        ("services:\n  a: {extends: {file: c.yaml, service: a}}\n", "c.yaml:2:40: extends leads in a circle: a > a"),
        ("services:\n  a: {extends: none}\n", "c.yaml:2:16: the service a extends none, which is no service of HERE/c.yaml"),
        ("services:\n  a: {extends: {file: no.yaml, service: a}}\n", "c.yaml:2:23: extends HERE/no.yaml: no such file"),
        ("services:\n  a: {extends: {file: l.yaml}}\n", "c.yaml:2:16: extends of the service a names no service"),
        ("include: [no.yaml]\n", "c.yaml:1:11: include HERE/no.yaml: no such file"),
        ("include: [l.yaml]\n", "c.yaml:1:11: the service a of the included file stands in this project already"),
        ("include: [loop.yaml]\n", "loop.yaml:1:11: include leads in a circle: HERE/c.yaml > HERE/loop.yaml > HERE/c.yaml"),
        ("include: [{path: [broken.yaml]}]\n", "broken.yaml:1:13: not valid YAML"),
        ("include: [oci://x/y]\n", "c.yaml:1:11: include oci://x/y lies elsewhere and is not fetched"),
        ("include: [{path: l.yaml, env_file: nosuch}]\n", "c.yaml:1:36: env_file HERE/nosuch: no such file"),
        ("include: [[]]\n", "c.yaml:1:11: include takes paths, or tables with a path"),
    ],
)
def test_what_cannot_be_extended_or_included_is_told(text, said, tmp_path):
    write(tmp_path / "l.yaml", "services:\n  a: {image: x/llama.cpp:server}\n")
    write(tmp_path / "loop.yaml", "include: [c.yaml]\n")
    write(tmp_path / "broken.yaml", "services: {a")
    if "already" in said:
        text += "services:\n  a: {image: other}\n"
    with pytest.raises(InputError) as caught:
        read(write(tmp_path / "c.yaml", text))
    assert said in str(caught.value).replace(str(tmp_path), "HERE")


def test_includes_that_multiply_do_not_hang(tmp_path):
    for i in range(30):
        write(tmp_path / f"{i}a.yaml", f"include: [{i + 1}a.yaml, {i + 1}b.yaml]\n")
        write(tmp_path / f"{i}b.yaml", f"include: [{i + 1}a.yaml, {i + 1}b.yaml]\n")
    with pytest.raises(InputError, match="include leads to more than 64 files"):
        read(tmp_path / "0a.yaml")


CARDS = {
    "name": "m",
    "pools": [{"name": "host", "total_bytes": 2**36}, *({"name": f"CUDA{i}", "total_bytes": 2**34} for i in range(3))],
    "devices": [{"name": f"CUDA{i}", "kind": "cuda", "pool": f"CUDA{i}", "uuid": f"GPU-{i}a"} for i in range(3)],
}


def seen(path, machine=CARDS):
    """Return the pools of the devices that the first launch of a file sees, and the warnings."""
    found = prepare_all(str(path), Inputs(machine=machine, environ={}))
    return [d.pool for d in found.cases[0].machine.accelerators], found


NONE, ALL = [], ["CUDA0", "CUDA1", "CUDA2"]


@pytest.mark.parametrize(
    ("entry", "pools"),
    [
        ("gpus: all", ALL),
        ("gpus: [{count: 2}]", ["CUDA0", "CUDA1"]),
        ("gpus: [{device_ids: ['2']}]", ["CUDA2"]),
        ("deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}}", ALL),
        ("deploy: {resources: {reservations: {devices: [{device_ids: ['2', '0']}]}}}", ["CUDA0", "CUDA2"]),
        ("deploy: {resources: {reservations: {devices: [{driver: cdi, device_ids: ['nvidia.com/gpu=1']}]}}}", ["CUDA1"]),
        ("devices: ['nvidia.com/gpu=all']", ALL),
        ("devices: ['/dev/dri:/dev/dri']", ALL),
        ("devices: ['/dev/ttyUSB0']", NONE),
        ("privileged: true", ALL),
        ("runtime: nvidia", ALL),
        ("runtime: runc", NONE),
        ("runtime: nvidia\n    environment: {NVIDIA_VISIBLE_DEVICES: all}", ALL),
        ("runtime: nvidia\n    environment: {NVIDIA_VISIBLE_DEVICES: none}", NONE),
        ("runtime: nvidia\n    environment: {NVIDIA_VISIBLE_DEVICES: void}", NONE),
        ("runtime: nvidia\n    environment: {NVIDIA_VISIBLE_DEVICES: '2,1'}", ["CUDA1", "CUDA2"]),
        ("runtime: nvidia\n    environment: {NVIDIA_VISIBLE_DEVICES: GPU-1a}", ["CUDA1"]),
        ("runtime: nvidia\n    environment: {NVIDIA_VISIBLE_DEVICES: '2,1', CUDA_VISIBLE_DEVICES: '1'}", ["CUDA2"]),
        ("gpus: [{count: 1}]\n    environment: {NVIDIA_VISIBLE_DEVICES: '2'}", ["CUDA0"]),
        ("gpus: [{count: 1}]\n    environment: {CUDA_VISIBLE_DEVICES: '1'}", NONE),
        ("environment: {NVIDIA_VISIBLE_DEVICES: '1'}", ["CUDA1"]),
        ("environment: {NVIDIA_VISIBLE_DEVICES: void}", NONE),
        ("restart: always", NONE),
    ],
)
def test_the_devices_a_service_gets(entry, pools, tmp_path, gemma_path):
    path = write(tmp_path / "c.yaml", f"services:\n  s:\n    image: x/llama.cpp:server-cuda\n    command: -m {gemma_path} -c 512\n    {entry}\n    volumes: ['{gemma_path}:{gemma_path}']\n")
    found, prepared = seen(path)
    assert found == pools
    assumed = not any(word in entry for word in ("gpus", "reservations", "nvidia.com", "/dev/dri", "privileged", "runtime:"))
    assert [str(w.where) for w in prepared.warnings] == ([f"{path}:3:12"] if assumed else [])
    names = [d.name for d in prepared.cases[0].machine.accelerators]
    assert names == ALL[: len(names)], "numbered anew"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("3", "NVIDIA_VISIBLE_DEVICES=3 names 3, which is no device of this machine; the container does not start"),
        ("GPU-9", "NVIDIA_VISIBLE_DEVICES=GPU-9 names GPU-9, which is no device of this machine"),
        ("9999999", "which is no device of this machine"),
    ],
)
def test_a_device_that_the_machine_lacks_is_told(value, said, tmp_path, gemma_path):
    path = write(
        tmp_path / "c.yaml",
        f"services:\n  s:\n    image: llama.cpp:server-cuda\n    command: -m {gemma_path}\n    runtime: nvidia\n    environment:\n      NVIDIA_VISIBLE_DEVICES: '{value}'\n    volumes: ['{gemma_path}:{gemma_path}']\n",
    )
    with pytest.raises(InputError, match=rf"c.yaml:7:31: s: {said}" if value == "3" else said):
        seen(path)
    nameless = {**CARDS, "devices": [{k: v for k, v in d.items() if k != "uuid"} for d in CARDS["devices"]]}
    with pytest.raises(InputError, match="by its UUID, and the machine profile gives none" if value == "GPU-9" else "no device of this machine"):
        seen(path, nameless)


def test_a_service_without_a_device_is_judged_on_the_host_and_that_is_said(judge, tmp_path, gemma_path):
    text = "services:\n  s:\n    image: ghcr.io/ggml-org/llama.cpp:server-cuda\n    command: -m GEMMA -c 512 -np 1\n    volumes: ['GEMMA:GEMMA']\n"
    code, out, err = judge("c.yaml", text)
    assert code == 0, out
    said = "the service s asks for no device: assumed is Docker's own default runtime, with which it sees none"
    assert err.startswith(f"warning: HERE/c.yaml:3:12: {said} (ask with gpus: all, or deploy.resources.reservations.devices; or name the runtime")
    assert judge("c.yaml", text + "    gpus: all\n")[::2] == (0, "")
    assert judge("c.yaml", text.replace("-cuda", ""))[::2] == (0, ""), "a build for the processor needs none"
    path = tmp_path / "c.yaml"
    path.write_text(text.replace("GEMMA", gemma_path))
    host = {"name": "m", "pools": [{"name": "host", "total_bytes": 2**34}]}
    assert seen(path, host)[1].warnings == (), "there is no device to miss"
    assert seen(path)[1].cases[0].machine.facts == (said,)


@pytest.mark.parametrize("form", ["json", "sarif", "github", "junit"])
def test_warnings_about_a_source_stand_in_every_format(form, judge, tmp_path, gemma_path):
    import xml.etree.ElementTree as ET

    path = write(tmp_path / "l.yaml", f"models:\n  a: {{cmd: 'llama-server -m {gemma_path} -c 512'}}\n  b: {{cmd: 'lama-server -m x'}}\n")
    code, out, err = run("validate", "--machine", "rtx-3090", "--format", form, path)
    said = "the model b is started by 'lama-server', which is not a program of an engine residency knows: it is not judged"
    assert (code, err) == (0, f"warning: {path}:3:12: {said}\n")
    if form == "json":
        (row,) = json.loads(out)["warnings"]
        assert (row["message"], row["where"]["line"]) == (said, 3)
    elif form == "sarif":
        row = json.loads(out)["runs"][0]["results"][-1]
        assert (row["ruleId"], row["level"], row["message"]["text"]) == ("residency/input", "warning", said)
        assert row["locations"][0]["physicalLocation"]["region"] == {"startLine": 3, "startColumn": 12}
    elif form == "github":
        assert out.startswith(f"::warning file={path},line=3,col=12,title=residency/input::{said}\n")
    else:
        suite = ET.fromstring(out)[0]
        assert suite.get("skipped") == "1"
        assert suite[0][0].get("message") == f"{path}:3:12: {said}"


# -- images and docker run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "argv"),
    [
        ("--server -c 512", ("llama-server", "-c", "512")),
        ("-s -c 512", ("llama-server", "-c", "512")),
        ("--run -c 512", ("llama-cli", "-c", "512")),
        ("-r -c 512", ("llama-cli", "-c", "512")),
        ("--run-legacy -c 512", ("llama-completion", "-c", "512")),
        ("-l -c 512", ("llama-completion", "-c", "512")),
        ("--bench -p 512", ("llama-bench", "-p", "512")),
        ("-b -p 512", ("llama-bench", "-p", "512")),
        ("/app/llama-server -c 7", ("/app/llama-server", "-c", "7")),
    ],
)
@pytest.mark.parametrize("kind", ["compose", "pod", "swap"])
def test_the_full_image_runs_what_its_first_argument_says(arguments, argv, kind, tmp_path):
    image = "ghcr.io/ggml-org/llama.cpp:full-cuda-b6123"
    texts = {
        "compose": f"services:\n  s: {{image: '{image}', command: {arguments}}}\n",
        "pod": f"kind: Pod\nspec:\n  containers:\n  - image: {image}\n    args: [{', '.join(arguments.split())}]\n",
        "swap": f"models:\n  m: {{cmd: docker run --rm {image} {arguments}}}\n",
    }
    path = write(tmp_path / "x.yaml", texts[kind])
    found = reader_for(str(path))(str(path), known=lambda p: p in ("llama-server", "llama-cli", "llama-completion", "llama-bench"), environ={})
    assert found.commands[0].argv == argv


@pytest.mark.parametrize("argument", ["--perplexity", "-p", "--quantize", "-q", "--convert", "-c", "--all-in-one"])
def test_what_of_the_full_image_serves_no_model_is_said_to_be_not_judged(argument, judge):
    own = "  s: {command: llama-server -m GEMMA -c 512, gpus: all, volumes: ['MODELS:MODELS']}\n"
    other = f"  t: {{image: 'ghcr.io/ggml-org/llama.cpp:full', command: [{argument}, x]}}\n"
    code, _, err = judge("c.yaml", "services:\n" + own + other)
    assert code == 0
    assert err.startswith("warning: HERE/c.yaml:3:")
    assert f"the service t runs {'llama-perplexity' if 'p' in argument else 'llama-quantize' if argument[1:2] != 'c' and argument != '--convert' else 'convert_hf_to_gguf.py'} ({argument})" in err
    assert judge("c.yaml", "services:\n" + other)[0] == 2, "nothing else is in the file"


@pytest.mark.parametrize(("arguments", "said"), [("-m x", "as its first argument, not '-m'"), ("", "as its first argument, and there is none")])
def test_the_full_image_without_a_program_does_not_start(arguments, said, judge):
    code, _, err = judge("c.yaml", f"services:\n  s:\n    image: ghcr.io/ggml-org/llama.cpp:full\n    command: {arguments}\n")
    assert (code, said in err) == (2, True), err


def test_llama_swap_models_in_containers_are_read(tmp_path):
    path = write(
        tmp_path / "l.yaml",
        "macros:\n  d: |\n    docker run --init --rm -it -p ${PORT}:8080 -v /srv/models:/models:ro --mount type=bind,src=/srv/more,dst=/more --gpus '\"device=1,2\"'\n"
        "models:\n  a:\n    cmd: |\n      ${d} -e LLAMA_ARG_N_GPU_LAYERS=99 -eX=1 --env FROM_CALLER -m 8g --name ${MODEL_ID}\n      ghcr.io/ggml-org/llama.cpp:server-cuda\n      -m /models/m.gguf -c 512\n",
    )
    (a,) = read(path, FROM_CALLER="f", OTHER="o").commands
    assert a.argv == ("llama-server", "-m", "/models/m.gguf", "-c", "512")
    assert a.environ == {"LLAMA_ARG_N_GPU_LAYERS": "99", "X": "1", "FROM_CALLER": "f"}
    assert dict(a.mounts) == {"/models": "/srv/models", "/more": "/srv/more"}
    assert (a.host_limit_bytes, a.device_names, a.device_count, a.inherits) == (8 * 2**30, "1,2", None, False)
    assert (a.places[0].line, a.places[4].line, a.environ_places["LLAMA_ARG_N_GPU_LAYERS"].line) == (8, 9, 7)


@pytest.mark.parametrize(
    ("options", "pools"),
    [
        ("--gpus all", ALL),
        ("--gpus=2", ["CUDA0", "CUDA1"]),
        ("--gpus device=1", ["CUDA1"]),
        ("--gpus '\"device=2,0\",capabilities=utility'", ["CUDA0", "CUDA2"]),
        ("--gpus count=1", ["CUDA0"]),
        ("--device nvidia.com/gpu=all", ALL),
        ("--device=nvidia.com/gpu=2", ["CUDA2"]),
        ("--device /dev/dri", ALL),
        ("--runtime nvidia -e NVIDIA_VISIBLE_DEVICES=1", ["CUDA1"]),
        ("--privileged", ALL),
        ("--privileged=false", NONE),
        ("-d", NONE),
    ],
)
@pytest.mark.parametrize("program", ["docker", "/usr/bin/podman", "sudo docker --context big container"])
def test_the_devices_of_a_docker_run(program, options, pools, tmp_path, gemma_path):
    folder = Path(gemma_path).parent
    path = tmp_path / "l.yaml"
    command = f"{program} run --rm {options} -v {folder}:/m llama.cpp:server-cuda -m /m/{Path(gemma_path).name} -c 512"
    path.write_text("models:\n  a:\n    cmd: |\n      " + command + "\n")
    found, prepared = seen(path)
    assert found == pools
    assert [w.message.split(":")[0] for w in prepared.warnings] == ([] if pools else ["the model a asks for no device"])


def test_a_group_counts_its_members_in_containers(judge, gemma_path):
    folder, name = Path(gemma_path).parent, Path(gemma_path).name
    count = 5_000_000
    models = f"  a: {{cmd: 'llama-server -m GEMMA -c {count}'}}\n  b: {{cmd: 'docker run --gpus all -v {folder}:/m llama.cpp:server-cuda -m /m/{name} -c {count}'}}\n"
    groups = "groups:\n  g: {swap: false, members: [a, b]}\n"
    code, out, err = judge("l.yaml", "models:\n" + models + groups)
    assert (code, err) == (1, "")
    assert out.count("ALLOW") == 2
    assert "VETO  2 launches at once: a + b" in out


@pytest.mark.parametrize(
    ("cmd", "said"),
    [
        ("docker run --frobnicate x y", "the model b is started by 'docker', which has the option '--frobnicate', which residency does not know"),
        ("docker run --rm", "the model b is started by 'docker', which names no image"),
        ("docker compose up", "the model b is started by 'docker', which starts no container with run"),
        ("podman run --entrypoint /bin/other llama.cpp:server x", "the model b runs the image llama.cpp:server, whose program residency does not know"),
    ],
)
def test_containers_that_cannot_be_read_are_told_and_so_is_the_sum_without_them(cmd, said, judge):
    models = f"models:\n  a: {{cmd: 'llama-server -m GEMMA -c 512'}}\n  b: {{cmd: '{cmd}'}}\n  c: {{cmd: 'llama-server -m GEMMA -c 513'}}\n"
    code, _, err = judge("l.yaml", models + "groups:\n  g: {swap: false, members: [a, b, c]}\n")
    assert code == 0
    assert err.splitlines() == [
        f"warning: HERE/l.yaml:3:12: {said}: it is not judged",
        "warning: HERE/l.yaml:6:6: the sum of the group g lacks its member b, which is not judged",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpus lots", "l.yaml:2:12: the model a: --gpus 'lots' is no number of devices"),
        ("--gpus what=1", "has the field 'what', which Docker does not know"),
        ("-m lots", "--memory lots is not a memory limit"),
        ("--env-file nosuch", "l.yaml:2:12: --env-file HERE/nosuch: no such file"),
        ("--gpus device=7", "NVIDIA_VISIBLE_DEVICES=7 names 7, which is no device of this machine"),
    ],
)
def test_options_of_docker_run_that_are_wrong_are_told(options, said, judge):
    code, out, err = judge("l.yaml", f"models:\n  a: {{cmd: docker run {options} -v MODELS:MODELS llama.cpp:server-cuda -m GEMMA}}\n")
    assert (code, out) == (2, "")
    assert said in err, err


def test_dockers_variable_files_keep_quotes(tmp_path):
    write(tmp_path / "e", "# c\nA='q'\nB=$A # x\nFROM_CALLER\n")
    path = write(tmp_path / "l.yaml", "models:\n  a: {cmd: docker run --env-file e --entrypoint llama-server --gpus all any/image -c 1}\n")
    (a,) = read(path, FROM_CALLER="f").commands
    assert a.environ == {"A": "'q'", "B": "$A # x", "FROM_CALLER": "f"}
    assert a.argv == ("llama-server", "-c", "1")


@pytest.mark.parametrize("image", ["ghcr.io/ggml-org/llama.cpp@sha256:0123", "local/llama-cpp:mine"])
def test_an_image_of_an_engine_whose_program_is_not_known_is_told(image, judge):
    own = "services:\n  s: {command: llama-server -m GEMMA -c 512, gpus: all, volumes: ['MODELS:MODELS']}\n"
    other = f"  t: {{image: '{image}', command: -m x}}\n  db: {{image: postgres}}\n"
    said = f"the service t runs the image {image}, whose program residency does not know: it is not judged"
    assert judge("c.yaml", own + other)[::2] == (0, f"warning: HERE/c.yaml:3:14: {said}\n")
    assert judge("c.yaml", "services:\n" + other)[::2] == (2, f"error: HERE/c.yaml:2:14: {said}\n")


def test_adapters_are_looked_for_where_they_are_mounted(models, gemma_path):
    path = write(
        models / "c.yaml",
        "services:\n  s:\n    image: llama.cpp:server\n    command: -m /m/gemma.gguf -c 512 --lora /m/none.gguf\n    volumes: [./models:/m]\n",
    )
    code, _, err = run("validate", "--machine", "rtx-3090", path)
    assert code == 2
    assert f"{path}:4:38: s: {models}/models/none.gguf: no such file" in err


def test_a_unit_that_is_a_link_has_the_drop_ins_of_its_own_folder(tmp_path):
    unit = write(tmp_path / "system" / "x.service", "[Service]\nExecStart=llama-server -c 1\n")
    write(tmp_path / "system" / "x.service.d" / "a.conf", "[Service]\nMemoryMax=2G\n")
    link = tmp_path / "system" / "multi-user.target.wants" / "x.service"
    link.parent.mkdir()
    link.symlink_to(unit)
    assert read(link).commands[0].host_limit_bytes == 2 * 2**30
    write(tmp_path / "system" / "y@.service", "[Service]\nExecStart=llama-server -c %i\n")
    write(tmp_path / "system" / "y@.service.d" / "a.conf", "[Service]\nMemoryMax=1G\n")
    instance = link.with_name("y@5.service")
    instance.symlink_to("../y@.service")
    (command,) = read(instance).commands
    assert (command.name, command.argv, command.host_limit_bytes) == ("y@5.service", ("llama-server", "-c", "5"), 2**30)


# -- what grows without end --------------------------------------------------------------------------------------------


DOUBLING = "A0=xxxxxxxxxxxxxxxx\n" + "".join(f"A{i}=${{A{i - 1}}}${{A{i - 1}}}\n" for i in range(1, 40))


@pytest.mark.parametrize("file", [".env", "vars"])
def test_variables_that_double_are_refused_where_they_get_too_long(file, tmp_path):
    write(tmp_path / file, DOUBLING)
    entry = "env_file: vars" if file == "vars" else "mem_limit: ${A39}"
    path = write(tmp_path / "c.yaml", f"services:\n  s:\n    command: llama-server\n    {entry}\n")
    with pytest.raises(InputError, match="A13: with what it refers to this is longer than 64 KiB") as caught:
        read(path)
    where = caught.value.problems[0].where
    assert (where.file, where.line) == ((str(path), 4) if file == "vars" else (str(tmp_path / ".env"), 14))


def test_references_that_repeat_are_refused_in_every_kind_of_file(tmp_path):
    big = "x" * 5000
    swap = write(tmp_path / "l.yaml", "models:\n  a:\n    cmd: llama-server\n    env: ['V=" + "${env.BIG}" * 1000 + "']\n")
    with pytest.raises(InputError, match=r"l.yaml:4:11: V: with what it refers to this is longer than 64 KiB"):
        read(swap, BIG=big)
    compose = write(tmp_path / "c.yaml", "services:\n  s:\n    command: [llama-server, '" + "${BIG}" * 1000 + "']\n")
    with pytest.raises(InputError, match=r"c.yaml:3:29: with what it refers to this is longer than 64 KiB"):
        read(compose, BIG=big)
    many = write(tmp_path / "m.yaml", "services:\n  s:\n    command:\n    - llama-server\n" + "    - ${BIG}\n" * 50_000)
    with pytest.raises(InputError, match=r"m.yaml:842:7: from here on the file's texts come to more than 4 MiB"):
        read(many, BIG=big)
    pod = write(tmp_path / "k.yaml", f"kind: Pod\nspec:\n  containers:\n  - command: [llama-server, '{'$(BIG)' * 1000}']\n    env: [{{name: BIG, value: {big}}}]\n")
    with pytest.raises(InputError, match=r"k.yaml:4:14: with what it refers to this is longer than 64 KiB"):
        read(pod)
    unit = write(tmp_path / "x.service", f"[Service]\nEnvironment=A={big}\nExecStart=llama-server -a {'${A}' * 10_000}\n")
    with pytest.raises(InputError, match=r"x.service:3:27: with what it refers to this is longer than 64 KiB"):
        read(unit)
    unit.write_text(f"[Service]\nEnvironment=A={big}\nExecStart=llama-server {'${A} ' * 10_000}\n")
    with pytest.raises(InputError, match=r"x.service:3:89: from here on the command is longer than 64 KiB"):
        read(unit)


@pytest.mark.parametrize("name", ["c.yaml", "s.json"])
def test_half_a_surrogate_pair_is_told_with_its_place(name, judge):
    text = 'services:\n  s: {command: [llama-server, -m, "/models/\\ud800.gguf"]}\n' if name == "c.yaml" else '{"exe": "strata",\n "args": ["/models/\\ud800.gguf"]}\n'
    code, _, err = judge(name, text)
    assert code == 2
    assert (f"{name}:2:35: " if name == "c.yaml" else f"{name}:2:20: ") in err
    assert "half of a surrogate pair" in err


def test_a_long_unit_is_read_in_linear_time(tmp_path):
    import time

    rows = "[Service]\nEnvironment=A=1\nUnsetEnvironment=B\n" * 20_000
    unit = write(tmp_path / "x.service", rows + "ExecStart=llama-server " + "'a'b " * 5_000 + "\n")
    started = time.process_time()
    assert len(read(unit).commands[0].argv) == 5001
    assert time.process_time() - started < 10
    unit.write_text("#" * 2**20 + "\n")
    with pytest.raises(InputError, match="is larger than 1 MiB"):
        read(unit)


def test_long_chains_of_extends_are_refused_by_name(tmp_path):
    chain = "services:\n  s0: {command: llama-server}\n" + "".join(f"  s{i}: {{extends: s{i - 1}}}\n" for i in range(1, 3000))
    with pytest.raises(InputError, match=r"c.yaml:66:\d+: extends leads through more than 64 services"):
        read(write(tmp_path / "c.yaml", chain))
    backwards = "services:\n" + "".join(f"  s{i}: {{extends: s{i - 1}}}\n" for i in range(3000, 0, -1)) + "  s0: {command: llama-server}\n"
    with pytest.raises(InputError, match=r"c.yaml:\d+:\d+: extends leads through more than 64 services"):
        read(write(tmp_path / "c.yaml", backwards))
    fine = "services:\n  s0: {command: llama-server}\n" + "".join(f"  s{i}: {{extends: s{i - 1}}}\n" for i in range(1, 64))
    assert len(read(write(tmp_path / "c.yaml", fine)).commands) == 64
    wide = "services:\n  base: {environment: [" + "A=1," * 5000 + "]}\n" + "".join(f"  s{i}: {{extends: base}}\n" for i in range(100))
    with pytest.raises(InputError, match=r"c.yaml:\d+:\d+: the services that extend others have more than 100000 settings"):
        read(write(tmp_path / "c.yaml", wide))


# -- paths in a container ------------------------------------------------------------------------------------------------


def in_container(kind, path, extra=""):
    """Return a file whose container opens a model at a path, and has further settings."""
    return {
        "c.yaml": f"services:\n  s:\n    image: llama.cpp:server\n    command: [-m, '{path}', -c, '512']\n{extra}",
        "k.yaml": f"kind: Pod\nspec:\n  containers:\n  - image: llama.cpp:server\n    args: [-m, '{path}', -c, '512']\n{extra}",
        "l.yaml": f"models:\n  s:\n    cmd: docker run {extra} llama.cpp:server -m {path} -c 512\n",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "path", "extra", "said"),
    [
        ("c.yaml", "GEMMA", "", "c.yaml:4:15: s: no mount holds GEMMA: in the container it is the image's own file"),
        ("c.yaml", "GEMMA", "    volumes: ['MODELS-x:MODELS-x']\n", "no mount holds GEMMA"),
        ("c.yaml", "/m/../GEMMA", "    volumes: ['MODELS:/m']\n", "no mount holds GEMMA"),
        ("c.yaml", "GEMMA", "    volumes: ['models:MODELS']\n", "GEMMA lies in a volume or a file system in memory, which cannot be seen from here"),
        ("c.yaml", "GEMMA", "    volumes: ['MODELS']\n", "GEMMA lies in a volume or"),
        ("c.yaml", "GEMMA", "    volumes: ['MODELS:MODELS']\n    tmpfs: GEMMA\n", "GEMMA lies in a volume or"),
        ("c.yaml", "GEMMA", "    volumes: [{type: volume, source: m, target: MODELS}]\n", "GEMMA lies in a volume or"),
        ("c.yaml", "GEMMA", "    volumes_from: [other]\n", "GEMMA lies in the image, or a volume of the container other"),
        ("c.yaml", "gemma.gguf", "    volumes: ['MODELS:/m']\n", "c.yaml:4:15: s: gemma.gguf is a relative path, and the image's working folder cannot be seen from here"),
        ("c.yaml", "gemma.gguf", "    working_dir: /n\n    volumes: ['MODELS:/m']\n", "no mount holds /n/gemma.gguf"),
        ("k.yaml", "GEMMA", "", "k.yaml:5:12: pod/container: no mount holds GEMMA"),
        ("k.yaml", "/m/x.gguf", "    volumeMounts: [{name: v, mountPath: /m}]\n  volumes: [{name: v, emptyDir: {}}]\n", "/m/x.gguf lies in the volume v (emptyDir)"),
        ("k.yaml", "/m/x.gguf", "    volumeMounts: [{name: v, mountPath: /m}]\n  volumes: [{name: v, persistentVolumeClaim: {claimName: c}}]\n", "the volume v (persistentVolumeClaim)"),
        ("k.yaml", "/m/x.gguf", "    volumeMounts: [{name: v, mountPath: /m}]\n", "the volume v (of a claim template)"),
        ("k.yaml", "/m/x.gguf", "    volumeMounts: [{name: v, mountPath: /m, subPathExpr: $(X)}]\n  volumes: [{name: v, hostPath: {path: MODELS}}]\n", "that subPathExpr names"),
        ("k.yaml", "x.gguf", "    volumeMounts: [{name: v, mountPath: /m}]\n  volumes: [{name: v, hostPath: {path: MODELS}}]\n", "x.gguf is a relative path"),
        ("l.yaml", "GEMMA", "", "l.yaml:3:39: s: no mount holds GEMMA"),
        ("l.yaml", "GEMMA", "-v models:MODELS", "GEMMA lies in a volume or"),
        ("l.yaml", "GEMMA", "-v MODELS:MODELS --tmpfs MODELS", "GEMMA lies in a volume or"),
        ("l.yaml", "GEMMA", "--mount type=volume,src=m,dst=MODELS", "GEMMA lies in a volume or"),
        ("l.yaml", "x.gguf", "-v MODELS:/m", "x.gguf is a relative path"),
    ],
)
def test_what_no_mount_holds_is_never_a_file_of_this_machine(kind, path, extra, said, judge, gemma_path):
    code, out, err = judge(kind, in_container(kind, path, extra))
    assert (code, out) == (2, "")
    assert said in err.replace(gemma_path, "GEMMA"), err


@pytest.mark.parametrize(
    ("kind", "path", "extra"),
    [
        ("c.yaml", "NAME", "    working_dir: /m\n    volumes: ['MODELS:/m']\n"),
        ("c.yaml", "../m/./NAME", "    working_dir: /n\n    volumes: ['MODELS:/m/', 'x:/n']\n"),
        ("c.yaml", "/m/NAME", "    volumes: [{type: bind, source: MODELS, target: /m}]\n"),
        ("c.yaml", "/m/deep/NAME", "    volumes: ['MODELS:/m/deep', 'x:/m']\n"),
        ("k.yaml", "NAME", "    workingDir: /m\n    volumeMounts: [{name: v, mountPath: /m}]\n  volumes: [{name: v, hostPath: {path: MODELS}}]\n"),
        ("k.yaml", "/m/x.gguf", "    volumeMounts: [{name: v, mountPath: /m/x.gguf, subPath: NAME}]\n  volumes: [{name: v, hostPath: {path: MODELS}}]\n"),
        ("l.yaml", "NAME", "-w /m -v MODELS:/m"),
        ("l.yaml", "/m/NAME", "--mount type=bind,src=MODELS,dst=/m --tmpfs /tmp"),
    ],
)
def test_what_a_mount_holds_is_read_from_there(kind, path, extra, judge, gemma_path):
    code, _, err = judge(kind, in_container(kind, path, extra).replace("NAME", Path(gemma_path).name))
    assert code == 0, err


def test_a_path_that_was_asked_for_here_is_not_the_containers(tmp_path, gemma_path):
    path = write(tmp_path / "c.yaml", in_container("c.yaml", "/m/x.gguf"))
    assert run("validate", "--machine", "rtx-3090", "--set", f"model.path={gemma_path}", path)[0] == 0


# -- entry points, limits, devices ------------------------------------------------------------------------------------------


def test_an_entry_point_of_null_is_the_images_and_an_empty_one_clears_it(tmp_path, judge):
    service = "services:\n  s:\n    image: llama.cpp:server\n    entrypoint: {}\n    command: [-c, '512']\n"
    assert read(write(tmp_path / "a.yaml", service.format("null"))).commands[0].argv == ("llama-server", "-c", "512")
    assert read(write(tmp_path / "b.yaml", service.replace("-c,", "llama-server, -c,").format("[]"))).commands[0].argv == ("llama-server", "-c", "512")
    said = "c.yaml:3:12: the service s runs the image llama.cpp:server and starts '{}', which is no program of an engine: it is not judged"
    for entry, started in (("[]", "-c"), ('""', "-c"), ("/start.sh", "/start.sh")):
        code, _, err = judge("c.yaml", service.format(entry))
        assert (code, said.format(started) in err) == (2, True), err


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("c.yaml", "services:\n  s: {command: llama-server, mem_limit: 0}\n", None),
        ("c.yaml", "services:\n  s: {command: llama-server, mem_limit: 1g, deploy: {resources: {limits: {memory: 1024m}}}}\n", 2**30),
        ("c.yaml", "services:\n  s: {command: llama-server, mem_limit: 1g, deploy: {resources: {limits: {memory: 0}}}}\n", 2**30),
        ("l.yaml", "models:\n  s: {cmd: docker run -m 0 llama.cpp:server}\n", None),
        ("k.yaml", "kind: Pod\nspec:\n  containers:\n  - command: [llama-server]\n    resources: {limits: {memory: '0'}}\n", None),
        ("k.yaml", "kind: Pod\nspec:\n  resources: {limits: {memory: 1Gi}}\n  containers:\n  - command: [llama-server]\n", 2**30),
        ("k.yaml", "kind: Pod\nspec:\n  resources: {limits: {memory: 3Gi}}\n  containers:\n  - command: [llama-server]\n    resources: {limits: {memory: 2Gi}}\n", 2**31),
    ],
)
def test_memory_limits_of_containers(name, text, limit, tmp_path):
    (command,) = read(write(tmp_path / name, text)).commands
    assert command.host_limit_bytes == limit


def test_two_memory_limits_that_differ_are_told(tmp_path):
    path = write(tmp_path / "c.yaml", "services:\n  s: {command: llama-server, mem_limit: 1g, deploy: {resources: {limits: {memory: 2g}}}}\n")
    with pytest.raises(InputError, match=r"c.yaml:2:41: mem_limit is 1073741824 bytes, and deploy.resources.limits.memory 2147483648 bytes"):
        read(path)


def test_more_devices_than_there_are_is_told(tmp_path, gemma_path):
    mounted = f"    volumes: ['{gemma_path}:{gemma_path}']\n"
    path = write(tmp_path / "c.yaml", f"services:\n  s:\n    image: llama.cpp:server-cuda\n    command: -m {gemma_path} -c 512\n    gpus: [{{count: 4}}]\n{mounted}")
    with pytest.raises(InputError, match=r"c.yaml:3:12: s: asks for 4 devices, and the machine has 3; it does not start"):
        seen(path)
    host = {"name": "m", "pools": [{"name": "host", "total_bytes": 2**34}]}
    with pytest.raises(InputError, match="asks for 4 devices, and the machine has none"):
        seen(path, host)


@pytest.mark.parametrize("resource", ["nvidia.com/mig-1g.5gb", "nvidia.com/gpu.shared", "aliyun.com/gpu-mem", "gpu.intel.com/i915", "amd.com/cpx_nps4"])
def test_parts_of_devices_are_not_understood(resource, tmp_path):
    path = write(tmp_path / "k.yaml", f"kind: Pod\nspec:\n  containers:\n  - command: [llama-server]\n    resources:\n      limits:\n        {resource}: 1\n")
    with pytest.raises(InputError, match=rf"k.yaml:7:{len(resource) + 11}: {resource} is a part of a device or one of a kind residency does not know"):
        read(path)
    path.write_text(path.read_text().replace(resource, "rdma/hca"))
    assert read(path).commands[0].device_count == 0


def test_every_container_of_a_pod_has_devices_of_its_own(tmp_path, gemma_path):
    def container(name, count, mount="    volumeMounts: [{name: v, mountPath: /m}]\n"):
        return f"  - name: {name}\n    command: [llama-server]\n    args: [-m, /m/{Path(gemma_path).name}, -c, '512']\n    resources: {{limits: {{nvidia.com/gpu: {count}}}}}\n{mount}"

    head = f"kind: Pod\nmetadata: {{name: p}}\nspec:\n  volumes: [{{name: v, hostPath: {{path: {Path(gemma_path).parent}}}}}]\n  containers:\n"
    path = write(tmp_path / "k.yaml", head + container("a", 1) + container("b", 2))
    cases = prepare_all(str(path), Inputs(machine=CARDS, environ={})).cases
    assert [[(d.name, d.pool) for d in c.machine.accelerators] for c in cases] == [[("CUDA0", "CUDA0")], [("CUDA0", "CUDA1"), ("CUDA1", "CUDA2")]]
    path.write_text(head + container("a", 2) + container("b", 2))
    with pytest.raises(InputError, match=r"k.yaml:14:42: p/b: asks for 2 devices, the containers beside it for 2, and the machine has 3; it does not start"):
        prepare_all(str(path), Inputs(machine=CARDS, environ={}))


# -- wrappers, units, what compose starts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrapper",
    ["env -u X A=1", "sudo -Eu llama --", "sudo --user=llama -g video", "nice -n 5", "nice -5", "ionice -c2 -n 0", "chrt -f 50", "taskset -c 0-3", "numactl -N0 --membind 0",
     "time -o log", "nohup", "stdbuf -oL -e 0", "timeout -k 5 1h", "exec -a chat", "tini -g --", "gosu llama", "busybox nice", "env nice -n 5 sudo -n"],
)  # fmt: skip
def test_known_wrappers_and_their_options_are_looked_through(wrapper, tmp_path):
    assert unit_argv(tmp_path, f"{wrapper} llama-server -c 1") == ("llama-server", "-c", "1")


@pytest.mark.parametrize("other", ["ssh host", "echo", "systemd-run", "nice -n", "taskset", "sh /x.sh", "/entry.sh", "env echo"])
def test_what_is_no_wrapper_starts_no_engine(other, tmp_path):
    with pytest.raises(InputError, match="no command of a known engine in this unit"):
        unit_argv(tmp_path, f"{other} llama-server -c 1")


def test_a_wrapper_that_leads_elsewhere_is_told(tmp_path):
    with pytest.raises(InputError, match=r"x.service:3:15: env -C starts its program in a way that is not followed"):
        unit_argv(tmp_path, "env -C /x llama-server -m m.gguf")


def test_two_commands_need_a_oneshot(tmp_path):
    with pytest.raises(InputError, match=r"x.service:4:11: this adds a second command, which only Type=oneshot takes"):
        unit_argv(tmp_path, "llama-server -c 1\nExecStart=llama-server -c 2")


def test_systemd_passes_export_over_and_compose_does_not(tmp_path):
    write(tmp_path / "e", "export A=1\nB=2\n")
    unit = write(tmp_path / "x.service", f"[Service]\nEnvironmentFile={tmp_path}/e\nExecStart=llama-server\n")
    assert read(unit).commands[0].environ == {"B": "2"}
    compose = write(tmp_path / "c.yaml", "services:\n  s: {command: llama-server, env_file: e}\n")
    assert read(compose).commands[0].environ == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("entries", "limit"),
    [("MemoryMax=2G\nMemoryLimit=1G", 2**31), ("MemoryLimit=1G\nMemoryMax=2G", 2**31), ("MemoryLimit=1G", 2**30), ("MemoryLimit=1G\nMemoryMax=infinity", 2**30), ("MemoryMax=0", None)],
)
def test_memory_max_beats_memory_limit(entries, limit, tmp_path):
    unit = write(tmp_path / "x.service", f"[Service]\n{entries}\nExecStart=llama-server\n")
    assert read(unit).commands[0].host_limit_bytes == limit


def test_a_units_relative_paths_are_those_of_its_working_directory(judge, gemma_path):
    folder, name = Path(gemma_path).parent, Path(gemma_path).name
    unit = f"[Service]\nWorkingDirectory=-{folder}\nExecStart=llama-server -m {name} -c 512\n"
    assert judge("x.service", unit)[0] == 0
    code, _, err = judge("x.service", unit.replace(f"-{folder}", "~"))
    assert (code, "x.service:3:24: x.service: " + name + " is a relative path, and WorkingDirectory=~ is the home of the unit's user" in err) == (2, True), err
    code, _, err = judge("x.service", unit.replace(f"WorkingDirectory=-{folder}\n", ""))
    assert (code, "WorkingDirectory= is not set" in err) == (2, True), err
    code, _, err = judge("x.service", unit.replace(f"WorkingDirectory=-{folder}", "User=llama"))
    assert (code, f"/{name}: no such file" in err) == (2, True), "a unit of the system starts in /"
    code, _, err = judge("x.service", unit.replace("WorkingDirectory=-", "RootDirectory="))
    assert (code, "x.service:2:15: RootDirectory gives the process a file tree of its own" in err) == (2, True), err


def test_services_with_profiles_are_no_part_of_the_sum_unless_asked_for(tmp_path):
    path = write(
        tmp_path / "c.yaml",
        "services:\n  a: {command: llama-server}\n  b: {command: llama-server, profiles: [big]}\n  c: {command: llama-server, profiles: [small]}\n  d: {command: llama-server}\n",
    )
    found = read(path)
    assert [c.name for c in found.commands] == ["a", "b", "c", "d"]
    assert found.groups == (("a", "d"),)
    assert [str(w.where) for w in found.warnings] == [f"{path}:3:40", f"{path}:4:40"]
    assert read(path, COMPOSE_PROFILES="other,big").groups == (("a", "b", "d"),)
    assert read(path, COMPOSE_PROFILES="*").groups == (("a", "b", "c", "d"),)


@pytest.mark.parametrize("setting", ["scale: {}", "deploy: {{replicas: {}}}"])
def test_a_service_counts_as_often_as_it_is_started(setting, tmp_path):
    path = tmp_path / "c.yaml"

    def service(count):
        return read(write(path, f"services:\n  a: {{command: llama-server}}\n  b: {{command: llama-server, {setting.format(count)}}}\n"))

    assert service(3).groups == (("a", "b", "b", "b"),)
    none = service(0)
    assert ([c.name for c in none.commands], none.groups) == (["a"], ())
    assert [str(w) for w in none.warnings] == [f"{path}:3:16: the service b is started 0 times: it is not judged"]
    for count in ("-1", "1001", "99999999999", "some"):
        with pytest.raises(InputError, match=r"c.yaml:3:\d+: .* is no number of containers from 0 to 1000"):
            service(count)


def test_the_sum_of_a_service_started_twice(judge):
    service = "services:\n  a:\n    image: llama.cpp:server-cuda\n    gpus: all\n    scale: {}\n    volumes: ['MODELS:MODELS']\n    command: -m GEMMA -c 5000000\n"
    assert judge("c.yaml", service.format(1))[0] == 0
    code, out, _ = judge("c.yaml", service.format(2))
    assert (code, "VETO  2 launches at once: a + a" in out) == (1, True), out


@pytest.mark.parametrize("name", ["compose.yaml", "docker-compose.yml"])
def test_the_override_file_is_merged_as_docker_compose_does(name, tmp_path):
    path = write(tmp_path / name, "services:\n  a: {command: llama-server -c 1, environment: {A: 1}}\n")
    over = write(tmp_path / "compose.override.yaml", "services:\n  a: {command: llama-server -c 2, environment: {B: 2}}\n  b: {command: llama-server}\n")
    a, b = read(path).commands
    assert (a.argv[2], a.environ, a.places[2].file, b.name) == ("2", {"A": "1", "B": "2"}, str(over), "b")
    other = write(tmp_path / "mine.yaml", path.read_text())
    assert len(read(other).commands) == 1


def test_a_variable_that_is_not_set_is_a_warning(tmp_path):
    path = write(tmp_path / "c.yaml", "services:\n  a:\n    image: ${IMG}\n    command: llama-server -c ${CTX:-5} -a ${IMG}${B-}\n  db: {image: postgres, environment: {P: '${PASS}'}}\n")
    found = read(path)
    assert [str(w) for w in found.warnings] == [f"{path}:4:14: the variable IMG is not set: compose puts in nothing"]
    assert read(path, IMG="x").warnings == ()


def test_a_service_that_seems_to_serve_a_model_and_is_passed_over_is_told(tmp_path):
    path = write(tmp_path / "c.yaml", "services:\n  a: {command: llama-server}\n  b: {image: mine, command: [/start.sh, -m, /m/x.gguf]}\n  c: {image: mine, environment: {LLAMA_ARG_CTX_SIZE: 5}}\n")
    assert [str(w) for w in read(path).warnings] == [
        f"{path}:3:45: the service b starts '/start.sh', which is no program of an engine residency knows: it is not judged",
        f"{path}:4:14: the service c does not say what it starts: it is not judged",
    ]


def test_files_of_variables_that_are_taken_without_end_are_refused(tmp_path):
    write(tmp_path / "e", "".join(f"A{i}=1\n" for i in range(3000)))
    path = write(tmp_path / "c.yaml", "services:\n  s:\n    command: llama-server\n    env_file: [" + "e, " * 30_000 + "]\n")
    with pytest.raises(InputError, match=r"c.yaml:4:115: from here on the services take more than 100000 variables from files"):
        read(path)
