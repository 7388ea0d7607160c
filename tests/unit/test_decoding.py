"""Messages are decoded by any number of threads, also when they are the first to decode one."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import weightcast
from weightcast.wire.decoding import decode

SOURCES = Path(weightcast.__file__).parent
# Every class is new, so that all threads meet it for the first time, and the interpreter changes threads all the time.
FIRST = """
import sys, threading, msgspec
from weightcast.wire.decoding import decode

sys.setswitchinterval(1e-6)
data = b'{"a":1,"b":{"k":[{"x":1,"y":"z"}]},"c":[{"x":1,"y":"q"}],"d":"e"}'
for _ in range(1000):
    class Inner(msgspec.Struct):
        x: int
        y: str
    class Outer(msgspec.Struct):
        a: int
        b: dict[str, tuple[Inner, ...]]
        c: list[Inner]
        d: str = ""
    together = threading.Barrier(4)
    def go(kind=Outer, together=together):
        together.wait()
        assert decode(data, kind).c[0].y == "q"
    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_are_the_first_to_decode_a_message_do_not_crash():
    ended = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_is_not_such_a_message_is_refused():
    assert decode(b"[1, 2]", list[int]) == [1, 2]
    with pytest.raises(msgspec.ValidationError):
        decode(b'["one"]', list[int])


def test_nothing_is_decoded_in_another_way():
    """But for the settings of a rank, which it reads before it has any thread."""
    direct = re.compile(r"msgspec\.json\.decode\([^\n]*type=")
    found = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if direct.search(path.read_text())}
    assert found == {"engines/embedded/ranks/process.py"}
