"""An update with contaccum's methods and with its peers: sentence-transformers' losses and the
package GradCache.

    python benchmarks/peers.py [--model DIR] [--defaults] [--json OUT] [--quick]

    pip install sentence-transformers==6.2.0
    pip install --no-deps --target gradcache GradCache==0.0.1     (optional: --gradcache gradcache)

Same weights, same made texts (queries of 16 tokens, passages of 128), tokenized before the clock
starts, same dtype, AdamW with the same settings; all in one process, interleaved. With --real_texts
the texts are real ones, at most 64 and 256 tokens long, padded as each library pads them. Towers
are tied on both sides, as sentence-transformers has them; the cached losses take mini-batches of B
pairs. Before anything is timed, the losses of all that compare N with N are taken without dropout
and must agree, and every trained parameter of a peer must have a gradient; timing is done with the
encoder's own dropout. Operations are ATen operators on the device in one update, without views and
allocations.

With --defaults, one more row for each library has the micro-batches of its defaults: ours without
padding and by tokens (by pairs for cont_accum), 32 pairs in sentence-transformers' cached loss.
Partial replay trains without dropout; all others have the encoder's.

With --token_budget, both libraries also get micro-batches of at most as many tokens as B pairs of
full length have. Ours are packed and count real tokens; a peer that pads counts padded ones. One
more row has the largest of our budgets whose update needs no more memory than the peer's.

GradCache 0.0.1, the one release on PyPI, installs a package named ``gradcache`` whose modules
import ``grad_cache``: it cannot be imported. ``--gradcache DIR`` names the folder it
was installed into, and the name it wants is given to it.
"""

import inspect
import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch
from common import (
    REAL_LENGTHS,
    TEMPERATURE,
    PeakMemory,
    Trainee,
    about_texts,
    add_real_texts,
    interleaved,
    make_parser,
    model_folder,
    publish,
    ratio,
    summary,
    table,
    texts_of_training,
)
from launches import Count
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor, nn
from transformers.utils import is_flash_attn_2_available

from contaccum.config import TrainConfig
from contaccum.training.automatic import CPU_TOKENS, GPU_TOKENS

AGREE = 1e-5
"""Largest difference between two losses of the same pairs."""


class Peer:
    """SentenceTransformer with the same weights, its optimizer, and the pairs of a trainee."""

    def __init__(
        self, folder: str, trainee: Trainee, dropout: float | None, rate: float, flat: bool = False
    ) -> None:
        """Load the model. flat: flatten the texts, if flash attention is installed and the
        precision is half."""
        self.device, self.precision = trainee.engine.device, trainee.engine.precision
        self.flat = flat and self.precision != "no" and is_flash_attn_2_available()
        attention = {"attn_implementation": "flash_attention_2"} if self.flat else {}
        self.model = SentenceTransformer(folder, device=str(self.device), model_kwargs=attention)
        for module in self.model.modules():
            if dropout is not None and isinstance(module, nn.Dropout):
                module.p = dropout
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("pooler" not in name)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=rate, fused=True
        )
        whole = trainee.whole[0]
        self.features = [
            {
                "input_ids": side.input_ids.to(self.device),
                "attention_mask": side.attention_mask.to(self.device),
            }
            for side in (whole.queries, whole.passages)
        ]
        if self.flat:
            self.features = []
            for texts, length in zip(trainee.texts, REAL_LENGTHS, strict=True):
                self.model.max_seq_length = length
                side = self.model.preprocess(texts).items()
                self.features.append(
                    {
                        name: part.to(self.device) if hasattr(part, "to") else part
                        for name, part in side
                    }
                )

    def autocast(self) -> torch.autocast:
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return torch.autocast(
            self.device.type, kinds.get(self.precision), enabled=self.precision in kinds
        )

    def update(self, loss: nn.Module) -> float:
        """Run one update with a sentence-transformers loss and return the loss."""
        with self.autocast():
            value = loss([dict(side) for side in self.features], None)
            value.backward()  # the cached loss encodes again in its backward pass
        self._step()
        return value.item()

    def _step(self) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                sys.exit(f"sentence-transformers: {name} has no gradient")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class GradCachePeer(Peer):
    """The same model, trained by the package GradCache."""

    def __init__(self, grad_cache: Any, micro: int, *given: Any) -> None:
        super().__init__(*given)
        embed = Embed(self.model)
        self.cache = grad_cache(models=[embed, embed], chunk_sizes=micro, loss_fn=self._loss)

    @staticmethod
    def _loss(queries: Tensor, passages: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            queries @ passages.T / TEMPERATURE, torch.arange(len(queries), device=queries.device)
        )

    def update(self, loss: None = None) -> float:
        with self.autocast():
            value = self.cache(*self.features)
        self._step()
        return value.item()


class Embed(nn.Module):
    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, **features: Tensor) -> Tensor:
        return nn.functional.normalize(self.model(features)["sentence_embedding"], dim=-1)


def load_gradcache(folder: Path) -> Any:
    """Return the class GradCache from under the package name that its modules import."""
    source = folder / "gradcache"
    if not (source / "grad_cache.py").is_file():
        sys.exit(
            f"--gradcache {folder}: no gradcache/grad_cache.py there, expected a pip --target "
            "folder of GradCache 0.0.1"
        )
    spec = ModuleSpec("grad_cache", None, is_package=True)
    spec.submodule_search_locations = [str(source)]
    sys.modules["grad_cache"] = module_from_spec(spec)
    from grad_cache.grad_cache import GradCache

    return GradCache


def make_cases(args: Any, folder: str, dropout: float | None, rate: float) -> dict[str, Any]:
    """Return every contender by name as a function that runs one update and returns its loss."""
    given = (args.device, args.precision, args.pairs, args.micro, dropout, rate, args.unpad)
    plain = Trainee(folder, *given, **texts_of_training(args))
    methods = ["in_batch", "grad_accum", "grad_cache", "cont_accum"]
    cases = {f"contaccum {name}": updates(plain, name, args.bank) for name in methods}
    sampled = Trainee(folder, *given, **texts_of_training(args), replay_share=0.5)
    cases["contaccum cont_cache, partial replay"] = updates(sampled, "cont_cache", args.bank)
    peer = Peer(folder, plain, dropout, rate)
    whole = MultipleNegativesRankingLoss(peer.model, scale=1 / TEMPERATURE)
    cached = CachedMultipleNegativesRankingLoss(
        peer.model, scale=1 / TEMPERATURE, mini_batch_size=args.micro
    )
    cases["sentence-transformers, plain"] = lambda: peer.update(whole)
    cases["sentence-transformers, cached"] = lambda: peer.update(cached)
    if args.defaults:
        cases |= by_default(args, folder, dropout, rate)
    if args.token_budget:
        cases |= token_budget(args, folder, dropout, rate)
    if args.gradcache:
        other = GradCachePeer(
            load_gradcache(args.gradcache), args.micro, folder, plain, dropout, rate
        )
        cases["GradCache 0.0.1"] = other.update
    return cases


def by_default(args: Any, folder: str, dropout: float | None, rate: float) -> dict[str, Any]:
    """Return our methods and the cached loss with the micro-batches that each library chooses if
    nothing is set."""
    cases: dict[str, Any] = {}
    config = TrainConfig(method="cont_accum", output_dir="")
    config.batch.global_batch_size = args.pairs
    micro = config.micro_batch_size(1)
    replay = TrainConfig.from_config("presets/replay")
    for name, method, share in (
        ("grad_cache", "grad_cache", 1.0),
        ("cont_accum", "cont_accum", 1.0),
        ("presets/replay", replay.method, replay.replay.share),
    ):
        given = (args.device, args.precision, args.pairs, micro, dropout, rate, True)
        trainee = Trainee(folder, *given, **texts_of_training(args), replay_share=share)
        if method != "cont_accum":
            tokens = CPU_TOKENS if trainee.engine.device.type == "cpu" else GPU_TOKENS
            trainee.micro_batches = trainee.cut_by_tokens(tokens)
        cases[f"contaccum {name}, by default"] = updates(trainee, method, args.bank)
    peer = Peer(folder, trainee, dropout, rate)
    loss = CachedMultipleNegativesRankingLoss(peer.model, scale=1 / TEMPERATURE)
    cases["sentence-transformers, cached, by default"] = lambda: peer.update(loss)
    return cases


def token_budget(args: Any, folder: str, dropout: float | None, rate: float) -> dict[str, Any]:
    """Return our methods and the cached loss with micro-batches of as many tokens as B pairs of
    full length have, and grad_cache with the peer's memory."""
    given = (args.device, args.precision, args.pairs, args.micro, dropout, rate, True)

    def trainee_of(budget: int) -> Trainee:
        trainee = Trainee(folder, *given, **texts_of_training(args))
        trainee.micro_batches = trainee.cut_by_tokens(budget)
        return trainee

    settings = Trainee(folder, *given, **texts_of_training(args)).encoder.settings
    budget = args.micro * (settings.max_query_length + settings.max_passage_length)
    trainee = trainee_of(budget)
    cases: dict[str, Any] = {
        f"contaccum {name}, {budget:,} tokens": updates(trainee, name, args.bank)
        for name in ("grad_cache", "cont_accum")
    }
    if (
        "mini_batch_num_tokens"
        not in inspect.signature(CachedMultipleNegativesRankingLoss).parameters
    ):
        print("sentence-transformers: this version has no mini-batches by tokens", file=sys.stderr)
        return cases
    peer = Peer(folder, trainee, dropout, rate, flat=True)
    loss = CachedMultipleNegativesRankingLoss(
        peer.model, scale=1 / TEMPERATURE, mini_batch_num_tokens=budget
    )
    if not peer.flat:
        print(
            "sentence-transformers: texts are padded, because flash attention is not available",
            file=sys.stderr,
        )
    cases[f"sentence-transformers, cached, {budget:,} tokens"] = lambda: peer.update(loss)
    most, device = peak(lambda: peer.update(loss), peer.device), peer.device
    within = budget
    while within < int(sum(map(sum, trainee.lengths))):
        larger = trainee_of(within * 5 // 4)
        if peak(updates(larger, "grad_cache", args.bank), device) > most:
            break
        trainee, within = larger, within * 5 // 4
    print(f"grad_cache with the peer's memory: {within:,} tokens", file=sys.stderr)
    cases["contaccum grad_cache, the peer's memory"] = updates(trainee, "grad_cache", args.bank)
    return cases


def updates(trainee: Trainee, method: str, size: int) -> Callable[[], float]:
    bank = trainee.bank(method, size)
    return lambda: trainee.update(method, bank)


def compares_all(name: str) -> bool:
    """Return whether a contender compares each of the N queries with all N passages."""
    return name.startswith(
        ("contaccum in_batch", "contaccum grad_cache", "sentence-transformers", "GradCache")
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=128, help="pairs in an update (N)")
    parser.add_argument("--micro", type=int, default=8, help="pairs in a micro-batch (B)")
    parser.add_argument("--bank", type=int, default=1024, help="bank rows (M)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--unpad", action="store_true", help="contaccum's encoders with model.unpad"
    )
    parser.add_argument(
        "--defaults", action="store_true",
        help="add both libraries with the micro-batches that they choose if nothing is set",
    )  # fmt: skip
    add_real_texts(parser)
    parser.add_argument(
        "--token_budget", action="store_true",
        help="add grad_cache and sentence-transformers' cached loss with micro-batches by tokens "
             "and without padding",
    )  # fmt: skip
    parser.add_argument(
        "--gradcache", type=Path, help="folder that the package GradCache was installed into"
    )
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.micro, args.bank, args.repeats = 8, 4, 16, 2
    folder = model_folder(args.model)
    losses = {
        name: run()
        for name, run in make_cases(args, folder, dropout=0.0, rate=0.0).items()
        if compares_all(name)
    }
    apart = max(losses.values()) - min(losses.values())
    if apart > AGREE and args.precision == "fp32":
        sys.exit(
            f"the losses differ by {apart:.2e}, expected at most {AGREE}: {json.dumps(losses)}"
        )
    cases = make_cases(args, folder, dropout=None, rate=1e-6)
    seconds = interleaved(cases, args.repeats)
    bases = ["sentence-transformers, cached", "contaccum grad_accum"]
    others = [name for name in cases if name.startswith("sentence-transformers, cached, ")]
    bases += others
    device = torch.device("cuda" if args.device == "auto" and torch.cuda.is_available() else "cpu")
    rows = [
        {
            "name": name,
            "seconds": summary(own),
            "loss": losses.get(name),
            "peak_bytes": peak(cases[name], device),
            "operations": operations(cases[name], device),
            "ratios": {other: ratio(seconds, name, other) for other in bases},
        }
        for name, own in seconds.items()
    ]
    heads = [
        "update by",
        "seconds",
        "÷ ST cached",
        "÷ `grad_accum`",
        *(f"÷ ST cached, {name.rpartition(', ')[2]}" for name in others),
        "peak MiB",
        "operations",
        "loss, no dropout",
    ]
    lines = [about(args), table(heads, [cells(row) for row in rows])]
    publish(
        args,
        "An update compared with other libraries",
        lines,
        {"rows": rows, "losses_apart": apart},
    )


def peak(update: Callable[[], float], device: torch.device) -> int:
    """Return the peak bytes of one update, without encoder, optimizer and bank."""
    with PeakMemory(device) as memory:
        update()
    return memory.bytes


def operations(update: Callable[[], float], device: torch.device) -> int:
    """Return the number of ATen operations of one update."""
    with Count(device.type) as count:
        update()
    return count.operations


def cells(row: dict[str, Any]) -> list[str]:
    spreads = (
        f"{s['median']:.3f} ({s['min']:.3f} to {s['max']:.3f})"
        for s in (row["seconds"], *row["ratios"].values())
    )
    loss = "other negatives" if row["loss"] is None else f"{row['loss']:.6f}"
    return [row["name"], *spreads, f"{row['peak_bytes'] / 2**20:.0f}", row["operations"], loss]


def about(args: Any) -> str:
    ours = "ours with `model.unpad`, " if args.unpad else ""
    return (
        f"{about_texts(args)}; N = {args.pairs}, B = {args.micro} (sentence-transformers' "
        f"mini_batch_size too), M = {args.bank:,}, {args.precision}, tied towers, "
        f"{ours}{args.repeats} rounds, interleaved; median (smallest to largest). Partial replay "
        "encodes half of the texts a second time. Peak: tensors of one update, without encoder, "
        "optimizer and bank."
    )


if __name__ == "__main__":
    main()
