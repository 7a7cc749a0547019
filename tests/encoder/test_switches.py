"""Every way to compute an encoder against the plain one: vectors, gradients, dropout; each with a control that must differ."""

import copy

import numpy as np
import pytest
import torch
from helpers import VOCABULARY, largest_difference, micro_batches, run_steps, tiny_encoder
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, BertTokenizerFast

from contaccum.batch import Tokens
from contaccum.encoder import DualEncoder, EncoderSettings, Tower
from contaccum.encoder.unpadded import FAMILIES, by_text, jagged, pack
from contaccum.engine import Engine
from contaccum.errors import InputError
from contaccum.methods import METHODS

SAME = 1e-5
DIFFERENT = 1e-3
SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 20, "pad_token_id": 0}
NAMES = {  # some families have names of their own for the same sizes
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "modernbert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
}
USUAL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def family_encoder(family: str, pooling: str = "mean", **config) -> DualEncoder:
    """Tied towers of two random layers of any family."""
    torch.manual_seed(0)
    made = AutoConfig.for_model(family, **SIZES, **NAMES.get(family, USUAL), **config)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = BertTokenizerFast(vocab={token: i for i, token in enumerate(words)})
    tower = Tower(AutoModel.from_config(made), tokenizer, pooling)
    return DualEncoder(tower, tower, EncoderSettings(max_query_length=16, max_passage_length=16, tie_towers=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_unpadded_vectors_are_the_padded_ones_in_every_family(family, pooling):
    padded = family_encoder(family, pooling).eval()
    unpadded = copy.deepcopy(padded)
    unpadded.set_attention("auto", unpad=True)
    batch = micro_batches(1, 4, hard_negatives=1)[0]
    for plain, packed in zip(padded(batch), unpadded(batch), strict=True):
        torch.testing.assert_close(packed, plain, atol=1e-6, rtol=0)


def test_attention_across_texts_would_show():
    """Negative control: the same packed row, read as one text."""
    encoder = family_encoder("bert").eval()
    encoder.set_attention("auto", unpad=True)
    tokens = micro_batches(1, 4)[0].passages
    tower = encoder.query_tower
    right = tower(tokens)
    packed = pack(tokens)
    tower.backbone.set_attn_implementation("sdpa")
    one = tower.backbone(input_ids=packed.input_ids, position_ids=packed.position_ids).last_hidden_state[0]
    first = one[: packed.bounds[1]].mean(0)
    assert (first - right[0]).abs().max() > DIFFERENT


def test_texts_are_encoded_the_same_without_padding(minilm):
    texts = ["Owls live in old barns. " * 9, "Where do owls live?", "", "Owls"]
    encoder = DualEncoder.load(minilm)
    padded = encoder.encode_passages(texts)
    encoder.set_attention("auto", unpad=True)
    np.testing.assert_allclose(encoder.encode_passages(texts), padded, atol=1e-6)


def test_packing_by_hand():
    tokens = Tokens(torch.tensor([[7, 8, 0], [9, 5, 6], [4, 0, 0]]), torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]))
    packed = pack(tokens, first=2)
    assert packed.input_ids.tolist() == [[7, 8, 9, 5, 6, 4]]
    assert packed.position_ids.tolist() == [[2, 3, 2, 3, 4, 2]]
    assert packed.kept.tolist() == [0, 1, 3, 4, 5, 6]
    assert packed.bounds.tolist() == [0, 2, 5, 6]
    assert (packed.shortest, packed.longest) == (1, 3)


def test_both_ways_to_attend_within_texts_agree():
    """The call for accelerators, run on the CPU, against the loop over texts, which is taken there."""
    torch.manual_seed(0)
    bounds = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    query, key, value = (torch.randn(1, 2, 17, 8, requires_grad=True) for _ in range(3))
    found = []
    for way in (by_text, jagged):
        output = way(query, key, value, 0.0, 0.3, bounds, 3, 9)
        assert output.shape == (17, 2, 8)
        found.append((output, *torch.autograd.grad(output.square().sum(), (query, key, value))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3)[0].transpose(0, 1)
    assert (whole - found[0][0]).abs().max() > DIFFERENT


@pytest.mark.parametrize("method", list(METHODS))
def test_unpadded_training_has_the_gradients_of_padded(method):
    data = [micro_batches(3, 4, 1, seed=i) for i in range(2)]
    start = tiny_encoder()
    plain, _ = run_steps(method, data, bank_size=16, push=12, encoder=start)
    start.set_attention("auto", unpad=True)
    assert largest_difference(run_steps(method, data, bank_size=16, push=12, encoder=start)[0], plain) < SAME


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("method", list(METHODS))
def test_packed_training_has_the_gradients_of_plain(method, unpad):
    """Over two steps, so that weights packed for the first and used in the second would show."""
    data = [micro_batches(3, 4, 1, seed=i) for i in range(2)]
    start = tiny_encoder()
    plain, _ = run_steps(method, data, bank_size=16, push=12, encoder=start)
    start.set_attention("auto", unpad)
    assert start.pack_linears() == 2 * (6 + 1)  # two towers of one layer with six linear ones, and a pooler
    packed, _ = run_steps(method, data, bank_size=16, push=12, encoder=start)
    assert largest_difference(packed, plain) < SAME
    assert (
        largest_difference(packed, run_steps(method, data[::-1], bank_size=16, push=12, encoder=start)[0]) > DIFFERENT
    )


def test_unpadded_grad_cache_replays_its_dropout():
    """In-batch with the same micro-batches draws the same noise once; other noise in the second pass would show."""
    data = [micro_batches(3, 4)]
    start = tiny_encoder(dropout=0.3)
    start.set_attention("auto", unpad=True)
    start.gradient_checkpointing_enable()
    cached, _ = run_steps("grad_cache", data, encoder=start)
    assert largest_difference(cached, run_steps("in_batch", data, encoder=start)[0]) < SAME
    assert largest_difference(cached, run_steps("in_batch", data, encoder=start, seed=1)[0]) > DIFFERENT


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_chosen_attention_runs_and_gives_the_same_vectors(name, monkeypatch):
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


def test_the_choice_of_attention_is_not_saved(tmp_path):
    encoder = family_encoder("bert")
    encoder.set_attention("auto", unpad=True)
    encoder.save(tmp_path / "model")
    assert "contaccum" not in (tmp_path / "model" / "query_encoder" / "config.json").read_text()
    loaded = DualEncoder.load(tmp_path / "model")
    assert loaded.query_tower.backbone.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "choice", "sentence"),
    [
        ("bert", ("flash_attention_2", False), "needs the package flash-attn"),
        ("mpnet", ("auto", True), "model.unpad is true for a mpnet encoder, expected one of bert, "),
        ("mpnet", ("sdpa", False), "the mpnet encoder "),
    ],
)
def test_attention_that_cannot_be_had_is_refused(family, choice, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        family_encoder(family).set_attention(*choice)
    assert "\n" not in str(error.value)


def test_unpadded_passes_refuse_padding_on_the_left():
    encoder = family_encoder("bert")
    encoder.query_tower.tokenizer.padding_side = "left"
    with pytest.raises(InputError, match="pads on the left"):
        encoder.set_attention("auto", unpad=True)


DROPOUTS = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "roberta": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "mpnet": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "electra": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "distilbert": ("dropout", "attention_dropout"),
    "modernbert": ("embedding_dropout", "mlp_dropout", "attention_dropout"),
}


@pytest.mark.parametrize("family", DROPOUTS)
def test_set_dropout_reaches_every_dropout_of_the_family(family):
    """Attention's own too, which some families hold as a plain number."""
    encoder = family_encoder(family, **dict.fromkeys(DROPOUTS[family], 0.5)).train()
    batch = micro_batches(1, 4)[0]
    assert not torch.equal(encoder(batch)[0], encoder(batch)[0])
    encoder.set_dropout(0.0)
    assert torch.equal(encoder(batch)[0], encoder(batch)[0])


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_set_dropout_sets_plain_numbers_too(family):
    """With every nn.Dropout off, what is left is what a family holds as a number: ModernBERT's attention, nothing of BERT's."""
    encoder = family_encoder(family, **dict.fromkeys(DROPOUTS[family], 0.0)).train()
    encoder.set_dropout(0.5)
    for module in encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = micro_batches(1, 4)[0]
    assert torch.equal(encoder(batch)[0], encoder(batch)[0]) == (family == "bert")


@pytest.mark.acceptance  # compilers take their time
@pytest.mark.parametrize("graphs", [False, True])
def test_compiled_training_has_the_gradients_of_plain(graphs, tmp_path):
    """On a CPU ``graphs`` records none, but lengths are padded to buckets and gradients keep their memory."""
    data = [micro_batches(3, 4, 1, seed=i) for i in range(2)]
    start, trained = tiny_encoder(), []

    def switch(encoder):
        trained.append(encoder)
        encoder.compile_backbones(graphs)

    plain, _ = run_steps("cont_cache", data, bank_size=16, push=12, encoder=start)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    found, _ = run_steps("cont_cache", data, bank_size=16, push=12, encoder=start, switch=switch)
    assert counters["unique_graphs"] > before
    zero = {name: torch.zeros_like(parameter) for name, parameter in trained[0].named_parameters()}
    assert largest_difference([{**zero, **step} for step in found], [{**zero, **step} for step in plain]) < 1e-4
    trained[0].save(tmp_path / "model")
    start.save(tmp_path / "plain")
    states = [load_file(tmp_path / name / "query_encoder" / "model.safetensors") for name in ("model", "plain")]
    assert states[0].keys() == states[1].keys()


@pytest.mark.acceptance
def test_compiled_passes_replay_their_dropout():
    """GradCache's first pass, without graph, and its second, with one, are compiled apart; their noise must be one."""
    batches = micro_batches(2, 4)
    encoder = tiny_encoder(dropout=0.3).train()
    encoder.compile_backbones()
    engine = Engine(device="cpu")
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    passes = []
    for graph in (False, True, True):
        with torch.set_grad_enabled(graph):
            passes.append([engine.encode(batch)[0].detach() for batch in engine.micro_steps(batches)])
        engine.step = int(len(passes) > 1)  # the third pass belongs to another step
    for first, second, other in zip(*passes, strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=0)
        assert (first - other).abs().max() > DIFFERENT
