"""SIGKILL at every file operation of a publisher, or a sample of them, and of everything else that writes to a store."""

from __future__ import annotations

import pytest

from .children import report_of


def matrix_of(scenario, form, memory_dir):
    """The report of a scenario, in its sampled or its full form."""
    return report_of("kill_matrix", scenario, memory_dir, *(["--sampled"] if form == "sampled" else []))


def check(report, record_property, at_least):
    points, whole, outcomes, problems = (report[name] for name in ("points", "of", "outcomes", "problems"))
    summary = f"{points} of {whole} points of {len(report['operations'])} operations, ended {outcomes}"
    record_property("kill_matrix", summary)
    print(summary)
    listed = "".join(f"\n  killed {where}: {'; '.join(found)}" for where, found in problems.items())
    assert not problems, f"{len(problems)} of {summary}:{listed}"
    assert report["watched"] == report["audited"], "an operation escaped the matrix"
    assert whole >= at_least
    assert sum(outcomes.values()) == points >= whole / 8


@pytest.mark.parametrize(
    ("scenario", "at_least"), [("publish", 100), ("first_publish", 100), ("publish_delta", 90), ("publish_too_large", 16)]
)
def test_a_publisher_killed_at_any_operation_leaves_the_old_versions_or_the_new_one_too(
    scenario, at_least, form, memory_dir, record_property
):
    report = matrix_of(scenario, form, memory_dir)

    check(report, record_property, at_least=at_least)
    assert report["outcomes"]["old"] > report["outcomes"]["new"] > report["points"] // 10


def test_a_publisher_killed_while_it_removes_what_an_earlier_one_left_behind_changes_no_version(
    form, memory_dir, record_property
):
    report = matrix_of("publish_over_leftovers", form, memory_dir)

    check(report, record_property, at_least=12)
    assert set(report["outcomes"]) == {"old"}


def test_a_fold_killed_at_any_operation_leaves_the_same_state_on_the_old_base_or_the_new_one(
    form, memory_dir, record_property
):
    report = matrix_of("fold", form, memory_dir)

    check(report, record_property, at_least=25)
    assert set(report["outcomes"]) == {"old", "new"}


def test_a_gc_killed_at_any_operation_leaves_whole_versions_and_the_next_gc_finishes(form, memory_dir, record_property):
    report = matrix_of("gc", form, memory_dir)

    check(report, record_property, at_least=51)
    assert set(report["outcomes"]) == {"4 versions", "3 versions", "2 versions"}


@pytest.mark.parametrize(("scenario", "outcomes"), [("announce", {"step_1", "step_2"}), ("migrate", {"txt", "yaml"})])
def test_a_version_file_names_a_whole_version_whenever_its_writer_is_killed(
    scenario, outcomes, form, memory_dir, record_property
):
    report = matrix_of(scenario, form, memory_dir)

    check(report, record_property, at_least=20)
    assert set(report["outcomes"]) == outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "fault", "complaint"),
    [
        ("publish", "manifest_first", "the file is missing"),
        ("publish", "version_file_in_place", "VersionFileInvalid"),
        ("publish_delta", "manifest_first", "the file is missing"),
        ("fold", "payload_in_place", "the manifest says"),
        ("gc", "parts_first", "the file is missing"),
    ],
)
def test_the_matrix_catches_a_writer_that_does_things_in_the_wrong_order(scenario, fault, complaint, memory_dir):
    problems = report_of("kill_matrix", scenario, memory_dir, "--sampled", "--fault", fault)["problems"]

    assert any(complaint in problem for found in problems.values() for problem in found), problems
