"""How help is laid out: what and why, options in sections, then exit status and examples, as a manual has them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

_TITLE = re.compile(r"[A-Z][A-Za-z ]*:$")


class _Manual(click.Command):
    """Its docstring may have sections: paragraphs whose first line is a title, such as `Examples:`.

    They stand after the options, just as they are written. `sections` puts options that belong together under a title, as
    in {"HTTP": ("--host", "--port")}; the others stand under "Options".
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> None:
        # of each command and not only of the outermost: click remembers the option that it made first
        given = settings.get("context_settings") or {}
        settings["context_settings"] = {"help_option_names": ["-h", "--help"], **given}
        super().__init__(*args, **settings)
        self.sections = sections or {}

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """Only the paragraphs that are no sections."""
        with formatter.indentation():
            for block in self._blocks():
                if not _TITLE.match(block.partition("\n")[0]):
                    formatter.write_paragraph()
                    formatter.write_text(block)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each option once: under its title, or with the rest at the end."""
        rows = dict(_row(option, ctx) for option in self.get_params(ctx) if isinstance(option, click.Option))
        titled = {title: [rows.pop(name) for name in names] for title, names in self.sections.items()}
        for title, lines in (titled | {"Options": list(rows.values())}).items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """The sections of the docstring."""
        for block in self._blocks():
            if _TITLE.match(block.partition("\n")[0]):
                formatter.write_paragraph()
                formatter.write(f"{block}\n")

    def _blocks(self) -> list[str]:
        return inspect.cleandoc(self.help or "").split("\n\n")


class Command(_Manual):
    """A command with help as a manual has it."""


class Group(_Manual, click.Group):
    """A group of commands. `families` puts those that belong together under a title; the others stand under "Commands"."""

    command_class = Command

    def __init__(self, *args: Any, families: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.families = families or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Commands first: they are what is looked for."""
        self.format_commands(ctx, formatter)
        _Manual.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """Each command once, in columns that are the same under every title."""
        left = dict(self.commands)
        families = {title: [left.pop(name) for name in names] for title, names in self.families.items()}
        width = max(map(len, self.commands))
        for title, commands in (families | {"Commands": list(left.values())}).items():
            if commands:
                with formatter.section(title):
                    formatter.write_dl([(f"{one.name:{width}}", one.get_short_help_str(90)) for one in commands])


def _row(option: click.Option, ctx: click.Context) -> tuple[str, tuple[str, str]]:
    """The name by which `sections` knows an option, its first long one, and what help says of it."""
    name = next((name for name in option.opts if name.startswith("--")), option.opts[0])
    written, explained = option.get_help_record(ctx) or (name, "")
    return name, (written.replace(" INTEGER RANGE", " N").replace(" FLOAT RANGE", " X"), explained)
