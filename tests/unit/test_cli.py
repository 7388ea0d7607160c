"""The command line: what it prints, what it returns, and that a user's mistake is never a traceback."""

import ast
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import weightcast
from weightcast import Store, __version__
from weightcast.cli.main import main
from weightcast.store import layout
from weightcast.store.snapshot import list_snapshots

SRC = Path(weightcast.__file__).parent
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys):
    def call(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def run_json(run):
    def call(*arguments):
        status, out, _ = run(*arguments, "--json")
        return status, json.loads(out)

    return call


@pytest.fixture
def checkpoint(tmp_path, rng):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    tensors = {"a": rng.standard_normal((40, 4)).astype(np.float32), "b": rng.standard_normal(5).astype(np.float16)}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def published(run, checkpoint, tmp_path, rng):
    path = tmp_path / "store"
    assert run("publish", path, "step_1", checkpoint)[0] == 0
    tensors = safetensors.numpy.load_file(checkpoint / "model.safetensors")
    tensors["a"][0, 0] = np.nextafter(tensors["a"][0, 0], np.float32(9))
    safetensors.numpy.save_file(tensors, checkpoint / "model.safetensors")
    assert run("publish", path, "step_2", checkpoint, "--mode", "full")[0] == 0
    return path


@pytest.fixture
def chained(run, checkpoint, tmp_path, rng):
    """A full version and two deltas."""
    path = tmp_path / "chained"
    tensors = {"a": rng.standard_normal((400, 40)).astype(np.float32), "b": rng.standard_normal(500).astype(np.float16)}
    for number in (1, 2, 3):
        tensors["a"][number, :5] = number
        safetensors.numpy.save_file(tensors, checkpoint / "model.safetensors")
        assert run("publish", path, f"step_{number}", checkpoint)[0] == 0
    return path


def damage(path, version):
    manifest = Store(path).manifest(version)
    part = layout.version_dir(path, version) / manifest.parts[0].file
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)


def test_publish_says_what_it_published(run_json, run, checkpoint, tmp_path):
    status, answer = run_json("publish", tmp_path / "s", "step_7", checkpoint, "--part-size", "1MiB", "--digest", "blake3")
    assert status == 0
    assert (answer["version"], answer["step"], answer["tensors"], answer["kind"]) == ("step_7", 7, 2, "full")
    manifest = Store(tmp_path / "s").manifest("step_7")
    assert answer["root_digest"] == manifest.root_digest
    assert manifest.root_digest.startswith("sums:")
    assert {entry.digest.partition(":")[0] for entry in manifest.tensors} == {"blake3"}
    status, out, _ = run("publish", tmp_path / "s", "step_8", checkpoint, "--mode", "full", "--step", "80")
    assert status == 0
    assert "published step_8: 2 tensors" in out
    assert Store(tmp_path / "s").manifest("step_8").step == 80


def test_ls_and_show_tell_what_is_there(run, run_json, published):
    status, out, _ = run("store", "ls", published)
    assert status == 0
    assert "step_1" in out
    assert "* " in next(line for line in out.splitlines() if "step_2" in line)
    _, rows = run_json("store", "ls", published)
    assert [(row["version"], row["newest"]) for row in rows] == [("step_1", False), ("step_2", True)]
    status, out, _ = run("store", "show", published)
    assert status == 0
    assert "F32" in out
    assert "[40, 4]" in out
    assert Store(published).manifest("step_2").root_digest in out
    _, manifest = run_json("store", "show", published, "step_1")
    assert manifest["version"] == "step_1"
    assert len(manifest["tensors"]) == 2


def test_a_damaged_version_is_shown_in_ls_and_fails_verify(run, run_json, published):
    assert run("store", "verify", published)[0] == 0
    damage(published, "step_1")
    manifest = layout.manifest_path(published, "step_2")
    manifest.write_bytes(manifest.read_bytes()[:-9])
    status, out, _ = run("store", "verify", published)
    assert status == 1
    assert "step_1: DAMAGED" in out
    assert "step_2: DAMAGED" in out
    status, reports = run_json("store", "verify", published, "step_1")
    assert (status, reports[0]["ok"], len(reports[0]["problems"])) == (1, False, 1)
    status, out, _ = run("store", "ls", published)
    assert status == 0
    assert "damaged" in out


@pytest.mark.parametrize("step", [9, 2])  # the second is that of a version that is there
def test_verify_fails_if_version_yaml_names_a_version_that_is_not_there(run, run_json, published, step):
    (published / "version.yaml").write_text(f"step: {step}\nversion: step_9\n")
    status, out, _ = run("store", "verify", published)
    assert status == 1
    assert "version.yaml names step_9, which is not there" in " ".join(out.split())
    status, reports = run_json("store", "verify", published)
    assert status == 1
    assert [report["ok"] for report in reports] == [True, True, False]
    assert run("store", "verify", published, "step_1")[0] == 0
    (published / "version.yaml").write_text("step: " + "9" * 3000)
    assert run("store", "verify", published)[0] == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("s3://bucket/weights", "file://, checkpoint://"),
        ("http://[::1", "is not a URL"),
        ("http://host?unknown=1", "unknown option(s) unknown"),
        ("http://host:99999", "is not the URL of a depot"),
        ("missing", "is not there"),
        ("file:///missing", "is not there"),
        ("checkpoint:///missing", "is not there"),
        ("file:///tmp?unknown=1", "unknown option(s) unknown"),
        ("file:///tmp?deltas=sometimes", "must be one of never, auto, always"),
        ("file://host/missing", "must name a directory on this host"),
        ("snapshot:///tmp", "needs the device id"),
        ("ipc:///tmp/later?unknown=1", "unknown option(s) unknown"),
        ("shares+http://host:1?unknown=1", "unknown option(s) unknown"),
        ("nixl://host:1?unknown=1", "unknown is not known"),
    ],
)
def test_serve_refuses_a_source_that_cannot_be_opened_before_it_starts(run, checkpoint, source, said):
    status, _, error = run("serve", checkpoint, "--source", source)
    assert status == 2
    assert said in " ".join(error.split())


def test_publish_takes_a_delta_where_it_can_and_says_so(run, run_json, chained, checkpoint):
    status, answer = run_json("publish", chained, "step_4", checkpoint, "--mode", "delta", "--packing", "gaps")
    assert status == 0
    assert (answer["kind"], answer["base"], answer["parts"]) == ("delta", "step_3", 0)
    assert answer["payload_nbytes"] == Store(chained).manifest("step_4").payloads[0].nbytes < 1000
    status, out, _ = run("publish", chained, "step_5", checkpoint)
    assert status == 0
    assert "as a delta of" in out
    assert "on step_4" in out
    assert run_json("publish", chained, "step_6", checkpoint, "--full-every", 5)[1]["kind"] == "full"
    assert run_json("publish", chained, "step_7", checkpoint, "--max-share", 0.0001)[1]["kind"] == "full"
    status, _, err = run("publish", chained, "step_8", checkpoint, "--max-share", 0.0001, "--mode", "delta")
    assert status == 1
    assert "max_share" in err
    assert "Store" not in err
    assert run("publish", chained, "step_8", checkpoint, "--max-share", 0)[0] == 2


def test_ls_and_show_tell_what_a_delta_is_built_on(run, run_json, chained):
    payload = Store(chained).manifest("step_3").payloads[0]
    status, out, _ = run("store", "ls", chained)
    assert status == 0
    line = next(line for line in out.splitlines() if "step_3" in line)
    assert ["delta" in line, "step_2" in line, f"{payload.nbytes} B" in line] == [True] * 3
    rows = run_json("store", "ls", chained)[1]
    assert [(row["kind"], row["base"]) for row in rows] == [("full", None), ("delta", "step_1"), ("delta", "step_2")]
    assert [row["payload_nbytes"] for row in rows][2] == payload.nbytes
    status, out, _ = run("store", "show", chained, "step_3")
    assert status == 0
    assert "base         step_2" in out
    assert "packed as gaps" in out
    a, b = (next(line for line in out.splitlines() if line.startswith(name)) for name in ("a ", "b "))
    assert ["sparse" in a, f"{5 / 16000:.4%}" in a, "skip" in b, "0.0000%" in b] == [True] * 4
    shown = run_json("store", "show", chained, "step_3")[1]
    assert shown["payloads"][0]["nbytes"] == payload.nbytes
    assert [(tensor["form"], tensor["changes"]) for tensor in shown["delta"]["tensors"]] == [("sparse", 5), ("skip", 0)]
    assert "delta" not in run_json("store", "show", chained, "step_1")[1]


def test_fold_makes_a_version_lead_from_an_older_base(run, run_json, chained):
    status, answer = run_json("store", "fold", chained)
    assert (status, answer["version"], answer["folded"], answer["base"]) == (0, "step_3", True, "step_1")
    assert answer["base_before"] == "step_2"
    status, out, _ = run("store", "fold", chained, "step_3", "--onto", "step_1")
    assert status == 0
    assert "nothing to fold" in out
    status, out, _ = run("store", "gc", chained, "--keep-last", 1)
    assert status == 0
    assert "removed step_2" in out
    assert "step_3/delta-00001.bin" in out
    assert run("store", "verify", chained)[0] == 0
    assert run("store", "fold", chained, "step_1")[0] == 2
    assert run("store", "fold", chained, "step_3", "--onto", "step_9")[0] == 2


def test_a_delta_version_is_verified_compared_and_written_as_a_snapshot(run, run_json, chained, tmp_path):
    status, reports = run_json("store", "verify", chained)
    assert (status, [report["tensors"] for report in reports]) == (0, [2, 2, 2])
    status, found = run_json("store", "diff", chained, "step_1", "step_3")
    assert (status, found["tensors"][0]["changed"]) == (1, 10)
    which = ("--rank", 0, "--id", "0")
    assert run("snapshot", "write", chained, "step_3", tmp_path / "legacy", *which, "--ranks", 1)[0] == 0
    assert run_json("snapshot", "convert", tmp_path / "legacy", tmp_path / "back", *which)[0] == 0
    assert Store(tmp_path / "back").manifest("step_3").root_digest == Store(chained).manifest("step_3").root_digest
    payload = layout.version_dir(chained, "step_2") / "delta-00001.bin"
    payload.write_bytes(payload.read_bytes()[:-1])
    status, out, _ = run("store", "verify", chained)
    assert status == 1
    assert out.count("DAMAGED") == 2


def test_names_are_printed_as_they_are(run, tmp_path):
    Store(tmp_path / "s").publish("v", {"w[bold]:smile:": np.zeros(2)})
    assert "w[bold]:smile:" in run("store", "show", tmp_path / "s")[1]


def test_diff_has_the_exit_status_of_diff(run, run_json, published):
    status, out, _ = run("store", "diff", published, "step_1", "step_2")
    assert status == 1
    assert "1 tensors differ, 1 are equal" in out
    status, found = run_json("store", "diff", published, "step_1", "step_2")
    assert status == 1
    assert (found["tensors"][0]["name"], found["tensors"][0]["changed"], found["tensors"][0]["max_ulp"]) == ("a", 1, 1)
    assert run("store", "diff", published, "step_1", "step_1")[0] == 0


def test_gc_and_its_dry_run(run, run_json, published):
    status, out, _ = run("store", "gc", published, "--keep-last", 1, "--dry-run")
    assert status == 0
    assert "would remove step_1; would free " in out
    assert "would keep step_2: " in out
    assert "freed" not in out
    assert len(Store(published).versions()) == 2
    assert run_json("store", "gc", published, "--keep-last", 1, "--protect", "step_1")[1]["removed"] == []
    assert run_json("store", "gc", published, "--keep-last", 1)[1]["removed"] == ["step_1"]


def test_migrate_converts_version_txt(run, run_json, published):
    (published / "version.yaml").unlink()
    (published / "version.txt").write_text("step_1")
    status, answer = run_json("store", "migrate", published)
    assert (status, answer["version"], answer["step"]) == (0, "step_1", 1)
    status, out, _ = run("store", "migrate", published)
    assert status == 0
    assert "nothing to migrate" in out


def test_a_version_goes_to_a_snapshot_and_back(run, run_json, published, tmp_path):
    directory = tmp_path / "legacy"
    which = ("--rank", 1, "--id", "GPU-0a1b")
    status, out, _ = run("snapshot", "write", published, "step_2", directory, *which, "--ranks", 2, "--part-size", "70kB")
    assert status == 0
    assert "wrote step_2" in out
    assert run("snapshot", "ls", directory)[0] == 0
    _, listed = run_json("snapshot", "ls", directory)
    assert [(item["rank"], item["id"]) for item in listed["snapshots"]] == [(1, "GPU-0a1b")]
    status, checked = run_json("snapshot", "check", directory, *which)
    assert (status, checked["version"], checked["level"], checked["proved"]) == (0, "step_2", 1, True)
    status, answer = run_json("snapshot", "convert", directory, tmp_path / "back", *which)
    assert status == 0
    assert answer["root_digest"] == Store(published).manifest("step_2").root_digest
    status, _, err = run("snapshot", "convert", directory, tmp_path / "back", "step_9", *which)
    assert status == 2
    assert "record version step_2" in err


def test_checks_of_snapshots_fail_with_what_was_found(run, published, tmp_path):
    directory = tmp_path / "legacy"
    which = ("--rank", 0, "--id", "0")
    run("snapshot", "write", published, "step_2", directory, *which, "--ranks", 1)
    (file,) = [file for file in list_snapshots(directory).snapshots[0].files if file.name.kind == "single"]
    data = bytearray(file.path.read_bytes())
    data[-1] ^= 1
    file.path.write_bytes(data)
    status, _, err = run("snapshot", "check", directory, *which)
    assert status == 1
    assert "differ from their digests" in err
    (directory / "model_state.tp0.0.partX.pdparams").write_bytes(b"")
    assert run("snapshot", "ls", directory)[0] == 1
    status, _, err = run("snapshot", "check", directory, "--rank", 3, "--id", "0", "--shared-dir", tmp_path / "none")
    assert status == 2
    assert "model_state.tp3.0.pdparams" in err
    assert str(tmp_path / "none") in err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["store", "ls", "nowhere"], 2, "nowhere"),
        (["store", "show", "STORE", "step_9"], 2, "step_9 is not in"),
        (["store", "diff", "STORE", "step_1", "step_9"], 2, "step_9"),
        (["store", "verify", "STORE", "step_9"], 2, "step_9"),
        (["store", "gc", "STORE", "--keep-last", "0"], 2, "keep-last"),
        (["publish", "STORE", "step_1", "CHECKPOINT"], 1, "already published"),
        (["publish", "STORE", "../x", "CHECKPOINT"], 2, "version id"),
        (["publish", "STORE", "step_3", "nowhere"], 2, "not a directory"),
        (["publish", "STORE", "step_3", "CHECKPOINT", "--mode", "delta", "--full-every", "1"], 1, "full_every"),
        (["publish", "STORE", "step_3", "CHECKPOINT", "--mode", "magic"], 2, "magic"),
        (["publish", "STORE", "step_3", "CHECKPOINT", "--part-size", "lots"], 2, "not a size"),
        (["snapshot", "ls", "nowhere"], 2, "nowhere"),
        (["snapshot", "check", "STORE", "--rank", "0", "--id", "a.b"], 2, "a.b"),
        (["frobnicate"], 2, "frobnicate"),
    ],
)
def test_a_mistake_ends_in_one_message_and_the_right_status(run, published, checkpoint, arguments, status, said):
    places = {"STORE": published, "CHECKPOINT": checkpoint}
    got, out, err = run(*(places.get(argument, argument) for argument in arguments))
    assert got == status
    assert said in err
    assert "Traceback" not in out + err
    assert Store(published).versions() == ["step_1", "step_2"]


def test_an_error_is_json_where_json_was_asked_for(run_json, published):
    status, answer = run_json("store", "show", published, "step_9")
    assert status == 2
    assert answer["error"]["code"] == "version_not_found"


def test_the_installed_command_and_the_module_are_the_same(published):
    for command in ([sys.executable, "-m", "weightcast"], [os.path.join(os.path.dirname(sys.executable), "weightcast")]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
        assert __version__ in done.stdout
    failed = subprocess.run(
        [sys.executable, "-m", "weightcast", "store", "ls", "/nowhere"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")


def said_on_a_terminal(*command):
    """Standard output, and what a terminal shows of standard error."""
    terminal, side = pty.openpty()
    shown = []

    def read():
        with contextlib.suppress(OSError):  # nobody has the other side open any more
            while data := os.read(terminal, 65536):
                shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "weightcast", *map(str, command)],
            stdout=subprocess.PIPE, stderr=side, timeout=60, check=True, env={**os.environ, "COLUMNS": "120"},
        )  # fmt: skip
    finally:
        os.close(side)
        reader.join(60)
        os.close(terminal)
    return done.stdout, b"".join(shown)


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(published):
    command = [sys.executable, "-m", "weightcast", "store", "verify", str(published)]
    piped = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert piped.stderr == b""
    out, shown = said_on_a_terminal("store", "verify", published)
    assert b"verify" in shown
    assert out == piped.stdout


def test_bars_count_in_the_units_of_the_tables_also_for_fold(tmp_path):
    store = Store(tmp_path / "s")
    weights = {"a": np.zeros(3 << 18, np.float32)}
    for step in range(3):
        weights["a"][step] = 1
        store.publish(f"step_{step}", weights)
    out, shown = said_on_a_terminal("store", "fold", store.path)
    assert out.startswith(b"folded step_2")
    assert b"fold step_2" in shown
    assert b"3.0 MiB of 3.0 MiB" in shown
    assert b"MB" not in shown


def test_docs_prints_every_page_that_the_sources_name(run, run_json):
    status, names = run_json("docs")
    assert status == 0
    assert {"failure-model", "errors", "decisions/0001-stage-then-commit"} <= set(names)
    status, out, _ = run("docs", "failure-model")
    assert (status, out) == (0, (ROOT / "docs" / "failure-model.md").read_text())
    assert run("docs", "../README")[0] == 2
    cited = {name for path in SRC.rglob("*.py") for name in re.findall(r"`weightcast docs ([a-z/-]+)`", path.read_text())}
    assert "legacy-config" in cited
    assert cited <= set(names)


def test_no_message_cites_a_file_that_an_installed_package_does_not_have():
    """Comments and docstrings are read in a clone; texts that a user sees are not, and those of commands are help."""
    cited = []
    for path in SRC.rglob("*.py"):
        tree = ast.parse(path.read_text())
        hidden = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and isinstance(node.body[0], ast.Expr)
            and not (path.parent.name == "cli" and isinstance(node, ast.FunctionDef))
        }
        cited += [
            f"{path.name}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden
            if re.search(r"docs/[a-z-]+\.md", node.value)
        ]
    assert cited == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["publish", "-h"],
        *([["store", name, "-h"] for name in ("ls", "show", "verify", "diff", "fold", "gc", "migrate")]),
        *([["snapshot", name, "-h"] for name in ("ls", "check", "write", "convert")]),
        ["demo", "-h"],
        ["demo", "modes", "-h"],
    ],
    ids=" ".join,
)
def test_every_command_explains_itself(run, arguments):
    status, out, _ = run(*arguments)
    assert status == 0
    assert "Usage:" in out


def test_the_demo_proves_every_mode_and_refuses_the_damaged_version(run, run_json):
    status, out, _ = run("demo", "modes", "--width", "32")
    assert status == 0
    assert out.count("yes") == 7
    assert re.search(r"refused \((digest_mismatch|manifest_corrupt)\)", out)
    assert "unchanged, bit for bit" in out
    status, report = run_json("demo", "modes", "--width", "16")
    assert status == 0
    assert all(row["proved"] for row in report["rows"])
