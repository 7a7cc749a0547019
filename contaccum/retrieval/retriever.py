"""Find the best passages of a corpus for each query, with an encoder or with BM25."""

import re
import unicodedata
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import regex
from datasets import Dataset, concatenate_datasets

from contaccum.config import ENCODER_SETTINGS
from contaccum.config.commands import DataPolicy, EncoderConfig, SearchConfig
from contaccum.config.declare import PositiveInt
from contaccum.config.load import converted
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.data.tables import PASSAGE_COLUMNS, column_batches
from contaccum.data.texts import passage_table, texts_by_id
from contaccum.errors import InputError
from contaccum.formats.records import Passage
from contaccum.retrieval.encode import (
    Texts,
    encode_in_memory,
    load_encoder_of,
    passage_vectors,
)
from contaccum.retrieval.exact import ExactIndex, best_first, inner_products
from contaccum.retrieval.index import Index, Origin
from contaccum.retrieval.runs import (
    RankedPassage,
    Ranking,
    Run,
    make_run,
    read_passages,
    require_run_ids,
    write_run,
)
from contaccum.retrieval.shards import Shards
from contaccum.runtime.checks import refuse_other_file
from contaccum.runtime.processes import ALONE, Processes
from contaccum.runtime.progress import progress_bar

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder

BM25_NAME = "bm25"
"""Model name that selects BM25."""
_UNSPACED = (
    r"\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}ー"  # ー belongs to no script
    r"\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
)
"""Scripts whose words are not separated by spaces. Korean has spaces, but its particles are part of
the word before them."""
_WORD = regex.compile(rf"(?P<unspaced>[{_UNSPACED}]+)|[\w--[{_UNSPACED}]]+", regex.V1)
_ASCII_WORD = re.compile(r"\w+")  # faster, and equal for ASCII texts
_POINTS = re.compile("[\u0591-\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670]|(?<=i)\u0307")
"""Vowel points of Hebrew and Arabic, and the Arabic tatweel: most texts omit them. Also the dot
above that is left of the Turkish letter İ in small letters: people write İstanbul and istanbul."""
STOP_WORDS = {
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it",
    "no", "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they",
    "this", "to", "was", "will", "with",
}  # fmt: skip
"""Lucene's English stop words."""
DEFAULTS = SearchConfig()
# settings that bm25 does not use
_OF_ENCODER = (*ENCODER_SETTINGS, "truncate_dim", "precision")
_OF_VECTORS = ("embeddings", "factory", "index_dir", "backend", "search_params")


class Retriever(ABC):
    """Base class of retrievers. A retriever searches one corpus."""

    corpus: Dataset
    precision: str | None = None
    """Precision of the encoder. None: there is no encoder."""

    @staticmethod
    def open(
        model: "EncoderConfig | DualEncoder | str | Path",
        corpus: Dataset | str | Path | Mapping[str, str] | Iterable[str],
        settings: SearchConfig = DEFAULTS,
        group: Processes = ALONE,
        *,
        extra: Dataset | None = None,
    ) -> "Retriever":
        """Load the model, then encode or index the corpus.

        model: an encoder, the name or the config of an encoder, or ``bm25``. corpus: texts by id, a
        list of texts (their ids are 0, 1, ...), the path or the name of a data set, a pandas Series
        of texts by its index, or a ``datasets.Dataset`` or pandas DataFrame with the columns id (or
        _id), text and optionally title. A number as an id becomes a text. group: processes of this
        search. With an encoder, they divide the corpus among themselves. All must search for the
        same queries, and each gets the complete run. extra: positives of the queries that are not
        in the corpus. ``rank`` returns their scores, but they are never found.

        Raises InputError if a value is no text, or if two ids are equal.
        """
        table = passage_table(corpus)
        if isinstance(model, str | Path):
            model = EncoderConfig.of(model)
        if isinstance(model, EncoderConfig):
            if model.model == BM25_NAME:
                refuse_unused(model, EncoderConfig(BM25_NAME), _OF_ENCODER)
                refuse_unused(settings, DEFAULTS, _OF_VECTORS)
                return BM25(table, extra)
            settings.check(group.world)  # before the slow loading
        folders = (settings.index_dir, settings.embeddings)
        model = load_encoder_of(model, "passage", lambda: Texts("passage", table), *folders)
        return DenseRetriever(model, table, settings, group, extra)

    def search(
        self,
        queries: Mapping[str, str] | Iterable[str],
        k: int = 100,
        *,
        ignore_identical_ids: bool = False,
    ) -> Run:
        """Return the k best passages for each query, or fewer if the search finds fewer.

        Passages with equal scores are in the order of the corpus, except in an approximate index.
        queries: query id -> text, a list
        of texts (their ids are 0, 1, ...), or another form of ``corpus`` in ``open``.
        ignore_identical_ids: leave out a passage whose id equals the id of the query, as BEIR does.
        """
        k = converted(PositiveInt, k, "k")
        queries = texts_by_id(queries)
        # one passage more, because one may have the id of the query
        rankings = list(self.rank(queries, k + ignore_identical_ids))
        run = make_run(queries, rankings, self.corpus)
        if ignore_identical_ids:
            for query_id, hits in run.items():
                run[query_id] = [hit for hit in hits if hit[0] != query_id][:k]
        empty = sum(not hits for hits in run.values())
        if 2 * empty > len(run) > 1:
            warnings.warn(
                f"no passage was found for {empty} of {len(run)} queries. With BM25, these queries "
                "share no word with any passage: are both in the same language?",
                stacklevel=2,
            )
        return run

    @abstractmethod
    def rank(
        self, queries: Mapping[str, str], k: int, positives: Sequence[Sequence[int]] = ()
    ) -> Iterator[Ranking]:
        """Yield the ranking of each query: its k best passages, or fewer if fewer are found.

        positives: for each query, the row numbers of its positives. The rows of ``extra`` (see
        ``open``) follow the corpus rows. Empty: no query has positives.
        """


def refuse_unused(settings: Any, defaults: Any, names: Sequence[str]) -> None:
    """Raise InputError if one of the settings ``names`` was changed, because bm25 does not use it.

    settings, defaults: instances of the same dataclass.
    """
    for name in names:
        if (value := getattr(settings, name)) != getattr(defaults, name):
            raise InputError(f"{name} {value!r} needs an encoder, and bm25 has none")


class DenseRetriever(Retriever):
    """Retriever that ranks passages by inner product, exactly or with a faiss index."""

    def __init__(
        self,
        encoder: "DualEncoder",
        corpus: Dataset,
        settings: SearchConfig,
        group: Processes,
        extra: Dataset | None,
    ) -> None:
        """See ``Retriever.open``."""
        settings.check(group.world)
        self.encoder = encoder
        self.precision = encoder.precision
        self.corpus = corpus
        self.settings = settings
        self.group = group
        self.extra: Shards = []  # vectors of positives outside the corpus
        if extra is not None:
            self.extra = [encode_in_memory(encoder, Texts("passage", extra), settings.batch_tokens)]
        self.index: ExactIndex | Index
        device = str(encoder.device)
        if settings.factory == "Flat":
            self.index = ExactIndex(*self.vectors, backend=settings.backend, device=device)
            return
        if settings.index_dir is None:
            self.index = Index.build(self.vectors[0], Origin(settings.factory), device)
        else:
            # the saved index belongs to these texts and this encoder
            source = Texts("passage", corpus).fingerprint
            origin = Origin(
                settings.factory, encoder.fingerprint("passage", settings.batch_tokens), source
            )
            self.index = Index.load_or_build(
                settings.index_dir, origin, lambda: self.vectors[0], device
            )
        self.index.set_search_params(settings.search_params)

    @cached_property
    def vectors(self) -> tuple[Shards, int]:
        """Vectors of the corpus, or of this process's part, and the row number of the first one.

        A saved index is searched without them, so they are read or computed when first needed.
        """
        return passage_vectors(self.encoder, self.corpus, self.settings, self.group)

    def rank(
        self, queries: Mapping[str, str], k: int, positives: Sequence[Sequence[int]] = ()
    ) -> Iterator[Ranking]:
        texts = Texts.of_queries(queries)
        # (n, d)
        vectors = encode_in_memory(self.encoder, texts, self.settings.batch_tokens).vectors
        scores, rows = self.index.search(vectors, k)  # (n, k)
        if self.group.world > 1:
            scores, rows = best_first(self._of_all(scores), self._of_all(rows), k)
        # (n, most positives of a query)
        wanted = np.full((len(queries), max(map(len, positives), default=0)), -1)
        for number, query_positives in enumerate(positives):
            wanted[number, : len(query_positives)] = query_positives
        positive_scores = wanted.astype(np.float32)
        if wanted.size:
            shards, first_row = self.vectors
            positive_scores = np.maximum(
                inner_products(vectors, shards, wanted, first_row),
                inner_products(vectors, self.extra, wanted, first_row=len(self.corpus)),
            )
            if isinstance(self.index, Index):
                # an approximate index may round scores, and negatives are compared with the exact
                # scores of positives
                scores = inner_products(vectors, shards, rows, first_row)
                scores, rows = best_first(scores, rows, k)
        for number in range(len(queries)):
            found = rows[number] >= 0
            yield Ranking(
                rows[number][found],
                scores[number][found],
                positive_scores[number][wanted[number] >= 0],
            )

    def _of_all(self, own: np.ndarray) -> np.ndarray:
        """Return the columns of all processes. own: (n, m), where m may differ."""
        parts = self.group.gather_bytes(own.tobytes())
        return np.hstack([np.frombuffer(part, own.dtype).reshape(len(own), -1) for part in parts])


class BM25(Retriever):
    """Retriever that ranks passages by the BM25 score of their title and text.

    bm25s computes Lucene's variant (k1 = 1.5, b = 0.75), without English stop words and without
    stemming; ``words_of`` describes the words. Memory holds the tokenized corpus. A passage that
    shares no word with a query is not found. Source: Robertson et al. 1994; bm25s, arXiv
    2407.03618.
    """

    def __init__(self, corpus: Dataset, extra: Dataset | None = None) -> None:
        """extra: positives outside the corpus.

        They are never found, but BM25's document frequencies include them.
        """
        import bm25s  # the import takes a quarter of a second

        self.corpus = corpus
        passages = corpus if extra is None else concatenate_datasets([corpus, extra])
        self._count = len(passages)
        self._vocabulary: dict[str, int] = {}
        rows = [
            [
                self._vocabulary.setdefault(word, len(self._vocabulary))
                for word in words_of(passage.content, of_query=False)
            ]
            for batch in column_batches(passages, PASSAGE_COLUMNS)
            for passage in Passage.of_columns(batch)
        ]
        if self._vocabulary:  # bm25s divides by zero if the corpus has no words
            self._index = bm25s.BM25()
            self._index.index((rows, self._vocabulary), show_progress=False)

    def rank(
        self, queries: Mapping[str, str], k: int, positives: Sequence[Sequence[int]] = ()
    ) -> Iterator[Ranking]:
        bar = progress_bar(len(queries), "searching", "queries", queries.values())
        for number, query in enumerate(bar):
            scores = np.zeros(self._count, dtype=np.float32)
            if words := [word for word in words_of(query) if word in self._vocabulary]:
                scores = self._index.get_scores(words)
            in_corpus = scores[: len(self.corpus)]
            kth_score = np.partition(in_corpus, -k)[-k] if k < len(in_corpus) else 0
            rows = np.flatnonzero((in_corpus >= kth_score) & (in_corpus > 0))
            # equal scores stay in the order of the corpus
            rows = rows[np.argsort(-in_corpus[rows], kind="stable")][:k]
            own = list(positives[number]) if positives else []
            yield Ranking(rows, in_corpus[rows], scores[own])


def words_of(text: str, of_query: bool = True) -> list[str]:
    """Return the words of a text for BM25, without English stop words.

    A word is a sequence of letters, digits and combining marks, without regard to case, to variants
    of a character (Unicode NFKC), and to vowel points. A single letter is a word: vitamin C. In
    scripts without spaces (Chinese, Japanese, Thai, ...) and in Korean, the words are all pairs of
    neighbouring characters, as in Lucene's CJKAnalyzer. There, a passage also has its single
    characters, so that a query of one character can be found.

    of_query: whether the text is a query.
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    if text.isascii():
        return [word for word in _ASCII_WORD.findall(text) if word not in STOP_WORDS]
    words: list[str] = []
    for match in _WORD.finditer(_POINTS.sub("", text)):
        word = match[0]
        if match["unspaced"] is None:
            if word not in STOP_WORDS:
                words.append(word)
            continue
        if len(word) == 1 or not of_query:
            words += word
        words += [word[start : start + 2] for start in range(len(word) - 1)]
    return words


def index_settings(settings: SearchConfig) -> dict[str, Any]:
    """Return the search settings that can change the passages found for equal vectors."""
    if settings.factory == "Flat":
        return {"factory": "Flat"}
    return {"factory": settings.factory, "search_params": settings.search_params}


def search(
    model: "EncoderConfig | DualEncoder | str | Path",
    data: str | Path,
    split: str = "test",
    k: int = 100,
    *,
    settings: SearchConfig = DEFAULTS,
    policy: DataPolicy = DEFAULT_POLICY,
    output: str | Path | None = None,
    group: Processes = ALONE,
) -> Run:
    """Return the k best passages per query: query id -> list of (passage id, score).

    The queries are those that the split judges, or all queries of a BEIR folder without qrels. A
    passage with the id of the query is left out, as in BEIR. model: an encoder, the name or the
    config of an encoder, or ``bm25``. policy: what to do with bad records. output: TREC run file to
    write. group: processes (see ``joined``) that share the work. All of them must call this
    function, and each gets the same run.
    """
    refuse_other_file(output, "run")
    with group.main_first():
        judged = open_dataset(data, split, policy).search_set
    if output is not None:  # encoding may take hours
        ids = (batch["id"] for batch in column_batches(judged.corpus, ["id"]))
        require_run_ids(output, chain(judged.queries, chain.from_iterable(ids)))
    retriever = Retriever.open(model, judged.corpus, settings, group)  # encodes the corpus
    run = retriever.search(judged.queries, k, ignore_identical_ids=judged.skips_own_id)
    if output is not None and group.is_main:
        write_run(output, run)
    return run


def look(
    model: "EncoderConfig | DualEncoder | str | Path",
    data: str | Path,
    query: str,
    k: int = 10,
    *,
    split: str = "test",
    settings: SearchConfig = DEFAULTS,
    policy: DataPolicy = DEFAULT_POLICY,
    group: Processes = ALONE,
) -> list[RankedPassage]:
    """Return the k best passages for one query text, with title and text.

    split: used only for a data set of the Hub.
    """
    if not query.strip():
        raise InputError("the query is empty; expected a text")
    with group.main_first():
        dataset = open_dataset(data, split, policy)
        corpus = dataset.corpus
    run = Retriever.open(model, corpus, settings, group).search({"query": query}, k)
    return read_passages(corpus, run["query"])
