"""What a file contains, or what a command says -> the sentence that refuses it.

Each row ends with exit code 2 and one line, and leaves every file as it was. Content that would run
code, if it were evaluated, makes a folder ``canary``.
"""

import gzip
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import open_corpus, tiny_encoder
from tiny_data import lines
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.data.tables import build_token_table
from contaccum.errors import InputError
from contaccum.formats.records import MAX_LINE
from contaccum.retrieval.retriever import Retriever
from contaccum.runtime.checks import refuse_input_as_output, require_utf8
from contaccum.runtime.files import write_text

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
SCORED = {"query": "x", "pos": ["a"], "neg": ["b", "c"], "pos_scores": [2], "neg_scores": [1, 0]}
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
    "collection.tsv": "0\tone\n1\ttwo\n",
    "queries.tsv": "0\tone\n1\ttwo\n",
    "scored.jsonl": lines(*(SCORED | {"query": f"{n}", "pos": [f"p{n}"]} for n in range(4))),
    "run.trec": "q0 Q0 p0 1 2.0 x\nq1 Q0 p1 1 2.0 x\n",
    "mined.about.json": lines({"query": "one", "pos": ["a"]}),
    "config.yaml": CONFIG,
    "scored/metrics.json": json.dumps({"mean": {"ndcg@10": 0.5}, "per_query": {}, "queries": 1}),
}
"""Sound files; each case spoils one of them."""
DISTIL = (
    "train --config config.yaml --data.train scored.jsonl --data.hard_negatives 1 "
    "--loss.distillation kl"
)
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
        *((f"when?\t{text}", ANSWERS)  # literals are read, nothing is evaluated
          for text in ("[__import__('os').mkdir('canary')]", "[open('canary', 'w')]",
                       "['a' * 10**10]", "[9**9**9**9]", "[f'{1}']", "[" * 100_000)),
        (r"when?" + "\t" + r"['\ud800']", "found half a character (a lone surrogate escape)"),
    ],
    ("data check collection.tsv", "collection.tsv", 2): [
        ("13", "found 1 columns; each line must be an id without spaces, then a tab, then a text"),
        ("13\tx\ty", "found 3 columns"),
        ("\tx", "the id is ''"),
        ("1 3\tx", "the id is '1 3'"),
        ("0\tx", "duplicate passage id '0' (first at line 1)"),
        ("13\t ", "passage '13' has an empty text"),
    ],
    ("data check collection.tsv", "collection.tsv", 1): [
        (header, "found the header") for header in ("pid\tpassage", "docid\ttext", "id\ttext")
    ],
    ("data check queries.tsv", "queries.tsv", 2): [
        ("13\t ", "the text of query '13' is empty"),
        ("0\tx", "duplicate query id '0' (first at line 1)"),
        ("13\ta\0b", "found a NUL byte"),
    ],
    (DISTIL, "scored.jsonl", 2): [
        (json.dumps(SCORED | change), sentence) for change, sentence in (
            ({"neg_scores": [1]}, "found scores for 1 of 1 positives and 1 of 2 negatives; give "
                                  "every passage one score"),
            ({"neg_scores": None}, "found scores for 1 of 1 positives and 0 of 2 negatives"),
            ({"pos_scores": []}, "found scores for 0 of 1 positives and 2 of 2 negatives"),
            ({"pos_scores": [float("nan")]},
             "pos_scores[0]: found the number nan; a score must be a finite number"),
            ({"neg_scores": [1, float("inf")]}, "neg_scores[1]: found the number inf"),
            ({"neg_scores": [1, 1e39]}, "neg_scores[1]: found the number 1e+39"),
            ({"neg_scores": [1, None]}, "neg_scores[1]: found null"),
            ({"neg_scores": [1, True]}, "neg_scores[1]: found true or false"),
            ({"pos_scores": 3}, "field 'pos_scores' is the number 3; it must be a list"),
        )
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


class Bomb:
    """Unpickled, it makes a folder ``canary``."""

    def __reduce__(self):
        return os.mkdir, ("canary",)


PICKLE = pickle.dumps([Bomb()])
MODEL_FILE = "m/query_encoder/model.safetensors"


def pickled_weights(path: Path) -> None:
    path.with_name("pytorch_model.bin").write_bytes(PICKLE)


WHOLE = gzip.compress(SOUND["d/corpus.jsonl"].encode(), mtime=0)
DAMAGED = "the gzip stream is damaged or truncated"

BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)
)
MIXTURE = "data:\n  mixture: [{}]\n"
# content of c.yaml -> the error
CONFIGS: list[tuple[object, str]] = [
    ("", "c.yaml: is empty, expected YAML with settings, such as 'seed: 1'"),
    ("\n- a\n- b\n", "c.yaml:2: found a list, expected settings"),
    ("hello\n", "c.yaml:1: found 'hello', expected settings"),
    ("5\n", "c.yaml:1: found 5, expected settings"),
    ("batch:\n\tmicro_batch_size: 2\n",
     "c.yaml:2: not valid YAML (found character '\\t' that cannot start any token)"),
    ("method cont_accum\nseed: 1\n", "c.yaml:2: not valid YAML"),
    (b"method: \xff\n", "c.yaml: byte 8 is not UTF-8, expected YAML"),
    (b"method: \0\n", "c.yaml: not usable YAML"),
    ("a: " + "[" * 99_000 + "]" * 99_000, "c.yaml: not usable YAML"),
    (BOMB, "c.yaml:1: a0: no such setting"),
    ("output_dir: !secret x\n",
     "c.yaml:1: not valid YAML (could not determine a constructor for the tag '!secret')"),
    ("output_dir: !!python/object/apply:os.mkdir [canary]\n", "c.yaml:1: not valid YAML"),
    ("seed: " + "9" * 5000 + "\n", "c.yaml: not usable YAML"),
    # nothing in a config is run or imported
    ("output_dir: !!python/object/new:os.mkdir [canary]\n", "c.yaml:1: not valid YAML"),
    ("data: inner.yaml\n", "c.yaml:1: data is 'inner.yaml', expected a group of settings"),
    (None, "c.yaml: cannot be read (No such file or directory)"),
    (folder, "c.yaml: cannot be read (Is a directory)"),
    (link_to_itself, "c.yaml: cannot be read (Too many levels"),
    # names
    ("seed: 1\nconfig: other.yaml\n", "c.yaml:2: config: no such setting"),
    ("model: {class_path: x}\n", "c.yaml:1: model.class_path: no such setting"),
    ("bank: {sise: 4}\n", "c.yaml:1: bank.sise: no such setting; did you mean bank.size?"),
    ("optm:\n  epochs: 1\n", "c.yaml:2: optm.epochs: no such setting; did you mean optim.epochs?"),
    ("bank: 5\n", "c.yaml:1: bank is 5, expected a group of settings, such as bank.size"),
    ("seed: 1\nbank: [1]\n",
     "c.yaml:2: bank is [1], expected a group of settings, such as bank.size"),
    ("format_version: 2\n", "c.yaml:1: format_version is 2, expected 1"),
    # a setting twice
    ("seed: 1\nseed: 2\n",
     "c.yaml:2: duplicate setting 'seed' (first in line 1); give each setting once"),
    ("bank: {size: 4}\nbank: {size: 4}\n",
     "c.yaml:2: duplicate setting 'bank.size' (first in line 1)"),
    ("optim.epochs: 1\noptim: {epochs: 2}\n",
     "c.yaml:2: duplicate setting 'optim.epochs' (first in line 1)"),
    ("run:\n  device: cpu\n  tf32: true\n  device: auto\n",
     "c.yaml:4: duplicate setting 'run.device' (first in line 2)"),
    # values
    ("seed:", "c.yaml:1: seed is null, expected a whole number (at least 0)"),
    ("seed: ''\n", "c.yaml:1: seed is '', expected a whole number (at least 0)"),
    ("run: {tf32: 1}\n", "c.yaml:1: run.tf32 is 1, expected true or false"),
    ("bank: {size: true}\n",
     "c.yaml:1: bank.size is true, expected a whole number (at least 0), or null"),
    ("bank: {size: [4]}\n", "c.yaml:1: bank.size is [4], expected a whole number"),
    ("bank: {size: -4}\n", "c.yaml:1: bank.size is -4, expected at least 0"),
    ("model: {temperature: 0}\n", "c.yaml:1: model.temperature is 0, expected more than 0"),
    ("optim: {warmup_ratio: 2}\n", "c.yaml:1: optim.warmup_ratio is 2, expected from 0 to 1"),
    ("optim: {learning_rate: .nan}\n",
     "c.yaml:1: optim.learning_rate is nan, expected a finite number"),
    ("optim: {learning_rate: .inf}\n",
     "c.yaml:1: optim.learning_rate is inf, expected a finite number"),
    ("run: {metric: 7}\n", "c.yaml:1: run.metric is 7, expected text; write it in quotes"),
    ("data:\n  train: {a: 1}\n", "c.yaml:2: data.train is a mapping, expected text"),
    ("run: {trackers: [[]]}\n", "c.yaml:1: run.trackers is a list, expected a list of texts"),
    # data.mixture
    (MIXTURE.format("{train: a, weightt: 3}"),
     "c.yaml:2: data.mixture[0].weightt: no such setting; did you mean weight?"),
    (MIXTURE.format("{train: a}, {train: b, weight: heavy}"),
     "c.yaml:2: data.mixture[1].weight is 'heavy', expected a number (more than 0), or null"),
    (MIXTURE.format("{train: a, train: b}"),
     "c.yaml:2: not valid YAML (duplicate key 'train', first in line 2)"),
    (MIXTURE.format("scifact"),
     "c.yaml:2: data.mixture[0] is 'scifact', expected a mapping with train, split, weight"),
    ("data: {mixture: scifact}\n",
     "c.yaml:1: data.mixture is 'scifact', expected a list of mappings with train, split"),
]  # fmt: skip

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
    *(("c.yaml", content, "train --config c.yaml", error) for content, error in CONFIGS),
    *((name, "", f"data check {name}", f"{name}: is empty; ")
      for name in ("x.jsonl", "x.csv", "x.tsv", "x.json")),
    *((name, gzip.compress(b"", mtime=0), "evaluate --model bm25 --data d",
       f"{name}: is empty; it must have at least a ")
      for name in ("d/corpus.jsonl", "d/queries.jsonl", "d/qrels/test.tsv")),
    ("x.csv", "", "evaluate --model bm25 --questions x.csv --passages psgs.tsv",
     "x.csv: is empty; "),
    # triples and judgements of MS MARCO are no corpus
    *(("x.tsv", content, "data check x.tsv", f"x.tsv:1: {error}") for content, error in [
        ("1\t20\t30\n2\t21\t31\n", "found only ids"),
        ("q1\td20\td30\nq2\td21\td31\n", "found only ids"),
        ("q1\td20\t1\nq2\td21\t0\n", "found only ids"),
        ("1\t20\n2\t21\n", "found only ids"),
        ("what is x\tit is y\tit is z\n", "the first column has texts"),
    ]),
    ("x.tsv", "1\t20\n", "mine --model bm25 --data pairs.jsonl --corpus x.tsv --output o",
     "x.tsv:1: found only ids"),
    # pickles
    *((f"set/{name}", PICKLE, f"data check {source}", f"{source}:") for name, source in [
        ("examples.pkl", "set/examples.pkl"), ("data.pt", "set/data.pt"), ("data.pt", "hub:set"),
    ]),
    *((MODEL_FILE, content, "evaluate --model m --data d", "m: no encoder could be loaded")
      for content in [
        struct.pack("<Q", 2**63), struct.pack("<Q", 10**9),
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ]),
    (MODEL_FILE, pickled_weights, "evaluate --model m --data d",
     "m: no encoder could be loaded from this folder (Error no file named model.safetensors"),
    ("scored/config.yaml", "output_dir: !!python/object/apply:os.mkdir [canary]\n",
     "report scored", "scored/config.yaml:1: not valid YAML"),
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
    ("data", "no command was given; contaccum data --help lists the commands"),
    ("fly", "contaccum fly: no such command; contaccum --help lists the commands"),
    ("searchh", "contaccum searchh: no such command; did you mean contaccum search?"),
    ("data convertt a",
     "contaccum data convertt: no such command; did you mean contaccum data convert?"),
    ("report", "contaccum report: the following arguments are required: RUNS; contaccum report "
               "--help lists"),
    ("merge", "contaccum merge: the following arguments are required: MODEL, OUTPUT;"),
    ("data convert a",
     "contaccum data convert: the following arguments are required: TARGET, --to;"),
    ("encode --model x",
     "contaccum encode: the following arguments are required: --input, --output;"),
    ("train --seed", "contaccum train: argument --seed: expected one argument;"),
    ("train seed", "contaccum train: unexpected argument 'seed';"),
    ("train --resume true", "--resume takes no value, but got 'true'"),
    ("train --data x",
     "--data is a group of settings, expected one of them, such as --data."),
    ("search --model m --data d --query q --k 0", "--k is 0, expected at least 1"),
    ("evaluate --model m --data d --batch_tokens x", "--batch_tokens is 'x', expected a whole"),
    ("evaluate --model m --data d --timeout_minutes=-1",
     "--timeout_minutes is -1, expected more than 0"),
    ("evaluate --model m --data d --timeout_minutes=1.0e+999",
     "--timeout_minutes is inf, expected a finite number"),
    ("compare --config config.yaml --seeds 0", "--seeds is 0, expected at least 1"),
    ("compare --config config.yaml --seed -1", "--seed is -1, expected at least 0"),
    ("plan --config config.yaml --memory much",
     "--memory is 'much', expected a number above 0"),
    ("plan --config config.yaml --memory 4GB --methods dpr", "--methods: 'dpr' is unknown"),
    ("auto --config config.yaml --memory 8GB",
     "contaccum auto: the following arguments are required: --time;"),
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
    *((f"data convert pairs.jsonl out --to beir --split {split}",
       f"split {split!r} cannot be a file name; use a plain name")
      for split in ("../../up", "a/b", "..", "nul\0")),
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

BM25 = "--model bm25 --data d"
# the output is the last argument, and an input of the same call
INPUTS = [
    f"search {BM25} --output d/corpus.jsonl",
    f"search {BM25} --output d/queries.jsonl",
    f"search {BM25} --output d/qrels/test.tsv",
    f"search {BM25} --output d/../d/corpus.jsonl",
    f"search {BM25} --output link.jsonl",
    f"search {BM25} --output hard-link.jsonl",
    "search --model m --data d --output m/contaccum.json",
    f"search --model m --data d --output {MODEL_FILE}",
    f"evaluate {BM25} --output d/qrels/test.tsv",
    f"{TO_EVALUATE_A_RUN} --output run.trec",
    f"{TO_EVALUATE_A_RUN} --output d/qrels/test.tsv",
    "evaluate --model m --questions qa.csv --passages psgs.tsv --output psgs.tsv",
    "evaluate --model m --questions qa.csv --passages psgs.tsv --output qa.csv",
    "encode --model m --input d --output d",
    "encode --model m --input d/corpus.jsonl --output d/corpus.jsonl",
    "encode --model m --input d --output m",
]
# command -> the error, before the work begins
OUTPUTS: list[tuple[str, str]] = [
    *((call, f"{call.split()[-1]}: is an input of this call") for call in INPUTS),
    ("mine --model bm25 --data pairs.jsonl --output pairs.jsonl",
     "pairs.jsonl: exists already; choose a new path"),
    ("mine --model bm25 --data mined.about.json --output mined.jsonl",
     "mined.about.json: is an input of this call"),
    ("data convert pairs.jsonl pairs.jsonl --to dpr", "pairs.jsonl: already exists; choose a new"),
    ("data convert d d --to beir --split test", "d: already exists; choose a new path"),
    (f"search {BM25} --output m", "m: is a folder; expected the name of a file"),
    (f"search {BM25} --output .", ".: is a folder; expected the name of a file"),
    (f"search {BM25} --output pipe", "pipe: is a device or a pipe; expected the name of a file"),
    (f"evaluate {BM25} --output m", "m: is a folder; expected the name of a file"),
    (f"mine {BM25} --output .", ".: exists already; choose a new path"),
]  # fmt: skip

# commands with an address instead of a path
ADDRESSES = [
    "train --config config.yaml --data.train s3://b/x",
    "train --config config.yaml --output_dir s3://b/x",
    "train --config config.yaml --data.dev GS://b/x",
    "train --data.train d --output_dir out --model.name file:///x",
    "evaluate --model https://h/x --data d",
    "evaluate --model m --data dbfs:/x",
    "evaluate --model bm25 --data s3://b/x",
    "evaluate --model bm25 --data d --output s3://b/x",
    "evaluate --run s3://b/x --qrels d/qrels/test.tsv",
    "search --model bm25 --data d --output s3://b/x",
    "search --model bm25 --data s3://b/x --query x",
    "mine --model bm25 --data d --output s3://b/x",
    "mine --model bm25 --data s3://b/x --output out",
    "encode --model s3://b/x --input d/corpus.jsonl --output out",
    "encode --model m --input s3://b/x --output out",
    "encode --model m --input d/corpus.jsonl --output s3://b/x",
    "merge s3://b/x out",
    "push s3://b/x somebody/name --dry_run",
    "data check s3://b/x",
    "data convert s3://b/x out --to jsonl",
    "data convert d s3://b/x --to jsonl",
    "data demo s3://b/x",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    tiny_encoder().save(folder)
    return folder


@pytest.fixture(autouse=True)
def sound_files(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, content in SOUND.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    Path("link.jsonl").symlink_to("d/corpus.jsonl")
    os.link("d/queries.jsonl", "hard-link.jsonl")
    shutil.copytree(model, "m")


def put(name: str, content: object) -> None:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
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


@pytest.mark.parametrize(("command", "error"), OUTPUTS)
def test_a_wrong_output_is_one_sentence_before_the_work(command, error, capsys, monkeypatch):
    monkeypatch.setattr(Retriever, "open", None)
    os.mkfifo("pipe")
    assert refused(command, capsys).startswith(f"contaccum: {error}")


@pytest.mark.parametrize("command", ADDRESSES)
def test_an_address_is_one_sentence(command, capsys):
    assert "is not a local path. Mount the storage" in refused(command, capsys)


@pytest.mark.filterwarnings("always::UserWarning")
def test_the_sound_files_are_accepted(capsys):
    """Negative control. Names with a colon are paths, and pickles do run."""
    for command in (
        "data check d", "data check d/corpus.jsonl", "data check d/queries.jsonl",
            "data check psgs.tsv",
        "data check qa.csv", "data check pairs.jsonl", "data check dpr.json",
            "data convert d out.jsonl --to jsonl",
        "report scored", "evaluate --model bm25 --data d", "train --config config.yaml",
        "data check collection.tsv", "data check queries.tsv", f"{DISTIL} --output_dir out2",
        "evaluate --model m --data d", "data convert d C:/Users/x --to jsonl",
        "data convert d folder/s3:/x --to jsonl",
    ):  # fmt: skip
        assert main(command.split()) == 0, command
    capsys.readouterr()
    assert main(TO_EVALUATE_A_RUN.split()) == 0
    assert "1 of 3 judged queries have no result" in capsys.readouterr().err
    pickle.loads(PICKLE)
    assert Path("canary").is_dir()


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


# outputs


@pytest.mark.parametrize(
    "call",
    [f"search {BM25} --split test --output d/run.trec", f"evaluate {BM25} --output d/m.json"],
)
def test_an_output_next_to_the_inputs_is_written_again(call, capsys):
    """Negative control: only files that commands read count as inputs."""
    output = Path(call.split()[-1])
    assert main(call.split()) == 0
    written = output.read_bytes()
    output.write_text("older")
    assert main(call.split()) == 0
    assert output.read_bytes() == written


def test_a_linked_output_replaces_the_target_of_the_link(tmp_path):
    """A result on another disk.

    A device, such as /dev/null for root, is never replaced by a file.
    """
    (tmp_path / "disk").mkdir()
    Path("result.trec").symlink_to("disk/run.trec")
    assert main(f"search {BM25} --split test --output plain.trec".split()) == 0
    for _ in range(2):  # the target is missing in the first call, and exists in the second
        assert main(f"search {BM25} --split test --output result.trec".split()) == 0
        assert Path("result.trec").is_symlink()
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["run.trec"]
        assert Path("disk/run.trec").read_bytes() == Path("plain.trec").read_bytes()
    os.mkfifo("pipe")
    Path("to-pipe").symlink_to("pipe")
    for name in ("pipe", "to-pipe"):
        with pytest.raises(InputError, match=r"this is a device or a pipe, not a file"):
            write_text(name, "text")
    assert Path("pipe").is_fifo()


def test_names_and_objects_are_no_paths(tmp_path):
    output = tmp_path / "out"
    output.write_text("")
    others = ("scifact", None, object(), tmp_path / "nowhere")
    for case in ((output, *others), (None, output, *others), (tmp_path / "new", *others)):
        assert refuse_input_as_output(*case) is None
    with pytest.raises(
        InputError, match="is an input of this call"
    ):  # control: the check does reach the last input
        refuse_input_as_output(output, *others, output)


@pytest.mark.parametrize("text", ["na\udcffve", "half \ud83d", "two \udcc3\udc28 bytes"])
def test_text_that_is_not_utf8_is_refused_in_one_sentence(text, capsys):
    """In a query, a passage or a prefix. Control: text of every plane is searched and encoded."""
    sound = "naïve 🦉 \u2028"
    assert require_utf8(sound, "the query") == sound
    with pytest.raises(InputError, match=r"^the prefix: .*; the text must be valid UTF-8$"):
        require_utf8(text, "the prefix")
    search = ["search", "--model", "bm25", "--data", "d", "--query"]
    assert main([*search, sound]) == 0
    capsys.readouterr()
    assert main([*search, text]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "must be valid UTF-8" in sentence
    with pytest.raises(InputError, match=r"query 'q7': .*must be valid UTF-8"):
        Retriever.open("bm25", open_corpus("d")).search({"q1": "sound", "q7": text}, 1)
    folder = family_folder("bert", Path("bert"))
    model = DualEncoder.load(folder, max_query_length=8, max_passage_length=8)
    for side, encode in (("query", model.encode_queries), ("passage", model.encode_passages)):
        with pytest.raises(InputError, match=rf"^{side} 1: .*; the text must be valid UTF-8$"):
            encode(["sound", text])
        assert encode([sound]).shape == (1, model.dim)
    with pytest.raises(InputError, match=r"bert: query_prefix: .*; the text must be valid UTF-8$"):
        DualEncoder.load(folder, query_prefix=text)
    table = Dataset.from_dict({"text": ["sound"]})
    with pytest.raises(
        InputError, match=r"^prefix '.*': .*; the text must be valid UTF-8$"
    ):  # of a mixture's data set
        build_token_table(
            table, ["text"], model.query_tower.tokenizer, max_length=8, prefix=text, fingerprint=""
        )
