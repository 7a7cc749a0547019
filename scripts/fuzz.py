"""Feed damaged files to every reader, and look for results other than records or an InputError.

    python scripts/fuzz.py --minutes 10 --seed 0

Each finding is printed with the smallest file that shows it. Needs hypothesis (the extra `dev`).
"""

import argparse
import gzip
import io
import json
import os
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from contaccum.catalog.download import unpack
from contaccum.config import TrainConfig, load
from contaccum.errors import InputError
from contaccum.formats.dpr import read_questions
from contaccum.formats.readers import kind_of_data, numbered_corpus, numbered_examples, numbered_queries, read_qrels
from contaccum.retrieval.runs import read_run
from contaccum.retrieval.shards import ShardFolder
from contaccum.runtime.files import read_json
from contaccum.training.run_folder import newest_checkpoint

CONTEXT = {"title": "T", "text": "t", "passage_id": 7}
EXAMPLE = {"query": "q", "pos": ["a"], "neg": ["b"], "pos_id": ["1"]}
DPR = {"question": "q", "answers": ["a"], "positive_ctxs": [CONTEXT], "hard_negative_ctxs": [CONTEXT]}
TEVATRON = {"query_id": 1, "query": "q", "positive_passages": [{"docid": "1", "title": "T", "text": "t"}]}
JOB = {"kind": "passage", "encoder": "e", "source": "s", "rows": 1, "shard_size": 1, "dtype": "float32"}
ENTRY = {"vectors": "00000.npy", "ids": "00000.ids.json", "rows": 1, "dimension": 2,
         "bytes": {"vectors": 1, "ids": 1}, "sha256": {"vectors": "0", "ids": "0"}}  # fmt: skip
SHARDS = {"format": "contaccum-embeddings", "version": 1, "job": JOB, "dimension": 2, "shards": [ENTRY]}


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("nq/corpus.jsonl", lines({"_id": 1, "text": "t"}))
        bundle.writestr("nq/qrels/test.tsv", "q\tp\t1\n")
    return buffer.getvalue()


def all_of(read: Callable) -> Callable[[Path], object]:
    return lambda path: list(read(path))


def tolerant(read: Callable) -> Callable[[Path], object]:
    """Read with bad records allowed; a file that is valid without them reads the same."""

    def attempt(path: Path) -> None:
        errors: list[InputError] = []
        try:
            sound = list(read(path))
        except InputError:
            list(read(path, on_error=errors.append))
            assert errors, "refused, but read without an error"
            return
        assert list(read(path, on_error=errors.append)) == sound
        assert not errors

    return attempt


def shards(path: Path) -> None:
    path.rename(path.with_name("manifest.json"))
    for shard in ShardFolder(path.parent):
        assert len(shard.ids) == len(shard.vectors)


def checkpoint(path: Path) -> None:
    folder = path.parent / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    path.rename(folder / "manifest.json")
    newest_checkpoint(path.parent)


TARGETS: dict[str, tuple[Callable[[Path], object], list[bytes]]] = {
    "corpus": (
        all_of(numbered_corpus),
        [lines({"_id": "1", "title": "T\u2028", "text": "é"}, {"_id": 2, "text": "t"}), b'id\ttext\ttitle\n1\t"a ""b"""\tT\n'],
    ),
    "queries": (all_of(numbered_queries), [lines({"_id": "1", "text": "é"}, {"_id": 2, "text": "\u2029"})]),
    "qrels": (all_of(read_qrels), [b"query-id\tcorpus-id\tscore\nq\tp\t1\nr\tp\t-1\n", b"q 0 p 1\nr 0 p 0\n"]),
    "questions": (all_of(read_questions), [b"who?\t['a', \"b\"]\nwhen?\t\"['\"\"c\"\"']\"\n"]),
    "examples": (
        all_of(numbered_examples),
        [lines(EXAMPLE, EXAMPLE), lines(DPR, DPR), json.dumps([DPR, DPR], indent=1).encode(), lines(TEVATRON, TEVATRON)],
    ),
    "corpus, with bad records": (
        tolerant(numbered_corpus),
        [lines({"_id": "1", "title": "T", "text": "é"}, {"_id": 2, "text": "t"}), b'id\ttext\ttitle\n1\t"a ""b"""\tT\n'],
    ),
    "qrels, with bad records": (
        tolerant(read_qrels),
        [b"query-id\tcorpus-id\tscore\nq\tp\t1\nr\tp\t-1\n", b"q 0 p 1\nr 0 p 0\n"],
    ),
    "questions, with bad records": (tolerant(read_questions), [b"who?\t['a', \"b\"]\nwhen?\t\"['\"\"c\"\"']\"\n"]),
    "examples, with bad records": (
        tolerant(numbered_examples),
        [lines(EXAMPLE, EXAMPLE), lines(DPR, DPR), json.dumps([DPR, DPR], indent=1).encode(), lines(TEVATRON, TEVATRON)],
    ),
    "any file": (kind_of_data, [lines(EXAMPLE), lines(DPR), b"1\ttext\ttitle\n", b"q\t['a']\n"]),
    "run": (all_of(read_run), [b"q Q0 p 1 2.5 x\nr Q0 p 1 -1e-3 x\n"]),
    "config": (
        lambda path: load([TrainConfig], [str(path)]),
        [b"seed: 1\nbank: {size: 4}\ndata:\n  train: &a x\n  dev: *a\n"],
    ),
    "json": (read_json, [lines(SHARDS), lines([1.5, "\U0001f600", None])]),
    "shards": (shards, [lines(SHARDS)]),
    "checkpoint": (checkpoint, [lines({"state.json": {"size": 2, "sha256": "0"}})]),
    "archive": (lambda path: unpack(path, "nq", path.with_name("out"), 1 << 20), [archive()]),
}  # fmt: skip
"""Readers by name, each with sound files to start from."""

PIECES = [
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b"\t", b'"', b"'", b"\\", b"\\u0000", b"\\ud800", b"\\udc00\\ud800",
    b"\xe2\x80\xa8", b"\xc2\x85", b"\xed\xa0\x80", b"[", b"]", b"{", b"}", b",", b":", b"null", b"true", b"NaN", b"-1",
    b"1e999", b"0.5", b"9" * 5000, b"[" * 3000, b"{\"a\":" * 3000, b"(" * 300, b"__import__('os')", b"{}", b"[]", b'""', b" ",
    b"*a", b"&a ", b"!!python/name:os.system ", b"..", b"/", b"\xf0\x9f\x98\x80", b"query-id\tcorpus-id\tscore\n",
    b"\x1f\x8b\x08\0",
]  # fmt: skip


def spoilt(sound: list[bytes]) -> st.SearchStrategy[bytes]:
    """Edit a valid file (insert, delete or repeat parts), sometimes gzip it and edit it again."""
    place = st.integers(0, 4000)
    piece = st.sampled_from(PIECES) | st.binary(max_size=6) | st.text(max_size=4).map(lambda text: text.encode("utf-8"))
    edit = st.tuples(st.sampled_from(["put", "take", "double", "replace"]), place, st.integers(0, 30), piece)
    edits = st.lists(edit, max_size=6)
    plain = st.builds(apply, st.sampled_from(sound), edits)
    zipped = st.builds(apply, plain.map(lambda content: gzip.compress(content, mtime=0)), st.lists(edit, max_size=2))
    return plain | plain | zipped | st.binary(max_size=60)


def apply(content: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    for kind, place, length, piece in edits:
        start = place % (len(content) + 1)
        span = content[start : start + length]
        middle = {"put": piece + span, "take": b"", "double": span * 2, "replace": piece}[kind]
        content = content[:start] + middle + content[start + length :]
    return content


def attempt(name: str, content: bytes) -> bool:
    """Return whether a reader accepts a file; raise every error that is not a one-sentence InputError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        try:
            TARGETS[name][0](path)
        except InputError as error:
            sentence = str(error)
            if "\n" in sentence or not sentence.startswith(folder):
                raise AssertionError(f"expected one line that starts with the file's name: {sentence}") from error
            return False
        return True


def hunt(name: str, number: int, examples: int, counts: dict[str, int]) -> None:
    """Run one round against one reader; raise the minimal example that hypothesis found."""

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink], print_blob=False,
    )  # fmt: skip
    @given(spoilt(TARGETS[name][1]))
    def run(content: bytes) -> None:
        counts["tried"] += 1
        counts["taken"] += attempt(name, content)

    run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="the first round's; each round takes the next")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    counts, findings, number = {"tried": 0, "taken": 0}, 0, options.seed
    stderr, sys.stderr = sys.stderr, open(os.devnull, "w")  # noqa: SIM115 - the checkpoint reader says what it passes over
    try:
        while time.monotonic() < end:
            for name in TARGETS:
                if time.monotonic() >= end:
                    break
                try:
                    hunt(name, number, 300, counts)
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    findings += 1
                    notes = "\n".join(getattr(error, "__notes__", []))
                    print(
                        f"--- {name}, seed {number}\n{notes}\n{''.join(traceback.format_exception(error)[-6:])}",
                        flush=True,
                    )
            number += 1
    finally:
        sys.stderr = stderr
        print(f"{counts['tried']} files tried, {counts['taken']} of them taken as sound; {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
