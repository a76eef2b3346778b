"""YAML documents as nodes with positions, and what every kind of file with engine commands writes in the same way."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from residency.errors import InputError, Problem
from residency.launch.toml_file import read_text
from residency.text import clean, shorten
from residency.where import Where

from .words import LONGEST_SUM, Found, NotSimpleError, Text, TooLongError, expand, split, unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from yaml.nodes import Node

#: Characters of alias expansion a document may reach; YAML aliases can double at every level.
_MOST_NODES = 100_000
#: Duplicate keys told of one file, about: a file made of nothing else is not worth more.
_MOST_DUPLICATES = 20
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)[bB]?")
_HALF = re.compile("[\ud800-\udfff]")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2})|([mkMGTPE])|([KMGTPE])i)?")


class Document:
    """A file and those it refers to: nodes with positions, and the problems found."""

    def __init__(self, path: str, known: Callable[[str], bool], environ: Mapping[str, str]) -> None:
        self.path, self.known, self.environ = path, known, environ
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []  # what is not judged or assumed, and would not be expected
        self.config_maps: dict[str, Node] = {}  # those that stand in the same file
        self.texts: dict[str, Text] = {}
        self.environs: dict[str, Mapping[str, str]] = {}  # by file: the variables that fill in its texts; default: the caller's
        self.folders: dict[str, str] = {}  # by file: what its paths are relative to; default: its own folder
        self.variables: dict[tuple[str, int], tuple[dict[str, str], dict[str, Where]]] = {}  # of files, by path and what fills them in
        self.taken = 0  # how many of them services have taken
        self._put_in = 0  # characters of texts with what they refer to, over all files
        self._roots: dict[str, list[Any]] = {}
        self._lines: dict[str, list[str]] = {}

    def parse(self, path: str) -> list[Any]:
        """Return the documents of a file as nodes; a file is read once. Raises InputError."""
        import yaml

        if path in self._roots:
            return self._roots[path]
        text = read_text(path)
        self.texts[path] = Text(path, text)
        roots = []
        try:
            loader = yaml.SafeLoader(text)
            loader.name = path  # every node then knows its file
            try:
                while loader.check_node():
                    root = loader.get_node()
                    if root is not None:
                        roots.append(root)
            finally:
                loader.dispose()
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
        self._roots[path] = roots
        _no_duplicates(roots, self)
        return roots

    def folder(self, node: Node) -> str:
        """Return the folder that paths of a node's file are relative to."""
        file = node.start_mark.name
        return self.folders.get(file) or str(PurePath(file).parent)

    def environ_of(self, node: Node) -> Mapping[str, str]:
        """Return the variables that fill in the texts of a node's file."""
        return self.environs.get(node.start_mark.name, self.environ)

    def found(self, words: list[str], places: list[Where], last: Node | None, environ: Mapping[str, str]) -> Found | None:
        """Return the engine's command in the words of a command that ends with the node ``last``."""
        file = last.start_mark.name if last is not None else self.path
        end = last.end_mark.index if last is not None else 0
        try:
            return unwrap(words, places, self.known, source=self.texts[file], end=end, environ=environ)
        except NotSimpleError as error:
            self.problems.append(Problem(message=str(error), where=error.where))
            return None

    def where(self, node: Node) -> Where:
        """Return a node's position."""
        return Where(source="file", file=node.start_mark.name, line=node.start_mark.line + 1, column=node.start_mark.column + 1)

    def complain(self, node: Node, message: str) -> None:
        """Note a problem at a node."""
        file, line = node.start_mark.name, node.start_mark.line
        lines = self._lines_of(file)
        self.problems.append(Problem(message=message, where=self.where(node), line_text=lines[line] if line < len(lines) else None))

    def _lines_of(self, file: str) -> list[str]:
        if file not in self._lines:
            self._lines[file] = self.texts[file].text.splitlines()
        return self._lines[file]

    def warn(self, where: Where | None, message: str) -> None:
        """Note what a reader of the report must know although it is no fault."""
        self.warnings.append(Problem(message=message, where=where))

    def expand(self, node: Node | None, text: str | None = None) -> str:
        """Return a node's text with compose's variables put in; one that is required and not set is a problem."""
        if node is None:
            return ""
        text = (text_of(node) or "") if text is None else text
        if not self.counted(text or " ", node):  # as it is written: aliases repeat texts, too
            return ""
        try:
            return self.counted(expand(text, self.environ_of(node), missing=lambda said: self.complain(node, said), unset=lambda name: self._unset(node, name)), node)
        except TooLongError as error:
            self.complain(node, str(error))
            return ""

    def _unset(self, node: Node, name: str) -> None:
        self.warn(self.where(node), f"the variable {name} is not set: compose puts in nothing")

    def counted(self, text: str, node: Node) -> str:
        """Return a text that was put together, or "" and a complaint once all of them are too long."""
        if self._put_in > LONGEST_SUM:
            return ""
        self._put_in += len(text)
        if self._put_in > LONGEST_SUM:
            self.complain(node, f"from here on the file's texts come to more than {LONGEST_SUM // 2**20} MiB; references that multiply?")
            return ""
        return text

    def words(self, node: Node, *, expanded: bool) -> tuple[list[str], list[Where]]:
        """Return the words of a command: a text split as a shell would, or a list of texts.

        ``expanded``: with compose's variables put in.
        """
        from yaml.nodes import ScalarNode, SequenceNode

        if isinstance(node, SequenceNode):
            nodes = [item for item in node.value if isinstance(item, ScalarNode)]
            return [self.expand(item) if expanded else str(item.value) for item in nodes], [self.where(item) for item in nodes]
        if isinstance(node, ScalarNode):
            return self._shell(self.expand(node) if expanded else str(node.value), node)
        self.complain(node, "a command is a text or a list of texts")
        return [], []

    def places(self, words: list[str], node: Node) -> list[Where]:
        """Return where each word of a node's text stands."""
        return self.texts[node.start_mark.name].places(words, node.start_mark.index, node.end_mark.index)

    def _shell(self, text: str, node: Node) -> tuple[list[str], list[Where]]:
        try:
            words = split(text)
        except ValueError as error:
            self.complain(node, f"the command cannot be split: {str(error).lower()}")
            return [], []
        return words, self.places(words, node)


def _bounded(roots: list[Any]) -> None:
    """Refuse documents whose aliases expand without end, and texts that no program can be given."""
    import yaml

    count = 0
    stack = list(roots)
    while stack:
        node = stack.pop()
        count += 1
        if count > _MOST_NODES:
            raise yaml.YAMLError("too many nodes; aliases that expand without end?")
        value = node.value
        if isinstance(value, str) and "\0" in value:
            raise yaml.MarkedYAMLError(problem="a text with a NUL character", problem_mark=node.start_mark)
        if isinstance(value, str) and not value.isascii() and _HALF.search(value):
            raise yaml.MarkedYAMLError(problem="a text with half of a surrogate pair, which is no character", problem_mark=node.start_mark)
        if isinstance(value, list):
            for item in value:
                stack.extend(item if isinstance(item, tuple) else (item,))


def _no_duplicates(roots: list[Any], document: Document) -> None:
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


def items(node: Any) -> Iterator[tuple[str, Node]]:
    """Yield a mapping node's keys and values; nothing for another kind of node."""
    from yaml.nodes import MappingNode, ScalarNode

    if not isinstance(node, MappingNode):
        return
    names = set()
    merged: list[Any] = []
    for key, value in node.value:
        if isinstance(key, ScalarNode) and key.tag == "tag:yaml.org,2002:merge":
            merged += list_of(value) or [value]
        elif isinstance(key, ScalarNode):
            names.add(str(key.value))
            yield str(key.value), value
    for part in merged:  # "<<": what the mapping itself does not say, earlier ones first
        for name, value in items(part):
            if name not in names:
                names.add(name)
                yield name, value


def get(node: Any, *path: str) -> Node | None:
    """Return what stands under keys inside keys; None when it is not there."""
    for key in path:
        node = next((value for name, value in items(node) if name == key), None)
        if node is None:
            return None
    return node


def list_of(node: Any) -> list[Any]:
    """Return the nodes of a list; none for another kind of node."""
    from yaml.nodes import SequenceNode

    return list(node.value) if isinstance(node, SequenceNode) else []


def text_of(node: Any) -> str | None:
    """Return a text, a number or the like as it is written; None for another kind of node."""
    from yaml.nodes import ScalarNode

    return str(node.value) if isinstance(node, ScalarNode) else None


def environment_of(node: Any, document: Document, *, composed: bool) -> tuple[dict[str, str], dict[str, Where]]:
    """Return variables given as a mapping, as NAME=value texts, or as {name, value} entries.

    ``composed``: with compose's variables put in.
    """
    environ: dict[str, str] = {}
    places: dict[str, Where] = {}

    def put(name: str, value: str, at: Node) -> None:
        environ[name] = document.expand(at, value) if composed else value
        places[name] = document.where(at)

    for name, value in items(node):
        if composed and value.tag == "tag:yaml.org,2002:null":  # the caller's own, if there is one
            if name in document.environ_of(value):
                environ[name], places[name] = document.environ_of(value)[name], document.where(value)
            continue
        put(name, text_of(value) or "", value)
    for item in list_of(node):
        text = text_of(item)
        if text is not None:
            name, equals, value = text.partition("=")
            if equals:
                put(name, value, item)
            elif name in document.environ_of(item):
                environ[name], places[name] = document.environ_of(item)[name], document.where(item)
        elif (name_text := text_of(get(item, "name"))) is not None:
            put(name_text, text_of(get(item, "value")) or "", item)
    return environ, places


def size_of(text: str) -> int | None:
    """Return the bytes of compose's "16g": powers of 1024."""
    match = _SIZE.fullmatch(text.strip()) if len(text) < 40 else None
    if match is None:
        return None
    size = float(match[1]) * 1024 ** _POWERS[match[2].casefold()]
    return int(size) if size < 2**63 else None


def quantity_of(text: str) -> int | None:
    """Return the bytes of Kubernetes' "16Gi", "16G", "1.5Gi", "1e9"; a part of a byte counts as one."""
    match = _QUANTITY.fullmatch(text.strip()) if len(text) < 40 else None
    if match is None:
        return None
    unit, binary = match[3] or match[4] or "", match[4] is not None
    scale = Fraction(1, 1000) if unit == "m" else Fraction(1024 if binary else 1000) ** " kmgtpe".index(unit.casefold() or " ")
    size = math.ceil(Fraction(match[1]) * Fraction(10) ** int(match[2] or 0) * scale)
    return size if size < 2**63 else None


def limit_of(node: Any, document: Document, *, binary: bool) -> tuple[int | None, Where | None]:
    """Return a memory limit and where it stands. ``binary``: compose's, otherwise Kubernetes'."""
    if node is None:
        return None, None
    text = document.expand(node) if binary else text_of(node) or ""
    size = size_of(text) if binary else quantity_of(text)
    if size is None:
        document.complain(node, f"{clean(shorten(text or 'this'))} is not a memory limit")
    return (size, document.where(node)) if size else (None, None)  # 0 is none


def count_of(node: Node, text: str, document: Document) -> int | None:
    """Return a number of devices, or complain."""
    if re.fullmatch(r"[0-9]{1,6}", text):
        return int(text)
    document.complain(node, f"{clean(shorten(text)) or 'this'} is not a number of devices")
    return None
