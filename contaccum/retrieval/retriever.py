"""Find the best passages of a corpus for each query, with an encoder or with BM25."""

import operator
import re
import unicodedata
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import regex
from datasets import Dataset, concatenate_datasets
from tqdm.auto import tqdm

from contaccum.config.commands import DataPolicy, EncoderConfig, SearchConfig
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.errors import InputError
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
    Run,
    make_run,
    read_passages,
    refuse_unwritable_ids,
    write_run,
)
from contaccum.retrieval.shards import Shards, refuse_infinite
from contaccum.runtime.checks import refuse_input_as_output, require_queries, require_utf8
from contaccum.runtime.processes import ALONE, Processes

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

Scored = tuple[list[tuple[str, float]], np.ndarray]
"""Best passages of a query, as (passage id, score), and scores of its P positives, (P,) float32."""


class Retriever(ABC):
    """Base class of retrievers. A retriever searches one corpus."""

    precision: str | None = None
    """Precision of the encoder. None: there is no encoder."""

    @staticmethod
    def open(
        model: "EncoderConfig | DualEncoder | str | Path",
        corpus: Dataset,
        settings: SearchConfig = DEFAULTS,
        group: Processes = ALONE,
        *,
        extra: Dataset | None = None,
    ) -> "Retriever":
        """Load the model, then encode or index the corpus (columns id, title, text).

        model: an encoder, the name or the config of an encoder, or ``bm25``. group: processes of
        this search. They divide the corpus among themselves, must all search for the same queries,
        and each gets the complete run. extra: positives of the queries that are not in the corpus.
        ``search_with_positives`` returns their scores, but they are never found.
        """
        if isinstance(model, str | Path):
            model = EncoderConfig.of(model)
        if isinstance(model, EncoderConfig) and model.model == BM25_NAME:
            return BM25(corpus, extra)
        validate_search(settings, group)
        if isinstance(model, EncoderConfig):
            folders = (settings.index_dir, settings.embeddings)
            model = load_encoder_of(model, "passage", lambda: Texts.of_corpus(corpus), *folders)
        return DenseRetriever(model, corpus, settings, group, extra)

    def search(
        self, queries: Mapping[str, str], k: int = 100, *, ignore_identical_ids: bool = False
    ) -> Run:
        """Return the k best passages for each query, or fewer if the search finds fewer.

        Passages with equal scores are in the order of the corpus. queries: query id -> text.
        ignore_identical_ids: leave out a passage whose id equals the id of the query, as BEIR does.
        """
        k = require_k(k)
        require_queries(queries)
        if not ignore_identical_ids:
            return self._search(queries, k)
        run = self._search(queries, k + 1)  # one of the k + 1 passages may have the id of the query
        return {
            query_id: [hit for hit in hits if hit[0] != query_id][:k]
            for query_id, hits in run.items()
        }

    @abstractmethod
    def _search(self, queries: Mapping[str, str], k: int) -> Run: ...

    @abstractmethod
    def search_with_positives(
        self, queries: Sequence[str], positives: Sequence[Sequence[int]], k: int
    ) -> Iterator[Scored]:
        """Yield, for each query text, the k best passages and the scores of the query's positives.

        positives: for each query, the row numbers of its positives. The rows of ``extra`` (see
        ``open``) follow the corpus rows.
        """


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
        self.encoder = encoder
        self.precision = encoder.precision
        self.corpus = corpus
        self.settings = settings
        self.group = group
        self.extra: Shards = []  # vectors of positives outside the corpus
        if extra is not None:
            self.extra = [encode_in_memory(encoder, Texts.of_corpus(extra), settings.batch_tokens)]
        self.index: ExactIndex | Index
        if settings.factory == "Flat":
            shards, first_row = self.vectors
            self.index = ExactIndex(
                shards, first_row, backend=settings.backend, device=str(encoder.device)
            )
        else:
            origin = Origin(settings.factory, settings.seed)
            if (
                settings.index_dir is not None
            ):  # the saved index belongs to these texts and this encoder
                source = Texts.of_corpus(corpus).fingerprint
                origin = Origin(
                    settings.factory, settings.seed, encoder.fingerprint("passage"), source
                )
            self.index = Index.load_or_build(settings.index_dir, origin, lambda: self.vectors[0])
            self.index.device = str(encoder.device)
            self.index.set_search_params(settings.search_params)

    @cached_property
    def vectors(self) -> tuple[Shards, int]:
        """Vectors of the corpus, or of this process's part, and the row number of the first one.

        A saved index is searched without them, so they are read or computed when first needed.
        """
        return passage_vectors(self.encoder, self.corpus, self.settings, self.group)

    def _search(self, queries: Mapping[str, str], k: int) -> Run:
        encoded = encode_in_memory(
            self.encoder, Texts.of_queries(queries), self.settings.batch_tokens
        )
        scores, rows = self.index.search(encoded.vectors, k)  # (n, k)
        if self.group.world > 1:
            gathered_scores = self.group.gather_bytes(scores.tobytes())
            gathered_rows = self.group.gather_bytes(rows.tobytes())
            # a process with fewer than k passages returns fewer columns
            scores = np.hstack(
                [
                    np.frombuffer(part, np.float32).reshape(len(queries), -1)
                    for part in gathered_scores
                ]
            )
            rows = np.hstack(
                [np.frombuffer(part, np.int64).reshape(len(queries), -1) for part in gathered_rows]
            )
            scores, rows = best_first(scores, rows, k)
        return make_run(encoded.ids, scores, rows, self.corpus)

    def search_with_positives(
        self, queries: Sequence[str], positives: Sequence[Sequence[int]], k: int
    ) -> Iterator[Scored]:
        texts = Texts.of_queries({str(number): text for number, text in enumerate(queries)})
        # (n, d)
        vectors = encode_in_memory(self.encoder, texts, self.settings.batch_tokens).vectors
        shards, first_row = self.vectors
        scores, rows = self.index.search(vectors, k)
        if isinstance(self.index, Index):
            # an approximate index may round scores, and negatives are compared with the exact
            # scores of positives
            scores, rows = best_first(inner_products(vectors, shards, rows, first_row), rows, k)
        # (n, most positives of a query)
        wanted = np.full((len(queries), max(map(len, positives), default=0)), -1)
        for number, query_positives in enumerate(positives):
            wanted[number, : len(query_positives)] = query_positives
        positive_scores = np.maximum(
            inner_products(vectors, shards, wanted, first_row),
            inner_products(vectors, self.extra, wanted, first_row=len(self.corpus)),
        )
        run = make_run(texts.read(0, len(queries))[0], scores, rows, self.corpus)
        for number, hits in enumerate(run.values()):
            yield hits, positive_scores[number, : len(positives[number])]


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
        self.ids, contents = Texts.of_corpus(passages).read(0, len(passages))
        self._vocabulary: dict[str, int] = {}
        rows = [
            [
                self._vocabulary.setdefault(word, len(self._vocabulary))
                for word in words_of(content, of_query=False)
            ]
            for content in contents
        ]
        self._index = None
        if self._vocabulary:  # bm25s divides by zero if the corpus has no words
            self._index = bm25s.BM25()
            self._index.index((rows, self._vocabulary), show_progress=False)

    def scores(self, queries: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield, for each query text, the scores of all n passages, (n,) float32.

        A passage without words of the query gets 0.
        """
        for query in tqdm(queries, desc="BM25", unit="query", disable=None, leave=False):
            words = [word for word in words_of(query) if word in self._vocabulary]
            if words and self._index is not None:
                yield self._index.get_scores(words)
            else:
                yield np.zeros(len(self.ids), dtype=np.float32)

    def _search(self, queries: Mapping[str, str], k: int) -> Run:
        scores = self.scores(list(queries.values()))
        run = {
            query_id: self._best(query_scores, k)
            for query_id, query_scores in zip(queries, scores, strict=True)
        }
        empty = sum(not hits for hits in run.values())
        if 2 * empty > len(run) > 1:
            warnings.warn(
                f"BM25 found no passage for {empty} of {len(run)} queries, because they share no "
                "word with any passage. Are queries and passages in the same language?",
                stacklevel=3,
            )
        return run

    def search_with_positives(
        self, queries: Sequence[str], positives: Sequence[Sequence[int]], k: int
    ) -> Iterator[Scored]:
        for scores, rows in zip(self.scores(queries), positives, strict=True):
            yield self._best(scores, k), scores[list(rows)]

    def _best(self, scores: np.ndarray, k: int) -> list[tuple[str, float]]:
        scores = scores[: len(self.corpus)]
        k = min(k, len(scores))
        if k == 0:  # the corpus is empty
            return []
        kth_score = np.partition(scores, -k)[-k]
        rows = np.flatnonzero((scores >= kth_score) & (scores > 0))
        # equal scores stay in the order of the corpus
        rows = rows[np.argsort(-scores[rows], kind="stable")][:k]
        return [(self.ids[row], float(scores[row])) for row in rows]


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


def search_vectors(
    query_ids: Sequence[str],
    query_vectors: np.ndarray,
    shards: Shards,
    k: int = 100,
    *,
    device: str = "auto",
    **options: Any,
) -> Run:
    """Return, for each query vector, the k passages with the largest inner products.

    query_vectors: (n, d) float32. device: ``cpu`` searches without GPUs. options: settings of
    ``SearchConfig``, such as ``factory`` and ``backend``. Raises InputError if dimensions differ,
    if a vector is not finite, or if settings conflict.
    """
    settings = SearchConfig(**options)
    validate_search(settings)
    k = require_k(k)
    width = shards[0].vectors.shape[1] if len(shards) else query_vectors.shape[1]
    if query_vectors.shape[1] != width:
        raise InputError(
            f"query vectors have dimension {query_vectors.shape[1]}, but passage vectors have "
            f"{width}; use one encoder for both"
        )
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused
        vectors = np.ascontiguousarray(query_vectors, dtype=np.float32)
    refuse_infinite("query", query_ids, vectors)
    if settings.factory == "Flat":
        scores, rows = ExactIndex(shards, backend=settings.backend, device=device).search(
            vectors, k
        )
    else:
        index = Index.build(shards, Origin(settings.factory, settings.seed))
        index.device = device
        index.set_search_params(settings.search_params)
        scores, rows = index.search(vectors, k)
    ids = [passage_id for shard in shards for passage_id in shard.ids]
    return make_run(query_ids, scores, rows, Dataset.from_dict({"id": ids}))


def require_k(k: int) -> int:
    """Return k as a Python number, because faiss refuses numbers of NumPy.

    Raise InputError if k is not positive.
    """
    if not hasattr(k, "__index__") or k < 1:
        raise InputError(f"k is {k}; expected a whole number of at least 1")
    return operator.index(k)


def validate_search(settings: SearchConfig, group: Processes = ALONE) -> None:
    """Raise InputError if settings contradict each other or the number of processes."""
    if settings.factory == "Flat":
        if settings.search_params:
            raise InputError(
                f"search_params {settings.search_params!r} has no effect on the exact index "
                "'Flat'. Leave search_params out, or choose an approximate index with --factory."
            )
        if settings.index_dir:
            raise InputError(
                f"index_dir {settings.index_dir!r} has no effect on the exact index 'Flat'. Use "
                "--embeddings to save the vectors that exact search reads."
            )
        return
    if group.world > 1:
        raise InputError(
            f"index {settings.factory!r} needs one process, but {group.world} were started. Start "
            "one process (it can read embeddings that several processes made), or use the exact "
            "index 'Flat'."
        )
    if settings.backend == "torch":
        raise InputError(
            f"factory {settings.factory!r} needs the backend faiss; the backend torch supports "
            "only 'Flat'"
        )


def index_settings(settings: SearchConfig) -> dict[str, Any]:
    """Return the search settings that can change the passages found for equal vectors."""
    if settings.factory == "Flat":
        return {"factory": "Flat"}
    return {
        "factory": settings.factory,
        "search_params": settings.search_params,
        "index_seed": settings.seed,
    }


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

    A passage with the id of the query is left out, as in BEIR. model: an encoder, the name or the
    config of an encoder, or ``bm25``. policy: what to do with bad records. output: TREC run file to
    write. If it is set, an id with white space raises InputError before the search. group:
    processes (see ``joined``) that share the work. All of them must call this function, and each
    gets the same run.
    """
    refuse_input_as_output(
        output, data, getattr(model, "model", model), settings.embeddings, settings.index_dir
    )
    with group.main_first():
        judged = open_dataset(data, split, policy).retrieval_set
    if output is not None:
        refuse_unwritable_ids(output, judged.queries, judged.corpus)
    run = Retriever.open(model, judged.corpus, settings, group).search(
        judged.queries, k, ignore_identical_ids=judged.skips_own_id
    )
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
    require_utf8(query, "the query")
    with group.main_first():
        dataset = open_dataset(data, split, policy)
        corpus = dataset.corpus if dataset.path.is_dir() else dataset.searchable_set.corpus
    run = Retriever.open(model, corpus, settings, group).search({"query": query}, k)
    return read_passages(corpus, run["query"])
