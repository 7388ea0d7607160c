"""Boxes and whole tensors received from several publishers, whatever sharding they have."""

import threading
import time
from contextlib import closing
from urllib.parse import urlsplit

import numpy as np
import pytest
from shares_detour import Detour
from shares_world import columns_of, fetched, model, publish, receiving, rows_of, same, share_of, soon, trainers

from weightcast import DepotPublisher, LiveModel, Shard, Store
from weightcast.clock import Deadline
from weightcast.errors import (
    AccessRefused,
    Conflict,
    DeadlineExceeded,
    DigestMismatch,
    InvalidInput,
    ManifestCorrupt,
    SourceFailed,
    VersionNotFound,
    VersionNotSet,
)
from weightcast.tensors.boxes import Box, Held, box_of
from weightcast.tensors.digest import PIECE_NBYTES
from weightcast.tensors.flat import flat_bytes
from weightcast.tensors.sums import array_sum
from weightcast.transports.base import AcknowledgingReceiver, LandingReceiver, Range, RangeReceiver
from weightcast.transports.http.access import Access
from weightcast.transports.http.client import DepotClient
from weightcast.transports.http.shares import SharesReceiver
from weightcast.worker.shards import Shards, cut


@pytest.fixture
def arrays():
    return model()


@pytest.fixture
def four(arrays):
    with trainers(4) as publishers:
        publish(publishers, "step_1", arrays)
        yield publishers


def test_boxes_of_any_sharding_come_from_any_other_bit_by_bit(four, arrays):
    with receiving(four[::-1]) as receiver:
        assert isinstance(receiver, RangeReceiver)
        assert isinstance(receiver, LandingReceiver)
        assert isinstance(receiver, AcknowledgingReceiver)
        manifest = receiver.manifest(receiver.newest(), deadline=soon())
        for ranks in (1, 2, 3):
            for rank in range(ranks):
                boxes = [
                    *((name, rows_of(arrays[name], rank, ranks)) for name in ("embed", "up", "experts", "nothing")),
                    *((name, columns_of(arrays[name], rank, ranks)) for name in ("embed", "up")),
                    ("norm", Box((7,), (11,))),
                    ("scale", Box.whole(())),
                ]

                found = fetched(receiver, manifest, boxes)

                for (name, box), array in zip(boxes, found, strict=True):
                    assert same(array, box_of(arrays[name], box))


def test_whole_tensors_land_and_prove_themselves(four, arrays):
    with receiving(four) as receiver:
        manifest = receiver.manifest("step_1", deadline=soon())
        memories = {name: flat_bytes(np.empty_like(array)) for name, array in arrays.items() if array.nbytes}

        with closing(receiver.landings(manifest, memories, deadline=soon())) as told:
            landed = {one.name: (one.offset, one.nbytes) for one in told}

        assert landed == {name: (0, len(memory)) for name, memory in memories.items()}
        for entry in manifest.tensors:
            if entry.nbytes:
                array = memories[entry.name].view(entry.dtype.numpy).reshape(entry.shape)
                assert same(array, arrays[entry.name])
                assert (entry.digest, str(array_sum(entry.sum_spec, array))) == ("", entry.sum)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("tied", [{}, {"zero": "norm", "a_head": "embed"}], ids=["untied", "tied"])
def test_the_sums_and_the_root_are_those_of_the_same_weights_published_whole(arrays, tmp_path, ranks, tied):
    whole = Store(tmp_path / "store").publish("step_1", arrays | {name: arrays[holder] for name, holder in tied.items()})
    with trainers(ranks) as publishers, receiving(publishers) as receiver:
        for rank, one in enumerate(publishers):
            share = share_of(arrays, rank, ranks)
            one.publish("step_1", share | {name: share[holder] for name, holder in tied.items()})
        manifest = receiver.manifest("step_1", deadline=soon())
        live = {name: np.zeros_like(array) for name, array in arrays.items()}
        live |= {name: live[holder] for name, holder in tied.items()}
        LiveModel(live, source=receiver).update(commit="copy")
    assert manifest.tied == whole.tied == tied
    assert {(entry.name, entry.summed_as, entry.sum) for entry in manifest.tensors} == {
        (entry.name, entry.summed_as, entry.sum) for entry in whole.tensors
    }
    assert manifest.root_digest == whole.root_digest
    assert all(same(live[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("commit", ["copy", "swap", "inplace"])
def test_a_model_that_is_not_sharded_is_updated_from_shares(four, arrays, commit):
    live = {name: np.zeros_like(array) for name, array in arrays.items()}
    with receiving(four) as receiver:
        LiveModel(live, source=receiver).update(commit=commit)
    assert all(same(live[name], array) for name, array in arrays.items())


@pytest.mark.parametrize("bucket_nbytes", [4096, 5000, 1 << 20])
def test_pieces_come_a_bucket_at_a_time_and_make_every_tensor(four, arrays, bucket_nbytes):
    with receiving(four, bucket_nbytes=bucket_nbytes) as receiver:
        manifest = receiver.manifest("step_1", deadline=soon())
        memories = {entry.name: np.zeros(entry.nbytes, dtype=np.uint8) for entry in manifest.tensors}

        with closing(receiver.pieces(manifest, deadline=soon())) as pieces:
            for piece in pieces:
                assert len(piece.data) <= bucket_nbytes
                before = bytes(piece.data)
                time.sleep(0.002)  # others come meanwhile
                assert before == piece.data
                memories[piece.tensor][piece.offset : piece.offset + len(piece.data)] += np.frombuffer(piece.data, np.uint8)
        named = [piece.tensor for piece in receiver.pieces(manifest, deadline=soon(), names={"norm"})]

    assert all(memories[name].tobytes() == array.tobytes() for name, array in arrays.items())
    assert named == ["norm"]


def test_a_rank_receives_little_more_than_its_own_bytes_and_replicas_share_the_work():
    arrays = model(rows=1 << 14) | {"table": np.random.default_rng(2).standard_normal((1 << 12, 1 << 10))}
    with trainers(4) as publishers:
        publish(publishers, "step_1", arrays)
        with receiving(publishers) as receiver:
            manifest = receiver.manifest("step_1", deadline=soon())
            asked_before = receiver.received_nbytes
            before = [one._depot.stats().sent_nbytes for one in publishers]
            boxes = [("embed", rows_of(arrays["embed"], 1, 3)), ("table", Box.whole((1 << 12, 1 << 10)))]

            found = fetched(receiver, manifest, boxes)

            own = sum(array.nbytes for array in found)
            sent = [one._depot.stats().sent_nbytes - start for one, start in zip(publishers, before, strict=True)]
            most = own + 3 * 4 * PIECE_NBYTES  # the edges of what comes from each
            assert own <= receiver.received_nbytes - asked_before <= sum(sent) <= 1.02 * most
            assert max(sent) <= 0.3 * most  # all four hold the table, which is nearly everything


def test_a_cut_takes_the_boxes_of_a_rank_and_nothing_else(four, arrays):
    with receiving(four) as receiver:
        manifest = receiver.manifest("step_1", deadline=soon())
        entries = manifest.by_name()
        boxes = {name: Box.whole(array.shape) for name, array in arrays.items()}
        boxes |= {"embed": columns_of(arrays["embed"], 1, 2), "experts": rows_of(arrays["experts"], 0, 2)}
        held = tuple(Held.slice_of(entries[name].spec, box) for name, box in boxes.items())
        shards = Shards(held, {name: array.shape for name, array in arrays.items()})
        before = receiver.received_nbytes

        version = cut(
            receiver, manifest, shards,
            held=None, mode="copy", checksum=True, deadline=soon(), progress=lambda *_: None,
        )  # fmt: skip

        shard = version.manifest(version.newest(), deadline=soon())
        found = version.arrays(shard)
        assert all(same(found[name], box_of(arrays[name], box)) for name, box in boxes.items())
        assert receiver.received_nbytes - before == sum(file.nbytes for file in manifest.shares)  # each is less than a piece
        assert not any(entry.proof for entry in shard.tensors)  # they are summed when they are staged

        streamed = cut(
            receiver, manifest, shards,
            held=None, mode="inplace", checksum=True, deadline=soon(), progress=lambda *_: None,
        )  # fmt: skip

        sums = {one.spec.name: str(array_sum(one.spec, found[one.spec.name])) for one in held}
        assert {entry.name: entry.proof for entry in streamed.shard.tensors} == sums


def test_a_rank_that_holds_no_element_publishes_all_the_same():
    whole = np.arange(6, dtype=np.int16).reshape(3, 2)
    with trainers(4) as publishers, receiving(publishers) as receiver:
        for rank, one in enumerate(publishers):
            box = rows_of(whole, rank, 4)
            one.publish("step_1", {"w": Shard(box_of(whole, box), whole.shape, box.start)})
        manifest = receiver.manifest("step_1", deadline=soon())
        found = fetched(receiver, manifest, [("w", Box((0, 1), (3, 1)))])
    assert same(found[0], whole[:, 1:])
    assert [box.ranks for box in manifest.boxes["w"]] == [(0,), (1,), (2,)]


def test_the_newest_version_is_the_last_that_all_ranks_have(four, arrays):
    other = model(2)
    with receiving(four) as receiver:
        for rank in (0, 1, 3):
            four[rank].publish("step_2", share_of(other, rank, 4))
        assert receiver.newest() == "step_1"
        with pytest.raises(DeadlineExceeded):
            receiver.wait_newer("step_1", deadline=Deadline.after(0.3))
        with pytest.raises(VersionNotFound, match="step_2 is not in the memory of trainer rank 2"):
            receiver.manifest("step_2", deadline=soon())

        late = threading.Timer(0.2, lambda: four[2].publish("step_2", share_of(other, 2, 4)))
        late.start()
        assert receiver.wait_newer("step_1", deadline=soon()) == "step_2"
        late.join()
        manifest = receiver.manifest("step_2", deadline=soon())
        found = fetched(receiver, manifest, [("embed", Box.whole(other["embed"].shape))])
        assert same(found[0], other["embed"])


def test_without_a_version_of_all_ranks_there_is_no_newest():
    with trainers(2) as publishers, receiving(publishers) as receiver:
        publishers[0].publish("step_1", share_of(model(), 0, 2))
        with pytest.raises(VersionNotSet):
            receiver.newest()


def test_publishers_that_are_not_all_given_or_given_twice_are_told(four):
    with receiving(four[:3]) as receiver, pytest.raises(InvalidInput, match="shared by 4 publishers, and 3 URL"):
        receiver.manifest("step_1", deadline=soon())
    with pytest.raises(InvalidInput, match="each once"):
        SharesReceiver([four[0].url] * 2)
    again = four[0].url.replace("127.0.0.1", "localhost")
    twice = SharesReceiver([again, *(one.url for one in four[:3])])
    with closing(twice), pytest.raises(ManifestCorrupt, match="rank 0 is there 2 times"):
        twice.manifest("step_1", deadline=soon())


def test_the_url_of_a_receiver_opens_another_one(four, tmp_path):
    (tmp_path / "token").write_text("secret")
    with receiving(four) as receiver:
        assert receiver.url == "shares+http://" + ",".join(one.url.removeprefix("http://") for one in four)
        options = {"bucket_nbytes": "65536", "token_file": str(tmp_path / "token")}
        with closing(SharesReceiver.open(urlsplit(receiver.url), options)) as other:
            assert other.url == receiver.url
            assert other.newest() == "step_1"


def test_replicas_that_differ_are_refused_and_all_are_listed(arrays):
    other = {name: np.flip(array).copy() for name, array in arrays.items()}
    with trainers(2) as publishers, receiving(publishers) as receiver:
        for rank, one in enumerate((arrays, other)):
            publishers[rank].publish("step_1", share_of(one, rank, 2))
        with pytest.raises(ManifestCorrupt, match="the box of tensor 'norm' at"):
            receiver.manifest("step_1", deadline=soon())


def test_a_manifest_is_asked_for_again_by_a_receiver_that_does_not_know_it_and_another_one_is_refused(four, arrays):
    with receiving(four) as first, receiving(four) as second:
        manifest = first.manifest("step_1", deadline=soon())
        found = fetched(second, manifest, [("norm", Box.whole((48,)))])
        assert same(found[0], arrays["norm"])
    with trainers(4) as others, receiving(others) as third:
        publish(others, "step_1", model(9))
        with pytest.raises(SourceFailed, match="published again"):
            fetched(third, manifest, [("norm", Box.whole((48,)))])


def test_a_payload_that_is_gone_since_its_rank_published_the_version_again_is_told(arrays):
    later = arrays | {"norm": arrays["norm"] + 1}
    with trainers(2) as publishers:
        publish(publishers, "step_1", arrays)
        publish(publishers, "step_2", later)
        with receiving(publishers) as receiver:
            manifest = receiver.manifest("step_2", deadline=soon())
        assert len(manifest.payloads) == 2
        publishers[1].close()
        with DepotPublisher(urlsplit(publishers[1].url).netloc, rank=1, ranks=2) as again, receiving(publishers) as other:
            again.publish("step_2", share_of(later, 1, 2))
            wanted = [Range(one.file, 0, np.empty(one.nbytes, np.uint8)) for one in manifest.payloads]
            with pytest.raises(SourceFailed, match=r"published again without delta-00002.bin"):
                list(other.ranges(manifest, wanted, deadline=soon()))
            with (
                pytest.raises(SourceFailed, match=r"published again without delta-00002.bin"),
                other._client.opened_range(manifest, "delta-00002.bin", 0, 1, deadline=soon()),
            ):
                pass


def test_a_dead_publisher_is_done_without_where_others_hold_its_boxes(four, arrays):
    with receiving(four, stall_s=2) as receiver:
        manifest = receiver.manifest("step_1", deadline=soon())
        four[1].close()

        found = fetched(receiver, manifest, [("norm", Box.whole((48,))), ("embed", rows_of(arrays["embed"], 0, 4))])
        assert same(found[0], arrays["norm"])

        with pytest.raises(SourceFailed, match=r"share-00001.bin failed, and no other publisher holds these boxes of embed"):
            fetched(receiver, manifest, [("embed", Box.whole(arrays["embed"].shape))])


def test_a_publisher_that_dies_in_the_middle_is_done_without():
    arrays = {"table": np.random.default_rng(2).standard_normal((1 << 9, 1 << 11))}
    with trainers(2) as publishers:
        for one in publishers:
            one.publish("step_1", arrays)
        with (
            Detour(publishers[0].url, after=1 << 20) as broken,
            closing(SharesReceiver([broken, publishers[1].url], stall_s=0.5)) as receiver,
        ):
            manifest = receiver.manifest("step_1", deadline=soon())
            found = fetched(receiver, manifest, [("table", Box.whole((1 << 9, 1 << 11)))])
    assert same(found[0], arrays["table"])


def test_a_byte_that_changes_on_the_way_is_noticed(arrays):
    with trainers(2) as publishers:
        publish(publishers, "step_1", arrays)
        with (
            Detour(publishers[0].url, flip=2000) as lying,
            closing(SharesReceiver([lying, publishers[1].url])) as receiver,
        ):
            manifest = receiver.manifest("step_1", deadline=soon())
            with pytest.raises(DigestMismatch, match=r"of share-00000\.bin: expected"):
                fetched(receiver, manifest, [("embed", Box.whole(arrays["embed"].shape))])


def test_memory_of_a_publisher_that_changed_is_noticed_and_another_one_asked(four, arrays):
    with receiving(four) as receiver:
        manifest = receiver.manifest("step_1", deadline=soon())
        shelf = four[0]._shelf
        for name in ("embed", "norm"):
            with shelf.holding("step_1") as held:
                entry = next(one for one in held.share.entries if one.name == name)
                shelf._slots[0].memory.bytes[entry.offset] ^= 1

        found = fetched(receiver, manifest, [("norm", Box((0,), (1,)))])
        assert same(found[0], arrays["norm"][:1])
        with pytest.raises(DigestMismatch, match=r"of share-00000\.bin: expected"):
            fetched(receiver, manifest, [("embed", Box((0, 0), (1, 4)))])


def test_a_version_that_made_room_for_newer_ones_is_told_to_be_gone(four, arrays):
    with receiving(four) as receiver:
        manifest = receiver.manifest("step_1", deadline=soon())
        for step in (2, 3):
            publish(four, f"step_{step}", model(step))
        with pytest.raises(SourceFailed, match="step_1 is not in the memory"):
            fetched(receiver, manifest, [("embed", Box.whole(arrays["embed"].shape))])
        assert receiver.newest() == "step_3"


def test_closing_early_and_the_deadline_end_all_threads(four, arrays):
    with receiving(four) as receiver:
        manifest = receiver.manifest("step_1", deadline=soon())
        memories = {name: flat_bytes(np.empty_like(array)) for name, array in arrays.items() if array.nbytes}
        told = receiver.landings(manifest, memories, deadline=soon())
        next(told)
        told.close()
        with pytest.raises(DeadlineExceeded):
            list(receiver.landings(manifest, memories, deadline=Deadline.after(0)))
    assert not [thread for thread in threading.enumerate() if "shares" in thread.name]


def test_receivers_show_their_token_and_tell_what_they_serve(arrays):
    with trainers(2, token="secret") as publishers:
        publications = [one.publish("step_1", share_of(arrays, rank, 2)) for rank, one in enumerate(publishers)]
        with receiving(publishers) as receiver, pytest.raises(AccessRefused):
            receiver.newest()
        with receiving(publishers, access=Access("secret")) as receiver:
            manifest = receiver.manifest(receiver.newest(), deadline=soon())
            with pytest.raises(DeadlineExceeded, match="0 did"):
                publications[0].wait(timeout=0)
            receiver.acknowledge(manifest, "engine 0", deadline=soon())
            receiver.acknowledge(manifest, "engine 0", deadline=soon())
            for publication in publications:
                publication.wait(1, timeout=5)
                assert publication.taken == ["engine 0"]


def test_a_share_is_not_taken_for_a_whole_version(four):
    with closing(DepotClient(four[2].url)) as client:
        assert client.catalogue(deadline=soon()).versions[0].shares == 4
        with pytest.raises(Conflict, match="shared by 4 publishers, and this is rank 2"):
            client.manifest("step_1", deadline=soon())
