"""The JSON configuration of a Strata server: ``exe``, ``args``, ``env``, and keys that become arguments.

Source: ``serve/server.py`` of the 0.1.33 to 0.1.40 generation. The server adds ``--serve``, the layer split and the
number of slots itself, and starts the image encoder first when there is a ``vision`` block. Keys without a flag reach
the engine's reader as words of the form ``@key=value``.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from residency.errors import InputError, Problem
from residency.launch.toml_file import read_text
from residency.text import clean
from residency.where import Where

from . import Collection, Command
from .words import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SIZE_LIMIT = 1 << 20  # a configuration is a few kB
_DEEPEST = 64
#: Characters that are searched for the place of an argument.
_NEAR = 64 * 1024
#: An escape; a pair of surrogates is one.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)


def read(path: str, *, known: Callable[[str], bool], environ: Mapping[str, str]) -> Collection:
    """Read a server's configuration. Raises InputError with every problem."""
    del known, environ
    text = read_text(path)
    config = _parse(path, text)
    places = _Places(path, text)
    problems: list[Problem] = []
    args = config.get("args")
    if not isinstance(args, list) or not all(isinstance(a, str) for a in args):
        raise InputError([Problem(message='not a server\'s configuration: "args" must be a list of strings', where=places.of('"args"'))])
    exe = config.get("exe")
    words, where = [exe if isinstance(exe, str) and exe else "strata", "--serve"], [places.of('"exe"'), places.of('"args"')]
    for word in args:
        if word == "--serve":
            continue
        words.append(word)
        where.append(places.of(json.dumps(word, ensure_ascii=False), after='"args"'))
    for key, build in _KEYS.items():
        if config.get(key) is None:
            continue
        try:
            added = build(config[key], args)
        except ValueError as error:
            problems.append(Problem(message=f'"{key}" {error}', where=places.of(f'"{key}"')))
            continue
        words += added
        where += [places.of(f'"{key}"')] * len(added)
    env = config.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(v, str) for v in env.values()):
        problems.append(Problem(message='"env" must be a table of strings', where=places.of('"env"')))
        env = {}
    if problems:
        raise InputError(problems)
    name = config.get("model_name")
    command = Command(
        name=clean(name) if isinstance(name, str) and name else "server", argv=tuple(words), places=tuple(where), environ=dict(env),
        environ_places={k: places.of(json.dumps(k, ensure_ascii=False), after='"env"') for k in env}, engine="strata",
    )  # fmt: skip
    return Collection(path=path, commands=(command,))


def _parse(path: str, text: str) -> dict[str, Any]:
    where = Where(source="file", file=path)
    if len(text) > _SIZE_LIMIT:
        raise InputError([Problem(message="more than 1 MiB is no server's configuration", where=where)])
    if _depth(text) > _DEEPEST:
        raise InputError([Problem(message=f"nested deeper than {_DEEPEST} levels", where=where)])
    try:
        config = json.loads(text)
    except ValueError as error:
        line, column = getattr(error, "lineno", None), getattr(error, "colno", None)
        raise InputError([Problem(message=f"not JSON: {getattr(error, 'msg', error)}", where=Where(source="file", file=path, line=line, column=column))]) from error
    half = next((match for match in _ESCAPE.finditer(text) if match[1]), None)
    if half is not None:
        raise InputError([Problem(message="a text with half of a surrogate pair, which is no character", where=Text(path, text).where(half.start()))])
    if not isinstance(config, dict):
        raise InputError([Problem(message="not a server's configuration: the file must hold one table", where=where)])
    return config


def _depth(text: str) -> int:
    deepest = depth = 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        deepest = max(deepest, depth)
    return deepest


class _Places:
    """Positions of keys and strings, found in the order they are asked for."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.lines = path, text, Text(path, text)
        self.last: dict[str, int] = {}

    def of(self, token: str, after: str | None = None) -> Where:
        """Return where a token stands; with ``after``, behind that key and behind the last one found there."""
        start = 0
        if after is not None:
            start = self.last.get(after, max(0, self.text.find(after)))
        at = self.text.find(token, start, len(self.text) if after is None else start + _NEAR + len(token))
        if at < 0:
            return Where(source="file", file=self.path)
        if after is not None:
            self.last[after] = at + len(token)
        return self.lines.where(at)


def _gpu(value: Any, args: list[str]) -> list[str]:
    del args
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1000 for n in numbers) or not numbers:
        raise ValueError("must be a card's number or a list of them")
    return ["@gpus=" + ",".join(str(n) for n in numbers)]


def _split(value: Any, args: list[str]) -> list[str]:
    if "--layer-split" in args:
        return []
    if isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        value = ",".join(str(n) for n in value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise ValueError('must be "auto" or the first layer of each later card')
    return ["--layer-split", value]


def _parallel(value: Any, args: list[str]) -> list[str]:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("must be a whole number")
    return [] if "--batch" in args else ["--batch", str(value)]


def _vision(value: Any, args: list[str]) -> list[str]:
    if not isinstance(value, dict):
        raise ValueError("must be a table")
    words = [] if "--vision" in args else ["--vision"]
    if value.get("gpu") is False:
        return [*words, "@vision-device=cpu"]
    card = value.get("cuda_device")
    if isinstance(card, int) and not isinstance(card, bool):
        words.append(f"@vision-device=CUDA{card}")
    tokens = value.get("max_tokens")
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
        words.append(f"@vision-tokens={tokens}")
    return words


def _switch(word: str) -> Callable[[Any, list[str]], list[str]]:
    def build(value: Any, args: list[str]) -> list[str]:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return [word] if value and word not in args else []

    return build


_KEYS: dict[str, Callable[[Any, list[str]], list[str]]] = {
    "gpu": _gpu, "layer_split": _split, "parallel": _parallel, "vision": _vision, "lazy_load": _switch("@lazy-load"),
    "split_skip_if_fits": _switch("--split-skip-if-fits"), "vram_elastic": _switch("--vram-elastic"),
}  # fmt: skip
