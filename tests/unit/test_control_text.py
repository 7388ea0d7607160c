"""Tokens to text: characters and stop strings split over tokens, chat templates, and what a model directory says."""

import json
import re

import pytest
import tokenizers
from control_engine import write_model_dir
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from weightcast.control.chat_template import ChatTemplate
from weightcast.control.stop_strings import StopSearch
from weightcast.control.tokenizer import Tokenizer
from weightcast.engines.embedded.byte_tokenizer import CHAT_START_ID, EOS_ID, PAD_ID
from weightcast.errors import InvalidInput, NotFound

LETTERS = st.text(alphabet="abä", max_size=30)
STOPS = st.lists(st.text(alphabet="abä", min_size=1, max_size=5), max_size=4)


def search_whole(text, stops):
    """The definition: the stop string that ends first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(draw, text):
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@given(st.data(), LETTERS, STOPS)
def test_stop_strings_are_found_however_the_text_is_cut(data, text, stops):
    search = StopSearch(stops)
    shown = "".join(search.feed(chunk) for chunk in cut(data.draw, text))
    if search.found is None:
        shown += search.finish()

    assert (shown, search.found) == search_whole(text, stops)


@given(LETTERS, STOPS)
def test_only_text_that_may_still_become_a_stop_string_is_held_back(text, stops):
    search, shown = StopSearch(stops), ""
    for number, character in enumerate(text, start=1):
        shown += search.feed(character)
        if search.found is not None:
            return
        held = text[len(shown) : number]
        assert text[:number] == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.fixture
def byte_level(tmp_path):
    return Tokenizer.read(write_model_dir(tmp_path / "model"))


def text_of(tokenizer, tokens):
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.feed(token) for token in tokens]
    return [*pieces, detokenizer.finish()]


def test_half_a_character_never_comes_out(byte_level):
    pieces = text_of(byte_level, "aé中🎉z".encode())

    assert pieces == ["a", "", "é", "", "", "中", "", "", "", "🎉", "z", ""]


def test_what_is_left_of_a_character_at_the_end_is_replaced(byte_level):
    assert text_of(byte_level, "中".encode()[:2]) == ["", "", "\N{REPLACEMENT CHARACTER}"]


@given(st.binary(max_size=24))
def test_any_bytes_become_the_text_that_the_tokenizer_makes_of_them_all(byte_level_once, data):
    rust, tokenizer = byte_level_once

    assert "".join(text_of(tokenizer, data)) == rust.decode(list(data)) == tokenizer.decode(data)


@pytest.fixture(scope="module")
def byte_level_once(tmp_path_factory):
    path = write_model_dir(tmp_path_factory.mktemp("model"))
    return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")), Tokenizer.read(path)


def test_special_tokens_and_unknown_numbers_have_no_text(byte_level):
    assert "".join(text_of(byte_level, [97, EOS_ID, CHAT_START_ID, 98, 5000])) == "ab"
    assert byte_level.bytes_of(EOS_ID) == b"<|im_end|>"
    assert byte_level.bytes_of(5000) == b""


def sentencepiece_like():
    """Words with a leading space, and bytes for what is not a word."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "ing", "▁", "!"]
    rust = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return rust, {word: number for number, word in enumerate(words)}


def test_other_tokenizers_keep_spaces_and_put_bytes_together():
    rust, number = sentencepiece_like()
    rust.add_special_tokens(["<eos>"])
    tokenizer = Tokenizer(rust)
    tokens = [number["▁Hello"], number["▁world"], number["ing"], *(byte + 1 for byte in "中é".encode()), number["!"]]
    tokens += [rust.token_to_id("<eos>"), number["▁world"], number["<0xE4>"], number["▁Hello"], number["<0xE4>"]]

    pieces = text_of(tokenizer, tokens)

    assert "".join(pieces) == "Hello worlding中é! world\N{REPLACEMENT CHARACTER} Hello\N{REPLACEMENT CHARACTER}"
    assert pieces[3:6] == ["", "", "中"]
    assert tokenizer.bytes_of(number["<0xE4>"]) == b"\xe4"


def test_the_tokens_that_end_an_answer_come_from_all_files_that_name_them(tmp_path):
    path = write_model_dir(tmp_path)
    assert Tokenizer.read(path).stop_tokens == (EOS_ID,)

    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [PAD_ID, EOS_ID]}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 7}))

    assert Tokenizer.read(path).stop_tokens == (7, PAD_ID, EOS_ID)


def test_a_chat_becomes_the_text_that_transformers_makes_of_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    path = write_model_dir(tmp_path)
    source = (
        "{%- if messages[0].role == 'system' %}\n    {{- bos_token }}S:{{ messages[0].content }}\n{% endif %}\n"
        "{%- for m in messages %}\n"
        "  {% if loop.index0 == 1 %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{%- endfor %}\n{% if add_generation_prompt %}A: {% endif %}"
    )
    (path / "chat_template.jinja").write_text(source)
    config = json.loads((path / "tokenizer_config.json").read_text()) | {"bos_token": "<|im_start|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [
        {"role": "system", "content": "<é>"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]

    expected = transformers.AutoTokenizer.from_pretrained(path).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )

    assert Tokenizer.read(path).render_chat(messages) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages + 1 }}", "list"),
    ],
)
def test_a_template_that_refuses_is_the_callers_problem_and_cannot_reach_out(source, words):
    with pytest.raises(InvalidInput, match=words):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_a_model_directory_that_is_none_is_told_at_once(tmp_path):
    with pytest.raises(NotFound, match="no model directory"):
        Tokenizer.read(tmp_path / "nowhere")
    with pytest.raises(NotFound, match=re.escape("no config.json and no tokenizer.json")):
        Tokenizer.read(tmp_path)
    path = write_model_dir(tmp_path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match="not a tokenizer"):
        Tokenizer.read(path)


def test_a_broken_settings_file_or_template_is_named(tmp_path):
    path = write_model_dir(tmp_path)
    (path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(InvalidInput, match="chat template"):
        Tokenizer.read(path)
    (path / "tokenizer_config.json").write_text("[")
    with pytest.raises(InvalidInput, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.read(path)


def test_without_a_template_a_chat_is_refused_and_the_other_path_named(tmp_path):
    path = write_model_dir(tmp_path)
    (path / "tokenizer_config.json").write_text("{}")

    with pytest.raises(InvalidInput, match="/v1/completions"):
        Tokenizer.read(path).render_chat([{"role": "user", "content": "x"}])


def test_a_long_text_has_the_tokens_of_its_parts(byte_level):
    text = "héllo " * 4000

    assert byte_level.encode(text, add_special_tokens=True) == tuple(text.encode())
