"""Command line: run a command, print an error as one sentence to stderr, and return the exit code.

Large packages such as torch are imported only when a command runs.
"""

import difflib
import errno
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from contaccum import __version__
from contaccum.cli.commands import COMMANDS
from contaccum.cli.parser import command_parser, overview, parse
from contaccum.config import to_yaml
from contaccum.errors import Failed, InputError, Interrupted, printable, without_logins
from contaccum.runtime.launch import StopSignals, check_launch, is_main, process_place

DISK_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO,
    errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR,
}  # fmt: skip
"""Error numbers of a full, read-only or failing disk, or of an invalid path. Such an error is shown
without traceback."""
BROKEN_PIPE = 128 + signal.SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    0: done. 1: failed check or unexpected error. 2: bad input or disk error. 130: Ctrl-C. 143:
    SIGTERM. 141: the program that reads stdout closed the pipe. With `--debug`, an error also
    prints its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict":  # as that of a terminal without UTF-8
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    before, warnings.showwarning = warnings.showwarning, _each_warning_once()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    try:
        check_launch()
        _dispatch(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt, Interrupted) as error:
        code = _report(error, _command_name(arguments), debug)
        with suppress(ValueError, AttributeError):  # stdout is closed
            try:
                sys.stdout.flush()
            except OSError:  # it would fail again when Python exits
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    finally:
        warnings.showwarning = before  # a program may call this function
    return 0


def _report(error: BaseException, command: str, debug: bool) -> int:
    """Print an error as one sentence, and return the exit code."""
    if isinstance(error, BrokenPipeError) and _reader_left():
        return BROKEN_PIPE
    if debug:
        traceback.print_exc()
    if isinstance(error, Failed | InputError | Interrupted):
        return _say(str(error), error.exit_code)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        file = error.filename or "a file or standard output"
        return _say(f"{file}: cannot be read or written ({error.strerror})", InputError.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return _say("interrupted", Interrupted.KEYBOARD)
    found = " ".join(str(error).split())[:500] or "no message"
    _say(f"{command} failed: {type(error).__name__}: {found}")
    hint = "Run the command again with --debug and report its output"
    if debug:
        hint = "Report the traceback above"
    return _say(f"this error was not expected and may be a bug. {hint}", 1)


def _command_name(arguments: list[str]) -> str:
    return " ".join(arguments[: 2 if arguments[:1] == ["data"] else 1])


def _dispatch(arguments: list[str]) -> None:
    """Print what was asked for, or run the command."""
    name, asks_help = _command_name(arguments), "--help" in arguments or "-h" in arguments
    words = arguments[len(name.split()) :]
    if name in COMMANDS and asks_help:
        print(command_parser(name, COMMANDS[name], everything="all" in words).format_help())
    elif name in COMMANDS:
        parts, print_config = parse(name, COMMANDS[name], words)
        if print_config:
            config = parts[-1]  # TrainConfig is the last dataclass of its commands
            from contaccum.training.automatic import choices

            print(to_yaml(config), end="")
            for line in choices(config):
                print(f"# auto on this machine: {line}")
        else:
            with StopSignals():
                _start(name, parts)
    elif asks_help:
        print(overview(COMMANDS, "data" if arguments[0] == "data" else ""))
    elif name == "--version":
        print(f"contaccum {__version__}")
    else:
        if not name:
            raise InputError("no command given; contaccum --help lists the commands")
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.65)
        answer = "contaccum --help lists the commands"
        if near:
            answer = f"did you mean contaccum {near[0]}?"
        raise InputError(f"contaccum {name}: no such command; {answer}")


def _start(name: str, parts: list[Any]) -> None:
    """Run a command and print its result.

    With several processes, record which process failed first.
    """

    def run() -> None:
        result = COMMANDS[name].run(*parts)
        if result is not None and is_main():
            print(printable(str(result)))

    if process_place()[1] == 1:
        return run()
    from contaccum.runtime.processes import run_with_error_file

    return run_with_error_file(run)


def _each_warning_once() -> Callable[..., None]:
    """Return a function that prints warnings. A file may be read twice, and so may its warning."""
    shown: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if (sentence := f"warning: {message}") not in shown:
            shown.add(sentence)
            _say(sentence)

    return show


def _say(sentence: str, exit_code: int = 0) -> int:
    """Print a sentence to stderr and return the exit code.

    If several processes of a launch print the same sentence, it appears only once.
    """
    first = True
    with suppress(InputError):  # the variables of the launcher are wrong; the sentence says this
        if check_launch() > 1:
            from contaccum.runtime.processes import first_to_say

            first = first_to_say(sentence)
    with suppress(OSError, ValueError):  # stderr cannot be written
        if first:
            print(f"contaccum: {printable(without_logins(sentence))}", file=sys.stderr)
    return exit_code


def _reader_left() -> bool:
    """Return whether the reader of our stdout or stderr has closed the pipe, as `head` does."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(event & select.POLLERR for _, event in poll.poll(0)):
                return True
    return False
