"""Mine hard negatives: search for the training queries, filter the passages, write them.

The queries are mined in chunks. W processes divide each chunk among themselves, and process 0
writes the output.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contaccum.config.commands import (
    DataPolicy,
    EncoderConfig,
    MineConfig,
    SearchConfig,
    TrainingKind,
)
from contaccum.config.load import converted
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.data.identity import text_hash
from contaccum.errors import InputError
from contaccum.formats.readers import has_answers
from contaccum.formats.records import (
    Example,
    Passage,
    TeacherScores,
    whole_records,
    without_blanks,
)
from contaccum.formats.training import example_line, framed
from contaccum.retrieval.encode import Texts, load_encoder_of, passage_vectors
from contaccum.retrieval.negatives import CrossEncoder, MiningQueries, select_negatives
from contaccum.retrieval.retriever import BM25_NAME, DEFAULTS, Retriever, index_settings
from contaccum.runtime.files import write_json
from contaccum.runtime.processes import ALONE, Processes, encoding_device
from contaccum.runtime.progress import progress_bar
from contaccum.runtime.units import counted

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder

MINING = MineConfig()
ABOUT = ".about.json"  # end of the name of a report
CHUNK = 16_384  # number of queries that are searched at a time; their rankings are in memory
RESCORED = 64  # number of queries whose passages the cross-encoder scores at a time
SPREAD = ("mean", "min", "25%", "median", "75%", "max")

Mined = dict[str, Any]
"""A mined example: its ``line`` of the output, the number of candidates that each filter
``removed``, the lowest score of its positives (``positive``), and the scores of its ``negatives``.
"""


@dataclass
class Candidates:
    """Passages that may become negatives of one example, best first."""

    number: int  # of the example
    example: Example
    passages: list[Passage]
    scores: np.ndarray  # (passages,)
    positive_scores: np.ndarray  # (positives,)
    removed: dict[str, int]


def mine_part(
    queries: MiningQueries,
    retriever: Retriever,
    settings: MineConfig,
    to: TrainingKind,
    cross_encoder: CrossEncoder | None,
    start: int,
    stop: int,
) -> Iterator[Mined]:
    """Mine the examples ``start`` to ``stop`` - 1. to: format of the output."""
    found = find_candidates(queries, retriever, settings, start, stop)
    if cross_encoder is not None:
        found = rescore(found, cross_encoder)
    for each in found:
        selected = select_negatives(each.scores, each.positive_scores, settings, each.number)
        teacher = TeacherScores(
            each.positive_scores.tolist(), each.scores[selected.indices].tolist()
        )
        negatives = [each.passages[position] for position in selected.indices]
        line = example_line(each.example._replace(negatives=negatives, scores=teacher), to)
        yield {
            "line": line.decode(),
            "removed": each.removed | selected.removed,
            "positive": min(teacher.positives),
            "negatives": teacher.negatives,
        }


def find_candidates(
    queries: MiningQueries, retriever: Retriever, settings: MineConfig, start: int, stop: int
) -> Iterator[Candidates]:
    """Search for the queries of the examples ``start`` to ``stop`` - 1.

    Passages that are known for the query are left out, and so are copies of a text.
    """
    part = enumerate(map(without_blanks, queries.examples.part(start, stop)), start)
    numbered = [(number, example) for number, example in part if example.positives]
    positives = [queries.positives(example) for _, example in numbered]
    known = [queries.known(example) for _, example in numbered]
    # search deeper by the number of known passages, so that range_max candidates remain when they
    # are left out
    depth = settings.range_max + max(map(len, known), default=0)
    texts = {str(number): example.query.text for number, example in numbered}
    for place, ranking in enumerate(retriever.rank(texts, depth, positives)):
        number, example = numbered[place]
        # (candidates,), descending
        kept = ~np.isin(ranking.rows, list(known[place]))
        rows, scores = ranking.rows[kept], ranking.scores[kept]
        candidates = list(Passage.of_columns(queries.corpus[rows[: settings.range_max]]))
        copies = known[place].difference(positives[place]).intersection(ranking.rows.tolist())
        best: dict[int, int] = {}  # hash of a text -> position of the best candidate with this text
        for position, passage in enumerate(candidates):
            best.setdefault(text_hash(passage.content), position)
        removed = {"same text": len(copies) + len(candidates) - len(best)}
        if best.pop(text_hash(""), None) is not None:
            removed["empty text"] = 1
        places = list(best.values())
        passages = [candidates[position] for position in places]
        yield Candidates(
            number, example, passages, scores[places], ranking.positive_scores, removed
        )


def rescore(found: Iterable[Candidates], cross_encoder: CrossEncoder) -> Iterator[Candidates]:
    """Replace all scores by those of a cross-encoder, and sort the candidates by them."""
    found = iter(found)
    while group := list(islice(found, RESCORED)):
        of_queries = [
            [(each.example.query.text, passage.content) for passage in passages]
            for each in group
            for passages in (each.example.positives, each.passages)
        ]
        scores = cross_encoder.scores(list(chain.from_iterable(of_queries)))
        parts = np.split(scores, np.cumsum([len(pairs) for pairs in of_queries])[:-1])
        for each, of_positives, of_candidates in zip(group, parts[::2], parts[1::2], strict=True):
            order = np.argsort(-of_candidates, kind="stable")
            passages = [each.passages[position] for position in order]
            yield replace(
                each,
                passages=passages,
                scores=of_candidates[order],
                positive_scores=of_positives,
            )


def mine_all(
    queries: MiningQueries,
    retriever: Retriever,
    settings: MineConfig = MINING,
    to: TrainingKind = "jsonl",
    cross_encoder: CrossEncoder | None = None,
    group: Processes = ALONE,
) -> Iterator[Mined]:
    """Yield all mined examples in order. W processes divide each chunk; each yields all."""
    total = len(queries.examples)
    with progress_bar(total, "mining", "queries") as bar:
        for start in range(0, total, CHUNK):
            size = min(CHUNK, total - start)
            first, last = (
                start + size * rank // group.world for rank in (group.rank, group.rank + 1)
            )
            own = []
            for mined in mine_part(queries, retriever, settings, to, cross_encoder, first, last):
                own.append(mined)
                bar.update(group.world)  # the other processes are about as far
            for part in group.gather_bytes(json.dumps(own).encode()):
                yield from json.loads(part)
            bar.update(start + size - bar.n)


def write_mined(
    output: str | Path,
    mined: Iterable[Mined],
    settings: MineConfig,
    to: TrainingKind,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Write mined examples to ``output``, and a report to a file next to it. Return the report.

    about: entries to add to the report. ``output`` contains the scores of the passages:
    ``pos_scores`` and ``neg_scores`` in JSONL, ``score`` in other formats.
    """
    removed: Counter[str] = Counter()
    numbers = []  # number of negatives of each example
    scores: dict[str, list[float]] = {"positives": [], "negatives": [], "margins": []}

    def lines() -> Iterator[bytes]:
        for example in mined:
            removed.update(example["removed"])
            numbers.append(len(example["negatives"]))
            scores["positives"].append(example["positive"])
            scores["negatives"] += example["negatives"]
            scores["margins"] += [example["positive"] - score for score in example["negatives"]]
            yield example["line"].encode()

    # after a kill, neither file exists or only the report: an output that exists is complete
    with whole_records(output) as file:
        file.writelines(framed(lines(), to))
        empty = numbers.count(0)
        if 2 * empty > len(numbers) or not numbers:
            reasons = ", ".join(f"{name} {count}" for name, count in removed.items())
            sentence = (
                f"{output}: no negative for {empty} of {counted(len(numbers), 'query')} "
                f"(candidates removed: {reasons}). The search found nothing else, or the filters "
                "are too strict."
            )
            if empty == len(numbers):
                raise InputError(sentence)
            warnings.warn(sentence, stacklevel=3)
        report = {
            **about,
            "settings": asdict(settings),
            "queries": len(numbers),
            "negatives": sum(numbers),
            "queries_with_fewer": sum(number < settings.num_negatives for number in numbers),
            "queries_without": empty,
            "removed": dict(removed),
            "scores": {
                name: dict(
                    zip(
                        SPREAD,
                        [np.mean(values), *np.percentile(values, [0, 25, 50, 75, 100])],
                        strict=True,
                    )
                )
                for name, values in scores.items()
                if values
            },
        }
        write_json(about_path(output), report)
    return report


def mine(
    model: "EncoderConfig | DualEncoder | str | Path",
    data: str | Path,
    output: str | Path,
    *,
    split: str = "train",
    corpus: str | Path | None = None,
    to: TrainingKind = "jsonl",
    mining: MineConfig = MINING,
    settings: SearchConfig = DEFAULTS,
    policy: DataPolicy = DEFAULT_POLICY,
    group: Processes = ALONE,
) -> dict[str, Any]:
    """Search for hard negatives, and write training examples with these negatives.

    Return the report (see ``write_mined``). Only process 0 writes and returns it; the others return
    {}.

    model: an encoder, the name or the config of an encoder, or ``bm25``.
    data: a BEIR folder or name, or a file of training examples, whose negatives are replaced.
    corpus: passages that may become negatives (a BEIR folder or name, a corpus.jsonl or a passages
    TSV); None: the passages of ``data``. group: processes that share the work. All of them must
    call this function.
    """
    mining.check()
    if isinstance(model, str | Path):
        model = EncoderConfig.of(model)
    name = getattr(model, "model", None)
    converted(TrainingKind, to, "to")
    if Path(output).exists():
        raise InputError(f"{output}: exists already; choose a new path")
    about_file = about_path(output)
    for ending in (".jsonl", ".json", ".jsonl.gz", ".json.gz"):
        other = about_file.with_name(about_file.name.removesuffix(ABOUT) + ending)
        if other.exists():
            raise InputError(
                f"{other}: has the same report, {about_file.name}; choose another name"
            )
    with group.main_first():
        passages = open_dataset(corpus, policy=policy).corpus if corpus else None
        opened = open_dataset(data, split, policy)
        queries = MiningQueries(opened.examples(), passages)
    if opened.kind == to == "dpr" and group.is_main and has_answers(opened.path):
        warnings.warn(f"{data}: answers of questions are dropped", stacklevel=2)
    encoder: DualEncoder | None = None
    if name != BM25_NAME:
        settings.check(group.world)
        encoder = load_encoder_of(
            model,
            "passage",
            lambda: Texts("passage", queries.corpus),
            settings.index_dir,
            settings.embeddings,
        )
        if group.world > 1:
            # each process searches the whole corpus for its own queries, in vectors that the
            # processes compute together
            if settings.embeddings is None:
                raise InputError(
                    f"{group.world} processes were started without --embeddings; set it to a "
                    "folder where the processes share vectors"
                )
            passage_vectors(encoder, queries.corpus, settings, group)
    retriever = Retriever.open(encoder or model, queries.corpus, settings, extra=queries.extra)
    cross_encoder = None
    if mining.cross_encoder is not None:
        device = encoding_device(model.device) if isinstance(model, EncoderConfig) else model.device
        cross_encoder = CrossEncoder(
            mining.cross_encoder,
            str(device),
            mining.cross_encoder_batch_size,
            getattr(model, "trust_remote_code", False),
        )
    search: dict[str, Any] = {}
    if encoder is not None:
        search = {"precision": retriever.precision, **index_settings(settings)}
    about = {
        "model": name,
        "data": data,
        "split": split,
        "corpus": corpus,
        "passages": len(queries.corpus),
        "search": search,
    }
    mined = mine_all(queries, retriever, mining, to, cross_encoder, group)
    if not group.is_main:
        for _ in mined:
            pass
        return {}
    report = write_mined(output, mined, mining, to, about)
    if left_out := len(queries.examples) - report["queries"]:
        warnings.warn(
            f"{data}: left out {counted(left_out, 'query')} whose positives all have an empty text",
            stacklevel=2,
        )
    return report


def about_path(output: str | Path) -> Path:
    """Return the path of the report of an output file: ``mined.about.json`` for ``mined.jsonl``."""
    path = Path(output)
    return path.with_name(re.sub(r"\.jsonl?(\.gz)?$", "", path.name) + ABOUT)


def render_mined(report: Mapping[str, Any], output: str | Path) -> str:
    """Format a mining report as text."""
    negatives = counted(report["negatives"], "negative")
    head = f"{output}: {negatives} for {counted(report['queries'], 'query')}"
    if report["queries_with_fewer"]:
        most = report["settings"]["num_negatives"]
        number = "no negative" if most == 1 else f"fewer than {most} negatives"
        head += f"; {number} for {counted(report['queries_with_fewer'], 'query')}"
    source = report["corpus"] or report["data"]
    head += f"; searched {counted(report['passages'], 'passage')} of {source}"
    taken = ", ".join(f"{name} {count}" for name, count in report["removed"].items())
    table = [" " * 10 + "".join(f"{name:>10s}" for name in SPREAD)]
    table += [
        f"{name:10s}" + "".join(f"{row[n]:10.4f}" for n in SPREAD)
        for name, row in report["scores"].items()
    ]
    if report["scores"]["margins"]["median"] < 0:
        table.append(
            "Most negatives score above the positive, so many may be relevant; --relative_margin "
            "0.05 leaves such passages out."
        )
    return "\n".join([head, f"candidates removed: {taken}", *table])
