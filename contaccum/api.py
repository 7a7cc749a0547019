"""The verbs of the command line as functions: from paths to results. ``train`` is contaccum.training.loop.train."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contaccum.data.convert import Form, open_examples
from contaccum.data.corpus import load_corpus, load_queries, load_questions, open_corpus
from contaccum.data.sources import resolve
from contaccum.data.tables import RetrievalSet, keep_answerable, load_retrieval_set, open_grades
from contaccum.encoder import DualEncoder
from contaccum.engine import encoding_device, torch_dtype
from contaccum.errors import InputError
from contaccum.evaluation.answers import evaluate_answers
from contaccum.evaluation.beir import CUTS, Metrics, cuts_within, drop_own, evaluate_run, noting
from contaccum.evaluation.benchmark import Part, data_digest, parts_of, render_benchmark, run_benchmark
from contaccum.evaluation.significance import Comparison
from contaccum.evaluation.significance import compare as compare_systems
from contaccum.files import write_json
from contaccum.options import MineSettings, ModelChoice, SearchSettings
from contaccum.processes import ALONE, Processes, joined
from contaccum.retrieval.bm25 import BM25 as LexicalIndex
from contaccum.retrieval.candidates import Dense, Lexical, Search
from contaccum.retrieval.encode import Texts, encode_texts
from contaccum.retrieval.mine import Asked, Mining, render_mined
from contaccum.retrieval.mine import mine as write_mined
from contaccum.retrieval.negatives import check as check_mining
from contaccum.retrieval.rerank import CrossEncoder
from contaccum.retrieval.runs import Run, check_ids, read_run, write_run
from contaccum.retrieval.search import Hit, Searcher, index_settings, vector_form, with_texts

if TYPE_CHECKING:
    from datasets import Dataset

BM25 = "bm25"
"""The model name that stands for the lexical baseline."""
LEAST_DEPTH = 10
"""Up to here a run file is scored however short its lists are: a search in a small corpus gives as many cuts."""
DEFAULTS = SearchSettings()
MINING = MineSettings()

__all__ = [
    "encode",
    "evaluate",
    "evaluate_questions",
    "evaluate_run_file",
    "joined",
    "look",
    "merge",
    "mine",
    "render_benchmark",
    "render_mined",
    "search",
    "write_run",
]


def load_encoder(choice: ModelChoice) -> DualEncoder:
    """The encoder on its device and in its precision, for encoding alone."""
    if choice.model == BM25:
        raise InputError("--model bm25 is the lexical baseline and has no vectors, expected an encoder")
    return DualEncoder.load(
        choice.model,
        pooling=choice.pooling,
        similarity=choice.similarity,
        max_query_length=choice.max_query_length,
        max_passage_length=choice.max_passage_length,
        query_prefix=choice.query_prefix,
        passage_prefix=choice.passage_prefix,
        truncate_dim=choice.truncate_dim,
        trust_remote_code=choice.trust_remote_code,
        dtype=torch_dtype(choice.precision),
        device=encoding_device(choice.device),
    )


def open_finder(
    choice: ModelChoice | DualEncoder, corpus: "Dataset", settings: SearchSettings = DEFAULTS, group: Processes = ALONE
) -> Searcher | LexicalIndex:
    """What finds passages for any number of queries: an encoder with a corpus's vectors, or BM25; ``group`` as in ``search``."""
    if isinstance(choice, ModelChoice) and choice.model == BM25:
        return LexicalIndex(corpus)
    encoder = load_encoder(choice) if isinstance(choice, ModelChoice) else choice
    return Searcher(encoder, corpus, settings, group)


def merge(model: str, output: str, trust_remote_code: bool = False) -> str:
    """Write a model trained with adapters as one of plain weights, with the same vectors to rounding; returns ``output``.

    A base in 4 or 8 bits is widened to float32 first.
    """
    if Path(output).exists():
        raise InputError(f"{output}: exists already, expected a new folder")
    DualEncoder.load(model, trust_remote_code=trust_remote_code, merge=True).save(output)
    return output


def encode(
    choice: ModelChoice,
    source: str,
    output: str,
    *,
    kind: str = "passage",
    dtype: str = "float32",
    shard_size: int = 50_000,
    batch_tokens: int | None = None,
    repair: bool = False,
    max_bad_records: int = 0,
) -> str:
    """Encode a corpus or a file of queries into shards under ``output``; returns a sentence that says what stands there.

    Started by torchrun, each process makes its own shards. Started again, finished shards are kept.
    """
    with joined(choice.timeout_minutes) as group, group.main_first():  # from here on, none waits for another
        path, repair = resolve(source, repair=repair)
        texts = (
            Texts.of_corpus(load_corpus(path, repair, max_bad_records))
            if kind == "passage"
            else Texts.of_queries(load_queries(path, repair=repair, max_bad_records=max_bad_records))
        )
    encoder = load_encoder(choice)
    form = {"dtype": dtype, "shard_size": shard_size, "batch_tokens": batch_tokens}
    if encode_texts(encoder, texts, output, rank=group.rank, world=group.world, **form):  # type: ignore[arg-type]
        return f"{output}: {texts.rows} {kind} vectors of {encoder.dim} numbers"
    return f"{output}: process {group.rank} of {group.world} has made its shards, others are still at work"


def search(
    choice: ModelChoice | DualEncoder | str,
    data: str,
    split: str = "test",
    k: int = 100,
    settings: SearchSettings = DEFAULTS,
    repair: bool = False,
    max_bad_records: int = 0,
    output: str | None = None,
    group: Processes = ALONE,
) -> Run:
    """The k best passages for every query of a split: query id to (passage id, score), best first.

    choice: what to load, the name of an encoder, or one that is loaded. output: a TREC run file to write; ids that it cannot hold
    are refused before the search. group: the processes (``joined``) that share the work; all of them call and get the same.
    """
    with group.main_first():
        judged = load_retrieval_set(data, split, repair=repair, max_bad_records=max_bad_records)
    if output is not None:
        check_ids(output, judged.queries, judged.corpus)
    run = _search(choice, judged, k, settings, group)
    if output is not None and group.is_main:
        write_run(output, run)
    return run


def look(
    choice: ModelChoice,
    data: str,
    query: str,
    k: int = 10,
    settings: SearchSettings = DEFAULTS,
    repair: bool = False,
    max_bad_records: int = 0,
    group: Processes = ALONE,
) -> list[Hit]:
    """The k best passages of a corpus for one query text, with their texts; ``group`` as in ``search``."""
    with group.main_first():
        path, repair = resolve(data, repair=repair)
        corpus = load_corpus(path, repair, max_bad_records)
    return with_texts(corpus, open_finder(choice, corpus, settings, group).find({"query": query}, k)["query"])


def evaluate(
    choice: ModelChoice | DualEncoder | str,
    data: str,
    split: str = "test",
    *,
    k: int = 100,
    settings: SearchSettings = DEFAULTS,
    strict: bool = False,
    repair: bool = False,
    max_bad_records: int = 0,
    relevance_level: int = 1,
    output: str | None = None,
    group: Processes = ALONE,
) -> Metrics:
    """Encode, search and score a split of a BEIR folder or name, or a file of training examples.

    choice: what to load, the name of an encoder, or one that is loaded. output: a file for the metrics, with the values of
    every query. relevance_level: as in ``evaluate_run``. group: as in ``search``.
    """
    with group.main_first():
        judged = load_retrieval_set(data, split, strict, repair, max_bad_records)
    run = _search(choice, judged, k, settings, group)
    found = evaluate_run(judged.qrels, run, cuts=cuts_within(CUTS, k), relevance_level=relevance_level)
    metrics = noting(judged.left_out, found)
    model = choice if isinstance(choice, str) else getattr(choice, "model", None)
    return _keep(metrics, output, {"model": model, "data": data, "split": split})


def is_benchmark(data: str) -> bool:
    """Whether ``data`` names several sets."""
    return len(parts_of(data, "test")) > 1


def evaluate_benchmark(
    choice: ModelChoice,
    data: str,
    split: str = "test",
    *,
    k: int = 100,
    settings: SearchSettings = DEFAULTS,
    strict: bool = False,
    repair: bool = False,
    max_bad_records: int = 0,
    relevance_level: int = 1,
    output: str | None = None,
    group: Processes = ALONE,
) -> dict[str, Any]:
    """Score several sets: ``beir``, ``nanobeir``, or names and folders joined by commas; see ``run_benchmark``.

    output: a folder for the metrics of each set and the table. Embeddings and indexes of a set get folders of their own in those
    that ``settings`` name. group: as in ``search``.
    """
    if output is not None and output.lower().endswith(".json"):
        raise InputError(
            f"--output is {output}, expected a folder's name: each of several sets gets a file of its own there"
        )
    encoder = None if choice.model == BM25 else load_encoder(choice)
    print_of = f"{encoder.fingerprint('query')} {encoder.fingerprint('passage')}" if encoder else BM25

    how = {"k": k, "relevance_level": relevance_level}
    how |= {"strict": strict, "repair": repair, "max_bad_records": max_bad_records}

    def of_part(part: Part) -> SearchSettings:
        folders = [value and str(Path(value) / part.name) for value in (settings.embeddings, settings.index_dir)]
        return replace(settings, embeddings=folders[0], index_dir=folders[1])

    def about_part(part: Part) -> dict[str, Any]:
        form = {"dtype": vector_form(of_part(part))} if encoder else {}
        return {"data_sha256": data_digest(part), **form}

    def score(part: Part) -> Metrics:
        return evaluate(encoder or choice, part.data, part.split, settings=of_part(part), group=group, **how)  # type: ignore[arg-type]

    about = {"model": choice.model, "encoder": print_of, **how, **(index_settings(settings) if encoder else {})}
    return run_benchmark(parts_of(data, split), about, about_part, output, score, group.is_main)


def evaluate_questions(
    choice: ModelChoice,
    questions: str,
    passages: str,
    *,
    k: int = 100,
    settings: SearchSettings = DEFAULTS,
    match: str = "string",
    processes: int = 1,
    repair: bool = False,
    max_bad_records: int = 0,
    output: str | None = None,
    group: Processes = ALONE,
) -> Metrics:
    """Answer accuracy (top1, top5, top20, top100) of a DPR question file over a passages file; ``group`` as in ``search``."""
    with group.main_first():
        asked, without = load_questions(resolve(questions)[0], max_bad_records)
        corpus = open_corpus(*resolve(passages, repair=repair), max_bad_records)
    metrics = evaluate_answers(
        load_encoder(choice), asked, corpus.table, k, settings, match=match, processes=processes, group=group
    )
    left_out = {questions: without, passages: corpus.left_out}
    metrics = noting({name: count for name, count in left_out.items() if count}, metrics)
    return _keep(metrics, output, {"model": choice.model, "data": questions, "passages": passages})


def evaluate_run_file(
    run: str,
    qrels: str,
    output: str | None = None,
    relevance_level: int = 1,
    max_bad_records: int = 0,
    strict: bool = False,
) -> Metrics:
    """Score a TREC run file against a qrels file, at the cuts that its longest list can answer, and up to 10 in any case.

    A list that ends before a cut has nothing relevant behind its end, as in trec_eval. Queries without a positive are left out
    with a warning, as in ``evaluate``, and refused when ``strict``.
    """
    hits = read_run(run)
    cuts = cuts_within(CUTS, max(LEAST_DEPTH, *map(len, hits.values())))
    judged, left_out = open_grades(qrels, max_bad_records)
    grades = keep_answerable(Path(qrels), judged, strict)
    metrics = noting(left_out, evaluate_run(grades, hits, cuts=cuts, relevance_level=relevance_level))
    return _keep(metrics, output, {"run": run, "data": qrels})


def compare_metrics(ours: Metrics, theirs: Metrics, measure: str = "ndcg@10") -> Comparison:
    """One run less another, query by query, with the tests of ``contaccum report``."""
    return compare_systems({0: ours["per_query"]}, {0: theirs["per_query"]}, measure)


def render_comparison(found: Comparison, measure: str, against: str) -> str:
    """The difference for the eye, in one line."""
    return (
        f"{measure} {found.difference:+.4f} against {against} (95 % interval {found.low:+.4f} to {found.high:+.4f}; better on "
        f"{found.wins} and worse on {found.losses} of {found.queries} queries; p = {found.p_permutation:.4f} by permutation, "
        f"{found.p_t:.4f} by t-test)"
    )


def mine(
    choice: ModelChoice,
    data: str,
    output: str,
    *,
    split: str = "train",
    corpus: str | None = None,
    to: Form = "jsonl",
    mining: MineSettings = MINING,
    settings: SearchSettings = DEFAULTS,
    strict: bool = False,
    repair: bool = False,
    max_bad_records: int = 0,
    group: Processes = ALONE,
) -> dict[str, Any]:
    """Write training examples with hard negatives that a search finds; returns what stands in ``about.json`` beside them.

    data: a BEIR folder or name, or a file of training examples; their own negatives are replaced. corpus: passages to mine
    from instead of those of ``data``: a BEIR folder or name, a corpus.jsonl or a passages TSV. group: as in ``search``.
    """
    check_mining(mining)
    if Path(output).exists():
        raise InputError(f"{output}: exists already, expected a new path")
    with group.main_first():
        given = load_corpus(*resolve(corpus, repair=repair), max_bad_records) if corpus else None
        asked = Asked(open_examples(data, split, strict, repair, max_bad_records), given)
    found: Search
    if choice.model == BM25:
        found = Lexical(asked.pool)
    else:
        found = Dense(load_encoder(choice), asked.pool, replace(settings, seed=mining.seed), group)
    rerank = None
    if mining.cross_encoder is not None:
        device, size = str(encoding_device(choice.device)), mining.cross_encoder_batch_size
        rerank = CrossEncoder(mining.cross_encoder, device, size, choice.trust_remote_code)
    about = {"model": choice.model, "data": data, "split": split, "corpus": corpus}
    return write_mined(Mining(asked, found, mining, to, rerank), output, about, group)


def _search(
    choice: ModelChoice | DualEncoder | str, judged: RetrievalSet, k: int, settings: SearchSettings, group: Processes
) -> Run:
    if k < 1:
        raise InputError(f"k is {k}, expected at least 1")
    choice = ModelChoice(choice) if isinstance(choice, str) else choice
    finder = open_finder(choice, judged.corpus, settings, group)
    return drop_own(finder.find(judged.queries, k + 1), k)  # one may be the query itself


def _keep(metrics: Metrics, output: str | None, about: Mapping[str, str | None]) -> Metrics:
    if output is not None:
        write_json(output, {**{name: value for name, value in about.items() if value is not None}, **metrics})
    return metrics


def render_metrics(metrics: Metrics) -> str:
    """The means as a small table, a row a measure and a column a cut."""
    mean = metrics["mean"]
    if not all("@" in name for name in mean):
        return "\n".join(f"{name:8s} {value:.4f}" for name, value in mean.items())
    measures = list(dict.fromkeys(name.split("@")[0] for name in mean))
    cuts = list(dict.fromkeys(name.split("@")[1] for name in mean))
    head = " " * 10 + "".join(f"{'@' + cut:>9s}" for cut in cuts)
    rows = [f"{measure:10s}" + "".join(f"{mean[f'{measure}@{cut}']:9.4f}" for cut in cuts) for measure in measures]
    return "\n".join([head, *rows, f"{metrics['queries']} queries"])
