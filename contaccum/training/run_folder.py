"""Folder of a training run: lock, settings, checkpoints, and checks before a run resumes.

checkpoints/step-00000100/
    model/                both towers, as DualEncoder.save writes them
    optimizer.safetensors state of the optimizer (moments of AdamW) by parameter name
    optimizer/            only with run.sharding, instead of optimizer.safetensors: the state, split
                          into one file per process
    bank.safetensors      embeddings, ids and cached log-sum-exps of the bank
    state.json            step, hashes of the data, counters of the bank, loss scale, best dev score
    manifest.json         SHA-256 of every other file

A checkpoint appears under its name only when it is complete. It is loaded only if every hash is
correct. No random state is saved, because the order of the data, the sampling and the dropout
depend only on (seed, step).
"""

import hashlib
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from contaccum.config import (
    ENCODER_SETTINGS,
    DataPolicy,
    TrainConfig,
    affects,
    from_mapping,
    settings_with,
)
from contaccum.config.load import CONFIG_VERSION, check_version, flat, read_yaml
from contaccum.data.dataset import (
    is_trained_on,
    load_training,
    open_dataset,
    warn_of_shared_queries,
)
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.data.train_set import TrainSet
from contaccum.encoder import SETTINGS_FILE, run_of
from contaccum.errors import InputError
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
from contaccum.runtime.units import counted

CONFIG_FILE = "config.yaml"
DEV_METRICS_FILE = "dev_metrics.json"  # metrics of the best evaluation on dev
METRICS_FILE = "metrics.json"  # metrics on the test data
CARD = "README.md"  # model card, in the folder of the model
FINISHED_FILE = "finished.json"  # steps and data of a run that ended and deleted its checkpoints
MANIFEST = "manifest.json"
# settings that contaccum auto changes in a run that it continues; more steps are refused anyway
_LENGTH_OF_A_RUN = ("optim.max_steps", "optim.epochs", "run.eval_steps")
_ADVICE = (
    "Start a new run from {} (as model.name), and set run.keep_checkpoints to be able to continue "
    "it."
)
# ``format_version`` of state.json; 2 and 3: other dropout noise, 4: other rounding in bf16 and fp16
STATE_VERSION = 4


@contextmanager
def claimed_folder(config: TrainConfig) -> Iterator[None]:
    """Check the output folder and lock it during the ``with`` block.

    Without ``resume``, the folder must be empty or not exist. With ``resume``, it may contain a run
    with the same settings. Only the main process takes the lock and removes the temporary files of
    a killed run.
    """
    run = Path(config.output_dir)
    with folder_lock(run) if is_main() else nullcontext():
        if (run / CONFIG_FILE).is_file():
            if not config.resume:
                raise InputError(
                    f"output_dir {run}: contains a run. Add --resume to continue it, or choose "
                    "another output_dir."
                )
            _refuse_changed_settings(config)
        else:
            require_empty(run, CONFIG_FILE)
        if is_main():
            sweep(run)
            sweep(run / "checkpoints")
        yield


def require_empty(folder: Path, missing: str) -> None:
    """Raise InputError if a folder without the file ``missing`` of a run is not empty."""
    if folder.is_dir() and not all(
        path.name == ".DS_Store" or path.name.startswith(LOCK_FILE) or is_leftover(path.name)
        for path in folder.iterdir()
    ):
        raise InputError(
            f"output_dir {folder}: not empty, and without the {missing} of a run. Choose an empty "
            "folder, or the folder of a run to continue it."
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


def _refuse_changed_settings(config: TrainConfig) -> None:
    """Raise InputError if settings changed since the run started, unless they may change."""
    where = f"output_dir {config.output_dir}"
    old, new = read_config(Path(config.output_dir)), asdict(config)
    fixed = {*settings_with("never"), *(f"model.{name}" for name in ENCODER_SETTINGS)}
    if changes := _changes(flat(old), flat(new), fixed):
        raise InputError(
            f"{where}: the checkpoints need these settings unchanged: {'; '.join(changes)}. Undo "
            "the changes, or start a new run; --allow_changes does not allow these changes."
        )
    changes = config_differences(old, new)
    refuse_changes(f"{where}: the settings of this run changed", changes, config.allow_changes)


def run_identity(
    config: TrainConfig, world: int, train_set: TrainSet, dev: RetrievalSet | None
) -> dict[str, Any]:
    """Return what must be the same when a run resumes: number of processes, hashes of the data.

    Weights and tokenizers are loaded from the checkpoint. world: number of processes.
    """
    identity = {"world": world, "data": train_set.fingerprint}
    if dev:
        identity[f"split {config.data.dev_split} of {config.data.dev}"] = dev.fingerprint()
    return identity


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


def refuse_other_identity(
    where: Path, old: dict[str, Any], new: dict[str, Any], allowed: bool
) -> None:
    """Compare two results of ``run_identity``, see ``refuse_changes``.

    Keys that only one result has are not compared: a run may resume with another dev set.
    """
    changes = _changes(old, new, old.keys() & new.keys())
    refuse_changes(f"{where}: the conditions of training changed", changes, allowed)


def config_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return a text ``name was x and is y`` for each changed setting.

    Leave out settings that users may always change.
    """
    old, new = flat(old), flat(new)
    return _changes(old, new, (old.keys() | new.keys()).difference(settings_with("free")))


def _changes(old: dict[str, Any], new: dict[str, Any], names: Iterable[str]) -> list[str]:
    changes = []
    for name in sorted(names):
        before, now = old.get(name), new.get(name)
        if before != now and not _same_path(before, now):
            changes.append(f"{name} was {before} and is {now}")
    return changes


def _same_path(one: Any, other: Any) -> bool:
    """Return whether two settings are the same existing path, such as data and ./data/."""
    texts = isinstance(one, str) and isinstance(other, str)
    return texts and os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def read_config(run: Path) -> dict[str, Any]:
    """Return the settings of a run, from the file in its folder, as nested mappings."""
    path = run / CONFIG_FILE
    values = read_yaml(str(path))
    check_version(values.pop("format_version", CONFIG_VERSION), f"{path}: format_version")
    parts = ("method", "seed", "output_dir", "model", "data", "batch", "optim", "run")
    if missing := [part for part in parts if part not in values]:
        raise InputError(
            f"{path}: has no {missing[0]}, so it is not the settings of a run. Move the file, or "
            "choose another folder."
        )
    return values


def warn_of_training_data(model: str, data: str, split: str, policy: DataPolicy | None) -> None:
    """Warn if ``model`` was trained on the split ``split`` of ``data``, or on some of its queries.

    Training data that is not a local path is compared by its name only. policy: how to read the
    queries of ``data``. None: only names are compared.
    """
    run = run_of(model)
    if not (run / CONFIG_FILE).is_file():
        return
    with suppress(InputError):  # the file of another program, or of an older version; changed data
        config = from_mapping(TrainConfig, read_config(run))
        if is_trained_on(config.data, data, split):
            warnings.warn(
                f"{data}: {model} was trained on these queries ({run / CONFIG_FILE}), so the "
                "scores say nothing about other queries. Evaluate on a split that training does "
                "not read; contaccum data convert --splits makes splits.",
                stacklevel=2,
            )
            return
        sources = [each.train for each in config.data.mixture] or [config.data.train]
        if policy and all(source and os.path.exists(source) for source in sources):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # training gave them, or the evaluation will
                train_set = load_training(config.data)
                judged = open_dataset(data, split, policy).retrieval_set
            same = train_set.shared_queries(judged.queries)
            warn_of_shared_queries("test", f"{data} {split}", judged, same, "training")


@dataclass(frozen=True)
class Finished:
    """Content of finished.json."""

    total: int  # planned number of steps
    examples: int
    identity: dict[str, Any]  # see ``run_identity``
    done: int  # number of steps taken


class Checkpoint(NamedTuple):
    """Checkpoint that is complete and whose hashes are correct."""

    folder: Path
    state: dict[str, Any]


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """Return the newest complete and undamaged checkpoint of a run, or None if there is none.

    Print which checkpoints are ignored, and why. Raises InputError if all are.
    """
    folders = all_checkpoints(run)
    for folder in folders:
        fault = _fault(folder)
        if fault is None:
            state = read_json(folder / "state.json", dict[str, Any], version=STATE_VERSION)
            return Checkpoint(folder, state)
        if is_main():
            print(f"{folder}: this checkpoint is ignored: {fault}", file=sys.stderr)
    if folders:
        raise InputError(
            f"{run / 'checkpoints'}: all checkpoints are damaged. Delete this folder to start "
            "again at step 0, or choose another output_dir."
        )
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
    try:
        hashes = read_json(folder / MANIFEST, dict[str, str])
        files = files_in(folder)
        del files[MANIFEST]
        # a model card, which other programs write, is read by nothing
        hashes, files = (
            {name: value for name, value in each.items() if not name.endswith(".md")}
            for each in (hashes, files)
        )
        # never open a name from the manifest: it could point outside the folder
        if names := hashes.keys() ^ files.keys():
            return f"{min(names)} is missing, or {MANIFEST} does not list it"
        for name, path in files.items():
            if sha256_of(path) != hashes[name]:
                return f"{name} is damaged: its SHA-256 is not the one in {MANIFEST}"
    except (InputError, OSError) as error:  # for example a bad sector, or a file of another user
        return str(error)
    return None


def finished_identity(config: TrainConfig) -> dict[str, Any] | None:
    """Return the identity (see ``run_identity``) of the run to resume if it has ended.

    Return None if it has not ended, or kept its checkpoints.

    Raises InputError if the run would now need more steps.
    """
    run = Path(config.output_dir)
    whole = (run / "model" / SETTINGS_FILE).is_file() and not all_checkpoints(run)
    finished = read_finished(run) if config.resume and whole else None
    if finished is None:
        return None
    total = total_steps(config, finished.examples)
    if total > finished.total:
        raise InputError(
            f"{run}: this run ended after {counted(finished.done, 'step')} and "
            f"deleted its checkpoints, so it cannot continue to {total} steps. "
            f"{_ADVICE.format(run / 'model')}"
        )
    return finished.identity


def read_finished(run: Path) -> Finished | None:
    """Return the record of an ended run. None: it has not ended, or kept its checkpoints."""
    file = run / FINISHED_FILE
    return read_json(file, Finished, version=STATE_VERSION) if file.is_file() else None


def total_steps(config: TrainConfig, examples: int) -> int:
    """Return the number of optimizer steps of a run with this number of training examples."""
    steps = config.optim.epochs * examples / config.batch.global_batch_size
    # rounded, because 1.1 * 800 / 16 is 55.00000000000001 in floating point
    return config.optim.max_steps or max(1, math.ceil(round(steps, 9)))


def refuse_changed_end(config: TrainConfig, finished: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise InputError if the weights would now be others, because nothing would be trained.

    finished, now: results of ``run_identity``.
    """
    run = Path(config.output_dir)
    old, new = flat(read_config(run)), flat(asdict(config))
    names = {name for name in old.keys() | new.keys() if affects(name, config.method)}
    changes = _changes(old, new, {*names, "seed", "method"}.difference(_LENGTH_OF_A_RUN))
    changes += _changes(finished, now, ["data"])
    if changes:
        raise InputError(
            f"{run}: this run ended and deleted its checkpoints, so it cannot continue with "
            f"changes ({'; '.join(changes)}). {_ADVICE.format(run / 'model')}"
        )


def finish(run: Path, total: int, examples: int, identity: dict[str, Any], done: int) -> None:
    """Delete the checkpoints of a run whose model is complete, and record that it ended.

    See ``Finished``.
    """
    finished = Finished(total, examples, identity, done)
    write_json(run / FINISHED_FILE, {"format_version": STATE_VERSION, **asdict(finished)})
    for folder in all_checkpoints(run):
        remove_folder(folder)
    with suppress(OSError):  # it has files of somebody else
        (run / "checkpoints").rmdir()
