"""Reports: the value and its formats."""

from __future__ import annotations

from .model import Report

__all__ = ["Report"]
