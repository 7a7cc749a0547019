"""The ways a verb ends other than well and says so in a sentence; the command line turns them into exit codes."""


class InputError(ValueError):
    """Bad input or configuration: one sentence that names the file, the line or id, what was found and what was expected."""

    exit_code = 2


class NotFiniteError(InputError):
    """An embedding, a loss or a gradient is NaN or infinite; the sentence names the step and its examples."""


class Interrupted(BaseException):
    """A verb stopped because of a signal, a run after saving a checkpoint.

    No Exception, as KeyboardInterrupt is none: a library that shrugs off the errors of one attempt must not shrug this off.
    """

    KEYBOARD = 130

    def __init__(self, signal_number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + signal_number


class Failed(Exception):
    """What was checked does not hold, or runs that were asked for broke off; the sentence says which."""

    exit_code = 1
