"""Tables against the lists they were written from, and every refused data set."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import load_examples, open_corpus, open_retrieval_set
from processes import python
from tiny_data import beir, context, dpr, lines, write, write_gzip

from contaccum.data import corpus as corpus_module
from contaccum.data.corpus import find_rows
from contaccum.data.dataset import open_dataset
from contaccum.data.tables import Ragged
from contaccum.errors import InputError
from contaccum.formats.records import content_id
from contaccum.runtime.cache import cached_folder
from contaccum.runtime.files import cache_folder


def refusal(call, *arguments, **options) -> str:
    with pytest.raises(InputError) as caught:
        call(*arguments, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    leftovers = [
        path.name for path in cache_folder().rglob("*") if path.name.endswith((".part", ".old"))
    ]
    assert not leftovers
    return sentence


def passage(key: str, text: str = "x", title: str = "") -> dict:
    return {"_id": key, "title": title, "text": text}


def test_a_corpus_opens_from_a_folder_a_file_and_a_tsv(tmp_path):
    expected = [("p0", "title 0", "text 0"), ("p1", "title 1", "text 1")]
    folder = beir(tmp_path / "b", "q0\tp0\t1\n", passages=2)
    rows = "".join(f"{key}\t{text}\t{title}\n" for key, title, text in expected)
    for path in (
        folder,
        folder / "corpus.jsonl",
        write_gzip(tmp_path / "c.tsv.gz", "id\ttext\ttitle\n" + rows),
    ):
        corpus = open_corpus(path)
        assert list(zip(corpus["id"], corpus["title"], corpus["text"], strict=True)) == expected


def test_a_corpus_is_cached_until_its_file_changes(tmp_path, monkeypatch):
    path = write(tmp_path / "c.jsonl", lines(passage("a")))
    open_corpus(path)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "numbered_corpus", lambda *_: pytest.fail("read again"))
        assert open_corpus(path)["id"][:] == ["a"]
    write(path, lines(passage("a"), passage("b")))
    assert open_corpus(path)["id"][:] == ["a", "b"]


def test_a_corpus_is_memory_mapped(tmp_path):
    corpus = open_corpus(
        write(tmp_path / "c.jsonl", lines(*(passage(str(n), "word " * 50) for n in range(20_000))))
    )
    assert len(corpus.cache_files) == 1
    assert corpus[19_999]["id"] == "19999"


def test_an_empty_title_is_accepted(tmp_path):
    assert open_corpus(write(tmp_path / "c.jsonl", lines(passage("a"))))["title"][:] == [""]


def test_repair_keeps_the_last_duplicate_and_empty_texts(tmp_path):
    path = write(
        tmp_path / "c.jsonl",
        lines(passage("a"), passage("b", ""), passage("a", "y"), passage("a", "z")),
    )
    with pytest.warns(
        UserWarning, match=": (skipped 2 passages with|1 passage without text)"
    ) as caught:
        corpus = open_corpus(path, repair=True)
    assert len(caught) == 2
    assert list(zip(corpus["id"], corpus["text"], strict=True)) == [("b", ""), ("a", "z")]


def test_find_rows_searches_all_batches(tmp_path):
    corpus = open_corpus(
        write(tmp_path / "c.jsonl", lines(*(passage(f"k{n}") for n in range(11_000))))
    )
    assert find_rows(corpus, ["k10999", "k0", "missing", "k5000"]) == {
        "k0": 0,
        "k5000": 5000,
        "k10999": 10999,
    }


def test_a_retrieval_set_has_only_judged_queries(tmp_path):
    found = open_retrieval_set(beir(tmp_path, "q2\tp0\t2\nq0\tp1\t1\nq2\tp3\t0\n", "test"))
    assert found.queries == {"q2": "query 2", "q0": "query 0"}
    assert found.qrels == {"q2": {"p0": 2, "p3": 0}, "q0": {"p1": 1}}
    assert len(found.corpus) == 6


def test_a_query_without_a_positive_is_counted_or_refused(tmp_path):
    folder = beir(tmp_path, "q0\tp0\t1\nq1\tp1\t0\nq2\tp1\t-1\n", "test")
    with pytest.warns(UserWarning, match=r"test\.tsv: skipped 2 queries"):
        assert open_retrieval_set(folder).qrels == {"q0": {"p0": 1}}
    assert "'q1'" in refusal(open_retrieval_set, folder, strict=True)
    assert "no query has a positive" in refusal(
        open_retrieval_set, beir(tmp_path / "none", "q0\tp0\t0\n", "test")
    )


def test_examples_become_tables_with_each_passage_once(tmp_path):
    records = [
        dpr("one?", [context(1), context(2)], [context(3)], [context(4)]),
        dpr("two?", [context(3)], [context(1), context(1)]),
    ]
    table = load_examples(write(tmp_path / "t.json", json.dumps(records)))
    assert table.passages["id"][:] == ["1", "2", "3", "4"]
    assert [table.positives.row(n).tolist() for n in range(2)] == [[0, 1], [2]]
    assert [table.negatives.row(n).tolist() for n in range(2)] == [[2], [0]]
    assert [table.others.row(n).tolist() for n in range(2)] == [[3], []]


def test_the_lists_of_a_query_share_no_passage(tmp_path):
    record = dpr(
        "one?", [context(1)], [context(2), context(1)], [context(3), context(1), context(2)]
    )
    table = load_examples(write(tmp_path / "t.json", json.dumps([record])))
    lists = [table.positives, table.negatives, table.others]
    assert [ragged.row(0).tolist() for ragged in lists] == [[0], [1], [2]]


def test_a_hard_negative_with_two_ids_is_one(tmp_path):
    """It took two places, and no random passage filled the second."""
    folder = beir(tmp_path, "q0\tp0\t1\nq0\tp1\t0\nq0\tp2\t0\n", passages=4)
    corpus = (folder / "corpus.jsonl").read_text().splitlines()
    one, two = (json.loads(line) for line in corpus[1:3])
    two |= {"title": one["title"], "text": one["text"] + " "}
    corpus[2] = json.dumps(two)
    (folder / "corpus.jsonl").write_text("\n".join(corpus) + "\n")
    examples = open_dataset(folder, "train").examples()
    assert examples.negatives.row(0).tolist() == [1]


def test_ragged_returns_the_packed_lists():
    packed = Ragged.grouped(np.array([2, 0, 0, 0]), np.array([9, 5, 3, 5]), 3)
    assert [packed.row(n).tolist() for n in range(len(packed))] == [[5, 3], [], [9]]
    assert packed.lengths.tolist() == [2, 0, 1]
    assert packed.owners.tolist() == [0, 0, 2]
    assert packed.renumbered(np.array([3, 5, 9])).values.tolist() == [1, 0, 2]
    part = packed.take(np.array([2, 0]), np.array([1, 1]))
    assert [part.row(n).tolist() for n in range(2)] == [[9], [5]]


BUILD = """
import sys, time
from contaccum.runtime.cache import cached_folder

def build(part):
    time.sleep(0.3)
    (part / "made").touch()
    with open(sys.argv[1], "a") as file:
        file.write("built\\n")

print(cached_folder("kind", "key", build))
"""


def test_a_record_without_a_positive_is_counted_or_refused_each_time(tmp_path):
    path = write(
        tmp_path / "t.jsonl", lines(dpr("one?", [context(1)]), dpr("two?", []), dpr("three?", []))
    )
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"t\.jsonl: skipped 2 queries without a positive"):
            assert open_retrieval_set(path).queries == {
                f"unnamed-query-{content_id('', 'one?')}": "one?"
            }
    sentence = refusal(load_examples, path, strict=True)
    assert ":2" in sentence


def test_concurrent_processes_build_a_cache_folder_once(tmp_path):
    notes = tmp_path / "notes"
    started = [
        subprocess.Popen([python(), "-c", BUILD, str(notes)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert notes.read_text() == "built\n"
    assert len(folders) == 1
    assert (Path(folders.pop()) / "made").exists()


def test_a_failed_build_leaves_no_folder():
    def build(part):
        raise InputError("bad data")

    with pytest.raises(InputError, match="bad data"):
        cached_folder("kind", "key", build)
    assert not (cache_folder() / "kind").exists()


@pytest.mark.acceptance
def test_published_sets_have_their_published_sizes(shared_data):
    scifact = open_retrieval_set(shared_data / "scifact", "test")
    assert len(scifact.corpus) == 5183
    assert len(scifact.queries) == 300
    assert sum(map(len, scifact.qrels.values())) == 339
    with pytest.warns(UserWarning, match="34 passages"):
        medquad = open_retrieval_set(shared_data / "medquad", "test", repair=True)
    assert (len(medquad.corpus), len(medquad.queries)) == (10_791, 678)
    assert "CancerGov-0000013_2-1" in refusal(open_corpus, shared_data / "medquad")
    assert len(open_corpus(shared_data / "xquad-dpr" / "psgs_w100.tsv")) == 240
    assert len(load_examples(shared_data / "xquad-dpr" / "xquad-train.json").queries) == 887


OPEN_AND_REPORT = """
import sys
from contaccum.data.dataset import open_dataset
corpus = open_dataset(sys.argv[1]).corpus
assert corpus[999_999]["id"] == "k999999"
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) // 1024)  # not getrusage: it counts the parent too
"""


@pytest.mark.acceptance
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
def test_a_million_passages_are_built_and_opened_in_under_500_mb(tmp_path):
    with open(tmp_path / "corpus.jsonl", "w") as file:
        for number in range(1_000_000):
            file.write(json.dumps(passage(f"k{number}", f"{number} word" * 50)) + "\n")
    for _ in range(2):
        found = subprocess.run(
            [sys.executable, "-c", OPEN_AND_REPORT, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(found.stdout) < 500
