"""The fleet's policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .model import DEFAULT_POLICY, Policy

__all__ = ["DEFAULT_POLICY", "Policy", "resolve_policy"]


def resolve_policy(source: str | os.PathLike[str] | Policy | Mapping[str, Any] | None) -> Policy:
    """Return the policy a caller means: a Policy, a path, a mapping, or None for the default."""
    if source is None:
        return DEFAULT_POLICY
    if isinstance(source, Policy):
        return source
    from .reader import policy_from_mapping, read_policy

    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return read_policy(os.fspath(source))
    if not isinstance(source, Mapping):
        raise TypeError(f"a policy is a path, a mapping, a Policy or None, not {type(source).__name__}")
    return policy_from_mapping(source)
