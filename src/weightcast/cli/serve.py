"""`weightcast serve`: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from weightcast import config, logs
from weightcast.cli.completion import directories
from weightcast.cli.help import Command
from weightcast.cli.output import Size
from weightcast.engines.base import UpdateRequest
from weightcast.engines.embedded.settings import Device, Dtype, EngineSettings, Experts, Graphs
from weightcast.errors import InvalidInput, MissingExtra, NotFound
from weightcast.transports.allowed import AllowedSources
from weightcast.transports.legacy_config import LegacyConfig
from weightcast.transports.registry import missing_directory

log = logs.get(__name__)

_COUNT = click.IntRange(min=1)
_FILE = click.Path(path_type=Path, dir_okay=False)
_SECONDS = click.FloatRange(min=0, min_open=True)
_ENGINE = EngineSettings(model_dir="")


_SECTIONS = {
    "Model": ("--ranks", "--device", "--dtype", "--experts", "--graphs", "--threads", "--served-model-name"),
    "Draft model": ("--draft", "--draft-tokens", "--draft-names"),
    "Weights": ("--source", "--follow", "--follow-poll", "--state-dir", "--rsync-config"),
    "HTTP": ("--host", "--port", "--port-file"),
    "Access": ("--api-key-file", "--control-token-file", "--allow-source", "--allow-host", "--legacy-get"),
    "Memory and load": (
        "--scrub-share",
        "--kv-cache",
        "--block-size",
        "--no-prefix-cache",
        "--max-length",
        "--max-batch",
        "--max-queue",
    ),
    "Deadlines": ("--heartbeat", "--start-timeout", "--request-timeout", "--drain-timeout"),
}


@click.command(cls=Command, sections=_SECTIONS, short_help="Serve a model over HTTP, OpenAI-compatible.")
@click.argument("model_dir", type=click.Path(path_type=Path), shell_complete=directories)
@click.option("--ranks", type=_COUNT, default=_ENGINE.ranks, show_default=True, help="Processes that share the model.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all of this machine's."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--port-file", type=click.Path(path_type=Path, dir_okay=False), help="Write the port's number here while serving."
)
@click.option("--api-key-file", type=_FILE, help="What callers of /v1/completions and the like must show.")
@click.option(
    "--control-token-file", type=_FILE, help="What callers of weights and control must show; without it: loopback only."
)
@click.option(
    "--allow-source",
    multiple=True,
    metavar="PATTERN",
    help="A source that requests may name, beside --source: file:///mnt/runs/* (all below), http://depot:8300.",
)
@click.option("--allow-host", multiple=True, metavar="NAME", help="A name that control may be called by without a token.")
@click.option(
    "--legacy-get", is_flag=True, help="Let the GETs of /clear_load_weight and /update_model_weight change things."
)
@click.option("--served-model-name", help="What requests call the model.  [default: the name of MODEL_DIR]")
@click.option("--draft", type=click.Path(path_type=Path), help="Directory of a draft (MTP) model: guesses tokens ahead.")
@click.option("--draft-tokens", type=_COUNT, default=_ENGINE.draft_tokens, show_default=True, help="Guessed at a time.")
@click.option(
    "--draft-names",
    multiple=True,
    metavar="PATTERN",
    help="Tensors of a version that feed the draft model, as a pattern; without it the draft stays as it is.",
)
@click.option("--source", metavar="URL", help="Where updates come from unless they say otherwise: a store, or its URL.")
@click.option("--follow", is_flag=True, help="Take each new version of --source by itself.")
@click.option(
    "--follow-poll",
    type=_SECONDS,
    default=1.0,
    show_default=True,
    metavar="SEC",
    help="How often --follow looks for a new version.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the committed version and the pin here, and start with them again.",
)
@click.option(
    "--rsync-config",
    metavar="JSON|@FILE",
    help="Transfer configuration of the legacy system, for --source and updates (`weightcast docs legacy-config`).",
)
@click.option(
    "--device", type=click.Choice(get_args(Device)), default=_ENGINE.device, show_default=True, help="Where it runs."
)
@click.option(
    "--dtype",
    type=click.Choice(get_args(Dtype)),
    default=_ENGINE.dtype,
    show_default=True,
    help="To compute in; auto: the checkpoint's own.",
)
@click.option(
    "--experts",
    type=click.Choice(get_args(Experts)),
    default=_ENGINE.experts,
    show_default=True,
    help="Whether each rank holds a part of the experts, or all.",
)
@click.option("--max-length", type=_COUNT, help="Tokens of prompt and answer together.  [default: the model's own limit]")
@click.option("--max-batch", type=_COUNT, default=_ENGINE.max_batch, show_default=True, help="Requests computed at a time.")
@click.option("--max-queue", type=_COUNT, default=256, show_default=True, help="Requests in flight; more get status 429.")
@click.option(
    "--kv-cache", type=Size(), default=_ENGINE.cache_nbytes, show_default="256MiB", help="Memory of the KV cache, all ranks."
)
@click.option("--block-size", type=_COUNT, default=_ENGINE.block_size, show_default=True, help="Tokens per KV block.")
@click.option("--no-prefix-cache", is_flag=True, help="Compute every prompt from its first token.")
@click.option(
    "--graphs",
    type=click.Choice(get_args(Graphs)),
    default=_ENGINE.graphs,
    show_default=True,
    help="Captured step functions: compile (torch.compile) or cuda (CUDA graphs).",
)
@click.option("--threads", type=_COUNT, help="Of each rank on a CPU.  [default: the cores divided by the ranks]")
@click.option(
    "--scrub-share",
    type=click.FloatRange(min=0, max=1),
    default=_ENGINE.scrub_share,
    show_default=True,
    metavar="X",
    help="Of one core, that each rank takes to compare live weights with what was committed; 0: none.",
)
@click.option(
    "--heartbeat",
    type=_SECONDS,
    default=_ENGINE.heartbeat_s,
    show_default=True,
    metavar="SEC",
    help="A rank that is silent or stands still for this long is given up, and all are started again.",
)
@click.option(
    "--start-timeout",
    type=_SECONDS,
    default=_ENGINE.start_timeout_s,
    show_default=True,
    metavar="SEC",
    help="For the ranks to load the model.",
)
@click.option(
    "--request-timeout",
    type=_SECONDS,
    default=600.0,
    show_default=True,
    metavar="SEC",
    help="For every request; one may ask for less.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SEC",
    help="How long running requests may go on after SIGTERM or SIGINT.",
)
def serve(
    model_dir: Path,
    ranks: int,
    host: str,
    port: int,
    port_file: Path | None,
    api_key_file: Path | None,
    control_token_file: Path | None,
    allow_source: tuple[str, ...],
    allow_host: tuple[str, ...],
    legacy_get: bool,
    served_model_name: str | None,
    draft: Path | None,
    draft_tokens: int,
    draft_names: tuple[str, ...],
    source: str | None,
    follow: bool,
    follow_poll: float,
    state_dir: Path | None,
    rsync_config: str | None,
    device: Device,
    dtype: Dtype,
    experts: Experts,
    max_length: int | None,
    max_batch: int,
    max_queue: int,
    kv_cache: int,
    block_size: int,
    no_prefix_cache: bool,
    graphs: Graphs,
    threads: int | None,
    scrub_share: float,
    heartbeat: float,
    start_timeout: float,
    request_timeout: float,
    drain_timeout: float,
) -> None:
    """Serve the model in MODEL_DIR (config.json, safetensors, tokenizer.json) until SIGTERM or SIGINT.

    The port is taken at once; /health answers 503 until all ranks have loaded the model, when the address is printed. A
    rank that dies or hangs ends the requests in flight with an error, and all ranks are started again. SIGTERM and SIGINT
    let running requests finish; a second one does not.

    New weights are put in while it serves: /v1/update_weights fetches, verifies and commits a version on all ranks, or on
    none. An update goes on if its caller goes away; DELETE /v1/updates/ID cancels it.

    With --follow, a rollback or an update to a version that is not the newest pins the replica. It stays there until a
    version is published that is newer than the newest one was then, or until /v1/weights/follow is called. The pin survives
    the loss of ranks and, with --state-dir, of the server.

    Paths:
      generate  POST /v1/completions /v1/chat/completions
      look      GET  /v1/models /v1/stats /health /ping /metrics
      weights   POST /v1/update_weights
                GET  /v1/updates/ID   DELETE /v1/updates/ID
                GET  /v1/weights
                POST /v1/weights/verify /v1/weights/rollback /v1/weights/recover /v1/weights/digest
                POST /v1/weights/follow
      control   POST /v1/pause /v1/resume /v1/abort_requests /v1/sleep /v1/wakeup
                GET  /v1/is_paused
      legacy    POST /clear_load_weight /update_model_weight (GET with --legacy-get)

    Anyone who reaches the port may generate, unless there is an API key. Weights, control and legacy calls want the control
    token, or come from this machine. Calls that POST there are JSON, and name no other sources than the configured and the
    allowed ones.

    Exit status:
      0  drained after a signal
      1  the model could not be loaded or the ranks could not be started
      2  the call itself is wrong: a directory, a source, an option, a port in use

    Examples:
      weightcast serve ./checkpoints/100
      weightcast serve ./checkpoints/100 --ranks 2 --port 8000 --source /mnt/weights --follow
      weightcast serve ./checkpoints/100 --host 0.0.0.0 --api-key-file key.txt --control-token-file token.txt
      curl --json '{"version": "step_101"}' localhost:8000/v1/update_weights

    Environment:
      WEIGHTCAST_API_KEY        the key itself, if there is no --api-key-file
      WEIGHTCAST_CONTROL_TOKEN  the token itself, if there is no --control-token-file
    """
    if follow and source is None:
        raise click.UsageError("--follow needs --source: where new versions come from.")
    if rsync_config is not None and source is None:
        raise click.UsageError("--rsync-config needs --source: a depot that it is about.")
    if draft_names and draft is None:
        raise click.UsageError("--draft-names needs --draft: the model that they feed.")
    try:
        from weightcast.control.server import serve as run  # noqa: PLC0415 - extras, and slow to import
        from weightcast.control.settings import ServerSettings, Token  # noqa: PLC0415
        from weightcast.control.tokenizer import Tokenizer  # noqa: PLC0415
        from weightcast.engines.embedded.replica.replica import Replica  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "a package", "serve", "weightcast serve") from error
    update = UpdateRequest()
    if source is not None:
        source = _absolute(source)
    if source is not None and rsync_config is not None:
        source, update = _configured(source, rsync_config)
    if source is not None:
        _check_source(source, follow=follow)
    engine = EngineSettings(
        model_dir=str(model_dir.absolute()),
        draft_dir=str(draft.absolute()) if draft is not None else None,
        draft_names=draft_names,
        source=source,
        state_dir=str(state_dir.absolute()) if state_dir is not None else None,
        ranks=ranks,
        device=device,
        dtype=dtype,
        experts=experts,
        block_size=block_size,
        cache_nbytes=kv_cache,
        max_length=max_length,
        max_batch=max_batch,
        max_step_tokens=max(_ENGINE.max_step_tokens, max_batch),
        prefix_cache=not no_prefix_cache,
        draft_tokens=draft_tokens,
        graphs=graphs,
        threads=threads,
        heartbeat_s=heartbeat,
        scrub_share=scrub_share,
        start_timeout_s=start_timeout,
    )
    server = ServerSettings(
        model_name=served_model_name or _name(model_dir),
        host=host,
        port=port,
        port_file=port_file,
        request_timeout_s=request_timeout,
        drain_timeout_s=drain_timeout,
        max_choices=min(128, max_queue),
        follow=follow,
        follow_poll_s=follow_poll,
        follow_timeout_s=update.timeout_s,
        update=update,
        api_key=Token.read(api_key_file, config.API_KEY),
        control_token=Token.read(control_token_file, config.CONTROL_TOKEN),
        sources=AllowedSources(filter(None, (source, *map(_absolute, allow_source)))),
        allow_hosts=allow_host,
        legacy_get=legacy_get,
    )
    tokenizer = Tokenizer.read(model_dir)
    run(
        lambda: Replica(engine, max_requests=max_queue),
        tokenizer,
        server,
        lambda url: click.echo(f"serving {model_dir} at {url}"),
    )


def _name(model_dir: Path) -> str:
    """The directory's name as it was given; that of its target only for . and .. (a link called "latest" is "latest")."""
    return model_dir.name if model_dir.name not in ("", "..") else model_dir.resolve().name


def _absolute(source: str) -> str:
    """A directory as every rank can open it, wherever it runs; a URL as it is."""
    return source if "://" in source else str(Path(source).absolute())


def _check_source(source: str, *, follow: bool) -> None:
    """Refuse a source that cannot be opened. One that is followed may be made later, by a trainer that starts later."""
    missing = missing_directory(source)
    if missing is None:
        return
    if not follow:
        raise NotFound(f"the source {source} is not there: {missing} is not a directory. Publish to it first, or --follow.")
    log.warning("source not there yet", source=source, why="it is taken from once its directory exists")


def _configured(source: str, config: str) -> tuple[str, UpdateRequest]:
    """The source and the updates that a legacy configuration, or @ and a file that holds one, asks for."""
    if config.startswith("@"):
        try:
            config = Path(config[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the legacy configuration {config[1:]} cannot be read: {error}.") from error
    settings = LegacyConfig.parse(config)
    for note in settings.notes:
        if logs.as_json():
            log.warning("configuration noted", note=note)
        else:
            click.echo(f"note: {note}", err=True)
    defaults = UpdateRequest()
    update = UpdateRequest(
        transfer_mode=settings.asked_mode or defaults.transfer_mode,
        timeout_s=defaults.timeout_s if settings.timeout_s is None else settings.timeout_s,
        release_cache=bool(settings.release_cache),
    )
    return settings.applied_to(source), update
