"""Passages as `search --query` prints them: the part with the query's words, and marked words."""

import json
import re

import pytest
from helpers import write_beir

from contaccum import DualEncoder, TrainConfig
from contaccum.cli import main
from contaccum.config import load
from contaccum.retrieval.runs import RankedPassage, best_part, render_passages

LONG = "filler words without meaning " * 20 + "the red fox sleeps " + "more of the same " * 20


def test_best_part_has_the_most_different_words_of_the_query():
    pattern = re.compile(r"\bred\b|\bfox\b|\bsame\b")
    part = best_part(LONG, pattern)
    assert "red fox" in part
    assert "same" in part
    assert part.startswith("… ")
    assert part.endswith(" …")
    assert len(part) <= 200 + 4
    assert part.strip("… ") in LONG
    # negative control: without words of the query, the part is the start of the text
    assert LONG.startswith(best_part(LONG, re.compile("(?!)")).strip("… "))
    assert best_part("short", pattern) == "short"


def test_words_are_marked_only_on_request_and_only_whole():
    passage = RankedPassage("d1", 0.5, "Redness", "a Red\x1b[2J fox and foxes")
    plain = render_passages([passage], {"red", "fox"})
    assert plain == "  1    0.5000  d1  Redness\n      a Red [2J fox and foxes"
    marked = render_passages([passage], {"red", "fox"}, mark=True)
    assert marked.endswith("a \x1b[1mRed\x1b[0m [2J \x1b[1mfox\x1b[0m and foxes")
    assert "\x1b" not in marked.splitlines()[0]
    assert re.sub(r"\x1b\[[01]m", "", marked) == plain


def test_json_has_one_object_a_line_with_the_whole_text(tmp_path, capsys):
    data, text = write_beir(tmp_path / "data"), "\x7f\x85\x1b \\ \u2028 é \U0001f98a"
    corpus = (data / "corpus.jsonl").read_text()
    assert '"text": "' in corpus
    prefix = json.dumps(text)[1:-1]
    (data / "corpus.jsonl").write_text(corpus.replace('"text": "', f'"text": "{prefix}'))
    call = ["search", "--model", "bm25", "--data", str(data), "--query", "red fox", "--k", "2"]
    assert main([*call, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(each) for each in found] == [["rank", "id", "score", "title", "text"]] * 2
    assert [each["rank"] for each in found] == [1, 2]
    assert all(each["text"].startswith(text) for each in found)
    assert main(call) == 0
    for each, line in zip(found, capsys.readouterr().out.splitlines()[::2], strict=True):
        assert line.split()[:3] == [str(each["rank"]), f"{each['score']:.4f}", each["id"]]


def test_names_of_sentence_transformers_are_aliases():
    assert DualEncoder.encode_query is DualEncoder.encode_queries
    assert DualEncoder.encode_document is DualEncoder.encode_passages


def test_config_is_read_by_its_name():
    config = TrainConfig.from_config("finetune")
    assert config == load([TrainConfig], ["finetune"])[0] != TrainConfig()


@pytest.mark.parametrize(
    ("text", "names"),
    [("wandb", ["wandb"]), ("[tensorboard, wandb]", ["tensorboard", "wandb"])],
)
def test_a_list_of_one_word_needs_no_brackets(text, names):
    assert load([TrainConfig], [], {"run.trackers": text})[0].run.trackers == names
