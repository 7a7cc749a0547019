"""Load the backbone of an encoder: a model of transformers, without layers after the encoder."""

import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, BitsAndBytesConfig
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging

from contaccum.encoder.folders import ADAPTER_FILE, WEIGHTS, decoder_only
from contaccum.errors import InputError, require
from contaccum.runtime.hub import loading, optional_file

# matches the names of the weights of a layer
LAYER = re.compile(r"(^|\.)(layers?|h|blocks?)\.\d+\.")
POOLER = r"(.*\.)?pooler\..*"  # matches the names of pooler layers, which contaccum does not use
# match the names of the weights after the encoder, in classifiers of transformers and in ColBERT
CLASSIFIER = re.compile(
    r"((pre_|qa_)?classifier|classification_head|score|qa_outputs|sequence_summary|logits_proj)\."
)
COLBERT = re.compile(r"(colbert_)?linear\.")

# hides warnings about optional kernels
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def load_backbone(
    name: str,
    subfolder: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str | None,
    quantize: str,
    trust_remote_code: bool,
) -> Any:
    """Load a backbone, without an adapter.

    name, subfolder: folder or Hub name, and a folder in it. device: device for a quantized
    backbone; do not move it later. Other backbones are loaded on the CPU. quantize: none or
    4bit. Raises InputError for a model that makes no token vectors, or was trained to be something
    else than an encoder.
    """
    source = {"subfolder": subfolder, "trust_remote_code": trust_remote_code}
    adapter = os.path.join(subfolder, ADAPTER_FILE)
    weights = [os.path.join(subfolder, file) for file in (WEIGHTS, f"{WEIGHTS}.index.json")]
    # transformers would add such an adapter to the weights, even if they contain it already
    if optional_file(name, adapter) and any(optional_file(name, each) for each in weights):
        raise InputError(
            f"{f'{name}/{subfolder}'.rstrip('/')}: has an adapter ({ADAPTER_FILE}) and full "
            f"weights ({WEIGHTS}); expected one of them. If the weights contain the adapter, "
            f"delete {ADAPTER_FILE}; if not, delete config.json and the full weights."
        )
    with loading(name), quiet_transformers():
        config = AutoConfig.from_pretrained(name, **source)
    if config.model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(
            f"{name}: {config.model_type} is an encoder-decoder; expected an encoder or a decoder"
        )
    if not hasattr(config, "hidden_size"):
        raise InputError(
            f"{name}: the configuration of the model type {config.model_type} has no hidden_size, "
            "as that of models of text and images; expected an encoder of text"
        )
    if config.model_type == "dpr":
        raise InputError(
            f"{name}: the model type dpr has no token vectors. Use a copy that was converted "
            "to the type bert, such as "
            "sentence-transformers/facebook-dpr-question_encoder-single-nq-base."
        )
    # without this request, transformers chooses an implementation; with it, loading fails if the
    # implementation is not installed
    if config._attn_implementation not in (None, "eager", "sdpa"):
        warnings.warn(
            f"{name}: config.json asks for {config._attn_implementation} as the implementation of "
            "attention, which is not used",
            stacklevel=2,
        )
    config._attn_implementation = None

    options: dict[str, Any] = {}
    if quantize == "none":
        options["ignore_mismatched_sizes"] = True  # refuse_incomplete names these tensors
    else:
        require("bitsandbytes", "bitsandbytes", "4-bit quantization")
        options["device_map"] = {"": str(device or "cpu")}
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    with loading(name), quiet_transformers():
        backbone, info = AutoModel.from_pretrained(
            name,
            config=config,
            **source,
            dtype=dtype,
            use_safetensors=True,  # a pickle can run code
            output_loading_info=True,
            **options,
        )
    refuse_other_heads(name, info["unexpected_keys"])
    refuse_incomplete(name, info["missing_keys"], info["mismatched_keys"], info["unexpected_keys"])
    if quantize == "none":
        # transformers fills a missing pooler with random numbers, so each load would have another
        # fingerprint; decoders, the usual encoders in 4 bits, have no pooler
        for key in info["missing_keys"]:
            backbone.get_parameter(key).data.zero_()

    if decoder_only(config.model_type):
        backbone.config.use_cache = False  # an encoder never generates text
    # otherwise save_pretrained splits the weights into several files
    vars(backbone).pop("hf_device_map", None)
    for module in backbone.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # otherwise the first evaluation repacks the weights permanently
            module.support_avx512bf16_for_cpu = False
    return backbone


def refuse_other_heads(name: str, unexpected: Iterable[str]) -> None:
    """Raise InputError if the file has the weights of a classifier or of a ColBERT model.

    unexpected: names of weights that a bare encoder does not have. The heads of pretraining, such
    as that for masked words, may be dropped.
    """
    for key in sorted(unexpected):
        kind = ""
        if CLASSIFIER.match(key):
            kind = "a classifier, such as a cross-encoder"
        elif COLBERT.match(key):
            kind = "a ColBERT model, which makes one vector for each token"
        if kind:
            raise InputError(
                f"{name}: is {kind} (it has the weights {key}); expected an encoder that makes one "
                "vector for each text. To train the encoder inside it, save that with "
                "AutoModel.from_pretrained and save_pretrained first."
            )


def refuse_incomplete(
    name: str, missing: Iterable[str], mismatched: Iterable[Any], unexpected: Iterable[str] = ()
) -> None:
    """Raise InputError if the weights of a model do not match its configuration.

    missing: names of weights that the file lacks. Pooler weights are ignored, because contaccum
    uses no pooler. mismatched: names of weights with a wrong shape. unexpected: names of weights in
    the file that the configuration does not have. They are an error only in an encoder layer.
    """
    problems = {
        "are missing": [key for key in missing if not re.fullmatch(POOLER, key)],
        # transformers names a tensor, or gives a tuple of its name and two shapes
        "have the wrong shape": [key if isinstance(key, str) else key[0] for key in mismatched],
        "belong to layers that the configuration does not have": [
            key for key in unexpected if LAYER.search(key)
        ],
    }
    for problem, keys in problems.items():
        if keys:
            examples = ", ".join(sorted(keys)[:3]) + (", ..." if len(keys) > 3 else "")
            raise InputError(
                f"{name}: {len(keys)} tensors {problem} ({examples}); the file must have the "
                "weights of every layer in the configuration"
            )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars and warnings of transformers inside the ``with`` block."""
    verbosity, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
