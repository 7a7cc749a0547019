"""The ways a verb ends other than well and says so in a sentence; the command line turns them into exit codes."""


class InputError(ValueError):
    """Bad input or configuration: one sentence that names the file, the line or id, what was found and what was expected."""

    exit_code = 2


class Interrupted(Exception):
    """A run stopped because of a signal, after saving a checkpoint."""

    KEYBOARD = 130

    def __init__(self, signal_number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + signal_number


class Failed(Exception):
    """What was checked does not hold, or runs that were asked for broke off; the sentence says which."""

    exit_code = 1
