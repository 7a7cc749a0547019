"""Command line: run a command, print an error as one sentence to stderr, and return the exit code.

Large packages such as torch are imported only when a command runs.
"""

import errno
import os
import select
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Any

from contaccum import __version__
from contaccum.cli.commands import COMMANDS
from contaccum.cli.parser import closest_command, help_of_command, overview, parse
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
    _prepare_streams()
    before, warnings.showwarning = warnings.showwarning, _show_warning
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    try:
        code = _run_and_report(arguments, debug)
    finally:
        unwritten = _flush_stdout()
        warnings.showwarning = before  # a program may call this function
    if unwritten is None or code:
        return code
    if isinstance(unwritten, BrokenPipeError):
        return BROKEN_PIPE
    return _say(f"standard output: cannot be written ({unwritten.strerror})", InputError.exit_code)


def _run_and_report(arguments: list[str], debug: bool) -> int:
    """Run one command and return the exit code. Print an error as one sentence."""
    try:
        check_launch()
        return _dispatch(arguments)
    except (Exception, KeyboardInterrupt, Interrupted) as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return BROKEN_PIPE
        if debug:
            traceback.print_exc()
        if isinstance(error, Failed | InputError | Interrupted):
            return _say(str(error), error.exit_code)
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            found = (
                f"{error.filename or 'a file or standard output'}: cannot be read or written "
                f"({error.strerror})"
            )
            return _say(found, InputError.exit_code)
        if isinstance(error, KeyboardInterrupt):
            return _say("interrupted", Interrupted.KEYBOARD)
        found = " ".join(str(error).split())[:500] or "no message"
        _say(f"{_command_name(arguments)} failed: {type(error).__name__}: {found}")
        hint = (
            "Report the traceback above"
            if debug
            else "Run the command again with --debug and report its output"
        )
        return _say(f"this error was not expected and may be a bug. {hint}", 1)


def _command_name(arguments: list[str]) -> str:
    return " ".join(arguments[: 2 if arguments[:1] == ["data"] else 1])


def _dispatch(arguments: list[str]) -> int:
    """Print what was asked for, or run the command. Return the exit code."""
    name, asks_help = _command_name(arguments), "--help" in arguments or "-h" in arguments
    if name in COMMANDS:
        words = arguments[len(name.split()) :]
        if asks_help:
            print(help_of_command(name, COMMANDS[name], everything="all" in words))
            return 0
        parts, print_config = parse(name, COMMANDS[name], words)
        if print_config:
            config = parts[-1]  # TrainConfig is the last dataclass of its commands
            from contaccum.training.automatic import choices

            print(to_yaml(config), end="")
            for line in choices(config):
                print(f"# auto on this machine: {line}")
            return 0
        with StopSignals():
            _start(name, parts)
        return 0
    group = "data" if arguments[:1] == ["data"] else ""
    if asks_help:
        print(overview(COMMANDS, group))
    elif arguments[:1] == ["--version"]:
        print(f"contaccum {__version__}")
    elif name in ("", "data"):
        raise InputError(
            f"no command was given; {f'contaccum {name}'.strip()} --help lists the commands"
        )
    else:
        raise InputError(f"contaccum {name}: no such command; {closest_command(COMMANDS, name)}")
    return 0


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


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _say(f"warning: {message}")


def _say(sentence: str, exit_code: int = 0) -> int:
    """Print a sentence to stderr and return the exit code.

    If several processes of a launch print the same sentence, it appears only once.
    """
    try:
        first = check_launch() == 1
    except InputError:  # the variables of the launcher are wrong; the sentence says this
        first = True
    if not first:
        from contaccum.runtime.processes import first_to_say

        first = first_to_say(sentence)
    with suppress(OSError, ValueError):  # stderr cannot be written
        if first:
            print(f"contaccum: {printable(without_logins(sentence))}", file=sys.stderr)
    return exit_code


def _prepare_streams() -> None:
    """Replace closed streams by the null device.

    Print "?" for characters that the terminal cannot encode.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if (
            stream is None
        ):  # the parent process closed it; open() uses the same file descriptor again
            # open until the process ends
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and hasattr(stream, "reconfigure"):
            if stream.errors == "strict" or "utf" not in stream.encoding.lower():
                stream.reconfigure(errors="replace")
            with suppress(OSError, ValueError):
                os.set_blocking(stream.fileno(), True)  # else a slow reader raises BlockingIOError


def _reader_left() -> bool:
    """Return whether the reader of our stdout or stderr has closed the pipe, as `head` does."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(event & select.POLLERR for _, event in poll.poll(0)):
                return True
    return False


def _flush_stdout() -> OSError | None:
    """Flush stdout and return the error, or None.

    After an error, the unwritten text is discarded. Otherwise, Python would flush it at exit, and
    fail again.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error if isinstance(error, OSError) else None
    return None
