"""No shipped rule knows an engine by name: not in its code, not in what it says, only in links to public reports."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from residency.plugins import load_plugins

FOLDER = Path(__file__).parent.parent / "plugins" / "residency_plugins"
FILES = sorted(FOLDER.rglob("*.py"))


def engine_words() -> set[str]:
    engines = load_plugins().engines
    assert len(engines) >= 2
    names = {word.casefold() for e in engines for word in (e.name, *e.aliases, *e.programs)}
    return names | {name.replace(".", "_").replace("-", "_") for name in names}


def strings(source: str) -> list[str]:
    """Return every string constant but the module's own docstring, with f-strings in pieces."""
    tree = ast.parse(source)
    docstring = tree.body[0].value if tree.body and isinstance(tree.body[0], ast.Expr) else None
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and n is not docstring]


def names(source: str) -> list[str]:
    return [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type in (tokenize.NAME, tokenize.COMMENT)]


def test_there_are_files_to_look_at():
    assert len(FILES) > 20


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(FOLDER).as_posix())
def test_no_engine_is_named(file):
    source = file.read_text(encoding="utf-8")
    pattern = re.compile("|".join(rf"(?<![\w-]){re.escape(word)}(?![\w-])" for word in sorted(engine_words())))
    found = [text for text in (*strings(source), *names(source)) if pattern.search(re.sub(r"https?://\S+", "", text.casefold()))]
    assert found == []


def test_every_rule_explains_itself():
    plugins = load_plugins()
    for rule in plugins.rules:
        if rule.id in plugins.shipped:
            for word in ("What: ", "Why: ", "Fix: "):
                assert len(re.findall(rf"(?m)^{word}\S", rule.doc)) == 1, (rule.id, word)


@pytest.mark.parametrize("plugin", ["unified-memory", "vision"])
def test_every_rule_links_to_a_public_report(plugin):
    rules = [r for r in load_plugins().rules if r.id.startswith(f"{plugin}/")]
    assert len(rules) >= 9
    for rule in rules:
        why = rule.doc.split("Why: ", 1)[1].split("Fix: ", 1)[0]
        assert re.search(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", why), rule.id
