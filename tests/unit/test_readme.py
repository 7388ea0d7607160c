"""What README shows works."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_runs_as_it_stands(tmp_path, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example.replace("/tmp/weights", str(tmp_path / "weights")), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("step_101 ")


def test_the_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
