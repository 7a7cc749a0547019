"""What a file contains, or what a command says -> the sentence that refuses it.

Each row ends with exit code 2 and one line, and leaves every file as it was. Content that would run
code, if it were evaluated, makes a folder ``canary``.
"""

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
from helpers import tiny_encoder
from safetensors.torch import load, save
from tiny_data import lines
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.catalog import fetch
from contaccum.catalog.pinned import tasks
from contaccum.cli import main
from contaccum.config import AdapterConfig, DataPolicy
from contaccum.data.commands import check, convert
from contaccum.encoder import Adapters
from contaccum.errors import InputError
from contaccum.retrieval.index import Index
from contaccum.retrieval.retriever import Retriever
from contaccum.retrieval.shards import EncodingJob, Shard, ShardFolder, write_manifest, write_shard
from contaccum.runtime.files import _temporary_path, write_json, write_text
from contaccum.training.run_folder import newest_checkpoint

QRELS = "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\tp{n}\t1\n" for n in range(3))
SIZE = {"max_query_length": 8, "max_passage_length": 8}
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
    "config.yaml": CONFIG,
    "scored/metrics.json": json.dumps({"mean": {"ndcg@10": 0.5}, "per_query": {}, "queries": 1}),
}
"""Sound files; each case spoils one of them."""
DISTIL = (
    "train --config config.yaml --data.train scored.jsonl --data.hard_negatives 1 "
    "--loss.distillation kl"
)
TO_EVALUATE_A_RUN = "evaluate --run run.trec --qrels d/qrels/test.tsv"
PASSAGE = "the record must be a passage (an object with _id, title and text)"
COLUMNS = "each row needs three columns separated by tabs: id, text, title"
ANSWERS = "they must be a list of strings such as ['a', 'b']"
KINDS = (
    "it must contain JSON, a DPR corpus TSV, a question CSV, or lines with id, tab and text (MS "
    "MARCO)"
)

# command, file and number of the line that is replaced -> [(the line, the error at this line)]
LINES: dict[tuple[str, str, int], list[tuple[str, str]]] = {
    ("data check d/corpus.jsonl", "d/corpus.jsonl", 2): [
        ('{"_id": "p1", "text": "x"', f"not usable JSON (Input data was truncated); {PASSAGE}"),
        ('["p1", "x"]', f"Expected `object`, got `array`; {PASSAGE}"),
        ('{"_id": "p1"}', f"Object missing required field `text`; {PASSAGE}; found _id"),
        ('{"_id": "p1", "text": 1.5}', f"Expected `str`, got `float` - at `$.text`; {PASSAGE}"),
        ('{"_id": "", "text": "x"}', "Expected `str` of length >= 1 - at `$._id`"),
        ('{"_id": 1.0, "text": "x"}', "Expected `int | str`, got `float` - at `$._id`"),
        ('{"_id": "p0", "text": "x"}',
         "duplicate passage id 'p0' (first at line 1); ids must be unique. Use --repair"),
        ('{"_id": "p1", "text": " \\u2028\\t"}',
         "passage 'p1' has an empty text; every passage needs a text"),
        ('{"_id": "p1", "text": "a\0b"}', "found a NUL byte; text must not contain NUL"),
        ('{"_id": "p1", "text": "\\ud83d a"}', "not usable JSON (Input data was truncated)"),
        ('{"_id": "p1", "text": "", "x": ' + "[" * 90_000, "not usable JSON"),
    ],
    ("data check d/queries.jsonl", "d/queries.jsonl", 2): [
        ('{"_id": "q1", "text": "  "}',
         "the text of query 'q1' is empty; every query needs a text"),
        ('{"_id": "q0", "text": "x"}',
         "duplicate query id 'q0' (first at line 1); ids must be unique. Use --repair"),
    ],
    ("evaluate --model bm25 --data d", "d/qrels/test.tsv", 2): [
        ("q0\tp0", "found 2 columns; a line must have 3: query-id, corpus-id, score"),
        *(
            (f"q0\tp0\t{grade}",
             f"the grade is '{grade[:40]}'; it must be an integer from -99999 to 99999")
            for grade in ("0.5", "", "3000000000")
        ),
        ("\tp0\t1", "found an empty id; queries and passages need an id"),
    ],
    ("evaluate --model bm25 --data d", "d/qrels/test.tsv", 3): [
        ("q0\tp0\t2", "query 'q0' and passage 'p0' have grade 2 here and 1 earlier; a pair can "
                      "have only one grade"),
    ],
    ("data check psgs.tsv", "psgs.tsv", 3): [
        ("2\ttwo", f"found 2 columns; {COLUMNS}"),
        ("\ttwo\tT", "the id is empty; every passage needs an id"),
        ("1\ttwo\tT", "duplicate passage id '1' (first at line 2); ids must be unique"),
        ('2\t"two\tT', "unexpected end of data; perhaps a quote is not closed"),
    ],
    ("data check psgs.tsv", "psgs.tsv", 1): [
        ("id\ttitle\ttext", "the header is 'id', 'title', 'text'; it must be id, text, title"),
    ],
    ("data check qa.csv", "qa.csv", 2): [
        *((line, "each row needs two columns separated by a tab: a question, and a list of")
          for line in ("when?", " \t['b']")),
        *((f"when?\t{text}", ANSWERS)
          for text in ("one", "[1, 2]", "[]")),
        *((f"when?\t{text}", ANSWERS)  # literals are read, nothing is evaluated
          for text in ("[__import__('os').mkdir('canary')]", "[9**9**9**9]", "[" * 100_000)),
    ],
    ("data check collection.tsv", "collection.tsv", 2): [
        *((line, "each line must be an id without spaces, a tab and a text")
          for line in ("13", "1 3\tx")),
    ],
    ("data check queries.tsv", "queries.tsv", 2): [
        ("13\t ", "the text of query '13' is empty"),
    ],
    (DISTIL, "scored.jsonl", 2): [
        (json.dumps(SCORED | change), sentence) for change, sentence in (
            ({"neg_scores": [1]}, "found 1 value in 'neg_scores' but 2 texts in 'neg'; each text "
                                  "needs one"),
            ({"pos_scores": [float("nan")]}, "not usable JSON (JSON is malformed: invalid chara"),
            ({"neg_scores": [1, 1e39]}, "Expected `float` <= 3e+38 - at `$.neg_scores["),
            ({"pos_scores": 3}, "Expected `array | null`, got `int` - at `$.pos_scores`"),
        )
    ],
    ("data check pairs.jsonl", "pairs.jsonl", 2): [
        ('{"query": "x"}', "Object missing required field `pos`; the record must be an"),
        ('{"query": "x", "pos": [null]}', "Expected `str`, got `null` - at `$.pos["),
        ('{"query": "x", "pos": ["a"], "pos_scores": [1e999]}', "Number out of range"),
        ('{"query": "x", "pos": ["a"], "pos_id": [1, 2]}',
         "found 2 values in 'pos_id' but 1 text in 'pos'; each text needs one"),
    ],
    (TO_EVALUATE_A_RUN, "run.trec", 2): [
        ("q1 Q0 p1 1 2.0",
         "found 5 columns; expected six columns: query id, Q0, passage id, rank, score, tag"),
        *((f"q1 Q0 p1 1 {score} x",
         f"score is '{score}'; expected a finite number") for score in ("high", "nan")),
        ("q0 Q0 p0 2 1.0 x", "passage 'p0' is listed twice for query 'q0'; expected it once"),
    ],
}  # fmt: skip


def dpr(**change: object) -> str:
    return f"[{json.dumps(DPR)},\n{json.dumps(DPR | change)}]"


def folder(path: Path) -> None:
    path.mkdir(parents=True)


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

MIXTURE = "data:\n  mixture: [{}]\n"
# content of c.yaml -> the error
CONFIGS: list[tuple[object, str]] = [
    ("", "c.yaml: found null, expected settings, such as 'seed: 1'"),
    ("\n- a\n- b\n", "c.yaml: found ['a', 'b'], expected settings"),
    ("batch:\n\tmicro_batch_size: 2\n",
     "c.yaml: not usable YAML (while scanning for the next token found character '\\t' that "
     'cannot start any token in "c.yaml", line 2, column 1)'),
    ("a: " + "[" * 99_000 + "]" * 99_000, "c.yaml: not usable YAML"),
    ("output_dir: !!python/object/apply:os.mkdir [canary]\n", "c.yaml: not usable YAML"),
    # nothing in a config is run or imported
    ("data: inner.yaml\n", "c.yaml: data: no such setting; did you mean data.train?"),
    # names
    ("optm:\n  epochs: 1\n", "c.yaml: optm.epochs: no such setting; did you mean optim.epochs?"),
    ("format_version: 2\n", "c.yaml: format_version is 2, expected 1"),
    # a setting twice
    ("seed: 1\nseed: 2\n",
     "c.yaml: not usable YAML (duplicate key 'seed', first in line 1"),
    # values
    ("seed:", "c.yaml: seed is null, expected `int`, got `null`"),
    ("bank: {size: true}\n", "c.yaml: bank.size is true, expected `int | null`, got `bool`"),
    ("bank: {size: -4}\n", "c.yaml: bank.size is -4, expected `int` >= 0"),
    ("data:\n  train: {a: 1}\n", "c.yaml: data.train is {'a': 1}, expected `str`"),
    # data.mixture
    (MIXTURE.format("{train: a, weightt: 3}"),
     "c.yaml: data.mixture[0].weightt: no such setting; did you mean weight?"),
    (MIXTURE.format("{train: a}, {train: b, weight: heavy}"),
     "c.yaml: data.mixture[1].weight is 'heavy', expected `float | null`"),
    (MIXTURE.format("scifact"),
     "c.yaml: data.mixture[0] is 'scifact', expected a mapping with train, split, weight"),
]  # fmt: skip

# file, its content (None: no file; a function makes something else), command -> the error
FILES: list[tuple[str, object, str, str]] = [
    *(
        ("d/corpus.jsonl", content, "data check d/corpus.jsonl", f"d/corpus.jsonl{error}")
        for content, error in [
            (b'{"_id": "a", "text": "x"}\n{"_id": "b", "text": "caf\xe9"}\n',
             ":2: byte 0xe9 is not UTF-8. Convert the file"),
            (SOUND["d/corpus.jsonl"].encode("utf-16"), ":1: byte 0xff is not UTF-8"),
            ("\n \r\n\t\n", f": is empty; {KINDS}"),
            (WHOLE[:-12], f": {DAMAGED}"),
            (folder, ": corpus.jsonl not found; a BEIR folder has corpus.jsonl, queries.jsonl and "
                     "qrels/<split>.tsv"),
            (os.mkfifo, ": is a pipe or device; it must be a file"),
            (None, ": no such file"),
            (b"%PDF-1.4\n%\xe2\xe3\n", ":1: found 1 column separated by tabs; the"),
            ('{"docno": 1, "body": ""}\n',
             ":1: found fields 'docno', 'body'; a record must be an object with query"),
        ]
    ),
    *(
        ("dpr.json", content, "data check dpr.json", f"dpr.json{error}")
        for content, error in [
            (dpr(positive_ctxs=["x"]),
             ":2 (record 2): Expected `object`, got `str` - at `$.positive_ctxs["),
            (dpr(positive_ctxs=[{"title": "x"}]),
             ":2 (record 2): Object missing required field `text` - at `$.positive_ctxs["),
            (dpr()[:-20], ":2 (record 2): not usable JSON"),
            (dpr() + "\n[]", ":2: text follows the end of the list; the file must end there"),
            ("[]", ": is empty; a record must be an object with query, pos and neg"),
            ("[1, 2]", ":1 (record 1): Expected `object`, got `int`; the record must be an object"),
        ]
    ),
    *(("c.yaml", content, "train --config c.yaml", error) for content, error in CONFIGS),
    *((name, "", f"data check {name}", f"{name}: is empty; ")
      for name in ("x.jsonl", "x.csv")),
    *((name, gzip.compress(b"", mtime=0), "evaluate --model bm25 --data d",
       f"{name}: has no ") for name in ("d/corpus.jsonl", "d/qrels/test.tsv")),
    # triples and judgements of MS MARCO are no corpus
    *(("x.tsv", content, "data check x.tsv", f"x.tsv:1: {error}") for content, error in [
        ("1\t20\t30\n2\t21\t31\n", "found only ids"),
        ("what is x\tit is y\tit is z\n", "the first column has texts"),
    ]),
    ("x.tsv", "query-id\tcorpus-id\tscore\n1\t2\t1\n", "data check x.tsv",
     "x.tsv: is a file of judgements; give the BEIR folder"),
    ("notes/a.md", "text", "data check notes",
     "notes: corpus.jsonl not found. To use text files, write their passages to a"),
    # pickles
    *((f"set/{name}", PICKLE, f"data check {source}", f"{source}:") for name, source in [
        ("examples.pkl", "set/examples.pkl"), ("data.pt", "set/data.pt"), ("data.pt", "hub:set"),
    ]),
    *((MODEL_FILE, content, "evaluate --model m --data d", "m: no encoder could be loaded")
      for content in [
        struct.pack("<Q", 2**63), struct.pack("<Q", 100_000) + b"[" * 100_000,
    ]),
    (MODEL_FILE, pickled_weights, "evaluate --model m --data d",
     "m: no encoder could be loaded from this folder (Error no file named model.safetensors"),
    ("scored/config.yaml", "output_dir: !!python/object/apply:os.mkdir [canary]\n",
     "report scored", "scored/config.yaml: not usable YAML"),
    ("d/queries.jsonl", None, "data check d",
     "d: queries.jsonl not found; a BEIR folder has corpus.jsonl"),
    ("d/qrels/faq.csv", "question,answer\nwhy,so\n", "data check d/qrels",
     "d/qrels: corpus.jsonl not found; a BEIR folder has corpus.jsonl, queries.jsonl and "
     'qrels/<split>.tsv. To read CSV or Parquet files, give "hub:d/qrels?query=COLUMN&pos='),
    ("d/qrels/test.tsv", QRELS[:25], "data check d",
     "d/qrels/test.tsv: has no valid judgement; a split needs at least one"),
    ("d/qrels/test.tsv", "corpus-id\tquery-id\tscore\np0\tq0\t1\n", "data check d",
     "d/qrels/test.tsv:1: the grade is 'score'; it must be an integer"),
    ("d/qrels/test.tsv", "q0\tp0\t0\n", "evaluate --model bm25 --data d",
     "d/qrels/test.tsv: no query has a positive; at least"),
    ("q.tsv", "q0 0 p0 1\nq0 0 p0\n", "evaluate --run run.trec --qrels q.tsv",
     "q.tsv:2: found 3 columns; a line must have 4"),
    ("pairs.jsonl", lines({"query": "x", "pos": []}),
     "train --config config.yaml --data.train pairs.jsonl --data.strict true",
     "pairs.jsonl: skipped 1 query without a positive (the first: pairs.jsonl:1); strict is set"),
    *(("pairs.jsonl", lines({"query_id": key, "query": "x", "pos": ["a"]}),
     "data convert pairs.jsonl out --to beir",
       f"id {key!r} contains a tab, a line break or a NUL") for key in ("a\tb", "a\0b")),
    ("d/corpus.jsonl", SOUND["d/corpus.jsonl"].replace('"p1"', '"p0"'),
     "train --config config.yaml",
     "d/corpus.jsonl:2: duplicate passage id 'p0' (first at line 1); ids must be unique. Use "
     "--repair (in training: --data"),
    ("d/qrels/train.tsv", QRELS.replace("p1", "p9"), "train --config config.yaml",
     "d/qrels/train.tsv: 1 judgement of a passage that"),
    ("d/qrels/train.tsv", None, "train --config config.yaml",
     "d: split 'train' not found; available: test"),
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
    ("", "no command given; contaccum --help lists the commands"),
    ("data", "contaccum data: no such command; contaccum --help lists the commands"),
    ("searchh", "contaccum searchh: no such command; did you mean contaccum search?"),
    ("report", "contaccum report: the following arguments are required: RUNS; contaccum report "
               "--help lists"),
    ("train --seed", "contaccum train: argument --seed: expected one argument;"),
    ("train seed", "contaccum train: unexpected argument 'seed';"),
    ("train --resume true", "contaccum train: unexpected argument 'true';"),
    ("train --data x", "--data: contaccum train has no such option"),
    ("search --model m --data d --query q --k 0", "--k is 0, expected `int` >= 1"),
    ("plan --config config.yaml --memory much",
     "--memory is 'much', expected a number and a unit"),
    ("plan --config config.yaml --memory 4GB --methods dpr", "--methods: 'dpr' is unknown"),
    ("data check d --fast", "--fast: contaccum data check has no such option"),
    ("data check nowhere",
     "nowhere: no folder or data set has this name; expected a path, one of arguana"),
    ("data check nul\0", "nul\\u0000: no folder or data set has this name"),
    ("data check d/qrels/test.tsv", "d/qrels/test.tsv: is a file of judgements; give the"),
    ("data convert d pairs.jsonl --to jsonl", "pairs.jsonl: already exists; choose a new path"),
    ("data convert psgs.tsv out --to jsonl",
     "psgs.tsv: is a corpus file; training examples must be DPR JSON"),
    *((f"data convert pairs.jsonl out --to beir --split {split}",
       f"split {split!r} cannot be a file name; use a plain name")
      for split in ("../../up", "nul\0")),
    ("data demo d", "d: already exists; choose a new folder"),
    ("evaluate --model bm25 --data d --split dev",
     "d: split 'dev' not found; available: test, train"),
    ("evaluate --model ./none --data d",
     "./none: no such folder; expected the folder of a model or of a run"),
    ("evaluate --model bm25 --data d --output qa.csv/metrics.json",
     "qa.csv: cannot be created (this is a file, not a folder)"),
    ("evaluate --model x", "evaluate got neither data nor a run file; give --data"),
    ("evaluate --data d", "evaluate got no --model; give --model, or --run and --qrels"),
    ("evaluate --run d/corpus.jsonl --qrels d/qrels/test.tsv",
     "d/corpus.jsonl: is JSON; expected a TREC run with six columns"),
    ("encode --model bm25 --input d --output v",
     "--model bm25 has no vectors; this command needs an encoder"),
    ("encode --model m --input d --output v --text",
     "text needs format parquet, but format is npy"),
    ("evaluate --model m --run run.trec --qrels d/qrels/test.tsv",
     "--model m has no effect on --run; leave it out"),
    ("evaluate --run run.trec --qrels d/qrels/test.tsv --k 5", "--k 5 has no effect on --run"),
    *((f"evaluate --run run.trec --qrels d/qrels/test.tsv {option}",
       f"{option} has no effect on --run")
      for option in ("--factory HNSW32", "--embeddings v", "--query_prefix x")),
    ("search --model bm25 --data d --output out.trec --json", "--json has no effect on --output"),
    ("mine --model bm25 --data d --output out --cross_encoder_batch_size 8",
     "cross_encoder_batch_size has no effect without cross_encoder"),
    ("mine --model bm25 --data d --output out --seed 1",
     "seed has no effect with sampling_strategy top"),
    ("data check hub:d/queries.jsonl@main?query=text&pos=text",
     "hub:d/queries.jsonl@main?query=text&pos=text: d/queries.jsonl is a path and has no revision"),
    ("evaluate --run run.trec --qrels d/qrels/test.tsv --split dev",
     "--split dev has no effect on --run"),
    ("evaluate --model m --questions qa.csv --passages psgs.tsv --metric top5",
     "--metric top5 has no effect on --questions"),
    ("evaluate --model m --data d --metric ndcg@7", "--metric is 'ndcg@7', expected MEASURE@K"),
    ("evaluate --model m --data d --metric ndcg@20 --k 10",
     "--metric is 'ndcg@20', expected MEASURE@K, such as ndcg@10 (MEASURE: ndcg, map, recall, "
     "precision, mrr; K: 1, 3, 5, 10)"),
    ("search --model x --data y", "search needs exactly one of --query and --output, but got none"),
    ("search --model bm25 --data d --output qa.csv/run.trec",
     "qa.csv: cannot be created (this is a file, not a folder)"),
    ("evaluate --model bm25 --data d,nfcorpus --output qa.csv",
     "qa.csv: is a file; several data sets need the name of a folder"),
    ("evaluate --run run.trec --qrels pairs.jsonl", "pairs.jsonl: is JSON; expected a table"),
    ("search --model bm25 --data d/corpus.jsonl --output out.trec",
     "d/corpus.jsonl: has passages and no queries; expected a BEIR folder, or --query"),
    ("evaluate --model bm25 --data ,",
     "data is ',', expected the name or the folder of a data set"),
    ("evaluate --model bm25 --data d --relevance_level 0", "--relevance_level is 0, expected"),
    ("report d", "d: no config.yaml and no metrics.json; this is not the folder of a run"),
    ("report scored --metric f1", "scored/metrics.json: no metric 'f1'; expected one of ndcg@10"),
    ("train --config config.yaml --output_dir qa.csv",
     "qa.csv: cannot be created (this is a file, not a folder)"),
    ("train --config config.yaml --output_dir d",
     "output_dir d: not empty, and without the config.yaml of a run."),
    ("train --config config.yaml --output_dir d --resume",
     "output_dir d: not empty, and without the config.yaml of a run."),
    ("train --model.name tiny --data.train d", "output_dir is not set, expected a path"),
    ("train --model.name tiny --output_dir out",
     "data.train is not set; give a path or the name of a data set"),
    ("train --config config.yaml --data.hard_negatives 9",
     "query 'q0': the training set has only 2 possible negatives"),
]  # fmt: skip

BM25 = "--model bm25 --data d"
# command -> the error, before the work begins
OUTPUTS: list[tuple[str, str]] = [
    # inputs of the same call
    *((f"search {BM25} --output {name}", f"{name}: exists and is not a TREC run")
      for name in ("d/corpus.jsonl", "d/qrels/test.tsv", "link.jsonl", MODEL_FILE)),
    (f"evaluate {BM25} --output d/qrels/test.tsv", "d/qrels/test.tsv: exists and is not a file"),
    (f"{TO_EVALUATE_A_RUN} --output run.trec", "run.trec: exists and is not a file of metrics"),
    ("evaluate --model m --questions qa.csv --passages psgs.tsv --output psgs.tsv",
     "psgs.tsv: exists and is not a file of metrics"),
    # other files
    (f"search {BM25} --output pairs.jsonl", "pairs.jsonl: exists and is not a TREC run"),
    (f"evaluate {BM25} --output run.trec", "run.trec: exists and is not a file of metrics"),
    (f"{TO_EVALUATE_A_RUN} --output pairs.jsonl", "pairs.jsonl: exists and is not a file of met"),
    ("report r --html pairs.jsonl", "pairs.jsonl: exists and is not a report"),
    ("plan --config config.yaml --output pairs.jsonl", "pairs.jsonl: exists and is not a plan"),
    ("mine --model bm25 --data pairs.jsonl --output pairs.jsonl",
     "pairs.jsonl: exists already; choose a new path"),
    ("data convert d d --to beir --split test", "d: already exists; choose a new path"),
    (f"search {BM25} --output m", "m: is a folder; expected the name of a file"),
    (f"search {BM25} --output pipe", "pipe: is a device or a pipe; expected the name of a file"),
]  # fmt: skip

# commands with an address instead of a path
ADDRESSES = [
    "train --config config.yaml --data.train s3://b/x",
    "train --config config.yaml --output_dir s3://b/x",
    "train --data.train d --output_dir out --model.name file:///x",
    "evaluate --model https://h/x --data d",
    "evaluate --model bm25 --data s3://b/x",
    "evaluate --run s3://b/x --qrels d/qrels/test.tsv",
    "search --model bm25 --data d --output s3://b/x",
    "mine --model bm25 --data s3://b/x --output out",
    "push s3://b/x somebody/name --dry_run",
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
    assert "no result for 1 of 3 judged queries" in capsys.readouterr().err
    pickle.loads(PICKLE)
    assert Path("canary").is_dir()


# outputs


def test_an_output_next_to_the_inputs_is_written_again():
    """Negative control: an older file of the same kind is replaced."""
    call = f"search {BM25} --split test --output d/run.trec"
    output = Path("d/run.trec")
    assert main(call.split()) == 0
    written = output.read_bytes()
    output.write_text("q0\t0\tp0\t1\t9.5\tolder\n")
    assert main(call.split()) == 0
    assert output.read_bytes() == written
    for again in (
        f"search {BM25} --split test --output run.trec.gz",
        f"evaluate {BM25} --output metrics.json",
    ):
        assert [main(again.split()), main(again.split())] == [0, 0]
    Path("metrics.json").write_text(json.dumps(json.loads(Path("metrics.json").read_text())))
    assert main(f"evaluate {BM25} --output metrics.json".split()) == 0


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


@pytest.mark.parametrize("text", ["na\udcffve", "half \ud83d"])
def test_text_that_is_not_utf8_is_refused_in_one_sentence(text):
    """In a passage, a query or a prefix. Control: text of every plane is encoded."""
    sound = "naïve 🦉 \u2028"
    folder = family_folder("bert", Path("bert"))
    model = DualEncoder.load(folder, **SIZE)
    for side, encode in (("query", model.encode_queries), ("passage", model.encode_passages)):
        with pytest.raises(InputError, match=rf"^{side} 1: .*; the text must be valid UTF-8$"):
            encode(["sound", text])
        assert encode([sound]).shape == (1, model.dim)
    with pytest.raises(InputError, match=r"bert: query_prefix: .*; the text must be valid UTF-8$"):
        DualEncoder.load(folder, query_prefix=text)


# all errors of a set at once


def passage(key: str, text: str = "x") -> dict:
    return {"_id": key, "title": "T", "text": text}


# what is added to the files of a BEIR folder -> what ``data check`` says
ADDED: list[tuple[dict[str, str], list[str]]] = [
    ({"corpus.jsonl": lines(passage("p0", "y"), passage("p9", " ")) + "{\n",
      "queries.jsonl": lines({"_id": 1.5}, {"_id": "q0", "text": "x"})},
     ["corpus.jsonl:5: passage 'p9' has an empty text; every passage needs a text",
      "corpus.jsonl:6: not usable JSON",
      "corpus.jsonl:4: duplicate passage id 'p0' (first at line 1); ids must be unique",
      "queries.jsonl:4: Expected `int | str`, got `float` - at `$._id`",
      "queries.jsonl:5: duplicate query id 'q0' (first at line 1); ids must be unique"]),
    ({"qrels/train.tsv": "q0\tp0\t2\nq0\tp1\tgood\nq0\tp1\n"},
     ["train.tsv:5: query 'q0' and passage 'p0' have grade 2 here and 1 earlier",
      "train.tsv:6: the grade is 'good'; it must be an integer",
      "train.tsv:7: found 2 columns; a line must have 3: query"]),
    ({"qrels/train.tsv": "q9\tp0\t1\nq8\tp9\t1\nq9\tp9\t1\n"},
     ["train.tsv: unknown query id 'q9'; queries.jsonl has no such id",
      "train.tsv: unknown query id 'q8'; queries.jsonl has no such id"]),
]  # fmt: skip
PAIRS = [{"query": f"query {n}", "pos": ["good"], "neg": ["bad"]} for n in range(3)]
NO_TEXT = CONTEXT | {"title": "", "text": " "}
RECORDS = [DPR, DPR | {"question": " "}, 5, DPR | {"positive_ctxs": [NO_TEXT]}]
# file, its content -> what ``data check`` says
SPOILT: list[tuple[str, str, list[str]]] = [
    ("train.jsonl", lines(PAIRS[0], PAIRS[1] | {"pos": 5}, PAIRS[0], PAIRS[2] | {"pos": [""]}),
     [":2: Expected `str | array`, got `int` - at `$.pos`", ":4: passage"]),
    ("train.json", json.dumps(RECORDS, indent=1),
     ["(record 2): the query has an empty text",
      "(record 3): Expected `object`, got `int`", "(record 4): passage '1'"]),
    ("questions.csv", "who?\t['a']\nwhen?\t[]\nwhere?\n",
     [":2: the answers are '[]'", ":3: found ['where?']"]),
    ("corpus.tsv", "1\ttext\tT\n2\tx\n\tx\tT\n", [":2: found 2 columns", ":3: the id is empty"]),
    ("queries.tsv", "1\ttext\n2\t \n1\ty\n",
     [":2: the text of query '2' is empty", ":3: duplicate query id '1'"]),
]  # fmt: skip


@pytest.mark.parametrize(("added", "sentences"), ADDED)
def test_check_lists_all_errors_of_a_beir_folder(added, sentences, capsys):
    for name, content in added.items():
        put(f"d/{name}", SOUND[f"d/{name}"] + content)
    assert main(["data", "check", "d", "--split", "train"]) == 2
    said = capsys.readouterr().err
    assert f"d: {len(sentences)} errors" in said
    for sentence in sentences:
        assert sentence in said


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "content", "sentences"), SPOILT)
def test_check_lists_all_errors_of_a_file(name, content, sentences):
    put(name, content)
    with pytest.raises(InputError) as caught:
        check(Path(name))
    said = str(caught.value)
    assert said.startswith(f"{name}: {len(sentences)} errors\n")
    for sentence in sentences:
        assert sentence in said


def test_repair_accepts_what_it_repairs_and_nothing_else():
    repaired = SOUND["d/corpus.jsonl"] + lines(passage("p0", "again"), passage("p9", ""))
    put("d/corpus.jsonl", repaired)
    with pytest.raises(InputError, match="2 errors"):
        check("d", "train")
    with pytest.warns(UserWarning, match=r"1 passage with"):
        assert check("d", "train", DataPolicy(repair=True))["passages"] == 4
    put("d/corpus.jsonl", repaired + "{\n")
    with pytest.raises(InputError, match=r"corpus\.jsonl:6: not usable JSON"):
        check("d", "train", DataPolicy(repair=True))


# encoders


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> Path:
    """A plain encoder, a saved one, an adapter, and a model of sentence-transformers."""
    root = tmp_path_factory.mktemp("models")
    family_folder("bert", root / "plain")
    two = {**SIZE, "tie_towers": False}
    DualEncoder.load(root / "plain", **two).save(root / "saved")
    DualEncoder.load(root / "plain", adapters=Adapters(AdapterConfig(rank=2)), **two).save(
        root / "adapter"
    )
    shutil.copytree(root / "saved" / "query_encoder", root / "st")
    return root


def values(**changes):
    """Change values of a JSON file."""
    return lambda content: json.dumps({**json.loads(content), **changes}).encode()


def tensors(change):
    """Change the tensors of a safetensors file."""
    return lambda content: save(change(load(content)), {"format": "pt"})


def vocabulary(content: bytes) -> bytes:
    """Add 10,000 to the ids of all words after the five special tokens."""
    tokenizer = json.loads(content)
    words = tokenizer["model"]["vocab"]
    for word, number in words.items():
        words[word] = number + 10_000 * (number > 4)
    return json.dumps(tokenizer).encode()


def flip(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 0x10]) + content[-4:]


NO_LAYER = tensors(lambda all: {name: all[name] for name in all if "layer.0." not in name})
NARROW = tensors(lambda all: all | {"embeddings.word_embeddings.weight": torch.zeros(5, 5)})
ADAPTER = "adapter/query_encoder"
CHANGED = "has changed since the model was saved"
# file of a model, how it is damaged -> part of the sentence. It would give wrong vectors
DAMAGES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("plain/config.json", lambda content: content[: len(content) // 2], "config.json"),
    ("plain/config.json", lambda content: b"[3]", "config.json"),
    ("saved/contaccum.json", lambda content: b"<html>404</html>", "contaccum.json"),
    ("st/modules.json", lambda content: b'[{"type": 1, "path": ""}]', "modules.json"),
    # settings
    ("saved/contaccum.json", values(format_version=99), "has format_version 99"),
    ("saved/contaccum.json", values(colour="red"), "unknown setting (colour)"),
    ("saved/contaccum.json", values(pooling=None), "pooling is None; expected one of"),
    ("saved/contaccum.json", values(query_prefix=7),
     "Expected `str`, got `int` - at `$.query_prefix`"),
    ("st/config_sentence_transformers.json", values(prompts={"query": 5}), "prompts"),
    # weights that do not match the configuration, or have changed
    ("plain/model.safetensors", NO_LAYER, "16 tensors are missing (encoder.layer.0"),
    ("plain/model.safetensors", NARROW,
     "1 tensors have the wrong shape (embeddings.word_embeddings.weight)"),
    ("plain/config.json", values(num_hidden_layers=1),
     "belong to layers that the configuration does not have"),
    ("saved/passage_encoder/model.safetensors", flip, CHANGED),
    (f"{ADAPTER}/adapter_model.safetensors", NO_LAYER, "tensors are missing"),
    (f"{ADAPTER}/adapter_model.safetensors", flip, CHANGED),
    (f"{ADAPTER}/adapter_config.json", values(peft_type="IA3"), "peft_type IA3; expected"),
    # tokenizers of another encoder
    ("plain/tokenizer.json", vocabulary, "but the encoder has"),
    ("plain/tokenizer_config.json", values(pad_token=None), "neither a padding token nor"),
    ("plain/tokenizer_config.json", values(pad_token="[PAX]"), "('[PAX]'), but the encoder"),
    # the error of transformers is enough
    ("plain/config.json", values(model_type="no-such-model"),
     "no encoder could be loaded from this folder"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "damage", "sentence"), DAMAGES)
def test_a_damaged_encoder_is_refused_in_one_sentence(file, damage, sentence, encoders):
    name, _, inner = file.partition("/")
    folder = shutil.copytree(encoders / name, name)
    content = Path(folder, inner).read_bytes()
    Path(folder, inner).unlink()  # the towers share files
    Path(folder, inner).write_bytes(damage(content))
    with pytest.raises(InputError) as error:
        DualEncoder.load(folder, **(SIZE if name == "plain" else {})).encode_queries(["fox"])
    assert sentence in str(error.value)
    assert folder in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["plain", "saved", "adapter", "st"])
def test_undamaged_encoders_load(name, encoders):
    """Negative control."""
    assert np.isfinite(DualEncoder.load(encoders / name, **SIZE).encode_queries(["fox"])).all()


def test_a_damaged_passage_encoder_of_another_model_is_refused(encoders):
    folder = Path(shutil.copytree(encoders / "saved", "saved"))
    assert DualEncoder.load(encoders / "plain", passage_name=folder, **SIZE).dim == 32  # control
    file = folder / "passage_encoder" / "model.safetensors"
    put(str(file), flip(file.read_bytes()))
    with pytest.raises(InputError, match=rf"saved/passage_encoder/.*{CHANGED}"):
        DualEncoder.load(encoders / "plain", passage_name=folder, **SIZE)


def test_pickled_weights_of_an_adapter_are_never_loaded(encoders):
    folder = shutil.copytree(encoders / "adapter", "adapter")
    Path(ADAPTER, "adapter_model.safetensors").unlink()
    Path(ADAPTER, "adapter_model.bin").write_bytes(PICKLE)
    with pytest.raises(InputError, match=r"pickled adapter weights \(.bin\) are never loaded"):
        DualEncoder.load(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_not_run(file, encoders, capsys):
    folder = Path(shutil.copytree(encoders / "plain", "evil"))
    (folder / "evil.py").write_text("import os\nos.mkdir('canary')\nclass Evil: pass\n")
    names = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}
    names["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]
    about = {"auto_map": names, "model_type": "evil", "tokenizer_class": "Evil"}
    (folder / file).write_bytes(values(**about)((folder / file).read_bytes()))
    main(["evaluate", "--model", "evil", "--data", "d"])
    assert "Traceback" not in capsys.readouterr().err
    assert not Path("canary").exists()


# embeddings and indexes whose manifest has the hashes of its files


def write_shards(folder: str, vectors: bytes) -> None:
    path = Path(folder)
    path.mkdir()
    job = EncodingJob("passage", "e", "s", 1, 1, "float32")
    write_shard(path, 0, job, Shard(["p"], np.zeros((1, 2), dtype=np.float32)))
    write_manifest(path, job)
    put(f"{folder}/00000.npy", vectors)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["shards"][0]["sha256"]["00000.npy"] = hashlib.sha256(vectors).hexdigest()
    write_json(path / "manifest.json", manifest)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def test_pickled_vectors_are_never_loaded():
    write_shards("sound", npy(np.zeros((1, 2), dtype=np.float32)))  # negative control
    assert ShardFolder(Path("sound"))[0].ids == ["p"]
    write_shards("evil", npy(np.array([[Bomb(), Bomb()]], dtype=object)))
    with pytest.raises(ValueError, match="Python objects in dtype"):
        ShardFolder(Path("evil"))[0]
    assert not Path("canary").exists()


@pytest.mark.parametrize("text", ["[" * 200_000, "null", '{"shards": 1}'])
def test_a_hostile_manifest_is_refused(text):
    for name in ("shards", "index", "run/checkpoints/step-00000001"):
        Path(name).mkdir(parents=True)
        put(f"{name}/manifest.json", text)
    with pytest.raises(InputError, match=r"manifest\.json"):
        ShardFolder(Path("shards"))
    with pytest.raises(InputError, match=r"manifest\.json"):
        Index.load(Path("index"))
    with pytest.raises(InputError, match="checkpoints: all checkpoints are damaged"):
        newest_checkpoint(Path("run"))


# names that are no paths, and secrets


@pytest.mark.parametrize("form", ["beir", "dpr", "jsonl", "tevatron"])
@pytest.mark.parametrize("key", ["../../canary", "x" * 5000])
def test_ids_are_never_paths(form, key, tmp_path):
    put("source.jsonl", lines({"query_id": key, "query": "x", "pos": ["a"], "pos_id": [key]}))
    Path("deep").mkdir()
    before = contents()
    convert(Path("source.jsonl"), Path("deep/out"), form)
    written = [name for name in contents() if not name.startswith("deep/out")]
    assert written == list(before)
    assert not (tmp_path.parent / "canary").exists()


@pytest.fixture
def scifact(tmp_path, monkeypatch):
    """Copy of mteb/SciFact's repository in the Hub's cache, to be filled."""
    for constants in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    repository, commit = tasks()["scifact"].repository
    folder = tmp_path / "hub" / f"datasets--{repository.replace('/', '--')}" / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("split", ["test", "../canary", "a/canary", "nul\0"])
def test_the_splits_of_a_repository_are_never_paths(split, tmp_path, scifact):
    files = {name: {"_id": name[0], "text": "x"} for name in ("corpus", "queries")}
    files["default"] = {"query-id": "q", "corpus-id": "c"}
    configurations = []
    for name, row in files.items():
        (scifact / f"{name}.jsonl").write_text(lines(row))
        data_files = [{"split": split, "path": f"{name}.jsonl"}]
        configurations.append({"config_name": name, "data_files": data_files})
    # JSON is YAML
    (scifact / "README.md").write_text(f"---\n{json.dumps({'configs': configurations})}\n---\n")
    if split == "test":  # negative control
        assert (fetch("mteb/SciFact") / "qrels" / "test.tsv").read_text().endswith("q\tc\t1\n")
    else:
        with pytest.raises(InputError, match=r"split"):
            fetch("mteb/SciFact")
    assert not list(tmp_path.rglob("*canary*"))


def test_a_link_with_the_name_of_a_temporary_file_is_not_followed():
    """In a shared folder, such as /tmp, anybody can create one before the output is written."""
    put("ours", "kept")
    _temporary_path(Path("output").absolute(), "part").symlink_to(Path("ours").absolute())
    write_text(Path("output").absolute(), "new")
    assert Path("ours").read_text() == "kept"
    assert Path("output").read_text() == "new"
    assert not Path("output").is_symlink()


@pytest.mark.filterwarnings("default:.* also occur in the training data")
def test_no_token_is_written_anywhere(tmp_path, capsys, monkeypatch):
    secret = "hf_AnAuthTokenThatNobodyMaySee"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, secret)
    tracked = ["--run.trackers", "tensorboard"] if find_spec("tensorboard") else []
    assert main(["train", "--config", "config.yaml", *tracked]) == 0
    assert (
        main(["evaluate", "--model", "out/model", "--data", "d", "--output", "out/metrics.json"])
        == 0
    )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert secret not in "".join(capsys.readouterr())
