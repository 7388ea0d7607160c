"""What every test gets: a seeded generator, a store in a temporary directory, and a check that no thread is left behind."""

import gc
import signal
import sys
import threading
from collections.abc import Generator

import hypothesis
import numpy as np
import pytest

from weightcast import Store

hypothesis.settings.register_profile("shared machine", deadline=None)  # a slow example is not a wrong one
hypothesis.settings.load_profile("shared machine")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so, and children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "untraced: the same lines over and over, without the cost of measuring their coverage"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with processes first: a file stays on one worker, where its servers are started once, and may take a minute."""
    items.sort(key=lambda item: "process" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Modules stay: without them, a collection takes milliseconds and not a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Tracing doubles the time of a long matrix, whose lines other tests run as well.

    The mark `no_cover` of pytest-cov would do nothing here: in a process of pytest-xdist a second tracer lies below.
    """
    if item.get_closest_marker("untraced") is None:
        return (yield)
    here, in_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        threading.settrace(in_threads)
        sys.settrace(here)


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
