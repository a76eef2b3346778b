"""Which rule speaks about which remark: by its code or the section of its knob; the settings rules take the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from residency.budget import Remark

#: Section of the knob a remark is about -> the rule that reports it.
CLAIMED = {"kv": "kv-cache/types"}
#: Code of a remark -> the rule that reports it.
CODES = {"projector-width": "vision/embedding-width"}
#: Kinds the special rules do not report: what works, but not as somebody may think.
SPOKEN_HERE = ("inert", "risk", "unverified")


def unclaimed(remark: Remark) -> bool:
    """Whether no special rule reports this remark."""
    return remark.code not in CODES and (remark.kind in SPOKEN_HERE or (remark.knob or "").split(".", 1)[0] not in CLAIMED)
