"""The proof under load: a server is asked without pause while its weights are replaced again and again, in every way.

Every token of every answer must be the one that the version named for it chooses behind all tokens before it: requests that
are kept over a commit compute their keys and values anew.
"""

import asyncio
import statistics
from collections import Counter

import pytest
import torch

from engine_reference import forget, reference

from . import update_load, update_load_reference
from .engine_runs import ask, running
from .update_load_versions import DONE_AS, Trainer, plan

MIB = 1 << 20
COUNTS = ("threads", "files", "shared_memory")
WINDOW = 4  # updates whose samples are taken together: what is in flight differs from one to the next


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prove(root, updates, *, seed, settled, fresh, tell):
    """Run so many updates under load, and compare all that was answered. Returns the trainer and the record."""
    trainer = Trainer(root, seed)
    record = update_load.run(trainer, plan(updates, seed), seed)
    update_load.check_results(record)
    update_load.check_counts(record)
    update_load.check_answers(record)
    findings = update_load_reference.compare(trainer.config, trainer.states, record.answers, record.numbers)
    tell(record, findings, settled)

    assert not findings.wrong, f"{findings.wrong_count} tokens of {findings.tokens} are wrong:\n" + "\n".join(findings.wrong)
    assert findings.tokens == sum(len(answer.tokens) for answer in record.answers)
    assert findings.ties < 0.01 * findings.tokens
    check_the_load(record, findings)
    assert trainer.store_nbytes < 16 * MIB, "the store grows"
    check_with_fresh_engines(trainer, record, fresh)
    return trainer, record


def check_the_load(record, findings):
    """The run was what it is meant to be, or it proves nothing."""
    assert Counter((one.kind, one.commit) for one in record.planned).keys() == DONE_AS.keys()
    assert findings.unlike_before > 0.1 * findings.compared_before, "versions answer alike"
    assert findings.unlike_spans > 0.5 * findings.long_spans, "versions answer alike"
    assert findings.logprobs > 0
    over_several = [answer for answer in record.answers if len(answer.spans) > 1]
    assert len(over_several) > 0.3 * len(record.answers), "too few answers run while weights are replaced"
    assert {answer.finish for answer in record.answers} == {"length", "abort"}
    assert record.cached_tokens > 0


def check_with_fresh_engines(trainer, record, count):
    """An engine that has seen one version only goes on as the answers did."""
    several = [answer for answer in record.answers if len(answer.spans) > 2]
    assert len(several) >= count
    for answer in several[:: max(1, len(several) // count)][:count]:
        span = answer.spans[1]  # the context before it was made by others
        context, wanted = answer.prompt + answer.tokens[: span["start"]], answer.tokens[span["start"] : span["end"]]
        directory = trainer.export(record.numbers[span["version"]])

        async def go_on(directory=directory, context=context, wanted=wanted):
            async with running(directory) as replica:
                return (await ask(replica, context, max_tokens=len(wanted))).tokens

        assert asyncio.run(go_on()) == wanted, span


def check_with_transformers(trainer, number):
    """The reference itself is right."""
    tokens = torch.randint(256, (4, 200), generator=torch.Generator().manual_seed(number))
    found = update_load_reference.PlainModel(trainer.config, trainer.states[number]).logits(tokens)
    try:
        with torch.inference_mode():
            wanted = reference(trainer.export(number))(tokens).logits
    finally:
        forget()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=update_load_reference.TIE)


def growth(record, settled, what):
    """The middle of what was sampled once all ways to update had been seen, and at the end."""
    early, late = record.samples[settled : settled + WINDOW], record.samples[-WINDOW:]
    return tuple(statistics.median(getattr(sample, what) for sample in samples) for samples in (early, late))


def check_nothing_grows(record, settled, whats):
    for what in whats:
        early, late = growth(record, settled, what)
        assert late <= early, f"{what}: {early} after {settled} updates, {late} after {len(record.samples)}"


def figures(record, findings, settled):
    """One line for whoever reads the log."""
    several = sum(len(answer.spans) > 1 for answer in record.answers)
    aborted = sum(answer.finish == "abort" for answer in record.answers)
    grown = {what: growth(record, settled, what) for what in ("rss_nbytes", *COUNTS)}
    return (
        f"updates={len(record.planned)} requests={record.asked} answers={len(record.answers)} aborted={aborted} "
        f"over_several_versions={several} most_versions={max(len(answer.spans) for answer in record.answers)} "
        f"tokens={findings.tokens} logprobs={findings.logprobs} ties={findings.ties} wrong={findings.wrong_count} "
        f"unlike_before={findings.unlike_before / max(1, findings.compared_before):.2f} "
        f"unlike_spans={findings.unlike_spans / max(1, findings.long_spans):.2f} "
        f"preempted={record.stats[0]['preempted']} cached_tokens={record.cached_tokens} seconds={record.seconds:.1f} "
        + " ".join(f"{what}={early:.0f}->{late:.0f}" for what, (early, late) in grown.items())
    )


@pytest.fixture
def tell(record_property):
    def print_figures(*facts):
        line = figures(*facts)
        record_property("update_load", line)
        print(line)

    return print_figures


@pytest.mark.timeout(300)
def test_every_token_is_of_the_version_named_for_it_while_weights_are_replaced_under_load(tmp_path, one_thread, tell):
    record = prove(tmp_path, 10, seed=1, settled=6, fresh=1, tell=tell)[1]

    check_nothing_grows(record, 6, COUNTS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_updates_under_load_lose_nothing_and_leave_nothing(tmp_path, one_thread, tell):
    trainer, record = prove(tmp_path, 200, seed=2, settled=20, fresh=4, tell=tell)

    check_nothing_grows(record, 20, COUNTS)
    early, late = growth(record, 20, "rss_nbytes")
    assert late - early <= 16 * MIB
    check_with_transformers(trainer, 200)
