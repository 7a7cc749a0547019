"""Mine hard negatives: search for the queries of a training set, filter the passages found, and write the examples.

Queries are mined in blocks. Each of W processes mines every W-th block. Until the mining is finished, the folder
``OUTPUT.mining`` contains two files for each finished block: its lines of the output, and its statistics. A restart mines only
the other blocks.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from tqdm.auto import tqdm

from contaccum.config.commands import DataPolicy, EncoderConfig, MineConfig, SearchConfig
from contaccum.data.corpus import find_rows
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.data.examples import ExampleTable
from contaccum.data.tables import PASSAGE_COLUMNS, column_batches
from contaccum.errors import InputError, refuse_input_as_output
from contaccum.formats import Example, Passage, TeacherScores, content_id, record_line
from contaccum.formats.training import Form, example_record, framed
from contaccum.retrieval.blocks import SPREAD, BlockFolder, Statistics
from contaccum.retrieval.encode import Texts
from contaccum.retrieval.negatives import CrossEncoder, select_negatives
from contaccum.retrieval.retriever import DEFAULTS, Retriever
from contaccum.runtime.files import remove_folder, sweep, whole_file, write_json
from contaccum.runtime.locks import folder_lock
from contaccum.runtime.processes import ALONE, Processes

FORMAT = "contaccum-mining"
MINING = MineConfig()


class MiningQueries:
    """Queries to mine negatives for, the corpus, and the passages that must not become negatives."""

    def __init__(self, examples: ExampleTable, corpus: Dataset | None = None) -> None:
        """corpus: passages that may become negatives (columns id, title, text). None: the passages of the examples."""
        self.examples = examples
        digest = hashlib.sha256()
        ids: dict[str, None] = {}
        # hash of a query's or positive's text, which no negative may have -> ids of the passages with this text
        ids_of_text: dict[str, list[str]] = {}
        # hash of a query text -> id of each positive -> hash of the positive's text
        answers: dict[str, dict[str, str]] = {}
        for query, positives, *_ in examples:
            digest.update(json.dumps([query, *positives]).encode())
            ids_of_text[_text_hash(query.text)] = []
            own = answers.setdefault(_text_hash(query.text), {})
            for passage in positives:
                own[passage.id] = _text_hash(passage.content)
                ids_of_text[own[passage.id]] = []
                ids[passage.id] = None
        self.fingerprint = digest.hexdigest()
        self.corpus = examples.passages if corpus is None else corpus
        self.extra = None if corpus is None else _missing(examples.passages, corpus, ids)
        """Positives that ``corpus`` lacks, or None if there are none. They get scores but never become negatives."""
        self.passages = self.corpus if self.extra is None else concatenate_datasets([self.corpus, self.extra])
        """Passages of ``corpus``, followed by the passages of ``extra``."""
        for batch in column_batches(self.passages, PASSAGE_COLUMNS):
            for row in zip(*(batch[name] for name in PASSAGE_COLUMNS), strict=True):
                passage = Passage(*row)
                for key in {_text_hash(passage.content), _text_hash(passage.text)}:
                    if key in ids_of_text:
                        ids_of_text[key].append(passage.id)
        self._ids_of_text, self._answers = ids_of_text, answers

    def known(self, example: Example) -> set[str]:
        """Return the ids of passages that must not become negatives of an example.

        These are the positives of all queries with the same text, and all passages with the text of the query or of one of these
        positives.
        """
        query = _text_hash(example.query.text)
        answers = self._answers[query]
        return set(answers).union(*(self._ids_of_text[key] for key in (query, *answers.values())))


def _missing(examples_corpus: Dataset, corpus: Dataset, ids: Collection[str]) -> Dataset | None:
    """Return the passages of ``examples_corpus`` with the given ids that ``corpus`` lacks, or None if it lacks none."""
    known = find_rows(corpus, ids)
    rows = find_rows(examples_corpus, [key for key in ids if key not in known])
    # copy the rows: to read a column after Dataset.select, datasets would read all rows of the table
    return Dataset.from_dict(examples_corpus[sorted(rows.values())], features=corpus.features) if rows else None


def _text_hash(text: str) -> str:
    return content_id("", text.strip())


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
        batch = self.queries.passages[[rows[key] for key, _ in hits]]
        texts: dict[str, tuple[Passage, float]] = {}  # text -> best passage with this text, and its score
        for row, (_, score) in zip(zip(*(batch[name] for name in PASSAGE_COLUMNS), strict=True), hits, strict=True):
            texts.setdefault(Passage(*row).content, (Passage(*row), score))
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
    choice: EncoderConfig,
    data: str,
    output: str,
    *,
    split: str = "train",
    corpus: str | None = None,
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
    from contaccum.runtime.processes import encoding_device

    mining.check()
    if group.is_main:
        _sweep_next_to(Path(output))
    if Path(output).exists():
        raise InputError(f"{output}: exists already; choose a new path")
    refuse_input_as_output(about_path(Path(output)), data, corpus, choice.model)
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
    blocks = BlockFolder(_work_folder(output), mining.job(), len(_starts(mining)))
    with folder_lock(blocks.folder) if group.is_main else nullcontext():
        if group.is_main:
            blocks.claim()
        group.barrier()
        _mine_blocks(mining, blocks, group)
        group.barrier()
        report: dict[str, Any] = {}
        if group.is_main:
            settings = {"settings": asdict(mining.settings)}
            report = {**about, "search": mining.retriever.index_settings, **settings, **blocks.report()}
            write_json(about_path(output), report)
            with whole_file(output) as file:
                file.writelines(framed(blocks.lines(), mining.to))
            remove_folder(blocks.folder)
    group.barrier()
    return report


def _work_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.mining")


def _sweep_next_to(output: Path) -> None:
    """Remove the files that killed calls left next to ``output``. Raise InputError if another call is running."""
    with folder_lock(_work_folder(output)):
        for path in (output, about_path(output), _work_folder(output)):
            sweep(path.parent, path.name)


def about_path(output: str | Path) -> Path:
    """Return the path of the report of an output file: ``mined.about.json`` for ``mined.jsonl``."""
    return Path(output).with_suffix(".about.json")


def _mine_blocks(mining: Mining, blocks: BlockFolder, group: Processes) -> None:
    """Mine the blocks of this process that are not finished yet."""
    starts = _starts(mining)
    with tqdm(total=starts.stop, desc="mining", unit="query", disable=None) as bar:
        for number, start in enumerate(starts):
            if number % group.world == group.rank and not blocks.is_finished(number):
                found = Statistics(blocks.job_hash, number)
                blocks.write(found, mining.block(start, found))
            bar.update(min(starts.step, starts.stop - start))


def _starts(mining: Mining) -> range:
    return range(0, len(mining.queries.examples), mining.settings.block_size)


def render_mined(report: Mapping[str, Any], output: str | Path) -> str:
    """Format a mining report as text."""
    head = f"{output}: {report['negatives']} negatives for {report['queries']} queries"
    if report["queries_with_fewer"]:
        head += f"; {report['queries_with_fewer']} queries have fewer than {report['settings']['num_negatives']}"
    taken = ", ".join(f"{name} {count}" for name, count in report["removed"].items())
    table = [" " * 10 + "".join(f"{name:>10s}" for name in SPREAD)]
    table += [f"{name:10s}" + "".join(f"{row[n]:10.4f}" for n in SPREAD) for name, row in report["scores"].items()]
    return "\n".join([head, f"candidates removed: {taken}", *table])
