"""Errors that a command reports in one sentence, each with its exit code, and checks that raise such errors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """Bad input or bad configuration. The message says where the fault is, what was found, and what was expected."""

    exit_code = 2


@contextmanager
def library_errors(problem: str, *kinds: type[BaseException], fix: str = "") -> Iterator[None]:
    """Convert an error of a library inside the ``with`` block to an InputError.

    The message is ``problem``, then the message of the library in brackets, then ``fix``. kinds: error classes to convert.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise InputError(f"{problem} ({in_one_line(error)}){fix}") from error


def in_one_line(error: BaseException) -> str:
    """Return at most 300 characters of the message of an error, in one line.

    If the message is unclear without the name of the error class, as for KeyError, the name comes first.
    """
    words, kind = " ".join(str(error).split())[:300], type(error).__name__
    needs_class = isinstance(error, LookupError | TypeError | AttributeError | AssertionError)
    return f"{kind}: {words}" if words and needs_class else words or kind


class NotFiniteError(InputError):
    """An embedding, a loss or a gradient is NaN or infinite. The message names the step and the examples of the step."""


class Interrupted(BaseException):
    """A signal stopped the command. A training run saves a checkpoint before it raises this error.

    This is a BaseException, like KeyboardInterrupt, because some libraries catch every Exception and try again.
    """

    KEYBOARD = 130  # exit code after Ctrl-C

    def __init__(self, signal_number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + signal_number


class Failed(Exception):
    """A check failed, or runs of a comparison failed. The message names the check or the runs."""

    exit_code = 1


def require_utf8(text: str, where: str) -> str:
    """Return ``text`` if it can be encoded as UTF-8, else raise InputError.

    where: name of the text in the error message. Python turns a byte of the command line that is not UTF-8 into half a character
    (a lone surrogate), which UTF-8 cannot encode.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        is_byte = 0xDC80 <= code <= 0xDCFF
        found = f"byte 0x{code - 0xDC00:02x} is not UTF-8" if is_byte else "found half a character (a lone surrogate)"
        raise InputError(f"{where}: {found}; the text must be valid UTF-8") from error
    return text


def require_known_ids(largest: int, vocabulary: int | None, tokenizer: Any) -> None:
    """Raise InputError if ``largest``, the largest token id in some texts, has no word embedding.

    vocabulary: number of word embeddings. If it is None (unknown), nothing is checked. Some published tokenizers have added
    tokens without an embedding, so the ids of the texts are checked, not the vocabulary of the tokenizer.
    """
    if vocabulary is not None and largest >= vocabulary:
        token = tokenizer.convert_ids_to_tokens(largest)
        name = "no token" if token is None else ascii(token)
        raise InputError(
            f"{tokenizer.name_or_path}: the tokenizer gives the token id {largest} ({name}), but the encoder has {vocabulary} "
            f"word embeddings; expected ids below {vocabulary}. Copy the files of the tokenizer again, or remove this token from "
            "the texts."
        )


_INPUT_FILES = (
    "corpus.jsonl*", "queries.jsonl*", "collection.tsv*", "queries.tsv*", "qrels/*", "*config*.json", "*.safetensors",
    "*tokenizer*", "modules.json", "contaccum.json", "manifest.json", "*.npy", "*.ids.json", "*.parquet",
)  # fmt: skip
"""Patterns for the names of files that commands read from the folder of a data set, a model or vectors."""


def refuse_input_as_output(output: str | Path | None, *inputs: object) -> None:
    """Raise InputError if ``output`` is one of ``inputs``, or a file that commands read from a folder among ``inputs``.

    Symbolic links are followed. Inputs that are not existing paths, such as names of data sets, are not checked.
    """
    if output is None or not os.path.exists(output):
        return
    for each in inputs:
        if not isinstance(each, str | Path) or not os.path.exists(each):
            continue
        depths = ("", "*/", "*/*/") if os.path.isdir(each) else ()
        files = (path for name in _INPUT_FILES for depth in depths for path in Path(each).glob(depth + name))
        for path in (Path(each), *files):
            if os.path.exists(path) and os.path.samefile(path, output):
                raise InputError(f"{output}: is an input of this call ({path}); choose another output")
