"""Commands: executed once by every rank, in their order, and done when all have answered."""

from __future__ import annotations

import asyncio

import pytest

from weightcast.engines.embedded.messages import ClearCache, Describe
from weightcast.errors import Corrupt, DeadlineExceeded, InvalidInput

from .replicas import FIRST, PATIENCE_S, in_loop, model_dir, run_root, running, write_script

__all__ = ["model_dir", "run_root"]  # fixtures


@in_loop
async def test_results_come_in_the_order_of_the_ranks(model_dir):
    async with running(model_dir, ranks=3) as replica:
        results = await replica.command(Describe(), timeout_s=PATIENCE_S)
        assert [result["rank"] for result in results] == [0, 1, 2]
        assert tuple(result["pid"] for result in results) == replica.status.pids


@in_loop
async def test_commands_run_one_after_the_other_in_the_order_of_the_calls(model_dir):
    async with running(model_dir) as replica:
        all_results = await asyncio.gather(*(replica.command(ClearCache(), timeout_s=PATIENCE_S) for _ in range(20)))
        for number, results in enumerate(all_results, start=FIRST):
            assert [result["command"] for result in results] == [number, number]
            assert [result["received"] for result in results] == [list(range(FIRST, number + 1))] * 2


@in_loop
async def test_a_command_that_was_not_answered_is_sent_again_and_executed_once(model_dir):
    write_script(model_dir, rank_1={"commands": "deaf once"})
    async with running(model_dir) as replica:
        first, second = await replica.command(Describe(), timeout_s=3)
        assert (first["received"], second["received"]) == ([FIRST], [FIRST, FIRST])
        assert second["executed"] == 1


@in_loop
async def test_a_deadline_names_the_ranks_that_did_not_answer(model_dir):
    write_script(model_dir, rank_0={"commands": "ignore"}, rank_2={"commands": "ignore"})
    async with running(model_dir, ranks=3) as replica:
        with pytest.raises(
            DeadlineExceeded, match=rf"command Describe \(id {FIRST}\) on rank\(s\) 0, 2 did not finish within 0.3 s"
        ):
            await replica.command(Describe(), timeout_s=0.3)
        assert replica.status.healthy


@in_loop
async def test_late_and_repeated_acknowledgements_are_not_taken_for_others(model_dir):
    write_script(model_dir, rank_0={"commands": "twice"}, rank_1={"commands": "late"})
    async with running(model_dir) as replica:
        with pytest.raises(DeadlineExceeded, match=r"rank\(s\) 1 "):
            await replica.command(Describe(), timeout_s=0.3)
        for number in range(FIRST + 1, FIRST + 4):
            results = await replica.command(Describe(), timeout_s=PATIENCE_S)
            assert [result["command"] for result in results] == [number, number]


@in_loop
async def test_the_errors_of_all_ranks_are_told_as_one_of_their_kind(model_dir):
    write_script(model_dir, rank_0={"commands": "error"}, rank_2={"commands": "error"})
    async with running(model_dir, ranks=3) as replica:
        with pytest.raises(Corrupt) as caught:
            await replica.command(ClearCache(), timeout_s=PATIENCE_S)
        assert str(caught.value) == (
            "command ClearCache failed on 2 of 3 rank(s): rank 0: rank 0 does not like ClearCache."
            "\nrank 2: rank 2 does not like ClearCache."
        )
        assert replica.status.healthy


@in_loop
async def test_waiting_for_an_earlier_command_has_a_deadline_too(model_dir):
    write_script(model_dir, rank_0={"commands": "ignore"})
    async with running(model_dir, ranks=1) as replica:
        first = asyncio.create_task(replica.command(Describe(), timeout_s=3600))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceeded, match="ClearCache, waiting for an earlier one"):
            await replica.command(ClearCache(), timeout_s=0.1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(DeadlineExceeded, match=rf"\(id {FIRST + 1}\) on rank\(s\) 0"):  # the way is free again
            await replica.command(Describe(), timeout_s=0.1)


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
@in_loop
async def test_a_timeout_that_is_none_is_refused(model_dir, timeout_s):
    async with running(model_dir, ranks=1) as replica:
        with pytest.raises(InvalidInput, match="timeout"):
            await replica.command(Describe(), timeout_s=timeout_s)
        (result,) = await replica.command(Describe(), timeout_s=PATIENCE_S)
        assert result["received"] == [FIRST]
