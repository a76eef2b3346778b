"""Docker compose files: services with their files, variables, limits and devices, ``extends`` and ``include``.

Merging as the Compose Specification has it (compose-go 2, ``override/merge.go``): mappings key by key, lists one behind
the other, ``command`` and ``entrypoint`` whole; what extends or overrides wins.
"""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from residency.errors import InputError, Problem
from residency.text import clean, shorten

from . import Collection, Command
from .containers import Request, devices_of, folder_of, split_mounts, with_image
from .environment import read_variables
from .yaml_nodes import count_of, environment_of, get, items, limit_of, list_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from yaml.nodes import MappingNode, Node

    from residency.where import Where

    from .yaml_nodes import Document

#: Files that may be read for one, counted every time they are included.
_MOST_FILES = 64
#: Containers of one service.
_MOST_COPIES = 1000
#: Names compose looks for, and those that are merged with them when no file is named.
_OWN_NAMES = ("compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml")
_OVERRIDES = ("compose.override.yml", "compose.override.yaml", "docker-compose.override.yml", "docker-compose.override.yaml")
#: Services that may extend one another in a row.
_MOST_LEVELS = 64
#: Settings that services may have with what they extend, all of them together.
_MOST_SETTINGS = 100_000
_WHOLE = ("command", "entrypoint")
_NULL = "tag:yaml.org,2002:null"
#: The tag of variables that were merged: a list of what was written, the strongest last.
_MERGED = "!residency/merged"


def read_compose(root: MappingNode, document: Document) -> Collection:
    """Return the engine commands of a compose file's services, which all run at once."""
    commands = []
    document.environ = _with_own(document.environ, str(PurePath(document.path).parent))
    wanted = {part.strip() for part in document.environ.get("COMPOSE_PROFILES", "").split(",")}
    at_once: list[str] = []
    apart: list[tuple[Node, str]] = []
    for name, service in _Project(document).services(document.path, root, ()).items():
        command = _service_command(name, service, document)
        if command is None:
            continue
        count = _count(name, service, document)
        if count == 0:
            document.warn(command.places[0], f"the service {clean(name)} is started 0 times: it is not judged")
            continue
        commands.append(command)
        profiles = get(service, "profiles")
        asked = [document.expand(node) for node in list_of(profiles)]
        if profiles is None or not asked or "*" in wanted or wanted & set(asked):
            at_once += [name] * count
        else:
            apart.append((profiles, name))
    for profiles, name in apart if at_once else ():
        said = f"the service {clean(name)} is not started without its profile: it is judged by itself and is no part of the sum (COMPOSE_PROFILES asks for one)"
        document.warn(document.where(profiles), said)
    return Collection(path=document.path, commands=tuple(commands), groups=(tuple(at_once),) if len(at_once) > 1 else ())


def _count(name: str, service: Node, document: Document) -> int:
    """Return how many containers of a service are started."""
    counts = [(node, document.expand(node)) for node in (get(service, "scale"), get(service, "deploy", "replicas")) if node is not None]
    for node, text in counts:
        if not text.isascii() or not text.isdecimal() or len(text) > 4 or int(text) > _MOST_COPIES:
            document.complain(node, f"{clean(shorten(text)) or 'this'} is no number of containers from 0 to {_MOST_COPIES}")
            return 1
    if len({int(text) for _, text in counts}) > 1:
        document.complain(counts[1][0], f"scale and deploy.replicas of the service {clean(name)} differ; compose refuses that")
    return int(counts[0][1]) if counts else 1


def _with_own(environ: Mapping[str, str], folder: str) -> Mapping[str, str]:
    """Return the variables that fill in ``${NAME}``: the caller's, over those of the project's ``.env``."""
    own = str(PurePath(folder, ".env"))
    return {**read_variables(own, host=environ)[0], **environ} if os.path.lexists(own) else environ


class _Project:
    """The services of a file, those it includes, and those they extend."""

    def __init__(self, document: Document) -> None:
        self.document, self.count, self.settings = document, 0, 0
        self.done: dict[tuple[str, str], tuple[Node | None, int]] = {}  # services with what they extend, and how many these are
        self.written: dict[str, dict[str, Node]] = {}  # by file: its services

    def services(self, path: str, root: Node, chain: tuple[str, ...]) -> dict[str, Node]:
        """Return the services of a file and of those it includes. ``chain``: the files that include it."""
        document = self.document
        chain = (*chain, path)
        written = dict(items(get(root, "services")))
        if len(chain) == 1:
            for name, service in self.override(path):
                written[name] = merged(written[name], service) if name in written else service
        found = {}
        for name in written:
            service = self.extended(name, written, path, ())
            if service is not None:
                found[name] = service
        include = get(root, "include")
        for item in list_of(include) or ([include] if include is not None else []):
            for name, service in self.included(item, path, chain).items():
                if name in found and found[name] is not service and not _same(found[name], service):
                    document.complain(item, f"the service {clean(name)} of the included file stands in this project already")
                found.setdefault(name, service)
        return found

    def override(self, path: str) -> Iterator[tuple[str, Node]]:
        """Yield the services of the file beside this one that ``docker compose up`` merges with it."""
        own = PurePath(path)
        beside = next((str(own.with_name(name)) for name in _OVERRIDES if os.path.lexists(own.with_name(name))), None) if own.name in _OWN_NAMES else None
        for root in self.document.parse(beside)[:1] if beside else ():
            yield from items(get(root, "services"))

    def included(self, item: Node, path: str, chain: tuple[str, ...]) -> dict[str, Node]:
        """Return the services of an entry of ``include``: a path, or a table with several that are merged."""
        document = self.document
        given = item if text_of(item) is not None else get(item, "path")
        paths = [n for n in (list_of(given) or [given]) if n is not None and text_of(n)]
        if not paths:
            document.complain(item, "include takes paths, or tables with a path")
            return {}
        base = document.folder(item)
        first = self.located(paths[0], "include")
        if first is None:
            return {}
        if os.path.realpath(first) in {os.path.realpath(p) for p in chain}:
            document.complain(item, f"include leads in a circle: {clean(' > '.join((*chain, first)))}")
            return {}
        directory = get(item, "project_directory")
        folder = str(PurePath(base, document.expand(directory))) if directory is not None else str(PurePath(first).parent)
        environ = self.environment(get(item, "env_file"), folder, document.environ_of(item))
        merged_all: dict[str, Node] = {}
        for node in paths:
            file = self.located(node, "include")
            roots = self.opened(file, node, "include", folder, environ) if file is not None else []
            for root in roots[:1]:
                for name, service in self.services(file or path, root, chain).items():
                    merged_all[name] = merged(merged_all[name], service) if name in merged_all else service
        return merged_all

    def environment(self, given: Node | None, folder: str, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables of an included project: the including one's, over its own files."""
        if given is None:
            return _with_own(environ, folder)
        values: dict[str, str] = {}
        for node in list_of(given) or [given]:
            path = str(PurePath(self.document.folder(node), self.document.expand(node)))
            try:
                values.update(read_variables(path, host=environ)[0])
            except InputError as error:
                for problem in error.problems:
                    self.document.complain(node, f"env_file {clean(path)}: {problem.message}")
        return {**values, **environ}

    def located(self, node: Node, key: str) -> str | None:
        """Return the path a node names, or complain about one that cannot be followed."""
        text = self.document.expand(node)
        if "://" in text or text.startswith(("oci:", "git@")):
            self.document.complain(node, f"{key} {clean(shorten(text))} lies elsewhere and is not fetched; keep a copy beside this file")
            return None
        return os.path.normpath(PurePath(self.document.folder(node), text))

    def opened(self, path: str, node: Node, key: str, folder: str, environ: Mapping[str, str]) -> list[Any]:
        """Return the documents of another file, or complain at the node that names it."""
        document = self.document
        self.count += 1
        if self.count > _MOST_FILES:
            document.complain(node, f"{key} leads to more than {_MOST_FILES} files")
            return []
        document.environs.setdefault(path, environ)
        document.folders.setdefault(path, folder)
        try:
            return document.parse(path)
        except InputError as error:
            for problem in error.problems:
                if problem.where is not None and problem.where.line is not None:
                    document.problems.append(problem)
                else:
                    document.complain(node, f"{key} {clean(path)}: {problem.message}")
            return []

    def extended(self, name: str, services: Mapping[str, Node], path: str, chain: tuple[tuple[str, str], ...]) -> Node | None:
        """Return a service with what it extends under it; None after a complaint."""
        if (path, name) not in self.done:
            self.done[path, name] = self._extended(name, services, path, chain)
        return self.done[path, name][0]

    def _extended(self, name: str, services: Mapping[str, Node], path: str, chain: tuple[tuple[str, str], ...]) -> tuple[Node | None, int]:
        document, own = self.document, services[name]
        extends = get(own, "extends")
        if extends is None:
            return own, 0
        chain = (*chain, (path, name))
        other = extends if text_of(extends) is not None else get(extends, "service")
        file = get(extends, "file")
        wanted = document.expand(other)
        if not wanted:
            document.complain(extends, f"extends of the service {clean(name)} names no service")
            return None, 0
        if file is not None:
            located = self.located(file, "extends")
            if located is None:
                return None, 0
            if located != path:
                roots = self.opened(located, file, "extends", str(PurePath(located).parent), document.environ_of(file))
                if not roots:
                    return None, 0
                path, services = located, self.written.setdefault(located, dict(items(get(roots[0], "services"))))
        at = other if other is not None else extends
        if wanted not in services:
            document.complain(at, f"the service {clean(name)} extends {clean(shorten(wanted))}, which is no service of {clean(path)}")
            return None, 0
        if (path, wanted) in chain:
            circle = " > ".join(n for _, n in (*chain, (path, wanted)))
            document.complain(at, f"extends leads in a circle: {clean(circle)}")
            return None, 0
        if (path, wanted) in self.done and self.done[path, wanted][0] is None:
            return None, 0  # told already
        levels = max(len(chain), self.done.get((path, wanted), (None, 0))[1] + 1)
        if levels >= _MOST_LEVELS:
            document.complain(at, f"extends leads through more than {_MOST_LEVELS} services")
            return None, levels
        base = self.extended(wanted, services, path, chain)
        if base is None:
            return None, levels
        both = merged(base, own)
        self.settings += _breadth(both)
        if self.settings > _MOST_SETTINGS:
            if self.settings - _breadth(both) <= _MOST_SETTINGS:
                document.complain(at, f"the services that extend others have more than {_MOST_SETTINGS} settings")
            return None, levels
        return both, self.done[path, wanted][1] + 1


def _breadth(node: Node) -> int:
    """Return about how many settings a service has."""
    parts = [value for _, value in items(node)]
    rows = [row for part in parts if isinstance(part.value, list) for row in (part.value if part.tag == _MERGED else [part])]
    return len(parts) + sum(len(row.value) for row in rows if isinstance(row.value, list))


def _same(one: Node, other: Node) -> bool:
    import yaml

    return bool(yaml.serialize(one) == yaml.serialize(other))


def merged(base: Node, own: Node, key: str = "", depth: int = 0) -> Node:
    """Return a setting of a service merged from two places; ``own`` wins."""
    from yaml.nodes import MappingNode, SequenceNode

    if own.tag == "!override" or key in _WHOLE:
        return own
    if own.tag == _NULL:
        return base
    if key == "environment" and depth == 1:
        parts = [part for node in (base, own) for part in (node.value if node.tag == _MERGED else [node])]
        return SequenceNode(_MERGED, parts, own.start_mark, own.end_mark)
    if isinstance(base, MappingNode) and isinstance(own, MappingNode):
        under = dict(items(base))
        rows = {name: node for name, node in under.items() if name != "extends"}
        for name, node in items(own):
            if node.tag == "!reset":
                rows.pop(name, None)
            else:
                rows[name] = merged(under[name], node, name, depth + 1) if name in under else node
        return MappingNode(own.tag, [(_key(name, own), node) for name, node in rows.items()], own.start_mark, own.end_mark)
    if isinstance(base, SequenceNode) or isinstance(own, SequenceNode):
        return SequenceNode(own.tag, [*(list_of(base) or [base]), *(list_of(own) or [own])], own.start_mark, own.end_mark)
    return own


def _key(name: str, at: Node) -> Node:
    from yaml.nodes import ScalarNode

    return ScalarNode("tag:yaml.org,2002:str", name, at.start_mark, at.end_mark)


def _service_command(name: str, service: Node, document: Document) -> Command | None:
    entry, command = get(service, "entrypoint"), get(service, "command")
    if entry is not None and entry.tag == _NULL:
        entry = None  # the image's own; [] and "" clear it
    words: list[str] = []
    places: list[Where] = []
    for node in (entry, command):
        if node is not None:
            more, at = document.words(node, expanded=True)
            words += more
            places += at
    image = get(service, "image")
    built = document.expand(image)
    before, told = len(document.problems), len(document.warnings)
    environ, environ_places = _environment(service, document)
    of_environment, unset = document.problems[before:], document.warnings[told:]
    del document.problems[before:], document.warnings[told:]
    who = f"the service {clean(name)}"
    found = with_image(
        words, places, image=built, image_at=document.where(image) if image is not None else None, own_entry=entry is not None,
        last=command or entry or image or service, environ=environ, document=document, who=who,
    )  # fmt: skip
    if found is None:
        return None  # a service of another kind
    document.problems += of_environment
    document.warnings += unset
    limit, limit_where = limit_of(get(service, "deploy", "resources", "limits", "memory"), document, binary=True)
    other, other_where = limit_of(get(service, "mem_limit"), document, binary=True)
    if limit is not None and other is not None and limit != other:
        message = f"mem_limit is {other} bytes, and deploy.resources.limits.memory {limit} bytes; compose refuses two that differ"
        document.problems.append(Problem(message=message, where=other_where))
    if limit is None:
        limit, limit_where = other, other_where
    mounts, hidden = _mounts(service, document)
    folder, no_folder = folder_of(document.expand(get(service, "working_dir")))
    given = devices_of(
        image=built, requests=list(_requests(service, document)), nodes=[document.expand(n) for n in list_of(get(service, "devices"))],
        runtime=document.expand(get(service, "runtime")), privileged=document.expand(get(service, "privileged")).casefold() == "true",
        environ=environ, who=who, ask="ask with gpus: all, or deploy.resources.reservations.devices",
    )  # fmt: skip
    return Command(
        name=name, argv=tuple(found.words), places=tuple(found.places), environ={**environ, **found.assigned}, environ_places=environ_places,
        mounts=mounts, hidden=hidden, contained=True, folder=folder, no_folder=no_folder, host_limit_bytes=limit, host_limit_where=limit_where,
        device_count=given.count, device_where=document.where(image or command or entry or service), device_names=given.names, facts=(given.fact,) if given.fact else (),
        assumption=given.assumed_at(document.where(image or command or entry or service)), inherits=False,
    )  # fmt: skip


def _mounts(service: Node, document: Document) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the mounts that lie on this machine, and those that cannot be seen; of two for one path the last counts."""
    found: dict[str, str | None] = {}
    memory = get(service, "tmpfs")
    for item in list_of(memory) or ([memory] if memory is not None else []):
        found[document.expand(item).split(":")[0]] = None
    for item in list_of(get(service, "volumes")):
        bound = document.expand(get(item, "type")) == "bind"
        text = text_of(item)
        if text is not None:
            parts = document.expand(item).split(":")
            source, target = (parts[0], parts[1]) if len(parts) > 1 else ("", parts[0])
        else:
            source, target = document.expand(get(item, "source")), document.expand(get(item, "target"))
        if source == "~" or source.startswith("~/"):
            source = document.environ.get("HOME", "~") + source[1:]
        if target:
            here = source if source.startswith(("/", "~")) else os.path.normpath(PurePath(document.folder(item), source))
            found[target] = here if source and (bound or (text is not None and source.startswith((".", "/", "~")))) else None
    return split_mounts(found, [document.expand(item) for item in list_of(get(service, "volumes_from"))])


def _requests(service: Node, document: Document) -> Iterator[Request]:
    """Yield the device requests of a service: ``gpus`` and reservations."""
    gpus = get(service, "gpus")
    if text_of(gpus) is not None:  # the only text it takes is "all"
        yield Request()
    for item in (*list_of(gpus), *list_of(get(service, "deploy", "resources", "reservations", "devices"))):
        ids = [document.expand(node) for node in list_of(get(item, "device_ids"))]
        count = get(item, "count")
        if ids:
            yield Request(names=tuple(ids))
        elif count is None or (number := document.expand(count)) == "all":
            yield Request()
        else:
            yield Request(count=count_of(count, number, document) or 0)


def _variables(path: str, at: Node, document: Document) -> tuple[dict[str, str], dict[str, Where]]:
    """Return the variables of a file, which is read once; nothing, and a complaint, once there are too many. Raises InputError."""
    environ = document.environ_of(at)
    key = (path, id(environ))
    if key not in document.variables:
        document.variables[key] = read_variables(path, host=environ)
    found = document.variables[key]
    before, document.taken = document.taken, document.taken + 1 + len(found[0])
    if document.taken > _MOST_SETTINGS:
        if before <= _MOST_SETTINGS:
            document.complain(at, f"from here on the services take more than {_MOST_SETTINGS} variables from files")
        return {}, {}
    return found


def _environment(service: Node, document: Document) -> tuple[dict[str, str], dict[str, Where]]:
    """Return a service's variables: its files in their order, and its own over them."""
    values: dict[str, str] = {}
    places: dict[str, Where] = {}
    given = get(service, "env_file")
    for item in list_of(given) or ([given] if given is not None else []):
        text = text_of(item) or text_of(get(item, "path"))
        if not text:
            document.complain(item, "env_file takes a path, or a table with a path")
            continue
        path = str(PurePath(document.folder(item), document.expand(item, text)))
        optional = (text_of(get(item, "required")) or "true").casefold() == "false"
        if optional and not os.path.lexists(path):
            continue
        try:
            more, at = _variables(path, item, document)
        except InputError as error:
            for problem in error.problems:
                document.complain(item, f"env_file {clean(path)}: {problem.message}")
            continue
        values.update(more)
        places.update(at)
    own = get(service, "environment")
    for part in (own.value if own is not None and own.tag == _MERGED else [own]):
        more, at = environment_of(part, document, composed=True)
        values.update(more)
        places.update(at)
    return values, places
