"""`weightcast model`: checkpoints to run and test with, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from weightcast.cli.completion import directories
from weightcast.cli.help import Group
from weightcast.cli.output import emit, json_option, size
from weightcast.engines.embedded.drafts import DRAFT_KINDS, DraftKind, init_draft
from weightcast.engines.embedded.presets import PRESETS, DtypeName, Preset, init_checkpoint, step_checkpoint

directory_argument = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path), shell_complete=directories)
seed_option = click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Which random weights.")


@click.group(cls=Group, short_help="Make random checkpoints to run and test with.")
def model() -> None:
    """Make random checkpoints of the Qwen3 architecture, to try things with: they need no download.

    Exit status:
      0  written
      1  the storage failed
      2  the call itself is wrong: a directory that is not empty, no checkpoint to draft for

    Examples:
      weightcast model init /tmp/tiny --preset tiny
      weightcast model step /tmp/tiny-1 --from /tmp/tiny
      weightcast model draft /tmp/tiny-draft --for /tmp/tiny --kind mtp
      weightcast serve /tmp/tiny --draft /tmp/tiny-draft
    """


@model.command("init", short_help="Write a random checkpoint.")
@directory_argument
@click.option(
    "--preset", type=click.Choice(PRESETS), default="tiny", show_default=True, help="How large, and of which kind."
)
@seed_option
@click.option("--untied", is_flag=True, help="Give the head weights of its own.")
@click.option("--dtype", type=click.Choice(get_args(DtypeName)), default="float32", show_default=True, help="Element type.")
@json_option
def init(directory: Path, preset: Preset, seed: int, untied: bool, dtype: DtypeName, as_json: bool) -> None:
    """Write a random checkpoint into DIR, which must not exist or be empty: config, safetensors and a byte-level tokenizer.

    \b
    tiny   2 layers, hidden size 64
    small  8 layers, hidden size 512, 25 million parameters
    moe    3 layers, the last two with 8 experts, of which each token visits 2

    It loads here and with `transformers`. The same preset and seed always give the same weights.

    Exit status:
      0  written
      1  the storage failed
      2  DIR is not empty

    Examples:
      weightcast model init /tmp/tiny
      weightcast model init /tmp/moe --preset moe --seed 7 --dtype bfloat16
    """
    nbytes = init_checkpoint(directory, preset, seed=seed, tied=not untied, dtype=dtype)
    made = {
        "directory": str(directory),
        "preset": preset,
        "seed": seed,
        "tied": not untied,
        "dtype": dtype,
        "nbytes": nbytes,
    }
    emit(as_json, made, lambda console: console.print(f"{directory}: a random {preset} model, {size(nbytes)} of weights"))


@model.command("step", short_help="Write a copy of a checkpoint in which some weights differ.")
@directory_argument
@click.option(
    "--from", "base_dir", metavar="DIR", type=click.Path(path_type=Path), required=True, help="The checkpoint to change."
)
@click.option(
    "--share", type=click.FloatRange(0, 1), default=0.01, show_default=True, help="How many of the weights differ."
)
@seed_option
@json_option
def step(directory: Path, base_dir: Path, share: float, seed: int, as_json: bool) -> None:
    """Write a copy of a checkpoint into DIR with a share of its weights changed in the last bit, as after a training step.

    It trains nothing. It makes the next version to try updates and deltas with. DIR must not exist or be empty.

    Exit status:
      0  written
      1  the storage failed
      2  DIR is not empty, or there is no checkpoint to change

    Examples:
      weightcast model step /tmp/tiny-1 --from /tmp/tiny
      weightcast model step /tmp/tiny-2 --from /tmp/tiny-1 --share 0.05 --seed 2
    """
    nbytes = step_checkpoint(directory, base_dir, share=share, seed=seed)
    made = {"directory": str(directory), "from": str(base_dir), "share": share, "seed": seed, "nbytes": nbytes}
    emit(as_json, made, lambda console: console.print(f"{directory}: {base_dir} with {share:.2%} of the weights changed"))


@model.command("draft", short_help="Write a draft model for a checkpoint.")
@directory_argument
@click.option(
    "--for", "main_dir", metavar="DIR", type=click.Path(path_type=Path), required=True, help="The checkpoint to draft for."
)
@click.option(
    "--kind", type=click.Choice(DRAFT_KINDS), default="plain", show_default=True, help="A whole model, or an MTP head."
)
@click.option(
    "--noise",
    type=click.FloatRange(min=0),
    default=0.05,
    show_default=True,
    help="How much its weights differ; 0 is a copy.",
)
@seed_option
@json_option
def draft(directory: Path, main_dir: Path, kind: DraftKind, noise: float, seed: int, as_json: bool) -> None:
    """Write a draft model for speculative decoding into DIR, which must not exist or be empty.

    It is a copy of the main model with some noise, so that it guesses well enough to see drafts accepted and refused.

    Exit status:
      0  written
      1  the storage failed
      2  DIR is not empty, or there is no checkpoint to draft for

    Examples:
      weightcast model draft /tmp/tiny-draft --for /tmp/tiny --kind mtp
    """
    nbytes = init_draft(directory, main_dir, kind, noise=noise, seed=seed)
    made = {"directory": str(directory), "for": str(main_dir), "kind": kind, "noise": noise, "seed": seed, "nbytes": nbytes}
    emit(
        as_json,
        made,
        lambda console: console.print(f"{directory}: a {kind} draft for {main_dir}, {size(nbytes)} of weights"),
    )
