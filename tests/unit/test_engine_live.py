"""One rank takes new weights while it answers: what it says afterwards is what a fresh one would say."""

import numpy as np
import pytest
from engine_models import greedy, load, loaded, new_cache
from engine_sequences import PagedSequences
from engine_thread import ThreadRank, feed_of, tokens_of
from engine_versions import (
    MORE,
    begun,
    by_version,
    changed,
    check_continued,
    count,
    digest_of,
    fresh,
    inside,
    one_thread,
    tiny,
    to_v2,
)

from engine_reference import PROMPTS
from weightcast.engines.embedded.messages import (
    Abandon,
    Command,
    Commit,
    Describe,
    DescribeWeights,
    Revert,
    Rollback,
    Settle,
    Stage,
    Thaw,
    Verify,
)
from weightcast.store.store import Store
from weightcast.tensors.digest import array_digest

__all__ = ["inside", "one_thread", "tiny"]  # fixtures


# -- updates ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "commit", "mode"),
    [
        ("full", "auto", "copy"),
        ("full", "copy", "copy"),
        ("full", "swap", "swap"),
        ("full", "inplace", "inplace"),
        ("full", "delta", "copy"),
        ("delta", "auto", "delta"),
        ("delta", "copy", "delta"),
        ("delta", "swap", "swap"),
        ("delta", "inplace", "delta"),
        ("delta", "delta", "delta"),
    ],
)
def test_requests_in_flight_go_on_under_the_new_version(tiny, kind, commit, mode):
    with ThreadRank(tiny.v1) as rank:
        running = begun(rank)
        result = rank.update("u", to_v2(tiny, kind), commit=commit)
        assert (result["version"], result["mode"], result["source"]) == ("v2", mode, tiny.source(kind))
        assert result["bytes"] > 0
        for name, prompt in running.items():
            check_continued(rank, name, prompt, tiny.v2)
        assert tokens_of(rank.ask(PROMPTS[2], max_tokens=MORE)) == fresh(tiny.v2, PROMPTS[2], MORE)
        rank.job(Verify())


def test_one_update_after_the_other_by_every_mode(tiny, tmp_path):
    store, tensors = Store(tmp_path / "store"), tiny.tensors["v1"]
    store.publish("s0", tensors, "full")
    with ThreadRank(tiny.v1) as rank:
        for step, commit in enumerate(("swap", "delta", "swap", "swap", "copy", "inplace", "swap", "auto"), start=1):
            tensors = changed(tensors, share=0.01, seed=step)
            store.publish(f"s{step}", tensors, "delta" if step % 3 else "full")
            rank.update(
                f"u{step}", [feed_of("main", f"file://{tmp_path / 'store'}")], commit="copy" if step % 3 == 0 else commit
            )
            assert rank.job(Verify())["version"] == f"s{step}"
        for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
            assert digest_of(rank, name) == array_digest(tensors[name])


def test_nothing_is_told_between_commit_and_settle(tiny):
    with ThreadRank(tiny.v1) as rank:
        running = begun(rank)
        rank.stage("u", to_v2(tiny))
        rank.commit("u")
        told = {name: count(rank, name) for name in running}
        short = rank.submit(PROMPTS[2], max_tokens=2)
        refused = rank.submit([], max_tokens=2)
        steps = rank.done(Describe())["steps"]
        while rank.done(Describe())["steps"] < steps + MORE:
            pass
        assert {name: count(rank, name) for name in running} == told
        assert not rank.outputs[short]
        assert not rank.outputs[refused]
        rank.done(Settle(update="u"))
        rank.wait_for(lambda: rank.finished(short) and rank.finished(refused))
        assert rank.outputs[refused][-1].refused
        assert by_version(rank.outputs[short]) == [("v2", fresh(tiny.v2, PROMPTS[2], 2))]
        for name, prompt in running.items():
            check_continued(rank, name, prompt, tiny.v2)


@pytest.mark.parametrize(("kind", "commit"), [("full", "copy"), ("full", "swap"), ("delta", "delta"), ("delta", "swap")])
def test_a_revert_drops_what_the_new_weights_made_and_goes_back(tiny, kind, commit):
    with ThreadRank(tiny.v1) as rank:
        running = begun(rank)
        rank.stage("u", to_v2(tiny, kind), commit=commit)
        rank.commit("u")
        told = {name: list(rank.outputs[name]) for name in running}
        short = rank.submit(PROMPTS[2], max_tokens=2)
        steps = rank.done(Describe())["steps"]
        while rank.done(Describe())["steps"] < steps + 4:
            pass
        rank.done(Revert(update="u", reason="it could not be proved"))
        rank.wait_for(lambda: all(map(rank.finished, [*running, short])))
        for name in (*running, short):
            *before, last = rank.outputs[name]
            assert before == told.get(name, [])
            assert (last.tokens, last.finish, last.reason) == ((), "error", "it could not be proved")
        for prompt in PROMPTS[:3]:
            outputs = rank.ask(prompt, max_tokens=MORE)
            assert by_version(outputs) == [("v1", fresh(tiny.v1, prompt, MORE))]
        rank.job(Verify())
        assert rank.update("again", to_v2(tiny, kind), commit=commit)["version"] == "v2"


def test_without_clearing_the_cache_requests_go_on_with_their_old_keys_and_values(tiny):
    with ThreadRank(tiny.v1) as rank:
        (name,) = begun(rank, prompts=PROMPTS[2:3])
        rank.update("u", to_v2(tiny), clear_cache=False)
        rank.wait_for(lambda: count(rank, name, "v2") >= 3 * MORE)
        rank.cancel(name)
        (_, said), (_, goes_on) = by_version(rank.outputs[name])
        goes_on = goes_on[: 3 * MORE]
        again = rank.ask(PROMPTS[2], max_tokens=MORE)
        assert again[-1].cached_tokens == 0, "a prefix of the old version was taken for one of the new"
        assert tokens_of(again) == fresh(tiny.v2, PROMPTS[2], MORE)
    model, sequences = loaded(tiny.v1), PagedSequences(blocks=256)
    cache = new_cache(model, sequences)
    model(sequences.batch({"s": [*PROMPTS[2], *said[:-1]]}), cache)
    load(model, tiny.v2)
    assert goes_on == greedy(model, {"s": said[-1:]}, len(goes_on), sequences=sequences, cache=cache)["s"]
    assert goes_on != fresh(tiny.v2, [*PROMPTS[2], *said], len(goes_on)), "old keys and values should show"


def test_other_bytes_under_the_name_that_is_served_do_not_inherit_its_prefixes(tiny):
    with ThreadRank(tiny.v1) as rank:
        rank.ask(PROMPTS[2], max_tokens=2)
        rank.update("u", [feed_of("main", f"checkpoint://{tiny.v2}", version="v1")], clear_cache=False)
        again = rank.ask(PROMPTS[2], max_tokens=MORE)
        assert (again[-1].cached_tokens, tokens_of(again)) == (0, fresh(tiny.v2, PROMPTS[2], MORE))


def test_freeing_the_caches_around_a_commit_is_timed_and_costs_no_token(tiny):
    with ThreadRank(tiny.v1) as rank:
        running = begun(rank)
        rank.stage("u", to_v2(tiny))
        answer = rank.command(Commit(update="u", clear_cache=True, release_cache=True))
        rank.wait_for(lambda: answer.id in rank.reports)
        committed = answer.result
        assert committed["cache_clear_cost"] > 0
        assert committed["cache_rebuild_cost"] > 0
        assert committed["pause_s"] >= committed["cache_clear_cost"] + committed["cache_rebuild_cost"]
        rank.done(Settle(update="u"))
        for name, prompt in running.items():
            check_continued(rank, name, prompt, tiny.v2)


def test_a_commit_that_fails_after_the_caches_were_freed_spoils_no_answer(tiny):
    with ThreadRank(tiny.v1) as rank:
        (name,) = begun(rank, prompts=PROMPTS[2:3])
        for clear_cache in (True, False):
            answer = rank.command(Commit(update="never staged", clear_cache=clear_cache, release_cache=True))
            assert answer.error[0] == "wrong_state"
        made = count(rank, name)
        rank.wait_for(lambda: count(rank, name) >= made + MORE)
        rank.cancel(name)
        ((version, said),) = by_version(rank.outputs[name])
        assert (version, said[: made + MORE]) == ("v1", fresh(tiny.v1, PROMPTS[2], made + MORE))


# -- going back ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "commit"), [("full", "copy"), ("full", "swap"), ("delta", "delta"), ("delta", "swap")])
def test_a_rollback_leads_to_the_version_before_once(tiny, kind, commit):
    with ThreadRank(tiny.v1) as rank:
        rank.update("u", to_v2(tiny, kind), commit=commit)
        assert rank.done(DescribeWeights())["previous"] == "v1"
        running = begun(rank)
        rank.done(Rollback())
        outputs = rank.ask(PROMPTS[2], max_tokens=MORE)
        assert by_version(outputs) == [("v1", fresh(tiny.v1, PROMPTS[2], MORE))]
        assert rank.done(DescribeWeights())["previous"] is None
        assert rank.job(Verify())["version"] == "v1"
        for name in running:
            rank.wait_for(lambda name=name: count(rank, name, "v1") > 0)
            assert [version for version, _ in by_version(rank.outputs[name])] == ["v2", "v1"]
        assert rank.command(Rollback()).error[0] == "not_found"
        assert rank.update("u2", to_v2(tiny, kind), commit=commit)["version"] == "v2"


def test_a_rollback_to_other_bytes_than_were_served_leaves_nothing_to_serve_until_the_next_update(tiny, inside):
    with ThreadRank(tiny.v1) as rank:
        rank.update("u", to_v2(tiny, "delta"), commit="delta")
        (same, *_) = np.flatnonzero(tiny.tensors["v1"]["model.norm.weight"] == tiny.tensors["v2"]["model.norm.weight"])
        running = begun(rank)
        inside[0].runner.main.decoder.norm.weight.data[same] += 1
        assert rank.command(Rollback()).error[0] == "commit_failed"
        assert rank.done(DescribeWeights())["weights"]["version"] == ""
        assert rank.command(Thaw()).error[0] == "wrong_state"
        rank.update("u2", to_v2(tiny), commit="swap")
        for name, prompt in running.items():
            said = count(rank, name)
            rank.wait_for(lambda name=name, said=said: count(rank, name) > said + MORE)
            goes_on = tokens_of(rank.outputs[name])[said:][:MORE]
            assert goes_on == fresh(tiny.v2, [*prompt, *tokens_of(rank.outputs[name])[:said]], MORE)
        rank.job(Verify())


def test_there_is_nothing_to_roll_back_to_at_first_nor_after_an_inplace_commit(tiny):
    with ThreadRank(tiny.v1) as rank:
        assert rank.command(Rollback()).error[0] == "not_found"
        rank.update("u", to_v2(tiny), commit="inplace")
        assert rank.command(Rollback()).error[0] == "not_found"
        assert tokens_of(rank.ask(PROMPTS[0], max_tokens=MORE)) == fresh(tiny.v2, PROMPTS[0], MORE)


@pytest.mark.parametrize("when", ["staging", "staged"])
def test_an_update_can_be_abandoned_before_its_commit(tiny, when):
    with ThreadRank(tiny.v1) as rank:
        if when == "staging":
            stage = Stage(update="u", feeds=tuple(to_v2(tiny)), commit="copy", verify_checksum=True, timeout_s=60)
            rank.send(Command(id=(first := next(rank.commands)), action=stage))
            rank.done(Abandon(update="u"))
            rank.wait_for(lambda: first in rank.reports and rank.reports[first].done)
        else:
            rank.stage("u", to_v2(tiny))
            rank.done(Abandon(update="another"))
            rank.done(Abandon(update="u"))
        assert rank.command(Commit(update="u", clear_cache=True, release_cache=False)).error[0] == "wrong_state"
        assert rank.done(DescribeWeights())["weights"]["state"] == "READY"
        assert by_version(rank.ask(PROMPTS[0], max_tokens=MORE)) == [("v1", fresh(tiny.v1, PROMPTS[0], MORE))]
        assert rank.update("u2", to_v2(tiny))["version"] == "v2"


def test_what_was_staged_and_not_committed_gives_way_to_the_next_update(tiny):
    with ThreadRank(tiny.v1) as rank:
        rank.stage("u1", to_v2(tiny), commit="swap")
        assert rank.update("u2", to_v2(tiny, "delta"), commit="delta")["mode"] == "delta"
        rank.job(Verify())
