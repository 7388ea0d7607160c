"""What several ranks say, as one: their results, or one error that names every rank's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightcast.errors import DeadlineExceeded, UpdateCancelled, WeightcastError, rebuilt

_CONSEQUENCES = (UpdateCancelled.code, DeadlineExceeded.code)  # what other ranks say after one has failed


def joined_error(what: str, errors: Mapping[int, tuple[str, str]], ranks: int) -> WeightcastError:
    """The errors (code and message) of some ranks as one, of the kind that the first had which was not told to stop.

    That one comes first, and what several ranks say in the same words comes once.
    """
    said: dict[tuple[str, str], list[int]] = {}
    for rank, error in sorted(errors.items()):
        said.setdefault(error, []).append(rank)
    ordered = sorted(said, key=lambda error: error[0] in _CONSEQUENCES)
    listed = "\n".join(f"{named_ranks(said[error])}: {error[1]}" for error in ordered)
    return rebuilt(ordered[0][0], f"{what} failed on {len(errors)} of {ranks} rank(s): {listed}")


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 1`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
