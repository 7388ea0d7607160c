"""Stop strings, found while the text is still being written, however it is cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence


class StopSearch:
    """Finds the first stop string that is completed; of several completed by the same character, the longest.

    Text that may still become a stop string is held back. Linear in the text (Knuth, Morris and Pratt).
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._borders = [_borders(string) for string in self._strings]
        self._matched = [0] * len(self._strings)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Take the next text and return what can be shown. Once `found` is set, nothing more comes out."""
        if not self._strings:
            return text
        if self.found is not None:
            return ""
        seen = self._held + text
        for at, character in enumerate(text, start=len(self._held) + 1):
            completed = self._step(character)
            if completed:
                self.found, self._held = completed, ""
                return seen[: at - len(completed)]
        shown = len(seen) - max(self._matched)
        self._held = seen[shown:]
        return seen[:shown]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str:
        """Take one character and return the longest stop string that it completes."""
        completed = ""
        for number, (string, borders) in enumerate(zip(self._strings, self._borders, strict=True)):
            matched = self._matched[number]
            while matched and string[matched] != character:
                matched = borders[matched - 1]
            matched += string[matched] == character
            self._matched[number] = matched
            if matched == len(string) > len(completed):
                completed = string
        return completed


def _borders(string: str) -> list[int]:
    """For every prefix, the length of its longest proper prefix that is also its suffix."""
    if not string:
        raise ValueError("an empty stop string")
    borders, length = [0], 0
    for character in string[1:]:
        while length and string[length] != character:
            length = borders[length - 1]
        length += string[length] == character
        borders.append(length)
    return borders
