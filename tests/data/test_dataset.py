"""Training sets and the order of examples, against plain lists."""

import json
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest
from helpers import open_train_set, ragged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_data import beir, context, dpr, write

from contaccum.batch import MISSING
from contaccum.data.sampler import StepSampler
from contaccum.data.tables import Ragged
from contaccum.data.train_set import TrainSet
from contaccum.errors import InputError


def by_id(train_set: TrainSet, lists: Ragged) -> list[list[str]]:
    ids = train_set.passages["id"][:]
    return [[ids[row] for row in lists.row(number)] for number in range(len(lists))]


def numbers(positives: list[list[int]], negatives: list[list[int]], passages: int) -> TrainSet:
    """Training set whose texts are never read."""
    queries = [{"id": f"q{number}"} for number in range(len(positives))]
    return TrainSet(
        queries,
        range(passages),
        np.arange(len(positives)),
        np.arange(passages),
        ragged(positives),
        ragged(negatives),
        "",
    )


def test_judgements_become_positives_and_hard_negatives(tmp_path):
    folder = beir(tmp_path, "q1\tp4\t2\nq0\tp0\t1\nq1\tp1\t0\nq1\tp3\t1\nq0\tp4\t-1\n")
    found = open_train_set(folder, hard_negatives=1)
    assert found.queries["id"][:] == ["q1", "q0"]
    assert found.queries["text"][:] == ["query 1", "query 0"]
    assert by_id(found, found.positives) == [["p4", "p3"], ["p0"]]
    assert by_id(found, found.negatives) == [["p1"], ["p4"]]
    assert found.passages["id"][:] == ["p0", "p1", "p3", "p4"]


def test_without_hard_negatives_only_positives_are_kept(tmp_path):
    found = open_train_set(beir(tmp_path, "q1\tp4\t2\nq1\tp1\t0\n"))
    assert found.passages["id"][:] == ["p4"]
    assert by_id(found, found.negatives) == [[]]


def test_other_negatives_fill_up_missing_hard_negatives(tmp_path):
    records = [
        dpr("one?", [context(1)], [context(2)], [context(1), context(2), context(4), context(5)]),
        dpr("two?", [context(2)], [context(3), context(2), context(1)], [context(6)]),
    ]
    path = write(tmp_path / "t.json", json.dumps(records))
    found = open_train_set(path, hard_negatives=2)
    assert by_id(found, found.negatives) == [["2", "4"], ["3", "1"]]
    assert sorted(found.passages["id"]) == ["1", "2", "3", "4"]
    assert open_train_set(path, hard_negatives=0).passages["id"][:] == ["1", "2"]


def test_the_fingerprint_depends_on_content_not_on_location(tmp_path):
    folder = beir(tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b")
    one, two = (open_train_set(tmp_path / name, hard_negatives=1).fingerprint for name in "ab")
    assert one == two
    assert open_train_set(folder).fingerprint != one
    qrels = folder / "qrels" / "train.tsv"
    write(qrels, qrels.read_text().replace("q1\tp1\t1", "q1\tp1\t1\nq1\tp5\t1"))
    assert open_train_set(folder, hard_negatives=1).fingerprint != one
    for name in ("corpus.jsonl", "queries.jsonl"):
        beir(folder)
        write(folder / name, (folder / name).read_text().replace('0"}', '0 more"}'))
        assert open_train_set(folder, hard_negatives=1).fingerprint != one


SETS = st.integers(2, 12).flatmap(
    lambda passages: st.lists(
        st.tuples(
            st.lists(st.integers(0, passages - 1), min_size=1, max_size=passages - 1, unique=True),
            st.lists(st.integers(0, passages - 1), max_size=4, unique=True),
        ),
        min_size=1,
        max_size=9,
    ).map(
        lambda rows: numbers(
            [row[0] for row in rows],
            [[n for n in row[1] if n not in row[0]] for row in rows],
            passages,
        )
    )
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(SETS, st.integers(0, 2**32), st.integers(1, 20))
@pytest.mark.filterwarnings("ignore:.*hard negatives")
def test_every_epoch_has_every_query_once(train_set, seed, size):
    sampler = StepSampler(train_set, seed, size, hard_negatives=1)
    count = len(train_set.positives)
    steps = -(-3 * count // size)
    stream = np.concatenate([sampler(step).queries for step in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(SETS, st.integers(0, 2**32), st.integers(0, 50))
@pytest.mark.filterwarnings("ignore:.*hard negatives")
def test_a_step_has_one_positive_and_different_hard_negatives(train_set, seed, step):
    hard = min(2, len(train_set.passages) - int(train_set.positives.lengths.max()))
    rows = StepSampler(train_set, seed, 8, hard)(step)
    assert rows.passages.shape == (8, 1 + hard)
    for query, passages in zip(rows.queries, rows.passages, strict=True):
        known = train_set.positives.row(query).tolist()
        assert passages[0] in known
        assert len(set(passages.tolist())) == 1 + hard
        assert not set(passages[1:].tolist()) & set(known)
        listed = set(train_set.negatives.row(query).tolist())
        drawn = set(passages[1:].tolist())
        assert drawn <= listed or listed <= drawn


def test_a_step_depends_only_on_seed_and_step():
    train_set = numbers(
        [[n, (n + 1) % 50] for n in range(40)],
        [[(n + 2) % 50, (n + 3) % 50] for n in range(40)],
        50,
    )
    one, two = (
        StepSampler(train_set, seed=3, global_batch_size=16, hard_negatives=1) for _ in range(2)
    )
    forward = [one(step) for step in range(6)]
    backward = [two(step) for step in reversed(range(6))][::-1]
    for left, right in zip(forward, backward, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
    other = StepSampler(train_set, seed=4, global_batch_size=16, hard_negatives=1)
    assert any(not np.array_equal(other(step).queries, forward[step].queries) for step in range(6))
    assert not np.array_equal(forward[0].queries, forward[3].queries)


def test_more_hard_negatives_do_not_change_queries_and_positives():
    train_set = numbers(
        [[n, (n + 1) % 50] for n in range(40)],
        [[(n + 2) % 50, (n + 3) % 50] for n in range(40)],
        50,
    )
    none, two = (StepSampler(train_set, 1, 16, hard)(5) for hard in (0, 2))
    assert np.array_equal(none.queries, two.queries)
    assert np.array_equal(none.passages[:, 0], two.passages[:, 0])


def test_positives_and_hard_negatives_are_drawn_evenly():
    train_set = numbers([[0, 1, 2]], [[3, 4, 5, 6]], 7)
    rows = [StepSampler(train_set, 0, 50, 2)(step).passages for step in range(60)]
    drawn = np.concatenate(rows)
    for column, share in ((drawn[:, 0], 1 / 3), (drawn[:, 1:].reshape(-1), 1 / 4)):
        counts = Counter(column.tolist())
        # five standard deviations of a binomial count
        tolerance = 5 * np.sqrt(len(column) * share * (1 - share))
        assert all(abs(count - share * len(column)) < tolerance for count in counts.values())
        assert len(counts) == round(1 / share)


def test_missing_hard_negatives_are_counted_once_and_filled_at_random():
    train_set = numbers([[0], [1], [2]], [[3], [], []], 9)
    with pytest.warns(UserWarning, match="no hard negative for 2 of 3 queries;"):
        sampler = StepSampler(train_set, 0, 3, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = [sampler(step).passages[:, 1] for step in range(200)]
    assert set(np.concatenate(drawn).tolist()) == set(range(9))


def test_hard_negatives_that_a_query_lacks_are_missing_without_fill(recwarn):
    train_set = numbers([[0, 1], [2], [3]], [[4, 5, 6], [7], []], 8)
    filled = StepSampler(train_set, 0, 3, 2)(5)
    rows = StepSampler(train_set, 0, 3, 2, fill="none")(5)
    assert len(recwarn) == 1  # only random passages are worth a warning
    assert np.array_equal(rows.queries, filled.queries)
    for query, passages, random in zip(rows.queries, rows.passages, filled.passages, strict=True):
        own = train_set.negatives.row(query)
        count = min(2, len(own))
        assert passages[: 1 + count].tolist() == random[: 1 + count].tolist()
        assert passages[1 + count :].tolist() == [MISSING] * (2 - count)
        assert MISSING not in random
    # no other passage is needed
    StepSampler(numbers([[0], [0, 1]], [[], []], 3), 0, 2, 2, fill="none")


def test_too_few_passages_for_the_hard_negatives_are_refused():
    with pytest.raises(
        InputError, match=r"query 'q1': .* only 1 possible negatives .* data.hard_negatives is 2"
    ):
        StepSampler(numbers([[0], [0, 1]], [[], []], 3), 0, 2, 2)


def test_enough_hard_negatives_give_no_warning(recwarn):
    StepSampler(numbers([[0]], [[1, 2]], 3), 0, 2, 2)
    assert not recwarn.list
