"""The dual bank for Lightning: a loss for a module's steps, and the callback that ends the bank's steps and keeps it.

    class Retriever(LightningModule):
        def __init__(self):
            ...
            self.bank_loss = ContAccumLoss(bank_size=128, similarity="cosine")

        def training_step(self, batch, index):
            queries, passages, ids = ...  # (B, d), (B, 1 + H, d), (B, 1 + H)
            return self.bank_loss(queries, passages, ids, training=True)

    Trainer(accumulate_grad_batches=16, callbacks=[ContAccumCallback(module.bank_loss)])  # batches of 8: a bank of one step

Needs pip install 'contaccum[lightning]'. Automatic optimization with one optimizer.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from contaccum.integrations.bank_loss import BankLoss as ContAccumLoss

__all__ = ["ContAccumCallback", "ContAccumLoss"]


class ContAccumCallback(Callback):
    """Ends the bank's steps with the trainer's, and keeps the bank in the trainer's checkpoints."""

    def __init__(self, loss: ContAccumLoss) -> None:
        self.loss = loss
        self.steps = 0  # optimizer steps seen to end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is read after this
            self.loss.begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.loss.end_step()

    def state_dict(self) -> dict[str, Any]:
        kept = self.loss.state()
        return {} if kept is None else {"tensors": kept[0], "numbers": kept[1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loss.load_state(state_dict["tensors"], state_dict["numbers"])
