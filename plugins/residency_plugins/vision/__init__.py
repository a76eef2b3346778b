"""Rules about images: the tower, the path to it, and its memory."""

from __future__ import annotations

from residency.plugins import hookimpl


@hookimpl
def residency_rules() -> list[object]:
    """Return this plugin's rules."""
    from . import (
        accounting,
        back_end,
        embedding_width,
        largest_image,
        lazy_loading,
        paid_for_nothing,
        projector,
        projector_type,
        request_path,
        tower_file,
    )  # fmt: skip

    return [
        tower_file.rule, projector.rule, projector_type.rule, embedding_width.rule, request_path.rule, accounting.rule,
        largest_image.rule, back_end.rule, lazy_loading.rule, paid_for_nothing.rule,
    ]  # fmt: skip
