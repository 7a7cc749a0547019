"""Files as people have them: other field names, endings, encodings, and files that are no data."""

import gzip
import json
import os
import re
import warnings

import pytest
from tiny_data import beir, lines, write, write_gzip

from contaccum.cli import main
from contaccum.config import DataPolicy
from contaccum.data.commands import check
from contaccum.data.corpus import read_query_texts
from contaccum.data.dataset import open_dataset
from contaccum.errors import InputError
from contaccum.formats.readers import kind_of_data
from contaccum.retrieval.runs import read_run

PAIRS = [{"query": "one", "pos": ["a"]}, {"query": "two", "pos": ["b"], "neg": ["c"]}]
DPR = {"question": "one", "positive_ctxs": [{"title": "", "text": "a"}], "hard_negative_ctxs": []}
TEVATRON = {"query": "one", "positive_passages": [{"docid": "1", "text": "a"}]}
PASSAGE = {"_id": "1", "title": "", "text": "a"}


def said_by(capsys, *words: str) -> str:
    """Return the sentence of a command that fails."""
    assert main(list(words)) == 2
    return capsys.readouterr().err


# formats are told by the fields


@pytest.mark.parametrize("form", ["lines", "list", "list over many lines"])
@pytest.mark.parametrize("name", ["X.JSONL", "x.json.gz"])
@pytest.mark.parametrize(
    ("record", "kind"),
    [(PAIRS[1], "jsonl"), (TEVATRON, "tevatron"), (DPR, "dpr"), (PASSAGE, "corpus")],
)
def test_lists_and_lines_are_told_by_their_fields(form, name, record, kind, tmp_path):
    content = lines(record)
    if form != "lines":
        content = json.dumps([record], indent=None if form == "list" else 2)
    path = (write_gzip if name.endswith(".gz") else write)(tmp_path / name, content)
    assert kind_of_data(path) == kind


def test_fields_of_other_names_are_answered_with_the_way_to_read_them(tmp_path, capsys):
    path = write(tmp_path / "pairs.jsonl", lines({"anchor": "one", "positive": "a"}))
    said = said_by(capsys, "data", "check", str(path))
    assert "found fields 'anchor', 'positive'; a record must be" in said
    assert 'give "hub:NAME?query=COLUMN&pos=COLUMN"' in said


@pytest.mark.parametrize("name", ["T.CSV", "T.JSONL", "t.csv.gz"])
def test_endings_in_capitals_and_columns_with_signs_work(name, tmp_path):
    columns = ["query", "Q&A", "x, y", "100%"]
    if "csv" in name.lower():
        content = 'query,Q&A,"x, y",100%\none,a,b,c\n'
    else:
        content = lines(dict(zip(columns, ["one", "a", "b", "c"], strict=True)))
    path = (write_gzip if name.endswith(".gz") else write)(tmp_path / name, content)
    data = open_dataset(f"hub:{path}?query=query&pos=Q%26A,x%2C y&neg=100%", "train")
    (example,) = data.examples()
    assert [passage.text for passage in example.positives] == ["a", "b"]
    assert [passage.text for passage in example.negatives] == ["c"]


def test_an_unknown_column_is_answered_with_the_columns(tmp_path):
    path = write(tmp_path / "t.csv", 'query,Q&A,"x, y"\none,a,b\n')
    with pytest.raises(InputError, match="'Q' not found; available: 'query', 'Q&A', 'x, y'"):
        open_dataset(f"hub:{path}?query=query&pos=Q", "train").examples()
    with pytest.raises(InputError, match="write %26 for & and %2C for a comma"):
        open_dataset(f"hub:{path}?query=query&pos=Q&A", "train").examples()


def test_messages_about_a_table_name_its_rows(tmp_path):
    """They named a file in the cache and the line there."""
    path = write(tmp_path / "t.csv", "query,pos,neg\none,a,b\ntwo,c,c\n")
    table = re.escape(f"hub:{path}")
    said = rf"^{table}: left out 1 hard negative .* \(the first: {table}, row 2\)$"
    with pytest.warns(UserWarning, match=said):
        check(f"hub:{path}")
    with pytest.raises(InputError, match=rf"{table}, row 2\); strict is set"):
        check(f"hub:{path}", policy=DataPolicy(strict=True))


def test_a_table_with_semicolons_is_read(tmp_path):
    """Spreadsheet programs write them in countries with a decimal comma."""
    path = write(tmp_path / "t.csv", 'query;answer\none;a, b\ntwo;"c; d"\n')
    table = f"hub:{path}?query=query&pos=answer"
    examples = open_dataset(table, "train").examples()
    assert [each.positives[0].text for each in examples] == ["a, b", "c; d"]
    write(path, "query;answer,short\none;a,b\n")
    with pytest.raises(InputError, match=r"'query' not found; available: 'query;answer', 'short'"):
        open_dataset(table, "train").examples()


def test_a_label_decides_between_positive_and_hard_negative(tmp_path):
    path = write(tmp_path / "t.csv", "q,p,score\na,right,0.9\nb,good,0.5\na,wrong,0.1\n")
    examples = open_dataset(f"hub:{path}?query=q&pos=p&label=score", "train").examples()
    assert [
        (each.query.text, [p.text for p in each.positives], [p.text for p in each.negatives])
        for each in examples
    ] == [("a", ["right"], ["wrong"]), ("b", ["good"], [])]
    path = write(
        tmp_path / "t.jsonl",
        lines({"q": "a", "p": "b", "l": True}, {"q": "a", "p": "c", "l": "no"}),
    )
    with pytest.raises(InputError, match=r"t.jsonl:2: column 'l' has 'no'; expected a number"):
        open_dataset(f"hub:{path}?query=q&pos=p&label=l", "train").examples()
    with pytest.raises(InputError, match=r"t.jsonl:1: column 'x' not found; available"):
        open_dataset(f"hub:{path}?query=q&pos=p&label=x", "train").examples()
    path = write(tmp_path / "b.csv", "q,p,l,label\na,right,TRUE,1\na,wrong,False,0\nb,bad,0,0\n")
    name = f"hub:{path}?query=q&pos=p"
    with pytest.warns(UserWarning, match=r"2 rows with a label or score .* add &label=COLUMN"):
        check(name)
    with pytest.warns(UserWarning, match="skipped 1 query without a positive"):
        (example,) = open_dataset(f"{name}&label=l", "train").examples()
    assert [each.text for each in example.negatives] == ["wrong"]
    for value in ("nan", "", "null"):
        path = write(tmp_path / "n.csv", f"q,p,l\na,b,{value}\n")
        with pytest.raises(InputError, match=rf"n.csv:2: column 'l' has '{value}'; expected a num"):
            check(f"hub:{path}?query=q&pos=p&label=l")


def test_a_wrong_row_of_a_table_is_named_by_its_number(tmp_path):
    path = write(tmp_path / "t.csv", 'q,p,l\n"several\nlines",a,1\nb,c,x\n')
    name = f"hub:{path}?query=q&pos=p"
    with pytest.raises(InputError, match=r"t\.csv:4: column 'l' has 'x'"):
        check(f"{name}&label=l")
    write(path, "q,p\n")
    with pytest.raises(InputError, match=r"t\.csv\?query=q&pos=p: has no rows"):
        check(name)


def test_rows_without_a_query_or_an_answer_are_skipped(tmp_path):
    """A cell may be empty or white space, and a JSON object may lack it."""
    table = write(tmp_path / "t.csv", 'q,p\n"several\nlines",a\n" ",b\n,c\nd," "\ne,\n')
    records = [
        {"p": "b"}, {"q": "several\nlines", "p": "a"}, {"q": None, "p": "c"}, {"q": "d"},
        {"q": "e", "p": " "},
    ]  # fmt: skip
    for path, first in ((table, r"t\.csv:4"), (write(tmp_path / "t.jsonl", lines(*records)), 1)):
        with pytest.warns(UserWarning, match="skipped") as said:
            (example,) = open_dataset(f"hub:{path}?query=q&pos=p", "train").examples()
        assert (example.query.text, example.positives[0].text) == ("several\nlines", "a")
        sentences = " ".join(str(each.message) for each in said)
        assert re.search(rf"skipped 2 rows without a query \(the first: .*{first}\)", sentences)
        assert "skipped 2 queries without a positive" in sentences


def test_a_wrong_line_of_a_file_is_named_as_the_file_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.jsonl", lines({"query": "a", "pos": "b"}, {"query": " ", "pos": "b"}))
    with pytest.raises(InputError, match=r"^(\./)?x\.jsonl:2: the query has an empty text"):
        check("./x.jsonl")


def test_columns_that_look_like_hard_negatives_are_not_dropped_silently(tmp_path):
    header = "query,pos,neg,negative_2\n"
    path = write(tmp_path / "t.csv", f"{header}a,b,c,d\n")
    for _ in range(2):  # the second time, the cache has the rows
        with pytest.warns(UserWarning, match=r"column negative_2 not read; .*&neg=negative_2"):
            assert open_dataset(f"hub:{path}", "train").path
    write(path, f"{header}a,b,c,\n")  # negative control
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_dataset(f"hub:{path}", "train").path


@pytest.mark.parametrize("zero", [0, "0"])
def test_rows_with_label_0_are_warned_of_at_every_use(zero, tmp_path):
    rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in (1, zero, zero)]
    path = write(tmp_path / "pairs.jsonl", lines(*rows))
    name = f"hub:{path}?query=sentence1&pos=sentence2"
    for _ in range(2):  # the second time, the cache has the rows
        with pytest.warns(UserWarning, match="2 rows with a label or score below .* positive pair"):
            assert open_dataset(name, "train").path
    write(path, lines(*({**row, "label": 1} for row in rows)))  # negative control
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_dataset(name, "train").path


def test_a_folder_with_two_configurations_needs_the_name_of_one(tmp_path, capsys):
    for part in ("a", "b"):
        write(tmp_path / "two" / part / "x.jsonl", lines({"query": part, "pos": ["p"]}))
    card = "".join(f"- config_name: {part}\n  data_files: {part}/*.jsonl\n" for part in "ab")
    write(tmp_path / "two" / "README.md", f"---\nconfigs:\n{card}---\n")
    name = f"hub:{tmp_path / 'two'}"
    assert "pick one among the available configs: ['a', 'b']" in said_by(
        capsys, "data", "check", name
    )
    assert open_dataset(f"{name}:a", "train").train_set().queries["text"][:] == ["a"]


# encodings


@pytest.mark.parametrize("form", ["jsonl", "csv", "queries.tsv"])
def test_a_text_that_is_not_utf8_is_refused_with_its_line(form, tmp_path):
    content = {
        "jsonl": lines(*PAIRS) + '{"query": "café", "pos": ["a"]}\n',
        "csv": "query,pos\none,a\ncafé,b\n",
        "queries.tsv": "1\tone\n2\tcafé\n",
    }[form]
    path = write(tmp_path / f"x.{form}", content.encode("cp1252"))
    name = f"hub:{path}?query=query&pos=pos" if form == "csv" else path

    def read():
        data = open_dataset(name, "train")
        return data.queries if form == "queries.tsv" else data.examples()

    line = content[: content.index("café")].count("\n") + 1
    with pytest.raises(InputError, match=rf"^{path}:{line}: byte 0xe9 is not UTF-8\. Convert"):
        read()
    write(path, content)  # negative control
    assert read()


# gzipped outputs and odd texts


def test_outputs_with_the_ending_gz_are_gzipped(tmp_path):
    ending = ".GZ"
    data = str(beir(tmp_path / "d"))
    texts = [{"_id": f"p{n}", "text": f"answer to query {n}"} for n in range(6)]
    write(tmp_path / "d" / "corpus.jsonl", lines(*texts))
    outputs = {
        f"mined.jsonl{ending}": f"mine --model bm25 --data {data} --num_negatives 1 --output",
        f"run.trec{ending}": f"search --model bm25 --data {data} --split train --output",
        f"examples.jsonl{ending}": f"data convert {data} --to jsonl",
        f"dpr.json{ending}": f"data convert {data} --to dpr",
    }
    for name, command in outputs.items():
        assert main([*command.split(), str(tmp_path / name)]) == 0
        assert gzip.decompress((tmp_path / name).read_bytes()).startswith((b"{", b"q0 Q0 ", b"["))
    assert read_run(tmp_path / f"run.trec{ending}")
    assert len(open_dataset(tmp_path / f"mined.jsonl{ending}").examples()) == 3


@pytest.mark.parametrize("query", ["null", "~", "[text]"])
def test_a_query_is_always_text(query, tmp_path, capsys):
    passages = [{**PASSAGE, "text": f"the text {query}"}, {**PASSAGE, "_id": "2", "text": "other"}]
    path = write(tmp_path / "corpus.jsonl", lines(*passages))
    words = [
        "search",
        "--model",
        "bm25",
        "--data",
        str(path),
        "--query",
        f"text {query}"[5 * (query != "~") :],
    ]
    assert main(words) == 0
    assert f"the text {query}" in capsys.readouterr().out


def test_the_home_folder_can_be_written_with_a_tilde(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    data = beir(tmp_path / "d", split="test")
    write(tmp_path / "e" / "pairs.jsonl", lines({"anchor": "one", "positive": "a"}))
    write(
        tmp_path / "c.yaml", "data: {train: ~/d, dev: ~/d}\nmodel: {name: ~/m}\noutput_dir: ~/o\n"
    )
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert main(["evaluate", "--model", "bm25", "--data=~/d", "--output=~/m.json"]) == 0
    assert (tmp_path / "m.json").is_file()
    assert main(["evaluate", "--model", "bm25", "--data=~/d,~/e/../d"]) == 0
    assert main(["data", "check", "~/d"]) == 0
    assert main(["data", "check", "hub:~/e?query=anchor&pos=positive"]) == 0
    capsys.readouterr()
    assert main(["train", "--config=~/c.yaml", "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f": {tmp_path}/") == 4
    assert not os.listdir(tmp_path / "work")
    # negative control: a text is no path
    corpus = str(data / "corpus.jsonl")
    assert main(["search", "--model", "bm25", "--data", corpus, "--query", "~/text"]) == 0
    assert "text 0" in capsys.readouterr().out


def test_a_parquet_file_is_answered_with_the_name_that_reads_it(tmp_path):
    path = write(tmp_path / "table", b"PAR1\xff\xce\x00")
    with pytest.raises(InputError, match='format Parquet; name it as "hub:FILE'):
        open_dataset(path, "train").examples()


@pytest.mark.parametrize("text", ["another", "same"])
def test_a_repeated_query_id_with_another_text_is_named(text, tmp_path):
    queries = [{"_id": "q", "text": "same"}, {"_id": "q", "text": text}]
    path = write(tmp_path / "queries.jsonl", lines(*queries))
    with pytest.warns(UserWarning, match="skipped 1 query with the id of a later one") as said:
        assert read_query_texts(path, repair=True) == {"q": text}
    named = "the texts of 1 id differ, such as 'q', so judgements of the earlier ones now belong"
    assert (named in str(said[0].message)) == (text == "another")
