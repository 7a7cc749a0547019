"""JSON files from disk: limits, types and versions.

Every fault is one sentence with the file's name.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import pytest

from contaccum.errors import InputError
from contaccum.runtime.files import read_json, write_json


class Entry(TypedDict):
    rows: int
    ids: list[str]


class Manifest(TypedDict):
    width: int
    rate: float
    shards: dict[str, Entry]


@dataclass
class Settings:
    name: str
    steps: int = 3


GOOD = {"width": 4, "rate": 1, "shards": {"a": {"rows": 2, "ids": ["p1", "p2"]}}}


def test_values_that_were_written_are_read_back(tmp_path):
    write_json(tmp_path / "m.json", {**GOOD, "unknown": None})
    assert read_json(tmp_path / "m.json", Manifest) == GOOD
    assert read_json(tmp_path / "m.json") == {**GOOD, "unknown": None}


def test_a_byte_order_mark_is_dropped(tmp_path):
    """Notepad and PowerShell write one.

    It was once answered with: not JSON (Unexpected UTF-8 BOM).
    """
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n')
    assert read_json(tmp_path / "a.json") == {"a": 1}


def test_random_states_and_losses_that_are_not_finite_are_read(tmp_path):
    value = {"state": 2**128 - 1, "loss": math.nan, "best": -math.inf}
    (tmp_path / "s.json").write_text(json.dumps(value))
    found = read_json(tmp_path / "s.json", dict[str, float | int])
    assert found["state"] == 2**128 - 1
    assert math.isnan(found["loss"])
    assert found["best"] == -math.inf


CASES = {
    "a string for a number": (
        {**GOOD, "width": "4"},
        r"m\.json: Expected `int`, got `str` - at `\$\.width`",
    ),
    "a missing field": (
        {"width": 1, "rate": 1},
        r"m\.json: Object missing required field `shards`",
    ),
    "a number among strings": (
        {**GOOD, "shards": {"a": {"rows": 1, "ids": ["x", 2]}}},
        r"Expected `str`, got `int` - at `\$\..*ids\[1\]`",
    ),
}


@pytest.mark.parametrize(("value", "sentence"), CASES.values(), ids=CASES)
def test_a_wrong_type_is_refused_with_the_field(tmp_path, value, sentence):
    write_json(tmp_path / "m.json", value)
    with pytest.raises(InputError, match=sentence):
        read_json(tmp_path / "m.json", Manifest)


TEXTS = {
    "truncated": (b'{"width":\n 4', r"line 2: not JSON"),
    "not UTF-8": (b'{"width": "\xff"}', r"byte 11 is not UTF-8"),
    "nested without end": (b"[" * 100_000, r"not usable JSON"),
}


@pytest.mark.parametrize(("text", "sentence"), TEXTS.values(), ids=TEXTS)
def test_text_that_is_no_usable_json_is_refused(tmp_path, text, sentence):
    (tmp_path / "m.json").write_bytes(text)
    with pytest.raises(InputError, match=rf"m\.json.*{sentence}"):
        read_json(tmp_path / "m.json", Manifest)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Path.mkdir, "Is a directory"),
        (os.mkfifo, "not a regular file"),
        (lambda path: None, "No such file"),
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, make, sentence):
    make(tmp_path / "m.json")
    with pytest.raises(InputError, match=sentence) as error:
        read_json(tmp_path / "m.json")
    assert str(error.value).count("m.json") == 1


def test_files_of_this_version_are_read(tmp_path):
    write_json(tmp_path / "s.json", {"name": "a", "format_version": 2})
    assert read_json(tmp_path / "s.json", Settings, version=2).name == "a"


@pytest.mark.parametrize("version", [3, "2", None])
def test_another_version_is_refused_by_its_number(tmp_path, version):
    write_json(tmp_path / "s.json", {"name": 5, "format_version": version})
    with pytest.raises(InputError, match=r"s\.json: has format_version .*reads 2\."):
        read_json(tmp_path / "s.json", Settings, version=2)
