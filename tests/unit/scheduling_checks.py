"""What must hold in a block pool at any time."""

from collections import Counter


def check_pool(pool, holders):
    """`holders` has the blocks of each sequence. Looks inside: no caller could see a lost block before it is too late."""
    held = Counter(block for blocks in holders for block in blocks)
    assert all(len(set(blocks)) == len(blocks) for blocks in holders), "a sequence holds a block twice"
    assert [held[block] for block in range(pool.blocks)] == pool._references
    free, unheld = pool._free, list(pool._unheld)
    assert len(set(free)) == len(free)
    assert sorted([*free, *unheld, *held]) == list(range(pool.blocks)), "a block is in no state, or in two"
    assert (pool.free, pool.cached, pool.room()) == (len(free), len(unheld), len(free) + len(unheld))

    nodes, stack = {}, [pool._root]
    while stack:
        node = stack.pop()
        assert node.alive
        for tokens, below in node.children.items():
            assert below.parent is node
            assert below.tokens == tokens
            assert len(tokens) == pool.block_size
            assert below.block not in nodes
            nodes[below.block] = below
            stack.append(below)
    assert {block: node for block, node in enumerate(pool._nodes) if node is not None} == nodes
    assert not set(free) & set(nodes)
    assert all(nodes[block] is node for block, node in pool._unheld.items())
    assert pool.prefix_cache or not nodes
    place = {block: index for index, block in enumerate(unheld)}
    for block in unheld:
        above = nodes[block].parent.block
        assert above not in place or place[above] > place[block], "a beginning would be given away before its end"
