"""The dual bank for SentenceTransformerTrainer: ContAccumLoss and its callback.

    model = SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2")
    loss = ContAccumLoss(model)
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=pairs, loss=loss, callbacks=[ContAccumCallback(loss)]
    )

Needs sentence-transformers 6.2 or newer: pip install 'contaccum[sentence-transformers]'.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.modules import Router
from torch import Tensor, nn
from transformers import TrainerCallback

from contaccum.errors import InputError
from contaccum.integrations.bank_loss import BankLoss, content_ids, write_bank


class ContAccumLoss(CachedLossMixin, nn.Module):
    """CONTACCUM over (query, positive) pairs, or n-tuples with hard negatives behind the positive.

    Under gradient accumulation each batch of ``per_device_train_batch_size`` pairs meets itself and the bank, which holds the
    pairs before it, of this optimizer step and of the steps before. In evaluation the loss is that of each batch by itself; the
    bank is neither used nor changed.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        bank_size: int | None = None,
        temperature: float = 0.05,
        similarity: str | None = None,
        mask_false_negatives: bool = True,
        mini_batch_size: int | None = None,
        **bank_options: Any,
    ) -> None:
        """
        bank_size: rows of the bank, each a query with its passages; not given, as many as an optimizer step has pairs, so
        that no row is older than one step; 0 leaves plain gradient accumulation.
        temperature: divides every similarity; sentence-transformers' ``scale`` is 1 / temperature.
        similarity: ``cosine`` or ``dot``; not given, the model's own.
        mask_false_negatives: leave out passages that have the same tokens as the row's own positive.
        mini_batch_size: pairs in one forward pass, by gradient caching within a batch; not given, the whole batch at once.
        bank_options: hard_negatives (bank them too, True), queries (False: passages alone), row_weight (``all`` or ``current``),
        visibility (``immediate`` or ``on_step``), keep (False: empty after each step), warmup_steps.
        """
        super().__init__()
        self.model = model
        self.mini_batch_size = mini_batch_size  # type: ignore[assignment]
        self.uses_gradient_cache = mini_batch_size is not None
        for module in model.modules():  # BERT's own pooler takes no part here
            if isinstance(getattr(module, "pooler", None), nn.Module):
                module.pooler.requires_grad_(False)
        self.bank_loss = BankLoss(
            bank_size, similarity or model.similarity_fn_name, temperature, mask_false_negatives, **bank_options
        )

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of one batch of columns: query, positive, then any hard negatives. Labels are not read."""
        features = list(sentence_features)
        if len(features) < 2:
            raise InputError(
                f"the data has {len(features)} text columns, expected a query, a positive, and any hard negatives"
            )
        ids = self._ids(features[1:])
        if self.mini_batch_size is not None:
            return self.forward_cached(features, ids)
        return self.calculate_loss([[self.model(each)["sentence_embedding"]] for each in features], ids)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """reps: embeddings of each column, in pieces; labels: the passages' ids. As gradient caching asks for it."""
        queries, *passages = (torch.cat(pieces) for pieces in reps)
        ids = None if labels is None else labels.to(queries.device)
        value = self.bank_loss(queries, torch.stack(passages, 1), ids, training=self._training())
        if with_backward:
            value.backward()
        return value

    def _training(self) -> bool:
        # the trainer puts the model itself into evaluation, not what it is wrapped in, nor the loss
        model = next(module for module in self.model.modules() if isinstance(module, SentenceTransformer))
        return model.training and torch.is_grad_enabled()

    def _ids(self, passages: list[dict[str, Tensor]]) -> Tensor | None:
        """(B, 1 + H) on the CPU; None where nobody asks for them."""
        if not self.bank_loss.loss.mask_false_negatives:
            return None
        if not all("input_ids" in each and "attention_mask" in each for each in passages):
            raise InputError(
                "passages without input_ids and attention_mask, expected texts, or mask_false_negatives=False"
            )
        columns = []
        for each in passages:
            tokens, mask = each["input_ids"].cpu(), each["attention_mask"].cpu().bool()
            columns.append(content_ids([row[kept].tolist() for row, kept in zip(tokens, mask, strict=True)]))
        return torch.stack(columns, 1)

    def get_config_dict(self) -> dict[str, Any]:
        """For sentence-transformers' model card."""
        return {
            "bank_size": self.bank_loss.size if self.bank_loss.begun else self.bank_loss.bank_size,
            "temperature": self.bank_loss.loss.temperature,
            "similarity": self.bank_loss.similarity,
            "mask_false_negatives": self.bank_loss.loss.mask_false_negatives,
            "mini_batch_size": self.mini_batch_size,
            **self.bank_loss.options,
        }

    @property
    def citation(self) -> str:
        return """
@inproceedings{kim2024contaccum,
    title={A Gradient Accumulation Method for Dense Retriever under Memory Constraint},
    author={Kim, Jaehee and Lee, Yukyung and Kang, Pilsung},
    booktitle={Advances in Neural Information Processing Systems},
    year={2024},
    url={https://arxiv.org/abs/2406.12356},
}
"""


class ContAccumCallback(TrainerCallback):
    """Ends the bank's steps with the trainer's, and keeps the bank in the trainer's checkpoints."""

    def __init__(self, loss: ContAccumLoss) -> None:
        self.loss = loss
        self.bank_loss = loss.bank_loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with an empty bank or, on resume, with that of the checkpoint: ``args.resume_from_checkpoint`` where it names a
        folder, else the trainer's own for this step."""
        self._refuse_search(args)
        if args.world_size > 1 and not args.dataloader_drop_last:
            raise InputError(
                "dataloader_drop_last is False with several processes, expected True: all bank the same rows"
            )
        pairs = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        checkpoint = None
        if state.global_step:
            named = args.resume_from_checkpoint
            checkpoint = named if isinstance(named, str) and Path(named).is_dir() else _folder(args, state)
        self.bank_loss.begin(checkpoint, pairs)

    def _refuse_search(self, args: Any) -> None:
        """DistributedDataParallel's search for unused parameters takes each forward pass for the only one, and of a Router each
        uses one tower. Gradient caching has a backward pass for each."""
        routed = any(isinstance(module, Router) for module in self.loss.model.modules())
        if (
            args.world_size > 1
            and routed
            and not self.loss.uses_gradient_cache
            and args.ddp_find_unused_parameters is not False
        ):
            raise InputError(
                "a Router in several processes with ddp_find_unused_parameters True, its default, expected False (or a "
                "mini_batch_size of the loss)"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bank_loss.end_step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kept = self.bank_loss.state()
        if state.is_world_process_zero and kept is not None:
            write_bank(_folder(args, state), kept)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
