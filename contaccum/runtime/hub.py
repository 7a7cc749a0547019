"""Connection to the Hugging Face Hub, and files of encoders in local folders and on the Hub.

The connection is checked before the first use, so that a missing network is reported at once, and
again 30 s after a failure.
"""

import os
import sys
import time
from contextlib import AbstractContextManager
from threading import Thread
from typing import Any

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from contaccum.errors import library_errors
from contaccum.runtime.files import read_json

SECONDS = 4
"""Maximum number of seconds to wait for an answer of the Hub, including the look-up of its
address.
"""
AGAIN = 30
"""Number of seconds after which the Hub is asked again, because a notebook or service outlives a
lost connection."""


def is_hub_name(text: str) -> bool:
    """Return whether ``text`` has the form of a Hub name, such as owner/name."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def hub_errors(
    problem: str, *kinds: type[BaseException], fix: str = ""
) -> AbstractContextManager[None]:
    """Return a context manager for reading from the Hub.

    It converts errors to InputError. Arguments: see ``library_errors``.

    If the Hub does not answer, only its local cache is read, see ``why_offline``.
    """
    if reason := why_offline():
        problem = f"{problem}; {reason}, so only the cache of the Hub is used"
    return library_errors(problem, *kinds, fix=fix)


# address of the Hub -> why it cannot be used ("" if it answered), and the time when it was asked
_failures: dict[str, tuple[str, float]] = {}


def why_offline() -> str:
    """Return why the Hub cannot be used, or an empty text if it answers.

    After a failure, it is asked again after ``AGAIN`` s. Until it answers, the Hub library is in
    offline mode, in which it reads only its cache. In online mode, it would try each file six
    times, for 30 seconds, and print a line for each attempt.
    """
    import requests

    endpoint = constants.ENDPOINT
    reason, asked = _failures.get(endpoint, ("", 0.0))
    if not reason and constants.is_offline_mode():
        return "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    if endpoint not in _failures or (reason and time.monotonic() - asked >= AGAIN):
        found = [f"{endpoint} does not answer"]

        def ask() -> None:
            try:
                requests.head(endpoint, timeout=SECONDS, allow_redirects=False)
                found.append("")
            except requests.RequestException as error:
                found.append(f"{endpoint} does not answer ({type(error).__name__})")

        # a thread, because the look-up of an address has no time limit
        thread = Thread(target=ask, daemon=True)
        thread.start()
        thread.join(SECONDS)
        failed_before, reason = bool(reason), found[-1]
        # a later answer to this request changes nothing
        _failures[endpoint] = (reason, time.monotonic())
        if reason or failed_before:
            # also for child processes, and for libraries that are imported later
            os.environ["HF_HUB_OFFLINE"] = "1" if reason else "0"
            constants.HF_HUB_OFFLINE = bool(reason)
            if "datasets" in sys.modules:
                sys.modules["datasets"].config.HF_HUB_OFFLINE = bool(reason)
    return reason


def loading(name: str) -> AbstractContextManager[None]:
    """Convert errors of transformers, peft and the Hub in the ``with`` block to InputError.

    name: folder or Hub name.
    """
    if os.path.isdir(name):
        return library_errors(f"{name}: no encoder could be loaded from this folder", Exception)
    return hub_errors(
        f"{name}: no folder has this name, and no encoder could be loaded from the Hub", Exception
    )


def optional_file(name: str, file: str) -> str | None:
    """Return the path of a file in the folder or Hub repository of an encoder.

    Return None if there is no such file. Offline, this is also so if the Hub's cache does not have
    it. Raises InputError if the Hub fails to say whether there is one.
    """
    if os.path.isdir(name):
        path = os.path.join(name, file)
        return path if os.path.lexists(path) else None
    with loading(name):
        try:
            return hf_hub_download(name, file)
        except LocalEntryNotFoundError as error:
            known_missing = try_to_load_from_cache(name, file) is not None
            if known_missing or constants.is_offline_mode():
                return None
            raise error.__cause__ or error from None  # the cause names the HTTP status
        except EntryNotFoundError:
            return None


def unknown_offline(name: str, file: str) -> bool:
    """Return whether only the Hub, which cannot be asked, knows if an encoder has this file.

    The encoder's config.json is in the Hub's cache.
    """
    return (
        not os.path.isdir(name)
        and constants.is_offline_mode()
        and try_to_load_from_cache(name, file) is None
        and isinstance(try_to_load_from_cache(name, "config.json"), str)
    )


def optional_json(name: str, file: str, type_: Any, version: int | None = None) -> Any:
    """Return the content of a JSON file in the folder or Hub repository of an encoder.

    Return None if there is no such file. Raises InputError if the content has a wrong type. type_
    and version: see ``read_json``.
    """
    path = optional_file(name, file)
    return None if path is None else read_json(path, type_, version=version)
