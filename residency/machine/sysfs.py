"""AMD and Intel devices from sysfs, where the kernel driver publishes their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.text import clean

from .model import Device, Pool

if TYPE_CHECKING:
    from pathlib import Path

_VENDORS = {"0x1002": ("rocm", "ROCm", "AMD"), "0x8086": ("sycl", "SYCL", "Intel")}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii", errors="replace").strip())
    except (OSError, ValueError):
        return None


def _word(path: Path) -> str | None:
    try:
        return clean(path.read_text(encoding="utf-8", errors="replace").strip()) or None
    except OSError:
        return None


def probe_sysfs(root: Path, host: Pool) -> tuple[tuple[Pool, ...], tuple[Device, ...], dict[str, str]]:
    """Return pools and devices of AMD and Intel cards, and why what is unknown is unknown.

    An AMD device whose carve-out is smaller than its GTT takes its memory from the host: one pool.
    """
    pools: list[Pool] = []
    devices: list[Device] = []
    unknown: dict[str, str] = {}
    counts: dict[str, int] = {}
    for card in sorted(root.glob("sys/class/drm/card[0-9]*/device")):
        if "-" in card.parent.name:
            continue  # a connector, not a card
        vendor = _VENDORS.get(_word(card / "vendor") or "")
        if vendor is None:
            continue
        kind, prefix, maker = vendor
        index = counts.get(kind, 0)
        counts[kind] = index + 1
        name = f"{prefix}{index}"
        total, used = _number(card / "mem_info_vram_total"), _number(card / "mem_info_vram_used")
        gtt, gtt_used = _number(card / "mem_info_gtt_total"), _number(card / "mem_info_gtt_used")
        model = _word(card / "product_name") or f"{maker} device {_word(card / 'device') or ''}".strip()
        if total is None:
            unknown[f"memory of {name}"] = f"no readable {card / 'mem_info_vram_total'}"
        integrated = total is not None and gtt is not None and host.total_bytes is not None and total + gtt >= host.total_bytes // 2 and total < gtt
        if integrated:
            devices.append(Device(name=name, kind=kind, pool=host.name, model=model, integrated=True))
            unknown[f"ceiling of {name}"] = f"GTT reports {gtt} bytes, {gtt_used or 0} used; what the runtime grants of it is not published"
            continue
        free = total - used if total is not None and used is not None else None
        pools.append(Pool(name=name, total_bytes=total, free_bytes=free, evidence=f"sysfs {card.parent.name}" if total is not None else None))
        devices.append(Device(name=name, kind=kind, pool=name, model=model, integrated=None if total is None else False))
    return tuple(pools), tuple(devices), unknown
