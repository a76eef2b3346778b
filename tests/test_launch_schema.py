"""The JSON Schema of a launch file, the words made from it, and the document that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from residency.launch.knobs import SECTIONS, Knobs, TensorOverride
from residency.launch.schema import describe, json_schema, lookup, markdown_table
from residency.launch.sizes import PercentValue, parse_size

SCHEMA = json_schema()
KNOBS = [(section, key) for section, model in SECTIONS.items() for key in model.model_fields]


def accepts(schema, value):
    """Whether a value meets a schema, for the words this schema uses."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return any(accepts(branch, value) for branch in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return value == schema["const"]
    kind = schema["type"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind in ("integer", "number"):
        types = int if kind == "integer" else (int, float)
        low, high = schema.get("minimum", float("-inf")), schema.get("maximum", float("inf"))
        return isinstance(value, types) and not isinstance(value, bool) and low <= value <= high
    if kind == "string":
        return isinstance(value, str) and re.search(schema.get("pattern", ""), value) is not None
    if kind == "array":
        return isinstance(value, list) and all(accepts(schema["items"], item) for item in value)
    assert kind == "object"
    if not isinstance(value, dict) or not set(schema.get("required", ())) <= value.keys():
        return False
    known, rest = schema.get("properties", {}), schema["additionalProperties"]
    return all(accepts(known[key], item) if key in known else rest and accepts(rest, item) for key, item in value.items())


@pytest.mark.parametrize(("section", "key"), KNOBS)
def test_every_knob_has_title_description_and_legal_examples(section, key):
    knob = lookup([section, key])
    assert knob["title"].strip()
    assert knob["description"].strip()
    assert knob["examples"]
    for example in knob["examples"]:
        Knobs.model_validate({section: {key: example}})
        assert accepts(knob, example)
    if (section, key) not in (("engine", "name"), ("model", "path")):
        assert knob["default"] is None
        assert knob["description"].endswith(f" Unset: {knob['x-unset']}.")


@pytest.mark.parametrize("key", list(TensorOverride.model_fields))
def test_overrides_have_them_too(key):
    knob = lookup(["layers", "overrides", 0, key])
    assert knob["title"]
    assert knob["description"]
    assert all(isinstance(example, str) for example in knob["examples"])


def test_numbers_and_sizes_have_units():
    units = {f"{section}.{key}": lookup([section, key]).get("unit") for section, key in KNOBS}
    assert units["context.length"] == "tokens"
    assert units["kv.memory"] == units["memory.reserve"] == units["experts.slot_size"] == "bytes"
    assert units["layers.on_device"] == "layers"
    assert units["engine.name"] is None
    assert {unit for unit in units.values() if unit} == {"tokens", "sequences", "blocks", "bytes", "layers", "slots", "experts"}


def test_the_document_is_closed_and_says_what_is_required():
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert list(SCHEMA["properties"]) == list(SECTIONS)
    assert SCHEMA["required"] == ["engine", "model"]
    assert all(definition["additionalProperties"] is False for definition in SCHEMA["$defs"].values())
    assert "null" not in {branch.get("type") for knob in KNOBS for branch in lookup(knob).get("anyOf", [])}
    good = {"engine": {"name": "e"}, "model": {"path": "m"}}
    assert accepts(SCHEMA, good)
    assert not accepts(SCHEMA, {"engine": {"name": "e"}, "model": {}})
    assert not accepts(SCHEMA, {**good, "context": {"lenght": 1}})
    assert not accepts(SCHEMA, {**good, "kv": {"memory": "80%"}})


def test_a_caller_may_change_its_copy():
    json_schema()["properties"].clear()
    assert json_schema() == SCHEMA


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (["context", "length"], "a whole number of tokens ≥ 0"),
        (["context", "sequences"], "a whole number of sequences ≥ 1"),
        (["context", "flash_attention"], 'one of "auto", "on" or "off"'),
        (["layers", "on_device"], 'a whole number of layers ≥ 0, or "all" or "auto"'),
        (["layers", "ratio"], "a list of finite numbers ≥ 0"),
        (["memory", "reserve"], 'a size such as "4GiB" or a whole number of bytes, or a percentage such as "5%"'),
        (["vision", "enabled"], "true or false"),
        (["layers", "overrides"], "a list of tables"),
        (["layers", "overrides", 3, "device"], "a text"),
        (["device", "ids", 0], "a text"),
    ],
)
def test_words(path, words):
    assert describe(lookup(path)) == words


def test_lookup_of_nothing():
    assert lookup(["context", "lenght"]) is None
    assert lookup(["context", 0]) is None
    assert lookup(["device", "ids", "x"]) is None


def test_the_document_is_in_step():
    text = (Path(__file__).parent.parent / "docs" / "launch-files.md").read_text(encoding="utf-8")
    start, end = "<!-- knobs: written by residency.launch.schema.markdown_table -->\n", "<!-- end of knobs -->"
    assert text.partition(start)[2].partition(end)[0].strip() == markdown_table().strip()
    for section, key in KNOBS:
        assert f"`{section}.{key}`" in text


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("2490368", 2490368), ("22GiB", 23622320128), ("1.5 GiB", 1610612736), ("1kB", 1000), ("1.5kB", 1500), ("2TB", 2 * 10**12), ("0.5KiB", 512)],
)
def test_sizes(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "80%", "1G", "1gib", "1 GIB", "-1GiB", "1_000", "1e3", "GiB", "1.GiB", "1GiB ", " 1GiB", "0.1KiB", "\u0661GiB", "1GiBx", "1.5", "9" * 21])
def test_texts_that_are_no_sizes(text):
    with pytest.raises(ValueError, match=r"is not|is a percentage"):
        parse_size(text)


def test_a_percentage_stays_one():
    for text, value in (("80%", 80.0), ("0%", 0.0), ("100 %", 100.0), ("2.5%", 2.5)):
        reserve = Knobs.model_validate({"memory": {"reserve": text}}).memory.reserve
        assert isinstance(reserve, PercentValue)
        assert reserve == value
        assert Knobs.model_validate({"memory": {"reserve": reserve}}).memory.reserve is reserve
    assert str(PercentValue(2.5)) == "2.5%"
    knobs = Knobs.model_validate({"memory": {"reserve": "80%"}})
    assert isinstance(knobs.model_dump()["memory"]["reserve"], PercentValue)
    assert knobs.model_dump(mode="json")["memory"]["reserve"] == "80%"
    assert Knobs.model_validate({"memory": {"reserve": 80}}).memory.reserve == 80
    assert type(Knobs.model_validate({"memory": {"reserve": 80}}).memory.reserve) is int


@pytest.mark.parametrize("text", ["101%", "-1%", "%", "5", "5 percent", "1e1%"])
def test_texts_that_are_no_percentages(text):
    from pydantic import TypeAdapter, ValidationError

    from residency.launch.sizes import Percent

    with pytest.raises(ValidationError):
        TypeAdapter(Percent).validate_python(text)
