"""Kubernetes manifests: containers of pods, with their limits, devices and host paths."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from residency.text import clean

from . import Collection, Command
from .containers import CPU_IMAGE, with_image
from .environment import matters
from .words import TooLongError, put_in
from .yaml_nodes import count_of, get, items, limit_of, list_of, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yaml.nodes import MappingNode, Node

    from residency.where import Where

    from .yaml_nodes import Document

_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def read_kubernetes(root: MappingNode, document: Document) -> Collection:
    """Return the engine commands of a manifest's pods; the containers of one pod run at once."""
    commands: list[Command] = []
    groups: list[tuple[str, ...]] = []
    for manifest in list_of(get(root, "items")) or [root]:
        owner = text_of(get(manifest, "metadata", "name")) or "pod"
        pod = get(manifest, "spec", "template", "spec") or get(manifest, "spec", "jobTemplate", "spec", "template", "spec") or get(manifest, "spec")
        if pod is None:
            continue
        host_paths = {
            text_of(get(v, "name")): text_of(get(v, "hostPath", "path")) for v in list_of(get(pod, "volumes")) if get(v, "hostPath", "path") is not None
        }
        of_this_pod = []
        for container in (*list_of(get(pod, "initContainers")), *list_of(get(pod, "containers"))):
            command = _container(container, owner, host_paths, document)
            if command is None:
                continue
            commands.append(command)
            if container in list_of(get(pod, "containers")) or text_of(get(container, "restartPolicy")) == "Always":
                of_this_pod.append(command)  # the other init containers have ended before
        if len(of_this_pod) > 1:
            groups.append(tuple(c.name for c in of_this_pod))
    return Collection(path=document.path, commands=tuple(commands), groups=tuple(groups))


def _container(container: Node, owner: str, host_paths: Mapping[str | None, str | None], document: Document) -> Command | None:
    before = len(document.problems)
    environ, environ_places = _pod_environment(container, document)
    of_environment = document.problems[before:]
    del document.problems[before:]
    words: list[str] = []
    places: list[Where] = []
    for key in ("command", "args"):
        node = get(container, key)
        if node is not None:
            more, at = document.words(node, expanded=False)
            words += [_referenced(w, environ, node, document) for w in more]
            places += at
    entry = get(container, "command")
    image = get(container, "image")
    built = text_of(image) or ""
    name = text_of(get(container, "name")) or "container"
    found = with_image(
        words, places, image=built, image_at=document.where(image) if image is not None else None, own_entry=entry is not None,
        last=get(container, "args") or entry or image or container, environ=environ, document=document, who=f"the container {clean(name)}",
    )  # fmt: skip
    if found is None:
        return None
    document.problems += of_environment
    limits = get(container, "resources", "limits")
    limit, limit_where = limit_of(get(limits, "memory"), document, binary=False)
    cards = next((v for n, v in items(limits) if n in ("nvidia.com/gpu", "amd.com/gpu")), None)
    mounts = []
    for mount in list_of(get(container, "volumeMounts")):
        inside, outside = text_of(get(mount, "mountPath")), host_paths.get(text_of(get(mount, "name")))
        if inside and outside:
            mounts.append((inside, outside))
    return Command(
        name=f"{owner}/{name}", argv=tuple(found.words), places=tuple(found.places), environ={**environ, **found.assigned},
        environ_places=environ_places, mounts=tuple(mounts), host_limit_bytes=limit, host_limit_where=limit_where,
        device_count=0 if CPU_IMAGE.fullmatch(built) else count_of(cards, text_of(cards) or "", document) if cards is not None else 0 if limits is not None else None,
        inherits=False,
    )  # fmt: skip


def _pod_environment(container: Node, document: Document) -> tuple[dict[str, str], dict[str, Where]]:
    """Return a container's variables: envFrom, then env over it. What only the cluster knows is a problem."""
    values: dict[str, str] = {}
    places: dict[str, Where] = {}
    for source in list_of(get(container, "envFrom")):
        prefix = text_of(get(source, "prefix")) or ""
        name = text_of(get(source, "configMapRef", "name"))
        if name is not None and name in document.config_maps:
            for key, value in items(get(document.config_maps[name], "data")):
                if not document.counted(prefix + key, value):
                    break
                values[prefix + key], places[prefix + key] = text_of(value) or "", document.where(value)
            continue
        secret = text_of(get(source, "secretRef", "name"))
        what = f"configMap {clean(name)}" if name is not None else f"secret {clean(secret)}" if secret is not None else "a source of another kind"
        document.complain(source, f"envFrom takes variables from {what}, which cannot be read here; write those the engine reads under env")
    for item in list_of(get(container, "env")):
        variable = text_of(get(item, "name"))
        if variable is None:
            continue
        places[variable] = document.where(item)
        origin = get(item, "valueFrom")
        if origin is None:
            values[variable] = _referenced(text_of(get(item, "value")) or "", values, item, document)
            continue
        reference = get(origin, "configMapKeyRef")
        written = get(document.config_maps.get(text_of(get(reference, "name")) or ""), "data", text_of(get(reference, "key")) or "")
        values.pop(variable, None)
        if written is not None:
            values[variable] = text_of(written) or ""
        elif matters(variable):
            kind = next((k.removesuffix("Ref") for k, _ in items(origin)), "a source")
            document.complain(item, f"{clean(variable)} comes from a {clean(kind)}, which cannot be read here; write its value under env")
    return values, places


def _referenced(text: str, values: Mapping[str, str], at: Node, document: Document) -> str:
    """Put in $(NAME) as Kubernetes does: what is not known stays as it is."""
    try:
        return document.counted(put_in(_REFERENCE, lambda m: values.get(m[1], m[0]), text), at)
    except TooLongError as error:
        document.complain(at, str(error))
        return ""
