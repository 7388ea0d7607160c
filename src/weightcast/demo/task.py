"""What the policy is asked, and what it is rewarded for: text that can be pronounced.

A character of an answer is worth 1 if it is a lower-case letter after a letter of the other kind: a consonant after a
vowel, or a vowel after a consonant. Any other lower-case letter is worth 1/2, unless it repeats the character before it.
The reward is the mean over the tokens of the answer: "banana" gets 5.5/6, "bnmk" a half, "aaaa" an eighth, "B4 N!" nothing.
Untrained, the policy gets a tenth, by chance.
"""

from __future__ import annotations

VOWELS = frozenset("aeiou")
CONSONANTS = frozenset("bcdfghjklmnpqrstvwxyz")

PROMPTS = ("Sing: ", "Name: ", "Word: ", "Echo: ", "Poem: ", "Tune: ", "Verb: ", "City: ")  # of equal length


def reward(text: str, tokens: int) -> float:
    """How well an answer of so many tokens can be pronounced: from 0 to 1."""
    pairs = zip(" " + text, text, strict=False)
    return sum(_worth(before, character) for before, character in pairs) / tokens


def _worth(before: str, character: str) -> float:
    if character not in VOWELS | CONSONANTS:
        return 0.0
    if before in (CONSONANTS if character in VOWELS else VOWELS):
        return 1.0
    return 0.5 if character != before else 0.0
