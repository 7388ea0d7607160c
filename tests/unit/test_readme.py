"""What README and the guides show works."""

import re
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()


def test_the_examples_run_as_they_stand(capsys):
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    examples = [one for one in examples if "openai" not in one]  # tests/process/test_server_openai.py runs that one
    begins = ("step_101 ", "11 changes in ", "step_1 is live", "step_1 came over the network")
    for example, begin in zip(examples, begins, strict=True):
        run(example)
        assert capsys.readouterr().out.startswith(begin)


@pytest.mark.parametrize(("guide", "count"), [("same-host", 1), ("across-hosts", 2), ("legacy-config", 1)])
def test_the_examples_of_the_guides_run_as_they_stand(guide, count):
    examples = re.findall(r"```python\n(.*?)```", (DOCS / f"{guide}.md").read_text(), re.DOTALL)
    assert len(examples) == count
    for example in examples:
        run(example)


def run(example):
    """Run an example with its files in a directory of the test's own; a short one, as the paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="wc-") as directory:
        exec(compile(example.replace("/tmp/", f"{directory}/"), "an example", "exec"), {})


def test_the_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
