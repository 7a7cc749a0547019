"""Teacher scores from files to micro-batches: they stay with their passages."""

import json
import re

import numpy as np
import pytest
from helpers import open_train_set
from tiny_data import beir, context, dpr, lines, write

from contaccum.config import DataConfig, MixtureConfig
from contaccum.data.dataset import load_training
from contaccum.data.sampler import make_sampler
from contaccum.data.train_set import subset
from contaccum.errors import InputError
from contaccum.formats.readers import numbered_examples
from contaccum.formats.records import TeacherScores


def score(query: str, passage: str) -> float:
    """Score computed from both texts, which reveals a misplaced one."""
    return int(query.split()[1]) * 100 + int(passage.split()[1])


def record(
    number: int, positives: int, negatives: int, form: str = "jsonl", scored: bool = True
) -> dict:
    query = f"query {number}"
    pos = [f"text {10 * number + place}" for place in range(positives)]
    neg = [f"text {10 * number + 5 + place}" for place in range(negatives)]
    if form == "jsonl":
        found = {"query": query, "pos": pos, "neg": neg}
        given = {
            f"{name}_scores": [score(query, text) for text in found[name]]
            for name in ("pos", "neg")
        }
        return {**found, **(given if scored else {})}
    passages = [
        [
            {
                "docid": text,
                "title": "",
                "text": text,
                **({"score": score(query, text)} if scored else {}),
            }
            for text in part
        ]
        for part in (pos, neg)
    ]
    return {
        "query_id": str(number),
        "query": query,
        "positive_passages": passages[0],
        "negative_passages": passages[1],
    }


def written(folder, form="jsonl", count=6, first=0, name="train.jsonl"):
    """Queries with 1 to 3 positives and 0 to 4 negatives; every fifth without scores."""
    records = (
        record(n, 1 + n % 3, n % 5, form, scored=n % 5 != 4) for n in range(first, first + count)
    )
    return write(folder / name, lines(*records))


@pytest.mark.parametrize("form", ["jsonl", "tevatron"])
def test_scores_of_both_formats_are_read(form, tmp_path):
    path = written(tmp_path, form)
    found = [example.scores for _, example in numbered_examples(path)]
    assert found[3] == TeacherScores([330], [335, 336, 337])
    assert found[0] == TeacherScores([0], [])
    assert found[4] is None


def test_a_score_that_is_a_text_is_refused_with_its_field(tmp_path):
    example = record(0, 1, 0, "tevatron")
    example["positive_passages"][0]["score"] = "7.5"
    path = write(tmp_path / "t.jsonl", lines(example))
    sentence = r"t\.jsonl:1: field score of the passages: Expected `float`, got `str`"
    with pytest.raises(InputError, match=sentence):
        list(numbered_examples(path))


def check(train_set, hard: int, batches: str = "mixed", steps: int = 12) -> int:
    """Compare each score of a sampler's steps with its two texts; return the number of scores."""
    sampler = make_sampler(train_set, 0, 5, hard, batches)
    queries, passages = train_set.queries["text"], train_set.passages["text"]
    known = train_set.positives, train_set.negatives
    seen = 0
    for step in range(steps):
        rows = sampler(step)
        assert rows.teacher.shape == rows.passages.shape
        # datasets 4.0 wants Python's own integers
        chosen = zip(rows.queries.tolist(), rows.passages.tolist(), rows.teacher, strict=True)
        for query, own, scores in chosen:
            for row, found in zip(own, scores, strict=True):
                listed = any(row in part.row(query) for part in known)
                if listed and int(queries[query].split()[1]) % 5 != 4:
                    assert found == score(queries[query], passages[row])
                    seen += 1
                else:  # drawn at random, or of a query without scores
                    assert np.isnan(found)
    return seen


@pytest.mark.filterwarnings("ignore:.*fewer than")
@pytest.mark.parametrize("form", ["jsonl", "tevatron"])
def test_a_step_has_the_scores_of_its_passages(form, tmp_path):
    path = written(tmp_path, form)
    with pytest.warns(UserWarning, match="missing for 3 of 6 queries"):
        train_set = load_training(DataConfig(train=str(path), hard_negatives=3), scores=True)
    assert check(train_set, 3) > 60
    assert check(subset(train_set, np.array([3, 1, 4])), 2) > 20


@pytest.mark.filterwarnings("ignore:.*fewer than")
def test_a_mixture_concatenates_scores_and_uses_nan_for_sets_without(tmp_path):
    sets = [
        str(written(tmp_path, name="a.jsonl")),
        str(written(tmp_path, "tevatron", 7, 10, "b.jsonl")),
    ]
    sets.append(str(beir(tmp_path / "c")))
    mixture = [MixtureConfig(train=path) for path in sets[:2]]
    data = DataConfig(mixture=mixture, hard_negatives=2)
    for batches in ("mixed", "one_set"):
        assert check(load_training(data, scores=True), 2, batches) > 60
    data.mixture.append(MixtureConfig(train=sets[2]))
    with pytest.warns(UserWarning, match="c: distillation needs .* missing for 3 of 3 queries"):
        loaded = load_training(data, scores=True)
    rows = make_sampler(loaded, 0, 64, 2)(0)
    plain = rows.queries >= 13
    assert plain.any()
    assert np.isnan(rows.teacher[plain]).all()
    assert not np.isnan(rows.teacher[~plain]).all()


def test_data_without_any_score_is_refused(tmp_path):
    plain = write(tmp_path / "plain.jsonl", lines(record(0, 1, 2, scored=False)))
    search = {"score": 7.5}  # DPR's own: what a search gave
    theirs = dpr("who", [context(1, **search)], [context(2, **search)])
    alone = write(
        tmp_path / "alone.jsonl",
        lines({"query": "q", "pos": ["a"], "neg": [], "pos_scores": [1.0]}),
    )
    for path in (
        plain,
        alone,
        beir(tmp_path / "beir"),
        write(tmp_path / "dpr.json", json.dumps([theirs])),
    ):
        with pytest.raises(InputError, match=re.escape(f"{path}: no teacher scores found")):
            load_training(DataConfig(train=str(path), hard_negatives=1), scores=True)


def test_scores_change_the_fingerprint_only_when_used(tmp_path):
    one, two = record(1, 1, 2), record(2, 1, 2)
    first = write(tmp_path / "a" / "train.jsonl", lines(one, two))
    second = write(tmp_path / "b" / "train.jsonl", lines(one, {**two, "neg_scores": [9, 8]}))
    asked = [
        open_train_set(path, hard_negatives=1, scores=True).fingerprint
        for path in (first, second, first)
    ]
    plain = [open_train_set(path, hard_negatives=1).fingerprint for path in (first, second)]
    assert asked[0] == asked[2]
    assert len({*asked, plain[0]}) == 3
    assert plain[0] == plain[1]


def test_a_repeated_passage_keeps_its_first_score(tmp_path):
    twice = {
        "query": "q",
        "pos": ["a", "b", "a"],
        "neg": ["c", "a", "c"],
        "pos_scores": [5, 4, 3],
        "neg_scores": [2, 1, 0],
    }
    found = open_train_set(write(tmp_path / "t.jsonl", lines(twice)), hard_negatives=1, scores=True)
    assert (found.positives.scores.tolist(), found.negatives.scores.tolist()) == ([5, 4], [2])
