"""A tower's tokenizer: where it is loaded from, and what is made of it so that every text ends as the pooling expects."""

from typing import Any

from tokenizers import normalizers, processors
from transformers import AutoTokenizer

from contaccum.encoder.sources import Source, optional_json
from contaccum.errors import InputError


def load_tokenizer(source: Source, trust_remote_code: bool) -> Any:
    """The tokenizer beside an encoder's weights or its adapter, else that of the adapter's base."""
    place, subfolder = source.name, source.subfolder
    if source.base and optional_json(place, f"{subfolder}/tokenizer_config.json".lstrip("/")) is None:
        place, subfolder = source.base.place, ""
    tokenizer = AutoTokenizer.from_pretrained(place, subfolder=subfolder, trust_remote_code=trust_remote_code)
    for key in ("is_local", "local_files_only"):  # how it was loaded, which would be saved with it
        tokenizer.init_kwargs.pop(key, None)
    if tokenizer.pad_token is None:  # decoder-only families: padding is masked, so any token will do
        tokenizer.pad_token = tokenizer.eos_token
    if source.lower_case:
        _lower_case(tokenizer.backend_tokenizer)
    return tokenizer


def _lower_case(tokenizer: Any) -> None:
    """Let a tokenizer lower-case its texts first; for one that does so itself it changes nothing."""
    own = tokenizer.normalizer
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([] if own is None else [own])])


def append_eos(tokenizer: Any, name: str) -> None:
    """Let every text end with the end-of-text token, unless it ends with a special token already.

    It is the tokenizer's own doing from then on: it is saved with it, and a text that is cut is cut before it.
    """
    if tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"][-1]:
        return
    end = tokenizer.eos_token
    if end is None:
        raise InputError(f"{name}: its tokenizer has no end-of-text token, expected one, or model.append_eos false")
    number = tokenizer.convert_tokens_to_ids(end)
    last = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B:1 {end}:1", special_tokens=[(end, number)]
    )
    own = tokenizer.backend_tokenizer.post_processor
    tokenizer.backend_tokenizer.post_processor = last if own is None else processors.Sequence([own, last])
