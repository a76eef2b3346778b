"""How a problem is printed."""

from __future__ import annotations

import pytest

from residency.errors import InputError, Problem
from residency.text import clean, columns, shorten
from residency.where import Where


def at(line, column):
    return Where(source="file", file="launch.toml", line=line, column=column)


def test_without_position_only_the_message():
    assert str(Problem(message="nothing to read")) == "nothing to read"


def test_hint_follows_the_message():
    where = Where(source="env", variable="RESIDENCY_X")
    assert str(Problem(message="RESIDENCY_X is not a knob", hint="did you mean Y?", where=where)) == (
        "$RESIDENCY_X: RESIDENCY_X is not a knob; did you mean Y?"
    )


def test_caret_stands_under_the_stretch():
    shown = str(Problem(message="no", where=at(12, 10), line_text="length = 4x", span=2))
    assert shown == "launch.toml:12:10: no\n  12 | length = 4x\n     |          ^^"


def test_tabs_stay_tabs_above_the_caret():
    shown = str(Problem(message="no", where=at(1, 4), line_text="\ta\tb = 1", span=1))
    assert shown == "launch.toml:1:4: no\n  1 | \ta\tb = 1\n    | \t \t^"


def test_wide_characters_take_two_columns():
    shown = str(Problem(message="no", where=at(1, 3), line_text="\u6a21\u578bx", span=1))
    assert shown.splitlines()[2] == "    |     ^"
    assert columns("\u6a21a\u0301") == 3


def test_controls_are_spelled_out_and_the_caret_still_fits():
    shown = str(Problem(message="bad \x1b[2J name", where=at(1, 2), line_text="\x1ba\x07b", span=2))
    assert shown == "launch.toml:1:2: bad \\x1b[2J name\n  1 | \\x1ba\\x07b\n    |     ^^^^^"


def test_an_endless_line_is_cut_around_the_caret():
    shown = str(Problem(message="no", where=at(1, 500_001), line_text="x" * 500_000 + "BAD" + "y" * 500_000, span=3))
    first, line, caret = shown.splitlines()
    assert first == "launch.toml:1:500001: no"
    assert line == "  1 | ..." + "x" * 100 + "BAD" + "y" * 100
    assert caret == "    | " + " " * 103 + "^^^"


def test_a_column_past_the_end_still_has_a_caret():
    shown = str(Problem(message="no", where=at(2, 4), line_text="a =", span=1))
    assert shown.splitlines()[1:] == ["  2 | a =", "    |    ^"]


def test_input_error_prints_every_problem():
    error = InputError([Problem(message="one"), Problem(message="two")])
    assert str(error) == "one\ntwo"
    assert [problem.message for problem in InputError("three").problems] == ["three"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00e9 \u6a21", "plain \u00e9 \u6a21"),
        ("a\x00b\x1b\x7f\x9b", "a\\x00b\\x1b\\x7f\\x9b"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\u2028\u2029", "\\u2028\\u2029"),
        ("\udc80\ud800", "\\udc80\\ud800"),
    ],
)
def test_clean(text, shown):
    assert clean(text) == shown
    assert clean(shown) == shown


def test_clean_keeps_what_it_is_told_and_shorten_cuts():
    assert clean("a\tb\n", keep="\t") == "a\tb\\n"
    assert shorten("x" * 61) == "x" * 57 + "..."
    assert shorten("x" * 60) == "x" * 60
