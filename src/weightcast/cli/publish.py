"""`weightcast publish`: a checkpoint directory becomes a version."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click
from rich.console import Console

from weightcast.cli.completion import directories
from weightcast.cli.help import Command
from weightcast.cli.output import Size, emit, json_option, progress, size
from weightcast.delta import Slicing
from weightcast.delta.container import MAX_SLICES
from weightcast.store.checkpoint import Checkpoint
from weightcast.store.delta_policy import DeltaPolicy, Packed
from weightcast.store.store import PART_NBYTES, Mode, Store
from weightcast.tensors.digest import ALGORITHMS, DEFAULT, Algorithm
from weightcast.tensors.dtypes import DType
from weightcast.tensors.placing import converts

_POLICY = DeltaPolicy()


_SECTIONS = {
    "Delta or full": ("--mode", "--full-every", "--max-share", "--packing", "--link"),
    "Names and dtypes": ("--dtype", "--keep-dtype", "--strip-wrappers"),
    "What is written": ("--step", "--part-size", "--digest"),
}


@click.command(cls=Command, sections=_SECTIONS, short_help="Publish a checkpoint directory as a version.")
@click.argument("store", type=click.Path(path_type=Path), shell_complete=directories)
@click.argument("version")
@click.argument("checkpoint_dir", type=click.Path(path_type=Path), shell_complete=directories)
@click.option(
    "--mode",
    type=click.Choice(["full", "delta", "auto"]),
    default="auto",
    show_default=True,
    help="What to write; auto takes a delta on the newest version where it can, delta fails where it cannot.",
)
@click.option(
    "--full-every",
    type=click.IntRange(min=1),
    default=_POLICY.full_every,
    show_default=True,
    help="Versions: of so many in a row at least one is full.",
)
@click.option(
    "--max-share",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=_POLICY.max_share,
    show_default=True,
    help="A delta of this share of the full size, or more, is published as a full version.",
)
@click.option(
    "--packing",
    type=click.Choice(get_args(Packed)),
    default=_POLICY.packing,
    show_default=True,
    help="How a delta is packed: gaps is written and applied faster, classes is smaller; auto follows --link.",
)
@click.option(
    "--slices",
    type=click.IntRange(min=1, max=MAX_SLICES),
    help="Cut a delta into so many parts for tensor-parallel ranks, by the usual names of decoders.  [default: not cut]",
)
@click.option(
    "--link",
    type=Size(),
    help="Per second, of the slowest link to a receiver: the slower, the more changes pay as a delta.  [default: no limit]",
)
@click.option(
    "--dtype",
    type=click.Choice([one.value for one in DType if converts(one, DType.F32)]),
    help="Convert floating-point tensors of 16 bits or more to this.  [default: as they are]",
)
@click.option("--keep-dtype", multiple=True, metavar="PATTERN", help="Tensors that --dtype leaves as they are; repeatable.")
@click.option(
    "--strip-wrappers",
    is_flag=True,
    help="Remove what torch.compile, activation checkpointing, FSDP1 and DDP put into names.",
)
@click.option("--finite", is_flag=True, help="Refuse a version that has a NaN or an infinity.")
@click.option("--step", type=int, help="The training step.  [default: the number at the end of VERSION]")
@click.option("--part-size", type=Size(), default=PART_NBYTES, show_default="1GiB", help="Largest size of a part file.")
@click.option(
    "--digest",
    type=click.Choice(ALGORITHMS),
    default=DEFAULT,
    show_default=True,
    help="How bytes are proved: blake3 where the storage is not trusted.",
)
@json_option
def publish(
    store: Path,
    version: str,
    checkpoint_dir: Path,
    mode: Mode,
    full_every: int,
    max_share: float,
    packing: Packed,
    slices: int | None,
    link: int | None,
    dtype: str | None,
    keep_dtype: tuple[str, ...],
    strip_wrappers: bool,
    finite: bool,
    step: int | None,
    part_size: int,
    digest: Algorithm,
    as_json: bool,
) -> None:
    """Publish the safetensors files of CHECKPOINT_DIR as VERSION of STORE.

    The small files beside them (config, tokenizer) come along, so that the version opens as a checkpoint. STORE is created
    if needed. An interrupted publish leaves the store as it was: engines see the whole version, or none of it.

    Where few weights changed since the newest version, only those are written, as a delta on it. VERSION is any name that
    is not taken; a number at its end is the training step.

    Exit status:
      0  published
      1  a version of this name exists, a delta was asked for and is not possible, another process publishes to the
         store, or the storage failed; the store is as it was
      2  the call itself is wrong: no checkpoint there

    Examples:
      weightcast publish /mnt/weights step_100 ./checkpoints/100
      weightcast publish /mnt/weights step_101 ./checkpoints/101 --mode delta --json
      weightcast publish /mnt/weights release ./final --mode full --digest blake3
      weightcast publish /mnt/weights step_102 ./checkpoints/102 --dtype BF16 --keep-dtype '*.router.weight'
    """
    total = Checkpoint(checkpoint_dir).nbytes
    slicing = Slicing() if slices is None else Slicing.decoder(slices)
    policy = DeltaPolicy(
        full_every=full_every, max_share=max_share, packing=packing, link_nbytes_per_s=link, slicing=slicing
    )
    with progress(f"publish {version}", total, as_json=as_json) as advance:
        manifest = Store(store, delta=policy).publish_checkpoint(
            version,
            checkpoint_dir,
            mode,
            progress=advance,
            dtype=dtype,
            keep_dtype=keep_dtype,
            strip_wrappers=strip_wrappers,
            finite=finite,
            step=step,
            part_nbytes=part_size,
            algorithm=digest,
        )

    def human(console: Console) -> None:
        written = f"in {len(manifest.parts)} part(s)"
        if manifest.base is not None and manifest.kind == "delta":
            written = f"as a delta of {size(manifest.payload_nbytes)} on {manifest.base.version}"
        console.print(
            f"published {manifest.version}: {len(manifest.tensors)} tensors, {size(manifest.nbytes)} {written}, "
            f"root {manifest.root_digest}"
        )

    summary = {
        "version": manifest.version,
        "step": manifest.step,
        "kind": manifest.kind,
        "tensors": len(manifest.tensors),
        "nbytes": manifest.nbytes,
        "parts": len(manifest.parts),
        "base": manifest.base.version if manifest.base else None,
        "payload_nbytes": manifest.payload_nbytes or None,
        "root_digest": manifest.root_digest,
    }
    emit(as_json, summary, human)
