"""A rank that computes nothing: it speaks the rank's side of the protocol and misbehaves as it is told.

Started as a program of its own with its settings on standard input, as real ranks are. The file `script.json` in the model
directory says how each rank behaves (`{"1": {"start": "never"}}`), the first token of a prompt what rank 0 does with it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import xxhash
import zmq

ECHO, WAIT, DIE, EXIT, TELL, GARBAGE, FRAMES, STAND_STILL, IMPOSTOR, UNHEARD, STREAM, SLOW = range(12)

STAGING = {"corrupt": ("digest_mismatch", "this rank got other bytes.")}  # how staging fails, by the script's word


def load_messages() -> ModuleType:
    """The contract alone: importing the whole package would take most of the time of a start."""
    package = importlib.util.find_spec("weightcast")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0]) / "engines" / "embedded" / "messages.py"
    spec = importlib.util.spec_from_file_location("rank_messages", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(path: Path, manifest: dict[str, Any]) -> tuple[str, str] | None:
    """What is wrong with a checkpoint of one tensor: its bytes are behind the header, whose length comes first."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return "storage_failed", f"{path} is not there."
    found = xxhash.xxh3_128_hexdigest(data[8 + int.from_bytes(data[:8], "little") :])
    (tensor,) = manifest["tensors"]
    if tensor["digest"] != f"xxh3-128:{found}":
        return "digest_mismatch", f"{path} has other bytes than {manifest['version']}."
    return None


class Rank:
    """The main loop and the heartbeat of one rank."""

    def __init__(self, settings: dict[str, Any], messages: ModuleType) -> None:
        self.settings, self.messages, self.rank = settings, messages, settings["rank"]
        self.script = self.read_script()
        self.encode = msgspec.msgpack.Encoder().encode
        self.context = zmq.Context()
        self.socket = self.connect(messages.rank_identity(self.rank))
        self.progress, self.busy = 0, False
        self.acknowledged: dict[int, Any] = {}
        self.received: list[int] = []
        self.actions: list[str] = []
        self.cancelled: list[str] = []
        self.executed = 0
        self.late: list[Any] = []
        self.staged = ""
        self.entered = False
        self.version = ""  # of the weights that it pretends to hold

    def read_script(self) -> dict[str, Any]:
        path = Path(self.settings["engine"]["model_dir"]) / "script.json"
        script: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        return script.get(str(self.rank), {})

    def connect(self, identity: bytes) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(self.messages.front_end_address(self.settings["run_dir"]))
        return socket

    def send(self, message: Any) -> None:
        self.socket.send(self.encode(message))

    def beat(self) -> None:
        socket = self.connect(self.messages.beat_identity(self.rank))
        while os.getppid() == self.settings["parent_pid"]:
            if not self.script.get("mute"):
                beat = self.messages.Heartbeat(rank=self.rank, progress=self.progress, busy=self.busy)
                socket.send(self.encode(beat))
            time.sleep(self.settings["engine"]["heartbeat_s"] / self.messages.BEATS)
        os._exit(1)

    def leave(self, code: int) -> None:
        """End without waiting for the heartbeat's thread; what was sent has a moment to go out."""
        self.socket.close()
        time.sleep(0.05)
        os._exit(code)

    def run(self) -> None:
        if self.script.get("sigterm") == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=self.beat, daemon=True).start()
        self.start(self.script.get("start", "ready"))
        decoder = msgspec.msgpack.Decoder(self.messages.ToRank)
        while True:
            message = decoder.decode(self.socket.recv())
            self.progress += 1
            if isinstance(message, self.messages.Submit):
                self.answer(message)
            elif isinstance(message, self.messages.Cancel):
                self.cancelled.append(message.id)
            else:
                self.execute(message)

    def start(self, how: str) -> None:
        messages = self.messages
        if how == "never":
            time.sleep(3600)
        if how == "exit":
            self.leave(7)
        if how == "fail":
            self.send(
                messages.Failed(rank=self.rank, code="unsupported_model", message=f"rank {self.rank} cannot run this.")
            )
            self.leave(1)
        if how == "stop":
            time.sleep(self.settings["engine"]["heartbeat_s"])  # it has been heard
            os.kill(os.getpid(), signal.SIGSTOP)
        ready = messages.Ready(
            rank=self.rank, pid=os.getpid(), protocol=messages.PROTOCOL + (how == "protocol"),
            max_length=128, blocks=64 + (how == "limits"), vocab_size=1000, moe=False,
            layouts={"main": messages.PartLayout(boxes=(), sources={})},
        )  # fmt: skip
        self.send(ready)
        if how == "twice":
            self.send(ready)

    def answer(self, request: Any) -> None:
        messages, kind = self.messages, request.prompt[0] if request.prompt else ECHO
        if kind == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == EXIT:
            self.leave(3)
        elif kind == TELL:
            self.send(messages.Failed(rank=self.rank, code="commit_failed", message="out of luck."))
            self.leave(1)
        elif kind == GARBAGE:
            self.socket.send(bytes(request.prompt[1:]))
        elif kind == FRAMES:
            self.socket.send_multipart([b"", b""])
        elif kind == STAND_STILL:
            self.busy = True
            time.sleep(3600)
        elif kind == IMPOSTOR:
            self.send(messages.Heartbeat(rank=self.rank + 1, progress=0, busy=False))
        elif kind == UNHEARD:
            self.send(messages.Acknowledged(rank=self.rank, id=99))
        elif kind == STREAM:
            self.stream(request)
        elif kind == SLOW:
            time.sleep(0.3)
            self.echo(request)
        elif kind == ECHO:
            self.echo(request)

    def echo(self, request: Any) -> None:
        for place, token in enumerate(request.prompt):
            finish = "stop" if place == len(request.prompt) - 1 else None
            self.output(self.messages.Output(id=request.id, tokens=(token,), version=self.version, finish=finish))

    def stream(self, request: Any) -> None:
        """Tokens in steps of a fixed length, until the front end has something else to say."""
        while not self.socket.poll(10):
            self.progress += 1
            self.output(self.messages.Output(id=request.id, tokens=(5,), version=self.version))

    def output(self, output: Any) -> None:
        self.send(self.messages.Outputs(outputs=(output,)))

    def load(self, command: Any) -> None:
        """Stage and commit: that is how weights come. Only the bytes are real; the rest goes as the script says."""
        messages, action, how = self.messages, command.action, self.read_script().get("load", "well")
        result: Any = None
        error: tuple[str, str] | None = None
        vote: Any = None
        if isinstance(action, messages.Stage):
            manifest, scheme, place = json.loads(action.feeds[0].manifest), *action.feeds[0].source.split("://")
            read = {key: manifest[key] for key in ("version", "root_digest")} | self.read_script().get("read", {})
            count = len(action.feeds)
            vote = messages.Vote(nbytes=0, reads=(messages.RankRead(**read),) * count, sums=(b"",) * count)
            self.staged = manifest["version"]
            error = ("wrong_state", "a commit was not ended.") if self.entered else STAGING.get(how)
            if scheme == "checkpoint" and error is None:
                error = compare(Path(place) / "model.safetensors", manifest)
        elif isinstance(action, messages.Commit):
            self.version, self.entered = "another" if how == "version" else self.staged, True
            result = {"version": self.version, "pause_s": 0.0}
        elif isinstance(action, messages.Settle | messages.Revert):
            self.entered = False
            result = {"version": self.version, "rank": self.rank, "bytes": 0}
        elif isinstance(action, messages.DescribeWeights):
            weights = {"rank": self.rank, "version": self.version, "state": "READY", "shard_digest": "", "nbytes": 0}
            result = {"weights": weights, "previous": None}
        self.send(messages.Acknowledged(rank=self.rank, id=command.id, result=result))
        if isinstance(action, messages.Commit) and how == "slow proof":
            time.sleep(0.2)
        if isinstance(action, (messages.Stage, messages.Commit)):
            self.send(messages.Report(rank=self.rank, job=command.id, done=True, result=vote, error=error))

    def execute(self, command: Any) -> None:
        messages = self.messages
        loading = (
            messages.Stage, messages.Abandon, messages.Commit, messages.Settle, messages.Revert, messages.DescribeWeights,
        )  # fmt: skip
        if isinstance(command.action, loading):
            self.load(command)
            return
        self.received.append(command.id)
        self.actions.append(type(command.action).__name__)
        how = self.read_script().get("commands", "well")  # as it is now
        shutdown = isinstance(command.action, self.messages.Shutdown)
        if shutdown and self.script.get("shutdown") == "ignore":
            return
        if how == "ignore" and not shutdown:
            return
        if how == "deaf once" and self.received.count(command.id) == 1 and not shutdown:
            return
        if command.id not in self.acknowledged:
            self.executed += 1
            self.acknowledged[command.id] = self.acknowledgement(command, failing=how == "error")
        if how == "late" and self.executed == 1 and not shutdown:
            self.late.append(self.acknowledged[command.id])
            return
        for message in (*self.late, *[self.acknowledged[command.id]] * (2 if how == "twice" else 1)):
            self.send(message)
        self.late.clear()
        if shutdown:
            self.leave(0)

    def acknowledgement(self, command: Any, *, failing: bool) -> Any:
        if failing:
            error = ("corrupt", f"rank {self.rank} does not like {type(command.action).__name__}.")
            return self.messages.Acknowledged(rank=self.rank, id=command.id, error=error)
        result = {
            "rank": self.rank, "pid": os.getpid(), "command": command.id, "received": list(self.received),
            "executed": self.executed, "cancelled": list(self.cancelled), "actions": list(self.actions),
        }  # fmt: skip
        return self.messages.Acknowledged(rank=self.rank, id=command.id, result=result)


if __name__ == "__main__":
    Rank(json.loads(sys.stdin.buffer.read()), load_messages()).run()
