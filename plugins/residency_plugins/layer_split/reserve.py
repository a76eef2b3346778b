"""The reserve is large enough for what else uses the card.

What: where a cache takes all memory but a reserve, the reserve is compared with what has been needed beside it: by a
display, and by drivers that answer a full card with paging instead of an error.

Why: a card that drives a display froze or went black until the reserve was 1,500 MiB
(https://github.com/Niko1221/Strata/issues/779), on AMD desktops 3,072 (https://github.com/Niko1221/Strata/issues/560).
Some drivers never fail an allocation: they move memory to the host, and a launch that seems to fit runs up to seven
times slower (https://github.com/Niko1221/Strata/issues/780).

Fix: raise the reserve to the figure in the message, or drive the display from another card.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.units import MIB, size

from .cards import after_cache, device_of

if TYPE_CHECKING:
    from residency.machine.model import Device
    from residency.rules import Facts

rule = Rule(id="layer-split/reserve", severity="warn")

DISPLAY = {"rocm": 3072 * MIB}
DISPLAY_ELSE = 1500 * MIB
NEVER_FAILS = 1536 * MIB


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Compare the reserve with what has been needed beside it."""
    cards = after_cache(facts)
    if not cards:
        return rule.not_applicable("no cache takes what is left")
    findings = []
    for card in cards:
        device = device_of(facts, card.found.pool.name)
        wanted, why = _wanted(device)
        if card.reserve_bytes < wanted:
            findings.append(
                rule.warn(f"{card.found.pool.name}: the reserve is {size(card.reserve_bytes)}, and {why}: {wanted // MIB} MiB have been needed there.",
                          pool=card.found.pool.name, need_bytes=wanted, have_bytes=card.reserve_bytes, knob="memory.reserve")
            )  # fmt: skip
    return findings or rule.approve(", ".join(f"{c.found.pool.name} keeps {size(c.reserve_bytes)}" for c in cards))


def _wanted(device: Device | None) -> tuple[int, str]:
    if device is None:
        return 0, ""
    if device.display_attached:
        return DISPLAY.get(device.kind, DISPLAY_ELSE), "the card drives a display"
    if device.kind == "sycl" or device.driver_model == "WDDM":
        return NEVER_FAILS, "its driver does not fail a full card but moves memory to the host"
    return 0, ""
