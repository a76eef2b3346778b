"""Kubernetes manifests: containers of pods, with their limits, devices and host paths."""

from __future__ import annotations

import posixpath
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from residency.text import clean, shorten

from . import Collection, Command
from .containers import CPU_IMAGE, folder_of, with_image
from .environment import matters
from .words import TooLongError, put_in
from .yaml_nodes import count_of, get, items, limit_of, list_of, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from yaml.nodes import MappingNode, Node

    from residency.where import Where

    from .yaml_nodes import Document

#: Resources that are whole devices.
_WHOLE_DEVICES = ("nvidia.com/gpu", "amd.com/gpu")
#: Others that are devices, or parts of some.
_PART_OF_A_DEVICE = re.compile(r"^(?:nvidia|amd|habana|huawei|google|volcano)\.(?:com|ai|sh)/|gpu.*/|/.*(?:gpu|vgpu|mig|npu|tpu)", re.IGNORECASE)
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
        volumes = {text_of(get(v, "name")) or "": v for v in list_of(get(pod, "volumes"))}
        of_this_pod: list[Command] = []
        taken, lasting = 0, {id(container) for container in list_of(get(pod, "containers"))}
        for container in (*list_of(get(pod, "initContainers")), *list_of(get(pod, "containers"))):
            command = _container(container, owner, pod, volumes, document)
            if command is None:
                continue
            if id(container) in lasting or text_of(get(container, "restartPolicy")) == "Always":
                command = replace(command, first_device=taken)  # every container has devices of its own
                taken += command.device_count or 0
                of_this_pod.append(command)  # the other init containers have ended before
            commands.append(command)
        if len(of_this_pod) > 1:
            groups.append(tuple(c.name for c in of_this_pod))
    return Collection(path=document.path, commands=tuple(commands), groups=tuple(groups))


def _container(container: Node, owner: str, pod: Node, volumes: Mapping[str, Node], document: Document) -> Command | None:
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
    whole, whole_where = limit_of(get(pod, "resources", "limits", "memory"), document, binary=False)
    if whole is not None and (limit is None or whole < limit):
        limit, limit_where = whole, whole_where
    cards = next((v for n, v in items(limits) if n in _WHOLE_DEVICES), None)
    for resource, value in items(limits):
        if resource not in _WHOLE_DEVICES and _PART_OF_A_DEVICE.search(resource) and text_of(value) != "0":
            document.complain(value, f"{clean(shorten(resource))} is a part of a device or one of a kind residency does not know; whole ones are {' and '.join(_WHOLE_DEVICES)}")
    claims = get(container, "resources", "claims")
    if claims is not None and list_of(claims):
        document.complain(claims, "which devices a resource claim gives is known only to the cluster; ask for them under limits")
    mounts, hidden = _mounts(container, volumes)
    folder, no_folder = folder_of(text_of(get(container, "workingDir")) or "")
    return Command(
        name=f"{owner}/{name}", argv=tuple(found.words), places=tuple(found.places), environ={**environ, **found.assigned},
        environ_places=environ_places, mounts=mounts, hidden=hidden, contained=True, folder=folder, no_folder=no_folder,
        device_where=document.where(cards) if cards is not None else None, host_limit_bytes=limit, host_limit_where=limit_where,
        device_count=0 if CPU_IMAGE.fullmatch(built) else count_of(cards, text_of(cards) or "", document) if cards is not None else 0 if limits is not None else None,
        inherits=False,
    )  # fmt: skip


def _mounts(container: Node, volumes: Mapping[str, Node]) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the mounts that lie on the node, taken for this machine, and those that cannot be seen."""
    mounts: list[tuple[str, str]] = []
    hidden: list[tuple[str, str]] = []
    for mount in list_of(get(container, "volumeMounts")):
        inside, name = text_of(get(mount, "mountPath")), text_of(get(mount, "name")) or ""
        if not inside:
            continue
        inside = posixpath.normpath(posixpath.join("/", inside))
        outside, part = text_of(get(volumes.get(name), "hostPath", "path")), text_of(get(mount, "subPath")) or ""
        if outside and get(mount, "subPathExpr") is not None:
            hidden.append((inside, f"a part of the volume {clean(shorten(name))} that subPathExpr names"))
        elif outside:
            mounts.append((inside, posixpath.normpath(posixpath.join(outside, part.lstrip("/")))))
        else:
            kind = next((key for key, _ in items(volumes.get(name)) if key != "name"), "of a claim template")
            hidden.append((inside, f"the volume {clean(shorten(name))} ({clean(shorten(kind))})"))
    return tuple(mounts), tuple(hidden)


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
