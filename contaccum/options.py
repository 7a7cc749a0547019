"""What encoding, searching and evaluating can be told. Imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelChoice:
    """Which encoder, and what to use instead of what its folder says."""

    model: str
    """A folder that we trained, any encoder folder, a hub name, or `bm25` for the lexical baseline."""
    pooling: Literal["cls", "mean", "last"] | None = None
    """How token vectors become one. Not given: what the folder says, else mean."""
    similarity: Literal["cosine", "dot"] | None = None
    """Inner product of unit vectors or of raw ones. Not given: what the folder says, else cosine."""
    max_query_length: int | None = None
    """Longest query, in tokens. Not given: what the folder says, else 64."""
    max_passage_length: int | None = None
    """Longest passage, in tokens. Not given: what the folder says, else 256."""
    query_prefix: str | None = None
    """Text put before every query. Not given: what the folder says, else none."""
    passage_prefix: str | None = None
    """Text put before every passage. Not given: what the folder says, else none."""
    truncate_dim: int | None = None
    """Keep so many of each vector's first numbers (of length 1 again with cosine), for a smaller index: meant for models trained
    at that width (`loss.matryoshka_dims`). Not given: what the folder says, else all."""
    device: Literal["auto", "cpu"] = "auto"
    """`auto` takes CUDA, else MPS, else the CPU."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the encoder's weights and arithmetic."""
    timeout_minutes: float = 30.0
    """Minutes that one of several processes waits for the others before it gives up."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint. Only for sources that you trust."""


@dataclass(frozen=True)
class SearchSettings:
    """How a corpus is encoded and searched."""

    embeddings: str | None = None
    """Folder that keeps the passages' vectors as shards and gives those it has. Not given: in memory, in float32."""
    dtype: Literal["float16", "float32"] = "float32"
    """Form of the vectors in the folder."""
    batch_tokens: int | None = None
    """Tokens in one forward pass, padding counted; a longer text passes alone. Not given: 1024 for each thread
    on a CPU, else 16384."""
    factory: str = "Flat"
    """`Flat` is exact; else any index_factory string of faiss, such as IVF1024,Flat, IVF1024,SQfp16 (half the
    memory) or HNSW32."""
    index_dir: str | None = None
    """Folder that keeps an approximate index: built at the first search, read at the next ones. Not given: built every time."""
    backend: Literal["auto", "faiss", "torch"] = "auto"
    """Library for the exact search; `auto` takes what the machine has."""
    search_params: str = ""
    """What trades speed for recall in an approximate index, such as nprobe=16 or efSearch=128."""
    seed: int = 0
    """Draws the rows that an approximate index is trained on."""


@dataclass(frozen=True)
class MineSettings:
    """Which of the passages that a search finds for a query become its hard negatives.

    Candidates are the best `range_max` passages for a query without its known positives, passages of the same text as one of
    those or as the query, and passages whose text stood higher. Filters leave some of them; of these the first `range_min` are
    passed over, and `num_negatives` of the rest are taken. The names are those of sentence-transformers' mine_hard_negatives.
    """

    num_negatives: int = 5
    """Negatives for each query; one for which the filters leave fewer gets fewer."""
    range_min: int = 0
    """How many of the best candidates that the filters leave are passed over."""
    range_max: int = 100
    """Candidates for each query."""
    relative_margin: float | None = None
    """A candidate must score lower than the positive by this share of the positive's score: 0.05 keeps what scores at most 95 %
    of it. Of several positives the one that scores lowest counts."""
    absolute_margin: float | None = None
    """A candidate must score lower than the positive by at least this."""
    max_score: float | None = None
    """Highest score of a negative."""
    min_score: float | None = None
    """Lowest score of a negative."""
    sampling_strategy: Literal["top", "random"] = "top"
    """Which of the candidates that are left: the best, or as many drawn at random, all equally likely."""
    cross_encoder: str | None = None
    """Cross-encoder (folder or hub name) that scores candidates and positives anew, before the filters and in place of the
    search's scores. Needs the package sentence-transformers (extra `mine`)."""
    cross_encoder_batch_size: int = 32
    """Pairs of query and passage in one forward pass of the cross-encoder."""
    seed: int = 0
    """Draws the negatives of `sampling_strategy random`, and the rows that an approximate index is trained on."""
    block_size: int = 16_384
    """Queries searched at a time: memory holds their candidates, and a kill loses no more than one block."""


@dataclass(frozen=True)
class RoundsOptions:
    """How often `contaccum rounds` trains and mines."""

    count: int = 1
    """Rounds after the first training, each of mining with the model before and training with what was mined."""
    first: Literal["data", "bm25"] = "data"
    """Hard negatives of the first training: those of the data (random passages where it lists too few), or mined by BM25."""
    start: Literal["base", "previous"] = "base"
    """Whether each training starts from `model.name`, or from the model of the round before."""


@dataclass(frozen=True)
class StudyOptions:
    """What `contaccum compare` runs, and what it weighs."""

    methods: str = ""
    """Memory methods, separated by commas. Not given: the config's own."""
    seeds: int = 3
    """Runs of each setting: with the config's seed and the ones after it."""
    vary: tuple[str, ...] = ()
    """Settings to vary, each as GROUP.FIELD=v1,v2; every combination is run with every method that reads the setting."""
    test: str | None = None
    """Data that every trained model is scored on: BEIR folder or name. Not given: `data.train`."""
    test_split: str = "test"
    """Which qrels of it."""
    baselines: str = "bm25,untrained"
    """Rows without training, separated by commas: bm25, untrained (the encoder that training starts from), or none."""
    against: str | None = None
    """The method that the others are tested against. Not given: grad_cache where it is among them, else the first."""
    tune_learning_rate: str = ""
    """Rates to choose from, separated by commas: each setting takes the one that is best on `data.dev` with the first seed."""
    parallel: int | None = None
    """Runs at a time. Not given: one a GPU, or one on a CPU."""


@dataclass(frozen=True)
class ExploreOptions:
    """What `contaccum explore` puts beside each other, and where it is served."""

    models: tuple[str, ...]
    """Folders that we trained, encoder folders, hub names, or `bm25`: one, or several of which any two are seen at once."""
    data: str
    """BEIR folder or name, corpus.jsonl or passages TSV."""
    split: str = "test"
    """Whose judged queries are listed and marked; data without judgements needs none."""
    k: int = 100
    """Passages in the ranking of a judged query, which the metrics and the ranks of judged passages are taken from."""
    embeddings: tuple[str, ...] = ()
    """Folders that `contaccum encode` wrote, each used for the model that made it. Vectors that none of them has are kept in the
    cache."""
    host: str = "127.0.0.1"
    """Address to listen on. The default is seen from this machine alone; there is no password."""
    port: int = 7860
    """Port to listen on."""
