"""DPR's answer matching in cases made by hand, and accuracy against plain words."""

import pytest
from datasets import Dataset

from contaccum.cli import main
from contaccum.errors import InputError
from contaccum.evaluation.answers import answer_accuracy
from contaccum.formats.records import Question


def has_answer(text: str, answers: list[str], match: str = "string") -> bool:
    corpus = Dataset.from_dict({"id": ["p"], "title": [""], "text": [text]})
    return (
        answer_accuracy([Question("", answers)], {"0": [("p", 1.0)]}, corpus, match=match)["mean"][
            "top1"
        ]
        == 1
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It was signed in Paris.", "paris"),  # case
        ("Born in Sa\u0303o Paulo", "S\u00e3o Paulo"),  # an accent as one character or two
        (
            "won 24\u201310 at home",
            "24\u201310",
        ),  # signs are tokens of their own, inside the answer too
        ("about $1.2 million was lost", "$1.2 million"),
        ("at 10 : 30 sharp", "10:30"),
        (
            "the re\u00adbirth",
            "re birth",
        ),  # a soft hyphen is a control character: it parts tokens and is none
        ("x", "x"),  # the whole passage
    ],
)
def test_held(text, answer):
    assert has_answer(text, [answer])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It was signed in Parisian style", "Paris"),  # whole tokens only
        ("gave up 308,000 points", "308000"),
        ("Sao Paulo", "S\u00e3o Paulo"),  # accents count: they are not stripped
        ("first great man", "first man"),  # nothing in between
        ("won 24-10", "24\u201310"),  # another dash
        ("", "anything"),
    ],
)
def test_not_held(text, answer):
    assert not has_answer(text, [answer])


def test_an_answer_without_a_token_is_found_nowhere_and_named():
    """DPR finds it in every passage."""
    with pytest.warns(UserWarning, match=r"1 question without a letter.*\(first: question 0\)"):
        assert not has_answer("some text", [" \u00ad "])


def test_one_of_several_answers_is_enough_and_none_is_not():
    assert has_answer("the fourth", ["four", "fourth"])
    assert not has_answer("the fourth", ["four", "forth"])
    with pytest.warns(UserWarning, match="count as wrong"):
        assert not has_answer("the fourth", [])


@pytest.mark.parametrize(
    ("text", "pattern", "held"),
    [
        ("in March 1998 or so", r"199[78]", True),
        ("NEW YORK city", r"new\s+york", True),
        ("first line\nsecond line", r"^second", True),  # every line has a beginning
        ("some text", "", False),
        ("some text", "(", False),  # no regular expression
        ("some text", "(?a)text", False),  # a flag that contradicts Unicode
        ("3080", r"308", True),  # a pattern is not held to whole tokens
    ],
)
def test_patterns(text, pattern, held):
    assert has_answer(text, [pattern], "regex") == held


CORPUS = Dataset.from_dict(
    {
        "id": ["p1", "p2", "p3", "p4"],
        "title": ["Paris", "", "Rome is old", ""],
        "text": ["It is a city.", "The capital is Paris.", "and large", "Nothing here (at all"],
    }
)


def run_of(*lists: str) -> dict[str, list[tuple[str, float]]]:
    return {
        str(q): [(p, 1.0 / n) for n, p in enumerate(hits.split(), 1)]
        for q, hits in enumerate(lists)
    }


def test_ranks_are_counted_and_the_title_does_not_count():
    questions = [
        Question("capital?", ["Paris"]),
        Question("old?", ["old and large"]),
        Question("big?", ["large"]),
    ]
    metrics = answer_accuracy(
        questions, run_of("p1 p2 p3", "p3 p4", "p3"), CORPUS, cutoffs=(1, 2, 5)
    )
    assert metrics["per_query"] == {
        "0": {"top1": 0.0, "top2": 1.0, "top5": 1.0},  # the first passage has it in its title alone
        "1": {"top1": 0.0, "top2": 0.0, "top5": 0.0},  # the answer crosses from title to text
        "2": {"top1": 1.0, "top2": 1.0, "top5": 1.0},
    }
    assert metrics["mean"] == {
        "top1": pytest.approx(1 / 3),
        "top2": pytest.approx(2 / 3),
        "top5": pytest.approx(2 / 3),
    }
    assert metrics["queries"] == 3


def test_a_question_without_results_counts_zero():
    questions = [Question("a", ["Paris"]), Question("b", ["Paris"])]
    assert answer_accuracy(questions, {"1": [("p2", 1.0)]}, CORPUS)["mean"]["top1"] == 0.5


def test_bm25_is_scored_on_questions(tmp_path, capsys):
    (tmp_path / "q.csv").write_text('what is red\t["fox"]\nwhat is blue\t["absent"]\n')
    (tmp_path / "p.tsv").write_text("id\ttext\ttitle\n1\tthe fox is red\tT\n2\tblue sky\tS\n")
    call = [
        "evaluate", "--model", "bm25", "--questions", str(tmp_path / "q.csv"),
        "--passages", str(tmp_path / "p.tsv"),
    ]  # fmt: skip
    assert main([*call, "--k", "5", "--match", "regex"]) == 0
    assert capsys.readouterr().out.split()[:4] == ["top1", "0.5000", "top5", "0.5000"]


def test_a_pattern_that_backtracks_without_end_is_stopped_and_named():
    """Not stopped, it would try more than 10^12 ways to divide the letters."""
    corpus = Dataset.from_dict({"id": ["p"], "title": [""], "text": ["a" * 60 + "b"]})
    questions = [Question("fine", ["ab"]), Question("bomb", [r"(a|aa)+$"])]
    with pytest.raises(
        InputError, match=r"question 1: its answer pattern '\(a\|aa\)\+\$' took more than 1 s"
    ):
        answer_accuracy(questions, run_of("p", "p"), corpus, match="regex")
