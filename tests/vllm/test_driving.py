"""Real servers driven from outside: by a fleet, by vLLM's own trainer interface, and by the command line.

Two servers: the one that all tests share, which serves `model_a` again afterwards, and one whose workers have our methods by
`--worker-extension-cls`, without a weight transfer of vLLM's.
"""

import json
import re
import threading

import pytest
import torch
from models import greedy, published
from servers import VllmServer
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    VLLMWeightSyncClient,
    WeightTransferTrainerFactory,
)

from weightcast import Store
from weightcast.cli.main import main
from weightcast.engines.vllm.trainer import WeightcastTrainer, WeightcastTrainerInfo
from weightcast.errors import FleetUpdateFailed, InvalidInput, UpdateFailed, WrongState
from weightcast.fleet.vllm_fleet import VllmFleet

PROMPT = [5, 6, 7, 8]
TOKENS = 16


@pytest.fixture(scope="module")
def versions(tmp_path_factory, model_a, nudged_once, model_b):
    """step_1 is `model_a`, step_2 a delta on it, step_3 something else. Each with the folder that it is."""
    store = Store(tmp_path_factory.mktemp("driving") / "store")
    folders = {"step_1": model_a, "step_2": nudged_once, "step_3": model_b}
    kinds = [published(store, version, folder).kind for version, folder in folders.items()]
    assert kinds == ["full", "delta", "full"]
    return store, folders


@pytest.fixture(scope="module")
def pair(shared_server, model_a, versions):
    extension = ("--worker-extension-cls", "weightcast.engines.vllm.workers.WeightcastExtension")
    with VllmServer(model_a, *extension, backend=None) as other:
        yield shared_server, other
    VllmFleet(shared_server.url).update("step_1", versions[0])


@pytest.fixture
def fleet(pair):
    return VllmFleet([server.url for server in pair])


def serve(pair, version, folder):
    for server in pair:
        assert server.tokens(PROMPT, TOKENS) == greedy(folder, PROMPT, TOKENS)
        assert server.get("/weight_info").json() == {"weight_version": version}


def test_full_versions_and_deltas_reach_all_servers(pair, fleet, versions):
    store, folders = versions
    for version in ("step_1", "step_2", "step_3", "step_2"):
        update = fleet.update(version, store)

        assert [one.aside for one in update.servers] == [True, True]
        serve(pair, version, folders[version])
        for ranks in fleet.status().values():
            assert [(rank.state, rank.version, rank.staged, rank.error) for rank in ranks] == [
                ("READY", version, None, None)
            ]


def test_a_version_that_all_serve_already_can_be_sent_again(pair, fleet, versions):
    store, folders = versions
    for _ in range(2):
        fleet.update("step_1", store)
        serve(pair, "step_1", folders["step_1"])


def failed_stages(pair):
    """The ids of updates that each server's log says it could not stage, those of earlier tests included."""
    return [set(re.findall(r"stage failed  update=(fleet-\w+)", server.said(1 << 20))) for server in pair]


def test_a_damaged_version_changes_no_server_and_the_next_one_does(pair, fleet, versions, tmp_path, model_b):
    store, folders = versions
    fleet.update("step_1", store)
    damaged = Store(tmp_path / "store")
    published(damaged, "step_9", model_b)
    (part,) = [path for path in (tmp_path / "store").rglob("*.safetensors") if path.stat().st_size > 1 << 16]
    content = bytearray(part.read_bytes())
    content[-1000] ^= 1
    part.write_bytes(content)

    before = failed_stages(pair)

    with pytest.raises(FleetUpdateFailed, match="no server was changed: 2 of 2") as raised:
        fleet.update("step_9", damaged)

    assert {error.code for error in raised.value.failures.values()} == {"digest_mismatch"}
    named = [after - known for after, known in zip(failed_stages(pair), before, strict=True)]
    assert named[0]
    assert named[0] == named[1]  # the same id at every server
    serve(pair, "step_1", folders["step_1"])
    with pytest.raises(FleetUpdateFailed) as raised:
        fleet.update("step_10", damaged)
    assert raised.value.exit_code == 2
    fleet.update("step_3", store)
    serve(pair, "step_3", folders["step_3"])


@pytest.mark.parametrize("pause", [None, "keep"])
def test_a_request_goes_on_through_an_update(pair, fleet, versions, pause):
    store, folders = versions
    fleet.update("step_1", store)
    got = []
    reader = threading.Thread(target=lambda: got.append(pair[0].tokens(PROMPT, 300, timeout=120)))
    reader.start()
    update = fleet.update("step_3", store, pause=pause)
    reader.join(180)

    assert len(got[0]) == 300
    assert [one.pause_s is None for one in update.servers] == [pause is None] * 2
    assert not pair[0].get("/is_paused").json()["is_paused"]
    serve(pair, "step_3", folders["step_3"])


def test_the_command_line_updates_servers_and_tells_what_they_serve(pair, versions, capsys):
    store, folders = versions
    urls = [part for server in pair for part in ("--server", server.url)]

    assert main(["vllm", "update", *urls, "--source", str(store.path), "--version", "step_1", "--pause", "abort"]) == 0
    serve(pair, "step_1", folders["step_1"])
    capsys.readouterr()
    assert main(["vllm", "status", *urls, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["servers"]
    assert [one["ranks"][0]["version"] for one in told] == ["step_1", "step_1"]
    assert told[0]["ranks"][0]["root_digest"] == store.manifest("step_1").root_digest


# -- vLLM's own trainer interface ---------------------------------------------------------------------------------------


def made(info, client, source):
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


@pytest.mark.parametrize("publish", ["ipc", "http", "store"])
def test_a_trainer_of_vllms_factory_sends_every_step(publish, pair, model_a, tmp_path):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(model_a, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    info = WeightcastTrainerInfo(rank=0, publish=str(tmp_path / "store") if publish == "store" else publish)
    # vLLM's own client for one server, ours for two
    client = HTTPVLLMWeightSyncClient(pair[0].url) if publish == "ipc" else VllmFleet([server.url for server in pair])
    driven = pair[:1] if publish == "ipc" else pair
    trainer = made(info, client, ModuleSource(model))
    try:
        assert isinstance(trainer, WeightcastTrainer)
        for step in (1, 2):
            batch = torch.randint(3, 500, (2, 16))
            model(batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trainer.send_weights()

            assert trainer.version == f"step_{step}"
            model.save_pretrained(tmp_path / f"{step}")
            serve(driven, f"step_{step}", tmp_path / f"{step}")
    finally:
        trainer.shutdown()
    with pytest.raises(WrongState):
        trainer.send_weights()


def test_a_step_that_servers_refuse_is_told_and_the_next_one_is_sent(pair, model_a, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_a, dtype=torch.float32)
    broken = torch.nn.ParameterDict({"nothing": torch.nn.Parameter(torch.zeros(4))})
    source = ModuleSource(broken)
    trainer = made(WeightcastTrainerInfo(rank=0), HTTPVLLMWeightSyncClient(pair[0].url), source)
    try:
        with pytest.raises(UpdateFailed, match=r"step_1 is published at ipc://.*, but the servers did not take it"):
            trainer.send_weights()
        source._module = model
        trainer.send_weights()
        serve(pair[:1], "step_2", model_a)
    finally:
        trainer.shutdown()


class Recorder:
    """A client that notes what it is told; the protocol of vLLM is structural."""

    def __init__(self):
        self.calls = []

    def init_weight_transfer_engine(self, init_info):
        self.calls.append("init")

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, update_info):
        self.calls.append(update_info["version"])

    def finish_weight_update(self, weight_version=None):
        self.calls.append(f"finish {weight_version}")


class Counting(ModuleSource):
    """Counts what is read of it, and can fail the publication halfway."""

    def __init__(self, module, bad=None):
        super().__init__(module)
        self.read, self.bad = 0, bad

    def __iter__(self):
        for at, (name, tensor) in enumerate(super().__iter__()):
            self.read += 1
            yield name, tensor.to_sparse() if at == self.bad else tensor


@pytest.fixture
def layers():
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])


def test_only_the_sender_publishes_and_drives_but_every_rank_reads_all(layers, tmp_path):
    assert isinstance(Recorder(), VLLMWeightSyncClient)
    assert isinstance(VllmFleet("http://127.0.0.1:1"), VLLMWeightSyncClient)
    for rank, calls in ((0, ["init", "start", "step_1", "finish step_1"]), (1, [])):
        client, source = Recorder(), Counting(layers)
        trainer = made(WeightcastTrainerInfo(rank=rank, publish=str(tmp_path / f"{rank}")), client, source)
        trainer.send_weights()

        assert (client.calls, source.read) == (calls, 6)
        assert (tmp_path / f"{rank}").exists() == (rank == 0)


def test_a_sender_that_fails_halfway_still_reads_all_since_other_ranks_wait_for_it(layers, tmp_path):
    client, source = Recorder(), Counting(layers, bad=2)
    trainer = made(WeightcastTrainerInfo(rank=0, publish=str(tmp_path / "store")), client, source)

    with pytest.raises(InvalidInput):
        trainer.send_weights()
    assert (source.read, client.calls) == (6, ["init"])
    source.bad = None
    trainer.send_weights()
    assert client.calls[1:] == ["start", "step_2", "finish step_2"]


def test_a_source_of_parts_and_no_source_are_refused(layers):
    class Parts(ModuleSource):
        def held_names(self):
            return {"0.weight"}

    for source, why in ((Parts(layers), "a part of the parameters"), (None, "needs a source")):
        with pytest.raises(InvalidInput, match=why):
            made(WeightcastTrainerInfo(rank=0), Recorder(), source)


# -- last, since it ends one of the servers -----------------------------------------------------------------------------


def test_a_server_that_is_killed_keeps_the_other_as_it_is(pair, versions):
    store, folders = versions
    VllmFleet(pair[0].url).update("step_1", store)
    fleet = VllmFleet([server.url for server in pair])
    pair[1].kill()

    with pytest.raises(FleetUpdateFailed, match="no server was changed: 1 of 2"):
        fleet.update("step_3", store, timeout=60)

    serve(pair[:1], "step_1", folders["step_1"])
    (rank,) = fleet.status()[pair[0].url]
    assert (rank.state, rank.staged) == ("READY", None)
