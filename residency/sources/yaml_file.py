"""YAML files that start engines: llama-swap, docker compose, Kubernetes. Told apart by their top-level keys."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from residency.errors import InputError, Problem
from residency.launch.toml_file import read_text
from residency.text import clean
from residency.where import Where

from . import Collection, Command, no_command
from .words import Text, expand, split, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from yaml.nodes import MappingNode, Node

#: Characters of alias expansion a document may reach; YAML aliases can double at every level.
_MOST_NODES = 100_000
#: llama-swap gives every model a port of its own.
_PORT = "5800"
#: Images whose entry point is an engine's program.
_IMAGES = (("llama.cpp:server", "llama-server"), ("llama.cpp:full", "llama-cli"), ("llama-server", "llama-server"))
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)[bB]?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class _Document:
    """One parsed file: nodes with positions, and the problems found."""

    def __init__(self, path: str, text: str, known: Callable[[str], bool], environ: Mapping[str, str]) -> None:
        self.text = Text(path, text)
        self.path, self.known, self.environ = path, known, environ
        self.problems: list[Problem] = []

    def where(self, node: Node) -> Where:
        """Return a node's position."""
        return Where(source="file", file=self.path, line=node.start_mark.line + 1, column=node.start_mark.column + 1)

    def complain(self, node: Node, message: str) -> None:
        """Note a problem at a node."""
        lines = self.text.text.splitlines()
        line = node.start_mark.line
        self.problems.append(Problem(message=message, where=self.where(node), line_text=lines[line] if line < len(lines) else None))

    def words(self, node: Node, values: Mapping[str, str] | None) -> tuple[list[str], list[Where]]:
        """Return the words of a command: a text split as a shell would, or a list of texts."""
        from yaml.nodes import ScalarNode, SequenceNode

        if isinstance(node, SequenceNode):
            words = [str(item.value) for item in node.value if isinstance(item, ScalarNode)]
            places = [self.where(item) for item in node.value if isinstance(item, ScalarNode)]
            if values is not None:
                words = [expand(w, values) for w in words]
            if len(words) >= 3 and words[1] in ("-c", "-lc") and words[0].rsplit("/", 1)[-1] in ("sh", "bash", "ash"):
                return self._shell(words[2], node.value[2])
            return words, places
        if isinstance(node, ScalarNode):
            text = str(node.value)
            return self._shell(expand(text, values) if values is not None else text, node)
        self.complain(node, "a command is a text or a list of texts")
        return [], []

    def _shell(self, text: str, node: Node) -> tuple[list[str], list[Where]]:
        try:
            words = split(text)
        except ValueError as error:
            self.complain(node, f"the command cannot be split: {str(error).lower()}")
            return [], []
        return words, self.text.places(words, node.start_mark.index, node.end_mark.index)


def read(path: str, *, known: Callable[[str], bool], environ: Mapping[str, str]) -> Collection:
    """Read a YAML file. Raises InputError with every problem."""
    import yaml

    text = read_text(path)
    document = _Document(path, text, known, environ)
    try:
        roots = [n for n in yaml.compose_all(text, Loader=yaml.SafeLoader) if n is not None]
        _bounded(roots)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        lines = text.splitlines()
        where = Where(source="file", file=path)
        line_text = None
        if mark is not None:
            where = Where(source="file", file=path, line=mark.line + 1, column=mark.column + 1)
            line_text = lines[mark.line] if mark.line < len(lines) else None
        reason = getattr(error, "problem", None) or str(error)
        raise InputError([Problem(message=f"not valid YAML: {clean(str(reason))}", where=where, line_text=line_text)]) from error
    except RecursionError as error:
        raise InputError([Problem(message="nested too deeply", where=Where(source="file", file=path))]) from error
    found: Collection | None = None
    for root in roots:
        part = _read_root(root, document)
        if part is not None:
            found = part if found is None else Collection(path=path, commands=(*found.commands, *part.commands), groups=(*found.groups, *part.groups))
    if document.problems:
        raise InputError(document.problems)
    if found is None:
        message = "neither a llama-swap, compose nor Kubernetes file (no models:, services: or kind:)"
        raise InputError([Problem(message=message, where=Where(source="file", file=path, line=1, column=1))])
    if not found.commands:
        raise no_command(path, "file")
    return found


def _bounded(roots: list[Any]) -> None:
    """Refuse documents whose aliases expand without end."""
    import yaml

    count = 0
    stack = list(roots)
    while stack:
        node = stack.pop()
        count += 1
        if count > _MOST_NODES:
            raise yaml.YAMLError("too many nodes; aliases that expand without end?")
        value = node.value
        if isinstance(value, list):
            for item in value:
                stack.extend(item if isinstance(item, tuple) else (item,))


def _items(node: Any) -> Iterator[tuple[str, Node]]:
    """Yield a mapping node's keys and values; nothing for another kind of node."""
    from yaml.nodes import MappingNode, ScalarNode

    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode):
                yield str(key.value), value


def _get(node: Any, *path: str) -> Node | None:
    for key in path:
        node = next((value for name, value in _items(node) if name == key), None)
        if node is None:
            return None
    return node


def _list(node: Any) -> list[Any]:
    from yaml.nodes import SequenceNode

    return list(node.value) if isinstance(node, SequenceNode) else []


def _text(node: Any) -> str | None:
    from yaml.nodes import ScalarNode

    return str(node.value) if isinstance(node, ScalarNode) else None


def _read_root(root: MappingNode, document: _Document) -> Collection | None:
    keys = dict(_items(root))
    if "services" in keys:
        return _compose(keys["services"], document)
    if "kind" in keys and ("spec" in keys or "items" in keys):
        return _kubernetes(root, document)
    if "models" in keys:
        return _llama_swap(root, document)
    return None


def _environment(node: Any, document: _Document, values: Mapping[str, str] | None) -> tuple[dict[str, str], dict[str, Where]]:
    """Return variables given as a mapping, as NAME=value texts, or as {name, value} entries."""
    environ: dict[str, str] = {}
    places: dict[str, Where] = {}

    def put(name: str, value: str, at: Node) -> None:
        environ[name] = expand(value, values) if values is not None else value
        places[name] = document.where(at)

    for name, value in _items(node):
        put(name, _text(value) or "", value)
    for item in _list(node):
        text = _text(item)
        if text is not None:
            name, equals, value = text.partition("=")
            if equals:
                put(name, value, item)
            elif name in document.environ:
                put(name, document.environ[name], item)
        elif (name_text := _text(_get(item, "name"))) is not None:
            put(name_text, _text(_get(item, "value")) or "", item)
    return environ, places


def _size(text: str | None, *, binary: bool) -> int | None:
    """Return the bytes of "16g" (compose: powers of 1024) or "16Gi" / "16G" (Kubernetes)."""
    match = _SIZE.fullmatch(text.strip()) if text is not None else None
    if match is None:
        return None
    base = 1024 if binary or match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[match[2].casefold()])


def _limit(node: Any, document: _Document, *, binary: bool) -> tuple[int | None, Where | None]:
    if node is None:
        return None, None
    size = _size(_text(node), binary=binary)
    if size is None:
        document.complain(node, f"{clean(_text(node) or 'this')} is not a memory limit")
    return size, document.where(node)


def _llama_swap(root: MappingNode, document: _Document) -> Collection:
    macros = {name: _text(value) or "" for name, value in _items(_get(root, "macros"))}
    commands = []
    for name, model in _items(_get(root, "models")):
        node = _get(model, "cmd")
        if node is None:
            document.complain(model, f"the model {clean(name)} has no cmd")
            continue
        own = {key: _text(value) or "" for key, value in _items(_get(model, "macros"))}
        values = {**macros, **own, "PORT": _PORT, "MODEL_ID": name}
        command = _swapped(node, values, document)
        if command is None:
            continue
        words, places = command
        found = unwrap(words, document.known)
        if found is None:
            document.complain(node, f"the model {clean(name)} is started by {clean(words[0] if words else '')!r}, which is not a program of an engine residency knows")
            continue
        index, assigned = found
        environ, environ_places = _environment(_get(model, "env"), document, None)
        commands.append(Command(name=name, argv=tuple(words[index:]), places=tuple(places[index:]), environ={**environ, **assigned}, environ_places=environ_places))
    names = {c.name for c in commands}
    groups = []
    for _, group in _items(_get(root, "groups")):
        if (_text(_get(group, "swap")) or "true").casefold() == "false":
            groups.append(tuple(m for n in _list(_get(group, "members")) if (m := _text(n)) in names and m is not None))
    return Collection(path=document.path, commands=tuple(commands), groups=tuple(g for g in groups if len(g) > 1))


def _swapped(node: Node, values: Mapping[str, str], document: _Document) -> tuple[list[str], list[Where]] | None:
    """Return the words of a cmd with macros replaced; macros may use macros. Positions are those of the cmd itself."""
    text = _text(node)
    if text is None:
        document.complain(node, "cmd must be a text")
        return None
    for _ in range(8):
        before = text
        for name, value in values.items():
            text = text.replace("${" + name + "}", value)
        if text == before:
            break
    left = re.search(r"\$\{([^}]*)\}", text)
    if left:
        document.complain(node, f"the macro ${{{clean(left[1])}}} is not defined")
        return None
    try:
        words = split(text)
    except ValueError as error:
        document.complain(node, f"the command cannot be split: {str(error).lower()}")
        return None
    return words, document.text.places(words, node.start_mark.index, node.end_mark.index)


def _compose(services: Node, document: _Document) -> Collection:
    commands = []
    folder = str(PurePath(document.path).parent)
    for name, service in _items(services):
        entry, command = _get(service, "entrypoint"), _get(service, "command")
        words: list[str] = []
        places: list[Where] = []
        for node in (entry, command):
            if node is not None:
                more, at = document.words(node, document.environ)
                words += more
                places += at
        image_node = _get(service, "image")
        words, places = _with_image(words, places, image_node, entry, document)
        found = unwrap(words, document.known)
        if found is None:
            continue  # a service of another kind
        index, assigned = found
        environ, environ_places = _environment(_get(service, "environment"), document, document.environ)
        limit, limit_where = _limit(_get(service, "deploy", "resources", "limits", "memory") or _get(service, "mem_limit"), document, binary=True)
        commands.append(
            Command(
                name=name, argv=tuple(words[index:]), places=tuple(places[index:]), environ={**environ, **assigned}, environ_places=environ_places,
                mounts=tuple(_compose_mounts(_get(service, "volumes"), folder, document)), host_limit_bytes=limit, host_limit_where=limit_where,
                device_count=_compose_devices(service), inherits=False,
            )
        )  # fmt: skip
    return Collection(path=document.path, commands=tuple(commands), groups=(tuple(c.name for c in commands),) if len(commands) > 1 else ())


def _with_image(words: list[str], places: list[Where], image: Node | None, entry: Node | None, document: _Document) -> tuple[list[str], list[Where]]:
    """Put the image's own program in front of arguments that have none."""
    name = _text(image) or ""
    if image is None or entry is not None or unwrap(words, document.known) is not None:
        return words, places
    for part, program in _IMAGES:
        if part in name:
            return [program, *words], [document.where(image), *places]
    return words, places


def _compose_mounts(volumes: Any, folder: str, document: _Document) -> Iterator[tuple[str, str]]:
    for item in _list(volumes):
        text = _text(item)
        if text is not None:
            parts = expand(text, document.environ).split(":")
            source, target = (parts[0], parts[1]) if len(parts) > 1 else ("", "")
        else:
            source, target = _text(_get(item, "source")) or "", _text(_get(item, "target")) or ""
        if source.startswith((".", "/", "~")) and target:
            yield target, source if source.startswith(("/", "~")) else str(PurePath(folder, source))


def _compose_devices(service: Node) -> int | None:
    for item in _list(_get(service, "deploy", "resources", "reservations", "devices")):
        ids = _list(_get(item, "device_ids"))
        if ids:
            return len(ids)
        count = _text(_get(item, "count"))
        if count is not None and count.isdigit():
            return int(count)
    return None


def _kubernetes(root: MappingNode, document: _Document) -> Collection:
    commands: list[Command] = []
    groups: list[tuple[str, ...]] = []
    for manifest in _list(_get(root, "items")) or [root]:
        owner = _text(_get(manifest, "metadata", "name")) or "pod"
        pod = _get(manifest, "spec", "template", "spec") or _get(manifest, "spec", "jobTemplate", "spec", "template", "spec") or _get(manifest, "spec")
        if pod is None:
            continue
        host_paths = {
            _text(_get(v, "name")): _text(_get(v, "hostPath", "path")) for v in _list(_get(pod, "volumes")) if _get(v, "hostPath", "path") is not None
        }
        of_this_pod = []
        for container in _list(_get(pod, "containers")):
            command = _container(container, owner, host_paths, document)
            if command is not None:
                of_this_pod.append(command)
        commands += of_this_pod
        if len(of_this_pod) > 1:
            groups.append(tuple(c.name for c in of_this_pod))
    return Collection(path=document.path, commands=tuple(commands), groups=tuple(groups))


def _container(container: Node, owner: str, host_paths: Mapping[str | None, str | None], document: _Document) -> Command | None:
    environ, environ_places = _environment(_get(container, "env"), document, None)
    words: list[str] = []
    places: list[Where] = []
    for key in ("command", "args"):
        node = _get(container, key)
        if node is not None:
            more, at = document.words(node, None)
            words += [re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda m: environ.get(m[1], m[0]), w) for w in more]
            places += at
    words, places = _with_image(words, places, _get(container, "image"), _get(container, "command"), document)
    found = unwrap(words, document.known)
    if found is None:
        return None
    index, assigned = found
    limits = _get(container, "resources", "limits")
    limit, limit_where = _limit(_get(limits, "memory"), document, binary=False)
    cards = next((_text(v) for n, v in _items(limits) if n in ("nvidia.com/gpu", "amd.com/gpu")), None)
    mounts = []
    for mount in _list(_get(container, "volumeMounts")):
        inside, outside = _text(_get(mount, "mountPath")), host_paths.get(_text(_get(mount, "name")))
        if inside and outside:
            mounts.append((inside, outside))
    name = _text(_get(container, "name")) or "container"
    return Command(
        name=f"{owner}/{name}", argv=tuple(words[index:]), places=tuple(places[index:]), environ={**environ, **assigned},
        environ_places=environ_places, mounts=tuple(mounts), host_limit_bytes=limit, host_limit_where=limit_where,
        device_count=int(cards) if cards is not None and cards.isdigit() else 0 if limits is not None and cards is None else None,
        inherits=False,
    )  # fmt: skip


