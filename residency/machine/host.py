"""Host memory: /proc/meminfo, and the cgroup limits along the whole path."""

from __future__ import annotations

import platform
from pathlib import Path

from .model import Host, Pool

#: A cgroup v1 "no limit" is a number near 2**63; anything above this is no limit.
_NO_LIMIT = 2**60


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def read_meminfo(root: Path) -> dict[str, int]:
    """Return /proc/meminfo in bytes; empty when there is none."""
    found = {}
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        parts = line.replace(":", " ").split()
        if len(parts) >= 2 and parts[1].isdigit():
            found[parts[0]] = int(parts[1]) * (1024 if parts[-1] == "kB" else 1)
    return found


def _stat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_text(path) or "").splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}


def cgroup_room(root: Path) -> tuple[int | None, int | None]:
    """Return (limit, room) of the tightest memory cgroup around this process, bytes; None: no limit.

    Room is limit - usage, with the reclaimable file cache counted as room: the kernel drops clean
    page cache before it fails an allocation.
    """
    tightest: tuple[int, int] | None = None
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[1] == "":  # v2
            base, limit_name, usage_name = root / "sys/fs/cgroup", "memory.max", "memory.current"
            cache_keys: tuple[str, ...] = ("active_file", "inactive_file", "slab_reclaimable")
        elif "memory" in parts[1].split(","):
            base, limit_name, usage_name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_keys = ("total_active_file", "total_inactive_file")
        else:
            continue
        # In a container the path may name a folder of the host's tree; then only the mounted root is visible.
        folder = base.joinpath(*[p for p in parts[2].split("/") if p not in ("", "..")])
        for step in (folder, *folder.parents):
            if step != base and base not in step.parents:
                break
            limit = _number(step / limit_name)
            if limit is None or limit >= _NO_LIMIT:
                continue
            usage = _number(step / usage_name) or 0
            stat = _stat(step / "memory.stat")
            reclaimable = sum(stat.get(key, 0) for key in cache_keys)
            room = max(0, limit - usage + min(reclaimable, usage))
            if tightest is None or room < tightest[1]:
                tightest = (limit, room)
    return tightest or (None, None)


def _memlock() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY else soft


def probe_host(root: Path = Path("/")) -> tuple[Pool, Host, tuple[str, ...], dict[str, str]]:
    """Return the host pool, host facts, sentences for people, and why unknown facts are unknown."""
    meminfo = read_meminfo(root)
    total, free = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
    unknown: dict[str, str] = {}
    facts: list[str] = []
    if total is None:
        unknown["host memory"] = f"no readable {root / 'proc/meminfo'}"
    limit, room = cgroup_room(root)
    evidence = "/proc/meminfo MemTotal, MemAvailable"
    if limit is not None and room is not None and (total is None or limit < total):
        facts.append(f"memory cgroup limits this process to {limit} bytes")
        evidence = "memory cgroup limit and usage, reclaimable cache counted as free"
        total = limit
        free = room if free is None else min(room, free)
    pool = Pool(name="host", total_bytes=total, free_bytes=free, evidence=evidence if total is not None else None)
    release = (_text(root / "proc/sys/kernel/osrelease") or "").casefold()
    host = Host(
        memlock_bytes=_memlock(),
        swap_free_bytes=meminfo.get("SwapFree"),
        cgroup_limit_bytes=limit,
        container=(root / ".dockerenv").exists() or (root / "run/.containerenv").exists(),
        wsl="microsoft" in release,
        system=platform.system().casefold() or None,
    )
    return pool, host, tuple(facts), unknown
