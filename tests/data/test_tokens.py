"""Token tables against the tokenizer called on one text at a time."""

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from contaccum.data import tables as tokens
from contaccum.data.tables import build_token_table
from contaccum.errors import InputError
from contaccum.formats.records import Passage
from contaccum.runtime.files import cache_folder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "alpha", "beta", "gamma", "query", ":"]


def tokenizer(words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    base = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=base, pad_token="[PAD]", unk_token="[UNK]")


def texts(count: int = 5000) -> Dataset:
    some = [" ".join(WORDS[4 + (n * k) % 3] for k in range(n % 7)) for n in range(count)]
    titles = ["beta" if n % 2 else "" for n in range(count)]
    return Dataset.from_dict({"id": list(map(str, range(count))), "title": titles, "text": some})


def test_rows_are_the_tokens_of_each_text():
    table, make = texts(), tokenizer()
    built = build_token_table(
        table, ("title", "text"), make, max_length=6, prefix="query: ", fingerprint="f"
    )
    assert len(built) == len(table)
    for number in [4999, 0, 2000, 1999, 17]:
        content = "query: " + Passage(**table[number]).content
        expected = make(content, truncation=True, max_length=6)["input_ids"]
        (found,) = built.rows(np.array([number]))
        assert found.dtype == np.int32
        assert found.tolist() == expected
        assert len(expected) <= 6


def test_an_empty_text_has_tokens():
    table = Dataset.from_dict({"text": ["", "alpha"]})
    built = build_token_table(table, ["text"], tokenizer(), max_length=8, fingerprint="f")
    assert [row.tolist() for row in built.rows(np.arange(2))] == [[2, 3], [2, 4, 3]]
    plain = tokenizer()
    plain.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", special_tokens=[]
    )
    built = build_token_table(table, ["text"], plain, max_length=8, fingerprint="f")
    # a padding token, as in encoding
    assert [row.tolist() for row in built.rows(np.arange(2))] == [
        [0],
        [4],
    ]


def test_an_id_without_word_embedding_is_refused(monkeypatch):
    table, call = texts(20), {"max_length": 6, "fingerprint": "f"}
    for path in ("built", "cached"):
        with pytest.raises(
            InputError, match=r"token id 6 \('gamma'\), but the encoder has 6 word embeddings"
        ):
            build_token_table(table, ["text"], tokenizer(), vocabulary=6, **call)
        if path == "built":
            build_token_table(table, ["text"], tokenizer(), vocabulary=7, **call)
            monkeypatch.setattr(tokens, "column_batches", lambda *_: pytest.fail("tokenized again"))


def test_every_part_of_the_cache_key_counts(monkeypatch):
    table, make = texts(20), tokenizer()
    base = {"max_length": 6, "prefix": "", "fingerprint": "f"}
    build_token_table(table, ["text"], make, **base)
    # leaves its padding behind in the tokenizer
    make(["alpha beta"], padding=True, truncation=True, max_length=3)
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "column_batches", lambda *_: pytest.fail("tokenised again"))
        build_token_table(table, ["text"], make, **base)
    left = tokenizer()
    left.truncation_side = "left"
    others = [
        (["title"], make, base),
        (["text"], left, base),
        (["text"], tokenizer([*WORDS, "more"]), base),
        (["text"], make, {**base, "max_length": 5}),
        (["text"], make, {**base, "prefix": "query: "}),
        (["text"], make, {**base, "fingerprint": "g"}),
    ]
    for number, (columns, other, options) in enumerate(others, 2):
        build_token_table(table, columns, other, **options)
        assert len(list((cache_folder() / "tokens").iterdir())) == number
