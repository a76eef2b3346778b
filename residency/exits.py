"""Exit codes of the command line (DESIGN 4.2)."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the process says when it ends."""

    ALLOWED = 0  # warnings included
    VETOED = 1  # at least one rule vetoed
    UNREADABLE = 2  # usage, TOML, unknown key, missing file
    NO_VERDICT = 3  # unknown fact, broken plugin or rule, missing required rule, nothing ran; wins over 1
