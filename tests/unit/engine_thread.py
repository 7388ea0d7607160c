"""One rank in a thread of the test: the program of a rank but for its process, spoken to over its real sockets."""

import itertools
import os
import shutil
import tempfile
import threading
from collections import defaultdict

import msgspec
import zmq
from msgspec import structs

from engine_reference import ANSWER
from weightcast.clock import Deadline
from weightcast.engines.embedded.messages import (
    Acknowledged,
    Cancel,
    Command,
    Commit,
    Failed,
    Feed,
    FromRank,
    Heartbeat,
    Outputs,
    Ready,
    Report,
    Sampling,
    Settle,
    Shutdown,
    Stage,
    Submit,
    front_end_address,
    rank_identity,
)
from weightcast.engines.embedded.ranks import process
from weightcast.engines.embedded.ranks.inbox import Inbox
from weightcast.engines.embedded.ranks.vitals import Pulse, Vitals
from weightcast.engines.embedded.settings import EngineSettings, RankSettings
from weightcast.errors import WeightcastError, rebuilt
from weightcast.transports.registry import open_receiver


def feed_of(part, source, *, take=None, version=None, names=(), ignore=()):
    """What the front end tells a rank about a version: the one to `take`, or the newest. `version` gives it another name."""
    receiver = open_receiver(source, rank=0)
    try:
        manifest = receiver.manifest(take or receiver.newest(), deadline=Deadline.after(30))
    finally:
        receiver.close()
    manifest = structs.replace(manifest, version=version or manifest.version)
    return Feed(part=part, manifest=msgspec.json.encode(manifest), source=source, names=names, ignore=ignore)


class ThreadRank:
    """A context manager. The test plays the front end."""

    def __init__(self, model_dir, **settings):
        self.run_dir = tempfile.mkdtemp(prefix="rank-")  # short: socket paths are
        small = {"cache_nbytes": 8 << 20, "threads": 1, "heartbeat_s": 0.4}
        engine = EngineSettings(model_dir=str(model_dir), **small | settings)
        self.settings = RankSettings(engine=engine, rank=0, run_dir=self.run_dir, parent_pid=os.getppid())
        self.ready = self.failure = None
        self.beats = []
        self.acknowledged = {}
        self.reports = {}
        self.outputs = defaultdict(list)
        self._numbers, self.commands = itertools.count(), itertools.count(1)

    def __enter__(self):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(front_end_address(self.run_dir))
        self._thread = threading.Thread(target=self._run, name="rank-0", daemon=True)  # a stuck one must not keep pytest
        self._thread.start()
        try:
            self.wait_for(lambda: self.ready or not self._thread.is_alive())
            if self.ready:
                self._load()
        except WeightcastError as error:
            self.command(Shutdown())
            self._thread.join(timeout=60)
            self.failure = error
        except BaseException:
            self._close()
            raise
        return self

    def _load(self):
        """The first version, as the front end brings it: the checkpoint itself, and the draft's."""
        engine = self.settings.engine
        parts = {"main": engine.model_dir} | ({"draft": engine.draft_dir} if engine.draft_dir else {})
        feeds = [feed_of(part, f"checkpoint://{directory}", version="v1") for part, directory in parts.items()]
        self.update("first", feeds)

    def update(self, name, feeds, *, commit="auto", verify_checksum=True, clear_cache=True, release_cache=False):
        """A whole update, as the front end drives it. Returns the rank's result."""
        self.stage(name, feeds, commit=commit, verify_checksum=verify_checksum)
        self.commit(name, clear_cache=clear_cache, release_cache=release_cache)
        return self.done(Settle(update=name))

    def stage(self, name, feeds, *, commit="auto", verify_checksum=True, timeout_s=60.0):
        return self.job(
            Stage(update=name, feeds=tuple(feeds), commit=commit, verify_checksum=verify_checksum, timeout_s=timeout_s)
        )

    def commit(self, name, *, clear_cache=True, release_cache=False):
        return self.job(Commit(update=name, clear_cache=clear_cache, release_cache=release_cache))

    def done(self, action):
        """The result of a command that must succeed."""
        answer = self.command(action)
        assert answer.error is None, answer.error
        return answer.result

    def job(self, action):
        """Start a job, and the result of its last report. Raises the error that either ended with."""
        answer = self.command(action)
        if answer.error is None:
            self.wait_for(lambda: answer.id in self.reports and self.reports[answer.id].done)
        error = answer.error or self.reports[answer.id].error
        if error is not None:
            raise rebuilt(*error)
        return self.reports[answer.id].result

    def _run(self):
        vitals = Vitals()
        with zmq.Context() as context, Pulse(self.settings, vitals, context), Inbox(self.settings) as inbox:
            try:
                process.serve(self.settings, inbox, vitals, context)
            except Exception as error:
                self.failure = error

    def __exit__(self, *exception):
        try:
            if self._thread.is_alive():
                self.send(Command(id=next(self.commands), action=Shutdown()))
        finally:
            self._close()

    def _close(self):
        self._thread.join(timeout=60)
        self._context.destroy(linger=0)  # whatever happened: a context that is left open keeps pytest from ending
        shutil.rmtree(self.run_dir)
        assert not self._thread.is_alive()

    def send(self, message):
        self._socket.send_multipart([rank_identity(0), msgspec.msgpack.encode(message)])

    def take(self):
        """Receive one message; False if the rank has ended and none is left. A rank that works sends heartbeats at least."""
        while not self._socket.poll(100):
            if not self._thread.is_alive():
                return False
        message = msgspec.msgpack.decode(self._socket.recv_multipart()[1], type=FromRank)
        if isinstance(message, Ready):
            self.ready = message
        elif isinstance(message, Heartbeat):
            self.beats.append(message)
        elif isinstance(message, Outputs):
            for output in message.outputs:
                self.outputs[output.id].append(output)
        elif isinstance(message, Acknowledged):
            self.acknowledged[message.id] = message
        elif isinstance(message, Report):
            self.reports[message.job] = message
        else:
            assert not isinstance(message, Failed), message
        return True

    def wait_for(self, condition):
        deadline = Deadline.after(60)
        while not condition():
            deadline.check("waiting for the rank")
            assert self.take() or condition(), self.failure

    def command(self, action):
        number = next(self.commands)
        self.send(Command(id=number, action=action))
        self.wait_for(lambda: number in self.acknowledged)
        return self.acknowledged[number]

    def submit(self, prompt, *, record_routing=False, replay=None, **sampling):
        name = f"request-{next(self._numbers)}"
        how = Sampling(**{"max_tokens": ANSWER} | sampling)
        self.send(Submit(id=name, prompt=tuple(prompt), sampling=how, record_routing=record_routing, replay=replay))
        return name

    def cancel(self, name):
        self.send(Cancel(id=name))

    def finished(self, name):
        return bool(self.outputs[name]) and self.outputs[name][-1].finish is not None

    def ask_all(self, prompts, **options):
        """All at once; the outputs of each."""
        names = [self.submit(prompt, **options) for prompt in prompts]
        self.wait_for(lambda: all(map(self.finished, names)))
        return [self.outputs[name] for name in names]

    def ask(self, prompt, **options):
        return self.ask_all([prompt], **options)[0]


def tokens_of(outputs):
    return [token for output in outputs for token in output.tokens]


def logprobs_of(outputs):
    return [detail for output in outputs for detail in output.logprobs or ()]
