"""Build the parts of a training run: encoder, batches, loss, bank and optimizer."""

import copy
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contaccum.config import ENCODER_SETTINGS, OptimConfig, TrainConfig
from contaccum.data.batches import Batches, BatchForm, JoinedTokens
from contaccum.data.sampler import make_sampler
from contaccum.data.tables import TokenTable, build_token_table
from contaccum.data.train_set import TrainSet
from contaccum.encoder import (
    Adapters,
    DualEncoder,
    EncoderSettings,
    Tower,
    make_settings,
    model_folder,
    tiny_tower,
)
from contaccum.encoder.tokenizer import check_prefix
from contaccum.errors import InputError, require
from contaccum.methods.bank import Bank, BankOptions
from contaccum.methods.distillation import Distillation
from contaccum.methods.loss import InfoNCE
from contaccum.methods.matryoshka import Matryoshka, MatryoshkaBank
from contaccum.methods.objective import Objective
from contaccum.methods.rules import Guide, PairRules
from contaccum.retrieval.encode import training_vectors
from contaccum.runtime.engine import Engine
from contaccum.runtime.processes import torch_dtype
from contaccum.runtime.progress import announced
from contaccum.training.automatic import choose_unpad, longest_pair

# maximum number of tokens of a text in training, unless the config sets another; some encoders
# accept 8,192 or more, for which the memory of most GPUs is too small
USUAL_LENGTH = 512


def build_encoder(
    config: TrainConfig, train_set: TrainSet, device: torch.device | str = "cpu"
) -> DualEncoder:
    """Build the encoder of a new run."""
    model = config.model
    if model.name != "tiny":
        adapters = Adapters(config.lora, model.quantize) if config.lora.rank else None
        encoder = _untrained_encoder(config, device, adapters)
        encoder.settings = _with_mixture_prefixes(config, encoder.settings)
        return encoder
    chosen = {
        name: getattr(model, name) for name in ENCODER_SETTINGS if getattr(model, name) is not None
    }
    tied = model.tie_towers is not False
    settings = make_settings({**chosen, "tie_towers": tied}, "model")
    settings = _with_mixture_prefixes(config, settings)
    query = tiny_tower(
        train_set.texts(),
        settings.pooling,
        layers=model.tiny_layers,
        width=model.tiny_width,
        vocabulary=model.tiny_vocabulary,
        max_length=max(settings.max_query_length, settings.max_passage_length),
        seed=config.seed,
    )
    passage = query if tied else copy.deepcopy(query)
    return DualEncoder(query, passage, settings).to(device)


def _untrained_encoder(
    config: TrainConfig, device: torch.device | str, adapters: Adapters | None = None
) -> DualEncoder:
    """Load the encoder that training starts from. adapters: options of new LoRA adapters."""
    model = config.model
    towers = {"passage_name": model.passage_name, "tie_towers": model.tie_towers}
    encoder = load_encoder(config, model.name, device, adapters=adapters, **towers)
    encoder.settings = _with_usual_lengths(config, encoder.settings)
    return encoder


def _with_usual_lengths(config: TrainConfig, settings: EncoderSettings) -> EncoderSettings:
    """Return ``settings`` with at most USUAL_LENGTH tokens a text, and warn if they change.

    Lengths that the config sets stay unchanged.
    """
    changes: dict[str, Any] = {}
    for name in ("max_query_length", "max_passage_length"):
        stored = getattr(settings, name)
        if getattr(config.model, name) is None and stored > USUAL_LENGTH:
            folder = config.model.name
            if name == "max_passage_length" and config.model.passage_name:
                folder = config.model.passage_name
            warnings.warn(
                f"{folder}: {name} is {stored}, but training uses {USUAL_LENGTH} tokens "
                f"of a text at most. Set model.{name} to another number to use more.",
                stacklevel=2,
            )
            changes[name] = USUAL_LENGTH
    return replace(settings, **changes)


def _with_mixture_prefixes(config: TrainConfig, settings: EncoderSettings) -> EncoderSettings:
    """Return ``settings`` with the query prefix and passage prefix of a mixture's data sets.

    If the config does not set a prefix and all data sets use the same one, the model gets the
    prefix of the data sets. Otherwise, the prefix in ``settings`` stays unchanged. A warning is
    given in two cases: the config sets no prefix and the data sets use different ones, or the
    config sets a prefix that no data set uses.
    """
    if not config.data.mixture:
        return settings
    for name in ("query_prefix", "passage_prefix"):
        of_model = getattr(settings, name)
        in_config = getattr(config.model, name)
        # prefixes in training; a data set without its own prefix uses that of the model
        used = set()
        for member in config.data.mixture:
            prefix = getattr(member, name)
            used.add(of_model if prefix is None else prefix)
        if len(used) == 1 and in_config is None:
            settings = replace(settings, **{name: used.pop()})
        elif used != {of_model} and (in_config is None or in_config not in used):
            warnings.warn(
                f"data.mixture: training uses these values of {name}: "
                f"{', '.join(map(repr, sorted(used)))}, but the model is saved with {of_model!r}, "
                f"and evaluation and search use this value. Set model.{name} to the value that "
                "evaluation and search should use.",
                stacklevel=2,
            )
    return settings


def load_encoder(
    config: TrainConfig, name: str | Path, device: torch.device | str, **options: Any
) -> DualEncoder:
    """Load an encoder with the settings of ``config``. name: folder or Hub name."""
    options |= {
        each: getattr(config.model, each) for each in (*ENCODER_SETTINGS, "trust_remote_code")
    }
    with torch.random.fork_rng(devices=[]), announced(f"loading the encoder {name}"):
        torch.manual_seed(config.seed)  # a new adapter has random weights
        encoder = DualEncoder.load(name, device=device, **options)
    if encoder.adapted and not config.lora.rank:
        raise InputError(
            f"{name}: has an adapter, but lora.rank is 0. Merge the adapter with contaccum merge, "
            "then train the result."
        )
    return encoder


def apply_switches(encoder: DualEncoder, config: TrainConfig) -> None:
    """Apply dropout, attention, padding, quantization and checkpointing settings."""
    encoder.set_dropout(config.model.dropout, config.model.attention_dropout)
    encoder.set_attention(config.model.attention, choose_unpad(config, encoder))
    if config.model.quantize == "4bit":
        encoder.set_compute_dtype(torch_dtype(config.run.precision))
    if config.model.gradient_checkpointing:
        encoder.gradient_checkpointing_enable()


def build_batches(
    config: TrainConfig, engine: Engine, encoder: DualEncoder, train_set: TrainSet
) -> Batches:
    """Tokenize the training set and build the source of the training batches."""
    data, settings = config.data, encoder.settings
    size, rank, world = config.batch.global_batch_size, engine.rank, engine.world
    query, passage = encoder.query_tower, encoder.passage_tower
    form = BatchForm(
        config.micro_batch_size(world),
        config.micro_batch_tokens,
        padded=not query.unpad,
        pad_ids=(query.tokenizer.pad_token_id, passage.tokenizer.pad_token_id),
        rank=rank,
        world=world,
    )
    with engine.main_first():
        query_tokens = _tokens(train_set, "query", settings, query)
        passage_tokens = _tokens(train_set, "passage", settings, passage)
    sampler = make_sampler(
        train_set,
        config.seed,
        size,
        data.hard_negatives,
        data.mixture_batches,
        data.fill_negatives,
        config.batch.order,
    )
    return Batches(train_set, sampler, query_tokens, passage_tokens, form, settings.query_prefix)


def check_guide(config: TrainConfig) -> None:
    """Raise InputError if ``loss.guide`` is neither an encoder folder nor a possible Hub name.

    No weights are loaded.
    """
    if config.loss.guide is None:
        return
    try:
        model_folder(config.loss.guide)
    except InputError as error:
        raise InputError(f"loss.guide: {error}") from error


def build_rules(
    config: TrainConfig, engine: Engine, train_set: TrainSet, missing: bool = False
) -> PairRules:
    """Build the rules that remove negatives of the loss. All processes must call this function.

    missing: whether the bank of a resumed run lacks hard negatives.

    If ``loss.guide`` names an encoder, it encodes the training queries and passages whose vectors
    are not in the cache.
    """
    loss = config.loss
    rules = _rules_without_data(config)
    rules = replace(rules, missing=rules.missing or missing)
    if loss.guide is not None:
        if loss.guide == config.model.name:
            encoder = _untrained_encoder(config, engine.device)
        else:
            trust = config.model.trust_remote_code
            encoder = DualEncoder.load(loss.guide, device=engine.device, trust_remote_code=trust)
        tokens = config.run.eval_batch_tokens
        guide = Guide(
            queries=training_vectors(encoder, train_set, "query", engine, tokens),
            passages=training_vectors(encoder, train_set, "passage", engine, tokens),
        )
        vectors = f"guide {guide.queries.name} {guide.passages.name}"
        margin = loss.false_negative_margin or 0.0
        key = f"margin {margin} {loss.margin_strategy} {vectors}"
        rules = replace(rules, margin=margin, guide=guide, key=key)
    separate = [not member.in_batch_negatives for member in train_set.members]
    if any(separate):
        # (queries,)
        flags = np.repeat(separate, [len(member.set.queries) for member in train_set.members])
        rules = replace(
            rules, separate=torch.from_numpy(flags), key=f"{rules.key} separate {separate}".strip()
        )
    return rules


def _rules_without_data(config: TrainConfig) -> PairRules:
    """Return the rules without training data: missing hard negatives, and own scores."""
    margin = config.loss.false_negative_margin
    strategy = config.loss.margin_strategy
    return PairRules(
        missing=bool(config.data.hard_negatives) and config.data.fill_negatives == "none",
        margin=margin,
        relative=strategy == "relative",
        key="" if margin is None else f"margin {margin} {strategy}",
    )


def _tokens(
    train_set: TrainSet, side: str, settings: EncoderSettings, tower: Tower
) -> TokenTable | JoinedTokens:
    """Tokenize all texts of ``side`` (query or passage).

    Each data set of a mixture may have its own prefix.
    """
    table, columns = {"query": ("queries", ["text"]), "passage": ("passages", ["title", "text"])}[
        side
    ]
    tables = []
    for member in train_set.members:
        prefix = getattr(member, f"{side}_prefix")
        max_length = getattr(settings, f"max_{side}_length")
        if prefix is None:
            prefix = getattr(settings, f"{side}_prefix")
        else:
            check_prefix(tower.tokenizer, prefix, max_length, side, "data.mixture: ")
        options = {
            "max_length": max_length,
            "prefix": prefix,
            "fingerprint": f"{member.set.fingerprint}/{table}",
            "vocabulary": tower.vocabulary,
        }
        tables.append(
            build_token_table(getattr(member.set, table), columns, tower.tokenizer, **options)
        )
    return tables[0] if len(tables) == 1 else JoinedTokens(tables)


def build_loss(
    config: TrainConfig, encoder: DualEncoder, rules: PairRules | None = None
) -> Objective:
    """Build the loss.

    Raises InputError if a Matryoshka width is not smaller than the width of the embeddings.

    rules: result of ``build_rules``. Default: only the rules that need no training data.
    """
    loss = config.loss
    temperature = config.model.temperature
    width = max(loss.matryoshka_dims, default=0)
    if width >= encoder.dim:
        raise InputError(
            f"loss.matryoshka_dims: {width} is not below the width of the embeddings, {encoder.dim}"
        )
    matryoshka = Matryoshka(
        widths=tuple(loss.matryoshka_dims),
        weights=tuple(loss.matryoshka_weights or [1.0] * len(loss.matryoshka_dims)),
        unit=encoder.settings.similarity == "cosine",
    )
    distillation = None
    if loss.distillation != "none":  # not config.distils: the type checker needs the comparison
        distillation = Distillation(
            loss.distillation, temperature, loss.teacher_temperature, loss.distillation_weight
        )
    if rules is None:
        rules = _rules_without_data(config)
    return Objective(
        InfoNCE(temperature, loss.mask_false_negatives, rules), matryoshka, distillation
    )


def build_bank(config: TrainConfig, engine: Engine, encoder: DualEncoder, loss: Objective) -> Bank:
    """Build the bank. If the method has no bank, build one of size 0."""
    options = BankOptions(
        hard_negatives=config.data.hard_negatives,
        columns_only=config.spec.bank != "pairs",
        row_weight=config.bank.row_weight,
        keep=config.bank.keep,
        warmup_steps=config.bank.warmup_steps,
        age_decay=config.bank.age_decay,
    )
    return MatryoshkaBank(
        config.bank_size(),
        encoder.dim,
        loss.similarity,
        options,
        loss.matryoshka,
        push=config.usual_push(engine.world, longest_pair(config, encoder)),
        device=engine.device,
    )


def trained_parameters(encoder: DualEncoder) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters by name.

    A parameter that both towers share appears only once.
    """
    return {
        name: parameter for name, parameter in encoder.named_parameters() if parameter.requires_grad
    }


def make_optimizer(encoder: DualEncoder, config: OptimConfig) -> torch.optim.Optimizer:
    """Build AdamW, or 8-bit AdamW if ``config.name`` is ``adamw_8bit``.

    Parameters with fewer than two dimensions have no weight decay. These are biases and the
    parameters of normalization. 8-bit AdamW stores the two moments of a parameter in 8 bits if the
    parameter has more than 4096 numbers. Each block of 256 numbers has one scale (Dettmers et al.
    2022, arXiv 2110.02861). Raises InputError if 8-bit AdamW is chosen and bitsandbytes is not
    installed.
    """
    parameters = list(trained_parameters(encoder).values())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": betas, "eps": config.adam_eps}
    if config.name == "adamw":
        return torch.optim.AdamW(groups, **settings, fused=True)
    require("bitsandbytes", "bitsandbytes", f"optim.name {config.name}")
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, **settings)


def step_count(steps: float, total: int) -> int:
    """Return a number of steps that a setting gives directly or, below 1, as a share of ``total``.

    total: number of steps of the run.
    """
    return int(steps) if steps >= 1 else math.ceil(round(steps * total, 9))


def learning_rate_factor(step: int, total: int, warmup: int, schedule: str) -> float:
    """Return the learning rate of one optimizer step, divided by the highest learning rate.

    step: number of the step; the first step is 0. total: number of steps of the run. The rate
    increases linearly in the first ``warmup`` steps. After them, ``schedule`` decides: ``linear``
    and ``cosine`` decrease the rate to 0 at step ``total``, and ``constant`` keeps it.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "constant": 1.0,
    }[schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
