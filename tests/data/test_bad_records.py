"""Invalid records: each is an error with its location, and ``data check`` lists all of them."""

import json
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_data import beir, context, dpr, lines, write

from contaccum.cli import main
from contaccum.config.commands import DataPolicy
from contaccum.data.commands import check
from contaccum.errors import InputError
from contaccum.formats.dpr import read_questions
from contaccum.formats.readers import (
    numbered_corpus,
    numbered_examples,
    numbered_queries,
    read_qrels,
)
from contaccum.formats.records import stop


class Form(NamedTuple):
    """A format: its reader, valid records and invalid records, each as written in the file."""

    read: Callable
    sound: list[str]
    bad: list[str | bytes]
    head: str = ""
    # before, between and behind records, where they are not lines
    joined: tuple[str, str, str] = (
        "",
        "",
        "",
    )


def second(rows):
    """Records of a reader that also yields locations."""
    return [record for _, record in rows]


def without_lines(rows):
    return [row[:3] for row in rows]


NO_JSON: list[str | bytes] = [
    "garbage\n", "{\n", "5\n", '["a"]\n', "{}\n", b"\xff\xfe\n", "nul\0\n", '{"_id": "\\ud800"}\n',
]  # fmt: skip
PAIR = {"query_id": "q", "query": "q", "pos": ["a"], "neg": ["b"]}
TEVATRON = {
    "query_id": "q",
    "query": "q",
    "positive_passages": [context(1) | {"docid": 1}],
    "negative_passages": [],
}
EXAMPLES = [dpr(f"question {n}", [context(n)], [context(n + 1)], query_id=n) for n in range(6)]
BAD_DPR = [
    {**EXAMPLES[0], "question": 5},
    {**EXAMPLES[0], "positive_ctxs": None},
    {"question": "q", "positive_ctxs": [5]},
]
FORMS = {
    "corpus": Form(
        lambda path, bad: second(numbered_corpus(path, bad)),
        [lines({"_id": n, "title": "T", "text": f"{{text {n}"}) for n in range(6)],
        [
            *NO_JSON,
            lines({"_id": "", "text": "t"}),
            lines({"_id": "p", "text": None}),
            lines({"_id": 1.5, "text": "t"}),
        ],
    ),
    "queries": Form(
        lambda path, bad: second(numbered_queries(path, bad)),
        [lines({"_id": n, "text": f"query {n}"}) for n in range(6)],
        [*NO_JSON, lines({"_id": "q", "text": " "}), lines({"text": "q"})],
    ),
    "qrels": Form(
        lambda path, bad: without_lines(read_qrels(path, bad)),
        [f"q{n}\tp{n}\t{n}\n" for n in range(6)],
        [
            "q\tp\n", "q\tp\tx\n", "\tp\t1\n", "q p 1 2 3\n", "q\tp\t1.5\n", b"\xff\tp\t1\n",
            "q\t0\tp\t1\n", "\x1c\n",
        ],
        head="query-id\tcorpus-id\tscore\n",
    ),
    "trec qrels": Form(
        lambda path, bad: without_lines(read_qrels(path, bad)),
        [f"q{n} 0 p{n} {n}\n" for n in range(6)],
        ["q p 1\n", "q 0 p many\n", "q\0 0 p 1\n"],
    ),
    "dpr lines": Form(
        lambda path, bad: second(numbered_examples(path, bad)),
        [lines(example) for example in EXAMPLES],
        [*NO_JSON, *(lines(record) for record in BAD_DPR)],
    ),
    "dpr list": Form(
        lambda path, bad: second(numbered_examples(path, bad)),
        [json.dumps(example, indent=1) for example in EXAMPLES],
        [
            "5",
            "{}",
            "null",
            '["a"]',
            '{"question": "\\ud800", "positive_ctxs": []}',
            *map(json.dumps, BAD_DPR),
        ],
        joined=("[\n", ",\n", "\n]\n"),
    ),
    "pairs": Form(
        lambda path, bad: second(numbered_examples(path, bad)),
        [lines({**PAIR, "query_id": n}) for n in range(6)],
        [
            *NO_JSON,
            lines({**PAIR, "pos": 5}),
            lines({**PAIR, "neg_id": []} | {"neg_id": ["1", "2"]}),
            lines({"pos": ["a"]}),
        ],
    ),
    "tevatron": Form(
        lambda path, bad: second(numbered_examples(path, bad)),
        [lines({**TEVATRON, "query_id": n}) for n in range(6)],
        [
            *NO_JSON,
            lines({**TEVATRON, "positive_passages": [{"docid": 1}]}),
            lines({**TEVATRON, "query_id": 0.5}),
        ],
    ),
    "passages": Form(
        lambda path, bad: second(numbered_corpus(path, bad)),
        [
            "1\tone\tT\n",
            '2\t"two ""2""\n\n{more"\tT\n',
            '3\t"three"\t"T"\n',
            "4\tfour {\tT\n",
            '5\t""\tT\n',
            "6\tsix\t\n",
        ],
        ["1\t2\n", "1\t2\t3\t4\n", "\ttext\tT\n", b"\xff\tt\tT\n", "{}\n"],
        head="id\ttext\ttitle\n",
    ),
    "questions": Form(
        lambda path, bad: list(read_questions(path, bad)),
        [
            "who?\t['a']\n",
            "\"when\n?\"\t['b', 'c']\n",
            'where?\t"[\'""d""\']"\n',
            "why?\t['e']\n",
            "how?\t['f']\n",
        ],
        [
            "who?\n",
            "who?\t[]\n",
            "who?\t['a'\n",
            " \t['a']\n",
            "who?\t__import__('os')\n",
            "who?\t['a']\tx\n",
        ],
    ),
}  # fmt: skip


def file_of(form: Form, pieces: list[str | bytes], path: Path) -> Path:
    before, between, behind = (part.encode() for part in form.joined)
    parts = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    return write(path, form.head.encode() + before + between.join(parts) + behind)


@pytest.mark.parametrize("name", FORMS)
@settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4))
def test_readers_report_each_bad_record_and_read_the_others(tmp_path, name, seed, count):
    form = FORMS[name]
    draw = random.Random(seed)
    clean = form.read(file_of(form, list(form.sound), tmp_path / "clean"), stop)
    pieces: list[tuple[str | bytes, bool]] = [(piece, True) for piece in form.sound]
    for piece in draw.choices(
        form.bad, k=count
    ):  # the first record is sound, because it decides about the format
        pieces.insert(draw.randrange(1, len(pieces) + 1), (piece, False))
    path = file_of(form, [piece for piece, _ in pieces], tmp_path / "spoilt")
    expected = []
    line = (form.head + form.joined[0]).count("\n") + 1
    for piece, good in pieces:
        if not good:
            expected.append(line)
        text = piece.decode(errors="replace") if isinstance(piece, bytes) else piece
        line += (text + form.joined[1]).count("\n")
    errors: list[InputError] = []
    assert form.read(path, errors.append) == clean
    assert [int(re.match(rf"{path}:(\d+)", str(error))[1]) for error in errors] == expected
    with pytest.raises(InputError) as caught:
        form.read(path, stop)
    assert str(caught.value) == str(errors[0])


def passage(key: str, text: str = "x") -> dict:
    return {"_id": key, "title": "T", "text": text}


PAIRS = [
    {"query_id": f"q{n}", "query": f"query {n}", "pos": ["good"], "neg": ["bad"]} for n in range(3)
]
BEIR = {
    "corpus.jsonl": lines(passage("p0"), passage("p1")),
    "queries.jsonl": lines({"_id": "q0", "text": "one"}, {"_id": "q1", "text": "two"}),
    "qrels/train.tsv": "q0\tp0\t1\nq1\tp1\t1\n",
}
TABLE = [
    # what is added to the files of a BEIR folder -> what ``data check`` says
    (
        {
            "corpus.jsonl": lines(passage("p0", "y"), passage("p2", " ")) + "{\n",
            "queries.jsonl": lines({"_id": 1.5}, {"_id": "q0", "text": "x"}),
        },
        [
            "corpus.jsonl:4: passage 'p2' has an empty text; every passage needs a text",
            "corpus.jsonl:5: not JSON",
            "corpus.jsonl:3: duplicate passage id 'p0' (first at line 1); ids must be unique",
            "queries.jsonl:3: field '_id' is the number 1.5; it must be an id",
            "queries.jsonl:4: duplicate query id 'q0' (first at line 1); ids must be unique",
        ],
    ),
    (
        {"qrels/train.tsv": "q0\tp0\t2\nq0\tp1\tgood\nq0\tp1\n"},
        [
            "train.tsv:3: query 'q0' and passage 'p0' have grade 2 here and 1 earlier",
            "train.tsv:4: the grade is 'good'; it must be an integer",
            "train.tsv:5: found 2 columns; a line must have 3 columns, as in the previous lines",
        ],
    ),
    (
        {"qrels/train.tsv": "q9\tp0\t1\nq8\tp9\t1\nq9\tp9\t1\n"},
        [
            "train.tsv:3: unknown query id 'q9'; queries.jsonl has no such id",
            "train.tsv:4: unknown query id 'q8'; queries.jsonl has no such id",
        ],
    ),
]


@pytest.mark.parametrize(("added", "sentences"), TABLE)
def test_check_lists_all_errors_of_a_beir_folder(added, sentences, tmp_path, capsys):
    for name, content in BEIR.items():
        write(tmp_path / "d" / name, content + added.get(name, ""))
    assert main(["data", "check", str(tmp_path / "d")]) == 2
    said = capsys.readouterr().err
    assert f"d: {len(sentences)} errors" in said
    for sentence in sentences:
        assert sentence in said
    for name, content in BEIR.items():  # negative control
        write(tmp_path / "d" / name, content)
    assert main(["data", "check", str(tmp_path / "d")]) == 0


@pytest.mark.parametrize(
    ("name", "content", "sentences"),
    [
        (
            "train.jsonl",
            lines(PAIRS[0], {**PAIRS[1], "pos": 5}, PAIRS[0], {**PAIRS[2], "pos": [""]}),
            [":2: field 'pos' is the number 5", ":4: passage"],
        ),
        (
            "train.json",
            json.dumps(
                [dpr("a", [context(1)]), dpr(" ", [context(1)]), 5, dpr("b", [context(2, " ")])],
                indent=1,
            ),
            [
                "(record 2): query 'unnamed-query-2' has an empty text",
                "(record 3): found the number 5",
                "(record 4): passage '2'",
            ],
        ),
        ("questions.csv", "who?\t['a']\nwhen?\t[]\nwhere?\n",
         [":2: the answers are '[]'", ":3: found 1 columns"]),
        ("corpus.tsv", "1\ttext\tT\n2\tx\n\tx\tT\n",
         [":2: found 2 columns", ":3: the id is empty"]),
        ("queries.tsv", "1\ttext\n2\t \n1\ty\n",
         [":2: the text of query '2' is empty", ":3: duplicate query id '1'"]),
    ],
)  # fmt: skip
def test_check_lists_all_errors_of_a_file(name, content, sentences, tmp_path):
    path = write(tmp_path / name, content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InputError) as caught:
            check(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: {len(sentences)} errors\n")
    for sentence in sentences:
        assert sentence in said


def test_a_single_error_is_one_sentence(tmp_path):
    path = write(tmp_path / "train.jsonl", lines(*PAIRS) + "{\n")
    with pytest.raises(InputError, match=rf"^{path}:4: not JSON") as caught:
        check(path)
    assert "\n" not in str(caught.value)


def test_repair_accepts_what_it_repairs_and_nothing_else(tmp_path):
    folder = beir(tmp_path)
    with open(folder / "corpus.jsonl", "a") as file:
        file.write(lines(passage("p0", "again"), passage("p9", "")))
    with pytest.raises(InputError, match="2 errors"):
        check(folder)
    with pytest.warns(UserWarning, match=r"1 passages (are skipped|have no text)"):
        assert check(folder, policy=DataPolicy(repair=True))["passages"] == 7
    with open(folder / "corpus.jsonl", "a") as file:
        file.write("{\n")
    with pytest.raises(InputError, match=r"corpus\.jsonl:9: not JSON"):
        check(folder, policy=DataPolicy(repair=True))
