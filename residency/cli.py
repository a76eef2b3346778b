"""The command line. Imports little until a command needs it: ``--version`` and ``explain`` stay fast."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from residency import __version__
from residency.errors import InputError
from residency.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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


def _filled(text: str) -> str:
    """Return a value that is not blank: an unset variable in a script must not choose another machine or engine."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the value is empty")
    return text


def _source_options(*formats: str) -> argparse.ArgumentParser:
    """Return the options of every command that takes a launch; the formats it can write, text first."""
    parent = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parent.add_argument("--machine", type=_filled, metavar="NAME|PATH|probe", help="machine profile; default: what the launch names, else probe this machine")
    parent.add_argument("--policy", type=_filled, metavar="PATH", help="the fleet's policy file")
    parent.add_argument("--engine", type=_filled, metavar="NAME[@VERSION]", help="engine, where the source does not say it")
    parent.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", dest="overrides", help="change one knob; wins over everything else")
    if formats:
        parent.add_argument("--format", choices=formats, default="text", help="output format")
    return parent


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = _Parser(
        prog="residency",
        description="Judge the launch of a local LLM inference engine before it starts.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"residency {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    judged = _source_options("text", "json", "sarif", "github", "junit")
    judged.add_argument("--together", action="store_true", help="several launches run at the same time: also judge their sum per pool")
    judged.add_argument("-v", "--verbose", action="store_true", help="also list what approved, and the machine's facts")
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument(
        "launch", nargs="*", metavar="LAUNCH",
        help="launch file, or a file with engine commands (preset INI, llama-swap, compose, Kubernetes, systemd); or, after --, an engine's own command line",
    )  # fmt: skip
    file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file.add_argument("launch", nargs="*", metavar="LAUNCH", help="launch file; or, after --, an engine's own command line")

    def add(name: str, text: str, function: Callable[[argparse.Namespace], int], *parents: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".", parents=list(parents))
        sub.set_defaults(function=function)
        return sub

    add("validate", "judge a launch: allowed, vetoed, or no verdict", _validate, judged, files)
    add("plan", "show which bytes land in which pool, whatever the verdict", _plan, judged, files)
    add("fit", "show the nearest values that pass; for an allowed launch, the largest context", _fit, _source_options("text", "json"), file)
    convert = add("convert", "write an engine's command line as a launch file", _convert, file)
    convert.add_argument("--engine", type=_filled, metavar="NAME[@VERSION]", help="engine, where the source does not say it")
    run = add("run", "judge a launch, then become the engine; refuse otherwise", _run)
    for name, meta, text in (
        ("--machine", "NAME|PATH|probe", "machine profile; default: probe this machine"),
        ("--policy", "PATH", "the fleet's policy file"),
        ("--engine", "NAME[@VERSION]", "engine, where the program's name does not say it"),
    ):
        run.add_argument(name, type=_filled, metavar=meta, help=text)
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
    rules.add_argument("--policy", type=_filled, metavar="PATH", help="the fleet's policy file")
    rules.add_argument("--format", choices=("text", "json"), default="text", help="output format")
    explain = add("explain", "explain a rule: what, why, fix", _explain)
    explain.add_argument("rule", metavar="RULE", help="rule id, such as memory-budget/pools")
    add("schema", "print the JSON Schema of launch files", _schema)
    plugins = add("plugins", "list the plugins found, and what became of them", _plugins)
    plugins.add_argument("--policy", type=_filled, metavar="PATH", help="the fleet's policy file")
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
    options = argparse.Namespace()
    try:
        options = build_parser().parse_args(arguments)
        options.engine_argv = engine_argv
        return int(options.function(options))
    except SystemExit as stop:  # argparse: --help, --version, usage
        return stop.code if isinstance(stop.code, int) else int(Exit.UNREADABLE)
    except InputError as error:
        return _say_problems(error, form=getattr(options, "format", "text"))
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            return _internal(error)
        if error.errno == errno.ENOSPC:
            _warn("residency: the output could not be written: no space left, so no verdict")
        # The reader of our output went away (head, less). Point stdout elsewhere so that the interpreter's
        # own flush at exit stays quiet; the verdict was not delivered, so this is not an approval.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.NO_VERDICT)
    except KeyboardInterrupt:
        return 130
    except RecursionError:
        _warn("residency: the input is nested too deeply")
        return int(Exit.UNREADABLE)
    except Exception as error:  # noqa: BLE001 - told with its place on request
        return _internal(error)


def _internal(error: Exception) -> int:
    from residency.errors import describe
    from residency.text import clean

    if os.environ.get("RESIDENCY_DEBUG"):
        raise error
    _warn(f"residency: internal error, no verdict: {clean(describe(error))}\n  set RESIDENCY_DEBUG=1 for the traceback")
    return int(Exit.NO_VERDICT)


def entry() -> None:
    """Console script."""
    code = main()
    if any(t is not threading.main_thread() and not t.daemon for t in threading.enumerate()):
        # A plugin left a thread behind; the verdict is out, and a service manager waits for the end.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _warn(text: str) -> None:
    """Write to stderr, if there is one."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text + "\n")


#: Problems told one by one; a file that is wrong in more places has one reason for it.
_MOST_PROBLEMS = 50


def _shown(problem: Problem) -> str:
    from residency.text import clean, shorten

    return "\n".join(clean(shorten(line, 2000), keep="\t") for line in str(problem).split("\n"))


def _say_problems(error: InputError, *, form: str = "text") -> int:
    for problem in error.problems[:_MOST_PROBLEMS]:
        _warn(f"error: {_shown(problem)}")
    if len(error.problems) > _MOST_PROBLEMS:
        _warn(f"error: and {len(error.problems) - _MOST_PROBLEMS} more of the same input")
    if form != "text":
        from residency.report.formats import problems_in

        document = problems_in(form, error.problems[:_MOST_PROBLEMS], int(Exit.UNREADABLE))
        if document is not None:
            _print(document)
    return int(Exit.UNREADABLE)


def _emit(lines: list[Line]) -> None:
    """Print styled lines: through rich on a terminal, plain otherwise."""
    from residency.report.text import plain

    if sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        for line in lines:
            console.print(Text.assemble(*[(text, style) for text, style in line]))
    else:
        _print(plain(lines))


def _print(text: str) -> None:
    """Write text to stdout whatever its encoding is; with stdout closed the exit code alone speaks."""
    if sys.stdout is None:
        return
    data = text + "\n"
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(data)
    except UnicodeEncodeError:
        sys.stdout.write(data.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep what plugins print away from stdout, which holds the report and nothing else."""
    with contextlib.ExitStack() as stack:
        target = sys.stderr if sys.stderr is not None else stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123 - the null device
        with contextlib.redirect_stdout(target):
            yield


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


def _judged(options: argparse.Namespace, *, ways_out: bool = True) -> tuple[list[Report], list[Problem]]:
    """Return the reports, and what of the sources is not judged or has been assumed; that is told on stderr."""
    import time

    from residency.api import prepare_all
    from residency.judge import judge
    from residency.together import judge_together

    inputs = _inputs(options)
    reports: list[Report] = []
    problems: list[Problem] = []
    warnings: list[Problem] = []
    cases: list[Case] = []
    with _quietly():
        for source in _sources(options):
            started = time.perf_counter()
            try:
                prepared = prepare_all(source, inputs)
            except InputError as error:
                problems.extend(error.problems)
                continue
            cases.extend(prepared.cases)
            warnings.extend(prepared.warnings)
            reports.extend(judge(case, started=started, ways_out=ways_out) for case in prepared.cases)
            reports.extend(judge_together([prepared.cases[i] for i in group]) for group in prepared.groups)
            if prepared.most_at_once > 1:
                reports.append(judge_together(prepared.cases, most=prepared.most_at_once))
        if problems:
            raise InputError(problems)
        if options.together and len(cases) > 1:
            reports.append(judge_together(cases))
    for warning in warnings[:_MOST_PROBLEMS]:
        _warn(f"warning: {_shown(warning)}")
    return reports, warnings[:_MOST_PROBLEMS]


def _validate(options: argparse.Namespace) -> int:
    from residency.report.formats import FORMATS, worst

    reports, warnings = _judged(options)
    if options.format == "text":
        from residency.report.text import render

        for index, report in enumerate(reports):
            _emit([*([[]] if index and not report.allowed else []), *render(report, verbose=options.verbose)])
    else:
        _print(FORMATS[options.format](reports, warnings))
    return worst(reports)


def _plan(options: argparse.Namespace) -> int:
    from residency.report.formats import FORMATS

    reports, warnings = _judged(options, ways_out=options.format != "text")
    if options.format == "text":
        from residency.report.text import heading, show_budget, show_pool

        for report in reports:
            bars = [line for found in report.pools for line in show_pool(found, report)]
            _emit([heading(report), [], *bars, *show_budget(report)])
    else:
        _print(FORMATS[options.format](reports, warnings))
    # A plan is shown whatever the verdict; only a plan that could not be made is worth an exit code.
    return int(Exit.NO_VERDICT) if any(r.budget.unknowns for r in reports) else int(Exit.ALLOWED)


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
        with _quietly():
            case = prepare(source, inputs)
            fixes = nearest(case)
        if case.launch.starts_nothing and options.format != "json":
            _print("starts no engine, only prints: nothing to change")
            continue
        if not fixes and not case.launch.starts_nothing:
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
        launch, _ = read_launch(source, engine=options.engine, environ=os.environ, plugins=load_plugins())
        if isinstance(source, str):  # what is written may be saved in another folder than the file that was read
            for knob in ("model.path", "model.mmproj", "model.draft"):
                path = launch.get(knob)
                launch = launch if path is None else launch.with_value(knob, os.path.abspath(path))  # noqa: PTH100 - Path would resolve links
        _print(to_toml(launch))
    return int(Exit.ALLOWED)


#: Knobs that change the judgement and nothing an engine could read: these may come from the environment of ``run``.
_JUDGED_ONLY = (("engine", "version"), ("memory", "reserve"), ("machine", "profile"))


def _refuse_silent_knobs(environ: Mapping[str, str]) -> None:
    """Refuse RESIDENCY_* knobs for ``run``: they would be judged, and the engine would start without them."""
    from residency.errors import Problem
    from residency.launch.layers import environment_layer, has_variables

    if not has_variables(environ):
        return
    layer, _ = environment_layer(environ)
    problems = [
        Problem(message="is judged but would not reach the engine; unset it, or say it on the engine's command line", where=where)
        for path, where in layer.places.items()
        if path[:2] not in _JUDGED_ONLY
    ]
    if problems:
        raise InputError(problems)


def _run(options: argparse.Namespace) -> int:
    import json
    import shlex
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

    _refuse_silent_knobs(environ)

    def look() -> Report:
        started = time.perf_counter()
        return judge(prepare(argv, replace(inputs, environ=environ)), started=started)

    with _quietly():
        report = judge_until(look, options.wait_for_memory)
    if options.json:
        _warn(json.dumps(report.to_dict(), ensure_ascii=True))
    if not report.allowed or options.dry_run or any(f.outcome not in _QUIET for f in report.findings):
        _warn(plain(render(report)))
    if not report.allowed:
        return int(report.exit_code)
    if options.dry_run:
        _warn("would start " + clean(shlex.join([path, *argv[1:]])))
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
        _warn(f"trouble: {clean(trouble.message)}")
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
