"""llama.cpp versions: build numbers, then dotted versions.

Builds were numbered bNNNN; from autumn 2026 there are dotted versions, of which 0.5.0 is newer than
every build seen. Wheels that repackage a build call it 0.NNNN. All become one ordered form. A day or
a month ("2025-06") stands for the build of that time, for whoever knows no more.
"""

from __future__ import annotations

import re
from functools import lru_cache

from . import history

#: The newest build seen before versions became dotted.
LAST_BUILD = 10434


def shown(version: str) -> str:
    """Return an ordered version as people write it: "0.0.4610" -> "b4610"."""
    return f"b{version[4:]}" if version.startswith("0.0.") else version


def last_before(version: str) -> str:
    """Return the newest version before another, as people write it: "0.5.0" -> "b10434", "0.0.10092" -> "b10091"."""
    match = re.fullmatch(r"0\.0\.(\d+)", version)
    return f"b{int(match[1]) - 1}" if match else f"b{LAST_BUILD}"


@lru_cache(maxsize=256)
def normal(version: str, engine: str = history.UPSTREAM) -> str:
    """Return the ordered form: "b4610", "4610 (6dde1782)" and "0.10434.0" give "0.0.N"; "0.5.0" stays."""
    text = version.strip().casefold()
    match = re.fullmatch(r"20[2-9]\d-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?", text)
    if match:
        try:
            return f"0.0.{history.build_of(text, engine)}"
        except ValueError:  # no such day in that month
            return f"0.0.{history.build_of(text[:7], engine)}"
    match = re.match(r"b?(\d{3,})\b", text) or re.match(r"0\.(\d{4,})(?:\.0)?\b", text)
    if match:
        return f"0.0.{match[1]}"
    match = re.match(r"v?(\d+(?:\.\d+)*)", text)
    return match[1] if match else text


#: A day or a month; a build, with or without what its program prints behind it; a repackaged build or a dotted version.
_READABLE = re.compile(r"20[2-9]\d-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?|(?!20[2-9]\d-)b?\d{3,7}([ (+-].*)?|v?\d{1,6}(\.\d{1,7}){1,3}([ (+-].*)?", re.DOTALL)


def problem(version: str) -> str | None:
    """Return why a text is no version of these engines, or None when it is one."""
    if _READABLE.fullmatch(version.strip().casefold()):
        return None
    return "builds are written b4610, versions 0.5.0, and a day or a month stands for its build: 2025-06-15, 2025-06"
