"""From the body of a request to a plan, or to all that is wrong with it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weightcast.control.engine import Limits
from weightcast.control.fields import decode_object
from weightcast.control.plan import Endpoint, Plan, Wanted, seed_for
from weightcast.control.problems import Problems
from weightcast.control.prompts import Prompt, check_tokens, read_messages, read_prompts, read_routing, read_stops
from weightcast.control.schemas import ChatRequest, CompletionRequest, read_request
from weightcast.control.tokenizer import Tokenizer
from weightcast.engines.embedded.messages import Routing, Sampling
from weightcast.errors import InvalidInput, NotFound

_DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it


@dataclass(frozen=True)
class Planner:
    """Knows what a request may ask for."""

    model_name: str
    tokenizer: Tokenizer
    limits: Limits
    max_choices: int

    def plan(self, endpoint: Endpoint, body: bytes, problems: Problems) -> Plan:
        """Raises `NotFound` for another model's name, and `InvalidInput` with all `problems` otherwise."""
        content = decode_object(body)
        if isinstance(content.get("model"), str) and content["model"] != self.model_name:
            raise NotFound(f"The model `{content['model']}` does not exist: this server has `{self.model_name}`.")
        stops = read_stops(content.get("stop"), problems)
        draft = self._read_chat(content, problems) if endpoint == "chat" else self._read_completion(content, problems)
        choices = self._choices(draft, problems) if draft is not None else []
        problems.check()
        if draft is None:
            raise AssertionError("a request that cannot be read has problems")
        request, per_prompt = draft.request, draft.request.n or 1
        return Plan(
            endpoint=endpoint,
            choices=tuple(choices),
            prompt_tokens=sum(len(choice.prompt) for choice in choices[::per_prompt]),
            per_prompt=per_prompt,
            stops=stops,
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            return_token_ids=request.return_token_ids,
            record_routing=request.return_routed_experts,
            replay=draft.replay,
            timeout_s=request.timeout,
            weight_version=request.weight_version.wanted if request.weight_version else None,
        )

    def _read_completion(self, content: dict[str, Any], problems: Problems) -> _Draft | None:
        prompts = read_prompts(content["prompt"], problems) if "prompt" in content else []
        request = read_request(CompletionRequest, content, problems)
        if request is None:
            return None
        if request.echo and request.logprobs is not None:
            problems.add("echo", "cannot be combined with logprobs: prompts have none")
        replay = read_routing(request.routed_experts, problems)
        return _Draft(request, prompts, request.max_tokens, request.logprobs, replay, echo=bool(request.echo))

    def _read_chat(self, content: dict[str, Any], problems: Problems) -> _Draft | None:
        messages = read_messages(content["messages"], problems) if "messages" in content else []
        sound = not problems.found
        request = read_request(ChatRequest, content, problems)
        prompts: list[Prompt] = []
        if messages and sound:
            try:
                prompts = [Prompt("messages", self.tokenizer.render_chat(messages), rendered=True)]
            except InvalidInput as error:
                problems.add("messages", str(error))
        if request is None:
            return None
        max_tokens = request.max_completion_tokens or request.max_tokens
        if request.max_tokens not in (None, max_tokens):
            problems.add(
                "max_tokens", f"is {request.max_tokens}, but max_completion_tokens is {max_tokens}: send one of them"
            )
        if request.top_logprobs is not None and not request.logprobs:
            problems.add("top_logprobs", "needs logprobs to be true")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return _Draft(request, prompts, max_tokens, logprobs, read_routing(request.routed_experts, problems))

    def _choices(self, draft: _Draft, problems: Problems) -> list[Wanted]:
        request, count = draft.request, draft.request.n or 1
        self._check(draft, problems)
        if len(draft.prompts) * count > self.max_choices:
            problems.add(
                "n", f"{len(draft.prompts)} prompt(s) × {count} are more than the {self.max_choices} answers allowed"
            )
            return []
        choices: list[Wanted] = []
        for prompt in draft.prompts:
            tokens = self._tokens(prompt, problems)
            allowed = self._allowed(draft, prompt, len(tokens), problems)
            echo = self._text(prompt) if draft.echo else ""
            for number in range(count):
                sampling = self._sampling(draft, allowed, seed_for(request.seed, number))
                choices.append(Wanted(len(choices), tokens, sampling, echo))
        return choices

    def _check(self, draft: _Draft, problems: Problems) -> None:
        """What depends on several fields."""
        request = draft.request
        if request.stream_options is not None and not request.stream:
            problems.add("stream_options", "needs stream to be true")
        if request.return_routed_experts and request.stop:
            problems.add("return_routed_experts", "cannot be combined with stop: experts are known at the engine's own end")
        for name, used in (
            ("return_routed_experts", request.return_routed_experts),
            ("routed_experts", request.routed_experts),
        ):
            if used and not self.limits.moe:
                problems.add(name, "the model has no experts")
        if request.routed_experts and len(draft.prompts) > 1:
            problems.add("routed_experts", "takes a single prompt")

    @property
    def _longest(self) -> int:
        """The tokens that prompt and answer may have together."""
        # the last token goes through no layer and needs no room in the cache
        return min(self.limits.max_length, self.limits.blocks * self.limits.block_size + 1)

    def _tokens(self, prompt: Prompt, problems: Problems) -> tuple[int, ...]:
        if isinstance(prompt.content, str):
            most = self._longest * self.tokenizer.longest_token
            if len(prompt.content) > most:  # to make tokens of 16 MB takes half a minute and gigabytes
                problems.add(
                    prompt.place,
                    f"has {len(prompt.content)} characters; {self._longest} tokens are allowed, which are at most {most}",
                )
                return ()
            tokens = self.tokenizer.encode(prompt.content, add_special_tokens=not prompt.rendered)
            if prompt.content and not tokens:
                problems.add(prompt.place, "the tokenizer makes no token of it")
            return tokens
        check_tokens(prompt, self.limits.vocab_size, problems)
        return tuple(prompt.content)

    def _text(self, prompt: Prompt) -> str:
        return prompt.content if isinstance(prompt.content, str) else self.tokenizer.decode(prompt.content)

    def _allowed(self, draft: _Draft, prompt: Prompt, length: int, problems: Problems) -> int:
        """How many tokens an answer may have."""
        longest = self._longest
        left = longest - length
        default = left if prompt.rendered else min(left, _DEFAULT_TOKENS)
        wanted = default if draft.max_tokens is None else draft.max_tokens
        if left < 1:
            problems.add(prompt.place, f"has {length} tokens; {longest} are allowed, with the answer")
        elif wanted > left:
            problems.add(
                "max_tokens",
                f"{length} tokens of {prompt.place} and {wanted} of the answer are more than the {longest} allowed: "
                f"{left} are left",
            )
        if draft.replay is not None and draft.replay.shape[0] > length + wanted:
            problems.add(
                "routed_experts", f"is for {draft.replay.shape[0]} tokens; prompt and answer have {length + wanted}"
            )
        return wanted

    def _sampling(self, draft: _Draft, max_tokens: int, seed: int) -> Sampling:
        request = draft.request
        temperature = 1.0 if request.temperature is None else request.temperature
        return Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(0, request.top_k or 0),
            seed=seed,
            stop_tokens=() if request.ignore_eos else self.tokenizer.stop_tokens,
            logprobs=draft.logprobs,
        )


@dataclass(frozen=True)
class _Draft:
    """A request whose fields are right, one by one."""

    request: CompletionRequest | ChatRequest
    prompts: list[Prompt]
    max_tokens: int | None
    logprobs: int | None
    replay: Routing | None
    echo: bool = False
