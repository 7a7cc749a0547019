"""Passages and queries in memory: every form gives the same search, and doubtful values are
refused."""

import numpy as np
import pandas
import pytest
from datasets import Dataset
from word_encoder import WordEncoder

from contaccum.data.texts import passage_table
from contaccum.errors import InputError
from contaccum.retrieval.retriever import Retriever

BY_ID = {"7": "the Rhine flows north", "8": "green pears", "9": "Saturn has rings"}
IDS, TEXTS = list(BY_ID), list(BY_ID.values())
NUMBERS = list(map(int, IDS))


@pytest.mark.parametrize(
    "corpus",
    [
        dict(zip(NUMBERS, TEXTS, strict=True)),
        Dataset.from_dict({"id": IDS, "text": TEXTS}),
        Dataset.from_dict({"_id": NUMBERS, "text": TEXTS, "title": [None, "", None]}),
        pandas.DataFrame({"id": NUMBERS, "text": TEXTS, "other": [1, 2, 3]}),
        pandas.DataFrame({"_id": IDS, "text": TEXTS, "title": [None, float("nan"), ""]}),
        {key: {"title": "", "text": text} for key, text in BY_ID.items()},  # as BEIR reads it
        {key: {"text": text} for key, text in BY_ID.items()},
        pandas.Series(TEXTS, index=NUMBERS),
        pandas.Series(TEXTS, index=IDS),
        dict(zip(np.array(NUMBERS), np.array(TEXTS), strict=True)),
    ],
)
@pytest.mark.parametrize("model", ["bm25", WordEncoder()])
def test_every_form_of_a_corpus_is_the_same_corpus(corpus, model):
    queries = {"3": "Saturn", "4": "None"}
    expected = Retriever.open(model, BY_ID).search(queries, 3)
    assert expected["3"][0][0] == "9"
    found = Retriever.open(model, corpus)
    assert found.search(queries, 3) == expected
    assert found.search(pandas.Series(list(queries.values()), index=[3, 4]), 3) == expected
    titled = Dataset.from_dict({"id": IDS, "text": TEXTS, "title": ["None", "", ""]})
    assert Retriever.open(model, titled).search(queries, 3) != expected  # negative control


def test_a_complete_table_is_not_copied():
    """It can be larger than memory."""
    columns = {"id": IDS, "title": [""] * 3, "text": TEXTS}
    table = Dataset.from_dict(columns)
    assert passage_table(table) is table
    part = table.select([0, 2])
    assert passage_table(part) is part
    with pytest.raises(InputError, match="id '8' is used 2 times"):
        passage_table(table.select([1, 0, 1]))
    for formatted in (table.with_format("arrow"), table.with_format(None, columns=["text"])):
        assert passage_table(formatted)[:] == columns
    for other in ({"id": NUMBERS}, {"title": [None, "", ""]}):
        assert passage_table(Dataset.from_dict(columns | other))[:] == columns


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", None], "'1': found NoneType; expected a text"),
        (["a", float("nan")], "'1': found float; expected a text"),
        ([1], "'0': found int; expected a text"),
        ([("x", "a")], "'0': found tuple; expected a text"),
        ([{"_id": "x", "text": "a"}], "'0': found dict; expected a text"),
        (pandas.DataFrame({"id": ["x"], "text": [None]}), "'x': found NoneType; expected a text"),
        ({1: "a", "1": "b"}, "id '1' is used 2 times; ids must be unique"),
        (Dataset.from_dict({"id": ["x", "x"], "text": ["a", "b"]}), "id 'x' is used 2 times"),
        ({1.5: "a"}, "0: the id is 1.5, expected a text or a whole number"),
        ({"": "a"}, "0: the id is '', expected a text or a whole number"),
        (pandas.DataFrame({"id": ["x", None], "text": ["a", "b"]}), "1: the id is None, expected"),
    ],
)
def test_values_that_are_no_texts_and_repeated_ids_are_refused(texts, message):
    with pytest.raises(InputError, match=f"^passage {message}"):
        Retriever.open("bm25", texts)
    with pytest.raises(InputError, match=f"^query {message}"):
        Retriever.open("bm25", ["a"]).search(texts)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Retriever.open("bm25", None), "found a NoneType; expected a list of texts"),
        (lambda: Retriever.open(object(), ["a"]), "model is a object, expected a DualEncoder"),
        (lambda: Retriever.open("bm25", ["a"]).search(["a"], "2"), "k is '2', expected `int`"),
        (lambda: Retriever.open("bm25", pandas.DataFrame({"text": ["a"]})), "the table has the co"),
    ],
)
def test_other_arguments_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
