"""The `weightcast` command.

Exit status: 0 done, 1 the call was right and failed or a check found something wrong, 2 the call itself is wrong.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence

import click

from weightcast import __version__
from weightcast.cli.bench import bench
from weightcast.cli.demo import demo
from weightcast.cli.depot import depot
from weightcast.cli.model import model
from weightcast.cli.publish import publish
from weightcast.cli.serve import serve
from weightcast.cli.snapshot import snapshot
from weightcast.cli.store import store
from weightcast.cli.vllm import vllm
from weightcast.errors import WeightcastError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="weightcast")
@click.option("-v", "--verbose", count=True, help="Log what happens; twice for every part.")
def cli(verbose: int) -> None:
    """Put new weights into running inference engines: whole and verified, or not at all.

    \b
    exit status: 0 done
                 1 the call was right and failed, or a check found something wrong
                 2 the call itself is wrong: an unknown option, version or directory
    """
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s", force=True)


for command in (publish, store, snapshot, depot, model, serve, vllm, demo, bench):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. Mistakes of the user end in one message, never a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = cli.main(args=given, prog_name="weightcast", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        return 130
    except WeightcastError as error:
        _report(error, as_json="--json" in given)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read our output has gone
        return 1
    return int(status or 0)


def _report(error: WeightcastError, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"error": {"code": error.code, "message": str(error)}}, indent=1))
    else:
        click.echo(f"error: {error}", err=True)


def run() -> None:
    """The entry point of the installed script."""
    sys.exit(main())
