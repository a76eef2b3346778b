"""The fleet's policy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .model import DEFAULT_POLICY, Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULT_POLICY", "Policy", "resolve_policy"]


def resolve_policy(source: str | os.PathLike[str] | Policy | Mapping[str, Any] | None) -> Policy:
    """Return the policy a caller means: a Policy, a path, a mapping, or None for the default."""
    if source is None:
        return DEFAULT_POLICY
    if isinstance(source, Policy):
        return source
    from .reader import policy_from_mapping, read_policy

    if isinstance(source, (str, bytes)) or hasattr(source, "__fspath__"):
        return read_policy(os.fspath(source))
    return policy_from_mapping(source)
