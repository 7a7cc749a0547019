"""Evaluation on the dev set during training: when, on which passages, and the best score so far."""

import time
from typing import Any

from contaccum.config import METRIC_CUTS, RunConfig
from contaccum.config.commands import SearchConfig
from contaccum.data.dev_set import sample_passages
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.encoder import DualEncoder
from contaccum.evaluation.evaluate import evaluate
from contaccum.evaluation.metrics import Metrics
from contaccum.runtime.engine import Engine
from contaccum.runtime.units import counted
from contaccum.training.parts import step_count

DEPTH = max(METRIC_CUTS)  # number of passages to retrieve for each dev query


class DevEvaluator:
    """Dev set of a run, its scores so far, and the steps to evaluate at.

    Without a dev set, no evaluation is due.
    """

    def __init__(self, dev_set: RetrievalSet | None, max_passages: int, run: RunConfig) -> None:
        """Set the dev set, of which at most ``max_passages`` passages are searched (0: all)."""
        self.settings = run
        self.dev_set = dev_set
        self.whole = True  # whether all passages are searched
        self.label = run.metric  # name of the score for people
        if dev_set is not None:
            passages = len(dev_set.corpus)
            # the same sample for every seed, so that the scores of several seeds can be compared
            self.dev_set = sample_passages(dev_set, max_passages or passages, seed=0)
            self.whole = len(self.dev_set.corpus) == passages
            if not self.whole:
                self.label += f" on {len(self.dev_set.corpus)} of {passages} passages"
        # score before training, its metric and dev set, if it was evaluated
        self.start: dict[str, Any] = {}
        # step, score, hash of the model, metric and dev set of the best evaluation
        self.best: dict[str, Any] = {}
        # whether the model of the best evaluation was replaced, as by steps that a kill undid
        self.replaced = False
        self.evaluated = 0  # step of the last evaluation
        self.worse = 0  # evaluations since the best one

    def due(self, step: int, total: int) -> bool:
        """Return whether to evaluate after ``step`` steps of ``total``."""
        if self.dev_set is None:
            return False
        left, every = total - step, step_count(self.settings.eval_steps, total)
        if left <= 0:
            return True
        # if the last step soon follows, its evaluation is enough
        return every > 0 and step % every == 0 and left >= every / 2

    def evaluations_left(self, total: int) -> int:
        """Return the number of evaluations until the end of a run of ``total`` steps."""
        if self.dev_set is None:
            return 0
        every = step_count(self.settings.eval_steps, total)
        if every == 0:
            return 1
        # at multiples of ``every``, but not shortly before the last step, and at the last step
        last = int((total - every / 2) // every)
        return max(0, last - self.evaluated // every) + 1

    def stops_early(self) -> bool:
        """Return whether the last evaluations were all below the best one (run.early_stopping)."""
        return 0 < self.settings.early_stopping <= self.worse

    def sizes(self) -> str:
        """Return the number of queries and passages as text."""
        assert self.dev_set is not None
        queries, passages = len(self.dev_set.queries), len(self.dev_set.corpus)
        return f"{counted(queries, 'dev query')} and {counted(passages, 'passage')}"

    def measure(self) -> dict[str, str]:
        """Return what a score depends on besides the model."""
        assert self.dev_set is not None
        return {"metric": self.settings.metric, "dev": self.dev_set.fingerprint()}

    def metrics(self, encoder: DualEncoder, engine: Engine, last: bool) -> tuple[Metrics, float]:
        """Return the metrics of the current model, and the seconds that the evaluation took.

        last: whether it is the evaluation of the trained model.
        """
        assert self.dev_set is not None
        # commands that use the trained model find the vectors of the last evaluation
        cache = last and self.settings.precision == "fp32" and self.whole
        settings = SearchConfig(batch_tokens=self.settings.eval_batch_tokens, cache=cache)
        began = time.monotonic()
        with engine.unmeasured(), engine.autocast():
            found = evaluate(encoder, self.dev_set, k=DEPTH, settings=settings, group=engine)
        return found, time.monotonic() - began

    def set_start(self, score: float) -> None:
        """Record the score of the model that training starts from."""
        self.start = {"score": score, **self.measure()}

    def is_best(self, score: float) -> bool:
        """Return whether a score is better than the best one, if the model of that still exists."""
        return not self.best or self.replaced or score > self.best["score"]

    def add(self, step: int, score: float, model: str) -> None:
        """Record the score after ``step`` steps. model: hash of the saved model."""
        if self.is_best(score):
            self.best = {"step": step, "score": score, "model": model, **self.measure()}
            self.worse, self.replaced = 0, False
        else:
            self.worse += 1
        self.evaluated = step

    def state(self) -> dict[str, Any]:
        """Return the values to save in a checkpoint."""
        return {
            "start": self.start,
            "best": self.best,
            "evaluated": self.evaluated,
            "worse": self.worse,
        }

    def load_state(self, state: dict[str, Any], model: str) -> str:
        """Restore the values that ``state`` returned, without scores that cannot be compared.

        model: hash of the saved model, or an empty text if there is none. Returns why the best
        score is ignored, or an empty text.
        """
        self.start, self.best = state["start"], state["best"]
        self.evaluated, self.worse = state["evaluated"], state["worse"]
        if self.dev_set is None:
            return ""
        if not self._comparable(self.start):
            self.start = {}
        if not self.best:
            return ""
        if not model or not self._comparable(self.best):
            self.best, self.worse = {}, 0
            self.evaluated = 0  # evaluate this step again if an evaluation is due
            return "the metric or the dev set changed" if model else "its model was deleted"
        self.replaced = self.best["model"] != model
        if self.replaced and self.best["step"] == state["step"]:
            self.evaluated = 0  # evaluate this step again, which saves its model
        return ""

    def _comparable(self, score: dict[str, Any]) -> bool:
        """Return whether a saved score has the metric and the dev set of this run."""
        measure = self.measure()
        return {name: score.get(name) for name in measure} == measure
