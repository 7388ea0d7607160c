"""Answers over HTTP from a small engine, read with the official client: whole, streamed, several, with log-probabilities."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import httpx
import pytest
from control_engine import MODEL, serving, write_model_dir

from weightcast.control.plan import seed_for

CHAT = [{"role": "user", "content": "héllo"}]
REPLY = "user\nhéllo"  # what the engine repeats of the rendered chat, up to the end of the message


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(write_model_dir(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture
def client(server):
    engine = server.engine
    engine.per_step, engine.switch_at, engine.cached_tokens, engine.moe = 1, None, 0, True
    engine.submitted.clear()
    with server.openai() as client:
        yield client


def complete(client, prompt="abcdef", **options):
    return client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 9, **options})


def chat(client, messages=CHAT, **options):
    return client.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, **options})


def test_a_completion_is_whole(client):
    answer = complete(client, "abcd", max_tokens=6)

    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "abcdab", "length", None)
    assert choice.weight_versions == [{"start": 0, "end": 6, "version": "step_1"}]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 6, 10)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_chat_ends_where_the_model_ends_it(client):
    answer = chat(client)

    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    tokens = 2 + len(REPLY.encode())  # with the special tokens at both ends
    assert answer.usage.completion_tokens == tokens
    assert choice.weight_versions == [{"start": 0, "end": tokens, "version": "step_1"}]


def test_a_streamed_completion_is_the_whole_one_in_pieces(client):
    chunks = list(complete(client, "aé", stream=True, max_tokens=7))

    assert [chunk.choices[0].text for chunk in chunks] == ["a", "", "é", "a", "", "é", "a"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["length"]
    assert chunks[-1].choices[0].weight_versions == [{"start": 0, "end": 7, "version": "step_1"}]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_streamed_chat_begins_with_the_role_and_can_end_with_the_usage(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))

    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant"] + [None] * (len(chunks) - 2)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == REPLY
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2 + len(REPLY.encode())


def test_a_stream_is_server_sent_events_with_the_last_word(server, client):
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 2, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        text = reply.read().decode()

    assert reply.headers["content-type"].startswith("text/event-stream")
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]] == ["a", "b"]


def test_every_prompt_gets_its_answers_in_order(client):
    answer = complete(client, ["abc", "xyz"], n=2, max_tokens=3, temperature=1, seed=0)

    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts[0] == "abc"
    assert texts[2] == "xyz"
    assert sorted(texts[1]) == ["a", "b", "c"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)


def test_prompts_may_be_tokens(client):
    assert complete(client, list(b"abc"), max_tokens=3).choices[0].text == "abc"
    assert [one.text for one in complete(client, [list(b"ab"), [120]], max_tokens=2).choices] == ["ab", "xx"]


def test_several_streamed_answers_each_come_to_their_end(client):
    texts, ends = ["", ""], []
    for chunk in complete(client, "abcdefg", n=2, seed=3, temperature=1, stream=True, max_tokens=20):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends.append((choice.index, choice.finish_reason))
            assert choice.weight_versions == [{"start": 0, "end": 20, "version": "step_1"}]

    whole = complete(client, "abcdefg", n=2, seed=3, temperature=1, max_tokens=20)
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(ends) == [(0, "length"), (1, "length")]


def test_a_seed_repeats_and_its_absence_does_not(server, client):
    for seed in (5, 5, -1, None, None):
        complete(client, n=2, temperature=1, seed=seed)
    seeds = [submit.sampling.seed for submit in server.engine.submitted]

    assert seeds[:2] == seeds[2:4] == [5, seed_for(5, 1)]
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert len(set(seeds)) == 8  # all but the repeated ones differ


def test_what_a_request_asks_for_reaches_the_engine(server, client):
    complete(client, temperature=0.5, top_p=0.25, seed=1, logprobs=3, max_tokens=4, extra_body={"top_k": 7})
    client.completions.create(model=MODEL, prompt="ab", extra_body={"ignore_eos": True, "top_k": -1})
    chat(client)
    first, second, third = (submit.sampling for submit in server.engine.submitted)

    assert (first.temperature, first.top_p, first.top_k, first.seed) == (0.5, 0.25, 7, 1)
    assert (first.logprobs, first.max_tokens) == (3, 4)
    assert (second.temperature, second.top_p, second.top_k, second.max_tokens) == (1.0, 1.0, 0, 16)
    assert second.stop_tokens == ()
    assert third.max_tokens == server.engine.max_length - len(server.engine.submitted[2].prompt)
    assert third.stop_tokens != ()


def test_content_may_come_in_parts_and_a_developer_is_the_system(server, client):
    parts = [{"type": "text", "text": "hé"}, {"type": "text", "text": "llo"}]
    chat(client, [{"role": "developer", "content": "x"}, {"role": "user", "content": parts, "name": "me"}])

    prompt = bytes(token for token in server.engine.submitted[0].prompt if token < 256).decode()
    assert prompt == "system\nx\nuser\nhéllo\nassistant\n"


def test_an_answer_can_be_sent_back_as_it_came(client):
    message = chat(client).choices[0].message
    again = chat(client, [*CHAT, message, {"role": "user", "content": "more"}])

    assert again.choices[0].message.content == REPLY


def test_a_stop_string_split_over_tokens_ends_the_answer_before_it(server, client):
    answer = complete(client, "xxSTOPyy", stop=["TOP", "never"], max_tokens=50)

    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("xxS", "stop")
    assert choice.finish_details == {"stop": "TOP"}
    assert answer.usage.completion_tokens == 6
    assert choice.weight_versions == [{"start": 0, "end": 6, "version": "step_1"}]
    assert server.engine.running == {}


def test_a_stop_string_within_one_output_drops_the_tokens_behind_it(server, client):
    server.engine.per_step, server.engine.switch_at = 8, 4

    answer = complete(client, "abcSTOPxyz", stop="ST", max_tokens=50, extra_body={"return_token_ids": True}, logprobs=0)

    (choice,) = answer.choices
    assert choice.text == "abc"
    assert bytes(choice.token_ids) == b"abcST"
    assert choice.weight_versions == [
        {"start": 0, "end": 4, "version": "step_1"},
        {"start": 4, "end": 5, "version": "step_2"},
    ]
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens == 5


def test_text_that_might_become_a_stop_string_is_held_back_and_then_shown(client):
    chunks = [chunk.choices[0].text for chunk in complete(client, "aSTx", stop="STOP", stream=True, max_tokens=6)]

    assert chunks == ["a", "", "", "STx", "a", "S"]


def test_the_end_of_half_a_character_is_shown_as_such(client):
    assert complete(client, "é", max_tokens=3).choices[0].text == "é\N{REPLACEMENT CHARACTER}"


def test_each_token_keeps_the_version_that_made_it(server, client):
    server.engine.switch_at, server.engine.per_step = 5, 3

    (choice,) = complete(client, max_tokens=9).choices
    last = list(chat(client, max_tokens=9, stream=True))[-1].choices[0]

    spans = [{"start": 0, "end": 5, "version": "step_1"}, {"start": 5, "end": 9, "version": "step_2"}]
    assert choice.weight_versions == last.weight_versions == spans


@pytest.mark.parametrize("ask", [complete, chat])
def test_every_chunk_of_a_stream_names_the_version_that_made_its_tokens(server, client, ask):
    server.engine.switch_at, server.engine.per_step = 5, 3
    asked = {"max_tokens": 9, "stream": True, "extra_body": {"return_token_ids": True}}
    chunks = [chunk.choices[0] for chunk in ask(client, **asked)]

    made = [chunk.weight_version for chunk in chunks for _ in getattr(chunk, "token_ids", ())]
    spans = chunks[-1].weight_versions
    assert made == [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    assert [chunk.weight_version for chunk in chunks] == sorted(chunk.weight_version for chunk in chunks)
    assert {chunk.weight_version for chunk in chunks} == {"step_1", "step_2"}


def test_log_probabilities_of_a_completion(client):
    logprobs = complete(client, "aé", max_tokens=3, logprobs=2).choices[0].logprobs

    assert logprobs.tokens == ["a", r"bytes:\xc3", r"bytes:\xa9"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}
    assert logprobs.top_logprobs[1] == {r"bytes:\xc3": -0.5, r"bytes:\xc4": -1.5}
    assert logprobs.text_offset == [0, 1, 1]


def test_log_probabilities_of_a_completion_without_alternatives_name_the_chosen_token(client):
    assert complete(client, "a", max_tokens=1, logprobs=0).choices[0].logprobs.top_logprobs == [{"a": -0.5}]


def test_log_probabilities_of_a_chat(client):
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content

    assert content[0].token == "<|im_start|>"
    assert (content[1].token, content[1].bytes, content[1].logprob) == ("u", [117], -0.5)
    assert [(top.token, top.logprob) for top in content[1].top_logprobs] == [("u", -0.5), ("v", -1.5)]
    assert content[7].bytes == [0xC3]
    assert all(one.top_logprobs == [] for one in chat(client, logprobs=True).choices[0].logprobs.content)


def test_streamed_log_probabilities_and_tokens_put_together_are_the_whole_ones(server, client):
    server.engine.per_step = 2
    options = {"logprobs": 1, "max_tokens": 7, "extra_body": {"return_token_ids": True}}
    whole = complete(client, "aéx", **options).choices[0]
    chunks = [chunk.choices[0] for chunk in complete(client, "aéx", stream=True, **options)]

    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert list(chain(*(getattr(chunk.logprobs, name) for chunk in chunks))) == getattr(whole.logprobs, name)
    assert list(chain(*(chunk.token_ids for chunk in chunks))) == whole.token_ids
    assert chunks[-1].prompt_token_ids == whole.prompt_token_ids == list("aéx".encode())


def test_echo_puts_the_prompt_before_every_answer(client):
    assert complete(client, "ab", echo=True, max_tokens=3).choices[0].text == "ababa"
    assert complete(client, list(b"ab"), echo=True, max_tokens=3).choices[0].text == "ababa"
    assert [chunk.choices[0].text for chunk in complete(client, "ab", echo=True, stream=True, max_tokens=2)] == ["aba", "b"]
    assert complete(client, "ab", echo=True, stop="a", max_tokens=2).choices[0].text == "ab"


def test_cached_tokens_are_counted_once_per_prompt(server, client):
    server.engine.cached_tokens = 4

    usage = complete(client, ["abcdef", "ghijkl"], n=2).usage

    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (12, 8)


def test_routing_is_returned_and_can_be_replayed(server, client):
    routed = complete(client, "abc", max_tokens=2, extra_body={"return_routed_experts": True}).choices[0].routed_experts
    assert routed["shape"] == [4, 1, 2]
    assert base64.b64decode(routed["data"]) == bytes(range(4)) * 4

    replayed = complete(
        client, "abc", max_tokens=2, extra_body={"routed_experts": routed, "return_routed_experts": True}
    ).choices[0]

    assert replayed.routed_experts == routed
    assert server.engine.submitted[1].replay.shape == (4, 1, 2)


def test_sixteen_at_once_get_their_own_answers(client):
    def ask(number):
        prompt = f"{number:02d}é"
        if number % 2:
            return prompt, "".join(chunk.choices[0].text for chunk in complete(client, prompt, stream=True, max_tokens=8))
        return prompt, complete(client, prompt, max_tokens=8).choices[0].text

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))

    assert all(text == prompt * 2 for prompt, text in answers)


def test_the_request_id_comes_back(server, client):
    given = httpx.get(f"{server.url}/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"]
    made = httpx.get(f"{server.url}/health", headers={"x-request-id": "x" * 300}).headers["x-request-id"]

    assert given == "mine-1"
    assert len(made) == 32
    for number, stream in enumerate((True, True, False)):  # twice: headers of one stream are not those of the next
        body = {"model": MODEL, "prompt": "a", "stream": stream}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": f"id-{number}"})
        assert reply.headers.get_list("x-request-id") == [f"id-{number}"]


def test_the_model_is_listed(server, client):
    (model,) = client.models.list().data

    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "weightcast")
    assert (model.max_model_len, model.weight_version) == (server.engine.max_length, "step_1")
    assert client.models.retrieve(MODEL).id == MODEL
