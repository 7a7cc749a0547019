"""Load an encoder for computing vectors, and choose its precision."""

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch

from contaccum.config import ENCODER_SETTINGS, EncoderConfig
from contaccum.encoder.dual import DualEncoder
from contaccum.errors import InputError
from contaccum.runtime.launch import is_main
from contaccum.runtime.processes import encoding_device, torch_dtype
from contaccum.runtime.progress import announced

SAMPLE = 64  # number of texts whose vectors decide
AGREEMENT = 0.9999  # minimum cosine of the vectors of a text in half precision and in fp32


def load_encoder(
    choice: EncoderConfig, kind: str, texts: Callable[[], Sequence[str]]
) -> DualEncoder:
    """Load an encoder for computing vectors, with the name, device and precision in ``choice``.

    kind: ``query`` or ``passage``. texts: returns the first SAMPLE texts of this kind that will be
    encoded. On CUDA, they choose the precision ``auto``. Without CUDA it is fp32.
    """
    if choice.model == "bm25":
        raise InputError("--model bm25 has no vectors; this command needs an encoder")
    if choice.precision != "auto":
        return _load(choice, choice.precision)
    if encoding_device(choice.device).type != "cuda":
        return _load(choice, "fp32")
    return load_fastest(choice, kind, texts())


def load_fastest(choice: EncoderConfig, kind: str, texts: Sequence[str]) -> DualEncoder:
    """Load an encoder in the first precision of fp16, bf16 and fp32 that agrees with fp32.

    A precision agrees with fp32 if the two vectors of each text have a cosine of at least
    AGREEMENT. fp16 comes first, because it has three more bits for the digits of a number than
    bf16. But numbers above 65,504 become infinite in fp16, and then the cosine is NaN.
    """
    # one encoder at a time in the memory of the GPU
    try:
        expected = _encode(_load(choice, "fp32"), kind, texts)  # (n, d)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{choice.model}: does not fit into the memory of the GPU in fp32, with which auto "
            "compares other precisions. Set --precision to bf16 or fp16."
        ) from error
    found = []
    for precision in ("fp16", "bf16"):
        encoder = _load(choice, precision)
        lowest = lowest_cosine(expected, _encode(encoder, kind, texts))
        found.append(f"{precision} {lowest:.7f}")
        if lowest >= AGREEMENT:
            break
        del encoder
    else:
        precision = "fp32"
        encoder = _load(choice, precision)
    if is_main():
        print(
            f"contaccum: encoding in {precision} (lowest cosine with fp32, {len(texts)} texts: "
            f"{', '.join(found)})",
            file=sys.stderr,
        )
    return encoder


def lowest_cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the lowest cosine of row i of ``one`` and row i of ``other``, both (n, d).

    The result is NaN if a vector is not finite.
    """
    one, other = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        return float(((one * other).sum(axis=1) / lengths).min(initial=1.0))


def _load(choice: EncoderConfig, precision: str) -> DualEncoder:
    options = {
        name: getattr(choice, name)
        for name in (*ENCODER_SETTINGS, "truncate_dim", "trust_remote_code")
    }
    with announced(f"loading the encoder {choice.model}"):
        return DualEncoder.load(
            choice.model,
            dtype=torch_dtype(precision),
            device=encoding_device(choice.device),
            **options,
        )


def _encode(encoder: DualEncoder, kind: str, texts: Sequence[str]) -> np.ndarray:
    encode = encoder.encode_queries if kind == "query" else encoder.encode_passages
    return encode(list(texts))
