"""CONTACCUM for SentenceTransformerTrainer: a loss with a bank, and a callback for the bank.

    model = SentenceTransformer("sentence-transformers/all-MiniLM-L6-v2")
    loss = ContAccumLoss(model)
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=pairs, loss=loss, callbacks=[ContAccumCallback(loss)]
    )

Requires sentence-transformers 6.2 or newer (extra `sentence-transformers`).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.modules import Router
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from contaccum.config.declare import PositiveInt
from contaccum.config.load import converted
from contaccum.errors import InputError
from contaccum.integrations.bank_loss import BANK_FILE, BankLoss, content_ids, read_bank, write_bank
from contaccum.runtime.files import read_json


class ContAccumLoss(CachedLossMixin, nn.Module):
    """CONTACCUM loss for data with the columns query, positive and, optionally, hard negatives.

    A batch has ``per_device_train_batch_size`` pairs (query, positive). The loss compares the
    queries and passages of the batch with each other and with earlier pairs from the bank. In
    evaluation, the loss does not use or change the bank.
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
        """Create the loss for a model.

        bank_size: maximum number of queries in the bank, each with its passages. Default: the
        number of pairs in one optimizer step, so that no query is older than one step. 0: no bank
        (plain gradient accumulation). temperature: every similarity is divided by this number. The
        ``scale`` of sentence-transformers is 1 / temperature. similarity: ``cosine`` or ``dot``.
        Default: the similarity of the model. mask_false_negatives: for each query, mask the
        negatives that have the same tokens as the positive passage. mini_batch_size: number of
        pairs in one forward pass; a smaller number needs less memory. The gradients of a batch are
        cached as in GradCache. Default: the whole batch in one pass, without caching. bank_options:
        hard_negatives (False: do not store hard negatives), queries (False: store only passages),
        and row_weight, age_decay, keep and warmup_steps (see BankOptions).
        """
        super().__init__()
        self.model = model
        mini_batch_size = converted(PositiveInt | None, mini_batch_size, "mini_batch_size")
        self.mini_batch_size = mini_batch_size
        self.uses_gradient_cache = mini_batch_size is not None
        for module in model.modules():  # the pooler of BERT is not used, so it is not trained
            if isinstance(getattr(module, "pooler", None), nn.Module):
                module.pooler.requires_grad_(False)
        self.bank_loss = BankLoss(
            bank_size,
            similarity or model.similarity_fn_name,
            temperature,
            mask_false_negatives,
            **bank_options,
        )

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        """Compute the loss of a batch.

        sentence_features: tokens of each column: query, positive, and optional hard negatives.
        labels: not used.
        """
        features = list(sentence_features)
        if len(features) < 2:
            raise InputError(
                "the data has one column of texts; expected the columns query, positive and, if "
                "there are any, hard negatives"
            )
        ids = self._ids(features[1:])
        if self.mini_batch_size is not None:
            return self.forward_cached(features, ids)
        return self.calculate_loss(
            [[self.model(each)["sentence_embedding"]] for each in features], ids
        )

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Compute the loss from embeddings; gradient caching calls this method.

        reps: for each column (query, positive, hard negatives), a list of embedding tensors, one
        for each mini-batch. labels: passage ids (B, 1 + H), or None. with_backward: also compute
        the gradients of the embeddings.
        """
        queries, *passages = (torch.cat(pieces) for pieces in reps)
        ids = None if labels is None else labels.to(queries.device)
        value = self.bank_loss(queries, torch.stack(passages, 1), ids, training=self._training())
        if with_backward:
            value.backward()
        return value

    def _training(self) -> bool:
        # in evaluation, the trainer calls eval() of the model, but not of this loss or of a wrapper
        # of the model
        model = next(
            module for module in self.model.modules() if isinstance(module, SentenceTransformer)
        )
        return model.training and torch.is_grad_enabled()

    def _ids(self, passages: list[dict[str, Tensor]]) -> Tensor | None:
        """Return an id for each passage, (B, 1 + H), on the CPU.

        Return None if false negatives are not masked.
        """
        if not self.bank_loss.loss.similarity.mask_false_negatives:
            return None
        return torch.stack([content_ids(tokens_of_texts(column)) for column in passages], 1)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options of the loss. sentence-transformers writes them into the model card."""
        return {
            "bank_size": self.bank_loss.size if self.bank_loss.begun else self.bank_loss.bank_size,
            "temperature": self.bank_loss.loss.similarity.temperature,
            "similarity": self.bank_loss.similarity,
            "mask_false_negatives": self.bank_loss.loss.similarity.mask_false_negatives,
            "mini_batch_size": self.mini_batch_size,
            **self.bank_loss.bank_options,
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


def tokens_of_texts(features: dict[str, Tensor]) -> list[list[int]]:
    """Return the token ids of each text of a batch of sentence-transformers."""
    ids = features["input_ids"].cpu()
    if "attention_mask" in features:  # padded, (B, length)
        masks = features["attention_mask"].cpu().bool()
        return [row[mask].tolist() for row, mask in zip(ids, masks, strict=True)]
    # without padding, for FlashAttention, or for StaticEmbedding
    if "cu_seq_lens_q" in features:
        starts = features["cu_seq_lens_q"][1:-1]
    else:
        starts = features["offsets"][1:]
    return [part.tolist() for part in ids.flatten().tensor_split(starts.tolist())]


class ContAccumCallback(TrainerCallback):
    """Callback that tells each bank when a step ends, and saves the banks in checkpoints."""

    def __init__(self, *losses: ContAccumLoss) -> None:
        """losses: one loss, or one of each data set, always in the same order."""
        self.losses = losses
        # name of the file in a checkpoint -> loss
        self.files = {
            BANK_FILE.replace(".", f"_{number}." if number else "."): loss.bank_loss
            for number, loss in enumerate(losses)
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start a new run with an empty bank.

        Start a resumed run with the bank of the checkpoint.
        """
        if getattr(state, "contaccum", self) is not self:  # the trainer makes a new state
            raise InputError(
                "there are two ContAccumCallback; expected one, with all losses: "
                "ContAccumCallback(loss_a, loss_b)"
            )
        state.contaccum = self
        if args.world_size > 1 and len(self.losses) > 1:
            raise InputError(
                f"{len(self.losses)} losses with banks train in several processes, which may take "
                "batches of different data sets at the same time; use one loss for all data sets"
            )
        # a pass of a Router uses only one tower; DistributedDataParallel would treat the other
        # tower as unused parameters
        modules = [module for loss in self.losses for module in loss.model.modules()]
        routed = any(isinstance(module, Router) for module in modules)
        cached = all(loss.uses_gradient_cache for loss in self.losses)
        searches = args.ddp_find_unused_parameters is not False and not cached
        if args.world_size > 1 and routed and searches:
            raise InputError(
                f"ddp_find_unused_parameters is {args.ddp_find_unused_parameters}, but the model "
                "has a Router and trains in several processes; set ddp_find_unused_parameters to "
                "False, or give the loss a mini_batch_size"
            )
        if args.world_size > 1 and not args.dataloader_drop_last:
            raise InputError(
                "dataloader_drop_last is False with several processes; set it to True, because the "
                "banks of all processes must be equal"
            )
        pairs = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        named = args.resume_from_checkpoint
        folder = (
            Path(named) if isinstance(named, str) and Path(named).is_dir() else _folder(args, state)
        )
        for name, loss in self.files.items():
            loss.begin(read_bank(folder, name) if state.global_step else None, pairs)
        if state.global_step:
            _refuse_other_run(folder, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for loss in self.files.values():
            loss.end_step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, loss in self.files.items():
            bank = loss.state()
            if state.is_world_process_zero:
                write_bank(_folder(args, state), bank, name)


def _refuse_other_run(folder: Path, state: Any) -> None:
    """Raise InputError if the trainer loaded another checkpoint than the bank's (``folder``)."""
    saved = read_json(folder / TRAINER_STATE_NAME)["log_history"]
    # as text, because NaN is not equal to itself
    if json.dumps(saved) != json.dumps(state.log_history):
        raise InputError(
            f"{folder}: this checkpoint, whose bank would be used, is of another run than the "
            "resumed checkpoint. Set resume_from_checkpoint in the training arguments to the "
            "resumed checkpoint."
        )


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
