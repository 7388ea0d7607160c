"""What an update brings beside answers: drafts, experts, captured steps; and the proof of what is in memory."""

import threading

import numpy as np
import pytest
import torch
from engine_thread import ThreadRank, feed_of, tokens_of
from engine_versions import (
    MORE,
    Versions,
    begun,
    by_version,
    check_continued,
    digest_of,
    fresh,
    inside,
    one_thread,
    tiny,
    to_v2,
)
from safetensors.numpy import load_file

from engine_reference import PROMPTS
from weightcast.engines.embedded.drafts import init_draft
from weightcast.engines.embedded.messages import (
    Commit,
    Describe,
    Digest,
    Freeze,
    Rebuild,
    Release,
    Revert,
    Rollback,
    Settle,
    Thaw,
    Verify,
)
from weightcast.errors import DigestMismatch, InvalidInput, VersionDoesNotFit, WrongState
from weightcast.store.snapshot.writer import write_snapshot
from weightcast.store.store import Store
from weightcast.tensors.digest import array_digest

__all__ = ["inside", "one_thread", "tiny"]  # fixtures


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return Versions(tmp_path_factory.mktemp("moe"), "moe")


# -- drafts, experts -------------------------------------------------------------------------------------------------------


def draft_of(versions, root, kind):
    """A store with v1 and v2 in which the draft model is an exact one for v2, and its tensors' names as patterns."""
    drafts = {}
    for version in ("v1", "v2"):
        init_draft(root / version, getattr(versions, version), kind, noise=0.0)
        drafts[version] = loaded_tensors(root / version)
    prefix = "" if kind == "mtp" else "draft."
    store = Store(root / "store")
    for version in ("v1", "v2"):
        tensors = versions.tensors[version] | {f"{prefix}{name}": tensor for name, tensor in drafts[version].items()}
        store.publish(version, tensors, "auto")
    return f"file://{root / 'store'}", ("mtp.*",) if kind == "mtp" else ("draft.*",)


def loaded_tensors(directory):
    return load_file(directory / "model.safetensors")


def guessed(rank):
    """How many tokens the draft proposed, and how many of them were right, for some answers."""
    before = rank.done(Describe())
    rank.ask_all(PROMPTS[:3], max_tokens=30)
    after = rank.done(Describe())
    return after["drafted"] - before["drafted"], after["accepted"] - before["accepted"]


def test_a_plain_draft_is_updated_with_the_model(tiny, tmp_path):
    source, names = draft_of(tiny, tmp_path, "plain")
    with ThreadRank(tiny.v1, draft_dir=str(tmp_path / "v1"), draft_names=names) as rank:
        drafted, accepted = guessed(rank)
        assert drafted == accepted, "a draft that is the model itself is always right"
        rank.update("main only", [feed_of("main", tiny.full, take="v2")])
        drafted, accepted = guessed(rank)
        assert accepted < drafted, "the draft of the old version"
        for name, version in (("model.norm.weight", "v2"), ("draft.model.norm.weight", "v1")):
            assert digest_of(rank, name) == array_digest(tiny.tensors[version]["model.norm.weight"])
        rank.done(Rollback())
        feeds = [feed_of("main", source, ignore=names), feed_of("draft", source, names=names)]
        rank.update("both", feeds)
        drafted, accepted = guessed(rank)
        assert drafted == accepted
        assert tokens_of(rank.ask(PROMPTS[3], max_tokens=MORE)) == fresh(tiny.v2, PROMPTS[3], MORE)
        rank.job(Verify())
        rank.done(Rollback())
        drafted, accepted = guessed(rank)
        assert drafted == accepted
        assert digest_of(rank, "model.norm.weight") == array_digest(tiny.tensors["v1"]["model.norm.weight"])


def test_an_mtp_head_is_updated_with_the_model(tiny, tmp_path):
    source, names = draft_of(tiny, tmp_path, "mtp")
    with ThreadRank(tiny.v1, draft_dir=str(tmp_path / "v1")) as rank:
        running = begun(rank)
        feeds = [feed_of("main", source, ignore=names), feed_of("draft", source, names=names)]
        rank.update("both", feeds, commit="swap")
        for name, prompt in running.items():
            check_continued(rank, name, prompt, tiny.v2)
        rank.job(Verify())
        assert digest_of(rank, "model.norm.weight") == array_digest(tiny.tensors["v2"]["model.norm.weight"])
        assert digest_of(rank, "mtp.norm.weight") == array_digest(loaded_tensors(tmp_path / "v2")["mtp.norm.weight"])


def test_a_version_without_the_tensors_of_the_draft_is_refused_and_nothing_changes(tiny, tmp_path):
    draft_of(tiny, tmp_path, "plain")
    with ThreadRank(tiny.v1, draft_dir=str(tmp_path / "v1")) as rank:
        feeds = [feed_of("main", tiny.full, ignore=("draft.*",)), feed_of("draft", tiny.full, names=("draft.*",))]
        with pytest.raises(VersionDoesNotFit, match=r"missing: draft\.model\.embed_tokens\.weight"):
            rank.stage("u", feeds)
        assert rank.command(Commit(update="u", clear_cache=True, release_cache=False)).error[0] == "wrong_state"
        assert by_version(rank.ask(PROMPTS[0], max_tokens=MORE)) == [("v1", fresh(tiny.v1, PROMPTS[0], MORE))]


@pytest.mark.parametrize(("kind", "commit"), [("full", "swap"), ("delta", "delta")])
def test_experts_are_updated_and_routing_is_recorded_anew(moe, kind, commit):
    with ThreadRank(moe.v1) as rank:
        before = rank.ask(PROMPTS[0], max_tokens=MORE, record_routing=True)[-1].routing
        (name,) = begun(rank, prompts=PROMPTS[:1], record_routing=True, max_tokens=40)
        rank.done(Freeze())  # so that some of its tokens are left for the new version
        rank.update("u", to_v2(moe, kind), commit=commit)
        rank.done(Thaw())
        rank.wait_for(lambda: rank.finished(name))
        over_the_commit = rank.outputs[name]
        after = rank.ask(PROMPTS[0], max_tokens=MORE, record_routing=True)
    with ThreadRank(moe.v2) as rank:
        wanted = rank.ask(PROMPTS[0], max_tokens=MORE, record_routing=True)
        (_, said), (_, goes_on) = by_version(over_the_commit)
        rest = rank.ask([*PROMPTS[0], *said], max_tokens=len(goes_on), record_routing=True)
    assert tokens_of(after) == tokens_of(wanted)
    assert after[-1].routing == wanted[-1].routing != before
    assert (goes_on, over_the_commit[-1].routing) == (tokens_of(rest), rest[-1].routing)


# -- digests ---------------------------------------------------------------------------------------------------------------


def test_digests_of_tensors_are_those_of_the_boxes_that_the_rank_holds(moe):
    names = (
        "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.self_attn.v_proj.weight", "model.embed_tokens.weight",
    )  # fmt: skip
    with ThreadRank(moe.v1) as rank:
        rank.update("u", to_v2(moe, "delta"))
        for algorithm in ("xxh3-128", "md5"):
            told = rank.job(Digest(names=names, algorithm=algorithm))
            assert (told["rank"], told["version"], set(told["digests"])) == (0, "v2", set(names))
            for name in names:
                (piece,) = told["digests"][name]
                box = tuple(slice(start, start + size) for start, size in zip(*piece["box"].values(), strict=True))
                assert piece["digest"] == array_digest(np.ascontiguousarray(moe.tensors["v2"][name][box]), algorithm)
        with pytest.raises(InvalidInput, match=r"no tensors a, b"):
            rank.job(Digest(names=("b", "model.norm.weight", "a"), algorithm="md5"))
        with pytest.raises(InvalidInput, match="sha0"):
            rank.job(Digest(names=names, algorithm="sha0"))


def test_verifying_finds_a_single_bit_that_changed_in_memory(tiny, inside):
    with ThreadRank(tiny.v1) as rank:
        assert rank.job(Verify())["verified"]
        weight = inside[0].runner.main.decoder.layers[1].attention.qkv_proj.weight
        flat = weight.data.view(torch.uint8).view(-1)
        flat[77] ^= 1
        with pytest.raises(DigestMismatch, match=r"decoder\.layers\.1\.attention\.qkv_proj\.weight"):
            rank.job(Verify())
        flat[77] ^= 1
        assert rank.job(Verify())["verified"]


def test_weights_that_are_being_replaced_are_not_taken_for_wrong_ones(tiny, inside):
    with ThreadRank(tiny.v1) as rank:
        rank.stage("u", to_v2(tiny))
        rank.commit("u")
        for job in (Verify(), Digest(names=("model.norm.weight",), algorithm="md5")):
            with pytest.raises(WrongState, match="not proved yet"):
                rank.job(job)
        rank.done(Settle(update="u"))
        assert rank.job(Verify())["version"] == "v2"
        part, read, gone = inside[0].live._parts["main"], threading.Event(), threading.Event()
        part.wrong = lambda: read.set() or (gone.wait(30) and ["a mixture"])
        number = rank.command(Verify()).id
        assert read.wait(30)
        rank.done(Rollback())
        gone.set()
        rank.wait_for(lambda: number in rank.reports)
        assert rank.reports[number].error[0] == "wrong_state"


def test_weights_that_are_not_what_was_staged_fail_their_proof(tiny, inside):
    with ThreadRank(tiny.v1) as rank:
        rank.stage("u", to_v2(tiny))
        live = inside[0].live
        prove = live._prove

        def spoil(parts):
            inside[0].runner.main.decoder.norm.weight.data[3] += 1
            prove(parts)

        live._prove = spoil
        with pytest.raises(DigestMismatch, match=r"decoder\.norm\.weight"):
            rank.commit("u")
        live._prove = prove
        rank.done(Revert(update="u", reason="the proof failed"))
        rank.job(Verify())
        assert by_version(rank.ask(PROMPTS[0], max_tokens=MORE)) == [("v1", fresh(tiny.v1, PROMPTS[0], MORE))]


# -- captured steps --------------------------------------------------------------------------------------------------------


def test_steps_are_captured_again_when_weights_or_caches_move_and_only_then(tiny, inside):
    with ThreadRank(tiny.v1) as rank:
        graphs = inside[0].runner.graphs
        assert (graphs.captures, graphs.armed) == (1, True)
        captures = {}
        for number, (commit, release_cache) in enumerate(
            [("copy", False), ("swap", False), ("inplace", False), ("copy", True)]
        ):
            before = graphs.captures
            take = "v1" if number % 2 else "v2"
            rank.update(f"u{number}", [feed_of("main", tiny.full, take=take)], commit=commit, release_cache=release_cache)
            captures[commit, release_cache] = graphs.captures - before
            assert graphs.armed
    assert captures == {("copy", False): 0, ("swap", False): 1, ("inplace", False): 0, ("copy", True): 1}


@pytest.mark.slow
def test_compiled_steps_follow_the_weights(tiny, inside):
    with ThreadRank(tiny.v1, graphs="compile") as rank:
        assert tokens_of(rank.ask(PROMPTS[0], max_tokens=MORE)) == fresh(tiny.v1, PROMPTS[0], MORE)
        for number, commit in enumerate(("copy", "swap")):
            rank.update(f"u{number}", [feed_of("main", tiny.full, take=("v2", "v1")[number])], commit=commit)
            assert inside[0].runner.graphs.captures == 1 + number
            directory = (tiny.v2, tiny.v1)[number]
            assert tokens_of(rank.ask(PROMPTS[0], max_tokens=MORE)) == fresh(directory, PROMPTS[0], MORE)
        rank.done(Release(tags=("kv_cache",)))
        rank.done(Rebuild())
        assert inside[0].runner.graphs.captures == 3
        assert tokens_of(rank.ask(PROMPTS[0], max_tokens=MORE)) == fresh(tiny.v1, PROMPTS[0], MORE)


def test_a_legacy_snapshot_is_a_source_for_one_rank(tiny, tmp_path):
    write_snapshot(tmp_path, tiny.tensors["v2"].items(), rank=0, ranks=1, device_id="0", version="v2", part_nbytes=None)
    with ThreadRank(tiny.v1) as rank:
        result = rank.update("u", [feed_of("main", f"snapshot://{tmp_path}?id=0")])
        assert (result["version"], result["mode"]) == ("v2", "copy")
        said = tokens_of(rank.ask(PROMPTS[2], max_tokens=MORE))
    with ThreadRank(tiny.v2) as other:
        assert tokens_of(other.ask(PROMPTS[2], max_tokens=MORE)) == said
