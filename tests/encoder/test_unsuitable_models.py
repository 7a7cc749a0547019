"""Models and settings that would load but give wrong vectors are refused, or a warning says so.

All models are tiny, have random weights and are written by transformers or sentence-transformers.
"""

import itertools
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers import train_config, write_beir
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny_families import TEXTS, family_folder
from transformers import AutoConfig, AutoTokenizer

from contaccum import DualEncoder, train
from contaccum.encoder.folders import family_settings
from contaccum.errors import InputError

SIZE = {"max_query_length": 12, "max_passage_length": 12}


def warned(function, *words: str) -> list[str]:
    """Call ``function``; return those of its warnings that contain all of ``words``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    messages = [str(each.message) for each in caught]
    return [message for message in messages if all(word in message for word in words)]


def change_json(path: Path, **values) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return family_folder("bert", tmp_path_factory.mktemp("bert") / "plain")


# prefixes that use up the token limit. "the" is one token, [CLS] and [SEP] are two


@pytest.mark.parametrize("family", ["bert", "qwen3"])
@pytest.mark.parametrize("side", ["query", "passage"])
def test_a_prefix_that_leaves_no_token_is_refused(family, side, tmp_path):
    folder = family_folder(family, tmp_path / family)
    special = 2 if family != "qwen3" else 1  # qwen3 gets an end-of-text token
    words = 12 - special
    encoder = DualEncoder.load(folder, **SIZE, **{f"{side}_prefix": "the " * 4})
    # each vector is that of its text
    encode = getattr(encoder, "encode_queries" if side == "query" else "encode_passages")
    fox, whale = encode(["fox", "whale"])
    assert np.abs(fox - whale).max() > 1e-3
    with pytest.raises(InputError) as error:
        DualEncoder.load(folder, **SIZE, **{f"{side}_prefix": "the " * words})
    assert str(error.value) == (
        f"{side}_prefix takes 12 tokens with the special tokens, and max_{side}_length is 12, so "
        f"nothing of a {side} is left. Shorten the prefix, or set max_{side}_length to more than "
        "12."
    )


def test_a_prefix_that_leaves_few_tokens_warns_with_both_numbers(bert):
    def load(words: int) -> None:
        DualEncoder.load(bert, **SIZE, query_prefix="the " * words)

    assert warned(lambda: load(4), "query_prefix") == []  # 6 of 12 tokens are left
    assert warned(lambda: load(5), "query_prefix") == [
        "query_prefix takes 7 tokens with the special tokens, and max_query_length is 12, which "
        "leaves 5 tokens for a query. Shorten the prefix, or raise max_query_length."
    ]


def test_a_prefix_is_no_problem_if_the_tokenizer_cuts_the_start(bert, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(bert, truncation_side="left")
    folder = family_folder("bert", tmp_path / "left")
    tokenizer.save_pretrained(folder)
    encoder = DualEncoder.load(folder, **SIZE, query_prefix="the " * 20)
    fox, whale = encoder.encode_queries(["fox", "whale"])
    assert np.abs(fox - whale).max() > 1e-3


def test_prompts_of_a_sentence_transformers_folder_are_counted(bert, tmp_path):
    for words in (2, 10):
        modules = [Transformer(str(bert), max_seq_length=12), Pooling(32, "mean")]
        theirs = SentenceTransformer(modules=modules, prompts={"query": "the " * words})
        theirs.save(str(tmp_path / str(words)), create_model_card=False)
    DualEncoder.load(tmp_path / "2")
    with pytest.raises(InputError, match="query_prefix takes 12 tokens with the special tokens"):
        DualEncoder.load(tmp_path / "10")


@pytest.mark.parametrize("prefix", ["model", "mixture"])
def test_training_refuses_a_prefix_that_leaves_no_token(prefix, bert, tmp_path):
    data = write_beir(tmp_path / "data")

    def config(words: int):
        text = "the " * words
        if prefix == "model":
            changes = {"model.passage_prefix": text}
        else:
            sets = [{"train": str(data), "passage_prefix": each} for each in (text, "")]
            changes = {"data.train": "", "data.mixture": sets}
        limits = {"model.max_query_length": 12, "model.max_passage_length": 12}
        steps = {"optim.max_steps": 1, "model.name": str(bert)}
        return train_config(data, tmp_path / f"run{words}", **limits, **steps, **changes)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of two prefixes, evaluation uses neither
        train(config(2))
        start = "data.mixture: passage_prefix" if prefix == "mixture" else "passage_prefix"
        with pytest.raises(InputError, match=f"^{start} takes 12 tokens"):
            train(config(10))
    assert not (tmp_path / "run10" / "model").exists()


# settings of a model family


@pytest.mark.parametrize(
    "name",
    [
        "/cache/hub/models--intfloat--e5-base-v2/snapshots/f52bf8ec8c71",
        "models/e5-base-v2",
    ],
)
def test_a_cached_copy_has_the_settings_of_its_family(name):
    assert family_settings(name) == family_settings("intfloat/e5-base-v2") != {}


@pytest.mark.parametrize(
    "name",
    ["my-e5-base-v2-tuned", "models--a--bert/snapshots/e5-base-v2", ""],
)
def test_names_of_no_family_have_no_settings(name):
    assert family_settings(name) == {}


def test_a_model_in_the_cache_of_the_hub_is_encoded_with_its_prefix_and_similarity(tmp_path):
    for repository, prefix, similarity in (
        ("models--intfloat--e5-base-v2", "query: ", "cosine"),
        ("models--facebook--contriever", "", "dot"),
    ):
        folder = tmp_path / repository / "snapshots" / "a1b2"
        family_folder("bert", folder, positions=100)
        encoder = DualEncoder.load(folder)
        assert encoder.settings.similarity == similarity
        bare = DualEncoder.load(folder, query_prefix="", passage_prefix="")
        np.testing.assert_array_equal(
            encoder.encode_queries(["fox"]), bare.encode_queries([prefix + "fox"])
        )


def test_a_fine_tuned_copy_has_the_settings_of_its_original_with_a_warning(bert, tmp_path):
    folder = family_folder("bert", tmp_path / "mine")
    change_json(folder / "config.json", _name_or_path="intfloat/e5-small-v2")
    encoders = []
    (message,) = warned(lambda: encoders.append(DualEncoder.load(folder, **SIZE)), "copy of")
    assert "copy of intfloat/e5-small-v2, so pooling 'mean', similarity 'cosine'" in message
    assert encoders[0].settings.query_prefix == "query: "
    chosen = {"pooling": "cls", "similarity": "dot", "query_prefix": "", "passage_prefix": "x"}
    assert warned(lambda: encoders.append(DualEncoder.load(folder, **SIZE, **chosen))) == []
    assert encoders[1].settings.query_prefix == ""
    # the same in a folder of sentence-transformers, which states pooling and similarity itself
    SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32, "cls")]).save(
        str(tmp_path / "theirs"), create_model_card=False
    )
    change_json(tmp_path / "theirs" / "config.json", _name_or_path="intfloat/e5-small-v2")
    (message,) = warned(lambda: encoders.append(DualEncoder.load(tmp_path / "theirs")), "copy of")
    assert "so query_prefix 'query: ', passage_prefix 'passage: ' are used" in message
    assert (encoders[2].settings.pooling, encoders[2].settings.query_prefix) == ("cls", "query: ")


def test_an_adapter_has_the_settings_of_its_base(tmp_path):
    base = tmp_path / "models--intfloat--e5-base-v2" / "snapshots" / "a1b2"
    family_folder("bert", base, positions=100)
    model = get_peft_model(
        transformers.AutoModel.from_pretrained(base), LoraConfig(target_modules=["query"])
    )
    model.save_pretrained(str(tmp_path / "adapter"))
    assert DualEncoder.load(tmp_path / "adapter").settings.query_prefix == "query: "


def test_an_adapter_has_the_modules_of_its_base(bert, tmp_path):
    """peft writes neither pooling nor prompts."""
    modules = [Transformer(str(bert), max_seq_length=9), Pooling(32, "cls")]
    theirs = SentenceTransformer(modules=modules, prompts={"query": "the "}, device="cpu")
    theirs.save(str(tmp_path / "base"), create_model_card=False)
    dense = SentenceTransformer(modules=[*modules, Dense(32, 16)], device="cpu")
    dense.save(str(tmp_path / "dense"), create_model_card=False)
    for base in ("base", "dense"):
        plain = transformers.AutoModel.from_pretrained(tmp_path / base)
        model = get_peft_model(plain, LoraConfig(target_modules=["query"]))  # changes nothing yet
        model.save_pretrained(str(tmp_path / f"adapter-{base}"))
    ours = DualEncoder.load(tmp_path / "adapter-base")
    assert ours.adapted
    assert (ours.settings.pooling, ours.settings.max_passage_length) == ("cls", 9)
    found = ours.encode_queries(TEXTS), ours.encode_passages(TEXTS)
    expected = theirs.encode_query(TEXTS), theirs.encode_document(TEXTS)
    unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in expected]
    np.testing.assert_allclose(found, unit, atol=1e-6)
    assert np.abs(unit[0] - unit[1]).max() > 1e-3
    with pytest.raises(InputError, match=r"the base of the adapter, .*dense, has Dense modules"):
        DualEncoder.load(tmp_path / "adapter-dense")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("my-e5-tuned", "e5"),
        ("models--x--me5-large/snapshots/a1b2", "me5"),
        ("stage5-bert", None),  # not a word of its own
    ],
)
def test_a_name_of_a_family_without_known_settings_warns(name, family, tmp_path):
    folder = family_folder("bert", tmp_path / name)
    found = warned(lambda: DualEncoder.load(folder, **SIZE))
    if family is None:
        assert found == []
    else:
        assert len(found) == 1
        assert f"seems to be a {family} model" in found[0]
        assert "pooling, similarity, query_prefix, passage_prefix have their defaults" in found[0]
        given = {"pooling": "cls", "similarity": "dot", "query_prefix": "", "passage_prefix": ""}
        assert warned(lambda: DualEncoder.load(folder, **SIZE, **given)) == []


def test_a_saved_model_keeps_its_settings_whatever_its_name(bert, tmp_path):
    DualEncoder.load(bert, **SIZE).save(tmp_path / "e5-base-v2")
    assert warned(lambda: DualEncoder.load(tmp_path / "e5-base-v2")) == []
    assert DualEncoder.load(tmp_path / "e5-base-v2").settings.query_prefix == ""


# attention in config.json


@pytest.mark.parametrize(
    ("family", "asked", "used"),
    [
        ("bert", "flash_attention_2", "sdpa"),
        ("mpnet", "sdpa", "eager"),  # the model type does not support it
        ("bert", "kernels-community/flash-attn2", "sdpa"),  # code on the Hub, never asked for
    ],
)
def test_transformers_chooses_the_attention_whatever_config_json_asks_for(
    family, asked, used, tmp_path
):
    folder = family_folder(family, tmp_path / family)
    expected = DualEncoder.load(folder, **SIZE).encode_queries(TEXTS)
    change_json(folder / "config.json", attn_implementation=asked)
    encoders = []
    found = warned(lambda: encoders.append(DualEncoder.load(folder, **SIZE)), "attention")
    assert [f"asks for {asked}" in each for each in found] == [True] * (asked != "sdpa")
    (encoder,) = encoders
    assert encoder.query_tower.backbone.config._attn_implementation == used
    np.testing.assert_array_equal(encoder.encode_queries(TEXTS), expected)
    encoder.save(tmp_path / "saved")
    again = DualEncoder.load(tmp_path / "saved").query_tower.backbone.config
    assert again._attn_implementation == used


# models that are no encoders of single texts

CLASSIFIERS = [
    "BertForSequenceClassification",
    "ModernBertForSequenceClassification",
    "Qwen3ForSequenceClassification",
]
HEADS_OF_PRETRAINING = [
    "BertForMaskedLM",
    "ModernBertForMaskedLM",
    "Qwen3ForCausalLM",
]
SIZES = {"vocab_size": 150, "pad_token_id": 0, "max_position_embeddings": 40, "num_labels": 1,
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "num_key_value_heads": 2, "head_dim": 16, "embedding_size": 32, "dim": 32, "n_layers": 2,
    "n_heads": 2, "hidden_dim": 64, "emb_dim": 32}  # fmt: skip


def model_folder(class_name: str, bert: Path, folder: Path) -> Path:
    made = getattr(transformers, class_name)
    config = made.config_class(**SIZES)
    made(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bert).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("class_name", CLASSIFIERS)
def test_classifiers_are_refused(class_name, bert, tmp_path):
    folder = model_folder(class_name, bert, tmp_path / "model")
    with pytest.raises(InputError, match="is a classifier, such as a cross-encoder") as error:
        DualEncoder.load(folder, **SIZE)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("class_name", HEADS_OF_PRETRAINING)
def test_heads_of_pretraining_are_dropped(class_name, bert, tmp_path):
    """Negative control."""
    folder = model_folder(class_name, bert, tmp_path / "model")
    assert DualEncoder.load(folder, **SIZE).dim == 32


def test_colbert_checkpoints_are_refused(bert, tmp_path):
    """As colbert-ir/colbertv2.0: a BERT under its name and the projection of all tokens."""
    folder = model_folder("BertModel", bert, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights = {f"bert.{name}": tensor for name, tensor in weights.items()}
    save_file(
        weights | {"linear.weight": torch.zeros(16, 32)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    change_json(folder / "config.json", architectures=["HF_ColBERT"])
    with pytest.raises(InputError, match="is a ColBERT model, which makes one vector for each to"):
        DualEncoder.load(folder, **SIZE)


def test_models_of_sentence_transformers_that_are_no_encoders_are_refused(bert, tmp_path):
    masked = model_folder("BertForMaskedLM", bert, tmp_path / "masked")
    classifier = model_folder("BertForSequenceClassification", bert, tmp_path / "classifier")
    SparseEncoder(str(masked)).save(str(tmp_path / "sparse"))
    CrossEncoder(str(classifier)).save(str(tmp_path / "cross"))
    modules = [Transformer(str(bert)), Pooling(32, "mean")]
    for name in ("pylate", "multi"):
        SentenceTransformer(modules=modules).save(str(tmp_path / name))
    file = "config_sentence_transformers.json"
    change_json(tmp_path / "pylate" / file, similarity_fn_name="MaxSim", query_prefix="[Q] ")
    change_json(tmp_path / "multi" / file, model_type="MultiVectorEncoder")
    for name, kind in (
        ("sparse", "a sparse encoder"),
        ("cross", "a c(ross-encoder|lassifier)"),
        ("pylate", "a ColBERT model"),
        ("multi", "a ColBERT model"),
    ):
        with pytest.raises(InputError, match=f"{name}: is {kind}"):
            DualEncoder.load(tmp_path / name)


def test_the_adapter_of_a_classifier_is_refused(bert, tmp_path):
    for task in ("SEQ_CLS", "FEATURE_EXTRACTION"):
        made = (
            transformers.AutoModelForSequenceClassification
            if task == "SEQ_CLS"
            else transformers.AutoModel
        )
        model = get_peft_model(
            made.from_pretrained(bert), LoraConfig(target_modules=["query"], task_type=task)
        )
        model.save_pretrained(str(tmp_path / task))
    assert DualEncoder.load(tmp_path / "FEATURE_EXTRACTION", **SIZE).dim == 32  # control
    with pytest.raises(InputError, match="task_type SEQ_CLS and peft_type LORA; expected a LORA"):
        DualEncoder.load(tmp_path / "SEQ_CLS", **SIZE)


@pytest.mark.parametrize("family", ["clip", "gemma3", "llava", "qwen2_vl"])
def test_models_of_text_and_images_are_refused(family, tmp_path):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"the model type {family} has no hidden_size, as that of"):
        DualEncoder.load(tmp_path, **SIZE)


# models whose vectors depend on padding


PADDED = {
    "funnel": {"d_model": 32, "block_sizes": [1, 1], "n_head": 2, "d_head": 16, "d_inner": 64},
    "fnet": {},
    "bert": None,
    "mpnet": None,
    "gpt2": None,
}


@pytest.mark.parametrize("family", PADDED)
def test_models_whose_vectors_depend_on_padding_warn(family, bert, tmp_path):
    own = PADDED[family]
    sizes = {name: SIZES[name] for name in ("vocab_size", "pad_token_id", "num_attention_heads",
        "intermediate_size", "max_position_embeddings", "hidden_size")}  # fmt: skip
    if family == "funnel":
        sizes = {"vocab_size": 150, "pad_token_id": 0}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **(own or {}))
    # AutoModel has two models for a Funnel configuration
    made = transformers.FunnelModel if family == "funnel" else transformers.AutoModel.from_config
    made(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    encoders = []
    found = warned(
        lambda: encoders.append(DualEncoder.load(tmp_path, **SIZE)), "padding changes the vectors"
    )
    assert len(found) == (own is not None)
    # the reason of the warning, by public calls
    texts = ["the red fox", "a blue whale swims in the deep sea"]
    alone = encoders[0].encode_queries(texts, batch_tokens=1)
    together = encoders[0].encode_queries(texts)
    assert (np.abs(alone - together).max() > 1e-5) == (own is not None)
    if found:
        assert f"model type {family}" in found[0]
    # cached vectors of other batches are not reused then
    warned(lambda: encoders.append(DualEncoder.load(tmp_path, **SIZE, tie_towers=False)))
    for encoder, side in itertools.product(encoders, ("query", "passage")):
        prints = {encoder.fingerprint(side, tokens) for tokens in (None, 1)}
        assert len(prints) == (2 if own is not None else 1)


def test_the_padding_check_sees_each_tower_and_precision(bert, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 150, "pad_token_id": 0}
    funnel = transformers.FunnelModel(transformers.FunnelConfig(**sizes, **PADDED["funnel"]))
    funnel.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert warned(lambda dtype=dtype: DualEncoder.load(bert, **SIZE, dtype=dtype)) == []
        options = {**SIZE, "passage_name": tmp_path, "dtype": dtype}
        (message,) = warned(lambda options=options: DualEncoder.load(bert, **options))
        assert message.startswith(f"{tmp_path}: padding changes the vectors")


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_a_tokenizer_that_pads_on_the_left_does_not_shift_positions(pooling, tmp_path):
    folder = family_folder("bert", tmp_path)
    change_json(folder / "tokenizer_config.json", padding_side="left")
    assert AutoTokenizer.from_pretrained(folder).padding_side == "left"
    encoder = DualEncoder.load(folder, pooling=pooling, **SIZE)
    alone = encoder.encode_queries(["the red fox"])
    together = encoder.encode_queries(["the red fox", "a blue whale swims in the sea"])[:1]
    np.testing.assert_allclose(together, alone, atol=1e-6)
    encoder.save(tmp_path / "saved")  # other libraries pad as the saved tokenizer says
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").padding_side == "right"


@pytest.mark.parametrize("asked", [True, False, None])
def test_add_eos_token_of_a_sentence_transformers_folder_is_obeyed(asked, tmp_path):
    """As in e5-mistral. transformers 5 reads only tokenizer.json, which adds no token."""
    plain = family_folder("mistral", tmp_path / "plain")
    modules = [Transformer(str(plain), max_seq_length=12), Pooling(32, "lasttoken")]
    SentenceTransformer(modules=modules).save(str(tmp_path / "st"), create_model_card=False)
    if asked is not None:
        change_json(tmp_path / "st" / "tokenizer_config.json", add_eos_token=asked)
    encoder = DualEncoder.load(tmp_path / "st")
    tokens = encoder.query_tower.tokenizer("the red fox").tokens()
    assert tokens == ["[CLS]", "the", "red", "fox"] + ["[SEP]"] * bool(asked)
    encoder.save(tmp_path / "saved")
    np.testing.assert_array_equal(
        DualEncoder.load(tmp_path / "saved").encode_queries(TEXTS), encoder.encode_queries(TEXTS)
    )


# folders that are accepted though a part is missing or unusual


def test_a_missing_pooler_is_accepted(tmp_path):
    folder = family_folder("bert", tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    one, other = (DualEncoder.load(folder, **SIZE) for _ in range(2))
    assert one.fingerprint("query") == other.fingerprint("query")
    other.query_tower.backbone.pooler.dense.weight.data.fill_(1.0)
    assert one.fingerprint("query") != other.fingerprint("query")


def test_models_without_hashes_load(bert, tmp_path):
    """Weights that a user changed on purpose."""
    DualEncoder.load(bert, **SIZE).save(tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "contaccum.json").read_text())
    assert set(settings.pop("sha256")) == {"model.safetensors"}
    (tmp_path / "saved" / "contaccum.json").write_text(json.dumps(settings))
    file = tmp_path / "saved" / "model.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-5] ^= 0x10
    file.write_bytes(changed)
    assert DualEncoder.load(tmp_path / "saved").dim == 32


def test_a_decoder_without_padding_token_pads_with_its_end_of_text_token(tmp_path):
    folder = family_folder("llama", tmp_path / "plain")
    change_json(folder / "tokenizer_config.json", pad_token=None)
    encoder = DualEncoder.load(folder, **SIZE)
    assert encoder.query_tower.tokenizer.pad_token == "[SEP]"
    assert np.isfinite(encoder.encode_queries(TEXTS)).all()


def test_a_slow_tokenizer_is_refused(tmp_path):
    folder = family_folder("roberta", tmp_path / "plain")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("fox 1\nowl 1\n")
    (folder / "bpe.codes").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PhobertTokenizer"}')
    with pytest.raises(InputError, match="has no fast tokenizer"):
        DualEncoder.load(folder, **SIZE)


def test_an_added_token_without_embedding_is_refused_only_in_a_text(bert, tmp_path):
    """As in the tokenizer of EmbeddingGemma, whose token for images has no word embedding."""
    folder = Path(shutil.copytree(bert, tmp_path / "plain"))
    before = DualEncoder.load(folder, **SIZE)
    expected = before.encode_queries(TEXTS)
    before.query_tower.tokenizer.add_tokens(["<image>"])
    before.query_tower.tokenizer.save_pretrained(folder)
    encoder = DualEncoder.load(folder, **SIZE)
    np.testing.assert_array_equal(encoder.encode_queries(TEXTS), expected)
    rows = encoder.query_tower.vocabulary
    with pytest.raises(
        InputError,
        match=rf"token id {rows} \('<image>'\), but the encoder has {rows} word embeddings",
    ):
        encoder.encode_queries(["the red fox", "an <image> of an owl"])
