"""DualEncoder, a model with a query tower and a passage tower."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contaccum.batch import ONE_TOKEN, MicroBatch, Tokens
from contaccum.encoder.adapters import Adapters
from contaccum.encoder.folders import (
    NO_LIMIT,
    SETTINGS_FILE,
    EncoderFiles,
    EncoderSettings,
    make_settings,
    model_folder,
    read_encoder,
)
from contaccum.encoder.kernels import ATTENTION, UNPADDED_FAMILIES, packed_linears
from contaccum.encoder.saving import check_hashes, save_encoder, send_weights
from contaccum.encoder.tokenizer import (
    ENCODING,
    check_prefix,
    default_batch_tokens,
    tokenized,
)
from contaccum.encoder.tower import (
    Tower,
    TowerLoader,
    can_unpad,
    check_padding,
    set_attention,
)
from contaccum.errors import InputError
from contaccum.runtime.checks import require_texts
from contaccum.runtime.files import refuse_other_files, whole_folder
from contaccum.runtime.prefetch import prefetch
from contaccum.runtime.processes import PRECISIONS, Processes

# minimum number of texts for packed linear layers; with fewer texts, packing takes longer than it
# saves
PACK_FROM = 64
# names of the first linear layer in modules that compute attention weights
ATTENTION_INPUTS = (
    "query", "q_proj", "q_lin", "q", "Wqkv", "c_attn", "query_key_value", "query_proj", "in_proj",
)  # fmt: skip
# matches the names of dropouts of attention weights, but not of those after the attention
OF_ATTENTION = re.compile("(?<!post_)(?<!resid_)att")
# matches the names of module attributes that hold a dropout probability as a number, but not
# layerdrop
DROPOUT_NUMBER = re.compile("dropout|pdrop")
# settings of a backbone that do not change its vectors, or that the fingerprint has elsewhere
NOT_IN_VECTORS = {
    "_name_or_path", "architectures", "auto_map", "dtype", "quantization_config",
    "transformers_version", "use_cache",
}  # fmt: skip


class DualEncoder(nn.Module):
    """Query tower and passage tower.

    The score of a query and a passage is the inner product of their vectors.

    If the similarity is cosine, all vectors have the L2 norm 1.
    """

    def __init__(self, query_tower: Tower, passage_tower: Tower, settings: EncoderSettings) -> None:
        super().__init__()
        width = query_tower.dim
        if passage_tower.dim != width:
            raise InputError(
                f"query tower has width {width}, passage tower {passage_tower.dim}; the widths "
                "must be equal"
            )
        self.query_tower = query_tower
        self.passage_tower = passage_tower
        self.settings = settings
        self.recomputes = False  # whether the backward pass recomputes activations
        self.shard_group: Processes | None = None  # processes among which the weights are divided
        if self.dim > width:
            raise InputError(
                f"truncate_dim is {self.dim}; expected at most {width}, the width of the encoder"
            )
        for side, tower, length, prefix in (
            ("query", query_tower, settings.max_query_length, settings.query_prefix),
            ("passage", passage_tower, settings.max_passage_length, settings.passage_prefix),
        ):
            least = tower.tokenizer.num_special_tokens_to_add() + 1
            if not least <= length <= tower.position_limit:
                most = (
                    f"to {tower.position_limit} " if tower.position_limit < NO_LIMIT else "or more "
                )
                raise InputError(f"max_{side}_length is {length}; expected {least} {most}tokens")
            check_prefix(tower.tokenizer, prefix, length, side)

    @property
    def dim(self) -> int:
        """Number of dimensions of each embedding."""
        truncated = self.settings.truncate_dim
        return self.query_tower.dim if truncated is None else truncated

    @property
    def towers(self) -> list[Tower]:
        """List of the query tower and the passage tower.

        If the towers are tied, the list has one tower.
        """
        return list(dict.fromkeys((self.query_tower, self.passage_tower)))

    @property
    def adapted(self) -> bool:
        """Whether the towers have LoRA adapters on a frozen base."""
        return any(tower.base is not None for tower in self.towers)

    def units(self) -> list[nn.Module]:
        """Return the FSDP units.

        They are the word embeddings of both towers, each layer of both towers, and the rest of each
        tower.
        """
        # layer by layer, because LoRA towers share memory until both are sharded
        levels = zip_longest(*(tower.units() for tower in self.towers))
        return [*(unit for level in levels for unit in level if unit is not None), *self.towers]

    @property
    def device(self) -> torch.device:
        """Device of the forward passes. Sharded weights may be stored on the CPU."""
        if self.shard_group is not None:
            return self.shard_group.device
        return next(self.query_tower.parameters()).device

    @property
    def precision(self) -> str:
        """Precision of the weights: fp32, bf16 or fp16."""
        names = {dtype: name for name, dtype in PRECISIONS.items()}
        dtype = self.query_tower.backbone.dtype
        return names.get(dtype, str(dtype))

    @property
    def one_pass(self) -> bool:
        """Whether the queries and the passages of a micro-batch are encoded in one pass.

        Without padding, they form one sequence, and tied towers are one tower.
        """
        return self.query_tower is self.passage_tower and self.query_tower.unpad

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the float32 embeddings of a micro-batch: queries (B, d), passages (B, 1+H, d)."""
        count = len(batch.queries.input_ids)
        if self.one_pass:
            padding = self.query_tower.tokenizer.pad_token_id
            texts = Tokens.join([batch.queries, batch.passages], padding)
            vectors = self.embed(self.query_tower, texts)  # (B + B * (1 + H), d)
            queries, passages = vectors[:count], vectors[count:]
        else:
            queries = self.embed(self.query_tower, batch.queries)  # (B, d)
            passages = self.embed(self.passage_tower, batch.passages)  # (B * (1 + H), d)
        return queries, passages.view(count, -1, passages.shape[-1])

    def embed(self, tower: Tower, tokens: Tokens) -> Tensor:
        """Return the float32 embeddings of n tokenized texts, (n, d).

        With cosine similarity, they have the L2 norm 1.
        """
        vectors = tower(tokens).float()[:, : self.dim]
        return F.normalize(vectors, dim=-1) if self.settings.similarity == "cosine" else vectors

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Switch the encoder to evaluation mode inside the ``with`` block."""
        training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(training)

    def encode_queries(
        self,
        texts: list[str],
        batch_tokens: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """Return the float32 embeddings of n queries, with shape (n, d).

        The query prefix is added to each text first.

        batch_tokens: maximum number of tokens in one forward pass, including padding. Default:
        16384, but on a CPU at most 1024 per thread. progress: called after each forward pass with
        the number of its texts, such as ``tqdm(total=len(texts)).update``. Raises InputError for
        invalid UTF-8, or if ``texts`` is one string.
        """
        return self._encode("query", texts, batch_tokens, progress)

    def encode_passages(
        self,
        texts: list[str],
        batch_tokens: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """Return the float32 embeddings of n passages with the passage prefix, (n, d).

        Arguments: as in ``encode_queries``.
        """
        return self._encode("passage", texts, batch_tokens, progress)

    # the names in sentence-transformers
    encode_query = encode_queries
    encode_document = encode_passages

    @contextmanager
    def in_lockstep(self, kind: str) -> Iterator[None]:
        """Allow the processes to encode different numbers of batches inside the ``with`` block.

        kind: tower that encodes the texts, ``query`` or ``passage``. With sharded weights, a
        forward pass needs all processes. Therefore a process without more batches runs dummy passes
        until all processes have finished.
        """
        yield
        while self.shard_group is not None and self.shard_group.largest(0):
            with torch.no_grad(), self.without_dropout():
                self.embed(getattr(self, f"{kind}_tower"), ONE_TOKEN.to(self.device))

    def _encode(
        self,
        kind: str,
        texts: list[str],
        batch_tokens: int | None,
        progress: Callable[[int], object] | None,
    ) -> np.ndarray:
        tower: Tower = getattr(self, f"{kind}_tower")
        texts = require_texts(texts, kind, getattr(self.settings, f"{kind}_prefix"))
        max_length = getattr(self.settings, f"max_{kind}_length")
        budget = default_batch_tokens(self.device) if batch_tokens is None else batch_tokens
        if budget < 1:
            raise InputError(f"batch_tokens is {budget}; expected at least 1")
        vectors = np.empty((len(texts), self.dim), dtype=np.float32)
        with ExitStack() as stack:
            stack.enter_context(ENCODING)
            # weights that are gathered in inference mode cannot be trained
            sharded = self.shard_group is not None
            stack.enter_context(torch.no_grad() if sharded else torch.inference_mode())
            stack.enter_context(self.without_dropout())
            if len(texts) >= PACK_FROM and not sharded:
                stack.enter_context(packed_linears(tower.backbone))
            tokens_of = tokenized(tower.tokenizer, texts, max_length, budget, tower.vocabulary)
            batches = stack.enter_context(closing(prefetch(tokens_of, depth=16)))
            cuda = self.device.type == "cuda"
            previous: list[tuple[np.ndarray, Tensor, torch.cuda.Event | None]] = []
            for indices, tokens in batches:
                if self.shard_group is not None:
                    self.shard_group.largest(1)  # see in_lockstep
                found = self.embed(tower, tokens.to(self.device)).to("cpu", non_blocking=cuda)
                copied = torch.cuda.current_stream(self.device).record_event() if cuda else None
                previous.append((indices, found, copied))
                # copy the vectors of a batch to the CPU while the GPU computes the next batch
                if len(previous) > 1:
                    _store(vectors, *previous.pop(0))
                if progress is not None:
                    progress(len(indices))
            for batch in previous:
                _store(vectors, *batch)
        return vectors

    def fingerprint(self, kind: str, batch_tokens: int | None = None) -> str:
        """Return the precision and a hash of the weights, vocabulary and settings of one tower.

        The settings include those of the backbone, such as the number of attention heads.

        Towers with the same fingerprint compute the same vectors. kind: ``query`` or ``passage``.
        batch_tokens: maximum number of tokens of a batch, which counts only if padding changes the
        vectors.
        """
        tower: Tower = getattr(self, f"{kind}_tower")
        digest = hashlib.sha256()
        weights = {**tower.backbone.state_dict(), **tower.dense.state_dict(prefix="dense.")}
        for name, tensor in sorted(weights.items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(
                tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        # every call of the tokenizer changes these settings; only the side of the truncation
        # affects the tokens of a text
        side = {"padding": None, "truncation": tower.tokenizer.truncation_side == "left" or None}
        tokenizer = json.loads(tower.tokenizer.backend_tokenizer.to_str()) | side
        digest.update(json.dumps(tokenizer, sort_keys=True).encode())
        # without the defaults of transformers, as in a saved config.json
        config = json.loads(tower.backbone.config.to_json_string())
        config = {key: value for key, value in config.items() if key not in NOT_IN_VECTORS}
        scales = {
            name: module.scaling
            for name, module in tower.backbone.named_modules()
            if hasattr(module, "lora_A")
        }
        activations = [type(dense.activation).__name__ for dense in tower.dense]
        digest.update(json.dumps([config, scales, activations], sort_keys=True).encode())
        names = ["pooling", "similarity", f"max_{kind}_length", f"{kind}_prefix"]
        if self.settings.truncate_dim is not None:
            names.append("truncate_dim")
        digest.update(json.dumps([getattr(self.settings, name) for name in names]).encode())
        if tower.padding_changes_vectors:
            digest.update(f"batch_tokens {batch_tokens}".encode())
        return f"{self.precision} {digest.hexdigest()}"

    def set_dropout(self, probability: float | None, attention: float | None = None) -> None:
        """Set the dropout probabilities of both towers, except the dropout of LoRA adapters.

        The configuration files that ``save`` writes keep the old probabilities.

        probability: None changes nothing. attention: dropout of the attention weights. None: as
        ``probability``.
        """
        if attention is None:
            attention = probability
        for path, module in self.named_modules():
            if path.endswith(".lora_dropout"):
                continue
            computes_attention = any(hasattr(module, name) for name in ATTENTION_INPUTS)
            for name, value in [*module.named_children(), *vars(module).items()]:
                of_weights = computes_attention and name == "dropout"
                chosen = attention if of_weights or OF_ATTENTION.search(name) else probability
                if chosen is None:
                    continue
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if isinstance(value, nn.Dropout):
                    value.p = chosen
                elif is_number and DROPOUT_NUMBER.search(name):
                    setattr(module, name, chosen)

    def set_attention(self, name: str, unpad: bool = False) -> None:
        """Choose the implementation of attention in both backbones.

        name: ``eager``, ``sdpa`` or ``auto`` (transformers chooses). unpad: whether to compute
        without padding, with attention of our own. Raises InputError if the model type does not
        support ``name`` or ``unpad``.
        """
        for tower in self.towers:
            if unpad and not can_unpad(tower):
                raise InputError(
                    "model.unpad is true, but the model type is "
                    f"{tower.backbone.config.model_type}; expected "
                    f"{', '.join(UNPADDED_FAMILIES)}. Set model.unpad to false."
                )
            tower.unpad = unpad
            chosen = ATTENTION if unpad else name
            if chosen != "auto":
                set_attention(tower.backbone, chosen)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Set the precision of the matrix products in 4-bit layers.

        In other layers, autocast sets the precision.
        """
        for layer in self.modules():
            if hasattr(layer, "compute_dtype"):
                layer.compute_dtype = dtype  # type: ignore[assignment]

    def has_dropout(self) -> bool:
        """Return whether any dropout is above 0, so that two training passes may differ."""
        for module in self.modules():
            if isinstance(module, nn.Dropout) and module.p > 0:
                return True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float) and value > 0:
                    return True
        return False

    def no_grad_group_size(self) -> int:
        """Return how many micro-batches can be encoded at once without gradients.

        These micro-batches together need at most the memory of a training pass over one
        micro-batch: the training pass stores the activations of every layer, but a pass without
        gradients stores one layer at a time.

        The result is 1 with dropout, because each micro-batch has its own dropout noise, and with
        gradient checkpointing, because a training pass then stores little more than one layer.
        """
        if self.has_dropout() or self.recomputes:
            return 1
        return max(1, min(tower.backbone.config.num_hidden_layers for tower in self.towers))

    def gradient_checkpointing_enable(self) -> None:
        """Save memory in training.

        Activations are computed again, with the same dropout noise, in the backward pass.
        """
        for tower in self.towers:
            backbone = tower.backbone  # transformers 5 renamed the method
            enable = getattr(
                backbone, "activation_checkpointing_enable", backbone.gradient_checkpointing_enable
            )
            try:
                enable({"use_reentrant": False})
            except ValueError as error:
                raise InputError(
                    "model.gradient_checkpointing is true, but the model type "
                    f"{backbone.config.model_type} does not support it. Set the option to false."
                ) from error
        self.recomputes = True

    def save(self, folder: str | Path) -> None:
        """Save both towers as one model, which contaccum and sentence-transformers can load.

        An older model in ``folder`` is replaced. If an error occurs, no file is written. With
        sharded weights, all processes must call this function; process 0 writes. Raises InputError
        if the folder has files but is no saved model.
        """
        refuse_other_files(Path(folder), "a saved model", SETTINGS_FILE)
        if self.shard_group is not None and not self.shard_group.is_main:
            send_weights(self.towers)
            return
        with whole_folder(folder) as unfinished:
            save_encoder(self.query_tower, self.passage_tower, self.settings, unfinished)

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
        adapters: Adapters | None = None,
        merge: bool = False,
        **overrides: Any,
    ) -> "DualEncoder":
        """Load an encoder from a folder or from the Hub.

        name: a run, a saved DualEncoder, a sentence-transformers model or a plain encoder.
        passage_name: encoder for the passage tower, with its own settings for passages or the
        defaults, not those of ``name``. None: the encoder in ``name``. tie_towers: whether queries
        and passages use the same tower. If None: False if ``passage_name`` is given, else the value
        saved with the encoder, or True if no value is saved. dtype, device: precision of the
        weights, and device of both towers. adapters: options of new LoRA adapters. The other
        weights are then frozen. None: no new adapters. merge: whether to merge the saved adapters
        into the base weights. Quantized base weights are dequantized first. overrides: values for
        fields of EncoderSettings. A value of None changes nothing.
        """
        given = {key: value for key, value in overrides.items() if value is not None}
        name = model_folder(name)
        files = read_encoder(name, given)
        if passage_name is not None:
            files = _with_passage_tower(files, model_folder(passage_name), given)
        if tie_towers is None:
            tie_towers = passage_name is None and files.settings.get("tie_towers", True)
        settings = make_settings({**files.settings, **given, "tie_towers": tie_towers}, name)
        if tie_towers and passage_name is not None:
            raise InputError(
                f"passage_name is {passage_name}, but the towers are tied. Remove passage_name, or "
                "set tie_towers to false."
            )
        if tie_towers and files.passage != files.query:
            raise InputError(
                f"{name}: has two different encoders, which cannot be tied. Set tie_towers to "
                "false."
            )
        loader = TowerLoader(settings.pooling, trust_remote_code, dtype, adapters, merge, device)
        query_tower, passage_tower = loader.load_pair(files.query, files.passage, tie_towers)
        # some folders state a length that the backbone does not support, and the default may be too
        # long as well
        for key, tower in (
            ("max_query_length", query_tower),
            ("max_passage_length", passage_tower),
        ):
            if key not in given:
                shortest = min(getattr(settings, key), tower.position_limit)
                settings = replace(settings, **{key: shortest})
        check_hashes(name, files.sha256)
        encoder = cls(query_tower, passage_tower, settings).to(device).eval()
        check_padding(query_tower, name)
        if files.passage == files.query:
            passage_tower.padding_changes_vectors = query_tower.padding_changes_vectors
        else:
            check_padding(passage_tower, files.passage.name)
        return encoder


def _with_passage_tower(
    files: EncoderFiles, passage_name: str, given: dict[str, Any]
) -> EncoderFiles:
    """Return ``files`` with the passage tower of another encoder, and its settings for passages.

    passage_name: folder or Hub name of the other encoder. given: settings that the caller chose.
    """
    other = read_encoder(passage_name, given)
    check_hashes(passage_name, other.sha256)
    for key in ("pooling", "similarity"):
        expected = files.settings.get(key, getattr(EncoderSettings, key))
        if key not in given and other.settings.get(key, expected) != expected:
            raise InputError(
                f"{passage_name}: {key} is {expected} for queries and {other.settings[key]} for "
                f"passages; they must be equal. Set {key} (--model.{key})."
            )
    settings = dict(files.settings)
    # without such a setting, the other encoder has the default, not the value of ``files``
    for key in ("max_passage_length", "passage_prefix"):
        settings[key] = other.settings.get(key, getattr(EncoderSettings, key))
    return files._replace(settings=settings, passage=other.passage)


def _store(
    vectors: np.ndarray, indices: np.ndarray, found: Tensor, copied: "torch.cuda.Event | None"
) -> None:
    if copied is not None:
        copied.synchronize()
    vectors[indices] = found.numpy()
