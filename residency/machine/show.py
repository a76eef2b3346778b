"""A machine for people, and as a profile that ``--machine`` takes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from residency.text import clean
from residency.units import size

from .profile import to_mapping

if TYPE_CHECKING:
    from .model import Device, Machine

_PREDICATES = (
    ("integrated", "integrated"), ("unified_addressing", "unified addressing"), ("managed_memory", "managed memory"),
    ("pageable_access", "reads plain host memory"), ("host_page_tables", "host page tables"),
    ("concurrent_managed_access", "concurrent managed access"), ("display_attached", "display attached"),
)  # fmt: skip
_WORD = {True: "yes", False: "no", None: "unknown"}


def render(machine: Machine, form: str) -> str:
    """Return the machine as "text", "json" or "toml"."""
    if form == "json":
        return json.dumps(to_mapping(machine), indent=2)
    if form == "toml":
        import tomli_w

        return tomli_w.dumps(to_mapping(machine)).rstrip("\n")
    lines = [clean(machine.name)]
    lines += [f"  {clean(fact)}" for fact in machine.facts]
    for pool in machine.pools:
        ceiling = f", usable at most {size(pool.ceiling_bytes)}" if pool.ceiling_bytes is not None else ""
        lines.append(f"pool {clean(pool.name):<10} {size(pool.free_bytes)} free of {size(pool.total_bytes)}{ceiling}")
        if pool.evidence:
            lines.append(f"  from {clean(pool.evidence)}")
    for device in machine.devices:
        lines += _device(device)
    host = machine.host
    lock = "unlimited" if host.memlock_bytes == -1 else size(host.memlock_bytes)
    lines.append(f"host: lockable memory {lock}, swap free {size(host.swap_free_bytes)}")
    lines += [f"unknown: {clean(what)}: {clean(why)}" for what, why in machine.unknown.items()]
    return "\n".join(lines)


def _device(device: Device) -> list[str]:
    capability = f", compute capability {device.compute_capability}" if device.compute_capability else ""
    place = f" at {device.pci_id}" if device.pci_id else ""
    lines = [clean(f"device {device.name}: {device.model or device.kind}{capability}{place}, memory from pool {device.pool}")]
    lines.append("  " + ", ".join(f"{label}: {_WORD[getattr(device, name)]}" for name, label in _PREDICATES))
    if device.peers is not None:
        lines.append(f"  direct access to: {clean(', '.join(device.peers)) or 'no other device'}")
    lines += [f"  held by {clean(tenant)}" for tenant in device.tenants]
    return lines
