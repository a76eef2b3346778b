"""Kernels that are to read host memory can read it.

What: a launch that leaves weights in plain host memory for the device's kernels to read runs on a device
whose kernels can (pageable access). That is a fact of its own: an integrated device, one address space
or managed memory do not imply it, and unknown is not "no".

Why: Strix Halo is integrated and manages memory, and its kernels cannot read pageable host memory, so
host slots are of no use there (https://github.com/mudler/vllm.cpp/issues/2515); using one predicate for
another has been a bug more than once (https://github.com/mudler/vllm.cpp/issues/2507).

Fix: switch the setting off, or compute on the CPU; where it is unknown, probe on the machine or write
``pageable_access`` into the profile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way

from .limits import filled, over

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="unified-memory/host-access")


@rule.check
def check(facts: Facts) -> Finding:
    """Look at the device whose kernels the launch lets read host memory."""
    name = facts.budget.facts.get("reads_host_memory")
    device = facts.machine.device(name) if isinstance(name, str) else None
    if device is None:
        return rule.not_applicable("no kernel is to read plain host memory")
    if device.integrated is False:
        return rule.not_applicable(f"{device.name} has memory of its own")
    exceeded = any(over(found, facts) is not None for found in filled(facts) if found.pool.name == device.pool)
    if device.pageable_access is None:
        message = f"Expert streaming lets the kernels of {device.name} read plain host memory, and whether they can (pageable access) is unknown."
        if exceeded:
            return rule.cannot_tell(f"{message} Without it the launch does not fit.", knob="experts.stream", pool=device.pool)
        return rule.warn(f"{message} The launch fits either way.", knob="experts.stream", pool=device.pool)
    if device.pageable_access is False:
        message = f"Expert streaming lets the kernels of {device.name} read plain host memory, and they cannot (no pageable access)"
        ways = (Way(knob="device.kind", value="cpu", note="slower"),)
        if exceeded:
            return rule.veto(
                f"{message}; with the whole experts on the device the launch does not fit.", knob="experts.stream", pool=device.pool,
                missing="device-expert-slots", ways=ways,
            )
        return rule.warn(f"{message}; the experts are uploaded whole instead.", knob="experts.stream", pool=device.pool)
    return rule.approve(f"kernels of {device.name} read pageable host memory")
