"""What the launch and its files say about vision, for every rule of this plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.budget import Purpose
from residency.checkpoint.model import Role

if TYPE_CHECKING:
    from residency.budget import Allocation
    from residency.checkpoint.model import Checkpoint
    from residency.machine.model import Device
    from residency.rules import Facts

#: ``general.architecture`` of a projector file.
PROJECTOR = "clip"


def wanted(facts: Facts) -> bool:
    """Whether requests with images must work."""
    return facts.launch.get("vision.enabled") is True


def is_projector(model: Checkpoint) -> bool:
    """Whether a file is a projector at all."""
    return model.architecture == PROJECTOR


def vision_bytes(model: Checkpoint | None) -> int:
    """Bytes of vision tensors in a file."""
    return sum(t.nbytes for t in model.tensors if t.role is Role.VISION) if model is not None else 0


def built_in(facts: Facts) -> bool:
    """Whether the model carries a vision tower of its own."""
    return facts.models.main is not None and not is_projector(facts.models.main) and vision_bytes(facts.models.main) > 0


def present(facts: Facts) -> bool:
    """Whether there is a tower: a projector file, or one in the model."""
    return facts.models.mmproj is not None or built_in(facts)


def projector_type(model: Checkpoint) -> str | None:
    """Return the projector's type: for images, else the file's one type."""
    for key in ("clip.vision.projector_type", "clip.projector_type"):
        value = model.metadata.get(key)
        if isinstance(value, str) and value:
            return value
    return None


def number(model: Checkpoint, key: str) -> int | None:
    """Return a whole-numbered metadata value."""
    value = model.metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def allocations(facts: Facts) -> tuple[Allocation, ...]:
    """Allocations for vision."""
    return tuple(a for a in facts.budget.allocations if a.purpose is Purpose.VISION)


def encoder_device(facts: Facts) -> Device | None:
    """Return the device the encoder computes on: as asked, as planned, else the first used; None: the CPU."""
    asked = facts.launch.get("vision.device")
    if asked is not None:
        return None if asked.casefold() in ("cpu", "none") else facts.machine.device(asked)
    for allocation in (*allocations(facts), *facts.budget.allocations):
        if allocation.device is not None:
            return facts.machine.device(allocation.device)
    return None
