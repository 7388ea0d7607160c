"""`weightcast serve` with two ranks, asked by the official client."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from weightcast.engines.embedded.presets import init_checkpoint

from .server_process import complete, server_process

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(model_dir, preset="tiny", seed=7)
    with server_process(model_dir, "--ranks", 2) as running:
        yield running
        shared = running.shared_memory()
        assert running.stop() == 0, running.said()
        assert running.left_behind() == []
        assert not any(Path(name).exists() for name in shared)
        assert not running.port_file.exists()


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def test_an_answer_is_the_same_streamed_and_whole(server, client):
    whole = complete(client)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))

    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 24
    version = server.health()["version"]
    spans = [{"start": 0, "end": 24, "version": version}]
    assert whole.choices[0].weight_versions == chunks[-2].choices[0].weight_versions == spans
    assert {choice.weight_version for chunk in chunks for choice in chunk.choices} == {version}
    assert client.models.list().data[0].weight_version == version


def test_a_chat_is_answered_and_streamed(client):
    options = {"model": "tiny", "messages": CHAT, "temperature": 0.7, "seed": 3, "max_tokens": 20}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))

    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    version = client.models.list().data[0].weight_version
    assert {choice.weight_version for chunk in chunks for choice in chunk.choices} == {version}
    assert whole.choices[0].finish_reason in ("stop", "length")


def test_answers_with_a_seed_repeat_and_differ_among_each_other(client):
    options = {"temperature": 1.0, "seed": 11, "n": 3}
    first, again = (([choice.text for choice in complete(client, **options).choices]) for _ in range(2))

    assert first == again
    assert len(set(first)) == 3


def test_sixteen_requests_at_once_are_answered_as_each_alone(client):
    prompts = [f"Prompt {number}" for number in range(16)]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts[:4]]

    def ask(prompt):
        if prompt.endswith(("1", "3", "5")):
            return "".join(chunk.choices[0].text for chunk in complete(client, prompt, stream=True))
        return complete(client, prompt).choices[0].text

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, prompts))

    assert together[:4] == alone
    assert len(together) == 16


def test_a_stop_string_ends_the_answer_before_it(client):
    text = complete(client).choices[0].text
    stop = text[10:13]
    answer = complete(client, stop=stop)

    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    (span,) = answer.choices[0].weight_versions
    assert (span["start"], span["end"]) == (0, answer.usage.completion_tokens)


def test_log_probabilities_come_with_the_tokens(client):
    logprobs = complete(client, max_tokens=5, logprobs=2).choices[0].logprobs

    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 5
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == max(top.values())  # greedy
        assert chosen <= 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_the_engine(server, client, stream):
    if stream:
        with complete(client, stream=True, max_tokens=3000) as answer:
            next(iter(answer))
            assert server.stats()[0]["running"] == 1
    else:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)

    server.wait_for(lambda: server.stats()[0]["running"] == 0, "the end of a request that nobody waits for", 10)


def test_metrics_show_the_ranks(server, client):
    complete(client)
    text = httpx.get(f"{server.url}/metrics").text

    assert 'weightcast_rank_steps_total{rank="1"}' in text
    assert 'weightcast_replica_state{state="READY"} 1' in text
