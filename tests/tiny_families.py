"""Encoder folders of every family: two random layers, 32 wide, with a small tokenizer that ends
texts as the family's does."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from contaccum.encoder import wordpiece_tokenizer

TEXTS = [
    "the red fox",
    "a blue whale swims in the deep sea and sings",
    "owl",
    "",
    "fox whale owl sea deep the a red",
]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
BIDIRECTIONAL = {
    "bert": SIZES,
    "roberta": SIZES,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "xlm-roberta": SIZES,
    "modernbert": SIZES
    | {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
    "mpnet": SIZES,
    "electra": SIZES | {"embedding_size": 32},
}
DECODERS = {
    "qwen3": SIZES | {"num_key_value_heads": 1, "head_dim": 16},
    "mistral": SIZES | {"num_key_value_heads": 1},
    "llama": SIZES | {"num_key_value_heads": 2},
}
FAMILIES = BIDIRECTIONAL | DECODERS
# compared only with and without padding
OTHERS = {
    "camembert": SIZES,
    "eurobert": SIZES | {"num_key_value_heads": 1},
    "qwen2": SIZES | {"num_key_value_heads": 1},
    "longformer": SIZES | {"attention_window": [8, 8]},
}


def family_folder(
    family: str,
    folder: Path,
    texts: Iterable[str] = TEXTS * 3,
    seed: int = 0,
    positions: int = 40,
    **changes: Any,
) -> Path:
    """changes: values of the model's configuration."""
    tokenizer = wordpiece_tokenizer(texts, 150)
    if family in DECODERS:
        tokenizer = decoder_tokenizer(tokenizer, family != "qwen3")
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": positions, "pad_token_id": 0}
    sizes = (FAMILIES | OTHERS).get(family, SIZES)
    config = AutoConfig.for_model(family, **size, **sizes | changes)
    torch.manual_seed(seed)
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def decoder_tokenizer(tokenizer: PreTrainedTokenizerFast, begins: bool) -> PreTrainedTokenizerFast:
    """As published for texts that go on: padded on the left, without an end, with a first token or
    without."""
    inner = tokenizer.backend_tokenizer
    start = ["[CLS]"] if begins else []
    special = [(token, inner.token_to_id(token)) for token in start]
    inner.post_processor = processors.TemplateProcessing(
        single=" ".join([*start, "$A"]), pair="$A $B:1", special_tokens=special
    )
    names = {"unk_token": "[UNK]", "eos_token": "[SEP]", "pad_token": "[PAD]"} | (
        {"bos_token": "[CLS]"} if begins else {}
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **names)
