"""A double of vLLM's HTTP routes (0.32), for failures that a real server cannot be made to have at the right moment.

It answers as vLLM's routers do (`entrypoints/rl/online`, `entrypoints/serve/dev`), with the same sessions of an update, the
same wrapping of what workers say, and the same error envelope; the workers behind it only keep books. Real servers are
driven by the tests of tests/vllm.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

METHODS = ("weightcast_stage", "weightcast_status", "weightcast_abandon", "weightcast_commit")


class Routes:
    """A server of `ranks` workers. `served` is what it serves, `calls` what it was asked, in order.

    `on` maps a route (or a method of the workers) to what happens instead: a number is a status with a message, "hang" waits
    until the server is closed, "drip" answers for ever, "cut" hangs up without an answer, a function is called first.
    """

    def __init__(
        self, *, ranks: int = 1, served: str = "default", knows_stage: bool = True, token: str | None = None
    ) -> None:
        self.ranks, self.served, self.knows_stage, self.token = ranks, served, knows_stage, token
        self.on: dict[str, object] = {}
        self.calls: list[str] = []
        self.bodies: list[object] = []
        self.paused = False
        self.active = False
        self.staged: str | None = None
        self.state = ["READY"] * ranks
        self.error: list[dict[str, str] | None] = [None] * ranks
        self.looks = 1  # how often a status says STAGING first
        self.refuses: dict[int, tuple[str, str]] = {}  # ranks that fail to stage, with code and message
        self.logprobs: dict[str, object] = {"prompt": [], "top": {}}
        self.closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def die(self) -> None:
        """Stop listening, as a server that was killed."""
        self._server.socket.close()

    # -- what routes do -----------------------------------------------------------------------------------------------

    def answer(self, path: str, query: dict[str, list[str]], body: object) -> object:
        if path == "/collective_rpc":
            return self.rpc(body)
        plain: dict[str, Callable[[], object]] = {
            "/health": lambda: None,
            "/weight_info": lambda: {"weight_version": self.served},
            "/get_world_size": lambda: {"world_size": self.ranks},
            "/is_paused": lambda: {"is_paused": self.paused},
            "/resume": lambda: self.set_paused(False),
            "/pause": lambda: self.set_paused(True),
            "/reset_prefix_cache": lambda: {"success": True},
            "/init_weight_transfer_engine": lambda: {"message": "Weight transfer initialized"},
            "/shutdown_weight_transfer_engine": lambda: {"message": "Weight transfer shut down"},
            "/start_weight_update": self.start,
            "/update_weights": lambda: self.update(body["update_info"]),
            "/finish_weight_update": lambda: self.finish(body),
            "/v1/completions": self.completion,
        }
        if path not in plain:
            raise Refused(404, "Not Found")
        return plain[path]()

    def set_paused(self, paused: bool) -> object:
        self.paused = paused
        return {"status": "paused" if paused else "resumed"}

    def start(self) -> object:
        if self.active:
            raise Refused(500, worker_said("start_weight_update called while a weight update is already active."))
        self.active = True
        return {"message": "Weight update started"}

    def update(self, info: dict[str, object]) -> object:
        if not self.active:
            raise Refused(500, worker_said("start_weight_update must be called before update_weights."))
        if self.staged != info["version"]:
            self.staged, self.state = info["version"], ["STAGED"] * self.ranks
        return {"message": "Weights updated"}

    def finish(self, body: object) -> object:
        if not self.active:
            raise Refused(500, worker_said("finish_weight_update called without a matching start_weight_update."))
        self.active, self.state, self.staged = False, ["READY"] * self.ranks, None
        self.served = (body or {}).get("weight_version", self.served)
        return {"message": "Weight update finished"}

    def completion(self) -> object:
        prompt = [None, *({str(token): {"logprob": value, "rank": 1}} for token, value in self.logprobs["prompt"])]
        top = {f"token_id:{token}": value for token, value in self.logprobs["top"].items()}
        return {"choices": [{"index": 0, "text": "x", "prompt_logprobs": prompt, "logprobs": {"top_logprobs": [top]}}]}

    def rpc(self, body: dict[str, object]) -> object:
        method = body["method"]
        if not self.knows_stage or method not in METHODS:
            raise Refused(500, worker_said(f"'CPUWorker' object has no attribute {method!r}"))
        if method == "weightcast_stage":
            self.stage(body["kwargs"])
        elif method == "weightcast_abandon":
            self.staged, self.active, self.state = None, False, ["READY"] * self.ranks
        elif method == "weightcast_commit":
            self.served, self.staged, self.state = self.staged, None, ["READY"] * self.ranks
        elif "STAGING" in self.state:
            self.looks -= 1
            if self.looks < 0:
                self.settle()
        results = [None] * self.ranks
        if method == "weightcast_status":
            results = [self.told(rank) for rank in range(self.ranks)]
        return {"results": results}

    def stage(self, wanted: dict[str, object]) -> None:
        self.staged, self.state, self.error = wanted["version"], ["STAGING"] * self.ranks, [None] * self.ranks

    def settle(self) -> None:
        for rank in range(self.ranks):
            refused = self.refuses.get(rank)
            self.state[rank] = "READY" if refused else "STAGED"
            self.error[rank] = {"code": refused[0], "message": refused[1]} if refused else None

    def told(self, rank: int) -> str:
        staged = self.staged if self.state[rank] == "STAGED" else None
        return json.dumps(
            {"version": self.served, "root_digest": None, "staged": staged, "state": self.state[rank],
             "error": self.error[rank], "rank": rank, "something_new": 1}
        )  # fmt: skip


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


def worker_said(message: str) -> str:
    """What a worker raised, as vLLM's executor and then its engine wrap it. Paths are taken out on the way."""
    wrapped = f"Worker failed with error '{message}', please check the stack trace above for the root cause"
    wrapped = f"Call to collective_rpc method failed: {wrapped}"
    return re.sub(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+", "<path>", wrapped)


def handler_of(routes: Routes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.close_connection = True
            parts = urlsplit(self.path)
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(data) if data else None
            name = body["method"] if parts.path == "/collective_rpc" else parts.path
            routes.calls.append(name + (f"?{parts.query}" if parts.query else ""))
            routes.bodies.append(body)
            try:
                if routes.token is not None and self.headers.get("Authorization") != f"Bearer {routes.token}":
                    raise Refused(401, "Unauthorized")
                if self.happens(routes.on.get(name)):
                    self.reply(200, routes.answer(parts.path, parse_qs(parts.query), body))
            except Refused as refused:
                self.reply(refused.status, {"error": {"message": refused.message, "type": "x", "code": refused.status}})

        do_GET = do_POST  # noqa: N815 - the library's name

        def happens(self, instead: object) -> bool:
            """Whether the route is to be answered as usual."""
            if isinstance(instead, int):
                raise Refused(instead, worker_said("RuntimeError: out of memory in /tmp/x/y.py"))
            if instead == "hang":
                routes.closing.wait(60)
            elif instead == "drip":  # bytes of a head that never ends
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                with suppress(OSError):
                    while not routes.closing.wait(0.02):
                        self.wfile.write(b"x")
            elif callable(instead):
                return instead() is not False
            return instead is None

        def reply(self, status: int, content: object) -> None:
            data = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def opened(*several: Routes):
    try:
        yield several
    finally:
        for one in several:
            one.close()
