"""Choosing tokens: exact where it is greedy, right on average where it is not, and the same in any company."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.engines.embedded.messages import Sampling
from weightcast.engines.embedded.scheduling import sampling
from weightcast.engines.embedded.scheduling.sampling import accept, choose, uniform

torch.set_num_threads(1)


def how(**kwargs):
    return Sampling(max_tokens=1, **kwargs)


def rows(count, vocabulary, seed=0):
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(logits, count, **kwargs):
    """How often each token is chosen, over as many seeds."""
    row = torch.tensor([logits], dtype=torch.float32)
    return Counter(choose(row, [(how(seed=seed, **kwargs), 7)])[0][0] for seed in range(count))


def chi_square(counts, weights):
    """How far counts are from what weights promise; tokens without weight must not have been chosen."""
    weights = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    observed = np.array([counts[token] for token in range(len(weights))])
    assert not observed[weights == 0].any()
    expected = weights[weights > 0] * observed.sum()
    return float(((observed[weights > 0] - expected) ** 2 / expected).sum())


# -- greedy ------------------------------------------------------------------------------------------------------------


def test_temperature_zero_takes_the_best_and_of_equals_the_first():
    logits = rows(9, 50)
    assert choose(logits, [(how(), 0)] * 9) == [(int(token), None) for token in logits.argmax(dim=1)]
    assert choose(torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]]), [(how(), 0)] * 2) == [(1, None), (0, None)]


def test_every_row_that_takes_time_is_told():
    told = []
    wanted = [(how(), 0), (how(temperature=1.0), 1), (how(logprobs=2), 2), (how(temperature=1.0, logprobs=0), 3)]
    assert choose(rows(4, 50), wanted, tick=lambda: told.append("tick")) == choose(rows(4, 50), wanted)
    assert len(told) == 3


def test_no_rows_make_no_tokens():
    assert choose(torch.empty(0, 5), []) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_numbers_get_no_token_and_the_others_do(bad, temperature):
    logits = rows(4, 6)
    wanted = [(how(temperature=temperature, logprobs=2), 0)] * 4
    whole = choose(logits, wanted)
    logits[1, 2] = logits[3, 0] = bad
    assert choose(logits, wanted) == [whole[0], None, whole[2], None]


def test_a_row_without_any_possible_token_gets_none():
    assert choose(torch.full((1, 4), -float("inf")), [(how(), 0)]) == [None]


def test_an_impossible_token_is_never_chosen():
    hidden = [-float("inf"), 0.0, -float("inf"), 0.0, -float("inf")]
    assert set(drawn(hidden, 200, temperature=5.0)) == {1, 3}
    assert set(drawn(hidden, 200, temperature=5.0, top_p=0.999, top_k=4)) == {1, 3}


# -- by chance ---------------------------------------------------------------------------------------------------------

LOGITS = [2.0, 1.0, 0.0, -1.0, 1.5, 0.5]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_tokens_come_as_often_as_the_temperature_says(temperature):
    counts = drawn(LOGITS, 4000, temperature=temperature)
    assert chi_square(counts, np.exp(np.array(LOGITS) / temperature)) < 25  # 5 degrees of freedom: 1 in 7000


def test_positions_of_one_seed_are_as_random_as_seeds():
    logits = torch.tensor([LOGITS] * 4000)
    tokens = [token for token, _ in choose(logits, [(how(temperature=1.0, seed=3), position) for position in range(4000)])]
    assert chi_square(Counter(tokens), np.exp(LOGITS)) < 25
    pairs = Counter(one * len(LOGITS) + two for one, two in zip(tokens[::2], tokens[1::2], strict=True))
    assert chi_square(pairs, np.outer(np.exp(LOGITS), np.exp(LOGITS)).ravel()) < 80  # 35 degrees of freedom


def test_random_numbers_are_even_and_of_any_seed():
    numbers = [uniform(seed, position) for seed in (0, 1, -1, 2**63, 2**64 + 5, 3 - 2**70) for position in range(2000)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert chi_square(Counter(int(number * 50) for number in numbers), [1] * 50) < 110  # 49 degrees of freedom
    neighbours = [uniform(seed, 0) for seed in range(12000)]
    assert chi_square(Counter(int(number * 50) for number in neighbours), [1] * 50) < 110


def test_a_seed_and_a_position_decide():
    logits = rows(1, 1000).expand(40, -1)
    wanted = [(how(temperature=20.0, seed=seed), position) for seed in range(4) for position in range(10)]
    first = choose(logits, wanted)
    assert choose(logits, wanted) == first
    assert len(set(first)) > 30


def test_random_numbers_are_those_of_splitmix64():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]  # of state 0
    assert [uniform(0, position) for position in range(4)] == [(number >> 11) / 2**53 for number in published]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_even():
    assert set(drawn(LOGITS, 100, temperature=1e-300)) == {0}
    assert chi_square(drawn(LOGITS, 3000, temperature=1e9), [1] * 6) < 25


def test_a_mixed_batch_chooses_what_each_row_alone_would():
    chance = np.random.default_rng(4)
    logits = rows(64, 700, seed=2)
    logits[10] = 0  # nothing but equals
    wanted = [
        (
            how(
                temperature=float(chance.choice([0, 0.3, 1, 1.7])),
                top_k=int(chance.choice([0, 1, 5, 300, 5000])),
                top_p=float(chance.choice([1e-9, 0.3, 0.9, 0.9999, 1])),
                seed=int(chance.integers(1 << 40)),
                logprobs=[None, 0, 1, 9][chance.integers(4)],
            ),
            int(chance.integers(4000)),
        )
        for _ in range(64)
    ]
    together = choose(logits, wanted)
    order = chance.permutation(64)
    assert [choose(logits[row : row + 1], [wanted[row]])[0] for row in range(64)] == together
    assert choose(logits[order], [wanted[row] for row in order]) == [together[row] for row in order]


# -- filters -----------------------------------------------------------------------------------------------------------


def test_top_k_takes_the_k_best_and_of_equals_the_first():
    assert set(drawn(LOGITS, 300, temperature=1.0, top_k=3)) == {0, 1, 4}
    assert set(drawn([1.0] * 6, 300, temperature=1.0, top_k=2)) == {0, 1}
    assert set(drawn(LOGITS, 300, temperature=9.0, top_k=1)) == {0}
    assert set(drawn(LOGITS, 300, temperature=9.0, top_k=6)) == set(range(6))


def test_top_p_takes_the_fewest_that_reach_it():
    halves = np.log([0.5, 0.25, 0.125, 0.125]).tolist()
    for top_p, tokens in (
        (-5.0, 1),
        (0.0, 1),
        (1e-12, 1),
        (0.4, 1),
        (0.6, 2),
        (0.74, 2),
        (0.76, 3),
        (0.87, 3),
        (0.88, 4),
        (1.0, 4),
    ):
        assert set(drawn(halves, 400, temperature=1.0, top_p=top_p)) == set(range(tokens)), top_p


def test_top_p_among_equals_takes_the_first():
    assert set(drawn([3.0] * 8, 300, temperature=1.0, top_p=0.375)) == {0, 1, 2}
    assert set(drawn([3.0] * 8, 300, temperature=1.0, top_p=0.376)) == {0, 1, 2, 3}


def test_what_top_p_leaves_keeps_its_proportions():
    counts = drawn(LOGITS, 4000, temperature=1.0, top_p=0.6)
    weights = np.exp(LOGITS) * np.isin(np.arange(6), [0, 4])
    assert chi_square(counts, weights) < 15


def test_top_p_counts_among_what_top_k_left():
    # of 0.4 0.3 0.2 0.1 the best two are 0.57 and 0.43: the first alone reaches 0.5 only after top_k
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert set(drawn(logits, 300, temperature=1.0, top_p=0.5, top_k=2)) == {0}
    assert set(drawn(logits, 300, temperature=1.0, top_p=0.5)) == {0, 1}


def expected_weights(logits, temperature, top_k, top_p):
    """The same, by sorting everything."""
    values = np.array(logits, dtype=np.float32).astype(np.float64)
    order = np.argsort(-values, kind="stable")[: top_k if top_k > 0 else None]
    weights = np.exp((values[order] - values[order[0]]) / temperature)
    reached = np.cumsum(weights) / weights.sum() >= top_p - 1e-9
    kept = order[: int(reached.argmax()) + 1] if top_p < 1 and reached.any() else order
    full = np.zeros(len(values))
    full[kept] = np.exp((values[kept] - values[order[0]]) / temperature)
    return full / full.sum()


@pytest.mark.untraced
@settings(max_examples=60)
@given(
    logits=st.lists(st.integers(-4, 4), min_size=1, max_size=30),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 31),
    top_p=st.sampled_from([0.011, 0.333, 0.617, 0.93, 0.9999, 1.0]),
)
def test_each_part_of_the_numbers_from_0_to_1_belongs_to_a_token_as_large_as_its_probability(
    logits, temperature, top_k, top_p
):
    grid = 500
    row, setting = np.array(logits, dtype=np.float32), how(temperature=temperature, top_k=top_k, top_p=top_p)
    counts = Counter(sampling._sample(row, setting, (step + 0.5) / grid) for step in range(grid))
    for token, weight in enumerate(expected_weights(logits, temperature, top_k, top_p)):
        assert abs(counts[token] / grid - weight) <= 2 / grid


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.31), (0, 0.77), (70, 1.0), (200, 1.0), (150, 0.52)])
def test_filters_that_end_among_many_equals_take_the_first_of_them(top_k, top_p):
    row = np.random.default_rng(8).integers(0, 3, 300).astype(np.float32)
    setting = how(temperature=1.0, top_k=top_k, top_p=top_p)
    seen = {sampling._sample(row, setting, step / 4000) for step in range(4000)}
    assert seen == set(np.flatnonzero(expected_weights(row, 1.0, top_k, top_p)).tolist())


def test_top_p_of_a_large_flat_vocabulary_looks_as_far_as_it_must():
    row = np.random.default_rng(1).normal(size=9000).astype(np.float32) / 50
    for top_p in (0.01, 0.2, 0.9, 0.999):
        weights = expected_weights(row, 1.0, 0, top_p)
        seen = {sampling._sample(row, how(temperature=1.0, top_p=top_p), step / 200) for step in range(200)}
        assert seen <= set(np.flatnonzero(weights).tolist())
        kept = sampling._nucleus(sampling._Candidates(None, np.exp(row.astype(np.float64))), top_p)
        assert set(kept.tokens.tolist()) == set(np.flatnonzero(weights).tolist())


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_numbers_choose_possible_tokens(number):
    for weights in ([0.0, 1.0, 0.0], [0.0, 0.1, 0.2, 0.7, 0.0], [0.0, 1.0, 0.5, 0.0], [0.0, 1e-300, 0.0]):
        assert weights[sampling._Candidates(None, np.array(weights)).pick(number)] > 0


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_model_before_temperature_and_filters():
    logits = rows(6, 40)
    exact = torch.log_softmax(logits.double(), dim=1)
    for settings_ in ({}, {"temperature": 0.2, "top_k": 3}, {"temperature": 3.0, "top_p": 0.5}):
        for row, (token, detail) in enumerate(choose(logits, [(how(logprobs=4, seed=5, **settings_), 1)] * 6)):
            best = exact[row].topk(4)
            assert detail.logprob == pytest.approx(exact[row, token].item(), abs=1e-9)
            assert [one for one, _ in detail.top] == best.indices.tolist()
            assert [value for _, value in detail.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_only_rows_that_ask_get_log_probabilities():
    details = [detail for _, detail in choose(rows(3, 8), [(how(), 0), (how(logprobs=0), 0), (how(logprobs=99), 0)])]
    assert details[0] is None
    assert details[1].top == ()
    assert len(details[2].top) == 8


def test_equal_alternatives_are_reported_in_the_order_of_the_vocabulary():
    ((token, detail),) = choose(torch.tensor([[0.0, 1.0, 1.0, 1.0]]), [(how(logprobs=2), 0)])
    assert token == 1
    assert [one for one, _ in detail.top] == [1, 2]


# -- speculation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "chosen", "kept"),
    [
        ([], [4], 0),
        ([4], [4, 5], 1),
        ([4], [5, 5], 0),
        ([4, 5, 6], [4, 5, 6, 7], 3),
        ([4, 5, 6], [4, 9, 6, 7], 1),
        ([9, 5, 6], [4, 5, 6, 7], 0),
    ],
)
def test_proposals_stay_up_to_the_first_that_the_main_model_would_not_have_made(drafts, chosen, kept):
    assert accept(drafts, chosen) == kept
