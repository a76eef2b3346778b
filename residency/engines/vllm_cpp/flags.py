"""Command line of vllm-server and vllm-cli. Data only.

Source: the server's flag parser of the tree of October 2026 (``server_main.cpp``). A flag and its value
are two arguments; ``--flag=value`` is not understood, and any other argument stops the program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .versions import DEVICE_SELECTION, DOCUMENT

Kind = Literal["int", "float", "text", "path", "json", "flag", "device", "kv-type"]

DEVICES = ("auto", "cpu", "cuda")
KV_TYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with all its names."""

    target: str  # knob, or "option:NAME"
    names: tuple[str, ...]
    kind: Kind
    negative: tuple[str, ...] = ()
    since: str | None = None
    least: int = 0  # smallest whole number taken


def _f(target: str, names: str, kind: Kind, negative: str = "", since: str | None = None, least: int = 0) -> Flag:
    return Flag(target, tuple(names.split()), kind, tuple(negative.split()), since, least)


# fmt: off
FLAGS: tuple[Flag, ...] = (
    _f("model.path", "--model", "path"),
    _f("device.kind", "--device", "device", since=DEVICE_SELECTION),
    _f("kv.block_size", "--block-size", "int", least=1),
    _f("kv.blocks", "--num-blocks", "int"),
    _f("kv.memory", "--kv-cache-memory", "int"),
    _f("option:gpu-memory-utilization", "--gpu-memory-utilization", "float"),
    _f("kv.key_type", "--kv-cache-dtype", "kv-type"),
    _f("context.length", "--max-model-len", "int"),
    _f("context.sequences", "--max-num-seqs", "int", least=1),
    _f("context.batch", "--max-num-batched-tokens", "int"),
    _f("option:enable-prefix-caching", "--enable-prefix-caching --enable-radix-attention", "flag",
       negative="--no-enable-prefix-caching --disable-radix-attention"),
    _f("option:offload-config", "--offload-config", "json", since=DOCUMENT),
    _f("option:kv-transfer-config", "--kv-transfer-config", "json"),
    _f("option:speculative-config", "--speculative-config", "json"),
    _f("option:limit-mm-per-prompt", "--limit-mm-per-prompt", "json"),
    _f("model.mmproj", "--mmproj", "path", since=DEVICE_SELECTION),
    _f("option:language-model-only", "--language-model-only", "flag", negative="--no-language-model-only"),
    _f("option:speech-model", "--speech-model", "path", since=DEVICE_SELECTION),
    _f("option:speech-device", "--speech-device", "int", since=DEVICE_SELECTION),
    _f("option:video-dit", "--video-dit", "path"),
    _f("option:video-encoder", "--video-encoder", "path"),
    _f("option:video-device", "--video-device", "text"),
)

#: Flags without bearing on memory: without a value, and with one.
_NO_VALUE = """
--enable-force-include-usage --enable-tokenizer-info-endpoint --enable-server-dev-mode --verbose -v --enable-thinking
--no-enable-thinking --enable-log-requests --disable-log-requests --enable-log-outputs --enable-metrics
--disable-metrics --enable-jump-forward --disable-jump-forward --disable-sliding-window --enable-sliding-window
--video-keep-quant --video-dequant-bf16 --enable-auto-tool-choice --trust-remote-code --version -h --help --stream
"""
_ONE_VALUE = """
--host --port --revision --download-dir --tokenizer-config --served-model-name --cuda-profile-graph-replays
--cuda-profile-graph-batch --benchmark-shutdown-fifo --video-vae --video-vae-config --audio-vae --audio-vae-config
--video-tokenizer --video-encoder-max-layers --video-prompt-embeds --video-workdir --video-ffmpeg --video-partition
--video-family --speech-family --video-extra --max-log-len --scheduling-policy --schedule-policy --generation-config
--tool-call-parser --reasoning-parser --prompt --max-tokens --temperature --top-p --top-k --seed
"""
SILENT: dict[str, int] = {**dict.fromkeys(_NO_VALUE.split(), 0), **dict.fromkeys(_ONE_VALUE.split(), 1)}
# fmt: on

#: Flags with which a program prints something and ends.
INFORMATION = ("--version", "-h", "--help")

#: Flags of other engines whose absence means a missing capability: name -> what to know.
FOREIGN: dict[str, str] = {
    "--tensor-parallel-size": "this is an engine for one device; it has no tensor parallelism",
    "-tp": "this is an engine for one device; it has no tensor parallelism",
    "--pipeline-parallel-size": "this is an engine for one device; it has no pipeline parallelism",
    "--enable-expert-parallel": "this is an engine for one device; it has no expert parallelism",
    "--mm-encoder-tp-mode": "this is an engine for one device; it has no tensor parallelism",
    "--cpu-offload-gb": "weights are not offloaded to the CPU; see --offload-config for what exists",
}
