"""Tower of an encoder (backbone, tokenizer, pooling, Dense layers): loading and forward pass."""

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from contaccum.batch import Tokens
from contaccum.encoder import adapters as lora
from contaccum.encoder.adapters import Adapters
from contaccum.encoder.backbone import load_backbone, quiet_transformers
from contaccum.encoder.folders import NO_LIMIT, WEIGHTS, Base, Positive, TowerFiles, decoder_only
from contaccum.encoder.kernels import (
    UNPADDED_FAMILIES,
    attention_mask,
    first_position,
    pool_unpadded,
    token_states,
    unpad,
)
from contaccum.encoder.tokenizer import (
    DEVICE_TOKENS,
    append_eos,
    load_tokenizer,
    tokenized,
    wordpiece_tokenizer,
)
from contaccum.errors import InputError, in_one_line, library_errors
from contaccum.runtime.checks import require_known_ids
from contaccum.runtime.hub import loading, optional_file, optional_json

# a short text, and words that make another text of its batch longer
SHORT_TEXT, MORE_WORDS = "a b", " a b c d e f g h"
# on a GPU, padded lengths are rounded up to a multiple of this, for fewer shapes and aligned masks
BUCKET = 8


def pool(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Combine the token vectors of each text (n, length, d) into one vector per text (n, d).

    mask: (n, length), 0 for padding tokens, which are on the left or on the right, and 1 for other
    tokens. pooling: cls (use the first token), last (use the last token) or mean (average of all
    tokens).
    """
    if pooling == "mean":
        # sums over long texts can overflow in float16
        wide = torch.promote_types(states.dtype, torch.float32)
        total = (states * mask.unsqueeze(-1).to(states.dtype)).sum(1, dtype=wide)  # (n, d)
        return (total / mask.sum(1, keepdim=True).clamp(min=1)).to(states.dtype)
    first = mask.argmax(1)  # (n,)
    if pooling == "cls":
        position = first
    else:
        assert pooling == "last", pooling
        position = first + mask.sum(1) - 1
    return states[torch.arange(len(states), device=states.device), position]


class Dense(nn.Module):
    """Linear layer and activation function after pooling, as in LaBSE and distiluse.

    inputs, outputs: widths of the vectors.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        return self.activation(self.linear(vectors))


class Tower(nn.Module):
    """Model that computes one vector for each tokenized text.

    A tower has a backbone, pooling and Dense layers.
    """

    def __init__(
        self,
        backbone: Any,
        tokenizer: Any,
        pooling: str,
        dense: Sequence[Dense] = (),
        base: Base | None = None,
    ) -> None:
        """dense: layers after pooling. base: encoder below a LoRA adapter, None without one."""
        super().__init__()
        self.backbone = backbone
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.base = base
        self.dense: Any = nn.ModuleList(dense)
        limit = getattr(backbone.config, "max_position_embeddings", None)
        self.position_limit = (
            NO_LIMIT if limit is None or limit < 1 else limit - first_position(backbone.config)
        )
        """Maximum number of tokens of a text that the position embeddings allow. ``NO_LIMIT`` if
        they set no limit."""
        try:
            embeddings = getattr(backbone.get_input_embeddings(), "weight", None)
        except NotImplementedError:  # for example CANINE, which has no vocabulary
            embeddings = None
        self.vocabulary = None if embeddings is None else len(embeddings)
        """Number of word embeddings, which is larger than every token id. None: the backbone has no
        table of word embeddings."""
        self.width = int(
            getattr(backbone.config, "word_embed_proj_dim", backbone.config.hidden_size)
        )
        """Number of dimensions of the token vectors. Some OPT models project them to
        ``word_embed_proj_dim`` dimensions."""
        self.unpad = False
        self.padding_changes_vectors = False
        """Whether the vector of a text depends on the other texts of its batch (``check_padding``
        finds it)."""
        # contaccum does not use BERT's pooler; freezing the pooler saves memory for gradients and
        # optimizer state
        if getattr(backbone, "pooler", None) is not None:
            backbone.pooler.requires_grad_(False)
        if base is not None:
            self.dense.requires_grad_(False)

    @property
    def dim(self) -> int:
        """Number of dimensions of the vectors before truncation."""
        return int(self.dense[-1].linear.out_features) if len(self.dense) else self.width

    def units(self) -> list[nn.Module]:
        """Return the FSDP units of the backbone: the word embeddings, then each layer."""
        count = self.backbone.config.num_hidden_layers
        for module in self.backbone.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return [self.backbone.get_input_embeddings(), *module]
        return [self.backbone.get_input_embeddings()]

    def forward(self, tokens: Tokens) -> Tensor:
        if tokens.input_ids.is_cuda:
            # since torch 2.11, Hopper GPUs would use cuDNN attention, which builds a plan for each
            # new shape (up to 0.4 s)
            torch.backends.cuda.enable_cudnn_sdp(False)
        if self.unpad:
            row = unpad(tokens, first_position(self.backbone.config))
            vectors = pool_unpadded(token_states(self.backbone, row), row, self.pooling)
        else:
            vectors = self._padded_vectors(tokens)  # (n, width)
        for layer in self.dense:
            vectors = layer(vectors)
        return vectors  # (n, d)

    def _padded_vectors(self, tokens: Tokens) -> Tensor:
        """Return the pooled vectors of n padded texts, (n, width)."""
        mask: Tensor | None = tokens.attention_mask
        if tokens.input_ids.device.type != "cpu":
            tokens = self._rounded(tokens)
            mask = attention_mask(tokens, self.backbone)
        states = self.backbone(input_ids=tokens.input_ids, attention_mask=mask).last_hidden_state
        return pool(states, tokens.attention_mask, self.pooling)

    def _rounded(self, tokens: Tokens) -> Tokens:
        """Pad texts that have padding to a multiple of BUCKET tokens.

        A GPU prepares kernels for each new length, which takes time.
        """
        if tokens.host_mask is None or tokens.host_mask.all():
            return tokens
        length = tokens.input_ids.shape[1]
        rounded = min(-(-length // BUCKET) * BUCKET, self.position_limit)
        extra = (0, rounded - length)
        return Tokens(
            F.pad(tokens.input_ids, extra, value=self.tokenizer.pad_token_id),
            F.pad(tokens.attention_mask, extra),
            F.pad(tokens.host_mask, extra),
        )


def check_padding(tower: Tower, name: str) -> None:
    """Set ``padding_changes_vectors``, and warn if it is true."""
    batch = [SHORT_TEXT, SHORT_TEXT + 2 * MORE_WORDS]
    length = min(32, tower.position_limit)
    device = next(tower.parameters()).device
    vectors = []
    for texts in (batch[:1], batch):
        ((indices, tokens),) = tokenized(
            tower.tokenizer, texts, length, DEVICE_TOKENS, tower.vocabulary
        )
        with torch.no_grad(), library_errors(f"{name}: the model encodes no text", Exception):
            found = F.normalize(tower(tokens.to(device)).float(), dim=-1)
        vectors.append(found[indices.tolist().index(0)])
    difference = float((vectors[0] - vectors[1]).norm())
    # distance by rounding alone, for all-MiniLM-L6-v2: 1e-6 in float32, 0.013 in bfloat16
    precise = tower.backbone.dtype == torch.float32 and not getattr(
        tower.backbone, "is_quantized", False
    )
    tower.padding_changes_vectors = difference > (1e-4 if precise else 0.05)
    if tower.padding_changes_vectors:
        warnings.warn(
            f"{name}: padding changes the vectors, so the vector of a text depends on the other "
            f"texts of its batch (model type {tower.backbone.config.model_type}, distance "
            f"{difference:.2g} between the unit vectors of one text). Choose another encoder, or "
            "encode with batch_tokens 1, which needs no padding.",
            stacklevel=2,
        )


@dataclass(frozen=True)
class TowerLoader:
    """Loader of towers. The fields are options for loading."""

    pooling: str
    trust_remote_code: bool = False
    dtype: torch.dtype = torch.float32
    adapters: Adapters | None = None
    merge: bool = False
    device: torch.device | str | None = None

    def load_pair(self, query: TowerFiles, passage: TowerFiles, tied: bool) -> tuple[Tower, Tower]:
        """Load both towers; tied towers are one object.

        Adapters on the same base share its weights in memory.
        """
        if self.merge and query.base is None and passage.base is None:
            raise InputError(
                f"{query.name}: has no adapter to merge; choose a model trained with lora.rank "
                "above 0"
            )
        query_backbone = self.backbone(query)
        if tied:
            tower = self.tower(query, query_backbone)
            return tower, tower
        if _weights_of(query) != _weights_of(passage):
            passage_backbone = self.backbone(passage)
        elif (query.base is not None or self.adapters is not None) and not self.merge:
            passage_backbone = lora.clone_sharing_weights(query_backbone)
        else:
            passage_backbone = copy.deepcopy(query_backbone)
        return self.tower(query, query_backbone), self.tower(passage, passage_backbone)

    def backbone(self, files: TowerFiles) -> Any:
        """Load the backbone of a tower, without an adapter."""
        name, subfolder, quantize = _weights_of(files)
        if files.base:
            if self.adapters:
                raise InputError(
                    f"{files.name}: already has an adapter, and lora.rank above 0 would add a "
                    "second one. Merge the first one with contaccum merge, then train the result."
                )
            lora.check_base(files.base, files.name)
        elif self.adapters:
            quantize = self.adapters.quantize
        backbone = load_backbone(
            name,
            subfolder,
            dtype=self.dtype,
            device=self.device,
            quantize=quantize,
            trust_remote_code=self.trust_remote_code,
        )
        # dequantizing does not transpose the weights of these layers back
        transposed = any(getattr(each, "source_cls", None) is Conv1D for each in backbone.modules())
        if transposed and (self.merge or self.adapters):
            raise InputError(
                f"{name}: the model type {backbone.config.model_type} has layers of the class "
                "Conv1D, whose 4-bit weights cannot be merged; train the adapter with "
                "model.quantize none"
            )
        return backbone.dequantize() if self.merge and quantize != "none" else backbone

    def tower(self, files: TowerFiles, backbone: Any) -> Tower:
        """Load the adapter, the tokenizer and the Dense layers of a tower.

        Return the tower with these parts and ``backbone``.
        """
        with loading(files.name), quiet_transformers():
            if files.base:
                lora.load_adapter(backbone, files.name, files.subfolder)
            tokenizer = load_tokenizer(files, self.trust_remote_code)
        # for the libraries that load the saved model: padding on the left would shift the positions
        # of a text by the length of another text
        tokenizer.padding_side = "right"
        if decoder_only(backbone.config.model_type) and files.plain and self.pooling == "last":
            # a sentence-transformers model or a saved encoder has a tokenizer that appends the
            # token if it was trained with it
            append_eos(tokenizer)
        dense = [load_dense(files.name, path, self.dtype) for path in files.dense]
        base = None if self.merge else files.base
        if self.adapters is not None:
            base = lora.base_of(files.name, files.subfolder, self.adapters.quantize)
            lora.add_adapter(backbone, base, self.adapters.config)
        elif self.merge and files.base:
            lora.merge(backbone)
        tower = Tower(backbone, tokenizer, self.pooling, dense, base)
        require_known_ids(tokenizer.pad_token_id, tower.vocabulary, tokenizer)
        return tower


def _weights_of(files: TowerFiles) -> tuple[str, str, str]:
    """Return name, subfolder and quantization of the encoder with the full weights of a tower."""
    if files.base is not None:
        return files.base.name, "", files.base.quantize
    return files.name, files.subfolder, "none"


class DenseConfig(TypedDict, total=False):
    """Content of config.json of a Dense module, a format of sentence-transformers."""

    in_features: Positive
    out_features: Positive
    bias: bool
    activation_function: str
    use_residual: bool | None
    module_input_name: str


def load_dense(name: str, subfolder: str, dtype: torch.dtype) -> Dense:
    """Load a Dense module of a sentence-transformers model from ``subfolder`` of the model."""
    where = f"{name}/{subfolder}"
    config = optional_json(name, f"{subfolder}/config.json", DenseConfig) or {}
    if (
        config.get("use_residual")
        or config.get("module_input_name", "sentence_embedding") != "sentence_embedding"
    ):
        raise InputError(
            f"{where}: unsupported Dense module; use_residual is true or module_input_name is not "
            "sentence_embedding"
        )
    path = optional_file(name, f"{subfolder}/{WEIGHTS}")
    if path is None:
        raise InputError(
            f"{where}: Dense module without {WEIGHTS}; weights must be in safetensors format"
        )
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    # only classes of torch.nn, because a name from a file must not import code
    kind = (
        getattr(nn, activation.rpartition(".")[2], None)
        if activation.startswith("torch.nn.")
        else None
    )
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InputError(
            f"{where}: activation_function is {activation!r}; expected the name of a torch.nn "
            "activation"
        )
    with library_errors(f"{where}: the Dense module could not be loaded", Exception):
        layer = Dense(
            config["in_features"], config["out_features"], config.get("bias", True), kind()
        )
        layer.load_state_dict(load_file(path))
    return layer.to(dtype)


def tiny_tower(
    texts: Iterable[str],
    pooling: str,
    *,
    layers: int,
    width: int,
    vocabulary: int,
    max_length: int,
    seed: int,
) -> Tower:
    """Create a tower with a small BERT that has random weights.

    Its WordPiece vocabulary is learned from ``texts``.

    layers: number of layers. width: number of dimensions of the vectors. vocabulary: maximum number
    of word pieces. max_length: maximum number of tokens of a text. seed: seed of the random
    weights.
    """
    from transformers import BertConfig, BertModel

    tokenizer = wordpiece_tokenizer(texts, vocabulary)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        max_position_embeddings=max_length,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Tower(BertModel(config), tokenizer, pooling)


def set_attention(backbone: Any, name: str) -> None:
    """Choose the implementation of attention in a backbone.

    Raise InputError if the model type does not support ``name``.
    """
    family = backbone.config.model_type
    reason = ""
    try:
        with quiet_transformers():
            backbone.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        reason = f" ({in_one_line(error)})"
    if reason or backbone.config._attn_implementation != name:  # some model types ignore the call
        raise InputError(
            f"model.attention is {name}, but the model type {family} does not support it{reason}. "
            "Use auto."
        )


def can_unpad(tower: Tower) -> bool:
    """Return whether the model type of a tower allows passes without padding."""
    return tower.backbone.config.model_type in UNPADDED_FAMILIES
