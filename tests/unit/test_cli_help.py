"""Help as a manual has it: every command says what it does, every option what it means, in one layout."""

from __future__ import annotations

import platform
import re

import click
import pytest

from weightcast import __version__
from weightcast.cli.help import Command, Group
from weightcast.cli.main import cli, main


def walk(command, path=()):
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


COMMANDS = dict(walk(cli))
IDS = [" ".join(path) or "weightcast" for path in COMMANDS]


@pytest.fixture
def shown(capsys):
    def call(*path):
        assert main([*path, "--help"]) == 0
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_help_has_a_synopsis_an_explanation_exit_statuses_and_examples_that_run_this_command(shown, path):
    text = shown(*path)
    called = " ".join(("weightcast", *path))
    sections = re.split(r"^(?=[A-Z][A-Za-z ]*:$)", text, flags=re.MULTILINE)
    titled = {section.partition(":")[0]: section for section in sections[1:]}

    assert text.startswith(f"Usage: {called} ")
    assert len(sections[0].split()) > 8, "nothing explained"
    assert list(titled)[-1] in ("Examples", "Environment"), "examples stand last"
    assert re.search(rf"^  .*{called}\b", titled["Examples"], re.MULTILINE)
    assert re.search(r"^  0  \S", titled["Exit status"], re.MULTILINE)
    assert "\\b" not in text


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_every_option_is_explained_and_shown_once(shown, path):
    text = shown(*path)
    options = [one for one in COMMANDS[path].params if isinstance(one, click.Option)]

    for option in options:
        assert option.help, option.opts
        assert len(re.findall(rf"^  (?:-\w, )?{max(option.opts, key=len)}(?![\w-])", text, re.MULTILINE)) == 1, option.opts
    assert "RANGE" not in text


@pytest.mark.parametrize("path", COMMANDS, ids=IDS)
def test_examples_name_options_that_exist(path):
    examples = (COMMANDS[path].help or "").partition("Examples:\n")[2].partition("\n\n")[0]

    for line in examples.splitlines():
        words = line.partition("|")[0].partition(" #")[0].partition(" > ")[0].rstrip(")").split()
        words = words[next((at for at, word in enumerate(words) if word.endswith("weightcast")), len(words)) + 1 :]
        command = cli
        while words and isinstance(command, click.Group) and not words[0].startswith("-"):
            command = command.commands[words.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_the_overview_puts_every_command_under_a_title(shown):
    text = shown()
    titles = re.findall(r"^([A-Z]\w+):$", text, re.MULTILINE)

    assert titles[:5] == ["Publishing", "Moving", "Serving", "Checking", "Measuring"]
    assert "Commands" not in titles
    for name in cli.commands:
        assert len(re.findall(rf"^  {name} +\S", text, re.MULTILINE)) == 1


def test_options_of_a_command_stand_in_the_sections_that_it_names(capsys):
    made = Command(
        "made",
        sections={"Place": ("--port",)},
        params=[
            click.Option(["--port"], type=click.IntRange(min=0), help="Where."),
            click.Option(["--other"], help="Else."),
        ],
        help="What it does.\n\nExamples:\n  made --port 1    # kept   as it is\n\nWhy it does.",
        add_help_option=False,
    )
    text = made.get_help(click.Context(made, info_name="made"))

    assert text == (
        "Usage: made [OPTIONS]\n\n  What it does.\n\n  Why it does.\n\n"
        "Place:\n  --port N  Where.  [x>=0]\n\nOptions:\n  --other TEXT  Else.\n\n"
        "Examples:\n  made --port 1    # kept   as it is"
    )


def test_a_section_that_names_an_option_twice_or_one_that_is_not_there_is_a_mistake_of_ours():
    for names in (("--port", "--port"), ("--prot",)):
        made = Command("made", sections={"Place": names}, params=[click.Option(["--port"], help="Where.")])
        with pytest.raises(KeyError):
            made.get_help(click.Context(made, info_name="made"))


def test_a_group_makes_commands_of_the_same_layout():
    group = Group("group")

    @group.command()
    def inner() -> None:
        """Nothing."""

    assert isinstance(group.commands["inner"], Command)


def test_the_version_stands_in_the_first_line_and_the_platform_in_the_second(capsys):
    assert main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"weightcast, version {__version__}"
    assert platform.python_version() in second
    assert platform.machine() in second
