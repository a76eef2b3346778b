"""The command line. Imports little until a command needs it: ``--version`` and ``explain`` stay fast."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from residency import __version__
from residency.errors import InputError
from residency.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from residency.api import Inputs
    from residency.errors import Problem
    from residency.judge import Case
    from residency.report.model import Report
    from residency.report.text import Line

#: Outcomes that are not worth a line when the engine starts.
_QUIET = ("approve", "not-applicable")

_EPILOG = """\
exit codes: 0 allowed (warnings included), 1 vetoed, 2 the input cannot be read,
3 no verdict (a required fact is unknown, a plugin or rule broke); 3 wins over 1.

examples:
  residency validate launch.toml
  residency validate -- llama-server -m model.gguf -c 32768
  residency validate --machine rtx-3090 -- llama-server -m model.census.json -c 32768
  residency run -- llama-server -m model.gguf -c 32768
  residency census model-00001-of-00003.gguf -o model.census.json
"""


class _Parser(argparse.ArgumentParser):
    """argparse with abbreviations off: a gate must not guess an option."""

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> Any:
        from residency.text import clean

        self.print_usage(sys.stderr)
        self.exit(Exit.UNREADABLE, f"{self.prog}: {clean(message)}\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = _Parser(
        prog="residency",
        description="Judge the launch of a local LLM inference engine before it starts.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"residency {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--machine", metavar="NAME|PATH|probe", help="machine profile; default: what the launch names, else probe this machine")
    common.add_argument("--policy", metavar="PATH", help="the fleet's policy file")
    common.add_argument("--engine", metavar="NAME[@VERSION]", help="engine, where the source does not say it")
    common.add_argument("--format", choices=("text", "json", "sarif", "github", "junit"), default="text", help="output format")
    common.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", dest="overrides", help="change one knob; wins over everything else")
    common.add_argument("--together", action="store_true", help="several launches run at the same time: also judge their sum per pool")
    common.add_argument("-v", "--verbose", action="store_true", help="also list what approved, and the machine's facts")
    common.add_argument("launch", nargs="*", metavar="LAUNCH", help="launch file or preset file; or, after --, an engine's own command line")

    def add(name: str, text: str, function: Callable[[argparse.Namespace], int], *parents: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".", parents=list(parents))
        sub.set_defaults(function=function)
        return sub

    add("validate", "judge a launch: allowed, vetoed, or no verdict", _validate, common)
    add("plan", "show which bytes land in which pool, whatever the verdict", _plan, common)
    add("fit", "show the nearest values that pass; for an allowed launch, the largest context", _fit, common)
    add("convert", "write an engine's command line as a launch file", _convert, common)
    run = add("run", "judge a launch, then become the engine; refuse otherwise", _run)
    for name, meta, text in (
        ("--machine", "NAME|PATH|probe", "machine profile; default: probe this machine"),
        ("--policy", "PATH", "the fleet's policy file"),
        ("--engine", "NAME[@VERSION]", "engine, where the program's name does not say it"),
    ):
        run.add_argument(name, metavar=meta, help=text)
    run.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", dest="overrides", help=argparse.SUPPRESS)
    run.add_argument("--wait-for-memory", type=float, default=0.0, metavar="SECONDS", help="wait while memory another process holds stands in the way")
    run.add_argument("--dry-run", action="store_true", help="say what would be started, and start nothing")
    run.add_argument("--json", action="store_true", help="also write the report as one JSON line to stderr")
    census = add("census", "show what model files hold, and save it as a small file that needs no weights", _census)
    census.add_argument("files", nargs="+", metavar="FILE", help="GGUF file (any shard) or census")
    census.add_argument("-o", "--output", metavar="X.census.json", help="write the census there")
    census.add_argument("--format", choices=("text", "json"), default="text", help="output format")
    probe = add("probe", "show this machine as residency sees it", _probe)
    probe.add_argument("--format", choices=("text", "json", "toml"), default="text", help="json and toml write a profile that --machine takes")
    rules = add("rules", "list the rules", _rules)
    rules.add_argument("--policy", metavar="PATH", help="the fleet's policy file")
    rules.add_argument("--format", choices=("text", "json"), default="text", help="output format")
    explain = add("explain", "explain a rule: what, why, fix", _explain)
    explain.add_argument("rule", metavar="RULE", help="rule id, such as memory-budget/pools")
    add("schema", "print the JSON Schema of launch files", _schema)
    plugins = add("plugins", "list the plugins found, and what became of them", _plugins)
    plugins.add_argument("--policy", metavar="PATH", help="the fleet's policy file")
    plugins.add_argument("--format", choices=("text", "json"), default="text", help="output format")
    completion = add("completion", "print a shell completion script", _completion)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. No input ends in a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    engine_argv: list[str] | None = None
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, engine_argv = arguments[:cut], arguments[cut + 1 :]
    try:
        options = build_parser().parse_args(arguments)
        options.engine_argv = engine_argv
        return int(options.function(options))
    except SystemExit as stop:  # argparse: --help, --version, usage
        return stop.code if isinstance(stop.code, int) else int(Exit.UNREADABLE)
    except InputError as error:
        return _say_problems(error)
    except BrokenPipeError:
        # The reader of our output went away (head, less). Point stdout elsewhere so that the interpreter's
        # own flush at exit stays quiet; the verdict was not delivered, so this is not an approval.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.NO_VERDICT)
    except KeyboardInterrupt:
        return 130
    except RecursionError:
        sys.stderr.write("residency: the input is nested too deeply\n")
        return int(Exit.UNREADABLE)
    except Exception as error:
        from residency.errors import describe
        from residency.text import clean

        if os.environ.get("RESIDENCY_DEBUG"):
            raise
        sys.stderr.write(f"residency: internal error, no verdict: {clean(describe(error))}\n  set RESIDENCY_DEBUG=1 for the traceback\n")
        return int(Exit.NO_VERDICT)


def entry() -> None:
    """Console script."""
    sys.exit(main())


def _say_problems(error: InputError) -> int:
    from residency.text import clean, shorten

    for problem in error.problems:
        sys.stderr.write("error: " + "\n".join(clean(shorten(line, 2000), keep="\t") for line in str(problem).split("\n")) + "\n")
    return int(Exit.UNREADABLE)


def _emit(lines: list[Line]) -> None:
    """Print styled lines: through rich on a terminal, plain otherwise."""
    from residency.report.text import plain

    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        for line in lines:
            console.print(Text.assemble(*[(text, style) for text, style in line]))
    else:
        _print(plain(lines))


def _print(text: str) -> None:
    """Write text to stdout whatever its encoding is."""
    data = text + "\n"
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(data)
    except UnicodeEncodeError:
        sys.stdout.write(data.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def _sources(options: argparse.Namespace) -> list[Any]:
    if options.engine_argv is not None:
        if options.launch:
            raise InputError("give a launch file or, after --, an engine's command line, not both")
        if not options.engine_argv:
            raise InputError("nothing follows --; an engine's command line is expected there")
        return [options.engine_argv]
    if not options.launch:
        raise InputError("give a launch file, or an engine's command line after --")
    return list(options.launch)


def _inputs(options: argparse.Namespace) -> Inputs:
    """Return what the options and the RESIDENCY_* variables of the command line say beside the source."""
    from residency.api import Inputs

    return Inputs(
        engine=options.engine,
        machine=options.machine or os.environ.get("RESIDENCY_MACHINE") or None,
        policy=options.policy or os.environ.get("RESIDENCY_POLICY") or None,
        overrides=options.overrides,
    )


def _judged(options: argparse.Namespace, *, ways_out: bool = True) -> list[Report]:
    import time

    from residency.api import prepare_all
    from residency.judge import judge
    from residency.together import judge_together

    inputs = _inputs(options)
    reports: list[Report] = []
    problems: list[Problem] = []
    cases: list[Case] = []
    for source in _sources(options):
        started = time.perf_counter()
        try:
            prepared = prepare_all(source, inputs)
        except InputError as error:
            problems.extend(error.problems)
            continue
        cases.extend(prepared.cases)
        reports.extend(judge(case, started=started, ways_out=ways_out) for case in prepared.cases)
        reports.extend(judge_together([prepared.cases[i] for i in group]) for group in prepared.groups)
        if prepared.most_at_once > 1:
            reports.append(judge_together(prepared.cases, most=prepared.most_at_once))
    if problems:
        raise InputError(problems)
    if options.together and len(cases) > 1:
        reports.append(judge_together(cases))
    return reports


def _validate(options: argparse.Namespace) -> int:
    from residency.report.formats import FORMATS, worst

    reports = _judged(options)
    if options.format == "text":
        from residency.report.text import render

        for index, report in enumerate(reports):
            _emit([*([[]] if index and not report.allowed else []), *render(report, verbose=options.verbose)])
    else:
        _print(FORMATS[options.format](reports))
    return worst(reports)


def _plan(options: argparse.Namespace) -> int:
    from residency.report.formats import FORMATS, worst

    reports = _judged(options, ways_out=options.format != "text")
    if options.format == "text":
        from residency.report.text import heading, show_budget, show_pool

        for report in reports:
            bars = [line for found in report.pools for line in show_pool(found, report)]
            _emit([heading(report), [], *bars, *show_budget(report)])
        return int(Exit.NO_VERDICT) if any(r.budget.unknowns for r in reports) else int(Exit.ALLOWED)
    _print(FORMATS[options.format](reports))
    return worst(reports)


def _fit(options: argparse.Namespace) -> int:
    import json

    from residency.api import prepare
    from residency.judge import nearest
    from residency.report.text import show_value
    from residency.text import clean

    inputs = _inputs(options)
    code = Exit.ALLOWED
    documents = []
    for source in _sources(options):
        fixes = nearest(prepare(source, inputs))
        if not fixes:
            code = Exit.VETOED
        if options.format == "json":
            documents.append({"fixes": [fix.to_dict() for fix in fixes]})
        elif not fixes:
            _print("no single change that residency knows makes this launch pass; see residency validate")
        else:
            rows = [(clean(f.spelling) or f"{f.knob.removeprefix('option:')} = {show_value(f.value)}", f.note) for f in fixes]
            width = max(len(text) for text, _ in rows)
            _print("\n".join(f"{text:<{width}}  {clean(note)}".rstrip() for text, note in rows))
    if options.format == "json":
        _print(json.dumps(documents if len(documents) > 1 else documents[0], indent=2))
    return int(code)


def _convert(options: argparse.Namespace) -> int:
    from residency.api import read_launch
    from residency.launch.convert import to_toml
    from residency.plugins import load_plugins

    for source in _sources(options):
        launch, _ = read_launch(source, engine=options.engine, environ=os.environ, plugins=load_plugins(), overrides=options.overrides)
        _print(to_toml(launch))
    return int(Exit.ALLOWED)


def _run(options: argparse.Namespace) -> int:
    import json
    import time
    from dataclasses import replace

    from residency.api import prepare
    from residency.hooks.run import find_program, judge_until, start
    from residency.judge import judge
    from residency.report.text import plain, render
    from residency.text import clean

    argv = options.engine_argv
    if not argv:
        raise InputError("give the engine's command line after --")
    if options.overrides:
        raise InputError("run starts the engine with exactly the given command line; change that instead of using --set")
    if not 0 <= options.wait_for_memory <= 86400:
        raise InputError("--wait-for-memory takes 0 to 86400 seconds")
    environ = dict(os.environ)
    inputs = _inputs(options)
    path = find_program(argv, environ)

    def look() -> Report:
        started = time.perf_counter()
        return judge(prepare(argv, replace(inputs, environ=environ)), started=started)

    report = judge_until(look, options.wait_for_memory)
    if options.json:
        sys.stderr.write(json.dumps(report.to_dict(), ensure_ascii=True) + "\n")
    if not report.allowed or options.dry_run or len(report.findings) > len([f for f in report.findings if f.outcome in _QUIET]):
        sys.stderr.write(plain(render(report)) + "\n")
    if not report.allowed:
        return int(report.exit_code)
    if options.dry_run:
        sys.stderr.write("would start " + " ".join(clean(part) for part in [path, *argv[1:]]) + "\n")
        return int(Exit.ALLOWED)
    return start(path, argv, environ)


def _census(options: argparse.Namespace) -> int:
    from residency.checkpoint.census import census_main

    code, text = census_main(options.files, options.output, as_json=options.format == "json")
    if text:
        _print(text)
    return code


def _probe(options: argparse.Namespace) -> int:
    from residency.machine.probe import probe
    from residency.machine.show import render

    _print(render(probe(), options.format))
    return int(Exit.ALLOWED)


def _plugin_set(options: argparse.Namespace) -> Any:
    from residency.plugins import load_plugins
    from residency.policy import resolve_policy

    return load_plugins(resolve_policy(options.policy or os.environ.get("RESIDENCY_POLICY") or None).plugins)


def _rules(options: argparse.Namespace) -> int:
    found = _plugin_set(options)
    if options.format == "json":
        import json

        rows = [{"id": r.id, "severity": r.severity, "summary": r.doc.split("\n", 1)[0], "plugin": found.owners[r.id]} for r in found.rules]
        _print(json.dumps({"rules": rows, "troubles": [t.message for t in found.troubles]}, indent=2))
    else:
        from residency.text import clean

        width = max((len(r.id) for r in found.rules), default=0)
        _print("\n".join(clean(f"{r.id:<{width}}  {r.doc.split(chr(10), 1)[0]}") for r in found.rules) or "no rules")
    return _troubles(found)


def _troubles(found: Any) -> int:
    from residency.text import clean

    for trouble in found.troubles:
        sys.stderr.write(f"trouble: {clean(trouble.message)}\n")
    return int(Exit.NO_VERDICT) if found.troubles else int(Exit.ALLOWED)


def _shipped_text(rule: str) -> str | None:
    """Return the explanation of a shipped rule from its source, without importing a single plugin.

    A shipped rule ``plugin-name/slug`` stands in ``residency_plugins/plugin_name/slug.py``; a test holds that.
    """
    import re

    if not re.fullmatch(r"[a-z-]+/[a-z-]+", rule):
        return None
    try:
        import residency_plugins

        path = os.path.join(residency_plugins.__path__[0], *rule.replace("-", "_").split("/")) + ".py"  # noqa: PTH118 - pathlib costs 8 ms here
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - the same
            source = file.read()
    except (ImportError, OSError):
        return None
    found = re.match(r'"""(.*?)"""', source, re.DOTALL)
    return found[1].strip() if found and f'id="{rule}"' in source else None


def _explain(options: argparse.Namespace) -> int:
    from residency.text import clean

    text = _shipped_text(options.rule)
    if text is None:
        found = _plugin_set(argparse.Namespace(policy=None))
        text = next((r.doc for r in found.rules if r.id == options.rule), None)
        if text is None:
            import difflib

            close = difflib.get_close_matches(options.rule, [r.id for r in found.rules], n=1)
            raise InputError(f'no rule is called "{clean(options.rule)}"' + (f'; did you mean "{close[0]}"?' if close else "; see residency rules"))
    _print("\n".join(clean(line) for line in f"{options.rule}\n\n{text}".split("\n")))
    return int(Exit.ALLOWED)


def _schema(_options: argparse.Namespace) -> int:
    import json

    from residency.launch.schema import json_schema

    _print(json.dumps(json_schema(), indent=2))
    return int(Exit.ALLOWED)


def _plugins(options: argparse.Namespace) -> int:
    found = _plugin_set(options)
    if options.format == "json":
        import json
        from dataclasses import asdict

        _print(json.dumps({"plugins": [asdict(p) for p in found.plugins], "troubles": [t.message for t in found.troubles]}, indent=2))
    else:
        from residency.text import clean

        rows = [f"{p.name:<18} {p.distribution:<20} {p.version:<10} {p.state}{': ' + p.detail if p.detail else ''}" for p in found.plugins]
        _print("\n".join(clean(row) for row in rows) or "no plugins")
    return _troubles(found)


def _completion(options: argparse.Namespace) -> int:
    from residency.completion import script

    _print(script(options.shell, build_parser()))
    return int(Exit.ALLOWED)


if __name__ == "__main__":
    entry()
