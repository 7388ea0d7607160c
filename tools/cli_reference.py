"""Writes docs/cli.md: what every command says to --help. `make docs` runs it, a test compares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from weightcast.cli.main import cli

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
_WIDTH = 110
_TOP = """# The command line

What every command says to `--help`. This page is made by `make docs`; change the command, not the page. What to do with
them from day to day: [operations.md](operations.md).

"""


def commands(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """A command and all below it, in the order in which --help lists them."""
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from commands(child, click.Context(child, context, info_name=name, **_settings(child)))


def _settings(command: click.Command) -> dict[str, object]:
    return {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}


def render() -> str:
    """The page."""
    found = list(commands(cli, click.Context(cli, info_name="weightcast", **_settings(cli))))
    lines = [f"- [`{one.command_path}`](#{one.command_path.replace(' ', '-')})" for one in found]
    sections = [f"## {one.command_path}\n\n```text\n{_help(one)}\n```\n" for one in found]
    return _TOP + "\n".join(lines) + "\n\n" + "\n".join(sections)


def _help(context: click.Context) -> str:
    return "\n".join(line.rstrip() for line in context.get_help().splitlines())


if __name__ == "__main__":
    PAGE.write_text(render())
