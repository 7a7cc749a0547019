"""Upload models to the Hugging Face Hub. Messages and files never contain the access token."""

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from contaccum.errors import InputError, library_errors
from contaccum.integrations.model_card import CARD, adapter_of, find_model, write_card
from contaccum.runtime.files import write_text

# a failed connection raises an instance of a base class of HfHubHTTPError
FAILURES: tuple[Any, ...] = (OSError, *HfHubHTTPError.__bases__)


def push(path: str, repository: str, private: bool = False, licence: str | None = None, dry_run: bool = False) -> str:
    """Upload a model to the Hub; return a text that lists the files and the addresses of the repository and the commit.

    path: folder of a model, or of a run that has a model. If the folder of the model has no model card, a card is written there;
    an existing card is not changed. repository: owner/name on the Hub. private: create a private repository. licence: licence for
    the model card. dry_run: write the card and list the files, but upload nothing. Raises InputError if the access token is
    missing, if the Hub does not answer, or if the Hub rejects the upload.
    """
    model, run = find_model(Path(path))
    refuse_links(model)
    with library_errors(f"repository is {repository!r}; expected a valid Hub name", ValueError):
        validate_repo_id(repository)
    if repository.count("/") != 1:
        raise InputError(f"repository is {repository!r}; expected owner/name")
    adapter = adapter_of(model)
    if adapter is not None and Path(adapter.get("base_model_name_or_path") or "").is_absolute():
        raise InputError(
            f"{model}: the adapter's base is a local folder, which nobody else can load. Merge the adapter with contaccum merge "
            "first."
        )
    if not (model / CARD).exists():
        write_text(model / CARD, write_card(model, run, repository, licence))
    elif licence is not None:
        raise InputError(
            f"{model / CARD}: already exists, so --licence has no effect. Edit the license field of this file instead."
        )
    files = sorted(file for file in model.rglob("*") if file.is_file())
    listed = "\n".join(f"{file.stat().st_size:12d}  {file.relative_to(model).as_posix()}" for file in files)
    if dry_run:
        return f"{listed}\nNothing was sent. Without --dry_run, these {len(files)} files are uploaded to {repository}."
    token = get_token()
    if token is None:
        raise InputError("no Hub token found. Set HF_TOKEN, or log in with `hf auth login`.")
    api = HfApi()
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        sent = api.upload_folder(repo_id=repository, folder_path=model, commit_message="Upload by contaccum push")
    except FAILURES as error:
        reason = " ".join(str(error).replace(token, "***").split())[:300]
        if not isinstance(error, HfHubHTTPError):
            raise InputError(f"{repository}: cannot reach the Hub at {api.endpoint} ({reason})") from error
        status = error.response.status_code if error.response is not None else "none"
        raise InputError(f"{repository}: the Hub rejected the upload (status {status}: {reason})") from error
    return f"{listed}\n{created}\n{sent.commit_url}"


def refuse_links(model: Path) -> None:
    """Raise InputError if a symbolic link leads out of the model's folder, because a private file could be uploaded."""
    for link in model.rglob("*"):
        if link.is_symlink() and not (target := link.resolve()).is_relative_to(model.resolve()):
            raise InputError(
                f"{link}: this symbolic link leads out of the model's folder, to {target}. Replace the link with a copy of the "
                "file, or delete it."
            )
