"""The Launch: what was asked for, engine-neutral, every value with its provenance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from residency.where import DEFAULT, Where

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .knobs import Knobs


_reader = cache(attrgetter)  # knobs are few, and every rule reads some


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch as asked for. Absent and default differ: an absent knob is ``None``.

    ``knobs`` are the engine-neutral residency knobs; ``options`` are settings only one engine
    knows, under that engine's own long names without leading dashes ("repack", "pcie-frac").
    ``places`` gives the position of every value, keyed by "context.length" for a knob and by
    "option:repack" for an option.
    """

    engine: str
    version: str | None  # None: not given
    version_reason: str | None = None  # why this version, when nobody gave it: "the newest with --no-mmap"
    knobs: Knobs
    options: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Where] = field(default_factory=dict)
    program: str | None = None  # "llama-server"; None for a launch file
    argv: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)  # only what an engine may read
    name: str = "launch"  # for headings: the file, or the program
    starts_nothing: bool = False  # --help, --version and the like: the program prints something and ends

    def get(self, knob: str) -> Any:
        """Return the value of "section.key", or None when it was not asked for."""
        return _reader(knob)(self.knobs)

    def setting(self, name: str) -> Any:
        """Return the value of a knob or "option:NAME"; None when it was not asked for or there is no such knob."""
        if name.startswith("option:"):
            return self.options.get(name[7:])
        section, _, key = name.partition(".")
        return getattr(getattr(self.knobs, section, None), key, None)

    def has(self, name: str) -> bool:
        """Whether there is such a knob; every "option:NAME" counts as one."""
        section, _, key = name.partition(".")
        return name.startswith("option:") or key in getattr(type(getattr(self.knobs, section, None)), "model_fields", {})

    def where(self, knob: str) -> Where:
        """Return where the value of a knob (or "option:NAME") came from."""
        return self.places.get(knob, DEFAULT)

    def with_value(self, knob: str, value: Any) -> Launch:
        """Return this launch with one knob (or "option:NAME") changed. Nothing else moves.

        A value of None removes the setting. The change is not re-validated against the schema;
        callers propose values of the knob's own type.
        """
        if knob.startswith("option:"):
            options = dict(self.options)
            if value is None:
                options.pop(knob[7:], None)
            else:
                options[knob[7:]] = value
            return replace(self, options=options)
        section, _, key = knob.partition(".")
        changed = getattr(self.knobs, section).model_copy(update={key: value})
        return replace(self, knobs=self.knobs.model_copy(update={section: changed}))
