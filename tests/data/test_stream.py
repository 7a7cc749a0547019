"""Streams: the same steps as from tables, their own order, and no files."""

import json
import os
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import train_config, weights
from opened import open_train_set, read_examples
from tiny_data import beir, context, dpr, lines, write, write_gzip

from contaccum.batch import MISSING
from contaccum.config import BatchConfig, DataConfig
from contaccum.data.commands import convert
from contaccum.data.dataset import load_training, open_training
from contaccum.data.stream import StreamSampler, open_stream, passage_number
from contaccum.errors import InputError
from contaccum.runtime.engine import Engine
from contaccum.training import parts
from contaccum.training.log import read_log
from contaccum.training.loop import train


def pair(number: int, positives: int = 1, negatives: int = 2) -> dict:
    """Texts of 1 to 5 words, each passage in one example only."""
    return {
        "query_id": f"q{number}",
        "query": " ".join(["word"] * (number % 5) + [f"query {number}"]),
        "pos": [f"good {number} {place}" for place in range(positives)],
        "neg": [" ".join([f"bad {number} {place}"] + ["more"] * (number % 4)) for place in range(negatives)],
    }


def pairs(folder: Path, count: int = 41, name: str = "pairs.jsonl", **lists: int) -> Path:
    return write(folder / name, lines(*(pair(number, **lists) for number in range(count))))


def scored(folder: Path, count: int = 41) -> Path:
    """Pairs with different teacher scores; every seventh without."""
    records = [pair(number, positives=3, negatives=3) for number in range(count)]
    for number, record in enumerate(records):
        if number % 7 != 6:
            record |= {"pos_scores": [number + place / 8 for place in range(3)]}
            record |= {"neg_scores": [number + place / 8 for place in range(4, 7)]}
    return write(folder / "scored.jsonl", lines(*records))


def sampler(path, size: int = 8, buffer: int = 10, seed: int = 0, hard: int = 1, kept: int = 4, **values):
    data = DataConfig(train=str(path), hard_negatives=hard, shuffle_buffer=buffer, streaming=True, **values)
    return StreamSampler(open_stream(data), seed, size, hard, buffer, kept)


def names(rows) -> list[str]:
    return [query.id for query in rows.queries]


def same(one, other) -> bool:
    arrays = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("columns", "positives"))
    return arrays and (one.queries, one.passages) == (other.queries, other.passages)


def batches_of(path, buffer: int, world: int = 1, **changes):
    """Batch source of each process, from a stream (with buffer 0: from tables)."""
    config = train_config(
        path, path.parent / "run", **{"data.hard_negatives": 1, "batch.micro_batch_size": 4, **changes}
    )
    config.data.streaming, config.data.shuffle_buffer = buffer > 0, buffer
    engine, encoder = Engine(device="cpu"), parts.build_encoder(config, open_train_set(path))
    train_set = open_training(config.data, config.distils)
    sources = []
    for rank in range(world):
        source = parts.build_batches(config, engine, encoder, train_set)
        source._form = replace(source._form, rank=rank, world=world)
        sources.append(source)
    return sources


SHORT = {"model.max_query_length": 8, "model.max_passage_length": 10}
BY_TOKENS = {**SHORT, "batch.micro_batch_tokens": 60}
DISTILLED = {"loss.distillation": "kl"}
UNFILLED = {"data.hard_negatives": 5, "data.fill_negatives": "none", "batch.micro_batch_tokens": 90}


@pytest.mark.filterwarnings("ignore:.*max_steps", "ignore:.*distillation needs the teacher scores")
@pytest.mark.parametrize(
    "changes",
    [{}, BY_TOKENS, DISTILLED, BY_TOKENS | DISTILLED | UNFILLED],
    ids=["pairs", "tokens", "scores", "tokens, scores and missing passages"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_buffer_of_one_keeps_the_files_order(world, changes, tmp_path):
    path = scored(tmp_path) if "loss.distillation" in changes else pairs(tmp_path, positives=3, negatives=3)
    passages = open_train_set(path, hard_negatives=1).passages["id"]
    differing, known = 0, []
    for usual, streamed, shuffled in zip(
        *(batches_of(path, buffer, world, **changes) for buffer in (0, 1, 5)), strict=True
    ):
        usual._sampler._permutation = lambda epoch: np.arange(41)
        for step in range(6):  # of 16 pairs: two epochs end inside
            found = [source.step(step) for source in (usual, streamed, shuffled)]
            assert usual.rows_of(step) == streamed.rows_of(step) == [len(one.ids.columns) for one in found[0]]
            assert (usual.rows_of(step) == [4 * world] * (4 // world)) == ("batch.micro_batch_tokens" not in changes)
            for one, other in zip(*found[:2], strict=True):
                assert one.query_ids == other.query_ids
                for tokens, others in ((one.queries, other.queries), (one.passages, other.passages)):
                    assert torch.equal(tokens.input_ids, others.input_ids)
                    assert torch.equal(tokens.attention_mask, others.attention_mask)
                for part in ("columns", "positives"):
                    numbered = [
                        [row if row == MISSING else passage_number(passages[row]) for row in rows]
                        for rows in getattr(one.ids, part).tolist()
                    ]
                    assert getattr(other.ids, part).tolist() == numbered
                assert (one.ids.teacher is None) == (other.ids.teacher is None) == ("loss.distillation" not in changes)
                if one.ids.teacher is not None:
                    assert torch.equal(one.ids.teacher.nan_to_num(-1), other.ids.teacher.nan_to_num(-1))
                    assert one.ids.teacher[one.ids.columns == MISSING].isnan().all()
                    known += (~one.ids.teacher.isnan()).flatten().tolist()
            names = [[name for one in batches for name in one.query_ids] for batches in found[1:]]
            differing += sum(one != other for one, other in zip(*names, strict=True))
    assert differing > 20
    share = 4 / 6 if "data.fill_negatives" in changes else 1  # of the columns have a passage
    assert not known or 0.7 < np.mean(known) / share < 0.9


def test_a_token_budget_below_the_longest_pair_is_refused(tmp_path):
    settings = {**SHORT, "batch.micro_batch_tokens": 28}  # 8 + 2 * 10
    assert batches_of(pairs(tmp_path), 5, **settings)[0].smallest == 28
    with pytest.raises(InputError, match="micro_batch_tokens is 27, but a query with its passages can have 28 tokens"):
        batches_of(pairs(tmp_path), 5, **{**settings, "batch.micro_batch_tokens": 27})


def test_a_stream_without_scores_is_refused_and_a_query_without_warns_once(tmp_path):
    def first(path: Path, buffer: int) -> np.ndarray:
        data = DataConfig(train=str(path), hard_negatives=1, shuffle_buffer=buffer, streaming=True)
        return StreamSampler(open_stream(data, scores=True), 0, 8, 1, buffer, 4)(5).teacher

    with pytest.warns(UserWarning, match="but query 'q6' lacks them") as said:
        found = first(scored(tmp_path), 10)
    assert len(said) == 1
    assert found.shape == (8, 2)
    for buffer, number in ((10, 10), (100, 41)):
        with (
            pytest.warns(UserWarning, match="but query 'q0' lacks them"),
            pytest.raises(InputError, match=f"no teacher scores found in its first {number} examples; loss"),
        ):
            first(pairs(tmp_path), buffer)


def test_each_epoch_is_a_different_permutation(tmp_path):
    rows = sampler(pairs(tmp_path), size=41, buffer=7)
    orders = [[int(name[1:]) for name in names(rows(step))] for step in range(3)]
    assert all(sorted(order) == list(range(41)) for order in orders)
    assert len({tuple(order) for order in [*orders, range(41)]}) == 4
    assert all(read < place + 7 for order in orders for place, read in enumerate(order))
    assert names(sampler(pairs(tmp_path), size=41, buffer=7, seed=1)(0)) != names(rows(0))
    whole = names(sampler(pairs(tmp_path), size=41, buffer=1000)(0))
    assert max(int(name[1:]) - place for place, name in enumerate(whole)) > 20


@pytest.mark.filterwarnings("ignore:.*hard negatives, fewer than 3")
def test_a_step_depends_only_on_seed_and_step(tmp_path):
    path = pairs(tmp_path, negatives=1)
    walked = sampler(path, hard=3)
    steps = [walked(step) for step in range(20)]
    jumped = sampler(path, hard=3)
    for step in (17, 16, 3, 19, 0):  # forwards, what is kept, and from the start again
        assert same(jumped(step), steps[step])
    assert not same(sampler(path, hard=3, seed=1)(0), steps[0])
    assert len(walked._steps) == 4


def test_processes_divide_a_step_and_know_all_ids(tmp_path):
    path = pairs(tmp_path)
    (alone,), both = batches_of(path, 10, **{"batch.micro_batch_size": 8}), batches_of(path, 10, world=2)
    for step in (0, 3):
        for whole, *halves in zip(alone.step(step), *(source.clone().step(step) for source in both), strict=True):
            assert [name for half in halves for name in half.query_ids] == whole.query_ids
            for half in halves:
                assert torch.equal(half.ids.columns, whole.ids.columns)
                assert torch.equal(half.ids.positives, whole.ids.positives)
            tokens = [row[row > 0].tolist() for half in halves for row in half.passages.input_ids]
            assert tokens == [row[row > 0].tolist() for row in whole.passages.input_ids]
    assert alone.rows_of(0) == both[0].rows_of(0) == [8, 8]


def test_missing_hard_negatives_come_from_other_examples(tmp_path):
    path = pairs(tmp_path, 30, positives=2, negatives=1)
    with pytest.warns(
        UserWarning, match="query 'q0' has 1 hard negatives, fewer than 4; for such queries, passages of other examples"
    ) as said:
        rows = [sampler(path, hard=4, buffer=6)(step) for step in range(4)]
    assert len(said) == 4  # once for each sampler
    seen = set()
    for step in rows:
        for query, passages, known in zip(step.queries, step.passages, step.positives, strict=True):
            number = query.id[1:]
            assert passages[0].text.startswith(f"good {number} ")
            assert passages[1].text.startswith(f"bad {number} 0")
            assert len({passage.id for passage in passages}) == 5
            assert not {passage_number(passage.id) for passage in passages[1:]} & set(known.tolist())
            seen |= {passage.text.split()[0] for passage in passages[2:]}
    assert seen == {"good", "bad"}
    with pytest.warns(UserWarning, match="hard negatives, fewer than 9"), pytest.raises(InputError) as caught:
        sampler(pairs(tmp_path, 2), size=2, hard=9, buffer=1)(0)
    assert "query 'q0': the step and the shuffle buffer have only 5 possible negatives" in str(caught.value)


def test_a_passage_has_the_same_number_in_every_step(tmp_path):
    """A positive is recognized in another example by its id, or its text without an id."""
    records = [
        {"query": "a", "pos": ["x", "y", "x"], "neg": ["y", "z", "z"]},
        {"query": "b", "pos": ["z"], "neg": ["x"]},
    ]
    rows = sampler(write(tmp_path / "t.jsonl", lines(*records)), size=2, buffer=1, hard=1)(0)
    (x, y), (z, nothing) = rows.positives.tolist()
    assert nothing == -1
    assert rows.columns[0, 0] in (x, y)
    assert (rows.columns[0, 1], rows.columns[1].tolist()) == (z, [z, x])
    assert min(x, y, z) >= 0
    assert len({x, y, z}) == 3


@pytest.mark.parametrize("form", ["jsonl", "tevatron", "dpr", "gzip", "dpr lines"])
def test_every_example_format_is_streamed(form, tmp_path):
    source = beir(tmp_path / "beir", queries=5)
    path = tmp_path / "t"
    convert(source, path, "dpr" if form.startswith("dpr") else "tevatron" if form == "tevatron" else "jsonl")
    if form == "gzip":
        path = write_gzip(tmp_path / "t.gz", path.read_text())
    elif form == "dpr lines":
        path = write(tmp_path / "l", lines(*json.loads(path.read_text())))
    rows = sampler(path, size=5, buffer=1)(0)
    expected = [(example.query, [*example.positives, *example.negatives]) for example in read_examples(path)]
    assert list(zip(rows.queries, rows.passages, strict=True)) == expected


def test_other_negatives_fill_up_before_those_of_other_examples(tmp_path):
    record = dpr("q?", [context(1)], [context(2)], [context(3), context(2), context(4)])
    path = write(tmp_path / "t.json", json.dumps([record]))
    ids = {passage.id for passage in sampler(path, size=1, buffer=1, hard=2)(0).passages[0]}
    assert ids == {"1", "2", "3"}


BAD = '{"query": "broken", '
BLANK = json.dumps({"query": " ", "pos": ["x"]})


def test_bad_records_are_skipped_with_one_warning_each(tmp_path):
    path = write(tmp_path / "t.jsonl", lines(pair(0)) + BAD + "\n" + lines(pair(1)) + BLANK + "\n")
    rows = sampler(path, size=2, buffer=1, max_bad_records=2)
    with pytest.warns(UserWarning, match="skipped") as said:
        assert [names(rows(step)) for step in range(3)] == [["q0", "q1"]] * 3
    found = [str(one.message) for one in said]
    assert len(found) == 2
    assert re.fullmatch(re.escape(str(path)) + r":2: not JSON .*\. The record is skipped", found[0])
    assert re.fullmatch(re.escape(str(path)) + r":4: query '.*-4' has an empty text; .* is skipped", found[1])
    with pytest.raises(InputError, match=":2: not JSON"):
        sampler(path, size=2, buffer=1)(0)
    with pytest.warns(UserWarning, match=":2"), pytest.raises(InputError, match=":4: query"):
        sampler(path, size=2, buffer=1, max_bad_records=1)(0)


def test_queries_without_a_positive_are_skipped_or_refused(tmp_path):
    path = write(tmp_path / "t.jsonl", lines(pair(0), pair(1, positives=0), pair(2)))
    with pytest.warns(UserWarning, match=":2: query 'q1' has no positive; .*. Such queries are skipped") as said:
        assert names(sampler(path, size=2, buffer=1)(1)) == ["q0", "q2"]
    assert len(said) == 1
    with pytest.raises(InputError, match=":2: query 'q1' has no positive"):
        sampler(path, size=2, buffer=1, strict=True)(0)


@pytest.mark.filterwarnings("ignore:.*has no positive")
def test_data_that_cannot_be_streamed_is_refused(tmp_path):
    folder = beir(tmp_path / "beir")
    unanswerable = write(tmp_path / "none.jsonl", lines(pair(0, positives=0)))
    for path, sentence in (
        (folder, "is a BEIR folder, but data.streaming reads one file"),
        (folder / "corpus.jsonl", "is a corpus file; training examples must be"),
        (tmp_path / "absent.jsonl", "no such file"),
        (unanswerable, "no query has a positive passage; at least one"),
    ):
        with pytest.raises(InputError) as caught:
            sampler(path)(0)
        assert f"{path}: {sentence}" in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="streaming is true, but this command cannot read"):
        load_training(DataConfig(train=str(pairs(tmp_path)), streaming=True))


def test_the_fingerprint_depends_on_content_not_on_path(tmp_path):
    def of(path: Path) -> str:
        return open_stream(DataConfig(train=str(path), streaming=True)).fingerprint

    first = of(pairs(tmp_path / "a"))
    assert of(pairs(tmp_path / "b")) == first
    assert of(pairs(tmp_path / "c", 40)) != first
    changed = write(tmp_path / "d.jsonl", pairs(tmp_path / "d").read_text().replace("good 40", "best 40"))
    assert of(changed) != first


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Local folders instead of the Hub: our columns in JSON, others in Parquet."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    pairs(tmp_path / "own", name="train.jsonl")
    rows = [pair(number) for number in range(41)]
    (tmp_path / "other").mkdir()
    columns = {"key": [int(row["query_id"][1:]) for row in rows], "anchor": [row["query"] for row in rows]}
    columns |= {"yes": [row["pos"][0] for row in rows], "no": [row["neg"] for row in rows]}
    Dataset.from_dict(columns).to_parquet(tmp_path / "other" / "train.parquet")
    return f"hub:{tmp_path / 'own'}", f"hub:{tmp_path / 'other'}?query_id=key&query=anchor&pos=yes&neg=no"


def test_a_hub_set_is_streamed_without_writing_files(hub, tmp_path):
    expected = sampler(pairs(tmp_path))
    for name in hub:
        found = sampler(name)
        for step in (0, 7):
            assert found(step).passages == expected(step).passages
    assert not list((tmp_path / "cache").rglob("*.*"))
    assert not list((tmp_path / "hub-cache").rglob("*.arrow"))
    before = open_stream(DataConfig(train=hub[0], streaming=True)).fingerprint
    assert open_stream(DataConfig(train=hub[0], streaming=True)).fingerprint == before
    os.utime(pairs(tmp_path / "own", 40, name="train.jsonl"), (1, 1))
    assert open_stream(DataConfig(train=hub[0], streaming=True)).fingerprint != before


def test_unreadable_hub_rows_are_reported(hub, tmp_path):
    script = write(tmp_path / "script" / "script.py", "").parent
    parts = "".join(f"- config_name: {part}\n  data_files: {part}.jsonl\n" for part in ("corpus", "queries", "qrels"))
    judged = write(tmp_path / "judged" / "README.md", f"---\nconfigs:\n{parts}---\n").parent
    for part in ("corpus", "queries", "qrels"):
        write(judged / f"{part}.jsonl", lines({"_id": "a", "text": "b"}))
    write(tmp_path / "own" / "train.jsonl", lines(pair(0), {**pair(1), "query": ""}, pair(2)))
    with pytest.raises(InputError, match=re.escape(f"{hub[0]}:2: query 'q1' has an empty text")):
        sampler(hub[0])(0)
    with pytest.warns(UserWarning, match=":2: query 'q1' has an empty text.*skipped"):
        assert names(sampler(hub[0], size=2, buffer=1, max_bad_records=1)(0)) == ["q0", "q2"]
    for name, sentence in (
        (hub[0].replace("own", "absent"), "cannot be loaded from the Hub"),
        (f"{hub[0]}::dev", "split 'dev' not found; available: train"),
        (hub[1].replace("anchor", "missing"), "column 'missing' not found; available: key, anchor, yes, no"),
        (f"hub:{judged}", "a data set with a corpus and queries cannot be streamed"),
        (f"hub:{script}", "Dataset scripts are no longer supported"),
        (hub[1].partition("?")[0], "found fields 'key', 'anchor', 'yes', 'no'; a record must be"),
    ):
        with pytest.raises(InputError) as caught:
            sampler(name)(0)
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)


def peak(make) -> int:
    tracemalloc.start()
    kept = make()  # noqa: F841 - freed only after the peak was taken
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


@pytest.mark.acceptance
def test_memory_is_bounded_by_the_shuffle_buffer(tmp_path):
    long = " ".join(["word"] * 800)
    small, large = (
        write(tmp_path / f"{count}", lines(*({**pair(number), "pos": [f"{long} {number}"]} for number in range(count))))
        for count in (500, 4000)
    )

    def streamed(path: Path, count: int):
        rows = sampler(path, size=50, buffer=100)
        for step in range(count // 50 + 1):  # into the next epoch
            rows(step)
        return rows

    peaks = peak(lambda: streamed(small, 500)), peak(lambda: streamed(large, 4000))
    assert peaks[1] < 1.2 * peaks[0]
    whole = [peak(lambda path=path: list(read_examples(path))) for path in (small, large)]
    assert whole[1] > 3 * whole[0]  # negative control


@pytest.mark.filterwarnings("ignore:.*distillation needs the teacher scores")
@pytest.mark.parametrize("more", [{}, BY_TOKENS | DISTILLED], ids=["pairs", "tokens and scores"])
def test_a_streamed_run_resumes_byte_identical_and_leaves_the_cache_empty(more, tmp_path, monkeypatch):
    path = scored(tmp_path) if more else pairs(tmp_path)
    starts, start = [], StreamSampler._start
    monkeypatch.setattr(StreamSampler, "_start", lambda self: (starts.append(self), start(self)))

    def run(name: str, **changes):
        config = train_config(path, tmp_path / name, **{"data.hard_negatives": 1, "run.drift_steps": 2, **changes})
        config.data.streaming = True
        train(config)
        assert len(set(starts)) == len(starts), "drift asks for what is kept"
        return weights(tmp_path / name)

    by_tokens = {"batch.micro_batch_size": BatchConfig().micro_batch_size} if more else {}  # which has no effect then
    settings = {"data.shuffle_buffer": 20, **more, **by_tokens}
    whole = run("whole", **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "model")
    for folder in (tmp_path / "broken" / "checkpoints").iterdir():
        if folder.name != "step-00000004":
            shutil.rmtree(folder)
    assert run("broken", resume=True, **settings) == whole
    if more:
        assert run("other", **{**settings, "loss.distillation": "none"}) != whole
    else:
        assert run("other", **{"data.shuffle_buffer": 5}) != whole
    assert not list((tmp_path / "cache").rglob("*.*"))
    logged = read_log(tmp_path / "whole")
    assert [line["epoch"] for line in logged] == [None] * 6
    assert [bool(line.get("drift")) for line in logged] == [step % 2 == 0 for step in range(1, 7)]
