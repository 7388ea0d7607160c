"""The codecs of others give back what they were given, bounds are as computed by hand, densities are as asked for."""

from math import log2

import ml_dtypes
import numpy as np
import pytest

from weightcast.bench import generated, rivals
from weightcast.bench.generated import generated_pair
from weightcast.bench.rivals import RIVALS, given_exponent_bytes, order0_entropy_bytes
from weightcast.errors import InvalidInput

BF16 = ml_dtypes.bfloat16
ODD = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x3F80]  # zeros, infinities, NaNs, tiny ones


def patterns(*values):
    return np.array(values, dtype=np.uint16)


def same(a, b):
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a
    )


@pytest.fixture
def states(rng):
    """A matrix, every pair of odd patterns, a scalar, an empty tensor, one far change, and a transposed tensor."""
    old = {
        "z.matrix": rng.standard_normal((200, 300)).astype(BF16),
        "odd": np.repeat(patterns(*ODD), len(ODD)).view(BF16),
        "scalar": np.array(1.0, dtype=BF16),
        "empty": np.empty((0, 3), dtype=BF16),
        "far": np.zeros(3 * 65536, dtype=np.uint16),
        "a.transposed": rng.standard_normal((30, 20)).astype(BF16).T,
    }
    new = {name: array.copy() for name, array in old.items()}
    new["z.matrix"][rng.random((200, 300)) < 0.01] = 0.5
    new["odd"] = np.tile(patterns(*ODD), len(ODD)).view(BF16)
    new["scalar"] = np.array(-1.0, dtype=BF16)
    new["far"][[65535, 2 * 65535, 2 * 65535 + 1, -1]] = 7
    new["a.transposed"][3, 4] = 9
    return old, new


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
class TestRoundTrips:
    def test_every_pattern_arrives(self, rival, states):
        old, new = states
        before = {name: array.tobytes() for name, array in old.items()}
        assert same(rival.decode(old, rival.encode(old, new)), new)
        assert {name: array.tobytes() for name, array in old.items()} == before

    def test_nothing_changed(self, rival, states):
        old, _ = states
        assert same(rival.decode(old, rival.encode(old, old)), old)

    def test_everything_changed(self, rival, states):
        old, _ = states
        new = {name: (~array.copy().view(np.uint16)).view(array.dtype) for name, array in old.items()}
        assert same(rival.decode(old, rival.encode(old, new)), new)

    def test_a_state_without_tensors(self, rival):
        assert rival.decode({}, rival.encode({}, {})) == {}

    @pytest.mark.parametrize("new", [{}, {"w": patterns(1, 2, 3)}, {"w": np.zeros(2, np.int16)}])
    def test_states_that_do_not_belong_together_are_refused(self, rival, new):
        with pytest.raises(InvalidInput, match="w"):
            rival.encode({"w": patterns(1, 2)}, new)

    def test_wider_elements_are_refused(self, rival):
        state = {"w": np.zeros(2, np.float32)}
        with pytest.raises(InvalidInput, match="16-bit"):
            rival.encode(state, state)


def test_a_change_costs_six_bytes_as_index_and_value(states):
    (rival,) = [r for r in RIVALS if r.name == "int32_value"]
    old = {"a": np.zeros(1000, np.uint16), "b": np.zeros(10, np.uint16)}
    new = {"a": old["a"].copy(), "b": old["b"] + np.uint16(1)}
    assert len(rival.encode(old, new)) == 2 * 4 + 10 * 6


class TestBounds:
    def test_gaps_start_anew_in_each_tensor(self):
        old = {"a": np.zeros(10, np.uint16), "b": np.zeros(10, np.uint16)}
        new = {name: array.copy() for name, array in old.items()}
        new["a"][[1, 3]] = 1  # gaps 1 and 1
        new["b"][[1, 2]] = 1, 2  # gaps 1 and 0, where one stream over both would have a gap of 7
        bound = order0_entropy_bytes(old, new)
        each = (3 * log2(4 / 3) + log2(4)) / 8  # three of one kind and one of another: gaps and differences alike
        assert bound.changes == 4
        assert bound.positions == pytest.approx(each)
        assert bound.differences == pytest.approx(each)
        assert bound.total == pytest.approx(2 * each)

    def test_differences_follow_the_value_across_zero_and_below_it(self):
        old = {"w": patterns(0x8000, 0x8001, 0xBF81, 0x3F80)}  # −0, the next below, just below −1, 1
        new = {"w": patterns(0x0000, 0x8000, 0xBF80, 0x3F81)}  # one step up each
        assert order0_entropy_bytes(old, new).differences == 0

    def test_positions_given_the_exponent(self):
        old = {"a": patterns(*[0x3F80] * 4, *[0xBF80] * 4), "b": patterns(*[0x4000] * 4)}  # 1, −1 and 2
        new = {name: array.copy() for name, array in old.items()}
        new["a"][[0, 4]] += np.uint16(1)  # 2 of the 8 with the exponent of 1: one up, and one down as it is negative
        new["b"][:] += np.uint16(1)  # all of the others: nothing left to say
        bound = given_exponent_bytes(old, new)
        assert bound.changes == 6
        assert bound.positions == pytest.approx((2 * log2(8 / 2) + 6 * log2(8 / 6)) / 8)
        assert bound.differences == pytest.approx((5 * log2(6 / 5) + log2(6)) / 8)  # five go up by one, one goes down
        assert bound.differences_given_exponent == pytest.approx(2 / 8)  # one bit each for the first two, none for the rest
        assert bound.total == pytest.approx(bound.positions + bound.differences)
        assert bound.total_given_exponent == pytest.approx(bound.positions + 2 / 8)

    def test_elements_are_counted_across_blocks(self, monkeypatch, states):
        whole = given_exponent_bytes(*states)
        monkeypatch.setattr(rivals, "BLOCK", 1000)
        assert given_exponent_bytes(*states) == whole

    @pytest.mark.parametrize("bound", [order0_entropy_bytes, given_exponent_bytes])
    @pytest.mark.parametrize("state", [{}, {"w": patterns(1, 2, 3)}])
    def test_no_change_costs_nothing(self, bound, state):
        assert bound(state, state).total == bound(state, state).changes == 0


class TestGenerated:
    @pytest.mark.parametrize("density", [0.0005, 0.0025, 0.02, 0.5])
    def test_the_density_is_met_beyond_the_sample_too(self, monkeypatch, density):
        monkeypatch.setattr(generated, "BLOCK", 1 << 18)
        old, new = generated_pair(2_500_001, density, seed=5)
        assert (old.dtype, old.shape) == (new.dtype, new.shape) == (np.dtype(BF16), (2_500_001,))
        changed = np.mean(old.view(np.uint16) != new.view(np.uint16))
        assert changed == pytest.approx(density, rel=0.05)

    def test_blocks_differ_and_the_weights_are_as_wide_as_trained_ones(self, monkeypatch):
        monkeypatch.setattr(generated, "BLOCK", 1000)
        old, _ = generated_pair(2000, 0.1, seed=5)
        assert (old[:1000] != old[1000:]).mean() > 0.9
        assert old.astype(np.float32).std() == pytest.approx(0.02, rel=0.1)

    def test_most_changes_are_by_one_step_and_small_weights_change_more_often(self):
        old, new = generated_pair(1_000_000, 0.0025, seed=5)
        moved = old.view(np.uint16) != new.view(np.uint16)
        steps = np.abs(old.view(np.int16)[moved].astype(int) - new.view(np.int16)[moved])
        assert 0.8 < (steps == 1).mean() < 1
        small = np.abs(old.astype(np.float32)) < 2**-10
        assert moved[small].mean() > 4 * moved[~small].mean()

    def test_the_seed_decides(self):
        a, b, c = (generated_pair(1000, 0.1, seed=seed) for seed in (1, 1, 2))
        assert a[0].tobytes() == b[0].tobytes()
        assert a[1].tobytes() == b[1].tobytes()
        assert a[0].tobytes() != c[0].tobytes()

    @pytest.mark.parametrize(("elements", "density"), [(0, 0.1), (10, 0.0), (10, 0.95), (10, float("nan"))])
    def test_what_cannot_be_generated_is_refused(self, elements, density):
        with pytest.raises(InvalidInput, match="density"):
            generated_pair(elements, density, seed=0)
