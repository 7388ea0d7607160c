"""A double of the parts of SGLang that weightcast plugs into. Nothing here was run against SGLang, which needs a GPU.

It was written from stored copies of SGLang's sources from around 0.5.23: the plugin registry with its signature and order of
events, `WeightUpdater`, the scheduler's handling of sessions and of the weight version, and the routes in front of it. The
copies do not name a release. That a refused flush is an answer is from notes on 0.5.23; in the copies it is an exception.

It differs where that does not matter to what is tested: tensors of /update_weights_from_tensor come as JSON and not as
pickles, and ranks are threads. As in SGLang each rank gets each request, the answer is that of rank 0, and an exception that
reaches a rank's loop ends the server.
"""

from __future__ import annotations

import base64
import functools
import json
import pkgutil
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.request import Request, urlopen

import torch
import torch.distributed as dist
from sglang_model import Model, default_weight_loader, tensors

_here = threading.local()  # the group of the rank whose thread this is
WAIT_S = 30


class HookType(Enum):
    BEFORE, AFTER, AROUND, REPLACE = "before", "after", "around", "replace"


class HookRegistry:
    """Hooks are registered while plugins are loaded, and applied once to each target afterwards."""

    _hooks: ClassVar[dict[str, list[tuple[HookType, Callable[..., Any], object]]]] = defaultdict(list)
    _patched: ClassVar[set[str]] = set()

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER, *, source: object = None):
        cls._hooks[target].append((hook_type, hook, source))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in sorted(cls._hooks.items()):
            if target in cls._patched:
                continue
            owner_path, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(owner_path)
            wrapped = getattr(owner, name)
            for hook_type, hook, _ in hooks:
                assert hook_type is HookType.AROUND, "others are not doubled"
                wrapped = cls._around(wrapped, hook)
            setattr(owner, name, wrapped)
            cls._patched.add(target)

    @staticmethod
    def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        return wrapper


def _updater_class() -> type:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class WeightUpdater:
        tp_rank: int
        device: str
        model_config: Any
        custom_weight_loaders: list[str]
        get_model: Callable[[], Model]
        events: list[str] = field(default_factory=list)

        def _assert_weight_cache_inactive(self, op: str) -> None:
            if self.model_config.weight_cache_mode != "off":
                raise RuntimeError(f"{op} is not supported while the weight cache is active")

        def update_weights_from_disk(
            self, model_path: str, load_format: str, weight_name_filter: Any = None, recapture_cuda_graph: bool = False
        ) -> tuple[bool, str]:
            if load_format != "auto":
                raise ValueError(f"{load_format!r} is not a valid LoadFormat")
            self.events.append(f"disk {model_path}")
            for param in self.get_model().parameters():
                param.data.fill_(7)
            return True, "Succeeded to update model weights."

        def begin_weight_update(self) -> None:
            self.events.append("restore")

        def end_weight_update(self, *, run_post_load: bool) -> None:
            self.events.append(f"postprocess {run_post_load}")

        def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
            if load_format in self.custom_weight_loaders:
                module, _, name = load_format.rpartition(".")
                __import__(module)
                getattr(sys.modules[module], name)(self.get_model(), named_tensors)
            elif load_format is None:
                self.get_model().load_weights(named_tensors)
            else:
                raise NotImplementedError(f"Unknown load_format={load_format}")
            return True, "Success"

    WeightUpdater.__module__ = "sglang.srt.model_executor.model_runner_components.weight_updater"
    return WeightUpdater


def _front_class() -> type:
    class TokenizerManager:
        def __init__(self) -> None:
            self.served_model_name, self.load_format = "policy", "auto"

        def _update_model_path_info(self, model_path: str, load_format: str) -> None:
            self.served_model_name, self.load_format = model_path, load_format

    return TokenizerManager


def _manager_class() -> type:
    class SchedulerWeightUpdaterManager:
        def release_memory_occupation(self, model: Model) -> None:
            for param in model.parameters():
                param.data.fill_(-1)

    return SchedulerWeightUpdaterManager


class Rank:
    """The scheduler and worker of one rank."""

    def __init__(self, rank: int, ranks: int, store: dist.Store, loaders: list[str]) -> None:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        self.thread = ThreadPoolExecutor(1, initializer=self._join, initargs=(rank, ranks, store))
        self.model = Model(rank, ranks)
        self.model.load_weights((name, torch.from_numpy(array)) for name, array in tensors(0).items())
        self.model.loads.clear()
        config = types.SimpleNamespace(dtype=torch.float32, weight_cache_mode="off")
        self.updater = WeightUpdater(
            tp_rank=rank, device="cpu", model_config=config, custom_weight_loaders=loaders, get_model=lambda: self.model
        )
        self.manager = SchedulerWeightUpdaterManager()
        self.weight_version = "default"
        self.session: str | None = None
        self.pending: str | None = None
        self.running = 0

    def _join(self, rank: int, ranks: int, store: dist.Store) -> None:
        group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=WAIT_S)) if ranks > 1 else None
        _here.group = group

    def handle(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, route.strip("/"))(body)

    def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        success, message = self.updater.update_weights_from_disk(
            body["model_path"], body["load_format"], recapture_cuda_graph=body.get("recapture_cuda_graph", False)
        )
        return self._answer(body, success, message)

    def begin_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.session is not None:
            return {"success": False, "message": "a weight-update session is already open"}
        self.session, self.pending = body.get("selector", "all"), None
        self.updater.begin_weight_update()
        return {"success": True, "message": "Success"}

    def update_weights_from_tensor(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.session is None:
            return {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        sent = json.loads(body["serialized_named_tensors"][self.updater.tp_rank])
        named = [(name, torch.frombuffer(bytearray(base64.b64decode(raw)), dtype=torch.uint8)) for name, raw in sent]
        success, message = self.updater.update_weights_from_tensor(named, load_format=body.get("load_format"))
        return self._answer(body, success, message)

    def end_weight_update(self, _: dict[str, Any]) -> dict[str, Any]:
        if self.session is None:
            return {"success": False, "message": "no weight-update session is open"}
        self.session = None
        self.updater.end_weight_update(run_post_load=False)
        self.weight_version = self.pending or self.weight_version
        return {"success": True, "message": "Success"}

    def release_memory_occupation(self, _: dict[str, Any]) -> dict[str, Any]:
        self.manager.release_memory_occupation(self.model)
        return {"success": True, "message": ""}

    def _answer(self, body: dict[str, Any], success: bool, message: str) -> dict[str, Any]:
        if success and body.get("flush_cache", True) and self.running:
            return {"success": False, "message": "Weights were updated, but the cache was not flushed"}
        if success and body.get("weight_version") is not None:
            if self.session is not None:
                self.pending = body["weight_version"]
            else:
                self.weight_version = body["weight_version"]
        return {"success": success, "message": message}


class Server:
    """The routes, and the ranks behind them."""

    def __init__(self, ranks: int, loaders: list[str]) -> None:
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        store = dist.HashStore()
        self.ranks = [Rank(rank, ranks, store, loaders) for rank in range(ranks)]
        self.front = TokenizerManager()
        self.alive = True
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, server.model_info())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    reply = server.handle(self.path, body)
                except Exception as error:
                    server.alive = False
                    self._reply(500, {"success": False, "message": f"the scheduler died: {error!r}"})
                    return
                self._reply(200 if reply["success"] else 400, reply)

            def _reply(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._listening = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._listening.start()

    def handle(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self.alive, "the scheduler died before"
        if route == "/update_weights_from_disk":
            body.setdefault("load_format", self.front.load_format)
        replies = [rank.thread.submit(rank.handle, route, body) for rank in self.ranks]
        reply, *_ = [one.result(WAIT_S) for one in replies]
        if route == "/update_weights_from_disk" and reply["success"]:
            self.front._update_model_path_info(body["model_path"], body["load_format"])
        return reply

    def model_info(self) -> dict[str, Any]:
        return {"weight_version": self.ranks[0].weight_version, "served_model_name": self.front.served_model_name}

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        """A client's call. A refusal (status 400) is an answer too."""
        return self._ask(Request(self._url(route), json.dumps(body).encode(), method="POST"))

    def get(self, route: str) -> dict[str, Any]:
        return self._ask(Request(self._url(route)))

    def _url(self, route: str) -> str:
        return f"http://127.0.0.1:{self._http.server_port}{route}"

    @staticmethod
    def _ask(request: Request) -> dict[str, Any]:
        from urllib.error import HTTPError

        try:
            with urlopen(request, timeout=WAIT_S) as answer:
                return json.load(answer)
        except HTTPError as refusal:
            with refusal:
                return json.load(refusal)

    def tensor_body(self, named: list[tuple[str, torch.Tensor]]) -> list[str]:
        """The tensors in the form of the route, for every rank."""
        sent = json.dumps([(name, base64.b64encode(tensor.numpy().tobytes()).decode()) for name, tensor in named])
        return [sent] * len(self.ranks)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._listening.join()
        for rank in self.ranks:
            rank.thread.shutdown()


def get_tp_group() -> Any:
    group = getattr(_here, "group", None)
    assert group is not None, "tensor model parallel group is not initialized"
    return types.SimpleNamespace(cpu_group=group)


@contextmanager
def installed() -> Iterator[None]:
    """The modules by SGLang's names, for as long as this lasts; classes and registry are new each time."""
    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.model_executor.model_runner_components.weight_updater": {"WeightUpdater": _updater_class()},
        "sglang.srt.managers.scheduler_components.weight_updater": {"SchedulerWeightUpdaterManager": _manager_class()},
        "sglang.srt.managers.tokenizer_manager": {"TokenizerManager": _front_class()},
        "sglang.srt.distributed": {"get_tp_group": get_tp_group},
        "sglang.srt.model_loader.weight_utils": {"default_weight_loader": default_weight_loader},
    }
    names = {".".join(path.split(".")[:depth]) for path in contents for depth in range(1, path.count(".") + 2)}
    assert not names & sys.modules.keys(), "SGLang is installed here: use it"
    HookRegistry._hooks.clear()
    HookRegistry._patched.clear()
    for name in sorted(names):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        vars(module).update(contents.get(name, {}))
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


@contextmanager
def serving(ranks: int = 1, *, loaders: tuple[str, ...] = ()) -> Iterator[Server]:
    """A server whose plugins are loaded as SGLang loads them: each is called, then hooks are applied."""
    from weightcast.engines.sglang.plugin import register

    with installed():
        register()
        HookRegistry.apply_hooks()
        server = Server(ranks, list(loaders))
        try:
            yield server
        finally:
            server.close()
