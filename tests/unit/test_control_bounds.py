"""Bounds of what callers send and of what they are answered: keys, depth, values, problems, texts."""

import contextlib
import json
import random
import time

import pytest

from weightcast.control.control_routes import legacy_keys
from weightcast.control.fields import MAX_DEPTH, MAX_KEYS, MAX_VALUES, check_shape, decode_object
from weightcast.control.problems import LISTED, MESSAGE_LENGTH, Problems, clipped, mismatch_problems
from weightcast.errors import InvalidInput, Mismatch


def refused(body, words):
    with pytest.raises(InvalidInput, match=words):
        check_shape(body)


def nested(levels):
    return b'{"a":' * levels + b"0" + b"}" * levels


def with_keys(count, between=":"):
    return ("{" + ",".join(f'"k{number}"{between}0' for number in range(count)) + "}").encode()


def test_a_body_may_be_as_deep_as_it_says():
    check_shape(nested(MAX_DEPTH))
    refused(nested(MAX_DEPTH + 1), "levels deep")
    refused(b"[" * 1000, "levels deep")
    check_shape(b"[]" * 1000)  # not JSON, and not deep


@pytest.mark.parametrize("between", [":", " :", "\n\t : ", " " * 70_000 + ":"])
def test_an_object_may_have_as_many_keys_as_it_says(between):
    check_shape(with_keys(MAX_KEYS, between))
    refused(with_keys(MAX_KEYS + 1, between), "keys")


def test_the_keys_of_several_objects_are_counted_apart():
    check_shape(b'{"a":[' + b",".join([with_keys(MAX_KEYS)] * 50) + b"]}")
    refused(b'{"a":{"b":0},' + with_keys(MAX_KEYS)[1:], "keys")


@pytest.mark.parametrize("value", [b'"a"', b"[]", b"{}"])
def test_a_body_holds_as_many_values_as_it_says(value):
    check_shape(b"[" + b",".join([value] * (MAX_VALUES - 1)) + b"]")
    refused(b"[" + b",".join([value] * MAX_VALUES) + b"]", "strings, lists and objects")


def test_numbers_are_counted_by_the_size_of_the_body_alone():
    check_shape(b"[" + b"0," * (2 * MAX_VALUES) + b"0]")


@pytest.mark.parametrize("seed", range(50))
def test_what_stands_in_strings_gives_a_body_no_shape(seed):
    rng = random.Random(seed)
    pieces = ['"', "\\", "{", "[", "}", "]", ":", '":', "\n", "a" * 5000, "é", "\\\\", '\\"']
    text = "".join(rng.choices(pieces, k=rng.randrange(2000)))
    body = json.dumps({text: [text, {text: text}]}).encode()

    assert decode_object(body) == {text: [text, {text: text}]}
    room = MAX_DEPTH - 3
    check_shape(b'{"a":' * room + body + b"}" * room)
    refused(b'{"a":' * (room + 1) + body + b"}" * (room + 1), "levels deep")


@pytest.mark.parametrize(
    "body",
    [b'"' + b'\\"' * (1 << 20), b'"' + b"a" * (2 << 20), b'{"a"' + b" " * (2 << 20), b"0," * (1 << 20), b"[" * (2 << 20)],
)
def test_the_time_to_look_at_a_body_grows_with_its_size_alone(body):
    def seconds(part):
        began = time.perf_counter()
        with contextlib.suppress(InvalidInput):
            check_shape(part)
        return time.perf_counter() - began

    eighth = min(seconds(body[: len(body) // 8]) for _ in range(3))
    assert min(seconds(body) for _ in range(3)) < 8 * eighth * 4 + 0.05


def test_problems_are_listed_up_to_a_bound_and_the_others_counted():
    problems = Problems()
    for number in range(LISTED + 48):
        problems.add(f"k{number}", "unknown field")

    assert [one.param for one in problems.found][:LISTED] == [f"k{number}" for number in range(LISTED)]
    assert (problems.found[-1].param, problems.found[-1].message) == (None, "and 48 more")
    with pytest.raises(InvalidInput, match=rf"has {LISTED + 48} problems\. k0: unknown field; .*; and 48 more\.$"):
        problems.check()


def test_names_and_messages_of_problems_are_clipped():
    problems = Problems()
    problems.add("k" * (1 << 20), "m" * (1 << 20))

    assert len(problems.found[0].param) < 300
    assert len(problems.found[0].message) < 1100
    assert clipped("abc", 3) == "abc"
    assert clipped("abcdef", 3) == "abc… (3 more characters)"


def test_mismatches_are_listed_up_to_the_same_bound():
    listed = mismatch_problems([Mismatch("missing", f"layer.{number}", "not there") for number in range(801)])

    assert len(listed) == LISTED + 1
    assert listed[-1].message == f"and {801 - LISTED} more"


def test_the_message_of_a_legacy_reply_is_clipped_too():
    assert len(legacy_keys("m" * (1 << 20))["msg"]) < MESSAGE_LENGTH + 100
    assert legacy_keys("model weight is cleared")["msg"] == "model weight is cleared"
