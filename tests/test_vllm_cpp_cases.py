"""Every published launch of vllm.cpp that there is, with the verdict it deserves; docs/cases-vllm-cpp.md says the same.

``python tests/test_vllm_cpp_cases.py`` writes the page.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
import tomli

import residency
from residency.checkpoint import census
from residency.checkpoint.model import Checkpoint, ModelFile, Tensor
from residency.checkpoint.roles import role_and_layer
from residency.checkpoint.types import TYPES, data_bytes
from residency.errors import InputError

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cases-vllm-cpp.md"
CASES = tomli.loads((Path(__file__).parent / "data" / "vllm_cpp_cases.toml").read_text(encoding="utf-8"))["case"]

MACHINES = {
    # 16,304 MiB as the driver reports it; a discrete card.
    "rx-9060-xt": {
        "name": "RX 9060 XT 16 GB",
        "pools": [{"name": "ROCm0", "total": "16304MiB", "free": "16000MiB"}, {"name": "host", "total": "62GiB", "free": "58GiB"}],
        "devices": [{"name": "ROCm0", "kind": "rocm", "pool": "ROCm0", "integrated": False, "pageable_access": False}],
    },
    "x86-64gb": {"name": "x86, 64 GB", "pools": [{"name": "host", "total": "62GiB", "free": "58GiB"}]},
}


def tensor(name, kind, *shape):
    type_id = next(number for number, known in TYPES.items() if known.name == kind)
    role, layer = role_and_layer(name)
    return Tensor(name, type_id, kind, shape, data_bytes(type_id, shape), 0, 0, role, layer)


def checkpoint(architecture, tensors, **hparams):
    placed, offset = [], 0
    for t in tensors:
        placed.append(t._replace(offset=offset))
        offset += (t.nbytes + 31) // 32 * 32
    metadata = {"general.architecture": architecture, **{k if k.startswith("clip") else f"{architecture}.{k}": v for k, v in hparams.items()}}
    file = ModelFile(path="model.gguf", size_bytes=offset + 4096, data_offset=4096, version=3)
    return Checkpoint(path="model.gguf", source="gguf", files=(file,), metadata=metadata, tensors=tuple(placed), declared_tensors=len(placed))


def hybrid(layers, width, kind, *, experts=0, inner=512, expert_kind=None, vocabulary=151936):
    """A Qwen3.5-like model: three layers with a recurrent state, then one with attention."""
    rows = [tensor("token_embd.weight", "Q4_K", width, vocabulary), tensor("output.weight", "Q6_K", width, vocabulary)]
    rows.append(tensor("output_norm.weight", "F32", width))
    for n in range(layers):
        at = f"blk.{n}."
        rows.append(tensor(f"{at}attn_norm.weight", "F32", width))
        if n % 4 == 3:
            rows += [tensor(f"{at}attn_q.weight", kind, width, 2 * width), tensor(f"{at}attn_output.weight", kind, width, width)]
            rows += [tensor(f"{at}attn_k.weight", kind, width, 1024), tensor(f"{at}attn_v.weight", kind, width, 1024)]
        else:
            rows += [tensor(f"{at}attn_qkv.weight", kind, width, 2 * width), tensor(f"{at}ssm_out.weight", kind, width, width)]
            rows.append(tensor(f"{at}attn_gate.weight", kind, width, width))
        if experts:
            rows += [tensor(f"{at}ffn_{part}_exps.weight", expert_kind or kind, width, inner, experts) for part in ("gate", "up")]
            rows.append(tensor(f"{at}ffn_down_exps.weight", expert_kind or kind, inner, width, experts))
        else:
            rows += [tensor(f"{at}ffn_{part}.weight", kind, width, inner) for part in ("gate", "up")]
            rows.append(tensor(f"{at}ffn_down.weight", kind, inner, width))
    more = {"expert_count": experts, "expert_used_count": 8, "expert_feed_forward_length": inner} if experts else {"feed_forward_length": inner}
    return checkpoint(
        "qwen35moe" if experts else "qwen35", rows, block_count=layers, embedding_length=width, context_length=262144, vocab_size=vocabulary,
        **{"attention.head_count": max(width // 256, 16), "attention.head_count_kv": 4, "attention.key_length": 256, "attention.value_length": 256,
           "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 4096}, **more,
    )  # fmt: skip


def projector(width):
    rows = [tensor("v.patch_embd.weight", "F16", 16, 16, 3, 1152), tensor("v.patch_embd.weight.1", "F16", 16, 16, 3, 1152)]
    rows += [tensor(f"v.blk.{n}.ffn_up.weight", "BF16", 1152, 4304) for n in range(27)] + [tensor(f"v.blk.{n}.ffn_down.weight", "BF16", 4304, 1152) for n in range(27)]
    rows += [tensor("mm.0.weight", "BF16", 4608, 4608), tensor("mm.2.weight", "BF16", 4608, width)]
    return checkpoint("clip", rows, **{"clip.projector_type": "qwen3vl_merger", "clip.has_vision_encoder": True, "clip.vision.projection_dim": width})


@cache
def shape(name):
    return {
        # Sizes of the published files: 7.87 GiB, and 17,106,775,008 bytes, as near as one encoding comes.
        "14b-a3b": lambda: hybrid(40, 2048, "Q4_K", experts=108, inner=512),
        "27b-q4_k_m": lambda: hybrid(64, 5120, "Q4_K", inner=17408, vocabulary=248320),
        "27b-q1_0": lambda: hybrid(64, 5120, "Q1_0", inner=17408, vocabulary=248320),
        "moe-48gib": lambda: hybrid(48, 4096, "Q4_K", experts=296, inner=512),
        "moe-nvfp4": lambda: hybrid(60, 4096, "NVFP4", experts=640, inner=1024),
        "mmproj-bf16": lambda: projector(5120),
    }[name]()


@pytest.fixture(scope="session")
def census_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")

    def path(name):
        if name == "2.4t":
            return str(ROOT / "configs" / "models" / "qwen3.8-2.4t-a95b-ud-q1_0.census.json")
        file = folder / f"{name}.census.json"
        if not file.exists():
            census.save(shape(name), str(file))
        return str(file)

    return path


def test_the_shapes_are_of_the_published_sizes():
    assert shape("14b-a3b").tensor_bytes == pytest.approx(7.87 * 2**30, rel=0.03)
    assert shape("27b-q4_k_m").tensor_bytes == pytest.approx(17_106_775_008, rel=0.13)  # of one encoding here, of a mixture there


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_case(case, census_of):
    argv = [case.get("program", "vllm-server"), "--model", census_of(case["model"]), *case["arguments"]]
    if "mmproj" in case:
        argv += ["--mmproj", census_of(case["mmproj"])]
    machine = MACHINES.get(case["machine"], case["machine"])
    more = {"engine": case["engine"], "machine": machine, "environ": case.get("environ", {}), "overrides": case.get("overrides", ())}
    if case["verdict"] == "unread":
        with pytest.raises(InputError) as caught:
            residency.validate(argv, **more)
        said = " ".join(p.message for p in caught.value.problems)
    else:
        report = residency.validate(argv, **more)
        loud = [f for f in report.findings if f.outcome in ("veto", "warn", "cannot-tell")]
        assert report.verdict == case["verdict"], [f"{f.rule}: {f.message}" for f in loud]
        assert sorted({f.rule for f in loud}) == case["rules"], [f"{f.rule}: {f.message}" for f in loud]
        said = " ".join(f.message for f in loud)
    for text in case["says"]:
        assert text in said


def render() -> str:
    """Return docs/cases-vllm-cpp.md."""
    lines = [
        "# vllm.cpp: published launches and their verdicts", "",
        "<!-- written by tests/test_vllm_cpp_cases.py -->", "",
        "Each row is a launch whose outcome the project published, and what residency says to it. The table is the one the",
        "tests run. *unread*: the program itself refuses the command line, and so does residency, with exit code 2.", "",
        "| Case | Launch | Version | Machine | Published outcome | residency |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for case in CASES:
        settings = " ".join([*(f"{k}={v}" for k, v in case.get("environ", {}).items()), *case["arguments"]])
        verdict = case["verdict"] + (f": {', '.join(case['rules'])}" if case.get("rules") else "")
        if "missing" in case:
            verdict += f". Missing to judge it: {case['missing']}"
        version = case["engine"].partition("@")[2] or "newest"
        lines.append(f"| {case['id']} | {case['what']}: `{settings}` | {version} | {case['machine']} | {case['outcome']} | {verdict} |")
    return "\n".join(lines) + "\n"


def test_the_page_says_what_the_tests_say():
    assert PAGE.read_text(encoding="utf-8") == render(), "python tests/test_vllm_cpp_cases.py writes it"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    sys.exit(0)
