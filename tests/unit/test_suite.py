"""The suite gives the same answers however it is started."""

import os
import signal
import subprocess
import sys


def test_a_program_that_a_test_starts_can_be_interrupted():
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"], stdout=subprocess.PIPE
    )
    with child:
        child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        try:
            assert child.wait(20) != 0
        finally:
            child.kill()


def test_the_suite_may_be_started_in_the_background_elsewhere_and_with_a_bare_environment(tmp_path):
    """A shell that starts a job in the background has it ignore SIGINT, which programs inherit."""
    bare = {"PATH": os.environ["PATH"], "COLUMNS": "40", "LANG": "C", "PYTHONPATH": os.pathsep.join(sys.path)}
    test = f"{__file__}::test_a_program_that_a_test_starts_can_be_interrupted"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=tmp_path, env=bare, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout
