"""A real, small encoder without weights: hashed bags of words.

Texts that share words have a high inner product.
"""

import hashlib
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=10_000)
def _vector(word: str, dim: int) -> np.ndarray:
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big")).standard_normal(dim)


class WordEncoder:
    """Unit vectors; ``name`` stands for the weights, ``seen`` counts the texts that were
    encoded."""

    device, precision = "cpu", "fp32"

    def __init__(self, dim: int = 48, name: str = "words", pause: float = 0.0) -> None:
        self.dim = dim
        self.name = name
        self.pause = pause  # seconds for each call, so that a test can kill it in between
        self.seen = 0

    def fingerprint(self, kind: str, batch_tokens: int | None = None) -> str:
        return f"{self.name}-{self.dim}-{kind}"

    def in_lockstep(self, kind: str) -> nullcontext:
        return nullcontext()

    def encode_queries(
        self,
        texts: list[str],
        batch_tokens: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        self.seen += len(texts)
        time.sleep(self.pause)
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                vectors[row] += _vector(word, self.dim)
        if progress is not None:
            progress(len(texts))
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)

    encode_passages = encode_queries
