"""Rules about the devices a launch names."""

from __future__ import annotations

import pytest

from residency.testing import facts, finding

from residency_plugins.devices import exist  # isort: skip

TWO = {
    "name": "two",
    "pools": [{"name": n, "total": "24GiB", "free": "23GiB"} for n in ("CUDA0", "CUDA1", "host")],
    "devices": [{"name": n, "kind": "cuda", "pool": n} for n in ("CUDA0", "CUDA1")],
}  # fmt: skip


def asked(**device):
    return finding(exist.rule, facts(launch={"device": device}, machine=TWO))


def test_devices_that_are_there():
    assert asked(ids=["CUDA0", "cuda1"]).outcome == "approve"
    assert asked().message == "devices: CUDA0, CUDA1"


@pytest.mark.parametrize(
    ("ids", "said", "offered"),
    [
        (["CUDA2"], "There is no device CUDA2 on two; there is: CUDA0, CUDA1.", [["CUDA0", "CUDA1"], ["CUDA0"], ["CUDA1"]]),
        (["CUDA2", "CUDA1"], "There is no device CUDA2 on two; there is: CUDA0, CUDA1.", [["CUDA1"], ["CUDA0", "CUDA1"], ["CUDA0"]]),
        (["CUDA2", "CUDA3"], "There are no devices CUDA2, CUDA3 on two; there is: CUDA0, CUDA1.", [["CUDA0", "CUDA1"], ["CUDA0"], ["CUDA1"]]),
    ],
)
def test_absent_devices_offer_those_named_that_exist_then_all(ids, said, offered):
    found = asked(ids=ids)
    assert (found.outcome, found.knob, found.message) == ("veto", "device.ids", said)
    assert [way.value for way in found.ways] == offered


def test_a_device_named_twice():
    assert asked(ids=["CUDA0", "CUDA0"]).message == "Named twice: the device CUDA0."


def test_a_kind_without_a_device():
    found = asked(kind="vulkan")
    assert found.message == "The launch asks for vulkan, and two has no such device; there is: CUDA0, CUDA1."
    assert [(way.knob, way.value) for way in found.ways] == [("device.kind", "cpu")]
