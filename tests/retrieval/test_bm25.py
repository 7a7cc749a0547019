"""BM25 against the formula written out, and its words in many scripts."""
# ruff: noqa: RUF001

import json
import math
import re
import unicodedata
import warnings
from pathlib import Path

import bm25s.stopwords
import numpy as np
import pytest
from datasets import Dataset
from tiny_data import lines, write

from contaccum.cli import main
from contaccum.retrieval.retriever import BM25, STOP_WORDS, words_of

TEXTS = {
    "a": ("", "cats chase mice, and cats sleep"),
    "b": ("Dogs", "dogs chase cats"),
    "c": ("", "mice eat cheese"),
    "d": ("", "the sun is far away from here"),
    "e": ("Dogs", "dogs chase cats"),  # as b
}
CORPUS = Dataset.from_dict(
    {
        "id": list(TEXTS),
        "title": [t for t, _ in TEXTS.values()],
        "text": [t for _, t in TEXTS.values()],
    }
)
WORDS = {
    key: re.findall(r"\b\w\w+\b", f"{title} {text}".lower()) for key, (title, text) in TEXTS.items()
}
STOP = {"and", "the", "is"}


def formula(query: str, key: str, k1: float = 1.5, b: float = 0.75) -> float:
    """Lucene's BM25: the sum over query words of idf * tf / (tf + k1 * (1 - b + b * length / mean
    length))."""
    documents = {
        name: [word for word in words if word not in STOP] for name, words in WORDS.items()
    }
    mean = np.mean([len(words) for words in documents.values()])
    score = 0.0
    for word in query.split():
        holding = sum(word in words for words in documents.values())
        idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
        tf = documents[key].count(word)
        score += idf * tf / (tf + k1 * (1 - b + b * len(documents[key]) / mean)) if tf else 0.0
    return score


@pytest.mark.parametrize("query", ["cats", "dogs chase cheese"])
def test_scores_are_the_formulas_and_passages_without_a_word_are_left_out(query):
    run = BM25(CORPUS).search({"q": query})
    expected = {key: formula(query, key) for key in TEXTS}
    assert {key for key, _ in run["q"]} == {key for key, score in expected.items() if score > 0}
    for key, score in run["q"]:
        assert score == pytest.approx(expected[key], rel=1e-5)


def test_equal_passages_are_in_the_order_of_the_corpus_also_at_the_cut():
    assert [key for key, _ in BM25(CORPUS).search({"q": "dogs"}, 2)["q"]] == ["b", "e"]
    assert [key for key, _ in BM25(CORPUS).search({"q": "dogs"}, 1)["q"]] == ["b"]


def test_queries_without_a_known_word_find_nothing():
    with pytest.warns(UserWarning, match="no passage was found for 4 of 4 queries"):
        run = BM25(CORPUS).search(
            {"unknown": "xylophone", "stop": "the is", "empty": "", "signs": "?!"}
        )
    assert run == {"unknown": [], "stop": [], "empty": [], "signs": []}


def test_a_corpus_of_stop_words_finds_nothing():
    corpus = Dataset.from_dict({"id": ["a"], "title": [""], "text": ["the"]})
    assert BM25(corpus).search({"q": "cats"}) == {"q": []}


def test_stop_words_are_lucenes_as_in_bm25s():
    assert set(bm25s.stopwords.STOPWORDS_EN) == STOP_WORDS


def corpus_of(texts: list[str]) -> Dataset:
    ids = [str(number) for number in range(len(texts))]
    return Dataset.from_dict({"id": ids, "title": [""] * len(texts), "text": texts})


# passages, and for each of them a query that shares words with it alone
LANGUAGES = {
    "Chinese": (
        [
            "北京是中国的首都。",
            "长江是亚洲最长的河流。",
            "熊猫以竹子为食。",
            "上海有一座很高的塔。",
        ],
        ["中国首都", "最长河流是哪条", "熊猫吃什么", "高塔在上海吗"],
    ),
    "Japanese": (
        [
            "東京は日本の首都です。",
            "富士山は一番高い山です。",
            "寿司は生の魚で作ります。",
            "ロボットが工場で働く。",
        ],
        ["日本の首都", "高い山", "生魚の寿司", "ﾛﾎﾞｯﾄ"],  # the last in half-width letters
    ),
    "Thai": (
        [
            "กรุงเทพมหานครเป็นเมืองหลวงของไทย",
            "ข้าวผัดเป็นอาหารยอดนิยม",
            "ช้างเป็นสัตว์ขนาดใหญ่",
            "ภาคใต้มีทะเลสวย",
        ],
        ["เมืองหลวง", "ข้าวผัด", "ช้าง", "ทะเล"],
    ),
    "Korean": (
        [
            "서울은 한국의 수도이다.",
            "김치를 배추로 만든다.",
            "제주도에서 귤이 자란다.",
            "기차가 부산까지 간다.",
        ],
        ["수도", "배추", "귤", "부산"],
    ),
    "Arabic": (
        ["القاهرة عاصمة مصر", "النيل نهر طويل", "الجمل يعيش في الصحراء", "اللُّغَةُ الْعَرَبِيَّةُ جميلة"],
        ["عاصمة", "نهر", "الصحراء", "العربية"],  # the last is written without vowel points
    ),
    "Greek": (["Η ΟΔΟΣ ΤΩΝ ΘΕΩΝ", "η θάλασσα"], ["οδος", "ΘΆΛΑΣΣΑ"]),
}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_each_query_finds_its_passage_first(language, form):
    passages, queries = LANGUAGES[language]
    passages = [unicodedata.normalize(form, text) for text in passages]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = BM25(corpus_of(passages)).search({str(n): text for n, text in enumerate(queries)})
    assert [hits[0][0] for hits in run.values()] == [str(n) for n in range(len(queries))]


def test_one_character_is_a_word_of_a_query():
    texts = ["Vitamin C helps", "Vitamin D helps", "私は猫が好き", "犬もいい", "plan 9", "plan 8"]
    queries = {"0": "C", "1": "d", "2": "猫", "3": "犬", "4": "9", "5": "8"}
    run = BM25(corpus_of(texts)).search(queries)
    assert [[passage for passage, _ in hits] for hits in run.values()] == [
        ["0"],
        ["1"],
        ["2"],
        ["3"],
        ["4"],
        ["5"],
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("東京タワーは高い", ["東京", "京タ", "タワ", "ワー", "ーは", "は高", "高い"]),
        ("人 々 人々", ["人", "々", "人々"]),
        ("Don't: the C++ x_1", ["don", "t", "c", "x_1"]),
        ("İstanbul, istanbul", ["istanbul", "istanbul"]),
    ],
)
def test_words_of_a_query(text, words):
    assert words_of(text) == [unicodedata.normalize("NFKC", word) for word in words]


def test_scores_of_character_pairs_are_the_formulas():
    """Passages have single characters and pairs, queries pairs."""
    texts = ["北京大学在北京", "上海大学", "北方的京城"]
    documents = [
        [*text, *(text[start : start + 2] for start in range(len(text) - 1))] for text in texts
    ]
    mean = np.mean([len(document) for document in documents])
    expected = {}
    for number, document in enumerate(documents):
        score = 0.0
        for word in ("北京", "京大", "大学"):
            holding = sum(word in other for other in documents)
            tf = document.count(word)
            idf = math.log(1 + (3 - holding + 0.5) / (holding + 0.5))
            score += idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        expected[str(number)] = score
    found = dict(BM25(corpus_of(texts)).search({"q": "北京大学"})["q"])
    assert found == pytest.approx(
        {key: score for key, score in expected.items() if score}, rel=1e-5
    )
    assert len(found) == 2


def mined(folder: Path, queries: list[str], passages: list[str]) -> list[str]:
    """Write examples whose query n has the positive n; return the words of a ``mine`` command."""
    records = [
        {"query": query, "pos": [passage]} for query, passage in zip(queries, passages, strict=True)
    ]
    data = write(folder / "train.jsonl", lines(*records))
    output = folder / "mined.jsonl"
    return f"mine --model bm25 --num_negatives 1 --data {data} --output {output}".split()


def test_mining_without_any_negative_is_refused_and_writes_nothing(tmp_path, capsys):
    command = mined(tmp_path, ["chats", "chiens"], ["cats purr", "dogs bark"])
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "mined.jsonl: no negative for 2 of 2 queries (candidates removed: " in said
    assert not list(tmp_path.glob("mined*"))


@pytest.mark.filterwarnings("always:.*no negative for")
def test_mining_with_few_negatives_warns(tmp_path, capsys):
    command = mined(tmp_path, ["the cats", "dogs", "hunde"], ["cats purr", "big cats", "x y"])
    assert main(command) == 0
    assert "no negative for 2 of 3 queries" in capsys.readouterr().err
    report = json.loads((tmp_path / "mined.about.json").read_text())
    assert report["queries_without"] == 2
