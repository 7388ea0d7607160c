"""The `weightcast` command.

Exit status: 0 done, 1 the call was right and failed or a check found something wrong, 2 the call itself is wrong.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Sequence

import click

from weightcast import __version__, logs
from weightcast.cli.bench import bench
from weightcast.cli.completion import completion
from weightcast.cli.demo import demo
from weightcast.cli.depot import depot
from weightcast.cli.docs import docs
from weightcast.cli.doctor import doctor
from weightcast.cli.help import Group
from weightcast.cli.model import model
from weightcast.cli.publish import publish
from weightcast.cli.serve import serve
from weightcast.cli.snapshot import snapshot
from weightcast.cli.store import store
from weightcast.cli.vllm import vllm
from weightcast.errors import WeightcastError

log = logs.get(__name__)

_FAMILIES = {
    "Publishing": ("publish", "snapshot"),
    "Moving": ("depot",),
    "Serving": ("serve", "vllm", "model"),
    "Checking": ("store", "doctor"),
    "Measuring": ("demo", "bench"),
    "Reading": ("docs", "completion"),
}
_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
_LONG_RUNNING = ("serve", "depot")  # whoever runs these reads their log: it begins one level lower
_VERSION = f"%(prog)s, version %(version)s\nPython {platform.python_version()}, {platform.system()} {platform.machine()}"


@click.group(cls=Group, families=_FAMILIES, context_settings={"max_content_width": 110})
@click.version_option(__version__, prog_name="weightcast", message=_VERSION)
@click.option("-v", "--verbose", count=True, help="Log what happens; twice for every request and piece.")
@click.option("-q", "--quiet", count=True, help="Log less: the opposite of -v.")
@click.option(
    "--log-format",
    type=click.Choice(["human", "json"]),
    default="human",
    show_default=True,
    help="Of log lines on standard error, one per event: text, or JSON objects (`weightcast docs logging`).",
)
@click.pass_context
def cli(context: click.Context, verbose: int, quiet: int, log_format: str) -> None:
    """Put new weights into running inference engines: whole and verified, or not at all.

    A trainer publishes versions to a store, full or as deltas; engines fetch, verify and commit them while they serve.
    `weightcast COMMAND --help` explains each command, `weightcast doctor` what this machine lacks.

    Commands log warnings; `serve` and `depot` log each update, version and change of state as well, and with -v each
    request. A line carries the ids of the request and the update that it belongs to, in every process.

    Exit status:
      0  done
      1  the call was right and failed, or a check found something wrong
      2  the call itself is wrong: an unknown option, version or directory, an extra that is not installed

    Examples:
      weightcast doctor
      weightcast publish /mnt/weights step_100 ./checkpoints/100
      weightcast serve ./checkpoints/100 --source /mnt/weights --follow
      weightcast depot --store /mnt/weights --listen 0.0.0.0:8300

    Environment:
      WEIGHTCAST_API_KEY, WEIGHTCAST_CONTROL_TOKEN  secrets of `serve`, instead of files
      WEIGHTCAST_ALLOW_SOURCE  sources that requests to vLLM and SGLang may name, with spaces between them
      UCX_*                    settings of UCX, which nixl:// uses
    """
    level = 1 + verbose - quiet + (context.invoked_subcommand in _LONG_RUNNING)
    logs.configure(_LEVELS[max(0, min(level, 3))], as_json=log_format == "json")


for command in (publish, store, snapshot, depot, model, serve, vllm, demo, bench, doctor, docs, completion):
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
    elif logs.as_json():
        log.error("command failed", code=error.code, error=str(error))  # the only answer there is: all of it
    else:
        click.echo(f"error: {error}", err=True)


def run() -> None:
    """The entry point of the installed script."""
    sys.exit(main())
