"""A rank of the engine takes versions that lie in shared memory, and live streams."""

import msgspec
import pytest
from engine_thread import ThreadRank, feed_of, tokens_of
from engine_versions import MORE, changed, fresh, one_thread, tiny
from mapped_sources import Slab, Stream

from engine_reference import PROMPTS
from weightcast.engines.embedded.messages import Release, Rollback, Settle, Verify
from weightcast.errors import DigestMismatch, InvalidInput, SourceFailed
from weightcast.transports import registry

__all__ = ["one_thread", "tiny"]  # fixtures


@pytest.fixture
def slabs(tiny, monkeypatch):
    """Opened connections to a publisher that holds some versions."""
    opened = []
    versions = tiny.tensors | {"v3": changed(tiny.tensors["v2"], seed=3)}

    def open_slab(*_):
        opened.append(Slab(**versions))
        return opened[-1]

    monkeypatch.setitem(registry._SCHEMES, "slab", open_slab)
    return opened


def from_slab(version):
    return [feed_of("main", "slab:///run", take=version)]


@pytest.mark.parametrize("commit", ["auto", "swap", "inplace"])
def test_a_version_in_shared_memory_is_taken_in_every_mode(commit, tiny, slabs):
    with ThreadRank(tiny.v1) as rank:
        result = rank.update("u", from_slab("v2"), commit=commit)
        assert (result["version"], result["mode"]) == ("v2", "copy" if commit == "auto" else commit)
        assert tokens_of(rank.ask(PROMPTS[0], max_tokens=MORE)) == fresh(tiny.v2, PROMPTS[0], MORE)
        rank.job(Verify())


def test_a_rank_keeps_its_connection_until_it_sleeps(tiny, slabs):
    feeds = {version: from_slab(version) for version in ("v2", "v3", "v1")}
    asking = len(slabs)
    with ThreadRank(tiny.v1) as rank:
        for version in ("v2", "v3"):
            rank.update(version, feeds[version], commit="swap")
        (mine,) = slabs[asking:]
        assert (mine.closed, len(mine.asked)) == (0, 2)
        mine.after = refuse
        with pytest.raises(SourceFailed, match="overwritten"):
            rank.stage("u", feeds["v1"])
        assert mine.closed == 1
        rank.update("v1", feeds["v1"])
        rank.update("in place", feeds["v2"], commit="inplace")
        assert [one.closed for one in slabs[asking:]] == [1, 1]  # it was used until the commit had ended
        rank.update("again", feeds["v3"])
        assert [one.closed for one in slabs[asking:]] == [1, 1, 0]
        rank.done(Release(tags=("weight",)))
        assert [one.closed for one in slabs[asking:]] == [1, 1, 1]


def refuse():
    raise SourceFailed("it was overwritten")


def stream_feed(monkeypatch, stream):
    """The feed of a stream, and the scheme that it is opened by."""
    monkeypatch.setitem(registry._SCHEMES, "stream", lambda *_: stream)
    return feed_of("main", "stream:///run")


def test_a_rank_tells_what_a_stream_was_and_serves_it(tiny, monkeypatch):
    stream = Stream(tiny.tensors["v2"], "v2", size=100_000)
    feed = stream_feed(monkeypatch, stream)
    assert not msgspec.json.decode(feed.manifest)["root_digest"]
    with ThreadRank(tiny.v1) as rank:
        vote = rank.stage("u", [feed], commit="swap")
        assert vote["verify_s"] > 0
        assert vote["nbytes"] == sum(one.nbytes for one in tiny.tensors["v2"].values())
        (read,) = vote["reads"]
        assert (read["version"], read["root_digest"]) == ("v2", stream.sealed.root_digest)
        rank.commit("u")
        rank.done(Settle(update="u"))
        assert tokens_of(rank.ask(PROMPTS[0], max_tokens=MORE)) == fresh(tiny.v2, PROMPTS[0], MORE)
        rank.job(Verify())
        rank.update("back", [feed_of("main", tiny.full, take="v1")])
        rank.done(Rollback())
        rank.job(Verify())
        (read,) = rank.stage("known", [feed_of("main", tiny.full, take="v2")])["reads"]
        assert read["root_digest"] == stream.sealed.root_digest


@pytest.mark.parametrize(
    ("tamper", "commit", "error"),
    [
        (lambda piece: piece._replace(digest=""), "auto", SourceFailed),
        (lambda piece: piece._replace(data=memoryview(bytes(len(piece.data)))), "swap", DigestMismatch),
        (None, "inplace", InvalidInput),
    ],
)
def test_a_stream_that_cannot_be_proved_or_read_twice_is_refused(tamper, commit, error, tiny, monkeypatch):
    feed = stream_feed(monkeypatch, Stream(tiny.tensors["v2"], "v2", size=100_000, tamper=tamper))
    with ThreadRank(tiny.v1) as rank:
        with pytest.raises(error):
            rank.stage("u", [feed], commit=commit)
        assert tokens_of(rank.ask(PROMPTS[0], max_tokens=MORE)) == fresh(tiny.v1, PROMPTS[0], MORE)
        rank.update("next", [feed_of("main", tiny.full, take="v2")])
