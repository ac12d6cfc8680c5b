"""What token ids stand for, as bytes, so that a run can be read without its tokenizer.

Always true: the pieces of a text's tokens, one after the other, are the text's bytes, for byte-level vocabularies (GPT-2 and
after) and for those that mark spaces and spell bytes (SentencePiece). A token of a template, such as `<|im_end|>`, is its own name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Pieces:
    """The bytes of a tokenizer's ids. Looking one up calls nothing that another thread's use of the tokenizer could hinder."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {int(token): str(word) for token, word in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        probe = tokenizer.convert_ids_to_tokens(tokenizer.encode("a b\n", add_special_tokens=False))
        self._alphabet = _byte_alphabet() if any("Ġ" in word or "Ċ" in word for word in probe if word) else None

    def __call__(self, tokens: Iterable[int]) -> list[bytes]:
        return [self._piece(token) for token in tokens]

    def _piece(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode("utf-8", "replace")
        word = self._tokenizer.convert_ids_to_tokens(token)
        if word is None:  # an id beyond the vocabulary, which a padded output layer can draw
            return f"<{token}>".encode()
        if self._alphabet is not None and all(letter in self._alphabet for letter in word):
            return bytes(self._alphabet[letter] for letter in word)
        if spelled := BYTE.fullmatch(word):
            return bytes([int(spelled[1], 16)])
        return word.replace("▁", " ").encode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """The letters byte-level vocabularies write bytes with: a printable byte is itself, the others follow after 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
