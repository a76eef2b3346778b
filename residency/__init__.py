"""residency: judge the launch of a local LLM inference engine before it starts.

``import residency`` is cheap; the work is imported when a function is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["InputError", "LaunchVetoed", "Report", "__version__", "guard", "hookimpl", "validate"]

if TYPE_CHECKING:
    from residency.api import guard, validate
    from residency.errors import InputError, LaunchVetoed
    from residency.plugins import hookimpl
    from residency.report.model import Report

_HOMES = {
    "validate": "residency.api", "guard": "residency.api", "Report": "residency.report.model",
    "InputError": "residency.errors", "LaunchVetoed": "residency.errors", "hookimpl": "residency.plugins",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name where it lives, at first use."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
