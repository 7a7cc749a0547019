"""State of ``contaccum auto`` in ``auto.json``, and the division of the time limit."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from contaccum.config import METHOD_SPECS
from contaccum.errors import InputError
from contaccum.experiments.settings import Values
from contaccum.experiments.tuning import rung_shares, survivors
from contaccum.runtime.files import read_json, write_json
from contaccum.training.run_folder import config_differences

STATE_FILE = "auto.json"
STAGES = ("dev", "untrained", "bm25")  # before tuning, in this order
TUNING = 0.2  # share of the time limit that tuning may take
LEAST_TRAINING = 0.15  # share of the time limit that must be left for training steps
RESERVE = 0.05  # share of the time limit that is left free, because predictions are not exact
SPARE = 1.25  # time limit that a refusal names / the least limit that is enough
SLOWER = 1.1  # the last evaluation may take longer than the same evaluation of the untrained model
DEV_SHARE = 0.1  # share of the time limit for the dev evaluations of the final run
# shorter tuning runs do not show which settings are better
FEWEST_STEPS = 8


def parse_time(text: str) -> float:
    """Convert a text such as 90s, 30m or 2h to seconds.

    Raise InputError for an invalid text or a time below 1 second.
    """
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else 0.0
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 1e9:
        raise InputError(
            f"--time is {text!r}; it must be a time from 1 second to 1e9 seconds: a number "
            "followed by s, m or h, such as 30m"
        )
    return seconds


@dataclass
class State:
    """Content of ``auto.json``: settings, measurements and decisions."""

    settings: dict[str, Any]
    spent: float = 0.0
    """Total seconds of all calls so far."""
    predicted: dict[str, float] = field(default_factory=dict)
    """Key -> seconds, predicted from the time to encode a sample of texts.

    The keys are those in STAGES, and also: ``run``, the time that a training run needs in addition
    to its steps (loading, dev evaluation, saving); ``pass``, one forward pass of one pair in
    training; ``report``; ``start``, from the start of a call to the end of the prediction. A call
    after a refusal predicts again.
    """
    seconds: dict[str, float] = field(default_factory=dict)
    """Measured seconds, with the keys of ``predicted``. They replace the prediction."""
    dev_passages: int = 0
    """Number of passages in the small dev set. 0: not chosen yet."""
    passage_length: int = 256
    """Maximum number of tokens of a passage. The prediction reads it from the encoder."""
    tuning: float = 0.0
    """Total seconds of all tuning runs so far."""
    candidates: int = 0
    """Number of candidates that tuning compares. 0: not planned yet."""
    budget: float = 0.0
    """Forward passes of a pair of a tuning run in the last rung."""
    micro_batch: float = 0.0
    """Pairs of a step whose texts grad_cache encodes only once, measured in a short run."""
    # setting -> chosen value; empty before the end of tuning
    chosen: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    """Number of optimizer steps of the final run. 0: not planned yet."""
    best: float | None = None  # best dev score so far
    format_version: int = 1
    file: Path = field(default=Path(), repr=False)
    began: float = field(default_factory=time.monotonic, repr=False)

    @classmethod
    def read(cls, file: Path, settings: dict[str, Any], began: float) -> "State":
        """Read the state of earlier calls from ``file``, if it exists. began: start of this call.

        Raise InputError if these calls had other settings.
        """
        if not file.is_file():
            return cls(settings, file=file, began=began)
        saved = read_json(file, cls, version=1)
        if changes := "; ".join(config_differences(saved.settings, settings)):
            raise InputError(
                f"{file.parent}: contains results with other settings or data ({changes}). Use the "
                "same ones or another folder. Only --time may change."
            )
        return replace(saved, file=file, began=began)

    def save(self) -> None:
        now = time.monotonic()
        self.spent += now - self.began
        self.began = now
        write_json(self.file, {k: v for k, v in asdict(self).items() if k not in ("file", "began")})

    @property
    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.began

    def expected(self, key: str) -> float:
        """Return the measured or predicted seconds of a stage."""
        if key in self.seconds:
            return self.seconds[key]
        # the first stage shows how good predictions are
        if key == "pass" and "dev" in self.seconds:
            return self.predicted[key] * self.seconds["dev"] / self.predicted["dev"]
        return self.predicted[key]

    def evaluations(self, total: float) -> int:
        """Return the number of dev evaluations of the final run.

        One before training and four in it, or fewer if they take long: one and two, or only the one
        after the last step.
        """
        return next((n for n in (5, 3) if n * self.expected("dev") <= DEV_SHARE * total), 1)

    def after_training(self) -> float:
        """Return the expected seconds of the last evaluation and the report."""
        return SLOWER * self.expected("untrained") + self.expected("report")

    def other_seconds(self, total: float) -> float:
        """Return the seconds of everything but tuning and the steps of the final run.

        total: time limit. The seconds so far are included.
        """
        waiting = sum(self.expected(stage) for stage in STAGES if stage not in self.seconds)
        dev = self.expected("dev")
        run = self.expected("run") - dev + self.evaluations(total) * dev
        return self.elapsed + waiting + run + self.after_training()

    def training_seconds(self, total: float) -> float:
        """Return the seconds for tuning and for the steps of the final run. total: time limit."""
        return (1 - RESERVE) * total - self.other_seconds(total)

    def enough(self, total: float, share: float = LEAST_TRAINING) -> bool:
        """Return whether the time limit ``total`` leaves time to train. share: least share."""
        needed = max(share * total, FEWEST_STEPS * 16 * 3 * self.expected("pass"))
        return self.training_seconds(total) >= needed

    def sufficient_time(self) -> float:
        """Return a time limit in whole minutes that is enough for the next call.

        It is also enough if this machine gets a little slower.
        """
        total, start = 60.0, self.expected("start")
        while not self.enough(total - start):
            total = max(total + 60, 1.02 * total)
        return 60.0 * -(-SPARE * total // 60)

    def step_seconds(self, values: Values) -> float:
        """Return the expected seconds of a step with the settings ``values``."""
        return self.expected("pass") * self.passes(values)

    def passes(self, values: Values | Iterable[tuple[str, str]]) -> float:
        """Return the cost of an optimizer step, in forward passes of one pair."""
        settings = dict(values)
        pairs = int(settings["batch.global_batch_size"])
        share = float(settings.get("replay.share", 1.0))
        once = min(self.micro_batch, pairs)
        return pairs * METHOD_SPECS[settings["method"]].cost(pairs, once, share)

    def tuning_plan(self, candidates: list[Values], total: float) -> tuple[list[Values], float]:
        """Return the candidates to try, and the planned seconds of a run in the last rung.

        candidates: the most promising first. total: seconds that the whole command may take. If
        there is only one candidate, or no time to compare two, return the first candidate and 0
        seconds.
        """
        most = min(
            TUNING * total - self.tuning,
            self.training_seconds(total) - LEAST_TRAINING * total,
        )
        for count in range(len(candidates), 1, -1):
            shares = rung_shares(count, None)
            runs = 0  # number of training runs
            full = Fraction(0)  # their cost; a run with the full budget costs 1
            trained = count
            for share in shares:
                runs += trained
                full += trained * share
                trained = survivors(trained)
            budget = (most - runs * self.expected("run")) / float(full)
            slowest = max(map(self.step_seconds, candidates[:count]))
            if budget * float(shares[0]) >= FEWEST_STEPS * slowest:
                return candidates[:count], budget
        return candidates[:1], 0.0
