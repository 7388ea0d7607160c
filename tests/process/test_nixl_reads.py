"""What comes through NIXL is what was published."""

from contextlib import closing

import msgspec
import numpy as np
import pytest

from weightcast.errors import AccessRefused, InvalidInput, NotFound, SourceFailed, VersionNotFound
from weightcast.transports.base import AcknowledgingReceiver, LandingReceiver
from weightcast.transports.http.access import Access
from weightcast.transports.nixl.receiver import NixlReceiver

from . import sample
from .nixl_stand import MIB, large, memories, needs_nixl, served, soon, wrong

pytestmark = needs_nixl


@pytest.fixture(scope="module")
def depot(tmp_path_factory):
    from weightcast import Store

    store = Store(tmp_path_factory.mktemp("nixl") / "store")
    sample.publish(store.path, "near_1")
    sample.publish(store.path, "near_2")
    store.publish("large", large(3), "full", part_nbytes=5 * MIB)
    with served(store, token="secret") as one:
        yield one


@pytest.fixture(scope="module")
def receiver(depot):
    one = NixlReceiver(depot.url, access=Access("secret"), bucket_nbytes=3 * MIB // 2)
    yield one
    one.close()


@pytest.mark.parametrize("version", ["near_1", "near_2", "large"])
def test_landings_and_pieces_are_bit_exact(receiver, version):
    manifest = receiver.manifest(version, deadline=soon())
    landed, pieced = memories(manifest), memories(manifest)
    told = dict.fromkeys(landed, 0)
    for one in receiver.landings(manifest, landed, deadline=soon()):
        told[one.name] += one.nbytes
    for piece in receiver.pieces(manifest, deadline=soon()):
        pieced[piece.tensor][piece.offset : piece.offset + len(piece.data)] = piece.data
    assert told == {name: entry.nbytes for name, entry in manifest.transfers().items()}
    assert wrong(manifest, landed) == wrong(manifest, pieced) == []
    assert (manifest.kind == "delta") == (version == "near_2")


def test_some_tensors_can_be_had_alone(receiver):
    manifest = receiver.manifest("large", deadline=soon())
    wanted = {"layer.3", "layer.5"}
    room = {name: memory for name, memory in memories(manifest).items() if name in wanted}
    assert {one.name for one in receiver.landings(manifest, room, deadline=soon())} == wanted
    assert {piece.tensor for piece in receiver.pieces(manifest, deadline=soon(), names=wanted)} == wanted
    assert not set(wrong(manifest, room | memories(manifest) | room)) & wanted


def test_the_agent_and_the_buckets_are_made_once_and_nobody_holds_anything_afterwards(receiver, depot):
    manifest = receiver.manifest("large", deadline=soon())
    before = None
    for _ in range(3):
        for _ in receiver.pieces(manifest, deadline=soon()):
            assert len(depot.leases.holds) == 1
        now = receiver._agents.made, [id(bucket) for bucket in receiver._ring[1]]
        assert before in (None, now)
        before = now
        assert len(receiver._ring[1]) == 4
        assert len(depot.leases.holds) == 0


def test_reading_can_be_cancelled_and_begun_again(receiver, depot):
    manifest = receiver.manifest("large", deadline=soon())
    for way in ("landings", "pieces"):
        room = [memories(manifest)] if way == "landings" else []
        going = getattr(receiver, way)(manifest, *room, deadline=soon())
        next(going)
        going.close()
        assert receiver._agents.made is None  # dropped: reads of it may have been moving
        assert len(depot.leases.holds) == 0
    room = memories(manifest)
    for _ in receiver.landings(manifest, room, deadline=soon()):
        pass
    assert wrong(manifest, room) == []


def test_a_receiver_that_is_closed_in_the_middle_fails_and_can_be_used_again(receiver):
    manifest = receiver.manifest("large", deadline=soon())
    going = receiver.pieces(manifest, deadline=soon())
    next(going)
    receiver.close()
    with pytest.raises(SourceFailed):
        for _ in going:
            pass
    assert sum(len(piece.data) for piece in receiver.pieces(manifest, deadline=soon())) == manifest.nbytes


def test_what_cannot_be_received_is_refused_before_anything_is_read(receiver, depot):
    manifest = receiver.manifest("large", deadline=soon())
    frozen = np.zeros(2 * MIB, np.uint8)
    frozen.flags.writeable = False
    bad = {"layer.0": np.zeros(5, np.uint8), "layer.1": frozen, "what": np.zeros(5, np.uint8)}
    with pytest.raises(InvalidInput) as caught:
        next(receiver.landings(manifest, bad, deadline=soon()))
    assert all(name in str(caught.value) for name in bad)
    other = receiver.manifest("near_1", deadline=soon())
    mixed = msgspec.structs.replace(manifest, root_digest=other.root_digest)
    with pytest.raises(SourceFailed, match="root digest"):
        next(receiver.pieces(mixed, deadline=soon()))
    with pytest.raises(VersionNotFound):
        receiver.manifest("nowhere", deadline=soon())
    lent = NixlReceiver(depot.url, access=Access("secret"), mode="gdr")
    with closing(lent), pytest.raises(NotFound, match="not lent"):
        next(lent.pieces(manifest, deadline=soon()))
    stranger = NixlReceiver(depot.url)
    with closing(stranger), pytest.raises(AccessRefused):
        stranger.manifest("large", deadline=soon())
    assert len(depot.leases.holds) == 0


def test_a_receiver_tells_the_newest_version_and_acknowledges(receiver):
    assert isinstance(receiver, LandingReceiver)
    assert isinstance(receiver, AcknowledgingReceiver)
    assert receiver.newest() == receiver.wait_newer("near_1", deadline=soon()) == "large"
    receiver.acknowledge(receiver.manifest("large", deadline=soon()), "replica", deadline=soon())
