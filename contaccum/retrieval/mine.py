"""Hard negatives for a training set: its queries are searched block after block, and what the filters leave is written.

Beside the output, while it is made, stands ``OUTPUT.mining`` with a file of lines and one of numbers for every block that is
finished; a process that starts again goes on behind them, and the processes of a launch take every W-th block.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from contaccum.data.arrow import PASSAGE_COLUMNS, column_batches
from contaccum.data.convert import Examples, Form, example_record, framed, record_line
from contaccum.data.corpus import find_rows
from contaccum.data.records import Example, Passage, Scores, content_id
from contaccum.errors import InputError
from contaccum.files import read_json, remove_folder, sweep, whole_file, write_json
from contaccum.lock import folder_lock
from contaccum.options import MineSettings
from contaccum.processes import ALONE, Processes
from contaccum.retrieval.candidates import Pool, Search, pool_of
from contaccum.retrieval.encode import Texts
from contaccum.retrieval.negatives import check, choose
from contaccum.retrieval.rerank import CrossEncoder

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT = "contaccum-mining"
JOB = "job.json"
QUARTILES = ("min", "25%", "median", "75%", "max")


class Asked:
    """The queries that negatives are mined for, the passages that may become them, and which are known to be none."""

    def __init__(self, examples: Examples, corpus: "Dataset | None" = None) -> None:
        """corpus: passages (columns id, title, text) to mine from instead of those of the examples; positives that it lacks are
        scored with it."""
        self.examples = examples
        digest = hashlib.sha256()
        keys: dict[str, list[str]] = {}  # of every text that no negative may have: ids of the passages with that text
        ids: dict[str, None] = {}
        answers: dict[
            str, dict[str, str]
        ] = {}  # of every query's text: its positives' ids, and the keys of their texts
        for query, positives, *_ in examples:
            digest.update(json.dumps([query, *positives]).encode())
            keys[_key(query.text)] = []
            own = answers.setdefault(_key(query.text), {})
            for passage in positives:
                own[passage.id] = _key(passage.content)
                keys[own[passage.id]] = []
                ids[passage.id] = None
        self.fingerprint = digest.hexdigest()
        self.pool: Pool = pool_of(examples.corpus, corpus, ids)
        self.passages = self.pool.all
        for batch in column_batches(self.passages, PASSAGE_COLUMNS):
            for row in zip(*(batch[name] for name in PASSAGE_COLUMNS), strict=True):
                passage = Passage(*row)
                for key in {_key(passage.content), _key(passage.text)}:
                    if key in keys:
                        keys[key].append(passage.id)
        self._keys, self._answers = keys, answers

    def known(self, example: Example) -> set[str]:
        """Ids of the passages that are no negatives: positives of this example and of others with the same query text, and what
        has the text of one of them or of the query."""
        query = _key(example.query.text)
        answers = self._answers[query]
        return set(answers).union(*(self._keys[key] for key in (query, *answers.values())))


def _key(text: str) -> str:
    return content_id("", text.strip())


@dataclass(frozen=True)
class Mining:
    """What is mined, how, and into which form of file."""

    asked: Asked
    search: Search
    settings: MineSettings
    to: Form = "jsonl"
    rerank: CrossEncoder | None = None

    def job(self) -> dict[str, Any]:
        """What tells one mining from another: of equal ones every block is the same."""
        return {
            "format": FORMAT,
            "search": self.search.fingerprint,
            **self.search.settings,
            "cross_encoder": self.rerank and self.rerank.fingerprint(),
            "queries": self.asked.fingerprint,
            "passages": f"{len(self.asked.pool.corpus)} first of {Texts.of_corpus(self.asked.passages).fingerprint}",
            "to": self.to,
            **{name: value for name, value in asdict(self.settings).items() if name != "cross_encoder"},
        }

    def block(self, start: int) -> "Block":
        """Mine for the examples from number ``start`` of the data on, one block of them."""
        examples = list(self.asked.examples.part(start, start + self.settings.block_size))
        known = [self.asked.known(example) for example in examples]
        rows = find_rows(self.asked.passages, {passage.id for example in examples for passage in example.positives})
        positives = [[rows[passage.id] for passage in example.positives] for example in examples]
        depth = self.settings.range_max + max(map(len, known))
        found = list(self.search.find([example.query.text for example in examples], positives, depth))
        hits = [
            [hit for hit in one.hits if hit[0] not in own][: self.settings.range_max]
            for one, own in zip(found, known, strict=True)
        ]
        rows = find_rows(self.asked.passages, {key for each in hits for key, _ in each})
        block = Block()
        for number, (example, each, one) in enumerate(zip(examples, hits, found, strict=True), start):
            passages, scores = self._distinct(each, rows)
            block.removed["same text"] += len(each) - len(passages)
            self._add(block, number, example, passages, scores, one.positives)
        return block

    def _distinct(self, hits: list[tuple[str, float]], rows: dict[str, int]) -> tuple[list[Passage], np.ndarray]:
        """The passages found, each text once, where it stands highest, and their scores."""
        batch = self.asked.passages[[rows[key] for key, _ in hits]]
        texts: dict[str, tuple[Passage, float]] = {}
        for row, (_, score) in zip(zip(*(batch[name] for name in PASSAGE_COLUMNS), strict=True), hits, strict=True):
            passage = Passage(*row)
            texts.setdefault(passage.content, (passage, score))
        return [passage for passage, _ in texts.values()], np.array([score for _, score in texts.values()])

    def _add(
        self,
        block: "Block",
        number: int,
        example: Example,
        passages: list[Passage],
        scores: np.ndarray,
        positives: np.ndarray,
    ) -> None:
        """Choose a query's negatives among its candidates, which stand in a run's order, and add its line to the block."""
        if self.rerank:
            texts = [passage.content for passage in (*example.positives, *passages)]
            positives, scores = np.split(self.rerank.scores(example.query.text, texts), [len(positives)])
            order = sorted(range(len(passages)), key=lambda place: (scores[place], passages[place].id), reverse=True)
            passages, scores = [passages[place] for place in order], scores[order]
        chosen = choose(scores, positives, self.settings, number)
        found = Scores([float(score) for score in positives], [float(scores[place]) for place in chosen.places])
        mined = example._replace(negatives=[passages[place] for place in chosen.places], scores=found)
        block.lines.append(record_line(example_record(mined, self.to)))
        block.removed.update(chosen.removed)
        block.short += len(chosen.places) < self.settings.num_negatives
        block.positives.append(min(found.positives))
        block.negatives += found.negatives
        block.margins += [min(found.positives) - score for score in found.negatives]


@dataclass
class Block:
    """What was mined for some queries; all but the lines is kept for the report."""

    lines: list[bytes] = field(default_factory=list)
    short: int = 0
    """Queries with fewer negatives than asked for."""
    removed: Counter[str] = field(default_factory=Counter)
    """Candidates that each filter took away."""
    positives: list[float] = field(default_factory=list)
    """Lowest score of each query's positives."""
    negatives: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    """By how much each negative scores lower than its query's positive."""


def mine(mining: Mining, output: str | Path, about: Mapping[str, Any], group: Processes = ALONE) -> dict[str, Any]:
    """Write the examples with mined negatives to ``output``, and beside it ``about`` with what was mined; returns the latter.

    The file has the passages' scores: ``pos_scores`` and ``neg_scores`` in JSONL, ``score`` with each passage elsewhere.
    Raises InputError where ``output`` exists, or the work begun beside it belongs to another mining.
    """
    check(mining.settings)
    output = Path(output)
    if output.exists():
        raise InputError(f"{output}: exists already, expected a new path")
    folder = output.with_name(f"{output.name}.mining")
    with folder_lock(folder) if group.is_main else nullcontext():
        if group.is_main:
            _claim(folder, mining.job())
        group.barrier()
        _mine_blocks(mining, folder, group)
        group.barrier()
        report: dict[str, Any] = {}
        if group.is_main:
            report = {**about, "search": mining.search.settings, **_report(folder, mining.settings)}
            write_json(about_path(output), report)
            with whole_file(output) as file:
                file.writelines(framed(_lines(folder), mining.to))
            remove_folder(folder)
    group.barrier()
    return report


def about_path(output: str | Path) -> Path:
    """Where it stands what was mined: ``mined.about.json`` beside ``mined.jsonl``."""
    return Path(output).with_suffix(".about.json")


def _claim(folder: Path, job: dict[str, Any]) -> None:
    """Make the folder of unfinished work this mining's, or refuse it."""
    sweep(folder)
    if not (folder / JOB).is_file():
        write_json(folder / JOB, job)
    found = read_json(folder / JOB)
    if found != job:
        changed = [name for name in job if not isinstance(found, dict) or found.get(name) != job[name]]
        raise InputError(
            f"{folder}: holds an unfinished mining with another {' and '.join(changed)}, expected the same to go on; or "
            "delete it"
        )


def _mine_blocks(mining: Mining, folder: Path, group: Processes) -> None:
    """Write every block of this process that is missing; its numbers come last, so that a block with numbers is finished."""
    count, size = len(mining.asked.examples), mining.settings.block_size
    with tqdm(total=count, desc="mining", unit="query", disable=None) as bar:
        for number, start in enumerate(range(0, count, size)):
            numbers = folder / f"{number:05d}.json"
            if number % group.world == group.rank and not numbers.exists():
                block = mining.block(start)
                with whole_file(folder / f"{number:05d}.lines") as file:
                    file.writelines(block.lines)
                write_json(numbers, {name: value for name, value in vars(block).items() if name != "lines"})
            bar.update(min(size, count - start))


def _lines(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.glob("*.lines")):
        with open(path, "rb") as file:
            yield from file


def _report(folder: Path, settings: MineSettings) -> dict[str, Any]:
    """What stands in ``about.json``: settings, counts, and how scores and margins are distributed."""
    blocks = [read_json(path) for path in sorted(folder.glob("[0-9]*.json"))]
    removed: Counter[str] = Counter()
    for block in blocks:
        removed.update(block["removed"])
    values = {name: np.array([v for b in blocks for v in b[name]]) for name in ("positives", "negatives", "margins")}
    return {
        "settings": asdict(settings),
        "queries": len(values["positives"]),
        "negatives": len(values["negatives"]),
        "queries_with_fewer": sum(block["short"] for block in blocks),
        "removed": dict(removed),
        "scores": {name: _spread(found) for name, found in values.items() if len(found)},
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    quartiles = zip(QUARTILES, np.percentile(values, [0, 25, 50, 75, 100]), strict=True)
    return {"mean": float(values.mean()), **{name: float(value) for name, value in quartiles}}


def render_mined(report: Mapping[str, Any], output: str | Path) -> str:
    """The report for the eye."""
    head = f"{output}: {report['negatives']} negatives for {report['queries']} queries"
    if report["queries_with_fewer"]:
        head += f"; {report['queries_with_fewer']} have fewer than {report['settings']['num_negatives']}"
    taken = ", ".join(f"{name} {count}" for name, count in report["removed"].items())
    names = ("mean", *QUARTILES)
    table = [" " * 10 + "".join(f"{name:>10s}" for name in names)]
    table += [f"{name:10s}" + "".join(f"{row[n]:10.4f}" for n in names) for name, row in report["scores"].items()]
    return "\n".join([head, f"candidates removed: {taken}", *table])
