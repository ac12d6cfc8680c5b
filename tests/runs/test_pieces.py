"""The pieces of a text's tokens are its bytes, whatever the vocabulary."""

from __future__ import annotations

from typing import Any

import pytest

from longrein.runs.pieces import Pieces

TEXT = "Hello  world\n\té日本語🙂 <|im_end|> 100% naïve"


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_2", "mistral_nemo", "smollm2", "tiny"])
def test_pieces_are_the_bytes_of_the_text(tokenizer: Any, name: str) -> None:
    words = tokenizer(name)
    ids = words.encode(TEXT, add_special_tokens=False)
    if words.unk_token_id is None or words.unk_token_id not in ids:
        assert b"".join(Pieces(words)(ids)).decode() == TEXT


def test_sentencepiece_marks_and_bytes() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "▁a": 1, "▁b": 2, "<0xE6>": 3, "<0x97>": 4, "<0xA5>": 5, "<s>": 6}
    raw = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces = Pieces(PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>"))
    assert b"".join(pieces([6, 1, 2, 3, 4, 5])).decode() == "<s> a b日"
    assert pieces([99]) == [b"<99>"]
