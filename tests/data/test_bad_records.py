"""Rejected records: only invalid ones are skipped, each listed with its usual error."""

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opened import judged_split, load_examples, open_corpus, open_queries, open_retrieval_set, open_train_set
from tiny_data import beir, context, dpr, lines, write, write_gzip

from contaccum.cli import main
from contaccum.config.commands import DataPolicy
from contaccum.data.commands import convert
from contaccum.data.dataset import open_dataset
from contaccum.errors import InputError
from contaccum.formats import records as lines_module
from contaccum.formats.dpr import read_questions
from contaccum.formats.readers import numbered_corpus, numbered_examples, numbered_queries, read_qrels
from contaccum.formats.records import LONGEST, RejectedRecords


class Form(NamedTuple):
    """A format: its reader, valid records and invalid records, each as written in the file."""

    read: Callable
    sound: list[str]
    bad: list[str | bytes]
    head: str = ""
    joined: tuple[str, str, str] = ("", "", "")  # before, between and behind records, where they are not lines


def second(rows):
    """Records of a reader that also yields locations."""
    return [record for _, record in rows]


def without_lines(rows):
    return [row[:3] for row in rows]


NO_JSON: list[str | bytes] = [
    "garbage\n",
    "{\n",
    "5\n",
    '["a"]\n',
    "{}\n",
    b"\xff\xfe\n",
    "nul\0\n",
    '{"_id": "\\ud800"}\n',
]
PAIR = {"query_id": "q", "query": "q", "pos": ["a"], "neg": ["b"]}
TEVATRON = {"query_id": "q", "query": "q", "positive_passages": [context(1) | {"docid": 1}], "negative_passages": []}
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
        [*NO_JSON, lines({"_id": "", "text": "t"}), lines({"_id": "p", "text": None}), lines({"_id": 1.5, "text": "t"})],
    ),
    "queries": Form(
        lambda path, bad: second(numbered_queries(path, bad)),
        [lines({"_id": n, "text": f"query {n}"}) for n in range(6)],
        [*NO_JSON, lines({"_id": "q", "text": " "}), lines({"text": "q"})],
    ),
    "qrels": Form(
        lambda path, bad: without_lines(read_qrels(path, bad)),
        [f"q{n}\tp{n}\t{n}\n" for n in range(6)],
        ["q\tp\n", "q\tp\tx\n", "\tp\t1\n", "q p 1 2 3\n", "q\tp\t1.5\n", b"\xff\tp\t1\n", "q\t0\tp\t1\n", "\x1c\n"],
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
        ["5", "{}", "null", '["a"]', '{"question": "\\ud800", "positive_ctxs": []}', *map(json.dumps, BAD_DPR)],
        joined=("[\n", ",\n", "\n]\n"),
    ),
    "pairs": Form(
        lambda path, bad: second(numbered_examples(path, bad)),
        [lines({**PAIR, "query_id": n}) for n in range(6)],
        [*NO_JSON, lines({**PAIR, "pos": 5}), lines({**PAIR, "neg_id": []} | {"neg_id": ["1", "2"]}), lines({"pos": ["a"]})],
    ),
    "tevatron": Form(
        lambda path, bad: second(numbered_examples(path, bad)),
        [lines({**TEVATRON, "query_id": n}) for n in range(6)],
        [*NO_JSON, lines({**TEVATRON, "positive_passages": [{"docid": 1}]}), lines({**TEVATRON, "query_id": 0.5})],
    ),
    "passages": Form(
        lambda path, bad: second(numbered_corpus(path, bad)),
        ["1\tone\tT\n", '2\t"two ""2""\n\n{more"\tT\n', '3\t"three"\t"T"\n', "4\tfour {\tT\n", '5\t""\tT\n', "6\tsix\t\n"],
        ['"open\n', "1\t2\n", "1\t2\t3\t4\n", "\ttext\tT\n", '"a"b\tc\td\n', '7\t"open\tT\n', b"\xff\tt\tT\n", "{}\n"],
        head="id\ttext\ttitle\n",
    ),
    "questions": Form(
        lambda path, bad: list(read_questions(path, bad)),
        ["who?\t['a']\n", "\"when\n?\"\t['b', 'c']\n", "where?\t\"['\"\"d\"\"']\"\n", "why?\t['e']\n", "how?\t['f']\n"],
        ["who?\n", "who?\t[]\n", "who?\t['a'\n", " \t['a']\n", "who?\t__import__('os')\n", "who?\t['a']\tx\n", '"open\n'],
    ),
}  # fmt: skip


def file_of(form: Form, pieces: list[str | bytes], path: Path) -> Path:
    before, between, behind = (part.encode() for part in form.joined)
    parts = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    return write(path, form.head.encode() + before + between.join(parts) + behind)


def refusal(call: Callable, *arguments: object, **options: object) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InputError) as caught:
            call(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", FORMS)
@settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4))
@example(seed=3, count=2)  # more of the first lines have two columns than three, because a cell has several lines
def test_bad_records_are_skipped_and_the_others_read_as_usual(tmp_path, name, seed, count):
    form, draw = FORMS[name], random.Random(seed)
    clean = form.read(file_of(form, list(form.sound), tmp_path / "clean"), RejectedRecords())
    pieces: list[tuple[str | bytes, bool]] = [(piece, True) for piece in form.sound]
    for piece in draw.choices(form.bad, k=count):
        pieces.insert(draw.randrange(len(pieces) + 1), (piece, False))
    path = file_of(form, [piece for piece, _ in pieces], tmp_path / "spoilt")
    places, line = [], (form.head + form.joined[0]).count("\n") + 1
    for piece, good in pieces:
        places += [] if good else [line]
        line += piece.count(b"\n" if isinstance(piece, bytes) else "\n") + form.joined[1].count("\n")

    bad = RejectedRecords(count)
    assert form.read(path, bad) == clean
    assert sorted(entry["line"] for entry in bad.entries) == places
    assert all(entry["error"].startswith(f"{path}:{entry['line']}") for entry in bad.entries)
    # one less is an error: that of the last of them; none is the first's. The first record may tell the format
    fewer, none = refusal(form.read, path, RejectedRecords(count - 1)), refusal(form.read, path, RejectedRecords())
    if pieces[0][1]:
        assert (fewer, none) == (bad.entries[-1]["error"], bad.entries[0]["error"])


@pytest.mark.parametrize("name", FORMS)
def test_every_kind_of_bad_record_is_refused_by_default(tmp_path, name):
    """Negative control: each invalid piece above is refused, and valid files lose nothing."""
    form = FORMS[name]
    for piece in form.bad:
        path = file_of(form, [*form.sound, piece], tmp_path / "file")
        assert str(path) in refusal(form.read, path, RejectedRecords())
    bad = RejectedRecords(100)
    assert form.read(file_of(form, list(form.sound), tmp_path / "clean"), bad)
    assert bad.entries == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("corpus", b"\x1f\x8b\x08\0", "gzip stream"),
        ("dpr list", "[" + json.dumps(EXAMPLES[0]), "instead of ','"),
        ("dpr list", "[{'a': 1}, " + json.dumps(EXAMPLES[0]) + "]", "not JSON"),
        ("dpr list", "[" + json.dumps(EXAMPLES[0]) + "] more", "text follows the end of the list"),
        ("passages", "id\ttitle\ttext\n1\tt\tT\n2\tt\tT\n", "the header is"),
    ],
)
def test_damage_outside_records_is_always_an_error(tmp_path, name, content, words):
    path = write(tmp_path / "file", content)
    sentence = refusal(FORMS[name].read, path, RejectedRecords(100))
    assert words in sentence
    assert sentence == refusal(FORMS[name].read, path, RejectedRecords())


def test_an_overlong_line_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINE", 4000)
    rows = [lines({"_id": n, "text": "t"}) for n in range(3)]
    path = write(tmp_path / "c.jsonl", rows[0] + "x" * 20_000 + "\n" + rows[1] + "y" * 4001 + "\n" + rows[2])
    bad = RejectedRecords(2)
    assert [passage.id for _, passage in numbered_corpus(path, bad)] == ["0", "1", "2"]
    assert [(entry["line"], entry["cut"], len(entry["text"])) for entry in bad.entries] == [
        (2, True, LONGEST),
        (4, True, LONGEST),
    ]


def test_made_up_query_ids_count_skipped_records(tmp_path):
    records = [lines({"query": "a", "pos": ["a"]}), "\udcff\n", "{}\n", lines({"query": "b", "pos": ["b"]})]
    path = write(tmp_path / "t.jsonl", "".join(records).encode("utf-8", "surrogateescape"))
    assert [example.query.id for _, example in numbered_examples(path, RejectedRecords(2))] == [
        "unnamed-query-1",
        "unnamed-query-4",
    ]


# whole data sets


def spoilt_folder(folder: Path) -> Path:
    """Folder with 3 of 8 passages, 1 of 4 queries and 1 judgement invalid, and judgements that name them."""
    beir(folder, passages=5, queries=3)
    corpus = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    broken = ['{"_id": "p3", "text"\n', lines({"_id": "p0", "text": "again"}), lines({"_id": "p7", "text": " "})]
    write(folder / "corpus.jsonl", "".join([*corpus[:3], *broken, corpus[4]]))
    with open(folder / "queries.jsonl", "a") as file:
        file.write(lines({"_id": "q3", "text": ""}))
    with open(folder / "qrels" / "train.tsv", "a") as file:
        file.write("q2\tp7\t1\nq3\tp4\t1\nq0\tp4\tmany\nq0\tp2\t1\n")
    return folder


def said(call: Callable, *arguments: object, **options: object):
    """Return a call's result and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = call(*arguments, **options)
    return value, [str(each.message) for each in caught]


def quarantine(sentence: str) -> list[dict]:
    return [json.loads(line) for line in Path(sentence.partition("listed in ")[2]).read_text().splitlines()]


def test_judgements_of_skipped_records_are_skipped(tmp_path):
    folder = spoilt_folder(tmp_path / "b")
    judged, sentences = said(open_retrieval_set, folder, "train", max_bad_records=3)
    assert judged.corpus["id"][:] == ["p0", "p1", "p2", "p4"]
    assert judged.corpus["text"][0] == "text 0"
    assert judged.qrels == {"q0": {"p0": 1, "p1": 0, "p2": 1}, "q1": {"p1": 1, "p2": 0}, "q2": {"p2": 1}}
    assert judged.queries.keys() == judged.qrels.keys()
    assert judged.left_out == {
        "corpus.jsonl": 3, "queries.jsonl": 1, "qrels/train.tsv": 1, "judgements of skipped texts": 3,
    }  # fmt: skip
    assert [sentence.split(", listed in")[0] for sentence in sentences] == [
        f"{folder / 'queries.jsonl'}: 1 invalid record is skipped",
        f"{folder / 'corpus.jsonl'}: 3 invalid records are skipped",
        f"{folder / 'qrels' / 'train.tsv'}: 1 invalid record is skipped",
        f"{folder / 'qrels' / 'train.tsv'}: 3 judgements are skipped, because they name a skipped passage or query",
    ]
    entries = quarantine(sentences[1])
    assert [(entry["line"], entry["text"]) for entry in entries] == [
        (4, '{"_id": "p3", "text"'),
        (5, '{"_id": "p0", "text": "again"}'),
        (6, '{"_id": "p7", "text": " "}'),
    ]
    assert [word in entry["error"] for word, entry in zip(("not JSON", "first at", "empty text"), entries, strict=True)]
    # what is cached says the same again
    assert said(open_retrieval_set, folder, "train", max_bad_records=3)[1] == sentences


def test_a_file_of_rejected_records_is_not_called_empty(tmp_path):
    queries = write(tmp_path / "queries.jsonl", '{"_id": "q", "text": 5}\n')
    examples = write(tmp_path / "pairs.jsonl", '{"query": 5, "pos": ["a"]}\n')
    questions = write(tmp_path / "qa.csv", "who?\tnobody\n")
    policy = DataPolicy(max_bad_records=1)
    readers = {
        "query": lambda: open_dataset(queries, policy=policy).queries,
        "example": lambda: open_dataset(examples, policy=policy).examples(),
        "question": lambda: open_dataset(questions, policy=policy).questions,
    }
    for name, path in (("query", queries), ("example", examples), ("question", questions)):
        sentence = refusal(readers[name])
        assert sentence == f"{path}: has no valid {name}; it needs at least one"


def test_one_bad_record_above_the_limit_raises_the_usual_error(tmp_path):
    folder = spoilt_folder(tmp_path / "b")
    assert ":6: passage 'p7' has an empty text" in refusal(open_corpus, folder, max_bad_records=2)
    assert ":4: not JSON" in refusal(open_corpus, folder)
    assert ":5: query 'q3' has an empty text" not in refusal(open_queries, folder)
    assert "query 'q3' is empty" in refusal(open_queries, folder)
    assert "max_bad_records is -1" in refusal(open_corpus, folder, max_bad_records=-1)


def test_an_unexplained_unknown_id_is_a_bad_judgement(tmp_path):
    folder = beir(tmp_path / "b", "q0\tp0\t1\nq0\tx\t1\nq1\tp1\t1\nq1\ty\t1\n")
    judged, sentences = said(judged_split, folder, "train", max_bad_records=2)
    qrels = judged.qrels
    assert qrels == {"q0": {"p0": 1}, "q1": {"p1": 1}}
    assert [entry["line"] for entry in quarantine(sentences[0])] == [3, 5]
    assert ":5: unknown passage id 'y'" in refusal(judged_split, folder, "train", max_bad_records=1)
    assert ":3: unknown passage id 'x'" in refusal(judged_split, folder, "train")
    # with one passage left out, one of the two ids may have been its
    with open(folder / "corpus.jsonl", "a") as file:
        file.write("garbage\n")
    assert said(judged_split, folder, "train", max_bad_records=1)[0].qrels == qrels


def test_repaired_records_are_not_rejected(tmp_path):
    folder = spoilt_folder(tmp_path / "b")
    corpus, sentences = said(open_corpus, folder, repair=True, max_bad_records=1)
    assert corpus["id"][:] == ["p1", "p2", "p0", "p7", "p4"]
    assert corpus["text"][2] == "again"
    assert [entry["line"] for entry in quarantine(sentences[0])] == [4]


def test_an_example_is_skipped_as_a_whole(tmp_path):
    bad = [
        dpr("empty passage", [context("new"), context("blank", " ")], query_id="e"),
        dpr("twice", [context("other")], query_id=0),
        dpr(" ", [context("third")], query_id="f"),
    ]
    sound = [dpr(f"question {n}", [context(n)], [context(n + 1)], query_id=n) for n in range(3)]
    clean = load_examples(write(tmp_path / "clean.json", json.dumps(sound)))
    path = write_gzip(tmp_path / "t.json.gz", json.dumps([sound[0], *bad, *sound[1:]]))
    found, sentences = said(load_examples, path, max_bad_records=3)
    assert found.passages["id"][:] == clean.passages["id"][:]
    assert found.fingerprint == clean.fingerprint
    assert found.left_out == 3
    assert [entry["record"] for entry in quarantine(sentences[0])] == [2, 3, 4]
    assert quarantine(sentences[0])[1]["text"] == json.dumps(bad[1])
    assert "record 4" in refusal(load_examples, path, max_bad_records=2)


def test_training_data_equals_the_file_without_bad_records(tmp_path):
    spoilt, _ = said(open_train_set, spoilt_folder(tmp_path / "b"), hard_negatives=1, max_bad_records=3)
    clean = beir(tmp_path / "c", "q0\tp0\t1\nq0\tp1\t0\nq1\tp1\t1\nq1\tp2\t0\nq2\tp2\t1\nq0\tp2\t1\n", passages=5)
    corpus = (clean / "corpus.jsonl").read_text().splitlines(keepends=True)
    write(clean / "corpus.jsonl", "".join(corpus[:3] + corpus[4:]))
    assert spoilt.fingerprint == open_train_set(clean, hard_negatives=1).fingerprint


def test_a_converted_set_has_no_bad_records(tmp_path):
    said(convert, spoilt_folder(tmp_path / "b"), tmp_path / "t.jsonl", "jsonl", policy=DataPolicy(max_bad_records=3))
    assert [example.query.id for _, example in numbered_examples(tmp_path / "t.jsonl")] == ["q0", "q1", "q2"]


# the command line

TINY = [
    *("--method", "grad_accum", "--model.name", "tiny", "--model.tiny_width", "32", "--model.tiny_layers", "1"),
    *("--model.tiny_vocabulary", "100", "--batch.global_batch_size", "2", "--batch.micro_batch_size", "1"),
    *("--run.device", "cpu", "--run.save_steps", "1"),
]


@pytest.mark.filterwarnings("always")
@pytest.mark.acceptance
def test_every_command_takes_max_bad_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = str(spoilt_folder(tmp_path / "b").relative_to(tmp_path))
    data = ["--data.train", folder, "--data.max_bad_records", "3", "--data.dev", folder, "--data.dev_split", "train"]
    train = ["train", "--output_dir", "run", *TINY, *data]
    limit = ["--max_bad_records", "3"]
    write(tmp_path / "run.trec", "q0 Q0 p0 1 1.0 x\n")
    evaluate = ["evaluate", "--model", "bm25", "--data", folder, "--split", "train", "--output", "metrics.json"]
    calls = [
        [*train, "--optim.max_steps", "1"],
        ["encode", "--model", "run/model", "--input", folder, "--output", "vectors", "--device", "cpu", *limit],
        ["search", "--model", "bm25", "--data", folder, "--split", "train", "--output", "found.trec", *limit],
        [*evaluate, *limit],
        ["evaluate", "--run", "run.trec", "--qrels", f"{folder}/qrels/train.tsv", "--output", "scored.json", *limit],
        ["data", "check", folder, *limit],
        ["data", "convert", folder, "pairs.jsonl", "--to", "jsonl", *limit],
    ]
    for call in calls:
        assert main(call) == 0, call
        assert "skipped, listed in" in capsys.readouterr().err, call
    counts = {"corpus.jsonl": 3, "queries.jsonl": 1, "qrels/train.tsv": 1, "judgements of skipped texts": 3}
    assert json.loads(Path("metrics.json").read_text())["left_out"] == counts
    assert json.loads(Path("run/dev_metrics.json").read_text())["left_out"] == counts
    assert json.loads(Path("scored.json").read_text())["left_out"] == {"train.tsv": 1}
    # a resumed run meets the same data; without the option nothing runs
    assert main([*train, "--optim.max_steps", "1", "--resume"]) == 0
    capsys.readouterr()
    assert main(evaluate) == 2
    assert "the grade is 'many'" in capsys.readouterr().err
    assert main([*train[:-6], "--output_dir", "other", "--data.max_bad_records", "0"]) == 2


def test_question_metrics_report_rejected_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.tsv", "id\ttext\ttitle\n1\tone\tT\n2\t\n3\tthree\tT\n")
    write(tmp_path / "q.csv", "who?\t['one']\nwhen?\n")
    from helpers import tiny_encoder

    from contaccum import evaluate_questions
    from contaccum.config.commands import DataPolicy, EncoderConfig

    tiny_encoder().save(tmp_path / "model")
    choice = EncoderConfig("model", device="cpu")
    metrics, _ = said(evaluate_questions, choice, "q.csv", "p.tsv", k=1, policy=DataPolicy(max_bad_records=1))
    assert metrics["left_out"] == {"q.csv": 1, "p.tsv": 1}
