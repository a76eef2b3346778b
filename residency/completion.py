"""Shell completion scripts, made from the argument parser so that they cannot drift from it."""

from __future__ import annotations

import argparse


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command, by name."""
    for action in parser._actions:  # noqa: SLF001 - argparse offers no public way to its own commands
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - the same
            return dict(action.choices)
    return {}


def _words(parser: argparse.ArgumentParser) -> list[str]:
    words: list[str] = []
    for action in parser._actions:  # noqa: SLF001 - the same
        words += action.option_strings
        if action.choices and not action.option_strings:
            words += [str(choice) for choice in action.choices]
    return words


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the completion script for bash, zsh or fish."""
    found = commands(parser)
    if shell == "fish":
        lines = ["complete -c residency -n __fish_use_subcommand -f -a '" + " ".join(found) + "'"]
        for name, sub in found.items():
            words = " ".join(_words(sub))
            lines.append(f"complete -c residency -n '__fish_seen_subcommand_from {name}' -a '{words}'")
        return "\n".join(lines)
    cases = "\n".join(f"    {name}) words='{' '.join(_words(sub))}' ;;" for name, sub in found.items())
    body = f"""_residency() {{
  local words='{" ".join(found)} --help --version'
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words='{" ".join(found)} --help --version'; fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}") $(compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o filenames -F _residency residency"""
    return f"autoload -U +X bashcompinit && bashcompinit\n{body}" if shell == "zsh" else body
