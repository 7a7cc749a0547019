"""The model card: what a trained model is, how it was made, how it scores and how it is loaded; README.md of its folder.

Read from what a run left: config.yaml, environment.json, log.jsonl, metrics.json. Of paths only the last part is told.
"""

from pathlib import Path
from typing import Any

import yaml

from contaccum.encoder.settings import SETTINGS_FILE, TOWERS, EncoderSettings, make_settings
from contaccum.errors import InputError
from contaccum.files import read_json
from contaccum.training.environment import read_environment
from contaccum.training.log import read_log
from contaccum.training.setup import CONFIG_FILE, flat, read_config

CARD = "README.md"
MOST_ROWS = 12
"""Rows of the table that stands for the training curve."""
PATHS = ("model.name", "model.passage_name", "data.train", "data.dev")
UNTOLD = ("output_dir", "resume", "allow_changes", "run.trackers", "run.timeout_minutes")
"""Settings that say nothing of the model."""
POOL = {
    "mean": "(states * mask).sum(1) / mask.sum(1)",
    "cls": "states[:, 0]",
    "last": "states[range(len(states)), tokens['attention_mask'].sum(1) - 1]",
}


def find_model(path: Path) -> tuple[Path, Path | None]:
    """The model's folder and the run's, of either of them; InputError where there is no model."""
    for model in (path / "model", path):
        if (model / SETTINGS_FILE).is_file():
            return model, model.parent if (model.parent / CONFIG_FILE).is_file() else None
    raise InputError(f"{path}: holds no model, expected a folder with {SETTINGS_FILE}, or a run's folder with model/")


def write_up(model: Path, run: Path | None, repository: str, licence: str | None) -> str:
    """The card of a model in Markdown, with the Hub's fields in front. ``repository``: owner/name, by which it is loaded."""
    settings = make_settings(read_json(model / SETTINGS_FILE), str(model))
    config = {} if run is None else flat(read_config(run))
    scores = _scores(run)
    parts = [
        _front(config, scores, repository, licence),
        f"# {repository.rpartition('/')[2]}",
        _summary(model, settings, config),
        *_use(model, settings, repository),
        *_training(run, config),
        *_evaluation(scores),
        "## Licence",
        licence or "None is stated.",
    ]
    return "\n\n".join(parts) + "\n"


def _front(config: dict[str, Any], scores: dict[str, Any], repository: str, licence: str | None) -> str:
    fields: dict[str, Any] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "feature-extraction", "dense-retrieval", "contaccum"],
    }
    if licence is not None:
        fields["license"] = licence
    base = str(config.get("model.name", "tiny"))
    if base.count("/") == 1 and not Path(base).exists():  # a hub name, which the Hub links to
        fields["base_model"] = base
    if str(config.get("data.train", "")).startswith("hub:"):
        fields["datasets"] = [config["data.train"].split(":")[1]]
    if scores:
        values = [{"type": name, "value": round(value, 5)} for name, value in scores["mean"].items()]
        task = {"type": "information-retrieval", "name": "Information Retrieval"}
        dataset = {"type": "unknown", "name": _named(scores)}
        results = [{"task": task, "dataset": dataset, "metrics": values}]
        fields["model-index"] = [{"name": repository.rpartition("/")[2], "results": results}]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _named(scores: dict[str, Any]) -> str:
    return f"{_last(scores.get('data', 'dev set'))} {scores.get('split', '')}".strip()


def _last(path: Any) -> str:
    """The last part of a path; what is no path stays."""
    text = str(path)
    return text if text.startswith("hub:") else text.rstrip("/").rpartition("/")[2]


def _summary(model: Path, settings: EncoderSettings, config: dict[str, Any]) -> str:
    kind = "one encoder for queries and passages" if settings.tie_towers else "a query encoder and a passage encoder"
    rows = {
        "architecture": _architecture(model),
        "pooling": settings.pooling,
        "similarity": settings.similarity,
        "longest query, longest passage (tokens)": f"{settings.max_query_length}, {settings.max_passage_length}",
        "put before a query": repr(settings.query_prefix),
        "put before a passage": repr(settings.passage_prefix),
    }
    how = f", trained with contaccum's `{config['method']}`" if config else ""
    return f"A dense retriever: {kind}{how}.\n\n{_table(('', ''), list(rows.items()))}"


def _architecture(model: Path) -> str:
    if adapter := adapter_of(model):
        return f"LoRA of rank {adapter['r']} beside {_last(adapter['base_model_name_or_path'])}"
    backbone = read_json(model / TOWERS[0] / "config.json")
    return f"{backbone.get('model_type')}, {backbone.get('num_hidden_layers', '?')} layers"


def adapter_of(model: Path) -> dict[str, Any] | None:
    """What the model's adapter says of itself; None of a model with weights of its own."""
    file = model / TOWERS[0] / "adapter_config.json"
    return read_json(file) if file.is_file() else None


def _use(model: Path, settings: EncoderSettings, repository: str) -> list[str]:
    blocks = {
        "sentence-transformers": f"""from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{repository}")
queries = model.encode_query(["What is asked"])
passages = model.encode_document(["Title and text of a passage"])
scores = model.similarity(queries, passages)""",
        "contaccum": f"""from contaccum import DualEncoder

encoder = DualEncoder.load("{repository}")
queries = encoder.encode_queries(["What is asked"])
passages = encoder.encode_passages(["Title and text of a passage"])
scores = queries @ passages.T""",
    }
    # Dense layers are not known to transformers, and the base of an adapter in a subfolder it does not find
    if not list(model.glob("*/*_Dense")) and adapter_of(model) is None:
        blocks["transformers"] = _plain_use(settings, repository)
    return ["## Use", *(f"{name}:\n\n```python\n{code}\n```" for name, code in blocks.items())]


def _plain_use(settings: EncoderSettings, repository: str) -> str:
    cut = "" if settings.truncate_dim is None else f"\n    vectors = vectors[:, :{settings.truncate_dim}]"
    normal = "\n    vectors = torch.nn.functional.normalize(vectors, dim=1)" * (settings.similarity == "cosine")
    return f"""import torch
from transformers import AutoModel, AutoTokenizer


def encode(texts, side, prefix, length):
    tokenizer = AutoTokenizer.from_pretrained("{repository}", subfolder=side)
    model = AutoModel.from_pretrained("{repository}", subfolder=side).eval()
    tokenizer.padding_side = "right"
    tokens = tokenizer(
        [prefix + text for text in texts], padding=True, truncation=True, max_length=length, return_tensors="pt"
    )
    with torch.no_grad():
        states = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(2)
    vectors = {POOL[settings.pooling]}{cut}{normal}
    return vectors


queries = encode(["What is asked"], "{TOWERS[0]}", {settings.query_prefix!r}, {settings.max_query_length})
passages = encode(["Title and text of a passage"], "{TOWERS[1]}", {settings.passage_prefix!r}, {settings.max_passage_length})
scores = queries @ passages.T"""


def _training(run: Path | None, config: dict[str, Any]) -> list[str]:
    if run is None:
        return []
    told = {name: value for name, value in config.items() if name not in UNTOLD and value is not None}
    rows = [(f"`{name}`", f"`{_last(value) if name in PATHS else value}`") for name, value in told.items()]
    made = [f"{name} {value}" for name, value in read_environment(run).items()]
    settings = f"<details><summary>All settings</summary>\n\n{_table(('setting', 'value'), rows)}\n\n</details>"
    data = f"Trained on `{_last(config['data.train'])}` ({config['data.split']}); {', '.join(made)}."
    return ["## Training", data, *_curve(run), settings]


def _curve(run: Path) -> list[str]:
    log = read_log(run)
    steps = [line for line in log if "loss" in line]
    if not steps:
        return []
    places = sorted({round(i * (len(steps) - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)})
    dev = {line["step"]: next(iter(line["dev"].items())) for line in log if "dev" in line}
    chosen = {steps[place]["step"] for place in places} | set(list(dev)[-MOST_ROWS:])
    rows = [
        (
            line["step"],
            f"{line['loss']:.4f}",
            f"{line['learning_rate']:.2e}",
            " ".join(f"{name} {value:.4f}" for name, value in [dev[line["step"]]]) if line["step"] in dev else "",
        )
        for line in steps
        if line["step"] in chosen
    ]
    return [_table(("step", "loss", "learning rate", "dev"), rows)]


def _scores(run: Path | None) -> dict[str, Any]:
    """What an evaluation of the run's model left beside it, else the last on its dev set."""
    for name in ("metrics.json", "dev_metrics.json"):
        if run is not None and (run / name).is_file():
            return read_json(run / name)
    return {}


def _evaluation(scores: dict[str, Any]) -> list[str]:
    if not scores:
        return []
    rows = [(name, f"{value:.4f}") for name, value in scores["mean"].items()]
    return ["## Evaluation", f"On `{_named(scores)}`, {scores['queries']} queries:", _table(("metric", "value"), rows)]


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
