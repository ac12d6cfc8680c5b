"""Real parts for the tests: tokenizers and models from the cache that the Makefile fills, and small random models."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import functools
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from missing import missing

from longrein.rendering import Rendering, rendering_for

CACHE = Path(__file__).parent.parent / ".cache"
FOLDERS = {
    "qwen3": "tokenizers/qwen3",
    "qwen2_5": "tokenizers/qwen2_5",
    "llama3_2": "tokenizers/llama3_2",
    "mistral_nemo": "tokenizers/mistral_nemo",
    "smollm2": "smollm2",
    "tiny": "tiny",
}

hypothesis.settings.register_profile(
    "longrein",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # a machine may be
)
hypothesis.settings.load_profile("longrein")

# Started in the background of a shell, Ctrl-C is ignored here and in every process from here; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def cached(name: str) -> Path:
    """A folder of the cache. On CI a missing one is a failure, elsewhere a skip that says how to get it."""
    folder = CACHE / FOLDERS[name]
    if not any(folder.glob("*.json")):
        missing(f"{folder} is not there; `make test` fetches it")
    return folder


@functools.cache
def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@functools.cache
def _rendering(folder: Path) -> Rendering:
    return rendering_for(_tokenizer(folder))


@pytest.fixture(scope="session")
def folder() -> Callable[[str], Path]:
    """The cached folder of that name: `folder("tiny")`."""
    return cached


@pytest.fixture(scope="session")
def tokenizer() -> Callable[[str], Any]:
    """The tokenizer of that name: `tokenizer("qwen3")`."""
    return lambda name: _tokenizer(cached(name))


@pytest.fixture(scope="session")
def rendering() -> Callable[[str], Rendering]:
    """The rendering of the tokenizer of that name: `rendering("qwen3")`."""
    return lambda name: _rendering(cached(name))


@pytest.fixture(scope="session")
def growing(tokenizer: Callable[[str], Any]) -> Any:
    """A tokenizer for any family of the `renderers` library: it takes in each special token it is asked for."""
    return GrowingTokenizer(copy.deepcopy(tokenizer("qwen3")))


class GrowingTokenizer:
    """A tokenizer that takes in each special token a family asks for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def convert_tokens_to_ids(self, token: str) -> int:
        self._tokenizer.add_tokens([token], special_tokens=True)
        return self._tokenizer.convert_tokens_to_ids(token)

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        if re.fullmatch(r"<?｜[^<>]+｜>?", text):
            self.convert_tokens_to_ids(text)
        return self._tokenizer.encode(text, **kwargs)


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Any]:
    """A new small model of random weights in float32: `random_model(vocab_size=32, seed=1)`."""

    def make(vocab_size: int = 64, seed: int = 0, **config: Any) -> Any:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        settings = {
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,  # wide enough that the tokens differ in probability
            "tie_word_embeddings": False,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Qwen3ForCausalLM(Qwen3Config(**{**settings, **config})).eval()

    return make
