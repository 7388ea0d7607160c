"""Which sources a caller may name: decided on the parsed and resolved URL, before anything is opened."""

import inspect
import re

import pytest

from weightcast.errors import InvalidInput, SourceNotAllowed
from weightcast.transports import allowed, registry
from weightcast.transports.allowed import OPERATOR_OPTIONS, AllowedSources
from weightcast.transports.http.options import KNOWN as HTTP_OPTIONS
from weightcast.transports.http.shares import OPTIONS as SHARES_OPTIONS
from weightcast.transports.nixl.options import KNOWN as NIXL_OPTIONS


def resolve(named, *rules):
    return AllowedSources(rules, cure="ask").resolve(named)


@pytest.mark.parametrize(
    ("rule", "named", "opened"),
    [
        ("http://depot:8300", "http://depot:8300", "http://depot:8300"),
        ("http://depot:8300", "HTTP://DEPOT.:8300/", "http://depot:8300"),
        ("http://depot", "http://depot:80", "http://depot:80"),
        ("http://depot:8300?token_file=/t", "http://depot:8300", "http://depot:8300?token_file=/t"),
        ("http://depot:8300?token_file=/t", "http://depot:8300?stall_s=3", "http://depot:8300?token_file=/t&stall_s=3"),
        ("http://depot:8300?stall_s=9", "http://depot:8300?stall_s=3", "http://depot:8300?stall_s=3"),
        ("http://depot:*", "http://depot:41234", "http://depot:41234"),
        ("http://depot:1/base/*", "http://depot:1/base/a%62", "http://depot:1/base/ab"),
        ("http://[::1]:8300", "http://[0:0::1]:8300", "http://[::1]:8300"),
        ("http://a:1,b:2", "http://b:2", "http://b:2"),
        ("shares+http://a:1,b:2", "shares+http://a:1,b:2", "shares+http://a:1,b:2"),
        ("nixl://depot:8300", "nixl://depot:8300?mode=gdr", "nixl://depot:8300?mode=gdr"),
        ("/mnt/weights", "file:///mnt/weights", "file:///mnt/weights"),
        ("file:///mnt/weights", "/mnt/x/../weights/", "file:///mnt/weights"),
        ("file:///mnt/weights/*", "/mnt/weights/run/1", "file:///mnt/weights/run/1"),
        ("file:///mnt/weights/*", "file://localhost/mnt/weights/a%20b", "file:///mnt/weights/a%20b"),
        ("ipc:///dev/shm/*", "ipc:///dev/shm/run", "ipc:///dev/shm/run"),
        ("snapshot:///mnt/old?id=0", "snapshot:///mnt/old", "snapshot:///mnt/old?id=0"),
        ("file:///*", "/mnt", "file:///mnt"),
    ],
)
def test_what_a_rule_allows_is_opened_with_the_options_of_the_rule(rule, named, opened):
    assert resolve(named, rule) == opened


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("http://depot:8300", "https://depot:8300"),
        ("https://depot:8300", "http://depot:8300"),
        ("http://depot:8300", "nixl://depot:8300"),
        ("http://depot:8300", "shares+http://depot:8300"),
        ("http://depot:8300", "http://depot:8301"),
        ("http://depot:8300", "http://depot"),
        ("http://depot:8300", "http://depot.evil.example:8300"),
        ("http://depot:8300", "http://evil@depot:8300"),
        ("http://depot:8300", "http://depot:8300@evil.example"),
        ("http://depot:8300", "http://evil.example/@depot:8300"),
        ("http://depot:8300", "http://depot:8300,evil.example:80"),
        ("http://depot:8300", "http://depot:8300/other"),
        ("http://depot:8300", "http://depot:8300#part"),
        ("http://depot:8300", "http://depot:8300\\@evil.example"),
        ("http://depot:8300", "http://depot\t:8300"),
        ("http://depot:8300", "http://de%70ot:8300"),
        ("http://depot:8300", "http://[::1"),
        ("http://depot:8300", "http://"),
        ("http://depot:8300", "http://depot:99999999"),
        ("http://depot:*", "http://depot:*"),
        ("http://depot:1/base/*", "http://depot:1/base/../other"),
        ("http://depot:1/base/*", "http://depot:1/base/%2e%2e/other"),
        ("http://depot:1/base/*", "http://depot:1/base/%252e%252e/other"),
        ("http://depot:1/base/*", "http://depot:1/base"),
        ("http://127.0.0.1:1", "http://2130706433:1"),
        ("http://127.0.0.1:1", "http://0x7f.1:1"),
        ("file:///mnt/weights", "file:///mnt/weights/sub"),
        ("file:///mnt/weights", "checkpoint:///mnt/weights"),
        ("file:///mnt/weights/*", "file:///mnt/weights"),
        ("file:///mnt/weights/*", "file:///mnt/weights/../secret"),
        ("file:///mnt/weights/*", "file:///mnt/weights/%2e%2e/secret"),
        ("file:///mnt/weights/*", "file:///mnt/weights-of-others/x"),
        ("file:///mnt/weights/*", "/mnt/weights/../secret"),
        ("file:///mnt/weights/*", "file://host/mnt/weights/x"),
        ("file:///mnt/weights/*", "file:///mnt/weights/a%00b"),
        ("file:///mnt/weights/*", "/mnt/weights/\0"),
        ("file:///mnt/weights/*", ""),
        ("file:///mnt/weights/*", "/mnt/weights/\udc80"),
        ("file:///mnt/weights/*", "file:///mnt/weights/\ud800"),
        ("file:///mnt/weights/*", "s3://bucket/mnt/weights/x"),
    ],
)
def test_what_no_rule_allows_is_refused(rule, named):
    with pytest.raises(SourceNotAllowed, match=r"refused.*Nothing was opened\. To allow a source, ask"):
        resolve(named, rule)


def test_without_rules_a_caller_may_name_nothing():
    with pytest.raises(SourceNotAllowed):
        resolve("file:///mnt/weights")


def test_a_link_leads_only_where_its_target_may_be_named(tmp_path):
    for name in ("allowed", "private", "real"):
        (tmp_path / name / "run").mkdir(parents=True)
    (tmp_path / "allowed" / "out").symlink_to(tmp_path / "private")
    (tmp_path / "allowed" / "within").symlink_to(tmp_path / "allowed" / "run")
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    rules = (f"{tmp_path}/allowed/*", f"file://{tmp_path}/alias/*")

    for path in ("allowed/out", "allowed/out/run", "allowed/within/../../private", "allowed/out/../private/run"):
        with pytest.raises(SourceNotAllowed):
            resolve(f"{tmp_path}/{path}", *rules)
    assert resolve(f"{tmp_path}/allowed/within", *rules) == f"file://{tmp_path}/allowed/run"
    assert resolve(f"{tmp_path}/alias/run", *rules) == f"file://{tmp_path}/real/run"


@pytest.mark.parametrize("number", ["65", "-1", "x", "1e3", "9" * 5000])
def test_a_request_may_not_ask_for_more_connections_or_memory_than_its_limit(number):
    with pytest.raises(SourceNotAllowed, match="may set connections up to 64") as refused:
        resolve(f"http://depot:1?connections={number}", "http://depot:1")
    assert len(str(refused.value)) < 600
    with pytest.raises(SourceNotAllowed, match="bucket_nbytes"):
        resolve(f"nixl://depot:1?bucket_nbytes={(1 << 30) + 1}", "nixl://depot:1")
    assert resolve("http://depot:1?connections=64", "http://depot:1?connections=200") == "http://depot:1?connections=64"
    assert resolve("http://depot:1", "http://depot:1?connections=200") == "http://depot:1?connections=200"


@pytest.mark.parametrize("option", sorted(OPERATOR_OPTIONS))
def test_an_option_of_the_operator_is_refused_even_for_an_allowed_source(option):
    with pytest.raises(SourceNotAllowed, match=f"must not set {option}") as refused:
        resolve(f"nixl://depot:1?mode=gdr&{option}=/etc/passwd", f"nixl://depot:1?{option}=/etc/passwd")
    assert "passwd" not in str(refused.value)


def test_every_option_that_names_a_file_or_a_user_is_the_operators():
    known = set(HTTP_OPTIONS) | set(SHARES_OPTIONS) | set(NIXL_OPTIONS)
    known |= set(re.findall(r'"(\w+)"', " ".join(re.findall(r"known=(\{.*?\})", inspect.getsource(registry)))))
    assert {"token_file", "id", "device", "shared_dir"} <= known, "the table of transports is written in another way now"
    assert {name for name in known if name.endswith(("_file", "_dir", "_path", "_cert", "_key"))} | {
        "tls",
        "uid",
        "nic",
    } == OPERATOR_OPTIONS


def test_every_transport_is_known():
    assert {*allowed.LOCAL_SCHEMES, *allowed.DEFAULT_PORTS} == set(registry._SCHEMES)


def test_several_depots_go_together_if_one_set_of_options_is_theirs():
    rules = ("http://a:1", "http://b:1", "http://c:1?token_file=/t")

    assert resolve("http://a:1,b:1", *rules) == "http://a:1,b:1"
    with pytest.raises(SourceNotAllowed):
        resolve("http://a:1,c:1", *rules)


@pytest.mark.parametrize("rule", ["s3://bucket/*", "http://user@host:1", "file://host/path", "http://", "http://[::1"])
def test_a_rule_that_cannot_be_read_is_refused(rule):
    with pytest.raises(InvalidInput, match="is not a source"):
        AllowedSources([rule], cure="ask")
