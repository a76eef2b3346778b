"""Every device the launch names is there.

What: the devices named by the launch exist on this machine, none is named twice, the main device's
index is in range, and a back end that is asked for has at least one device.

Why: engines differ in what they do with a device that is not there: some stop, some fall back to the
CPU without a word and then run a hundred times slower, and a card that was renumbered by
CUDA_VISIBLE_DEVICES is a different card. Reported as a silent CPU fallback in
https://github.com/mudler/vllm.cpp/issues/2505 and its neighbours.

Fix: name one of the devices listed in the message, or let the engine choose.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way

if TYPE_CHECKING:
    from residency.machine.model import Machine
    from residency.rules import Facts

rule = Rule(id="devices/exist")


def _some(names: list[str], one: str, many: str) -> str:
    shown = ", ".join(names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{one if len(names) == 1 else many} {shown}{more}"


def _instead(machine: Machine, there: list[str]) -> list[list[str]]:
    """Return lists of devices to name instead: those named that exist, all there are, one alone."""
    every = [d.name for d in machine.accelerators]
    found: list[list[str]] = []
    for names in (there, every, *([name] for name in every)):
        if names and names not in found:
            found.append(names)
    return found[:3]


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Look every named device up in the machine."""
    machine, launch = facts.machine, facts.launch
    listed = ", ".join(d.name for d in machine.accelerators) or "none"
    findings: list[Finding] = []
    ids = launch.get("device.ids") or []
    remote = bool(launch.options.get("rpc"))
    counts = Counter(name.casefold() for name in ids)
    once = {name.casefold(): name for name in ids}
    missing = [name for name in once.values() if machine.device(name) is None and not (remote and name.casefold().startswith("rpc"))]
    if missing:
        ways = tuple(Way(knob="device.ids", value=names) for names in _instead(machine, [n for n in once.values() if n not in missing]))
        findings.append(rule.veto(f"There {_some(missing, 'is no device', 'are no devices')} on {machine.name}; there is: {listed}.", knob="device.ids", ways=ways))
    if twice := [name for folded, name in once.items() if counts[folded] > 1 and name not in missing]:
        findings.append(rule.veto(f"{_some(twice, 'Named twice: the device', 'Named twice: the devices')}.", knob="device.ids"))
    kind = launch.get("device.kind")
    if kind not in (None, "auto", "cpu") and all(d.kind != kind for d in machine.devices):
        why = "".join(f" {fact[:1].upper()}{fact[1:]}." for fact in machine.facts)
        findings.append(
            rule.veto(
                f"The launch asks for {kind}, and {machine.name} has no such device; there is: {listed}.{why}",
                knob="device.kind",
                ways=(Way(knob="device.kind", value="cpu"),),
            )
        )
    main = launch.get("device.main")
    count = len(ids) or len(machine.accelerators)
    told = any(remark.knob == "device.main" for remark in facts.budget.remarks)  # the engine's own order of devices is the better one
    if main is not None and count and main >= count and launch.get("layers.split") == "none" and not told:
        findings.append(
            rule.veto(
                f"Main device {main} does not exist: the launch sees {count}, numbered from 0.",
                knob="device.main",
                ways=(Way(knob="device.main", value=0),),
            )
        )
    return findings or rule.approve(f"devices: {', '.join(ids) or listed}")
