"""What the pages say holds: links lead somewhere, blocks parse and run, commands exist. `tests/docs` runs the commands."""

import contextlib
import io
import json
import re
import tempfile
import tomllib
import xml.etree.ElementTree as ET

import click
import pytest
import yaml

from documents import ROOT, all_blocks, anchors, blocks, calls_of, command_lines, links, page_id, pages, prose
from weightcast.cli.main import cli

# Where links may lead outside, and why: nobody can check them without a network, so there are few.
OUTSIDE = {
    "https://github.com/huggingface/safetensors": "the format that parts are in",
    **dict.fromkeys(
        (
            "https://github.com/vllm-project/vllm",
            "https://github.com/sgl-project/sglang",
            "https://github.com/MoonshotAI/checkpoint-engine",
            "https://github.com/meta-pytorch/torchstore",
            "https://github.com/inclusionAI/Awex",
            "https://github.com/verl-project/verl",
            "https://github.com/THUDM/slime",
            "https://github.com/radixark/miles",
            "https://github.com/modal-projects/stitch",
            "https://github.com/ai-dynamo/modelexpress",
            "https://github.com/NVIDIA-NeMo/RL",
            "https://github.com/PaddlePaddle/FastDeploy",
        ),
        "what we are compared with: docs/comparison.md",
    ),
}
LANGUAGES = {"sh", "python", "json", "yaml", "toml", "http", "hex", "text"}
# Why a block is not run here or by tests/docs/test_shell_blocks.py, and who does it instead.
MARKERS = {
    ("sh", "install"): "changes the environment; extras and packages are compared with pyproject.toml",
    ("sh", "make"): "takes minutes; the targets are compared with the Makefile, CI runs them",
    ("sh", "example"): "the tests of the examples run them",
    ("sh", "vllm"): "needs vLLM: run by tests/vllm/test_docs.py",
    ("python", "vllm"): "needs vLLM: run by tests/vllm/test_docs.py",
    ("python", "nixl"): "needs NIXL: run by tests/docs/test_shell_blocks.py where it is installed",
    ("python", "server"): "needs the server that the block before it starts: run by tests/docs/test_shell_blocks.py",
    ("python", "sketch"): "a shape to fill in, which names things that are the reader's; it must compile",
}
PAGES = pytest.mark.parametrize("page", pages(), ids=page_id)


@PAGES
def test_the_links_lead_somewhere(page):
    wrong = []
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            if not any(link == known or link.startswith(f"{known}/") for known in OUTSIDE):
                wrong.append(f"{link} leads outside")
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or ROOT not in (target, *target.parents):
            wrong.append(f"{link} leads nowhere")
        elif anchor and anchor not in anchors(target):
            wrong.append(f"{link}: no such heading")
    assert not wrong


def test_the_readme_leads_to_every_page():
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    linked |= {page for target in linked if target.is_dir() for page in target.iterdir()}
    assert [page_id(page) for page in pages()[1:] if page not in linked] == []


def test_the_outside_list_holds_nothing_that_is_not_used():
    used = {link for page in pages() for link in links(page)}
    assert [known for known in OUTSIDE if not any(link.startswith(known) for link in used)] == []


@PAGES
def test_blocks_say_what_they_are_and_why_they_are_not_run(page):
    wrong = []
    for block in blocks(page):
        if block.language not in LANGUAGES:
            wrong.append(f"{block}: {block.language or 'no language'}")
        elif block.marker and (block.language, block.marker) not in MARKERS:
            wrong.append(f"{block}: unknown reason {block.marker!r}")
    assert not wrong


def test_few_blocks_are_run_nowhere():
    used = {(block.language, block.marker) for block in all_blocks(*LANGUAGES) if block.marker}
    assert used == set(MARKERS)
    assert sum(block.marker in ("install", "make", "example", "sketch") for block in all_blocks("sh", "python")) <= 8
    elsewhere = {"vllm": "tests/vllm/test_docs.py", "server": "tests/docs/test_shell_blocks.py"}
    for marker, file in elsewhere.items():
        assert f'"{marker}"' in (ROOT / file).read_text()


@pytest.mark.parametrize("block", [one for one in all_blocks("python") if not one.marker], ids=str)
def test_the_python_blocks_run_as_they_stand(block):
    """With their files in a directory of the test's own; a short one, as the paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="wc-") as directory, contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block.text.replace("/tmp/", f"{directory}/"), str(block), "exec"), {"__name__": "__main__"})


def test_the_python_blocks_that_are_not_run_here_compile():
    for block in all_blocks("python"):
        compile(block.text, str(block), "exec")


def test_data_blocks_parse():
    for block in all_blocks("json", "yaml", "toml", "http"):
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        else:
            for line in block.text.splitlines():
                method, path, *body = line.split(" ", 2)
                assert (method in ("GET", "POST", "DELETE"), path[0]) == (True, "/"), f"{block}: {line}"
                assert not body or isinstance(json.loads(body[0]), dict)


# -- commands -----------------------------------------------------------------------------------------------------------


def command_problem(arguments, *, whole):
    """What click would say against a call, without calling. Files and directories need not be there.

    Not `whole`: as commands stand in a sentence, where arguments may be missing.
    """
    command, context = cli, click.Context(cli, info_name="weightcast", allow_extra_args=True, **cli.context_settings)
    while True:
        try:
            given, rest, _ = command.make_parser(context).parse_args(list(arguments))
        except click.UsageError as error:
            if whole or not isinstance(error, click.BadOptionUsage | click.MissingParameter):
                return error.format_message()
            return None
        for parameter in command.params:
            value = given.get(parameter.name)
            missing = value is None or parameter.value_is_missing(value)
            if whole and missing and parameter.required:
                return f"{parameter.get_error_hint(context)} is missing"
            try:
                for one in [] if missing or isinstance(parameter.type, click.Path) else _values(value):
                    parameter.type.convert(one, parameter, context)
            except click.UsageError as error:
                if whole:
                    return error.format_message()
        if not isinstance(command, click.Group):
            return f"too many arguments: {rest}" if rest else None
        if not rest:
            return None
        name, *arguments = rest
        child = command.get_command(context, name)
        if child is None:
            return f"no such command: {name}"
        command, context = child, click.Context(child, context, info_name=name, allow_extra_args=True)


def _values(value):
    return value if isinstance(value, tuple | list) else [value]


def calls(program):
    for block in all_blocks("sh"):
        for command in command_lines(block.text):
            for arguments in calls_of(command, program):
                yield block, arguments


def test_every_command_in_a_shell_block_is_one():
    problems = {
        f"{block}: weightcast {' '.join(arguments)}": problem
        for block, arguments in calls("weightcast")
        if (problem := command_problem(arguments, whole=True))
    }
    assert not problems
    assert len(list(calls("weightcast"))) > 20


@PAGES
def test_every_command_named_in_a_sentence_is_one(page):
    problems = {}
    for code in re.findall(r"`(weightcast [^`]+)`", prose(page)):
        words = re.split(r"[|…\[]", code)[0].split()[1:]
        if problem := command_problem(words, whole=False):
            problems[code] = problem
    assert not problems


@pytest.mark.parametrize(
    "line",
    [
        "serv ./m", "serve ./m --rank 2", "serve ./m --ranks two", "serve", "serve ./m ./n", "store gc /s --keep-last 0",
        "publish /s step_1 ./c --mode half", "vllm update --source x", "--nonsense",
    ],
)  # fmt: skip
def test_a_command_that_click_would_refuse_is_noticed(line):
    assert command_problem(line.split(), whole=True)


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_extra_that_is_installed_is_one():
    known = set(project()["optional-dependencies"])
    named = {page_id(page): set(re.findall(r"(?:weightcast|\.|\.whl)\[([\w,]+)\]", page.read_text())) for page in pages()}
    unknown = {page: {e for one in extras for e in one.split(",")} - known for page, extras in named.items()}
    assert {page: extras for page, extras in unknown.items() if extras} == {}
    assert any(named.values())


def test_every_make_target_is_one():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {argument for _, arguments in calls("make") for argument in arguments if "=" not in argument}
    named |= {target for page in pages() for target in re.findall(r"`make ([a-z-]+)`", prose(page))}
    assert named - targets == set()
    assert {"demo", "test"} <= named


@PAGES
def test_tests_that_a_page_refers_to_are_there(page):
    there = {path.name for path in (ROOT / "tests").rglob("*.py")}
    assert set(re.findall(r"\b(test_\w+\.py)\b", page.read_text())) <= there


def test_the_pictures_are_well_formed():
    pictures = sorted((ROOT / "docs").glob("*.svg"))
    assert pictures
    for picture in pictures:
        assert ET.parse(picture).getroot().tag.endswith("svg")


def test_every_promise_of_the_failure_model_names_tests_that_exist():
    text = (ROOT / "docs" / "failure-model.md").read_text()
    promised = text.partition("## Publishers and stores")[2].partition("## What is not guaranteed")[0]
    promises = re.split(r"^- ", promised, flags=re.MULTILINE)[1:]
    held = {one.partition(".**")[0].strip("*"): re.findall(r"`(test_\w+\.py)::(test_\w+)`", one) for one in promises}
    sources = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}

    assert len(promises) == text.count("Tests: ") > 20
    assert [promise for promise, tests in held.items() if not tests] == []
    named = {one for tests in held.values() for one in tests}
    assert {f"{file}::{test}" for file, test in named if f"def {test}(" not in sources.get(file, "")} == set()
