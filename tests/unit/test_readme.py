"""What README shows works."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_examples_run_as_they_stand(tmp_path, capsys):
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    examples = [one for one in examples if "openai" not in one]  # tests/process/test_server_openai.py runs that one
    for example, begins in zip(examples, ("step_101 ", "11 changes in "), strict=True):
        exec(compile(example.replace("/tmp/weights", str(tmp_path / "weights")), "README.md", "exec"), {})
        assert capsys.readouterr().out.startswith(begins)


def test_the_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
