"""A small engine in the process of the test, and a real server around it.

It answers with its prompt, over and over: token i of an answer is token (i + seed) of the prompt, modulo its length; the
seed counts only with a temperature. So every text that a test wants to see, it can ask for.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec
import openai
from control_weights import EchoStatus, EchoWeights

from weightcast.control.listening import listen
from weightcast.control.server import Server
from weightcast.control.settings import ServerSettings
from weightcast.control.tokenizer import Tokenizer
from weightcast.engines.embedded.byte_tokenizer import VOCAB_SIZE, tokenizer_files
from weightcast.engines.embedded.messages import Describe, Output, RankStats, Routing, Submit, TokenLogprob
from weightcast.engines.states import Operation
from weightcast.errors import NotReady, Overloaded

MODEL = "echo"
WAIT_S = 20


@dataclass(frozen=True)
class EchoLimits:
    max_length: int = 200
    vocab_size: int = VOCAB_SIZE
    moe: bool = True
    blocks: int = 100
    block_size: int = 16


class EchoAnswer:
    def __init__(self, engine: EchoEngine, request: Submit) -> None:
        self.engine, self.request = engine, request
        self.queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self.made = 0
        self.stopped: str | None = None
        self.task = asyncio.create_task(self._generate())

    async def _generate(self) -> None:
        engine, request = self.engine, self.request
        while True:
            await asyncio.sleep(engine.step_s)
            while self.stopped is None and (engine.frozen or (engine.held_at is not None and self.made >= engine.held_at)):
                await asyncio.sleep(0.001)
            output = self._next()
            self.queue.put_nowait(output)
            if output.finish is not None:
                self.queue.put_nowait(None)
                engine.running.pop(request.id, None)
                return

    def _next(self) -> Output:
        engine, request, sampling = self.engine, self.request, self.request.sampling
        version = engine.version_at(self.made)
        if engine.fail_at is not None and self.made >= engine.fail_at:
            return Output(id=request.id, tokens=(), version=version, finish="error", reason="rank 1 died (signal 9).")
        if engine.abort_at is not None and self.made >= engine.abort_at:
            return Output(id=request.id, tokens=(), version=version, finish="abort", reason="shutting down")
        if self.stopped is not None:
            return Output(id=request.id, tokens=(), version=version, finish="abort", reason=self.stopped)
        tokens, finish = [], None
        while finish is None and len(tokens) < engine.per_step and engine.version_at(self.made) == version:
            token = engine.token(request, self.made)
            tokens.append(token)
            self.made += 1
            finish = "stop" if token in sampling.stop_tokens else "length" if self.made == sampling.max_tokens else None
        logprobs = (
            tuple(engine.logprob(token, sampling.logprobs) for token in tokens) if sampling.logprobs is not None else None
        )
        routing = None
        if finish and request.record_routing:
            count = len(request.prompt) + self.made - 1
            routing = request.replay or Routing(shape=(count, 1, 2), data=bytes(range(4)) * count)
        return Output(
            id=request.id, tokens=tuple(tokens), version=version, logprobs=logprobs, finish=finish,
            cached_tokens=engine.cached_tokens, routing=routing,
        )  # fmt: skip

    def __aiter__(self) -> EchoAnswer:
        return self

    async def __anext__(self) -> Output:
        output = await self.queue.get()
        if output is None:
            raise StopAsyncIteration
        return output

    def cancel(self) -> None:
        if self.engine.running.pop(self.request.id, None) is not None:
            self.engine.cancelled.append(self)
            self.task.cancel()
            self.queue.put_nowait(None)

    async def __aenter__(self) -> EchoAnswer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


@dataclass
class EchoEngine(EchoWeights):
    """Knobs are turned by the test while the engine runs in another thread."""

    max_length: int = 200
    blocks: int = 100
    moe: bool = True
    max_requests: int = 64
    step_s: float = 0.0
    per_step: int = 1
    cached_tokens: int = 0
    held_at: int | None = None
    fail_at: int | None = None
    abort_at: int | None = None
    switch_at: int | None = None
    start_error: Exception | None = None
    start_held: bool = False
    submitted: list[Submit] = field(default_factory=list)
    running: dict[str, EchoAnswer] = field(default_factory=dict)
    cancelled: list[EchoAnswer] = field(default_factory=list)
    closes: list[float] = field(default_factory=list)

    @property
    def limits(self) -> EchoLimits:
        if not self.status.version:
            raise NotReady("the engine is starting.")
        return EchoLimits(max_length=self.max_length, moe=self.moe, blocks=self.blocks)

    def version_at(self, position: int) -> str:
        return "step_2" if self.switch_at is not None and position >= self.switch_at else self.status.version

    def stop_requests(self, ids: Collection[str]) -> None:
        for one in ids:
            self.running[one].stopped = "aborted by the operator"

    def made(self) -> dict[str, int]:
        return {one: answer.made for one, answer in self.running.items()}

    def token(self, request: Submit, position: int) -> int:
        start = request.sampling.seed if request.sampling.temperature else 0
        return request.prompt[(start + position) % len(request.prompt)]

    def logprob(self, token: int, count: int) -> TokenLogprob:
        top = tuple(((token + other) % VOCAB_SIZE, -0.5 - other) for other in range(count))
        return TokenLogprob(-0.5, top)

    async def start(self) -> None:
        while self.start_held:
            await asyncio.sleep(0.005)
        if self.start_error is not None:
            raise self.start_error
        self.status = EchoStatus()

    async def close(self, *, drain_s: float) -> None:
        self.closes.append(drain_s)
        self.status = replace(self.status, state="DRAINING", reason="shutting down")
        end = time.monotonic() + drain_s
        while self.running and time.monotonic() < end and 0 not in self.closes:
            await asyncio.sleep(0.005)
        await self.end_updates()
        self.abort_at, self.held_at, self.is_paused = 0, None, False
        self.asleep.clear()
        while self.running:
            await asyncio.sleep(0.005)
        self.status = replace(self.status, state="CLOSED")

    def submit(self, request: Submit) -> EchoAnswer:
        self._allow(Operation.GENERATE)
        if len(self.running) >= self.max_requests:
            raise Overloaded(f"{len(self.running)} requests are in flight.")
        self.submitted.append(request)
        answer = self.running[request.id] = EchoAnswer(self, request)
        return answer

    async def command(self, action: object, *, timeout_s: float) -> list[object]:
        assert isinstance(action, Describe)
        assert timeout_s > 0
        if not self.status.healthy:
            raise NotReady("the replica takes no requests now.")
        numbers = dict.fromkeys(RankStats.__struct_fields__, 7)
        return [msgspec.to_builtins(RankStats(**{**numbers, "rank": rank, "version": "step_1"})) for rank in (0, 1)]


@dataclass
class Running:
    """A server with its engine, and clients for it."""

    engine: EchoEngine
    server: Server
    url: str
    loop: asyncio.AbstractEventLoop
    error: list[BaseException]
    announced: list[str]
    thread: threading.Thread
    http: httpx.Client

    def openai(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S, **options)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)


@contextmanager
def serving(model_dir: Path, **options: object) -> Iterator[Running]:
    """Run a server in a thread, on a free port. Options are settings of the server, or of the engine."""
    names = set(ServerSettings.__struct_fields__)
    engine_options = {name: value for name, value in options.items() if name not in names}
    settings = ServerSettings(
        **{"model_name": MODEL, "port": 0, **{name: options[name] for name in options if name in names}}
    )
    tokenizer = Tokenizer.read(model_dir)
    listening = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    http = httpx.Client(base_url=url, timeout=WAIT_S, headers={"content-type": "application/json"})
    started: list[Running] = []
    ready = threading.Event()

    async def run() -> None:
        engine = EchoEngine(**engine_options)
        server = Server(engine, tokenizer, settings)
        started.append(Running(engine, server, url, asyncio.get_running_loop(), [], [], thread, http))
        if engine.start_held:
            ready.set()
        await server.run(listening, lambda url: (started[0].announced.append(url), ready.set()))

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            started[0].error.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=main, name="server")
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        yield started[0]
    finally:
        for _ in range(2):  # the second time without draining
            if thread.is_alive():
                started[0].stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        http.close()
        listening.close()


def write_model_dir(path: Path) -> Path:
    """A directory with a tokenizer: one token per byte."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    for name, data in tokenizer_files(4096).items():
        (path / name).write_bytes(data)
    return path


def wait_for(fact: object, what: str = "") -> None:
    """Wait until a callable returns something true."""
    end = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < end, what or "it did not happen"
        time.sleep(0.005)


def read_metrics(url):
    """Every sample, after checking that each line is what Prometheus reads."""
    samples, types = {}, {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split(" ")
            types[name] = kind
        elif not line.startswith("# HELP"):
            matched = re.fullmatch(r'([a-z_]+)(\{(?:[a-z_]+="(?:[^"\\]|\\.)*",?)+\})? (-?[0-9.]+(?:e[+-][0-9]+)?)', line)
            assert matched, line
            assert any(matched[1] in (name, f"{name}_bucket", f"{name}_sum", f"{name}_count") for name in types)
            samples[matched[1] + (matched[2] or "")] = float(matched[3])
    return samples
