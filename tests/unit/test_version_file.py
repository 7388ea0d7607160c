"""version.yaml, its legacy form, and every way in which they can be wrong."""

import logging

import numpy as np
import pytest

from weightcast.errors import VersionFileInvalid, VersionNotFound, VersionNotSet
from weightcast.store.version_file import read_version_file, step_of, write_version_file


def test_it_is_written_and_read_with_both_keys(tmp_path):
    write_version_file(tmp_path, version="step_100", step=100)
    found = read_version_file(tmp_path)
    assert (found.version, found.step, found.path) == ("step_100", 100, tmp_path / "version.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["version.yaml"]


@pytest.mark.parametrize(
    ("text", "version", "step"),
    [
        ("step: 100", "100", 100),
        ("step: '7'", "7", 7),
        ("version: a", "a", None),
        ("version: 12\nstep: 3\nmore: x", "12", 3),
    ],
)
def test_legacy_files_with_one_of_the_keys_are_understood(tmp_path, text, version, step):
    (tmp_path / "version.yaml").write_text(text)
    found = read_version_file(tmp_path)
    assert (found.version, found.step) == (version, step)


def test_version_txt_is_read_with_a_warning_that_names_it(tmp_path, caplog):
    (tmp_path / "version.txt").write_text(" step_5\n")
    with caplog.at_level(logging.WARNING):
        assert read_version_file(tmp_path).version == "step_5"
    assert str(tmp_path / "version.txt") in caplog.text
    assert "store migrate" in caplog.text


@pytest.mark.parametrize(("txt", "agrees"), [("step_5", True), ("5", True), ("step_6", False)])
def test_both_files_must_agree(tmp_path, txt, agrees, caplog):
    write_version_file(tmp_path, version="step_5", step=5)
    (tmp_path / "version.txt").write_text(txt)
    if agrees:
        assert read_version_file(tmp_path).path.name == "version.yaml"
        assert not caplog.records
    else:
        with pytest.raises(VersionFileInvalid) as caught:
            read_version_file(tmp_path)
        assert str(tmp_path / "version.yaml") in str(caught.value)
        assert str(tmp_path / "version.txt") in str(caught.value)


def test_neither_file_names_both_paths_that_were_tried(tmp_path):
    with pytest.raises(VersionNotSet) as caught:
        read_version_file(tmp_path)
    assert str(tmp_path / "version.yaml") in str(caught.value)
    assert str(tmp_path / "version.txt") in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "- a", "{", "step:", "step: true", "step: [1]", "version: {a: 1}", "other: 1", "\xff\xfe"]
)
def test_a_file_that_says_nothing_usable_is_an_error_with_its_path(tmp_path, text):
    (tmp_path / "version.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(VersionFileInvalid) as caught:
        read_version_file(tmp_path)
    assert str(tmp_path / "version.yaml") in str(caught.value)


def test_an_empty_version_txt_is_an_error(tmp_path):
    (tmp_path / "version.txt").write_text("\n")
    with pytest.raises(VersionFileInvalid, match="empty"):
        read_version_file(tmp_path)


def test_migrating_converts_once_and_keeps_the_version(store):
    store.publish("step_5", {"w": np.zeros(2)})
    (store.path / "version.yaml").unlink()
    (store.path / "version.txt").write_text("step_5")
    found = store.migrate()
    assert (found.version, found.step) == ("step_5", 5)
    assert not (store.path / "version.txt").exists()
    assert store.newest() == "step_5"
    assert store.migrate() is None


def test_migrating_refuses_files_that_disagree_and_changes_nothing(store):
    store.publish("step_5", {"w": np.zeros(2)})
    (store.path / "version.txt").write_text("step_4")
    with pytest.raises(VersionFileInvalid):
        store.migrate()
    assert (store.path / "version.txt").read_text() == "step_4"


def test_a_legacy_file_that_knows_only_the_step_finds_the_version(store):
    store.publish("global_step_40", {"w": np.zeros(2)})
    (store.path / "version.yaml").write_text("step: 40")
    assert store.newest() == "global_step_40"


def test_a_version_that_is_not_there_is_not_replaced_by_another_of_its_step(store):
    store.publish("run_a_40", {"w": np.zeros(2)})
    (store.path / "version.yaml").write_text("step: 40\nversion: run_b_40\n")
    assert store.newest() == "run_b_40"
    with pytest.raises(VersionNotFound, match="run_b_40"):
        store.load()


@pytest.mark.parametrize(("version", "step"), [("step_100", 100), ("1200", 1200), ("v2-rc", 7), ("a1b22", 22)])
def test_the_step_is_the_number_at_the_end(version, step):
    assert step_of(version, default=7) == step
