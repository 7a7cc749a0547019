"""Small dev sets: what is sampled, what is kept, and that no query is in two parts."""

import json

import pytest
from tiny_data import context, dpr, lines, write

from contaccum.data.dataset import open_dataset
from contaccum.data.dev_set import hold_out, write_dev_set
from contaccum.errors import InputError
from contaccum.evaluation.evaluate import evaluate


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path):
    """Forty queries with two positives and one passage of grade 0 each, and 200 passages that
    nobody judged."""
    data = tmp_path / "beir"
    (data / "qrels").mkdir(parents=True)
    passages = [f"p{n}" for n in range(120)] + [f"o{n}" for n in range(200)]
    (data / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"_id": p, "title": f"t {p}", "text": f"text {p}"}) + "\n" for p in passages
        )
    )
    # the first ten are five pairs
    texts = [f"Question {n // 2 if n < 10 else n}" for n in range(40)]
    (data / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"q{n}", "text": t}) + "\n" for n, t in enumerate(texts))
    )
    rows = [f"q{n}\tp{3 * n + i}\t{(2, 1, 0)[i]}\n" for n in range(40) for i in range(3)]
    (data / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    return data


def test_a_dev_set_has_its_judged_passages_and_a_sample_of_the_others(folder, tmp_path):
    write_dev_set(open_dataset(folder, "train").retrieval_set, tmp_path / "dev", 6, 50, seed=1)
    found = open_dataset(tmp_path / "dev", "dev").retrieval_set
    whole = open_dataset(folder, "train").retrieval_set
    assert len(found.queries) == 6
    assert found.queries == {name: whole.queries[name] for name in found.queries}
    assert found.qrels == {name: whole.qrels[name] for name in found.queries}
    assert len(found.corpus) == 50
    assert {p for judged in found.qrels.values() for p in judged} <= set(found.corpus["id"])


def test_all_judged_passages_are_kept_even_if_they_are_more_than_asked_for(folder, tmp_path):
    write_dev_set(open_dataset(folder, "train").retrieval_set, tmp_path / "dev", 100, 5, seed=1)
    assert sorted(open_dataset(tmp_path / "dev", "dev").retrieval_set.corpus["id"]) == sorted(
        f"p{n}" for n in range(120)
    )


def test_held_out_queries_leave_the_training_queries(folder, tmp_path):
    hold_out(open_dataset(folder, "train"), tmp_path / "data", 300, 60, seed=3)
    dev = open_dataset(tmp_path / "data" / "dev", "dev").retrieval_set
    train = list(open_dataset(tmp_path / "data" / "train", "train").examples())
    kept = {example.query.id: example for example in train}
    assert 1 <= len(dev.queries) <= 3  # a tenth of 35
    different = {f"q{n}" for n in range(40) if n >= 10 or n % 2 == 0}
    assert kept.keys() | dev.queries.keys() == different
    assert not kept.keys() & dev.queries.keys()
    assert not {example.query.text for example in train} & set(dev.queries.values())
    trained = open_dataset(tmp_path / "data" / "train", "train").retrieval_set.qrels
    for number in (number for number in range(40) if number >= 10 or number % 2 == 0):
        both = range(number, number + (2 if number < 10 else 1))  # two queries with one text
        grades = {f"p{3 * n + i}": (2, 1, 0)[i] for n in both for i in range(3)}
        name = f"q{number}"
        if name in dev.qrels:  # without the grade 0, so that the dev set stays small
            assert dev.qrels[name] == {p: grade for p, grade in grades.items() if grade}
        else:
            assert trained[name] == grades
    assert {p.id for p in kept["q39"].positives} == {"p117", "p118"} if "q39" in kept else True
    assert all(len(kept[f"q{n}"].negatives) == 1 for n in range(10, 40) if f"q{n}" in kept)
    assert all(len(kept[f"q{n}"].negatives) == 2 for n in range(0, 10, 2) if f"q{n}" in kept)
    assert len(_lines(tmp_path / "data" / "train" / "corpus.jsonl")) == 320


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(folder, tmp_path):
    def content(name, seed):
        hold_out(open_dataset(folder, "train"), tmp_path / name, 300, 60, seed)
        return [path.read_bytes() for path in sorted((tmp_path / name).rglob("*.*sonl"))]

    assert content("a", 3) == content("b", 3)
    assert content("a2", 3) != content("c", 4)


def test_too_few_training_queries_are_refused(folder, tmp_path):
    lines = (folder / "qrels" / "train.tsv").read_text().splitlines()[: 1 + 3 * 9]
    (folder / "qrels" / "train.tsv").write_text("\n".join(lines) + "\n")
    with pytest.raises(
        InputError, match=r"has 5 training queries; .* at least 10 are .*Set data\.dev"
    ):
        hold_out(open_dataset(folder, "train"), tmp_path / "data", 300, 60, seed=3)
    assert not (tmp_path / "data").exists()


def test_held_out_training_data_keep_the_negatives_of_a_dpr_file(tmp_path):
    """A query with too few hard negatives uses negative_ctxs.

    They were once lost, so auto drew random passages instead.
    """
    records = [
        dpr(f"query {n}", [context(n)], [context(f"h{n}")], [context(f"o{n}"), context(f"x{n}")])
        for n in range(20)
    ]
    source = open_dataset(write(tmp_path / "dpr.json", json.dumps(records)), "train")
    hold_out(source, tmp_path / "data", 300, 60, seed=3, hard_negatives=2)
    sets = source.train_set(2), open_dataset(tmp_path / "data" / "train", "train").train_set(2)
    before, after = (
        {
            text: each.passages[each.negatives.row(n)]["id"]
            for n, text in enumerate(each.queries["text"])
        }
        for each in sets
    )
    assert after == {text: before[text] for text in after}
    assert len(after) == 18
    assert after["query 0"] == ["h0", "o0"]


def test_queries_with_the_id_of_a_passage_get_another_id(tmp_path):
    """In a BEIR folder, a search would leave out the passage, here each query's positive."""
    ids = [*range(38), "query-0", "a"]
    records = [
        {"query_id": key, "query": f"word{n}", "pos": [f"word{n} {n}"], "pos_id": [n]}
        for n, key in enumerate(ids)
    ]
    path = write(tmp_path / "pairs.jsonl", lines(*records))
    source = open_dataset(path, "train")
    write_dev_set(source.retrieval_set, tmp_path / "dev", 40, 40, seed=0)
    hold_out(source, tmp_path / "data", 4, 40, seed=0)
    folders = [(tmp_path / "dev", "dev"), (tmp_path / "data" / "dev", "dev")]
    folders.append((tmp_path / "data" / "train", "train"))
    for folder, split in folders:
        assert evaluate("bm25", folder, split=split)["mean"]["ndcg@1"] == 1.0
    found = open_dataset(tmp_path / "dev", "dev").retrieval_set.queries
    expected = {f"query-query-{n}": f"word{n}" for n in range(38)}
    assert found == {**expected, "query-0": "word38", "a": "word39"}


def test_queries_with_one_text_use_the_highest_of_their_grades(folder):
    with (folder / "qrels" / "train.tsv").open("a") as file:
        file.write("q1\tp0\t3\nq1\tp2\t0\nq1\tp1\t0\n")
    with pytest.warns(UserWarning, match="left out 1 hard negative"):
        grades = open_dataset(folder, "train").examples().qrels["q0"]
    assert grades == {"p0": 3, "p1": 1, "p2": 0, "p3": 2, "p4": 1, "p5": 0}
