"""The stand itself: the tiny models, and servers and engines that answer as `transformers` does."""

import subprocess
import sys
from pathlib import Path

import pytest
from inprocess import open_llm, run, tokens
from models import greedy, nudged, published, tiny_model
from processes import OwnProcess
from servers import VllmServer

PROMPT = [5, 6, 7, 8]


def test_a_server_without_weight_transfer_answers_as_transformers_does(model_a):
    with VllmServer(model_a, backend=None) as server:
        assert server.tokens(PROMPT, 24) == greedy(model_a, PROMPT, 24)
        assert len(server.workers()) == 1

    assert not server.processes()
    assert not server.tmp_dir.exists()


def test_an_engine_inside_a_process_answers_as_transformers_does(model_a):
    assert run(answer, model_a, 24) == greedy(model_a, PROMPT, 24)


def answer(folder, n):
    return tokens(open_llm(folder, backend=None), PROMPT, n)


def test_the_models_differ_in_what_they_say_and_are_the_same_when_made_again(
    model_a, model_b, tied_a, tied_b, nudged_once, nudged_twice, tmp_path
):
    folders = (model_a, model_b, tied_a, tied_b, nudged_once, nudged_twice)

    assert len({tuple(greedy(folder, PROMPT, 8)) for folder in folders}) == len(folders)
    again = nudged(tiny_model(tmp_path / "a", seed=0), tmp_path / "b", seed=4)
    assert weights(again) == weights(nudged_once)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nudged_model_is_published_as_a_small_delta(dtype, store, tmp_path):
    first = tiny_model(tmp_path / "first", seed=6, dtype=dtype)
    second = nudged(first, tmp_path / "second", seed=7)

    full = published(store, "step_1", first)
    delta = published(store, "step_2", second)

    assert (full.kind, delta.kind) == ("full", "delta")
    assert delta.payloads[0].nbytes < 0.1 * full.nbytes
    assert delta.root_digest != full.root_digest


def test_what_a_process_leaves_behind_is_told_and_removed():
    with pytest.raises(AssertionError, match="sleep") as raised:
        run(leave_a_child_and_memory)

    path = Path(str(raised.value).split("made ")[1].split()[0])
    assert f"file {path}" in str(raised.value)
    assert not path.exists()


def leave_a_child_and_memory():
    path = Path("/dev/shm") / f"weightcast-{Path.cwd().stat().st_ino}-left"
    print("made", path, flush=True)
    with path.open("w") as file:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=file)


def test_a_program_that_ends_instead_of_getting_ready_is_told_with_its_last_words():
    program = OwnProcess([sys.executable, "-c", "raise SystemExit('no such model')"], {})

    with pytest.raises(AssertionError, match=r"ended with 1\.(.|\s)*no such model"):
        program.wait_for(lambda: False, "an answer", 60)

    assert program.end() == []
    assert "no such model" in program.said()
    assert not program.log.exists()
