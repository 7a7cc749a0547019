"""How stale the bank is: stored vectors against those that the encoders would give for the same texts now."""

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from contaccum.data.collate import Batches
from contaccum.engine import Engine
from contaccum.methods.bank import Bank
from contaccum.training.fit import MicroBatchSize

SAMPLE = 4
"""Micro-batches that are encoded again, from the oldest in the bank to the newest."""


class Drift:
    """Encodes a few of the bank's micro-batches again, with their own dropout noise, so that weights alone make a difference."""

    def __init__(self, engine: Engine, bank: Bank, batches: Batches, size: MicroBatchSize) -> None:
        """batches: for this object alone, see ``Batches.twin``. size: tells how each step was cut."""
        self.engine, self.bank, self.batches, self.size = engine, bank, batches, size

    def measure(self) -> dict[str, Any]:
        """Mean cosine between stored and new vectors of the sample, for queries and passages, and per age in optimizer steps.

        Empty where the bank holds no whole micro-batch, or in another process than the main one, which measures its own
        rows.
        """
        found = []
        if self.engine.is_main:
            training = self.engine.encoder.training
            self.engine.encoder.train()
            found = [one for chosen in self._sample() if (one := self._of(*chosen)) is not None]
            self.engine.encoder.train(training)
        if not found:
            return {}
        queries = [one["query"] for one in found if one["query"] is not None]
        return {
            "drift_query_cosine": sum(queries) / len(queries) if queries else None,
            "drift_passage_cosine": sum(one["passage"] for one in found) / len(found),
            "drift": found,
        }

    def _sample(self) -> list[tuple[int, int, torch.Tensor]]:
        """Step, number in the step, and slots in order, of whole micro-batches, evenly from the oldest to the newest."""
        bank = self.bank
        born, places = bank.born[: bank.stored], bank.places[: bank.stored]
        whole: list[tuple[int, int, int, int]] = []  # step, number, first row and end in the step, in order
        for step, kept in zip(*(part.tolist() for part in born.unique(return_counts=True)), strict=True):
            first = int(
                places[born == step].min()
            )  # rows are overwritten from the oldest on: the last ones of a step stay
            ends = list(accumulate(self.batches.rows_of(step, self.size.at(step))))
            starts = [0, *ends[:-1]]
            numbered = enumerate(zip(starts, ends, strict=True))
            whole += [(step, n, start, end) for n, (start, end) in numbered if first <= start and end <= first + kept]
        if not whole:
            return []
        chosen = sorted(set(torch.linspace(0, len(whole) - 1, SAMPLE).round().long().tolist()))
        sample = []
        for step, number, start, end in (whole[index] for index in chosen):
            slots = ((born == step) & (places >= start) & (places < end)).nonzero().squeeze(1)
            sample.append((step, number, slots[places[slots].argsort()]))
        return sample

    def _of(self, step: int, number: int, slots: torch.Tensor) -> dict[str, Any] | None:
        batch = self.batches.step(step, self.size.at(step))[number]
        queries, passages = self.engine.encode_again(batch, step, number)  # (B, d), (B, 1 + H, d)
        own = slots[self.engine.rank * len(queries) :][: len(queries)].to(self.engine.device)
        if not torch.equal(self.bank.column_ids[slots, 0], batch.ids.columns[:, 0]):
            return None  # cut for another number of processes, before this one took the run over
        kept = self.bank.passages[own]  # (B, 1 or 1 + H, d)
        cosine = None if self.bank.queries is None else _cosine(self.bank.queries[own], queries)
        return {
            "age": self.bank.step - step,
            "query": cosine,
            "passage": _cosine(kept, passages[:, : kept.shape[1]]),
        }


def _cosine(stored: torch.Tensor, now: torch.Tensor) -> float:
    return F.cosine_similarity(stored.float(), now.float(), dim=-1).mean().item()
