"""Every shell block of every page is run, in the order in which it stands: servers serve, clients are answered."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from shell_pages import ShellPage

from documents import Block, all_blocks, blocks, page_id, pages


def runnable(page):
    return [
        block
        for block in blocks(page)
        if (block.language == "sh" and not block.marker) or (block.language, block.marker) == ("python", "server")
    ]


@pytest.mark.parametrize("page", [page for page in pages() if runnable(page)], ids=page_id)
def test_the_shell_blocks_of_a_page_run(page):
    with ShellPage() as shell:
        for block in runnable(page):
            if block.language == "sh":
                shell.run(block)
            else:
                shell.run_python(block)


@pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")
@pytest.mark.parametrize("block", [one for one in all_blocks("python") if one.marker == "nixl"], ids=str)
def test_the_blocks_that_need_nixl_run(block):
    subprocess.run([sys.executable, "-c", block.text], check=True, timeout=60)


def block_of(text):
    return Block(pages()[0], 1, "sh", "", text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("weightcast store ls /mnt/nowhere\n", "exit status 2"),
        ("weightcast --version   # exits 3, it says\n", "exit status 0"),
        ("curl localhost:8000/health\n", "exit status 7"),
        (
            "weightcast model init ./m\nweightcast publish /mnt/s v ./m\n"
            "weightcast depot --store /mnt/s --listen 0.0.0.0:8300\ncurl localhost:8300/v1/nonsense\n",
            "exit status 22",
        ),
        ("weightcast serve ./model --port 8000 --draft-tokens 0\n", "the server ended"),
    ],
)
def test_a_block_that_fails_is_noticed(text, complaint):
    with pytest.raises(AssertionError, match=complaint), ShellPage() as shell:
        shell.run(block_of(text))
