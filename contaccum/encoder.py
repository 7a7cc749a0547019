"""Two towers, pooling and similarity: DualEncoder, loaded from and saved as plain encoder folders.

Each tower's folder is what ``AutoModel.from_pretrained`` and ``SentenceTransformer`` read: weights in safetensors, tokenizer,
pooling, normalisation, prefix. ``contaccum.json`` beside the two folders holds what belongs to the pair.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer
from transformers.utils import cached_file, is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from contaccum.batch import MicroBatch, Tokens
from contaccum.errors import InputError
from contaccum.files import read_json, whole_folder, write_json
from contaccum.inference import PACK_FROM, WINDOW, default_batch_tokens, packed_linears, token_batches
from contaccum.prefetch import Prefetch
from contaccum.unpadded import ATTENTION, FAMILIES, first_position, token_states

SETTINGS_FILE = "contaccum.json"
TOWERS = ("query_encoder", "passage_encoder")
POOLINGS = ("cls", "mean", "last")
SIMILARITIES = ("cosine", "dot")
BUCKET = 32
"""Tokens between the lengths for which graphs are recorded."""
DROPOUT_NUMBERS = ("attention_dropout", "activation_dropout", "hidden_dropout", "dropout", "dropout_prob")
"""Under these names some families' modules hold a dropout probability as a plain number."""


@dataclass(frozen=True)
class EncoderSettings:
    """What turns token vectors into scores, besides the weights."""

    pooling: str = "mean"
    similarity: str = "cosine"
    max_query_length: int = 64
    max_passage_length: int = 256
    query_prefix: str = ""
    passage_prefix: str = ""
    tie_towers: bool = False


def pool(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """One vector per text from its token vectors.

    states (n, length, d); mask (n, length), 0 at padding, which may stand on either side. cls: the first token that is no
    padding; last: the last one; mean: the average over all of them. Returns (n, d).
    """
    if pooling == "mean":
        weights = mask.unsqueeze(-1).to(states.dtype)  # (n, length, 1)
        return (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    first = mask.argmax(1)  # (n,)
    position = first if pooling == "cls" else first + mask.sum(1) - 1
    return states[torch.arange(len(states), device=states.device), position]


class Tower(nn.Module):
    """A backbone with its tokenizer: token ids in, one vector per text out."""

    def __init__(self, backbone: Any, tokenizer: Any, pooling: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.unpad = False
        self.compiled: Callable[..., Any] | None = None
        self.bucket = 1  # compiled passes see lengths that are multiples of it
        # BERT's own pooler takes no part here; frozen, it is saved as it came and costs neither gradient nor optimizer state
        if getattr(backbone, "pooler", None) is not None:
            backbone.pooler.requires_grad_(False)

    def forward(self, tokens: Tokens) -> Tensor:
        return pool(self._states(tokens), tokens.attention_mask, self.pooling)  # (n, d)

    def _states(self, tokens: Tokens) -> Tensor:
        """Token vectors (n, length, d)."""
        if self.unpad:
            return token_states(self.backbone, tokens)
        ids, mask = tokens.input_ids, tokens.attention_mask
        if self.compiled is None or not self.training:  # evaluation runs seldom: it would not earn its own compilation
            return self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        length = ids.shape[1]
        limit = self.backbone.config.max_position_embeddings - first_position(self.backbone.config)
        extra = min(-(-length // self.bucket) * self.bucket, limit) - length
        ids = F.pad(ids, (0, extra), value=self.tokenizer.pad_token_id)
        return self.compiled(input_ids=ids, attention_mask=F.pad(mask, (0, extra))).last_hidden_state[:, :length]


class DualEncoder(nn.Module):
    """Query tower and passage tower; scores are inner products of their vectors (unit vectors when similarity is cosine)."""

    def __init__(self, query_tower: Tower, passage_tower: Tower, settings: EncoderSettings) -> None:
        super().__init__()
        if query_tower.backbone.config.hidden_size != passage_tower.backbone.config.hidden_size:
            raise InputError(
                f"query tower is {query_tower.backbone.config.hidden_size} wide and passage tower "
                f"{passage_tower.backbone.config.hidden_size}, expected the same width"
            )
        self.query_tower = query_tower
        self.passage_tower = passage_tower
        self.settings = settings
        self.graphs = False
        """Whether training replays CUDA graphs, which own the memory that they write to."""
        self.recomputes = False
        """Whether activations are recomputed in the backward pass."""
        for side, length in (("query", settings.max_query_length), ("passage", settings.max_passage_length)):
            _check_length(getattr(self, f"{side}_tower").backbone.config, side, length)

    @property
    def dim(self) -> int:
        """Width of the embeddings."""
        return int(self.query_tower.backbone.config.hidden_size)

    @property
    def towers(self) -> list[Tower]:
        """Both towers, or the one that both sides share."""
        return list(dict.fromkeys((self.query_tower, self.passage_tower)))

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
        vectors = tower(tokens).float()
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
        for name, tensor in sorted(tower.backbone.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        tokenizer = json.loads(tower.tokenizer.backend_tokenizer.to_str())
        # these two change with every call of the tokenizer and say nothing of the texts' tokens
        digest.update(json.dumps({**tokenizer, "truncation": None, "padding": None}, sort_keys=True).encode())
        names = ("pooling", "similarity", f"max_{kind}_length", f"{kind}_prefix")
        digest.update(json.dumps([getattr(self.settings, name) for name in names]).encode())
        return digest.hexdigest()

    def set_dropout(self, share: float) -> None:
        """Replace every dropout probability of both backbones; what is saved keeps the encoder's own."""
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = share
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
                _check_unpad(tower)
            tower.unpad = unpad
            # unpadded passes take FlashAttention from its package when it is asked for, else PyTorch's own
            chosen = ATTENTION if unpad and name != "flash_attention_2" else name
            if chosen != "auto":
                _set_attention(tower.backbone, chosen)

    def _check_flash_attention(self) -> None:
        if not is_flash_attn_2_available():
            raise InputError(
                "model.attention is flash_attention_2, which needs the package flash-attn and a CUDA device (pip install "
                "flash-attn --no-build-isolation); model.attention auto uses the FlashAttention that comes with PyTorch"
            )
        if self.device.type != "cuda":
            raise InputError(f"model.attention is flash_attention_2 on {self.device.type}, expected a CUDA device")

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
        """Write ``query_encoder/``, ``passage_encoder/`` and ``contaccum.json``; the folder appears whole or not at all."""
        with whole_folder(folder) as part:
            for name, tower in zip(TOWERS, (self.query_tower, self.passage_tower), strict=True):
                _save_tower(tower, self.settings, part / name)
            write_json(part / SETTINGS_FILE, asdict(self.settings))

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
        **overrides: Any,
    ) -> "DualEncoder":
        """Load a folder that we saved, or any encoder folder or hub name (then both towers are that encoder).

        ``overrides`` are fields of EncoderSettings; one that is None keeps what the folder says. With ``tie_towers`` both
        sides share their weights; without it they start equal and part in training. A plain folder is tied unless asked
        otherwise, since nothing can tell its towers apart before training.
        """
        unknown = set(overrides) - {field.name for field in fields(EncoderSettings)}
        assert not unknown, f"no such encoder setting: {unknown}"
        ours = (Path(name) / SETTINGS_FILE).is_file()
        found = read_json(Path(name) / SETTINGS_FILE) if ours else sentence_transformers_settings(str(name))
        given = {key: value for key, value in overrides.items() if value is not None}
        tied = tie_towers if tie_towers is not None else found.get("tie_towers", passage_name is None)
        settings = make_settings({**found, **given, "tie_towers": tied}, str(name))
        sources = [str(Path(name) / tower) for tower in TOWERS] if ours else [str(name), str(name)]
        if passage_name is not None:
            if tied:
                raise InputError(f"passage_name {passage_name} was given with tied towers, expected one or the other")
            sources[1] = str(passage_name)
        query_tower = load_tower(sources[0], settings.pooling, trust_remote_code, dtype)
        if tied:
            passage_tower = query_tower
        elif sources[1] == sources[0]:
            passage_tower = copy.deepcopy(query_tower)
        else:
            passage_tower = load_tower(sources[1], settings.pooling, trust_remote_code, dtype)
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


def make_settings(values: dict[str, Any], source: str) -> EncoderSettings:
    """EncoderSettings from a mapping, or InputError naming ``source`` and the value that is not allowed."""
    for key, allowed in (("pooling", POOLINGS), ("similarity", SIMILARITIES)):
        if key in values and values[key] not in allowed:
            raise InputError(f"{source}: {key} is {values[key]!r}, expected one of {', '.join(allowed)}")
    try:
        return EncoderSettings(**values)
    except TypeError as error:
        raise InputError(f"{source}: {SETTINGS_FILE} holds a setting that is not known ({error})") from error


def load_tower(name: str, pooling: str, trust_remote_code: bool = False, dtype: torch.dtype = torch.float32) -> Tower:
    """Backbone and tokenizer of an encoder folder or hub name; half-precision weights are widened to ``dtype``."""
    try:
        with quiet_transformers():
            backbone = AutoModel.from_pretrained(
                name, trust_remote_code=trust_remote_code, dtype=dtype, use_safetensors=True
            )
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{name}: no encoder could be loaded from this folder or hub name ({reason})") from error
    for key in ("is_local", "local_files_only"):  # how it was loaded, which would be saved with it
        tokenizer.init_kwargs.pop(key, None)
    if tokenizer.pad_token is None:  # decoder-only families: padding is masked, so any token will do
        tokenizer.pad_token = tokenizer.eos_token
    return Tower(backbone, tokenizer, pooling)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no remarks on unused pooler weights while a tower is loaded or saved."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def sentence_transformers_settings(name: str) -> dict[str, Any]:
    """Pooling, similarity, length and prompts of a sentence-transformers folder or hub name; empty for any other encoder."""
    modules = _optional_json(name, "modules.json")
    if modules is None:
        return {}
    about = _optional_json(name, "config_sentence_transformers.json") or {}
    # their own default where a model neither normalises nor says otherwise
    settings: dict[str, Any] = {
        "similarity": "dot" if about.get("similarity_fn_name") in ("dot", "dot_score") else "cosine"
    }
    for module in modules:
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            settings["pooling"] = _pooling_of(_optional_json(name, f"{module['path']}/config.json") or {}, name)
        elif kind == "Normalize":
            settings["similarity"] = "cosine"
        elif kind != "Transformer":
            raise InputError(
                f"{name}: modules.json names a {kind} module, expected Transformer, Pooling and Normalize only"
            )
    length = (_optional_json(name, "sentence_bert_config.json") or {}).get("max_seq_length")
    if length:
        settings |= {"max_query_length": length, "max_passage_length": length}
    prompts = about.get("prompts") or {}
    passage_prompts = [prompts[key] for key in ("document", "passage", "corpus") if prompts.get(key)]
    return settings | {"query_prefix": prompts.get("query") or "", "passage_prefix": (passage_prompts or [""])[0]}


def _pooling_of(config: dict[str, Any], name: str) -> str:
    modes = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}
    mode = config.get("pooling_mode")  # the newer form names the mode; the older has a flag for each
    chosen = [ours for ours, flag in modes.items() if config.get(flag) or mode in (ours, f"{ours}token")]
    if len(chosen) != 1:
        raise InputError(f"{name}: its pooling configuration is {config}, expected exactly one of {', '.join(modes)}")
    return chosen[0]


def _optional_json(name: str, file: str) -> Any:
    """A JSON file of an encoder folder or hub repository, or None where it has none."""
    try:
        path = cached_file(
            name, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    except OSError:  # no such folder or repository: load_tower says so with the reason
        return None
    return None if path is None else read_json(path)


def _check_length(config: Any, side: str, length: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return
    limit -= first_position(config)
    if not 2 < length <= limit:
        raise InputError(
            f"max_{side}_length is {length}, expected more than 2 and at most {limit}, the encoder's positions"
        )


def _set_attention(backbone: Any, name: str) -> None:
    family = backbone.config.model_type
    try:
        with quiet_transformers():
            backbone.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise InputError(
            f"the {family} encoder cannot run attention {name} ({' '.join(str(error).split())})"
        ) from error
    if backbone.config._attn_implementation != name:  # some families ignore the call
        raise InputError(
            f"the {family} encoder does not let its attention be set to {name}, expected model.attention auto"
        )


def _check_unpad(tower: Tower) -> None:
    family = tower.backbone.config.model_type
    if family not in FAMILIES:
        raise InputError(f"model.unpad is true for a {family} encoder, expected one of {', '.join(FAMILIES)}")
    if tower.tokenizer.padding_side != "right":
        raise InputError(
            "model.unpad is true with a tokenizer that pads on the left, expected one that pads on the right"
        )


def _save_tower(tower: Tower, settings: EncoderSettings, folder: Path) -> None:
    """One tower as transformers and sentence-transformers read it; ``encode`` there puts this tower's own prefix first."""
    tower.tokenizer.backend_tokenizer.no_truncation()  # a call leaves its own truncation behind, which would be saved too
    tower.tokenizer.backend_tokenizer.no_padding()
    with quiet_transformers():
        tower.backbone.save_pretrained(folder)
        tower.tokenizer.save_pretrained(folder)
    side = "query" if folder.name == TOWERS[0] else "document"
    length = settings.max_query_length if side == "query" else settings.max_passage_length
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    if settings.similarity == "cosine":
        kinds.append(("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    prompts = {"query": settings.query_prefix, "document": settings.passage_prefix}
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": side, "similarity_fn_name": settings.similarity},
    )
    pooling = {
        "word_embedding_dimension": tower.backbone.config.hidden_size,
        "pooling_mode_cls_token": settings.pooling == "cls",
        "pooling_mode_mean_tokens": settings.pooling == "mean",
        "pooling_mode_lasttoken": settings.pooling == "last",
        "include_prompt": True,
    }
    write_json(folder / "1_Pooling" / "config.json", pooling)
    if settings.similarity == "cosine":
        write_json(folder / "2_Normalize" / "config.json", {})
