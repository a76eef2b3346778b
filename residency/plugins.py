"""Plugins: the hook specifications, and how plugins are found, loaded and asked for what they bring.

pluggy is used for what it is good at, *collecting*. It is not used to run rules: a hook wrapper can
erase every result, and one raising implementation loses the results of all others. So the core
takes each implementation by itself, calls it by itself, and refuses wrappers.

Entry points of the group ``residency`` are loaded one by one: an import error of one plugin is a
trouble with a name, not the end of the others, and two plugins under one name are both refused.
A trouble is never an approval: every trouble ends in exit code 3.

Plugins are trusted code in the same process. Nothing here is a sandbox.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from residency.clock import time_limit
from residency.errors import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from residency.engines.base import Engine
    from residency.policy.model import PluginPin
    from residency.rules.rule import Rule

PROJECT = "residency"
GROUP = "residency"

#: Seconds one plugin may take to load, and to answer a hook; things it may bring.
PLUGIN_SECONDS = 10.0
MOST_ITEMS = 1000

_hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Specifications:
    """Every hook there is, in the order the hooks are called."""

    @_hookspec
    def residency_engines(self) -> Iterable[Engine]:  # type: ignore[empty-body]
        """Called once, before a launch is read, to collect this plugin's engines.

        Returns a list or tuple of objects with the members of
        :class:`residency.engines.base.Engine`. A plugin that raises here refuses the launch.
        Wrappers are not allowed.
        """

    @_hookspec
    def residency_rules(self) -> Iterable[Rule]:  # type: ignore[empty-body]
        """Called once, before any rule runs, to collect this plugin's rules.

        Returns a list or tuple of :class:`residency.rules.Rule`. A plugin that raises here
        refuses the launch; the rules of all other plugins still run. Wrappers are not allowed.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """One plugin that was found, whatever became of it."""

    name: str
    distribution: str
    version: str
    state: str  # "loaded" | "failed" | "not allowed"
    detail: str = ""

    @property
    def label(self) -> str:
        """Return "name (distribution version)"."""
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Something about plugins that makes an approval impossible."""

    culprit: str
    message: str


@dataclass(frozen=True, kw_only=True)
class PluginSet:
    """What all plugins together bring."""

    plugins: tuple[Plugin, ...] = ()
    rules: tuple[Rule, ...] = ()
    engines: tuple[Engine, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    owners: Mapping[str, str] = field(default_factory=dict)  # rule id -> plugin label
    shipped: frozenset[str] = frozenset()  # rule ids that come with residency itself


def build_manager() -> pluggy.PluginManager:
    """Return a fresh plugin manager that knows the hook specifications and no plugin."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specifications)
    return manager


def _distribution_of(entry: metadata.EntryPoint) -> tuple[str, str]:
    dist = entry.dist
    return (dist.name, dist.version) if dist is not None else ("unknown", "unknown")


def _pin_problem(entry: metadata.EntryPoint, pins: Sequence[PluginPin] | None) -> str | None:
    """Return why the policy keeps an entry point out, or None when it may load."""
    distribution, version = _distribution_of(entry)
    if pins is None or distribution == PROJECT:
        return None
    for pin in pins:
        if pin.name != entry.name:
            continue
        if pin.distribution is not None and pin.distribution != distribution:
            return f"the policy wants it from {pin.distribution}"
        if pin.version is not None and pin.version != version:
            return f"the policy wants version {pin.version}"
        return None
    return "not on the policy's list of plugins"


def register_entry_points(
    manager: pluggy.PluginManager, pins: Sequence[PluginPin] | None = None
) -> tuple[list[Plugin], list[Trouble]]:
    """Load every entry point of the group into the manager, one by one; return what was found."""
    found: list[Plugin] = []
    troubles: list[Trouble] = []
    by_name: dict[str, list[metadata.EntryPoint]] = {}
    seen: set[tuple[str, str, str]] = set()
    for entry in metadata.entry_points(group=GROUP):
        key = (entry.name, entry.value, _distribution_of(entry)[0])
        if key not in seen:  # one distribution can be listed twice when sys.path names its folder twice
            seen.add(key)
            by_name.setdefault(entry.name, []).append(entry)
    for name in sorted(by_name):
        entries = by_name[name]
        allowed = [e for e in entries if _pin_problem(e, pins) is None]
        for entry in entries:
            distribution, version = _distribution_of(entry)
            reason = _pin_problem(entry, pins)
            state, detail = "loaded", ""
            if reason is not None:
                state, detail = "not allowed", reason
            elif len(allowed) > 1:
                others = ", ".join(_distribution_of(e)[0] for e in allowed if e is not entry)
                state, detail = "failed", f"the plugin name is also taken by {others}"
            else:
                try:
                    with time_limit(PLUGIN_SECONDS) as wind:
                        wind(PLUGIN_SECONDS)
                        module = entry.load()
                    if manager.register(module, name=name) is None:
                        state, detail = "failed", "the plugin is blocked"
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # noqa: BLE001 - whatever a plugin throws must end in "no verdict" with its name
                    state, detail = "failed", describe(error)
            plugin = Plugin(name=name, distribution=distribution, version=version, state=state, detail=detail)
            found.append(plugin)
            if state == "failed":
                troubles.append(Trouble(culprit=plugin.label, message=f"plugin {plugin.label} did not load: {detail}"))
    return found, troubles


def _collect(manager: pluggy.PluginManager, hook: str, troubles: list[Trouble], labels: dict[str, str]) -> list[tuple[str, Any]]:
    """Ask each implementation of a hook by itself; return (plugin name, item) pairs."""
    items: list[tuple[str, Any]] = []
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        label = labels.get(implementation.plugin_name, implementation.plugin_name)
        if implementation.wrapper or implementation.hookwrapper:
            troubles.append(Trouble(culprit=label, message=f"plugin {label} wraps the hook {hook}; wrappers are refused"))
            continue
        try:
            with time_limit(PLUGIN_SECONDS) as wind:
                wind(PLUGIN_SECONDS)
                brought = implementation.function()
                if brought is None or isinstance(brought, (str, bytes)):
                    raise TypeError(f"{hook} returned {type(brought).__name__}, not a list")
                listed = list(islice(brought, MOST_ITEMS + 1))
            if len(listed) > MOST_ITEMS:
                raise ValueError(f"{hook} brought more than {MOST_ITEMS} things")
            items.extend((implementation.plugin_name, item) for item in listed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a plugin throws must end in "no verdict" with its name
            troubles.append(Trouble(culprit=label, message=f"plugin {label} failed in {hook}: {describe(error)}"))
    return items


def collect(
    manager: pluggy.PluginManager, found: Sequence[Plugin] = (), troubles: Sequence[Trouble] = ()
) -> PluginSet:
    """Ask every registered plugin for its engines and rules; judge what comes back."""
    from residency.rules.rule import Rule

    faults = list(troubles)
    labels = {p.name: p.label for p in found if p.state == "loaded"}
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        faults.append(Trouble(culprit=str(error).split("'")[1] if "'" in str(error) else "plugin", message=describe(error)))
    rules: dict[str, Rule] = {}
    owners: dict[str, str] = {}
    shipped: set[str] = set()
    from_residency = {p.name for p in found if p.distribution == PROJECT}
    for name, rule in _collect(manager, "residency_rules", faults, labels):
        label = labels.get(name, name)
        if not isinstance(rule, Rule) or rule.function is None:
            what = f"rule {rule.id} without a check" if isinstance(rule, Rule) else f"{type(rule).__name__}, not a Rule"
            faults.append(Trouble(culprit=label, message=f"plugin {label} brought a {what}"))
        elif rule.id in rules:
            both = owners[rule.id] if owners[rule.id] == label else f"{owners[rule.id]} and {label}"
            faults.append(Trouble(culprit=label, message=f"two rules are called {rule.id} (from {both})"))
        else:
            rules[rule.id] = rule
            owners[rule.id] = label
            if name in from_residency:
                shipped.add(rule.id)
    engines: dict[str, Engine] = {}
    claimed: dict[str, str] = {}  # every name, alias and program -> the engine that took it first
    for name, engine in _collect(manager, "residency_engines", faults, labels):
        label = labels.get(name, name)
        missing = [m for m in _ENGINE_MEMBERS if not hasattr(engine, m)]
        if missing or inspect.isclass(engine):
            what = f"lacks {', '.join(missing)}" if missing else "is a class, not an object"
            faults.append(Trouble(culprit=label, message=f"an engine of plugin {label} {what}"))
            continue
        words = {f"program {p}" for p in engine.programs} | {f"name {n.casefold()}" for n in (engine.name, *engine.aliases)}
        taken = sorted(word for word in words if word in claimed)
        if taken:
            faults.append(Trouble(culprit=label, message=f"an engine of plugin {label} takes the {taken[0]}, which belongs to {claimed[taken[0]]}"))
        else:
            engines[engine.name] = engine
            claimed.update(dict.fromkeys(words, engine.name))
    return PluginSet(
        plugins=tuple(found),
        rules=tuple(rules[i] for i in sorted(rules)),
        engines=tuple(engines.values()),
        troubles=tuple(faults),
        owners=MappingProxyType(owners),
        shipped=frozenset(shipped),
    )


_ENGINE_MEMBERS = ("name", "aliases", "newest", "programs", "capabilities", "read", "option_problem", "plan")


@lru_cache(maxsize=8)
def load_plugins(pins: tuple[PluginPin, ...] | None = None) -> PluginSet:
    """Find, load and ask every installed plugin. Cached: a process sees the plugins it started with."""
    manager = build_manager()
    found, troubles = register_entry_points(manager, pins)
    return collect(manager, found, troubles)
