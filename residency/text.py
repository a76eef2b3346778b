"""Text from files, environments and plugins, made safe for a terminal."""

from __future__ import annotations

import re
import unicodedata

# C0 and C1 controls; line and paragraph separators; bidirectional controls; lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def clean(text: str, *, keep: str = "") -> str:
    r"""Return the text with everything that could steer a terminal spelled out: ESC becomes ``\x1b``.

    ``keep`` names characters to leave alone, such as ``"\t"``. Cleaning twice changes nothing.
    """
    if _UNSAFE.search(text) is None:
        return text
    return _UNSAFE.sub(lambda match: match[0] if match[0] in keep else _spell(match[0]), text)


def shorten(text: str, most: int = 60) -> str:
    """Return at most ``most`` characters of the text, with "..." in place of what is cut from its end."""
    return text if len(text) <= most else text[: most - 3] + "..."


def sentence(text: str) -> str:
    """Return the text as a sentence: a full stop at its end, and a capital first letter unless it begins with a name.

    ``general.architecture`` or ``blk.0.attn_q.weight`` stays as it is written in the file.
    """
    text = text.strip()
    first = text.split(" ", 1)[0]
    start = text[:1].upper() if first.isalpha() else text[:1]
    return f"{start}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def columns(text: str) -> int:
    """Return how many terminal columns the text takes: wide characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _spell(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    code = ord(char)
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"
