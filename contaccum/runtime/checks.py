"""Checks of texts (UTF-8), token ids, and outputs that would replace another file."""

import gzip
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from contaccum.errors import InputError


def require_utf8(text: str, where: str) -> str:
    """Return ``text`` if it is a string that can be encoded as UTF-8, else raise InputError.

    where: name of the text in the error message. A command line can contain bytes that are not
    UTF-8. Python turns each of them into a lone surrogate, which UTF-8 cannot encode.
    """
    if not isinstance(text, str):
        raise InputError(f"{where}: found {type(text).__name__}; expected a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: found {text[error.start]!a}; the text must be valid UTF-8"
        ) from error
    return text


def require_texts(texts: Any, what: str, prefix: str) -> list[str]:
    """Return the texts as a list, each after ``prefix``.

    Raise InputError if ``texts`` is one string, a mapping or a table.

    what: kind of the texts in error messages, such as query.
    """
    if isinstance(texts, str | Mapping) or hasattr(texts, "columns"):
        raise InputError(f"found a {type(texts).__name__}; expected a list of texts")
    return [prefix + require_utf8(text, f"{what} {number}") for number, text in enumerate(texts)]


def require_known_ids(largest: int, vocabulary: int | None, tokenizer: Any) -> None:
    """Raise InputError if ``largest``, the largest token id in some texts, has no word embedding.

    vocabulary: number of word embeddings. If it is None (unknown), nothing is checked. In some
    published tokenizers, added tokens have no embedding. So the ids of the texts are checked, not
    the vocabulary of the tokenizer.
    """
    if vocabulary is not None and largest >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(largest)
        name = "no token" if token is None else ascii(token)
        raise InputError(
            f"{tokenizer.name_or_path}: the tokenizer gives the token id {largest} ({name}), but "
            f"the encoder has {vocabulary} word embeddings; expected ids below {vocabulary}. Copy "
            "the files of the tokenizer again, or remove this token from the texts."
        )


def refuse_other_file(
    output: str | Path | None, kind: Literal["run", "metrics", "page", "plan"]
) -> None:
    """Raise InputError if ``output`` cannot be created, or exists and is not a file of this kind.

    The command would replace the file, which may be one of its inputs.
    """
    if output is None:
        return
    if not os.path.exists(output):
        parent = next((folder for folder in Path(output).parents if folder.exists()), Path())
        if not parent.is_dir():
            raise InputError(f"{parent}: cannot be created (this is a file, not a folder)")
        try:
            with TemporaryFile(dir=parent):
                return
        except OSError as error:
            raise InputError(f"{output}: cannot be created ({error.strerror})") from error
    if not os.path.isfile(output):
        what = "a folder" if os.path.isdir(output) else "a device or a pipe"
        raise InputError(f"{output}: is {what}; expected the name of a file")
    if not os.path.getsize(output):
        return
    try:
        with (gzip.open if str(output).lower().endswith(".gz") else open)(output, "rb") as file:
            start = file.readline(4096)
            cells = start.split()
            if kind == "run":
                same = len(cells) == 6 and math.isfinite(float(cells[4]))
            elif kind == "page":
                same = start.strip().lower() == b"<!doctype html>"
            else:
                field = {"metrics": "mean", "plan": "methods"}[kind]
                same = field in json.loads(start + file.read())
    except (OSError, ValueError, TypeError):
        same = False
    if not same:
        names = {"run": "TREC run", "metrics": "file of metrics", "page": "report", "plan": "plan"}
        name = f"a {names[kind]}"
        raise InputError(f"{output}: exists and is not {name}; choose another output")
