"""`weightcast store verify` as a program: it finds each byte that is wrong, and names the file that holds it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from weightcast import Store


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "store")
    weights = {"a": np.arange(4096, dtype=np.float32), "b": np.ones(64, dtype=np.float32)}
    for step in range(3):
        opened.publish(f"step_{step}", {**weights, "b": weights["b"] * step})
    assert [opened.manifest(version).kind for version in opened.versions()] == ["full", "delta", "delta"]
    return opened


def verify(store):
    """The exit status and the versions that are damaged, each with what is said of it."""
    command = [sys.executable, "-m", "weightcast", "store", "verify", str(store.path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = {}
    for line in ran.stdout.splitlines():
        if not line.startswith(" "):
            version, _, verdict = line.partition(": ")
        elif "DAMAGED" in verdict:
            said[version] = said.get(version, "") + line.strip()
    return ran.returncode, said


@pytest.mark.parametrize(
    ("file", "damaged"),
    [
        ("step_0/model-00001-of-00001.safetensors", ["step_0", "step_1", "step_2"]),
        ("step_1/delta-00001.bin", ["step_1", "step_2"]),
        ("step_2/manifest.json", ["step_2"]),
    ],
)
def test_a_flipped_byte_is_found_and_its_version_blamed(store, file, damaged):
    path = store.path / "versions" / file
    data = bytearray(path.read_bytes())
    data[-9] ^= 0x10
    path.write_bytes(data)
    status, said = verify(store)
    assert (status, sorted(said)) == (1, damaged)
    assert path.name in said[damaged[0]]
    assert all(f"built on {damaged[0]}, which is damaged" in said[version] for version in damaged[1:])


def test_a_version_file_that_names_a_missing_version_is_found(store):
    assert verify(store) == (0, {})
    (store.path / "version.yaml").write_text("step: 2\nversion: step_02\n")
    status, said = verify(store)
    assert (status, list(said)) == (1, ["version.yaml"])
    assert "names step_02, which is not there" in said["version.yaml"]
