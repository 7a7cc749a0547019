"""Options of the encoder's computation equal the plain one in vectors, gradients and dropout; each
with a negative control."""

import json

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, largest_difference, micro_batches, run_steps, tiny_encoder
from tiny_families import FAMILIES, OTHERS, SIZES
from transformers import AutoConfig, AutoModel

from contaccum.batch import Tokens
from contaccum.encoder import DualEncoder, EncoderSettings, Tower, kernels
from contaccum.encoder.kernels import (
    FULL_ATTENTION,
    UNPADDED_FAMILIES,
    by_length,
    padding_bias,
    varlen,
)
from contaccum.encoder.tokenizer import wordpiece_tokenizer
from contaccum.errors import InputError
from contaccum.methods import METHODS

SAME = 1e-5
DIFFERENT = 1e-3
LIMITS = {"vocab_size": VOCABULARY, "max_position_embeddings": 20, "pad_token_id": 0}


def family_encoder(family: str, pooling: str = "mean", **config) -> DualEncoder:
    """Tied towers with two random layers of a family."""
    torch.manual_seed(0)
    sizes = (FAMILIES | OTHERS).get(family, SIZES)
    made = AutoConfig.for_model(family, **LIMITS, **sizes | config)
    # special tokens only
    tower = Tower(AutoModel.from_config(made), wordpiece_tokenizer([], 5), pooling)
    return DualEncoder(
        tower, tower, EncoderSettings(max_query_length=16, max_passage_length=16, tie_towers=True)
    )


@pytest.mark.parametrize("hidden", [False, True])
def test_attention_with_dropout_equals_its_formula_with_the_same_bytes(hidden, monkeypatch):
    """Outputs and gradients in float64, from the definition of dropout."""
    dropout = 0.1
    torch.manual_seed(0)
    inputs = [torch.randn(3, 2, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    drawn = kernels.random_bytes(torch.Size((3, 2, 7, 7)))
    monkeypatch.setattr(kernels, "random_bytes", lambda shape: drawn)
    # hidden: all tokens but those at a distance of at most 2 to the left
    mask = torch.tensor([[0 <= row - column < 3 for column in range(7)] for row in range(7)])
    found = kernels.attention_with_dropout(*inputs, dropout, 0.3, mask if hidden else None)
    probability = round(256 * dropout) / 256
    query, key, value = inputs
    scores = 0.3 * torch.einsum("bhqd,bhkd->bhqk", query, key)
    weights = scores.exp() * mask if hidden else scores.exp()
    weights = weights / weights.sum(-1, keepdim=True)
    kept = torch.where(drawn / 256 < probability, 0.0, weights / (1 - probability))
    expected = torch.einsum("bhqk,bhkd->bhqd", kept, value)
    for one, other in zip(
        (found, *torch.autograd.grad(found.square().sum(), inputs)),
        (expected, *torch.autograd.grad(expected.square().sum(), inputs)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)
    # negative control: without dropout
    plain = torch.nn.functional.scaled_dot_product_attention(*inputs, scale=0.3)
    assert (plain - found).abs().max() > DIFFERENT


def test_random_bytes_are_uniform_and_repeat_with_the_seed():
    torch.manual_seed(0)
    drawn = kernels.random_bytes(torch.Size((3, 11, 4096)))
    counts = drawn.flatten().bincount(minlength=256).double()
    expected = drawn.numel() / 256
    # chi-square with 255 degrees of freedom: above 340 in one of 3,000 seeds
    assert 180 < ((counts - expected).square() / expected).sum() < 340
    torch.manual_seed(0)
    assert torch.equal(drawn, kernels.random_bytes(torch.Size((3, 11, 4096))))
    assert not torch.equal(drawn, kernels.random_bytes(torch.Size((3, 11, 4096))))


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_dropout_of_the_attention_weights_is_a_setting_of_its_own(family, monkeypatch):
    encoder = family_encoder(family).train()
    encoder.set_attention("auto", unpad=True)
    used = []
    attention = kernels.attention_with_dropout

    def recorded(query, key, value, dropout, scaling, mask):
        used.append(dropout)
        return attention(query, key, value, dropout, scaling, mask)

    monkeypatch.setattr(kernels, "attention_with_dropout", recorded)
    batch = micro_batches(1, 4)[0]
    encoder.set_dropout(0.0, attention=0.25)
    encoder(batch)
    assert set(used) == {0.25}
    used.clear()
    encoder.set_dropout(0.25, attention=0.0)
    one, other = encoder(batch)[0], encoder(batch)[0]
    assert not used
    if family == "bert":  # qwen3 has no other dropout
        assert (one - other).abs().max() > DIFFERENT
    encoder.set_dropout(None, attention=0.5)
    encoder(batch)
    assert set(used) == {0.5}


@pytest.mark.parametrize(
    ("dtype", "same", "causal", "window"),
    [
        (torch.float32, 1e-5, True, None),
        (torch.bfloat16, 0.05, False, None),
        (torch.bfloat16, 0.05, True, 3),
    ],
)
@pytest.mark.parametrize("width", [8, 12])
def test_varlen_attention_equals_attention_by_length(
    width, dtype, same, causal, window, monkeypatch
):
    """The kernels exist only on a GPU; here a loop over texts replaces them, with their layout of
    arguments and results."""

    def flash(
        query, key, value, starts, ends, most, most_keys, dropout, is_causal, debug, *, scale,
        window_size_left, window_size_right,
    ):  # fmt: skip
        assert starts is ends
        assert query.shape[-1] % 8 == 0
        length = None if window_size_left is None else window_size_left + 1
        assert window_size_right == (0 if is_causal and length is not None else window_size_left)
        inputs = [each.transpose(0, 1).unsqueeze(0) for each in (query, key, value)]
        runs = [(1, length) for length in starts.diff().tolist()]
        return (by_length(inputs, dropout, scale, runs, is_causal, length),)

    def efficient(query, key, value, bias, *texts_and_dropout_and_mask_type, scale):
        *rest, mask_type, _ = texts_and_dropout_and_mask_type
        assert bias is None
        assert query.shape == key.shape
        inputs = (each.squeeze(0) for each in (query, key, value))
        output = flash(
            *inputs, *rest, mask_type == 1, False, scale=scale, window_size_left=None,
            window_size_right=None,
        )  # fmt: skip
        return (output[0].unsqueeze(0),)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient)
    torch.manual_seed(0)
    bounds = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    # two heads of the queries share one of the keys
    query, key, value = (
        torch.randn(1, heads, 17, width, dtype=dtype, requires_grad=True) for heads in (2, 1, 1)
    )
    found = []
    for output in (
        by_length((query, key, value), 0.0, None, ((1, 5), (1, 9), (1, 3)), causal, window),
        varlen((query, key, value), 0.0, None, bounds, 9, causal, window),
    ):
        assert output.shape == (17, 2, width)
        found.append((output, *torch.autograd.grad(output.square().sum(), (query, key, value))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=same, rtol=same)
    whole = by_length((query, key, value), 0.0, None, ((1, 17),), causal, window)
    assert (whole - found[1][0]).abs().max() > DIFFERENT


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 3)])
def test_varlen_attention_calls_kernels_of_this_torch(dtype, window):
    bounds = torch.tensor([0, 5, 14, 17], dtype=torch.int32, device="meta")
    inputs = [
        torch.randn(1, heads, 17, 12, dtype=dtype, device="meta", requires_grad=True)
        for heads in (2, 1, 1)
    ]
    output = varlen(inputs, 0.1, 0.3, bounds, 9, True, window)
    assert output.shape == (17, 2, 12)
    assert output.requires_grad
    with pytest.raises((TypeError, RuntimeError)):  # negative control: the bounds of another kernel
        varlen(inputs, 0.1, 0.3, bounds.tolist(), 9)


def gpu_like(tokens: Tokens) -> Tokens:
    """Move tokens to the meta device, where waiting for a value fails; the mask stays on the CPU
    too."""
    return Tokens(
        tokens.input_ids.to("meta"), tokens.attention_mask.to("meta"), tokens.attention_mask
    )


@pytest.mark.parametrize(
    ("family", "unpadded"),
    [
        *((family, False) for family in FULL_ATTENTION),
        *((family, True) for family in UNPADDED_FAMILIES),
    ],
)
def test_a_pass_never_waits_for_the_device(family, unpadded):
    encoder = family_encoder(family).to("meta")
    encoder.set_attention("auto", unpadded)
    tower = encoder.query_tower
    padded = micro_batches(1, 4)[0].passages
    whole = Tokens(padded.input_ids, torch.ones_like(padded.attention_mask))
    for tokens in (padded, whole):
        assert tower(gpu_like(tokens)).shape == (4, 32)
    with pytest.raises(
        (RuntimeError, NotImplementedError)
    ):  # negative control: no copy of the mask on the CPU
        tower(Tokens(*(each.to("meta") for each in (padded.input_ids, padded.attention_mask))))


@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_ready_masks_give_equal_vectors(family):
    backbone = family_encoder(family).eval().query_tower.backbone
    tokens = micro_batches(1, 4)[0].passages
    mask = tokens.attention_mask
    assert not mask.all()
    bias = padding_bias(mask, torch.float32)
    plain, ready, none = (
        backbone(tokens.input_ids, each).last_hidden_state for each in (mask, bias, None)
    )
    torch.testing.assert_close(ready[mask > 0], plain[mask > 0], atol=1e-6, rtol=0)
    assert (none[mask > 0] - plain[mask > 0]).abs().max() > DIFFERENT


def test_lengths_are_rounded_on_a_gpu():
    tower = family_encoder("bert").query_tower  # at most 20 tokens
    lengths = []
    tower.backbone.register_forward_pre_hook(
        lambda module, args, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )

    def made(length: int, padded: bool = True) -> Tokens:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, -1] = int(not padded)
        return Tokens(torch.full((2, length), 7), mask)

    vectors = tower.eval()(made(13))
    tower(made(13).to(torch.device("cpu")))
    tower.to("meta")
    for tokens in (made(13), made(16), made(18), made(13, padded=False)):
        tower(gpu_like(tokens))
    assert vectors.shape == (2, 32)
    assert lengths == [13, 13, 16, 16, 20, 13]


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("method", list(METHODS))
def test_unpadded_gradients_equal_padded(method, tie):
    data = [micro_batches(3, 4, 1, seed=i) for i in range(2)]
    start = tiny_encoder(tie=tie)
    plain, _ = run_steps(method, data, bank_size=16, push=12, encoder=start)
    start.set_attention("auto", unpad=True)
    assert (
        largest_difference(run_steps(method, data, bank_size=16, push=12, encoder=start)[0], plain)
        < SAME
    )


def test_unpadded_grad_cache_replays_dropout():
    """In-batch draws the same noise once per pass; other noise in the second pass changes the
    gradients."""
    data = [micro_batches(3, 4)]
    start = tiny_encoder(dropout=0.3)
    start.set_attention("auto", unpad=True)
    start.gradient_checkpointing_enable()
    cached, _ = run_steps("grad_cache", data, encoder=start)
    assert largest_difference(cached, run_steps("in_batch", data, encoder=start)[0]) < SAME
    assert (
        largest_difference(cached, run_steps("in_batch", data, encoder=start, seed=1)[0])
        > DIFFERENT
    )


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_implementations_give_equal_vectors(name, monkeypatch):
    encoder = family_encoder("bert").eval()
    batch = micro_batches(1, 4)[0]
    plain = encoder(batch)[0]
    encoder.set_attention(name)
    calls = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    torch.testing.assert_close(encoder(batch)[0], plain, atol=1e-6, rtol=0)
    assert bool(calls) == (name == "sdpa")


def test_attention_choice_is_not_saved(tmp_path):
    encoder = family_encoder("bert")
    encoder.set_attention("auto", unpad=True)
    encoder.save(tmp_path / "model")
    assert "contaccum" not in (tmp_path / "model" / "config.json").read_text()
    loaded = DualEncoder.load(tmp_path / "model")
    assert loaded.query_tower.backbone.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "choice", "sentence"),
    [
        (
            "mpnet",
            ("auto", True),
            "model.unpad is true, but the model type is mpnet; expected bert, ",
        ),
        ("mpnet", ("sdpa", False), "the model type mpnet does not support it"),
    ],
)
def test_unsupported_attention_is_refused(family, choice, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        family_encoder(family).set_attention(*choice)
    assert "\n" not in str(error.value)


def test_unsupported_gradient_checkpointing_is_refused():
    with pytest.raises(InputError, match="true, but the model type mpnet does not support it"):
        family_encoder("mpnet").gradient_checkpointing_enable()


DROPOUTS = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "distilbert": ("dropout", "attention_dropout"),
    "modernbert": ("embedding_dropout", "mlp_dropout", "attention_dropout"),
    "gpt_bigcode": ("embd_pdrop", "resid_pdrop", "attn_pdrop"),
}


def test_fingerprint_of_a_family_with_weights_without_dimensions():
    encoder = family_encoder("apertus")
    scale = encoder.query_tower.backbone.layers[0].mlp.act_fn.beta
    assert scale.dim() == 0
    before = encoder.fingerprint("query")
    scale.data += 1
    assert encoder.fingerprint("query") != before


@pytest.mark.parametrize("family", DROPOUTS)
def test_set_dropout_sets_every_dropout_of_the_family(family):
    """Attention dropout too, which is a plain number in some families."""
    encoder = family_encoder(family, **dict.fromkeys(DROPOUTS[family], 0.5)).train()
    batch = micro_batches(1, 4)[0]
    assert not torch.equal(encoder(batch)[0], encoder(batch)[0])
    encoder.set_dropout(0.0)
    assert torch.equal(encoder(batch)[0], encoder(batch)[0])
    assert not encoder.has_dropout()


@pytest.mark.parametrize(
    ("family", "after_attention"),
    [
        ("deberta", "output.dropout"),
        ("deberta-v2", "output.dropout"),
        ("opt", "layers.0.dropout"),
        ("nomic_bert", "post_attention_dropout"),
        ("gpt_neox", "post_attention_dropout"),
        ("phi3", "resid_attn_dropout"),
    ],
)
def test_set_dropout_tells_attention_weights_from_the_layers_after_them(family, after_attention):
    encoder = family_encoder(family)
    encoder.set_dropout(0.25, attention=0.5)
    found: dict[float, set[str]] = {0.25: set(), 0.5: set()}
    for path, module in encoder.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name and "layerdrop" not in name:
                found[value].add(f"{path}.{name}")
        if isinstance(module, torch.nn.Dropout):
            found[module.p].add(path)
    layers = encoder.query_tower.backbone.config.num_hidden_layers
    assert len(found[0.5]) == layers  # one for each
    assert sum(name.endswith(after_attention) for name in found[0.25]) >= 1
    assert not any(name.endswith(after_attention) for name in found[0.5])


def test_token_vectors_narrower_than_the_layers(tmp_path):
    """As in facebook/opt-350m."""
    encoder = family_encoder(
        "opt", word_embed_proj_dim=16, ffn_dim=64, do_layer_norm_before=False
    ).eval()
    vectors = encoder.encode_queries(["a", "b"])
    assert vectors.shape == (2, 16)
    encoder.save(tmp_path / "model")
    np.testing.assert_array_equal(
        DualEncoder.load(tmp_path / "model").encode_queries(["a", "b"]), vectors
    )
    pooling = json.loads((tmp_path / "model" / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 16
