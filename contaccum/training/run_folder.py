"""Folder of a training run: lock, settings, checkpoints, and checks before a run resumes.

checkpoints/step-00000100/
    model/                both towers, as DualEncoder.save writes them
    optimizer.safetensors state of the optimizer (moments of AdamW) by parameter name
    optimizer/            only with run.sharding, instead of optimizer.safetensors: the state, split
                          into one file per process
    bank.safetensors      embeddings, ids and cached log-sum-exps of the bank
    state.json            step, hashes of data and encoder, counters of the bank, loss scale, best
                          dev score
    manifest.json         size and SHA-256 of every other file

A checkpoint appears under its name only when it is complete. It is loaded only if every hash is
correct. No random state is saved, because the order of the data, the sampling and the dropout
depend only on (seed, step).
"""

import hashlib
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from contaccum.config import ENCODER_SETTINGS, TrainConfig, settings_with
from contaccum.config.load import CONFIG_VERSION, check_version, read_yaml
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.data.tables import tokenizer_hash
from contaccum.data.train_set import TrainSet
from contaccum.encoder import SETTINGS_FILE, DualEncoder, model_folder
from contaccum.errors import InputError
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import (
    is_leftover,
    read_json,
    remove_folder,
    sha256_of,
    sweep,
    write_json,
)
from contaccum.runtime.launch import is_main
from contaccum.runtime.locks import LOCK_FILE, folder_lock

CONFIG_FILE = "config.yaml"
DEV_METRICS_FILE = "dev_metrics.json"  # metrics of the best evaluation on dev
FINISHED_FILE = "finished.json"  # steps of a run that ended and deleted its checkpoints
MANIFEST = "manifest.json"
STATE_VERSION = 3  # ``format_version`` of state.json; 2 and 3: other dropout noise
LINKS = ("checkpoints", "model")
"""Names of the folders in a run's folder that may be symbolic links, for example to another
disk.
"""


@contextmanager
def claimed_folder(config: TrainConfig) -> Iterator[None]:
    """Check the output folder and lock it during the ``with`` block.

    Without ``resume``, the folder must be empty or not exist. With ``resume``, it may contain a run
    with the same settings. Only the main process takes the lock and removes the temporary files of
    a killed run.
    """
    run = Path(config.output_dir)
    where = f"output_dir {run}"
    for path in (run, *(run / name for name in LINKS)):
        if path.is_symlink() and not path.is_dir():
            raise InputError(
                f"{path}: this link points to {os.readlink(path)}, where no folder exists. Create "
                "the folder, or remove the link."
            )
    if run.exists() and not run.is_dir():
        raise InputError(f"{where}: this is a file. Choose a folder.")
    model = run / "model"  # if model/ is a link, saving replaces the folder that it points to
    if model.is_symlink() and any(model.iterdir()) and not (model / SETTINGS_FILE).is_file():
        raise InputError(
            f"{model}: this link points to {os.readlink(model)}, which is not empty. Link an empty "
            "folder."
        )
    with folder_lock(run) if is_main() else nullcontext():
        if (run / CONFIG_FILE).is_file():
            if not config.resume:
                raise InputError(
                    f"{where}: contains a run. Add --resume to continue it, or choose another "
                    "output_dir."
                )
            changes = config_differences(read_config(run), asdict(config))
            refuse_changes(
                f"{where}: the settings of this run changed", changes, config.allow_changes
            )
        elif run.is_dir() and not all(_is_unused(path) for path in run.iterdir()):
            if config.resume:
                raise InputError(
                    f"{where}: no {CONFIG_FILE} found, so there is no run to resume in this folder."
                )
            raise InputError(f"{where}: not empty. Choose an empty folder.")
        if is_main():
            sweep(run)
            sweep(run / "checkpoints")
            if model.is_symlink():  # temporary files are next to the folder that the link points to
                target = Path(os.path.realpath(model))
                sweep(target.parent, target.name, shared=True)
        yield


def _is_unused(path: Path) -> bool:
    """Return whether ``path`` may be in the folder of a new run.

    Allowed are a link to an empty folder, the lock, a temporary file, and the file of the macOS
    Finder.
    """
    if path.is_symlink() and path.name in LINKS:
        return not any(path.iterdir())
    # filelock may leave LOCK_FILE.break.*
    return path.name.startswith(LOCK_FILE) or is_leftover(path.name) or path.name == ".DS_Store"


def require_lock(run: Path) -> None:
    """Raise InputError if the run's folder was renamed or deleted after it was locked."""
    if not (run / LOCK_FILE).exists():
        raise InputError(
            f"{run}: this folder was renamed or deleted during the run. If it still exists, "
            "continue with --resume and its new name."
        )


def refuse_changes(where: str, changes: list[str], allowed: bool) -> None:
    """Raise InputError if there are ``changes`` since the run started.

    If ``allowed``, only print the changes.
    """
    if not changes:
        return
    listed = "; ".join(changes)
    if not allowed:
        raise InputError(
            f"{where}: {listed}. Undo these changes, or allow them with --allow_changes true."
        )
    if is_main():
        print(f"{where} (allowed): {listed}", file=sys.stderr)


def refuse_fixed_changes(config: TrainConfig) -> None:
    """Raise InputError if a changed setting makes the checkpoints of the run unusable."""
    settings, fixed = flat(asdict(config)), set(settings_with("never"))
    # None means the value in the folder of the initial encoder, but a resumed run would use the
    # value in the checkpoint
    fixed |= {f"model.{name}" for name in ENCODER_SETTINGS if settings[f"model.{name}"] is None}
    if changes := _changes(flat(read_config(Path(config.output_dir))), settings, fixed):
        raise InputError(
            f"output_dir {config.output_dir}: the checkpoints need these settings unchanged: "
            f"{'; '.join(changes)}. Undo the changes, or start a new run; --allow_changes does not "
            "allow these changes."
        )


def run_identity(
    config: TrainConfig,
    engine: Engine,
    encoder: DualEncoder,
    train_set: TrainSet,
    dev: RetrievalSet | None,
) -> dict[str, Any]:
    """Return the values that must be the same when a run resumes.

    These are the number of processes, and hashes of the data, the tokenizers, the encoder folders,
    the guide and the dev set. Tokenizers are loaded from the checkpoint, so their hash changes only
    if the tokenizer library changes. Trained weights are loaded from the checkpoint too. The folder
    of the initial encoder is still hashed, because config.yaml names this folder: if the files in
    the folder changed, config.yaml would no longer describe the run.
    """
    towers = encoder.query_tower, encoder.passage_tower
    return {
        "world": engine.world,
        "data": train_set.fingerprint,
        "tokenizer": [tokenizer_hash(tower.tokenizer) for tower in towers],
        "encoder": [
            files_hash(Path(name))
            for name in (config.model.name, config.model.passage_name)
            if name
        ],
        **(
            {"guide": files_hash(Path(model_folder(config.loss.guide)))}
            if config.loss.guide
            else {}
        ),
        **(
            {f"split {config.data.dev_split} of {config.data.dev}": dev.fingerprint()}
            if dev
            else {}
        ),
    }


def files_hash(folder: Path) -> str | None:
    """Return one hash of the files in a folder.

    Return None if there is no such folder (``folder`` may be a Hub name).
    """
    if not folder.is_dir():
        return None
    lines = [f"{name} {sha256_of(path)}" for name, path in files_in(folder).items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def files_in(folder: Path) -> dict[str, Path]:
    """Return a folder's files by relative path, without hidden ones (macOS, Hub downloads)."""
    files = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") for part in parts):
            files["/".join(parts)] = path
    return files


def identity_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Compare two results of ``run_identity``.

    Return a text ``name was x and is y`` for each value that differs.

    Keys that only one result has are not compared: a run may resume with another dev set. A deleted
    encoder folder is not a difference.
    """
    ignored = {"encoder"} if None in new["encoder"] else set()
    return _changes(old, new, (old.keys() & new.keys()) - ignored)


def config_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a text ``name was x and is y`` for each changed setting.

    Leave out settings that users may always change.
    """
    old, new = flat(old), flat(new)
    return _changes(old, new, (old.keys() | new.keys()).difference(settings_with("free")))


def _changes(old: dict[str, Any], new: dict[str, Any], names: Iterable[str]) -> list[str]:
    changes = []
    for name in sorted(names):
        if old.get(name) != new.get(name):
            changes.append(f"{name} was {old.get(name)} and is {new.get(name)}")
    return changes


def read_config(run: Path, name: str = CONFIG_FILE) -> dict[str, Any]:
    """Read the settings of a run from the file ``name`` in its folder.

    Return them as nested mappings.
    """
    path = run / name
    values = read_yaml(str(path))
    check_version(values.pop("format_version", CONFIG_VERSION), f"{path}: format_version")
    return values


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested mappings into one flat mapping. Its keys are names such as ``group.field``."""
    settings: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[prefix + key] = value
    return settings


@dataclass
class State:
    """Content of state.json."""

    format_version: int
    step: int  # number of finished steps
    identity: dict[str, Any]  # result of ``run_identity``
    # step, score, metric and dev set of the best evaluation; empty before the first one
    best: dict[str, Any]
    evaluated: int  # step of the last evaluation
    worse: int  # evaluations since the best one
    scaler: dict[str, Any]  # state of the loss scaler; empty without fp16
    micro_batch: dict[str, Any]  # micro-batch sizes, see ``MicroBatchSize``
    bank: dict[str, Any]  # counters of the bank
    without_gradient: list[str]  # names of the trained parameters that have no optimizer state


class WrittenFile(TypedDict):
    """Entry in the manifest of a checkpoint: size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


class Checkpoint(NamedTuple):
    """Checkpoint that is complete and whose hashes are correct."""

    folder: Path
    state: dict[str, Any]


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """Return the newest complete and undamaged checkpoint of a run, or None.

    Print which checkpoints are ignored, and why.
    """
    folders = all_checkpoints(run)
    if is_main():
        for path in sorted((run / "checkpoints").glob("*")):
            if path not in folders:
                print(
                    f"{path}: ignored, because it is not the folder of a checkpoint",
                    file=sys.stderr,
                )
    for folder in folders:
        fault = _fault(folder)
        if fault is None:
            return Checkpoint(
                folder, asdict(read_json(folder / "state.json", State, version=STATE_VERSION))
            )
        if is_main():
            print(f"{folder}: this checkpoint is ignored: {fault}", file=sys.stderr)
    return None


def all_checkpoints(run: Path) -> list[Path]:
    """Return the folders of all checkpoints of a run, the newest first.

    Damaged checkpoints are included.
    """
    paths = (run / "checkpoints").glob("step-*")
    folders = [path for path in paths if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def last_good_state(run: Path) -> str:
    """Return the newest checkpoint of a run for an error message, or that there is none."""
    if saved := all_checkpoints(run):
        return f"the last good state is {saved[0]}"
    return "the run has no checkpoint yet, so --resume starts at step 0"


def _fault(folder: Path) -> str | None:
    """Return why the checkpoint in ``folder`` is incomplete or damaged, or None if it is not."""
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_json(folder / MANIFEST, dict[str, WrittenFile])
        files = files_in(folder)
        for name, expected in manifest.items():
            # never open a name from the manifest: it could point outside the folder
            path = files.pop(name, None)
            if path is None:
                return f"{name} is missing"
            if path.stat().st_size != expected["size"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
            if sha256_of(path) != expected["sha256"]:
                return f"{name} is damaged: its SHA-256 is not the one in {MANIFEST}"
    except InputError as error:
        return str(error)
    except OSError as error:  # for example a bad sector, or a file of another user
        return f"{error.filename or 'a file'} cannot be read ({error.strerror or error})"
    for name in files:  # what is left is not in the manifest
        if name != MANIFEST:
            return f"{MANIFEST} does not list {name}"
    return None


def is_finished(config: TrainConfig) -> bool:
    """Return whether the run to resume ended without checkpoints.

    Raises InputError if the run would now need more steps.
    """
    run = Path(config.output_dir)
    whole = (run / FINISHED_FILE).is_file() and (run / "model" / SETTINGS_FILE).is_file()
    if not config.resume or not whole or all_checkpoints(run):
        return False
    finished = read_json(run / FINISHED_FILE, dict[str, int], version=STATE_VERSION)
    total = total_steps(config, finished["examples"])
    if total > finished["total"]:
        raise InputError(
            f"{run}: this run ended after {finished['total']} steps and deleted its checkpoints, "
            f"so it cannot continue to {total} steps. Start a new run from {run / 'model'} (as "
            "model.name), and set run.keep_checkpoints to be able to continue it."
        )
    return True


def total_steps(config: TrainConfig, examples: int) -> int:
    """Return the number of optimizer steps of a run with this number of training examples."""
    epochs = config.optim.epochs * examples / config.batch.global_batch_size
    return config.optim.max_steps or max(1, math.ceil(epochs))


def finish(run: Path, total: int, examples: int) -> None:
    """Delete the checkpoints of a run whose model is complete, and record that it ended."""
    numbers = {"format_version": STATE_VERSION, "total": total, "examples": examples}
    write_json(run / FINISHED_FILE, numbers)
    for folder in all_checkpoints(run):
        remove_folder(folder)
    folder = run / "checkpoints"
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def next_steps(config: TrainConfig, model: Path) -> list[str]:
    """Return lines for the end of a run: its best dev metric, and the next command.

    model: folder of the trained model.
    """
    lines = []
    if not config.model.tie_towers:
        lines.append(
            "two towers: in sentence-transformers, encode_query gives query vectors, and encode "
            "gives passage vectors"
        )
    scores = Path(config.output_dir) / DEV_METRICS_FILE
    if config.data.dev is not None and scores.is_file():
        metrics = read_json(scores)
        lines.append(f"best dev {metrics['label']}: {metrics['mean'][config.run.metric]:.4f}")
    # training data that were mined have no test queries, but the folder of the dev queries may
    given = filter(None, (config.data.train, config.data.dev))
    tests = [name for name in given if (Path(name) / "qrels" / "test.tsv").is_file()]
    data = shlex.quote(tests[0]) if tests else "DATA"
    lines.append(f"next: contaccum evaluate --model {shlex.quote(str(model))} --data {data}")
    return lines
