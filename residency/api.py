"""The Python contract: ``validate`` and ``guard`` (DESIGN 4.1)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from residency.engines.base import program_name
from residency.errors import InputError, LaunchVetoed, Problem
from residency.judge import Case, judge
from residency.machine import resolve_machine
from residency.machine.visible import as_seen, given
from residency.plugins import load_plugins
from residency.text import clean, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
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
    warnings: tuple[Problem, ...] = ()  # what of the source is not judged or has been assumed


def prepare_all(source: Source, inputs: Inputs) -> Prepared:
    """Read a source that may hold several launches (a preset file, say)."""
    from residency.sources import reader_for

    if isinstance(source, (str, os.PathLike)):
        reader = reader_for(os.fspath(source))
        if reader is not None:
            return _collection(os.fspath(source), reader, inputs)
    return Prepared(cases=(prepare(source, inputs),))


def _collection(path: str, reader: Reader, inputs: Inputs) -> Prepared:
    from residency.sources import placed, placed_error

    environ = dict(os.environ) if inputs.environ is None else inputs.environ  # a copy: os.environ encodes each name it is asked for
    policy = _policy(inputs)
    plugins = load_plugins(policy.plugins)
    found = reader(path, known=lambda program: engine_of_program(program, plugins) is not None, environ=environ)
    cases: list[Case] = []
    problems: list[Problem] = []
    machine = _machine(inputs.machine)
    for command in found.commands:
        try:
            effective = {**(environ if command.inherits else {}), **command.environ}
            argv = list(command.argv)
            launch, engine = read_launch(argv, engine=inputs.engine or command.engine, environ=effective, plugins=plugins, overrides=inputs.overrides)
            launch = placed(_mounted(launch, command), command)
            models = read_models(launch)
            cases.append(Case(launch=launch, models=models, machine=as_seen(_limited(machine, command), effective), whole=machine,
                              engine=engine, policy=policy, plugins=plugins))  # fmt: skip
        except InputError as error:
            problems.extend(placed_error(error, command).problems)
    if problems:
        raise InputError(problems)
    order = {command.name: index for index, command in enumerate(found.commands)}
    assumed = tuple(c.assumption for c in found.commands if c.assumption is not None) if machine.accelerators else ()
    groups = tuple(tuple(order[name] for name in group) for group in found.groups)
    return Prepared(cases=tuple(cases), groups=groups, most_at_once=found.most_at_once or 1, warnings=(*found.warnings, *assumed))


def _policy(inputs: Inputs) -> Policy:
    from residency.policy import resolve_policy

    with _about("policy"):
        return resolve_policy(inputs.policy)


def _machine(source: MachineSource) -> Machine:
    with _about("machine profile"):
        return resolve_machine(source)


@contextlib.contextmanager
def _about(what: str) -> Iterator[None]:
    """Name the input a problem is about: several files are read in one run."""
    try:
        yield
    except InputError as error:
        said = what.rsplit(maxsplit=1)[-1]
        raise InputError([p if said in p.message else replace(p, message=f"{what}: {p.message}") for p in error.problems]) from error


def _mounted(launch: Launch, command: Command) -> Launch:
    """Return the launch with its model paths as they are on this machine, not inside the container."""
    from residency.sources import here

    def moved(knob: str, path: str) -> str:
        where = launch.where(knob)
        if (where.source == "argv" and where.argv_index is None) or (where.variable or "").upper().startswith("RESIDENCY_"):
            return path  # asked for here, not by the file
        try:
            return here(path, command)
        except InputError as error:
            raise InputError([replace(p, where=where) for p in error.problems]) from error

    for knob in ("model.path", "model.mmproj", "model.draft"):
        path = launch.get(knob)
        if path is not None:
            launch = launch.with_value(knob, moved(knob, path))
    adapters = launch.get("model.adapters")
    return launch.with_value("model.adapters", [moved("model.adapters", path) for path in adapters]) if adapters else launch


def _limited(machine: Machine, command: Command) -> Machine:
    """Return the machine as the process sees it: the host pool under its memory limit, fewer devices."""
    limit = command.host_limit_bytes
    if command.host_limit_share is not None:
        total = machine.host_pool.total_bytes
        if total is None:
            message = "the memory limit is a share of the host's memory, and the size of that is not known; write it in bytes"
            raise InputError([Problem(message=message, where=command.host_limit_where)])
        limit = int(total * command.host_limit_share)
    if limit is not None:
        pools = []
        for pool in machine.pools:
            if pool.name == machine.host_pool.name and (pool.total_bytes is None or limit < pool.total_bytes):
                free = limit if pool.free_bytes is None else min(limit, pool.free_bytes)
                pools.append(replace(pool, total_bytes=limit, free_bytes=free, evidence=f"memory limit at {command.host_limit_where}"))
            else:
                pools.append(pool)
        machine = replace(machine, pools=tuple(pools))
    last = command.first_device + (command.device_count or 0)
    if command.device_count and last > len(machine.accelerators):
        has = len(machine.accelerators)
        what = f"asks for {command.device_count} {'device' if command.device_count == 1 else 'devices'}"
        others = f", the containers beside it for {command.first_device}" if command.first_device else ""
        raise InputError([Problem(message=f"{what}{others}, and the machine has {has or 'none'}; it does not start", where=command.device_where)])
    if not machine.accelerators:
        return machine
    if command.device_count and command.first_device:
        return replace(given(machine, ",".join(str(n) for n in range(command.first_device, last))), facts=(*machine.facts, *command.facts))
    if command.device_count is not None:
        kept = {d.name for d in machine.accelerators[: command.device_count]}
        machine = replace(machine, devices=tuple(d for d in machine.devices if d.kind == "cpu" or d.name in kept))
    if command.device_names is not None:
        try:
            machine = given(machine, command.device_names)
        except InputError as error:
            where = command.environ_places.get("NVIDIA_VISIBLE_DEVICES")
            raise InputError([replace(p, where=where) for p in error.problems]) from error
    return replace(machine, facts=(*machine.facts, *command.facts))


def prepare(source: Source, inputs: Inputs) -> Case:
    """Read everything a judgement needs and return it as one value."""
    from residency.sources import reader_for

    _checked(source, inputs)
    if isinstance(source, (str, os.PathLike)) and reader_for(os.fspath(source)) is not None:
        raise InputError(f"{clean(os.fspath(source))} may hold several launches; residency validate judges such files")
    environ = dict(os.environ) if inputs.environ is None else inputs.environ  # a copy: os.environ encodes each name it is asked for
    policy = _policy(inputs)
    plugins = load_plugins(policy.plugins)
    launch, engine = read_launch(source, engine=inputs.engine, environ=environ, plugins=plugins, overrides=inputs.overrides)
    problems: list[Problem] = []
    try:
        machine = as_seen(_machine(inputs.machine if inputs.machine is not None else launch.get("machine.profile")), environ)
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

    name, at, version = (engine or "").partition("@")
    if at and not version:
        raise InputError(f'--engine "{clean(shorten(engine or ""))}" names no version after the @')
    if isinstance(source, (str, os.PathLike)):
        launch = read_launch_file(os.fspath(source), environ=environ, overrides=overrides)
    elif isinstance(source, Mapping):
        launch = read_launch_mapping(source, environ=environ, overrides=overrides)
    else:
        argv = _checked_argv(source)
        found = _engine_named(name, plugins) if name else _engine_of_program(argv[0], plugins)
        _check_version(version or None, found, None)
        typed = found.read(argv, environ, version=version or None)
        launch = merge_overrides(typed, environ, overrides)
        changed = {name: value for name, value in launch.options.items() if name not in typed.options or typed.options[name] != value}
        _check_options(replace(launch, options=changed), found)  # the engine's own reader has checked what was typed
        return launch, found
    if name:
        launch = replace(launch, engine=name)
    if version:
        launch = replace(launch, version=version)
    found = _engine_named(launch.engine, plugins, launch)
    _check_version(launch.version, found, launch)
    _check_options(launch, found)
    return launch, found


def _checked(source: Any, inputs: Inputs) -> None:
    """Raise TypeError for arguments of the wrong kind: that is misuse, not bad input."""
    if not isinstance(source, (str, os.PathLike, Mapping, list, tuple)):
        raise TypeError(f"a source is a path, a mapping or a list of strings, not {type(source).__name__}")
    if inputs.engine is not None and not isinstance(inputs.engine, str):
        raise TypeError(f'an engine is a text like "llama.cpp@b4610", not {type(inputs.engine).__name__}')
    if inputs.environ is not None and not isinstance(inputs.environ, Mapping):
        raise TypeError(f"an environment is a mapping, not {type(inputs.environ).__name__}")
    if isinstance(inputs.overrides, str) or not all(isinstance(text, str) for text in inputs.overrides):
        raise TypeError("overrides are a list of texts")


def _checked_argv(source: Sequence[str]) -> list[str]:
    if not all(isinstance(part, str) for part in source):
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
    import difflib

    known = sorted({p for e in plugins.engines for p in e.programs})
    close = difflib.get_close_matches(program, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"name the engine with --engine: {', '.join(e.name for e in plugins.engines)}"
    raise InputError([Problem(message=f'"{clean(shorten(program))}" is not a program of an engine residency knows', hint=hint)])


def _check_version(version: str | None, engine: Engine, launch: Launch | None) -> None:
    """Refuse a version the engine cannot read; an engine without ``version_problem`` takes every text."""
    ask = getattr(engine, "version_problem", None)
    reason = ask(version) if version is not None and ask is not None else None
    if reason is not None:
        where = launch.where("engine.version") if launch is not None else None
        raise InputError([Problem(message=f'"{clean(shorten(version or ""))}" is not a version of {engine.name}: {reason}', where=where)])


def _check_options(launch: Launch, engine: Engine) -> None:
    version = launch.version or engine.newest
    problems = []
    for name, value in launch.options.items():
        reason = engine.option_problem(name, value, version=version)
        if reason is not None:
            problems.append(Problem(message=f"engine.options.{clean(name)}: {reason}", where=launch.where(f"option:{name}")))
    if problems:
        raise InputError(problems)


#: Characters of a path that a message shows.
_LONGEST_PATH = 300


def read_models(launch: Launch) -> Models:
    """Read the headers of every model file a launch names. Raises InputError for those that cannot be read."""
    from residency import checkpoint
    from residency.engines.base import Models

    if launch.starts_nothing:
        return Models()
    problems: list[Problem] = []

    def read(knob: str, path: str | None) -> Any:
        if path is None:
            return None
        try:
            return checkpoint.read(path)
        except InputError as error:
            for problem in error.problems:
                where = launch.where(knob)
                name = clean(shorten(path, _LONGEST_PATH))
                message = problem.message if clean(path) in problem.message else f"{name}: {problem.message}"
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
