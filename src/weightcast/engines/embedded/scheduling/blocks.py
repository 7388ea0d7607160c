"""Which block of the KV cache belongs to whom. Numbers only: the memory is the runner's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Node:
    """A full block in the tree of cached prefixes: its key is its tokens and all the nodes above it.

    The root stands for a weight version and has no block. A node that left the cache is no longer `alive`; nothing can be
    entered below it any more.
    """

    __slots__ = ("alive", "block", "children", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], block: int) -> None:
        self.parent, self.tokens, self.block = parent, tokens, block
        self.children: dict[tuple[int, ...], Node] = {}
        self.alive = True


class BlockPool:
    """Blocks of `block_size` tokens, counted references, and the prefixes that can be used again.

    Every block is free, held by one or more sequences, or cached and held by none. The last kind is given away when room is
    needed, those first that were not used for longest, the ends of prefixes before their beginnings. Keys are the tokens
    themselves, below one root per weight version, so a match is never wrong.
    """

    def __init__(self, blocks: int, block_size: int, *, prefix_cache: bool, version: str) -> None:
        self.blocks, self.block_size, self.prefix_cache = blocks, block_size, prefix_cache
        self.version = version
        self.hits = 0  # tokens
        self.queries = 0  # tokens
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._nodes: list[Node | None] = [None] * blocks
        self._unheld: OrderedDict[int, Node] = OrderedDict()  # longest unused first; a node is always behind those below it
        self._root = Node(None, (), -1)

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that hold a cached prefix and that no sequence holds."""
        return len(self._unheld)

    def count(self, tokens: int) -> int:
        """How many blocks so many tokens need."""
        return -(-tokens // self.block_size)

    # -- take and give back ----------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The cached blocks of the longest known prefix. At least one token is left over, for there is one to compute."""
        blocks: list[int] = []
        if self.prefix_cache:
            size, node = self.block_size, self._root
            for end in range(size, len(tokens), size):
                below = node.children.get(tuple(tokens[end - size : end]))
                if below is None:
                    break
                blocks.append(below.block)
                node = below
        return blocks

    def room(self, shared: Sequence[int] = ()) -> int:
        """How many blocks `allocate` could give once the cached blocks `shared` are held."""
        return len(self._free) + len(self._unheld) - sum(not self._references[block] for block in shared)

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks that `match` found, for one more sequence."""
        for block in blocks:
            self._references[block] += 1
            self._unheld.pop(block, None)

    def allocate(self, count: int) -> list[int] | None:
        """Blocks for one sequence alone. None if there are not so many: then nothing has changed."""
        if count > self.room():
            return None
        while len(self._free) < count:
            self._drop(next(iter(self._unheld.values())))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back what a sequence holds, in the order of its tokens. What is cached stays so until room is needed."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                node = self._nodes[block]
                if node is None:
                    self._free.append(block)
                else:
                    self._rest(node)

    def _rest(self, node: Node) -> None:
        self._unheld[node.block] = node
        # A sequence that filled a block twice with another hangs its next blocks below a node that it does not hold. Such
        # nodes must not be given away before what is below them.
        above = node.parent
        while above is not None and above.block in self._unheld:
            self._unheld.move_to_end(above.block)
            above = above.parent

    # -- the cache -------------------------------------------------------------------------------------------------------

    def chain(self, shared: Sequence[int]) -> Node | None:
        """Where the blocks behind those that `match` found are to be registered; None without a prefix cache."""
        if not self.prefix_cache:
            return None
        return self._nodes[shared[-1]] if shared else self._root

    def register(self, chain: Node, block: int, tokens: tuple[int, ...]) -> Node | None:
        """Enter a full block behind `chain` and answer with the place of the next one.

        If the same tokens are there already, in another's block, this one is not entered. None if `chain` has left the
        cache: then the sequence was computed under an older version or before the cache was cleared, or room was needed,
        and nothing more of it may be entered.
        """
        if not chain.alive:
            return None
        node = chain.children.get(tokens)
        if node is None:
            node = chain.children[tokens] = self._nodes[block] = Node(chain, tokens, block)
        return node

    def clear_cache(self) -> None:
        """Forget all prefixes. Blocks that are held stay with their holders, and are never entered again."""
        self._drop(self._root)
        self._root = Node(None, (), -1)

    def set_version(self, version: str) -> None:
        """From now on blocks are computed by `version`. What other versions computed is never matched again."""
        self.version = version
        self.clear_cache()

    def _drop(self, top: Node) -> None:
        """Take a node and all that is below it out of the cache."""
        if top.parent is not None:
            del top.parent.children[top.tokens]
        nodes = [top]
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            node.alive, node.parent = False, None
            node.children.clear()
            if node is not self._root:
                self._nodes[node.block] = None
                if self._unheld.pop(node.block, None) is not None:
                    self._free.append(node.block)
