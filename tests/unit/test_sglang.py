"""Versions through SGLang's seams, against a double of them (see `sglang_double`): nothing here was run against SGLang."""

import gc
import socket
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from depot_stand import PART
from sglang_double import HookRegistry, Server, installed, serving
from sglang_model import Model, bits_of, tensors

from weightcast import Store
from weightcast.engines.sglang.plugin import register
from weightcast.engines.sglang.ranks import Ranks, Said
from weightcast.engines.sglang.request import LOADER, Request, encode_request, request_from_bytes, request_from_url
from weightcast.engines.sglang.update import bring, complete_groups
from weightcast.errors import CommitFailed, DeadlineExceeded, InvalidInput, VersionDoesNotFit
from weightcast.publish.depot_publisher import DepotPublisher

Q0 = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
FIRST, SECOND = tensors(1), tensors(1, **{"layers.1.mlp.up_proj": 0.5, "norm.weight": 1.0})


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def allowed_sources(monkeypatch):
    monkeypatch.setenv("WEIGHTCAST_ALLOW_SOURCE", "file:///* http://127.0.0.1:*")


@pytest.fixture
def server():
    with serving() as one:
        yield one


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.publish("step_1", FIRST)
    store.publish("step_2", SECOND, mode="delta")
    return store


def url(store: Store, what: str = "") -> str:
    return f"file://{store.path}{what and '#' + what}"


def update(server: Server, path: str, version: str | None = None, **more):
    return server.post(
        "/update_weights_from_disk", model_path=path, load_format="weightcast", weight_version=version, **more
    )


def held(server: Server) -> list[dict[str, bytes]]:
    return [rank.model.bits() for rank in server.ranks]


def last_load(server: Server) -> set[str]:
    return set(server.ranks[0].model.loads[-1])


def test_a_full_version_and_then_a_delta_come_from_a_store(server, store):
    first = update(server, url(store, "step_1"), "step_1")

    assert first["success"], first
    assert held(server) == [bits_of(FIRST)]
    assert last_load(server) == set(FIRST)

    second = update(server, url(store, "step_2"), "step_2")

    assert "version step_2 is served" in second["message"]
    assert held(server) == [bits_of(SECOND)]
    assert last_load(server) == {
        name for name in FIRST if name.endswith("norm.weight") or "layers.1.mlp.up" in name or "layers.1.mlp.gate" in name
    }
    assert server.get("/model_info")["weight_version"] == "step_2"


def test_the_newest_version_comes_from_a_depot(server):
    with DepotPublisher("127.0.0.1:0") as publisher:
        publisher.publish("step_1", FIRST)
        assert update(server, publisher.url)["success"]
        assert held(server) == [bits_of(FIRST)]

        publisher.publish("step_2", SECOND)
        assert update(server, publisher.url)["success"]

    assert held(server) == [bits_of(SECOND)]
    assert last_load(server) < set(FIRST)


def test_two_ranks_load_their_slices(store):
    with serving(2) as server:
        for version, arrays in (("step_1", FIRST), ("step_2", SECOND)):
            assert update(server, url(store, version))["success"]

            assert held(server) == [bits_of(arrays, rank, 2) for rank in range(2)]


def test_an_older_version_comes_back(server, store):
    for version, arrays in (("step_2", SECOND), ("step_1", FIRST)):
        assert update(server, url(store, version))["success"]

        assert held(server) == [bits_of(arrays)]


def test_tied_names_and_other_dtypes_arrive(server, store):
    for version, amount in (("step_3", 0.0), ("step_4", 1.0)):
        halves = {name: torch.from_numpy(array + np.float32(amount)).bfloat16() for name, array in FIRST.items()}
        halves["lm_head.weight"] = halves["model.embed_tokens.weight"]
        assert store.publish(version, halves).tied
        expected = {name: tensor.float().numpy() for name, tensor in halves.items()}

        assert update(server, url(store, version))["success"]
        assert held(server) == [bits_of(expected)]


def damage(store: Store) -> None:
    part = store.path / "versions" / "bad" / PART
    data = bytearray(part.read_bytes())
    data[-3] ^= 1
    part.chmod(0o600)
    part.write_bytes(data)


BAD = {
    "corrupt byte": (tensors(2), "digest"),
    "missing tensor": ({name: array for name, array in tensors(2).items() if name != NORM}, NORM),
    "half of a fused group": ({name: array for name, array in tensors(2).items() if name != Q0}, "incomplete|" + Q0),
    "unknown tensor": (tensors(2) | {"model.extra": np.zeros(3, np.float32)}, "model.extra"),
    "wrong shape": (tensors(2) | {NORM: np.zeros(9, np.float32)}, NORM),
    "wrong shape of a part": (tensors(2) | {Q0: np.zeros((12, 8), np.float32)}, Q0),
}


FIRST_TOO = [fault for fault in BAD if fault != "unknown tensor"]  # SGLang's loaders pass over names they do not know


@pytest.mark.parametrize(
    ("fault", "first_update"), [*((fault, False) for fault in BAD), *((fault, True) for fault in FIRST_TOO)]
)
def test_a_bad_version_changes_no_bit_and_the_next_update_works(server, store, fault, first_update):
    if not first_update:
        assert update(server, url(store, "step_1"), "step_1")["success"]
    arrays, words = BAD[fault]
    store.publish("bad", arrays)
    if fault == "corrupt byte":
        damage(store)
    before, loads = held(server), len(server.ranks[0].model.loads)

    reply = update(server, url(store, "bad"), "bad")

    assert not reply["success"]
    assert any(word in reply["message"] for word in words.split("|")), reply
    assert held(server) == before
    assert len(server.ranks[0].model.loads) == loads
    assert server.get("/model_info")["weight_version"] == ("default" if first_update else "step_1")
    assert update(server, url(store, "step_2"), "step_2")["success"]
    assert held(server) == [bits_of(SECOND)]


def test_a_source_that_callers_may_not_name_is_not_opened(server, store, tmp_path, monkeypatch):
    update(server, url(store, "step_1"), "step_1")
    before = held(server)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        port = elsewhere.getsockname()[1]
        stolen = update(server, f"http://127.0.0.1:{port}?token_file={secret}#step_2")
        probed = update(server, f"http://localhost:{port}#step_2")
        with pytest.raises(TimeoutError):
            elsewhere.accept()
    monkeypatch.delenv("WEIGHTCAST_ALLOW_SOURCE")
    nothing = update(server, url(store, "step_2"))

    assert [reply["success"] for reply in (stolen, probed, nothing)] == [False] * 3
    assert "must not set token_file" in stolen["message"]
    assert all("WEIGHTCAST_ALLOW_SOURCE" in reply["message"] for reply in (stolen, probed, nothing))
    assert held(server) == before


def test_a_dead_source_changes_nothing(server, store):
    assert update(server, url(store, "step_1"))["success"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        reply = update(server, f"http://127.0.0.1:{taken.getsockname()[1]}#version=step_2&timeout=2")

    assert not reply["success"]
    assert held(server) == [bits_of(FIRST)]
    assert update(server, url(store, "step_2"))["success"]


def test_what_is_missing_in_a_first_version_can_be_allowed(server, store):
    store.publish("partly", {name: array for name, array in FIRST.items() if name != NORM})

    assert not update(server, url(store, "partly"))["success"]
    assert update(server, url(store, "version=partly&allow_unwritten=true"))["success"]


@pytest.mark.parametrize("first_update", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("fail_after", [0, 3])
def test_a_load_that_fails_in_the_middle_is_undone(server, store, fail_after, first_update):
    if not first_update:
        assert update(server, url(store, "step_1"), "step_1")["success"]
    before, model = held(server), server.ranks[0].model
    model.fail_after, model.failures = fail_after, 1

    reply = update(server, url(store, "step_2"), "step_2")

    assert not reply["success"]
    assert "no memory left" in reply["message"]
    assert ("what was served before is served" if first_update else "version step_1 is served") in reply["message"]
    assert held(server) == before
    assert update(server, url(store, "step_2"), "step_2")["success"]
    assert held(server) == [bits_of(SECOND)]


def test_a_load_that_can_neither_be_done_nor_undone_is_said_and_the_next_update_loads_everything(server, store):
    assert update(server, url(store, "step_1"))["success"]
    model = server.ranks[0].model
    model.fail_after, model.failures = 2, 2

    reply = update(server, url(store, "step_2"))

    assert "holds no whole version" in reply["message"]
    assert update(server, url(store, "step_2"))["success"]
    assert held(server) == [bits_of(SECOND)]
    assert last_load(server) == set(SECOND)


def test_if_one_rank_fails_the_other_one_goes_back_too(store):
    with serving(2) as server:
        assert update(server, url(store, "step_1"))["success"]
        model = server.ranks[1].model
        model.fail_after, model.failures = 2, 1

        reply = update(server, url(store, "step_2"))

        assert not reply["success"]
        assert "rank 1: RuntimeError: no memory left" in reply["message"]
        assert held(server) == [bits_of(FIRST, rank, 2) for rank in range(2)]
        assert update(server, url(store, "step_2"))["success"]
        assert held(server) == [bits_of(SECOND, rank, 2) for rank in range(2)]


def test_if_one_rank_cannot_stage_none_loads(store):
    with serving(2) as server:
        server.ranks[1].model.extra = torch.nn.Linear(2, 2)  # no version has it

        reply = update(server, url(store, "version=step_1&timeout=5"))

        assert not reply["success"]
        assert "rank 1" in reply["message"]
        assert not server.ranks[0].model.loads


def test_other_load_formats_pass_through_and_are_not_mistaken_for_a_version(server, store):
    assert update(server, url(store, "step_1"))["success"]

    reply = server.post("/update_weights_from_disk", model_path="/models/other", load_format="auto")

    assert reply == {"success": True, "message": "Succeeded to update model weights."}
    assert "disk /models/other" in server.ranks[0].updater.events
    assert server.get("/model_info")["served_model_name"] == "/models/other"
    assert update(server, url(store, "step_2"))["success"]
    assert held(server) == [bits_of(SECOND)]
    assert last_load(server) == set(SECOND)


def test_memory_that_was_released_is_loaded_whole(server, store):
    assert update(server, url(store, "step_1"))["success"]
    server.post("/release_memory_occupation")

    assert update(server, url(store, "step_2"))["success"]
    assert held(server) == [bits_of(SECOND)]


def test_the_served_name_stays_what_it_was(server, store):
    assert update(server, url(store, "step_1"))["success"]

    assert server.get("/model_info")["served_model_name"] == "policy"
    assert server.front.load_format == "auto"


def test_layouts_are_restored_before_and_processed_after_a_load(server, store):
    assert update(server, url(store, "step_1"))["success"]

    assert server.ranks[0].updater.events == ["restore", "postprocess False"]


def test_a_packed_model_is_loaded_whole_each_time(server, store):
    class Fp8LinearMethod:
        pass

    server.ranks[0].model.model.layers[0].mlp.down_proj.quant_method = Fp8LinearMethod()
    for version in ("step_1", "step_2"):
        assert update(server, url(store, version))["success"]
        assert last_load(server) == set(FIRST)


def test_what_sglang_itself_would_refuse_is_refused(server, store):
    server.ranks[0].updater.model_config.weight_cache_mode = "daemon"
    before = held(server)

    reply = update(server, url(store, "step_1"))

    assert "weight cache is active" in reply["message"]
    assert held(server) == before
    assert server.alive


def test_a_refused_flush_says_failure_and_the_same_call_again_makes_it_whole(server, store):
    assert update(server, url(store, "step_1"), "step_1")["success"]
    server.ranks[0].running = 1

    reply = update(server, url(store, "step_2"), "step_2")

    assert not reply["success"]
    assert held(server) == [bits_of(SECOND)], "SGLang says failure, and yet serves the new version"
    assert server.get("/model_info")["weight_version"] == "step_1"
    loads = len(server.ranks[0].model.loads)
    server.ranks[0].running = 0
    again = update(server, url(store, "step_2"), "step_2")
    assert again["success"]
    assert "0 of its" in again["message"]
    assert len(server.ranks[0].model.loads) == loads
    assert server.get("/model_info")["weight_version"] == "step_2"


def test_registering_twice_hooks_once(store):
    with installed():
        register()
        register()

        assert {len(hooks) for hooks in HookRegistry._hooks.values()} == {1}
        assert len(HookRegistry._hooks) == 4


def from_tensor(server: Server, source: str, version: str):
    from weightcast.engines.sglang.loader import request

    return server.post(
        "/update_weights_from_tensor",
        serialized_named_tensors=server.tensor_body(request(source, version)),
        load_format=LOADER,
        weight_version=version,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_custom_loader_brings_a_version_inside_of_a_session(store, ranks):
    with serving(ranks, loaders=(LOADER,)) as server:
        assert "must run between" in from_tensor(server, url(store), "step_1")["message"]
        for version, arrays in (("step_1", FIRST), ("step_2", SECOND)):
            assert server.post("/begin_weight_update")["success"]
            assert from_tensor(server, url(store), version)["success"]
            assert server.post("/end_weight_update")["success"]

            assert held(server) == [bits_of(arrays, rank, ranks) for rank in range(ranks)]
            assert server.get("/model_info")["weight_version"] == version


def test_an_error_of_the_custom_loader_is_an_answer_and_does_not_end_the_server(store):
    with serving(loaders=(LOADER,)) as server:
        server.post("/begin_weight_update")

        reply = from_tensor(server, url(store), "step_9")

        assert not reply["success"]
        assert "step_9" in reply["message"]
        assert server.alive
        assert from_tensor(server, url(store), "step_1")["success"]


def test_other_tensors_are_not_the_custom_loaders_business(store):
    from weightcast.engines.sglang.loader import load

    with pytest.raises(InvalidInput, match=r"one tensor.*got a, b"):
        load(Model(), [("a", torch.zeros(1)), ("b", torch.zeros(1))])


def test_fused_groups_are_completed():
    names = set(FIRST)

    assert complete_groups({Q0}, names) == {Q0, Q0.replace("q_proj", "k_proj"), Q0.replace("q_proj", "v_proj")}
    assert complete_groups({NORM}, names) == {NORM}


def test_what_is_asked_for_is_read_from_urls_and_bytes():
    assert request_from_url("file:///store#step_7") == Request(source="file:///store", version="step_7")
    assert request_from_url("http://depot:1?options=2") == Request(source="http://depot:1?options=2")
    asked = request_from_url("file:///store#version=a&timeout=2.5&verify_checksum=false&whole=1")
    assert asked == Request(source="file:///store", version="a", timeout=2.5, verify_checksum=False, whole=True)
    assert request_from_bytes(encode_request(asked)) == asked
    for wrong in (
        "file:///s#versoin=a",
        "file:///s#timeout=soon",
        "file:///s#=",
        "file:///s#version=",
        "file:///s#version=a&",
    ):
        with pytest.raises(InvalidInput, match="After # goes a version"):
            request_from_url(wrong)
    with pytest.raises(InvalidInput, match="does not hold a request"):
        request_from_bytes(b"\xff\0")


def test_a_wrong_url_is_an_answer(server):
    for wrong in ("file:///s#versoin=a", "nowhere://x#step_1", ""):
        assert not update(server, wrong)["success"]
        assert server.alive


def test_a_model_that_is_gone_takes_its_copy_with_it(store):
    with installed():
        model = Model()
        bring(model, Request(source=url(store), version="step_1"))
        gone = weakref.ref(model)
        del model
        gc.collect()

        assert gone() is None


def test_a_model_with_a_tied_head_takes_versions_without_one(store):
    store.publish("headless", {name: array for name, array in FIRST.items() if name != "lm_head.weight"})
    with installed():
        model = Model()
        with pytest.raises(VersionDoesNotFit, match="lm_head"):
            bring(model, Request(source=url(store), version="headless"))
        model = Model()
        model.lm_head.weight = model.model.embed_tokens.weight

        bring(model, Request(source=url(store), version="headless"))

        assert model.bits()["model.embed_tokens.weight"] == bits_of(FIRST)["model.embed_tokens.weight"]


def test_a_live_model_is_not_touched_by_trying_its_loader(store):
    with installed():
        model = Model()
        store.publish("bad", {**FIRST, NORM: np.zeros(9, np.float32), Q0: np.zeros((2, 2), np.float32)})
        attributes = {name: dict(vars(module)) for name, module in model.named_modules()}

        with pytest.raises(VersionDoesNotFit) as refused:
            bring(model, Request(source=url(store), version="bad"))

        assert {mismatch.name for mismatch in refused.value.mismatches} == {NORM, Q0}
        assert attributes == {name: dict(vars(module)) for name, module in model.named_modules()}


def test_a_loader_with_threads_is_tried_without_touching_the_model(store):
    class Threaded(Model):
        def load_weights(self, weights):
            with ThreadPoolExecutor(4) as threads:
                for one in [threads.submit(super(Threaded, self).load_weights, [item]) for item in weights]:
                    one.result()

    with installed():
        model = Threaded()
        store.publish("bad", {name: array for name, array in FIRST.items() if name != Q0})
        before = model.bits()

        with pytest.raises(VersionDoesNotFit, match="128 of its 256 elements"):
            bring(model, Request(source=url(store), version="bad"))
        assert model.bits() == before

        bring(model, Request(source=url(store), version="step_1"))
        assert model.bits() == bits_of(FIRST)


def test_a_loader_that_needs_memory_is_not_tried_but_used(store, caplog):
    class Reading(Model):
        def load_weights(self, weights):
            super().load_weights((name, loaded * 1 if loaded.sum().item() else loaded) for name, loaded in weights)

    with installed():
        model = Reading()
        bring(model, Request(source=url(store), version="step_1"))

        assert model.bits() == bits_of(FIRST)
        assert "cannot be tried beforehand" in caplog.text


def test_a_rank_that_does_not_answer_is_given_up_and_long_words_are_cut():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(dist.ProcessGroupGloo, store, rank, 2, timedelta(seconds=20)) for rank in range(2)]
        here, there = (Ranks(one.result(20)) for one in joining)
        threads.submit(there.exchange, Said(problem="ü" * 9000), 20)
        heard = here.exchange(Said(version="step_1"), 20)

        assert heard[0] == Said(version="step_1")
        assert heard[1].problem.startswith("üü")
        with pytest.raises(DeadlineExceeded, match="waiting for the other ranks"):
            here.exchange(Said(), 0.1)


def test_commit_failed_is_raised_to_whoever_calls_without_a_server(store):
    with installed():
        model = Model()
        model.fail_after, model.failures = 1, 1

        with pytest.raises(CommitFailed, match="It was undone"):
            bring(model, Request(source=url(store), version="step_1"))
