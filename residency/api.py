"""The Python contract: ``validate`` and ``guard`` (DESIGN 4.1)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from residency.engines.base import program_name
from residency.errors import InputError, LaunchVetoed, Problem
from residency.judge import Case, judge
from residency.machine import resolve_machine
from residency.plugins import load_plugins
from residency.text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date

    from residency.engines.base import Engine, Models
    from residency.launch.model import Launch
    from residency.machine.model import Machine
    from residency.plugins import PluginSet
    from residency.policy.model import Policy
    from residency.report.model import Report
    from residency.sources import Command, Reader

    Source = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str]
    MachineSource = str | os.PathLike[str] | Machine | Mapping[str, Any] | None
    PolicySource = str | os.PathLike[str] | Policy | Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What stands beside a source: the arguments of :func:`validate`."""

    engine: str | None = None
    machine: MachineSource = None
    policy: PolicySource = None
    environ: Mapping[str, str] | None = None
    overrides: Sequence[str] = ()


def validate(
    source: Source,
    *,
    engine: str | None = None,
    machine: MachineSource = None,
    policy: PolicySource = None,
    environ: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    today: date | None = None,
) -> Report:
    """Judge one launch and return the report; nothing is started, loaded or allocated.

    Args:
        source: path of a launch file; a mapping of the same shape; or a list of strings, an engine's
            command line with the program first.
        engine: ``"llama.cpp"`` or ``"strata@0.1.35"``; default: what the source says.
        machine: a profile's path or name, a Machine, a mapping of a profile's shape; None or
            ``"probe"``: this machine.
        policy: path of a policy file, a mapping, a Policy; None: the default policy.
        environ: the environment the engine will get; default: this process's.
        overrides: ``"section.knob=value"`` texts, which win over everything else.
        today: the date waivers are compared with; default: the clock's.

    Raises:
        InputError: the source, a model file, the profile or the policy cannot be read.
    """
    inputs = Inputs(engine=engine, machine=machine, policy=policy, environ=environ, overrides=overrides)
    started = time.perf_counter()
    return judge(prepare(source, inputs), today=today, started=started)


def guard(source: Source, **more: Any) -> Report:
    """Return the report like :func:`validate`, or raise :class:`LaunchVetoed` unless the launch is allowed."""
    report = validate(source, **more)
    if not report.allowed:
        raise LaunchVetoed(report)
    return report


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything one source holds: its launches, and which of them run at once."""

    cases: tuple[Case, ...]
    groups: tuple[tuple[int, ...], ...] = ()  # indexes of cases that run at the same time
    most_at_once: int = 1  # any that many of all the cases run at the same time


def prepare_all(source: Source, inputs: Inputs) -> Prepared:
    """Read a source that may hold several launches (a preset file, say)."""
    from residency.sources import reader_for

    if isinstance(source, (str, os.PathLike)):
        reader = reader_for(os.fspath(source))
        if reader is not None:
            return _collection(os.fspath(source), reader, inputs)
    return Prepared(cases=(prepare(source, inputs),))


def _collection(path: str, reader: Reader, inputs: Inputs) -> Prepared:
    from residency.policy import resolve_policy
    from residency.sources import placed, placed_error

    environ = os.environ if inputs.environ is None else inputs.environ
    policy = resolve_policy(inputs.policy)
    plugins = load_plugins(policy.plugins)
    found = reader(path, known=lambda program: engine_of_program(program, plugins) is not None, environ=environ)
    cases: list[Case] = []
    problems: list[Problem] = []
    machine = resolve_machine(inputs.machine)
    for command in found.commands:
        try:
            effective = {**(environ if command.inherits else {}), **command.environ}
            argv = list(command.argv)
            launch, engine = read_launch(argv, engine=inputs.engine or command.engine, environ=effective, plugins=plugins, overrides=inputs.overrides)
            launch = placed(_mounted(launch, command), command)
            models = read_models(launch)
            cases.append(Case(launch=launch, models=models, machine=_limited(machine, command), engine=engine, policy=policy, plugins=plugins))
        except InputError as error:
            problems.extend(placed_error(error, command).problems)
    if problems:
        raise InputError(problems)
    order = {command.name: index for index, command in enumerate(found.commands)}
    groups = tuple(tuple(order[name] for name in group) for group in found.groups)
    return Prepared(cases=tuple(cases), groups=groups, most_at_once=found.most_at_once or 1)


def _mounted(launch: Launch, command: Command) -> Launch:
    """Return the launch with its model paths as they are on this machine, not inside the container."""
    from residency.sources import here

    for knob in ("model.path", "model.mmproj", "model.draft"):
        path = launch.get(knob)
        if path is not None and command.mounts:
            launch = launch.with_value(knob, here(path, command))
    return launch


def _limited(machine: Machine, command: Command) -> Machine:
    """Return the machine as the process sees it: the host pool under its memory limit, fewer devices."""
    limit = command.host_limit_bytes
    if limit is not None:
        pools = []
        for pool in machine.pools:
            if pool.name == machine.host_pool.name and (pool.total_bytes is None or limit < pool.total_bytes):
                free = limit if pool.free_bytes is None else min(limit, pool.free_bytes)
                pools.append(replace(pool, total_bytes=limit, free_bytes=free, evidence=f"memory limit at {command.host_limit_where}"))
            else:
                pools.append(pool)
        machine = replace(machine, pools=tuple(pools))
    if command.device_count is not None:
        kept = {d.name for d in machine.accelerators[: command.device_count]}
        machine = replace(machine, devices=tuple(d for d in machine.devices if d.kind == "cpu" or d.name in kept))
    return machine


def prepare(source: Source, inputs: Inputs) -> Case:
    """Read everything a judgement needs and return it as one value."""
    from residency.policy import resolve_policy

    environ = os.environ if inputs.environ is None else inputs.environ
    policy = resolve_policy(inputs.policy)
    plugins = load_plugins(policy.plugins)
    launch, engine = read_launch(source, engine=inputs.engine, environ=environ, plugins=plugins, overrides=inputs.overrides)
    problems: list[Problem] = []
    try:
        machine = resolve_machine(inputs.machine if inputs.machine is not None else launch.get("machine.profile"))
    except InputError as error:  # reported with what is wrong with the model files, in one run
        problems.extend(error.problems)
    try:
        models = read_models(launch)
    except InputError as error:
        problems.extend(error.problems)
    if problems:
        raise InputError(problems)
    return Case(launch=launch, models=models, machine=machine, engine=engine, policy=policy, plugins=plugins)


def read_launch(
    source: Source, *, engine: str | None, environ: Mapping[str, str], plugins: PluginSet, overrides: Sequence[str] = ()
) -> tuple[Launch, Engine]:
    """Return the launch of a source and the engine it is for."""
    from residency.launch.reader import merge_overrides, read_launch_file, read_launch_mapping

    name, _, version = (engine or "").partition("@")
    if isinstance(source, (str, os.PathLike)):
        launch = read_launch_file(os.fspath(source), environ=environ, overrides=overrides)
    elif isinstance(source, Mapping):
        launch = read_launch_mapping(source, environ=environ, overrides=overrides)
    else:
        argv = _checked_argv(source)
        found = _engine_named(name, plugins) if name else _engine_of_program(argv[0], plugins)
        launch = found.read(argv, environ, version=version or None)
        launch = merge_overrides(launch, environ, overrides)
        return launch, found
    if name:
        launch = replace(launch, engine=name)
    if version:
        launch = replace(launch, version=version)
    found = _engine_named(launch.engine, plugins, launch)
    _check_options(launch, found)
    return launch, found


def _checked_argv(source: Any) -> list[str]:
    if isinstance(source, (bytes, bytearray)) or not all(isinstance(part, str) for part in source):
        raise TypeError("a command line is a list of strings")
    argv = list(source)
    if not argv:
        raise InputError("the command line is empty")
    nul = next((i for i, part in enumerate(argv) if "\0" in part), None)
    if nul is not None:
        raise InputError(f"argument {nul} contains a NUL byte; no program can be started with it")
    return argv


def _engine_named(name: str, plugins: PluginSet, launch: Launch | None = None) -> Engine:
    import difflib

    folded = name.casefold()
    for found in plugins.engines:
        if folded in (found.name.casefold(), *(a.casefold() for a in found.aliases)):
            return found
    known = [e.name for e in plugins.engines]
    close = difflib.get_close_matches(folded, known, n=1)
    hint = f'did you mean "{close[0]}"?' if close else f"known engines: {', '.join(known) or 'none'}"
    where = launch.where("engine.name") if launch is not None else None
    raise InputError([Problem(message=f'no installed plugin brings an engine called "{clean(name)}"', where=where, hint=hint)])


def engine_of_program(program: str, plugins: PluginSet) -> Engine | None:
    """Return the engine a program belongs to, or None."""
    for found in plugins.engines:
        # A build's suffix is common: llama-server-vulkan, llama-server-cuda.
        if any(program == p or program.startswith(f"{p}-") for p in found.programs):
            return found
    return None


def _engine_of_program(path: str, plugins: PluginSet) -> Engine:
    program = program_name(path)
    named = engine_of_program(program, plugins)
    if named is not None:
        return named
    known = sorted({p for e in plugins.engines for p in e.programs})
    raise InputError(
        [Problem(message=f'"{clean(program)}" is not a program of an engine residency knows', hint=f"name it with --engine; known programs: {', '.join(known)}")]
    )


def _check_options(launch: Launch, engine: Engine) -> None:
    version = launch.version or engine.newest
    problems = []
    for name, value in launch.options.items():
        reason = engine.option_problem(name, value, version=version)
        if reason is not None:
            problems.append(Problem(message=f"engine.options.{clean(name)}: {reason}", where=launch.where(f"option:{name}")))
    if problems:
        raise InputError(problems)


def read_models(launch: Launch) -> Models:
    """Read the headers of every model file a launch names. Raises InputError for those that cannot be read."""
    from residency import checkpoint
    from residency.engines.base import Models

    problems: list[Problem] = []

    def read(knob: str, path: str | None) -> Any:
        if path is None:
            return None
        try:
            return checkpoint.read(path)
        except InputError as error:
            for problem in error.problems:
                where = launch.where(knob)
                message = problem.message if clean(path) in problem.message else f"{clean(path)}: {problem.message}"
                problems.append(replace(problem, message=message, where=where if where.source != "default" else problem.where))
            return None

    models = Models(
        main=read("model.path", launch.get("model.path")),
        mmproj=read("model.mmproj", launch.get("model.mmproj")),
        draft=read("model.draft", launch.get("model.draft")),
        adapters=tuple(a for p in launch.get("model.adapters") or () if (a := read("model.adapters", p)) is not None),
    )
    if problems:
        raise InputError(problems)
    return models
