"""A cross-encoder: scores of query and passage read together, by sentence-transformers' CrossEncoder."""

import hashlib
from typing import Any

import numpy as np
import torch

from contaccum.errors import InputError


class CrossEncoder:
    """Scores pairs of query and passage; any model that sentence-transformers' CrossEncoder loads and that gives one number."""

    def __init__(self, name: str, device: str, batch_size: int, trust_remote_code: bool = False) -> None:
        """Raises InputError where there is no such model, it gives several numbers, or the package is not installed."""
        self.name, self._batch_size = name, batch_size
        self._model = _load(name, device, trust_remote_code)
        if self._model.num_labels != 1:
            raise InputError(
                f"{name}: gives {self._model.num_labels} numbers for a query and a passage, expected a cross-encoder with one"
            )

    def fingerprint(self) -> str:
        """Hash of its weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def scores(self, query: str, passages: list[str]) -> np.ndarray:
        """The score of each passage for the query, (n,) float32. Raises InputError where one is not finite."""
        pairs = [(query, passage) for passage in passages]
        scores = np.asarray(
            self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False), dtype=np.float32
        ).reshape(len(pairs))
        if not np.isfinite(scores).all():
            raise InputError(f"{self.name}: a score for the query {query[:80]!r} is NaN or infinite, expected numbers")
        return scores


def _load(name: str, device: str, trust_remote_code: bool) -> Any:
    try:
        from sentence_transformers import CrossEncoder as Model
    except ImportError as error:
        raise InputError(
            f'cross_encoder {name} needs sentence-transformers, which is not installed: pip install "contaccum[mine]"'
        ) from error
    try:
        return Model(name, device=device, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{name}: no cross-encoder could be loaded ({reason}), expected a folder or hub name"
        ) from error
