"""Pages that list something list all of it: commands, paths, fields of bodies, metrics, errors, the public names."""

import importlib.util
import re

import pytest
from control_engine import serving, write_model_dir
from test_layers import ROOMS, SRC

from documents import ROOT
from weightcast import DepotPublisher, errors
from weightcast.control.legacy_routes import LEGACY_ROUTES
from weightcast.control.pause_routes import PAUSE_ROUTES
from weightcast.control.schemas import ChatRequest, CompletionRequest
from weightcast.control.statuses import status_of
from weightcast.control.weights_routes import WEIGHTS_ROUTES
from weightcast.depot.replies import _STATUSES

HTTP = (ROOT / "docs" / "http.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(write_model_dir(tmp_path_factory.mktemp("docs") / "model")) as running:
        yield running


def rows(text):
    """The calls that a page lists, each with the rest of its row."""
    found = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            first, _, rest = line[2:].partition(" | ")
            found |= dict.fromkeys(re.findall(r"`((?:GET|POST|DELETE) [^`]+)`", first), rest)
    return found


def sections():
    engine, depot = HTTP.split("\n## A depot\n")
    return rows(engine), rows(depot)


def test_every_path_of_the_server_is_listed_and_no_other(server):
    described = server.http.get("/openapi.json").json()["paths"]
    there = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    there = {re.sub(r":path}", "}", call) for call in there}
    assert set(sections()[0]) == there
    assert "GET /openapi.json" in HTTP


@pytest.mark.parametrize(
    "route", [*WEIGHTS_ROUTES, *PAUSE_ROUTES, *LEGACY_ROUTES], ids=lambda one: f"{one.method} {one.path}"
)
def test_every_field_of_a_control_call_is_listed_with_its_default(route):
    row = sections()[0][f"{route.method} {route.path}"]
    if "as `update_weights`" in row:
        return
    for name, field in route.body.model_fields.items():
        assert f"`{name}`" in row
        if isinstance(field.default, float):
            assert f"`{name}` ({field.default:g})" in row
    for name in route.query:
        assert f"?{name}=" in row


def test_every_field_of_a_request_is_listed():
    answers = HTTP.partition("### Answers")[2].partition("### Reports")[0]
    named = set(re.findall(r"`(\w+)`", answers))
    ignored = {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
    known = (set(CompletionRequest.model_fields) | set(ChatRequest.model_fields)) - ignored
    assert known - named == set()


def test_every_path_of_a_depot_is_listed_and_no_other():
    with DepotPublisher("127.0.0.1:0", nixl=True) as publisher:
        table = publisher._depot._hall._service.routes._routes
    there = {f"{method} /{'/'.join(pattern)}" for pattern, handlers in table.items() for method in handlers}
    assert set(sections()[1]) == there
    told = set(re.findall(r"\b[2-5]\d\d\b", HTTP.partition("\n## A depot\n")[2]))
    assert {str(status) for _, status in _STATUSES} <= told


def test_the_protocol_of_the_depot_tells_every_path_but_those_of_nixl():
    page = (ROOT / "docs" / "depot.md").read_text()
    for call in sections()[1]:
        method, path = call.split()
        spelled = path.replace("{version}", "V").replace("{file}", "F")
        assert "nixl" in path or re.search(rf"`{method}(`, `HEAD)? {re.escape(spelled)}[`?]", page), call


def test_every_metric_is_listed_and_no_other(server):
    text = server.http.get("/metrics").text
    there = set(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    table = OPERATIONS.partition("## Metrics")[2].partition("```yaml")[0]
    told = set()
    for line in table.splitlines():
        if line.startswith("| `weightcast_"):
            names, kind = line.split(" | ")[:2]
            told |= {(name, kind.strip()) for name in re.findall(r"`(\w+)`", names)}
    assert told == there


def test_every_metric_that_an_alert_asks_for_is_there(server):
    text = server.http.get("/metrics").text
    asked = set(re.findall(r"\b(weightcast_\w+)", OPERATIONS.partition("```yaml")[2].partition("```")[0]))
    assert asked
    for name in asked:
        assert f"# TYPE {name.removesuffix('_bucket')} " in text


def test_every_error_is_told_with_its_http_status_cause_and_cure():
    page = (ROOT / "docs" / "errors.md").read_text()
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.WeightcastError) and cls is not errors.WeightcastError:
            (row,) = [line for line in page.splitlines() if line.startswith(f"| `{cls.__name__}` ")]
            _, _, _, cause, cure, status, exit_status, _ = row.split("|")
            assert (status.strip(), exit_status.strip()) == (str(status_of(cls)), str(cls.exit_code)), cls
            assert len(cause.strip()) > 10, cls
            assert len(cure.strip()) > 10, cls


def test_every_test_that_the_page_about_security_names_is_there():
    page = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 10
    assert named <= there


def test_the_rooms_are_listed_in_their_order():
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn = page.partition("```text")[2].partition("```")[0]
    listed = [
        name.strip("/,") for line in re.findall(r"^(\w+(?:, \w+)?)/? +\S", drawn, re.MULTILINE) for name in line.split(", ")
    ]
    there = {path.name.removesuffix(".py") for path in SRC.iterdir() if not path.name.startswith(("_", "py.typed"))}
    assert set(listed) == there
    assert [ROOMS[name] for name in listed] == sorted(ROOMS[name] for name in listed)


@pytest.mark.parametrize("name", ["api_reference", "cli_reference"])
def test_the_generated_pages_are_up_to_date(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text() == tool.render(), "run `make docs`"
