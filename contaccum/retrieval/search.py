"""Search: from query vectors, or an encoder and texts, to a run."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from contaccum.errors import InputError
from contaccum.options import SearchSettings
from contaccum.processes import ALONE, Processes
from contaccum.retrieval.encode import Encoder, Texts, encode_in_memory, encode_own, encode_texts, open_embeddings
from contaccum.retrieval.exact import Candidates, exact_search, find_candidates
from contaccum.retrieval.index import Index, Origin
from contaccum.retrieval.runs import Run, ranked
from contaccum.retrieval.shards import MANIFEST, Shard, Shards, kept_dtype

if TYPE_CHECKING:
    from datasets import Dataset


DEFAULTS = SearchSettings()


def search(
    query_ids: Sequence[str],
    query_vectors: np.ndarray,
    shards: Shards,
    k: int = 100,
    *,
    factory: str = "Flat",
    backend: str = "auto",
    search_params: str = "",
    seed: int = 0,
    device: str = "auto",
) -> Run:
    """The k passages of highest inner product for each query; all of them when the corpus holds fewer.

    query_vectors (n, d) float32. ``Flat`` is exact and streams the shards; any other faiss ``factory`` string is
    built in memory and is approximate, ``search_params`` (``nprobe=16``) trading its speed for recall. ``device`` ``cpu`` keeps
    the search off the GPUs that there are. Raises InputError when the dimensions differ, a query vector is not finite, or the
    settings do not go together.
    """
    if factory != "Flat":
        settings = SearchSettings(factory=factory, backend=backend, search_params=search_params, seed=seed)  # type: ignore[arg-type]
        return search_index(query_ids, query_vectors, build_index(lambda: shards, settings, device), k)
    check_exact(search_params)
    return _search_shards(query_ids, query_vectors, shards, k, find_candidates(shards, backend, device))


def _search_shards(
    query_ids: Sequence[str], query_vectors: np.ndarray, shards: Shards, k: int, candidates: Candidates
) -> Run:
    dimension = shards[0].vectors.shape[1] if len(shards) else query_vectors.shape[1]
    queries = _checked_queries(query_ids, query_vectors, dimension, k)
    return dict(zip(query_ids, exact_search(queries, shards, k, candidates), strict=True))


def build_index(shards: Callable[[], Shards], settings: SearchSettings, device: str) -> Index:
    """The settings' approximate index of vectors that are asked for once the settings are seen to go together."""
    _check_approximate(settings.backend, settings.factory)
    index = Index.build(shards(), Origin(settings.factory, settings.seed))
    index.device = device
    index.set_search_params(settings.search_params)
    return index


def check_exact(search_params: str) -> None:
    """InputError where an exact search is told what only an approximate index has."""
    if search_params:
        raise InputError(f"search_params {search_params!r} have no effect on the exact index 'Flat', expected none")


def index_settings(settings: SearchSettings) -> dict[str, Any]:
    """The settings by which one index finds other passages than another over the same vectors."""
    if settings.factory == "Flat":
        return {"factory": "Flat"}
    return {"factory": settings.factory, "search_params": settings.search_params, "index_seed": settings.seed}


def _check_approximate(backend: str, factory: str) -> None:
    if backend == "torch":
        raise InputError(f"backend torch has only the exact index 'Flat', but the index asked for is {factory!r}")


def search_index(query_ids: Sequence[str], query_vectors: np.ndarray, index: Index, k: int = 100) -> Run:
    """As ``search``, in an index that was built or loaded; what it does not find is left out."""
    queries = _checked_queries(query_ids, query_vectors, index.dimension, k)
    scores, rows = index.search(queries, k)
    return {
        query_id: ranked((index.ids[row], float(score)) for row, score in zip(found, values, strict=True) if row >= 0)
        for query_id, found, values in zip(query_ids, rows, scores, strict=True)
    }


def _checked_queries(query_ids: Sequence[str], vectors: np.ndarray, dimension: int, k: int) -> np.ndarray:
    assert len(query_ids) == len(vectors)
    if k < 1:
        raise InputError(f"k is {k}, expected at least 1")
    if vectors.shape[1] != dimension:
        raise InputError(
            f"the queries have dimension {vectors.shape[1]} and the passages {dimension}, expected the same"
        )
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise InputError(f"query {query_ids[int(np.argmin(finite))]!r}: its embedding holds NaN or infinity")
    return np.ascontiguousarray(vectors, dtype=np.float32)


class Searcher:
    """An encoder over a corpus (columns id, title, text) whose vectors are made or opened once, for any number of queries.

    Each process of ``group`` encodes and searches every W-th shard; all get the run that one process would have made. An
    approximate index, or with faiss on GPUs the exact one, is built, or read from the settings' folder, once. The search stays
    on the encoder's device.
    """

    def __init__(
        self, encoder: Encoder, corpus: "Dataset", settings: SearchSettings = DEFAULTS, group: Processes = ALONE
    ) -> None:
        check_group(settings, group)
        self.encoder, self.settings, self.group = encoder, settings, group
        self._index: Index | None = None
        self._shards: Shards = []
        if settings.index_dir is not None:
            self._index = kept_index(encoder, corpus, settings)
        elif settings.factory != "Flat":
            device = str(encoder.device)
            self._index = build_index(lambda: passage_shards(encoder, corpus, settings), settings, device)
        else:
            check_exact(settings.search_params)
            self._shards = passage_shards(encoder, corpus, settings, group)
            self._candidates = find_candidates(self._shards, settings.backend, str(encoder.device))

    def find(self, queries: Mapping[str, str], k: int = 100) -> Run:
        """The k best passages for each query (id to text)."""
        asked = encode_in_memory(self.encoder, Texts.of_queries(queries), self.settings.batch_tokens)
        if self._index is not None:
            return search_index(asked.ids, asked.vectors, self._index, k)
        own = _search_shards(asked.ids, asked.vectors, self._shards, k, self._candidates)
        return merge_runs(own, k, self.group)


def retrieve(
    encoder: Encoder,
    queries: Mapping[str, str],
    corpus: "Dataset",
    k: int = 100,
    settings: SearchSettings = DEFAULTS,
    group: Processes = ALONE,
) -> Run:
    """Encode queries (id to text) and corpus (columns id, title, text), and search; ``group`` as in ``Searcher``."""
    return Searcher(encoder, corpus, settings, group).find(queries, k)


def check_group(settings: SearchSettings, group: Processes) -> None:
    """InputError where several processes are to share an approximate index."""
    if group.world > 1 and settings.factory != "Flat":
        raise InputError(
            f"index {settings.factory!r} is built and searched by one process, but {group.world} were started; expected the "
            "exact index 'Flat', or one process (which can read the embeddings that several have made)"
        )


def merge_runs(own: Run, k: int, group: Processes) -> Run:
    """The k best of what all processes found, each in its own shards. Scores do not depend on shards, so neither does the run."""
    if group.world == 1:
        return own
    runs = [json.loads(part) for part in group.gather_bytes(json.dumps(own).encode())]
    return {query: ranked(((hit[0], hit[1]) for run in runs for hit in run[query]), k) for query in own}


def passage_shards(
    encoder: Encoder, corpus: "Dataset", settings: SearchSettings = DEFAULTS, group: Processes = ALONE
) -> Shards:
    """The corpus's embeddings: those of the settings' folder, where what is missing is encoded first, or made in memory.

    Of several processes each gets every W-th shard.
    """
    passages = Texts.of_corpus(corpus)
    if settings.embeddings is None:
        if group.world == 1:
            return [encode_in_memory(encoder, passages, settings.batch_tokens)]
        return encode_own(encoder, passages, settings.batch_tokens, group.rank, group.world)
    finished = (Path(settings.embeddings) / MANIFEST).is_file()  # they serve whatever their shard size and form
    group.barrier()  # all have looked before one can finish
    if not finished:
        form = {"dtype": settings.dtype, "batch_tokens": settings.batch_tokens}
        encode_texts(encoder, passages, settings.embeddings, rank=group.rank, world=group.world, **form)  # type: ignore[arg-type]
        group.barrier()
    shards = open_embeddings(encoder, passages, settings.embeddings)
    return shards if group.world == 1 else EveryNth(shards, group)


def vector_form(settings: SearchSettings) -> str:
    """The dtype of the vectors that ``passage_shards`` gives."""
    if settings.embeddings is None:
        return "float32"
    return kept_dtype(settings.embeddings) or settings.dtype


class EveryNth:
    """The shards of one process: rank, rank + W, rank + 2 W, …"""

    def __init__(self, shards: Shards, group: Processes) -> None:
        self.shards = shards
        self.numbers = range(group.rank, len(shards), group.world)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Shard:
        return self.shards[self.numbers[number]]

    def __iter__(self) -> Iterator[Shard]:
        return (self.shards[number] for number in self.numbers)


def kept_index(encoder: Encoder, corpus: "Dataset", settings: SearchSettings, shards: Shards | None = None) -> Index:
    """The corpus's approximate index in the settings' folder; where there is none, it is built from its vectors.

    shards: the corpus's vectors; not given, it is encoded where the index has to be built.
    """
    if settings.factory == "Flat":
        raise InputError(
            f"index_dir {settings.index_dir!r} has no effect on the exact index 'Flat', expected none: "
            "embeddings keeps the vectors, which exact search streams"
        )
    assert settings.index_dir is not None
    _check_approximate(settings.backend, settings.factory)
    origin = Origin(
        settings.factory, settings.seed, encoder.fingerprint("passage"), Texts.of_corpus(corpus).fingerprint
    )
    index = Index.kept(settings.index_dir, origin, lambda: shards or passage_shards(encoder, corpus, settings))
    index.device = str(encoder.device)
    index.set_search_params(settings.search_params)
    return index


class Hit(NamedTuple):
    """A passage found for a query, with its text."""

    id: str
    score: float
    title: str
    text: str


def with_texts(corpus: "Dataset", found: Sequence[tuple[str, float]]) -> list[Hit]:
    """Passages of a run with their texts, in its order; only theirs are read of the corpus."""
    rows = rows_of(corpus, {passage_id for passage_id, _ in found})
    read = corpus[[rows[passage_id] for passage_id, _ in found]]
    return [
        Hit(passage_id, score, title, text)
        for (passage_id, score), title, text in zip(found, read["title"], read["text"], strict=True)
    ]


def rows_of(corpus: "Dataset", ids: set[str]) -> dict[str, int]:
    """Row number of each id; InputError naming one that the corpus lacks."""
    from contaccum.data.tables import find_rows  # imports datasets, which takes a second

    rows = find_rows(corpus, ids)
    if missing := sorted(ids - rows.keys()):
        raise InputError(
            f"passage {missing[0]!r} of the run is not in the corpus ({len(missing)} such), expected the same corpus"
        )
    return rows
