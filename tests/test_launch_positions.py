"""Positions in TOML text, counted by hand."""

from __future__ import annotations

import tomli
from hypothesis import given
from hypothesis import strategies as st

from residency.launch.toml_positions import Positions, Spot


def spot(line, column, length):
    return Spot(line=line, column=column, length=length)


def test_plain_key_and_value():
    found = Positions("length = 4096\n")
    assert found.key(("length",)) == spot(1, 1, 6)
    assert found.value(("length",)) == spot(1, 10, 4)


def test_dotted_key_has_a_position_per_part():
    found = Positions("# c\nkv . key_type='f16' # c\n")
    assert found.key(("kv",)) == spot(2, 1, 2)
    assert found.key(("kv", "key_type")) == spot(2, 6, 8)
    assert found.value(("kv", "key_type")) == spot(2, 15, 5)


def test_header_and_its_parts():
    found = Positions("\n[ engine . options ]\nx = 1\n")
    assert found.header(("engine", "options")) == spot(2, 1, 20)
    assert found.key(("engine", "options")) == spot(2, 12, 7)
    assert found.key(("engine", "options", "x")) == spot(3, 1, 1)


def test_inline_table_over_nested_arrays():
    found = Positions('a = { b = [1, [2, "]}#"], { c = true }], d.e = 5 }\n')
    assert found.value(("a", "b", 0)) == spot(1, 12, 1)
    assert found.value(("a", "b", 1, 1)) == spot(1, 19, 5)
    assert found.key(("a", "b", 2, "c")) == spot(1, 29, 1)
    assert found.value(("a", "b", 2, "c")) == spot(1, 33, 4)
    assert found.key(("a", "d", "e")) == spot(1, 44, 1)
    assert found.value(("a",)) == spot(1, 5, 46)


def test_arrays_of_tables_are_indexed_and_sub_tables_belong_to_the_last():
    found = Positions("[[layers.overrides]]\np = 1\n[[layers.overrides]]\np = 2\n[layers.overrides.q]\nr = 3\n")
    assert found.header(("layers", "overrides", 1)) == spot(3, 1, 20)
    assert found.value(("layers", "overrides", 0, "p")) == spot(2, 5, 1)
    assert found.value(("layers", "overrides", 1, "p")) == spot(4, 5, 1)
    assert found.value(("layers", "overrides", 1, "q", "r")) == spot(6, 5, 1)


def test_quoted_keys_with_escapes():
    found = Positions("\"a\\tb\" = 1\n'c.d\\n'.\"\\u00e9\\x41\\U0001F600\" = 2\n")
    assert found.key(("a\tb",)) == spot(1, 1, 6)
    assert found.key(("c.d\\n", "\u00e9A\U0001f600")) == spot(2, 9, 22)


def test_multi_line_strings_do_not_hide_what_follows():
    text = 'a = """\nx = 1 # [no]\n""\\"""""" \nb = \'\'\'\n[z]\n\'\'\'\'\'\nc = 1\n'
    found = Positions(text)
    assert list(found.keys()) == [("a",), ("b",), ("c",)]
    assert found.value(("a",)) == spot(1, 5, 3)
    assert found.key(("b",)) == spot(4, 1, 1)
    assert found.key(("c",)) == spot(7, 1, 1)
    assert tomli.loads(text).keys() == {"a", "b", "c"}


def test_multi_line_array_with_comments_and_trailing_comma():
    found = Positions("ids = [ # ] no\n\t'CUDA0' , # c\n\t'CUDA1',\n]\nx = 1\n")
    assert found.value(("ids", 0)) == spot(2, 2, 7)
    assert found.value(("ids", 1)) == spot(3, 2, 7)
    assert found.value(("ids",)) == spot(1, 7, 8)
    assert found.key(("x",)) == spot(5, 1, 1)


def test_carriage_returns_tabs_and_characters_count_once():
    found = Positions('[a]\r\n\t"\u00e9\U0001f600"\t=\t"\u00fc"\r\nb = 2\r\n')
    assert found.key(("a", "\u00e9\U0001f600")) == spot(2, 2, 4)
    assert found.value(("a", "\u00e9\U0001f600")) == spot(2, 9, 3)
    assert found.value(("a", "b")) == spot(3, 5, 1)
    assert found.line(2) == '\t"\u00e9\U0001f600"\t=\t"\u00fc"'


def test_date_with_a_space_is_one_value():
    found = Positions("t = 1979-05-27 07:32:00\nd = 1979-05-27\nx = [1979-05-27 07:32:00.5, 1]\n")
    assert found.value(("t",)) == spot(1, 5, 19)
    assert found.value(("d",)) == spot(2, 5, 10)
    assert found.value(("x", 1)) == spot(3, 29, 1)


def test_what_is_not_there_has_no_position():
    found = Positions("a = 1\n")
    assert found.key(("b",)) is None
    assert found.value(("a", "b")) is None
    assert found.header(("a",)) is None
    assert found.line(99) == ""


def test_text_no_parser_accepts_does_not_raise():
    for text in ("[", "a", "a =", 'a = "', "a = [1,", "= 1", "a.\n", "[[x]", "]"):
        Positions(text)


def test_deep_and_long_documents_are_walked_without_recursion():
    found = Positions("a = " + "[" * 400 + "]" * 400 + "\nb = 1\n")
    assert found.key(("b",)) == spot(2, 1, 1)
    assert found.value(("a", *([0] * 399))) == spot(1, 404, 2)


KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=6)
SCALARS = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(st.characters(codec="utf-8"), max_size=8))
TREES = st.recursive(SCALARS, lambda deeper: st.lists(deeper, max_size=4) | st.dictionaries(KEYS, deeper, max_size=4), max_leaves=12)


def quoted(text):
    return '"' + "".join(c if c >= " " and c not in '"\\\x7f' else f"\\U{ord(c):08X}" for c in text) + '"'


def written(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return "[ " + " ,\t".join(map(written, value)) + "]"
    return "{" + ", ".join(f"{quoted(key)} ={written(item)}" for key, item in value.items()) + " }"


def paths(value, path=()):
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key), item
            yield from paths(item, (*path, key))


@given(st.dictionaries(KEYS, TREES, max_size=4), st.sampled_from(["\n", "\r\n"]))
def test_every_value_is_found_where_it_was_written(document, end):
    text = "".join(f"{quoted(key)} = {written(value)} # c{end}" for key, value in document.items())
    assert tomli.loads(text) == document
    found = Positions(text)
    assert set(found.values()) == {path for path, _ in paths(document)}
    for path, value in paths(document):
        place = found.value(path)
        line = found.line(place.line)
        assert line[place.column - 1 : place.column - 1 + place.length] == written(value)
