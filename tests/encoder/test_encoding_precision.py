"""Half precision for encoding: chosen if vectors agree with fp32, and kept for later queries."""

import numpy as np
import pytest
import torch
from helpers import write_beir
from test_inference import TEXTS, words_encoder

from contaccum import evaluate, look
from contaccum.cli import main
from contaccum.config.commands import EncoderConfig, MineConfig, SearchConfig
from contaccum.encoder import precision as encoder_precision
from contaccum.encoder.precision import load_encoder, load_fastest, lowest_cosine
from contaccum.errors import InputError
from contaccum.retrieval.encode import encode
from contaccum.retrieval.mine import mine
from contaccum.runtime.files import read_json


def overflowing(encoder, rounded=False):
    """Scale weights so that numbers inside the layer are infinite in fp16.

    rounded: also shift the word embeddings, so that bf16 rounds their differences away.
    """
    backbone = encoder.passage_tower.backbone
    with torch.no_grad():
        backbone.encoder.layer[0].intermediate.dense.weight.mul_(1e6)
        backbone.encoder.layer[0].output.dense.weight.mul_(1e-6)
        if rounded:
            backbone.embeddings.word_embeddings.weight.add_(100)
            backbone.embeddings.token_type_embeddings.weight.sub_(100)
    return encoder


@pytest.mark.parametrize(
    ("change", "precision"),
    [
        (lambda encoder: encoder, "fp16"),
        (overflowing, "bf16"),
        (lambda encoder: overflowing(encoder, rounded=True), "fp32"),
    ],
)
def test_the_first_precision_that_agrees_with_fp32(change, precision, tmp_path, capfd):
    encoder = change(words_encoder())
    encoder.save(tmp_path / "model")
    capfd.readouterr()
    found = load_fastest(
        EncoderConfig(str(tmp_path / "model"), device="cpu"), "passage", TEXTS[:64]
    )
    assert found.precision == precision
    assert next(found.parameters()).dtype == {
        "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32
    }[precision]  # fmt: skip
    said = capfd.readouterr().err
    assert said.startswith(f"contaccum: encoding in {precision} (lowest cosine with fp32, 64 texts")
    assert said.count("\n") == 1
    assert ("fp16 nan" in said) == (precision != "fp16")
    # the vectors of all texts agree, not only those of the sample
    expected = encoder.encode_passages(TEXTS)
    assert lowest_cosine(expected, found.encode_passages(TEXTS)) > 0.9998
    assert found.fingerprint("passage").split()[0] == precision


def test_an_encoder_that_does_not_fit_in_fp32_is_named(tmp_path, monkeypatch):
    def load(choice, name):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(encoder_precision, "_load", load)
    with pytest.raises(InputError, match=r"large: does not fit .* in fp32, .* bf16 or fp16"):
        load_fastest(EncoderConfig("large", device="cpu"), "passage", TEXTS[:64])


def test_lowest_cosine():
    one, other = np.array([[1.0, 0], [2, 0]]), np.array([[3.0, 0], [1, 1]])
    assert lowest_cosine(one, other) == pytest.approx(0.5**0.5)
    assert np.isnan(lowest_cosine(one, np.array([[3.0, 0], [np.inf, 1]])))
    assert lowest_cosine(one[:0], other[:0]) == 1  # no texts


def test_without_cuda_auto_is_fp32_and_asks_for_no_texts(tmp_path):
    words_encoder().save(tmp_path / "model")
    for given, precision in (("auto", "fp32"), ("bf16", "bf16")):
        choice = EncoderConfig(str(tmp_path / "model"), device="cpu", precision=given)
        found = load_encoder(choice, "passage", lambda: pytest.fail("texts were read"))
        assert found.precision == precision


def test_queries_are_encoded_in_the_precision_of_existing_vectors(tmp_path, capfd):
    data, model = write_beir(tmp_path / "data"), str(tmp_path / "model")
    words_encoder().save(model)
    half = EncoderConfig(model, device="cpu", precision="bf16")
    vectors = str(tmp_path / "vectors")
    assert encode(half, data, vectors).endswith("encoded in bf16")
    assert read_json(tmp_path / "vectors" / "manifest.json")["job"]["encoder"].startswith("bf16 ")
    auto, exact = (EncoderConfig(model, device="cpu", precision=p) for p in ("auto", "fp32"))
    settings = SearchConfig(embeddings=vectors)
    output = tmp_path / "metrics.json"
    found = evaluate(auto, data, settings=settings, output=output)
    assert f"contaccum: encoding in bf16, as in {vectors}\n" in capfd.readouterr().err
    assert read_json(output)["precision"] == "bf16"
    assert found == evaluate(half, data, settings=SearchConfig(cache=False))
    report = mine(
        auto, data, tmp_path / "m.jsonl", mining=MineConfig(num_negatives=1), settings=settings
    )
    assert report["search"]["precision"] == "bf16"
    with pytest.raises(InputError, match=r"data or settings .encoder 'bf16 .*, but now 'fp32 "):
        evaluate(exact, data, settings=settings)

    # an index
    index = SearchConfig(factory="HNSW8", index_dir=str(tmp_path / "index"), embeddings=vectors)
    look(auto, data, "red fox", settings=index)
    index = SearchConfig(factory="HNSW8", index_dir=str(tmp_path / "index"))
    hits = look(auto, data, "red fox", settings=index)
    assert hits == look(half, data, "red fox", settings=index)
    with pytest.raises(InputError, match=r"encoder 'bf16 .*, but now 'fp32 "):
        look(exact, data, "red fox", settings=index)
    # negative control: without vectors or index
    evaluate(auto, data, settings=SearchConfig(cache=False), output=output)
    assert read_json(output)["precision"] == "fp32"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_scifact_to_one_thousandth_in_half_precision(shared_data, minilm, tmp_path, capfd):
    options = ["--max_query_length", "64", "--max_passage_length", "256"]
    output = tmp_path / "metrics.json"
    data = str(shared_data / "scifact")
    command = ["evaluate", "--model", str(minilm), "--data", data, "--output", str(output)]
    assert main([*command, *options]) == 0
    assert "contaccum: encoding in fp16" in capfd.readouterr().err
    metrics = read_json(output)
    assert metrics["precision"] == "fp16"
    assert metrics["mean"]["ndcg@10"] == pytest.approx(0.6451, abs=0.001)
