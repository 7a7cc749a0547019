"""Write the model card (README.md) of a model, and upload the model to the Hugging Face Hub.

The card shows settings, training, scores and example code. Its content comes from the model and from config.yaml,
environment.json, log.jsonl and metrics.json of the run. The card shows only the last part of a local path. Messages and files
never contain the access token.
"""

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects, validate_repo_id

from contaccum.encoder import SETTINGS_FILE, TOWERS, EncoderSettings, make_settings, model_folder
from contaccum.encoder.folders import ADAPTER_FILE, AdapterFile, ModelFile, read_encoder
from contaccum.errors import InputError, library_errors, printable
from contaccum.evaluation.metrics import read_metrics
from contaccum.runtime.files import read_json, write_text
from contaccum.runtime.hub import is_hub_name, optional_json
from contaccum.training.log import read_environment, read_log
from contaccum.training.run_folder import CONFIG_FILE, flat, read_config

CARD = "README.md"
CURVE_ROWS = 12
PATHS = ("model.name", "model.passage_name", "data.train", "data.dev", "loss.guide")
OMITTED = ("output_dir", "resume", "allow_changes", "run.trackers", "run.timeout_minutes")
"""Settings that the card does not show, because they do not describe the model."""
POOL = {
    "mean": "(states * mask).sum(1) / mask.sum(1)",
    "cls": "states[:, 0]",
    "last": "states[range(len(states)), tokens['attention_mask'].sum(1) - 1]",
}
_HUB_SET = re.compile(r"hub:([\w-][\w.-]*/[\w.-]+)([@:?].*)?", re.DOTALL)
_FAMILIES = ("nanobeir", "mteb", "miracl", "cqadupstack", "dpr")  # first parts of names of data sets
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
    files = uploaded_files(model)
    listed = "\n".join(f"{(model / name).stat().st_size:12d}  {name}" for name in files)
    if dry_run:
        return f"{listed}\nNothing was sent. Without --dry_run, these {len(files)} files are uploaded to {repository}."
    token = get_token()
    if token is None:
        raise InputError("no Hub token found. Set HF_TOKEN, or log in with `hf auth login`.")
    api = HfApi()
    try:
        created = api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.repo_info(repository).private:
            raise InputError(
                f"{repository}: this repository exists and is public; --private needs a new or a private repository. Choose "
                "another name, or make the repository private on the Hub."
            )
        sent = api.upload_folder(repo_id=repository, folder_path=model, commit_message="Upload by contaccum push")
    except FAILURES as error:
        reason = " ".join(str(error).replace(token, "***").split())[:300]
        if not isinstance(error, HfHubHTTPError):
            raise InputError(f"{repository}: cannot reach the Hub at {api.endpoint} ({reason})") from error
        status = error.response.status_code if error.response is not None else "none"
        raise InputError(f"{repository}: the Hub rejected the upload (status {status}: {reason})") from error
    return f"{listed}\n{created}\n{sent.commit_url}"


def uploaded_files(model: Path) -> list[str]:
    """Return the names of the files that ``HfApi.upload_folder`` uploads: all but those of git and of downloads from the Hub."""
    names = [file.relative_to(model).as_posix() for file in sorted(model.rglob("*")) if file.is_file()]
    return list(filter_repo_objects(names, ignore_patterns=DEFAULT_IGNORE_PATTERNS))


def refuse_links(model: Path) -> None:
    """Raise InputError if a symbolic link leads out of the model's folder, because a private file could be uploaded."""
    for link in model.rglob("*"):
        if link.is_symlink() and not (target := link.resolve()).is_relative_to(model.resolve()):
            raise InputError(
                f"{link}: this symbolic link leads out of the model's folder, to {target}. Replace the link with a copy of the "
                "file, or delete it."
            )


def find_model(path: Path) -> tuple[Path, Path | None]:
    """Return the folder of a model, and the folder of its run or None if unknown. path: either of the two folders."""
    model = Path(model_folder(path))
    if not (model / SETTINGS_FILE).is_file():
        raise InputError(f"{path}: no model found; expected a folder with {SETTINGS_FILE}, or the folder of a run")
    run = Path(os.path.abspath(model)).parent  # the parent of Path(".") is Path(".")
    return model, run if (run / CONFIG_FILE).is_file() else None


def adapter_of(model: Path) -> AdapterFile | None:
    """Return the configuration of the LoRA adapter of a model. Return None if the model has no adapter."""
    return optional_json(str(model / TOWERS[0]), ADAPTER_FILE, AdapterFile)


def write_card(model: Path, run: Path | None, repository: str, licence: str | None) -> str:
    """Return the text of the model card: Markdown, with metadata for the Hub at the top.

    run: folder of the run that trained the model. None: the card shows neither training settings nor scores. repository:
    owner/name on the Hub. licence: licence to state, or None to state none.
    """
    settings = make_settings(read_encoder(str(model)).settings, str(model))
    config = {} if run is None else flat(read_config(run))
    scores = _scores(run)
    card = ModelCard.from_template(
        _metadata(config, scores, repository, licence),
        template_path=str(Path(__file__).with_name("model_card.md.jinja")),
        repository=repository,
        towers="one encoder for queries and passages" if settings.tie_towers else "separate query and passage encoders",
        method=config.get("method"),
        summary=_summary(model, settings),
        # whether to show the transformers example, which loads neither a Dense layer nor an adapter in a subfolder
        plain=not list(model.glob("*/*_Dense")) and adapter_of(model) is None,
        pool=POOL[settings.pooling],
        settings=settings,
        query_prefix=repr(settings.query_prefix),
        passage_prefix=repr(settings.passage_prefix),
        training=None if run is None else _training(run, config),
        scores=scores,
        evaluated_on=_data_of(scores),
        scores_table=_table(("metric", "value"), [(k, f"{v:.4f}") for k, v in scores.get("mean", {}).items()]),
        licence=licence,
    )
    return f"{str(card).rstrip()}\n"


def _metadata(config: dict[str, Any], scores: dict[str, Any], repository: str, licence: str | None) -> ModelCardData:
    base = str(config.get("model.name", "tiny"))
    datasets = dict.fromkeys(name for train, _ in _train_sets(config) if (name := _hub_set(train)))
    about = ("information-retrieval", "unknown", _data_of(scores))
    means = scores.get("mean", {}).items()
    results = [EvalResult(*about, name, round(v, 5), task_name="Information Retrieval") for name, v in means]
    return ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "feature-extraction", "dense-retrieval", "contaccum"],
        license=licence,
        base_model=base if base.count("/") == 1 and is_hub_name(base) and not Path(base).exists() else None,
        datasets=list(datasets) or None,
        model_name=repository.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )


def _data_of(scores: dict[str, Any]) -> str:
    return f"{_last_part(scores.get('data', 'dev set'))} {scores.get('split', '')}".strip()


def _train_sets(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the name and the split of each training set."""
    mixture = config.get("data.mixture") or [{name: config.get(f"data.{name}", "") for name in ("train", "split")}]
    return [(each["train"], each["split"]) for each in mixture]


def _hub_set(name: str) -> str | None:
    """Return owner/name for a name such as ``hub:owner/name``. Return None for other names and for a local folder."""
    found = _HUB_SET.fullmatch(name)
    return found[1] if found and not Path(found[1]).exists() else None


def _last_part(path: Any) -> str:
    """Return the last part of a local path or of a model's name. Return the name of a data set unchanged."""
    text = str(path)
    is_name = _hub_set(text) or text.partition("/")[0] in _FAMILIES
    return text if is_name else text.rstrip("/").rpartition("/")[2]


def _summary(model: Path, settings: EncoderSettings) -> str:
    if adapter := adapter_of(model):
        architecture = f"LoRA of rank {adapter['r']} on {_last_part(adapter['base_model_name_or_path'])}"
    else:
        backbone = read_json(model / TOWERS[0] / "config.json", ModelFile)
        architecture = f"{backbone.get('model_type')}, {backbone.get('num_hidden_layers', '?')} layers"
    rows = {
        "architecture": architecture,
        "pooling": settings.pooling,
        "similarity": settings.similarity,
        "maximum query and passage length (tokens)": f"{settings.max_query_length}, {settings.max_passage_length}",
        "query prefix": repr(settings.query_prefix),
        "passage prefix": repr(settings.passage_prefix),
    }
    return _table(("", ""), list(rows.items()))


def _training(run: Path, config: dict[str, Any]) -> str:
    shown = {name: value for name, value in config.items() if name not in OMITTED and value is not None}
    if mixture := shown.get("data.mixture"):
        shown["data.mixture"] = [each | {"train": _last_part(each["train"])} for each in mixture]
    rows = [(f"`{name}`", f"`{_last_part(value) if name in PATHS else value}`") for name, value in shown.items()]
    versions = [f"{name} {value}" for name, value in read_environment(run).items()]
    sets = ", ".join(f"`{_last_part(name)}` ({split})" for name, split in _train_sets(config))
    data = f"Trained on {sets}; {', '.join(versions)}."
    settings = f"<details><summary>All settings</summary>\n\n{_table(('setting', 'value'), rows)}\n\n</details>"
    return "\n\n".join([data, *_curve(run, config["run.metric"]), settings])


def _curve(run: Path, metric: str) -> list[str]:
    """Return [table], or [] if the log has no steps. The table has losses at evenly spaced steps, and the last dev scores."""
    log = read_log(run)
    steps = {line["step"]: (f"{line['loss']:.4f}", f"{line['learning_rate']:.2e}") for line in log if "loss" in line}
    if not steps:
        return []
    dev = {line["step"]: f"{line['dev'][metric]:.4f}" for line in log if metric in line.get("dev", {})}
    chosen = {list(steps)[round(i * (len(steps) - 1) / (CURVE_ROWS - 1))] for i in range(CURVE_ROWS)}
    chosen |= set(list(dev)[-CURVE_ROWS:])
    rows = [(step, *steps.get(step, ("", "")), dev.get(step, "")) for step in sorted(chosen)]
    return [_table(("step", "loss", "learning rate", f"dev {metric}"), rows)]


def _scores(run: Path | None) -> dict[str, Any]:
    for name in ("metrics.json", "dev_metrics.json"):
        if run is not None and (run / name).is_file():
            return read_metrics(run / name)
    return {}


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines, escapes = [header, tuple("---" for _ in header), *rows], str.maketrans({"|": "\\|", "\n": "\\n"})
    cells = ((printable(str(cell)).translate(escapes) for cell in line) for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
