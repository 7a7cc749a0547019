"""What is marked, counted and sorted, against values by hand; and hostile texts, which stay texts."""

from html.parser import HTMLParser

import pytest

from contaccum.errors import InputError
from contaccum.explore import html
from contaccum.explore.html import grades_of_text, judged, losses, ranking, relevant_among
from contaccum.retrieval.runs import RankedPassage


def test_a_typed_query_is_known_by_its_words():
    queries = {"q1": "Red  fox\n", "q2": "red fox", "q3": "blue fox"}
    qrels = {"q1": {"a": 1, "b": 0}, "q2": {"b": 2, "c": -1}, "q3": {"d": 1}}
    assert grades_of_text(" RED fox ", queries, qrels) == {"a": 1, "b": 2, "c": -1}
    assert grades_of_text("red foxes", queries, qrels) == {}


def test_queries_come_by_what_the_left_side_lost():
    left = {"q1": {"m": 0.5, "n": 0.0}, "q2": {"m": 0.1, "n": 0.2}, "q3": {"m": 0.5, "n": 0.1}}
    right = {"q1": {"m": 0.25, "n": 0.0}, "q2": {"m": 0.6, "n": 0.2}, "q3": {"m": 0.25, "n": 1.0}}
    found = losses([left, right], "m")
    assert list(found.items()) == [("q2", [0.1, 0.6, -0.5]), ("q1", [0.5, 0.25, 0.25]), ("q3", [0.5, 0.25, 0.25])]
    assert list(losses([left, right], "n")) == ["q3", "q1", "q2"]
    assert list(losses([right, left], "m")) == ["q1", "q3", "q2"]
    assert list(losses([left], "n").items()) == [("q1", [0.0]), ("q3", [0.1]), ("q2", [0.2])]
    with pytest.raises(InputError, match="metric 'o' was not computed; choose one of m, n"):
        losses([left, right], "o")


def test_judged_passages_have_their_rank_in_each_ranking():
    rankings = {"one": [("c", 3.0), ("a", 2.0)], "two": [("x", 9.0), ("y", 8.0), ("b", 7.0)]}
    table = judged({"b": 1, "a": 1, "c": 0, "d": 2}, rankings, {key: f"title {key}" for key in "abcd"}, 3)
    rows = [row.split("</tr>")[0] for row in table.split("<tr>")[2:]]
    assert [Elements(row).cells for row in rows] == [
        ["title d d", "2", "> 3", "> 3"],
        ["title a a", "1", "2", "> 3"],
        ["title b b", "1", "> 3", "3"],
        ["title c c", "0", "1", "> 3"],
    ]


def test_relevant_passages_are_counted():
    hits = [RankedPassage("a", 1.0, "", ""), RankedPassage("b", 0.5, "", ""), RankedPassage("x", 0.1, "", "")]
    assert relevant_among({"a": 1, "b": 0, "c": 2}, hits) == "1 of 2 relevant passages are among these 3"


def test_words_of_the_query_are_marked_and_the_text_stays():
    text = "The red fox; a REDDER fox."
    hit = RankedPassage("a", 1.0, "", text)
    shown = ranking("one", "red fox the", [hit], {})
    assert "<summary>The <mark>red</mark> <mark>fox</mark>; a REDDER <mark>fox</mark>.</summary>" in shown
    assert "<summary></summary>" in ranking("one", "fox", [hit._replace(text="")], {})


class Elements(HTMLParser):
    """The elements, attributes and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words = ""
        self.cells: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "td":
            self.cells.append("")
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.words += data
        if self.cells:
            self.cells[-1] += data


HOSTILE = (
    "<script>canary()</script><img src=x onerror='canary()'>\"><svg onload=canary()>${canary()}{{canary}}&lt;b&gt;"
)


def hostile_page() -> str:
    hit = RankedPassage(HOSTILE, 1.0, HOSTILE, HOSTILE)
    return html.styled(
        html.heading(HOSTILE),
        html.note(HOSTILE),
        html.columns([html.ranking(HOSTILE, HOSTILE, [hit], {HOSTILE: 1}, HOSTILE)]),
        html.judged({HOSTILE: 1}, {HOSTILE: []}, {HOSTILE: HOSTILE}, 100),
        html.lost([(HOSTILE, [0.0, 1.0, -1.0])], {HOSTILE: HOSTILE}, [HOSTILE, HOSTILE + "2"]),
    )


def test_hostile_texts_stay_texts():
    found = Elements(hostile_page())
    assert not found.tags & {"script", "img", "svg", "b"}
    assert not [name for name in found.attributes if name.startswith("on") or name == "src"]
    assert found.attributes <= {"class", "data-id", "data-query", "data-column"}
    # heading, note; a ranking's label, note, title, id and text; a label, title and id of the judged; a query and its two labels
    assert found.words.count(HOSTILE) == 2 + 5 + 3 + 3


def test_no_text_is_taken_for_a_template():
    """What gradio fills in on its way to the page: ${...} and {{...}}."""
    assert "${" not in hostile_page()
    assert "{{" not in hostile_page()


def test_the_parser_sees_what_is_not_escaped():
    """Negative control."""
    found = Elements(HOSTILE)
    assert found.tags == {"script", "img", "svg"}
    assert {"onerror", "onload"} <= found.attributes
