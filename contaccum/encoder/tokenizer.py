"""A tower's tokenizer: where it is loaded from, and what is made of it so that every text ends as the pooling expects."""

import json
from typing import Any

from tokenizers import Tokenizer, normalizers
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
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["post_processor"] = _ended(state["post_processor"], end, tokenizer.convert_tokens_to_ids(end))
    tokenizer.backend_tokenizer.post_processor = Tokenizer.from_str(json.dumps(state)).post_processor


def _ended(own: dict[str, Any] | None, end: str, number: int) -> dict[str, Any]:
    """A post-processor, as tokenizer.json has it, that puts ``end`` behind what ``own`` makes of a text.

    A template is made longer: a second one behind it would take the first one's pieces for two texts.
    """
    if own is not None and own["type"] == "TemplateProcessing":
        last = {"SpecialToken": {"id": end, "type_id": 0}}
        known = {**own["special_tokens"], end: {"id": end, "ids": [number], "tokens": [end]}}
        return own | {"single": [*own["single"], last], "pair": [*own["pair"], last], "special_tokens": known}
    parts = [] if own is None else own["processors"] if own["type"] == "Sequence" else [own]
    if all(part["type"] != "TemplateProcessing" for part in parts):
        text = {"Sequence": {"id": "A", "type_id": 0}}
        parts = [*parts, {"type": "TemplateProcessing", "single": [text], "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
                          "special_tokens": {}}]  # fmt: skip
    ended = [_ended(part, end, number) if part["type"] == "TemplateProcessing" else part for part in parts]
    return {"type": "Sequence", "processors": ended}
