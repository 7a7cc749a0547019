"""A model to the Hugging Face Hub, by its own client; the token is the client's, and is neither read into messages nor kept."""

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from contaccum.data.repositories import CLIENT_ERROR
from contaccum.errors import InputError
from contaccum.files import write_text
from contaccum.publish.card import CARD, adapter_of, find_model, write_up


def push(path: str, repository: str, private: bool = False, licence: str | None = None, dry_run: bool = False) -> str:
    """Send a model's folder, with its card, to ``repository`` (owner/name); returns what was or would be sent.

    path: a model's folder or a run's. A card is written beside the model unless there is one, which is sent as it is. InputError
    without a token, without a network, or where the Hub refuses.
    """
    model, run = find_model(Path(path))
    _check_name(repository)
    _check_base(model)
    if not (model / CARD).exists():
        write_text(model / CARD, write_up(model, run, repository, licence))
    elif licence is not None:
        raise InputError(f"{model / CARD}: stands already, expected no licence beside a card that is sent as it is")
    files = sorted(file for file in model.rglob("*") if file.is_file())
    listed = "\n".join(f"{file.stat().st_size:12d}  {file.relative_to(model).as_posix()}" for file in files)
    if dry_run:
        return f"{listed}\nnothing was sent; without --dry_run these {len(files)} files go to {repository}"
    return f"{listed}\n{_send(model, repository, private)}"


def _check_base(model: Path) -> None:
    adapter = adapter_of(model)
    if adapter is not None and Path(adapter["base_model_name_or_path"]).is_absolute():
        raise InputError(
            f"{model}: an adapter whose base is a folder of this machine, expected one from the Hub, or whole weights "
            "(contaccum merge makes them)"
        )


def _check_name(repository: str) -> None:
    try:
        validate_repo_id(repository)
    except ValueError as error:
        raise InputError(f"repository {repository!r} is no name on the Hub ({' '.join(str(error).split())})") from error
    if repository.count("/") != 1:
        raise InputError(f"repository is {repository!r}, expected owner/name")


def _send(model: Path, repository: str, private: bool) -> str:
    token = get_token()
    if token is None:
        raise InputError("no token for the Hub was found, expected one in HF_TOKEN or from `hf auth login`")
    api = HfApi()
    try:
        made = api.create_repo(repository, private=private, exist_ok=True)
        sent = api.upload_folder(repo_id=repository, folder_path=model, commit_message="Upload by contaccum push")
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "none"
        raise InputError(f"{repository}: the Hub refused (status {status}: {_said(error, token)})") from error
    except (OSError, CLIENT_ERROR) as error:
        raise InputError(f"{repository}: the Hub at {api.endpoint} was not reached ({_said(error, token)})") from error
    return f"{made}\n{sent.commit_url}"


def _said(error: Exception, token: str) -> str:
    return " ".join(str(error).replace(token, "***").split())[:300]
