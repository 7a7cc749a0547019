"""Exact search against the obvious sort; approximate search against exact; ties, cuts and what is
refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from helpers import search_vectors as search
from word_encoder import WordEncoder

from contaccum.config.commands import SearchConfig
from contaccum.errors import InputError
from contaccum.retrieval import exact, index, shards
from contaccum.retrieval.encode import Texts, encode_texts, passage_vectors
from contaccum.retrieval.index import Index
from contaccum.retrieval.retriever import Retriever
from contaccum.retrieval.shards import Shard
from contaccum.runtime.processes import Processes


def made(rows: int, dim: int = 24, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)


def key(row: int) -> str:
    """Ids in another order than the rows, so that no tie is broken rightly by chance."""
    return f"p{row * 4001 % 10007:05d}"


def cut(vectors: np.ndarray, size: int) -> list[Shard]:
    ids = [key(row) for row in range(len(vectors))]
    return [
        Shard(ids[at : at + size], vectors[at : at + size]) for at in range(0, len(vectors), size)
    ]


def obvious(queries: np.ndarray, vectors: np.ndarray, k: int) -> dict[str, list[tuple[str, float]]]:
    """Every score in float64, then a plain sort: score descending, then row number."""
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    return {
        f"q{q}": sorted(((key(n), float(s)) for n, s in enumerate(row)), key=lambda hit: -hit[1])[
            :k
        ]
        for q, row in enumerate(scores)
    }


def assert_obvious(run: dict, queries: np.ndarray, vectors: np.ndarray, k: int) -> None:
    """The same passages in the same order, and scores equal to rounding.

    Of passages that tie for the k-th place, the library may keep any, but these are in the order of
    the corpus too.
    """
    expected = obvious(queries, vectors, k)
    row_of = {key(row): row for row in range(len(vectors))}
    assert run.keys() == expected.keys()
    for query, hits in run.items():
        scores = [score for _, score in hits]
        assert scores == pytest.approx([score for _, score in expected[query]], abs=1e-5)
        last = expected[query][-1][1]
        above = [passage for passage, score in expected[query] if score > last + 1e-5]
        assert [passage for passage, _ in hits][: len(above)] == above
        tied = [row_of[passage] for passage, _ in hits[len(above) :]]
        assert len(set(tied)) == len(tied)
        if len(set(scores[len(above) :])) == 1:
            assert tied == sorted(tied)


def names(count: int) -> list[str]:
    return [f"q{n}" for n in range(count)]


@pytest.mark.parametrize("backend", ["faiss", "torch"])
@pytest.mark.parametrize(("size", "block"), [(7, 65_536), (90, 16)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_exact_search_is_the_obvious_sort_for_every_backend_and_shard_size(
    backend, size, block, dtype, monkeypatch
):
    monkeypatch.setattr(shards, "BLOCK", block)
    monkeypatch.setattr(exact, "QUERIES", 8)
    vectors, queries = made(300).astype(dtype), made(30, seed=1)
    run = search(names(30), queries, cut(vectors, size), 10, backend=backend)
    assert_obvious(run, queries, vectors, 10)


def whole_numbers(rows: int, dim: int, seed: int) -> np.ndarray:
    """Vectors whose products are exact in float32, so that equal products are ties on every
    device."""
    return np.random.default_rng(seed).integers(-2, 3, (rows, dim)).astype(np.float32)


@pytest.mark.parametrize("k", [1, 150])
@pytest.mark.parametrize("size", [64, 1000])
def test_both_libraries_break_ties_at_the_cutoff_by_row_number(k, size):
    vectors, queries = whole_numbers(900, 3, 0), whole_numbers(30, 3, 1)
    order = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :k]
    expected = [[key(row) for row in rows] for rows in order]
    for backend in ("faiss", "torch"):
        run = search(names(30), queries, cut(vectors, size), k, backend=backend)
        assert [[passage for passage, _ in hits] for hits in run.values()] == expected


@pytest.mark.parametrize("faster", ["faiss", "torch"])
def test_a_large_search_uses_the_library_that_was_faster(faster, monkeypatch, capsys):
    def delayed(backend, queries, block, k):
        clock[0] += backend != faster
        return best_rows(backend, queries, block, k)

    clock, best_rows = [0.0], exact._best_rows
    monkeypatch.setattr(exact, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(exact, "_best_rows", delayed)
    vectors, queries = made(300), made(30, seed=1)
    index = exact.ExactIndex(cut(vectors, 100), device="cpu")
    for too_large in ((30, 301), (31, 300)):
        monkeypatch.setattr(exact, "TIMED_FROM", too_large)
        index.search(queries, 10)
        assert index.backend == "auto"  # not timed
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(exact, "TIMED_FROM", (30, 300))
    index.search(queries, 10)
    assert index.backend == faster
    assert f"exact search with {faster} " in capsys.readouterr().err


def test_torch_is_exact_though_the_caller_allowed_reduced_precision():
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        vectors, queries = made(300), made(9, seed=1)
        assert_obvious(
            search(names(9), queries, cut(vectors, 90), 10, backend="torch"), queries, vectors, 10
        )
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("factory", "least"),
    [
        ("IVF16,Flat", 0.6),
        ("HNSW16", 0.9),
        ("IVF8,PQ6x4", 0.5),
        ("SQ8", 0.9),
        ("Flat,RFlat", 1.0),
        ("L2norm,Flat", 0.5),  # ranks by cosine
        ("PCA8,Flat", 0.3),
    ],
)
def test_approximate_indexes_find_most_of_what_exact_search_finds(factory, least):
    centres = made(30)
    vectors = centres[np.random.default_rng(3).integers(0, 30, 900)] + 0.3 * made(900, seed=4)
    queries = centres + 0.3 * made(30, seed=5)
    params = "nprobe=8" if "IVF" in factory else ""
    found, other = (
        search(names(30), each, cut(vectors, 250), 20, factory=factory, search_params=params)
        for each in (queries, -queries)
    )
    right = obvious(queries, vectors, 20)

    def shared(run: dict) -> float:
        return np.mean([len({p for p, _ in run[q]} & {p for p, _ in right[q]}) / 20 for q in right])

    assert shared(found) >= least
    assert shared(other) < 0.2  # negative control
    assert all(hits == sorted(hits, key=lambda hit: -hit[1]) for hits in found.values())


def test_search_params_trade_speed_for_recall():
    vectors, queries = made(900), made(30, seed=1)
    right = obvious(queries, vectors, 10)

    def recall(params: str) -> float:
        run = search(
            names(30), queries, cut(vectors, 250), 10, factory="IVF32,Flat", search_params=params
        )
        return float(
            np.mean([len({p for p, _ in run[q]} & {p for p, _ in right[q]}) / 10 for q in right])
        )

    assert recall("nprobe=1") < recall("nprobe=8") < recall("nprobe=32") == 1.0


@pytest.mark.parametrize("factory", ["IVF16,Flat", "HNSW16", "PQ4x4"])
def test_two_builds_give_one_run_and_another_seed_another_training(factory, monkeypatch):
    # fewer than there are, as in a large corpus
    monkeypatch.setattr(index, "training_rows", lambda faiss, index: 700)
    vectors, queries = made(3000, dim=8), made(20, dim=8, seed=1)
    first, again = (
        search(names(20), queries, cut(vectors, 900), 10, factory=factory) for _ in range(2)
    )
    assert first == again
    monkeypatch.setattr(index, "SEED", 6)
    other = search(names(20), queries, cut(vectors, 900), 10, factory=factory)
    assert (other == first) == (factory == "HNSW16")  # which is not trained


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"factory": "HNSW8", "search_params": "nprobe=4"},
            "search_params 'nprobe=4': faiss cannot use them with index 'HNSW8'",
        ),
        ({"factory": "LSH"}, r"index 'LSH': faiss cannot build it .*METRIC_L2"),
        # its scores are best when small, so the worst passages would come first
        ({"factory": "HNSW8,PQ2x1"}, "faiss ranks its results by distance, not by inner product"),
        (
            {"factory": "Ivory"},
            r"'Ivory': faiss cannot build it for 40 passages \(could not parse index string "
            r"Ivory\)$",
        ),
        (
            {"factory": "HNSW8", "search_params": "nprobes=4"},
            r"'HNSW8' \(ParameterSpace\S* ?could not set parameter nprobes\)$",
        ),
        (
            {"factory": "IVF4,Flat", "search_params": "nprobe=0"},
            "index 'IVF4,Flat': faiss refused the search",
        ),
        ({"factory": "IVF64,Flat"}, "index 'IVF64,Flat': faiss cannot build it for 40 passages"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_sentence(given, words):
    with pytest.raises(InputError, match=words) as error:
        search(names(3), made(3, seed=1), cut(made(40), 16), 5, **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "processes", "words"),
    [
        ({"search_params": "nprobe=4"}, 1, "search_params 'nprobe=4' has no effect on the exact"),
        ({"index_dir": "i"}, 1, "index_dir 'i' has no effect on the exact"),
        ({"factory": "HNSW8", "backend": "torch"}, 1, "'HNSW8' needs one process and faiss"),
        ({"factory": "HNSW8"}, 2, "needs one process and faiss, but 2 were started"),
        ({"backend": "fais"}, 1, "backend is 'fais', expected {auto,faiss,torch}"),
        ({"search_params": {"nprobe": 4}}, 1, "search_params is {'nprobe': 4}, expected `str`"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, processes, words):
    with pytest.raises(InputError, match=words):
        SearchConfig(**settings).check(processes)
    SearchConfig(factory="HNSW8", index_dir="i", search_params="efSearch=9").check(1)
    SearchConfig(backend="torch").check(2)


def test_a_query_vector_that_is_not_finite_is_named():
    class BrokenQueries(WordEncoder):
        def encode_queries(self, texts, *rest):
            return np.where([[text == "rings"] for text in texts], np.nan, np.zeros(self.dim))

    retriever = Retriever.open(BrokenQueries(), CORPUS)
    with pytest.raises(InputError, match="query 'y'"):
        retriever.search({"x": "pears", "y": "rings"}, 5)


class Broken(WordEncoder):
    """Its vector of "green pears" is not finite."""

    def encode_passages(self, texts, *rest):
        vectors = self.encode_queries(texts)
        vectors[[text == "green pears" for text in texts], 5] = np.inf
        return vectors


@pytest.mark.parametrize("factory", ["Flat", "HNSW8"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_passage_vector_that_is_not_finite_is_named_wherever_it_is_kept(tmp_path, factory, kept):
    where = "embeddings" if factory == "Flat" else "index_dir"
    chosen = SearchConfig(factory=factory, **({where: str(tmp_path / "i")} if kept else {}))
    with pytest.raises(InputError, match="passage 'c': its vector contains NaN, infinity"):
        Retriever.open(Broken(), CORPUS, chosen).search({"x": "rings"}, 4)
    assert not (tmp_path / "i" / "manifest.json").exists()


@pytest.mark.parametrize("world", [1, 3, 7])
def test_processes_divide_the_corpus_into_consecutive_parts(world, tmp_path):
    encode_texts(WordEncoder(), Texts("passage", CORPUS), tmp_path / "e", shard_size=1)
    for kept in (None, str(tmp_path / "e")):
        found = []
        for rank in range(world):
            shards, first_row = passage_vectors(
                WordEncoder(), CORPUS, SearchConfig(embeddings=kept), unconnected(rank, world)
            )
            assert first_row == len(found)
            found += [passage for shard in shards for passage in shard.ids]
        assert found == CORPUS["id"][:]


def unconnected(rank: int, world: int) -> Processes:
    group = Processes(rank, world)
    group.barrier = lambda: None
    return group


def test_no_passages_and_no_queries():
    assert search(names(2), made(2), [], 5) == {"q0": [], "q1": []}
    assert search([], made(0), cut(made(40), 16), 5) == {}
    with pytest.raises(InputError, match="k is 0, expected `int` >= 1"):
        Retriever.open(WordEncoder(), CORPUS).search({"x": "rings"}, 0)


CORPUS = Dataset.from_dict(
    {
        "id": ["a", "b", "c", "d"],
        "title": ["", "Rivers", "", "Planets"],
        "text": [
            "red apples grow on trees",
            "the Rhine flows north",
            "green pears",
            "Saturn has rings",
        ],
    }
)


@pytest.mark.parametrize("embeddings", [False, True])
def test_texts_are_found_by_their_words(tmp_path, embeddings):
    queries = {
        "x": "which planets have rings",
        "y": "where does the Rhine flow",
        "z": "apples and trees",
    }
    chosen = SearchConfig(embeddings=tmp_path / "e" if embeddings else None)
    run = Retriever.open(WordEncoder(), CORPUS, chosen).search(queries, 2)
    assert [(query, hits[0][0], len(hits)) for query, hits in run.items()] == [
        ("x", "d", 2),
        ("y", "b", 2),
        ("z", "a", 2),
    ]
    assert (tmp_path / "e" / "manifest.json").exists() == embeddings


def test_a_corpus_is_a_list_texts_by_id_a_path_or_a_table(tmp_path):
    by_id = {"b": "the Rhine flows north", "c": "green pears", "d": "Saturn has rings"}
    lines = [json.dumps({"_id": key, "text": text}) for key, text in by_id.items()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    table = {"id": list(by_id), "title": [""] * 3, "text": list(by_id.values())}
    texts = list(by_id.values())
    forms = [by_id, tmp_path / "corpus.jsonl", Dataset.from_dict(table), texts]
    runs = [Retriever.open("bm25", form).search(["Saturn", "pears"], 1) for form in forms]
    assert [hits[0][0] for hits in runs[0].values()] == ["d", "c"]
    assert list(runs[0]) == ["0", "1"]
    assert runs[0] == runs[1] == runs[2]
    assert [hits[0][0] for hits in runs[3].values()] == ["2", "1"]
    with pytest.raises(
        InputError, match=r"the table has the columns title, text; expected id \(or"
    ):
        Retriever.open("bm25", CORPUS.remove_columns("id"))
    with pytest.raises(InputError, match="found a str; expected a list of texts"):
        Retriever.open("bm25", texts).search("pears")


def test_finished_embeddings_serve_whatever_their_shard_size_and_form(tmp_path):
    encode_texts(
        WordEncoder(), Texts("passage", CORPUS), tmp_path / "e", shard_size=3, dtype="float16"
    )
    shards, _ = passage_vectors(WordEncoder(), CORPUS, SearchConfig(embeddings=str(tmp_path / "e")))
    assert len(shards[0].ids) == 3
    assert shards[0].vectors.dtype == np.float16


@pytest.mark.parametrize(
    "chosen", [{}, {"factory": "HNSW8"}, {"factory": "IVF2,Flat", "search_params": "nprobe=2"}]
)
def test_a_searcher_encodes_its_corpus_once(chosen, monkeypatch):
    built = []
    build = Index.build
    monkeypatch.setattr(Index, "build", lambda *a, **b: built.append(a) or build(*a, **b))
    encoder, settings = WordEncoder(), SearchConfig(**chosen)
    searcher = Retriever.open(encoder, CORPUS, settings)
    found = [searcher.search({"x": query}, 2)["x"] for query in ("rings", "apples", "rings")]
    assert encoder.seen == 4 + 3
    assert len(built) == bool(chosen)
    assert [hits[0][0] for hits in found] == ["d", "a", "d"]
    assert (
        found[0]
        == found[2]
        == Retriever.open(WordEncoder(), CORPUS, settings).search({"x": "rings"}, 2)["x"]
    )


def test_a_kept_index_spares_the_corpus_and_knows_its_texts(tmp_path):
    encoder, chosen = WordEncoder(), SearchConfig(factory="HNSW8", index_dir=str(tmp_path / "i"))
    first = Retriever.open(encoder, CORPUS, chosen).search({"x": "rings"}, 2)
    assert encoder.seen == 5
    assert Retriever.open(encoder, CORPUS, chosen).search({"x": "rings"}, 2) == first
    assert encoder.seen == 6
    with pytest.raises(InputError, match=r"was made from other texts\. Choose"):
        Retriever.open(encoder, CORPUS.select(range(3)), chosen).search({"x": "rings"}, 2)
    with pytest.raises(InputError, match=r"was made with other data or settings \(encoder "):
        Retriever.open(WordEncoder(name="other"), CORPUS, chosen).search({"x": "rings"}, 2)
