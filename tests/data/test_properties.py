"""Every reader and writer against the csv and json modules, or there and back."""

import csv
import json
from pathlib import Path

from helpers import open_retrieval_set, read_corpus, read_examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_data import lines, write

from contaccum.data.commands import convert
from contaccum.formats.dpr import read_questions
from contaccum.formats.readers import read_qrels
from contaccum.formats.records import Passage
from contaccum.retrieval.runs import ranked, read_run, write_run

SETTINGS = settings(
    max_examples=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
seen = texts.filter(lambda text: text and not text.isspace())
odd = st.sampled_from(
    [
        "\u2028", "a\u0085b", "\ufeff", "'", '"', "\\", "e\u0301", "\U0001f600", "null", "0", "a b",
        "../x", "\x1f",
    ]
)  # fmt: skip
ids = odd | seen.filter(lambda text: not set(text) & set("\t\r\n\0"))
values = (odd | seen).filter(str.strip)


@SETTINGS
@given(st.lists(st.tuples(ids | st.integers(), texts, values), min_size=1, max_size=6))
def test_jsonl_reader_equals_the_json_module(tmp_path, rows):
    records = [{"_id": key, "title": title, "text": text} for key, title, text in rows]
    for ascii_only in (True, False):
        content = "\r\n".join(json.dumps(record, ensure_ascii=ascii_only) for record in records)
        path = write(tmp_path / "c.jsonl", content.replace("\0", ""))
        plain = [json.loads(line) for line in content.split("\n")]
        assert list(read_corpus(path)) == [
            Passage(str(row["_id"]), row["title"], row["text"]) for row in plain
        ]


cells = (values | st.just("a\n\n b\n")).filter(
    lambda text: text.strip() and not set(text) & set("\r\0")
)


@SETTINGS
@given(
    st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=6),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_dpr_tsv_reader_equals_the_csv_module(tmp_path, rows, quoting):
    path = tmp_path / "c.tsv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n", quoting=quoting).writerows(
            [["id", "text", "title"], *rows]
        )
    with open(path, newline="", encoding="utf-8") as file:
        plain = list(csv.reader(file, delimiter="\t", strict=True))[1:]
    assert list(read_corpus(path)) == [Passage(key, title, text) for key, text, title in plain]


@SETTINGS
@given(st.lists(st.tuples(seen, st.lists(values, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_questions_round_trip(tmp_path, rows):
    path = tmp_path / "qa.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerows(
            [
                [text.replace("\r", "").replace("\0", "") or "x", repr(answers)]
                for text, answers in rows
            ]
        )
    with open(path, newline="", encoding="utf-8") as file:
        plain = [row[0] for row in csv.reader(file, delimiter="\t", strict=True)]
    found = list(read_questions(path))
    assert [question.text for question in found] == plain
    assert [question.answers for question in found] == [answers for _, answers in rows]


@SETTINGS
@given(st.dictionaries(st.tuples(ids, ids), st.integers(-99_999, 99_999), min_size=1, max_size=8))
def test_qrels_round_trip(tmp_path, grades):
    rows = "".join(f"{query}\t{passage}\t{grade}\n" for (query, passage), grade in grades.items())
    path = write(tmp_path / "q.tsv", "query-id\tcorpus-id\tscore\n" + rows)
    expected = [
        ((path, line, 0), *pair, grade) for line, (pair, grade) in enumerate(grades.items(), 2)
    ]
    assert list(read_qrels(path)) == expected


# a mark at a file's very beginning belongs to no word
words = ids.filter(lambda text: text.split() == [text] and text[0] != "\ufeff")


@SETTINGS
@given(
    st.dictionaries(
        words,
        st.dictionaries(
            words, st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_trec_run_round_trips(tmp_path, scores):
    run = {query: ranked(hits.items()) for query, hits in scores.items()}
    write_run(tmp_path / "run.trec", run)
    assert read_run(tmp_path / "run.trec") == run


@settings(SETTINGS, max_examples=10)
@given(
    st.dictionaries(
        # different from all passage ids, because a BEIR folder gets other ids for equal ones
        ids.map(lambda key: f"{key}?"),
        st.tuples(
            values,
            st.dictionaries(ids.map(lambda key: f"{key}."), values, min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    st.permutations(["beir", "dpr", "tevatron", "jsonl"]),
)
def test_unusual_ids_and_texts_round_trip_in_every_format(tmp_path_factory, queries, forms):
    """Give each id the first text it appears with, and make all texts different."""
    folder = tmp_path_factory.mktemp("trip")
    known: dict[str, str] = {}
    records = []
    for number, (key, (text, positives)) in enumerate(queries.items()):
        own = {
            passage: known.setdefault(passage, f"{len(known)} {content.strip()}".strip())
            for passage, content in positives.items()
        }
        records.append(
            {
                "query_id": key,
                "query": f"{number} {text}",
                "pos": list(own.values()),
                "pos_id": list(own),
            }
        )
    source = write(folder / "source.jsonl", lines(*records))
    for form in forms:
        convert(source, folder / form, form)
        source = folder / form
    expected = {
        row["query_id"]: (row["query"], dict(zip(row["pos_id"], row["pos"], strict=True)))
        for row in records
    }
    assert meaning(source) == expected


def meaning(path: Path) -> dict[str, tuple[str, dict[str, str]]]:
    if path.is_dir():
        found = open_retrieval_set(path, "train")
        contents = {row["id"]: row["text"] for row in found.corpus}
        return {
            key: (found.queries[key], {row: contents[row] for row in grades})
            for key, grades in found.qrels.items()
        }
    return {
        example.query.id: (example.query.text, {row.id: row.text for row in example.positives})
        for example in read_examples(path)
    }
