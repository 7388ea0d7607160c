"""Where a trainer puts its versions for vLLM servers; the trainer itself needs vLLM, and is tested in tests/vllm."""

from urllib.parse import quote

import numpy as np
import pytest

from weightcast import LiveModel, Store
from weightcast.engines.vllm.outlet import open_outlet
from weightcast.errors import InvalidInput

torch = pytest.importorskip("torch")


def outlet(place, **changes):
    settings = {"listen": "127.0.0.1:0", "source": None, "keep": 2, "delta": True, "prefix": "step_", "token_file": None}
    return open_outlet(str(place), **settings | {"timeout_s": 30.0} | changes)


def stepped(step, *, reused=None):
    """Two tensors of a step, one after the other, perhaps in the same memory."""
    for name in ("a", "b"):
        tensor = torch.full((4, 3), float(step if name == "a" else -step))
        yield name, tensor if reused is None else reused.copy_(tensor)


def received(url, version):
    held = {"a": np.zeros((4, 3), "float32"), "b": np.zeros((4, 3), "float32")}
    with LiveModel(held, source=url) as live:
        live.update(version)
    return held["a"][0, 0], held["b"][0, 0]


@pytest.mark.parametrize("place", ["ipc", "http", "store"])
@pytest.mark.parametrize("lasting", [True, False])
def test_every_place_gives_versions_that_receivers_can_open(place, lasting, tmp_path):
    opened = outlet(tmp_path / "store" if place == "store" else place)
    try:
        reused = None if lasting else torch.empty(4, 3)
        versions = [opened.publish(stepped(step, reused=reused), metadata={"m": "x"}, lasting=lasting) for step in (1, 2)]

        assert versions == ["step_1", "step_2"]
        assert received(opened.url, "step_2") == (2, -2)
        assert received(opened.url, "step_1") == (1, -1)
        opened.tidy()
    finally:
        opened.close()
        opened.close()


def test_a_publication_that_fails_does_not_stand_in_the_way_of_the_next(tmp_path):
    def broken():
        yield "a", torch.zeros(4, 3)
        raise RuntimeError("no more")

    for place in ("ipc", tmp_path / "store"):
        opened = outlet(place)
        with pytest.raises(RuntimeError, match="no more"):
            opened.publish(broken(), metadata={}, lasting=True)
        assert received(opened.url, opened.publish(stepped(5), metadata={}, lasting=True)) == (5, -5)
        opened.close()


def test_a_store_counts_on_takes_deltas_and_keeps_the_last_versions(tmp_path):
    base = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    first = outlet(tmp_path)
    assert first.publish(iter([("a", base)]), metadata={}, lasting=True) == "step_1"

    again = outlet(tmp_path.as_uri())
    base[0, 0] += 1
    assert again.publish(iter([("a", base)]), metadata={}, lasting=True) == "step_2"
    full = outlet(tmp_path, delta=False, keep=1)
    base[0, 0] += 1
    assert full.publish(iter([("a", base)]), metadata={}, lasting=True) == "step_3"

    store = Store(tmp_path)
    assert [store.manifest(version).kind for version in store.versions()] == ["full", "delta", "full"]
    full.tidy()
    assert store.versions() == ["step_3"]


def test_a_token_of_a_file_is_asked_for_and_stays_out_of_the_url(tmp_path):
    secret = tmp_path / "a token"
    secret.write_text("0123456789abcdef\n")
    opened = outlet("http", token_file=str(secret))
    opened.publish(stepped(1), metadata={}, lasting=True)
    try:
        assert received(f"{opened.url}?token_file={quote(str(secret))}", "step_1") == (1, -1)
        assert "?" not in opened.url, "requests carry no options of the operator"
        with pytest.raises(Exception, match="token"):
            received(opened.url, "step_1")
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("place", "changes", "why"),
    [
        ("s3://bucket", {}, "no place to publish"),
        ("file://other/path", {}, "no place to publish"),
        ("ipc", {"keep": 0}, "at least one"),
        ("ipc", {"prefix": "a/b"}, "version id"),
        ("ipc", {"token_file": "x"}, "token_file is for"),
        ("http", {"listen": "0.0.0.0:0"}, "where servers find it"),
        ("http", {"listen": "[::]:0"}, "where servers find it"),
    ],
)
def test_places_and_settings_that_cannot_work_are_refused(place, changes, why):
    with pytest.raises(InvalidInput, match=why):
        outlet(place, **changes)


def test_a_source_that_names_a_tensor_twice_is_refused():
    opened = outlet("ipc")
    try:
        with pytest.raises(InvalidInput, match="yields a twice"):
            opened.publish(iter([("a", torch.zeros(2)), ("a", torch.zeros(2))]), metadata={}, lasting=True)
    finally:
        opened.close()
