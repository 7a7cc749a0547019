"""The command line's door: exit codes, and what is said on stderr. Nothing heavy is imported before a verb runs."""

import errno
import os
import signal
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable
from typing import Any

from jsonargparse import Namespace

from contaccum.cli.parsers import make_parser, refuse_whole_groups, settings_like
from contaccum.cli.verbs import VERBS
from contaccum.errors import Failed, InputError, Interrupted
from contaccum.launch import process_place

DISK_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG,
    errno.ENOTDIR, errno.EISDIR,
}  # fmt: skip
"""What a full, read-only or failing disk, or a path that cannot be, says: the user's to mend, one sentence."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 done, 2 the user's input or disk, 130 Ctrl-C, 143 SIGTERM, 141 nobody reads what
    it prints; else raises (1)."""
    warnings.showwarning = _show_warning
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        refuse_whole_groups(arguments)
        chosen = make_parser(arguments).parse_args(arguments)
        path, options = chosen.subcommand, chosen[chosen.subcommand]
        if path == "data":
            path, options = f"data {options.subcommand}", options[options.subcommand]
        from contaccum.training.signals import StopSignals

        with StopSignals():
            _run(VERBS[path], options)
        sys.stdout.flush()
    except (Failed, InputError, Interrupted) as error:
        return _fail(str(error), error.exit_code)
    except ArgumentError as error:
        sentence = " ".join(str(error).split())
        return _fail(sentence + settings_like(arguments, sentence), InputError.exit_code)
    except BrokenPipeError:
        if not _output_is_left():
            raise
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return _fail(
            f"{error.filename or 'a file'}: could not be read or written ({error.strerror})", InputError.exit_code
        )
    except KeyboardInterrupt:
        return _fail("interrupted", Interrupted.KEYBOARD)
    return 0


def _output_is_left() -> bool:
    """Whether whoever read the output has gone, as `head` does: no error, and nobody to tell. Other pipes are no matter of it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at its end goes there
        return True
    return False


def _run(verb: Callable[[Namespace], None], options: Namespace) -> None:
    if process_place()[1] == 1:
        return verb(options)
    from contaccum.processes import recorded

    return recorded(verb, options)


def _fail(sentence: str, code: int) -> int:
    _say(sentence)
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _say(f"warning: {message}")


def _say(sentence: str) -> None:
    """To stderr; what several processes of a launch have to say alike is said once."""
    if process_place()[1] > 1:
        from contaccum.processes import first_to_say

        if not first_to_say(sentence):
            return
    print(f"contaccum: {sentence}", file=sys.stderr)
