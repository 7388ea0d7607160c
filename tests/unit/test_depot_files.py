"""What a depot answers about versions and their files, asked by a client that is not ours."""

from __future__ import annotations

import contextlib
import http.client
import threading

import msgspec
import pytest
from depot_stand import PART, WAIT_S, ask, ask_on, file_path, nothing_left, part_bytes, serving, tensors

from weightcast import Store
from weightcast.depot.ranges import asked_range, names_tag
from weightcast.wire.depot import Catalogue, file_tag
from weightcast.wire.manifest import decode_manifest


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("depot") / "store")
    store.publish("step_1", tensors(), files={"config.json": b'{"a": 1}', "nothing.txt": b""})
    return store


@pytest.fixture(scope="module")
def depot(store):
    with nothing_left(), serving(store) as depot:
        yield depot


@pytest.fixture(scope="module")
def tag(store):
    return file_tag(store.manifest("step_1"), PART)


def test_health_and_versions_and_newest_are_told(depot, store):
    manifest = store.manifest("step_1")

    catalogue = msgspec.json.decode(ask(depot, "/v1/versions").body, type=Catalogue)

    assert ask(depot, "/health").json == {"status": "ok"}
    assert catalogue.newest == "step_1"
    assert [(one.version, one.kind, one.root_digest, one.nbytes, one.complete) for one in catalogue.versions] == [
        ("step_1", "full", manifest.root_digest, manifest.nbytes, True)
    ]
    assert ask(depot, "/v1/newest").json == {"version": "step_1", "sequence": 1, "root_digest": manifest.root_digest}


def test_a_manifest_comes_as_it_was_sealed_and_only_if_it_is_not_known_yet(depot, store):
    path = "/versions/step_1/manifest.json"

    first = ask(depot, path)
    known = ask(depot, path, If_None_Match=f'"other", {first.headers["etag"]}')

    assert decode_manifest(first.body, "answer") == store.manifest("step_1")
    assert (known.status, known.body) == (304, b"")
    assert ask(depot, path, If_None_Match='"other"').status == 200


@pytest.mark.parametrize("file", [PART, "config.json", "nothing.txt", "model.safetensors.index.json"])
def test_a_whole_file_comes_as_it_lies_in_the_store(depot, store, file):
    answer = ask(depot, file_path(file))

    assert answer.status == 200
    assert answer.body == (store.path / "versions" / "step_1" / file).read_bytes()
    assert answer.headers["accept-ranges"] == "bytes"


RANGES = [
    ("bytes=0-0", 0, 1), ("bytes=0-99", 0, 100), ("bytes=100-", 100, None), ("bytes=-100", -100, None),
    ("bytes=5-99999999999", 5, None), ("bytes=-99999999999", 0, None), ("Bytes= 7-9 ", 7, 10),
]  # fmt: skip


@pytest.mark.parametrize(("field", "start", "stop"), RANGES)
def test_a_range_comes_as_a_part_and_says_which(depot, store, field, start, stop):
    data = part_bytes(store)
    first, last, _ = slice(start, stop).indices(len(data))

    answer = ask(depot, file_path(), Range=field)

    assert answer.status == 206
    assert answer.body == data[first:last]
    assert answer.headers["content-range"] == f"bytes {first}-{last - 1}/{len(data)}"


def test_several_ranges_come_in_one_answer(depot, store):
    data = part_bytes(store)

    answer = ask(depot, file_path(), Range=f"bytes=0-1, 7-4999 ,5000-{len(data) - 1}")

    kind, _, boundary = answer.headers["content-type"].partition("; boundary=")
    assert (answer.status, kind) == (206, "multipart/byteranges")
    before, *parts, after = answer.body.split(f"\r\n--{boundary}".encode())
    assert (before, after) == (b"", b"--\r\n")
    for part, (start, stop) in zip(parts, ((0, 2), (7, 5000), (5000, len(data))), strict=True):
        head, _, body = part.partition(b"\r\n\r\n")
        assert f"Content-Range: bytes {start}-{stop - 1}/{len(data)}" in head.decode().split("\r\n")
        assert body == data[start:stop]


@pytest.mark.parametrize(
    "field",
    ["3-4,0-1", "0-5,5-9", "0-1,99999990-99999999", "0-1,5-", "0-1,-5", "0-1,,5-6", "0-1,6-5"]
    + [",".join(f"{number}-{number}" for number in range(0, 2 * count, 2)) for count in (65, 5000)],
)
def test_several_ranges_that_would_send_more_than_the_file_or_make_no_sense_are_the_whole_file(depot, store, field):
    answer = ask(depot, file_path(), Range=f"bytes={field}")

    assert (answer.status, len(answer.body)) == (200, len(part_bytes(store)))


@pytest.mark.parametrize("field", ["bytes=9-5", "bytes=-", "bytes=a-b", "lines=0-1", "bytes=", "bytes=+1-2"])
def test_what_is_not_one_range_is_answered_with_the_whole_file(depot, store, field):
    answer = ask(depot, file_path(), Range=field)

    assert (answer.status, len(answer.body)) == (200, len(part_bytes(store)))


@pytest.mark.parametrize("field", ["bytes=99999999-", "bytes=99999999-99999999999", "bytes=-0"])
def test_a_range_outside_of_the_file_is_refused_with_its_size(depot, store, field):
    answer = ask(depot, file_path(), Range=field)

    assert answer.status == 416
    assert answer.headers["content-range"] == f"bytes */{len(part_bytes(store))}"
    assert answer.json["code"] == "invalid_input"


def test_a_range_of_an_empty_file_is_outside_of_it(depot):
    assert ask(depot, file_path("nothing.txt"), Range="bytes=0-0").status == 416
    assert ask(depot, file_path("nothing.txt"), Range="bytes=-5").status == 416


def test_a_range_of_bytes_that_are_not_here_any_more_is_the_whole_file(depot, store, tag):
    assert ask(depot, file_path(), Range="bytes=0-9", If_Range=tag).status == 206
    for other in ('"xxh3-128:00/x"', f"W/{tag}", "Mon, 16 Nov 2020 10:00:00 GMT"):
        answer = ask(depot, file_path(), Range="bytes=0-9", If_Range=other)
        assert (answer.status, answer.body) == (200, part_bytes(store))


def test_a_file_is_sent_only_if_it_is_the_one_that_is_meant(depot, tag):
    assert ask(depot, file_path(), If_Match=f'"other", {tag}').status == 200
    assert ask(depot, file_path(), If_Match="*").status == 200
    refused = ask(depot, file_path(), If_Match=f'"other", W/{tag}')
    assert (refused.status, refused.json["code"]) == (412, "conflict")
    assert ask(depot, file_path(), If_None_Match=f"W/{tag}").status == 304
    assert ask(depot, file_path(), If_None_Match="*").status == 304


def test_a_head_request_has_the_headers_of_the_whole_file_and_no_body(depot, store, tag):
    answer = ask(depot, file_path(), "HEAD", Range="bytes=0-9")

    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-length"] == str(len(part_bytes(store)))
    assert answer.headers["etag"] == tag


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/versions/step_9/manifest.json", 404, "version_not_found"),
        ("/versions/step_9/x", 404, "version_not_found"),
        ("/versions/../manifest.json", 422, "invalid_input"),
        ("/versions/%2e%2e/manifest.json", 422, "invalid_input"),
        ("/versions/step_1/..%2f..%2fversion.yaml", 404, "not_found"),
        ("/versions/step_1/../../version.yaml", 404, "not_found"),
        ("/versions/step_1/%00", 404, "not_found"),
        ("/versions/step_1/", 404, "not_found"),
        ("/versions/step_1/x/digests", 404, "not_found"),
        ("/v1/newest?wait=long", 422, "invalid_input"),
        ("/v1/newest?wait=-1", 422, "invalid_input"),
        ("/v1/newest?wait=nan", 422, "invalid_input"),
        ("/", 404, "not_found"),
        ("/v1/versions/", 404, "not_found"),
        ("/health/", 404, "not_found"),
    ],
)
def test_what_is_not_there_is_told_with_a_code(depot, path, status, code):
    answer = ask(depot, path)

    assert (answer.status, answer.json["code"]) == (status, code)


def test_the_paths_of_files_are_those_of_the_store(depot, store):
    for path in store.path.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            answer = ask(depot, f"/{path.relative_to(store.path)}")
            assert (answer.status, answer.body) == (200, path.read_bytes())


def test_waiting_for_a_newer_version_ends_when_it_is_published_or_the_time_is_over(store, tmp_path):
    fresh, answers = Store(tmp_path / "store"), []
    fresh.path.mkdir()
    with serving(fresh) as depot:
        assert (ask(depot, "/v1/newest").status, ask(depot, "/v1/newest").json["code"]) == (404, "version_not_set")
        assert ask(depot, "/v1/newest?after=step_1").status == 204
        for version in ("step_1", "step_2"):
            after = "step_1" if version == "step_2" else ""
            waiting = threading.Thread(
                target=lambda after=after: answers.append(ask(depot, f"/v1/newest?after={after}&wait=20"))
            )
            waiting.start()
            fresh.publish(version, tensors(seed=len(answers)), mode="full")
            waiting.join(WAIT_S)
            assert answers[-1].json["version"] == version
        assert ask(depot, "/v1/newest?after=step_2&wait=0.2").status == 204
        assert ask(depot, "/v1/newest?after=step_1&wait=20").json["version"] == "step_2"


def test_requests_follow_one_another_on_one_connection(depot, store):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", depot.port, timeout=WAIT_S)) as connection:
        sockets = set()
        for status, path in ((200, "/health"), (404, "/nothing"), (200, file_path()), (204, "/v1/newest?after=step_1")):
            assert ask_on(connection, path).status == status
            sockets.add(connection.sock.getsockname())
        assert ask_on(connection, file_path(), "HEAD").status == 200
        assert ask_on(connection, file_path(), Range="bytes=0-3").body == part_bytes(store)[:4]
        assert ask_on(connection, "/v1/newest", "DELETE").status == 405
        assert len(sockets | {connection.sock.getsockname()}) == 1


@pytest.mark.parametrize("nbytes", [0, 1, 2, 1000])
def test_ranges_agree_with_slices_of_python(nbytes):
    data = bytes(index % 251 for index in range(nbytes))
    for first in (0, 1, nbytes - 1, nbytes, nbytes + 1):
        for last in (0, 1, nbytes - 1, nbytes, nbytes + 7):
            if min(first, last) < 0:
                continue
            found = asked_range({"range": f"bytes={first}-{last}"}, "tag", nbytes)
            if last < first:
                assert found is None
            else:
                assert data[slice(*found)] == data[first : last + 1]
        if first >= 0:
            assert data[slice(*asked_range({"range": f"bytes={first}-"}, "tag", nbytes))] == data[first:]
            assert data[slice(*asked_range({"range": f"bytes=-{first}"}, "tag", nbytes))] == data[max(0, nbytes - first) :]


def test_tags_are_compared_whole():
    assert names_tag('"a", "b"', '"b"', weak=False)
    assert not names_tag('"ab"', '"b"', weak=False)
    assert not names_tag("", '"b"', weak=True)
