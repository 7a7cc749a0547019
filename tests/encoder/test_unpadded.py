"""Passes without padding equal padded ones in every family, also with causal masks and windows."""

import copy

import numpy as np
import pytest
import torch
from tiny_families import family_folder
from torch import Tensor
from transformers import AttentionInterface

from contaccum import DualEncoder
from contaccum.batch import Tokens
from contaccum.encoder import kernels
from contaccum.encoder.kernels import ATTENTION, UNPADDED_FAMILIES, attend, by_length

# a window of 5 tokens to the left, or 4 to each side, in all layers or in the second one
ONE_LAYER = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CASES = {family: (family, {}) for family in UNPADDED_FAMILIES} | {
    "mistral window": ("mistral", {"sliding_window": 5}),
    "qwen2 window": ("qwen2", ONE_LAYER),
    "qwen3 window": ("qwen3", ONE_LAYER),
    "modernbert window": ("modernbert", {"local_attention": 8, "global_attn_every_n_layers": 2}),
    "qwen2 bidirectional": ("qwen2", {"is_causal": False}),  # as gte-Qwen2
}
LENGTHS = [3, 16, 7, 16, 1, 12]  # numbers of tokens, most of them longer than the windows
SIZE = {"max_query_length": 8, "max_passage_length": 24}


def load(case: str, folder, pooling: str = "mean") -> DualEncoder:
    family, changes = CASES[case]
    # large weights, for attention that is far from uniform
    family_folder(family, folder, initializer_range=0.2, **changes)
    return DualEncoder.load(folder, pooling=pooling, **SIZE)


def vectors_and_gradients(encoder: DualEncoder) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tower = encoder.query_tower
    ids = torch.randint(5, tower.vocabulary, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)).long()
    vectors = tower(Tokens(ids, mask).to(encoder.device))
    weights = torch.randn(vectors.shape, generator=generator).to(vectors)
    encoder.zero_grad()
    (vectors * weights).sum().backward()
    named = encoder.named_parameters()
    return vectors.detach(), {name: p.grad for name, p in named if p.grad is not None}


def differences(one: DualEncoder, other: DualEncoder) -> tuple[float, float]:
    """Largest difference of vectors and of gradients, relative to the largest value."""
    vectors, gradients = vectors_and_gradients(one)
    other_vectors, other_gradients = vectors_and_gradients(other)
    assert gradients.keys() == other_gradients.keys()
    largest = max(gradient.abs().max() for gradient in gradients.values())
    of_gradients = max((gradients[name] - other_gradients[name]).abs().max() for name in gradients)
    of_vectors = (vectors - other_vectors).abs().max() / vectors.abs().max()
    return float(of_vectors), float(of_gradients / largest)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_vectors_and_gradients_equal_padded_ones(case, pooling, tmp_path):
    padded = load(case, tmp_path, pooling)
    padded.set_dropout(0.0)
    unpadded = copy.deepcopy(padded)
    unpadded.set_attention("auto", unpad=True)
    for dtype, same in ((torch.float32, 2e-5), (torch.float64, 1e-10)):
        for training in (False, True):
            for encoder in (padded, unpadded):
                encoder.to(dtype).train(training)
            assert max(differences(padded, unpadded)) < same


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        *((family, {"is_causal": False}) for family in ("llama", "mistral", "qwen2", "qwen3")),
        *((family, {"is_causal": True}) for family in ("bert", "eurobert", "qwen2 bidirectional")),
        *((case, {"sliding_window": None}) for case in CASES if case.endswith("window")),
        *((case, {"sliding_window": 4}) for case in CASES if case.endswith("window")),
        *((case, {"sliding_window": 6}) for case in CASES if case.endswith("window")),
    ],
)
def test_vectors_differ_with_a_wrong_mask(case, wrong, tmp_path, monkeypatch):
    """Negative control: without the causal mask, or with another window or none."""
    padded = load(case, tmp_path)
    unpadded = copy.deepcopy(padded)
    unpadded.set_attention("auto", unpad=True)
    assert max(differences(padded, unpadded)) < 2e-5

    def wrongly(*args, **kwargs):
        return attend(*args, **kwargs | wrong)

    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, wrongly)
    assert min(differences(padded, unpadded)) > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", ["qwen3", "mistral window", "eurobert", "modernbert window"])
def test_encoding_equals_padded_for_both_padding_sides_of_the_tokenizer(case, side, tmp_path):
    padded = load(case, tmp_path, "last")
    padded.query_tower.tokenizer.padding_side = side
    padded.query_tower.tokenizer.save_pretrained(tmp_path)
    texts = ["owl", "a blue whale swims in the deep sea and sings", "the red fox", ""]
    plain = DualEncoder.load(tmp_path, pooling="last", **SIZE).encode_passages(texts)
    unpadded = DualEncoder.load(tmp_path, pooling="last", **SIZE)
    unpadded.set_attention("auto", unpad=True)
    np.testing.assert_allclose(unpadded.encode_passages(texts), plain, atol=2e-6)
    alone = [unpadded.encode_passages([text])[0] for text in texts]
    np.testing.assert_allclose(alone, plain, atol=2e-6)


@pytest.mark.parametrize("case", ["qwen3", "modernbert window"])
def test_gradient_checkpointing_keeps_the_mask(case, tmp_path):
    plain = load(case, tmp_path)
    plain.set_attention("auto", unpad=True)
    recomputed = copy.deepcopy(plain)
    recomputed.gradient_checkpointing_enable()
    assert max(differences(plain.train(), recomputed.train())) < 2e-5


@pytest.mark.parametrize("case", ["qwen3", "llama", "modernbert window"])
def test_autocast_casts_the_inputs_of_attention(case, tmp_path, monkeypatch):
    """Position embeddings would leave the queries and keys of decoders in float32."""
    encoder = load(case, tmp_path)
    encoder.set_attention("auto", unpad=True)
    types = set()

    def recorded(inputs, *args):
        types.update(each.dtype for each in inputs)
        return by_length(inputs, *args)

    monkeypatch.setattr(kernels, "by_length", recorded)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = vectors_and_gradients(encoder)
    assert types == {torch.bfloat16}
    assert (
        torch.nn.functional.cosine_similarity(
            found.float(), vectors_and_gradients(encoder)[0]
        ).min()
        > 0.999
    )


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, 3)])
def test_dropout_of_attention_keeps_the_mask(causal, window, monkeypatch):
    """Bytes that drop nothing give the output without dropout, times the factor of dropout."""
    monkeypatch.setattr(kernels, "random_bytes", lambda shape: torch.full(shape, 255))
    torch.manual_seed(0)
    inputs = tuple(torch.randn(1, heads, 17, 8) for heads in (2, 1, 1))
    runs = ((1, 7), (2, 5))
    plain = by_length(inputs, 0.0, None, runs, causal, window)
    dropped = by_length(inputs, 0.25, None, runs, causal, window)
    torch.testing.assert_close(dropped, plain / 0.75)
    hides_less = by_length(inputs, 0.25, None, runs, causal and window is not None, None)
    assert (dropped - hides_less).abs().max() > 1e-3
