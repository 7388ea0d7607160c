"""The examples, run as a user runs them: they do what their page says, and leave nothing behind."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
MEMORY = Path("/dev/shm")
RUN_S = 240.0  # far more than they take, on a machine that may be busy
END_S = 20.0

pytestmark = pytest.mark.timeout(300)


class Run:
    """An example in a session of its own, with its own temporary directory: whatever is left of it can be found."""

    def __init__(self, name: str, *arguments: str, **environ: str) -> None:
        self._shared: set[str] = set()
        self._tmp_dir = Path(tempfile.mkdtemp(prefix="wc-"))  # short: the paths of sockets must be
        self._log = self._tmp_dir.with_suffix(".log")
        self._cache = self._tmp_dir.with_suffix(".cache")  # torch's own, which it makes and keeps
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, EXAMPLES / name, *arguments],
                cwd="/",  # it needs nothing of the repository
                env={**os.environ, "TMPDIR": str(self._tmp_dir), "TORCHINDUCTOR_CACHE_DIR": str(self._cache), **environ},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        until = time.monotonic() + RUN_S
        while words not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.05)

    def wait(self) -> int:
        """Its exit status. Meanwhile the names in shared memory that its processes use are noted, to look for them later."""
        until = time.monotonic() + RUN_S
        while self.process.poll() is None:
            assert time.monotonic() < until, self.said()
            for one in self.alive():
                self._shared |= shared_names(one.pid)
            time.sleep(0.2)
        return self.process.returncode

    def alive(self) -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(one.pid) == self.process.pid and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def left(self) -> list[str]:
        """Its processes, temporary files, network namespaces and names in shared memory, if they stay."""
        until = time.monotonic() + END_S  # multiprocessing's own helper ends a moment after its parent
        while (found := self._found()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def _found(self) -> list[str]:
        files = [str(path) for path in self._tmp_dir.iterdir()]
        shared = [name for name in self._shared if Path(name).exists()]
        return [*map(str, self.alive()), *files, *namespaces(self.process.pid), *shared]

    def end(self) -> None:
        for one in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait(END_S)
        for name in namespaces(self.process.pid):
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=END_S)
        for directory in (self._tmp_dir, self._cache):
            shutil.rmtree(directory, ignore_errors=True)
        self._log.unlink(missing_ok=True)


def namespaces(pid: int) -> list[str]:
    """Those that an example has made."""
    if shutil.which("ip") is None:
        return []
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=END_S).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"wc-example-{pid}-")]


def shared_names(pid: int) -> set[str]:
    """The names in shared memory that a process has mapped or open."""
    found: set[str] = set()
    with contextlib.suppress(OSError):  # it may end at any moment
        found.update(re.findall(rf"{MEMORY}/.+", Path(f"/proc/{pid}/maps").read_text()))
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor))
    return {name for name in found if name.startswith(f"{MEMORY}/") and not name.endswith("(deleted)")}


@contextlib.contextmanager
def example(name: str, *arguments: str, **environ: str) -> Iterator[Run]:
    run = Run(name, *arguments, **environ)
    try:
        yield run
        assert run.left() == []
    finally:
        run.end()


def output(name: str, *arguments: str) -> str:
    """What an example says that ends well and leaves nothing."""
    with example(name, *arguments) as run:
        status = run.wait()
        assert status == 0, run.said()
        return run.said()


# -- what they do ---------------------------------------------------------------------------------------------------------


def test_an_engine_follows_a_trainer_loop_by_deltas():
    said = output("trainer_loop.py", "--steps", "5")

    assert re.search(r"trainer  step_1 .* published: full", said)
    assert re.search(r"trainer  step_5 .* published: delta", said)
    (full,) = re.findall(r"engine   \S+  copy  +([\d,]+) bytes", said)
    deltas = re.findall(r"engine   \S+  delta +([\d,]+) bytes", said)
    assert deltas
    assert all(20 * number(delta) < number(full) * 5 for delta in deltas)
    assert "The engine holds step_5 bit for bit" in said


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_fsdp_ranks_teach_a_tensor_parallel_engine_a_sentence():
    said = output("fsdp_to_tp.py")

    assert "engine after    Rain fell|' on the quiet harbour all night.'" in said
    fetched = [number(found) for found in re.findall(r"engine rank \d   ([\d,]+) bytes fetched", said)]
    held = [number(found) for found in re.findall(r"([\d,]+) bytes of its own to share", said)]
    assert len(fetched) == len(held) == 2
    assert sum(fetched) < 1.01 * sum(held), "the norms are fetched by both ranks, and nothing else twice"
    assert re.search(r"hold \d+ boxes, each bit for bit", said)


def test_an_engine_recovers_from_legacy_snapshots():
    said = output("legacy_recovery.py")

    assert "version step_7 could not be loaded again" in said
    assert said.count("step_7 from snapshot:///") == 2
    assert "every byte proved" in said
    assert "The new store's step_7 is the one that was lost, bit for bit." in said


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@needs_root
def test_hosts_with_capped_links_send_deltas_and_the_trainer_sends_once():
    said = output("two_hosts.py", "--versions", "2")

    rows = re.findall(r"^(step_\d) +(full|delta) +(http|nixl)://.* s +([\d,]+) +([\d,]+) +([\d,]+)$", said, re.MULTILINE)
    schemes = ["http", "nixl"] if find_spec("nixl_cu12") else ["http"]
    expected = [(*step, scheme) for step in (("step_1", "full"), ("step_2", "delta")) for scheme in schemes]
    assert [row[:3] for row in rows] == expected, said
    by_trainer = {row[:3]: number(row[3]) for row in rows}
    assert all(number(row[5]) > 10**5 for row in rows), "every engine has it over its link"
    assert all(nbytes < 10**4 for row, nbytes in by_trainer.items() if row[2] == "nixl")
    assert "The engine holds step_2 bit for bit" in said


@needs_root
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_hosts_that_are_interrupted_are_removed(stop):
    with example("two_hosts.py", "--versions", "1000") as run:  # it cannot be over before it is interrupted
        run.wait_for("trainer sent")
        assert len(namespaces(run.process.pid)) == 4
        if stop == signal.SIGINT:
            os.killpg(run.process.pid, stop)  # as Ctrl-C does
        else:
            run.process.send_signal(stop)

        assert run.wait() == 128 + stop, run.said()
        assert "Traceback" not in run.said()


# -- what they say where they cannot run ----------------------------------------------------------------------------------


def test_without_iproute2_the_hosts_say_so():
    with example("two_hosts.py", PATH="/nowhere") as run:
        assert run.wait() == 2
        assert "root" in run.said() or "install iproute2" in run.said()


@pytest.mark.skipif(Path(sys.executable).with_name("vllm").exists(), reason="tests/vllm runs it where vLLM is installed")
def test_without_vllm_its_example_says_what_to_install():
    with example("vllm_update.py") as run:
        assert run.wait() == 2
        assert "pip install vllm" in run.said()


# -- what they are --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_each_explains_itself_and_is_on_the_page(name):
    text = (EXAMPLES / name).read_text()
    with example(name, "--help") as run:
        assert run.wait() == 0
        assert (ast.get_docstring(ast.parse(text)) or "").splitlines()[0] in run.said()
    assert f"`{name}`" in (EXAMPLES / "README.md").read_text()
    assert len(text.splitlines()) <= 250, "it is to be read in five minutes"


@pytest.mark.parametrize("name", NAMES)
def test_each_uses_what_is_public(name):
    tree = ast.parse((EXAMPLES / name).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} | {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    ours = {module for module in modules if module and module.split(".")[0] == "weightcast"}
    assert ours
    assert ours <= {"weightcast", "weightcast.errors"}


def test_the_trainers_part_of_a_loop_has_at_most_twenty_lines():
    tree = ast.parse((EXAMPLES / "trainer_loop.py").read_text())
    (train,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    assert train.end_lineno - train.lineno + 1 <= 20
