"""Count the device operations of each method outside the encoder, on the meta device, which holds
no values.

    python benchmarks/launches.py [--json OUT] [--quick]

An operation is a call of an ATen operator on device tensors, except views and allocations. It may
launch several kernels. A micro-step consists of the loss, its backward pass and the push of one
micro-batch, without masked pairs. For in_batch, grad_cache and cont_cache, it is a step of 8
micro-batches, divided by 8. Some pushes open a block of log-sum-exps; the mean is over one turn of
the ring.

The second table counts the forward and backward passes and the loss of a whole step with a BERT of
12 layers, in fp32 and bf16: 64 pairs, queries of 8 to 32 and passages of 64 to 256 tokens,
micro-batches of at most 2,560 tokens, dropout 0, without padding. It is counted on the CPU, because
autocast needs a real device, so operations on ids and lengths count too. Attention counts as one
operation, as on a GPU.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import TEMPERATURE, fill, make_parser, publish, table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertModel

from contaccum.batch import MicroBatch, RowIds, Tokens, pad
from contaccum.data.batches import partition_by_tokens
from contaccum.encoder import DualEncoder, EncoderSettings, Tower, kernels
from contaccum.encoder.tokenizer import wordpiece_tokenizer
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank, BankOptions
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.engine import Engine

DIM, MICRO_STEPS, META = 768, 8, torch.device("meta")
WHOLE_STEP = ("in_batch", "grad_cache", "cont_cache")
BANKLESS = ("grad_accum", "in_batch", "grad_cache")
NO_LAUNCH = (
    "aten::empty", "aten::new_empty", "aten::lift_fresh", "aten::detach", "aten::unsafe_split",
)  # fmt: skip


class Count(TorchDispatchMode):
    """Counter of the operations on a type of device inside the ``with`` block."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.operations = device, 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        on_device = any(
            isinstance(each, Tensor) and each.device.type == self.device
            for each in tree_leaves((args, kwargs, result))
        )
        self.operations += (
            on_device and not operator.is_view and not operator.name().startswith(NO_LAUNCH)
        )
        return result


class MetaEncoder:
    """Encoder whose vectors are leaves on the meta device, so that it launches no operations."""

    one_pass, shard_group = False, None

    def __init__(self) -> None:
        self.towers: list[Any] = []
        self.query_tower, self.passage_tower = (
            SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0), unpad=False)
            for _ in range(2)
        )

    def parameters(self) -> list[Tensor]:
        return []

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        queries, passages = (
            self.embed(tower, texts)
            for tower, texts in (
                (self.query_tower, batch.queries),
                (self.passage_tower, batch.passages),
            )
        )
        return queries, passages.view(len(queries), -1, DIM)

    def embed(self, tower: object, texts: Tokens) -> Tensor:
        graph = torch.is_grad_enabled()
        return torch.empty(len(texts.input_ids), DIM, device=META, requires_grad=graph)


def meta_engine() -> Engine:
    engine = Engine(device="cpu")
    engine.prepare(MetaEncoder(), None)  # type: ignore[arg-type]
    return engine


def operations(method: str, pairs: int, bank: Bank) -> int:
    """Return the number of operations of a micro-step, or of a whole step for the WHOLE_STEP
    methods."""
    ids = torch.arange(MICRO_STEPS * pairs).view(-1, pairs, 1)[
        : MICRO_STEPS if method in WHOLE_STEP else 1
    ]
    text = Tokens(torch.zeros(pairs, 1, dtype=torch.long), torch.ones(pairs, 1, dtype=torch.long))
    batches = [MicroBatch(text, text, RowIds(own, own), [""] * pairs) for own in ids]
    with Count("meta") as count:
        METHODS[method](meta_engine(), batches, bank, InfoNCE(TEMPERATURE))
    return count.operations


def count(method: str, size: int, pairs: int, decay: float) -> dict[str, Any]:
    """Return the operations per micro-step of a push that opens no block, of one that opens a
    block, and their mean."""
    share = MICRO_STEPS if method in WHOLE_STEP else 1
    push = pairs * share
    options = BankOptions(age_decay=decay, columns_only=method == "passage_bank")
    bank = Bank(size, DIM, InfoNCE(TEMPERATURE).similarity, options, push=push, device=META)
    found: dict[str, float | None] = {"plain": None, "opening": None}
    pushes = {"plain": 1, "opening": 0}  # number of pushes of each kind in one turn of the ring
    if bank.sums is not None:
        slots = range(0, size, push)
        pushes["opening"] = sum(slot % bank.sums.width == 0 for slot in slots)
        pushes["plain"] = len(slots) - pushes["opening"]
    for kind, number in pushes.items():
        if number:
            fill(bank, 0 if kind == "opening" else push)
            found[kind] = operations(method, pairs, bank) / share
            bank.end_step()
    mean = sum((found[kind] or 0) * number for kind, number in pushes.items()) / sum(
        pushes.values()
    )
    return {
        "method": method,
        "size": size,
        "pairs": pairs,
        "age_decay": decay,
        "mean": mean,
        **found,
    }


class AttendOnce(torch.autograd.Function):
    """Stand-in for attention, with one operation in each direction."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query.neg().squeeze(0).transpose(0, 1)  # (tokens, heads, width)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (gradient.neg().transpose(0, 1).unsqueeze(0),) * 3


def count_step(method: str, tied: bool, layers: int, pairs: int = 64) -> dict[str, Any]:
    """Return the number of micro-batches and of operations of a step, encoder included."""
    kernels.by_length = lambda inputs, *_: AttendOnce.apply(*inputs)
    random = np.random.default_rng(0)
    lengths = random.integers(8, 33, pairs), random.integers(64, 257, pairs)
    batches = []
    for rows in partition_by_tokens(lengths[0], lengths[1][:, None], 2560, 1, padded=False):
        ids = torch.from_numpy(rows).unsqueeze(1)
        texts = (pad([np.ones(length) for length in side[rows]], 0) for side in lengths)
        batches.append(MicroBatch(*texts, RowIds(ids, ids), [""] * len(rows), 2560))
    config = BertConfig(
        vocab_size=5,
        hidden_size=64,
        num_attention_heads=2,
        intermediate_size=64,
        num_hidden_layers=layers,
    )
    found: dict[str, Any] = {"method": method, "towers": "tied" if tied else "untied"}
    found["micro_batches"] = len(batches)
    for precision in ("fp32", "bf16"):
        tokenizer = wordpiece_tokenizer([], 5)
        towers = [Tower(BertModel(config), tokenizer, "mean") for _ in range(2 - tied)]
        encoder = DualEncoder(towers[0], towers[-1], EncoderSettings(tie_towers=tied)).train()
        encoder.set_dropout(0.0)
        encoder.set_attention("auto", unpad=True)
        engine = Engine(device="cpu", precision=precision)
        engine.prepare(encoder, None)  # type: ignore[arg-type]
        loss = InfoNCE(TEMPERATURE)
        push = pairs if method in WHOLE_STEP else len(batches[0].query_ids)
        options = BankOptions(columns_only=method == "passage_bank")
        bank = Bank(0 if method in BANKLESS else 1024, 64, loss.similarity, options, push=push)
        if bank.size:
            fill(bank, push)
        with Count("cpu") as counter:
            METHODS[method](engine, batches, bank, loss)
        found[precision] = counter.operations
    return found


def main() -> None:
    args = make_parser(__doc__, model=False).parse_args()
    sizes, micro = ((1024,), (8,)) if args.quick else ((1024, 16_384, 131_072), (8, 64))
    cases = [(method, 0, pairs, 0.0) for method in BANKLESS for pairs in micro]
    cases += [(method, size, pairs, decay) for method in METHODS if method not in BANKLESS
              for size in sizes for pairs in micro for decay in (0.0, 0.1)]  # fmt: skip
    results = [count(*case) for case in cases]
    base = {row["pairs"]: row["mean"] for row in results[: len(micro)]}  # grad_accum
    rows = [
        [
            row["method"],
            f"{row['size']:,}",
            str(row["pairs"]),
            f"{row['age_decay']:g}",
            *(
                "-" if row[name] is None else f"{row[name]:,.0f}"
                for name in ("plain", "opening", "mean")
            ),
            f"{row['mean'] - base[row['pairs']]:+,.0f}",
        ]
        for row in results
    ]
    steps = [
        count_step(method, tied, layers=1 if args.quick else 12)
        for method in METHODS
        if method != "in_batch"
        for tied in (False, True)
    ]
    whole = [[*step.values()] for step in steps]
    heads = ["method", "M", "B", "age decay", "no opening", "opening", "mean", "over grad_accum"]
    publish(
        args,
        "Device operations of a micro-step outside the encoder",
        [
            table(heads, rows),
            table(["method", "towers", "micro-batches", "fp32", "bf16"], whole),
        ],
        {"rows": results, "steps": steps},
    )


if __name__ == "__main__":
    main()
