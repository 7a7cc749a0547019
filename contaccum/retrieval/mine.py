"""Mine hard negatives: search for the queries of a training set, filter the passages found, and write the examples.

Queries are mined in blocks. Each of W processes mines every W-th block. Until the mining is finished, the folder
``OUTPUT.mining`` contains two files for each finished block: its lines of the output, and its statistics, with hashes. A restart
mines only the missing and damaged blocks.
"""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from contaccum.config.commands import DataPolicy, EncoderConfig, MineConfig, SearchConfig
from contaccum.data.corpus import find_rows
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.errors import InputError
from contaccum.formats.records import Example, Passage, TeacherScores, record_line, whole_records
from contaccum.formats.training import Form, example_record, framed
from contaccum.retrieval.encode import Texts
from contaccum.retrieval.negatives import CrossEncoder, MiningQueries, select_negatives
from contaccum.retrieval.retriever import DEFAULTS, Retriever
from contaccum.runtime.checks import refuse_input_as_output
from contaccum.runtime.files import read_json, remove_folder, sha256_of, sweep, whole_file, write_json
from contaccum.runtime.locks import folder_lock
from contaccum.runtime.processes import ALONE, Processes, encoding_device

FORMAT = "contaccum-mining"
MINING = MineConfig()
JOB = "job.json"
SPREAD = ("mean", "min", "25%", "median", "75%", "max")


@dataclass
class Statistics:
    """Statistics of one mined block of queries, with hashes that reveal damaged files."""

    job: str  # SHA-256 of ``BlockFolder.job``
    block: int  # number of the block, from 0
    lines: str = ""  # SHA-256 of the block's lines
    short: int = 0  # number of queries that got fewer negatives than num_negatives
    removed: dict[str, int] = field(default_factory=dict)  # filter name -> number of candidates that it removed
    positives: list[float] = field(default_factory=list)  # lowest score of each query's positives
    negatives: list[float] = field(default_factory=list)  # score of each negative
    margins: list[float] = field(default_factory=list)  # lowest positive score of the query - score of each negative
    sha256: str = ""  # SHA-256 of all other fields

    def own_hash(self) -> str:
        """Return the SHA-256 of all fields except ``sha256``."""
        return _hash_of({**vars(self), "sha256": ""})


def _hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class BlockFolder:
    """Folder with the blocks of one mining job. Several processes can write blocks at the same time."""

    def __init__(self, folder: Path, job: dict[str, Any], count: int) -> None:
        """Set the folder. job: settings and hashes that determine the content of the blocks. count: number of blocks."""
        self.folder, self.job, self.count = folder, job, count
        self.job_hash = _hash_of(job)

    def claim(self) -> None:
        """Raise InputError if the folder belongs to a different job. If the job file is missing or damaged, write it."""
        sweep(self.folder)
        try:
            found = read_json(self.folder / JOB, dict[str, Any])
        except InputError:  # missing or damaged; each block has the hash of its job, so the file can be written again
            found = self.job
            write_json(self.folder / JOB, self.job)
        if changed := [name for name in self.job if found.get(name) != self.job[name]]:
            raise InputError(
                f"{self.folder}: contains an unfinished mining job that differs in {', '.join(changed)}. Use the settings "
                "and data of that job, or delete the folder to start again."
            )

    def write(self, found: Statistics, lines: list[bytes]) -> None:
        """Write the lines of a block, then its statistics. A block without statistics is unfinished."""
        content = b"".join(lines)
        with whole_file(self._lines(found.block)) as file:
            file.write(content)
        found.lines = hashlib.sha256(content).hexdigest()
        found.sha256 = found.own_hash()
        write_json(self._statistics(found.block), vars(found))

    def is_finished(self, number: int) -> bool:
        """Return whether a block is finished. If the block is damaged or belongs to a different job, warn and return False."""
        path = self._statistics(number)
        if not path.exists():
            return False
        try:
            found: Statistics = read_json(path, Statistics)
            usable = (found.job, found.block, found.sha256) == (self.job_hash, number, found.own_hash())
            usable = usable and sha256_of(self._lines(number)) == found.lines
        except (InputError, OSError):
            usable = False
        if not usable:
            warnings.warn(
                f"{path}: block {number} is damaged or belongs to a different job; it is mined again", stacklevel=2
            )
        return usable

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of all blocks in order."""
        for number in range(self.count):
            yield from self._lines(number).read_bytes().splitlines(True)

    def report(self) -> dict[str, Any]:
        """Return the statistics of all blocks: counts, candidates removed by each filter, mean and quantiles of scores."""
        blocks: list[Statistics] = [read_json(self._statistics(number), Statistics) for number in range(self.count)]
        removed: Counter[str] = Counter()
        for block in blocks:
            removed.update(block.removed)
        names = ("positives", "negatives", "margins")
        values = {name: np.array([value for block in blocks for value in getattr(block, name)]) for name in names}
        return {
            "queries": len(values["positives"]),
            "negatives": len(values["negatives"]),
            "queries_with_fewer": sum(block.short for block in blocks),
            "removed": dict(removed),
            "scores": {name: _spread(found) for name, found in values.items() if len(found)},
        }

    def _lines(self, number: int) -> Path:
        return self.folder / f"{number:05d}.lines"

    def _statistics(self, number: int) -> Path:
        return self.folder / f"{number:05d}.json"


def _spread(values: np.ndarray) -> dict[str, float]:
    numbers = values.mean(), *np.percentile(values, [0, 25, 50, 75, 100])
    return {name: float(value) for name, value in zip(SPREAD, numbers, strict=True)}


@dataclass(frozen=True)
class Mining:
    """One mining job: queries, retriever, settings and output format."""

    queries: MiningQueries
    retriever: Retriever
    settings: MineConfig
    to: Form = "jsonl"
    cross_encoder: CrossEncoder | None = None

    def job(self) -> dict[str, Any]:
        """Return the settings and hashes that determine the content of the blocks. Equal jobs have equal blocks."""
        return {
            "format": FORMAT,
            "search": self.retriever.fingerprint,
            **self.retriever.index_settings,
            "cross_encoder": self.cross_encoder and self.cross_encoder.fingerprint(),
            "queries": self.queries.fingerprint,
            "passages": f"{len(self.queries.corpus)} first of {Texts.of_corpus(self.queries.passages).fingerprint}",
            "to": self.to,
            **{name: value for name, value in asdict(self.settings).items() if name != "cross_encoder"},
        }

    def block(self, start: int, found: Statistics) -> list[bytes]:
        """Mine the block that starts at example ``start``. Return the lines of the block, and add its statistics to ``found``."""
        examples = list(self.queries.examples.part(start, start + self.settings.block_size))
        known = [self.queries.known(example) for example in examples]
        rows = find_rows(self.queries.passages, {passage.id for example in examples for passage in example.positives})
        positives = [[rows[passage.id] for passage in example.positives] for example in examples]
        depth = self.settings.range_max + max(map(len, known))
        texts = [example.query.text for example in examples]
        scored = list(self.retriever.search_with_positives(texts, positives, depth))
        candidates = [
            [hit for hit in hits if hit[0] not in own][: self.settings.range_max]
            for (hits, _), own in zip(scored, known, strict=True)
        ]
        rows = find_rows(self.queries.passages, {key for hits in candidates for key, _ in hits})
        return [
            self._mined_line(found, number, example, hits, scores, rows)
            for number, (example, hits, (_, scores)) in enumerate(zip(examples, candidates, scored, strict=True), start)
        ]

    def _mined_line(
        self,
        found: Statistics,
        number: int,
        example: Example,
        hits: list[tuple[str, float]],
        positives: np.ndarray,
        rows: dict[str, int],
    ) -> bytes:
        """Select the negatives of one query among ``hits``. Return the example with these negatives as a line of the output.

        The query's statistics are added to ``found``. positives: scores of the positives. rows: passage id -> row number.
        """
        found_passages = Passage.of_columns(self.queries.passages[[rows[key] for key, _ in hits]])
        texts: dict[str, tuple[Passage, float]] = {}  # text -> best passage with this text, and its score
        for passage, (_, score) in zip(found_passages, hits, strict=True):
            texts.setdefault(passage.content, (passage, score))
        passages, scores = [passage for passage, _ in texts.values()], np.array([score for _, score in texts.values()])
        removed = {"same text": len(hits) - len(passages)}
        if self.cross_encoder:
            pairs = [passage.content for passage in (*example.positives, *passages)]
            positives, scores = np.split(self.cross_encoder.scores(example.query.text, pairs), [len(positives)])
            order = sorted(range(len(passages)), key=lambda row: (scores[row], passages[row].id), reverse=True)
            passages, scores = [passages[row] for row in order], scores[order]
        selected = select_negatives(scores, positives, self.settings, number)
        teacher = TeacherScores([float(score) for score in positives], [float(scores[row]) for row in selected.indices])
        for name, count in (removed | selected.removed).items():
            found.removed[name] = found.removed.get(name, 0) + count
        found.short += len(selected.indices) < self.settings.num_negatives
        found.positives.append(min(teacher.positives))
        found.negatives += teacher.negatives
        found.margins += [min(teacher.positives) - score for score in teacher.negatives]
        mined = example._replace(negatives=[passages[row] for row in selected.indices], scores=teacher)
        return record_line(example_record(mined, self.to))


def mine(
    choice: EncoderConfig | str | Path,
    data: str | Path,
    output: str | Path,
    *,
    split: str = "train",
    corpus: str | Path | None = None,
    to: Form = "jsonl",
    mining: MineConfig = MINING,
    settings: SearchConfig = DEFAULTS,
    policy: DataPolicy = DEFAULT_POLICY,
    group: Processes = ALONE,
) -> dict[str, Any]:
    """Search for hard negatives, and write training examples with these negatives. Return the report of ``write_mined``.

    data: a BEIR folder or name, or a file of training examples, whose negatives are replaced. corpus: passages that may become
    negatives (a BEIR folder or name, a corpus.jsonl or a passages TSV); None: the passages of ``data``. group: processes that
    share the work. All of them must call this function.
    """
    mining.check()
    choice = EncoderConfig.of(choice)
    path = Path(output)
    if path.is_dir():
        raise InputError(f"{output}: exists already; choose a new path")
    about_file = about_path(output)
    if group.is_main:
        with folder_lock(_work_folder(path)):  # raises an error if another call is running
            for each in (path, about_file, _work_folder(path)):
                sweep(each.parent, each.name)  # removes the files that killed calls left
    if path.exists():
        raise InputError(f"{output}: exists already; choose a new path")
    refuse_input_as_output(about_file, data, corpus, choice.model)
    with group.main_first():
        given = open_dataset(corpus, policy=policy).corpus if corpus else None
        queries = MiningQueries(open_dataset(data, split, policy).examples(), given)
    settings = replace(settings, seed=mining.seed)
    retriever = Retriever.open(choice, queries.corpus, settings, group, mining=True, extra=queries.extra)
    cross_encoder = None
    if mining.cross_encoder is not None:
        device, size = str(encoding_device(choice.device)), mining.cross_encoder_batch_size
        cross_encoder = CrossEncoder(mining.cross_encoder, device, size, choice.trust_remote_code)
    about = {"model": choice.model, "data": data, "split": split, "corpus": corpus}
    return write_mined(Mining(queries, retriever, mining, to, cross_encoder), output, about, group)


def write_mined(
    mining: Mining, output: str | Path, about: Mapping[str, Any], group: Processes = ALONE
) -> dict[str, Any]:
    """Write the mined examples to ``output``, and a report to a file next to it. Return the report.

    about: entries to add to the report. ``output`` contains the scores of the passages: ``pos_scores`` and ``neg_scores`` in
    JSONL, ``score`` in other formats. Only the main process returns the report; others return an empty one.

    Raises InputError if the folder ``<output>.mining`` has an unfinished job with other settings or data.
    """
    output = Path(output)
    starts = range(0, len(mining.queries.examples), mining.settings.block_size)
    blocks = BlockFolder(_work_folder(output), mining.job(), len(starts))
    with folder_lock(blocks.folder) if group.is_main else nullcontext():
        if group.is_main:
            blocks.claim()
        group.barrier()
        with tqdm(total=starts.stop, desc="mining", unit="query", disable=None) as bar:
            for number, start in enumerate(starts):
                if number % group.world == group.rank and not blocks.is_finished(number):
                    found = Statistics(blocks.job_hash, number)
                    blocks.write(found, mining.block(start, found))
                bar.update(min(starts.step, starts.stop - start))
        group.barrier()
        report: dict[str, Any] = {}
        if group.is_main:
            settings = {"settings": asdict(mining.settings)}
            report = {**about, "search": mining.retriever.index_settings, **settings, **blocks.report()}
            write_json(about_path(output), report)
            with whole_records(output) as file:
                file.writelines(framed(blocks.lines(), mining.to))
            remove_folder(blocks.folder)
    group.barrier()
    return report


def _work_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.mining")


def about_path(output: str | Path) -> Path:
    """Return the path of the report of an output file: ``mined.about.json`` for ``mined.jsonl``."""
    return Path(output).with_suffix(".about.json")


def render_mined(report: Mapping[str, Any], output: str | Path) -> str:
    """Format a mining report as text."""
    head = f"{output}: {report['negatives']} negatives for {report['queries']} queries"
    if report["queries_with_fewer"]:
        head += (
            f"; {report['queries_with_fewer']} queries have fewer than {report['settings']['num_negatives']} negatives"
        )
    taken = ", ".join(f"{name} {count}" for name, count in report["removed"].items())
    table = [" " * 10 + "".join(f"{name:>10s}" for name in SPREAD)]
    table += [f"{name:10s}" + "".join(f"{row[n]:10.4f}" for n in SPREAD) for name, row in report["scores"].items()]
    return "\n".join([head, f"candidates removed: {taken}", *table])
