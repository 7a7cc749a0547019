"""Load tokenizers, append end-of-text tokens, tokenize batches, and learn vocabularies."""

import os
import warnings
from collections.abc import Iterable, Iterator
from threading import Lock
from typing import Any

import numpy as np
import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from contaccum.batch import Tokens, pad, token_batches
from contaccum.encoder.folders import ModelFile, TowerFiles
from contaccum.errors import InputError
from contaccum.runtime.checks import require_known_ids
from contaccum.runtime.hub import optional_json
from contaccum.runtime.units import counted

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# texts that are sorted by length together; more mean less padding, but a later first batch
WINDOW = 4096
# tokens per thread; at width 384, the output of the widest layer (6 MB) then fits in the CPU cache
CPU_TOKENS = 1024
DEVICE_TOKENS = 16_384

# Without it, threads that encode with one encoder would change each other's truncation length and
# packed layers. It is no attribute of an encoder, because a lock cannot be copied.
ENCODING = Lock()


def load_tokenizer(files: TowerFiles, trust_remote_code: bool) -> Any:
    """Load the tokenizer of an encoder or adapter.

    If an adapter has no tokenizer, load the tokenizer of its base.
    """
    name, subfolder = files.name, files.subfolder
    config = optional_json(name, f"{subfolder}/tokenizer_config.json".lstrip("/"), ModelFile)
    if config is None and files.base:
        name, subfolder = files.base.name, ""
        config = optional_json(name, "tokenizer_config.json", ModelFile)
    tokenizer = AutoTokenizer.from_pretrained(
        name, subfolder=subfolder, trust_remote_code=trust_remote_code
    )
    if not tokenizer.is_fast:
        raise InputError(
            f"{tokenizer.name_or_path!r} has no fast tokenizer; contaccum needs one "
            "(tokenizer.json)"
        )
    for key in ("is_local", "local_files_only"):  # options of this call, not to be saved
        tokenizer.init_kwargs.pop(key, None)
    if config is not None and config.get("add_eos_token"):
        append_eos(tokenizer)  # since version 5, transformers ignores this setting of e5-mistral
    if tokenizer.pad_token is None:  # decoder-only models: padding is masked, so any token works
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise InputError(
            f"{os.path.join(name, subfolder)}: the tokenizer has neither a padding token nor an "
            "end-of-text token. Set pad_token in tokenizer_config.json, or copy this file from "
            "the original model."
        )
    if files.lower_case:
        backend = tokenizer.backend_tokenizer
        steps = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
        _save_as_changed(tokenizer)
    return tokenizer


def _save_as_changed(tokenizer: Any) -> None:
    """Make the tokenizer a PreTrainedTokenizerFast, so that its changes can be saved and loaded.

    Other classes can lose the changes, because they rebuild parts such as the normalizer when they
    are loaded.
    """
    for name in ("model_input_names", "padding_side"):  # their default values depend on the class
        tokenizer.init_kwargs[name] = getattr(tokenizer, name)
    tokenizer.__class__ = PreTrainedTokenizerFast


def check_prefix(tokenizer: Any, prefix: str, max_length: int, side: str, source: str = "") -> None:
    """Raise InputError if ``prefix`` leaves no token for the text: all vectors would be equal.

    Warn if less than half of the tokens are left. max_length: maximum number of tokens of a text,
    including prefix and special tokens. side: ``query`` or ``passage``. source: first words of the
    message, such as the name of a data set.
    """
    # a tokenizer that truncates on the left cuts the prefix, not the text
    if not prefix or tokenizer.truncation_side == "left":
        return
    # counted in front of a text, because a last space can become part of the text's first token
    spans = tokenizer(prefix + "a", return_offsets_mapping=True, verbose=False)["offset_mapping"]
    taken = sum(end <= len(prefix) for _, end in spans)  # special tokens have the span (0, 0)
    left = max_length - taken
    found = (
        f"{source}{side}_prefix takes {taken} tokens with the special tokens, and "
        f"max_{side}_length is {max_length}"
    )
    if left < 1:
        raise InputError(
            f"{found}, so nothing of a {side} is left. Shorten the prefix, or set "
            f"max_{side}_length to more than {taken}."
        )
    if 2 * left < max_length:
        warnings.warn(
            f"{found}, which leaves {counted(left, 'token')} for a {side}. Shorten the prefix, "
            f"or raise max_{side}_length.",
            stacklevel=2,
        )


def append_eos(tokenizer: Any) -> None:
    """Change the tokenizer so that every text, truncated or not, ends with the end-of-text token.

    The change is saved with the tokenizer. A tokenizer without this token, or one whose texts
    already end with a special token, does not change.
    """
    end = tokenizer.eos_token
    text = tokenizer("a", return_special_tokens_mask=True)
    if end is None or text["special_tokens_mask"][-1]:
        return
    # the tokenizer may add tokens at the start of each text
    added = zip(text["input_ids"], text["special_tokens_mask"], strict=True)
    start = tokenizer.convert_ids_to_tokens([number for number, special in added if special])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[*start, "$A", end],
        pair=[*start, "$A", end, "$B", end],
        special_tokens=[
            (token, tokenizer.convert_tokens_to_ids(token))
            for token in dict.fromkeys([*start, end])
        ],
    )
    _save_as_changed(tokenizer)


def default_batch_tokens(device: torch.device) -> int:
    """Return the default of ``batch_tokens``, the maximum number of tokens in one forward pass."""
    if device.type == "cpu":
        return min(CPU_TOKENS * torch.get_num_threads(), DEVICE_TOKENS)
    return DEVICE_TOKENS


def tokenized(
    tokenizer: Any, texts: list[str], max_length: int, budget: int, vocabulary: int | None = None
) -> Iterator[tuple[np.ndarray, Tokens]]:
    """Tokenize texts and group them into batches of at most ``budget`` tokens, including padding.

    Yields the text indices and the tokens of each batch. max_length: maximum number of tokens of a
    text. Longer texts are truncated. vocabulary: number of word embeddings. Raises InputError for a
    token id that has no word embedding.
    """
    for start in range(0, len(texts), WINDOW):
        window = texts[start : start + WINDOW]
        encoded = tokenizer(
            window, truncation=True, max_length=max_length, return_attention_mask=False
        )
        # an empty text has no tokens if the tokenizer adds no special ones
        rows = [ids or [tokenizer.pad_token_id] for ids in encoded["input_ids"]]
        for chosen in token_batches([len(row) for row in rows], budget):
            tokens = pad([rows[index] for index in chosen], tokenizer.pad_token_id)
            require_known_ids(int(tokens.input_ids.max()), vocabulary, tokenizer)
            yield start + np.array(chosen), tokens


def wordpiece_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Learn a WordPiece vocabulary from texts.

    Return a tokenizer that works like the tokenizer of bert-base-uncased.

    vocabulary: maximum number of word pieces. The same texts always give the same vocabulary.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    lines = [normalizer.normalize_str(text) for text in texts]
    letters = sorted(set("".join(lines)) - {" "})
    # The trainer numbers letters in random order, and the numbers decide ties. Special tokens have
    # fixed numbers.
    fixed = SPECIAL + letters + [f"##{letter}" for letter in letters]
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=fixed, show_progress=False
    )
    learner.train_from_iterator(lines, trainer)

    tokenizer = Tokenizer(
        models.WordPiece(learner.get_vocab(with_added_tokens=True), unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=512,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
