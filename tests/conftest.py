"""What every test gets: a seeded generator, a store in a temporary directory, and a check that no thread is left behind."""

import threading

import hypothesis
import numpy as np
import pytest

from weightcast import Store

hypothesis.settings.register_profile("shared machine", deadline=None)  # a slow example is not a wrong one
hypothesis.settings.load_profile("shared machine")


@pytest.fixture
def rng():
    return np.random.default_rng(1234)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture(autouse=True)
def no_thread_is_left_behind():
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before and thread.name.startswith("prefetch")]
    assert not left, f"threads left behind: {left}"
