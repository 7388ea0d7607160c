"""What several ranks say, as one: their results, or one error that names every rank's."""

from __future__ import annotations

from collections.abc import Mapping

from weightcast.errors import DeadlineExceeded, UpdateCancelled, WeightcastError, rebuilt

_CONSEQUENCES = (UpdateCancelled.code, DeadlineExceeded.code)  # what other ranks say after one has failed


def joined_error(what: str, errors: Mapping[int, tuple[str, str]], ranks: int) -> WeightcastError:
    """The errors (code and message) of some ranks as one, of the kind that the first had which was not told to stop."""
    causes = [rank for rank, (code, _) in errors.items() if code not in _CONSEQUENCES] or list(errors)
    listed = "".join(f"\n  rank {rank}: {message}" for rank, (_, message) in sorted(errors.items()))
    return rebuilt(errors[causes[0]][0], f"{what} failed on {len(errors)} of {ranks} rank(s):{listed}")
