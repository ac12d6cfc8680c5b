"""Builds the small policy that `make train` starts from: a real Qwen3 of three million parameters that half knows the hunt.

    python -m longrein.training.tiny FOLDER

Its BPE tokenizer is trained on the hunt's own texts, with Qwen3's special tokens and chat template, so the real Qwen3
renderer serves it. The weights come from a minute of supervised training, first on a careful demonstrator, so that the model
learns to copy a room from a note at all, then on a careless one: often it looks into a room no note named, or answers before
it saw the coin. What is left for reinforcement learning is what the notes are for.
"""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import qwen3_chat_template

from longrein.contract import Message
from longrein.rendering import Rendering, rendering_for
from longrein.rooms import ROOMS, TOOLS, look, opening

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip
VOCABULARY = 1024
FOLLOWS_NOTE = 0.8
"""How often the careless demonstrator looks where the note says, rather than anywhere."""
PATIENCE = 0.9
"""How often it goes on looking, rather than answering before it saw the coin."""


class Demonstration(NamedTuple):
    token_ids: list[int]
    agent_mask: list[bool]


def build(folder: Path, *, seed: int = 0, steps: int = 320, batch_size: int = 16) -> None:
    """Make the tokenizer and the warm-started model, and save both into `folder`."""
    torch.manual_seed(seed)
    rng = random.Random(f"tiny-{seed}")
    tokenizer = make_tokenizer(rng)
    pad_id, eos_id = (tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>"))
    model = make_model(len(tokenizer), cast(int, pad_id), cast(int, eos_id))
    rendering = rendering_for(tokenizer)
    careful, careless = (demonstrations(rendering, rng, carefully=carefully) for carefully in (True, False))
    warm_start(model, chain(islice(careful, steps // 2 * batch_size), careless), steps=steps, batch_size=batch_size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """A byte-level BPE of about a thousand tokens with Qwen3's special tokens and chat template."""
    bpe = Tokenizer(models.BPE())
    # A room is a piece of its own, so it is the same token wherever it stands, and so is the tool of a call; the rest of a
    # line may merge into long tokens, which keeps the tool descriptions and the replies short.
    pieces = rf"""(?<=")({"|".join(ROOMS)})(?=")|(?<={{"name": ")(look|answer)(?=", "arg)|\n+"""
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(rng), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def make_model(vocabulary: int, pad_id: int, eos_id: int, *, hidden: int = 256, layers: int = 3) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 5 // 2,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            head_dim=32,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            pad_token_id=pad_id,
            eos_token_id=eos_id,
            bos_token_id=None,
        )
    )


def demonstrations(rendering: Rendering, rng: random.Random, *, carefully: bool) -> Iterator[Demonstration]:
    """Hunts without end, as tokens; the demonstrator's replies are masked as the agent's."""
    follows, patience = (1.0, 1.0) if carefully else (FOLLOWS_NOTE, PATIENCE)
    prompt = cache(lambda room: rendering.prompt(opening(room), TOOLS))
    drawn = cache(lambda action: rendering.encode_reply(_written(action)))
    read = cache(lambda text: rendering.extension({"role": "assistant", "content": ""}, [_result(text)], TOOLS) or [])
    while True:
        rooms = rng.sample(ROOMS, rng.randint(2, 4))
        pieces = [(prompt(rooms[0]), False)]
        noted: str | None = rooms[0]
        found: str | None = None
        for _ in range(6):
            action = _choose(rng, found, noted, follows, patience)
            pieces.append((drawn(action), True))
            name, room = action
            if name == "answer":
                break
            pieces.append((read(look(rooms, room)), False))
            noted = rooms[rooms.index(room) + 1] if room in rooms[:-1] else None
            found = room if room == rooms[-1] else None
        yield Demonstration([token for ids, _ in pieces for token in ids], [agent for ids, agent in pieces for _ in ids])


def warm_start(model: Qwen3ForCausalLM, data: Iterator[Demonstration], *, steps: int, batch_size: int) -> None:
    """Next-token training on the demonstrator's replies."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps, pct_start=0.1)
    shuffle = random.Random(0)
    batches: list[list[Demonstration]] = []
    model.train()
    for step in range(steps):
        if step % 8 == 0:  # eight batches at a time, sorted by length: little padding
            pool = sorted((next(data) for _ in range(8 * batch_size)), key=lambda item: len(item.token_ids))
            batches = [pool[start : start + batch_size] for start in range(0, len(pool), batch_size)]
            shuffle.shuffle(batches)
        ids, labels = _batch(batches.pop())
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            logger.info("warm start: step %d of %d, loss %.3f", step, steps, loss.item())
    model.eval()


def _choose(rng: random.Random, found: str | None, noted: str | None, follows: float, patience: float) -> tuple[str, str]:
    """The demonstrator's next action, given the room where it saw the coin and the room the last note named."""
    if found is not None:
        return "answer", found
    if rng.random() > patience:
        return "answer", rng.choice(ROOMS)
    if noted is not None and rng.random() < follows:
        return "look", noted
    return "look", rng.choice(ROOMS)


def _written(action: tuple[str, str]) -> str:
    name, room = action
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'room': room}})}\n</tool_call>"


def _result(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "", "content": text}


def _batch(items: Sequence[Demonstration]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(item.token_ids) for item in items)
    ids = np.zeros((len(items), width), np.int64)
    labels = np.full((len(items), width), -100, np.int64)
    for row, item in enumerate(items):
        ids[row, : len(item.token_ids)] = item.token_ids
        labels[row, : len(item.token_ids)] = np.where(item.agent_mask, item.token_ids, -100)
    return torch.from_numpy(ids), torch.from_numpy(labels)


def _corpus(rng: random.Random) -> Iterator[str]:
    """The hunt's texts, and Qwen3's description of the tools around them."""
    (described,), _ = render_jinja_template(
        [opening("attic")], tools=list(TOOLS), chat_template=qwen3_chat_template, add_generation_prompt=True
    )
    for _ in range(200):
        room = rng.choice(ROOMS)
        yield from re.split("|".join(map(re.escape, SPECIAL_TOKENS)), described)
        yield from (message["content"] for message in opening(room) + opening(room, "text"))
        yield from (look([room, "attic"], room), look([room], room), look(["?"], room))
        yield from (_written(("look", room)), _written(("answer", room)), f"look {room}", f"answer {room}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build(Path(sys.argv[1]))
