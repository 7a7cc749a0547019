"""Connection to the Hugging Face Hub.

The connection is checked once before the first use, so that a missing network is reported at once.
"""

import os
import sys
from contextlib import AbstractContextManager
from threading import Thread

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from contaccum.errors import library_errors

SECONDS = 4
"""Maximum number of seconds to wait for an answer of the Hub, including the look-up of its address."""


def is_hub_name(text: str) -> bool:
    """Return whether ``text`` has the form of a Hub name, such as owner/name."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def hub_errors(problem: str, *kinds: type[BaseException], fix: str = "") -> AbstractContextManager[None]:
    """Convert errors to InputError, as ``library_errors`` does, in a ``with`` block that reads from the Hub.

    If the Hub does not answer, offline mode is set, which reads only the local cache of the Hub. Otherwise the Hub library would
    try each file six times, for 30 seconds, and print a line for each attempt.
    """
    if reason := _failure(constants.ENDPOINT):
        os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes, and for libraries that are imported later
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        problem = f"{problem}; {reason}, so only the cache of the Hub is used"
    return library_errors(problem, *kinds, fix=fix)


_failures: dict[str, str] = {}  # reason for each address of the Hub; empty if the Hub answered


def _failure(endpoint: str) -> str:
    """Return the reason why the Hub cannot be used, or an empty text if the Hub answers.

    Each process asks the Hub only once.
    """
    import requests

    if not _failures.get(endpoint) and constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    if endpoint not in _failures:
        _failures[endpoint] = f"{endpoint} does not answer"

        def ask() -> None:
            try:
                requests.head(endpoint, timeout=SECONDS, allow_redirects=False)
                _failures[endpoint] = ""
            except requests.RequestException as error:
                _failures[endpoint] = f"{endpoint} does not answer ({type(error).__name__})"

        thread = Thread(target=ask, daemon=True)  # a thread, because the look-up of an address has no time limit
        thread.start()
        thread.join(SECONDS)
    return _failures[endpoint]
