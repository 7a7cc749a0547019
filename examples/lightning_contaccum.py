r"""Train a retriever with Lightning and a dual memory bank: batches of 8 pairs, compared with the
128 pairs before them.

    pip install '.[lightning]'
    python examples/lightning_contaccum.py --model sentence-transformers/all-MiniLM-L6-v2 \
        --data pairs.jsonl

Each line of the file has two columns, a query and its passage. The lines that contaccum adds to a
Lightning module are marked. The result is a folder of transformers, which SentenceTransformer and
`contaccum evaluate --model` load.
"""

import argparse

import torch
from datasets import load_dataset
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

from contaccum.integrations.lightning import ContAccumCallback, ContAccumLoss  # 1


class Retriever(LightningModule):
    """One encoder with mean pooling for queries and passages."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.backbone = AutoModel.from_pretrained(name)
        self.bank_loss = ContAccumLoss(bank_size=128, similarity="cosine", temperature=0.05)  # 2

    def encode(self, tokens: dict[str, Tensor]) -> Tensor:
        """Return the mean of the token vectors of each text, (n, d)."""
        states = self.backbone(**tokens).last_hidden_state  # (n, length, d)
        mask = tokens["attention_mask"].unsqueeze(-1)  # (n, length, 1)
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    def training_step(self, batch: dict, index: int) -> Tensor:
        # (B, d) each
        queries, passages = (
            self.encode(batch["queries"]),
            self.encode(batch["passages"]),
        )
        # 3: (B, 1, d), (B, 1)
        loss = self.bank_loss(queries, passages.unsqueeze(1), batch["ids"], training=True)
        self.log("loss", loss, prog_bar=True, batch_size=len(queries))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-5)


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", required=True, help="name or folder of an encoder of transformers")
parser.add_argument(
    "--data", required=True, help="JSONL file with a query and its passage on each line"
)
parser.add_argument("--output", default="runs/lightning")
parser.add_argument("--max_steps", type=int, default=100)
given = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(given.model)
pairs = load_dataset("json", data_files=given.data, split="train")
query, passage = pairs.column_names[:2]
# equal passages have one id, so the loss masks them
number = {text: n for n, text in enumerate(dict.fromkeys(pairs[passage]))}


def collate(rows: list[dict]) -> dict:
    def tokens(column: str) -> dict[str, Tensor]:
        texts = [row[column] for row in rows]
        return dict(
            tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
        )

    ids = torch.tensor([[number[row[passage]]] for row in rows])  # (B, 1)
    return {"queries": tokens(query), "passages": tokens(passage), "ids": ids}


module = Retriever(given.model)
trainer = Trainer(
    max_steps=given.max_steps,
    accumulate_grad_batches=16,
    callbacks=[ContAccumCallback(module.bank_loss)],  # 4
    default_root_dir=given.output,
    logger=False,
)
trainer.fit(
    module, DataLoader(pairs, batch_size=8, shuffle=True, drop_last=True, collate_fn=collate)
)
module.backbone.save_pretrained(f"{given.output}/final")
tokenizer.save_pretrained(f"{given.output}/final")
print(f"{given.output}/final")
