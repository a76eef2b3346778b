"""Reading a launch: a file or a mapping, below ``RESIDENCY_*`` variables, below ``--set``.

Every source is checked on its own and all problems are raised together, each where it stands.
A value that a stronger source replaces must still be a legal one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from residency.errors import InputError, Problem
from residency.where import Where

from .model import Launch

if TYPE_CHECKING:
    from .knobs import Section
    from .layers import Layer
    from .toml_positions import Path

MOST_PROBLEMS = 100  # reported in one run
REQUIRED = ("engine.name", "model.path")
_FILE_KNOBS = ("path", "mmproj", "draft")  # of [model]; adapters is a list of them


def read_launch_file(path: str | os.PathLike[str], *, environ: Mapping[str, str], overrides: Sequence[str] = ()) -> Launch:
    """Read a TOML launch file. Paths of model files in it are relative to its folder.

    ``overrides`` are the texts of ``--set knob=value``; they win over ``RESIDENCY_*`` variables of
    ``environ``, which win over the file.

    Raises:
        InputError: with every problem of the file, the variables and the overrides.
    """
    from .layers import FileLayer
    from .toml_file import parse, read_text

    name = os.fspath(path)
    text = read_text(name)
    layer = FileLayer(values=parse(text, name), name=name, text=text)
    return _launch(layer, [], environ, overrides, name=name, folder=str(PurePath(name).parent))


def read_launch_mapping(
    mapping: Mapping[str, Any], *, environ: Mapping[str, str], overrides: Sequence[str] = (), name: str = "mapping"
) -> Launch:
    """Read a launch given as a mapping of a launch file's shape. Its paths are relative to the current folder.

    Raises:
        InputError: as for :func:`read_launch_file`.
    """
    from .layers import mapping_layer

    layer, problems = mapping_layer(mapping, name)
    return _launch(layer, problems, environ, overrides, name=name, folder="")


def merge_overrides(launch: Launch, environ: Mapping[str, str], overrides: Sequence[str]) -> Launch:
    """Apply ``RESIDENCY_*`` variables and ``--set`` to a launch read from an engine's own command line.

    What the engine was told wins over ``RESIDENCY_*``, which fills in what it was not told; ``--set``
    wins over both. The engine itself cannot be changed this way.

    Raises:
        InputError: with every problem of the variables and the overrides.
    """
    if not overrides and not any(variable[:10].upper() == "RESIDENCY_" for variable in environ):
        return launch  # the usual case, without any import
    from .judgement import judge, show
    from .knobs import SECTIONS, Knobs
    from .layers import environment_layer, has_variables, override_layer

    if not overrides and not has_variables(environ):
        return launch
    below, problems = environment_layer(environ)
    above, more = override_layer(overrides)
    problems += more + [problem for layer in (below, above) for problem in judge(layer)[0]]
    engine = above.values.get("engine", {}).get("name", launch.engine)
    if engine != launch.engine:
        message = f"engine.name cannot be changed to {show(engine)}: this is a command line of {launch.engine}"
        problems.append(above.problem(("engine", "name"), message))
    _raise(problems)

    # The engine's own values are not validated again: they are its affair and may be more than the schema knows.
    weak, strong = Knobs.model_validate(below.values), Knobs.model_validate(above.values)
    places = dict(launch.places)
    sections: dict[str, Section] = {}
    for name in SECTIONS:
        told, changes = getattr(launch.knobs, name), {}
        for layer, given in ((below, getattr(weak, name)), (above, getattr(strong, name))):
            for key in given.model_fields_set - {"options"}:
                known = launch.engine if (name, key) == ("engine", "name") else getattr(told, key)
                known = launch.version if (name, key) == ("engine", "version") else known
                if known is None or layer is above:
                    changes[key] = getattr(given, key)
                    places[f"{name}.{key}"] = layer.where((name, key))
        sections[name] = told.model_copy(update=changes)
    options = dict(launch.options)
    for layer, offered in ((below, weak.engine.options or {}), (above, strong.engine.options or {})):
        for option, value in offered.items():
            if option not in launch.options or layer is above:
                options[option] = value
                places[f"option:{option}"] = layer.where(("engine", "options", option))
    knobs = launch.knobs.model_copy(update=sections)
    return replace(launch, version=knobs.engine.version or launch.version, knobs=knobs, options=options, places=places)


class Places(Mapping[str, Where]):
    """Where every value of a launch stands; a file is scanned for positions when the first one is asked for."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        """Take the layers, the strongest first."""
        self._sources = {_place(path): (layer, path) for layer in reversed(layers) for path in _paths(layer.values)}

    def __getitem__(self, knob: str) -> Where:
        layer, path = self._sources[knob]
        return layer.where(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        return f"Places({dict(self)})"


def _launch(
    base: Layer, problems: list[Problem], environ: Mapping[str, str], overrides: Sequence[str], *, name: str, folder: str
) -> Launch:
    from .judgement import judge, missing
    from .layers import environment_layer, override_layer
    from .settings import merge

    below, wrong_variables = environment_layer(environ)
    above, wrong_overrides = override_layer(overrides)
    found, meant = judge(base)
    problems = problems + found
    for knob in REQUIRED:
        path = tuple(knob.split("."))
        given = any(_has(layer, path) for layer in (above, below, base))
        if not given and not meant.intersection((path[0], knob)) and isinstance(base.values.get(path[0], {}), dict):
            problems.append(missing(base, knob))
    problems.sort(key=_position)
    problems += [*wrong_variables, *judge(below)[0], *wrong_overrides, *judge(above)[0]]
    _raise(problems)

    layers = [above, below, replace(base, values=_relocate(base.values, folder))]
    knobs = merge([layer for layer in layers if layer.values])
    assert knobs.engine.name is not None
    return Launch(
        engine=knobs.engine.name,
        version=knobs.engine.version,
        knobs=knobs,
        options=knobs.engine.options or {},
        places=Places(layers),
        name=name,
    )


def _raise(problems: list[Problem]) -> None:
    if not problems:
        return
    more = len(problems) - MOST_PROBLEMS
    if more > 0:
        problems = [*problems[:MOST_PROBLEMS], Problem(message=f"{more} more problems are not shown")]
    raise InputError(problems)


def _position(problem: Problem) -> tuple[int, int]:
    where = problem.where
    return (where.line or 0, where.column or 0) if where is not None else (0, 0)


def _has(layer: Layer, path: tuple[str, ...]) -> bool:
    section = layer.values.get(path[0])
    return isinstance(section, dict) and path[1] in section


def _place(path: Path) -> str:
    return f"option:{path[2]}" if len(path) > 2 else ".".join(str(part) for part in path)


def _paths(values: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the path of every knob, and of every engine option, that has a value."""
    for section, keys in values.items():
        for key, value in keys.items():
            yield (section, key)
            if (section, key) == ("engine", "options"):
                yield from ((section, key, option) for option in value)


def _relocate(values: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the values with the paths of files taken relative to the launch file's folder."""
    moved = dict(values)
    model = dict(values.get("model", {}))
    for key in _FILE_KNOBS:
        if key in model:
            model[key] = str(PurePath(folder, model[key]))
    if "adapters" in model:
        model["adapters"] = [str(PurePath(folder, adapter)) for adapter in model["adapters"]]
    if model:
        moved["model"] = model
    profile = values.get("machine", {}).get("profile")
    if profile is not None and (PurePath(profile).name != profile or profile.endswith(".toml")):  # else the name of one that ships
        moved["machine"] = {**values["machine"], "profile": str(PurePath(folder, profile))}
    return moved
