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
    batch_size: int = 64
    """Texts in one forward pass."""
    factory: str = "Flat"
    """`Flat` is exact; else any index_factory string of faiss, such as IVF1024,Flat or HNSW32."""
    backend: Literal["auto", "faiss", "torch"] = "auto"
    """Library for the exact search; `auto` takes what the machine has."""
    search_params: str = ""
    """What trades speed for recall in an approximate index, such as nprobe=16 or efSearch=128."""
    seed: int = 0
    """Draws the rows that an approximate index is trained on."""
