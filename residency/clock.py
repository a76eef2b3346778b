"""A time limit for code of strangers, where the platform and the caller's own signals allow it."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class NoAnswer(BaseException):
    """Raised inside code that does not come back."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[Callable[[float], object]]:
    """Let the body interrupt what takes longer than some seconds; yields what winds the clock: ``wind(seconds)``, 0 stops it.

    Works in the main thread on POSIX when nobody else uses SIGALRM; elsewhere winding does nothing. The alarm repeats, so
    that code which swallows the first one is interrupted again.
    """
    usable = (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    )
    if not usable:
        yield lambda _seconds: None
        return

    def expire(_number: int, _frame: object) -> None:
        raise NoAnswer(f"no answer within {seconds:g} s")

    signal.signal(signal.SIGALRM, expire)
    try:
        yield lambda wound: signal.setitimer(signal.ITIMER_REAL, wound, wound and 0.2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
