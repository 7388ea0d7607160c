"""`weightcast completion`: what a shell needs to complete commands, options and the versions of a store."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from weightcast.cli.help import Command
from weightcast.errors import WeightcastError
from weightcast.store.store import Store

_VARIABLE = "_WEIGHTCAST_COMPLETE"  # click answers a shell that sets it


@click.command(cls=Command, short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete commands, options and, where a store was named before, its versions.

    The script calls `weightcast` itself, so it stays right when weightcast is upgraded. bash must be 4.4 or newer.

    Exit status:
      0  printed
      2  not a shell that is known

    Examples:
      source <(weightcast completion bash)                      # this shell only; put it into ~/.bashrc for all
      source <(weightcast completion zsh)                       # in ~/.zshrc, after compinit
      weightcast completion fish > ~/.config/fish/completions/weightcast.fish
    """
    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"this click cannot complete in {shell}.")
    click.echo(made(context.find_root().command, {}, "weightcast", _VARIABLE).source())


def versions(context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Versions of the store that was named before and that begin like this. None without one: a shell shows no errors."""
    named = context.params.get("path") or context.params.get("store") or next(iter(context.args), None)
    if named is None:
        return []
    try:
        listings = Store(Path(named)).listings()
    except WeightcastError:
        return []
    return [CompletionItem(listing.version) for listing in listings if listing.version.startswith(typed)]


def directories(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Let the shell itself complete a directory."""
    return [CompletionItem(typed, type="dir")]
