"""Small encoders, random micro-batches, and a slow reference implementation of the loss."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import BertConfig, BertModel

from contaccum.batch import NO_PASSAGE, MicroBatch, RowIds, Tokens
from contaccum.config import DataPolicy, TrainConfig
from contaccum.data import examples, retrieval_set
from contaccum.data.commands import convert
from contaccum.data.dataset import open_dataset
from contaccum.data.examples import ExampleTable
from contaccum.data.retrieval_set import JudgedSplit, RetrievalSet
from contaccum.data.tables import Ragged
from contaccum.data.train_set import TrainSet
from contaccum.encoder import DualEncoder, EncoderSettings, Tower
from contaccum.encoder.tokenizer import wordpiece_tokenizer
from contaccum.formats.readers import numbered_corpus, numbered_examples
from contaccum.formats.records import Example, Passage
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank, BankOptions
from contaccum.methods.loss import InfoNCE
from contaccum.methods.matryoshka import FULL_WIDTH, MatryoshkaBank
from contaccum.methods.objective import Loss, Objective
from contaccum.retrieval.exact import ExactIndex
from contaccum.retrieval.index import Index, Origin
from contaccum.retrieval.shards import Shard
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import sha256_of

VOCABULARY = 60


def tiny_encoder(
    dropout: float = 0.0, tie: bool = False, similarity: str = "cosine", seed: int = 0
) -> DualEncoder:
    """Two one-layer towers, 32 wide."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    tokenizer = wordpiece_tokenizer([], 5)  # special tokens only
    query = Tower(BertModel(config), tokenizer, "mean")
    passage = query if tie else Tower(BertModel(config), tokenizer, "mean")
    settings = EncoderSettings(
        similarity=similarity, max_query_length=16, max_passage_length=16, tie_towers=tie
    )
    return DualEncoder(query, passage, settings)


def micro_batches(
    count: int, pairs: int, hard_negatives: int = 0, passages: int = 1000, seed: int = 0
) -> list[MicroBatch]:
    """Random tokens and passage ids; few ``passages`` make many false negatives.

    Every row knows its positive and one more.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(rows: int, length: int) -> Tokens:
        ids = torch.randint(5, VOCABULARY, (rows, length), generator=generator)
        lengths = torch.randint(3, length + 1, (rows, 1), generator=generator)
        return Tokens(ids, (torch.arange(length) < lengths).long())

    batches = []
    for _ in range(count):
        columns = torch.randint(0, passages, (pairs, 1 + hard_negatives), generator=generator)
        other = torch.randint(0, passages, (pairs, 1), generator=generator)
        other[::2] = NO_PASSAGE
        # a hard negative is never a positive of its own row
        clash = (columns[:, 1:] == columns[:, :1]) | (columns[:, 1:] == other)
        columns[:, 1:][clash] += passages
        ids = RowIds(columns, torch.cat([columns[:, :1], other], dim=1))
        names = [f"q{i}" for i in range(pairs)]
        batches.append(
            MicroBatch(tokens(pairs, 6), tokens(pairs * (1 + hard_negatives), 9), ids, names)
        )
    return batches


def concatenate(parts) -> tuple[torch.Tensor, torch.Tensor, RowIds]:
    """Concatenate (queries, passages, ids) of several micro-batches."""
    queries, passages, ids = zip(*parts, strict=True)
    return torch.cat(queries), torch.cat(passages), RowIds.merge(list(ids), torch.cat)


def gradients(encoder: DualEncoder) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter's gradient."""
    return {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}


def make_bank(
    size: int, dim: int, loss: Loss, *, push: int, device: torch.device | None = None, **options
) -> Bank:
    """A bank for ``loss``; options: of BankOptions."""
    matryoshka = loss.matryoshka if isinstance(loss, Objective) else FULL_WIDTH
    return MatryoshkaBank(
        size, dim, loss.similarity, BankOptions(**options), matryoshka, push=push, device=device
    )


def run_steps(
    method: str,
    steps: list[list[MicroBatch]],
    *,
    dropout: float = 0.0,
    loss: Loss | None = None,
    seed: int = 0,
    bank_size: int = 0,
    encoder: DualEncoder | None = None,
    switch: Callable[[DualEncoder], object] = lambda encoder: None,
    device: str = "cpu",
    precision: str = "fp32",
    replay_share: float = 1.0,
    **bank_options,
) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Return the gradients and the loss of each step of a method with plain gradient descent.

    ``switch`` is called with the trained encoder, a copy of the given one.
    """
    encoder = copy.deepcopy(encoder) if encoder is not None else tiny_encoder(dropout, seed=seed)
    engine = Engine(device=device, precision=precision, seed=seed, replay_share=replay_share)
    encoder.to(engine.device).train()
    switch(encoder)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    loss = loss or InfoNCE(0.1)
    first = steps[0][0]
    hard = first.ids.columns.shape[1] - 1
    only = method == "passage_bank"
    bank_options = {
        "hard_negatives": hard,
        "columns_only": only,
        "push": len(first.ids.columns),
        "device": engine.device,
        **bank_options,
    }
    bank = make_bank(bank_size, encoder.dim, loss, **bank_options)
    found, losses = [], []
    for number, batches in enumerate(steps):
        engine.step = number
        values = METHODS[method](engine, batches, bank, loss)
        losses.append(torch.stack([value.value for value in values]).mean().item())
        found.append(gradients(encoder))
        engine.update()
        bank.end_step()
    return found, losses


def largest_difference(one: list[dict], other: list[dict]) -> float:
    """Return the largest difference between two lists of gradients, relative to each step's largest
    gradient."""
    differences = []
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        scale = max(gradient.abs().max() for gradient in left.values())
        differences.append(max((left[name] - right[name]).abs().max() / scale for name in left))
    return float(max(differences))


class SlowBank:
    """Reference bank of plain lists, oldest row first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.step = 0
        self.rows: list[tuple] = []  # (query, [passages], [passage ids], {known positives}, step)

    def push(self, queries, passages, ids: RowIds) -> None:
        for i in range(len(queries)):
            known = set(ids.positives[i].tolist()) - {NO_PASSAGE}
            row = (
                queries[i].detach(),
                list(passages[i].detach()),
                ids.columns[i].tolist(),
                known,
                self.step,
            )
            self.rows.append(row)
        self.rows = self.rows[max(0, len(self.rows) - self.size) :]


def slow_loss(
    queries,
    passages,
    ids: RowIds,
    bank: SlowBank | None,
    temperature: float,
    *,
    mask: bool,
    rows: bool = True,
    weight: str = "all",
    decay: float = 0.0,
):
    """Compute the loss element by element: the mean over rows of the cross-entropy over current and
    bank columns.

    decay: age penalty on a logit for each step between its row and column.
    """
    now = bank.step if bank else 0
    current = [
        (
            queries[i],
            list(passages[i]),
            ids.columns[i].tolist(),
            set(ids.positives[i].tolist()) - {NO_PASSAGE},
            now,
        )
        for i in range(len(queries))
    ]
    stored = bank.rows if bank else []
    total = torch.zeros(())
    all_rows = current + (stored if rows else [])
    for row in all_rows:
        query, own_passages, _, known, row_step = row
        logits, target = [], None
        for column in current + stored:
            _, column_passages, column_ids, _, column_step = column
            for passage, passage_id in zip(column_passages, column_ids, strict=True):
                own = passage is own_passages[0]
                if own:
                    target = len(logits)
                elif mask and passage_id in known:
                    continue
                logits.append(query @ passage / temperature - decay * abs(row_step - column_step))
        total = total + F.cross_entropy(torch.stack(logits).unsqueeze(0), torch.tensor([target]))
    return total / (len(all_rows) if weight == "all" else len(current))


def write_beir(folder: Path, queries: int = 40) -> Path:
    """Write a small BEIR folder; each query names a colour, an animal and a place, its passage
    describes them."""
    colours = ["red", "blue", "green", "white", "black"]
    animals = ["fox", "cat", "owl", "bear", "seal", "crow", "wolf", "hare"]
    (folder / "qrels").mkdir(parents=True)
    corpus, asked, train, dev = [], [], [], []
    for number in range(queries):
        colour, animal = colours[number % 5], animals[number % 8]
        passage = {
            "_id": f"p{number}",
            "title": animal,
            "text": f"a {colour} {animal} lives in valley {number}",
        }
        corpus.append(json.dumps(passage))
        asked.append(
            json.dumps(
                {"_id": f"q{number}", "text": f"where is the {colour} {animal} of valley {number}"}
            )
        )
        train.append(f"q{number}\tp{number}\t1")
        train.append(f"q{number}\tp{(number + 1) % queries}\t0")
        if number < 10:
            dev.append(f"q{number}\tp{number}\t1")
    head = "query-id\tcorpus-id\tscore"
    for name, lines in (
        ("corpus.jsonl", corpus),
        ("queries.jsonl", asked),
        ("qrels/train.tsv", [head, *train]),
        ("qrels/dev.tsv", [head, *dev]),
        ("qrels/test.tsv", [head, *dev]),
    ):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_uneven_beir(folder: Path, queries: int = 40) -> Path:
    """Write a BEIR folder as ``write_beir`` does, with passages of 8 to 29 words."""
    words = [
        "near", "the", "old", "mill", "where", "snow", "falls", "late", "and", "few", "people",
        "ever", "pass",
    ]  # fmt: skip
    write_beir(folder, queries)
    file = folder / "corpus.jsonl"
    passages = [json.loads(line) for line in file.read_text().splitlines()]
    for number, passage in enumerate(passages):
        passage["text"] += "".join(
            f" {words[(number + 5 * place) % 13]}" for place in range(number * 7 % 22)
        )
    file.write_text("\n".join(map(json.dumps, passages)) + "\n", encoding="utf-8")
    return folder


def write_scored_lines(data: Path) -> Path:
    """Write the examples of a ``write_beir`` folder as lines of query, pos and neg with teacher
    scores."""
    path = data / "scored.jsonl"
    convert(data, path, "jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for number, record in enumerate(records):
        record |= {"pos_scores": [5 + number % 3], "neg_scores": [number % 7 - 2.5]}
    path.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return path


def train_config(data: Path, output: Path, method: str = "cont_accum", **changes) -> TrainConfig:
    """Return the config of six steps of a tiny model; ``changes`` are settings by name,
    group.field."""
    settings = {
        "method": method,
        "output_dir": str(output),
        "model.name": "tiny",
        "model.tie_towers": False,
        "model.tiny_width": 32,
        "model.tiny_layers": 1,
        "model.tiny_vocabulary": 200,
        "model.max_query_length": 16,
        "model.max_passage_length": 16,
        "data.train": str(data),
        "batch.global_batch_size": 16,
        "batch.micro_batch_size": 4,
        "bank.size": 24,
        "optim.learning_rate": 1e-3,
        "optim.max_steps": 6,
        "run.device": "cpu",
        "run.save_steps": 2,
        "run.keep_checkpoints": 10,
    } | changes
    if settings["model.name"] != "tiny":
        settings = {
            name: value
            for name, value in settings.items()
            if name in changes or "tiny_" not in name
        }
    config = TrainConfig()
    for name, value in settings.items():
        *groups, field = name.split(".")
        target = config
        for group in groups:
            target = getattr(target, group)
        assert hasattr(target, field), name
        setattr(target, field, value)
    return config


def weights(run: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of the trained model."""
    return {
        str(path.relative_to(run)): sha256_of(path)
        for path in sorted((run / "model").rglob("*"))
        if path.is_file()
    }


def peak(run) -> int:
    """Return the peak of torch's memory during ``run``, in bytes above the start."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    held = most = 0
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def ragged(rows: list[list[int]]) -> Ragged:
    values = np.array([value for row in rows for value in row], dtype=np.int64)
    scores = np.full(len(values), np.nan, dtype=np.float32)
    return Ragged(np.cumsum([0, *map(len, rows)]), values, scores)


# one part of a data set, opened by open_dataset with the policy's fields as keywords


def open_train_set(
    path: str | Path,
    split: str = "train",
    hard_negatives: int = 0,
    scores: bool = False,
    **policy: int,
) -> TrainSet:
    return open_dataset(path, split, DataPolicy(**policy)).train_set(hard_negatives, scores)


def open_retrieval_set(path: str | Path, split: str = "test", **policy: int) -> RetrievalSet:
    return open_dataset(path, split, DataPolicy(**policy)).retrieval_set


def open_corpus(path: str | Path, **policy: int) -> Dataset:
    return open_dataset(path, policy=DataPolicy(**policy)).corpus


def open_queries(path: str | Path, **policy: int) -> dict[str, str]:
    return open_dataset(path, policy=DataPolicy(**policy)).queries


def open_examples(path: str | Path, split: str = "train", **policy: int) -> ExampleTable:
    return open_dataset(path, split, DataPolicy(**policy)).examples()


def load_examples(path: Path, **policy: int) -> ExampleTable:
    return examples.load_examples(path, DataPolicy(**policy), str(path))


def judged_split(path: Path, split: str, **policy: int) -> JudgedSplit:
    return retrieval_set.judged_split(path, split, DataPolicy(**policy))


def read_corpus(path: Path) -> Iterator[Passage]:
    return (passage for _, passage in numbered_corpus(path))


def read_examples(path: Path) -> Iterator[Example]:
    return (example for _, example in numbered_examples(path))


def search_vectors(
    names: list[str],
    queries: np.ndarray,
    shards: list[Shard],
    k: int,
    *,
    factory: str = "Flat",
    search_params: str = "",
    backend: str = "auto",
    device: str = "auto",
) -> dict[str, list[tuple[str, float]]]:
    """Search with query vectors in shards, exactly or with an index of faiss."""
    if factory == "Flat":
        scores, rows = ExactIndex(shards, backend=backend, device=device).search(queries, k)
    else:
        index = Index.build(shards, Origin(factory), device)
        index.set_search_params(search_params)
        scores, rows = index.search(queries, k)
    ids = [passage_id for shard in shards for passage_id in shard.ids]
    return {
        name: [
            (ids[row], score)
            for row, score in zip(rows[number].tolist(), scores[number].tolist(), strict=True)
            if row >= 0
        ]
        for number, name in enumerate(names)
    }
