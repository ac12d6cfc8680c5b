"""The plain tokenizer writes what the real one writes, word by word or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conversations import AWKWARD, TEXT
from hypothesis import given
from hypothesis import strategies as st

from longrein.tokenizer import KnownWords, Lexicon, PlainTokenizer, in_ascii, words_of

Named = Callable[[str], Any]
SIX = pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2", "mistral_nemo", "smollm2", "tiny"])
ASCII = st.lists(
    st.sampled_from(
        [" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x7f", "\x00", "a", "Zq", "'s", "'LL", "'", "12", "3456"]
    )
    | st.sampled_from(["!", "...", "--", "_", '{"a": 1}', "foo", "I'll", "<", ">", "/", "\\"])
    | st.text(st.characters(max_codepoint=127), max_size=6),
    max_size=16,
).map("".join)


@SIX
@given(text=ASCII | TEXT)
def test_ids_and_text_are_the_tokenizers_own(name: str, tokenizer: Named, text: str) -> None:
    real = tokenizer(name)
    plain = PlainTokenizer(real)
    ids = real.encode(text, add_special_tokens=False)
    assert plain.encode(text, add_special_tokens=False) == ids
    assert plain.encode(text) == ids  # what was met once is written the same again
    assert plain.decode(ids, skip_special_tokens=False) == real.decode(ids, skip_special_tokens=False)


def test_most_text_of_the_main_families_is_written_word_by_word(tokenizer: Named) -> None:
    for name in ("qwen3", "qwen2_5", "llama3_2"):
        words = words_of(tokenizer(name).backend_tokenizer)
        assert words is not None
        assert words.spells("The quick brown fox: 12 + 30!\n")
        words.encode("the cat and the dog and the cow")
        assert sorted(words) == [" and", " cat", " cow", " dog", " the", "the"]
        assert not any(words.spells(text) for text in AWKWARD if "<|" in text or not text.isascii())


@SIX
def test_a_space_after_whitespace_may_be_of_one_piece_with_it(name: str, tokenizer: Named) -> None:
    real = tokenizer(name)
    plain = PlainTokenizer(real)
    before, after = (
        ["", "a", "1", ".", "\n", "\t", "\r", "\x0b", "\x0c", " "],
        ["", "b", "2", ",", "\n", "\nb", "\t\n", " b"],
    )
    for text in [f"x{one} {two}" for one in before for two in after]:
        assert plain.encode(text) == real.encode(text, add_special_tokens=False), repr(text)


def test_words_are_forgotten_before_there_are_too_many(tokenizer: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.tokenizer.MAX_WORDS", 10)
    real = tokenizer("qwen3")
    words = words_of(real.backend_tokenizer)
    assert isinstance(words, KnownWords)
    text = " ".join(f"w{number}x" for number in range(50))
    assert words.encode(text) == real.encode(text, add_special_tokens=False)
    assert len(words) <= 10


def test_a_tokenizer_that_pads_or_is_wrapped_is_asked_itself(tokenizer: Named, growing: Any) -> None:
    assert PlainTokenizer(growing).encode("hello there") == growing.encode("hello there", add_special_tokens=False)
    import copy

    padding = copy.deepcopy(tokenizer("qwen3"))
    padding.backend_tokenizer.enable_padding(length=12)
    assert PlainTokenizer(padding).encode("hi") == tokenizer("qwen3").encode("hi", add_special_tokens=False)


def test_an_expression_with_more_than_letters_digits_and_spaces_is_left_alone() -> None:
    assert in_ascii(r"\p{Lu}+|\s+") is None
    assert in_ascii(r"\w+") is None
    assert in_ascii(r"[^\S]") is None


@given(texts=st.lists(ASCII | TEXT | st.sampled_from([".<|im_end|>", "<think>x</think>", "< |im_start|>"]), max_size=4))
def test_a_lexicon_gives_back_what_it_was_given_and_cuts_special_words_out(texts: list[str]) -> None:
    lexicon = Lexicon()
    written = [lexicon.encode(text) for text in texts]
    assert [lexicon.decode(ids) for ids in written] == texts
    assert lexicon.encode("".join(texts)).count(lexicon.convert_tokens_to_ids("<|im_end|>")) == "".join(texts).count(
        "<|im_end|>"
    )
