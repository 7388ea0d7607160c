"""Publishers and receivers of shared memory, both in the process of the test."""

import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def root():
    """A directory to publish in that is not there yet; short, as the path of a socket must be."""
    path = Path(tempfile.mkdtemp(prefix="wc-"))
    yield path / "run"
    shutil.rmtree(path)


@pytest.fixture
def publisher(root):
    from ipc_pairs import BUCKET_NBYTES

    from weightcast.publish.publisher import Publisher

    with Publisher(root, bucket_nbytes=BUCKET_NBYTES, hold_s=10, stall_s=5) as one:
        yield one


@pytest.fixture
def receiver(publisher):
    from weightcast.transports.registry import open_receiver

    one = open_receiver(publisher.url, rank=0)
    yield one
    one.close()
