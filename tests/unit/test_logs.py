"""Log lines: one event, one line, its ids, and never the contents of a tensor."""

import ast
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import weightcast
from weightcast import DepotPublisher, LiveModel, Publisher, Shard, logs
from weightcast.cli.main import main

SRC = Path(weightcast.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "logging.md"
EVIL = 'two\nlines\r\x85\u2028\u2029\x0b\x1b[31m\x00 and "quotes"'
LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR", "at": "varies"}

log = logs.get("weightcast.engines.test")


@pytest.fixture
def written():
    """Configure as a program does, and give what is written; afterwards all is as before."""
    root, stream = logging.getLogger(), io.StringIO()
    level, hooks = root.level, (sys.excepthook, threading.excepthook)

    def configure(**options):
        logs.configure(options.pop("level", logging.DEBUG), stream=stream, **options)
        return stream

    yield configure
    for handler in [one for one in root.handlers if isinstance(one, logs.Handler)]:
        root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks


def lines(stream):
    text = stream.getvalue()
    assert text.endswith("\n")
    assert len(text.splitlines()) == text.count("\n")  # nothing else that any reader takes for the end of a line
    return text.splitlines()


def objects(stream):
    return [json.loads(line) for line in lines(stream)]


# -- the two forms -------------------------------------------------------------------------------------------------------


def test_a_line_for_people(written):
    stream = written()
    with logs.bound(request_id="r-1", update_id="u-7"):
        log.info("update committed", version="step_4", pause_ms=3.1, nbytes=0, wide=True, base=None, pids=[1, 2])
    (line,) = lines(stream)
    clock, rest = line.split(" ", 1)
    assert len(clock) == len("19:24:51.123")
    assert rest == (
        "INFO  engines.test  update committed  request=r-1 update=u-7 version=step_4 pause_ms=3.1 nbytes=0 wide=yes "
        "base=none pids=[1,2]"
    )


def test_a_line_for_programs(written):
    stream = written(as_json=True, always={"rank": 1})
    with logs.bound(request_id="r-1"):
        log.warning("update failed", version="step_4", ms=2.5, tags=["a", "b"], level=3)
    (line,) = objects(stream)
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "WARNING", "logger": "weightcast.engines.test", "event": "update failed", "rank": 1, "request_id": "r-1",
        "version": "step_4", "ms": 2.5, "tags": ["a", "b"], "level_": 3,
    }  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
def test_whatever_is_in_it_an_event_is_one_line(written, as_json):
    stream = written(as_json=as_json)
    with logs.bound(request_id=EVIL):
        log.info(EVIL, words=EVIL, several=[EVIL, EVIL], error=ValueError(EVIL))
        logging.getLogger("another.library").warning("%s", EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError:
            log.exception("broke")
    assert len(lines(stream)) == 3
    if as_json:
        first, _, last = objects(stream)
        assert first["words"] == EVIL
        assert last["exception"].startswith("Traceback")
        assert "test_logs.py" in last["exception"]


@pytest.mark.parametrize("formatter", [logs.HumanFormatter(), logs.JsonFormatter()])
def test_a_character_that_cannot_be_encoded_does_not_lose_the_line(formatter):
    record = logging.makeLogRecord({"name": "weightcast.test", "msg": logs.Event("seen", {"name": "half \ud800"})})
    assert "\\ud800" in formatter.format(record).encode("utf-8").decode()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_is_a_field_of_its_line(written, as_json):
    stream = written(as_json=as_json)
    log.error("crashed", trace=KeyError("lost"), version="v")
    (line,) = lines(stream)
    assert "KeyError: 'lost'" in line


def test_of_an_error_that_lists_many_things_a_line_has_the_first_line_and_how_many_follow(written):
    stream = written(as_json=True)
    log.warning("failed", error=ValueError("3 tensors differ:\n  a\n  b\n  c"), other=ValueError("one line"))
    (line,) = objects(stream)
    assert (line["error"], line["other"]) == ("3 tensors differ: (and 3 more lines)", "one line")


PROGRAM = (
    "import logging\nfrom weightcast import delta, logs\nlogs.configure(logging.DEBUG)\ndelta.warm_up()\ndelta.warm_up()"
)


def said_of_kernels(**environ):
    command, environ = [sys.executable, "-c", PROGRAM], {**os.environ, **environ}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environ)
    return re.findall(r"kernels (?:compiled|loaded)", done.stderr)


@pytest.mark.timeout(400)
def test_kernels_that_are_loaded_are_not_said_to_be_compiled():
    said_of_kernels()
    assert said_of_kernels() == ["kernels loaded"]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_kernels_that_are_compiled_are_said_to_be_once(tmp_path):
    assert said_of_kernels(NUMBA_CACHE_DIR=str(tmp_path)) == ["kernels compiled"]
    assert said_of_kernels(NUMBA_CACHE_DIR=str(tmp_path)) == ["kernels loaded"]


def test_numbers_that_json_has_not_become_words(written):
    stream = written(as_json=True)
    log.info("measured", one=float("nan"), more=[float("inf"), 1.0])
    (line,) = objects(stream)
    assert (line["one"], line["more"]) == ("nan", ["inf", 1.0])


# -- never a tensor -------------------------------------------------------------------------------------------------------


class Sizeless:
    def __len__(self):
        raise ZeroDivisionError

    def __repr__(self):
        return "777.125"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.full(4096, 777.125), "<ndarray 4096>"),
        (np.float32(777.125), "<float32 1>"),
        (b"777.125" * 100, "<bytes 700>"),
        (memoryview(b"777.125"), "<memoryview 7>"),
        ({"777.125": 777.125}, "<dict 1>"),
        ([777.125] * 17, "<list 17>"),
        ([np.full(3, 777.125)], ["<ndarray 3>"]),
        (iter([777.125]), "<list_iterator>"),
        (Sizeless(), "<Sizeless>"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_only_the_type_and_size_of_what_is_no_scalar_is_told(written, value, said, as_json):
    stream = written(as_json=as_json)
    log.info("seen", value=value)
    assert "777.125" not in stream.getvalue()
    if as_json:
        assert objects(stream)[0]["value"] == said


def test_a_torch_tensor_is_not_looked_into(written):
    torch = pytest.importorskip("torch")
    stream = written(as_json=True)
    log.info("seen", value=torch.full((2, 3), 777.125), parameter=torch.nn.Parameter(torch.full((5,), 777.125)))
    (line,) = objects(stream)
    assert (line["value"], line["parameter"]) == ("<Tensor 6>", "<Parameter 5>")


def test_the_record_that_other_handlers_get_holds_no_tensor_either(caplog):
    caplog.set_level(logging.INFO, "weightcast.engines.test")
    log.info("seen", value=np.full(8, 777.125))
    assert caplog.records[0].msg.fields == {"value": "<ndarray 8>"}
    assert caplog.records[0].getMessage() == 'seen  value="<ndarray 8>"'


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("word", ["x", "\n", "\u2028", '"'])
def test_a_line_is_never_longer_than_a_pipe_takes_whole(written, as_json, word):
    stream = written(as_json=as_json, always={"rank": 1})
    with logs.bound(request_id="r" * 256, update_id="u" * 256):
        log.info(word * 9000, one=word * 9000, two=word * 9000, several=[word * 9000] * 16)
        log.error("crashed", trace=ValueError(word * 20_000 + "the end"), error=word * 9000)
        log.info("wide", **{f"field_{number}": word * 9000 for number in range(200)})
    assert max(len(line.encode()) for line in lines(stream)) < 4096
    assert "the end" in lines(stream)[1]
    assert "r" * 20 in lines(stream)[2]
    if as_json:
        assert [line["rank"] for line in objects(stream)] == [1, 1, 1]


def test_long_words_are_cut(written):
    stream = written(as_json=True)
    log.info("said", words="x" * 100_000)
    (line,) = objects(stream)
    assert len(line["words"]) < 5000
    assert line["words"].endswith("(100000 characters)")


# -- ids ------------------------------------------------------------------------------------------------------------------


def test_ids_add_up_inside_and_are_gone_outside():
    with logs.bound(request_id="r", update_id=None):
        with logs.bound(update_id="u", request_id=""):
            assert logs.ids() == {"request_id": "r", "update_id": "u"}
        assert logs.ids() == {"request_id": "r"}
    assert logs.ids() == {}


def test_lines_of_other_libraries_carry_ids_too(written):
    stream = written(as_json=True)
    with logs.bound(update_id="u-1"):
        logging.getLogger("another.library").warning("lost %d", 3)
    (line,) = objects(stream)
    assert (line["event"], line["update_id"]) == ("lost 3", "u-1")


def test_a_thread_has_the_ids_of_whoever_started_it_if_they_are_carried():
    seen = {}

    def look(name):
        seen[name] = logs.ids()

    with logs.bound(request_id="r-1"):
        threads = [
            threading.Thread(target=look, args=("plain",)),
            threading.Thread(target=logs.carried(look), args=("carried",)),
        ]
        look_up = logs.carried(lambda _: logs.ids())
    for thread in threads:
        thread.start()
        thread.join(10)
    assert seen == {"plain": {}, "carried": {"request_id": "r-1"}}
    with ThreadPoolExecutor(4) as pool:  # one carried function in many threads at once
        assert list(pool.map(look_up, range(20))) == [{"request_id": "r-1"}] * 20


@pytest.mark.parametrize("text", ["a\r\nX-Evil: 1", "é", "x" * 300, "tab\t"])
def test_an_id_can_always_go_into_a_header(text):
    with logs.bound(request_id=text):
        assert logs.usable_id(logs.ids()["request_id"])


def test_an_update_that_has_an_id_keeps_it():
    with logs.updating():
        made = logs.ids()["update_id"]
        with logs.updating("mirror"):
            assert logs.ids()["update_id"] == made
    with logs.updating("mirror"):
        assert logs.ids()["update_id"].startswith("mirror-")


def test_a_publisher_logs_the_ids_of_those_that_read(caplog):
    caplog.set_level(logging.INFO, "weightcast")
    with tempfile.TemporaryDirectory(prefix="wc-") as directory, Publisher(Path(directory) / "p") as publisher:
        publisher.publish("step_1", {"w": np.ones(8)})
        with LiveModel({"w": np.zeros(8)}) as model, logs.bound(request_id="r-1"):
            model.update(source=publisher.url)
    said = {record.msg.name: record.msg.fields for record in caplog.records if record.name.startswith("weightcast.")}
    assert said["transfer begun"]["request_id"] == "r-1"
    assert said["transfer begun"]["update_id"] == said["model updated"]["update_id"]


def test_every_publisher_of_a_share_logs_the_ids_of_those_that_fetch(caplog):
    caplog.set_level(logging.DEBUG, "weightcast.depot.connection")
    whole = np.arange(8, dtype=np.float32)
    with DepotPublisher("127.0.0.1:0", rank=0, ranks=2) as first, DepotPublisher("127.0.0.1:0", rank=1, ranks=2) as second:
        first.publish("step_1", {"w": Shard(whole[:4], (8,), (0,))})
        second.publish("step_1", {"w": Shard(whole[4:], (8,), (4,))})
        hosts = ",".join(one.url.removeprefix("http://") for one in (first, second))
        with LiveModel({"w": np.zeros(8, np.float32)}) as model, logs.bound(request_id="r-1"):
            model.update(source=f"shares+http://{hosts}")
    asked = [record.msg for record in caplog.records if record.msg.name == "request answered"]
    assert sum("/share-0000" in one.fields["path"] for one in asked) == 2
    assert {one.fields.get("request_id") for one in asked} == {"r-1"}
    assert len({one.fields.get("update_id") for one in asked}) == 1


# -- configuring -----------------------------------------------------------------------------------------------------------


def test_configuring_again_replaces_what_was(written):
    written(), written(as_json=True)
    stream = written(as_json=True)
    log.info("once")
    assert [line["event"] for line in objects(stream)] == ["once"]
    assert logs.as_json()


def test_levels_are_kept_and_other_libraries_are_heard_from_warning_on(written):
    stream = written(level=logging.INFO, as_json=True)
    log.debug("detail")
    log.info("news")
    logging.getLogger("another.library").info("chat")
    logging.getLogger("weightcaster").info("not ours")
    assert [line["event"] for line in objects(stream)] == ["news"]


def test_importing_configures_nothing():
    program = (
        "import logging, weightcast, weightcast.store.store, weightcast.publish, weightcast.worker.live_model\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('weightcast').handlers\n"
        "assert logging.getLogger('weightcast').level == logging.NOTSET and logging.getLogger().level == logging.WARNING\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_that_nobody_catches_is_a_line_as_well():
    program = (
        "import threading, warnings\nfrom weightcast import logs\n"
        "logs.configure(20, as_json=True)\nwarnings.warn('old\\nhabit')\n"
        "thread = threading.Thread(target=lambda: 1 / 0, name='worker')\nthread.start()\nthread.join()\n"
        "raise OSError('gone')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    warned, thread, crash = map(json.loads, done.stderr.splitlines())
    assert "old\nhabit" in warned["event"]
    assert (thread["event"], thread["thread"]) == ("thread crashed", "worker")
    assert (crash["event"], crash["error"], done.returncode) == ("program crashed", "OSError: gone", 1)


# -- the sources and the page -----------------------------------------------------------------------------------------------


@cache
def calls():
    """Every event in the sources: its name, its levels, its fields and the rooms it comes from; and what is no event."""
    found: dict[str, tuple[set[str], dict[str, None], set[str]]] = {}
    wrong = []
    for path in sorted(SRC.rglob("*.py")):
        place, text = str(path.relative_to(SRC)), path.read_text()
        if not re.search(r"\blog\.|\bget\(ROOT\)|getLogger|basicConfig", text):
            continue  # parsing all of them takes seconds
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            method = node.func.attr
            if method in ("getLogger", "basicConfig") and place != "logs.py":
                wrong.append(f"{place}:{node.lineno} uses logging.{method}")
            if method not in LEVELS or ast.unparse(node.func.value) not in ("log", "get(ROOT)"):
                continue
            event = node.args[method == "at"] if len(node.args) == 1 + (method == "at") else None
            if not (isinstance(event, ast.Constant) and isinstance(event.value, str)):
                wrong.append(f"{place}:{node.lineno} logs something that is no plain event")
                continue
            levels, fields, rooms = found.setdefault(event.value, (set(), {}, set()))
            levels.add(LEVELS[method])
            rooms.add(place.removesuffix(".py").split("/")[0])
            for keyword in node.keywords:
                if keyword.arg is None or keyword.arg in logs.CORE:
                    wrong.append(f"{place}:{node.lineno} has a field {keyword.arg}")
                elif keyword.arg != "trace":
                    fields[keyword.arg] = None
    return found, wrong


def test_the_sources_log_events_and_nothing_else():
    found, wrong = calls()
    assert not wrong
    assert len(found) > 100


def test_the_page_lists_every_event_with_its_level_and_fields():
    order = ("DEBUG", "INFO", "WARNING", "ERROR", "varies")
    wanted = [
        f"| {name} | {', '.join(sorted(levels, key=order.index))} | {', '.join(fields)} | {', '.join(sorted(rooms))} |"
        for name, (levels, fields, rooms) in sorted(calls()[0].items())
    ]
    page = PAGE.read_text().partition("<!-- events -->")[2]
    listed = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| event ")]
    assert listed == wanted, "docs/logging.md lists other events than there are"


NO_TOKEN = ("--listen", "127.0.0.1:0", "--store", "none", "--token-file")  # a store may come later, a token must be there


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (("store", "ls"), logging.WARNING), (("-q", "store", "ls"), logging.ERROR), (("-v", "store", "ls"), logging.INFO),
        (("-vvv", "store", "ls"), logging.DEBUG), (("depot", *NO_TOKEN), logging.INFO),
        (("-q", "depot", *NO_TOKEN), logging.WARNING), (("-v", "depot", *NO_TOKEN), logging.DEBUG),
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_says_from_which_level_on_and_a_failure_is_a_line_in_json(
    written, capsys, tmp_path, arguments, level, as_json
):
    written()  # what it changes is put back
    form = ("--log-format", "json") if as_json else ()
    assert main([*form, *arguments, str(tmp_path / "none")]) == 2
    assert logging.getLogger().level == level
    said = capsys.readouterr().err
    if as_json:
        assert json.loads(said)["code"] == ("invalid_input" if "depot" in arguments else "store_not_found")
    else:
        assert said.startswith("error: ")
