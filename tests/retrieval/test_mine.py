"""Mined negatives against a slow, plain version and against sentence-transformers' own; files,
refusals."""

import json
import shutil
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from helpers import open_corpus, open_examples, read_examples, train_config, write_beir
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from word_encoder import WordEncoder

from contaccum import DualEncoder
from contaccum.cli import main
from contaccum.config.commands import DataPolicy, EncoderConfig, MineConfig, SearchConfig
from contaccum.data.commands import convert
from contaccum.encoder import EncoderSettings, tiny_tower
from contaccum.errors import InputError
from contaccum.retrieval import mine as mine_module
from contaccum.retrieval.mine import about_path, mine, mine_all, write_mined
from contaccum.retrieval.negatives import CrossEncoder, MiningQueries, select_negatives
from contaccum.retrieval.retriever import BM25, Retriever
from contaccum.training.messages import next_steps

SETTINGS = {
    "top": {},
    "window": {"range_min": 2, "range_max": 9},
    "percentage of the positive": {"relative_margin": 0.3},
    "window behind a margin": {"absolute_margin": 0.1, "range_min": 1, "range_max": 12},
    "band": {"max_score": 0.6, "min_score": 0.3},
}


@pytest.fixture
def data(tmp_path):
    """40 passages and more with texts that stand already: of positives, of a query, of each
    other."""
    folder = write_beir(tmp_path / "data")
    with (folder / "qrels" / "train.tsv").open("a") as file:
        file.write("q0\tp7\t1\nq1\tp9\t2\n")
    with (folder / "corpus.jsonl").open("a") as file:
        for key, title, text in (
            ("twin", "", "fox a red fox lives in valley 0"),
            ("other", "fox a red", "fox lives in valley 0"),
            ("self", "a title", "where is the white bear of valley 3"),
            ("again", "cat", "a blue cat lives in valley 1"),
            ("double", "", "owl a green owl lives in valley 2"),
        ):
            file.write(json.dumps({"_id": key, "title": title, "text": text}) + "\n")
    return folder


@pytest.fixture
def queries(data):
    return MiningQueries(open_examples(data))


def dense(
    queries: MiningQueries,
    settings: SearchConfig = SearchConfig(),  # noqa: B008
    encoder=None,
) -> Retriever:
    return Retriever.open(encoder or WordEncoder(), queries.corpus, settings, extra=queries.extra)


def content(row: dict) -> str:
    return f"{row['title']} {row['text']}".strip()


def mined(
    queries: MiningQueries, retriever, folder, rerank=None, to="jsonl", **settings
) -> list[dict]:
    output = folder / f"{time.monotonic_ns()}.jsonl"
    chosen = MineConfig(**settings)
    write_mined(output, mine_all(queries, retriever, chosen, to, rerank), chosen, to, {})
    return [json.loads(line) for line in output.read_text().splitlines()]


def slowly(
    queries: MiningQueries, scores: dict[str, dict[str, float]], settings: MineConfig
) -> list[tuple]:
    """Every passage looked at for every query, one rule after the other: ids and scores of the
    negatives."""
    found = []
    for example in queries.examples:
        own = scores[example.query.text]
        texts = {example.query.text}
        for passage in example.positives:
            texts |= {passage.content, passage.text}
        lowest = min(own[passage.id] for passage in example.positives)
        ranking = sorted(
            ((own[row["id"]], row["id"], row) for row in queries.corpus), key=lambda hit: -hit[0]
        )
        ranking = [
            hit for hit in ranking if hit[1] not in {passage.id for passage in example.positives}
        ]
        ranking = [hit for hit in ranking if not texts & {content(hit[2]), hit[2]["text"]}][
            : settings.range_max
        ]
        earlier: list[str] = []
        left = []
        for score, key, row in ranking:
            if content(row) in earlier:
                continue
            earlier.append(content(row))
            if settings.absolute_margin is not None and score > lowest - settings.absolute_margin:
                continue
            if settings.relative_margin is not None and score > lowest * (
                1 - settings.relative_margin
            ):
                continue
            if settings.max_score is not None and score > settings.max_score:
                continue
            if settings.min_score is not None and score < settings.min_score:
                continue
            left.append((key, score))
        found.append(left[settings.range_min :][: settings.num_negatives])
    return found


def passages_of(queries: MiningQueries) -> Dataset:
    """Return the corpus, followed by the positives that it lacks."""
    return concatenate_datasets(
        [queries.corpus, *([] if queries.extra is None else [queries.extra])]
    )


def all_inner_products(queries: MiningQueries) -> dict[str, dict[str, float]]:
    asked = [example.query.text for example in queries.examples]
    texts = [content(row) for row in passages_of(queries)]
    vectors = [WordEncoder().encode_queries(each).astype(np.float64) for each in (asked, texts)]
    ids = passages_of(queries)["id"]
    return {
        query: dict(zip(ids, map(float, row.astype(np.float32)), strict=True))
        for query, row in zip(asked, vectors[0] @ vectors[1].T, strict=True)
    }


@pytest.mark.parametrize("to", ["jsonl", "dpr", "tevatron"])
def test_a_passage_without_a_text_is_neither_negative_nor_positive(to, data, tmp_path):
    """Training refuses such a passage; one with only a title is fine."""
    with (data / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "none", "title": "", "text": ""}\n')
        file.write('{"_id": "titled", "title": "fox cat owl bear", "text": ""}\n')
    with (data / "queries.jsonl").open("a") as file:
        file.write('{"_id": "unanswered", "text": "where is nothing"}\n')
    with (data / "qrels" / "train.tsv").open("a") as file:
        file.write("unanswered\tnone\t1\nq3\tnone\t1\n")
    policy, output = DataPolicy(repair=True), tmp_path / "mined"
    wanted = MineConfig(num_negatives=60, range_max=60)
    with pytest.warns(UserWarning, match="left out 1 query whose positives all have an empty"):
        report = mine("bm25", data, output, to=to, mining=wanted, policy=policy)
    assert report["queries"] == 40
    queries = MiningQueries(open_examples(data, repair=True))
    found = list(mine_all(queries, dense(queries), wanted, to))
    assert sum(example["removed"].get("empty text", 0) for example in found) > 0
    write_mined(tmp_path / "dense", found, wanted, to, {})
    for file in (output, tmp_path / "dense"):
        examples = list(read_examples(file))
        assert len(examples) == 40
        passages = {row.id for one in examples for row in (*one.positives, *one.negatives)}
        assert "none" not in passages
        assert len(open_examples(file)) == 40
    assert "titled" in passages  # negative control: the dense search finds it


@pytest.mark.parametrize("name", SETTINGS)
def test_dense_mining_is_the_slow_version(name, queries, tmp_path, monkeypatch):
    settings = MineConfig(**{"num_negatives": 3, "range_max": 30, **SETTINGS[name]})
    expected = slowly(queries, all_inner_products(queries), settings)
    assert sum(map(len, expected)) > 40
    # of two passages with the same text, a search may return either as its last one
    texts = {row["id"]: content(row) for row in queries.corpus}
    for chunk, backend in ((7, "torch"), (1000, "faiss")):
        monkeypatch.setattr(mine_module, "CHUNK", chunk)
        search = dense(queries, SearchConfig(backend=backend))
        found = mined(queries, search, tmp_path, **vars(settings))
        assert [row["query_id"] for row in found] == [f"q{n}" for n in range(40)]
        for row, hits in zip(found, expected, strict=True):
            assert [texts[key] for key in row["neg_id"]] == [texts[key] for key, _ in hits]
            assert row["neg_scores"] == pytest.approx([score for _, score in hits], abs=1e-6)
    assert (
        slowly(
            queries,
            all_inner_products(queries),
            replace(settings, range_min=settings.range_min + 1),
        )
        != expected
    )


def test_lexical_mining_is_the_slow_version(queries, tmp_path):
    settings = MineConfig(num_negatives=4, range_max=25, relative_margin=0.05)
    passages = passages_of(queries)
    asked = {example.query.text: example.query.text for example in queries.examples}
    rankings = BM25(passages).rank(asked, 1, [range(len(passages))] * len(asked))
    scores = {
        query: dict(zip(passages["id"], map(float, ranking.positive_scores), strict=True))
        for query, ranking in zip(asked, rankings, strict=True)
    }
    found = mined(queries, BM25(queries.corpus, queries.extra), tmp_path, **vars(settings))
    expected = slowly(queries, scores, settings)
    assert [list(zip(row["neg_id"], row["neg_scores"], strict=True)) for row in found] == expected
    assert found[0]["pos_scores"] == [scores[found[0]["query"]][key] for key in ("p0", "p7")]


def test_what_is_known_is_never_mined(queries, tmp_path):
    """By id, by the text of a positive or of the query itself, and no text twice."""
    found = mined(queries, dense(queries), tmp_path, num_negatives=45, range_max=45)
    ids = [set(row["neg_id"]) for row in found]
    assert {"p0", "p7", "twin", "other"} & ids[0] == set()
    assert {"p1", "p9", "again"} & ids[1] == set()
    assert "self" not in ids[3]
    for row in found:
        assert len(set(row["neg"])) == len(row["neg"])
    # the negative control: by ids alone the copies are found, and high
    queries.known = lambda example: set(queries.positives(example))
    copied = mined(queries, dense(queries), tmp_path, num_negatives=3)
    assert {"twin", "other"} & set(copied[0]["neg_id"])
    assert "self" in copied[3]["neg_id"]


def test_random_negatives_are_a_function_of_seed_and_query():
    scores, positives = np.linspace(0.9, 0.1, 30), np.array([0.8], dtype=np.float32)
    settings = MineConfig(
        num_negatives=4, range_min=2, relative_margin=0.1, sampling_strategy="random"
    )
    drawn = [
        select_negatives(scores, positives, settings, number).indices for number in range(2000)
    ]
    window = np.flatnonzero(scores <= 0.8 * 0.9)[2:]
    assert all(list(places) == sorted(set(places)) and len(places) == 4 for places in drawn)
    counts = Counter(place for places in drawn for place in places)
    assert set(counts) == set(window)
    expected = 2000 * 4 / len(window)
    assert max(abs(count - expected) for count in counts.values()) < 5 * np.sqrt(expected)
    again = [
        select_negatives(scores, positives, settings, number).indices for number in range(2000)
    ]
    assert all(np.array_equal(one, other) for one, other in zip(drawn, again, strict=True))
    other = [
        select_negatives(scores, positives, replace(settings, seed=1), number).indices
        for number in range(2000)
    ]
    assert not all(np.array_equal(one, two) for one, two in zip(drawn, other, strict=True))


def test_a_margin_under_a_negative_positive_lies_below_it():
    """5 % less of a negative score would be more; as in sentence-transformers the margin is taken
    off."""
    scores, positives = np.array([-0.39, -0.41, -0.43]), np.array([-0.4], dtype=np.float32)
    assert list(
        select_negatives(scores, positives, MineConfig(relative_margin=0.05), 0).indices
    ) == [2]
    assert select_negatives(scores, positives, MineConfig(relative_margin=0.05), 0).removed == {
        "relative_margin": 2
    }
    assert list(select_negatives(scores, positives, MineConfig(absolute_margin=0), 0).indices) == [
        1,
        2,
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny encoder with tied towers and a tiny cross-encoder, with random weights, as folders;
    and texts for them."""
    folder = tmp_path_factory.mktemp("models")
    data = write_beir(folder / "data")
    texts = [content(row) for row in open_corpus(data)]
    tower = tiny_tower(texts, "mean", layers=1, width=32, vocabulary=200, max_length=64, seed=0)
    DualEncoder(
        tower, tower, EncoderSettings(max_query_length=32, max_passage_length=64, tie_towers=True)
    ).save(folder / "encoder")
    config = BertConfig.from_dict(
        {**tower.backbone.config.to_dict(), "num_labels": 1, "initializer_range": 0.5}
    )
    torch.manual_seed(1)
    BertForSequenceClassification(config).save_pretrained(folder / "cross")
    tower.tokenizer.save_pretrained(folder / "cross")
    return folder


PEER = {
    "top": {},
    "relative_margin": {"relative_margin": 0.02, "num_negatives": 3},
    "window behind a margin": {"range_min": 2, "relative_margin": 0.02, "num_negatives": 2},
    "scores": {"max_score": 0.9, "min_score": 0.6},
    "cross-encoder": {"cross_encoder": True, "absolute_margin": 0.02},
}


@pytest.mark.parametrize("name", PEER)
def test_it_mines_what_sentence_transformers_mines(name, models, tmp_path):
    """Where both look at the whole corpus, as here; each of these settings gives something of its
    own."""
    from sentence_transformers import CrossEncoder as PeerCrossEncoder
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    options = {"num_negatives": 5, "range_max": 40, **PEER[name]}
    queries = MiningQueries(open_examples(models / "data"))
    pairs = [
        (example.query.text, passage.content)
        for example in queries.examples
        for passage in example.positives
    ]
    cross = options.pop("cross_encoder", None) and str(models / "cross")
    peer = mine_hard_negatives(
        Dataset.from_dict(
            {"query": [pair[0] for pair in pairs], "positive": [pair[1] for pair in pairs]}
        ),
        SentenceTransformer(str(models / "encoder"), device="cpu"),
        corpus=[content(row) for row in queries.corpus],
        cross_encoder=PeerCrossEncoder(cross, device="cpu") if cross else None,
        output_scores=True,
        verbose=False,
        **options,
    )
    expected: dict[str, dict[str, list[float]]] = {}
    for row in peer:
        expected.setdefault(row["query"], {})[row["negative"]] = row["scores"]
    rerank = CrossEncoder(cross, "cpu", 7) if cross else None
    search = dense(queries, encoder=DualEncoder.load(models / "encoder"))
    found = mined(queries, search, tmp_path, rerank, **options)
    assert 20 < sum(map(len, expected.values())) <= 40 * options["num_negatives"]
    for row in found:
        negatives = expected.get(row["query"], {})
        assert row["neg"] == list(negatives)
        for score, scores in zip(row["neg_scores"], negatives.values(), strict=True):
            assert [min(row["pos_scores"]), score] == pytest.approx(
                [min(row["pos_scores"]), scores[1]], abs=1e-5
            )
            assert any(
                scores[0] == pytest.approx(positive, abs=1e-5) for positive in row["pos_scores"]
            )
    plain = mined(queries, search, tmp_path, num_negatives=5, range_max=40)
    assert ([row["neg"] for row in plain] == [row["neg"] for row in found]) == (name == "top")


def test_a_model_that_is_no_cross_encoder_is_refused(models, tmp_path):
    config = BertConfig.from_pretrained(models / "cross", num_labels=3)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "three")
    AutoTokenizer.from_pretrained(models / "cross").save_pretrained(tmp_path / "three")
    with pytest.raises(InputError, match=r"three: cannot be loaded .* has 3 outputs"):
        CrossEncoder(str(tmp_path / "three"), "cpu", 7)
    with pytest.raises(InputError, match="absent: cannot be loaded as a cross-encoder"):
        CrossEncoder(str(tmp_path / "absent"), "cpu", 7)
    shutil.copytree(models / "cross", tmp_path / "pickled")
    weights = tmp_path / "pickled" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    with pytest.raises(InputError, match=r"pickled: cannot .*no file named model\.safetensors"):
        CrossEncoder(str(tmp_path / "pickled"), "cpu", 7)


def test_an_approximate_index_is_scored_exactly(queries, tmp_path):
    settings = {"num_negatives": 3, "relative_margin": 0.3}
    exact = mined(queries, dense(queries), tmp_path, **settings)
    rough = dense(queries, SearchConfig(factory="SQ4"))
    found = mined(queries, rough, tmp_path, **settings)
    scores = all_inner_products(queries)
    for row in found:
        assert row["neg_scores"] == pytest.approx(
            [scores[row["query"]][key] for key in row["neg_id"]], abs=1e-6
        )
    assert [row["pos_scores"] for row in found] == [row["pos_scores"] for row in exact]
    negatives = [row["neg_id"] for row in exact]
    few = dense(queries, SearchConfig(factory="IVF4,Flat", search_params="nprobe=1"))
    assert [row["neg_id"] for row in mined(queries, few, tmp_path, **settings)] != negatives
    kept = SearchConfig(
        factory="IVF4,Flat", search_params="nprobe=4", index_dir=str(tmp_path / "index")
    )
    for _ in range(2):
        assert [
            row["neg_id"] for row in mined(queries, dense(queries, kept), tmp_path, **settings)
        ] == negatives


@pytest.mark.parametrize("form", ["jsonl", "dpr", "tevatron"])
def test_every_form_is_training_data_with_scores(form, data, tmp_path):
    output = tmp_path / "mined.file"
    options = MineConfig(num_negatives=3, range_max=20)
    report = mine(EncoderConfig("bm25"), str(data), str(output), to=form, mining=options)
    assert json.loads(about_path(output).read_text()) == report
    found = list(read_examples(output))
    queries = MiningQueries(open_examples(data))
    plain = mined(queries, BM25(queries.corpus, queries.extra), tmp_path, **vars(options))
    assert [[p.id for p in example.negatives] for example in found] == [
        row["neg_id"] for row in plain
    ]
    assert [[p.content for p in example.positives] for example in found] == [
        row["pos"] for row in plain
    ]
    assert report["queries"] == 40
    assert report["negatives"] == sum(len(row["neg"]) for row in plain)
    margins = [min(row["pos_scores"]) - score for row in plain for score in row["neg_scores"]]
    assert report["scores"]["margins"]["mean"] == pytest.approx(np.mean(margins))
    assert report["scores"]["margins"]["25%"] == pytest.approx(np.quantile(margins, 0.25))
    if form != "jsonl":
        records = (
            json.loads(output.read_text())
            if form == "dpr"
            else map(json.loads, output.read_text().splitlines())
        )
        name = "hard_negative_ctxs" if form == "dpr" else "negative_passages"
        assert [[p["score"] for p in record[name]] for record in records] == [
            row["neg_scores"] for row in plain
        ]
    names = {path.name for path in tmp_path.glob("mined*")}
    assert names == {"mined.file", "mined.file.about.json"}
    for name in ("m.jsonl", "m.json", "m.jsonl.gz", "m"):
        assert about_path(tmp_path / name) == tmp_path / "m.about.json"
    assert about_path("neg-0.05") != about_path("neg-0.1")
    with pytest.raises(InputError, match="exists already; choose a new path"):
        mine(EncoderConfig("bm25"), str(data), str(output), to=form, mining=options)


def test_of_a_corpus_beside_the_data_alone_is_mined_and_positives_that_it_lacks_are_scored(
    data, tmp_path
):
    convert(data, tmp_path / "train.jsonl", "jsonl")
    lines = (data / "corpus.jsonl").read_text().splitlines()
    extra = [
        json.dumps({"_id": f"x{n}", "title": "", "text": f"a red fox lives in valley {n}"})
        for n in range(60, 70)
    ]
    (tmp_path / "corpus.jsonl").write_text("\n".join([*lines[:20], *extra]) + "\n")
    queries = MiningQueries(
        open_examples(tmp_path / "train.jsonl"), open_corpus(tmp_path / "corpus.jsonl")
    )
    assert sorted(passages_of(queries)["id"]) == sorted(
        [f"p{n}" for n in range(40)] + [f"x{n}" for n in range(60, 70)]
    )
    given = {f"p{n}" for n in range(20)} | {f"x{n}" for n in range(60, 70)}
    settings = MineConfig(num_negatives=25, range_max=25)
    expected = [
        [key for key, _ in hits] for hits in slowly(queries, all_inner_products(queries), settings)
    ]
    assert {len(keys) for keys in expected} == {25}  # of 30: what is left out costs no depth
    for factory in ("Flat", "IVF1,Flat"):  # the latter looks at everything too
        search = dense(queries, SearchConfig(factory=factory))
        found = mined(queries, search, tmp_path, **vars(settings))
        assert [row["neg_id"] for row in found] == expected
    lexical = mined(queries, BM25(queries.corpus, queries.extra), tmp_path, num_negatives=4)
    assert all(set(row["neg_id"]) <= given for row in (*found, *lexical))
    assert all(
        len(row["pos_scores"]) == len(row["pos"]) and min(row["pos_scores"]) > 0 for row in lexical
    )


def test_copies_of_a_positive_are_no_negatives_whatever_their_ids_and_titles(tmp_path):
    text = "A red fox sleeps in the valley."
    record = {"query": "where does the fox sleep", "pos": [text], "pos_id": ["1"]}
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    passages = {
        "9": ("", text),
        "titled": ("Foxes", text),
        "broken": ("", "A red fox\nsleeps in  the valley."),
        "1": ("", "A red fox runs in the valley."),  # another passage with the id of the positive
        "2": ("", "A red fox sleeps in the valley!"),
    }
    with (tmp_path / "corpus.jsonl").open("w") as file:
        for key, (title, passage) in passages.items():
            file.write(json.dumps({"_id": key, "title": title, "text": passage}) + "\n")
    queries = MiningQueries(
        open_examples(tmp_path / "data.jsonl"), open_corpus(tmp_path / "corpus.jsonl")
    )
    assert queries.extra is None
    output = tmp_path / "mined.jsonl"
    settings = MineConfig(num_negatives=5, range_max=5)
    report = write_mined(output, mine_all(queries, dense(queries), settings), settings, "jsonl", {})
    assert sorted(json.loads(output.read_text())["neg_id"]) == ["1", "2"]
    assert report["removed"]["same text"] == 2  # 9 is the positive itself


def test_a_title_only_positive_forbids_only_its_own_copies(tmp_path):
    """Corpora such as TREC-COVID's have passages with a title and no text."""
    record = {"query": "fox", "pos": ["The fox"], "pos_id": ["1"]}
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    titles = {"1": "The fox", "2": "Another fox", "3": "The fox", "4": "A third fox"}
    with (tmp_path / "corpus.jsonl").open("w") as file:
        for key, title in titles.items():
            file.write(json.dumps({"_id": key, "title": title, "text": ""}) + "\n")
    with pytest.warns(UserWarning, match="4 passages without text"):
        corpus = open_corpus(tmp_path / "corpus.jsonl", repair=True)
    queries = MiningQueries(open_examples(tmp_path / "data.jsonl"), corpus)
    (row,) = mined(queries, dense(queries), tmp_path, num_negatives=5, range_max=5)
    assert sorted(row["neg_id"]) == ["2", "4"]


def test_no_query_at_all_is_an_error_and_writes_no_file(tmp_path):
    with pytest.raises(InputError, match="no negative for 0 of 0 queries"):
        write_mined(tmp_path / "mined.jsonl", [], MineConfig(), "jsonl", {})
    assert not list(tmp_path.iterdir())


def test_the_report_of_another_file_is_not_replaced(data, tmp_path):
    mine("bm25", data, tmp_path / "mined.jsonl")
    with pytest.raises(InputError, match=r"mined\.jsonl: has the same report, mined"):
        mine("bm25", data, tmp_path / "mined.json", to="dpr")
    (tmp_path / "mined.jsonl").unlink()  # as after a kill, which may leave only the report
    mine("bm25", data, tmp_path / "mined.json", to="dpr")


def test_the_report_names_the_search_settings_that_can_change_the_negatives(data, models, tmp_path):
    encoder = EncoderConfig(str(models / "encoder"), device="cpu")
    index = {"factory": "IVF4,Flat", "search_params": "nprobe=1"}
    report = mine(
        encoder,
        data,
        tmp_path / "mined.jsonl",
        settings=SearchConfig(**index),
    )
    assert report["search"] == {"precision": "fp32", **index}
    loaded = DualEncoder.load(models / "encoder", device="cpu")
    mine(loaded, data, tmp_path / "loaded.jsonl", settings=SearchConfig(**index))
    assert (tmp_path / "loaded.jsonl").read_bytes() == (tmp_path / "mined.jsonl").read_bytes()
    report = mine(EncoderConfig("bm25"), data, tmp_path / "lexical.jsonl")
    assert report["search"] == {}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--range_min", "98"], "expected at least range_min + num_negatives = 103"),
        (["--pooling", "cls"], "pooling 'cls' needs an encoder, and bm25 has none"),
        (["--factory", "HNSW32"], "factory 'HNSW32' needs an encoder, and bm25 has none"),
        (["--search_params", "nprobe=9"], "search_params 'nprobe=9' needs an encoder"),
        (["--backend", "faiss"], "backend 'faiss' needs an encoder"),
        (["--precision", "bf16"], "precision 'bf16' needs an encoder"),
        (["--cross_encoder", "./absent"], "./absent: cannot be loaded as a cross-encoder"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(options, sentence, data, tmp_path, capsys):
    output = tmp_path / "out" / "mined.jsonl"
    assert (
        main(["mine", "--model", "bm25", "--data", str(data), "--output", str(output), *options])
        == 2
    )
    err = capsys.readouterr().err
    assert sentence in err
    # warnings come from libraries
    assert err.count("contaccum: ") - err.count("contaccum: warning: ") == 1
    assert not output.parent.exists()


def test_next_commands_name_the_mined_file_and_then_the_test_data(data, tmp_path, capsys):
    """The mined file has no test queries, but the folder of the dev queries has some."""
    output = tmp_path / "mined negatives.jsonl"
    assert main(["mine", "--model", "bm25", "--data", str(data), "--output", str(output)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"; searched {len(open_corpus(data))} passages of {data}" in said[0]
    margins = next(line for line in said if line.startswith("margins")).split()[1:]
    median = float(margins[3])
    assert any("Most negatives score above the positive" in line for line in said) == (median < 0)
    assert said[-1] == (
        f"next: contaccum train --config finetune --data.train '{output}' "
        "--data.hard_negatives 1 --model.name MODEL --output_dir DIR"
    )
    for dev, shown in ((str(data), data), (None, "DATA")):
        config = train_config(output, tmp_path / "run", **{"data.dev": dev})
        expected = f"next: contaccum evaluate --model {tmp_path / 'model'} --data {shown}"
        assert next_steps(config, tmp_path / "model")[-1] == expected
