"""DPR's answer matching in cases made by hand, and accuracy in one and in several processes."""

import time
import warnings

import pytest
from datasets import Dataset

from contaccum.cli import main
from contaccum.config.commands import SearchConfig
from contaccum.errors import InputError
from contaccum.evaluation import answers
from contaccum.evaluation.answers import Batch, answer_accuracy, first_hits
from contaccum.formats.records import Question
from contaccum.retrieval.retriever import Retriever


def has_answer(text: str, answers: list[str], match: str = "string") -> bool:
    return first_hits(Batch([("0", Question("", answers))], [[0]], [text], match))[0] == [1]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It was signed in Paris.", "paris"),  # case
        ("It was signed in PARIS", "Paris"),
        ("Born in Sa\u0303o Paulo", "S\u00e3o Paulo"),  # an accent as one character or two
        ("Beyonc\u00e9's album", "Beyonce\u0301"),
        ("gave up just 308 points", "308"),
        ("won 24\u201310 at home", "24\u201310"),  # signs are tokens of their own, inside the answer too
        ("about $1.2 million was lost", "$1.2 million"),
        ("founded by J. R. R. Tolkien", "J.R.R. Tolkien"),  # spaces do not count, tokens do
        ("at 10 : 30 sharp", "10:30"),
        ("the first\nman  on\tthe moon", "first man on the moon"),  # any white space
        ("the re\u00adbirth", "re birth"),  # a soft hyphen is a control character: it parts tokens and is none
        ("\u1fbd\u1f08\u03b8\u1fc6\u03bd\u03b1\u03b9 is Athens", "\u1f08\u03b8\u1fc6\u03bd\u03b1\u03b9"),
        ("(yes)", "yes"),
        ("x", "x"),  # the whole passage
        ("E = mc\u00b2", "mc\u00b2"),
    ],
)
def test_held(text, answer):
    assert has_answer(text, [answer])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It was signed in Parisian style", "Paris"),  # whole tokens only
        ("gave up 3080 points", "308"),
        ("gave up 308,000 points", "308000"),
        ("Sao Paulo", "S\u00e3o Paulo"),  # accents count: they are not stripped
        ("man first on the moon", "first man"),  # order
        ("first great man", "first man"),  # nothing in between
        ("won 24-10", "24\u201310"),  # another dash
        ("well known", "well-known"),
        ("", "anything"),
        ("some text", ""),
        ("some text", " \u00ad "),  # an answer without any token
    ],
)
def test_not_held(text, answer):
    assert not has_answer(text, [answer])


def test_one_of_several_answers_is_enough_and_none_is_not():
    assert has_answer("the fourth", ["four", "fourth"])
    assert not has_answer("the fourth", ["four", "forth"])
    assert not has_answer("the fourth", [])


@pytest.mark.parametrize(
    ("text", "pattern", "held"),
    [
        ("in March 1998 or so", r"199[78]", True),
        ("in March 1996", r"199[78]", False),
        ("NEW YORK city", r"new\s+york", True),
        ("first line\nsecond line", r"^second", True),  # every line has a beginning
        ("Beyonc\u00e9", "beyonce\u0301", True),
        ("some text", "", False),
        ("some text", "(", False),  # no regular expression
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
    return {str(q): [(p, 1.0 / n) for n, p in enumerate(hits.split(), 1)] for q, hits in enumerate(lists)}


def test_ranks_are_counted_and_the_title_does_not_count():
    questions = [Question("capital?", ["Paris"]), Question("old?", ["old and large"]), Question("big?", ["large"])]
    metrics = answer_accuracy(questions, run_of("p1 p2 p3", "p3 p4", "p3"), CORPUS, cutoffs=(1, 2, 5))
    assert metrics["per_query"] == {
        "0": {"top1": 0.0, "top2": 1.0, "top5": 1.0},  # the first passage has it in its title alone
        "1": {"top1": 0.0, "top2": 0.0, "top5": 0.0},  # the answer crosses from title to text
        "2": {"top1": 1.0, "top2": 1.0, "top5": 1.0},
    }
    assert metrics["mean"] == {"top1": pytest.approx(1 / 3), "top2": pytest.approx(2 / 3), "top5": pytest.approx(2 / 3)}
    assert metrics["queries"] == 3


def test_a_question_without_results_counts_zero():
    questions = [Question("a", ["Paris"]), Question("b", ["Paris"])]
    assert answer_accuracy(questions, {"1": [("p2", 1.0)]}, CORPUS)["mean"]["top1"] == 0.5


def many(count: int = 300):
    texts = [f"passage {n} tells of number {n % 17} and of {n % 5}" for n in range(200)]
    corpus = Dataset.from_dict({"id": [f"p{n}" for n in range(200)], "title": [""] * 200, "text": texts})
    questions = [Question(f"q{n}", [f"number {n % 23}", f"of {n % 7 + 3}"]) for n in range(count)]
    run = {str(n): [(f"p{(7 * n + 11 * rank) % 200}", 1.0 - rank / 100) for rank in range(30)] for n in range(count)}
    return questions, run, corpus


@pytest.mark.parametrize("match", ["string", pytest.param("regex", marks=pytest.mark.acceptance)])
def test_two_processes_count_what_one_counts_and_what_plain_words_say(match):
    questions, run, corpus = many()
    one = answer_accuracy(questions, run, corpus, match=match)
    two = answer_accuracy(questions, run, corpus, match=match, processes=2)
    assert one == two
    if match == "string":
        texts = dict(zip(corpus["id"], (f"{text} " for text in corpus["text"]), strict=True))
        first = [any(f"{a} " in texts[run[str(n)][0][0]] for a in q.answers) for n, q in enumerate(questions)]
        assert [one["per_query"][str(n)]["top1"] for n in range(300)] == [float(held) for held in first]
    changed = [question._replace(answers=["nowhere"]) for question in questions]
    assert answer_accuracy(changed, run, corpus, match=match, processes=2)["mean"]["top20"] == 0.0


def test_patterns_that_are_none_are_counted():
    questions = [Question("a", ["Par.s"]), Question("b", ["(", "[", "(?a)x", "capital"]), Question("c", [""])]
    with pytest.warns(UserWarning, match="4 answers are empty or not a regular expression"):
        metrics = answer_accuracy(questions, run_of("p2", "p2", "p2"), CORPUS, match="regex")
    assert metrics["mean"]["top1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_pattern_that_backtracks_without_end_is_stopped_and_named(processes):
    """Not stopped, it would try more than 10^12 ways to divide the letters."""
    corpus = Dataset.from_dict({"id": ["p"], "title": [""], "text": ["a" * 60 + "b"]})
    questions = [Question("fine", ["ab"]), Question("bomb", [r"(a|aa)+$"])]
    with pytest.raises(InputError, match=r"question 1: its answer pattern '\(a\|aa\)\+\$' took more than 1 s"):
        answer_accuracy(questions, run_of("p", "p"), corpus, match="regex", processes=processes)


EXPLOSIVE = {
    "a large repetition": (
        "a{100000000,}",
        r"has 100,000,000 characters after repetitions are expanded \(a\{3\} to aaa\); at most 100,000",
    ),
    "a large upper bound": ("x(ab){2,90000}", "has 180,001 characters after"),
    "nested repetitions": ("((a{500}){500}){500}", "has 125,000,000 characters after"),
    "a repeated class": (r"([\\)(]{400}){400}", "has 160,000 characters after"),
    "a number of 900 digits": ("a{" + "9" * 900 + "}", "has 999,999"),
    "20,000 brackets": ("(" * 10_000 + "a" + ")" * 10_000, "has 20,001 characters; at most 2,000 are allowed"),
    "a long text": ("a" * 2001, "has 2,001 characters"),
    "recursion": ("(?R)", "refers to itself; recursion is not allowed"),
    "recursion into a group": ("(a|(?1))*b", "refers to itself"),
    "recursion by name": ("(?P<x>a(?&x)?)", "refers to itself"),
}


@pytest.mark.parametrize(("pattern", "fault"), EXPLOSIVE.values(), ids=EXPLOSIVE)
def test_a_pattern_that_explodes_is_refused_before_it_is_compiled(pattern, fault):
    """Compiled, the first one takes 12 s and 4 GB."""
    corpus = Dataset.from_dict({"id": ["p"], "title": [""], "text": ["a" * 60 + "b"]})
    start = time.monotonic()
    with pytest.raises(InputError, match=f"question 1: its answer pattern .* {fault}") as error:
        answer_accuracy(
            [Question("fine", ["ab"]), Question("bomb", [pattern])], run_of("p", "p"), corpus, match="regex"
        )
    assert time.monotonic() - start < 2
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{1,2}(st|nd|rd|th)?.{0,50}\d{4}.{0,50}(a|b){0,100}",
        "a{2,}",
        "{1}{",
        "[{}]",
        r"\{9{3}",
        "(" * 900 + "a" + ")" * 900,
        "x{e<=1000}",
    ],
)
def test_a_pattern_of_ordinary_size_is_used_or_ignored(pattern):
    corpus = Dataset.from_dict({"id": ["p"], "title": [""], "text": ["nothing"]})
    with warnings.catch_warnings(record=True):
        assert answer_accuracy([Question("q", [pattern])], run_of("p"), corpus, match="regex")["queries"] == 1


def test_a_pattern_has_a_time_limit_for_all_passages(monkeypatch):
    """Each passage takes less than the limit for one passage."""
    monkeypatch.setattr(answers, "SECONDS_PER_PATTERN", 0.3)
    monkeypatch.setattr(answers, "SECONDS_PER_MATCH", 5.0)
    texts = ["a" * 24 + "b"] * 40
    corpus = Dataset.from_dict(
        {"id": [f"p{n}" for n in range(40)], "title": [""] * 40, "text": [f"{t} {n}" for n, t in enumerate(texts)]}
    )
    run = {"0": [(f"p{n}", float(-n)) for n in range(40)]}
    with pytest.raises(InputError, match=r"or 0\.3 s on all passages"):
        answer_accuracy([Question("bomb", [r"(a|aa)+$"])], run, corpus, match="regex")
    assert (
        answer_accuracy([Question("fine", ["b 39"])], run, corpus, match="regex", cutoffs=(100,))["mean"]["top100"] == 1
    )


def test_what_does_not_fit_together_is_refused():
    questions = [Question("a", ["Paris"])]
    with pytest.raises(InputError, match="passage 'p9' of the run is not in the corpus"):
        answer_accuracy(questions, run_of("p9"), CORPUS)
    with pytest.raises(InputError, match="the run has none of the 1 questions"):
        answer_accuracy(questions, {"test-1": [("p1", 1.0)]}, CORPUS)
    with pytest.raises(InputError, match="match is 'fuzzy'"):
        answer_accuracy(questions, run_of("p1"), CORPUS, match="fuzzy")


def test_an_encoder_is_scored_on_questions(tmp_path):
    from word_encoder import WordEncoder

    questions = [Question("which city is the capital", ["Paris"]), Question("nothing at all", ["here"])]
    retriever = Retriever.open(WordEncoder(), CORPUS, SearchConfig(embeddings=tmp_path / "e"))
    run = retriever.search({str(number): question.text for number, question in enumerate(questions)}, 5)
    metrics = answer_accuracy(questions, run, CORPUS, cutoffs=(1, 5))
    assert metrics["mean"] == {"top1": 1.0, "top5": 1.0}
    assert list(metrics["per_query"]) == ["0", "1"]


@pytest.mark.parametrize("match", ["string", "regex"])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_bm25_is_scored_on_questions(tmp_path, capsys, match, processes):
    (tmp_path / "q.csv").write_text('what is red\t["fox"]\nwhat is blue\t["absent"]\n')
    (tmp_path / "p.tsv").write_text("id\ttext\ttitle\n1\tthe fox is red\tT\n2\tblue sky\tS\n")
    call = [
        "evaluate",
        "--model",
        "bm25",
        "--questions",
        str(tmp_path / "q.csv"),
        "--passages",
        str(tmp_path / "p.tsv"),
    ]
    assert main([*call, "--k", "5", "--match", match, "--processes", processes]) == 0
    assert capsys.readouterr().out.split()[:4] == ["top1", "0.5000", "top5", "0.5000"]
