"""Select the hard negatives of a query among its candidates, and score candidates with a cross-encoder."""

import hashlib
from typing import NamedTuple

import numpy as np
import torch

from contaccum.config.commands import MineConfig
from contaccum.errors import InputError


class Selection(NamedTuple):
    """Negatives selected among the candidates of one query."""

    indices: np.ndarray
    """Positions of the negatives in the list of candidates, in ascending order. There are at most ``num_negatives``."""
    removed: dict[str, int]
    """Name of a filter -> number of candidates that it removed. Filters run in order, so each candidate is counted once."""


def select_negatives(scores: np.ndarray, positives: np.ndarray, settings: MineConfig, number: int) -> Selection:
    """Select hard negatives of one query among n candidates.

    scores: scores of the candidates, (n,), descending. positives: scores of the query's positives, (P,). number: position of the
    query in the data. It seeds the random sample, so the sample does not depend on other queries.

    Let p be the lowest score of the query's positives. A candidate with score s remains if s <= p - absolute_margin, s <= p -
    relative_margin |p|, s <= max_score and s >= min_score. A setting that is None has no effect. Of the remaining candidates,
    the ``range_min`` best are skipped, and ``num_negatives`` are selected: the best, or a random sample. Moreira et al. 2024
    (NV-Retriever, arXiv 2407.15831) call the relative margin TopK-PercPos, the absolute margin TopK-MarginPos and max_score
    TopK-Abs.
    """
    exact = scores.astype(np.float64)
    lowest = float(positives.min())
    left = np.ones(len(scores), dtype=bool)
    removed = {}
    for name in ("absolute_margin", "relative_margin", "max_score", "min_score"):
        bound = getattr(settings, name)
        if bound is None:
            continue
        if name.endswith("margin"):  # abs() keeps the bound below ``lowest`` even if ``lowest`` is negative
            bound = lowest - bound * (abs(lowest) if name == "relative_margin" else 1)
        fails = left & (exact < bound if name == "min_score" else exact > bound)
        removed[name] = int(fails.sum())
        left &= ~fails
    window = np.flatnonzero(left)[settings.range_min :]
    take = settings.num_negatives
    if settings.sampling_strategy == "random" and len(window) > take:
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([settings.seed, number])))
        window = np.sort(random.choice(window, take, replace=False))
    return Selection(window[:take], removed)


class CrossEncoder:
    """Model of sentence-transformers that reads a query and a passage together and gives one score."""

    def __init__(self, name: str, device: str, batch_size: int, trust_remote_code: bool = False) -> None:
        """Load the model.

        Raises InputError if the model is not found, if it has several outputs, or if sentence-transformers is missing.
        """
        try:
            from sentence_transformers import CrossEncoder as Model
        except ImportError as error:
            raise InputError(
                f'cross_encoder {name} needs sentence-transformers, which is not installed. Run: pip install "contaccum[mine]"'
            ) from error
        self.name, self._batch_size = name, batch_size
        try:
            self._model = Model(name, device=device, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"{name}: not a cross-encoder ({reason}); give the folder or the Hub name of a cross-encoder"
            ) from error
        if self._model.num_labels != 1:
            raise InputError(f"{name}: has {self._model.num_labels} outputs; expected a cross-encoder with one output")

    def fingerprint(self) -> str:
        """Return the SHA-256 of the model's weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def scores(self, query: str, passages: list[str]) -> np.ndarray:
        """Return the scores of n passages for one query, (n,) float32. Raises InputError if a score is not finite."""
        pairs = [(query, passage) for passage in passages]
        scores = np.asarray(
            self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False), dtype=np.float32
        ).reshape(len(pairs))
        if not np.isfinite(scores).all():
            raise InputError(
                f"{self.name}: a score for the query {query[:80]!r} is NaN or infinite; use another cross-encoder"
            )
        return scores
