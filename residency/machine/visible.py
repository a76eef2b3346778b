"""The devices a process sees: what CUDA_VISIBLE_DEVICES and its like leave, and what a container is given."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from residency.errors import InputError
from residency.text import clean, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .model import Device, Machine

#: Variables by device kind; the first that is set counts.
VARIABLES = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}


def as_seen(machine: Machine, environ: Mapping[str, str]) -> Machine:
    """Return the machine with the devices that a process with this environment sees, numbered anew.

    Pools keep their names: ``CUDA0`` of the process may draw from the pool ``CUDA1``. What a probe has seen
    already, because this process has the same variable, is not applied again.

    Raises:
        InputError: the variable names devices that this machine does not tell apart, or one of them twice.
    """
    for kind, variables in VARIABLES.items():
        name = next((v for v in variables if v in environ), None)
        if name is None or (machine.source == "probe" and environ[name] == os.environ.get(name)):
            continue
        every = [d for d in machine.devices if d.kind == kind]
        if every:
            machine = _renumbered(machine, every, _chosen(every, name, environ[name]), name, environ[name])
    return machine


def given(machine: Machine, names: str) -> Machine:
    """Return the machine with the devices of a container: those that NVIDIA_VISIBLE_DEVICES names, numbered anew.

    They keep the machine's own order, whatever the order of the names is. Numbers count the machine's devices.

    Raises:
        InputError: a name is no device of this machine, with which the container does not start; or the machine does
            not tell its devices' UUIDs.
    """
    every = [d for d in machine.devices if d.kind == "cuda"] or list(machine.accelerators)
    if not every or names == "all":
        return machine
    label = f"NVIDIA_VISIBLE_DEVICES={clean(shorten(names))}"
    chosen: list[Device] = []
    for entry in (text.strip() for text in names.split(",")):
        if entry in ("", "void", "none"):
            continue
        if entry.isascii() and entry.isdecimal():
            named = every[int(entry) : int(entry) + 1] if len(entry) < 6 else []
        else:
            if any(d.uuid is None for d in every):
                raise InputError(f"{label} names a device by its UUID, and the machine profile gives none")
            named = [d for d in every if d.uuid is not None and d.uuid.casefold().startswith(entry.casefold())]
        if len(named) != 1:
            raise InputError(f"{label} names {clean(shorten(entry))}, which is no device of this machine; the container does not start")
        chosen += named
    return _renumbered(machine, every, [d for d in every if d in chosen], "NVIDIA_VISIBLE_DEVICES", names)


def _chosen(every: list[Device], name: str, value: str) -> list[Device]:
    """Return the devices a list names, up to the first entry that names none, as the driver does."""
    chosen: list[Device] = []
    for entry in (text.strip() for text in value.split(",")):
        if entry.isdecimal() and int(entry) < len(every):
            device = every[int(entry)]
        elif entry.startswith(("GPU-", "MIG-")):
            named = [d for d in every if d.uuid is not None and d.uuid.casefold().startswith(entry.casefold())]
            if not named and any(d.uuid is None for d in every):
                raise InputError(f"{name}={clean(shorten(value))} names a device by its UUID, and the machine profile gives none")
            if len(named) != 1:
                break
            (device,) = named
        else:
            break
        if device in chosen:
            raise InputError(f"{name}={clean(shorten(value))} names a device twice, which the driver refuses")
        chosen.append(device)
    return chosen


def _renumbered(machine: Machine, every: list[Device], chosen: list[Device], name: str, value: str) -> Machine:
    if chosen == every:
        return machine
    new = {old.name: every[index].name for index, old in enumerate(chosen)}
    devices = [
        replace(d, name=new[d.name], peers=None if d.peers is None else tuple(new[p] for p in d.peers if p in new)) for d in chosen
    ]
    at = machine.devices.index(every[0])
    others = [d for d in machine.devices if d not in every]
    before = sum(1 for d in machine.devices[:at] if d not in every)
    seen = ", ".join(f"{now} is {old}" for old, now in new.items()) or "no device"
    fact = f"with {name}={clean(shorten(value))} the launch sees {seen}"
    return replace(machine, devices=(*others[:before], *devices, *others[before:]), facts=(*machine.facts, fact))
