"""The section "Queries that changed" of a report."""

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import write_beir

from contaccum import evaluate
from contaccum.cli import main
from contaccum.data.dataset import open_dataset
from contaccum.evaluation.metrics import evaluate_run
from contaccum.experiments.changed_queries import (
    SHOWN_CHARACTERS,
    SHOWN_QUERIES,
    changed_queries,
    one_line,
)
from contaccum.experiments.run_records import group_runs, load_run_record
from contaccum.retrieval.retriever import Retriever
from contaccum.retrieval.runs import ranked

CANARY = "document.body.id='canary'"
HOSTILE = f'<script>{CANARY}</script><img src=x onerror="{CANARY}">{{{{1}}}}'


@pytest.fixture
def data(tmp_path) -> Path:
    """Thirty judged test queries. One query and one passage contain HTML."""
    folder = write_beir(tmp_path / "data")
    lines = [f"q{number}\tp{number}\t{1 + number % 2}" for number in range(30)]
    (folder / "qrels" / "test.tsv").write_text(
        "\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n"
    )
    for file, id_ in (("corpus.jsonl", "p0"), ("queries.jsonl", "q0")):
        records = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        for record in records:
            if record["_id"] == id_:
                record["text"] = f"{HOSTILE} {record['text']} {'long ' * 200}"
        (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def system(folder: Path, data: Path, ranks: dict[str, int]) -> Path:
    """Write the metrics of a system that ranks the positive of each query at the given rank, from 1
    to 9, and others at 1."""
    judged = open_dataset(data).retrieval_set
    run = {}
    for number, query in enumerate(judged.queries):
        others = [f"p{(number + n) % 40}" for n in range(1, 10)]
        rank = ranks.get(query, 1)
        ranking = [*others[: rank - 1], f"p{number}", *others[rank - 1 :]]
        run[query] = [(passage, 1.0 - place / 10) for place, passage in enumerate(ranking)]
    folder.mkdir()
    metrics = evaluate_run(judged.qrels, run)
    (folder / "metrics.json").write_text(
        json.dumps({"data": str(data), "split": "test", **metrics})
    )
    return folder


def changed(*folders: Path):
    groups = group_runs([load_run_record(folder) for folder in folders])
    return changed_queries(groups, [], "ndcg@10")


def test_metrics_list_the_first_five_passages_of_each_query_with_their_grades(data):
    judged = open_dataset(data).retrieval_set
    run = Retriever.open("bm25", judged.corpus).search(
        judged.queries, 100, ignore_identical_ids=True
    )
    found = evaluate("bm25", str(data))["first_passages"]
    assert found.keys() == judged.queries.keys()
    for query, grades in found.items():
        assert list(grades) == [passage for passage, _ in ranked(run[query])[:5]]
        assert all(
            grade == judged.qrels[query].get(passage, 0) for passage, grade in grades.items()
        )
    assert found["q1"]["p1"] == 2


def test_queries_are_those_with_the_largest_gains_and_losses(data, tmp_path):
    one = system(tmp_path / "one", data, {"q1": 5, "q2": 2} | {f"q{n}": 3 for n in range(20, 25)})
    two = system(tmp_path / "two", data, {f"q{n}": 4 for n in range(3, 18)} | {"q18": 9, "q1": 2})
    (pair,) = changed(one, two).pairs
    scores = {name: load_run_record(tmp_path / name).per_query for name in ("one", "two")}
    best, worst = sorted(
        scores, key=lambda name: -sum(each["ndcg@10"] for each in scores[name].values())
    )
    assert (pair.system, pair.reference) == (best, worst)
    gains = {
        query: values["ndcg@10"] - scores[worst][query]["ndcg@10"]
        for query, values in scores[best].items()
    }
    for found, sign in ((pair.gained, 1), (pair.lost, -1)):
        expected = sorted(
            (sign * gain for gain in gains.values() if sign * gain > 0), reverse=True
        )[:SHOWN_QUERIES]
        assert [sign * query.difference for query in found] == pytest.approx(expected)
        assert all(query.difference == pytest.approx(gains[query.id]) for query in found)
    assert len(pair.gained) == 16
    (first, *_) = pair.gained
    assert first.id == "q18"
    assert first.text == "where is the white owl of valley 18"
    left, right = first.rankings
    assert [passage.id for passage in left.passages] == ["p18", "p19", "p20", "p21", "p22"]
    assert [passage.grade for passage in left.passages] == [1, 0, 0, 0, 0]
    assert left.passages[0].text == "a white owl lives in valley 18"
    assert [passage.id for passage in right.passages] == ["p19", "p20", "p21", "p22", "p23"]


def test_equal_systems_have_no_changed_query(data, tmp_path):
    (pair,) = changed(system(tmp_path / "one", data, {}), system(tmp_path / "two", data, {})).pairs
    assert pair.gained == pair.lost == []


def test_without_the_data_only_ids_are_shown_and_a_note_says_so(data, tmp_path):
    folders = [system(tmp_path / "one", data, {}), system(tmp_path / "two", data, {"q1": 5})]
    whole = changed(*folders)
    assert len(whole.notes) == 1
    metrics = json.loads((folders[0] / "metrics.json").read_text())
    (folders[0] / "metrics.json").write_text(
        json.dumps({**metrics, "test_content": "of other data"})
    )
    note = changed(*folders).notes[1]
    assert "one: only ids are shown, without texts" in note
    assert "changed after the evaluation" in note
    shutil.rmtree(data)
    found = changed(*folders)
    assert [note.partition(":")[0] for note in found.notes[1:]] == ["one", "two"]
    (query,) = found.pairs[0].gained
    assert (query.id, query.text) == ("q1", "")
    assert [passage.id for passage in query.rankings[0].passages] == ["p1", "p2", "p3", "p4", "p5"]
    assert {passage.text for ranking in query.rankings for passage in ranking.passages} == {""}


def test_texts_are_shortened():
    assert one_line(" a\n b ") == "a b"
    assert one_line("x" * (SHOWN_CHARACTERS + 1)) == "x" * (SHOWN_CHARACTERS - 1) + "…"


def test_texts_are_shown_as_they_are_and_the_page_runs_nothing(data, tmp_path, capsys):
    one = system(tmp_path / "one", data, {})
    two = system(tmp_path / "two", data, {"q0": 5, "q1": 3})
    page = tmp_path / "page.html"
    assert main(["report", str(one), str(two), "--html", str(page)]) == 0
    tags, texts = [], []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.handle_data = texts.append
    parser.feed(page.read_text())
    assert any(HOSTILE in text for text in texts)
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in tags}
    assert not [name for _, found in tags for name in found if name.startswith("on")]
    assert [found.get("class") for tag, found in tags if tag == "details"].count("query") == 2
