"""The built packages: what is in them, and that they work where nothing else is installed."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from weightcast import __version__

ROOT = Path(__file__).parents[2]
INFO = f"weightcast-{__version__}.dist-info"
RUN_S = 250.0  # far more than anything takes, on a machine that may be busy

pytestmark = pytest.mark.timeout(300)


def run(*command, cwd=None, status=0):
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=RUN_S, check=False, cwd=cwd, env=clean)
    assert ended.returncode == status, f"{words}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The sources at one moment: somebody may be working on them."""
    copied = tmp_path_factory.mktemp("tree") / "weightcast"
    shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".venv*", ".git", "dist", ".*_cache", ".hypothesis"))
    return copied


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--outdir", folder, tree)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def bare(built, tmp_path_factory):
    """An environment that has the wheel, what its core requires, and nothing else. Gives the folder of its programs."""
    home = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", home)
    programs = home / "bin"
    constraints = ROOT / "constraints.txt"
    run(sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "-c", constraints, built[1])
    return programs


def test_the_wheel_has_every_module_and_nothing_but_the_package(built, tree):
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())

    modules = {str(path.relative_to(tree / "src")) for path in (tree / "src").rglob("*.py")}
    about = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    docs = {f"weightcast/{path.relative_to(tree)}" for path in (tree / "docs").rglob("*") if path.is_file()}
    assert names == modules | about | docs | {"weightcast/py.typed"}


def test_the_metadata_are_those_of_the_project(built, tree):
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(built[1]) as wheel:
        told = email.message_from_bytes(wheel.read(f"{INFO}/METADATA"))
        points = wheel.read(f"{INFO}/entry_points.txt").decode()

    assert (told["Name"], told["Version"], told["Requires-Python"]) == ("weightcast", __version__, ">=3.11")
    assert told["License-Expression"] == "Apache-2.0"
    assert set(told.get_all("Provides-Extra")) == project["optional-dependencies"].keys()
    core = {one.partition(">=")[0] for one in told.get_all("Requires-Dist") if "extra ==" not in one}
    assert core == {one.partition(">=")[0] for one in project["dependencies"]}
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload(decode=True).decode().strip() == (tree / "README.md").read_text().strip()
    assert "weightcast = weightcast.cli.main:run" in points
    assert "[vllm.general_plugins]\nweightcast = weightcast.engines.vllm.plugin:register" in points
    assert "[sglang.srt.plugins]\nweightcast = weightcast.engines.sglang.plugin:register" in points


def test_a_wheel_from_the_tree_is_the_one_from_the_sdist(built, tree, tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, tree)
    (wheel,) = tmp_path.glob("*.whl")

    assert wheel.read_bytes() == built[1].read_bytes()


def test_the_sdist_has_the_tests_the_docs_and_what_the_makefile_needs(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}

    assert {"Makefile", "constraints.txt", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} <= names
    assert {"tests/docs/test_packaging.py", "docs/format.md", "src/weightcast/py.typed"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "dist/"))]


def test_the_core_alone_tells_its_version_explains_itself_and_examines_the_machine(bare, tmp_path):
    for command in ([bare / "weightcast"], [bare / "python", "-m", "weightcast"]):
        assert run(*command, "--version", cwd=tmp_path).stdout.startswith(f"weightcast, version {__version__}\n")
    told = run(bare / "weightcast", "doctor", cwd=tmp_path).stdout
    assert "PROBLEM" not in told
    for extra in ("torch", "fast", "ipc", "nixl", "serve"):
        assert f"cure: pip install 'weightcast[{extra}]'" in told
    page = run(bare / "weightcast", "docs", "failure-model", cwd=tmp_path).stdout
    assert page == (ROOT / "docs" / "failure-model.md").read_text()


CORE = """
import sys
import numpy as np
from weightcast import LiveModel, Store

weights = {"layer.weight": np.zeros((64, 64), np.float32), "layer.bias": np.zeros(64, np.float32)}
live = {name: array.copy() for name, array in weights.items()}
store = Store("weights")
store.publish("step_1", weights)
model = LiveModel(live, source="file://" + str(store.path.absolute()))
model.update()
weights["layer.weight"][3, 5] = 1.5
manifest = store.publish("step_2", weights)
result = model.update("step_2")
assert manifest.kind == "delta", manifest.kind
assert live["layer.weight"][3, 5] == 1.5
assert model.root_digest() == manifest.root_digest
print(result.version, "torch" in sys.modules)
"""


def test_the_core_alone_publishes_a_version_and_a_delta_and_updates_a_model_of_numpy(bare, tmp_path):
    (tmp_path / "trainer.py").write_text(CORE)
    assert run(bare / "python", "trainer.py", cwd=tmp_path).stdout == "step_2 False\n"
    run(bare / "weightcast", "store", "verify", "weights", cwd=tmp_path)
    assert "step_2" in run(bare / "weightcast", "store", "ls", "weights", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["serve", "."], "serve"),
        (["model", "init", "made"], "serve"),
        (["demo"], "demo"),
        (["demo", "modes"], "torch"),
        (["bench", "delta"], "bench"),
        (["bench", "engine", "--quick"], "serve"),
        (["bench", "pause"], "serve"),
        (["bench", "update"], "serve"),
        (["bench", "ipc", "--size", "16MiB"], "ipc"),
        (["bench", "vllm"], "vllm"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_command_whose_extra_is_missing_names_what_installs_it(bare, tmp_path, command, extra):
    ended = run(bare / "weightcast", *command, cwd=tmp_path, status=2)

    assert ended.stderr.startswith("error: ")
    assert f"pip install 'weightcast[{extra}]'" in ended.stderr
    assert "Traceback" not in ended.stderr


MISSING = """
import numpy as np
import weightcast
from weightcast.tensors.kernels import kernels
from weightcast.errors import MissingExtra

def engine():
    from weightcast.engines.embedded.replica.replica import Replica

weightcast.Store("weights").publish("step_1", {"a": np.arange(4.0)})
with weightcast.DepotPublisher("127.0.0.1:0") as depot:
    depot.publish("step_1", {"a": np.arange(4.0)})
    port = depot.url.rpartition(":")[2]
    calls = {
        "ipc publisher": lambda: weightcast.Publisher("ipc:///dev/shm/none"),
        "ipc source": lambda: weightcast.LiveModel({"a": np.zeros(4)}, source="ipc:///dev/shm/none").update(),
        "nixl source": lambda: weightcast.LiveModel({"a": np.zeros(4)}, source=f"nixl://127.0.0.1:{port}").update(timeout=20),
        "fast kernels": lambda: kernels("compiled"),
        "serve engine": engine,
    }
    for name, call in calls.items():
        try:
            call()
        except MissingExtra as error:
            assert f"pip install 'weightcast[{name.split()[0]}]'" in str(error), (name, str(error))
        else:
            raise AssertionError(f"{name} did not fail")
print("all said so")
"""


def test_a_class_whose_extra_is_missing_names_what_installs_it(bare, tmp_path):
    (tmp_path / "missing.py").write_text(MISSING)
    assert run(bare / "python", "missing.py", cwd=tmp_path).stdout == "all said so\n"
