"""Machine profiles: TOML or a mapping in, a Machine out.

The same keys in both; byte sizes in TOML may also be written ``total = "22GiB"``. What is absent
is unknown.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residency.data import named
from residency.errors import InputError, Problem
from residency.where import Where

from .model import Device, Host, Machine, Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    #: Gives a Problem with position and line for a path of keys and indexes.
    Locate = Callable[[tuple[str | int, ...]], Problem]

KINDS = ("cuda", "rocm", "metal", "vulkan", "sycl", "rpc", "cpu")
_TOP = ("name", "pools", "devices", "host", "host_pool", "facts", "driver_version", "evidence", "extends", "unknown")
_SIZES = ("total", "free", "reserved", "ceiling", "context", "largest_allocation", "memlock", "swap_free", "cgroup_limit")
_LARGEST_BYTES = 2**60


def load_machine(source: str | Path) -> Machine:
    """Read a profile by path, or by the name of a shipped one ("rtx-3090")."""
    text = str(source)
    path = Path(text)
    shipped = named("machines", ".toml")
    if not path.suffix and "/" not in text:
        if text not in shipped:
            close = difflib.get_close_matches(text, shipped, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"shipped profiles: {', '.join(shipped)}"
            raise InputError([Problem(message=f'no machine profile is called "{text}"', hint=hint)])
        path = shipped[text]
    document, locate = _document(path)
    return machine_from_mapping(document, name=path.stem, file=str(path), folder=path.parent, locate=locate)


def _document(path: Path) -> tuple[dict[str, Any], Locate | None]:
    """Return a profile's document, and what finds a position in it (TOML only)."""
    from residency.launch.toml_file import load_toml, read_text

    if path.suffix != ".json":
        return load_toml(path)
    import json

    try:
        found = json.loads(read_text(str(path)))
    except (ValueError, RecursionError) as error:
        raise InputError([Problem(message=f"not valid JSON: {error}", where=Where(source="file", file=str(path)))]) from error
    if not isinstance(found, dict):
        raise InputError([Problem(message="a profile is a table", where=Where(source="file", file=str(path)))])
    return found, None


class _Reader:
    """Reads a profile's tables strictly, gathering every problem."""

    def __init__(self, file: str | None, locate: Locate | None) -> None:
        self.file, self.locate = file, locate
        self.problems: list[Problem] = []

    def complain(self, message: str, hint: str | None = None, at: str = "") -> None:
        """Note a problem; ``at`` is the dotted path it stands at, "pools[0].total"."""
        base = Problem(message="", where=Where(source="file", file=self.file) if self.file else None)
        if self.locate is not None:
            base = self.locate(tuple(int(p) if p.isdigit() else p for p in re.split(r"[.\[\]]+", at) if p))
        self.problems.append(replace(base, message=message, hint=hint))

    def keys(self, table: Mapping[str, Any], legal: tuple[str, ...], at: str) -> None:
        for key in table:
            if key not in legal:
                close = difflib.get_close_matches(str(key), legal, n=1)
                self.complain(f"{at}{key} is not a key of a profile", f'did you mean "{close[0]}"?' if close else None, f"{at}{key}")

    def size(self, table: Mapping[str, Any], key: str, at: str) -> int | None:
        from residency.launch.sizes import parse_size

        plain, sized = table.get(f"{key}_bytes"), table.get(key)
        if plain is not None and sized is not None:
            self.complain(f"{at}{key} and {at}{key}_bytes are both given", at=f"{at}{key}")
            return None
        value = plain if plain is not None else sized
        if value is None:
            return None
        try:
            if isinstance(value, str) and plain is None:
                value = parse_size(value)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{value!r} is not a whole number of bytes")
            if not (-1 if key in _UNLIMITED else 0) <= value <= _LARGEST_BYTES:
                raise ValueError(f"{value} bytes is outside what a machine can have")
        except ValueError as error:
            self.complain(f"{at}{key}: {error}", at=f"{at}{key if plain is None else key + '_bytes'}")
            return None
        return int(value)

    def typed(self, table: Mapping[str, Any], key: str, kind: type, at: str) -> Any:
        value = table.get(key)
        if value is not None and (type(value) is not kind):
            self.complain(f"{at}{key} must be {_WORDS[kind]}, not {value!r:.60}", at=f"{at}{key}")
            return None
        return value

    def tables(self, document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        value = document.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            self.complain(f"{key} must be a list of tables", at=key)
            return []
        return value


#: Sizes that -1 means "no limit" for.
_UNLIMITED = frozenset({"memlock"})
_WORDS = {bool: "true or false", str: "a text", int: "a whole number", list: "a list"}
_DEVICE_TEXTS = ("model", "compute_capability", "pci_id", "uuid", "driver_model")
_DEVICE_FLAGS = (
    "integrated", "unified_addressing", "managed_memory", "pageable_access", "host_page_tables",
    "concurrent_managed_access", "display_attached", "memory_query",
)  # fmt: skip


def machine_from_mapping(document: Mapping[str, Any], *, name: str = "machine", file: str | None = None, folder: Path | None = None, locate: Locate | None = None) -> Machine:
    """Return the Machine a profile's mapping describes; raise InputError with every problem."""
    read = _Reader(file, locate)
    document = _extended(document, read, folder, ())
    read.keys(document, _TOP, "")
    pools = []
    for index, table in enumerate(read.tables(document, "pools")):
        at = f"pools[{index}]."
        read.keys(table, ("name", "evidence", "total", "free", "reserved", "ceiling", "total_bytes", "free_bytes", "reserved_bytes", "ceiling_bytes"), at)
        pool_name = read.typed(table, "name", str, at)
        if not pool_name:
            read.complain(f"{at}name is missing", at=at)
            continue
        pool = Pool(
            name=pool_name,
            total_bytes=read.size(table, "total", at),
            free_bytes=read.size(table, "free", at),
            reserved_bytes=read.size(table, "reserved", at) or 0,
            ceiling_bytes=read.size(table, "ceiling", at),
            evidence=read.typed(table, "evidence", str, at),
        )
        if pool.total_bytes is not None and pool.free_bytes is not None and pool.free_bytes > pool.total_bytes:
            read.complain(f"{at}free is {pool.free_bytes} bytes, more than its total of {pool.total_bytes}", at=f"{at}free")
        pools.append(pool)
    for duplicate in {p.name for p in pools if sum(q.name == p.name for q in pools) > 1}:
        read.complain(f'two pools are called "{duplicate}"')
    if not pools:
        read.complain("a profile needs at least one pool")
    devices = [d for i, t in enumerate(read.tables(document, "devices")) if (d := _device(read, t, i, pools)) is not None]
    for duplicate in {d.name for d in devices if sum(e.name == d.name for e in devices) > 1}:
        read.complain(f'two devices are called "{duplicate}"')
    host_table = document.get("host", {})
    if not isinstance(host_table, dict):
        read.complain("host must be a table", at="host")
        host_table = {}
    host = _host(read, host_table)
    host_pool = read.typed(document, "host_pool", str, "")
    if host_pool is not None and all(p.name != host_pool for p in pools):
        read.complain(f'host_pool names "{host_pool}", which is not a pool', at="host_pool")
    own = {d.pool for d in devices if d.integrated is False}
    if pools and host_pool is None and all(p.name != "host" and p.name in own for p in pools):
        read.complain('no pool is the host\'s memory: every one belongs to a discrete device; call the host\'s "host", or name it with host_pool')
    shown = read.typed(document, "name", str, "") or name
    facts = read.typed(document, "facts", list, "") or []
    if read.problems:
        raise InputError(read.problems)
    return Machine(
        name=shown, pools=tuple(pools), devices=tuple(devices), host=host, host_pool_name=host_pool or "host",
        facts=tuple(str(f) for f in facts), driver_version=document.get("driver_version"),
        unknown=dict(document.get("unknown", {})),
    )  # fmt: skip


def _extended(document: Mapping[str, Any], read: _Reader, folder: Path | None, seen: tuple[str, ...]) -> Mapping[str, Any]:
    """Lay a profile over the one it extends: tables of the same name are merged key by key."""
    base_name = document.get("extends")
    if base_name is None:
        return document
    if isinstance(base_name, str) and base_name in seen:
        raise InputError([Problem(message=f'the profile extends itself: {" extends ".join((*seen, base_name))}', where=Where(source="file", file=read.file))])
    if not isinstance(base_name, str) or len(seen) > 8:
        read.complain(f"extends = {base_name!r:.60} is not another profile's name or path", at="extends")
        return document
    shipped = named("machines", ".toml")
    path = shipped.get(base_name) or (folder or Path()) / base_name
    base = _extended(_document(path)[0], read, path.parent, (*seen, base_name))
    merged = {**base, **{k: v for k, v in document.items() if k != "extends"}}
    for key in ("pools", "devices"):
        if isinstance(base.get(key), list) and isinstance(document.get(key), list):
            rows = {t.get("name"): dict(t) for t in base[key] if isinstance(t, dict)}
            for table in document[key]:
                if isinstance(table, dict):
                    rows.setdefault(table.get("name"), {}).update(table)
            merged[key] = list(rows.values())
    return merged


def _device(read: _Reader, table: Mapping[str, Any], index: int, pools: list[Pool]) -> Device | None:
    at = f"devices[{index}]."
    legal = ("name", "kind", "pool", "peers", "tenants", "context", "context_bytes", "largest_allocation", "largest_allocation_bytes", "evidence", *_DEVICE_TEXTS, *_DEVICE_FLAGS)
    read.keys(table, legal, at)
    name, kind, pool = (read.typed(table, key, str, at) for key in ("name", "kind", "pool"))
    if not name or not kind or not pool:
        read.complain(f"{at}name, kind and pool are required", at=at)
        return None
    if kind not in KINDS:
        read.complain(f"{at}kind must be one of {', '.join(KINDS)}, not {kind!r:.40}", at=f"{at}kind")
    if all(p.name != pool for p in pools):
        read.complain(f'{at}pool names "{pool}", which is not a pool', at=f"{at}pool")
    capability = table.get("compute_capability")
    if isinstance(capability, str) and not re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", capability):
        read.complain(f'{at}compute_capability must be written like "8.6", not {capability!r:.40}', at=f"{at}compute_capability")
    peers, tenants = read.typed(table, "peers", list, at), read.typed(table, "tenants", list, at)
    return Device(
        name=name,
        kind=kind,
        pool=pool,
        peers=tuple(str(p) for p in peers) if peers is not None else None,
        tenants=tuple(str(t) for t in tenants or ()),
        context_bytes=read.size(table, "context", at),
        largest_allocation_bytes=read.size(table, "largest_allocation", at),
        **{key: read.typed(table, key, str, at) for key in _DEVICE_TEXTS},
        **{key: read.typed(table, key, bool, at) for key in _DEVICE_FLAGS},
    )


def _host(read: _Reader, table: Mapping[str, Any]) -> Host:
    sizes = ("memlock", "swap_free", "cgroup_limit")
    read.keys(table, (*sizes, *(f"{s}_bytes" for s in sizes), "container", "wsl", "system"), "host.")
    return Host(
        **{f"{key}_bytes": read.size(table, key, "host.") for key in sizes},
        container=read.typed(table, "container", bool, "host."),
        wsl=read.typed(table, "wsl", bool, "host."),
        system=read.typed(table, "system", str, "host."),
    )


def to_mapping(machine: Machine) -> dict[str, Any]:
    """Return the profile mapping of a machine: what ``machine_from_mapping`` reads back."""

    def row(value: Any) -> dict[str, Any]:
        shown = {}
        for f in fields(value):
            item = getattr(value, f.name)
            if item is None or item == () or (f.name == "reserved_bytes" and item == 0):
                continue
            shown[f.name] = list(item) if isinstance(item, tuple) else item
        return shown

    document: dict[str, Any] = {"name": machine.name}
    if machine.host_pool_name != "host":
        document["host_pool"] = machine.host_pool_name
    if machine.driver_version is not None:
        document["driver_version"] = machine.driver_version
    if machine.facts:
        document["facts"] = list(machine.facts)
    host = row(machine.host)
    if host:
        document["host"] = host
    if machine.unknown:
        document["unknown"] = dict(machine.unknown)
    document["pools"] = [row(p) for p in machine.pools]
    document["devices"] = [row(d) for d in machine.devices]
    return document
