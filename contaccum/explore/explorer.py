"""Compare retrieval systems on one data set, and build the HTML of the page. This module does not need a web server."""

import hashlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath

from contaccum.config.commands import EncoderConfig, SearchConfig
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.encoder import DualEncoder, load_encoder
from contaccum.errors import InputError
from contaccum.evaluation.metrics import CUTOFFS, cutoffs_within, evaluate_run
from contaccum.explore import html
from contaccum.explore.html import grades_of_text, losses
from contaccum.retrieval.encode import Texts
from contaccum.retrieval.retriever import BM25_NAME, Retriever
from contaccum.retrieval.runs import RankedPassage, Run, read_passages
from contaccum.retrieval.shards import ShardFolder, saved_dtype
from contaccum.runtime.files import cache_folder

QUERIES_PER_PAGE = 50
MAX_QUERY = 2000  # maximum number of characters of a query
_ONE_AT_A_TIME = threading.Lock()
"""Lock that every search holds, because the server uses several threads and a tokenizer is not thread-safe."""


@dataclass(frozen=True)
class System:
    """One retriever and the data set that it searches."""

    name: str
    retriever: Retriever
    data: RetrievalSet
    k: int
    """Number of passages in the ranking of a judged query."""

    def ask(self, query: str, k: int) -> list[RankedPassage]:
        """Return the k best passages for a query text."""
        with _ONE_AT_A_TIME:
            return read_passages(self.data.corpus, self.retriever.search({"query": query}, k)["query"])

    @cached_property
    def run(self) -> Run:
        """Rankings of the judged queries, equal to those of ``evaluate``. They are computed at first use."""
        with _ONE_AT_A_TIME:
            return self.retriever.search(self.data.queries, self.k, ignore_identical_ids=True)

    @cached_property
    def scores(self) -> dict[str, dict[str, float]]:
        """Metrics of the judged queries: query id -> metric -> value."""
        return evaluate_run(self.data.qrels, self.run, cutoffs=cutoffs_within(CUTOFFS, self.k))["per_query"]


def open_systems(
    models: Sequence[str],
    choice: EncoderConfig,
    data: RetrievalSet,
    k: int,
    settings: SearchConfig,
    folders: Sequence[str],
) -> list[System]:
    """Open every model. Encode the corpus for each model whose vectors are neither in ``folders`` nor in the cache.

    choice: settings for loading every model; ``choice.model`` is ignored. folders: folders of embeddings from `contaccum encode`.
    Each folder is used for the model that encoded it. New vectors and approximate indexes are saved in the cache. Raises
    InputError if a model is listed twice, or if a folder is not used.
    """
    paths = [str(Path(name).resolve()) if Path(name).exists() else name for name in models]
    if repeated := [name for name, path in zip(models, paths, strict=True) if paths.count(path) > 1]:
        raise InputError(f"--models: {repeated[0]} is listed twice; list each model once")
    source = Texts.of_corpus(data.corpus).fingerprint
    unused = {str(folder): ShardFolder(folder, source=source).job.encoder for folder in folders}
    systems = []
    for name, label in zip(models, labels(models), strict=True):
        print(f"contaccum: {label}: opening {name}", file=sys.stderr)
        model: EncoderConfig | DualEncoder = replace(choice, model=name)
        own_settings = settings
        if name != BM25_NAME:
            model = load_encoder(replace(choice, model=name))
            fingerprint = model.fingerprint("passage")
            given = next((folder for folder, encoder in unused.items() if encoder == fingerprint), None)
            own_settings = cached_settings(settings, fingerprint, source, given)
            unused.pop(given or "", None)
        systems.append(System(label, Retriever.open(model, data.corpus, own_settings), data, k))
    if unused:
        raise InputError(
            f"{next(iter(unused))}: none of the models ({', '.join(models)}) made these embeddings, or another folder in "
            "--embeddings has embeddings of the same model. Give at most one folder for each model."
        )
    return systems


def cached_settings(settings: SearchConfig, encoder: str, source: str, given: str | None) -> SearchConfig:
    """Return a copy of the settings in which the folders of the vectors and of the index are filled in.

    encoder, source: fingerprints of the encoder and the texts. given: folder with the vectors. None: a folder in the cache.
    The folder of the index is filled in only for an approximate index.
    """
    dtype = (given and saved_dtype(given)) or settings.dtype
    vectors = given or _cached(encoder, source, dtype)
    if settings.factory == "Flat":
        return replace(settings, embeddings=vectors)
    index = _cached(encoder, source, dtype, settings.factory, str(settings.seed))
    return replace(settings, embeddings=vectors, index_dir=index)


def _cached(*parts: str) -> str:
    return str(cache_folder() / "explore" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32])


def labels(models: Sequence[str]) -> list[str]:
    """Return a short name for each model: the last part of the model's path that is not ``model``.

    If two models have the same short name, their full names are used.
    """
    paths = [Path(name).resolve() if Path(name).exists() else PurePath(name) for name in models]
    short = [
        next((part for part in reversed(path.parts) if part != "model"), name)
        for name, path in zip(models, paths, strict=True)
    ]
    return [label if short.count(label) == 1 else name for label, name in zip(short, models, strict=True)]


@dataclass(frozen=True)
class Explorer:
    """Build the HTML that shows the results of systems on one data set."""

    systems: Sequence[System]
    data: RetrievalSet
    split: str

    def chosen(self, left: str, right: str | None) -> list[System]:
        """Return the systems with the names ``left`` and ``right``. If the names are equal, return one system."""
        by_name = {system.name: system for system in self.systems}
        return [by_name[name] for name in dict.fromkeys((left, right)) if name]

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of the judged queries."""
        return list(next(iter(self.systems[0].scores.values()))) if self.data.queries else []

    @property
    def list_pages(self) -> int:
        """Number of pages in the list of judged queries."""
        return -(-len(self.data.queries) // QUERIES_PER_PAGE)

    def answer(self, query: str, left: str, right: str | None, k: int) -> str:
        """Return HTML that shows the k best passages of each chosen system for a query text."""
        if len(query) > MAX_QUERY:
            return html.styled(html.note(f"The query has {len(query)} characters; at most {MAX_QUERY} are allowed."))
        if not query.strip():
            return html.styled(html.note("Type a query."))
        grades = grades_of_text(query, self.data.queries, self.data.qrels)
        sentence = f"This query is in the split {self.split}. Judged passages are marked." if grades else ""
        systems = self.chosen(left, right)
        found = [html.ranking(system.name, query, system.ask(query.strip(), k), grades) for system in systems]
        return html.styled(html.note(sentence), html.columns(found))

    def lost(self, left: str, right: str | None, metric: str, number: int) -> str:
        """Return HTML that shows one page of the list of judged queries.

        The list is sorted by the metric of ``left`` minus the metric of ``right``, lowest first. number: page number, from 1.
        """
        systems = self.chosen(left, right)
        found = list(losses([system.scores for system in systems], metric).items())
        start = QUERIES_PER_PAGE * (number - 1)
        what = f"{metric} of {left} minus {metric} of {right}" if len(systems) > 1 else f"{metric} of {left}"
        last = min(start + QUERIES_PER_PAGE, len(found))
        about = f"{what}, lowest first: queries {start + 1} to {last} of {len(found)}"
        rows = html.lost(found[start:last], self.data.queries, [system.name for system in systems])
        return html.styled(html.note(about), rows)

    def show_query(self, query_id: str, left: str, right: str | None, metric: str, k: int) -> str:
        """Return HTML that shows a judged query, the ranks of its judged passages, and k passages of each ranking.

        Raises InputError if the split lacks the query.
        """
        if query_id not in self.data.queries:
            raise InputError(f"query {query_id!r} is not in the split {self.split}; choose a query of this split")
        systems, query, grades = self.chosen(left, right), self.data.queries[query_id], self.data.qrels[query_id]
        read = read_passages(self.data.corpus, [(passage_id, 0.0) for passage_id in grades])
        titles = {passage.id: passage.title or passage.text for passage in read}
        found = []
        for system in systems:
            score = f"{metric} {system.scores[query_id][metric]:.4f}"
            hits = read_passages(self.data.corpus, system.run[query_id][:k])
            found.append(html.ranking(system.name, query, hits, grades, score))
        return html.styled(
            html.heading(query),
            html.note(f"query {query_id} of the split {self.split}"),
            html.judged(grades, {system.name: system.run[query_id] for system in systems}, titles, systems[0].k),
            html.columns(found),
        )
