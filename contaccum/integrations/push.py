"""Write the model card (README.md) of a model, and upload the model to the Hugging Face Hub.

The card shows settings, training data, scores and example code. Its content comes from the model
and from config.yaml, environment.json and metrics.json of the run. Local paths are shortened to
their last part.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError

from contaccum.encoder import SETTINGS_FILE, make_settings, model_folder
from contaccum.encoder.folders import ADAPTER_FILE, AdapterFile, ModelFile, read_encoder
from contaccum.errors import InputError, library_errors, printable
from contaccum.evaluation.metrics import read_metrics
from contaccum.runtime.files import read_json, write_text
from contaccum.runtime.hub import is_hub_name, optional_json
from contaccum.training.log import read_environment
from contaccum.training.run_folder import (
    CARD,
    CONFIG_FILE,
    DEV_METRICS_FILE,
    METRICS_FILE,
    flat,
    read_config,
)

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
OMITTED = ("output_dir", "resume", "allow_changes", "run.trackers", "run.timeout_minutes")
"""Settings that the card does not show, because they do not describe the model."""
PATHS = ("model.name", "model.passage_name", "data.train", "data.dev", "loss.guide")
"""Settings that can be local paths."""
# a failed connection raises an instance of a base class of HfHubHTTPError
HUB_ERRORS: tuple[Any, ...] = (OSError, *HfHubHTTPError.__bases__)


def push(
    path: str,
    repository: str,
    private: bool = False,
    licence: str | None = None,
    dry_run: bool = False,
) -> str:
    """Upload a model to the Hub. Return the addresses of the repository and of the commit.

    path: folder of a model, or of a run that has a model. If the folder of the model has no model
    card, a card is written there; an existing card is not changed. repository: owner/name on the
    Hub. private: create a private repository. licence: licence for the model card. dry_run: write
    the card and return the names of the files, but upload nothing. Raises InputError if the access
    token is missing, if the Hub does not answer, or if the Hub rejects the upload.
    """
    model = Path(model_folder(path))
    if not (model / SETTINGS_FILE).is_file():
        raise InputError(
            f"{path}: no model found; expected a folder with {SETTINGS_FILE}, or the folder of a "
            "run"
        )
    if repository.count("/") != 1 or not is_hub_name(repository):
        raise InputError(
            f"repository is {repository!r}; expected a valid Hub name of the form owner/name"
        )
    for file in model.rglob("*"):  # a link could upload a private file
        if file.is_symlink() and not file.resolve().is_relative_to(model.resolve()):
            raise InputError(
                f"{file}: this symbolic link leads out of the model's folder, to {file.resolve()}. "
                "Replace the link with a copy of the file, or delete it."
            )
    read = read_encoder(str(model))
    for tower in (read.query, read.passage):
        if tower.base is not None and os.path.isabs(tower.base.name):
            raise InputError(
                f"{model}: the adapter's base is a local folder, which nobody else can load. Merge "
                "the adapter with contaccum merge first."
            )
    if not (model / CARD).exists():
        write_text(model / CARD, write_card(model, repository, licence))
    elif licence is not None:
        raise InputError(
            f"{model / CARD}: already exists, so --licence has no effect. Edit the license field "
            "of this file instead."
        )
    if dry_run:
        names = sorted(str(file.relative_to(model)) for file in model.rglob("*") if file.is_file())
        said = f"Nothing was sent. Without --dry_run, these files are uploaded to {repository}."
        return "\n".join([*names, said])
    if get_token() is None:
        raise InputError("no Hub token found. Set HF_TOKEN, or log in with `hf auth login`.")
    api = HfApi()
    with library_errors(f"{repository}: cannot be uploaded to {api.endpoint}", *HUB_ERRORS):
        created = api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.repo_info(repository).private:
            raise InputError(
                f"{repository}: this repository exists and is public; --private needs a new or a "
                "private repository. Choose another name, or make the repository private on the "
                "Hub."
            )
        sent = api.upload_folder(
            repo_id=repository, folder_path=model, commit_message="Upload by contaccum push"
        )
    return f"{created}\n{sent.commit_url}"


def write_card(model: Path, repository: str, licence: str | None) -> str:
    """Return the text of the model card: Markdown, with metadata for the Hub at the top.

    The parent folder of ``model`` can be the run that trained it. Without a run, the card shows
    neither training settings nor scores. repository: owner/name on the Hub. licence: licence to
    state, or None to state none.
    """
    run = Path(os.path.abspath(model)).parent
    files = read_encoder(str(model))
    settings = make_settings(files.settings, str(model))
    tower = model / files.query.subfolder
    config: dict[str, Any] = {}
    if (run / CONFIG_FILE).is_file():
        with suppress(InputError):  # the file of another program
            config = flat(read_config(run))

    adapter = optional_json(str(tower), ADAPTER_FILE, AdapterFile)
    if adapter is not None:
        architecture = f"LoRA of rank {adapter['r']} on {shown(adapter['base_model_name_or_path'])}"
    else:
        backbone = read_json(tower / "config.json", ModelFile)
        architecture = (
            f"{backbone.get('model_type')}, {backbone.get('num_hidden_layers', '?')} layers"
        )

    scores: dict[str, Any] = {}
    evaluated_on = ""
    tested = bool(config) and (run / METRICS_FILE).is_file()
    if tested:
        scores = read_metrics(run / METRICS_FILE)
        evaluated_on = f"{shown(scores.get('data', 'test set'))} {scores.get('split', '')}".strip()
    elif config and (run / DEV_METRICS_FILE).is_file():
        scores = read_metrics(run / DEV_METRICS_FILE)
        evaluated_on = f"dev set ({scores['label']})"  # the label says if passages are a sample
    means = scores.get("mean", {})

    default = {"train": config.get("data.train", ""), "split": config.get("data.split", "")}
    mixture = config.get("data.mixture") or []
    rows = []  # name and value of each setting, as Markdown code
    for name, value in config.items():
        if name == "data.mixture":
            value = [member | {"train": shown(member["train"])} for member in mixture] or None
        if name not in OMITTED and value is not None:
            rows.append((f"`{name}`", cell(f"`{shown(value) if name in PATHS else value}`")))

    base = str(config.get("model.name", "tiny"))
    on_hub = base.count("/") == 1 and is_hub_name(base) and not Path(base).exists()
    data = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "feature-extraction", "dense-retrieval", "contaccum"],
        license=licence,
        base_model=base if on_hub else None,
        model_name=repository.rpartition("/")[2] if tested else None,
        eval_results=[
            EvalResult("information-retrieval", "unknown", evaluated_on, metric, round(value, 5))
            for metric, value in means.items()
        ]
        if tested
        else None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        repository=repository,
        method=config.get("method"),
        architecture=architecture,
        settings=settings,
        query_prefix=repr(settings.query_prefix),
        passage_prefix=repr(settings.passage_prefix),
        prefixes_in_table=[cell(repr(settings.query_prefix)), cell(repr(settings.passage_prefix))],
        # the transformers example loads neither Dense layers nor adapters
        plain=not list(model.rglob("*_Dense")) and adapter is None,
        training_sets=", ".join(
            f"`{shown(member['train'])}` ({member['split']})" for member in mixture or [default]
        ),
        versions=", ".join(f"{name} {value}" for name, value in read_environment(run).items()),
        rows=rows,
        queries=scores.get("queries"),
        means=means,
        evaluated_on=evaluated_on,
        licence=licence,
    )
    return f"{str(card).rstrip()}\n"


def shown(name: Any) -> str:
    """Return the last part of a local path. Return the name of a data set or model unchanged."""
    text = str(name)
    path = text.removeprefix("hub:").partition("?")[0]
    return text.rpartition("/")[2] if os.path.isabs(path) or os.path.exists(path) else text


def cell(text: str) -> str:
    """Escape the characters of ``text`` that would end a cell or a row of a Markdown table."""
    return printable(text).replace("|", "\\|").replace("\n", "\\n")
