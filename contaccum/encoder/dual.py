"""Two towers and their similarity: DualEncoder, loaded from and saved as plain encoder folders.

Each tower's folder is what ``AutoModel.from_pretrained`` and ``SentenceTransformer`` read: weights in safetensors, tokenizer,
pooling, normalisation, prefix. ``contaccum.json`` beside the two folders holds what belongs to the pair.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.utils import is_flash_attn_2_available

from contaccum.batch import MicroBatch, Tokens
from contaccum.encoder.adapters import Adapters, few_bits, own_dropouts
from contaccum.encoder.folder import save_encoder
from contaccum.encoder.inference import PACK_FROM, WINDOW, default_batch_tokens, token_batches
from contaccum.encoder.loading import Loading
from contaccum.encoder.packed import pack_linears, packed_linears, weights_changed
from contaccum.encoder.settings import EncoderSettings, make_settings
from contaccum.encoder.sources import read_encoder
from contaccum.encoder.tower import Tower, check_length, check_unpad, position_limit, set_attention
from contaccum.encoder.unpadded import ATTENTION
from contaccum.errors import InputError
from contaccum.files import whole_folder
from contaccum.prefetch import Prefetch

BUCKET = 32
"""Tokens between the lengths for which graphs are recorded."""


DROPOUT_NUMBERS = ("attention_dropout", "activation_dropout", "hidden_dropout", "dropout", "dropout_prob")
"""Under these names some families' modules hold a dropout probability as a plain number."""


class DualEncoder(nn.Module):
    """Query tower and passage tower; scores are inner products of their vectors (unit vectors when similarity is cosine)."""

    def __init__(self, query_tower: Tower, passage_tower: Tower, settings: EncoderSettings) -> None:
        super().__init__()
        if query_tower.dim != passage_tower.dim:
            raise InputError(
                f"query tower is {query_tower.dim} wide and passage tower {passage_tower.dim}, expected the same width"
            )
        self.query_tower = query_tower
        self.passage_tower = passage_tower
        self.settings = settings
        self.graphs = False
        """Whether training replays CUDA graphs, which own the memory that they write to."""
        self.recomputes = False
        """Whether activations are recomputed in the backward pass."""
        if self.dim > query_tower.dim:
            raise InputError(f"truncate_dim is {self.dim}, expected at most the encoder's {query_tower.dim}")
        for side, length in (("query", settings.max_query_length), ("passage", settings.max_passage_length)):
            check_length(getattr(self, f"{side}_tower").backbone.config, side, length)

    @property
    def dim(self) -> int:
        """Width of the embeddings."""
        kept = self.settings.truncate_dim
        return self.query_tower.dim if kept is None else kept

    @property
    def towers(self) -> list[Tower]:
        """Both towers, or the one that both sides share."""
        return list(dict.fromkeys((self.query_tower, self.passage_tower)))

    @property
    def adapted(self) -> bool:
        """Whether a tower is an adapter beside a frozen base."""
        return any(tower.base is not None for tower in self.towers)

    @property
    def similarity(self) -> str:
        return self.settings.similarity

    @property
    def device(self) -> torch.device:
        return next(self.query_tower.parameters()).device

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Embeddings of one micro-batch: queries (B, d) and passages (B, 1 + H, d), in float32."""
        queries = self.embed(self.query_tower, batch.queries)  # (B, d)
        passages = self.embed(self.passage_tower, batch.passages)  # (B * (1 + H), d)
        return queries, passages.view(len(queries), -1, passages.shape[-1])

    def embed(self, tower: Tower, tokens: Tokens) -> Tensor:
        """Vectors of tokenised texts, (n, d) float32; of length 1 when similarity is cosine."""
        vectors = tower(tokens).float()[:, : self.dim]
        return F.normalize(vectors, dim=-1) if self.settings.similarity == "cosine" else vectors

    def encode_queries(self, texts: list[str], batch_tokens: int | None = None, progress: bool = False) -> np.ndarray:
        """Embeddings of query texts, float32 of shape (n, d); the prefix is put before each text.

        batch_tokens: tokens in one forward pass, padding counted; not given, 1024 for each thread on a CPU and
        16384 elsewhere.
        """
        texts = [self.settings.query_prefix + text for text in texts]
        return self._encode(self.query_tower, texts, self.settings.max_query_length, batch_tokens, progress)

    def encode_passages(self, texts: list[str], batch_tokens: int | None = None, progress: bool = False) -> np.ndarray:
        """Embeddings of passage texts, float32 of shape (n, d); the prefix is put before each text.

        batch_tokens: as for queries.
        """
        texts = [self.settings.passage_prefix + text for text in texts]
        return self._encode(self.passage_tower, texts, self.settings.max_passage_length, batch_tokens, progress)

    @torch.inference_mode()
    def _encode(
        self, tower: Tower, texts: list[str], max_length: int, batch_tokens: int | None, progress: bool
    ) -> np.ndarray:
        budget = default_batch_tokens(self.device) if batch_tokens is None else batch_tokens
        if budget < 1:
            raise InputError(f"batch_tokens is {budget}, expected at least 1")
        was_training = self.training
        self.eval()
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        with ExitStack() as stack:
            stack.callback(self.train, was_training)
            if len(texts) >= PACK_FROM:
                stack.enter_context(packed_linears(tower.backbone))
            bar = stack.enter_context(tqdm(total=len(texts), unit="text", disable=None if progress else True))
            batches = stack.enter_context(Prefetch(_tokenised(tower.tokenizer, texts, max_length, budget), depth=16))
            for places, tokens in batches:
                vectors[places] = self.embed(tower, tokens.to(self.device)).cpu().numpy()
                bar.update(len(places))
        return vectors

    def fingerprint(self, kind: str) -> str:
        """Hash of all that decides the vectors of one side, ``query`` or ``passage``: weights, vocabulary, settings."""
        tower: Tower = getattr(self, f"{kind}_tower")
        digest = hashlib.sha256()
        weights = {**tower.backbone.state_dict(), **tower.dense.state_dict(prefix="dense.")}
        for name, tensor in sorted(weights.items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        tokenizer = json.loads(tower.tokenizer.backend_tokenizer.to_str())
        # these two change with every call of the tokenizer and say nothing of the texts' tokens
        digest.update(json.dumps({**tokenizer, "truncation": None, "padding": None}, sort_keys=True).encode())
        names = ("pooling", "similarity", f"max_{kind}_length", f"{kind}_prefix")
        values = [getattr(self.settings, name) for name in names]
        if self.settings.truncate_dim is not None:
            values.append(self.settings.truncate_dim)
        digest.update(json.dumps(values).encode())
        return digest.hexdigest()

    def set_dropout(self, share: float) -> None:
        """Replace every dropout probability of both backbones; what is saved keeps the encoder's own."""
        for tower in self.towers:
            for dropout in own_dropouts(tower):
                dropout.p = share
        for module in self.modules():
            for name in DROPOUT_NUMBERS:
                if isinstance(getattr(module, name, None), (int, float)):
                    setattr(module, name, share)

    def set_attention(self, name: str, unpad: bool = False) -> None:
        """Choose the attention of both backbones: ``eager``, ``sdpa``, ``flash_attention_2``, or ``auto`` (what transformers
        chose: SDPA where the family has it). With ``unpad`` no padding is computed on. Raises InputError where it cannot be.
        """
        if name == "flash_attention_2":
            self._check_flash_attention()
        for tower in self.towers:
            if unpad:
                check_unpad(tower)
            tower.unpad = unpad
            # unpadded passes take FlashAttention from its package when it is asked for, else PyTorch's own
            chosen = ATTENTION if unpad and name != "flash_attention_2" else name
            if chosen != "auto":
                set_attention(tower.backbone, chosen)

    def _check_flash_attention(self) -> None:
        if not is_flash_attn_2_available():
            raise InputError(
                "model.attention is flash_attention_2, which needs the package flash-attn and a CUDA device (pip install "
                "flash-attn --no-build-isolation); model.attention auto uses the FlashAttention that comes with PyTorch"
            )
        if self.device.type != "cuda":
            raise InputError(f"model.attention is flash_attention_2 on {self.device.type}, expected a CUDA device")

    def pack_linears(self) -> int:
        """Let the linear layers of both backbones run packed on a CPU (contaccum.encoder.packed); returns how many do."""
        return sum(len(pack_linears(tower.backbone)) for tower in self.towers)

    def weights_changed(self) -> None:
        """To be called after each step of an optimizer: packed layers take their weights anew."""
        for tower in self.towers:
            weights_changed(tower.backbone)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Multiply in this precision where a base is held in 4 bits; the rest is autocast's to say."""
        for layer in few_bits(self):
            layer.compute_dtype = dtype

    def compile_backbones(self, graphs: bool = False) -> None:
        """Compile both backbones for training; with ``graphs`` the kernels of each length are replayed as one CUDA graph.

        Lengths are dynamic, so that one compilation serves all. A graph is recorded per length, so with ``graphs`` lengths are
        padded to multiples of BUCKET tokens. The weights keep their names; evaluation is not compiled.
        """
        self.graphs = graphs
        for tower in self.towers:
            tower.bucket = BUCKET if graphs else 1
            mode = "reduce-overhead" if graphs else None
            tower.compiled = torch.compile(tower.backbone.forward, dynamic=True, mode=mode)

    def has_dropout(self) -> bool:
        """Whether two passes over one text in training may differ: any dropout is above 0, plain numbers of layers included."""
        return any(
            (isinstance(module, nn.Dropout) and module.p > 0)
            or any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
            for module in self.modules()
        )

    def gradient_checkpointing_enable(self) -> None:
        """Trade time for memory: activations inside the backbones are recomputed in the backward pass, dropout replayed."""
        for tower in self.towers:
            backbone = tower.backbone  # transformers 5 renamed the switch
            enable = getattr(backbone, "activation_checkpointing_enable", backbone.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        self.recomputes = True

    def save(self, folder: str | Path) -> None:
        """Write ``query_encoder/``, ``passage_encoder/`` and what makes one of them for us and for sentence-transformers.

        The folder appears whole or not at all.
        """
        with whole_folder(folder) as part:
            save_encoder(self.query_tower, self.passage_tower, self.settings, part)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        passage_name: str | Path | None = None,
        tie_towers: bool | None = None,
        trust_remote_code: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        append_eos: bool | None = None,
        adapters: Adapters | None = None,
        merge: bool = False,
        **overrides: Any,
    ) -> "DualEncoder":
        """Load what we saved, any sentence-transformers model, or any encoder, from a folder or by hub name.

        ``overrides`` are fields of EncoderSettings; one that is None keeps what the folder says. With ``tie_towers`` both
        sides share their weights; without it they start equal and part in training. Where the folder does not say otherwise
        one encoder for both sides is tied, since nothing can tell its towers apart before training.

        append_eos: whether texts end with the end-of-text token where the tokenizer sets none; not given, as
        ``contaccum.config.ModelConfig`` says. adapters: what is trained beside the encoders, which are then frozen; towers from
        one encoder share it in memory. merge: add adapters that the folder holds to the weights; those of a base in few bits are
        widened first.
        """
        unknown = set(overrides) - {field.name for field in fields(EncoderSettings)}
        assert not unknown, f"no such encoder setting: {unknown}"
        found, query_source, passage_source = read_encoder(str(name))
        if passage_name is not None:
            passage_source = read_encoder(str(passage_name)).passage
        given = {key: value for key, value in overrides.items() if value is not None}
        tied = tie_towers if tie_towers is not None else passage_name is None and found.get("tie_towers", True)
        settings = make_settings({**found, **given, "tie_towers": tied}, str(name))
        if tied and passage_name is not None:
            raise InputError(f"passage_name {passage_name} was given with tied towers, expected one or the other")
        if tied and passage_source != query_source:
            raise InputError(f"{name}: holds two towers, expected one to be tied")
        loading = Loading(settings.pooling, trust_remote_code, dtype, append_eos, adapters, merge, device)
        query_tower, passage_tower = loading.towers(query_source, query_source if tied else passage_source, tied)
        for key, tower in (("max_query_length", query_tower), ("max_passage_length", passage_tower)):
            limit = position_limit(tower.backbone.config)
            if (
                key in found and key not in given and limit is not None
            ):  # some folders promise more than their weights have
                settings = replace(settings, **{key: min(getattr(settings, key), limit)})
        return cls(query_tower, passage_tower, settings).to(device).eval()


def _tokenised(tokenizer: Any, texts: list[str], max_length: int, budget: int) -> Iterator[tuple[np.ndarray, Tokens]]:
    """Batches of at most ``budget`` tokens with the texts' places; texts are sorted by length, a window of them at a time."""
    for start in range(0, len(texts), WINDOW):
        rows = tokenizer(
            texts[start : start + WINDOW], truncation=True, max_length=max_length, return_token_type_ids=False
        )
        for chosen in token_batches([len(row) for row in rows["input_ids"]], budget):
            batch = {name: [values[index] for index in chosen] for name, values in rows.items()}
            padded = tokenizer.pad(batch, return_tensors="pt")
            yield start + np.array(chosen), Tokens(padded["input_ids"], padded["attention_mask"])
