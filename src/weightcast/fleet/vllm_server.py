"""One running `vllm serve`, over its HTTP routes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.engines.vllm.probe import Observed
from weightcast.errors import AccessRefused, InvalidInput, ReplicaFailed
from weightcast.fleet.http_call import HttpCaller, Reply
from weightcast.wire.decoding import decode

if TYPE_CHECKING:
    import ssl

TIMEOUT_S = 30.0
PauseMode = Literal["keep", "wait", "abort"]

_Kind = TypeVar("_Kind")
# How vLLM wraps what a worker raised: the executor of several ranks inside, the engine's process outside.
_WRAPPINGS = (
    re.compile(r"Call to \w+ method failed: (.*)", re.DOTALL),
    re.compile(r"Worker failed with error '(.*)', please check the stack trace above for the root cause", re.DOTALL),
)
_NO_METHOD = re.compile(r"Method '(\w+)' is not implemented|object has no attribute '(\w+)'")


class NoSuchMethod(InvalidInput):
    """The workers of a server have no method of this name."""


class NoSuchRoute(InvalidInput):
    """A server has no route of this name."""


class RankError(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong in a rank the last time."""

    code: str
    message: str


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker of a server says of itself. `version` is served, `staged` lies ready beside it.

    `mode` is how versions are committed; `layers`, `stage_s`, `commit_s` and `nbytes`, what this rank fetched for its host,
    are of the last one that was.
    """

    state: str
    rank: int = 0
    version: str | None = None
    root_digest: str | None = None
    staged: str | None = None
    error: RankError | None = None
    mode: str | None = None
    layers: int | None = None
    stage_s: float | None = None
    commit_s: float | None = None
    nbytes: int | None = None


class VllmServer:
    """A server that was started with `VLLM_SERVER_DEV_MODE=1`, which is what opens these routes.

    `token` is what it was started with as `--api-key`. Each call takes a `deadline` (default: 30 s from now) and raises
    `DeadlineExceeded`, `ReplicaFailed` if the server cannot be reached or fails, `AccessRefused` or `InvalidInput`. Any
    number of threads may call.
    """

    def __init__(self, url: str, token: str | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        self._http = HttpCaller(url, token=token, tls=tls)
        self.url = self._http.url

    def __repr__(self) -> str:
        return f"VllmServer({self.url!r})"

    # -- the engine ---------------------------------------------------------------------------------------------------

    def health(self, *, deadline: Deadline | None = None) -> bool:
        """Whether the server says that its engine lives. Raises if it says nothing."""
        return self._reply("GET", "/health", None, "asking for its health", deadline).status == 200

    def weight_version(self, *, deadline: Deadline | None = None) -> str:
        """The label of the weights that new tokens are computed with; "default" before the first update."""
        return self._get("/weight_info", _WeightInfo, "asking for its version", deadline).weight_version

    def world_size(self, *, deadline: Deadline | None = None) -> int:
        """How many workers it has."""
        return self._get("/get_world_size", _WorldSize, "asking for its size", deadline).world_size

    def pause(self, mode: PauseMode = "keep", *, deadline: Deadline | None = None) -> None:
        """Stop generating. Requests in flight are kept as they are, waited for, or aborted."""
        if mode not in ("keep", "wait", "abort"):
            raise InvalidInput(f"a pause is keep, wait or abort, not {mode!r}.")
        self._post(f"/pause?mode={mode}", None, "pausing", deadline)

    def resume(self, *, deadline: Deadline | None = None) -> None:
        """Go on generating. Does nothing to a server that is not paused."""
        self._post("/resume", None, "resuming", deadline)

    def is_paused(self, *, deadline: Deadline | None = None) -> bool:
        """Whether it is paused."""
        return self._get("/is_paused", _IsPaused, "asking whether it is paused", deadline).is_paused

    def reset_prefix_cache(self, *, running: bool = False, deadline: Deadline | None = None) -> bool:
        """Forget cached prompts; those of running requests too if `running`. False if some are in use and stay."""
        path = f"/reset_prefix_cache?reset_running_requests={str(running).lower()}"
        return self._decoded(self._post(path, None, "resetting the prefix cache", deadline), _Success, path).success

    # -- vLLM's own weight transfer -----------------------------------------------------------------------------------

    def init(self, info: Mapping[str, Any] | None = None, *, deadline: Deadline | None = None) -> None:
        """Set up the weight transfer; `weightcast` needs it only for settings other than the default."""
        self._post(
            "/init_weight_transfer_engine", {"init_info": dict(info or {})}, "setting up the weight transfer", deadline
        )

    def shutdown(self, *, deadline: Deadline | None = None) -> None:
        """Let the workers release what they hold for the weight transfer."""
        self._post("/shutdown_weight_transfer_engine", None, "ending the weight transfer", deadline)

    def start(self, *, deadline: Deadline | None = None) -> None:
        """Begin an update."""
        self._post("/start_weight_update", None, "starting an update", deadline)

    def update(self, info: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, deadline: Deadline | None = None) -> None:
        """Stage a version, and wait until it is; returns at once if it is staged already."""
        given = dict(info) if isinstance(info, Mapping) else [dict(one) for one in info]
        self._post("/update_weights", {"update_info": given}, "staging a version", deadline)

    def finish(self, version: str | None = None, *, deadline: Deadline | None = None) -> None:
        """Commit what is staged, and call it so."""
        body = {} if version is None else {"weight_version": version}
        self._post("/finish_weight_update", body, "committing a version", deadline)

    # -- our workers --------------------------------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        *,
        deadline: Deadline | None = None,
    ) -> list[Any]:
        """Call a method of every worker; one result of each, as text unless it is a mapping, a list or None.

        Raises `NoSuchMethod` if they have none of that name. `timeout` is vLLM's own: after it, answers of workers that were
        late can be taken for those to later calls, so leave it out.
        """
        body: dict[str, Any] = {"method": method, "kwargs": dict(kwargs or {})}
        if timeout is not None:
            body["timeout"] = timeout
        try:
            reply = self._post("/collective_rpc", body, f"calling {method} of its workers", deadline)
        except ReplicaFailed as error:
            missing = _NO_METHOD.search(str(error))
            if missing is None or method not in missing.groups():
                raise
            raise NoSuchMethod(
                f"the workers of {self.url} have no method {method}: install weightcast there, and start it with "
                '--weight-transfer-config \'{"backend":"weightcast"}\'.'
            ) from error
        return self._decoded(reply, _Results, "/collective_rpc").results if reply.body else []

    def stage(
        self,
        version: str | None,
        source: str,
        *,
        verify_checksum: bool = True,
        timeout: float = 180.0,
        deadline: Deadline | None = None,
    ) -> None:
        """Let the workers begin to stage a version in the background. `status` tells how it goes."""
        wanted: dict[str, object] = {"version": version, "source": source}
        wanted |= {"verify_checksum": verify_checksum, "timeout": timeout, "update_id": logs.ids().get("update_id", "")}
        self.collective_rpc("weightcast_stage", wanted, deadline=deadline)

    def status(self, *, deadline: Deadline | None = None) -> list[RankStatus]:
        """What each worker says of itself."""
        told = self.collective_rpc("weightcast_status", deadline=deadline)
        try:
            ranks = [decode(str(one).encode(), RankStatus) for one in told]
        except msgspec.MsgspecError as error:
            raise ReplicaFailed(f"{self.url}: the status of its workers cannot be read: {error}.") from error
        if not ranks:
            raise ReplicaFailed(f"{self.url}: no worker told its status.")
        return ranks

    def commit(self, *, deadline: Deadline | None = None) -> None:
        """Let the workers commit what they have staged, without an update of vLLM's around it."""
        self.collective_rpc("weightcast_commit", deadline=deadline)

    def abandon(self, *, deadline: Deadline | None = None) -> None:
        """Let the workers drop what they stage or have staged. They go on serving what they serve."""
        self.collective_rpc("weightcast_abandon", deadline=deadline)

    # -- requests -----------------------------------------------------------------------------------------------------

    def completion(self, prompt_ids: Sequence[int], *, top: int = 10, deadline: Deadline | None = None) -> Observed:
        """The log-probabilities of a prompt's tokens from the second on, and of the `top` likeliest next tokens.

        They are computed anew: a prompt whose log-probabilities are asked for is not taken from the prefix cache.
        """
        body = {
            "prompt": list(prompt_ids),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": top,
            "prompt_logprobs": 0,
            "return_tokens_as_token_ids": True,  # as texts, different tokens may look alike
        }
        reply = self._decoded(self._post("/v1/completions", body, "asking for a probe", deadline), _Completion, "a probe")
        if not reply.choices or reply.choices[0].prompt_logprobs is None or reply.choices[0].logprobs is None:
            raise ReplicaFailed(f"{self.url} answered a probe without log-probabilities.")
        choice, tokens = reply.choices[0], [str(token) for token in prompt_ids]
        prompt = [one or {} for one in (choice.prompt_logprobs or [])]
        told = [one[token].logprob for token, one in zip(tokens[1:], prompt[1:], strict=False) if token in one]
        tops = [one for one in (choice.logprobs.top_logprobs if choice.logprobs else []) if one]
        try:
            top_next = {int(token.removeprefix("token_id:")): value for token, value in (tops[0] if tops else {}).items()}
        except ValueError as error:
            raise ReplicaFailed(f"{self.url} answered a probe with tokens that are not ids: {error}.") from error
        if len(told) != len(tokens) - 1:
            raise ReplicaFailed(f"{self.url} told {len(told)} log-probabilities for a prompt of {len(tokens)} tokens.")
        return Observed(logprobs=tuple(told), top=top_next)

    # -- calling ------------------------------------------------------------------------------------------------------

    def _get(self, path: str, kind: type[_Kind], what: str, deadline: Deadline | None) -> _Kind:
        return self._decoded(self._checked("GET", path, None, what, deadline), kind, path)

    def _post(self, path: str, body: object, what: str, deadline: Deadline | None) -> Reply:
        return self._checked("POST", path, body, what, deadline)

    def _reply(self, method: str, path: str, body: object, what: str, deadline: Deadline | None) -> Reply:
        return self._http.call(method, path, body, what=what, deadline=deadline or Deadline.after(TIMEOUT_S))

    def _checked(self, method: str, path: str, body: object, what: str, deadline: Deadline | None) -> Reply:
        reply = self._reply(method, path, body, what, deadline)
        if reply.status == 200:
            return reply
        message = told_by(reply.body)
        if reply.status in (401, 403):
            raise AccessRefused(f"{self.url} refused {what}: give the token that it was started with (--api-key).")
        if reply.status in (404, 405) and not path.startswith("/v1/"):
            raise NoSuchRoute(f"{self.url} has no route {path.partition('?')[0]}: start vLLM with VLLM_SERVER_DEV_MODE=1.")
        raise ReplicaFailed(f"{self.url} answered {reply.status} to {what}: {message}")

    def _decoded(self, reply: Reply, kind: type[_Kind], what: str) -> _Kind:
        try:
            return decode(reply.body, kind)
        except msgspec.MsgspecError as error:
            raise ReplicaFailed(f"{self.url}: its answer to {what} cannot be read: {error}. Is it a vLLM server?") from error


def told_by(body: bytes) -> str:
    """What an answer that is an error says, without what vLLM wraps around the words of a worker.

    The words are not always whole: vLLM replaces paths in them. The status of the workers has them as they were.
    """
    try:
        error = decode(body, _Problem).error
        message = error if isinstance(error, str) else error.message
    except msgspec.MsgspecError:
        message = body.decode(errors="replace").strip()[:2000]
    for wrapping in _WRAPPINGS:
        inner = wrapping.search(message)
        message = inner[1] if inner else message
    return message or "without a word"


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _WorldSize(msgspec.Struct):
    world_size: int


class _IsPaused(msgspec.Struct):
    is_paused: bool


class _Success(msgspec.Struct):
    success: bool


class _Results(msgspec.Struct):
    results: list[Any]


class _ErrorInfo(msgspec.Struct):
    message: str


class _Problem(msgspec.Struct):
    error: str | _ErrorInfo


class _Logprob(msgspec.Struct):
    logprob: float


class _Tops(msgspec.Struct):
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None
    logprobs: _Tops | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
