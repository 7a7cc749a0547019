"""Bad input, case by case through the command line: one sentence, exit code 2, nothing left behind."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from contaccum.cli import main
from contaccum.formats.records import MAX_LINE


def lines(*records: object) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


PASSAGES = [{"_id": f"p{n}", "title": f"title {n}", "text": f"text {n}"} for n in range(3)]
QUERIES = [{"_id": f"q{n}", "text": f"a text on title {n}"} for n in range(3)]
QRELS = "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\tp{n}\t1\n" for n in range(3))
CONTEXT = {"title": "T", "text": "t", "passage_id": "1"}
DPR = [{"question": "who?", "answers": ["a"], "positive_ctxs": [CONTEXT], "hard_negative_ctxs": []}] * 2
PAIRS = [{"query": "one", "pos": ["a"], "neg": ["b"]}, {"query": "two", "pos": ["c"], "neg": ["d"]}]
CONFIG = """\
method: cont_accum
model: {name: tiny, tiny_width: 32, tiny_layers: 1, tiny_vocabulary: 200, max_query_length: 16, max_passage_length: 16}
data: {train: d}
batch: {global_batch_size: 4, micro_batch_size: 2}
bank: {size: 4}
optim: {max_steps: 1}
run: {device: cpu}
output_dir: out
"""
METRICS = {"mean": {"ndcg@10": 0.5}, "per_query": {}, "queries": 1}
SOUND: dict[str, str] = {
    "d/corpus.jsonl": lines(*PASSAGES),
    "d/queries.jsonl": lines(*QUERIES),
    "d/qrels/train.tsv": QRELS,
    "d/qrels/test.tsv": QRELS,
    "pairs.jsonl": lines(*PAIRS),
    "dpr.json": json.dumps(DPR, indent=0),
    "psgs.tsv": "id\ttext\ttitle\n1\tone\tT\n2\ttwo\tT\n",
    "qa.csv": "who?\t['one']\nwhen?\t['two']\n",
    "run.trec": "q0 Q0 p0 1 2.0 x\nq1 Q0 p1 1 2.0 x\n",
    "config.yaml": CONFIG,
    "scored/metrics.json": json.dumps(METRICS),
}
"""A sound world; each case spoils it in one place."""


class Case(NamedTuple):
    """``files`` stand over the sound ones (None: taken away; a callable makes something else at the path)."""

    arguments: str
    words: list[str]  # of the sentence: where, what was found, what was expected
    files: dict[str, object] = {}  # noqa: RUF012 - never changed


def line(number: int, value: object, sound: str) -> str:
    """A file of JSON or text lines with one of them replaced; a string stands as it is."""
    rows = sound.splitlines(keepends=True)
    rows[number - 1] = value + "\n" if isinstance(value, str) else json.dumps(value) + "\n"
    return "".join(rows)


def passage(value: object, *words: str) -> Case:
    spoilt = line(2, value, SOUND["d/corpus.jsonl"])
    return Case("data check d/corpus.jsonl", ["d/corpus.jsonl:2", *words], {"d/corpus.jsonl": spoilt})


def corpus(content: object, *words: str) -> Case:
    return Case("data check d/corpus.jsonl", ["d/corpus.jsonl", *words], {"d/corpus.jsonl": content})


def query(value: object, *words: str) -> Case:
    spoilt = line(2, value, SOUND["d/queries.jsonl"])
    return Case("data check d/queries.jsonl", ["d/queries.jsonl:2", *words], {"d/queries.jsonl": spoilt})


def judgement(value: str, *words: str) -> Case:
    spoilt = line(2, value, QRELS)
    return Case("evaluate --model bm25 --data d", ["d/qrels/test.tsv:2", *words], {"d/qrels/test.tsv": spoilt})


def row(value: str, *words: str) -> Case:
    spoilt = line(3, value, SOUND["psgs.tsv"])
    return Case("data check psgs.tsv", ["psgs.tsv:3", *words], {"psgs.tsv": spoilt})


def answers(value: str, *words: str) -> Case:
    spoilt = line(2, f"when?\t{value}", SOUND["qa.csv"])
    return Case("data check qa.csv", ["qa.csv:2", *words], {"qa.csv": spoilt})


def record(change: dict, *words: str) -> Case:
    spoilt = json.dumps([DPR[0], {**DPR[1], **change}])
    return Case("data check dpr.json", ["dpr.json:1 (record 2)", *words], {"dpr.json": spoilt})


def pair(value: object, *words: str) -> Case:
    spoilt = line(2, value, SOUND["pairs.jsonl"])
    return Case("data check pairs.jsonl", ["pairs.jsonl:2", *words], {"pairs.jsonl": spoilt})


def hit(value: str, *words: str) -> Case:
    spoilt = line(2, value, SOUND["run.trec"])
    files = {"run.trec": spoilt}
    return Case("evaluate --run run.trec --qrels d/qrels/test.tsv", ["run.trec:2", *words], files)


def config(old: str, new: str, *words: str) -> Case:
    assert old in CONFIG
    return Case("train --config config.yaml", list(words), {"config.yaml": CONFIG.replace(old, new)})


def folder(path: Path) -> None:
    path.mkdir(parents=True)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


WHOLE = gzip.compress(SOUND["d/corpus.jsonl"].encode())

CASES: dict[str, Case] = {
    # a corpus, record by record
    "passage: JSON cut short": passage('{"_id": "p1", "text": "x"', "not JSON", "must be a passage"),
    "passage: Python's quotes": passage("{'_id': 'p1', 'text': 'x'}", "not JSON", "must be a passage"),
    "passage: a list": passage(["p1", "x"], "found a list", "must be a passage"),
    "passage: a number": passage(5, "found the number 5", "must be a passage"),
    "passage: a string": passage('"p1"', "found a string", "must be a passage"),
    "passage: null": passage("null", "found null", "must be a passage"),
    "passage: no text": passage({"_id": "p1"}, "'text' is missing (other fields: '_id')", "must be a string"),
    "passage: no id": passage({"text": "x"}, "'_id' is missing", "must be an id"),
    "passage: null text": passage({"_id": "p1", "text": None}, "'text' is null", "must be a string"),
    "passage: number for text": passage({"_id": "p1", "text": 1.5}, "'text' is the number 1.5", "must be a string"),
    "passage: list for text": passage({"_id": "p1", "text": ["x"]}, "'text' is a list", "must be a string"),
    "passage: nested title": passage({"_id": "p1", "title": [[]], "text": "x"}, "'title' is a list", "a string"),
    "passage: empty id": passage({"_id": "", "text": "x"}, "'_id' is empty", "must be an id"),
    "passage: id true": passage({"_id": True, "text": "x"}, "'_id' is true or false", "must be an id"),
    "passage: fractional id": passage({"_id": 1.0, "text": "x"}, "'_id' is the number 1.0", "an integer"),
    "passage: id an object": passage({"_id": {}, "text": "x"}, "'_id' is an object", "must be an id"),
    "passage: id again": passage({"_id": "p0", "text": "x"}, "'p0' (first at line 1)", "--data.repair true)"),
    "passage: number id again": passage('{"_id": "p0", "text": "x"}', "duplicate passage id 'p0'", "ids must be unique"),
    "passage: empty text": passage({"_id": "p1", "text": ""}, "passage 'p1' has an empty text", "passage needs a text"),
    "passage: blank text": passage({"_id": "p1", "text": " \u2028\t"}, "passage 'p1' has an empty text", "passage needs a text"),
    "passage: NUL": passage('{"_id": "p1", "text": "a\0b"}', "NUL", "text must not contain NUL"),
    "passage: half a character": passage('{"_id": "p1", "text": "\\ud83d"}', "half a character", "Unicode"),
    "passage: half a character as a key": passage('{"_id": "p1", "text": "x", "\\udc00": 1}', "half a character"),
    "passage: nested without end": passage('{"_id": "p1", "text": ' + "[" * 90_000, "not usable JSON", "a passage"),
    "passage: nested key without end": passage('{"a":' * 90_000, "not usable JSON", "must be a passage"),
    "passage: 5,000 digits": passage('{"_id": ' + "9" * 5000 + "}", "not usable JSON", "must be a passage"),
    "passage: Infinity": passage('{"_id": Infinity, "text": "x"}', "the number inf", "must be an id"),
    # a corpus, the whole file
    "corpus: not UTF-8": corpus(b'{"_id": "a", "text": "x"}\n{"_id": "b", "text": "caf\xe9"}\n', ":2", "0xe9"),
    "corpus: UTF-16": corpus(SOUND["d/corpus.jsonl"].encode("utf-16"), ":1", "0xff is not UTF-8", "valid UTF-8"),
    "corpus: empty": corpus("", "is empty", "must contain JSON"),
    "corpus: blank lines": corpus("\n \r\n\t\n", "is empty", "must contain JSON"),
    "corpus: only a byte order mark": corpus(b"\xef\xbb\xbf", "is empty", "must contain JSON"),
    "corpus: gzip of nothing": corpus(gzip.compress(b""), "is empty", "must contain JSON"),
    "corpus: gzip cut short": corpus(WHOLE[:-12], "gzip stream is damaged or truncated"),
    "corpus: gzip's first bytes alone": corpus(WHOLE[:5], "gzip stream is damaged or truncated"),
    "corpus: gzip damaged": corpus(WHOLE[:12] + b"\xff" * 8 + WHOLE[20:], "gzip stream is damaged or truncated"),
    "corpus: gzip with a wrong checksum": corpus(WHOLE[:-8] + b"\0" * 8, "gzip stream is damaged or truncated"),
    "corpus: a folder": corpus(folder, "corpus.jsonl not found", "a BEIR folder has"),
    "corpus: a pipe": corpus(fifo, "is a pipe or device", "must be a file"),
    "corpus: a link to itself": corpus(loop, "cannot be read", "symbolic links"),
    "corpus: not there": corpus(None, "no such file"),
    "corpus: a PDF": corpus(b"%PDF-1.4\n%\xe2\xe3\n", ":1", "found 1 columns", "must contain JSON"),
    "corpus: commas": corpus("id,text,title\n1,one,T\n", ":1", "found 1 columns", "a DPR corpus TSV"),
    "corpus: five columns": corpus("1\t2\t3\t4\t5\n", ":1", "found 5 columns", "a DPR corpus TSV"),
    "corpus: unknown fields": corpus('{"docno": 1, "body": ""}\n', ":1", "found fields 'docno', 'body'"),
    "corpus: an empty object": corpus("{}\n", ":1", "found an empty object", "must be an object with query"),
    "corpus: a folder without one": Case("data check d/qrels", ["d/qrels: corpus.jsonl not found", "a BEIR folder"]),
    "corpus: a file for a folder": Case(
        "evaluate --model bm25 --data d/corpus.jsonl", ["d/corpus.jsonl", "is a corpus file", "training examples"]
    ),
    # queries
    "query: JSON cut short": query('{"_id": "q1", "text": "x', "not JSON", "must be a query"),
    "query: empty text": query({"_id": "q1", "text": "  "}, "text of query 'q1' is empty", "query needs a text"),
    "query: id again": query({"_id": "q0", "text": "x"}, "'q0' (first at line 1)", "ids must be unique"),
    "query: null id": query({"_id": None, "text": "x"}, "'_id' is null", "must be an id"),
    "query: text missing": query({"_id": "q1", "question": "x"}, "'text' is missing (other fields: '_id', 'question')"),
    "queries: empty": Case("data check d", ["d/queries.jsonl: has no valid query", "at least one"], {"d/queries.jsonl": ""}),
    "queries: not there": Case("data check d", ["d: queries.jsonl not found"], {"d/queries.jsonl": None}),
    # judgements
    "qrels: two columns": judgement("q0\tp0", "found 2 columns", "must have 3"),
    "qrels: four columns": judgement("q0\t0\tp0\t1", "found 4 columns", "must have 3"),
    "qrels: commas": judgement("q0,p0,1", "found 1 columns", "must have 3"),
    "qrels: fractional grade": judgement("q0\tp0\t0.5", "grade is '0.5'", "an integer"),
    "qrels: grade a word": judgement("q0\tp0\tyes", "grade is 'yes'", "an integer"),
    "qrels: no grade": judgement("q0\tp0\t", "grade is ''", "an integer"),
    "qrels: NaN": judgement("q0\tp0\tnan", "grade is 'nan'", "an integer"),
    "qrels: grade beyond measure": judgement("q0\tp0\t3000000000", "grade is '3000000000'", "an integer from -"),
    "qrels: grade of 5,000 digits": judgement("q0\tp0\t" + "9" * 5000, "grade is '999", "an integer from -"),
    "qrels: underscore in a grade": judgement("q0\tp0\t1_0", "grade is '1_0'", "an integer"),
    "qrels: empty query id": judgement("\tp0\t1", "found an empty id", "need an id"),
    "qrels: empty passage id": judgement("q0\t\t1", "found an empty id", "need an id"),
    "qrels: unknown query": judgement("q9\tp0\t1", "query id 'q9'", "queries.jsonl has no such id"),
    "qrels: unknown passage": judgement("q0\tp9\t1", "passage id 'p9'", "corpus.jsonl has no such id"),
    "qrels: two grades": judgement("q1\tp1\t2", "'q1' and passage 'p1'", "grade 1 here and 2 earlier", "one grade")._replace(
        words=["d/qrels/test.tsv:3", "grade 1 here and 2 earlier", "only one grade"]
    ),
    "qrels: columns swapped": judgement("p0\tq0\t1", "query id 'p0'", "queries.jsonl has no such id"),
    "qrels: NUL": judgement("q0\tp\0\t1", "NUL", "text must not contain NUL"),
    "qrels: a control character alone": judgement("\x1c", "found 1 columns", "must have 3"),
    "qrels: a separator alone": Case(
        "evaluate --run run.trec --qrels q.tsv", ["q.tsv:1", "found 0 columns", "must have 3 columns"], {"q.tsv": "\x1c"}
    ),
    "qrels: empty": Case("data check d", ["d/qrels/test.tsv: has no valid judgement", "at least one"], {"d/qrels/test.tsv": ""}),
    "qrels: a header alone": Case(
        "data check d",
        ["d/qrels/test.tsv: has no valid judgement", "at least one"],
        {"d/qrels/test.tsv": "query-id\tcorpus-id\tscore\n"},
    ),
    "qrels: nothing relevant": Case(
        "evaluate --model bm25 --data d",
        ["d/qrels/test.tsv: no query has a positive", "one grade must be above 0"],
        {"d/qrels/test.tsv": "q0\tp0\t0\nq1\tp1\t-1\n"},
    ),
    "qrels: no such split": Case("evaluate --model bm25 --data d --split dev", ["split 'dev' not found", "test, train"]),
    "qrels: a split that climbs": Case(
        "evaluate --model bm25 --data d --split ../queries", ["split '../queries' not found", "test, train"]
    ),
    "qrels: a folder": Case("evaluate --model bm25 --data d", ["d: qrels/test.tsv not found"], {"d/qrels/test.tsv": folder}),
    "qrels: none": Case(
        "data check d", ["d: qrels/<split>.tsv not found"], {"d/qrels/test.tsv": None, "d/qrels/train.tsv": None}
    ),
    # DPR's passages
    "psgs: two columns": row("2\ttwo", "found 2 columns", "three columns"),
    "psgs: four columns": row("2\ttwo\tT\tmore", "found 4 columns", "three columns"),
    "psgs: tab inside a text": row("2\ttwo\tand\tT", "found 4 columns", "three columns"),
    "psgs: empty id": row("\ttwo\tT", "the id is empty", "needs an id"),
    "psgs: id again": row("1\ttwo\tT", "'1' (first at line 2)", "ids must be unique"),
    "psgs: quote left open": row('2\t"two\tT', "perhaps a quote is not closed", "three columns"),
    "psgs: letters behind a quote": row('2\t"two"x\tT', "expected after", "three columns"),
    "psgs: carriage return inside": row("2\ttwo\rmore\tT", "each row needs three columns"),
    "psgs: empty text": row("2\t\tT", "passage '2' has an empty text", "passage needs a text"),
    "psgs: header in another order": Case(
        "data check psgs.tsv",
        ["psgs.tsv:1", "header is 'id', 'title', 'text'", "must be id, text, title"],
        {"psgs.tsv": "id\ttitle\ttext\n1\tT\tone\n"},
    ),
    "psgs: header of other names": Case(
        "data check psgs.tsv",
        ["psgs.tsv:1", "header is 'docid', 'Title', 'text'", "must be id, text, title"],
        {"psgs.tsv": "docid\tTitle\ttext\n1\tT\tone\n"},
    ),
    "psgs: judgements": Case(
        "data check d/qrels/test.tsv",
        ["test.tsv:1", "header is 'query-id', 'corpus-id', 'score'", "must be id, text, title"],
    ),
    "psgs: column twice": Case(
        "data check psgs.tsv",
        ["psgs.tsv:1", "header is 'id', 'text', 'text'", "must be id, text, title"],
        {"psgs.tsv": "id\ttext\ttext\n1\tone\tone\n"},
    ),
    # DPR's questions
    "qa: no answers": answers("", "the answers are ''"),
    "qa: a word": answers("one", "the answers are 'one'"),
    "qa: a string": answers("'one'", "'one'"),
    "qa: numbers": answers("[1, 2]", "[1, 2]"),
    "qa: empty list": answers("[]", "[]"),
    "qa: a set": answers("{'a'}", "{'a'}"),
    "qa: an empty answer list inside": answers("[['a']]", "[['a']]"),
    "qa: a call": answers("__import__('os').getcwd()", "__import__"),
    "qa: a call in a list": answers("[__import__('os').getcwd()]", "__import__"),
    "qa: a comprehension": answers("[x for x in ['a']]", "[x for x in"),
    "qa: a formatted string": answers("[f'{1}']", "[f'{1}']"),
    "qa: brackets without end": answers("[" * 50_000, "[[["),
    "qa: minus without end": answers("[" + "-" * 90_000 + "1]", "[---"),
    "qa: a power": answers("[9**9**9]", "[9**9**9]"),
    "qa: half a character": answers(r"['\ud800']", "half a character"),
    "qa: quotes that do not close": answers("['a", "['a"),
    "qa: one column": Case("data check qa.csv", ["qa.csv:2", "1 columns"], {"qa.csv": "who?\t['a']\nwhen?\n"}),
    "qa: three columns": Case(
        "data check qa.csv", ["qa.csv:2", "3 columns", "two columns"], {"qa.csv": "who?\t['a']\nwhen?\t['b']\tc\n"}
    ),
    "qa: no question": Case(
        "data check qa.csv", ["qa.csv:2", "question is empty"], {"qa.csv": "who?\t['a']\n \t['b']\n"}
    ),
    # examples
    "dpr: question null": record({"question": None}, "'question' is null", "must be a string"),
    "dpr: question empty": record({"question": ""}, "query 'unnamed-query-2' has an empty text", "query needs a text"),
    "dpr: contexts a string": record({"positive_ctxs": "x"}, "'positive_ctxs' is a string", "must be a list"),
    "dpr: context a string": record({"positive_ctxs": ["x"]}, "positive_ctxs[0]", "found a string", "a context"),
    "dpr: context without text": record({"positive_ctxs": [{"title": "x"}]}, "positive_ctxs[0]", "'text' is missing"),
    "dpr: context with empty text": record({"positive_ctxs": [{"text": " "}]}, "passage", "empty text"),
    "dpr: fractional passage id": record({"positive_ctxs": [{**CONTEXT, "passage_id": 1.5}]}, "the number 1.5"),
    "dpr: list cut short": Case("data check dpr.json", ["dpr.json", "not JSON"], {"dpr.json": json.dumps(DPR)[:-20]}),
    "dpr: comma missing": Case(
        "data check dpr.json", ["dpr.json:2", "instead of ','"], {"dpr.json": json.dumps(DPR).replace("}, {", "}\n{")}
    ),
    "dpr: more behind the list": Case(
        "data check dpr.json", ["dpr.json:2", "text follows the end of the list"], {"dpr.json": json.dumps(DPR) + "\n[]"}
    ),
    "dpr: an empty list": Case("data check dpr.json", ["dpr.json: is empty", "a DPR"], {"dpr.json": "[]"}),
    "dpr: numbers": Case("data check dpr.json", ["dpr.json", "number 1", "a DPR record"], {"dpr.json": "[1, 2]"}),
    "dpr: nested without end": Case(
        "data check dpr.json", ["dpr.json:1 (record 1)", "not usable JSON"], {"dpr.json": "[" * 90_000}
    ),
    "pairs: pos missing": pair({"query": "x"}, "'pos' is missing (other fields: 'query')", "must be a list"),
    "pairs: pos a number": pair({"query": "x", "pos": 4}, "'pos' is the number 4", "must be a list"),
    "pairs: pos of null": pair({"query": "x", "pos": [None]}, "pos[0]", "found null", "must be a string"),
    "pairs: pos empty text": pair({"query": "x", "pos": [""]}, "passage", "empty text", "passage needs a text"),
    "pairs: query empty": pair({"query": " ", "pos": ["a"]}, "query 'unnamed-query-2' has an empty text", "query needs a text"),
    "pairs: query a list": pair({"query": ["x"], "pos": ["a"]}, "'query' is a list", "must be a string"),
    "pairs: ids and texts": pair({"query": "x", "pos": ["a"], "pos_id": [1, 2]}, "2 ids in 'pos_id'", "1 texts"),
    "pairs: query id again": pair(
        {"query_id": "unnamed-query-1", "query": "x", "pos": ["a"]}, "'unnamed-query-1' (first at line 1)"
    ),
    "pairs: another format's line": pair(DPR[0], "'query' is missing", "must be a string"),
    "pairs: no positive at all": Case(
        "train --config config.yaml --data.train pairs.jsonl --data.strict true",
        ["pairs.jsonl:1", "query 'unnamed-query-1' has no positive"],
        {"pairs.jsonl": lines({"query": "x", "pos": []})},
    ),
    "tevatron: document without text": Case(
        "data check t.jsonl",
        ["t.jsonl:1", "positive_passages[0]", "'text' is missing"],
        {"t.jsonl": lines({"query_id": 1, "query": "x", "positive_passages": [{"docid": 1}]})},
    ),
    # runs
    "run: five columns": hit("q1 Q0 p1 1 2.0", "5 columns", "expected six columns"),
    "run: score a word": hit("q1 Q0 p1 1 high x", "score is 'high'", "expected a finite number"),
    "run: score NaN": hit("q1 Q0 p1 1 nan x", "score is 'nan'", "expected a finite number"),
    "run: score infinite": hit("q1 Q0 p1 1 1e999 x", "score is '1e999'", "expected a finite number"),
    "run: passage twice": hit("q0 Q0 p0 2 1.0 x", "'p0' is listed twice for query 'q0'", "expected it once"),
    "run: JSON": hit('{"q1": {"p1": 2.0}}', "columns", "expected six columns"),
    "run: empty": Case(
        "evaluate --run run.trec --qrels d/qrels/test.tsv", ["run.trec: is empty", "six columns"], {"run.trec": ""}
    ),
    "run: of other queries": Case(
        "evaluate --run run.trec --qrels d/qrels/test.tsv",
        ["run and qrels have no query in common; for example, 'x0' is only in the run, and 'q0' only in the qrels"],
        {"run.trec": "x0 Q0 p0 1 2.0 x\n"},
    ),
    "run: without qrels": Case("evaluate --run run.trec", ["evaluate got --run", "give --data"]),
    "run: qrels without judgements": Case(
        "evaluate --run run.trec --qrels d/qrels/test.tsv", ["d/qrels/test.tsv", "at least one"], {"d/qrels/test.tsv": ""}
    ),
    # verbs
    "verb: no such one": Case("fly", ["fly"]),
    "verb: unknown option": Case("data check d --fast", ["--fast"]),
    "verb: path not there": Case("data check nowhere", ["nowhere: no folder or data set has this name", "expected a path"]),
    "verb: data not there": Case("evaluate --model bm25 --data nowhere", ["nowhere: no folder or data set", "expected a path"]),
    "verb: data that climbs": Case("data fetch ../nowhere", ["..", "no such folder", "expected a path or the name of"]),
    "verb: path with a NUL": Case("data check nul\0", ["no folder or data set has this name"]),
    "verb: name of 5,000 letters": Case("data check " + "x" * 5000, ["xxx"]),
    "verb: empty path": Case("data check ''", [".: corpus.jsonl not found", "a BEIR folder"]),
    "verb: k zero": Case("evaluate --model bm25 --data d --k 0", ["k is 0", "at least 1"]),
    "verb: k negative": Case("evaluate --model bm25 --data d --k -5", ["k is -5", "at least 1"]),
    "verb: k a word": Case("evaluate --model bm25 --data d --k many", ["many"]),
    "verb: match unknown": Case(
        "evaluate --model bm25 --questions qa.csv --passages psgs.tsv --match fuzzy", ["fuzzy", "string"]
    ),
    "verb: model not there": Case("evaluate --model ./none --data d", ["./none", "no such folder"]),
    "verb: output under a file": Case(
        "evaluate --model bm25 --data d --output qa.csv/metrics.json", ["qa.csv", "this is a file, not a folder"]
    ),
    "verb: output is a folder": Case("evaluate --model bm25 --data d --output d", ["d: is an input of this call"]),
    "convert: target is there": Case("data convert d pairs.jsonl --to jsonl", ["pairs.jsonl: already exists", "a new path"]),
    "convert: from a corpus": Case("data convert psgs.tsv out --to jsonl", ["is a corpus file", "training examples"]),
    "convert: unknown form": Case("data convert d out --to csv", ["csv", "tevatron"]),
    "convert: under a file": Case("data convert d qa.csv/out --to jsonl", ["qa.csv", "this is a file, not a folder"]),
    "convert: split with a slash": Case(
        "data convert pairs.jsonl out --to beir --split ../../up", ["'../../up'", "use a plain name"]
    ),
    "convert: id with a tab": Case(
        "data convert pairs.jsonl out --to beir",
        ["id 'a\\tb' contains", "a qrels file cannot contain"],
        {"pairs.jsonl": lines({"query_id": "a\tb", "query": "x", "pos": ["a"]})},
    ),
    "convert: id with a NUL": Case(
        "data convert pairs.jsonl out --to beir",
        ["id 'a\\x00b' contains", "a qrels file cannot contain"],
        {"pairs.jsonl": lines({"query_id": "a\0b", "query": "x", "pos": ["a"]})},
    ),
    "demo: folder is there": Case("data demo d", ["d", "exists"]),
    "report: no run": Case("report d", ["d: no config.yaml and no metrics.json"]),
    "report: not JSON": Case("report scored", ["scored/metrics.json, line 1"], {"scored/metrics.json": "{"}),
    "report: unknown metric": Case("report scored --metric f1", ["scored/metrics.json: no metric 'f1'; expected one of ndcg@10"]),
    # configs; tests/test_config_files.py has those that are no sound files of settings
    "config: output a file": config("output_dir: out", "output_dir: qa.csv", "qa.csv: this is a file", "Choose a folder"),
    "config: output not empty": config("output_dir: out", "output_dir: d", "output_dir d: not empty", "Choose an empty folder"),
    "config: output missing": config("output_dir: out\n", "", "output_dir"),
    "config: no training data": config("train: d", "dev: d", "data.train is not set", "a path"),
    "config: data not there": config("train: d", "train: nowhere", "nowhere: no folder or data set", "expected a path"),
    "config: a corpus to train on": config("train: d", "train: psgs.tsv", "psgs.tsv", "corpus", "training examples"),
    "config: dev split missing": config("train: d", "train: d, dev: d", "split 'dev' not found", "test, train"),
    "config: more negatives than passages": config("train: d", "train: d, hard_negatives: 9", "data.hard_negatives is 9"),
    "config: nothing to resume": Case("train --config config.yaml --output_dir d --resume", ["d: no config.yaml"]),
}  # fmt: skip

if os.geteuid() != 0:  # who may read everything is refused nothing
    CASES["corpus: unreadable"] = corpus(lambda path: path.touch(mode=0), "cannot be read", "Permission denied")


def make(case: Case, root: Path) -> None:
    for name, content in {**SOUND, **case.files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        elif content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def arguments_of(case: Case) -> list[str]:
    return [argument.strip("'") for argument in case.arguments.split(" ")]


def standing(root: Path) -> dict[str, object]:
    """All that stands under a folder, the cache aside, with its bytes."""
    found = {}
    for path in sorted(root.rglob("*")):
        if "cache" not in path.relative_to(root).parts:
            found[str(path.relative_to(root))] = path.read_bytes() if path.is_file() else path.is_dir()
    return found


def is_refused(case: Case, code: int, out: str, err: str) -> None:
    assert code == 2, err
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("contaccum: ")
    assert "Traceback" not in err
    assert len(err) < 6000
    missing = [word for word in case.words if word not in err]
    assert not missing, f"{missing} not in {err}"


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence_and_leaves_nothing(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    case = CASES[name]
    make(case, tmp_path)
    before = standing(tmp_path)
    code = main(arguments_of(case))
    is_refused(case, code, *capsys.readouterr())
    assert standing(tmp_path) == before
    assert not list((tmp_path / "cache").rglob("*.part*"))


@pytest.mark.filterwarnings("always::UserWarning")
def test_there_are_at_least_80_cases_and_the_sound_world_passes(tmp_path, capsys, monkeypatch):
    """Negative control: what the cases spoil is accepted as it stands."""
    assert len(CASES) >= 80
    monkeypatch.chdir(tmp_path)
    make(Case("", []), tmp_path)
    for arguments in (
        "data check d", "data check d/corpus.jsonl", "data check d/queries.jsonl", "data check psgs.tsv",
        "data check qa.csv", "data check pairs.jsonl", "data convert d out.jsonl --to jsonl", "report scored",
        "evaluate --model bm25 --data d", "train --config config.yaml",
    ):  # fmt: skip
        assert main(arguments.split()) == 0, arguments
    capsys.readouterr()
    assert main(["evaluate", "--run", "run.trec", "--qrels", "d/qrels/test.tsv"]) == 0
    assert "1 of 3 judged queries have no result" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["with a space", "é\u2028\U0001f600'\"$(x)", "x" * 250, "é" * 125, "-dash", "%s{}"])
def test_odd_names_are_names(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(Case("", []), tmp_path)
    data = (tmp_path / "d").rename(tmp_path / name)
    pairs, folder, metrics = (tmp_path / f"out{number}" / name for number in range(3))
    for parent in (pairs.parent, folder.parent):
        parent.mkdir()
    for arguments in (
        ["data", "check", data],
        ["data", "convert", data, pairs, "--to", "jsonl"],
        ["data", "convert", pairs, folder, "--to", "beir"],
        ["evaluate", "--model", "bm25", "--data", data, "--output", metrics],
    ):
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
    assert json.loads(metrics.read_text())["queries"] == 3
    assert [path.name for path in folder.parent.iterdir()] == [name]


IN_A_PROCESS = ["passage: nested without end", "qa: brackets without end", "config: data not there"]


@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_bad_input_in_a_process_of_its_own(name, tmp_path):
    make(CASES[name], tmp_path)
    before = standing(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "contaccum", *arguments_of(CASES[name])],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    is_refused(CASES[name], done.returncode, done.stdout, done.stderr)
    assert standing(tmp_path) == before


def test_a_line_of_100_mb_is_refused_in_little_memory(tmp_path):
    """What is allocated at most while it is read, behind the imports."""
    script = (
        "import sys, tracemalloc\nfrom contaccum.cli import main\nmain(['data', 'check', sys.argv[1]])\n"
        "tracemalloc.start()\nprint(main(['data', 'check', sys.argv[2]]), tracemalloc.get_traced_memory()[1])"
    )
    (tmp_path / "short.jsonl").write_text(SOUND["d/corpus.jsonl"])
    long = tmp_path / "long.jsonl"
    with open(long, "wb") as file:
        file.write(lines(PASSAGES[0]).encode() + b'{"_id": "a", "text": "')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n')
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "short.jsonl", long], capture_output=True, text=True, check=True
    )
    code, peak = map(int, done.stdout.split()[-2:])
    assert code == 2
    assert f"long.jsonl:2: the line has more than {MAX_LINE} bytes; longer lines are not read" in done.stderr
    assert peak < 4 * MAX_LINE
