"""Chat templates: Jinja, in a sandbox, with the settings and helpers that `transformers` gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from weightcast.errors import InvalidInput, MissingExtra

try:
    from jinja2 import Template, TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    raise MissingExtra("jinja2", "serve", "the server") from error


class ChatTemplate:
    """Turns the messages of a chat into the text that the model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _compile(source)
        except TemplateError as error:
            raise InvalidInput(f"the chat template of the model cannot be read: {error}.") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, ending where the assistant is to speak. Raises `InvalidInput` if the template refuses."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise InvalidInput(f"the model's chat template does not take these messages: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training. Here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as the class above declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside, as they are."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this does not escape HTML: the reader is a model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
