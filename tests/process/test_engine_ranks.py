"""Ranks at work: groups made once, nothing said while idle, commands on all ranks alike, experts recorded and replayed."""

import asyncio
from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine_reference import PROMPTS
from weightcast.engines.embedded.messages import ClearCache, Describe, Routing
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import ReplicaFailed

from .engine_runs import ask, ask_all, running

PER_COMMAND = 2  # an idle engine's command is one message, and one more sends the peers back to sleep


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "one-layer"
    init_checkpoint(directory, "tiny", num_hidden_layers=1)
    return directory


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "moe"
    init_checkpoint(directory, "moe")
    return directory


@pytest.fixture(scope="module")
def pair(small_model):
    """Does something with two ranks that several tests use, one after the other."""
    with kept_running(small_model, ranks=2, blocks=200, max_length=600) as do:
        yield do


@pytest.fixture(scope="module")
def moe_pair(moe_model):
    """The same with experts, divided among the ranks."""
    with kept_running(moe_model, ranks=2, experts="sharded") as do:
        yield do


@contextmanager
def kept_running(model_dir, **settings):
    with asyncio.Runner() as runner:
        replica = running(model_dir, **settings)
        started = runner.run(replica.__aenter__())
        try:
            yield lambda act, *arguments: runner.run(act(started, *arguments))
        finally:
            runner.run(replica.__aexit__(None, None, None))


async def describe(replica):
    return await replica.command(Describe(), timeout_s=60)


async def many_steps(replica, steps, tokens):
    """Run so many steps on two ranks, with a command now and then; the counters after a tenth of them and at the end."""
    begun = (await describe(replica))[0]["steps"]
    made, early = [], None
    while not made or made[-1][0]["steps"] - begun < steps:
        await ask_all(replica, PROMPTS[:2], max_tokens=tokens)
        made.append(await describe(replica))
        if early is None and made[-1][0]["steps"] - begun >= steps // 10:
            early = made[-1]
    return early, made[-1]


def check_flat(early, late, steps):
    assert late[0]["steps"] == late[1]["steps"]
    assert late[0]["steps"] - early[0]["steps"] >= 0.8 * steps
    for before, after in zip(early, late, strict=True):
        assert before["groups_made"] == after["groups_made"] == 1
        grown = after["rss_nbytes"] - before["rss_nbytes"]
        assert grown < 4 << 20, f"rank {after['rank']} grew by {grown} bytes in {after['steps'] - before['steps']} steps"
    assert late[0]["collectives"] == late[1]["collectives"]


@pytest.mark.slow
def test_choosing_among_many_tokens_for_many_requests_is_not_taken_for_a_hang(tmp_path):
    init_checkpoint(tmp_path / "wide", "tiny", num_hidden_layers=1, vocab_size=151_936)

    async def choosing():
        async with running(tmp_path / "wide", ranks=2, max_batch=256, heartbeat_s=2.0) as replica:
            asked = [ask(replica, [number], max_tokens=1, temperature=1.0, top_p=0.95) for number in range(256)]
            return await asyncio.gather(*asked), replica.status.restarts

    answers, restarts = asyncio.run(choosing())
    assert {(answer.last.finish, answer.last.reason) for answer in answers} == {("length", None)}
    assert restarts == 0


def test_groups_stay_one_and_memory_flat_over_many_steps(pair):
    check_flat(*pair(many_steps, 200, 40), 200)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_groups_stay_one_and_memory_flat_over_ten_thousand_steps(pair):
    early, late = pair(many_steps, 10_000, 500)
    print(early, late)
    check_flat(early, late, 10_000)


def test_an_idle_engine_runs_no_collective(pair):
    async def idle(replica):
        await ask(replica, PROMPTS[0])
        first = await describe(replica)
        await asyncio.sleep(2.5)  # longer than either loop waits at a time
        return first, await describe(replica)

    first, second = pair(idle)
    assert [after["collectives"] - before["collectives"] for before, after in zip(first, second, strict=True)] == [
        PER_COMMAND,
        PER_COMMAND,
    ]


def test_a_command_amid_requests_rides_on_a_step(pair):
    async def busy(replica):
        answers = asyncio.gather(*(ask(replica, prompt, max_tokens=300) for prompt in PROMPTS))
        await asyncio.sleep(0.2)
        told = [await describe(replica) for _ in range(20)]
        disturbed = await answers
        again = await ask_all(replica, PROMPTS, max_tokens=300)
        return told, disturbed, again, await describe(replica)

    told, disturbed, again, last = pair(busy)
    assert [answer.tokens for answer in disturbed] == [answer.tokens for answer in again]
    while_busy = [stats for stats in told if stats[0]["running"]]
    assert len(while_busy) > 2, "the commands came too late to show anything"
    for ranks in told:
        assert ranks[0]["commands"] == ranks[1]["commands"]
        assert ranks[0]["steps"] == ranks[1]["steps"], "a command was executed after different steps"
    first, final = while_busy[0], while_busy[-1]
    steps = final[0]["steps"] - first[0]["steps"]
    # a layer has two sums, the embedding one; then the logits, and the message itself: none for the commands between
    assert final[0]["collectives"] - first[0]["collectives"] == steps * 5
    assert last[0]["commands"] - told[0][0]["commands"] == 20


def test_clearing_the_cache_forgets_prefixes(pair):
    async def clear(replica):
        cached = []
        for turn in range(3):
            if turn == 2:
                assert await replica.command(ClearCache(), timeout_s=60) == [None, None]
            cached.append((await ask(replica, PROMPTS[2][::-1], max_tokens=2)).last.cached_tokens)  # asked by no other test
        return cached

    assert pair(clear) == [0, 80, 0]


async def replay_routing(replica):
    first = await ask(replica, PROMPTS[0], record_routing=True)
    await ask(replica, PROMPTS[0], record_routing=True)  # out of the prefix cache
    cached = await ask(replica, PROMPTS[0], record_routing=True)
    again = await ask(replica, PROMPTS[0], record_routing=True, replay=first.last.routing)
    other = Routing(shape=first.last.routing.shape, data=elsewhere(first.last.routing))
    moved = await ask(replica, PROMPTS[0], record_routing=True, replay=other)
    return first, cached, again, other, moved


def check_routing(first, cached, again, other, moved):
    assert first.last.routing.shape == (len(PROMPTS[0]) + len(first.tokens) - 1, 2, 2)
    assert cached.last.cached_tokens > 0
    assert first.last.routing == cached.last.routing == again.last.routing
    assert first.tokens == again.tokens
    assert moved.last.routing == other
    assert moved.tokens != first.tokens


def test_routing_is_recorded_and_replayed_on_two_ranks(moe_pair):
    check_routing(*moe_pair(replay_routing))


@pytest.mark.slow
def test_routing_is_recorded_and_replayed_on_two_ranks_that_have_all_experts(moe_model):
    with kept_running(moe_model, ranks=2, experts="replicated") as do:
        check_routing(*do(replay_routing))


def elsewhere(routing):
    experts = np.frombuffer(routing.data, dtype="<i2")
    return ((experts + 3) % 8).astype("<i2").tobytes()


@pytest.mark.parametrize(
    ("replay", "problem"),
    [
        (Routing(shape=(3, 1, 2), data=bytes(12)), "2 MoE layers, 2 experts per token"),
        (Routing(shape=(3, 2, 2), data=bytes(12)), "in 12 bytes does not fit"),
        (Routing(shape=(1, 2, 2), data=np.array([0, 1, 2, 8], "<i2").tobytes()), "outside of 0 to 7"),
    ],
)
def test_a_routing_that_does_not_fit_is_refused_and_nothing_else(moe_pair, replay, problem):
    async def refuse(replica):
        refused = await ask(replica, PROMPTS[3], replay=replay)
        return refused.last, (await ask(replica, PROMPTS[3], max_tokens=2)).last

    refused, after = moe_pair(refuse)
    assert (refused.finish, refused.refused) == ("error", True)
    assert problem in refused.reason
    assert after.finish == "length"


def test_weights_that_make_no_numbers_end_requests_and_not_the_replica(tmp_path, small_model):
    init_checkpoint(tmp_path / "broken", "tiny", num_hidden_layers=1)
    path = tmp_path / "broken" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, path)

    async def ask_broken():
        async with running(tmp_path / "broken", ranks=2) as replica:
            answers = await ask_all(replica, PROMPTS)
            return answers, replica.status

    answers, status = asyncio.run(ask_broken())
    assert {(answer.last.finish, answer.last.refused, len(answer.tokens)) for answer in answers} == {("error", False, 0)}
    assert "not numbers" in answers[0].last.reason
    assert status.healthy
    assert status.restarts == 0


@pytest.mark.slow
def test_a_model_that_cannot_be_divided_says_so_before_it_serves(small_model):
    async def start():
        async with running(small_model, ranks=3):
            pass

    with pytest.raises(ReplicaFailed, match="num_attention_heads is 4, which 3 does not divide"):
        asyncio.run(start())
