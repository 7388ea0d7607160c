"""One rank stands still on demand, and frees its weights and caches: what it was asked is answered all the same."""

import pytest
from engine_thread import ThreadRank, feed_of, tokens_of
from engine_versions import MORE, begun, by_version, count, inside, one_thread, tiny

from engine_reference import PROMPTS
from weightcast.engines.embedded.messages import (
    Commit,
    Describe,
    DescribeWeights,
    Digest,
    Freeze,
    Rebuild,
    Release,
    Rollback,
    Thaw,
    Verify,
)
from weightcast.errors import Corrupt, WrongState

__all__ = ["inside", "one_thread", "tiny"]  # fixtures


@pytest.fixture(scope="module")
def expected(tiny):
    """What is said where nothing disturbs, from the first token on."""
    with ThreadRank(tiny.v1) as rank:
        return {tuple(prompt): tokens_of(rank.ask(prompt, max_tokens=60)) for prompt in PROMPTS}


def stands_still(rank, running):
    """Whether no step is computed and nothing is said, while the rank still answers commands."""
    seen = []
    for _ in range(4):
        beats = len(rank.beats)
        rank.wait_for(lambda beats=beats: len(rank.beats) > beats)
        seen.append((rank.done(Describe())["steps"], [count(rank, name) for name in running]))
    return seen.count(seen[0]) == len(seen)


def check_goes_on(rank, running, expected):
    made = {name: count(rank, name) for name in running}
    rank.wait_for(lambda: all(count(rank, name) >= made[name] + MORE for name in running))
    for name, prompt in running.items():
        rank.cancel(name)
        ((version, said),) = by_version(rank.outputs[name])
        wanted = expected[tuple(prompt)]
        assert (version, said[: len(wanted)]) == ("v1", wanted[: len(said)])


def refused(rank, action):
    code, message = rank.command(action).error
    assert code == WrongState.code
    return message


# -- standing still --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_requests_stand_still_and_go_on_where_they_were(tiny, expected, recompute):
    with ThreadRank(tiny.v1) as rank:
        running = begun(rank)
        rank.done(Freeze(recompute=recompute))
        rank.done(Freeze())
        late = rank.submit(PROMPTS[2], max_tokens=MORE)
        assert stands_still(rank, [*running, late])
        stats = rank.done(Describe())
        assert (stats["running"], stats["waiting"]) == ((0, 3) if recompute else (2, 1))
        rank.done(Thaw())
        rank.done(Thaw())
        rank.wait_for(lambda: rank.finished(late))
        assert tokens_of(rank.outputs[late]) == expected[tuple(PROMPTS[2])][:MORE]
        check_goes_on(rank, running, expected)


def test_a_frozen_request_can_be_cancelled_and_a_wrong_one_is_refused_at_once(tiny):
    with ThreadRank(tiny.v1) as rank:
        (name, _) = begun(rank)
        rank.done(Freeze())
        rank.cancel(name)
        wrong = rank.submit([])
        rank.wait_for(lambda: rank.finished(wrong))
        assert rank.outputs[wrong][-1].refused
        assert rank.done(Describe())["running"] == 1


def test_an_update_needs_no_thaw_and_ends_no_freeze(tiny):
    with ThreadRank(tiny.v1) as rank:
        running = begun(rank)
        rank.done(Freeze())
        rank.update("u", [feed_of("main", tiny.full, take="v2")])
        rank.done(Rollback())
        rank.update("u2", [feed_of("main", tiny.delta, take="v2")])
        assert stands_still(rank, running)
        rank.done(Thaw())
        for name in running:
            rank.wait_for(lambda name=name: count(rank, name, "v2") > 0)
            assert [version for version, _ in by_version(rank.outputs[name])] == ["v1", "v2"]


# -- memory ----------------------------------------------------------------------------------------------------------------


def back(rank, tiny, tags):
    """Bring back what was freed, in an order in which nothing can be computed before the last."""
    if "kv_cache" in tags:
        assert rank.done(Rebuild()) > 0
    if "weight" in tags:
        if "kv_cache" in tags:
            assert "without weights" in refused(rank, Thaw())
        rank.update("back", [feed_of("main", tiny.full, take="v1")])


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("tags", [("kv_cache",), ("weight",), ("weight", "kv_cache")], ids="+".join)
def test_freed_memory_comes_back_and_requests_go_on(tiny, expected, inside, tags, frozen):
    with ThreadRank(tiny.v1) as rank:
        running = begun(rank)
        if frozen:
            rank.done(Freeze())
        freed = rank.done(Release(tags=tags))
        assert set(freed) == set(tags)
        assert all(seconds > 0 for seconds in freed.values())
        held = rank.done(DescribeWeights())
        assert (held["asleep"], held["caches"]) == ("weight" in tags, "kv_cache" not in tags)
        if "weight" in tags:
            assert (held["weights"]["version"], held["weights"]["nbytes"]) == ("", 0)
            assert not any(one.untyped_storage().nbytes() for one in inside[0].runner.main.parameters() if not one.is_meta)
        assert stands_still(rank, running)
        missing = "weights" if "weight" in tags else "the KV cache"
        assert f"without {missing}" in refused(rank, Thaw())
        back(rank, tiny, tags)
        if frozen:
            assert stands_still(rank, running)
            rank.done(Thaw())
        check_goes_on(rank, running, expected)
        assert rank.job(Verify())["version"] == "v1"


def test_memory_that_is_free_can_be_freed_again(tiny, expected):
    with ThreadRank(tiny.v1) as rank:
        running = begun(rank)
        for _ in range(2):
            rank.done(Release(tags=("kv_cache",)))
            rank.done(Release(tags=("weight", "kv_cache")))
        back(rank, tiny, ("weight", "kv_cache"))
        assert rank.done(Rebuild()) < 1
        check_goes_on(rank, running, expected)


def test_a_rank_without_weights_takes_another_version_and_has_none_to_go_back_to(tiny):
    with ThreadRank(tiny.v1) as rank:
        rank.update("u", [feed_of("main", tiny.full, take="v2")])
        rank.done(Release(tags=("weight",)))
        assert rank.command(Rollback()).error[0] == "not_found"
        with pytest.raises(Corrupt, match="no whole version"):
            rank.job(Verify())
        with pytest.raises(WrongState):
            rank.job(Digest(names=("model.norm.weight",), algorithm="md5"))
        assert refused(rank, Commit(update="u", clear_cache=True, release_cache=False))
        rank.update("u2", [feed_of("main", tiny.delta, take="v2")], commit="delta")
        with ThreadRank(tiny.v2) as fresh:
            assert tokens_of(rank.ask(PROMPTS[0], max_tokens=MORE)) == tokens_of(fresh.ask(PROMPTS[0], max_tokens=MORE))


def test_weights_can_come_while_the_caches_are_free_and_are_captured_when_those_are_back(tiny, expected, inside):
    with ThreadRank(tiny.v1) as rank:
        graphs, running = inside[0].runner.graphs, begun(rank)
        rank.done(Release(tags=("weight", "kv_cache")))
        assert (graphs.captures, graphs.armed) == (1, False)
        rank.update("back", [feed_of("main", tiny.full, take="v1")])
        assert (graphs.captures, graphs.armed) == (1, False)
        assert "without the KV cache" in refused(rank, Thaw())
        rank.done(Rebuild())
        assert (graphs.captures, graphs.armed) == (2, True)
        check_goes_on(rank, running, expected)


def test_caches_that_are_free_stay_so_over_an_update_that_would_free_them(tiny):
    with ThreadRank(tiny.v1) as rank:
        rank.done(Release(tags=("kv_cache",)))
        rank.stage("u", [feed_of("main", tiny.full, take="v2")])
        committed = rank.done(Commit(update="u", clear_cache=True, release_cache=True))
        assert (committed["cache_clear_cost"], committed["cache_rebuild_cost"]) == (0, 0)
        assert not rank.done(DescribeWeights())["caches"]


def test_a_draft_model_sleeps_and_wakes_with_its_main_model(tiny):
    with ThreadRank(tiny.v1, draft_dir=str(tiny.v1)) as rank:
        said = tokens_of(rank.ask(PROMPTS[2], max_tokens=MORE))
        rank.done(Release(tags=("weight", "kv_cache")))
        rank.done(Rebuild())
        rank.update("main", [feed_of("main", tiny.full, take="v1")])
        assert rank.done(DescribeWeights())["weights"]["version"] == "", "the draft has no weights yet"
        assert "without weights" in refused(rank, Thaw())
        rank.update("draft", [feed_of("draft", tiny.full, take="v1")])
        before = rank.done(Describe())
        assert tokens_of(rank.ask(PROMPTS[2], max_tokens=MORE)) == said
        after = rank.done(Describe())
        assert after["drafted"] - before["drafted"] == after["accepted"] - before["accepted"] > 0
