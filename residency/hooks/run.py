"""``residency run``: judge the effective launch, then become the engine, or refuse.

The engine is started with exec: same process id, same signals, its exit code is ours, no shell.
What is judged is what is passed: the argv and the environment are not touched in between.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

from residency.errors import InputError, Problem
from residency.exits import Exit
from residency.rules.finding import Outcome
from residency.where import Where

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from residency.report.model import Report

#: Seconds between two looks at the memory while waiting for a dead engine's bytes to come back.
PAUSE_SECONDS = 0.5


def find_program(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the path exec will start, looked up as a shell would. Raises InputError when there is none."""
    path = shutil.which(argv[0], path=environ.get("PATH", os.defpath))
    if path is None:
        exists = os.path.exists(argv[0])  # noqa: PTH110 - argv is text
        message = f"{argv[0]} cannot be executed" if exists else f"there is no program {argv[0]}"
        raise InputError([Problem(message=message, where=Where(source="argv", argv_index=0))])
    return path


def waits_help(report: Report) -> bool:
    """Whether the refusal is about memory that is taken now but exists: only then does waiting help."""
    vetoes = [f for f in report.findings if f.outcome is Outcome.VETO and f.waived is None]
    totals = {p.name: p.total_bytes for p in report.machine.pools}
    return (
        report.verdict == "veto"
        and bool(vetoes)
        and all(
            f.pool is not None and f.need_bytes is not None and f.need_bytes <= (totals.get(f.pool) or 0) for f in vetoes
        )
    )


def judge_until(judge: Callable[[], Report], wait_seconds: float, *, pause: float = PAUSE_SECONDS) -> Report:
    """Judge, and while only missing free memory stands in the way judge again until the time is up."""
    deadline = time.monotonic() + wait_seconds
    report = judge()
    while not report.allowed and waits_help(report) and time.monotonic() + pause <= deadline:
        time.sleep(pause)
        report = judge()
    return report


def start(path: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Become the engine; returns only when that fails."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(path, list(argv), dict(environ))  # noqa: S606 - starting the engine without a shell is the purpose
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.ENOEXEC:
            reason = "it is no program, and a script needs a first line that names its interpreter (#!/bin/sh)"
        elif error.errno == errno.ENOENT and os.path.exists(path):  # noqa: PTH110 - argv is text
            reason = "the interpreter or loader it names is missing"
        sys.stderr.write(f"residency: {path} could not be started: {reason}\n")
    return int(Exit.UNREADABLE)
