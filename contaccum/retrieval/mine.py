"""Mine hard negatives: search for the training queries, filter the passages, write them.

The queries are mined in chunks. W processes divide each chunk among themselves, and process 0
writes the output.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from contaccum.config.commands import DataPolicy, EncoderConfig, MineConfig, SearchConfig
from contaccum.data.corpus import find_rows
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.data.identity import text_hash
from contaccum.errors import InputError
from contaccum.formats.records import Example, Passage, TeacherScores, record_line, whole_records
from contaccum.formats.training import TrainingKind, example_record, framed
from contaccum.retrieval.encode import Texts, load_encoder_of, passage_vectors
from contaccum.retrieval.negatives import CrossEncoder, MiningQueries, select_negatives
from contaccum.retrieval.retriever import (
    BM25_NAME,
    DEFAULTS,
    Retriever,
    index_settings,
    validate_search,
)
from contaccum.runtime.checks import refuse_input_as_output
from contaccum.runtime.files import write_json
from contaccum.runtime.processes import ALONE, Processes, encoding_device

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder

MINING = MineConfig()
CHUNK = 16_384  # number of queries that are searched at a time; their rankings are in memory
SPREAD = ("mean", "min", "25%", "median", "75%", "max")


@dataclass
class Statistics:
    """Statistics of the mined queries."""

    short: int = 0  # number of queries that got fewer negatives than num_negatives
    empty: int = 0  # number of queries that got no negative
    # filter name -> number of candidates that it removed
    removed: Counter[str] = field(default_factory=Counter)
    positives: list[float] = field(default_factory=list)  # lowest score of each query's positives
    negatives: list[float] = field(default_factory=list)  # score of each negative
    # lowest positive score of the query - score of each negative
    margins: list[float] = field(default_factory=list)

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the statistics of other queries, as the dictionary of their fields."""
        self.short += other["short"]
        self.empty += other["empty"]
        self.removed.update(other["removed"])
        self.positives += other["positives"]
        self.negatives += other["negatives"]
        self.margins += other["margins"]

    def report(self) -> dict[str, Any]:
        """Return counts, removed candidates by filter, and mean and quantiles of the scores."""
        scores = {}
        for name in ("positives", "negatives", "margins"):
            if values := getattr(self, name):
                quantiles = [float(value) for value in np.percentile(values, [0, 25, 50, 75, 100])]
                scores[name] = dict(zip(SPREAD, [float(np.mean(values)), *quantiles], strict=True))
        return {
            "queries": len(self.positives),
            "negatives": len(self.negatives),
            "queries_with_fewer": self.short,
            "queries_without": self.empty,
            "removed": dict(self.removed),
            "scores": scores,
        }


@dataclass(frozen=True)
class Miner:
    """Finds the negatives of the queries of a training set."""

    queries: MiningQueries
    retriever: Retriever
    settings: MineConfig = MINING
    to: TrainingKind = "jsonl"  # format of the mined examples
    cross_encoder: CrossEncoder | None = None

    def mine(self, start: int, stop: int, statistics: Statistics) -> list[bytes]:
        """Mine the examples ``start`` to ``stop`` - 1.

        Return them with their negatives, as lines of the output.

        Their statistics are added to ``statistics``.
        """
        examples = list(self.queries.examples.part(start, stop))
        positives = [self.queries.positives(example) for example in examples]
        known = [self.queries.known(example) for example in examples]
        # search deeper by the number of known passages, so that range_max candidates remain when
        # they are left out
        depth = self.settings.range_max + max(map(len, known), default=0)
        results = self.retriever.search_with_positives(
            [example.query.text for example in examples],
            [[row for _, row in places] for places in positives],
            depth,
        )
        candidates = []
        positive_scores = []
        for (hits, scores), places, left_out in zip(results, positives, known, strict=True):
            copies = left_out.difference(key for key, _ in places)
            statistics.removed["same text"] += sum(key in copies for key, _ in hits)
            kept = [hit for hit in hits if hit[0] not in left_out]
            candidates.append(kept[: self.settings.range_max])
            positive_scores.append(scores)
        corpus = self.queries.corpus
        row_of = find_rows(corpus, {passage_id for hits in candidates for passage_id, _ in hits})
        lines = []
        for number, example in enumerate(examples):
            hits = candidates[number]
            found = list(Passage.of_columns(corpus[[row_of[passage_id] for passage_id, _ in hits]]))
            scores = np.array([score for _, score in hits])
            lines.append(
                self._line(
                    start + number, example, found, scores, positive_scores[number], statistics
                )
            )
        return lines

    def _line(
        self,
        number: int,
        example: Example,
        candidates: list[Passage],
        scores: np.ndarray,
        positive_scores: np.ndarray,
        statistics: Statistics,
    ) -> bytes:
        """Select the negatives of one query among n candidates.

        Return the example with these negatives as a line.

        number: position of the example in the data. scores: scores of the candidates, (n,),
        descending. positive_scores: (P,).
        """
        # hash of a text -> position of the best candidate with this text
        first_with_text: dict[int, int] = {}
        for position, passage in enumerate(candidates):
            first_with_text.setdefault(text_hash(passage.content), position)
        removed = {"same text": len(candidates) - len(first_with_text)}
        candidates = [candidates[position] for position in first_with_text.values()]
        scores = scores[list(first_with_text.values())]
        if self.cross_encoder is not None:
            texts = [passage.content for passage in (*example.positives, *candidates)]
            both = self.cross_encoder.scores(example.query.text, texts)
            positive_scores, scores = both[: len(example.positives)], both[len(example.positives) :]
            order = np.argsort(-scores, kind="stable")
            candidates, scores = [candidates[position] for position in order], scores[order]
        selected = select_negatives(scores, positive_scores, self.settings, number)
        negatives = [candidates[position] for position in selected.indices]
        teacher = TeacherScores(positive_scores.tolist(), scores[selected.indices].tolist())
        lowest = min(teacher.positives)
        statistics.add(
            {
                "short": int(len(negatives) < self.settings.num_negatives),
                "empty": int(not negatives),
                "removed": removed | selected.removed,
                "positives": [lowest],
                "negatives": teacher.negatives,
                "margins": [lowest - score for score in teacher.negatives],
            }
        )
        return record_line(
            example_record(example._replace(negatives=negatives, scores=teacher), self.to)
        )

    def mine_all(self, statistics: Statistics, group: Processes = ALONE) -> Iterator[bytes]:
        """Yield the lines of all examples in order.

        W processes divide each chunk; every process gets all lines.
        """
        total = len(self.queries.examples)
        with tqdm(total=total, desc="mining", unit="query", disable=None) as bar:
            for start in range(0, total, CHUNK):
                size = min(CHUNK, total - start)
                own_statistics = Statistics()
                first, last = (
                    start + size * rank // group.world for rank in (group.rank, group.rank + 1)
                )
                lines = self.mine(first, last, own_statistics)
                message = json.dumps(
                    {"lines": b"".join(lines).decode(), "statistics": vars(own_statistics)}
                )
                for part in group.gather_bytes(message.encode()):
                    mined = json.loads(part)
                    statistics.add(mined["statistics"])
                    yield from mined["lines"].encode().splitlines(keepends=True)
                bar.update(size)

    def write(
        self, output: str | Path, about: Mapping[str, Any], group: Processes = ALONE
    ) -> dict[str, Any]:
        """Write the mined examples to ``output``, and a report to a file next to it.

        Return the report.

        about: entries to add to the report. ``output`` contains the scores of the passages:
        ``pos_scores`` and ``neg_scores`` in JSONL, ``score`` in other formats. Only process 0
        writes and returns the report; the others return {}.
        """
        statistics = Statistics()
        lines = self.mine_all(statistics, group)
        if not group.is_main:
            for _ in lines:
                pass
            return {}
        # after a kill, neither file exists or only the report: an output that exists is complete
        with whole_records(output) as file:
            file.writelines(framed(lines, self.to))
            queries = len(statistics.positives)
            if 2 * statistics.empty > queries:
                removed = ", ".join(f"{name} {count}" for name, count in statistics.removed.items())
                sentence = (
                    f"{output}: {statistics.empty} of {queries} queries got no negative "
                    f"(candidates removed: {removed}). The search found nothing else, or the "
                    "filters are too strict."
                )
                if statistics.empty == queries:
                    raise InputError(sentence)
                warnings.warn(sentence, stacklevel=3)
            report = {**about, "settings": asdict(self.settings), **statistics.report()}
            write_json(about_path(output), report)
        return report


def mine(
    model: EncoderConfig | str | Path,
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

    Return the report (see ``Miner.write``).

    data: a BEIR folder or name, or a file of training examples, whose negatives are replaced.
    corpus: passages that may become negatives (a BEIR folder or name, a corpus.jsonl or a passages
    TSV); None: the passages of ``data``. group: processes that share the work. All of them must
    call this function.
    """
    mining.check()
    model = EncoderConfig.of(model)
    if Path(output).exists():
        raise InputError(f"{output}: exists already; choose a new path")
    refuse_input_as_output(about_path(output), data, corpus, model.model)
    with group.main_first():
        passages = open_dataset(corpus, policy=policy).corpus if corpus else None
        queries = MiningQueries(open_dataset(data, split, policy).examples(), passages)
    settings = replace(settings, seed=mining.seed)
    encoder: DualEncoder | None = None
    if model.model != BM25_NAME:
        validate_search(settings, group)
        encoder = load_encoder_of(
            model,
            "passage",
            lambda: Texts.of_corpus(queries.corpus),
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
        device = str(encoding_device(model.device))
        cross_encoder = CrossEncoder(
            mining.cross_encoder, device, mining.cross_encoder_batch_size, model.trust_remote_code
        )
    search: dict[str, Any] = {}
    if encoder is not None:
        search = {"precision": retriever.precision, **index_settings(settings)}
    about = {"model": model.model, "data": data, "split": split, "corpus": corpus, "search": search}
    return Miner(queries, retriever, mining, to, cross_encoder).write(output, about, group)


def about_path(output: str | Path) -> Path:
    """Return the path of the report of an output file: ``mined.about.json`` for ``mined.jsonl``."""
    return Path(output).with_suffix(".about.json")


def render_mined(report: Mapping[str, Any], output: str | Path) -> str:
    """Format a mining report as text."""
    head = f"{output}: {report['negatives']} negatives for {report['queries']} queries"
    if report["queries_with_fewer"]:
        most = report["settings"]["num_negatives"]
        number = "no negative" if most == 1 else f"fewer than {most} negatives"
        head += f"; {report['queries_with_fewer']} queries have {number}"
    taken = ", ".join(f"{name} {count}" for name, count in report["removed"].items())
    table = [" " * 10 + "".join(f"{name:>10s}" for name in SPREAD)]
    table += [
        f"{name:10s}" + "".join(f"{row[n]:10.4f}" for n in SPREAD)
        for name, row in report["scores"].items()
    ]
    return "\n".join([head, f"candidates removed: {taken}", *table])
