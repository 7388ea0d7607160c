"""One answer while it grows: tokens become text, stop strings end it, and each token keeps the version that made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from weightcast.control.detokenizer import Detokenizer
from weightcast.control.plan import Wanted
from weightcast.control.stop_strings import StopSearch
from weightcast.engines.embedded.messages import Output, Routing, TokenLogprob
from weightcast.errors import InvalidInput, ReplicaFailed

Finish = Literal["stop", "length", "abort"]


class VersionSpan(msgspec.Struct):
    """The tokens `start` up to and without `end` of an answer were made by this weight version."""

    start: int
    end: int
    version: str


@dataclass(frozen=True)
class Piece:
    """What one output of the engine adds to an answer: tokens `start` up to the present end, text, and their version."""

    start: int
    text: str
    version: str


class Choice:
    """The state of one answer.

    Tokens after the one that completes a stop string are dropped, with their log-probabilities and versions. The text ends
    before the stop string. `offsets` are the places of the tokens in the text before it was cut.
    """

    def __init__(self, wanted: Wanted, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self.wanted = wanted
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.offsets: list[int] = []
        self.spans: list[VersionSpan] = []
        self.finish: Finish | None = None
        self.reason: str | None = None
        self.cached_tokens = 0
        self.routing: Routing | None = None
        self._detokenizer = detokenizer
        self._search = StopSearch(stops)
        self._length = 0
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """Everything that can be shown so far, behind the echoed prompt."""
        return "".join(self._texts)

    @property
    def started(self) -> bool:
        """Whether the engine has said anything."""
        return bool(self._texts)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._search.found

    def take(self, output: Output) -> Piece:
        """Add an output. Raises if the engine refused the request (`InvalidInput`) or could not go on with it."""
        first, shown = len(self.tokens), [] if self.started else [self.wanted.echo]
        for number, token in enumerate(output.tokens):
            text = self._detokenizer.feed(token)
            shown.append(self._search.feed(text))
            self.tokens.append(token)
            self.offsets.append(self._length)
            self._length += len(text)
            if output.logprobs is not None:
                self.logprobs.append(output.logprobs[number])
            if self.stop is not None:
                break
        self._cover(first, output.version)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self._texts.append("".join(shown))
        if output.finish is not None:
            self.flush()
            self._texts[-2:] = ["".join(self._texts[-2:])]
        self._end(output)
        return Piece(first, self._texts[-1], output.version)

    def flush(self) -> None:
        """No more tokens come: half a character, and what might have become a stop string, are shown after all."""
        self._texts.append(self._search.feed(self._detokenizer.finish()) + self._search.finish())

    def _cover(self, first: int, version: str) -> None:
        if len(self.tokens) == first:
            return
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = len(self.tokens)
        else:
            self.spans.append(VersionSpan(first, len(self.tokens), version))

    def _end(self, output: Output) -> None:
        if self.stop is not None:
            self.finish = "stop"
            return
        if output.finish == "error":
            kind = InvalidInput if output.refused else ReplicaFailed
            raise kind(output.reason or "the engine could not go on with the request.")
        self.finish, self.reason, self.routing = output.finish, output.reason, output.routing
