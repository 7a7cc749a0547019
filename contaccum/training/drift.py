"""Drift of the bank, measured on past micro-batches."""

from typing import Any

import torch
import torch.nn.functional as F

from contaccum.batch import MISSING
from contaccum.data.batches import Batches
from contaccum.methods.bank import Bank
from contaccum.runtime.engine import Engine
from contaccum.training.out_of_memory import MicroBatchSize

DRIFT_SAMPLE = 4  # number of past steps of which a micro-batch is encoded again


class Drift:
    """Drift of the bank: the cosine between stored embeddings and new embeddings of the same texts.

    The new embeddings are computed with the current weights and the old dropout noise, so only the
    weights differ.
    """

    def __init__(
        self,
        engine: Engine,
        bank: Bank,
        batches: Batches,
        size: MicroBatchSize,
        two_pass: bool = False,
    ) -> None:
        """batches: source of the training batches. size: micro-batch size.

        two_pass: whether the method has two passes.
        """
        self.engine, self.bank, self.batches, self.size = engine, bank, batches, size
        self.two_pass = two_pass

    def measure(self) -> dict[str, Any]:
        """Encode a micro-batch of some past steps again, and return the drift for the log.

        The steps are evenly spread over those in the bank. Returns the mean cosines of queries and
        of passages, for all of these micro-batches and for each one with its age (optimizer steps).
        Only rows of this process are measured. Returns {} if the bank is empty. Without sharding,
        only the main process measures; other processes return {}.
        """
        # a pass over sharded weights needs all processes
        if not (self.engine.is_main or self.engine.sharded):
            return {}
        self.engine.encoder.train()
        bank = self.bank
        steps = bank.step - bank.ages().cpu()
        if not (steps >= self.size.since).any():
            return {}
        positions = bank.index_in_step[: bank.stored]
        measured = []
        oldest = max(int(steps.min()), self.size.since)  # other sizes gave other micro-batches
        sample = torch.linspace(oldest, int(steps.max()), DRIFT_SAMPLE)
        for step in sample.round().long().unique().tolist():
            # the last micro-batch of a step stays in the bank for longest
            rows = self.batches.rows_of(step, self.size.now)
            slots = torch.nonzero((steps == step) & (positions >= sum(rows[:-1]))).flatten()
            if len(slots) == rows[-1]:
                slots = slots[positions[slots].argsort()]
                cosines = self._cosines(step, len(rows) - 1, slots)
                if cosines is not None:
                    measured.append(cosines)
        if not measured:
            return {}
        queries = [cosines["query"] for cosines in measured if cosines["query"] is not None]
        return {
            "drift_query_cosine": sum(queries) / len(queries) if queries else None,
            "drift_passage_cosine": sum(cosines["passage"] for cosines in measured) / len(measured),
            "drift": measured,
        }

    def _cosines(self, step: int, number: int, slots: torch.Tensor) -> dict[str, Any] | None:
        """Return the age and the mean cosines of one past micro-batch.

        slots: bank slots of its rows, all processes.
        """
        engine, bank = self.engine, self.bank
        micro_batches = self.batches.step(step, self.size.now)
        batch = micro_batches[number]
        # (B, d), (B, 1 + H, d)
        queries, passages = engine.encode_again(micro_batches, number, step, self.two_pass)
        if not torch.equal(bank.column_ids[slots, 0], batch.ids.columns[:, 0]):
            # the run had another number of processes before the resume, and so other micro-batches
            return None
        first = engine.rank * len(queries)
        here = slots[first : first + len(queries)]  # slots of the rows of this process
        present = (bank.column_ids[here] != MISSING).to(engine.device)  # (B, 1 or 1 + H)
        here = here.to(engine.device)
        stored = bank.passages[here]  # (B, 1 or 1 + H, d)
        return {
            "age": bank.step - step,
            "query": None if bank.queries is None else _mean_cosine(bank.queries[here], queries),
            "passage": _mean_cosine(stored[present], passages[:, : stored.shape[1]][present]),
        }


def _mean_cosine(stored: torch.Tensor, now: torch.Tensor) -> float:
    return F.cosine_similarity(stored.float(), now.float(), dim=-1).mean().item()
