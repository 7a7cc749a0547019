"""Choose the hard negatives of a query: without positives and copies, filtered by score."""

from typing import NamedTuple

import numpy as np
from datasets import Dataset
from safetensors import SafetensorError

from contaccum.config.commands import MineConfig
from contaccum.data.examples import ExampleTable
from contaccum.data.identity import text_hash
from contaccum.data.tables import PASSAGE_COLUMNS, column_batches
from contaccum.errors import InputError, library_errors, require
from contaccum.formats.records import Example, Passage, is_blank


class MiningQueries:
    """Queries that need negatives, the corpus, and the passages that must not become negatives.

    A passage is recognized by its text, not by its id: the corpus may have other ids than the
    examples.
    """

    def __init__(self, examples: ExampleTable, corpus: Dataset | None = None) -> None:
        """corpus: passages that may become negatives (columns id, title, text).

        None: the passages of the examples.
        """
        self.examples = examples
        self.corpus = examples.passages if corpus is None else corpus
        # hash of a query text -> hashes of the texts that no negative of the query may have
        self._forbidden: dict[int, set[int]] = {}
        positives: set[int] = set()  # hashes of all positives
        for example in examples:
            query = text_hash(example.query.text)
            forbidden = self._forbidden.setdefault(query, {query})
            for passage in example.positives:
                positives.add(text_hash(passage.content))
                forbidden.update(_text_hashes(passage))

        # hash of a forbidden text -> rows of the passages with this text, with or without a title
        self._rows: dict[int, list[int]] = {
            text: [] for texts in self._forbidden.values() for text in texts
        }
        self._row_of: dict[int, int] = {}  # hash of a positive -> its row
        row = 0
        for batch in column_batches(self.corpus, PASSAGE_COLUMNS):
            for passage in Passage.of_columns(batch):
                content, *_ = texts = _text_hashes(passage)
                for text in self._rows.keys() & texts:
                    self._rows[text].append(row)
                if content in positives:
                    self._row_of.setdefault(content, row)
                row += 1

        self.extra: Dataset | None = None
        """Positives that ``corpus`` lacks, or None if there are none. They are scored, but no query
        gets them as negatives. Their rows follow those of ``corpus``."""
        missing = np.array(sorted(positives - self._row_of.keys()), dtype=np.int64)
        if len(missing):
            hashes = np.asarray(examples.passage_hashes)
            rows = np.flatnonzero(np.isin(hashes, missing))
            rows = rows[np.unique(hashes[rows], return_index=True)[1]]
            # copy the rows: to read a column after Dataset.select, datasets would read all rows of
            # the table
            self.extra = Dataset.from_dict(examples.passages[rows], features=self.corpus.features)
            for place, number in enumerate(rows, row):
                self._row_of[int(hashes[number])] = place

    def positives(self, example: Example) -> list[int]:
        """Return the rows of the positives of an example."""
        return [self._row_of[text_hash(passage.content)] for passage in example.positives]

    def known(self, example: Example) -> set[int]:
        """Return the rows of the passages that must not become negatives of an example.

        These are the passages with the text of a positive of the example, or of another example
        with the same query text, whatever their titles, and the passages with the text of the
        query.
        """
        forbidden = self._forbidden[text_hash(example.query.text)]
        return {row for text in forbidden for row in self._rows[text]}


def _text_hashes(passage: Passage) -> list[int]:
    """Return the hashes of a passage's text with its title and, if it has both, without."""
    texts = [passage.content]
    if passage.title and not is_blank(passage.text):
        texts.append(passage.text)
    return list(map(text_hash, texts))


class Selection(NamedTuple):
    """Negatives selected among the candidates of one query."""

    indices: np.ndarray
    """Positions of the negatives in the list of candidates, in ascending order. There are at most
    ``num_negatives``."""
    removed: dict[str, int]
    """Name of a filter -> number of candidates that it removed. Filters run in order, so each
    candidate is counted once."""


def select_negatives(
    scores: np.ndarray, positives: np.ndarray, settings: MineConfig, number: int
) -> Selection:
    """Select hard negatives of one query among n candidates.

    scores: scores of the candidates, (n,), descending. positives: scores of the query's positives,
    (P,). number: position of the query in the data. It seeds the random sample, so the sample does
    not depend on other queries.

    Let p be the lowest score of the query's positives. A candidate with score s remains if s <= p -
    absolute_margin, s <= p - relative_margin |p|, s <= max_score and s >= min_score. A setting that
    is None has no effect. Of the remaining candidates, the ``range_min`` best are skipped, and
    ``num_negatives`` are selected: the best, or a random sample. Moreira et al. 2024 (NV-Retriever,
    arXiv 2407.15831) call the relative margin TopK-PercPos, the absolute margin TopK-MarginPos and
    max_score TopK-Abs.
    """
    scores = scores.astype(np.float64)
    lowest = float(positives.min())
    fails: dict[str, np.ndarray] = {}  # filter -> whether each candidate fails it, (n,)
    if settings.absolute_margin is not None:
        fails["absolute_margin"] = scores > lowest - settings.absolute_margin
    if settings.relative_margin is not None:
        # abs() keeps the limit below ``lowest`` even if ``lowest`` is negative
        fails["relative_margin"] = scores > lowest - settings.relative_margin * abs(lowest)
    if settings.max_score is not None:
        fails["max_score"] = scores > settings.max_score
    if settings.min_score is not None:
        fails["min_score"] = scores < settings.min_score
    remain = np.ones(len(scores), dtype=bool)
    removed = {}
    for name, failed in fails.items():
        removed[name] = int((remain & failed).sum())
        remain &= ~failed
    window = np.flatnonzero(remain)[settings.range_min :]
    if settings.sampling_strategy == "random" and len(window) > settings.num_negatives:
        random = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([settings.seed, number]))
        )
        window = np.sort(random.choice(window, settings.num_negatives, replace=False))
    return Selection(window[: settings.num_negatives], removed)


class CrossEncoder:
    """Cross-encoder of sentence-transformers: reads query and passage, gives one score."""

    def __init__(
        self, name: str, device: str, batch_size: int, trust_remote_code: bool = False
    ) -> None:
        """Load the model.

        Raises InputError if the model is not found, if it has several outputs, or if
        sentence-transformers is missing.
        """
        require("sentence_transformers", "mine", f"cross_encoder {name}")
        from sentence_transformers import CrossEncoder as Model

        self._name, self._batch_size = name, batch_size
        fix = "; give the folder or the Hub name of a cross-encoder with safetensors weights"
        kinds = OSError, ValueError, KeyError, SafetensorError
        with library_errors(f"{name}: cannot be loaded as a cross-encoder", *kinds, fix=fix):
            self._model = Model(
                name,
                device=device,
                trust_remote_code=trust_remote_code,
                # without this option, transformers would also load pickled weights
                model_kwargs={"use_safetensors": True},
            )
            if self._model.num_labels != 1:
                raise ValueError(f"it has {self._model.num_labels} outputs, not one")

    def scores(self, pairs: list[tuple[str, str]]) -> np.ndarray:
        """Return the scores of n pairs of query and passage, (n,) float32.

        Raises InputError if a score is not finite.
        """
        scores = self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False)
        scores = np.asarray(scores, dtype=np.float32).reshape(len(pairs))
        finite = np.isfinite(scores)
        if not finite.all():
            query = pairs[int(finite.argmin())][0]
            raise InputError(f"{self._name}: a score for the query {query[:80]!r} is not finite")
        return scores
