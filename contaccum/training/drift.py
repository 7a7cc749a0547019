"""Drift of the bank, measured on past micro-batches."""

from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from contaccum.batch import MISSING
from contaccum.data.batches import Batches
from contaccum.methods.bank import Bank
from contaccum.runtime.engine import Engine
from contaccum.training.out_of_memory import MicroBatchSize

DRIFT_SAMPLE = 4  # number of micro-batches to encode again for the drift


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
        """batches: clone of the source of training batches, used only here.

        size: micro-batch size of each step. two_pass: whether the method has two passes.
        """
        self.engine, self.bank, self.batches, self.size = engine, bank, batches, size
        self.two_pass = two_pass

    def measure(self) -> dict[str, Any]:
        """Encode a sample of past micro-batches again, and return the drift for the log.

        Returns the mean cosines of queries and of passages, for the whole sample and for each
        micro-batch with its age (optimizer steps). Only rows of this process are measured. Returns
        {} if the bank contains no complete micro-batch. Without sharding, only the main process
        measures; other processes return {}.
        """
        if not (
            self.engine.is_main or self.engine.sharded
        ):  # a pass over sharded weights needs all processes
            return {}
        self.engine.encoder.train()
        measured = []
        for step, number, slots in self._sample():
            cosines = self._cosines(step, number, slots)
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

    def _sample(self) -> list[tuple[int, int, torch.Tensor]]:
        """Choose some past micro-batches, evenly spread over those whose rows are all in the bank.

        Choose at most DRIFT_SAMPLE. Return (optimizer step, number in that step, bank slots of the
        rows) for each micro-batch.
        """
        bank = self.bank
        steps = bank.step - bank.ages().cpu()
        positions = bank.index_in_step[: bank.stored]
        # sort by step and position only once, because a bank may have thousands of micro-batches
        slots = torch.from_numpy(np.lexsort((positions, steps)))
        stored_steps, counts = steps[slots].unique_consecutive(return_counts=True)
        complete: list[tuple[int, int, torch.Tensor]] = []
        for step, slots_of_step in zip(
            stored_steps.tolist(), slots.split(counts.tolist()), strict=True
        ):
            # rows of micro-batch n have the positions bounds[n] to bounds[n + 1] - 1 in their step
            bounds = [0, *accumulate(self.batches.rows_of(step, self.size.at(step)))]
            where = torch.searchsorted(positions[slots_of_step], torch.tensor(bounds)).tolist()
            for number in range(len(bounds) - 1):
                first, last = where[number], where[number + 1]
                if (
                    last - first == bounds[number + 1] - bounds[number]
                ):  # else the bank has overwritten some rows
                    complete.append((step, number, slots_of_step[first:last]))
        if not complete:
            return []
        chosen = torch.linspace(0, len(complete) - 1, DRIFT_SAMPLE).round().long().unique().tolist()
        return [complete[index] for index in chosen]

    def _cosines(self, step: int, number: int, slots: torch.Tensor) -> dict[str, Any] | None:
        """Return the age and the mean cosines of one past micro-batch.

        slots: bank slots of its rows, all processes.
        """
        engine, bank = self.engine, self.bank
        micro_batches = self.batches.step(step, self.size.at(step))
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
