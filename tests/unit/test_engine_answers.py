"""One rank answers as `transformers` does, token for token, whatever it does to be fast: float32, greedy."""

import itertools

import pytest
import torch
from engine_thread import ThreadRank, logprobs_of, tokens_of

from engine_reference import ANSWER, DRAFTS, MODELS, PROMPTS, draft_setting, expected, forget, reference, write_checkpoints
from weightcast.engines.embedded.messages import ClearCache, Command, Describe
from weightcast.engines.embedded.presets import init_checkpoint
from weightcast.errors import NotFound, UnsupportedModel, VersionDoesNotFit


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(root)
    yield root
    forget()


def matrix():
    """All combinations; those that differ from others in the prefix cache alone are among the slow ones."""
    for number, case in enumerate(itertools.product(MODELS, DRAFTS, (True, False))):
        model, draft, prefix_cache = case
        usual = prefix_cache == (number // 2 % 2 == 0)
        yield pytest.param(model, prefix_cache, draft, marks=[] if usual else pytest.mark.slow)


@pytest.mark.untraced
@pytest.mark.parametrize(("model", "prefix_cache", "draft"), list(matrix()))
def test_answers_are_those_of_transformers(checkpoints, model, prefix_cache, draft):
    settings = {"prefix_cache": prefix_cache, "max_step_tokens": 64} | draft_setting(checkpoints, model, draft)
    with ThreadRank(checkpoints / model, **settings) as rank:
        together = [tokens_of(outputs) for outputs in rank.ask_all(PROMPTS)]
        alone = [tokens_of(rank.ask(prompt)) for prompt in PROMPTS]  # with the prefix cache, on blocks of the first round
        stats = rank.command(Describe()).result
    assert together == expected(checkpoints / model)
    assert alone == expected(checkpoints / model)
    assert (stats["prefix_hits"] > 0) == prefix_cache
    assert (stats["accepted"] > 0) == (stats["drafted"] > 0) == (draft != "no draft")
    if draft != "no draft":
        assert stats["accepted"] < stats["drafted"], "a draft that is never wrong proves little"
    assert stats["collectives"] == stats["groups_made"] == 0


def test_a_draft_that_is_the_model_itself_is_always_right(checkpoints):
    """Answers never depend on the draft's cache, so only its guesses tell whether that is kept right."""
    with ThreadRank(checkpoints / "tied", draft_dir=str(checkpoints / "tied"), draft_tokens=4) as rank:
        answers = [tokens_of(outputs) for outputs in rank.ask_all(PROMPTS)]
        stats = rank.command(Describe()).result
    assert answers == expected(checkpoints / "tied")
    assert stats["drafted"] == stats["accepted"] > ANSWER * len(PROMPTS) * 0.7
    assert stats["steps"] < ANSWER * 0.4


@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_a_draft_changes_no_sampled_token(checkpoints, draft):
    options = {"temperature": 1.3, "top_p": 0.9, "seed": 11, "logprobs": 2}
    answers = []
    for kind in ("no draft", draft):
        with ThreadRank(checkpoints / "tied", **draft_setting(checkpoints, "tied", kind)) as rank:
            answers.append(rank.ask_all(PROMPTS, **options))
    for left, right in zip(*answers, strict=True):
        assert tokens_of(left) == tokens_of(right)
        ours, theirs = logprobs_of(left), logprobs_of(right)
        assert len(ours) == ANSWER
        assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)
        assert [[token for token, _ in one.top] for one in ours] == [[token for token, _ in one.top] for one in theirs]


@pytest.mark.parametrize("draft", DRAFTS)
def test_answers_do_not_change_when_requests_are_preempted(checkpoints, draft):
    settings = draft_setting(checkpoints, "tied", draft)
    with ThreadRank(checkpoints / "tied", blocks=16, max_length=200, **settings) as rank:
        answers = [tokens_of(outputs) for outputs in rank.ask_all(PROMPTS * 2)]
        stats = rank.command(Describe()).result
    assert stats["preempted"] > 0
    assert answers == expected(checkpoints / "tied") * 2


def test_log_probabilities_are_those_of_transformers(checkpoints):
    with ThreadRank(checkpoints / "untied") as rank:
        outputs = rank.ask(PROMPTS[0], logprobs=3)
    tokens = tokens_of(outputs)
    with torch.inference_mode():
        whole = torch.tensor([[*PROMPTS[0], *tokens]])
        logits = reference(checkpoints / "untied")(whole).logits[0, len(PROMPTS[0]) - 1 : -1]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = logprobs.topk(3)
    for row, (token, detail) in enumerate(zip(tokens, logprobs_of(outputs), strict=True)):
        assert detail.logprob == pytest.approx(logprobs[row, token].item(), abs=1e-4)
        assert [token for token, _ in detail.top] == best.indices[row].tolist()
        assert [value for _, value in detail.top] == pytest.approx(best.values[row].tolist(), abs=1e-4)


def test_a_stop_token_ends_an_answer_and_is_part_of_it(checkpoints):
    whole = expected(checkpoints / "tied")[0]
    stop = next(token for token in whole[5:] if token not in whole[:5])
    with ThreadRank(checkpoints / "tied") as rank:
        outputs = rank.ask(PROMPTS[0], stop_tokens=(stop,))
    assert tokens_of(outputs) == whole[: whole.index(stop) + 1]
    assert outputs[-1].finish == "stop"
    assert {output.version for output in outputs} == {"v1"}


def test_a_request_that_is_cancelled_says_no_more_and_gives_back_its_blocks(checkpoints):
    with ThreadRank(checkpoints / "tied") as rank:
        name = rank.submit(PROMPTS[0], max_tokens=4000)
        rank.wait_for(lambda: rank.outputs[name])
        rank.cancel(name)
        rank.cancel("unknown")
        stats = rank.command(Describe()).result
        said = len(rank.outputs[name])
        rank.ask(PROMPTS[1])
        assert len(rank.outputs[name]) == said
    assert stats["running"] == stats["waiting"] == 0
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks"]


def test_a_request_that_cannot_run_is_refused_and_the_others_go_on(checkpoints):
    with ThreadRank(checkpoints / "tied", max_length=100) as rank:
        good, bad = rank.submit(PROMPTS[0]), rank.submit([1] * 100)
        rank.wait_for(lambda: rank.finished(good) and rank.finished(bad))
    (refused,) = rank.outputs[bad]
    assert (refused.finish, refused.refused) == ("error", True)
    assert "within 100" in refused.reason
    assert tokens_of(rank.outputs[good]) == expected(checkpoints / "tied")[0]


def test_a_command_that_comes_twice_is_acknowledged_twice_and_executed_once(checkpoints):
    with ThreadRank(checkpoints / "tied") as rank:
        rank.ask(PROMPTS[2], max_tokens=2)
        rank.command(ClearCache())
        after = rank.ask(PROMPTS[2], max_tokens=2)
        first = rank.acknowledged.pop(1)
        rank.send(Command(id=1, action=ClearCache()))
        rank.wait_for(lambda: 1 in rank.acknowledged)
        again = rank.ask(PROMPTS[2], max_tokens=2)
        assert rank.acknowledged[1] == first
    assert after[-1].cached_tokens == 0
    assert again[-1].cached_tokens > 0, "the cache was cleared a second time"


def test_heartbeats_tell_work_from_rest(checkpoints):
    with ThreadRank(checkpoints / "tied") as rank:
        rank.ask(PROMPTS[0], max_tokens=4)
        before = len(rank.beats)
        rank.wait_for(lambda: len(rank.beats) > before + 2)
        resting = rank.beats[-1]
        name = rank.submit(PROMPTS[0], max_tokens=4000)
        rank.wait_for(lambda: rank.beats[-1].busy)
        working = rank.beats[-1]
        rank.cancel(name)
    assert not resting.busy
    assert working.progress > resting.progress


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_answer_too(checkpoints, dtype):
    with ThreadRank(checkpoints / "moe", dtype=dtype) as rank:
        assert len(tokens_of(rank.ask(PROMPTS[0]))) == ANSWER


def failure_of(*arguments, **settings):
    with ThreadRank(*arguments, **settings) as rank:
        return rank.failure


def test_what_cannot_be_loaded_is_an_error_before_anything_is_served(checkpoints, tmp_path):
    assert isinstance(failure_of(tmp_path), NotFound)
    if not torch.cuda.is_available():
        assert "need a GPU each" in str(failure_of(checkpoints / "tied", device="cuda"))
    init_checkpoint(tmp_path / "other", "tiny", vocab_size=300)
    other = failure_of(checkpoints / "tied", draft_dir=str(tmp_path / "other"))
    assert isinstance(other, UnsupportedModel)
    assert "vocab_size is 300" in str(other)
    deeper = tmp_path / "deeper"
    init_checkpoint(deeper, "tiny", num_hidden_layers=2)
    config = (deeper / "config.json").read_text()
    (deeper / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    missing = failure_of(deeper)
    assert isinstance(missing, VersionDoesNotFit)
    assert str(missing).count("missing: model.layers.2.") == 11
