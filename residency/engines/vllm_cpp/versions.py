"""Versions of vllm.cpp, as the dates of its trees.

The project is read here by tree, not by release: the sources and documents behind the tables of this
package are dated July to October 2026 and name no version of their own. A version is the year and the
month of a tree, with a day where it matters ("2026.08", "2026.08.20"); each row of ``TREES`` says what
that month's tree can do that the one before could not.
"""

from __future__ import annotations

import re

#: version -> what it brought.
TREES: dict[str, str] = {
    "2026.07": "tree of 24 July 2026: no device selection, no expert streaming, no fit check",
    "2026.08": "device selection; expert streaming on the CPU, by environment variable; no fit check yet",
    "2026.09": "the fit check refuses at load what a bounded device cannot hold; the residency document (--offload-config)",
    "2026.10": "expert streaming on integrated devices whose kernels read host memory; the fit check reaches ROCm; placement fit",
}
OLDEST, NEWEST = "2026.07", "2026.10"

DEVICE_SELECTION = "2026.08"
STREAMING = "2026.08"
FIT_CHECK = "2026.09"
DOCUMENT = "2026.09"
DEVICE_LANE = "2026.10"


def is_tree(version: str) -> bool:
    """Whether the text names a tree: YYYY.MM or YYYY.MM.DD, not before the oldest one read."""
    match = re.fullmatch(r"(20\d\d)\.(0[1-9]|1[0-2])(\.\d{1,2})?", version)
    return match is not None and version[:7] >= OLDEST


def problem(version: str) -> str | None:
    """Return why a text is no version of this engine, or None when it is one."""
    if is_tree(version):
        return None
    return f"its versions are dates of trees, {OLDEST} to {NEWEST} ({', '.join(TREES)})"
