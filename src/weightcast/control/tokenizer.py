"""The tokenizer of a model directory: text to tokens, tokens to text, and chats to text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightcast.control.chat_template import ChatTemplate
from weightcast.control.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from weightcast.errors import InvalidInput, MissingExtra, NotFound
from weightcast.store.files import read_small

try:
    import tokenizers
except ImportError as error:
    raise MissingExtra("tokenizers", "serve", "the server") from error


_LONG_TEXT = 10_000  # characters
_LONG_TOKEN = 64  # characters; some tokenizers make one token of a whole word that they do not know
_FILE_LIMIT_NBYTES = 64 << 20
_BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


class Tokenizer:
    """Made once, used by all requests."""

    def __init__(
        self, rust: tokenizers.Tokenizer, *, chat_template: ChatTemplate | None = None, stop_tokens: Iterable[int] = ()
    ) -> None:
        self._rust = rust
        self._chat_template = chat_template
        self._special = {token for token, added in rust.get_added_tokens_decoder().items() if added.special}
        self._byte_level = _is_byte_level(rust)
        self._bytes: dict[int, bytes] = {}
        self.stop_tokens = tuple(sorted(set(stop_tokens)))
        self.longest_token = max((*map(len, rust.get_vocab()), _LONG_TOKEN))  # in characters

    @classmethod
    def read(cls, model_dir: str | Path) -> Tokenizer:
        """Read the tokenizer, the chat template and the tokens that end an answer out of a model directory."""
        directory = Path(model_dir)
        check_model_dir(directory)
        path = directory / "tokenizer.json"
        try:
            rust = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more exact
            raise InvalidInput(f"{path} is not a tokenizer that can be read: {error}.") from error
        config = _read_json(directory / "tokenizer_config.json")
        source = _template_source(directory, config)
        names = _special_names(config)
        template = ChatTemplate(source, names) if source is not None else None
        return cls(rust, chat_template=template, stop_tokens=_stop_tokens(directory, rust, names))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Tokens of a text. A prompt gets the special tokens that the model expects around it; a rendered chat has them."""
        if len(text) > _LONG_TEXT:  # lets other threads run meanwhile
            return tuple(self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        return tuple(self._rust.encode(text, add_special_tokens=add_special_tokens).ids)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that a chat becomes."""
        if self._chat_template is None:
            raise InvalidInput(
                "the model has no chat template: send the prompt to /v1/completions, or add a chat_template.jinja."
            )
        return self._chat_template.render(messages)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, special ones included."""
        if self._byte_level:
            return b"".join(map(self.bytes_of, tokens)).decode(errors="replace")
        return str(self._rust.decode(list(tokens), skip_special_tokens=False))

    def detokenizer(self) -> Detokenizer:
        """For one answer. Special tokens have no text."""
        if self._byte_level:
            return ByteDetokenizer(self._shown_bytes)
        return WindowDetokenizer(
            lambda tokens: str(self._rust.decode(list(tokens), skip_special_tokens=True)), self._byte_of
        )

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for on its own. None for numbers that the model has and the tokenizer does not know."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def _shown_bytes(self, token: int) -> bytes:
        return b"" if token in self._special else self.bytes_of(token)

    def _byte_of(self, token: int) -> bytes | None:
        """The byte that a token of a tokenizer with byte fallback stands for; None for all others."""
        symbols = self._rust.id_to_token(token) or ""
        matched = _BYTE_FALLBACK.fullmatch(symbols)
        return bytes.fromhex(matched[1]) if matched else None

    def _find_bytes(self, token: int) -> bytes:
        symbols = self._rust.id_to_token(token)
        if symbols is None:
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF[symbol] for symbol in symbols)
            except KeyError:  # an added token: it stands for itself
                return str(symbols).encode()
        if (byte := self._byte_of(token)) is not None:
            return byte
        return str(self._rust.decode([token], skip_special_tokens=False)).encode()


def check_model_dir(directory: Path) -> None:
    """Raise unless this looks like a model directory. Whether the model can be run, the ranks find out."""
    if not directory.is_dir():
        raise NotFound(f"there is no model directory {directory}.")
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    if missing:
        raise NotFound(f"{directory} is not a model directory: it has no {' and no '.join(missing)}.")


def _byte_symbols() -> dict[str, int]:
    """The printable characters that byte-level tokenizers write for the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_BYTE_OF = _byte_symbols()


def _is_byte_level(rust: tokenizers.Tokenizer) -> bool:
    decoder = json.loads(rust.to_str()).get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    return [step.get("type") for step in steps] == ["ByteLevel"]


def _read_json(path: Path) -> dict[str, Any]:
    """A small settings file; empty if it is not there."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_small(path, _FILE_LIMIT_NBYTES))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} must hold a JSON object.")
    return content


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    """The file beside the tokenizer goes first, as in `transformers`; of several named templates, "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get("default")
    return source if isinstance(source, str) else None


def _special_names(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on, which a template may use."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _stop_tokens(directory: Path, rust: tokenizers.Tokenizer, names: dict[str, str]) -> set[int]:
    """Everything the model directory names as the end of an answer."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        found.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
    if (token := rust.token_to_id(names.get("eos_token", ""))) is not None:
        found.add(token)
    return found
