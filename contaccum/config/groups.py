"""Option groups of a training run, except `model`, `lora` and `run`.

Each group checks its own rules.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from contaccum.config.declare import (
    DecayRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Steps,
    setting,
)

if TYPE_CHECKING:
    from contaccum.config import TrainConfig

Order = Literal["shuffled", "file"]
Fill = Literal["random", "none"]
MixtureBatches = Literal["mixed", "one_set"]


@dataclass(kw_only=True)
class DataPolicy:
    """Options for data with invalid records."""

    strict: bool = setting(False, flag=True)
    """Stop with an error if a query has no positive, or if a file of examples has other doubtful
    records, such as a hard negative with the text of a positive. Without this option, these are
    left out with a warning."""
    repair: bool = setting(False, flag=True)
    """Accept empty passages and duplicate ids of a BEIR folder or a corpus. Of several records with
    the same id, the last is used. Training leaves out judgements of passages that the corpus lacks.
    Warnings count these records."""


@dataclass
class MixtureConfig:
    """One of several data sets to train on together."""

    train: str = setting("", metavar="DATA")
    """Training data, in any form that `data.train` accepts."""
    split: str = "train"
    """Split to train on: the name of a qrels file in a BEIR folder, or a split of a Hub data
    set."""
    weight: PositiveFloat | None = None
    """Share of the examples that come from this data set, relative to the weights of the other data
    sets. Give a weight to all data sets or to none. Default: the number of queries in the data
    set."""
    query_prefix: str | None = None
    """Text that is put before the queries of this data set in training. Default:
    `model.query_prefix`."""
    passage_prefix: str | None = None
    """Text that is put before the passages of this data set in training. Default:
    `model.passage_prefix`."""
    in_batch_negatives: bool = True
    """Whether passages of other examples are negatives for the queries of this data set. Use false
    if the positive of one query often answers other queries, as in classification or duplicate
    questions. Each query of the batch and of the bank is then compared only with its own positive
    and hard negatives."""


@dataclass
class DataConfig(DataPolicy):
    """Data for training and for evaluation during training (dev data)."""

    train: str = setting("", metavar="DATA")
    """Training data: the path of a BEIR folder, of a DPR JSON file, or of a JSONL file with query,
    pos and neg or in Tevatron's form, gzipped or not; or a name, such as scifact, dpr/nq-train,
    miracl/sw, mteb/NFCorpus or
    hub:owner/name:configuration:split?query=COLUMN&pos=COLUMN&neg=COLUMN&label=COLUMN."""
    split: str = "train"
    """Split to train on: the name of a qrels file in a BEIR folder, or a split of a Hub data
    set."""
    mixture: list[MixtureConfig] = setting(factory=list)
    """Several data sets instead of `train`. Each item of the list has `train`, `split`, `weight`,
    `query_prefix`, `passage_prefix` and `in_batch_negatives`."""
    mixture_batches: MixtureBatches = "mixed"
    """How to choose the examples of a step: from all data sets (mixed), or from one data set that
    is drawn by weight (one_set)."""
    dev: str | None = setting(None, metavar="DATA")
    """Data for evaluation during training, in any form that `train` accepts. Default: no
    evaluation, and the last model is kept."""
    dev_split: str = "dev"
    """Split to evaluate on during training: the name of a qrels file in a BEIR folder, or a split
    of a Hub data set."""
    dev_passages: NonNegativeInt = 2000
    """Maximum number of passages of the dev corpus: all judged ones, and a random sample of the
    others. This makes evaluations fast, but scores are higher than on the whole corpus. 0: the
    whole corpus."""
    hard_negatives: NonNegativeInt = 0
    """Number of hard negatives for each query (H). `fill_negatives` decides what happens to queries
    that have fewer."""
    fill_negatives: Fill = "random"
    """What to do if a query has fewer than H hard negatives: add random passages (random), or
    nothing (none). With `none`, a text of one token takes the place of each missing negative, and
    the loss masks its column. `model.unpad` avoids the padding of this text."""

    @property
    def policy(self) -> DataPolicy:
        return DataPolicy(**{each.name: getattr(self, each.name) for each in fields(DataPolicy)})

    def conflicts(self, config: "TrainConfig", world: int) -> Iterator[str]:
        if self.mixture and self.train:
            yield f"data.train is {self.train!r}, but data.mixture is set too; use only one of them"
        if not self.mixture and not self.train:
            yield "data.train is not set; give a path or the name of a data set"
        for number, each in enumerate(self.mixture):
            if not each.train:
                yield f"data.mixture[{number}].train is not set; give a path or a name"
        if len({each.weight is None for each in self.mixture}) > 1:
            yield (
                "data.mixture: some sets have a weight and some do not; give a weight to all sets "
                "or to none"
            )
        alone = [number for number, each in enumerate(self.mixture) if not each.in_batch_negatives]
        if alone and (self.hard_negatives == 0 or self.fill_negatives == "random"):
            yield (
                f"data.mixture[{alone[0]}].in_batch_negatives is false, so this data set needs "
                "data.hard_negatives of at least 1, and data.fill_negatives none, because random "
                "negatives are passages of other examples"
            )


@dataclass
class BatchConfig:
    """Number of pairs in a step, and how many of these pairs are in memory at once."""

    global_batch_size: PositiveInt = 128
    """Number of pairs (N) in one optimizer step, over all processes."""
    micro_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Number of pairs (B) in one forward pass of one process. Peak memory grows with this number.
    `in_batch` always encodes the full step at once. With `auto`, `grad_cache` and `cont_cache`,
    whose gradients do not depend on B, use `micro_batch_tokens` instead: on a GPU, as many tokens
    as fit into its memory (at most 32768), else 2048. The other methods use 8 pairs, because B
    decides how many negatives a query has."""
    micro_batch_tokens: PositiveInt | None = None
    """Maximum number of tokens in one forward pass of one process. It replaces `micro_batch_size`.
    A step is split into as few micro-batches as possible. Every pair has the same weight in the
    loss.
    With padding (see `model.unpad`), a forward pass of B pairs has B x (tokens of the longest query
    + (1 + H) x tokens of the longest passage) tokens, where H is `data.hard_negatives`, and the
    pairs of a step are sorted by length, which saves padding. With `grad_cache` and `cont_cache`,
    the gradients are the same as with `micro_batch_size`. The exception is `cont_cache` with
    padding and a `bank.size` that is not a multiple of `global_batch_size`: the bank then stores
    only a part of some step, and sorting decides which pairs. With one-pass methods and padding, a
    query is compared with passages of similar length. Default: see `micro_batch_size`."""
    order: Order = "shuffled"
    """Order of the examples: random in each epoch (shuffled), or as in the training data (file).
    With `data.mixture`, `file` means that a step takes the next examples of its data sets, in
    random order within the step."""

    def conflicts(self, config: "TrainConfig", world: int) -> Iterator[str]:
        pairs = 1
        by_tokens = self.micro_batch_tokens is not None
        if not config.spec.single_micro_batch and not by_tokens and self.micro_batch_size != "auto":
            pairs = self.micro_batch_size
        if self.global_batch_size % (pairs * world):
            divisor = f"{world} processes"
            if pairs > 1:
                divisor = f"batch.micro_batch_size {pairs}"
                if world > 1:
                    divisor += f" x {world} processes = {pairs * world}"
            yield f"batch.global_batch_size {self.global_batch_size} is not divisible by {divisor}"


@dataclass
class BankConfig:
    """Memory bank of past embeddings, for methods that have a bank."""

    size: NonNegativeInt | None = None
    """Number of past pairs kept in the bank (M), with their hard negatives. The method
    `passage_bank` stores no queries. 0 disables the bank. Default: the pairs of one step
    (`batch.global_batch_size`)."""
    row_weight: Literal["all", "current"] = "all"
    """What divides the summed loss: the number of current and stored queries (all), or of current
    queries only (current)."""
    keep: bool = True
    """Keep the bank after an optimizer step. If false, the bank is emptied after each step."""
    warmup_steps: NonNegativeInt = 0
    """Number of optimizer steps at the start that fill the bank without using it."""
    age_decay: NonNegativeFloat = 0.0
    """Age penalty: if the query and the passage of a logit were encoded t optimizer steps apart,
    age_decay x t is subtracted from the logit. In the softmax, the logit then has the weight
    exp(-age_decay x t), so the weight is 1 if t is 0. The published method has age_decay 0."""

    def conflicts(self, config: "TrainConfig", world: int) -> Iterator[str]:
        size, push = config.bank_size(), config.bank_push(world)
        if 0 < size < push:
            yield (
                f"bank.size is {size}, but {config.method} can push {push} entries at once; use 0 "
                f"or at least {push}"
            )


@dataclass
class ReplayConfig:
    """Partial replay: the second pass of `grad_cache` and `cont_cache` encodes only some texts."""

    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the texts that the second pass encodes again (p). Texts with large gradients are
    preferred. The sampled gradients are weighted, and then shifted by one vector so that they have
    the same sum as the gradients of all texts. Below 1, a pair costs 1 + 3p forward passes, and
    training has no dropout. With p = 1, the gradient is exact."""

    def conflicts(self, config: "TrainConfig", world: int) -> Iterator[str]:
        if config.replay_share == 1:
            return
        for name, dropout in (
            ("model.dropout", config.model.dropout),
            ("model.attention_dropout", config.model.attention_dropout),
            ("lora.dropout", config.lora.dropout),
        ):
            if dropout:
                yield (
                    f"{name} is {dropout}, but partial replay (replay.share {self.share}) trains "
                    f"without dropout, because the second pass would draw new noise; set {name} 0"
                )


@dataclass
class LossConfig:
    """Negatives of the loss, and additional training targets."""

    mask_false_negatives: bool = True
    """Mask negatives whose text is known to be relevant for the query. This applies to the
    negatives of the batch and of the bank."""
    guide: str | None = setting(None, metavar="MODEL")
    """Encoder that finds false negatives: a folder or a name on the Hub. It may be the same encoder
    as in `model.name`. The guide scores the positive and the negatives (in-batch, hard and from the
    bank) of each query, and `false_negative_margin` (then 0 by default) compares its scores. The
    guide encodes all training queries and passages once. Its vectors are kept in the cache, in
    float16. Default: no guide."""
    false_negative_margin: float | None = None
    """Mask a negative if its score is above the positive's score minus this margin, see
    `margin_strategy`. A larger margin masks more negatives. The scores are those of `guide`.
    Without a guide, they are the similarities that the model computes in training, not divided by
    `model.temperature`. Default: no such mask without a guide."""
    margin_strategy: Literal["absolute", "relative"] = "absolute"
    """Meaning of `false_negative_margin`: a difference of scores (absolute), or a share of the
    positive's score (relative, from 0 to 1)."""
    matryoshka_dims: list[PositiveInt] = setting(factory=list)
    """Widths to which vectors may be truncated after training, such as [256, 128, 64]. The loss at
    each width is added to the loss of the full vectors. With cosine, truncated vectors are scaled
    to length 1 again. Each width has its own bank."""
    matryoshka_weights: list[PositiveFloat] = setting(factory=list)
    """Weight of the loss at each width of `matryoshka_dims`. The loss of the full vectors has
    weight 1. Default: 1 for each width."""
    distillation: Literal["none", "kl", "margin"] = "none"
    """Learn also from the scores that a teacher gives to the positive and the hard negatives of
    each query. The training data must contain these scores. `kl` is the KL divergence from the
    softmax of the teacher. `margin` is the squared error of score differences (margin-MSE). The
    scores of the model are similarities divided by `model.temperature`."""
    distillation_weight: PositiveFloat = 1.0
    """Weight of the distillation loss. The InfoNCE loss has weight 1."""
    teacher_temperature: PositiveFloat = 1.0
    """Number by which the scores of the teacher are divided."""

    def conflicts(self, config: "TrainConfig", world: int) -> Iterator[str]:
        dims, weights = len(self.matryoshka_dims), len(self.matryoshka_weights)
        if weights and weights != dims:
            yield (
                f"loss.matryoshka_weights has {weights} numbers, expected {dims}: one per width in "
                "matryoshka_dims"
            )
        margin = self.false_negative_margin or 0.0
        if self.margin_strategy == "relative" and not 0 <= margin <= 1:
            yield (
                f"loss.false_negative_margin is {margin}, expected a number from 0 to 1, because "
                "loss.margin_strategy is relative"
            )
        if self.distillation != "none" and not config.data.hard_negatives:
            yield (
                f"loss.distillation is {self.distillation}, but data.hard_negatives is 0; set it "
                "to at least 1, because the teacher's scores compare a positive with hard "
                "negatives"
            )


@dataclass
class OptimConfig:
    """AdamW, learning rate schedule, and length of the run."""

    name: Literal["adamw", "adamw_8bit"] = setting("adamw", resume="never")
    """Optimizer. `adamw_8bit` stores both moments in 8 bits, which takes a quarter of the memory.
    It needs the extra `bitsandbytes`."""
    learning_rate: NonNegativeFloat = 5e-5
    """Maximum learning rate, reached at the end of the warm-up."""
    epochs: PositiveFloat = 1.0
    """Number of passes over the training queries. If `max_steps` is given, this setting is
    ignored."""
    max_steps: PositiveInt | None = None
    """Total number of optimizer steps. Default: as many as `epochs` needs."""
    warmup_steps: Steps = 0
    """Number of steps in which the learning rate rises from 0 to its maximum. Below 1: share of all
    steps."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Learning rate after the warm-up: it falls to 0 (linear, cosine), or stays at its maximum
    (constant)."""
    max_grad_norm: PositiveFloat = 2.0
    """Maximum L2 norm of the gradients of both towers together. Larger gradients are clipped. 1e9
    clips none."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of all weights except biases and normalization weights."""
    adam_beta1: DecayRate = 0.9
    """Decay rate of the first moment of AdamW."""
    adam_beta2: DecayRate = 0.999
    """Decay rate of the second moment of AdamW."""
    adam_eps: PositiveFloat = 1e-8
    """Epsilon of AdamW."""
