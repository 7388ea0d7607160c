"""What the demo shows and sums up, its transports, and its check of every bit against a rank that lies."""

import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from rich.console import Console

from weightcast.cli.main import main
from weightcast.demo.check import compare
from weightcast.demo.engine_client import Choice, EngineClient, TokenLogprobs, VersionSpan
from weightcast.demo.plot import draw
from weightcast.demo.records import Committed, Finished, Happened, Recovery, RunSettings, Started, Step
from weightcast.demo.rollouts import _check
from weightcast.demo.sources import TRANSPORTS, open_source
from weightcast.demo.summary import facts, summarize
from weightcast.demo.view import Lines, LiveView, graph, shown
from weightcast.errors import MissingExtra, ReplicaFailed
from weightcast.tensors.bridges import host_array
from weightcast.tensors.digest import array_digest


def committed(number, kind="delta", pause_s=0.002):
    return Committed(f"step_{number}", kind, kind, 1000 if kind == "delta" else 8000, 0.1, 0.01, 0.02, pause_s, 0.03)


def made_run(rewards, *, kill_at=2):
    started = Started("http://h:1", "http://h:2", 4000, 8000, committed(0, "full"), 5.0)
    steps = [
        Step(number, reward, "ba\x01", 100, 9.0 if number == kill_at else 0.5, 0.1, 0.01, committed(number))
        for number, reward in enumerate(rewards, start=1)
    ]
    recovery = Recovery(kill_at, 1, 77, "step_1", 8, 3, 48, 2.5)
    return started, steps, Finished("step_8", "xxh3-128:00", 2, 4, [], recovery, 30.0)


def test_a_summary_compares_the_means_of_both_ends_and_leaves_the_kill_out_of_the_rate():
    started, steps, finished = made_run([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    found = summarize(started, steps, finished)
    assert (found.window, found.versions, found.full_versions, found.delta_versions) == (2, 9, 1, 8)
    assert (found.first_reward, found.last_reward) == (pytest.approx(0.15), pytest.approx(0.75))
    assert found.tokens_per_s == pytest.approx(200)
    assert found.learned
    assert found.equal
    told = dict(facts(found))
    assert "3 of 8 requests lost (48 answers)" in told["kill"]
    assert "5.0 times" in told["reward"]
    assert not summarize(started, made_run([0.4] * 8)[1], finished).learned


def test_a_graph_has_a_column_per_value_from_empty_to_full():
    drawn = graph([0.0, 0.5, 1.0], rows=2).splitlines()
    assert drawn == ["1.0 │  █", "0.0 │ ██"]
    assert shown("a\x00b\ufffdc") == "a·b·c"


def test_a_run_is_shown_line_by_line_and_as_a_picture():
    started, steps, finished = made_run([0.1, 0.2])
    told = [started, steps[0], Happened(2, "rank 1 (pid 77) killed", 9.0), steps[1], finished]
    plain, live = (Console(record=True, width=150, file=io.StringIO(), force_terminal=forced) for forced in (False, True))
    for view in (Lines(plain), LiveView(live, RunSettings(Path("out"), steps=2))):
        with view:
            for one in told:
                view.show(one)
    lines = plain.export_text().splitlines()
    assert len(lines) == 4
    assert "reward 0.200  step_2    delta" in lines[3]
    picture = live.export_text()
    for part in ("step 2 of 2", "killed", "density", "12.5%", "1.0 │"):
        assert part in picture


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "nixl"])
def test_every_transport_publishes_the_first_version_full_and_says_what_the_next_costs(transport, tmp_path, root):
    root.mkdir()
    tensors = {"w": torch.zeros(64, 256, dtype=torch.bfloat16)}
    with open_source(transport, root) as source:
        first = source.publish("step_0", tensors)
        tensors["w"][3, 5] = 1
        second = source.publish("step_1", tensors)
        assert source.url.startswith(f"{transport}://")
    assert (first.kind, first.nbytes, first.full_nbytes) == ("full", 2 * 64 * 256, 2 * 64 * 256)
    assert second.kind == "delta"
    assert second.nbytes < first.nbytes / 10


def test_answers_by_another_version_or_of_another_length_are_refused():
    def answer(*spans, tokens=4):
        logprobs = TokenLogprobs([0.0] * tokens)
        return Choice(0, "", [1] * tokens, logprobs, [VersionSpan(*span) for span in spans])

    good = answer((0, 4, "step_1"))
    _check([good, good], "step_1", answers=2, tokens=4)
    for wrong in (answer((0, 4, "step_0")), answer((0, 2, "step_0"), (2, 4, "step_1")), answer((0, 4, "step_1"), tokens=3)):
        with pytest.raises(ReplicaFailed):
            _check([good, wrong], "step_1", answers=2, tokens=4)
    with pytest.raises(ReplicaFailed):
        _check([good], "step_1", answers=2, tokens=4)


@pytest.fixture
def engine_that_says():
    """A server that answers every call with what it was given last."""
    said = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield said, EngineClient(f"http://127.0.0.1:{server.server_port}", model="policy")
        server.shutdown()
        thread.join()


def test_weights_are_equal_only_if_every_box_of_every_rank_is(engine_that_says):
    said, engine = engine_that_says
    tensors = {"w": torch.arange(8, dtype=torch.bfloat16).view(2, 4), "n": torch.ones(3, dtype=torch.bfloat16)}

    def box(name, start, shape, tensor=None):
        whole = host_array(name, tensors[name] if tensor is None else tensor)
        part = whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
        return {"parameter": "p", "box": {"start": start, "shape": shape}, "digest": array_digest(part)}

    def ranks(*second, version="step_9"):
        norm = [box("n", [0], [3])]
        digests = [{"w": [box("w", [0, 0], [2, 2])], "n": norm}, {"w": list(second), "n": norm}]
        return [{"rank": rank, "version": version, "digests": one} for rank, one in enumerate(digests)]

    right, wrong = box("w", [0, 2], [2, 2]), tensors["w"].clone()
    wrong[1, 3] += 1
    said["result"] = ranks(right)
    found = compare(engine, "step_9", tensors)
    assert (found.problems, found.boxes, found.tensors) == ([], 4, 2)
    for lie, problem in (
        (ranks(box("w", [0, 2], [2, 2], wrong)), "w: rank 1 holds other bytes"),
        (ranks(), "w: the ranks do not hold all of it"),
        (ranks(right, version="step_8"), "rank 0 holds step_8"),
    ):
        said["result"] = lie
        assert compare(engine, "step_9", tensors).problems[0].startswith(problem)


def test_a_plot_is_a_png_and_needs_its_extra(tmp_path, monkeypatch):
    _, steps, finished = made_run([0.1, 0.2, 0.3])
    draw(tmp_path / "plot.png", steps, finished.recovery, title="t")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install 'weightcast\[demo\]'"):
        draw(tmp_path / "other.png", steps, None, title="t")


def test_a_run_that_cannot_begin_says_which_extra_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'weightcast[demo]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
