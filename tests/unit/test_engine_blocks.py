"""The bookkeeping of the KV cache: blocks, who holds them, and which prefixes can be used again."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling_checks import check_pool

from weightcast.engines.embedded.scheduling.blocks import BlockPool


def make_pool(blocks=8, block_size=2, *, prefix_cache=True):
    return BlockPool(blocks, block_size, prefix_cache=prefix_cache, version="v1")


def fill(pool, tokens):
    """Hold blocks for all tokens as a sequence would, enter the full ones, and return them."""
    shared = pool.match(tokens)
    pool.share(shared)
    blocks = shared + pool.allocate(pool.count(len(tokens)) - len(shared))
    enter(pool, pool.chain(shared), blocks, tokens, len(shared))
    return blocks


def enter(pool, chain, blocks, tokens, first=0):
    size = pool.block_size
    for index in range(first, len(tokens) // size):
        if chain is not None:
            chain = pool.register(chain, blocks[index], tuple(tokens[index * size : (index + 1) * size]))
    return chain


def test_the_longest_known_prefix_is_found_in_whole_blocks():
    pool = make_pool()
    blocks = fill(pool, [1, 2, 3, 4, 5])
    assert pool.match([1, 2, 3, 4, 9, 9]) == blocks[:2]
    assert pool.match([1, 2, 3, 9, 9]) == blocks[:1]
    assert pool.match([1, 2, 3]) == blocks[:1]
    assert pool.match([3, 4, 5]) == []


def test_the_last_token_is_never_found_for_it_has_to_be_computed():
    pool = make_pool()
    blocks = fill(pool, [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4]) == blocks[:1]
    assert pool.match([1, 2]) == []
    assert pool.match([]) == []


def test_equal_tokens_behind_another_prefix_are_another_block():
    pool = make_pool()
    first, second = fill(pool, [1, 1, 7, 7, 0]), fill(pool, [2, 2, 7, 7, 0])
    assert first[1] != second[1]
    assert pool.match([2, 2, 7, 7, 0]) == second[:2]
    check_pool(pool, [first, second])


def test_without_a_prefix_cache_nothing_is_found_and_nothing_stays():
    pool = make_pool(prefix_cache=False)
    blocks = fill(pool, [1, 2, 3, 4, 5])
    assert pool.chain([]) is None
    assert pool.match([1, 2, 3, 4, 5]) == []
    pool.release(blocks)
    assert (pool.free, pool.cached) == (8, 0)


def test_what_is_given_back_stays_cached_until_room_is_needed():
    pool = make_pool()
    blocks = fill(pool, [1, 2, 3, 4, 5])
    pool.release(blocks)
    assert (pool.free, pool.cached) == (6, 2)
    assert pool.match([1, 2, 3, 4, 5]) == blocks[:2]
    taken = pool.allocate(8)
    assert sorted(taken) == list(range(8))
    assert pool.match([1, 2, 3, 4, 5]) == []
    check_pool(pool, [taken])


def test_asking_for_too_much_changes_nothing():
    pool = make_pool()
    held = fill(pool, [1, 2, 3, 4, 5])
    pool.release(fill(pool, [7, 7, 8]))
    before = (pool.free, pool.cached)
    assert pool.allocate(6) is None
    assert (pool.free, pool.cached) == before
    assert pool.match([7, 7, 8])
    check_pool(pool, [held])


def test_the_prefix_that_was_not_used_for_longest_goes_first_and_its_end_before_its_beginning():
    pool = make_pool(blocks=8)
    old, new = fill(pool, [1, 1, 1, 1, 1, 1, 0]), fill(pool, [2, 2, 2, 2, 2, 2, 0])
    pool.release(old)
    pool.release(new)
    assert (pool.free, pool.cached) == (2, 6)
    for left in (2, 1, 0):
        held = pool.allocate(pool.free + 1)
        assert pool.match([1] * 7) == old[:left]
        assert pool.match([2] * 7) == new[:3]
        check_pool(pool, [held])
        pool.release(held)


def test_a_prefix_that_is_used_again_is_young_again():
    pool = make_pool(blocks=4)
    pool.release(fill(pool, [1, 1, 0]))
    pool.release(fill(pool, [2, 2, 0]))
    pool.release(fill(pool, [1, 1, 9]))
    pool.allocate(3)
    assert pool.match([1, 1, 0])
    assert not pool.match([2, 2, 0])


def test_a_shared_block_is_free_for_others_only_after_its_last_holder():
    pool = make_pool(blocks=4)
    first = fill(pool, [1, 1, 1, 1, 0])
    second = fill(pool, [1, 1, 1, 1, 5])
    assert first[:2] == second[:2]
    check_pool(pool, [first, second])
    pool.release(first)
    assert pool.room() == 1
    assert pool.allocate(2) is None
    check_pool(pool, [second])
    pool.release(second)
    assert pool.room() == 4


def test_room_counts_cached_blocks_that_are_about_to_be_shared_as_taken():
    pool = make_pool(blocks=4)
    pool.release(fill(pool, [1, 1, 1, 1, 0]))
    assert pool.room() == 4
    assert pool.room(pool.match([1, 1, 1, 1, 0])) == 2


def test_two_that_fill_the_same_block_at_once_enter_it_once_and_go_on_behind_it():
    pool = make_pool()
    first, second = pool.allocate(3), pool.allocate(3)
    enter(pool, pool.chain([]), first, [1, 1, 2, 2])
    enter(pool, pool.chain([]), second, [1, 1, 2, 2, 3, 3])
    assert pool.match([1, 1, 2, 2, 3, 3, 0]) == [*first[:2], second[2]]
    check_pool(pool, [first, second])
    pool.release(first)
    check_pool(pool, [second])
    pool.release(second)  # its last block keeps those above alive until it goes itself
    check_pool(pool, [])
    pool.allocate(6)
    assert pool.match([1, 1, 2, 2, 3, 3, 0]) == first[:2]


def test_a_beginning_can_be_given_away_while_its_end_is_held_by_one_who_has_the_beginning_twice():
    pool = make_pool(blocks=4)
    first, second = pool.allocate(1), pool.allocate(2)
    enter(pool, pool.chain([]), first, [1, 1])
    chain = enter(pool, pool.chain([]), second, [1, 1, 2, 2])
    pool.release(first)
    more = pool.allocate(2)
    assert more is not None
    assert pool.match([1, 1, 2, 2, 0]) == []
    assert pool.register(chain, more[0], (3, 3)) is None
    check_pool(pool, [second, more])


@pytest.mark.parametrize("forget", [lambda pool: pool.set_version("v2"), lambda pool: pool.clear_cache()])
def test_after_a_new_version_or_a_clearing_old_prefixes_are_gone_and_held_blocks_are_never_entered(forget):
    pool = make_pool()
    unheld = fill(pool, [9, 9, 0])
    pool.release(unheld)
    held = pool.allocate(3)
    chain = enter(pool, pool.chain([]), held, [1, 1])
    forget(pool)
    assert (pool.free, pool.cached) == (5, 0)
    assert pool.match([9, 9, 0]) == pool.match([1, 1, 0]) == []
    assert pool.register(chain, held[1], (2, 2)) is None
    check_pool(pool, [held])
    new = fill(pool, [1, 1, 0])
    assert new[0] != held[0]
    check_pool(pool, [held, new])
    pool.release(held)
    assert pool.match([1, 1, 0]) == new[:1]
    check_pool(pool, [new])


def test_a_sequence_that_began_before_a_new_version_enters_nothing_even_at_its_root():
    pool = make_pool()
    chain, held = pool.chain([]), pool.allocate(1)
    pool.set_version("v2")
    assert pool.register(chain, held[0], (1, 1)) is None
    assert pool.match([1, 1, 0]) == []


class PoolMachine(RuleBasedStateMachine):
    """Holders come, fill, share and go, in any order. A model keeps what each block really holds."""

    @initialize(blocks=st.integers(1, 9), size=st.integers(1, 3), cache=st.booleans())
    def begin(self, blocks, size, cache):
        self.pool = BlockPool(blocks, size, prefix_cache=cache, version="0")
        self.now, self.holders, self.contents = 0, [], {}

    @rule(tokens=st.lists(st.integers(0, 1), max_size=12))
    def admit(self, tokens):
        shared = self.pool.match(tokens)
        assert len(shared) * self.pool.block_size <= max(0, len(tokens) - 1)
        for index, block in enumerate(shared):
            assert self.contents[block] == (self.now, tokens[: (index + 1) * self.pool.block_size])
        short = self.pool.count(len(tokens)) - len(shared)
        room = self.pool.room(shared)
        self.pool.share(shared)
        fresh = self.pool.allocate(short)
        assert (fresh is None) == (short > room)
        if fresh is None:
            self.pool.release(shared)
        else:
            chain = self.pool.chain(shared)
            self.holders.append({"blocks": shared + fresh, "tokens": tokens, "chain": chain, "done": len(shared)})

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fill_one(self, data):
        one = data.draw(st.sampled_from(self.holders))
        size, end = self.pool.block_size, (one["done"] + 1) * self.pool.block_size
        if end <= len(one["tokens"]):
            block, alive = one["blocks"][one["done"]], one["chain"] is not None and one["chain"].alive
            self.contents[block] = (self.now, one["tokens"][:end])
            if one["chain"] is not None:
                one["chain"] = self.pool.register(one["chain"], block, tuple(one["tokens"][end - size : end]))
                assert (one["chain"] is not None) == alive
            one["done"] += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def go(self, data):
        one = data.draw(st.sampled_from(self.holders))
        self.holders.remove(one)
        self.pool.release(one["blocks"])

    @rule(version=st.booleans())
    def forget(self, version):
        self.now += 1
        self.pool.set_version(str(self.now)) if version else self.pool.clear_cache()
        assert self.pool.cached == 0

    @rule()
    def take_all(self):
        room = self.pool.room()
        blocks = self.pool.allocate(room)
        assert self.pool.room() == 0
        assert len(set(blocks)) == room
        self.pool.release(blocks)
        assert self.pool.free == room

    @invariant()
    def holds(self):
        if hasattr(self, "pool"):
            check_pool(self.pool, [one["blocks"] for one in self.holders])


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
test_a_pool_keeps_its_books_whatever_happens = pytest.mark.untraced(PoolMachine.TestCase)
