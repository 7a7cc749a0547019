"""Rounds of training and mining: each model finds the hard negatives that the next one is trained with.

In ``output_dir``: ``round-0`` (the first run), ``mined-1.jsonl`` (what its model found), ``round-1`` (trained with that), and so
on. A finished stage is not done again; ``rounds.yaml`` keeps the settings, which must stay the same.
"""

import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from contaccum import api
from contaccum.config import ModelConfig, TrainConfig, validate
from contaccum.errors import InputError, Interrupted
from contaccum.files import remove_folder, write_text
from contaccum.launch import is_main, process_place
from contaccum.lock import folder_lock
from contaccum.options import MineSettings, ModelChoice, RoundsOptions, SearchSettings
from contaccum.retrieval.negatives import check as check_mining
from contaccum.training.loop import train
from contaccum.training.setup import config_differences, read_config, refuse_changes

SETTINGS_FILE = "rounds.yaml"
OF_THE_BASE: dict[str, Any] = {
    name: getattr(ModelConfig, name) for name in ("passage_name", "tiny_layers", "tiny_width", "tiny_vocabulary")
}
"""Settings that say how ``model.name`` is made, as they are where it is a folder that we trained."""


def run_rounds(config: TrainConfig, mining: MineSettings, options: RoundsOptions) -> Path:
    """Train, mine and train again as often as ``options`` say; returns the folder of the last model.

    Raises InputError for what the user can mend, Interrupted after a signal; called again it goes on where it stopped.
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
            raise Interrupted(signal.exit_code - 128, "stopped; the same command goes on from here") from signal
    return rounds.model(options.count)


def _check(config: TrainConfig, mining: MineSettings, options: RoundsOptions) -> None:
    validate(config, process_place()[1])
    check_mining(mining)
    if options.count < 1:
        raise InputError(f"rounds.count is {options.count}, expected at least 1")
    if config.data.mixture:
        raise InputError("data.mixture is given, expected data.train: rounds mine one data set")
    if options.start == "previous" and config.lora.rank:
        raise InputError(
            "rounds.start is previous with lora.rank above 0, expected base: an adapter stands on no other adapter"
        )
    if config.distils and mining.cross_encoder is None:
        raise InputError(
            f"loss.distillation is {config.loss.distillation} without mine.cross_encoder, expected one: the scores of a search "
            "are no teacher's"
        )
    wanted = config.data.hard_negatives
    if wanted < 1:
        raise InputError("data.hard_negatives is 0, expected at least 1: training would not read what is mined")
    if mining.num_negatives < wanted:
        raise InputError(
            f"mine.num_negatives is {mining.num_negatives}, expected at least the {wanted} of data.hard_negatives"
        )


def _claim(output: Path, config: TrainConfig, mining: MineSettings, options: RoundsOptions) -> None:
    """Note the settings in a new folder; refuse one that holds something else, or rounds with other settings."""
    settings = {**asdict(config), "mine": asdict(mining), "rounds": asdict(options)}
    file = output / SETTINGS_FILE
    if file.is_file():
        changes = config_differences(read_config(output, SETTINGS_FILE), settings)
        more = [change for change in changes if not change.startswith("rounds.count ")]
        refuse_changes(f"output_dir {output} holds rounds with other settings", more, allowed=False)
    elif any(not path.name.startswith((".", "contaccum.lock")) for path in output.iterdir()):
        raise InputError(
            f"output_dir {output} already holds something, expected a new or empty folder, or rounds to go on with"
        )
    write_text(file, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


class _Rounds:
    def __init__(self, config: TrainConfig, mining: MineSettings, options: RoundsOptions) -> None:
        self.config, self.mining, self.options = config, mining, options
        self.output = Path(config.output_dir)

    def mined(self, number: int) -> Path:
        return self.output / f"mined-{number}.jsonl"

    def model(self, number: int) -> Path:
        return self.output / f"round-{number}" / "model"

    def mine(self, number: int) -> None:
        """Make the negatives of round ``number``, unless they stand or the data's own are used."""
        vectors = self.output / f"vectors-{number}"
        if not self.mined(number).exists() and (number > 0 or self.options.first == "bm25"):
            self._mine(number, vectors)
        if is_main() and vectors.is_dir():  # of a model that nobody asks again
            remove_folder(vectors)

    def _mine(self, number: int, vectors: Path) -> None:
        data, run = self.config.data, self.config.run
        choice = ModelChoice(
            api.BM25 if number == 0 else str(self.model(number - 1)),
            device=run.device,
            timeout_minutes=run.timeout_minutes,
            trust_remote_code=self.config.model.trust_remote_code,
        )
        settings = SearchSettings(embeddings=str(vectors), batch_tokens=run.eval_batch_tokens)
        _say(f"round {number}: mining with {choice.model}")
        with api.joined(choice.timeout_minutes) as group:
            report = api.mine(
                choice, data.train, str(self.mined(number)), split=data.split, mining=self.mining, settings=settings,
                strict=data.strict, repair=data.repair, max_bad_records=data.max_bad_records, group=group,
            )  # fmt: skip
            if group.is_main:
                _say(api.render_mined(report, self.mined(number)))

    def train(self, number: int) -> None:
        """Train round ``number``, unless it is finished, which its folder does not tell: a best model stands before the end."""
        finished = self.output / f"round-{number}.finished"
        if not finished.exists():
            _say(f"round {number}: training")
            train(self._config(number))
            if is_main():
                write_text(finished, "")

    def _config(self, number: int) -> TrainConfig:
        config = replace(self.config, output_dir=str(self.model(number).parent), resume=True)
        if number and self.options.start == "previous":
            config = replace(config, model=replace(config.model, name=str(self.model(number - 1)), **OF_THE_BASE))
        if self.mined(number).exists():
            config = replace(
                config, data=replace(config.data, train=str(self.mined(number)), repair=False, max_bad_records=0)
            )
        return config


def _say(sentence: str) -> None:
    if is_main():
        print(sentence, file=sys.stderr)
