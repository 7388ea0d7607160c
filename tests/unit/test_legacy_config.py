"""The configuration of the legacy system: what its keys become, what is noted, and what is refused."""

import copy
import json
import re
from pathlib import Path

import pytest

from weightcast.cli import serve as serve_command
from weightcast.cli.main import main
from weightcast.control.control_schemas import UpdateBody
from weightcast.engines.base import UpdateRequest
from weightcast.engines.embedded.replica.served import read_by
from weightcast.errors import InvalidInput
from weightcast.transports.legacy_config import KEYS, LegacyConfig, TransferSettings, with_options
from weightcast.transports.registry import open_receiver

DOCS = Path(__file__).parents[2] / "docs" / "legacy-config.md"
WHOLE = {
    "bucket_size_mb": 512, "num_buffers": 2, "qsize": 3, "gdr_prefetch_queue_size": 4, "recv_bucket_timeout_s": 60,
    "session_total_timeout_s": 600.5, "device": "mlx5_0", "device_name": "mlx5_0", "transfer_mode": "gdr",
    "gpu_direct": True, "phase1_backend": "gpu_direct", "backend": "gpu_direct", "gdr_release_cache": True,
    "gdr_mtp_chunk_size": 8, "discover_timeout_s": 60, "output_framework": "paddle", "materialize_tensors": True,
    "phase2_backend": "none", "phase2_fan_out": 4, "role": "inference", "index": 0, "group_size": 8,
    "global_rank": 3, "local_rank": 3, "gpu_id": -1, "gdr_debug_tensor_digest": True, "gdr_debug_tensor_names": ["a", "b"],
    "gdr_debug_compare_direct": False, "redis_host": "127.0.0.1", "redis_port": 6379, "redis_ttl_s": 60,
    "etcd_server": "10.0.0.1:2379",
    "log_level": "INFO", "log_file": "transfer.log", "perf_log_file": "perf.log",
}  # fmt: skip


def test_every_key_is_read_and_the_dictionary_stays_as_it_was():
    config = copy.deepcopy(WHOLE)
    settings = LegacyConfig.parse(config)
    assert config == WHOLE
    assert config.keys() == {key.name for key in KEYS}
    assert settings == LegacyConfig.parse(json.dumps(config)) == LegacyConfig.parse(json.dumps(config).encode())
    assert settings == TransferSettings(
        bucket_nbytes=512 << 20, prefetch=4, stall_s=60.0, timeout_s=600.5, nic="mlx5_0", mode="gdr", asked_mode="gdr",
        backend="gpu_direct", release_cache=True, mtp_chunk=8, notes=settings.notes,
    )  # fmt: skip
    assert settings.as_options() == {
        "bucket_nbytes": str(512 << 20), "prefetch": "4", "stall_s": "60.0", "mode": "gdr", "nic": "mlx5_0",
    }  # fmt: skip


def test_an_empty_configuration_changes_nothing_but_names_the_mode():
    for nothing in (
        {},
        "{}",
        {"device": None, "transfer_mode": None, "log_file": None, "phase2_backend": None, "backend": "ipc"},
    ):
        settings = LegacyConfig.parse(nothing)
        assert settings.as_options() == {"mode": "rdma"}
        assert (settings.timeout_s, settings.release_cache, settings.asked_mode, settings.notes) == (None, None, "", ())


def test_keys_without_meaning_are_noted_with_what_replaces_them():
    notes = LegacyConfig.parse(WHOLE).notes
    noted = {note.split()[0] for note in notes}
    assert noted == {key.name for key in KEYS if key.instead} | {"num_buffers", "qsize"}
    assert all(key.instead for key in KEYS if not key.becomes)
    assert any(note.startswith("etcd_server has no effect: the source says where the depot is") for note in notes)
    assert "qsize has no effect beside gdr_prefetch_queue_size: there is one queue" in notes


@pytest.mark.parametrize(
    ("config", "depth"),
    [
        ({"qsize": 3}, 3),
        ({"qsize": 3, "num_buffers": 2}, 2),
        ({"qsize": 3, "num_buffers": 2, "gdr_prefetch_queue_size": 5}, 5),
    ],
)
def test_of_three_queues_the_nearest_to_ours_counts(config, depth):
    assert LegacyConfig.parse(config).prefetch == depth


# request, configuration → mode: the whole table
MODES = [
    (None, {}, "rdma", ""),
    (None, {"gpu_direct": False}, "rdma", ""),
    (None, {"gpu_direct": True}, "gdr", "gdr"),
    (None, {"transfer_mode": "rdma", "gpu_direct": True}, "rdma", "rdma"),
    (None, {"transfer_mode": "", "gpu_direct": True}, "gdr", "gdr"),
    (None, {"transfer_mode": "gdr"}, "gdr", "gdr"),
    ("rdma", {"transfer_mode": "gdr", "gpu_direct": True}, "rdma", "rdma"),
    ("gdr", {"transfer_mode": "rdma"}, "gdr", "gdr"),
    ("", {"transfer_mode": "gdr"}, "gdr", "gdr"),
    ("gdr", {}, "gdr", "gdr"),
]


@pytest.mark.parametrize(("request_mode", "config", "mode", "asked"), MODES)
def test_the_mode_is_the_requests_then_the_configurations_then_gpu_directs(request_mode, config, mode, asked):
    settings = LegacyConfig.parse(config, transfer_mode=request_mode)
    assert (settings.mode, settings.asked_mode) == (mode, asked)


@pytest.mark.parametrize("mode", ["tcp", "RDMA", "auto", "http"])
def test_any_other_mode_is_refused(mode):
    with pytest.raises(InvalidInput, match=f"transfer_mode must be rdma or gdr, and is '{mode}'"):
        LegacyConfig.parse({"transfer_mode": mode})
    with pytest.raises(InvalidInput, match=f"transfer_mode of the request must be rdma or gdr, and is '{mode}'"):
        LegacyConfig.parse({"transfer_mode": "gdr"}, transfer_mode=mode)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bucket_size_mb", 0), ("bucket_size_mb", 1.5), ("bucket_size_mb", "512"), ("bucket_size_mb", True),
        ("bucket_size_mb", None), ("bucket_size_mb", 1 << 40), ("num_buffers", 0), ("num_buffers", -1), ("qsize", 0),
        ("gdr_prefetch_queue_size", 0), ("recv_bucket_timeout_s", 0), ("recv_bucket_timeout_s", -1.0),
        ("recv_bucket_timeout_s", "60"), ("recv_bucket_timeout_s", True), ("recv_bucket_timeout_s", float("nan")),
        ("session_total_timeout_s", float("inf")), ("session_total_timeout_s", 1e9), ("device", 0), ("device", " mlx5_0"),
        ("device", ["mlx5_0"]), ("gpu_direct", 1), ("gpu_direct", "true"), ("gpu_direct", None), ("gdr_release_cache", 0),
        ("gdr_mtp_chunk_size", 0), ("phase1_backend", "mooncake"), ("phase1_backend", "GPU_DIRECT"), ("backend", 3),
        ("phase2_backend", "mooncake"), ("role", "trainer"), ("output_framework", "jax"), ("redis_port", 0),
        ("redis_port", 65536), ("index", -1), ("group_size", 0), ("gpu_id", -2), ("gdr_debug_tensor_names", [1]),
        ("gdr_debug_tensor_names", {}), ("materialize_tensors", "yes"), ("log_level", []), ("etcd_server", None),
    ],
)  # fmt: skip
def test_values_that_cannot_be_meant_are_refused(key, value):
    with pytest.raises(InvalidInput, match=rf"cannot be used: {key} must be .*, and is {re.escape(repr(value))}"):
        LegacyConfig.parse({key: value})


def test_what_is_not_offered_says_what_to_do_instead():
    with pytest.raises(InvalidInput, match="Mooncake is not a transport here, take a source nixl://"):
        LegacyConfig.parse({"phase1_backend": "mooncake"})
    with pytest.raises(InvalidInput, match="run depots that mirror one another"):
        LegacyConfig.parse({"phase2_backend": "gpu_direct"})


def test_everything_that_is_wrong_is_told_at_once():
    config = {"bucket_size": 1, "num_buffers": 0, "device": "mlx5_0", "device_name": "mlx5_1", "Transfer_Mode": "gdr", 3: 4}
    with pytest.raises(InvalidInput) as refused:
        LegacyConfig.parse(config, transfer_mode="tcp")
    told = str(refused.value)
    for part in (
        "'bucket_size' is not a key that is known", "'Transfer_Mode' is not a key", "3 is not a key",
        "num_buffers must be a whole number from 1 to 1024, and is 0",
        "device is 'mlx5_0' and device_name is 'mlx5_1', and both mean the same",
        "transfer_mode of the request must be rdma or gdr, and is 'tcp'",
    ):  # fmt: skip
        assert part in told
    with pytest.raises(InvalidInput, match="phase1_backend is 'ipc' and backend is 'gpu_direct'"):
        LegacyConfig.parse({"phase1_backend": "ipc", "backend": "gpu_direct"})


@pytest.mark.parametrize("name", ["device", "device_name"])
def test_a_device_may_be_called_by_either_name(name):
    assert LegacyConfig.parse({name: "mlx5_0"}).nic == "mlx5_0"
    assert LegacyConfig.parse({"device": "mlx5_0", "device_name": None}).nic == "mlx5_0"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"), ("{", "not JSON"), ("[]", "must be a JSON object, and is list"), ("null", "and is NoneType"),
        ('"gdr"', "and is str"), ('{"qsize": 1, "qsize": 2}', "twice: qsize"), ('{"qsize": NaN}', "NaN, which is no JSON"),
        ("[" * 100_000, "not JSON"), (b"\xff", "not JSON"), ("{'qsize': 1}", "not JSON"),
    ],
)  # fmt: skip
def test_text_that_is_no_json_object_is_refused(text, why):
    with pytest.raises(InvalidInput, match=why):
        LegacyConfig.parse(text)


# -- sources -------------------------------------------------------------------------------------------------------------


def test_settings_become_options_of_a_source_on_a_network():
    settings = LegacyConfig.parse({"bucket_size_mb": 1, "num_buffers": 2, "device": "mlx5_0:1", "recv_bucket_timeout_s": 5})
    options = "bucket_nbytes=1048576&prefetch=2&stall_s=5.0"
    assert settings.applied_to("nixl://a:1") == f"nixl://a:1?mode=rdma&{options}&nic=mlx5_0:1"
    assert settings.applied_to("http://a:1,b:2") == f"http://a:1,b:2?{options}"
    assert settings.applied_to("https://a:1/?token_file=/x/y%20z") == f"https://a:1/?{options}&token_file=/x/y%20z"
    for elsewhere in ("file:///store", "/store", "ipc:///run", "checkpoint:///model"):
        assert settings.applied_to(elsewhere) == elsewhere


@pytest.mark.parametrize("source", ["http://127.0.0.1:1", "nixl://127.0.0.1:1", "shares+http://127.0.0.1:1"])
def test_a_receiver_opens_what_the_whole_configuration_makes_of_a_source(source):
    ways = ("transfer_mode", "gpu_direct", "phase1_backend", "backend")
    modest = {key: value for key, value in WHOLE.items() if key not in ways}
    receiver = open_receiver(LegacyConfig.parse(modest).applied_to(source), rank=0)
    assert (receiver._prefetch, receiver._bucket_nbytes) == (4, 512 << 20)
    receiver.close()


def test_what_a_source_says_itself_stays():
    settings = LegacyConfig.parse({"bucket_size_mb": 1})
    assert settings.applied_to("nixl://a:1?bucket_nbytes=5&mode=gdr") == "nixl://a:1?bucket_nbytes=5&mode=gdr"
    assert with_options("nixl://a:1?mode=gdr&nic=x", {"mode": "rdma"}, win=True) == "nixl://a:1?mode=rdma&nic=x"


@pytest.mark.parametrize(
    ("config", "source"),
    [
        ({"transfer_mode": "rdma"}, "http://a:1"), ({"gpu_direct": True}, "file:///store"), ({"backend": "ipc"}, "nixl://a:1"),
        ({"phase1_backend": "gpu_direct"}, "https://a:1"), ({"transfer_mode": "gdr"}, "/store"),
    ],
)  # fmt: skip
def test_a_way_that_the_source_does_not_have_is_refused(config, source):
    with pytest.raises(InvalidInput, match=r"of the legacy configuration goes with a source .*://…, not with"):
        LegacyConfig.parse(config).applied_to(source)


def test_a_request_decides_how_a_source_is_read():
    assert read_by("nixl://a:1?mode=rdma&nic=x", "gdr") == "nixl://a:1?mode=gdr&nic=x"
    assert read_by("nixl://a:1", "rdma") == "nixl://a:1?mode=rdma"
    assert read_by("nixl://a:1?mode=gdr", "auto") == "nixl://a:1?mode=gdr"
    assert read_by("http://a:1", "http") == "http://a:1"
    with pytest.raises(InvalidInput, match="'gdr' goes with a source nixl://"):
        read_by("http://a:1", "gdr")


def test_updates_start_from_the_configuration_and_say_what_differs():
    configured = UpdateRequest(transfer_mode="gdr", timeout_s=600.0, release_cache=True)
    assert UpdateBody().request(configured) == configured
    said = UpdateBody(timeout=5, release_cache=False, version="v").request(configured)
    assert said == UpdateRequest(transfer_mode="gdr", timeout_s=5, release_cache=False, version="v")
    assert UpdateBody(source="file:///s").request(configured).transfer_mode == "auto"
    assert UpdateBody(source="nixl://a:1", transfer_mode="rdma").request(configured).transfer_mode == "rdma"


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_reads_the_configuration_from_its_argument_or_a_file(tmp_path, capsys):
    file = tmp_path / "rsync.json"
    file.write_text('{"bucket_size_mb": 2, "session_total_timeout_s": 600, "gdr_release_cache": true, "redis_port": 1}')
    for config in (f"@{file}", file.read_text()):
        source, update = serve_command._configured("nixl://a:1", config)
        assert source == "nixl://a:1?mode=rdma&bucket_nbytes=2097152"
        assert update == UpdateRequest(timeout_s=600.0, release_cache=True)
        assert "note: redis_port has no effect" in capsys.readouterr().err
    assert serve_command._configured("nixl://a:1", '{"gpu_direct": true}')[1].transfer_mode == "gdr"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--rsync-config", "{}"], "--rsync-config needs --source"),
        (["--source", "nixl://a:1", "--rsync-config", '{"bucket": 1}'], "'bucket' is not a key that is known"),
        (["--source", "nixl://a:1", "--rsync-config", "@nowhere.json"], "nowhere.json cannot be read"),
        (["--source", "/store", "--rsync-config", '{"transfer_mode": "gdr"}'], "goes with a source nixl://"),
    ],
)
def test_a_wrong_configuration_is_a_wrong_call(tmp_path, capsys, arguments, why):
    assert main(["serve", str(tmp_path), *arguments]) == 2
    assert why in capsys.readouterr().err


def test_every_key_is_documented_in_the_right_table():
    working, replaced = DOCS.read_text().split("## Where something else does the work")
    for key in KEYS:
        where = working if key.becomes and not key.instead else replaced
        assert f"`{key.name}`" in where, key.name
