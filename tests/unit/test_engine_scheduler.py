"""Continuous batching on a device that is played: every token must be computed behind exactly its own prefix."""

import random
from dataclasses import replace

import numpy as np
import pytest
from scheduling_checks import check_pool
from scheduling_device import Setup, Simulation, next_token

from weightcast.engines.embedded.messages import Routing, Sampling, Submit
from weightcast.engines.embedded.scheduling.blocks import BlockPool
from weightcast.engines.embedded.scheduling.scheduler import Scheduler, StepResult
from weightcast.errors import InvalidInput

SETUPS = {
    "plenty": Setup(blocks=60, max_batch=8, max_step_tokens=32),
    "tight": Setup(blocks=11, max_batch=6, max_step_tokens=12),
    "tight, no cache": Setup(blocks=11, max_batch=6, max_step_tokens=12, prefix_cache=False),
    "just one fits": Setup(blocks=10, max_batch=4, max_step_tokens=4),
    "blocks of one token": Setup(blocks=45, block_size=1, max_batch=5, max_step_tokens=7),
    "one at a time": Setup(blocks=12, max_batch=1, max_step_tokens=1),
    "drafts": Setup(blocks=60, max_batch=8, max_step_tokens=32, draft_tokens=3),
    "drafts, tight": Setup(blocks=11, max_batch=6, max_step_tokens=12, draft_tokens=3),
    "drafts, tight, no cache": Setup(blocks=11, max_batch=6, max_step_tokens=12, draft_tokens=3, prefix_cache=False),
    "more drafts than a block": Setup(blocks=24, block_size=2, max_batch=4, max_step_tokens=16, draft_tokens=5, skill=0.95),
    "drafts, no budget": Setup(blocks=20, max_batch=4, max_step_tokens=4, draft_tokens=2),
}


def some_request(simulation, chance):
    """A prompt that often begins like others, and sampling that ends in all ways."""
    setup = simulation.setup
    length = chance.randint(1, setup.max_length - 1) if chance.random() < 0.2 else chance.randint(1, 14)
    common = [index % setup.vocabulary for index in range(chance.choice([0, 4, 9, 13]))]
    prompt = [*common, *(chance.randrange(setup.vocabulary) for _ in range(length))][: setup.max_length - 1]
    extra = {}
    if chance.random() < 0.1:
        extra["replay"] = Routing(shape=(2, 1, 1), data=bytes(4))
    stop = (chance.randrange(setup.vocabulary),) if chance.random() < 0.3 else ()
    simulation.submit(
        prompt, max_tokens=chance.randint(1, 20), stop_tokens=stop, record_routing=chance.random() < 0.3, **extra
    )


@pytest.mark.untraced
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 6))])
@pytest.mark.parametrize("name", SETUPS)
def test_every_answer_is_that_of_the_model_alone_whatever_else_happens(name, seed):
    simulation, chance = Simulation(SETUPS[name], seed), random.Random(seed + 100)
    versions = 1
    for turn in range(120):
        if chance.random() < 0.3 and len(simulation.open) < 12:
            some_request(simulation, chance)
        if chance.random() < 0.03 and simulation.open:
            simulation.cancel(chance.choice(simulation.open))
        if chance.random() < 0.02 or turn == 60:
            versions += 1
            simulation.set_version(f"v{versions}")
        if chance.random() < 0.02:
            simulation.clear_cache()
        cancels = chance.random() < 0.02 and simulation.open
        simulation.step((lambda: simulation.cancel(chance.choice(simulation.open))) if cancels else None)
    simulation.finish()
    if name.startswith(("tight", "drafts, tight")):
        assert simulation.scheduler.preempted
    if simulation.setup.prefix_cache:
        assert simulation.pool.hits


@pytest.mark.parametrize("drafts", [0, 3])
def test_caching_batching_and_drafts_change_no_token(drafts):
    chance = random.Random(5)
    prompts = [[chance.randrange(5) for _ in range(chance.randint(1, 20))] for _ in range(12)]
    answers = []
    for setup in (
        Setup(),
        Setup(prefix_cache=False),
        Setup(max_batch=1),
        Setup(blocks=60, max_batch=12, max_step_tokens=99),
    ):
        simulation = Simulation(replace(setup, draft_tokens=drafts), seed=3)
        names = [simulation.submit(prompt, max_tokens=15) for prompt in prompts]
        simulation.finish()
        answers.append([simulation.answer(name) for name in names])
    assert all(one == answers[0] for one in answers)


# -- what a step holds -----------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_parts_while_others_make_tokens():
    simulation = Simulation(Setup(blocks=40, max_step_tokens=8))
    short = simulation.submit([1, 2], max_tokens=20)
    simulation.step()
    long = simulation.submit([3] * 30, max_tokens=3)
    parts = []
    for _ in range(5):
        chunks, outputs = simulation.step()
        assert [chunk.sequence.id for chunk in chunks] == [short, long]
        assert short in [output.id for output in outputs]
        parts.append(chunks[1].count)
    assert parts == [7, 7, 7, 7, 2]
    simulation.finish()


def test_prompts_start_in_the_order_they_came():
    simulation = Simulation(Setup(blocks=60, max_batch=2, max_step_tokens=2))
    names = [simulation.submit([index, 1, 2], max_tokens=2) for index in range(4)]
    ended = []
    while simulation.scheduler.has_work:
        ended += [output.id for output in simulation.step()[1] if output.finish]
    assert ended == names


def test_drafts_leave_half_of_the_step_to_prompts():
    simulation = Simulation(Setup(blocks=40, max_batch=3, max_step_tokens=8, draft_tokens=3, skill=0))
    for _ in range(2):
        simulation.submit([1], max_tokens=30)
    simulation.step()
    chunks, _ = simulation.step()
    assert [(chunk.count, chunk.draft) for chunk in chunks] == [(1, 3), (1, 3)]
    simulation.submit([2] * 20, max_tokens=1)
    chunks, _ = simulation.step()
    assert [(chunk.count, chunk.draft) for chunk in chunks] == [(1, 1), (1, 1), (4, 0)]
    simulation.finish()


def test_drafts_end_where_the_answer_must_end():
    simulation = Simulation(Setup(blocks=40, draft_tokens=3, max_step_tokens=32, skill=1))
    name = simulation.submit([1, 2, 3], max_tokens=4)
    drafts = []
    while simulation.scheduler.has_work:
        drafts += [chunk.draft for chunk in simulation.step()[0] if chunk.count == 1]
    assert drafts[0] == 2
    assert len(simulation.answer(name)) == 4


def test_a_stop_token_among_accepted_drafts_cuts_the_answer_behind_it():
    simulation = Simulation(Setup(draft_tokens=3, max_step_tokens=32))
    prompt = [0, 1, 2]
    answer = list(prompt)
    for _ in range(4):
        answer.append(next_token("v1", answer, 5))
    stop = answer[4]
    simulation.submit(prompt, max_tokens=9, stop_tokens=(stop,))
    scheduler = simulation.scheduler
    (chunk,) = scheduler.plan()
    scheduler.apply([StepResult(chunk, (answer[3],))])
    if answer[3] != stop:
        (chunk,) = scheduler.plan()
        assert chunk.draft == 3
        (output,) = scheduler.apply([StepResult(chunk, tuple(answer[4:7]))])
        assert output.tokens == (stop,)
        assert output.finish == "stop"
        assert chunk.sequence.computed == len(chunk.sequence.tokens) - 1 == 4
    check_pool(simulation.pool, [])


# -- room --------------------------------------------------------------------------------------------------------------


def test_the_last_admitted_makes_room_and_is_next_to_run_again():
    simulation = Simulation(Setup(blocks=7, max_batch=2, max_step_tokens=16, prefix_cache=False))
    first, second = (simulation.submit([index] * 7, max_tokens=20) for index in range(2))
    third = simulation.submit([3], max_tokens=2)
    while not simulation.scheduler.preempted:
        simulation.step()
    assert list(simulation.scheduler._running) == [first]
    assert list(simulation.scheduler._waiting) == [second, third]
    made = len(simulation.answer(second))
    assert made
    simulation.finish()
    assert len(simulation.answer(second)) == 20


def test_one_alone_runs_to_the_longest_length_in_a_pool_that_just_holds_it():
    setup = Setup(blocks=10, max_length=41, draft_tokens=3)
    simulation = Simulation(setup)
    name = simulation.submit([1] * 5, max_tokens=1000)
    simulation.finish()
    assert len(simulation.answer(name)) == 36
    assert simulation.outputs[name][-1].finish == "length"
    assert simulation.scheduler.preempted == 0


def test_what_was_preempted_finds_its_own_blocks_again():
    simulation = Simulation(Setup(blocks=8, max_batch=2, max_step_tokens=32, max_length=33))
    old = simulation.submit([1] * 6, max_tokens=14)
    young = simulation.submit([2] * 5, max_tokens=20)
    while not simulation.scheduler.preempted:
        simulation.step()
    hits = simulation.pool.hits
    chunk = None
    while chunk is None or chunk.sequence.id != young:
        chunk = simulation.step()[0][-1]
    assert chunk.start > 8, "the blocks of its answer too"
    simulation.finish()
    assert simulation.pool.hits == hits, "its own blocks are no hits of the prompt"
    assert simulation.outputs[young][-1].cached_tokens == 0
    assert old not in simulation.open


def test_a_prompt_is_admitted_only_if_each_that_runs_can_still_take_a_block():
    simulation = Simulation(Setup(blocks=10, max_step_tokens=16))
    old = simulation.submit([1] * 15, max_tokens=6)
    simulation.step()
    young = simulation.submit([2] * 24, max_tokens=2)  # with it the pool would be full
    for _ in range(5):
        assert [chunk.sequence.id for chunk in simulation.step()[0]] == [old]
    assert [chunk.sequence.id for chunk in simulation.step()[0]] == [young]
    simulation.finish()
    assert simulation.scheduler.preempted == 0


class CountingPool(BlockPool):
    matches = 0

    def match(self, tokens):
        self.matches += 1
        return super().match(tokens)


def test_a_prompt_that_does_not_fit_is_not_looked_up_again_until_there_is_more_room():
    pool = CountingPool(10, 4, prefix_cache=True, version="v1")
    scheduler = Scheduler(pool, max_batch=4, max_step_tokens=64, max_length=40, version="v1")
    scheduler.submit(Submit(id="a", prompt=(1,) * 17, sampling=Sampling(max_tokens=8)))
    scheduler.submit(Submit(id="b", prompt=(2,) * 30, sampling=Sampling(max_tokens=3)))
    scheduler.submit(Submit(id="c", prompt=(3,), sampling=Sampling(max_tokens=3)))
    for _ in range(8):
        (chunk,) = scheduler.plan()
        scheduler.apply([StepResult(chunk, (0,))])
        assert pool.matches == 2
    assert [chunk.sequence.id for chunk in scheduler.plan()] == ["b", "c"]


def test_a_prompt_that_does_not_fit_goes_away_and_the_next_one_runs_at_once():
    simulation = Simulation(Setup(blocks=10))
    first = simulation.submit([1] * 17, max_tokens=20)
    for _ in range(3):
        simulation.step()
    big, small = simulation.submit([2] * 30, max_tokens=2), simulation.submit([3], max_tokens=2)
    assert [chunk.sequence.id for chunk in simulation.step()[0]] == [first]
    simulation.cancel(big)
    assert [chunk.sequence.id for chunk in simulation.step()[0]] == [first, small]
    simulation.finish()


# -- the prefix cache --------------------------------------------------------------------------------------------------


def test_an_answer_says_how_much_of_its_prompt_was_cached():
    simulation = Simulation(Setup(blocks=40))
    prompt = list(range(5)) * 2
    first = simulation.submit(prompt, max_tokens=3)
    simulation.finish()
    second = simulation.submit(prompt, max_tokens=3)
    simulation.finish()
    assert [output.cached_tokens for output in simulation.outputs[first]] == [0, 0, 0]
    assert [output.cached_tokens for output in simulation.outputs[second]] == [8, 8, 8]
    assert (simulation.pool.hits, simulation.pool.queries) == (8, 20)


def test_an_answer_is_cached_like_a_prompt():
    simulation = Simulation(Setup(blocks=40))
    first = simulation.submit([1, 2, 3], max_tokens=10)
    simulation.finish()
    turn = simulation.submit([1, 2, 3, *simulation.answer(first), 4], max_tokens=2)
    simulation.finish()
    assert simulation.outputs[turn][0].cached_tokens == 12


def test_a_block_is_cached_only_once_the_draft_model_has_it_too():
    pool = BlockPool(8, 4, prefix_cache=True, version="v1")
    scheduler = Scheduler(pool, max_batch=1, max_step_tokens=16, max_length=32, draft_tokens=2, version="v1")
    scheduler.submit(Submit(id="a", prompt=(1,) * 9, sampling=Sampling(max_tokens=9)))
    (chunk,) = scheduler.plan()
    chunk.sequence.draft_computed = 7
    scheduler.apply([StepResult(chunk, (0,))])
    assert len(pool.match((1,) * 9)) == 1
    (chunk,) = scheduler.plan()
    chunk.sequence.draft_computed = 10
    scheduler.apply([StepResult(chunk, (0,))])
    assert len(pool.match((1,) * 9)) == 2


def test_replay_takes_nothing_from_the_cache_and_leaves_nothing_there():
    simulation = Simulation(Setup(blocks=40))
    simulation.submit([1] * 9, max_tokens=1)
    simulation.finish()
    cached = simulation.pool.cached
    experts = np.arange(6, dtype="<i2").reshape(3, 1, 2)
    name = simulation.submit([1] * 9, max_tokens=9, replay=Routing(shape=(3, 1, 2), data=experts.tobytes()))
    chunks, _ = simulation.step()
    assert (chunks[0].start, chunks[0].count) == (0, 8)
    assert chunks[0].sequence.replay.dtype == np.int16
    assert (chunks[0].sequence.replay == experts).all()
    simulation.finish()
    assert simulation.outputs[name][-1].cached_tokens == 0
    assert simulation.pool.cached == cached
    assert simulation.pool.queries == 9


def test_tokens_carry_the_version_that_made_them():
    simulation = Simulation(Setup(blocks=40))
    name = simulation.submit([1] * 9, max_tokens=6)
    for _ in range(4):
        simulation.step()
    simulation.set_version("v2")
    again = simulation.submit([1] * 9, max_tokens=6)
    simulation.finish()
    versions = [output.version for output in simulation.outputs[name]]
    assert versions == sorted(versions)
    assert set(versions) == {"v1", "v2"}
    assert simulation.outputs[again][0].cached_tokens == 0
    last = simulation.submit([1] * 9, max_tokens=2)
    simulation.finish()
    assert simulation.outputs[last][0].cached_tokens == 8, "what the new version alone computed is cached again"


def test_what_is_computed_again_under_a_new_version_is_cached_for_it():
    simulation = Simulation(Setup(blocks=8, max_batch=2, max_step_tokens=32, max_length=33))
    simulation.submit([1] * 6, max_tokens=14)
    prompt = [2, 3, 4, 2, 3]
    simulation.submit(prompt, max_tokens=20)
    while not simulation.scheduler.preempted:
        simulation.step()
    simulation.set_version("v2")
    simulation.finish()
    assert len(simulation.pool.match([*prompt, *simulation.answer("r1")])) == 6


# -- requests ----------------------------------------------------------------------------------------------------------


def make_scheduler(blocks=4, **kwargs):
    pool = BlockPool(blocks, 4, prefix_cache=True, version="v1")
    return Scheduler(pool, **{"max_batch": 2, "max_step_tokens": 8, "max_length": 20, "version": "v1"} | kwargs)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [
        ((), 3, "its prompt is empty"),
        ((1,) * 20, 3, "its prompt of 20 tokens leaves no room for an answer within 20"),
        ((1,), 0, "it asks for 0 tokens"),
        ((1,) * 10, 8, "up to 18 tokens do not fit the 4 blocks of 4 tokens"),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(prompt, max_tokens, reason):
    scheduler = make_scheduler()
    output = scheduler.submit(Submit(id="a", prompt=prompt, sampling=Sampling(max_tokens=max_tokens)))
    assert output.finish == "error"
    assert reason in output.reason
    assert "request a cannot run" in output.reason
    assert not scheduler.has_work


def test_what_just_fits_is_taken_and_runs_to_its_end():
    scheduler = make_scheduler()
    assert scheduler.submit(Submit(id="a", prompt=(1,) * 10, sampling=Sampling(max_tokens=7))) is None
    tokens = 0
    while scheduler.has_work:
        chunks = scheduler.plan()
        tokens += len(scheduler.apply([StepResult(chunk, (0,) if chunk.wants_token else ()) for chunk in chunks]))
    assert tokens == 7


def test_all_problems_of_a_request_are_named_at_once():
    scheduler = make_scheduler()
    scheduler.submit(Submit(id="a", prompt=(1,), sampling=Sampling(max_tokens=1)))
    replay = Routing(shape=(2, 1, 1), data=b"abc")
    output = scheduler.submit(Submit(id="a", prompt=(), sampling=Sampling(max_tokens=0), replay=replay))
    for part in ("another request of this id", "prompt is empty", "asks for 0 tokens", "routing of 3 bytes"):
        assert part in output.reason
    assert scheduler.waiting == 1


def test_unknown_and_finished_requests_cannot_be_cancelled():
    scheduler = make_scheduler()
    assert not scheduler.cancel("nobody")
    scheduler.submit(Submit(id="a", prompt=(1,), sampling=Sampling(max_tokens=1)))
    scheduler.apply([StepResult(chunk, (0,)) for chunk in scheduler.plan()])
    assert not scheduler.cancel("a")
    assert scheduler.submit(Submit(id="a", prompt=(1,), sampling=Sampling(max_tokens=1))) is None


def test_results_of_a_request_that_was_cancelled_and_asked_again_are_dropped():
    scheduler = make_scheduler()
    request = Submit(id="a", prompt=(1,), sampling=Sampling(max_tokens=2))
    scheduler.submit(request)
    chunks = scheduler.plan()
    scheduler.cancel("a")
    scheduler.submit(request)
    (chunk,) = scheduler.plan()
    assert scheduler.apply([StepResult(chunks[0], (7,))]) == []
    assert chunk.sequence.tokens == [1]


def test_aborting_ends_all_requests_with_the_reason_the_oldest_first():
    simulation = Simulation(Setup(max_batch=2))
    names = [simulation.submit([index] * 9, max_tokens=5, record_routing=True) for index in range(4)]
    for _ in range(4):
        simulation.step()
    outputs = simulation.scheduler.abort_all("the weights are gone")
    assert [output.id for output in outputs] == names
    assert {(output.tokens, output.finish, output.reason) for output in outputs} == {((), "abort", "the weights are gone")}
    assert not simulation.scheduler.has_work
    assert simulation.scheduler.plan() == []
    check_pool(simulation.pool, [])


def test_routing_is_asked_for_while_the_sequence_still_holds_its_blocks():
    scheduler = make_scheduler()
    scheduler.submit(Submit(id="a", prompt=(1, 2, 3), sampling=Sampling(max_tokens=2), record_routing=True))
    scheduler.submit(Submit(id="b", prompt=(1, 2, 3), sampling=Sampling(max_tokens=2)))
    asked = []

    def routing(sequence):
        asked.append((sequence.id, sequence.slots(0, sequence.computed), scheduler.pool.room()))
        return Routing(shape=(sequence.computed, 1, 1), data=b"")

    outputs = []
    while scheduler.has_work:
        results = [StepResult(chunk, (0,)) for chunk in scheduler.plan()]
        outputs += scheduler.apply(results, routing=routing)
    assert asked == [("a", [0, 1, 2, 3], 2)]
    assert [output.routing is not None for output in outputs] == [False, False, True, False]


def test_results_that_cannot_be_of_the_planned_step_are_refused():
    scheduler = make_scheduler()
    scheduler.submit(Submit(id="a", prompt=(1,) * 10, sampling=Sampling(max_tokens=4)))
    (chunk,) = scheduler.plan()
    with pytest.raises(InvalidInput, match="1 tokens were made for request a behind its tokens 0 to 8"):
        scheduler.apply([StepResult(chunk, (1,))])
    scheduler.apply([StepResult(chunk, ())])
    with pytest.raises(InvalidInput, match="Apply each planned step once"):
        scheduler.apply([StepResult(chunk, ())])
    (chunk,) = scheduler.plan()
    for tokens in ((), (1, 2)):
        with pytest.raises(InvalidInput):
            scheduler.apply([StepResult(chunk, tokens)])
    assert chunk.sequence.computed == 8


def test_a_step_must_have_room_for_each_of_its_sequences():
    with pytest.raises(InvalidInput, match="a step of 3 tokens has no room for each of 4 sequences"):
        make_scheduler(max_batch=4, max_step_tokens=3)


def test_a_request_whose_token_cannot_be_chosen_ends_with_the_problem_and_the_others_go_on():
    scheduler = make_scheduler(blocks=8)
    for name in ("good", "bad"):
        scheduler.submit(Submit(id=name, prompt=(1, 2), sampling=Sampling(max_tokens=3)))
    good, bad = scheduler.plan()
    outputs = scheduler.apply([StepResult(good, (5,)), StepResult(bad, (), problem="no numbers")])
    assert [(output.id, output.tokens, output.finish, output.reason) for output in outputs] == [
        ("good", (5,), None, None),
        ("bad", (), "error", "no numbers"),
    ]
    assert scheduler.running == 1
    check_pool(scheduler.pool, [good.sequence.blocks])
