"""Errors that a command reports in one sentence, each with its exit code."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

_FAISS_PREFIX = re.compile(r"^Error in .*? at \S+:\d+: (Error: )?('.*?' failed: )?")
"""Start of a message of faiss: C++ function, file, line and failed condition."""


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

    If the message is unclear without the name of the error class, as for KeyError, the name comes first. A message of faiss loses
    its C++ function, file and line number.
    """
    words, kind = _FAISS_PREFIX.sub("", " ".join(str(error).split()))[:300], type(error).__name__
    needs_class = isinstance(error, LookupError | TypeError | AttributeError | ArithmeticError | AssertionError)
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
