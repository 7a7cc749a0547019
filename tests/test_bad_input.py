"""Bad input through the command line: one sentence, exit code 2, nothing left behind."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_data import lines

from contaccum.cli import main
from contaccum.formats.records import MAX_LINE

QRELS = "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\tp{n}\t1\n" for n in range(3))
CONTEXT = {"title": "T", "text": "t", "passage_id": "1"}
DPR = {"question": "who?", "answers": ["a"], "positive_ctxs": [CONTEXT], "hard_negative_ctxs": []}
CONFIG = """\
method: cont_accum
model: {name: tiny, tiny_width: 32, tiny_layers: 1, tiny_vocabulary: 200,\
        max_query_length: 16, max_passage_length: 16}
data: {train: d}
batch: {global_batch_size: 4, micro_batch_size: 2}
bank: {size: 4}
optim: {max_steps: 1}
run: {device: cpu}
output_dir: out
"""
SOUND = {
    "d/corpus.jsonl": lines(
        *({"_id": f"p{n}", "title": f"title {n}", "text": f"text {n}"} for n in range(3))
    ),
    "d/queries.jsonl": lines(*({"_id": f"q{n}", "text": f"a text on title {n}"} for n in range(3))),
    "d/qrels/train.tsv": QRELS,
    "d/qrels/test.tsv": QRELS,
    "pairs.jsonl": lines(
        {"query": "one", "pos": ["a"], "neg": ["b"]}, {"query": "two", "pos": ["c"], "neg": ["d"]}
    ),
    "dpr.json": json.dumps([DPR, DPR], indent=0),
    "psgs.tsv": "id\ttext\ttitle\n1\tone\tT\n2\ttwo\tT\n",
    "qa.csv": "who?\t['one']\nwhen?\t['two']\n",
    "run.trec": "q0 Q0 p0 1 2.0 x\nq1 Q0 p1 1 2.0 x\n",
    "config.yaml": CONFIG,
    "scored/metrics.json": json.dumps({"mean": {"ndcg@10": 0.5}, "per_query": {}, "queries": 1}),
}
"""Sound files; each case spoils one of them."""
TO_EVALUATE_A_RUN = "evaluate --run run.trec --qrels d/qrels/test.tsv"
PASSAGE = "it must be a passage (an object with _id, title and text)"
ID = "it must be an id (a non-empty string or an integer)"
COLUMNS = "each row needs three columns separated by tabs: id, text, title"
ANSWERS = "they must be a list of strings such as ['a', 'b']"
KINDS = (
    "it must contain JSON, a DPR corpus TSV, a question CSV, or lines with id, tab and text (MS "
    "MARCO)"
)

# command, file and number of the line that is replaced -> [(the line, the error at this line)]
LINES: dict[tuple[str, str, int], list[tuple[str, str]]] = {
    ("data check d/corpus.jsonl", "d/corpus.jsonl", 2): [
        ('{"_id": "p1", "text": "x"', "not JSON"),
        ('["p1", "x"]', f"found a list; {PASSAGE}"),
        ("null", f"found null; {PASSAGE}"),
        ('{"_id": "p1"}',
         "field 'text' is missing (other fields: '_id'); it is required and must be a string"),
        ('{"text": "x"}',
         "field '_id' is missing (other fields: 'text'); it is required and "
         f"{ID.removeprefix('it ')}"),
        ('{"_id": "p1", "text": 1.5}', "field 'text' is the number 1.5; it must be a string"),
        ('{"_id": "p1", "title": [[]], "text": "x"}',
         "field 'title' is a list; it must be a string"),
        ('{"_id": "", "text": "x"}', f"field '_id' is empty; {ID}"),
        ('{"_id": true, "text": "x"}', f"field '_id' is true or false; {ID}"),
        ('{"_id": 1.0, "text": "x"}', f"field '_id' is the number 1.0; {ID}"),
        ('{"_id": Infinity, "text": "x"}', f"field '_id' is the number inf; {ID}"),
        ('{"_id": "p0", "text": "x"}',
         "duplicate passage id 'p0' (first at line 1); ids must be unique. Use --repair"),
        ('{"_id": "p1", "text": " \\u2028\\t"}',
         "passage 'p1' has an empty text; every passage needs a text"),
        ('{"_id": "p1", "text": "a\0b"}', "found a NUL byte; text must not contain NUL"),
        ('{"_id": "p1", "text": "\\ud83d"}', "found half a character (a lone surrogate escape)"),
        ('{"_id": "p1", "text": "x", "\\udc00": 1}',
         "found half a character (a lone surrogate escape)"),
        ('{"_id": "p1", "text": ' + "[" * 90_000, "not usable JSON"),
        ('{"_id": ' + "9" * 5000 + "}", "not usable JSON"),
    ],
    ("data check d/queries.jsonl", "d/queries.jsonl", 2): [
        ('{"_id": "q1", "text": "x', "not JSON"),
        ('{"_id": "q1", "text": "  "}',
         "the text of query 'q1' is empty; every query needs a text"),
        ('{"_id": "q0", "text": "x"}',
         "duplicate query id 'q0' (first at line 1); ids must be unique. Use --repair"),
        ('{"_id": null, "text": "x"}', f"field '_id' is null; {ID}"),
    ],
    ("evaluate --model bm25 --data d", "d/qrels/test.tsv", 2): [
        ("q0\tp0", "found 2 columns; a line must have 3 columns"),
        ("q0\t0\tp0\t1", "found 4 columns; a line must have 3 columns"),
        ("\x1c", "found 1 columns; a line must have 3 columns"),
        *(
            (f"q0\tp0\t{grade}",
             f"the grade is '{grade[:40]}'; it must be an integer from -99999 to 99999")
            for grade in ("0.5", "yes", "", "nan", "3000000000", "9" * 5000, "1_0")
        ),
        ("\tp0\t1", "found an empty id; queries and passages need an id"),
        ("q0\t\t1", "found an empty id; queries and passages need an id"),
        ("q9\tp0\t1", "unknown query id 'q9'; queries.jsonl has no such id"),
        ("q0\tp\0\t1", "found a NUL byte; text must not contain NUL"),
    ],
    ("evaluate --model bm25 --data d", "d/qrels/test.tsv", 3): [
        ("q0\tp0\t2", "query 'q0' and passage 'p0' have grade 2 here and 1 earlier; a pair can "
                      "have only one grade"),
    ],
    ("data check psgs.tsv", "psgs.tsv", 3): [
        ("2\ttwo", f"found 2 columns; {COLUMNS}"),
        ("2\ttwo\tand\tT", f"found 4 columns; {COLUMNS}"),
        ("\ttwo\tT", "the id is empty; every passage needs an id"),
        ("1\ttwo\tT", "duplicate passage id '1' (first at line 2); ids must be unique"),
        ('2\t"two\tT', f"unexpected end of data (perhaps a quote is not closed); {COLUMNS}"),
        ('2\t"two"x\tT', f"'\t' expected after '\"' (perhaps a quote is not closed); {COLUMNS}"),
        ("2\ttwo\rmore\tT", COLUMNS),
        ("2\ttw\0o\tT", "found a NUL byte; text must not contain NUL"),
        ("2\t\tT", "passage '2' has an empty text; every passage needs a text"),
    ],
    ("data check psgs.tsv", "psgs.tsv", 1): [
        ("id\ttitle\ttext", "the header is 'id', 'title', 'text'; it must be id, text, title"),
        ("id\ttext\ttext", "the header is 'id', 'text', 'text'; it must be id, text, title"),
    ],
    ("data check qa.csv", "qa.csv", 2): [
        ("when?", "found 1 columns; each row needs two columns separated by a tab"),
        ("when?\t['b']\tc", "found 3 columns; each row needs two columns separated by a tab"),
        (" \t['b']", "the question is empty; each row needs two columns separated by a tab"),
        *((f"when?\t{text}", ANSWERS)
          for text in ("", "one", "'one'", "[1, 2]", "[]", "{'a'}", "[['a']]", "['a")),
        (r"when?" + "\t" + r"['\ud800']", "found half a character (a lone surrogate escape)"),
    ],
    ("data check pairs.jsonl", "pairs.jsonl", 2): [
        ('{"query": "x"}',
         "field 'pos' is missing (other fields: 'query'); it is required and must be a list"),
        ('{"query": "x", "pos": 4}', "field 'pos' is the number 4; it must be a list"),
        ('{"query": "x", "pos": [null]}', "pos[0]: found null; it must be a string"),
        ('{"query": "x", "pos": [""]}', "has an empty text; every passage needs a text"),
        ('{"query": " ", "pos": ["a"]}',
         "query 'unnamed-query-2' has an empty text; every query needs a text"),
        ('{"query": "x", "pos": ["a"], "pos_id": [1, 2]}',
         "found 2 ids in 'pos_id' but 1 texts in 'pos'; each text needs one"),
        (json.dumps(DPR), "field 'query' is missing"),
    ],
    (TO_EVALUATE_A_RUN, "run.trec", 2): [
        ("q1 Q0 p1 1 2.0",
         "found 5 columns; expected six columns: query id, Q0, passage id, rank, score, tag"),
        *((f"q1 Q0 p1 1 {score} x",
         f"score is '{score}'; expected a finite number") for score in ("high", "nan", "1e999")),
        ("q0 Q0 p0 2 1.0 x", "passage 'p0' is listed twice for query 'q0'; expected it once"),
    ],
}  # fmt: skip


def dpr(**change: object) -> str:
    return f"[{json.dumps(DPR)},\n{json.dumps(DPR | change)}]"


def folder(path: Path) -> None:
    path.mkdir(parents=True)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


WHOLE = gzip.compress(SOUND["d/corpus.jsonl"].encode(), mtime=0)
DAMAGED = "the gzip stream is damaged or truncated"

# file, its content (None: no file; a function makes something else), command -> the error
FILES: list[tuple[str, object, str, str]] = [
    *(
        ("d/corpus.jsonl", content, "data check d/corpus.jsonl", f"d/corpus.jsonl{error}")
        for content, error in [
            (b'{"_id": "a", "text": "x"}\n{"_id": "b", "text": "caf\xe9"}\n',
             ":2: byte 0xe9 is not UTF-8; the encoding is probab"),
            (SOUND["d/corpus.jsonl"].encode("utf-16"),
             ":1: byte 0xff is not UTF-8; the encoding is probably UTF-16"),
            ("\n \r\n\t\n", f": is empty; {KINDS}"),
            (b"\xef\xbb\xbf", f": is empty; {KINDS}"),
            (gzip.compress(b"", mtime=0), f": is empty; {KINDS}"),
            (WHOLE[:-12], f": {DAMAGED}"),
            (WHOLE[:12] + b"\xff" * 8 + WHOLE[20:], f": {DAMAGED}"),
            (WHOLE[:-8] + b"\0" * 8, f": {DAMAGED}"),
            (folder, ": corpus.jsonl not found; a BEIR folder has corpus.jsonl, queries.jsonl and "
                     "qrels/<split>.tsv"),
            (os.mkfifo, ": is a pipe or device; it must be a file"),
            (link_to_itself, ": cannot be read (Too many levels of symbolic links)"),
            (None, ": no such file"),
            (b"%PDF-1.4\n%\xe2\xe3\n", ":1: found 1 columns; the file must contain JSON"),
            ('{"docno": 1, "body": ""}\n',
             ":1: found fields 'docno', 'body'; a record must be an object with query"),
        ]
    ),
    *(
        ("dpr.json", content, "data check dpr.json", f"dpr.json{error}")
        for content, error in [
            (dpr(question=None), ":2 (record 2): field 'question' is null; it must be a string"),
            (dpr(question=""),
             ":2 (record 2): query 'unnamed-query-2' has an empty text; every query needs a text"),
            (dpr(positive_ctxs="x"),
             ":2 (record 2): field 'positive_ctxs' is a string; it must be a list"),
            (dpr(positive_ctxs=["x"]),
             ":2 (record 2), positive_ctxs[0]: found a string; it must be a context"),
            (dpr(positive_ctxs=[{"title": "x"}]),
             ":2 (record 2), positive_ctxs[0]: field 'text' is missing"),
            (dpr(positive_ctxs=[CONTEXT | {"passage_id": 1.5}]),
             ":2 (record 2), positive_ctxs[0]: field 'passage_id' is the"),
            (dpr(hard_negative_ctxs=[{}]),
             ":2 (record 2), hard_negative_ctxs[0]: field 'text' is missing"),
            (dpr()[:-20], ":2 (record 2): not JSON"),
            (dpr().replace("},", "}"),
             ":2: found '{' instead of ','; the file must be one JSON list"),
            (dpr() + "\n[]", ":3: text follows the end of the list; the file must end there"),
            ("[]", ": is empty; a record must be an object with query, pos and neg"),
            ("[1, 2]", ":1 (record 1): found the number 1; it must be an object with query, pos "
                       "and neg"),
            ("[" * 90_000, ":1 (record 1): not usable JSON"),
        ]
    ),
    ("d/queries.jsonl", "", "data check d",
     "d/queries.jsonl: is empty; it must have at least a query"),
    ("d/queries.jsonl", None, "data check d",
     "d: queries.jsonl not found; a BEIR folder has corpus.jsonl"),
    ("d/qrels/faq.csv", "question,answer\nwhy,so\n", "data check d/qrels",
     "d/qrels: corpus.jsonl not found; a BEIR folder has corpus.jsonl, queries.jsonl and "
     'qrels/<split>.tsv. To read its tables, give "hub:d/qrels?query=COLUMN&pos=COLUMN"'),
    ("d/qrels/test.tsv", QRELS[:25], "data check d",
     "d/qrels/test.tsv: has no valid judgement; a split needs at least one"),
    ("d/qrels/test.tsv", "", TO_EVALUATE_A_RUN,
     "d/qrels/test.tsv: is empty; it must have at least a judgement"),
    ("d/qrels/test.tsv", "q0\tp0\t0\n", "evaluate --model bm25 --data d",
     "d/qrels/test.tsv: no query has a positive; at least"),
    ("d/qrels/test.tsv", folder, "evaluate --model bm25 --data d",
     "d: qrels/test.tsv not found; a BEIR folder has"),
    ("q.tsv", "q0 0 p0 1\nq0 0 p0\n", "evaluate --run run.trec --qrels q.tsv",
     "q.tsv:2: found 3 columns; a line must have 4"),
    ("q.tsv", "\x1c", "evaluate --run run.trec --qrels q.tsv",
     "q.tsv:1: found 0 columns; a line must have 3 columns"),
    ("t.jsonl", lines({"query_id": 1, "query": "x", "positive_passages": [{"docid": 1}]}),
     "data check t.jsonl",
     "t.jsonl:1, positive_passages[0]: field 'text' is missing (other fields: 'docid')"),
    ("pairs.jsonl", lines({"query": "x", "pos": []}),
     "train --config config.yaml --data.train pairs.jsonl --data.strict true",
     "pairs.jsonl:1: the query has no positive; every query needs a positive"),
    *(("pairs.jsonl", lines({"query_id": key, "query": "x", "pos": ["a"]}),
     "data convert pairs.jsonl out --to beir",
       f"id {key!r} contains a tab, a line break or a NUL") for key in ("a\tb", "a\0b", "a\nb")),
    ("d/corpus.jsonl", SOUND["d/corpus.jsonl"].replace('"p1"', '"p0"'),
     "train --config config.yaml",
     "d/corpus.jsonl:2: duplicate passage id 'p0' (first at line 1); ids must be unique. Use "
     "--repair (in training: --data"),
    ("d/qrels/train.tsv", QRELS.replace("p1", "p9"), "train --config config.yaml",
     "d/qrels/train.tsv: 1 judgements name a passage that"),
    ("d/qrels/train.tsv", None, "train --config config.yaml",
     "d: split 'train' not found; available: test"),
    ("config.yaml", CONFIG.replace("{size: 4}", "{sise: 4}"),
     "train --config config.yaml", "config.yaml:5: "),
    ("run.trec", "", TO_EVALUATE_A_RUN, "run.trec: is empty; expected a TREC run with six columns"),
    ("run.trec", "x0 Q0 p0 1 2.0 x\n", TO_EVALUATE_A_RUN,
     "run and qrels have no query in common; for example, 'x0' is only"),
    ("scored/metrics.json", "{", "report scored", "scored/metrics.json, line 1: not JSON"),
]  # fmt: skip
if os.geteuid() != 0:  # root may read everything
    FILES.append(
        (
            "psgs.tsv",
            lambda path: path.touch(mode=0),
            "data check psgs.tsv",
            "psgs.tsv: cannot be read (Permission denied)",
        )
    )

# command with sound files -> the error
COMMANDS: list[tuple[str, str]] = [
    ("", "no command was given; contaccum --help lists the commands"),
    ("fly", "contaccum fly: no such command"),
    ("data check d --fast", "--fast: contaccum data check has no such option"),
    ("data check nowhere",
     "nowhere: no folder or data set has this name; expected a path, one of arguana"),
    ("data check nowhere/at/all", "nowhere/at/all: no folder or data set has this name"),
    ("data check nul\0", "nul\\x00: no folder or data set has this name"),
    ("data check " + "x" * 5000, "xxx"),
    ("data check d/qrels", "d/qrels: corpus.jsonl not found; a BEIR folder has corpus.jsonl"),
    ("data check d/qrels/test.tsv",
     "d/qrels/test.tsv:1: the header is 'query-id', 'corpus-id', 'score'; it must be id, text"),
    ("data fetch ../nowhere",
     "../nowhere: no such folder or file; expected a path or the name of a published data set"),
    ("data convert d pairs.jsonl --to jsonl", "pairs.jsonl: already exists; choose a new path"),
    ("data convert psgs.tsv out --to jsonl",
     "psgs.tsv: is a corpus file; training examples must be DPR JSON"),
    ("data convert d out --to csv", "--to is 'csv', expected one of beir, dpr, jsonl, tevatron"),
    ("data convert d qa.csv/out --to jsonl",
     "qa.csv: cannot be created (this is a file, not a folder)"),
    ("data convert pairs.jsonl out --to beir --split ../../up",
     "split '../../up' cannot be a file name; use a plain name"),
    ("data demo d", "d: already exists; choose a new folder"),
    ("evaluate --model bm25 --data d/corpus.jsonl",
     "d/corpus.jsonl: is a corpus file; training examples must be DPR JSON"),
    ("evaluate --model bm25 --data d --split dev",
     "d: split 'dev' not found; available: test, train"),
    ("evaluate --model bm25 --data d --split ../queries",
     "d: split '../queries' not found; available: test, train"),
    ("evaluate --model bm25 --data d --k 0", "--k is 0, expected at least 1"),
    ("evaluate --model bm25 --data d --k many",
     "--k is 'many', expected a whole number (at least 1)"),
    ("evaluate --model ./none --data d",
     "./none: no such folder; expected the folder of a model or of a run"),
    ("evaluate --model bm25 --data d --output qa.csv/metrics.json",
     "qa.csv: cannot be created (this is a file, not a folder)"),
    ("evaluate --model x", "evaluate got neither data nor a run file; give --data"),
    ("evaluate --data d", "evaluate got no --model; give --model, or --run and --qrels"),
    ("evaluate --data x --run y",
     "evaluate got --data, --run; give --data, or --questions and --passages, or --run and"),
    ("evaluate --run d/corpus.jsonl --qrels d/qrels/test.tsv",
     "d/corpus.jsonl:1: found 8 columns; expected six columns"),
    ("encode --model bm25 --input d --output v",
     "--model bm25 has no vectors; this command needs an encoder"),
    ("search --model x --data y", "search needs exactly one of --query and --output, but got none"),
    ("evaluate --run run.trec",
     "evaluate got --run; give --data, or --questions and --passages, or --run and --qrels"),
    ("report d", "d: no config.yaml and no metrics.json; this is not the folder of a run"),
    ("report scored --metric f1", "scored/metrics.json: no metric 'f1'; expected one of ndcg@10"),
    ("train --config config.yaml --output_dir qa.csv",
     "output_dir qa.csv: this is a file. Choose a folder."),
    ("train --config config.yaml --output_dir d",
     "output_dir d: not empty. Choose an empty folder."),
    ("train --config config.yaml --output_dir d --resume",
     "output_dir d: no config.yaml found, so there is no run to resume"),
    ("train --method magic", "--method is 'magic', expected one of in_batch"),
    ("train --config config.yaml --model.pooling max",
     "--model.pooling is 'max', expected one of cls, mean, last, or null"),
    ("train --bank.sise 3",
     "--bank.sise: contaccum train has no such option; did you mean --bank.size?"),
    ("train --bank.size many",
     "--bank.size is 'many', expected a whole number (at least 0), or null"),
    ("train --config absent.yaml", "absent.yaml: cannot be read (No such file or directory)"),
    ("train --model.name tiny --data.train d", "output_dir is not set, expected a path"),
    ("train --model.name tiny --output_dir out",
     "data.train is not set; give a path or the name of a data set"),
    ("train --config config.yaml --data.train nowhere",
     "nowhere: no folder or data set has this name; expected a path"),
    ("train --config config.yaml --data.train psgs.tsv",
     "psgs.tsv: is a corpus file; training examples must be"),
    ("train --config config.yaml --data.dev d", "d: split 'dev' not found; available: test, train"),
    ("train --config config.yaml --data.hard_negatives 9",
     "query 'q0': the training set has only 2 possible negatives"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def sound_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, content in SOUND.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)


def put(name: str, content: object) -> None:
    path = Path(name)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if callable(content):
        content(path)
    elif content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def contents() -> dict[str, object]:
    """All files and folders outside the cache, with their bytes."""
    paths = [path for path in sorted(Path().rglob("*")) if "cache" not in path.parts]
    return {str(path): path.read_bytes() if path.is_file() else path.is_dir() for path in paths}


def refused(command: str, capsys) -> str:
    """Return the sentence with which a command is refused. It must leave every file as it was."""
    before = contents()
    code = main(command.split(" ") if command else [])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    assert len(err) < 6000
    assert contents() == before
    assert not list(Path("cache").rglob("*.part*"))
    return err


@pytest.mark.parametrize(
    ("command", "file", "number", "line", "error"),
    [(*place, *case) for place, cases in LINES.items() for case in cases],
)
def test_a_bad_line_is_one_sentence(command, file, number, line, error, capsys):
    rows = SOUND[file].splitlines(keepends=True)
    rows[number - 1] = line + "\n"
    put(file, "".join(rows))
    sentence = refused(command, capsys)
    assert sentence.startswith(f"contaccum: {file}:{number}")
    assert error in sentence


@pytest.mark.parametrize(("file", "content", "command", "error"), FILES)
def test_a_bad_file_is_one_sentence(file, content, command, error, capsys):
    put(file, content)
    assert refused(command, capsys).startswith(f"contaccum: {error}")


@pytest.mark.parametrize(("command", "error"), COMMANDS)
def test_a_bad_command_is_one_sentence(command, error, capsys):
    assert refused(command, capsys).startswith(f"contaccum: {error}")


@pytest.mark.filterwarnings("always::UserWarning")
def test_the_sound_files_are_accepted(capsys):
    """Negative control."""
    for command in (
        "data check d", "data check d/corpus.jsonl", "data check d/queries.jsonl",
            "data check psgs.tsv",
        "data check qa.csv", "data check pairs.jsonl", "data check dpr.json",
            "data convert d out.jsonl --to jsonl",
        "report scored", "evaluate --model bm25 --data d", "train --config config.yaml",
    ):  # fmt: skip
        assert main(command.split()) == 0, command
    capsys.readouterr()
    assert main(TO_EVALUATE_A_RUN.split()) == 0
    assert "1 of 3 judged queries have no result" in capsys.readouterr().err


def test_a_line_of_100_mb_is_refused_in_little_memory():
    """In a process of its own; the peak is that of the second refusal, so the imports are not
    counted."""
    script = (
        "import sys, tracemalloc\nfrom contaccum.cli import main\nmain(['data', 'check', "
        "'short.jsonl'])\n"
        "tracemalloc.start()\ncode = main(['data', 'check', 'long.jsonl'])\n"
        "print(tracemalloc.get_traced_memory()[1])\nsys.exit(code)"
    )
    sound = lines({"_id": "p0", "title": "T", "text": "x"})
    put("short.jsonl", sound + "{\n")
    with open("long.jsonl", "wb") as file:
        file.write(sound.encode() + b'{"_id": "a", "text": "')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n')
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert (
        f"long.jsonl:2: the line has more than {MAX_LINE} bytes; longer lines are not read"
        in done.stderr
    )
    assert int(done.stdout.split()[-1]) < 4 * MAX_LINE
