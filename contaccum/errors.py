"""Errors that a command reports in one sentence, each with its exit code."""

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote

# all control characters except tab and line feed
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_LOGIN = re.compile(r"(?<=://)[^/?#@\s]+@")  # user name and password, or a token, in a URL


class InputError(ValueError):
    """Bad input or bad configuration.

    The message says where the fault is, what was found, and what was expected.
    """

    exit_code = 2


MOST_ERRORS = 100  # maximum number of errors in a message


def joined_errors(
    errors: Sequence[InputError], source: object, total: int | None = None
) -> InputError:
    """Return the only error, or one error with the first MOST_ERRORS messages.

    Of messages that differ only in the place before ``: ``, the first one stands for all.

    source: name of the data with the errors. total: number of errors. Default: those in ``errors``.
    """
    total = total or len(errors)
    if total == 1:
        return errors[0]
    count = f"{source}: {total} errors"
    if total > MOST_ERRORS:
        count += f"; the first {MOST_ERRORS}:"
    places: dict[str, list[str]] = {}  # message without place -> places
    for error in errors[:MOST_ERRORS]:
        place, _, message = str(error).partition(": ")
        places.setdefault(message, []).append(place)
    lines = []
    for message, (first, *others) in places.items():
        more = f" (and {len(others)} more, the last at {others[-1]})" if others else ""
        lines.append(f"{first}: {message}{more}")
    return InputError("\n  ".join([count, *lines]))


def in_one_line(error: BaseException) -> str:
    """Return the message of an error in one line, truncated to 300 characters.

    The class name comes first for errors such as KeyError, whose message alone is unclear.
    """
    words, kind = " ".join(str(error).split())[:300], type(error).__name__
    needs_class = isinstance(
        error, LookupError | TypeError | AttributeError | ArithmeticError | AssertionError
    )
    return f"{kind}: {words}" if words and needs_class else words or kind


def printable(text: str) -> str:
    """Return ``text`` with escapes such as \\u001b for control characters, which terminals obey.

    These are the escapes of JSON, so JSON text stays valid.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1].replace("\\x", "\\u00"), text)


def without_logins(text: str) -> str:
    """Return ``text`` without logins in URLs, such as https://user:password@host of HF_ENDPOINT."""
    return _LOGIN.sub("***@", text)


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation of contaccum.

    pip writes direct_url.json unless the package came from an index.
    """
    try:
        origin = json.loads(distribution("contaccum").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # run from a folder that is not installed
        origin = {"url": Path(__file__).parent.parent.as_uri()}
    url = origin.get("url", "")
    if "vcs_info" in origin:
        return f"pip install 'contaccum[{extra}] @ {origin['vcs_info']['vcs']}+{url}'"
    if not url.startswith("file://"):
        return f"pip install 'contaccum[{extra}]'"
    folder = Path(unquote(url.removeprefix("file://")))
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{'.' if folder == Path.cwd() else folder}[{extra}]'"


def require(package: str, extra: str, what: str) -> None:
    """Raise InputError if ``package`` is missing.

    extra: extra of contaccum that installs it. what: feature that needs it.
    """
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{what}: package {package} is missing. Run: {install_command(extra)}")


@contextmanager
def library_errors(
    problem: str,
    *kinds: type[BaseException],
    fix: str = "",
    reason: Callable[[BaseException], str] = in_one_line,
) -> Iterator[None]:
    """Convert library errors that are raised inside the ``with`` block to InputError.

    The new message is ``problem``, then the library's message in brackets, then ``fix``. kinds:
    classes to convert. reason: function that returns the library's message, given the error.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise InputError(f"{problem} ({reason(error)}){fix}") from error


class NotFiniteError(InputError):
    """An embedding, a loss or a gradient is NaN or infinite.

    In a training run, the message names the step.
    """


class Interrupted(BaseException):
    """A signal stopped the command. A training run saves a checkpoint before it raises this error.

    This is a BaseException, like KeyboardInterrupt, because some libraries catch every Exception
    and try again.
    """

    KEYBOARD = 130  # exit code after Ctrl-C

    def __init__(self, signal_number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + signal_number


class Failed(Exception):
    """A check failed, or runs of a comparison failed. The message names the check or the runs."""

    exit_code = 1
