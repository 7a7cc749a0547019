"""Find the best passages of a corpus for each query, with the vectors of an encoder or with BM25."""

import json
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from tqdm.auto import tqdm

from contaccum.config.commands import DataPolicy, EncoderConfig, SearchConfig
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.errors import InputError
from contaccum.retrieval.encode import Texts, encode_in_memory, passage_shards
from contaccum.retrieval.exact import Ranker, exact_ranker, rescore
from contaccum.retrieval.index import Index, Origin
from contaccum.retrieval.runs import RankedPassage, Run, ranked, read_passages, refuse_unwritable_ids, write_run
from contaccum.retrieval.shards import Shard, Shards, refuse_infinite
from contaccum.runtime.checks import refuse_input_as_output, require_queries, require_utf8
from contaccum.runtime.processes import ALONE, Processes

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder

BM25_NAME = "bm25"
"""Model name that selects BM25."""
WORDS = {"token_pattern": r"(?u)\b\w\w+\b", "stopwords": "en"}
"""Settings of the bm25s tokenizer: lower-cased words of two characters or more, without English stop words."""
DEFAULTS = SearchConfig()

Scored = tuple[list[tuple[str, float]], np.ndarray]
"""Best passages of a query, as (passage id, score), and scores of its P positives, (P,) float32."""


class Retriever(ABC):
    """Base class of retrievers. A retriever searches one corpus."""

    fingerprint: str  # hash of the model's weights and settings, or bm25
    index_settings: dict[str, Any]  # search settings that can change which passages are found

    @staticmethod
    def open(
        model: "EncoderConfig | DualEncoder | str | Path",
        corpus: Dataset,
        settings: SearchConfig = DEFAULTS,
        group: Processes = ALONE,
        *,
        mining: bool = False,
        extra: Dataset | None = None,
    ) -> "Retriever":
        """Load the model, then encode or index the corpus (columns id, title, text).

        model: an encoder, the name or the config of an encoder, or ``bm25``. group: processes of this search. mining: if False,
        the processes divide the corpus among themselves; all of them must search for the same queries, and each gets the complete
        run. If True, each process searches the whole corpus for its own queries, and the scores are exact inner products, even
        with an approximate index. extra: positives of the queries that are not in the corpus. ``search_with_positives`` returns
        their scores, but they are never among the passages found.
        """
        config = EncoderConfig.of(model) if isinstance(model, str | Path) else model
        if isinstance(config, EncoderConfig) and config.model == BM25_NAME:
            return BM25(corpus, extra)
        validate_search(settings, group)
        if mining and group.world > 1 and settings.embeddings is None:
            raise InputError(
                f"{group.world} processes were started without --embeddings; set it to a folder where the processes share vectors"
            )
        from contaccum.encoder import load_encoder

        encoder = load_encoder(config) if isinstance(config, EncoderConfig) else config
        exact = settings.factory == "Flat"
        shards = passage_shards(encoder, corpus, settings, group, whole=mining) if exact or mining else []
        extras = [] if extra is None else [encode_in_memory(encoder, Texts.of_corpus(extra), settings.batch_tokens)]
        if exact:
            rank = exact_ranker(shards, settings.backend, str(encoder.device))
        else:
            rank = index_ranker(_open_index(encoder, corpus, settings, shards), shards if mining else None)
        return DenseRetriever(encoder, settings, group, shards, extras, rank)

    def search(self, queries: Mapping[str, str], k: int = 100, *, ignore_identical_ids: bool = False) -> Run:
        """Return the k best passages for each query, or fewer if the search finds fewer.

        queries: query id -> text. ignore_identical_ids: leave out a passage whose id equals the id of the query, as BEIR does.
        """
        k = require_k(k)
        require_queries(queries)
        if not ignore_identical_ids:
            return self._search(queries, k)
        run = self._search(queries, k + 1)  # one of the k + 1 passages may have the id of the query
        return {query_id: [hit for hit in hits if hit[0] != query_id][:k] for query_id, hits in run.items()}

    @abstractmethod
    def _search(self, queries: Mapping[str, str], k: int) -> Run: ...

    @abstractmethod
    def search_with_positives(
        self, queries: Sequence[str], positives: Sequence[Sequence[int]], k: int
    ) -> Iterator[Scored]:
        """Yield, for each query text, the k best passages and the scores of the query's positives.

        positives: for each query, the row numbers of its positives. The rows of ``extra`` (see ``open``) follow the corpus rows.
        """


@dataclass(eq=False)
class DenseRetriever(Retriever):
    """Retriever that ranks passages by the inner product of vectors, either exactly or with a faiss index."""

    encoder: "DualEncoder"
    settings: SearchConfig
    group: Processes
    shards: Shards  # vectors of the corpus; empty if a faiss index is searched, except for mining
    extra: list[Shard]  # vectors of positives outside the corpus; they are scored, but never among the passages found
    rank: Ranker

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        return f"{self.encoder.fingerprint('query')} {self.encoder.fingerprint('passage')}"

    @property
    def index_settings(self) -> dict[str, Any]:  # type: ignore[override]
        return index_settings(self.settings) | {"dtype": str(self.shards[0].vectors.dtype)}

    def _search(self, queries: Mapping[str, str], k: int) -> Run:
        encoded = encode_in_memory(self.encoder, Texts.of_queries(queries), self.settings.batch_tokens)
        run = dict(zip(encoded.ids, self.rank(encoded.vectors, k), strict=True))
        if self.group.world == 1:
            return run
        # a score depends only on its query and passage, so the merged run equals the run of one process
        runs = [json.loads(part) for part in self.group.gather_bytes(json.dumps(run).encode())]
        return {query: ranked(((hit[0], hit[1]) for part in runs for hit in part[query]), k) for query in run}

    def search_with_positives(
        self, queries: Sequence[str], positives: Sequence[Sequence[int]], k: int
    ) -> Iterator[Scored]:
        texts = Texts.of_queries({str(number): text for number, text in enumerate(queries)})
        vectors = encode_in_memory(self.encoder, texts, self.settings.batch_tokens).vectors  # (n, d)
        padded = np.array(list(zip_longest(*positives, fillvalue=-1))).T  # (n, most positives of a query)
        _, scores, _ = rescore(vectors, chain(self.shards, self.extra), padded)
        for ranking, values, own in zip(self.rank(vectors, k), scores, positives, strict=True):
            yield ranking, values[: len(own)]


class BM25(Retriever):
    """Retriever that ranks passages by the BM25 score of their title and text.

    bm25s computes Lucene's variant (k1 = 1.5, b = 0.75), without English stop words and without stemming. Memory holds the
    tokenized corpus. A passage that shares no word with a query is not found. Source: Robertson et al. 1994; bm25s,
    arXiv 2407.03618.
    """

    def __init__(self, corpus: Dataset, extra: Dataset | None = None) -> None:
        """extra: positives outside the corpus. They are never found, but BM25's document frequencies include them."""
        import bm25s  # the import takes a quarter of a second

        self.fingerprint, self.index_settings = BM25_NAME, {}
        passages = corpus if extra is None else concatenate_datasets([corpus, extra])
        self.ids, contents = Texts.of_corpus(passages).read(0, len(passages))
        self._rows = len(corpus)
        tokens = bm25s.tokenize(contents, show_progress=False, **WORDS)
        self._index = None
        if tokens.vocab:  # bm25s divides by zero if the corpus has no words
            self._index = bm25s.BM25()
            self._index.index(tokens, show_progress=False)

    def scores(self, queries: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield, for each query text, the scores of all n passages, (n,) float32. A passage without words of the query gets 0."""
        for terms in tqdm(words_of(queries), desc="BM25", unit="query", disable=None, leave=False):
            if terms and self._index is not None:
                yield self._index.get_scores(terms)
            else:
                yield np.zeros(len(self.ids), dtype=np.float32)

    def _search(self, queries: Mapping[str, str], k: int) -> Run:
        scores = self.scores(list(queries.values()))
        return {query_id: self._best(own, k) for query_id, own in zip(queries, scores, strict=True)}

    def search_with_positives(
        self, queries: Sequence[str], positives: Sequence[Sequence[int]], k: int
    ) -> Iterator[Scored]:
        for scores, rows in zip(self.scores(queries), positives, strict=True):
            yield self._best(scores, k), scores[list(rows)]

    def _best(self, scores: np.ndarray, k: int) -> list[tuple[str, float]]:
        scores = scores[: self._rows]
        k = min(k, len(scores))
        if k == 0:  # the corpus is empty
            return []
        least = max(float(np.partition(scores, -k)[-k]), np.finfo(np.float32).tiny)
        return ranked(((self.ids[row], float(scores[row])) for row in np.flatnonzero(scores >= least)), k)


def words_of(texts: Sequence[str]) -> list[list[str]]:
    """Return, for each text, the list of words that BM25 uses."""
    import bm25s

    return bm25s.tokenize(list(texts), return_ids=False, show_progress=False, **WORDS)


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

    query_vectors: (n, d) float32. device: ``cpu`` searches without GPUs. options: settings of ``SearchConfig``, such as
    ``factory`` and ``backend``. Raises InputError if dimensions differ, if a vector is not finite, or if settings conflict.
    """
    settings = SearchConfig(**options)
    validate_search(settings)
    k = require_k(k)
    width = shards[0].vectors.shape[1] if len(shards) else query_vectors.shape[1]
    if query_vectors.shape[1] != width:
        raise InputError(
            f"query vectors have dimension {query_vectors.shape[1]}, but passage vectors have {width}; use one encoder for both"
        )
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused
        vectors = np.ascontiguousarray(query_vectors, dtype=np.float32)
    refuse_infinite("query", query_ids, vectors)
    if settings.factory == "Flat":
        rank = exact_ranker(shards, settings.backend, device)
    else:
        index = Index.build(shards, Origin(settings.factory, settings.seed))
        index.device = device
        index.set_search_params(settings.search_params)
        rank = index_ranker(index)
    return dict(zip(query_ids, rank(vectors, k), strict=True))


def index_ranker(index: Index, shards: Shards | None = None) -> Ranker:
    """Return a function that searches the index. If ``shards`` is given, the passages found are sorted by exact scores."""

    def rank(queries: np.ndarray, k: int) -> list[list[tuple[str, float]]]:
        scores, rows = index.search(queries, k)
        if shards is not None:
            _, scores, _ = rescore(queries, shards, rows)
        return [  # row -1: no passage
            ranked((index.ids[row], float(score)) for row, score in zip(*found, strict=True) if row >= 0)
            for found in zip(rows, scores, strict=True)
        ]

    return rank


def require_k(k: int) -> int:
    """Return k as a Python number, because faiss refuses numbers of NumPy. Raise InputError if k is not positive."""
    if not hasattr(k, "__index__") or k < 1:
        raise InputError(f"k is {k}; expected a whole number of at least 1")
    return operator.index(k)


def validate_search(settings: SearchConfig, group: Processes = ALONE) -> None:
    """Raise InputError if the settings contradict each other or do not work with the number of processes."""
    if settings.factory == "Flat":
        fixes = {
            "search_params": "Leave search_params out, or choose an approximate index with --factory.",
            "index_dir": "Use --embeddings to save the vectors that exact search reads.",
        }
        for name, fix in fixes.items():
            if value := getattr(settings, name):
                raise InputError(f"{name} {value!r} has no effect on the exact index 'Flat'. {fix}")
        return
    if group.world > 1:
        raise InputError(
            f"index {settings.factory!r} needs one process, but {group.world} were started. Start one process (it can read "
            "embeddings that several processes made), or use the exact index 'Flat'."
        )
    if settings.backend == "torch":
        raise InputError(
            f"factory {settings.factory!r} needs the backend faiss; the backend torch supports only 'Flat'"
        )


def index_settings(settings: SearchConfig) -> dict[str, Any]:
    """Return the search settings that can change which passages are found, even if the vectors stay the same."""
    if settings.factory == "Flat":
        return {"factory": "Flat"}
    return {"factory": settings.factory, "search_params": settings.search_params, "index_seed": settings.seed}


def _open_index(encoder: "DualEncoder", corpus: Dataset, settings: SearchConfig, shards: Shards) -> Index:
    """Load the saved index of the corpus, or build it from ``shards``. If ``shards`` is empty, first encode the corpus."""
    origin = Origin(settings.factory, settings.seed)
    if settings.index_dir is not None:
        origin = replace(origin, encoder=encoder.fingerprint("passage"), source=Texts.of_corpus(corpus).fingerprint)
    index = Index.load_or_build(settings.index_dir, origin, lambda: shards or passage_shards(encoder, corpus, settings))
    index.device = str(encoder.device)
    index.set_search_params(settings.search_params)
    return index


def search(
    choice: "EncoderConfig | DualEncoder | str | Path",
    data: str | Path,
    split: str = "test",
    k: int = 100,
    settings: SearchConfig = DEFAULTS,
    repair: bool = False,
    max_bad_records: int = 0,
    output: str | None = None,
    group: Processes = ALONE,
    policy: DataPolicy | None = None,
) -> Run:
    """Return the k best passages for each query of a split: query id -> list of (passage id, score), best first.

    A passage with the id of the query is left out, as in BEIR. choice: an encoder, the name or the config of an encoder, or
    ``bm25``. output: TREC run file to write. If it is set, an id with white space raises InputError before the search. group:
    processes (see ``joined``) that share the work. All of them must call this function, and each gets the same run. policy:
    what to do with bad records. None: use ``repair`` and ``max_bad_records``.
    """
    policy = policy or DataPolicy(repair=repair, max_bad_records=max_bad_records)
    refuse_input_as_output(output, data, getattr(choice, "model", choice), settings.embeddings, settings.index_dir)
    with group.main_first():
        judged = open_dataset(data, split, policy).retrieval_set
    if output is not None:
        refuse_unwritable_ids(output, judged.queries, judged.corpus)
    retriever = Retriever.open(choice, judged.corpus, settings, group)
    run = retriever.search(judged.queries, k, ignore_identical_ids=True)
    if output is not None and group.is_main:
        write_run(output, run)
    return run


def look(
    choice: "EncoderConfig | DualEncoder | str | Path",
    data: str | Path,
    query: str,
    k: int = 10,
    settings: SearchConfig = DEFAULTS,
    policy: DataPolicy = DEFAULT_POLICY,
    group: Processes = ALONE,
    split: str = "test",
) -> list[RankedPassage]:
    """Return the k best passages for one query text, with title and text. split: used only for a data set of the Hub."""
    require_utf8(query, "the query")
    with group.main_first():
        given = open_dataset(data, split, policy)
        corpus = given.corpus if given.path.is_dir() else given.searchable_set.corpus
    run = Retriever.open(choice, corpus, settings, group).search({"query": query}, k)
    return read_passages(corpus, run["query"])
