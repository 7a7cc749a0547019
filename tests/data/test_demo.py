"""``contaccum data demo``: a data set from the docstrings of installed packages."""

import ast
import json
from importlib.metadata import version
from pathlib import Path

import pytest

from contaccum.data.demo import docstrings, pair, write_demo
from contaccum.errors import InputError

CHECKSUM = "3fbc70b18915757964fe5c865e621654d3b0e2de924029d315906e72e57daacf"
"""Printed for the versions below, with the CPU and the CUDA build of torch and with wheels for
Python 3.11, 3.12 and 3.13."""
VERSIONS = {"numpy": "2.4.6", "scipy": "1.17.1", "torch": "2.13.0"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The data set and what the command prints."""
    folder = tmp_path_factory.mktemp("api") / "docs"
    return folder, write_demo(folder)


def read(folder: Path) -> tuple[dict[str, dict], dict[str, dict], dict[str, list[tuple[str, str]]]]:
    """Return queries and passages by id, and the judged pairs of each split."""
    queries, corpus = (
        {
            row["_id"]: row
            for row in map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        }
        for name in ("queries", "corpus")
    )
    judged = {
        split: [
            tuple(line.split("\t")[:2])
            for line in (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
        ]
        for split in ("train", "dev", "test")
    }
    return queries, corpus, judged


def test_the_splits_share_no_module_and_hold_every_pair(made):
    queries, corpus, judged = read(made[0])
    assert 4500 < len(queries) == len(corpus) == sum(map(len, judged.values())) < 5500
    modules = {
        split: {queries[query]["metadata"]["module"] for query, _ in pairs}
        for split, pairs in judged.items()
    }
    assert (
        not modules["train"] & modules["dev"]
        | modules["train"] & modules["test"]
        | modules["dev"] & modules["test"]
    )
    assert len(judged["dev"]) > 300
    assert len(judged["test"]) > 500
    # modules of the same name, such as torch.linalg and numpy.linalg._linalg, are in the same split
    # too
    names = {
        split: {name.rpartition(".")[2].strip("_") for name in found}
        for split, found in modules.items()
    }
    assert not names["train"] & (names["dev"] | names["test"]) | names["dev"] & names["test"]


def test_no_passage_contains_its_query_and_no_text_occurs_twice(made):
    queries, corpus, judged = read(made[0])
    for query, passage in (found for pairs in judged.values() for found in pairs):
        assert queries[query]["text"].lower() not in corpus[passage]["text"].lower()
    for rows in (queries, corpus):
        assert len({row["text"] for row in rows.values()}) == len(rows)


def test_the_checksum_of_the_pinned_versions(made):
    if {name: version(name).partition("+")[0] for name in VERSIONS} != VERSIONS:
        pytest.skip("other versions are installed")
    assert made[1].endswith(f"sha256 {CHECKSUM}")


SOURCE = '''
def documented(a):
    """Compute something useful quickly, e.g. the square of :func:`~numpy.abs`. It is fast.

    Parameters follow here, with twenty words or more so that the passage is long enough to be kept
    in the set of pairs.
    """
    def inner():
        """Docstring of an inner function."""

def _private():
    """Docstring of a private function."""

class Documented:
    """Docstring of a class."""
    def method(self):
        """Docstring of a method."""

if True:
    add_docstr(other, r"""
other(input) -> Tensor

Return \\text{{other}} of input.

Args:
    {input}
""".format(**common))
'''


def test_docstrings_are_read_from_the_source():
    found = list(docstrings(ast.parse(SOURCE)))
    assert [text.splitlines()[0] for text in found] == [
        "Compute something useful quickly, e.g. the square of :func:`~numpy.abs`. It is fast.",
        "Docstring of a class.", "Docstring of a method.", "other(input) -> Tensor",
    ]  # fmt: skip
    assert "Return \\text{other} of input." in found[-1]
    assert "{input}" not in found[-1]
    query, passage = pair(found[0])
    assert query == "Compute something useful quickly, e.g. the square of numpy.abs."
    assert passage.startswith("It is fast. Parameters follow here")
    # a summary that the rest repeats is no query
    assert (
        pair(found[0] + "\ncompute something useful quickly, e.g. the square of numpy.abs") is None
    )


def test_an_existing_folder_is_left_alone(tmp_path):
    with pytest.raises(InputError, match="already exists"):
        write_demo(tmp_path)
    assert not list(tmp_path.iterdir())
