"""Reads a policy file: TOML in, Policy out, every problem with its position."""

from __future__ import annotations

import difflib
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from residency.errors import InputError, Problem
from residency.launch.sizes import parse_size
from residency.where import Where

from .model import REQUIRED, Margin, PluginPin, Policy, Waiver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TOP = ("name", "require", "require_shipped", "margin", "margins", "plugins", "severity", "waivers", "cannot_tell")
_WAIVER = ("rule", "reason", "until", "approved_by", "match")
_MATCH = ("model", "path", "machine", "engine", "knob", "pool")
_SEVERITIES = ("deny", "warn", "off")


def read_policy(path: str) -> Policy:
    """Return the policy of a TOML file. Raises InputError with every problem."""
    from residency.launch.toml_file import load_toml

    document, locate = load_toml(path)
    return policy_from_mapping(document, locate=locate, name=path)


def policy_from_mapping(
    document: Mapping[str, Any], *, locate: Callable[[tuple[str | int, ...]], Problem] | None = None, name: str = "policy"
) -> Policy:
    """Return the policy a mapping describes.

    Args:
        document: the keys of a policy file.
        locate: gives a Problem with position and line for a key path; None when there is no file.
        name: shown in messages when the policy has no name of its own.
    """
    problems: list[Problem] = []

    def complain(path: tuple[str | int, ...], message: str, hint: str | None = None) -> None:
        base = locate(path) if locate is not None else Problem(message="", where=Where(source="default"))
        problems.append(Problem(message=message, where=base.where if locate else None, line_text=base.line_text, span=base.span, hint=hint))

    def check_keys(table: Mapping[str, Any], legal: tuple[str, ...], at: tuple[str | int, ...]) -> None:
        for key in table:
            if key not in legal:
                close = difflib.get_close_matches(key, legal, n=1)
                complain((*at, key), f"{key} is not a key of a policy", f"did you mean {close[0]}?" if close else f"legal: {', '.join(legal)}")

    def text(table: Mapping[str, Any], key: str, at: tuple[str | int, ...], *, required: bool = False) -> str | None:
        value = table.get(key)
        if value is None and not required:
            return None
        if not isinstance(value, str) or not value.strip():
            complain((*at, key), f"{key} must be a text that is not empty")
            return None
        return value

    def margin(value: Any, at: tuple[str | int, ...]) -> Margin:
        try:
            if isinstance(value, str) and value.endswith("%"):
                share = float(value[:-1])
                if not 0 <= share <= 100:
                    raise ValueError(f"{value} is not between 0% and 100%")
                return Margin(percent=share)
            if isinstance(value, str):
                return Margin(size_bytes=parse_size(value))
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return Margin(size_bytes=value)
            raise ValueError(f'a margin is a size like "512MiB" or a share like "3%", not {value!r:.40}')
        except ValueError as error:
            complain(at, str(error))
            return Margin()

    check_keys(document, _TOP, ())
    require = document.get("require", [])
    if not isinstance(require, list) or not all(isinstance(r, str) for r in require):
        complain(("require",), "require must be a list of rule ids")
        require = []
    shipped = document.get("require_shipped", True)
    if not isinstance(shipped, bool):
        complain(("require_shipped",), "require_shipped must be true or false")
        shipped = True
    margins = document.get("margins", {})
    if not isinstance(margins, dict):
        complain(("margins",), "margins must be a table of pool = margin")
        margins = {}
    severities = document.get("severity", {})
    if not isinstance(severities, dict):
        complain(("severity",), "severity must be a table of rule = deny, warn or off")
        severities = {}
    for rule, level in severities.items():
        if level not in _SEVERITIES:
            complain(("severity", rule), f"severity of {rule} must be deny, warn or off, not {level!r:.40}")
    cannot_tell = document.get("cannot_tell", "refuse")
    if cannot_tell not in ("refuse", "warn"):
        complain(("cannot_tell",), 'cannot_tell must be "refuse" or "warn"')
        cannot_tell = "refuse"
    pins = None
    if "plugins" in document:
        pins = []
        for index, table in enumerate(_tables(document, "plugins", complain)):
            at = ("plugins", index)
            check_keys(table, ("name", "distribution", "version"), at)
            pin_name = text(table, "name", at, required=True)
            if pin_name:
                pins.append(PluginPin(name=pin_name, distribution=text(table, "distribution", at), version=text(table, "version", at)))
    waivers = []
    for index, table in enumerate(_tables(document, "waivers", complain)):
        at = ("waivers", index)
        check_keys(table, _WAIVER, at)
        fields = {key: text(table, key, at, required=True) for key in ("rule", "reason", "approved_by")}
        until = table.get("until")
        if not isinstance(until, date) or isinstance(until, datetime):
            complain((*at, "until"), "until must be a date like 2027-01-31, without quotes or time")
            until = None
        match = table.get("match", {})
        if not isinstance(match, dict) or not all(isinstance(v, str) for v in match.values()):
            complain((*at, "match"), f"match must be a table of texts: {', '.join(_MATCH)}")
            match = {}
        check_keys(match, _MATCH, (*at, "match"))
        if until is not None and None not in fields.values():
            waivers.append(
                Waiver(rule=fields["rule"] or "", reason=fields["reason"] or "", until=until, approved_by=fields["approved_by"] or "", match=dict(match))
            )
    policy = Policy(
        name=text(document, "name", ()) or name,
        require=tuple(dict.fromkeys((*(REQUIRED if shipped else ()), *require))),
        margin=margin(document.get("margin", 0), ("margin",)),
        pool_margins={str(pool): margin(value, ("margins", pool)) for pool, value in margins.items()},
        plugins=tuple(pins) if pins is not None else None,
        severities=dict(severities),
        waivers=tuple(waivers),
        cannot_tell=cannot_tell,
    )
    if problems:
        raise InputError(problems)
    return policy


def _tables(document: Mapping[str, Any], key: str, complain: Callable[..., None]) -> list[Mapping[str, Any]]:
    value = document.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        complain((key,), f"{key} must be a list of tables, [[{key}]]")
        return []
    return value
