"""Every setting of a training run, its meaning, unit and default. Imports no torch."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Literal

from contaccum.config.traits import TRAITS, MethodName, Traits
from contaccum.errors import InputError

METRIC_MEASURES = ("ndcg", "map", "recall", "precision", "mrr")
METRIC_CUTS = (1, 3, 5, 10, 20, 100)


@dataclass
class ModelConfig:
    """The two encoder towers and how their vectors are compared."""

    name: str = "bert-base-uncased"
    """Encoder folder or hub name for both towers, a folder that we trained, or `tiny`: a small BERT with random weights and a
    vocabulary learned from the training texts."""
    passage_name: str | None = None
    """Another encoder for the passage tower; the same as `name` when not given."""
    tie_towers: bool = False
    """Whether both towers share their weights."""
    pooling: Literal["cls", "mean", "last"] | None = None
    """How token vectors become one: first token, average, last token. Not given: what the encoder's folder says, else mean."""
    similarity: Literal["cosine", "dot"] | None = None
    """Inner product of unit vectors or of raw ones. Not given: what the encoder's folder says, else cosine."""
    temperature: float = 0.05
    """Similarities are divided by it in the loss; 0.05 suits cosine, 1 is the published setting for dot."""
    max_query_length: int | None = 64
    """Longest query, in tokens; the rest is cut."""
    max_passage_length: int | None = 256
    """Longest passage, in tokens; the rest is cut."""
    query_prefix: str | None = None
    """Text put before every query. Not given: what the encoder's folder says, else none."""
    passage_prefix: str | None = None
    """Text put before every passage. Not given: what the encoder's folder says, else none."""
    dropout: float | None = None
    """Dropout of both towers in training, a share between 0 and 1. Not given: what the encoder's own config says."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, half as much time again."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """How attention is computed; `auto` is what transformers chooses, SDPA where the family has it. `flash_attention_2` needs
    the package flash-attn, CUDA and half precision."""
    unpad: bool = False
    """Compute on no padding token: the texts of a micro-batch run end to end, attention stays within each. For BERT, RoBERTa,
    XLM-RoBERTa, CamemBERT, DistilBERT and ELECTRA; also while the dev set is encoded."""
    pack_linears: bool = False
    """On a CPU in fp32: multiply by weights that oneDNN has packed once an update, forwards and for the gradient of a layer's
    input. Less time on AMD's processors, equal to rounding; no effect on a GPU."""
    append_eos: bool | None = None
    """Whether texts end with the tokenizer's end-of-text token where it sets none itself; texts that are cut keep it. Not given:
    true where a decoder-only encoder that is no sentence-transformers model is pooled by its last token."""
    quantize: Literal["none", "4bit", "8bit"] = "none"
    """Hold the frozen base of adapters in few bits (needs `lora.rank` and the extra `bitsandbytes`): `4bit` is NF4 with doubly
    quantised scales, as in QLoRA, `8bit` is LLM.int8."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint. Only for sources that you trust."""
    tiny_layers: int = 2
    """Layers of the `tiny` encoder."""
    tiny_width: int = 128
    """Width of the `tiny` encoder, in numbers per vector; a multiple of 32."""
    tiny_vocabulary: int = 4000
    """Most word pieces in the `tiny` encoder's vocabulary."""


@dataclass
class AdapterConfig:
    """Low-rank adapters (LoRA): the encoders stay as they are, and small matrices beside their linear layers are trained.

    Tied towers have one adapter. Two towers from one encoder share it in memory and have an adapter each. Needs the extra `lora`.
    """

    rank: int = 0
    """Rank of the adapters' matrices (r); 0 trains all weights instead."""
    alpha: float | None = None
    """An adapter's output is multiplied by alpha / rank. Not given: twice the rank."""
    dropout: float = 0.0
    """Dropout of the adapters' inputs in training, a share between 0 and 1; `model.dropout` is that of the encoders."""
    target_modules: list[str] = field(default_factory=list)
    """Names of the linear layers that get an adapter, such as q_proj and v_proj. Not given: all of them."""

    def scale(self) -> float:
        """alpha, given or not."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


@dataclass
class MixtureConfig:
    """One of several data sets that are learned from together."""

    train: str = ""
    """Training data, in any form that `data.train` takes."""
    split: str = "train"
    """Which qrels of a BEIR folder, or split of a Hub set."""
    weight: float | None = None
    """Share of the examples, against the other sets' weights. Not given for any set: the number of its queries."""
    query_prefix: str | None = None
    """Text put before this set's queries in training. Not given: the model's."""
    passage_prefix: str | None = None
    """Text put before this set's passages in training. Not given: the model's."""


@dataclass
class DataConfig:
    """What is learned from, and what progress is measured on."""

    train: str = ""
    """Training data: BEIR folder, DPR JSON, JSONL of query/pos/neg, or Tevatron JSONL, gzipped or not; or a name: scifact,
    dpr/nq-train, miracl/sw, mteb/NFCorpus, hub:owner/name:configuration:split?query=COLUMN&pos=COLUMN&neg=COLUMN."""
    split: str = "train"
    """Which qrels of a BEIR folder to train on."""
    mixture: list[MixtureConfig] = field(default_factory=list)
    """Several data sets instead of `train`: a list of `train`, `split`, `weight`, `query_prefix`, `passage_prefix`. An epoch is
    as many examples as all of them have queries."""
    mixture_batches: Literal["mixed", "one_set"] = "mixed"
    """Whether a step takes its examples from all sets, or from one of them, drawn by weight."""
    streaming: bool = False
    """Read the examples of `train` as they are needed, and keep nothing of them on disk: for a file, or a set of the Hub, that is
    too large for the cache. Needs `optim.max_steps`; every process reads the whole stream."""
    shuffle_buffer: int = 10_000
    """Examples of a stream that are in memory at once: each that is learned from is drawn from as many, and the next one of the
    file takes its place. 1 is the file's own order."""
    dev: str | None = None
    """Data for evaluation during training, in any of the same forms. Not given: no evaluation, the last model is kept."""
    dev_split: str = "dev"
    """Which qrels of a BEIR folder to evaluate on during training."""
    hard_negatives: int = 0
    """Hard negatives per query (H); queries with fewer are filled up with random passages."""
    strict: bool = False
    """Refuse queries without a positive instead of skipping them with a warning."""
    repair: bool = False
    """Accept repeated ids (the last one counts) and empty passages, counted in a warning."""
    max_bad_records: int = 0
    """Records of each file that may be left out because they cannot be read; a warning names the file that lists them. The next
    one, or with 0 the first, is an error."""


@dataclass
class BatchConfig:
    """How many pairs make a step, and how many of them are in memory at once."""

    global_batch_size: int = 128
    """Pairs in one optimizer step, over all processes (N)."""
    micro_batch_size: int = 8
    """Pairs in one forward pass of one process (B); peak memory follows it. `in_batch` takes its whole step at once."""
    micro_batch_tokens: int | None = None
    """Padded tokens in one forward pass of one process, instead of `micro_batch_size`: B x (longest query + (1 + H) x longest
    passage) is at most this. A step's pairs are sorted by length and cut into as few micro-batches as fit, so that little is
    spent on padding; every pair weighs the same in the step's loss. `grad_cache` and `cont_cache` give the same gradients as
    with any other cut; in the one-pass methods a query meets passages of like length in its own micro-batch."""
    on_out_of_memory: Literal["shrink", "grow", "stop"] = "shrink"
    """What a run does when memory runs out in a step: `shrink` takes the step again with micro-batches of half the size and
    goes on with them, `grow` also tries the larger ones again after a while, `stop` ends the run. N stays; for `grad_cache`
    and `cont_cache` so do the gradients. On a CPU it needs a limit (ulimit -v): without one the system ends the process."""


@dataclass
class BankConfig:
    """The memory bank of past embeddings; read by the methods that have one."""

    size: int | None = None
    """Rows in the bank (M); 0 is legal. Not given: as many as a step has pairs (`batch.global_batch_size`), so that no row is
    older than one optimizer step."""
    visibility: Literal["immediate", "on_step"] = "immediate"
    """Whether stored rows are seen by the next micro-batch, or only after the optimizer step."""
    row_weight: Literal["all", "current"] = "all"
    """Whether the loss is the mean over current and bank rows, or is divided by the number of current rows."""
    queries: bool = True
    """Whether past queries are stored as further rows; without them `cont_accum` is `passage_bank`."""
    hard_negatives: bool = True
    """Whether hard negatives are stored too, as further columns."""
    keep: bool = True
    """Whether the bank lives on across optimizer steps; false empties it after each."""
    warmup_steps: int = 0
    """Optimizer steps during which the bank is filled but not used."""
    age_decay: float = 0.0
    """How much the logit of a row and a column falls for each optimizer step between their encodings: a column of age a weighs
    exp(-age_decay a) of a current one in the softmax. 0 is the published method."""


@dataclass
class OptimConfig:
    """AdamW, its schedule, and for how long."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps both moments in 8 bits (needs the extra `bitsandbytes`): a quarter of their memory."""
    fused: bool = True
    """One kernel updates all weights; false takes PyTorch's plain AdamW, the same to rounding."""
    learning_rate: float = 2e-5
    """Highest learning rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with `global_batch_size` over `reference_batch_size`."""
    reference_batch_size: int = 128
    """Pairs per step that `learning_rate` is meant for."""
    epochs: float = 1.0
    """Passes over the training queries; `max_steps` goes before it."""
    max_steps: int | None = None
    """Optimizer steps to take in all."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises from 0."""
    warmup_ratio: float | None = None
    """The same as a share of all steps."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How the learning rate falls to 0 after the warm-up, or does not."""
    max_grad_norm: float = 2.0
    """Gradients of both towers together are clipped to this L2 norm."""
    weight_decay: float = 0.0
    """Decay of all weights but biases and normalisation."""
    adam_beta1: float = 0.9
    """Decay rate of AdamW's first moment."""
    adam_beta2: float = 0.999
    """Decay rate of AdamW's second moment."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""


@dataclass
class LossConfig:
    """What counts as a negative, and what is learned besides."""

    mask_false_negatives: bool = True
    """Leave out columns whose passage is known to be relevant for the row, found by passage id, current and banked alike."""
    matryoshka_dims: list[int] = field(default_factory=list)
    """Widths below the encoder's at which vectors are to be of use too, such as [256, 128, 64]: the loss is the sum of those of
    the first so many numbers (of length 1 again with cosine) and of the whole vectors. Each has its part of the bank."""
    matryoshka_weights: list[float] = field(default_factory=list)
    """What the loss at each of `matryoshka_dims` counts for, beside 1 for the whole vectors. Not given: 1 each."""
    distillation: Literal["none", "kl", "margin"] = "none"
    """Learn a teacher's scores of a query's own positive and hard negatives too, which the training data must hold: `kl` by
    the divergence of the student's softmax over them from the teacher's, `margin` by the squared error of the differences
    between positive and negative (margin-MSE). The student's scores are its similarities over `model.temperature`."""
    distillation_weight: float = 1.0
    """What the distillation's loss counts for beside InfoNCE's 1."""
    teacher_temperature: float = 1.0
    """The teacher's scores are divided by it."""


@dataclass
class RunConfig:
    """Device, precision, checkpoints, evaluation and logging."""

    device: Literal["auto", "cpu"] = "auto"
    """`auto` takes CUDA, else MPS, else the CPU."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast precision of the encoders; weights and loss stay in fp32."""
    tf32: bool = False
    """Let CUDA multiply fp32 matrices, the loss's among them, in TF32: faster, with 10 bits of mantissa instead of 23."""
    compile: Literal["off", "default", "cuda_graphs"] = "off"
    """Compile the encoders for training with torch.compile: `default`, or `cuda_graphs` (CUDA only), which also replays the
    kernels of each length as one graph. The first steps take minutes."""
    memory_budget: str | None = None
    """Most memory that torch may allocate on each GPU, such as 11GB (GB and MB are 10^9 and 10^6 bytes, GiB and MiB 2^30 and
    2^20); CUDA's own few hundred MB come on top. No effect on a CPU."""
    save_steps: int = 500
    """A checkpoint every so many steps, and one at the end; 0 for the end alone."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    eval_steps: int = 0
    """Evaluate on `data.dev` every so many steps, and at the end; 0 for the end alone."""
    metric: str = "ndcg@10"
    """The dev metric that decides which model is kept."""
    eval_batch_tokens: int | None = None
    """Tokens in one forward pass of an evaluation, padding counted. Not given: 1024 for each thread on a CPU,
    else 16384."""
    timeout_minutes: float = 30.0
    """Minutes that one of several processes waits for the others before it gives up and ends the run; the longest wait is for
    the main process to prepare the data."""
    bank_check_steps: int = 100
    """Compare the hashes of all processes' banks every so many steps and before each checkpoint, and stop where they differ; 0:
    never."""
    log_steps: int = 1
    """Write a line to log.jsonl and the trackers every so many steps."""
    on_nan: str = "stop"
    """When an embedding, the loss or a gradient is NaN or infinite: `stop`, or `skip:N` to drop such steps, up to N in a run."""
    drift_steps: int = 10
    """Measure every so many steps how far a sample of the bank's vectors has drifted from what the encoders give now; 0 for
    never. Changes no result."""
    trackers: list[str] = field(default_factory=list)
    """Further logs, by accelerate's names, e.g. tensorboard (needs the extra `tensorboard`) or wandb."""


@dataclass
class TrainConfig:
    """A whole training run."""

    method: MethodName = "cont_accum"
    """Memory method: in_batch, grad_accum, grad_cache, passage_bank, cont_accum or cont_cache."""
    seed: int = 0
    """Decides weights, order, choice of positives and negatives, and dropout."""
    output_dir: str = ""
    """Folder of the run; must be new or empty unless `resume` is given."""
    resume: bool = False
    """Continue the run in `output_dir` from its newest checkpoint."""
    allow_changes: bool = False
    """With `resume`: go on although settings, data, tokenizer, encoder or the number of processes differ from the run's; the
    differences are printed. What decided the encoders' weights, `lora` and `optim.name` cannot change. Where B x W stays the
    same, another number of processes changes the result by rounding alone."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    bank: BankConfig = field(default_factory=BankConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def traits(self) -> Traits:
        return TRAITS[self.method]

    def micro_batch_size(self, world: int) -> int:
        """Pairs in one forward pass of one of ``world`` processes."""
        return self.batch.global_batch_size // world if self.traits.whole else self.batch.micro_batch_size

    @property
    def distils(self) -> bool:
        """Whether a teacher's scores are learned."""
        return self.loss.distillation != "none"

    @property
    def bank_rows(self) -> int:
        """Rows in the bank of a method that has one."""
        return self.batch.global_batch_size if self.bank.size is None else self.bank.size

    def bank_size(self) -> int:
        """Rows in the bank that this method uses."""
        return 0 if self.traits.bank == "none" else self.bank_rows

    @property
    def micro_batch_tokens(self) -> int | None:
        """Padded tokens in one forward pass; None where micro-batches are counted in pairs."""
        return None if self.traits.whole else self.batch.micro_batch_tokens

    def bank_push(self, world: int) -> int:
        """Most rows that may enter the bank at once."""
        if self.traits.pushes_whole_step or self.micro_batch_tokens is not None:
            return self.batch.global_batch_size
        return self.micro_batch_size(world) * world

    def usual_push(self, world: int, longest: int) -> int:
        """Rows that enter the bank at once as a rule; of micro-batches cut by tokens, those of the ``longest`` pairs."""
        if self.traits.pushes_whole_step or self.micro_batch_tokens is None:
            return self.bank_push(world)
        return min(self.batch.global_batch_size, max(1, self.micro_batch_tokens // longest) * world)

    def learning_rate(self) -> float:
        """Highest learning rate, scaled to the global batch."""
        ratio = self.batch.global_batch_size / self.optim.reference_batch_size
        return self.optim.learning_rate * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.optim.lr_scaling]

    def skips(self) -> int:
        """How many steps may be dropped in a run because their numbers are not finite."""
        word, colon, number = self.run.on_nan.partition(":")
        if (word, colon, number) == ("stop", "", ""):
            return 0
        if word != "skip" or not number.isascii() or not number.isdigit() or int(number) < 1:
            raise InputError(f"run.on_nan is {self.run.on_nan!r}, expected stop, or skip:N with N at least 1")
        return int(number)


GROUPS = tuple(each.name for each in fields(TrainConfig) if is_dataclass(getattr(TrainConfig(), each.name)))
"""The settings that are groups of settings."""
