"""What a container runs and what it is given: images and their programs, devices, ``docker run`` command lines.

Devices, as the daemon hands them out (moby 28, ``daemon/nvidia_linux.go``; NVIDIA container toolkit 1.17): a request
(``--gpus``, ``deploy.resources.reservations.devices``) becomes NVIDIA_VISIBLE_DEVICES, over what the container was given
itself. Without one only the runtime ``nvidia`` looks at that variable, and with Docker's default runtime no device is
there. CUDA's images set it to ``all``.
"""

from __future__ import annotations

import csv
import os
import posixpath
import re
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from residency.engines.base import program_name
from residency.errors import InputError, Problem
from residency.text import clean, shorten

from .environment import read_variables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from yaml.nodes import Node

    from residency.where import Where

    from .words import Found
    from .yaml_nodes import Document

#: Images whose entry point is an engine's program.
_IMAGES = (("llama.cpp:server", "llama-server"), ("llama.cpp:light", "llama-cli"), ("llama-server", "llama-server"))
#: Names of images that run an engine, whatever their program is.
_OF_AN_ENGINE = re.compile(r"llama[._-]?cpp", re.IGNORECASE)
#: llama.cpp's image with every program: the first argument picks one (``.devops/tools.sh``, 0.5.0).
_FULL = "llama.cpp:full"
_TOOLS = {
    "--server": "llama-server", "-s": "llama-server", "--run": "llama-cli", "-r": "llama-cli", "--run-legacy": "llama-completion",
    "-l": "llama-completion", "--bench": "llama-bench", "-b": "llama-bench",
}  # fmt: skip
#: Those that serve no model: nothing to judge.
_OTHER_TOOLS = {
    "--perplexity": "llama-perplexity", "-p": "llama-perplexity", "--quantize": "llama-quantize", "-q": "llama-quantize",
    "--convert": "convert_hf_to_gguf.py", "-c": "convert_hf_to_gguf.py", "--all-in-one": "llama-quantize", "-a": "llama-quantize",
}  # fmt: skip
#: llama.cpp's images without a back-end for accelerators in their tag.
CPU_IMAGE = re.compile(r"(?:.*/)?(?:ggml-org|ggerganov)/llama\.cpp:(?:server|light|full)(?:-b[0-9]+)?(?:@.*)?")
#: Programs that start another one in a container.
CONTAINERS = ("docker", "podman", "nerdctl")
#: Nodes under /dev through which a program reaches an accelerator.
_DEVICE_NODES = ("/dev/dri", "/dev/kfd", "/dev/dxg", "/dev/nvidia", "/dev/accel", "/dev/davinci", "/dev/mthreads")
#: Values of NVIDIA_VISIBLE_DEVICES that leave no device.
_NO_DEVICE = ("", "void", "none")


def with_image(
    words: list[str], places: list[Where], *, image: str, image_at: Where | None, own_entry: bool, last: Node, environ: Mapping[str, str],
    document: Document, who: str, tell: bool = True,
) -> Found | None:  # fmt: skip
    """Return the engine's command of a container: the one written, or arguments behind the image's own program.

    ``own_entry``: the image's entry point is replaced. ``tell``: whether an engine's image with another program is told. What an image of an engine runs instead of a server is told.
    """
    before = len(document.problems)
    found = document.found(words, places, last, environ)
    if found is not None or len(document.problems) > before:
        return found
    if image_at is None:
        if tell and words:
            _tell_of_a_model(words, places, places[0], environ, document, who)
        return None
    if own_entry:
        if tell and (_FULL in image or _OF_AN_ENGINE.search(image) or any(part in image for part, _ in _IMAGES)):
            started = f"starts {clean(shorten(words[0]))!r}" if words else "has an empty entry point"
            document.warn(image_at, f"{who} runs the image {clean(shorten(image))} and {started}, which is no program of an engine: it is not judged")
        elif tell:
            _tell_of_a_model(words, places, image_at, environ, document, who)
        return None
    if _FULL in image:
        return _of_full(words, places, image=image, image_at=image_at, last=last, environ=environ, document=document, who=who)
    for part, program in _IMAGES:
        if part in image:
            return document.found([program, *words], [image_at, *places], last, environ)
    if _OF_AN_ENGINE.search(image):
        document.warn(image_at, f"{who} runs the image {clean(shorten(image))}, whose program residency does not know: it is not judged")
    elif tell:
        _tell_of_a_model(words, places, image_at, environ, document, who)
    return None


def _tell_of_a_model(words: Sequence[str], places: Sequence[Where], at: Where, environ: Mapping[str, str], document: Document, who: str) -> None:
    """Warn of a container that is passed over although it seems to serve a model."""
    where = next((place for word, place in zip(words, places, strict=False) if ".gguf" in word), None)
    where = where or next((at for name in environ if name.startswith("LLAMA_ARG_")), None)
    if where is not None:
        started = f"starts {clean(shorten(words[0]))!r}, which is no program of an engine residency knows" if words else "does not say what it starts"
        document.warn(where, f"{who} {started}: it is not judged")


def _of_full(
    words: list[str], places: list[Where], *, image: str, image_at: Where, last: Node, environ: Mapping[str, str], document: Document, who: str
) -> Found | None:
    if "-intel" in image and words[:1] in (["--device"], ["-d"]):  # its own script: which device SYCL takes
        words, places = words[2:], places[2:]
    first = words[0] if words else ""
    if first in _TOOLS:
        return document.found([_TOOLS[first], *words[1:]], [places[0], *places[1:]], last, environ)
    if first in _OTHER_TOOLS:
        document.warn(places[0], f"{who} runs {_OTHER_TOOLS[first]} ({first}), which serves no model: it is not judged")
        return None
    said = f"not {clean(shorten(first))!r}" if first else "and there is none"
    message = f"{who}: the program that starts in {clean(shorten(image))} takes --server, --run, --bench or the like as its first argument, {said}"
    document.problems.append(Problem(message=message, where=places[0] if places else image_at))
    return None


#: Why a relative path of a container cannot be followed.
IMAGES_FOLDER = "the image's working folder cannot be seen from here"


def folder_of(text: str) -> tuple[str | None, str | None]:
    """Return the working folder of a container and, if it is not known, why. ``text``: what it is set to."""
    return (text, None) if text.startswith("/") else (None, IMAGES_FOLDER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """The devices a container gets. With neither count nor names it sees every one of the machine."""

    count: int | None = None  # so many, the first ones
    names: str | None = None  # as NVIDIA_VISIBLE_DEVICES names them
    fact: str | None = None  # for the report
    assumption: str | None = None  # what has been assumed and may be otherwise, for a warning

    def assumed_at(self, where: Where) -> Problem | None:
        """Return the warning, at the place it is about."""
        return None if self.assumption is None else Problem(message=self.assumption, where=where)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A device request: so many, these, or (with neither) all."""

    count: int | None = None
    names: tuple[str, ...] = ()


def devices_of(
    *, image: str, requests: Sequence[Request], nodes: Iterable[str], runtime: str, privileged: bool, environ: Mapping[str, str], who: str, ask: str
) -> Given:
    """Return the devices of a container.

    Args:
        image: its name.
        requests: the device requests, as the daemon gets them.
        nodes: ``/dev`` paths and names of the Container Device Interface that are handed through.
        runtime: the runtime asked for; "" for the daemon's default.
        privileged: whether it gets every device node.
        environ: the container's own variables.
        who: it, for messages.
        ask: how a device would be asked for, for messages.
    """
    if CPU_IMAGE.fullmatch(image):
        return Given(count=0, fact=f"the image {clean(shorten(image))} is a build without accelerators")
    every, names, counts = False, [], []
    for request in requests:
        names += [_bare(name) for name in request.names]
        counts += [request.count] if request.count is not None else []
        every = every or (not request.names and request.count is None)
    handed = list(nodes)
    names += [_bare(node) for node in handed if "=" in node and not node.startswith("/")]
    if every or "all" in names:
        return Given()
    if names:
        return Given(names=",".join(dict.fromkeys(names)))
    if counts:
        return Given(count=max(counts))
    if privileged or any(node.startswith(_DEVICE_NODES) for node in handed):
        return Given()
    visible = environ.get("NVIDIA_VISIBLE_DEVICES")
    if "nvidia" in runtime:
        if visible is None:
            return Given(fact=f"the runtime nvidia gives {who} every device: NVIDIA_VISIBLE_DEVICES is not set, and CUDA's images set it to all")
        return _named(visible)
    if runtime not in ("", "runc", "crun", "io.containerd.runc.v2"):
        return Given()
    if runtime:
        return Given(count=0, fact=f"{who} asks for no device, and the runtime {clean(runtime)} gives none by itself")
    if visible is not None and visible not in _NO_DEVICE:
        said = f"{who} sets NVIDIA_VISIBLE_DEVICES and asks for no device: assumed is that the daemon's default runtime is nvidia, which heeds it"
        return replace(_named(visible), fact=said, assumption=f"{said}; with Docker's own default it would see none ({ask})")
    said = f"{who} asks for no device: assumed is Docker's own default runtime, with which it sees none"
    return Given(count=0, fact=said, assumption=f"{said} ({ask}; or name the runtime, should the daemon's default be nvidia)")


def _named(visible: str) -> Given:
    if visible in _NO_DEVICE:
        return Given(count=0, fact=f"NVIDIA_VISIBLE_DEVICES={clean(visible)} leaves no device")
    return Given() if visible == "all" else Given(names=visible)


def _bare(name: str) -> str:
    """Return "0" of nvidia.com/gpu=0."""
    return name.rsplit("=", 1)[-1].strip()


#: Options of ``docker run`` and ``podman run`` without a value (Docker 28, podman 5).
_SWITCHES = (  # noqa: SIM905 - so many read best as words
    "detach disable-content-trust env-host help http-proxy init interactive no-healthcheck no-hostname no-hosts oom-kill-disable passwd privileged"
    " publish-all quiet read-only read-only-tmpfs replace rm rmi rootfs sig-proxy tls-verify tty unsetenv-all use-api-socket"
).split()
#: Those with one.
_OPTIONS = (  # noqa: SIM905 - the same
    "add-host annotation arch attach authfile blkio-weight blkio-weight-device cap-add cap-drop cert-dir cgroup-conf cgroup-parent cgroupns cgroups"
    " chrootdirs cidfile conmon-pidfile cpu-count cpu-percent cpu-period cpu-quota cpu-rt-period cpu-rt-runtime cpu-shares cpus cpuset-cpus cpuset-mems"
    " creds decryption-key detach-keys device device-cgroup-rule device-read-bps device-read-iops device-write-bps device-write-iops dns dns-opt"
    " dns-option dns-search domainname entrypoint env env-file env-merge expose gidmap gpus group-add group-entry health-cmd health-interval"
    " health-log-destination health-max-log-count health-max-log-size health-on-failure health-retries health-start-interval health-start-period"
    " health-startup-cmd health-startup-interval health-startup-retries health-startup-success health-startup-timeout health-timeout hostname hosts-file"
    " hostuser image-volume init-ctr init-path io-maxbandwidth io-maxiops ip ip6 ipc isolation kernel-memory label label-file link link-local-ip"
    " log-driver log-opt mac-address memory memory-reservation memory-swap memory-swappiness mount name net network network-alias net-alias"
    " oom-score-adj os passwd-entry personality pid pidfile pids-limit platform pod pod-id-file preserve-fd preserve-fds publish pull rdt-class requires"
    " restart retry retry-delay runtime sdnotify seccomp-policy secret security-opt shm-size shm-size-systemd stop-signal stop-timeout storage-opt"
    " subgidname subuidname sysctl systemd timeout tmpfs tz uidmap ulimit umask unsetenv user userns uts variant volume volume-driver volumes-from workdir"
).split()
_SHORT_SWITCHES = "ditPq"
_SHORT_OPTIONS = {
    "a": "attach", "c": "cpu-shares", "e": "env", "h": "hostname", "l": "label", "m": "memory", "p": "publish", "u": "user", "v": "volume", "w": "workdir",
}  # fmt: skip
#: Words that may stand before the program.
_BEFORE = ("sudo", "env", "exec", "nohup", "time")
#: Options of the program itself, in front of "run", that take a value.
_GLOBAL = ("-c", "--context", "-H", "--host", "-l", "--log-level", "--config", "--connection", "--url", "--root", "--runroot", "--identity", "-n", "--namespace")


class ContainerRun(NamedTuple):
    """A ``docker run`` command line, read."""

    image: str
    at: int  # where the image stands among the words
    given: Mapping[str, list[str]]  # long option -> its values, in their order
    switches: frozenset[str]

    def last(self, option: str) -> str:
        """Return the value of an option that counts once; "" when it is not given."""
        return self.given.get(option, [""])[-1]


def container_run(words: Sequence[str]) -> ContainerRun | str | None:
    """Read ``docker run OPTIONS IMAGE ...``; None: it is no such command, a text: why it cannot be read."""
    start = 0
    while start < len(words) and (words[start] in _BEFORE or re.match(r"[A-Za-z_][A-Za-z0-9_]*=", words[start])):
        start += 1
    if start >= len(words) or program_name(words[start]) not in CONTAINERS:
        return None
    at = start + 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in _GLOBAL else 1
    if list(words[at : at + 2]) == ["container", "run"]:
        at += 1
    elif list(words[at : at + 1]) != ["run"]:
        return "starts no container with run"
    at += 1
    given: dict[str, list[str]] = {}
    switches: set[str] = set()
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            at -= 1
            break
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            name, equals, value = _short(word, switches)
            if not name:
                continue
        elif name in _SWITCHES:
            if value.casefold() not in ("false", "0"):
                switches.add(name)
            continue
        if name not in _OPTIONS:
            return f"has the option {clean(shorten(word))!r}, which residency does not know"
        if not equals:
            if at >= len(words):
                break
            value = words[at]
            at += 1
        given.setdefault(name, []).append(value)
    if at >= len(words):
        return "names no image"
    return ContainerRun(image=words[at], at=at, given=given, switches=frozenset(switches))


def _short(word: str, switches: set[str]) -> tuple[str, str, str]:
    """Read -it, -eNAME=value, -v=value: the option that takes a value, "=" when the value is there already, and it."""
    for index, letter in enumerate(word[1:], 1):
        if letter in _SHORT_SWITCHES:
            switches.add({"d": "detach", "i": "interactive", "t": "tty", "P": "publish-all", "q": "quiet"}[letter])
            continue
        value = word[index + 1 :]
        return _SHORT_OPTIONS.get(letter, word), "=" if value else "", value.removeprefix("=")
    return "", "", ""


def run_environment(run: ContainerRun, caller: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables ``docker run`` gives: its files in their order, and -e over them. Raises InputError."""
    values: dict[str, str] = {}
    for text in run.given.get("env-file", ()):
        path = str(PurePath(folder, text))
        try:
            values.update(read_variables(path, host=caller, raw=True)[0])
        except InputError as error:
            raise InputError([Problem(message=f"--env-file {clean(path)}: {p.message}") for p in error.problems]) from error
    for text in run.given.get("env", ()):
        name, equals, value = text.partition("=")
        if equals:
            values[name] = value
        elif name in caller:
            values[name] = caller[name]
    return values


def run_mounts(run: ContainerRun, folder: str) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the mounts that lie on this machine, and those that cannot be seen."""
    found: dict[str, str | None] = {}
    for text in run.given.get("volume", ()):
        parts = text.split(":")
        if len(parts) > 1:
            found[parts[1]] = str(PurePath(folder, parts[0])) if parts[0].startswith((".", "/")) else None
        else:
            found[text] = None
    for text in run.given.get("mount", ()):
        fields = dict(field.partition("=")[::2] for field in _fields(text))
        source, target = fields.get("source", fields.get("src", "")), fields.get("target", fields.get("dst", fields.get("destination", "")))
        if target:
            found[target] = str(PurePath(folder, source)) if fields.get("type", "volume") == "bind" and source else None
    for text in run.given.get("tmpfs", ()):
        found[text.split(":")[0]] = None
    return split_mounts({target: source and os.path.normpath(source) for target, source in found.items()}, run.given.get("volumes-from", ()))


def split_mounts(found: Mapping[str, str | None], from_others: Iterable[str] = ()) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the mounts of a container that lie on this machine, and those that cannot be seen. ``found``: None for one that cannot."""
    clear = {posixpath.normpath(target): source for target, source in found.items()}
    hidden = [(target, "a volume or a file system in memory") for target, source in clear.items() if source is None]
    hidden += [("/", f"the image, or a volume of the container {clean(shorten(other))}") for other in from_others]
    return tuple((target, source) for target, source in clear.items() if source is not None), tuple(hidden)


def _fields(text: str) -> list[str]:
    """Split a list of fields; those in quotes may hold commas."""
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return [text]


def run_devices(run: ContainerRun, environ: Mapping[str, str], who: str) -> Given:
    """Return the devices of a ``docker run``. Raises ValueError for a --gpus that cannot be read."""
    requests = [_gpus(text) for text in run.given.get("gpus", ())]
    return devices_of(
        image=run.image, requests=requests, nodes=run.given.get("device", ()), runtime=run.last("runtime"), privileged="privileged" in run.switches,
        environ=environ, who=who, ask="ask with --gpus",
    )  # fmt: skip


def _gpus(text: str) -> Request:
    """Read the value of --gpus: all, a number, or fields such as device=0,1 in quotes of their own."""
    count: str | None = None
    names: list[str] = []
    for field in _fields(text):
        key, equals, value = field.partition("=")
        if not equals:
            count = key
        elif key == "count":
            count = value
        elif key == "device":
            names += value.split(",")
        elif key not in ("driver", "capabilities", "options"):
            raise ValueError(f"--gpus {clean(shorten(text))!r} has the field {clean(key)!r}, which Docker does not know")
    if names or count in (None, "all", "-1"):
        return Request(names=tuple(names))
    if count is None or not re.fullmatch(r"[0-9]{1,6}", count):
        raise ValueError(f"--gpus {clean(shorten(text))!r} is no number of devices")
    return Request(count=int(count))
