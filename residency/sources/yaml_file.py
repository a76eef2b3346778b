"""YAML files that start engines: llama-swap, docker compose, Kubernetes. Told apart by their top-level keys."""

from __future__ import annotations

import math
import os
import re
from fractions import Fraction
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from residency.engines.base import program_name
from residency.errors import InputError, Problem
from residency.launch.toml_file import read_text
from residency.text import clean, shorten
from residency.where import Where

from . import Collection, Command, no_command
from .environment import matters, read_variables
from .words import Found, NotSimpleError, Text, expand, split, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from yaml.nodes import MappingNode, Node

#: Characters of alias expansion a document may reach; YAML aliases can double at every level.
_MOST_NODES = 100_000
#: Characters a command may have once its macros are put in; macros can grow tenfold at every level.
_LONGEST_COMMAND = 64 * 1024
#: Duplicate keys told of one file, about: a file made of nothing else is not worth more.
_MOST_DUPLICATES = 20
#: llama-swap gives every model a port of its own.
_PORT = "5800"
#: Images whose entry point is an engine's program.
_IMAGES = (
    ("llama.cpp:server", "llama-server"),
    ("llama.cpp:light", "llama-cli"),
    ("llama.cpp:full", "llama-cli"),
    ("llama-server", "llama-server"),
)
#: llama.cpp's images without a back-end for accelerators in their tag.
_CPU_IMAGE = re.compile(r"(?:.*/)?(?:ggml-org|ggerganov)/llama\.cpp:(?:server|light|full)(?:-b[0-9]+)?(?:@.*)?")
#: Programs that start another one in a container.
_CONTAINERS = ("docker", "podman", "nerdctl")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)[bB]?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2})|([mkMGTPE])|([KMGTPE])i)?")


class _Document:
    """One parsed file: nodes with positions, and the problems found."""

    def __init__(self, path: str, text: str, known: Callable[[str], bool], environ: Mapping[str, str]) -> None:
        self.text, self.lines = Text(path, text), text.splitlines()
        self.path, self.known, self.environ = path, known, environ
        self.problems: list[Problem] = []
        self.config_maps: dict[str, Node] = {}  # those that stand in the same file

    def found(self, words: list[str], places: list[Where], last: Node | None, environ: Mapping[str, str]) -> Found | None:
        """Return the engine's command in the words of a command that ends with the node ``last``."""
        end = last.end_mark.index if last is not None else 0
        try:
            return unwrap(words, places, self.known, source=self.text, end=end, environ=environ)
        except NotSimpleError as error:
            self.problems.append(Problem(message=str(error), where=error.where))
            return None

    def where(self, node: Node) -> Where:
        """Return a node's position."""
        return Where(source="file", file=self.path, line=node.start_mark.line + 1, column=node.start_mark.column + 1)

    def complain(self, node: Node, message: str) -> None:
        """Note a problem at a node."""
        line = node.start_mark.line
        self.problems.append(Problem(message=message, where=self.where(node), line_text=self.lines[line] if line < len(self.lines) else None))

    def expand(self, node: Node | None, text: str | None = None) -> str:
        """Return a node's text with compose's variables put in; one that is required and not set is a problem."""
        text = (_text(node) or "") if text is None else text
        return expand(text, self.environ, missing=lambda said: self.complain(node, said) if node is not None else None)

    def words(self, node: Node, values: Mapping[str, str] | None) -> tuple[list[str], list[Where]]:
        """Return the words of a command: a text split as a shell would, or a list of texts."""
        from yaml.nodes import ScalarNode, SequenceNode

        if isinstance(node, SequenceNode):
            words = [str(item.value) for item in node.value if isinstance(item, ScalarNode)]
            places = [self.where(item) for item in node.value if isinstance(item, ScalarNode)]
            if values is not None:
                words = [self.expand(item) for item in node.value if isinstance(item, ScalarNode)]
            return words, places
        if isinstance(node, ScalarNode):
            text = str(node.value)
            return self._shell(self.expand(node) if values is not None else text, node)
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
    _no_duplicates(roots, document)
    for root in roots:
        for manifest in _list(_get(root, "items")) or [root]:
            if _text(_get(manifest, "kind")) == "ConfigMap":
                document.config_maps[_text(_get(manifest, "metadata", "name")) or ""] = manifest
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


def _no_duplicates(roots: list[Any], document: _Document) -> None:
    """Complain about keys that stand twice in one mapping: readers differ in which one they take."""
    from yaml.nodes import MappingNode, ScalarNode

    seen: set[int] = set()
    stack = list(reversed(roots))
    while stack and len(document.problems) < _MOST_DUPLICATES:
        node = stack.pop()
        if id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))
        if not isinstance(node, MappingNode):
            stack.extend(reversed(node.value))
            continue
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                document.complain(key, f"the key {clean(name)} stands twice; the first is in line {lines[name]}")
            lines.setdefault(name, line)
        stack.extend(reversed([value for _, value in node.value]))


def _items(node: Any) -> Iterator[tuple[str, Node]]:
    """Yield a mapping node's keys and values; nothing for another kind of node."""
    from yaml.nodes import MappingNode, ScalarNode

    if not isinstance(node, MappingNode):
        return
    names = set()
    merged: list[Any] = []
    for key, value in node.value:
        if isinstance(key, ScalarNode) and key.tag == "tag:yaml.org,2002:merge":
            merged += _list(value) or [value]
        elif isinstance(key, ScalarNode):
            names.add(str(key.value))
            yield str(key.value), value
    for part in merged:  # "<<": what the mapping itself does not say, earlier ones first
        for name, value in _items(part):
            if name not in names:
                names.add(name)
                yield name, value


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
        environ[name] = document.expand(at, value) if values is not None else value
        places[name] = document.where(at)

    for name, value in _items(node):
        if values is not None and value.tag == "tag:yaml.org,2002:null":  # compose: the caller's own, if there is one
            if name in document.environ:
                environ[name], places[name] = document.environ[name], document.where(value)
            continue
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


def _compose_environment(service: Node, document: _Document, folder: str) -> tuple[dict[str, str], dict[str, Where]]:
    """Return a service's variables: its files in their order, and its own over them."""
    values: dict[str, str] = {}
    places: dict[str, Where] = {}
    given = _get(service, "env_file")
    for item in _list(given) or ([given] if given is not None else []):
        text = _text(item) or _text(_get(item, "path"))
        if not text:
            document.complain(item, "env_file takes a path, or a table with a path")
            continue
        path = str(PurePath(folder, document.expand(item, text)))
        optional = (_text(_get(item, "required")) or "true").casefold() == "false"
        if optional and not os.path.lexists(path):
            continue
        try:
            more, at = read_variables(path, host=document.environ)
        except InputError as error:
            for problem in error.problems:
                document.complain(item, f"env_file {clean(path)}: {problem.message}")
            continue
        values.update(more)
        places.update(at)
    own, own_places = _environment(_get(service, "environment"), document, document.environ)
    return {**values, **own}, {**places, **own_places}


def _pod_environment(container: Node, document: _Document) -> tuple[dict[str, str], dict[str, Where]]:
    """Return a container's variables: envFrom, then env over it. What only the cluster knows is a problem."""
    values: dict[str, str] = {}
    places: dict[str, Where] = {}
    for source in _list(_get(container, "envFrom")):
        prefix = _text(_get(source, "prefix")) or ""
        name = _text(_get(source, "configMapRef", "name"))
        if name is not None and name in document.config_maps:
            for key, value in _items(_get(document.config_maps[name], "data")):
                values[prefix + key], places[prefix + key] = _text(value) or "", document.where(value)
            continue
        secret = _text(_get(source, "secretRef", "name"))
        what = f"configMap {clean(name)}" if name is not None else f"secret {clean(secret)}" if secret is not None else "a source of another kind"
        document.complain(source, f"envFrom takes variables from {what}, which cannot be read here; write those the engine reads under env")
    for item in _list(_get(container, "env")):
        variable = _text(_get(item, "name"))
        if variable is None:
            continue
        places[variable] = document.where(item)
        origin = _get(item, "valueFrom")
        if origin is None:
            values[variable] = _referenced(_text(_get(item, "value")) or "", values)
            continue
        reference = _get(origin, "configMapKeyRef")
        written = _get(document.config_maps.get(_text(_get(reference, "name")) or ""), "data", _text(_get(reference, "key")) or "")
        values.pop(variable, None)
        if written is not None:
            values[variable] = _text(written) or ""
        elif matters(variable):
            kind = next((k.removesuffix("Ref") for k, _ in _items(origin)), "a source")
            document.complain(item, f"{clean(variable)} comes from a {clean(kind)}, which cannot be read here; write its value under env")
    return values, places


def _referenced(text: str, values: Mapping[str, str]) -> str:
    """Put in $(NAME) as Kubernetes does: what is not known stays as it is."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda m: values.get(m[1], m[0]), text)


def _size(text: str) -> int | None:
    """Return the bytes of compose's "16g": powers of 1024."""
    match = _SIZE.fullmatch(text.strip()) if len(text) < 40 else None
    if match is None:
        return None
    size = float(match[1]) * 1024 ** _POWERS[match[2].casefold()]
    return int(size) if size < 2**63 else None


def _quantity(text: str) -> int | None:
    """Return the bytes of Kubernetes' "16Gi", "16G", "1.5Gi", "1e9"; a part of a byte counts as one."""
    match = _QUANTITY.fullmatch(text.strip()) if len(text) < 40 else None
    if match is None:
        return None
    unit, binary = match[3] or match[4] or "", match[4] is not None
    scale = Fraction(1, 1000) if unit == "m" else Fraction(1024 if binary else 1000) ** " kmgtpe".index(unit.casefold() or " ")
    size = math.ceil(Fraction(match[1]) * Fraction(10) ** int(match[2] or 0) * scale)
    return size if size < 2**63 else None


def _limit(node: Any, document: _Document, *, binary: bool) -> tuple[int | None, Where | None]:
    """Return a memory limit and where it stands. ``binary``: compose's, otherwise Kubernetes'."""
    if node is None:
        return None, None
    text = document.expand(node) if binary else _text(node) or ""
    size = _size(text) if binary else _quantity(text)
    if size is None:
        document.complain(node, f"{clean(shorten(text or 'this'))} is not a memory limit")
    return size, document.where(node)


def _count(node: Node, text: str, document: _Document) -> int | None:
    """Return a number of devices, or complain."""
    if re.fullmatch(r"[0-9]{1,6}", text):
        return int(text)
    document.complain(node, f"{clean(shorten(text)) or 'this'} is not a number of devices")
    return None


def _llama_swap(root: MappingNode, document: _Document) -> Collection:
    macros = {name: _text(value) or "" for name, value in _items(_get(root, "macros"))}
    commands = []
    others: list[tuple[Node, str]] = []  # models of no known engine: passed over when there are others
    for name, model in _items(_get(root, "models")):
        node = _get(model, "cmd")
        if node is None:
            document.complain(model, f"the model {clean(name)} has no cmd")
            continue
        own = {key: _text(value) or "" for key, value in _items(_get(model, "macros"))}
        values = {**macros, **own, "PORT": _PORT, "MODEL_ID": name, **_of_caller((_text(node) or "", *macros.values(), *own.values()), document)}
        command = _swapped(node, values, document)
        if command is None:
            continue
        words, places = command
        if not words:
            document.complain(node, f"the model {clean(name)} has an empty cmd")
            continue
        environ, environ_places = _environment(_get(model, "env"), document, None)
        for variable, value in environ.items():
            for macro, put in _of_caller((value,), document).items():
                environ[variable] = environ[variable].replace("${" + macro + "}", put)
            unset = re.search(r"\$\{env\.[^}]*\}", environ[variable])
            if unset:
                document.problems.append(Problem(message=f"the macro {clean(unset[0])} is not set in the environment", where=environ_places[variable]))
        before = len(document.problems)
        # what docker run is given is for the container's own program, whatever the container is called
        inside = any(program_name(w) in _CONTAINERS for w in words[:2])
        found = None if inside else document.found(words, places, node, {**document.environ, **environ})
        if found is None:
            if len(document.problems) == before:
                others.append((node, f"the model {clean(name)} is started by {clean(words[0])!r}, which is not a program of an engine residency knows"))
            continue
        commands.append(
            Command(name=name, argv=tuple(found.words), places=tuple(found.places), environ={**environ, **found.assigned}, environ_places=environ_places)
        )
    if not commands:
        for node, message in others:
            document.complain(node, message)
    judged = {c.name for c in commands}
    groups = []
    for title, group in _items(_get(root, "groups")):
        members = _members(title, group, {name for name, _ in _items(_get(root, "models"))}, document)
        if (_text(_get(group, "swap")) or "true").casefold() == "false":
            groups.append(tuple(m for m in members if m in judged))
    return Collection(path=document.path, commands=tuple(commands), groups=tuple(g for g in groups if len(g) > 1))


def _of_caller(texts: Iterable[str], document: _Document) -> dict[str, str]:
    """Return the values of the macros ${env.NAME} in some texts, as far as the caller's environment has them."""
    names = {name for text in texts for name in re.findall(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}", text)}
    return {f"env.{name}": document.environ[name] for name in sorted(names) if name in document.environ}


def _members(title: str, group: Node, names: set[str], document: _Document) -> tuple[str, ...]:
    """Return the models of a group, each once; complain about what is none."""
    found: dict[str, None] = {}
    for node in _list(_get(group, "members")):
        name = _text(node)
        if name is None:
            document.complain(node, f"a member of the group {clean(title)} must be a model's name")
        elif name not in names:
            document.complain(node, f"the group {clean(title)} has the member {clean(name)}, which is not a model of this file")
        else:
            found[name] = None
    return tuple(found)


def _swapped(node: Node, values: Mapping[str, str], document: _Document) -> tuple[list[str], list[Where]] | None:
    """Return the words of a cmd with macros replaced; macros may use macros. Positions are those of the cmd itself."""
    text = _text(node)
    if text is None:
        document.complain(node, "cmd must be a text")
        return None
    for _ in range(8):
        before = text
        for name, value in values.items():
            token = "${" + name + "}"
            if len(text) + text.count(token) * (len(value) - len(token)) > _LONGEST_COMMAND:
                document.complain(node, f"with its macros the command is longer than {_LONGEST_COMMAND // 1024} KiB; macros that multiply?")
                return None
            text = text.replace(token, value)
        if text == before:
            break
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
    return words, document.text.places(words, node.start_mark.index, node.end_mark.index)


def _compose(services: Node, document: _Document) -> Collection:
    commands = []
    folder = str(PurePath(document.path).parent)
    own = str(PurePath(folder, ".env"))  # compose fills ${NAME} in from there, under the caller's environment
    if os.path.lexists(own):
        document.environ = {**read_variables(own, host=document.environ)[0], **document.environ}
    for name, service in _items(services):
        entry, command = _get(service, "entrypoint"), _get(service, "command")
        words: list[str] = []
        places: list[Where] = []
        for node in (entry, command):
            if node is not None:
                more, at = document.words(node, document.environ)
                words += more
                places += at
        before = len(document.problems)
        environ, environ_places = _compose_environment(service, document, folder)
        of_environment = document.problems[before:]
        del document.problems[before:]
        image = _get(service, "image")
        built = document.expand(image)
        found = _with_image(words, places, image, built, entry, command or entry, environ, document)
        if found is None:
            continue  # a service of another kind
        document.problems += of_environment
        limit, limit_where = _limit(_get(service, "deploy", "resources", "limits", "memory") or _get(service, "mem_limit"), document, binary=True)
        commands.append(
            Command(
                name=name, argv=tuple(found.words), places=tuple(found.places), environ={**environ, **found.assigned}, environ_places=environ_places,
                mounts=tuple(_compose_mounts(_get(service, "volumes"), folder, document)), host_limit_bytes=limit, host_limit_where=limit_where,
                device_count=0 if _CPU_IMAGE.fullmatch(built) else _compose_devices(service, document), inherits=False,
            )
        )  # fmt: skip
    return Collection(path=document.path, commands=tuple(commands), groups=(tuple(c.name for c in commands),) if len(commands) > 1 else ())


def _with_image(
    words: list[str], places: list[Where], image: Node | None, built: str, entry: Node | None, last: Node | None, environ: Mapping[str, str], document: _Document
) -> Found | None:
    """Return the engine's command of a container: the one written, or arguments behind the image's own program."""
    before = len(document.problems)
    found = document.found(words, places, last, environ)
    if found is not None or len(document.problems) > before or image is None or entry is not None:
        return found
    for part, program in _IMAGES:
        if part in built:
            return document.found([program, *words], [document.where(image), *places], last or image, environ)
    return None


def _compose_mounts(volumes: Any, folder: str, document: _Document) -> Iterator[tuple[str, str]]:
    for item in _list(volumes):
        text = _text(item)
        if text is not None:
            parts = document.expand(item).split(":")
            source, target = (parts[0], parts[1]) if len(parts) > 1 else ("", "")
        else:
            source, target = document.expand(_get(item, "source")), document.expand(_get(item, "target"))
        if source.startswith((".", "/", "~")) and target:
            yield target, source if source.startswith(("/", "~")) else str(PurePath(folder, source))


def _compose_devices(service: Node, document: _Document) -> int | None:
    for item in _list(_get(service, "deploy", "resources", "reservations", "devices")):
        ids = _list(_get(item, "device_ids"))
        if ids:
            return len(ids)
        count = _get(item, "count")
        if count is not None and (number := document.expand(count)) != "all":
            return _count(count, number, document)
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
        for container in (*_list(_get(pod, "initContainers")), *_list(_get(pod, "containers"))):
            command = _container(container, owner, host_paths, document)
            if command is None:
                continue
            commands.append(command)
            if container in _list(_get(pod, "containers")) or _text(_get(container, "restartPolicy")) == "Always":
                of_this_pod.append(command)  # the other init containers have ended before
        if len(of_this_pod) > 1:
            groups.append(tuple(c.name for c in of_this_pod))
    return Collection(path=document.path, commands=tuple(commands), groups=tuple(groups))


def _container(container: Node, owner: str, host_paths: Mapping[str | None, str | None], document: _Document) -> Command | None:
    before = len(document.problems)
    environ, environ_places = _pod_environment(container, document)
    of_environment = document.problems[before:]
    del document.problems[before:]
    words: list[str] = []
    places: list[Where] = []
    for key in ("command", "args"):
        node = _get(container, key)
        if node is not None:
            more, at = document.words(node, None)
            words += [_referenced(w, environ) for w in more]
            places += at
    entry = _get(container, "command")
    image = _get(container, "image")
    built = _text(image) or ""
    found = _with_image(words, places, image, built, entry, _get(container, "args") or entry, environ, document)
    if found is None:
        return None
    document.problems += of_environment
    limits = _get(container, "resources", "limits")
    limit, limit_where = _limit(_get(limits, "memory"), document, binary=False)
    cards = next((v for n, v in _items(limits) if n in ("nvidia.com/gpu", "amd.com/gpu")), None)
    mounts = []
    for mount in _list(_get(container, "volumeMounts")):
        inside, outside = _text(_get(mount, "mountPath")), host_paths.get(_text(_get(mount, "name")))
        if inside and outside:
            mounts.append((inside, outside))
    name = _text(_get(container, "name")) or "container"
    return Command(
        name=f"{owner}/{name}", argv=tuple(found.words), places=tuple(found.places), environ={**environ, **found.assigned},
        environ_places=environ_places, mounts=tuple(mounts), host_limit_bytes=limit, host_limit_where=limit_where,
        device_count=0 if _CPU_IMAGE.fullmatch(built) else _count(cards, _text(cards) or "", document) if cards is not None else 0 if limits is not None else None,
        inherits=False,
    )  # fmt: skip


