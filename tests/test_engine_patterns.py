"""Placement patterns: what the engine's library refuses, what matches, and never for ever.

Which texts are refused was seen with llama-server 0.5.0 (``-ot PATTERN=CPU`` with a model, libstdc++).
"""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as some

from residency.engines.patterns import PatternError, PatternUnknownError, _Automaton, _Parser, reason, searcher

NAMES = [f"blk.{i}.{rest}" for i in range(40) for rest in ("attn_q.weight", "ffn_up_exps.weight", "ffn_gate_inp.weight", "attn_norm.weight")]


def found(pattern):
    search = searcher(pattern)
    return [name for name in NAMES if search(name)]


@pytest.mark.parametrize(
    "pattern", ["a{", "(?<n>a)", "^*a", "[z-a]", "[a", "a)", "{a", "a|*b", "(a", r"\b*", r"[\d-z]", r"[a-\d]", r"\d{3", "(?i)a", "a\\", "a{2,1}"]
)
def test_what_the_engine_refuses_is_refused(pattern):
    assert reason(pattern) is not None
    with pytest.raises(PatternError):
        searcher(pattern)


@pytest.mark.parametrize("pattern", [r"\q", "x{3}{2}", r"\cA", "a{0}", "()", "[]", "[^]", "[]a]", "}", "]", "[[:alpha:]]", "a{1001}", "[+--]", "a++"])
def test_what_the_engine_takes_is_taken(pattern):
    assert reason(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\.ffn_(up|down|gate)_(ch|)exps", [n for n in NAMES if "exps" in n]),
        (r"blk\.(1|2)\..*", [n for n in NAMES if n.startswith(("blk.1.", "blk.2."))]),
        (r"^blk\.(2[0-9]|3[0-5])\.ffn_.*_exps\.weight$", [f"blk.{i}.ffn_up_exps.weight" for i in range(20, 36)]),
        (r"blk\.(?!0\.)\d+\.attn_q", [f"blk.{i}.attn_q.weight" for i in range(1, 40)]),
        ("[[:digit:]]{2}[.]attn_norm", [f"blk.{i}.attn_norm.weight" for i in range(10, 40)]),
        (r"(\.|_)(up|gate)+_exps", [n for n in NAMES if "exps" in n]),
        ("", NAMES),
        ("[]a]", []),
    ],
)
def test_ordinary_patterns_match(pattern, expected):
    assert found(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("(([a-z0-9_.])+)+!", 0), (r"(.*)*(.*)*(.*)*(.*)*(.*)*x$", 0), ("(a|a)" * 40 + "!", 0), ("a?" * 60 + "!", 0), (".*.*.*.*.*.*.*x$", 0),
        ("(x+x+)+y", 0), ("((a+)+)+$", 0), ("(.*)*(.*)*(.*)*weight$", 160), ("(a{1000}){1000}", 0),
    ],
)  # fmt: skip
def test_no_pattern_takes_for_ever(pattern, matches):
    began = time.process_time()
    try:
        count = len(found(pattern))
    except PatternUnknownError:
        count = 0
    assert count == matches
    assert time.process_time() - began < 1


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?!(.*)*(.*)*z)", "x" * 9000, "(" * 100 + "a" + ")" * 100, "[[.hyphen.]]"])
def test_what_cannot_be_told_is_said(pattern):
    assert reason(pattern) is None
    with pytest.raises(PatternUnknownError):
        searcher(pattern)


@given(some.text(alphabet="ab.()|*+?^$[]12\\d,-", max_size=8), some.text(alphabet="ab.12d-", max_size=8))
def test_the_automaton_agrees_with_python(pattern, text):
    parser = _Parser(pattern)
    try:
        automaton = _Automaton(parser.read())
        compiled = re.compile(pattern, re.ASCII)
    except (ValueError, re.error, FutureWarning):
        return
    if not parser.foreign:
        assert automaton.search(text) == bool(compiled.search(text))
