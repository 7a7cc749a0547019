"""The dual bank in Lightning's trainer: steps equal to our loop's, and checkpoints."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from helpers import gradients, largest_difference, micro_batches, run_steps, tiny_encoder
from torch.utils.data import DataLoader

from contaccum.batch import MicroBatch
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

from contaccum.integrations.lightning import ContAccumCallback, ContAccumLoss

pytestmark = pytest.mark.acceptance
K, STEPS = 3, 4


class Retriever(LightningModule):
    def __init__(self, encoder: DualEncoder, bank_size: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.bank_loss = ContAccumLoss(bank_size, "cosine", 0.1)
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: MicroBatch, index: int) -> torch.Tensor:
        queries, passages = self.encoder(batch)
        value = self.bank_loss(queries, passages, batch.ids.columns, training=True)
        self.losses.append(value.item())
        return value

    def validation_step(self, batch: MicroBatch, index: int) -> None:
        queries, passages = self.encoder(batch)
        self.log(
            "loss",
            self.bank_loss(queries, passages, batch.ids.columns, training=False),
            batch_size=4,
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients(self.encoder))

    def train_dataloader(self) -> DataLoader:
        """Two optimizer steps an epoch: a loader tells no place in its data, so a resumed run
        begins with an epoch."""
        first = self.current_epoch * 2 * K
        return DataLoader(batches()[first : first + 2 * K], batch_size=None, shuffle=False)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(batches()[:1], batch_size=None, shuffle=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.encoder.parameters(), lr=0.1)


def batches() -> list[MicroBatch]:
    """Use each row's own positive as its only known one, as the integration does."""
    found = micro_batches(K * STEPS, 4, hard_negatives=1, passages=30)
    for batch in found:
        batch.ids.positives[:, 1:] = -1
    return found


def fit(
    folder: Path,
    steps: int = STEPS,
    bank_size: int = 16,
    resume: str | None = None,
    more: int | None = None,
) -> Retriever:
    """more: number of steps at which a second call of the trainer's ``fit`` ends."""
    module = Retriever(copy.deepcopy(tiny_encoder()), bank_size)
    trainer = Trainer(
        max_steps=steps,
        accumulate_grad_batches=K,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=1,
        callbacks=[
            ContAccumCallback(module.bank_loss),
            ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1),
        ],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, ckpt_path=resume)
        if more is not None:
            trainer.fit_loop.epoch_loop.max_steps = more
            trainer.fit(module)
    return module


def test_lightning_steps_equal_our_loop(tmp_path):
    found = batches()
    steps = [found[start : start + K] for start in range(0, len(found), K)]
    own, losses = run_steps("cont_accum", steps, encoder=tiny_encoder(), bank_size=16)
    module = fit(tmp_path)
    assert largest_difference(own, module.gradients) < 1e-5
    assert [sum(module.losses[i : i + K]) / K for i in range(0, len(found), K)] == pytest.approx(
        losses, abs=1e-5
    )
    assert (module.bank_loss.bank.fill, module.bank_loss.bank.step) == (16, STEPS)
    without = fit(tmp_path / "none", bank_size=0)  # negative control
    assert largest_difference(own, without.gradients) > 0.01


def test_a_second_fit_goes_on_with_the_bank(tmp_path):
    whole = fit(tmp_path / "whole")
    twice = fit(tmp_path / "twice", steps=2, more=STEPS)
    assert largest_difference(whole.gradients, twice.gradients) == 0
    assert twice.bank_loss.bank.fingerprint() == whole.bank_loss.bank.fingerprint()


def test_resumed_run_restores_the_bank(tmp_path):
    whole = fit(tmp_path / "whole")
    half = next((tmp_path / "whole").glob("*step=2.ckpt"))
    rest = fit(tmp_path / "rest", resume=str(half))
    assert largest_difference(whole.gradients[2:], rest.gradients) == 0
    assert rest.losses == whole.losses[2 * K :]
    assert rest.bank_loss.bank.fingerprint() == whole.bank_loss.bank.fingerprint()
    checkpoint = torch.load(half, weights_only=True)
    checkpoint["callbacks"] = {}
    torch.save(checkpoint, tmp_path / "without.ckpt")
    with pytest.raises(InputError, match=r"without\.ckpt: has no bank"):
        fit(tmp_path / "x", resume=str(tmp_path / "without.ckpt"))
