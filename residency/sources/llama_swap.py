"""llama-swap's configuration: models with a ``cmd``, macros, and groups that stay loaded together."""

from __future__ import annotations

import re
from collections import ChainMap
from dataclasses import replace
from typing import TYPE_CHECKING

from residency.errors import InputError, Problem
from residency.text import clean, shorten

from . import Collection, Command
from .containers import container_run, folder_of, run_devices, run_environment, run_mounts, with_image
from .words import LONGEST, TooLongError, put_in, split
from .yaml_nodes import environment_of, get, items, list_of, size_of, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yaml.nodes import MappingNode, Node

    from residency.where import Where

    from .yaml_nodes import Document

_OF_CALLER = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
_MACRO = re.compile(r"\$\{([^{}]*)\}")
#: Macros that may lead to one another.
_MOST_LEVELS = 32
#: llama-swap gives every model a port of its own.
_PORT = "5800"


def read_llama_swap(root: MappingNode, document: Document) -> Collection:
    """Return the engine commands of the models, and the groups whose members stay loaded together."""
    macros = {name: text_of(value) or "" for name, value in items(get(root, "macros"))}
    names = {name for name, _ in items(get(root, "models"))}
    commands = []
    others: dict[str, tuple[Node, str]] = {}  # models of no known engine: passed over when there are others
    for name, model in items(get(root, "models")):
        node = get(model, "cmd")
        if node is None:
            document.complain(model, f"the model {clean(name)} has no cmd")
            continue
        own = {key: text_of(value) or "" for key, value in items(get(model, "macros"))}
        values = ChainMap({"PORT": _PORT, "MODEL_ID": name}, own, macros)
        command = _swapped(node, values, document)
        if command is None:
            continue
        words, places = command
        if not words:
            document.complain(node, f"the model {clean(name)} has an empty cmd")
            continue
        environ, environ_places = environment_of(get(model, "env"), document, composed=False)
        for variable, value in environ.items():
            try:
                environ[variable] = document.counted(put_in(_OF_CALLER, lambda m: document.environ.get(m[1], m[0]), value), model)
            except TooLongError as error:
                document.problems.append(Problem(message=f"{clean(variable)}: {error}", where=environ_places[variable]))
            unset = re.search(r"\$\{env\.[^}]*\}", environ[variable])
            if unset:
                document.problems.append(Problem(message=f"the macro {clean(unset[0])} is not set in the environment", where=environ_places[variable]))
        before = len(document.problems)
        found = _model(name, words, places, environ, environ_places, node, document)
        if isinstance(found, Command):
            commands.append(found)
        elif len(document.problems) == before:
            others[name] = (node, found)
    for node, message in others.values():
        if message and not commands:
            document.complain(node, message)
        elif message:
            document.warn(document.where(node), f"{message}: it is not judged")
    judged = {c.name for c in commands}
    groups = []
    for title, group in items(get(root, "groups")):
        members = _members(title, group, names, document)
        if (text_of(get(group, "swap")) or "true").casefold() == "false":
            groups.append(tuple(m for m in members if m in judged))
            for member in members:
                if member in others and commands:
                    document.warn(document.where(group), f"the sum of the group {clean(title)} lacks its member {clean(member)}, which is not judged")
    return Collection(path=document.path, commands=tuple(commands), groups=tuple(g for g in groups if len(g) > 1))


def _model(
    name: str, words: list[str], places: list[Where], environ: Mapping[str, str], environ_places: Mapping[str, Where], node: Node, document: Document
) -> Command | str:
    """Return the engine's command of a model, or what else starts it."""
    run = container_run(words)
    if run is None:
        found = document.found(words, places, node, {**document.environ, **environ})
        if found is None:
            return f"the model {clean(name)} is started by {clean(words[0])!r}, which is not a program of an engine residency knows"
        return Command(name=name, argv=tuple(found.words), places=tuple(found.places), environ={**environ, **found.assigned}, environ_places=environ_places)
    who = f"the model {clean(name)}"
    if isinstance(run, str):
        return f"{who} is started by {clean(words[0])!r}, which {run}"
    folder = document.folder(node)
    try:
        inside = run_environment(run, {**document.environ, **environ}, folder)
        given = run_devices(run, inside, who)
    except InputError as error:
        document.problems += [replace(p, where=document.where(node)) for p in error.problems]
        return ""
    except ValueError as error:
        document.complain(node, f"{who}: {error}")
        return ""
    entry, told = run.last("entrypoint"), len(document.warnings)
    rest, at = ([entry] if entry else []) + words[run.at + 1 :], ([places[run.at]] if entry else []) + places[run.at + 1 :]
    found = with_image(rest, at, image=run.image, image_at=places[run.at], own_entry=bool(entry), last=node, environ=inside, document=document, who=who, tell=False)
    if found is None:
        if len(document.warnings) > told:
            return ""  # what it runs instead has been said
        return f"{who} runs the image {clean(shorten(run.image))}, whose program residency does not know"
    memory = run.last("memory")
    limit = size_of(memory) if memory else None
    mounts, hidden = run_mounts(run, folder)
    working, no_folder = folder_of(run.last("workdir"))
    if memory and limit is None:
        document.complain(node, f"--memory {clean(shorten(memory))} is not a memory limit")
    return Command(
        name=name, argv=tuple(found.words), places=tuple(found.places), environ={**inside, **found.assigned},
        environ_places={key: _place_of(key, words, places, run.at) for key in inside}, mounts=mounts, hidden=hidden,
        contained=True, folder=working, no_folder=no_folder, host_limit_bytes=limit or None,
        host_limit_where=document.where(node) if limit else None, device_count=given.count, device_where=places[run.at], device_names=given.names,
        facts=(given.fact,) if given.fact else (), assumption=given.assumed_at(places[run.at]), inherits=False,
    )  # fmt: skip


def _place_of(variable: str, words: list[str], places: list[Where], end: int) -> Where:
    """Return where a variable stands among the options in front of the image."""
    return next((places[i] for i, word in enumerate(words[:end]) if word == variable or word.startswith(f"{variable}=")), places[0])


def _members(title: str, group: Node, names: set[str], document: Document) -> tuple[str, ...]:
    """Return the models of a group, each once; complain about what is none."""
    found: dict[str, None] = {}
    for node in list_of(get(group, "members")):
        name = text_of(node)
        if name is None:
            document.complain(node, f"a member of the group {clean(title)} must be a model's name")
        elif name not in names:
            document.complain(node, f"the group {clean(title)} has the member {clean(name)}, which is not a model of this file")
        else:
            found[name] = None
    return tuple(found)


def _swapped(node: Node, values: Mapping[str, str], document: Document) -> tuple[list[str], list[Where]] | None:
    """Return the words of a cmd with macros replaced; macros may use macros. Positions are those of the cmd itself."""
    text = text_of(node)
    if text is None:
        document.complain(node, "cmd must be a text")
        return None
    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        found = document.environ.get(name[4:]) if name.startswith("env.") else values.get(name)
        return match[0] if found is None else found

    try:
        for _ in range(_MOST_LEVELS):
            before, text = text, put_in(_MACRO, value_of, text)
            if text == before:
                break
    except TooLongError:
        document.complain(node, f"with its macros the command is longer than {LONGEST // 1024} KiB; macros that multiply?")
        return None
    text = document.counted(text, node)
    left = re.search(r"\$\{([^}]*)\}", text)
    if left:
        why = "leads back to itself" if left[1] in values else "is not set in the environment" if left[1].startswith("env.") else "is not defined"
        document.complain(node, f"the macro ${{{clean(left[1])}}} {why}")
        return None
    try:
        words = split(text)
    except ValueError as error:
        document.complain(node, f"the command cannot be split: {str(error).lower()}")
        return None
    return words, document.places(words, node)
