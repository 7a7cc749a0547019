"""A small BERT with random weights, and a WordPiece vocabulary learned from the texts themselves: needs no download."""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from contaccum.encoder import Tower

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def tiny_tower(
    texts: Iterable[str], pooling: str, *, layers: int, width: int, vocabulary: int, max_length: int, seed: int
) -> Tower:
    """A tower of ``layers`` layers, ``width`` wide, for texts of up to ``max_length`` tokens; the same for the same arguments."""
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


def wordpiece_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """BERT's uncased tokenizer with at most ``vocabulary`` word pieces learned from ``texts``; the same for the same texts."""
    normalizer = normalizers.BertNormalizer(lowercase=True)
    lines = [normalizer.normalize_str(text) for text in texts]
    letters = sorted(set("".join(lines)) - {" "})
    # The trainer numbers the letters inside words as a hash table yields them, and ties between merges follow the numbers.
    # Handed over as special tokens, all letters have fixed numbers.
    fixed = SPECIAL + letters + [f"##{letter}" for letter in letters]
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=fixed, show_progress=False)
    learner.train_from_iterator(lines, trainer)

    tokenizer = Tokenizer(models.WordPiece(learner.get_vocab(with_added_tokens=True), unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)
