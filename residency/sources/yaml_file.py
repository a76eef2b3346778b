"""YAML files that start engines: llama-swap, docker compose, Kubernetes. Told apart by their top-level keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from residency.errors import InputError, Problem
from residency.where import Where

from . import Collection, no_command
from .compose import read_compose
from .kubernetes import read_kubernetes
from .llama_swap import read_llama_swap
from .yaml_nodes import Document, get, items, list_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from yaml.nodes import MappingNode


def read(path: str, *, known: Callable[[str], bool], environ: Mapping[str, str]) -> Collection:
    """Read a YAML file. Raises InputError with every problem."""
    document = Document(path, known, environ)
    roots = document.parse(path)
    for root in roots:
        for manifest in list_of(get(root, "items")) or [root]:
            if text_of(get(manifest, "kind")) == "ConfigMap":
                document.config_maps[text_of(get(manifest, "metadata", "name")) or ""] = manifest
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
        raise InputError(document.warnings) if document.warnings else no_command(path, "file")
    first = {warning.message: warning for warning in reversed(document.warnings)}  # a variable that is not set is told once
    return replace(found, warnings=tuple(reversed(first.values())))


def _read_root(root: MappingNode, document: Document) -> Collection | None:
    keys = dict(items(root))
    if "services" in keys or ("include" in keys and not keys.keys() & {"kind", "models"}):
        return read_compose(root, document)
    if "kind" in keys and ("spec" in keys or "items" in keys):
        return read_kubernetes(root, document)
    if "models" in keys:
        return read_llama_swap(root, document)
    return None
