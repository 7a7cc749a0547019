"""``contaccum rounds``: train a model, mine hard negatives with it, train on them, and repeat.

Content of ``output_dir``:

- ``round-0``: first training run
- ``mined-1.jsonl``: hard negatives that the model of ``round-0`` found
- ``round-1``: training run with these negatives, and so on
- ``rounds.yaml``: settings, of which only ``rounds.count`` can change later, and hashes of the data

The command skips finished training runs and finished mining.
"""

import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from contaccum.config import ModelConfig, TrainConfig, settings_with, validate
from contaccum.config.commands import EncoderConfig, MineConfig, SearchConfig
from contaccum.config.experiments import RoundsConfig
from contaccum.errors import InputError, Interrupted
from contaccum.experiments.jobs import data_hashes, refuse_changed
from contaccum.retrieval.mine import mine, render_mined
from contaccum.retrieval.retriever import BM25_NAME
from contaccum.runtime.files import remove_folder, write_text
from contaccum.runtime.launch import is_main, process_place
from contaccum.runtime.locks import LOCK_FILE, folder_lock
from contaccum.runtime.processes import joined
from contaccum.training.loop import train
from contaccum.training.run_folder import config_differences, read_config

SETTINGS_FILE = "rounds.yaml"
_INITIAL = [name.removeprefix("model.") for name in settings_with(initial_encoder=True)]
TRAINED_MODEL: dict[str, Any] = {name: getattr(ModelConfig, name) for name in _INITIAL}
"""Default values of settings that describe an initial encoder. Runs that start from a trained model keep these defaults."""


def run_rounds(config: TrainConfig, mining: MineConfig, options: RoundsConfig) -> Path:
    """Train a model, then mine and train again ``options.count`` times. Return the folder of the last model.

    Raises InputError for a wrong setting. Raises Interrupted after a signal; the next call continues.
    """
    _check(config, mining, options)
    output = Path(config.output_dir)
    with folder_lock(output) if is_main() else nullcontext():
        if is_main():
            _claim(output, config, mining, options)
        rounds = _Rounds(config, mining, options)
        try:
            for number in range(options.count + 1):
                rounds.mine(number)
                rounds.train(number)
        except Interrupted as signal:
            raise Interrupted(signal.exit_code - 128, "stopped; run the same command again to continue") from signal
    return rounds.model(options.count)


def _check(config: TrainConfig, mining: MineConfig, options: RoundsConfig) -> None:
    validate(config, process_place()[1])
    mining.check()
    wanted, mined = config.data.hard_negatives, mining.num_negatives
    checks = {
        "data.mixture is set, but `contaccum rounds` mines only one data set. Use data.train.": config.data.mixture,
        "rounds.start is 'previous', but lora.rank is above 0. LoRA cannot continue from a LoRA model. Use rounds.start 'base'.":
            options.start == "previous" and config.lora.rank,
        f"loss.distillation is {config.loss.distillation}, so mine.cross_encoder must be set to compute the teacher scores.":
            config.distils and mining.cross_encoder is None,
        "data.hard_negatives is 0, so training would ignore the mined negatives; it must be at least 1.": wanted < 1,
        f"mine.num_negatives is {mined}; it must be at least data.hard_negatives ({wanted}).": mined < wanted,
    }  # fmt: skip
    for sentence, wrong in checks.items():
        if wrong:
            raise InputError(sentence)


def _claim(output: Path, config: TrainConfig, mining: MineConfig, options: RoundsConfig) -> None:
    """Write the settings to ``output``. Raise InputError if it has files but no settings, or different settings or data.

    Only ``rounds.count`` may be different.
    """
    settings = {**asdict(config), "mine": asdict(mining), "rounds": asdict(options)}
    file, content = output / SETTINGS_FILE, {}
    if file.is_file():
        earlier = read_config(output, SETTINGS_FILE)
        content = earlier.pop("content", {})  # empty in files of older versions
        changes = config_differences(earlier, settings)
        if found := "; ".join(change for change in changes if not change.startswith("rounds.count ")):
            raise InputError(
                f"{output}: contains rounds of an earlier call with other settings ({found}). Use the earlier settings, or "
                "another output_dir."
            )
    elif any(not path.name.startswith((".", LOCK_FILE)) for path in output.iterdir()):
        raise InputError(f"{output}: contains files that `contaccum rounds` did not write. Use a new or empty folder.")
    hashes = data_hashes("run", config)
    refuse_changed(output, content, hashes, config)
    write_text(file, yaml.safe_dump({**settings, "content": hashes}, sort_keys=False, allow_unicode=True))


class _Rounds:
    def __init__(self, config: TrainConfig, mining: MineConfig, options: RoundsConfig) -> None:
        self.config, self.mining, self.options = config, mining, options
        self.output = Path(config.output_dir)

    def mined(self, number: int) -> Path:
        return self.output / f"mined-{number}.jsonl"

    def model(self, number: int) -> Path:
        return self.output / f"round-{number}" / "model"

    def mine(self, number: int) -> None:
        """Mine the hard negatives of round ``number``, unless they exist. Then, in both cases, delete the vectors of this round.

        In round 0, negatives are mined only if ``rounds.first`` is bm25.
        """
        vectors = self.output / f"vectors-{number}"
        if not self.mined(number).exists() and (number > 0 or self.options.first == "bm25"):
            self._mine(number, vectors)
        if is_main() and vectors.is_dir():  # later rounds use other models
            remove_folder(vectors)

    def _mine(self, number: int, vectors: Path) -> None:
        data, run = self.config.data, self.config.run
        choice = EncoderConfig(
            BM25_NAME if number == 0 else str(self.model(number - 1)),
            device=run.device,
            timeout_minutes=run.timeout_minutes,
            trust_remote_code=self.config.model.trust_remote_code,
        )
        settings = SearchConfig(embeddings=str(vectors), batch_tokens=run.eval_batch_tokens)
        _print(f"round {number}: mining with {choice.model}")
        with joined(choice.timeout_minutes) as group:
            report = mine(
                choice, data.train, str(self.mined(number)), split=data.split, mining=self.mining, settings=settings,
                policy=data.policy, group=group,
            )  # fmt: skip
            if group.is_main:
                _print(render_mined(report, self.mined(number)))

    def train(self, number: int) -> None:
        """Train the model of round ``number`` and write the file ``round-NUMBER.finished``.

        Does nothing if this file exists. The folder ``model`` is no proof that training has ended, because dev evaluations also
        write this folder.
        """
        finished = self.output / f"round-{number}.finished"
        if not finished.exists():
            _print(f"round {number}: training")
            train(self._config(number))
            if is_main():
                write_text(finished, "")

    def _config(self, number: int) -> TrainConfig:
        folder = str(self.model(number).parent)
        config = replace(self.config, output_dir=folder, resume=True)
        if number and self.options.start == "previous":
            config = replace(config, model=replace(config.model, name=str(self.model(number - 1)), **TRAINED_MODEL))
        if self.mined(number).exists():
            data = replace(config.data, train=str(self.mined(number)), repair=False, max_bad_records=0)
            config = replace(config, data=data)
        return config


def _print(sentence: str) -> None:
    if is_main():
        print(sentence, file=sys.stderr)
