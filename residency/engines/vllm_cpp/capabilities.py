"""What vllm.cpp can do, per device platform and tree. Data only.

Platforms are those of :func:`residency.engines.base.platform_of`. "host-expert-slots" on an integrated
device is granted by the platform and still needs the conditions of ``lane.py`` on each launch.
"""

from __future__ import annotations

from residency.engines.base import Capability, CapabilityTable

from .versions import DEVICE_LANE, DEVICE_SELECTION, FIT_CHECK, STREAMING

_ISSUES = "https://github.com/mudler/vllm.cpp/issues"
#: Why the lane is not trusted yet: it decodes, and its tokens are not the CPU's.
PARITY = "it decodes, but its token-parity gate against the CPU fails, so its answers are not established to be the model's"

# fmt: off
CAPABILITIES = CapabilityTable(
    rows=(
        Capability(id="disk-borrowed-weights", title="weights borrowed from the file mapping", platforms=("cpu",),
                   evidence="keep-quant weights of a GGUF are computed on in place on the CPU"),
        Capability(id="host-expert-slots", title="host expert slot store", platforms=("cpu",), since=STREAMING,
                   evidence=f"{_ISSUES}/1123: the slot store is host memory and its lane is for the CPU"),
        Capability(id="host-expert-slots", title="host expert slot store", platforms=("cuda-integrated", "rocm-integrated"), since=DEVICE_LANE,
                   evidence=f"{_ISSUES}/1124", unverified=PARITY),
        Capability(id="expert-slices", title="experts handed to the kernel one slice at a time", platforms=("cpu",), since=STREAMING,
                   evidence=f"{_ISSUES}/1123"),
        Capability(id="expert-slices", title="experts handed to the kernel one slice at a time", platforms=("cuda-integrated",), since=DEVICE_LANE,
                   evidence=f"{_ISSUES}/1124", unverified=PARITY),
        Capability(id="load-time-fit-check", title="check at load that the weights fit the device", platforms=("cuda",), since=FIT_CHECK,
                   evidence=f"{_ISSUES}/1123"),
        Capability(id="load-time-fit-check", title="check at load that the weights fit the device", platforms=("rocm",), since=DEVICE_LANE,
                   evidence=f"{_ISSUES}/1934"),
        Capability(id="device-selection", title="device named on the command line", platforms=("cpu", "cuda"), since=DEVICE_SELECTION,
                   evidence=f"{_ISSUES}/2505: rocm, metal and vulkan are reached through auto only"),
        Capability(id="weight-staging", title="weights uploaded to the device at the first forward", platforms=("cuda",), evidence=f"{_ISSUES}/1897"),
        Capability(id="expert-placement", title="experts computed on the CPU", platforms=("cuda-discrete",), since=DEVICE_LANE, evidence=f"{_ISSUES}/149"),
        Capability(id="kv-on-host", title="KV cache in host memory", evidence="VT_DEVICE_KV_CACHE=0"),
        Capability(id="projector-qwen3vl_merger", title="projector of type qwen3vl_merger", since="2026.08", evidence=f"{_ISSUES}/821"),
    ),
    titles={
        "device-expert-slots": "device-side expert slot store",
        "kv-streaming": "KV cache streamed from host memory",
        "kv-offload-disk": "KV cache offloaded to CPU memory and disk",
        "weight-offload": "weights offloaded to the CPU (uva, prefetch)",
        "split-layer": "split of whole layers over devices",
        "split-row": "split of weight rows over devices",
        "split-tensor": "tensor-parallel split",
        "vision-request-path": "requests with images to a GGUF model",
        "vision-encoder": "forward that uses the vision tower of a GGUF model",
    },
)
# fmt: on
