"""CONTACCUM for Lightning: a loss with a bank, and a callback that updates and saves the bank.

    class Retriever(LightningModule):
        def __init__(self):
            ...
            self.bank_loss = ContAccumLoss(bank_size=128, similarity="cosine")

        def training_step(self, batch, index):
            queries, passages, ids = ...  # (B, d), (B, 1 + H, d), (B, 1 + H)
            return self.bank_loss(queries, passages, ids, training=True)

    Trainer(accumulate_grad_batches=16, callbacks=[ContAccumCallback(module.bank_loss)])  # 16
    batches of 8 pairs: bank_size 128

B is the number of queries in a batch, H the number of hard negatives of a query, and d the length
of a vector. Install the extra `lightning`. The module must use automatic
optimization and one optimizer.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from contaccum.errors import InputError
from contaccum.integrations.bank_loss import BankLoss as ContAccumLoss

__all__ = ["ContAccumCallback", "ContAccumLoss"]


class ContAccumCallback(Callback):
    """Callback that tells the bank when a step ends, and saves the bank in checkpoints."""

    def __init__(self, loss: ContAccumLoss) -> None:
        self.loss = loss
        self.steps = 0  # number of finished optimizer steps
        self.restored = False  # whether there is the bank of the steps before

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # a second call of ``fit`` without a checkpoint goes on with the bank
        self.restored = trainer.global_step > 0 and trainer.ckpt_path is None
        if not self.restored:
            # the trainer calls load_state_dict later, so a checkpoint replaces the empty bank
            self.loss.begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steps = trainer.global_step
        if self.steps and not self.restored:
            raise InputError(
                f"{trainer.ckpt_path}: has no bank; expected a checkpoint that was saved with "
                "ContAccumCallback"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.loss.end_step()

    def state_dict(self) -> dict[str, Any]:
        tensors, numbers = self.loss.state()
        return {"tensors": tensors, "numbers": numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loss.begin((state_dict["tensors"], state_dict["numbers"]))
        self.restored = True
