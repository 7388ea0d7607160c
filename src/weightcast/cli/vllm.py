"""`weightcast vllm`: put a version on running vLLM servers, and ask what they serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from weightcast.cli.help import Group
from weightcast.cli.output import emit, json_option, short, table
from weightcast.errors import WeightcastError

if TYPE_CHECKING:
    from weightcast.fleet.vllm_fleet import VllmFleet
    from weightcast.fleet.vllm_server import PauseMode

_SECONDS = click.FloatRange(min=0, min_open=True)
_SERVER = click.option(
    "--server", "servers", multiple=True, required=True, metavar="URL", help="A server: http://HOST:PORT; several for more."
)
_TOKEN = click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The --api-key that the servers were started with.",
)


@click.group(cls=Group, short_help="Put versions on running vLLM servers.")
def vllm() -> None:
    """Drive servers that run `vllm serve` with weightcast as their weight transfer and VLLM_SERVER_DEV_MODE=1.

    weightcast must be installed beside vLLM on the servers; here vLLM is not needed. `weightcast docs vllm` explains it.

    Exit status:
      0  all servers did it
      1  a server failed or did not answer
      2  the call itself is wrong

    Examples:
      VLLM_SERVER_DEV_MODE=1 vllm serve ./model --weight-transfer-config '{"backend": "weightcast"}'
      weightcast vllm update --server http://gen-0:8000 --source file:///mnt/weights
      weightcast vllm status --server http://gen-0:8000
    """


@vllm.command(short_help="Put a version on all servers.")
@_SERVER
@click.option("--source", required=True, metavar="URL", help="Where the servers fetch it: a store, or any source's URL.")
@click.option("--version", help="Which one.  [default: the source's newest]")
@click.option(
    "--pause",
    type=click.Choice(["keep", "wait", "abort"]),
    help="Stop generating around the commit: requests are kept, waited for, or aborted.  [default: no pause]",
)
@click.option(
    "--no-verify", is_flag=True, help="Do not compare bytes with the digests of the manifest.  [default: all are compared]"
)
@click.option("--probe", is_flag=True, help="Compare what servers compute with the fingerprint in the version's metadata.")
@click.option("--timeout", type=_SECONDS, default=180.0, show_default=True, metavar="SEC", help="For all of it, seconds.")
@_TOKEN
@json_option
def update(
    servers: tuple[str, ...],
    source: str,
    version: str | None,
    pause: PauseMode | None,
    no_verify: bool,
    probe: bool,
    timeout: float,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Stage a version on all servers, while they serve as before; when all have it, commit it on all.

    If one server cannot stage it, none is changed. SOURCE is opened by the servers, so it must mean the same to all of them.

    Exit status:
      0  all servers serve it
      1  a server failed: the message lists all that did, why, and what they serve
      2  the call itself is wrong: a version, a source, a URL

    Examples:
      weightcast vllm update --server http://gen-0:8000 --server http://gen-1:8000 --source file:///mnt/weights
      weightcast vllm update --server http://gen-0:8000 --source http://trainer:8300 --version step_119 --pause keep
    """
    done = _fleet(servers, token_file).update(
        version, source, pause=pause, verify_checksum=not no_verify, timeout=timeout, probe=probe
    )

    def human(console: Console) -> None:
        console.print(
            f"{len(done.servers)} server(s) serve {done.version} after {done.seconds:.2f} s"
            + (", and compute what it must" if done.probed else "")
        )
        rows = table("server", "staged in", "committed in", "paused for", right=("staged in", "committed in", "paused for"))
        for one in done.servers:
            paused = "-" if one.pause_s is None else f"{one.pause_s:.3f} s"
            rows.add_row(one.url, f"{one.stage_s:.3f} s", f"{one.commit_s:.3f} s", paused)
        console.print(rows)

    emit(as_json, done, human)


@vllm.command(short_help="What servers serve and have staged.")
@_SERVER
@click.option("--timeout", type=_SECONDS, default=30.0, show_default=True, metavar="SEC", help="For their answers, seconds.")
@_TOKEN
@json_option
def status(servers: tuple[str, ...], timeout: float, token_file: Path | None, as_json: bool) -> int:
    """What every rank of every server serves, has staged, and what went wrong there the last time.

    Exit status:
      0  all servers answered
      1  a server did not, or one of its ranks has FAILED
      2  the call itself is wrong

    Examples:
      weightcast vllm status --server http://gen-0:8000 --server http://gen-1:8000 --token-file token.txt
    """
    told = _fleet(servers, token_file).status(timeout=timeout)
    silent = {url: ranks for url, ranks in told.items() if isinstance(ranks, WeightcastError)}
    answers = {url: ranks for url, ranks in told.items() if not isinstance(ranks, WeightcastError)}

    def human(console: Console) -> None:
        rows = table("server", "rank", "state", "version", "root", "staged", "last error", right=("rank",))
        for url, ranks in answers.items():
            for rank in ranks:
                problem = f"{rank.error.code}: {rank.error.message.partition(chr(10))[0]}" if rank.error else "-"
                root = short(rank.root_digest) if rank.root_digest else "-"
                rows.add_row(url, str(rank.rank), rank.state, rank.version or "-", root, rank.staged or "-", problem)
        for url, error in silent.items():
            rows.add_row(url, "-", "-", "-", "-", "-", f"{error.code}: {error}")
        console.print(rows)

    found: list[dict[str, object]] = [{"url": url, "ranks": ranks} for url, ranks in answers.items()]
    found += [{"url": url, "error": {"code": one.code, "message": str(one)}} for url, one in silent.items()]
    emit(as_json, {"servers": found}, human)
    failed = any(rank.state == "FAILED" for ranks in answers.values() for rank in ranks)
    return 1 if silent or failed else 0


def _fleet(servers: tuple[str, ...], token_file: Path | None) -> VllmFleet:
    from weightcast.fleet.vllm_fleet import VllmFleet  # noqa: PLC0415 - clients are slow to import
    from weightcast.transports.http.access import read_token  # noqa: PLC0415

    return VllmFleet(servers, token=None if token_file is None else read_token(token_file))
