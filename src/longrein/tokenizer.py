"""A tokenizer as renderers need it: text to ids and back, nothing about where in the text a token came from.

Always true: the ids and the text are those of the tokenizer it stands for. Where that one rests on the `tokenizers` library it
is asked directly; most text is not even asked for, since a byte-level vocabulary writes a text word by word and has seen most
words before. And a renderer that is given no offsets does not follow every token back to its message, which nobody here needs;
nor does it take a long text token by token where it can be given the whole of it as one number.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

MAX_WORDS = 100_000
"""How many words are remembered; past that they are forgotten, and met again."""
MAX_PIECES, PIECE = 1000, 32
"""How many texts of at most so many characters are remembered whole: what a template writes around each message."""
LONG = 64
"""Tokens from which a text is folded."""
_CLASSES = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9", r"\s": r"\t-\r ", r"\r": r"\r", r"\n": r"\n", r"\t": r"\t", r"\/": "/"}
_USUAL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How most families cut. A space is the first character of its piece, unless whitespace stands before it."""
_RUNS = tuple(f"{space} " for space in " \t\n\r\x0b\x0c")
_PLAIN = {None, "NFC", "NFKC", "NFD", "NFKD"}
"""Normalizers that leave ASCII alone."""


class PlainTokenizer:
    """Stands for a tokenizer of transformers, or for anything with `encode`, `decode` and `convert_tokens_to_ids`."""

    __call__ = None
    """No offsets: this is how a renderer asks for them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Looked up on the class: a wrapper that passes everything on may have an `encode` of its own.
        direct = hasattr(type(tokenizer), "backend_tokenizer") and not getattr(tokenizer, "split_special_tokens", False)
        self._backend = tokenizer.backend_tokenizer if direct else None
        self._words = None if self._backend is None else words_of(self._backend)
        self._pieces: dict[str, list[int]] = {}
        # Renderers ask for these with every reply, and transformers looks long for them.
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids
        self.unk_token_id = getattr(tokenizer, "unk_token_id", None)

    def encode(self, text: str, add_special_tokens: bool = False, **kwargs: Any) -> list[int]:
        backend = self._backend
        if backend is None or kwargs or backend.padding is not None or backend.truncation is not None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **kwargs))
        if self._words is not None and not add_special_tokens and self._words.spells(text):
            return self._words.encode(text)
        if add_special_tokens or len(text) > PIECE:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        ids = self._pieces.get(text)
        if ids is None:
            if len(self._pieces) >= MAX_PIECES:
                self._pieces.clear()
            ids = self._pieces[text] = backend.encode(text, add_special_tokens=False).ids
        return list(ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        if self._backend is None or kwargs or self._tokenizer.clean_up_tokenization_spaces:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Folded(int):
    """The ids of a long text as one number, which is no token's: a renderer only passes it on."""

    ids: list[int]


class FoldingTokenizer:
    """A tokenizer that folds long texts; `unfolded` puts their ids back where the numbers stand."""

    __call__ = None

    def __init__(self, tokenizer: PlainTokenizer) -> None:
        self._tokenizer = tokenizer
        self.convert_tokens_to_ids, self.unk_token_id = tokenizer.convert_tokens_to_ids, tokenizer.unk_token_id

    def encode(self, text: str, add_special_tokens: bool = False, **kwargs: Any) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **kwargs)
        if len(ids) < LONG:
            return ids
        folded = Folded(-1)
        folded.ids = ids
        return [folded]

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        return self._tokenizer.decode(unfolded(token_ids), **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def unfolded(ids: Sequence[int]) -> list[int]:
    return list(chain.from_iterable(token.ids if type(token) is Folded else (token,) for token in ids))


class KnownWords(dict[str, list[int]]):
    """The words a vocabulary has written, and how: the pieces into which it cuts every text before it looks for tokens."""

    def __init__(self, backend: Any, pattern: str, usual: bool = False) -> None:
        self._backend = backend
        self._cut = re.compile(pattern).findall
        self._after_space = _AfterSpace(self._pieces) if usual else None
        self._marks = {token.content[:1] for token in backend.get_added_tokens_decoder().values()}

    def spells(self, text: str) -> bool:
        """Whether the text is ASCII, where letters, digits and spaces are the same for every regular expression, and has no
        character that a token of the template's own starts with."""
        return text.isascii() and not any(mark in text for mark in self._marks)

    def encode(self, text: str) -> list[int]:
        if self._after_space is None or any(run in text for run in _RUNS):
            return self._pieces(text)
        first, *rest = text.split(" ")
        return [*self._pieces(first), *chain.from_iterable(map(self._after_space.__getitem__, rest))]

    def _pieces(self, text: str) -> list[int]:
        return list(chain.from_iterable(map(self.__getitem__, self._cut(text))))

    def __missing__(self, word: str) -> list[int]:
        if len(self) >= MAX_WORDS:
            self.clear()
        ids = self[word] = self._backend.encode(word, add_special_tokens=False).ids
        return ids


class _AfterSpace(dict[str, list[int]]):
    """What stands between two spaces, written with the one before it: found faster than it is cut into pieces."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def __missing__(self, word: str) -> list[int]:
        ids = self._encode(f" {word}")
        if len(word) <= PIECE:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids


class Lexicon:
    """A tokenizer without a download, for scripts: it learns each word that it meets, and about as many make a text as of a
    real vocabulary's. The special words are Qwen3's.

    >>> lexicon = Lexicon()
    >>> lexicon.decode(ids := lexicon.encode("<|im_start|>user\\nGo, 12 times<|im_end|>")), len(ids)
    ('<|im_start|>user\\nGo, 12 times<|im_end|>', 10)
    """

    name_or_path, unk_token_id = "lexicon", None
    special = (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    )

    def __init__(self) -> None:
        self._ids = {word: number for number, word in enumerate(self.special)}
        self._words = list(self.special)
        words = (*map(re.escape, self.special), r" ?[^\W\d_]{1,8}", r"\s+(?=\s)", ".")
        self._cut = re.compile("|".join(words), re.DOTALL).findall
        self._lock = threading.Lock()
        self.eos_token_id = self._ids["<|im_end|>"]

    def encode(self, text: str, **options: Any) -> list[int]:
        with self._lock:
            return [self._id(word) for word in self._cut(text)]

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]

    def decode(self, token_ids: Any, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return "".join(self._words[number] for number in ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._ids.get(tokens) if tokens in self.special else None


def words_of(backend: Any) -> KnownWords | None:
    """The words of a byte-level vocabulary; None for one that cuts texts in another way."""
    cutting, normalizer = _state(backend.pre_tokenizer), _state(backend.normalizer).get("type")
    steps = cutting.get("pretokenizers", [])
    if type(backend.model).__name__ != "BPE" or backend.model.dropout or normalizer not in _PLAIN or len(steps) != 2:
        return None
    split, letters = steps
    if (split.get("type"), split.get("behavior"), split.get("invert")) != ("Split", "Isolated", False):
        return None
    if letters.get("type") != "ByteLevel" or letters.get("use_regex") or letters.get("add_prefix_space"):
        return None
    expression = split["pattern"].get("Regex", "")
    pattern = in_ascii(expression)
    usual = expression.replace(r"\p{N}{1,3}", r"\p{N}") == _USUAL
    return KnownWords(backend, pattern, usual) if pattern and not re.compile(pattern).groups else None


def in_ascii(pattern: str) -> str | None:
    """The regular expression for ASCII text, in Python's words; None if it speaks of more than letters, digits and spaces.

    >>> in_ascii(r" ?[^\\\\s\\\\p{L}]+|\\\\p{N}{1,3}")
    ' ?[^\\\\t-\\\\r A-Za-z]+|[0-9]{1,3}'
    """
    written, inside = [], False
    for piece in re.findall(r"\\p\{[^}]*\}|\\.|.", pattern, re.DOTALL):
        if piece.startswith("\\"):
            if piece == r"\S" and not inside:
                written.append(r"[^\t-\r ]")
            elif piece not in _CLASSES:
                return None
            else:
                written.append(_CLASSES[piece] if inside or len(_CLASSES[piece]) < 3 else f"[{_CLASSES[piece]}]")
            continue
        inside = piece == "[" or (inside and piece != "]")
        written.append(piece)
    return "".join(written)


def _state(part: Any) -> dict[str, Any]:
    return {} if part is None else json.loads(part.__getstate__())
