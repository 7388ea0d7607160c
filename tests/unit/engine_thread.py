"""One rank in a thread of the test: the program of a rank but for its process, spoken to over its real sockets."""

import itertools
import os
import shutil
import tempfile
import threading
from collections import defaultdict

import msgspec
import zmq

from engine_reference import ANSWER
from weightcast.engines.embedded.messages import (
    Acknowledged,
    Cancel,
    Command,
    Failed,
    FromRank,
    Heartbeat,
    Outputs,
    Ready,
    Sampling,
    Shutdown,
    Submit,
    front_end_address,
    rank_identity,
)
from weightcast.engines.embedded.ranks import process
from weightcast.engines.embedded.ranks.inbox import Inbox
from weightcast.engines.embedded.ranks.vitals import Pulse, Vitals
from weightcast.engines.embedded.settings import EngineSettings, RankSettings


class ThreadRank:
    """A context manager. The test plays the front end."""

    def __init__(self, model_dir, **settings):
        self.run_dir = tempfile.mkdtemp(prefix="rank-")  # short: socket paths are
        small = {"cache_nbytes": 8 << 20, "threads": 1, "heartbeat_s": 0.4}
        engine = EngineSettings(model_dir=str(model_dir), **small | settings)
        self.settings = RankSettings(engine=engine, rank=0, run_dir=self.run_dir, parent_pid=os.getppid(), version="v1")
        self.ready = self.failure = None
        self.beats = []
        self.acknowledged = {}
        self.outputs = defaultdict(list)
        self._numbers, self._commands = itertools.count(), itertools.count(1)

    def __enter__(self):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(front_end_address(self.run_dir))
        self._thread = threading.Thread(target=self._run, name="rank-0")
        self._thread.start()
        try:
            self.wait_for(lambda: self.ready or not self._thread.is_alive())
        except BaseException:
            self._close()
            raise
        return self

    def _run(self):
        vitals = Vitals()
        with zmq.Context() as context, Pulse(self.settings, vitals, context), Inbox(self.settings) as inbox:
            try:
                process.serve(self.settings, inbox, vitals, context)
            except Exception as error:
                self.failure = error

    def __exit__(self, *exception):
        if self._thread.is_alive():
            self.command(Shutdown())
        self._close()

    def _close(self):
        self._thread.join(timeout=60)
        self._socket.close()
        self._context.term()
        shutil.rmtree(self.run_dir)
        assert not self._thread.is_alive()

    def send(self, message):
        self._socket.send_multipart([rank_identity(0), msgspec.msgpack.encode(message)])

    def take(self):
        """Receive one message; returns without if the rank has ended. A rank that works sends heartbeats at least."""
        while not self._socket.poll(100):
            if not self._thread.is_alive():
                return
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
        else:
            assert not isinstance(message, Failed), message

    def wait_for(self, condition):
        while not condition():
            self.take()

    def command(self, action):
        number = next(self._commands)
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
