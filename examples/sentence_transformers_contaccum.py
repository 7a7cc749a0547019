"""Fine-tune a sentence-transformers model with a dual memory bank: batches of 8 pairs that meet the
128 pairs before them.

    pip install '.[sentence-transformers]'
    python examples/sentence_transformers_contaccum.py

The three lines that differ from sentence-transformers' own training examples are marked. Pairs come
from the Hub, or from a JSONL file whose first column is the query and whose second is its passage:
--data pairs.jsonl.
"""

import argparse
from pathlib import Path

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.training_args import BatchSamplers

from contaccum.integrations.sentence_transformers import ContAccumCallback, ContAccumLoss  # 1

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
parser.add_argument("--data", default="sentence-transformers/natural-questions")
parser.add_argument("--output", default="runs/sentence-transformers")
parser.add_argument("--max_steps", type=int, default=100)
given = parser.parse_args()

model = SentenceTransformer(given.model)
files = (
    {"path": "json", "data_files": given.data}
    if Path(given.data).is_file()
    else {"path": given.data}
)
pairs = load_dataset(**files, split="train")

loss = ContAccumLoss(model, temperature=0.05)  # 2
args = SentenceTransformerTrainingArguments(
    output_dir=given.output,
    max_steps=given.max_steps,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=16,
    learning_rate=2e-5,
    warmup_steps=given.max_steps // 10,
    batch_sampler=BatchSamplers.NO_DUPLICATES,
    logging_steps=1,
    save_steps=50,
    report_to="none",
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=args,
    train_dataset=pairs,
    loss=loss,
    callbacks=[ContAccumCallback(loss)],  # 3
)
trainer.train()
model.save_pretrained(f"{given.output}/final")
print(f"{given.output}/final")
