"""sentence-transformers loads our folders and we load its folders, with equal vectors."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from beir.datasets.data_loader import GenericDataLoader
from beir.retrieval.evaluation import EvaluateRetrieval
from beir.retrieval.models import SentenceBERT
from beir.retrieval.search.dense import DenseRetrievalExactSearch
from helpers import write_beir
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling
from test_encoder import TEXTS, words_encoder
from tiny_families import DECODERS, FAMILIES, family_folder
from transformers import AutoModel

from contaccum import DualEncoder, evaluate
from contaccum.config.commands import EncoderConfig
from contaccum.encoder import EncoderSettings, tiny_tower
from contaccum.encoder.folders import family_settings
from contaccum.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query"
LONG = [*TEXTS, "owl fox sea whale deep " * 6]


def peer(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


def differences(
    ours: DualEncoder, theirs: SentenceTransformer, texts: list[str] = LONG
) -> list[float]:
    """Return the largest difference of query and passage vectors."""
    ours = DualEncoder(ours.query_tower, ours.passage_tower, in_their_library(ours.settings)).eval()
    return [
        float(np.abs(ours.encode_queries(texts) - theirs.encode_query(texts)).max()),
        float(np.abs(ours.encode_passages(texts) - theirs.encode_document(texts)).max()),
    ]


def in_their_library(settings: EncoderSettings) -> EncoderSettings:
    """Return the settings with one length for both sides if there is one encoder."""
    if not settings.tie_towers:
        return settings
    return replace(settings, max_query_length=settings.max_passage_length)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    ("pooling", "similarity"), [("cls", "dot"), ("mean", "cosine"), ("last", "dot")]
)
def test_the_folder_is_one_model(pooling, similarity, tie, tmp_path):
    """One encoder for both sides also loads with transformers alone, as the model that it was."""
    ours = words_encoder(pooling, similarity, tie, query_prefix="the ", passage_prefix="deep sea ")
    ours.save(tmp_path / "model")
    theirs = peer(tmp_path / "model")
    assert max(differences(ours, theirs)) < 1e-6
    np.testing.assert_allclose(theirs.encode(LONG), ours.encode_passages(LONG), atol=1e-6)
    assert np.abs(theirs.encode_query(LONG) - theirs.encode_document(LONG)).max() > 1e-3
    assert theirs.similarity_fn_name == similarity
    folders = ["."] if tie else ["query_encoder", "passage_encoder"]
    weights = [tmp_path / "model" / name / "model.safetensors" for name in folders]
    assert sorted((tmp_path / "model").rglob("*.safetensors")) == sorted(weights)
    expected = (
        [ours.encode_passages(LONG)]
        if tie
        else [ours.encode_queries(LONG), ours.encode_passages(LONG)]
    )
    for name, vectors in zip(folders, expected, strict=True):
        AutoModel.from_pretrained(tmp_path / "model" / name)
        alone = peer(tmp_path / "model" / name)
        np.testing.assert_allclose(alone.encode(LONG), vectors, atol=1e-6)
    assert (tmp_path / "model" / "README.txt").exists() != tie
    assert len(list(theirs.parameters())) == len(list(ours.parameters()))


def test_missing_prefix_changes_vectors(tmp_path):
    """Negative control of the comparison above."""
    ours = words_encoder(query_prefix="the ", passage_prefix="deep sea ")
    ours.save(tmp_path / "model")
    theirs = peer(tmp_path / "model")
    theirs.prompts = {"query": "", "document": ""}
    assert min(differences(ours, theirs)) > 0.01


def test_different_passage_encoder_keeps_both(tmp_path):
    size = {"layers": 1, "vocabulary": 150, "max_length": 24}
    query = tiny_tower(TEXTS, "mean", width=32, seed=0, **size)
    settings = EncoderSettings(max_query_length=8, max_passage_length=12)
    passage = tiny_tower(
        TEXTS[:3], "mean", width=32, seed=1, **size | {"layers": 2, "vocabulary": 90}
    )
    ours = DualEncoder(query, passage, settings).eval()
    ours.save(tmp_path / "model")
    assert max(differences(ours, peer(tmp_path / "model"))) < 1e-6


@pytest.mark.parametrize("tie", [True, False])
def test_models_saved_again_by_sentence_transformers_load(tie, tmp_path):
    ours = words_encoder("cls", tie=tie, query_prefix="the ", passage_prefix="sea ")
    ours.save(tmp_path / "model")
    peer(tmp_path / "model").save(str(tmp_path / "theirs"), create_model_card=False)
    assert not (tmp_path / "theirs" / "contaccum.json").exists()
    loaded = DualEncoder.load(tmp_path / "theirs")
    assert loaded.settings == in_their_library(ours.settings)
    texts = LONG if not tie else ["red fox", "sea"]
    np.testing.assert_array_equal(loaded.encode_queries(texts), ours.encode_queries(texts))
    np.testing.assert_array_equal(loaded.encode_passages(LONG), ours.encode_passages(LONG))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_truncated_vectors_equal_in_both_libraries(similarity, tmp_path):
    """sentence-transformers truncates unit vectors without normalizing again; its cosine similarity
    normalizes."""
    words_encoder("mean", similarity, query_prefix="the ").save(tmp_path / "whole")
    whole, ours = (DualEncoder.load(tmp_path / "whole", truncate_dim=width) for width in (None, 8))

    def unit(vectors: np.ndarray) -> np.ndarray:
        return (
            vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            if similarity == "cosine"
            else vectors
        )

    expected = unit(whole.encode_queries(LONG)[:, :8])
    np.testing.assert_allclose(ours.encode_queries(LONG), expected, atol=1e-6)
    assert (ours.dim, ours.fingerprint("query") == whole.fingerprint("query")) == (8, False)
    ours.save(tmp_path / "cut")
    theirs = peer(tmp_path / "cut")
    np.testing.assert_allclose(unit(theirs.encode_query(LONG)), expected, atol=1e-6)
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    loaded = DualEncoder.load(tmp_path / "theirs")
    assert loaded.settings == ours.settings
    np.testing.assert_array_equal(loaded.encode_passages(LONG), ours.encode_passages(LONG))


# any model of theirs


def their_model(
    folder: Path, pooling: str = "mean", dense: bool = False, normalize: bool = True, **more
):
    transformer = Transformer(str(folder))
    transformer.max_seq_length = more.pop("length", 12)
    modules = [transformer, Pooling(32, pooling)]
    if dense:
        torch.manual_seed(1)
        modules += [
            Dense(32, 24),
            Dense(24, 16, bias=False, activation_function=torch.nn.Identity()),
        ]
    return SentenceTransformer(modules=[*modules, *[Normalize()] * normalize], device="cpu", **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_equal_vectors(family, tmp_path):
    plain = family_folder(family, tmp_path / "plain")
    pooling = "last" if family in DECODERS else "cls"
    their_name = {"last": "lasttoken"}.get(pooling, pooling)
    theirs = their_model(plain, their_name, prompts={"query": "the ", "document": "sea "})
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    ours = DualEncoder.load(tmp_path / "theirs")
    assert (ours.settings.pooling, ours.settings.query_prefix, ours.settings.max_query_length) == (
        pooling,
        "the ",
        12,
    )
    assert max(differences(ours, theirs)) < 1e-6
    cut = DualEncoder.load(tmp_path / "theirs", max_query_length=6, query_prefix="")
    assert differences(cut, theirs)[0] > 5e-4
    ours.save(tmp_path / "ours")
    assert max(differences(ours, peer(tmp_path / "ours"))) < 1e-6


@pytest.mark.parametrize("name", ["document", "passage", "corpus"])
def test_a_default_prompt_for_passages_follows_a_new_prefix(name, tmp_path):
    plain = family_folder("bert", tmp_path / "plain")
    prompts = {"other": "a ", name: "sea "}
    theirs = their_model(plain, prompts=prompts, default_prompt_name=name)
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    ours = DualEncoder.load(tmp_path / "theirs", passage_prefix="the ")
    ours.save(tmp_path / "ours")
    expected = theirs.encode(TEXTS, prompt="the ")
    np.testing.assert_allclose(peer(tmp_path / "ours").encode(TEXTS), expected, atol=1e-6)
    assert np.abs(theirs.encode(TEXTS) - expected).max() > 5e-4  # negative control


@pytest.mark.parametrize("default", ["other", "query", None])
def test_other_prompts_and_the_default_one_are_kept(default, tmp_path):
    plain = family_folder("bert", tmp_path / "plain")
    prompts = {"query": "the ", "other": "sea "}
    theirs = their_model(plain, prompts=prompts, default_prompt_name=default)
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    DualEncoder.load(tmp_path / "theirs").save(tmp_path / "ours")
    DualEncoder.load(tmp_path / "ours", query_prefix="a ").save(tmp_path / "again")
    expected = [theirs.encode(TEXTS, prompt_name=name) for name in (None, "query", "other")]
    for folder in ("ours", "again"):
        ours = peer(tmp_path / folder)
        found = [ours.encode(TEXTS, prompt_name=name) for name in (None, "query", "other")]
        apart = [np.abs(one - other).max() for one, other in zip(found, expected, strict=True)]
        changed = folder == "again"  # negative control: only the query prefix is another
        assert [distance > 5e-4 for distance in apart] == [
            changed and default == "query",
            changed,
            False,
        ]
        assert ours.default_prompt_name == default


def test_two_encoders_never_use_the_prompt_for_queries_by_default(tmp_path):
    plain = family_folder("bert", tmp_path / "plain")
    prompts = {"query": "the ", "document": "sea "}
    theirs = their_model(plain, prompts=prompts, default_prompt_name="query")
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    for tie in (True, False):
        ours = DualEncoder.load(tmp_path / "theirs", tie_towers=tie)
        ours.save(tmp_path / str(tie))
        expected = ours.encode_queries(TEXTS) if tie else ours.encode_passages(TEXTS)
        for name in ["."] if tie else [".", "passage_encoder"]:
            found = peer(tmp_path / str(tie) / name).encode(TEXTS)
            np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_dense_layers_load_train_and_save(normalize, tmp_path):
    theirs = their_model(family_folder("bert", tmp_path / "plain"), dense=True, normalize=normalize)
    theirs.similarity_fn_name = "cosine" if normalize else "dot"
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    ours = DualEncoder.load(tmp_path / "theirs")
    assert ours.dim == 16
    assert max(differences(ours, theirs)) < 1e-6
    assert all(parameter.requires_grad for parameter in ours.query_tower.dense.parameters())
    before = ours.fingerprint("query")
    ours.save(tmp_path / "ours")
    again = DualEncoder.load(tmp_path / "ours")
    assert again.fingerprint("query") == before
    assert max(differences(again, peer(tmp_path / "ours"))) < 1e-6
    with torch.no_grad():
        again.query_tower.dense[0].linear.bias += 1
    assert again.fingerprint("query") != before


def test_router_with_different_sides_loads(tmp_path):
    short = their_model(family_folder("distilbert", tmp_path / "d"), normalize=False, length=9)
    long = their_model(family_folder("bert", tmp_path / "b"), normalize=False)
    routes = {"query": list(short), "document": list(long)}
    theirs = SentenceTransformer(
        modules=[Router(routes, default_route="document"), Normalize()],
        prompts={"query": "the "},
        device="cpu",
    )
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    ours = DualEncoder.load(tmp_path / "theirs")
    assert (ours.settings.max_query_length, ours.settings.max_passage_length) == (9, 12)
    assert max(differences(ours, theirs)) < 1e-6
    with pytest.raises(InputError, match="has two different encoders"):
        DualEncoder.load(tmp_path / "theirs", tie_towers=True)
    theirs[0].default_route = "query"
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    with pytest.warns(UserWarning, match="default_route is query, which a saved model does not"):
        DualEncoder.load(tmp_path / "theirs")


def test_do_lower_case_is_applied(tmp_path):
    folder = family_folder("roberta", tmp_path / "plain")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": None}))
    theirs = their_model(folder)
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    for said in (False, True):
        path = tmp_path / "theirs" / "sentence_bert_config.json"
        path.write_text(json.dumps({"max_seq_length": 12, "do_lower_case": said}))
        assert (
            max(differences(DualEncoder.load(path.parent), peer(path.parent), ["The Red FOX"]))
            < 1e-6
        )
    lower = DualEncoder.load(path.parent).encode_queries(["The Red FOX", "the red fox"])
    np.testing.assert_array_equal(lower[0], lower[1])


def test_do_lower_case_is_saved_if_the_tokenizer_class_rebuilds_its_normalizer(tmp_path):
    theirs = their_model(family_folder("bert", tmp_path / "plain"))
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    (tmp_path / "theirs" / "sentence_bert_config.json").write_text(
        json.dumps({"do_lower_case": True})
    )
    path = tmp_path / "theirs" / "tokenizer_config.json"
    about = json.loads(path.read_text()) | {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": False,
    }
    path.write_text(json.dumps(about))
    DualEncoder.load(tmp_path / "theirs").save(tmp_path / "saved")
    upper, lower = DualEncoder.load(tmp_path / "saved").encode_queries(
        ["The Red FOX", "the red fox"]
    )
    np.testing.assert_array_equal(upper, lower)


def test_max_length_is_limited_to_positions(tmp_path):
    theirs = their_model(family_folder("bert", tmp_path / "plain"), length=4000)
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    assert DualEncoder.load(tmp_path / "theirs").settings.max_passage_length == 40


@pytest.mark.parametrize(
    ("name", "pooling", "query", "passage"),
    [
        ("intfloat/e5-base-v2", "mean", "query: ", "passage: "),
        ("/models/multilingual-e5-large/", "mean", "query: ", "passage: "),
        (
            "BAAI/bge-small-en-v1.5",
            "cls",
            "Represent this sentence for searching relevant passages: ",
            None,
        ),
        ("BAAI/bge-m3", "cls", None, None),
        ("thenlper/gte-base", "mean", None, None),
        ("Alibaba-NLP/gte-modernbert-base", "cls", None, None),
        ("nomic-ai/nomic-embed-text-v1.5", "mean", "search_query: ", "search_document: "),
        ("Qwen/Qwen3-Embedding-0.6B", "last", f"{TASK}\nQuery:", None),
        ("intfloat/e5-mistral-7b-instruct", "last", f"{TASK}\nQuery: ", None),
    ],
)
def test_family_settings_by_name(name, pooling, query, passage):
    settings = family_settings(name)
    assert settings["pooling"] == pooling
    assert (settings.get("query_prefix"), settings.get("passage_prefix")) == (query, passage)


def test_folder_settings_override_family_settings(tmp_path):
    assert family_settings("somebody/my-e5-base-v2-tuned") == {}
    plain = family_folder("bert", tmp_path / "bge-base-en-v1.5", positions=100)
    size = {"max_query_length": 100, "max_passage_length": 12}
    assert DualEncoder.load(plain, **size).settings.pooling == "cls"
    assert (
        DualEncoder.load(plain, pooling="mean", query_prefix="", **size).settings.query_prefix == ""
    )
    for prompts, expected in (({}, "query: "), ({"query": "the "}, "the ")):
        saved = tmp_path / str(len(prompts)) / "e5-base-v2"
        their_model(plain, "cls", length=40, prompts=prompts).save(
            str(saved), create_model_card=False
        )
        settings = DualEncoder.load(saved).settings
        assert (settings.pooling, settings.query_prefix) == ("cls", expected)


def altered(theirs: SentenceTransformer, folder: Path, file: str, **values) -> Path:
    theirs.save(str(folder), create_model_card=False)
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_unsupported_modules_are_refused(tmp_path):
    plain = family_folder("bert", tmp_path / "plain")
    theirs = their_model(plain, dense=True, prompts={"query": "the "})
    cases = {
        ("1_Pooling/config.json", "pooling excludes the prompt"): {"include_prompt": False},
        ("1_Pooling/config.json", "expected exactly one of cls, mean, last"): {
            "pooling_mode": "max"
        },
        ("2_Dense/config.json", "expected the name of a torch.nn activation"): {
            "activation_function": "os.system"
        },
        ("2_Dense/config.json", "use_residual is true"): {"use_residual": True},
        ("2_Dense/config.json", "the Dense module could not be loaded"): {"out_features": 5},
        (
            "config_sentence_transformers.json",
            "similarity is 'euclidean'; expected one of cosine, dot",
        ): {
            "similarity_fn_name": "euclidean",
        },
        ("config_sentence_transformers.json", "truncate_dim is 8, but similarity_fn_name is dot"): {
            "truncate_dim": 8,
            "similarity_fn_name": "dot",
        },
        ("config_sentence_transformers.json", "truncate_dim is 99; expected at most"): {
            "truncate_dim": 99
        },
        ("config_sentence_transformers.json", r"got `str` - at `\$.truncate_dim`"): {
            "truncate_dim": "all"
        },
    }
    for number, ((file, said), values) in enumerate(cases.items()):
        with pytest.raises(InputError, match=said):
            DualEncoder.load(altered(theirs, tmp_path / str(number), file, **values))
    theirs = their_model(plain, dense=True, prompts={"clustering": "sea "})
    with pytest.raises(InputError, match="pooling excludes the prompt"):
        DualEncoder.load(
            altered(theirs, tmp_path / "p", "1_Pooling/config.json", include_prompt=False)
        )
    folder = altered(
        theirs,
        tmp_path / "named",
        "config_sentence_transformers.json",
        similarity_fn_name="euclidean",
    )
    assert DualEncoder.load(folder, similarity="cosine").settings.similarity == "cosine"
    folder = altered(theirs, tmp_path / "pickled", "config_sentence_transformers.json")
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"Dense module without model\.safetensors"):
        DualEncoder.load(folder)
    sides = [list(their_model(plain, pooling)) for pooling in ("cls", "mean")]
    one = Router.for_query_document(*sides)
    SentenceTransformer(modules=[one], device="cpu").save(
        str(tmp_path / "poolings"), create_model_card=False
    )
    with pytest.raises(InputError, match="pooling is cls for queries and mean for passages"):
        DualEncoder.load(tmp_path / "poolings")
    pictures = Router({"image": sides[0]})
    SentenceTransformer(modules=[pictures], device="cpu").save(
        str(tmp_path / "routes"), create_model_card=False
    )
    with pytest.raises(InputError, match="found the routes image, but no route for query"):
        DualEncoder.load(tmp_path / "routes")


@pytest.mark.parametrize("file", ["modules.json", "router_config.json"])
def test_modules_of_other_packages_are_refused(file, tmp_path):
    """As in jina-embeddings-v3, whose own Transformer chooses an adapter for the task."""
    theirs = their_model(family_folder("bert", tmp_path / "plain"))
    if file == "router_config.json":
        routes = {"query": list(theirs), "document": list(theirs)}
        theirs = SentenceTransformer(
            modules=[Router(routes, default_route="document")], device="cpu"
        )
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    DualEncoder.load(tmp_path / "theirs")  # control
    path = tmp_path / "theirs" / file
    text = re.sub(
        r'"sentence_transformers[\w.]+\.Transformer"', '"custom_st.Transformer"', path.read_text()
    )
    assert "custom_st" in text
    path.write_text(text)
    with pytest.raises(InputError, match="theirs: has a module of the class custom_st"):
        DualEncoder.load(tmp_path / "theirs")


def test_chat_templates_and_other_tasks_are_refused(tmp_path):
    plain = family_folder("qwen3", tmp_path / "plain")
    (plain / "chat_template.jinja").write_text(
        "{% for m in messages %}fox {{m['content']}}{% endfor %}"
    )
    theirs = their_model(plain, "lasttoken")
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    with pytest.raises(InputError, match="modality_config has message, so sentence-transformers"):
        DualEncoder.load(tmp_path / "theirs")
    # control: without this entry, sentence-transformers does not use the template either
    file = tmp_path / "theirs" / "sentence_bert_config.json"
    config = json.loads(file.read_text())
    del config["modality_config"]["message"]
    file.write_text(json.dumps(config))
    assert max(differences(DualEncoder.load(file.parent), peer(file.parent))) < 1e-6
    file.write_text(json.dumps(config | {"transformer_task": "fill-mask"}))
    with pytest.raises(InputError, match="transformer_task is fill-mask; expected feature-ext"):
        DualEncoder.load(file.parent)


@pytest.mark.parametrize(
    "options",
    [
        {"processing_kwargs": {"text": {"max_length": 6}}},
        {"processor_kwargs": {"model_max_length": 6, "use_fast": True}},
        {"tokenizer_args": {"model_max_length": 6}},
        {"config_kwargs": {"attn_implementation": "eager", "dim": 32}},
    ],
)
def test_options_of_the_transformer_are_applied(options, tmp_path):
    theirs = their_model(family_folder("distilbert", tmp_path / "plain"))
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    (tmp_path / "theirs" / "sentence_bert_config.json").write_text(json.dumps(options))
    ours = DualEncoder.load(tmp_path / "theirs")
    length = 12 if "config_kwargs" in options else 6
    assert ours.settings.max_passage_length == length
    assert max(differences(ours, peer(tmp_path / "theirs"))) < 1e-6


def test_an_old_name_of_the_settings_file_is_read(tmp_path):
    theirs = their_model(family_folder("distilbert", tmp_path / "plain"))
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    (tmp_path / "theirs" / "sentence_bert_config.json").unlink()
    old = tmp_path / "theirs" / "sentence_distilbert_config.json"
    old.write_text(json.dumps({"max_seq_length": 6, "do_lower_case": False}))
    ours = DualEncoder.load(old.parent)
    assert ours.settings.max_passage_length == 6
    assert max(differences(ours, peer(old.parent))) < 1e-6


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"processing_kwargs": {"text": {"add_special_tokens": False}}},
            "add_special_tokens False",
        ),
        ({"processing_kwargs": {"common": {"max_length": 6}}}, "max_length 6"),
        ({"processor_kwargs": {"truncation_side": "left"}}, "truncation_side 'left'"),
        ({"config_kwargs": {"activation": "relu"}}, "activation 'relu'"),
    ],
)
def test_options_of_the_transformer_that_change_vectors_are_refused(options, named, tmp_path):
    theirs = their_model(family_folder("distilbert", tmp_path / "plain"))
    file = "sentence_bert_config.json"
    without = DualEncoder.load(altered(theirs, tmp_path / "without", file))
    folder = altered(theirs, tmp_path / "theirs", file, **options, max_seq_length=12)
    assert max(differences(without, peer(folder), ["fox " * 12 + "owl sea"])) > 1e-3
    with pytest.raises(InputError, match=rf"{file}: has the option {named}, which can"):
        DualEncoder.load(folder)


# evaluators


def test_sentence_transformers_and_beir_give_equal_ndcg(tmp_path):
    data = write_beir(tmp_path / "data")
    size = {"layers": 1, "width": 32, "vocabulary": 200, "max_length": 24}
    words = [(data / name).read_text() for name in ("corpus.jsonl", "queries.jsonl")]
    tower = tiny_tower(words, "mean", seed=0, **size)
    settings = EncoderSettings(
        max_query_length=20, max_passage_length=24, query_prefix="the ", passage_prefix="valley "
    )
    ours = DualEncoder(tower, tiny_tower(words, "mean", seed=1, **size), settings).eval()
    ours.save(tmp_path / "model")
    read = [json.loads(line) for line in (data / "corpus.jsonl").read_text().splitlines()]
    corpus = {each["_id"]: f"{each['title']} {each['text']}" for each in read}
    rows = [line.split("\t") for line in (data / "qrels" / "test.tsv").read_text().splitlines()[1:]]
    asked = [json.loads(line) for line in (data / "queries.jsonl").read_text().splitlines()]
    queries = {
        each["_id"]: each["text"] for each in asked if each["_id"] in {row[0] for row in rows}
    }
    evaluator = InformationRetrievalEvaluator(
        queries, corpus, {query: {passage} for query, passage, _ in rows}
    )
    theirs = evaluator(peer(tmp_path / "model"))["cosine_ndcg@10"]
    assert evaluate(ours, str(data))["mean"]["ndcg@10"] == pytest.approx(theirs, abs=1e-4)
    assert 0 < theirs < 1
    towers = SentenceBERT(
        tuple(str(tmp_path / "model" / f"{side}_encoder") for side in ("query", "passage"))
    )
    retriever = EvaluateRetrieval(DenseRetrievalExactSearch(towers), score_function="cos_sim")
    texts, asked_texts, qrels = GenericDataLoader(str(data)).load(split="test")
    beir, *_ = retriever.evaluate(qrels, retriever.retrieve(texts, asked_texts), [10])
    assert beir["NDCG@10"] == pytest.approx(theirs, abs=1e-4)
    tied = replace(settings, tie_towers=True)
    one = DualEncoder(ours.query_tower, ours.query_tower, tied).eval()
    one.save(tmp_path / "one")
    names = {"query": "query", "passage": "document"}
    model = SentenceBERT(str(tmp_path / "one"), prompt_names=names)
    retriever = EvaluateRetrieval(DenseRetrievalExactSearch(model), score_function="cos_sim")
    beir, *_ = retriever.evaluate(qrels, retriever.retrieve(texts, asked_texts), [10])
    expected = evaluate(one, str(data))["mean"]["ndcg@10"]
    assert beir["NDCG@10"] == pytest.approx(expected, abs=1e-4)
    rows = {query: {passage} for query, passage, _ in rows}
    evaluator = InformationRetrievalEvaluator(queries, corpus, rows, truncate_dim=2)
    narrow = evaluate(EncoderConfig(str(tmp_path / "model"), truncate_dim=2), str(data))["mean"][
        "ndcg@10"
    ]
    assert narrow == pytest.approx(evaluator(peer(tmp_path / "model"))["cosine_ndcg@10"], abs=1e-4)
    assert not math.isclose(theirs, narrow, abs_tol=1e-3)
    other = evaluate(DualEncoder(tower, tower, settings).eval(), str(data))["mean"]["ndcg@10"]
    assert not math.isclose(theirs, other, abs_tol=1e-3)
