"""How stale the bank is: stored vectors against those that the encoders would give for the same texts now."""

from typing import Any

import torch
import torch.nn.functional as F

from contaccum.batch import MicroBatch
from contaccum.data.collate import BatchSource
from contaccum.engine import Engine
from contaccum.methods.bank import Bank

SAMPLE = 4
"""Micro-batches that are encoded again, from the oldest in the bank to the newest."""


class Drift:
    """Encodes a few of the bank's micro-batches again, with their own dropout noise, so that weights alone make a difference."""

    def __init__(self, engine: Engine, bank: Bank, batches: BatchSource) -> None:
        """batches: for this object alone, see ``BatchSource.twin``."""
        self.engine, self.bank, self.batches = engine, bank, batches

    def measure(self, size: int) -> dict[str, Any]:
        """Mean cosine between stored and new vectors of the sample, for queries and passages, and per age in optimizer steps.

        size: of micro-batches, in the unit of the batches; rows that came in others are passed over. Empty where the bank holds
        no whole micro-batch, or in another process than the main one, which measures its own rows.
        """
        found = []
        if self.engine.is_main:
            training = self.engine.encoder.training
            self.engine.encoder.train()
            found = [self._of(*chosen) for chosen in self._sample(size)]
            self.engine.encoder.train(training)
        if not found:
            return {}
        queries = [one["query"] for one in found if one["query"] is not None]
        return {
            "drift_query_cosine": sum(queries) / len(queries) if queries else None,
            "drift_passage_cosine": sum(one["passage"] for one in found) / len(found),
            "drift": found,
        }

    def _sample(self, size: int) -> list[tuple[int, int, MicroBatch, torch.Tensor]]:
        """Step, number in the step, and slots in order, of whole micro-batches, evenly from the oldest row to the newest."""
        bank = self.bank
        born, places = bank.born[: bank.stored], bank.places[: bank.stored]
        if not len(born):
            return []
        by_age = (born * (1 + int(places.max())) + places).argsort()
        wanted = by_age[torch.linspace(0, len(by_age) - 1, SAMPLE).round().long()]
        sample: dict[tuple[int, int], tuple[int, int, MicroBatch, torch.Tensor]] = {}
        for step, place in zip(born[wanted].tolist(), places[wanted].tolist(), strict=True):
            start = 0
            for number, batch in enumerate(self.batches.step(step, size)):
                stop = start + len(batch.ids.columns)
                slots = ((born == step) & (places >= start) & (places < stop)).nonzero().squeeze(1)
                # of the oldest micro-batch some rows may be overwritten: the next one then stands for it
                if place < stop and len(slots) == stop - start:
                    slots = slots[places[slots].argsort()]
                    if torch.equal(bank.column_ids[slots, 0], batch.ids.columns[:, 0]):  # cut then as now
                        sample[step, number] = (step, number, batch, slots)
                    break
                start = stop
        return list(sample.values())

    def _of(self, step: int, number: int, batch: MicroBatch, slots: torch.Tensor) -> dict[str, Any]:
        queries, passages = self.engine.encode_again(batch, step, number)  # (B, d), (B, 1 + H, d)
        own = slots[self.engine.rank * len(queries) :][: len(queries)].to(self.engine.device)
        kept = self.bank.passages[own]  # (B, 1 or 1 + H, d)
        cosine = None if self.bank.queries is None else _cosine(self.bank.queries[own], queries)
        return {
            "age": self.bank.step - step,
            "query": cosine,
            "passage": _cosine(kept, passages[:, : kept.shape[1]]),
        }


def _cosine(stored: torch.Tensor, now: torch.Tensor) -> float:
    return F.cosine_similarity(stored.float(), now.float(), dim=-1).mean().item()
