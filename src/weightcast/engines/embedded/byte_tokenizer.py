"""A tokenizer that needs no training: one token per byte, and the special tokens of Qwen's chat format."""

from __future__ import annotations

import json

from weightcast.errors import MissingExtra

END_OF_TEXT, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, CHAT_START, CHAT_END)
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
PAD_ID, CHAT_START_ID, EOS_ID = range(256, VOCAB_SIZE)

_CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tokenizer_files(max_length: int) -> dict[str, bytes]:
    """`tokenizer.json` and `tokenizer_config.json`, as Hugging Face tools read them. Byte b is token b."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _CHAT_TEMPLATE,
        "eos_token": CHAT_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [CHAT_START, CHAT_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    return {
        "tokenizer.json": _tokenizer_json().encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }


def _tokenizer_json() -> str:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingExtra("tokenizers", "serve", "making a tokenizer") from error
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer.to_str(pretty=False)


def _byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, in the order of the bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
