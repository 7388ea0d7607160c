"""`weightcast docs`: the documentation of the installed release, in the terminal."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

import weightcast
from weightcast.cli.help import Command
from weightcast.cli.output import emit, json_option
from weightcast.errors import NotFound

_PACKAGE = Path(weightcast.__file__).parent


def pages() -> dict[str, Path]:
    """Every page by its name. A wheel has them in the package, a clone beside `src`."""
    packaged = _PACKAGE / "docs"
    directory = packaged if packaged.is_dir() else _PACKAGE.parents[1] / "docs"
    return {str(path.relative_to(directory).with_suffix("")): path for path in sorted(directory.rglob("*.md"))}


def _names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    return [CompletionItem(name) for name in pages() if name.startswith(incomplete)]


@click.command(cls=Command, short_help="Print a page of the documentation.")
@click.argument("page", required=False, shell_complete=_names)
@json_option
def docs(page: str | None, as_json: bool) -> None:
    """Print a PAGE of the documentation as Markdown, or the names of all pages.

    The pages belong to the installed release. Error messages name them.

    Exit status:
      0  printed
      2  no such page

    Examples:
      weightcast docs
      weightcast docs failure-model
    """
    found = pages()
    if page is None:
        emit(as_json, list(found), lambda console: console.print("\n".join(found)))
        return
    if page not in found:
        raise NotFound(f"there is no page {page!r} in the documentation: `weightcast docs` lists all pages.")
    text = found[page].read_text(encoding="utf-8")
    emit(as_json, {"page": page, "text": text}, lambda _: click.echo(text, nl=False))
