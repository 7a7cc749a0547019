"""LoRA and QLoRA: training, sharing, saving and refusals."""

import copy
import importlib.util
import json
import re
import shutil

import numpy as np
import pytest
import torch
from helpers import (
    gradients,
    largest_difference,
    micro_batches,
    run_steps,
    train_config,
    weights,
    write_beir,
)
from processes import Job, run_jobs
from sentence_transformers import SentenceTransformer
from tiny_families import FAMILIES, TEXTS, family_folder
from transformers import AutoModel

from contaccum import DualEncoder, train
from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.cli import main
from contaccum.config import AdapterConfig, to_yaml, validate
from contaccum.encoder import Adapters, merge
from contaccum.errors import InputError, install_command
from contaccum.integrations.push import push
from contaccum.methods import METHODS
from contaccum.runtime.files import sha256_of
from contaccum.training.parts import trained_parameters

SIZE = {"max_query_length": 8, "max_passage_length": 12}
LORA = AdapterConfig(rank=4)


def adapted(folder, quantize="none", seed=1, config=LORA, **how) -> DualEncoder:
    """Encoder with adapters that change its vectors."""
    encoder = DualEncoder.load(
        folder, adapters=Adapters(config, quantize), **{"tie_towers": False, **SIZE, **how}
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in trained_parameters(encoder).values():
            parameter.normal_(std=0.3)
    return encoder


def bases(encoder: DualEncoder) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone() for name, p in encoder.named_parameters() if not p.requires_grad
    }


def apart(one: DualEncoder, other) -> float:
    """Return the largest difference of vectors; the second model may be sentence-transformers'."""
    if isinstance(other, DualEncoder):
        theirs = other.encode_queries(TEXTS), other.encode_passages(TEXTS)
    else:
        theirs = other.encode_query(TEXTS), other.encode_document(TEXTS)
    ours = one.encode_queries(TEXTS), one.encode_passages(TEXTS)
    return max(float(np.abs(left - right).max()) for left, right in zip(ours, theirs, strict=True))


# what is trained


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("bert", "qwen3") else pytest.mark.acceptance)
        for name in FAMILIES
        if name not in ("mpnet", "electra")
    ],
)
def test_every_method_trains_only_the_adapters(family, tmp_path):
    folder = family_folder(family, tmp_path / "base")
    plain = DualEncoder.load(folder, **SIZE)
    encoder = DualEncoder.load(folder, tie_towers=False, adapters=Adapters(LORA), **SIZE)
    assert apart(encoder, plain) == 0  # until it is trained
    names = set(trained_parameters(encoder))
    assert names
    assert all("lora_" in name and "pooler" not in name for name in names)
    steps = [micro_batches(2, 4, hard_negatives=1, seed=seed) for seed in range(2)]
    before = bases(encoder)
    for method in METHODS:
        trained = []
        batches = (
            [micro_batches(1, 8, hard_negatives=1, seed=seed) for seed in range(2)]
            if method == "in_batch"
            else steps
        )
        found, losses = run_steps(
            method, batches, encoder=encoder, bank_size=16, switch=trained.append
        )
        assert all(set(step) == names for step in found)
        assert losses[0] != losses[1]
        after = bases(trained[0])
        assert all(torch.equal(before[name], after[name]) for name in before)
        moved = dict(trained[0].named_parameters())
        assert any(
            not torch.equal(moved[name], dict(encoder.named_parameters())[name]) for name in names
        )


def test_grad_cache_gradients_equal_in_batch_with_adapters(tmp_path):
    encoder = adapted(family_folder("qwen3", tmp_path / "base"))
    parts = micro_batches(4, 4)
    queries, passages = (
        Tokens.join([getattr(part, side) for part in parts], 0) for side in ("queries", "passages")
    )
    ids = RowIds(
        *(
            torch.cat([getattr(part.ids, name) for part in parts])
            for name in ("columns", "positives")
        )
    )
    whole = MicroBatch(queries, passages, ids, [name for part in parts for name in part.query_ids])
    joined = run_steps("in_batch", [[whole]], encoder=encoder)[0]
    assert largest_difference(run_steps("grad_cache", [parts], encoder=encoder)[0], joined) < 1e-5
    # the control
    assert largest_difference(run_steps("grad_accum", [parts], encoder=encoder)[0], joined) > 1e-2


def test_set_dropout_keeps_lora_dropout(tmp_path):
    folder = family_folder("bert", tmp_path / "base")
    for share, any_left in ((0.0, False), (0.25, True)):
        encoder = DualEncoder.load(
            folder, adapters=Adapters(AdapterConfig(rank=3, dropout=share)), **SIZE
        )
        encoder.set_dropout(0.0)
        assert encoder.has_dropout() == any_left


def test_gradient_checkpointing_gradients_equal_plain_with_adapters(tmp_path):
    encoder = adapted(family_folder("qwen3", tmp_path / "base"))
    steps = [micro_batches(2, 4, seed=seed) for seed in range(2)]
    plain = run_steps("cont_cache", steps, encoder=encoder, bank_size=8)[0]
    switch = DualEncoder.gradient_checkpointing_enable
    recomputed = run_steps("cont_cache", steps, encoder=encoder, bank_size=8, switch=switch)[0]
    assert largest_difference(recomputed, plain) < 1e-4
    other = run_steps("cont_accum", steps, encoder=encoder, bank_size=8)[0]
    assert largest_difference(other, plain) > 1e-3  # negative control


def test_towers_share_their_base_and_tied_towers_share_adapters(tmp_path):
    folder = family_folder("llama", tmp_path / "base")
    two, one = adapted(folder), adapted(folder, tie_towers=True)
    towers = [dict(tower.named_parameters()) for tower in (two.query_tower, two.passage_tower)]
    for name, parameter in towers[0].items():
        assert (parameter.data_ptr() == towers[1][name].data_ptr()) == ("lora_" not in name)
    assert len(trained_parameters(two)) == 2 * len(trained_parameters(one))
    assert two.encode_queries(["red fox"]).tolist() != two.encode_passages(["red fox"]).tolist()
    moved = copy.deepcopy(two)
    with torch.no_grad():
        for name, parameter in moved.passage_tower.named_parameters():
            if "lora_" in name:
                parameter.zero_()
    np.testing.assert_array_equal(moved.encode_queries(TEXTS), two.encode_queries(TEXTS))
    assert np.abs(moved.encode_passages(TEXTS) - two.encode_passages(TEXTS)).max() > 0.01


def test_lora_options_reach_the_layers(tmp_path):
    folder = family_folder("bert", tmp_path / "base")
    config = AdapterConfig(rank=3, alpha=5, dropout=0.25, target_modules=["query", "value"])
    encoder = DualEncoder.load(folder, adapters=Adapters(config), **SIZE)
    names = set(trained_parameters(encoder))
    assert {name.split(".")[-4] for name in names} == {"query", "value"}
    assert {min(p.shape) for p in trained_parameters(encoder).values()} == {3}
    layer = encoder.query_tower.backbone.encoder.layer[0].attention.self.query
    assert layer.scaling["default"] == pytest.approx(5 / 3)
    assert layer.lora_dropout["default"].p == 0.25
    assert AdapterConfig(rank=8).scale() == 16
    wrong = AdapterConfig(rank=3, target_modules=["query", "values"])
    with pytest.raises(InputError, match=r"lora\.target_modules: found no module 'values' in the"):
        DualEncoder.load(folder, adapters=Adapters(wrong), **SIZE)
    longer = AdapterConfig(rank=3, target_modules=["self.query", "encoder.layer.0.output.dense"])
    encoder = DualEncoder.load(folder, adapters=Adapters(longer), **SIZE)
    assert len(trained_parameters(encoder)) == 2 * (2 + 1)
    with pytest.raises(
        InputError, match=r"lora\.target_modules: Target modules .*nothing.* not found"
    ):
        DualEncoder.load(
            folder, adapters=Adapters(AdapterConfig(rank=3, target_modules=["nothing"])), **SIZE
        )


# what is saved


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_saved_adapter_gives_equal_vectors_in_every_library(family, tie, tmp_path):
    folder = family_folder(family, tmp_path / "base")
    # for one encoder, sentence-transformers has one maximum length
    size = {"max_query_length": 12} if tie else {}
    ours = adapted(folder, tie_towers=tie, query_prefix="the ", passage_prefix="sea ", **size)
    ours.save(tmp_path / "model")
    folders = ["."] if tie else ["query_encoder", "passage_encoder"]
    for name in folders:
        files = {path.name for path in (tmp_path / "model" / name).iterdir()}
        assert {
            "adapter_model.safetensors",
            "adapter_config.json",
            "base.json",
            "tokenizer.json",
        } <= files
        assert not {"model.safetensors", "config.json"} & files
        AutoModel.from_pretrained(tmp_path / "model" / name)
    said = json.loads((tmp_path / "model" / folders[0] / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(folder)
    loaded = DualEncoder.load(tmp_path / "model")
    assert loaded.settings == ours.settings
    assert [loaded.fingerprint(side) for side in ("query", "passage")] == [
        ours.fingerprint("query"),
        ours.fingerprint("passage"),
    ]
    assert set(trained_parameters(loaded)) == set(trained_parameters(ours))
    shared = {p.data_ptr() for p in loaded.query_tower.parameters()} & {
        p.data_ptr() for p in loaded.passage_tower.parameters()
    }
    assert len(shared) >= len(bases(ours))
    theirs = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert apart(loaded, theirs) < 1e-6
    # negative control: the base alone
    assert apart(loaded, DualEncoder.load(folder, **SIZE)) > 0.01
    alone = SentenceTransformer(str(tmp_path / "model" / folders[0]), device="cpu")
    np.testing.assert_allclose(alone.encode_query(TEXTS), ours.encode_queries(TEXTS), atol=1e-6)
    theirs.save(str(tmp_path / "theirs"), create_model_card=False)
    assert apart(DualEncoder.load(tmp_path / "theirs"), theirs) < 1e-6
    for name in folders:
        (tmp_path / "model" / name / "adapter_config.json").write_text(
            json.dumps({**said, "lora_alpha": 2 * said["lora_alpha"]})
        )
    stronger = DualEncoder.load(tmp_path / "model")
    assert apart(stronger, ours) > 0.01
    assert stronger.fingerprint("query") != ours.fingerprint("query")


def test_push_needs_an_adapter_base_on_the_hub(tmp_path):
    adapted(family_folder("bert", tmp_path / "base")).save(tmp_path / "model")
    with pytest.raises(InputError, match="the adapter's base is a local folder"):
        push(str(tmp_path / "model"), "owner/name", dry_run=True)
    for file in sorted((tmp_path / "model").glob("*/adapter_config.json"), reverse=True):
        with pytest.raises(InputError, match="the adapter's base is a local folder"):
            push(str(tmp_path / "model"), "owner/name", dry_run=True)  # of one tower too
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "somebody/base"})
        )
    assert "adapter_model.safetensors" in push(str(tmp_path / "model"), "owner/name", dry_run=True)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "LoRA of rank 4 on somebody/base" in card
    assert "AutoModel" not in card


def test_merged_model_has_equal_vectors_and_no_adapter(tmp_path, capsys):
    folder = family_folder("mistral", tmp_path / "base")
    ours = adapted(folder)
    ours.save(tmp_path / "model")
    assert main(["merge", str(tmp_path / "model"), str(tmp_path / "merged")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "merged")
    shutil.rmtree(folder)
    merged = DualEncoder.load(tmp_path / "merged")
    assert not merged.adapted
    assert all(parameter.requires_grad for parameter in merged.parameters())
    assert apart(merged, ours) < 1e-5
    assert apart(merged, SentenceTransformer(str(tmp_path / "merged"), device="cpu")) < 1e-6
    query, passage = (dict(tower.named_parameters()) for tower in merged.towers)
    name = "backbone.layers.0.self_attn.q_proj.weight"
    # neither took the other's adapter into a common weight
    assert not torch.equal(query[name], passage[name])
    assert main(["merge", str(tmp_path / "model"), str(tmp_path / "merged")]) == 2
    assert main(["merge", str(tmp_path / "merged"), str(tmp_path / "again")]) == 2
    assert (
        "has no adapter to merge; choose a model trained with lora.rank above 0"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["embed_tokens", "norm"]},
        {"trainable_token_indices": {"embed_tokens": [2, 5, 6]}},
    ],
)
def test_fully_trained_parts_of_an_adapter_are_merged(options, tmp_path):
    peft = pytest.importorskip("peft")
    backbone = AutoModel.from_pretrained(family_folder("qwen3", tmp_path / "base"))
    model = peft.get_peft_model(
        backbone, peft.LoraConfig(**{"target_modules": ["q_proj"], **options})
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    merge(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    merged, ours = DualEncoder.load(tmp_path / "merged"), DualEncoder.load(tmp_path / "adapter")
    assert apart(merged, ours) < 1e-5
    assert apart(merged, DualEncoder.load(tmp_path / "base")) > 1e-3


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_adapters_on_experts_are_merged(family, tmp_path):
    """The adapters on both weights of the experts are nested layers."""
    sizes = {"num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 48}
    counts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    folder = family_folder(family, tmp_path / "base", **sizes, **counts)
    ours = adapted(folder)
    ours.save(tmp_path / "model")
    assert apart(DualEncoder.load(tmp_path / "model", merge=True), ours) < 1e-5
    experts = ["w1", "w2", "w3"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    names = AdapterConfig(rank=4, target_modules=["q_proj", *experts])
    named = DualEncoder.load(folder, adapters=Adapters(names), **SIZE)
    assert any("experts" in name for name in trained_parameters(named))
    nested = [name for name in trained_parameters(ours) if "experts.base_layer.lora_" in name]
    with torch.no_grad():
        for name in nested:
            ours.get_parameter(name).zero_()
    assert apart(DualEncoder.load(tmp_path / "model"), ours) > 1e-3  # negative control


def test_a_dora_adapter_is_refused_as_such(tmp_path):
    peft = pytest.importorskip("peft")
    backbone = AutoModel.from_pretrained(family_folder("qwen3", tmp_path / "base"))
    peft.get_peft_model(backbone, peft.LoraConfig(use_dora=True)).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(InputError, match="adapter: transformers cannot load its DoRA weights"):
        DualEncoder.load(tmp_path / "adapter")


def test_quantized_base_is_shared_saved_and_merged(tmp_path):
    """Both towers share the base, loading restores its quantization, merging dequantizes it."""
    folder = family_folder("qwen3", tmp_path / "base")
    ours = adapted(folder, "4bit")
    whole = adapted(folder)
    assert 1e-3 < apart(ours, whole) < 0.5
    two = [tower.backbone.layers[0].self_attn.q_proj.base_layer for tower in ours.towers]
    assert two[0].weight.data_ptr() == two[1].weight.data_ptr()
    assert two[0].weight.dtype == torch.uint8
    ours.save(tmp_path / "model")
    loaded = DualEncoder.load(tmp_path / "model")
    assert apart(loaded, ours) == 0
    assert loaded.fingerprint("query") == ours.fingerprint("query")
    assert apart(DualEncoder.load(tmp_path / "model", merge=True), ours) < 1e-5
    found, _ = run_steps("cont_cache", [micro_batches(2, 4)], encoder=ours, bank_size=8)
    assert set(found[0]) == set(trained_parameters(ours))
    ours.zero_grad(set_to_none=True)
    assert not gradients(ours)


def test_4_bit_weights_of_conv1d_layers_are_refused(tmp_path):
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 40}
    folder = family_folder("gpt2", tmp_path / "base", **sizes)
    assert adapted(folder, "none", tie_towers=True).adapted  # control
    with pytest.raises(InputError, match="gpt2 has layers of the class Conv1D, whose 4-bit wei"):
        adapted(folder, "4bit", tie_towers=True)


def test_a_merged_model_next_to_its_adapter_is_refused(tmp_path):
    peft = pytest.importorskip("peft")
    backbone = AutoModel.from_pretrained(family_folder("bert", tmp_path / "base"))
    model = peft.get_peft_model(backbone, peft.LoraConfig(target_modules=["query"]))
    model.save_pretrained(tmp_path / "both")
    DualEncoder.load(tmp_path / "both", **SIZE)  # control
    model.merge_and_unload().save_pretrained(tmp_path / "both")
    shutil.copy(tmp_path / "base" / "tokenizer.json", tmp_path / "both")
    with pytest.raises(InputError, match=r"both: has an adapter \(adapter_config.json\) and full"):
        DualEncoder.load(tmp_path / "both", **SIZE)
    (tmp_path / "both" / "adapter_config.json").unlink()
    assert (
        apart(
            DualEncoder.load(tmp_path / "both", **SIZE), DualEncoder.load(tmp_path / "base", **SIZE)
        )
        < 1e-6
    )


# a whole run


@pytest.mark.filterwarnings("ignore:the best score so far is ignored")
@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_resumed_adapters_equal_an_uninterrupted_run(quantize, tmp_path):
    data = write_beir(tmp_path / "data")
    folder = family_folder("qwen3", tmp_path / "base", [(data / "corpus.jsonl").read_text()])
    before = {path.name: sha256_of(path) for path in folder.iterdir()}
    lora = {
        "model.name": str(folder),
        "lora.rank": 4,
        "lora.dropout": 0.1,
        "model.quantize": quantize,
        "optim.max_steps": 4,
    }
    dev = {"data.dev": str(data), "run.eval_steps": 1}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(train_config(data, whole, "cont_cache", **lora, **dev))
    assert {path.name: sha256_of(path) for path in folder.iterdir()} == before
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "model")
    shutil.rmtree(broken / "checkpoints" / "step-00000004")
    held = {path.name for path in (broken / "checkpoints").rglob("*.safetensors")}
    assert held == {"adapter_model.safetensors", "bank.safetensors", "optimizer.safetensors"}
    train(train_config(data, broken, "cont_cache", resume=True, **lora, **dev))
    last = [run / "checkpoints" / "step-00000004" for run in (whole, broken)]
    assert sha256_of(last[0] / "manifest.json") == sha256_of(last[1] / "manifest.json")
    if (broken / "model").exists():  # the best step may have come before the break
        assert weights(broken) == weights(whole)
    with pytest.raises(InputError, match=r"lora\.rank was 4 and is 8"):
        train(
            train_config(data, broken, "cont_cache", resume=True, **{**lora, **dev, "lora.rank": 8})
        )
    other = family_folder(
        "qwen3", tmp_path / "other", [(data / "corpus.jsonl").read_text()], seed=5
    )
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(InputError, match="the adapter was trained on"):
        train(train_config(data, broken, "cont_cache", resume=True, **lora, **dev))


@pytest.mark.acceptance
def test_two_processes_train_equal_adapters(tmp_path):
    data = write_beir(tmp_path / "data")
    folder = family_folder("qwen3", tmp_path / "base", [(data / "corpus.jsonl").read_text()])
    calls = {}
    for world in (1, 2):
        config = train_config(
            data,
            tmp_path / f"run-{world}",
            **{
                "model.name": str(folder),
                "lora.rank": 4,
                "batch.micro_batch_size": 4 // world,
                "model.dropout": 0.0,
            },
        )
        path = tmp_path / f"{world}.yaml"
        path.write_text(to_yaml(config))
        calls[str(world)] = Job(["train", "--config", str(path)], processes=world)
    for outcome in run_jobs(calls, tmp_path / "jobs").values():
        outcome.check()
    one, two = (DualEncoder.load(tmp_path / f"run-{world}" / "model", **SIZE) for world in (1, 2))
    start = DualEncoder.load(folder, **SIZE)
    assert apart(one, two) < 1e-4
    assert apart(one, start) > 1e-2  # negative control


# what is refused


def test_wrong_bases_and_missing_extras_are_refused(tmp_path, monkeypatch):
    folder = family_folder("distilbert", tmp_path / "base")
    adapted(folder).save(tmp_path / "model")
    with pytest.raises(InputError, match=r"already has an adapter"):
        adapted(tmp_path / "model")
    data = write_beir(tmp_path / "data")
    with pytest.raises(InputError, match=r"has an adapter, but lora\.rank is 0\. Merge the"):
        train(train_config(data, tmp_path / "run", **{"model.name": str(tmp_path / "model")}))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"dropout": 0.1', '"dropout": 0.2'))
    with pytest.raises(InputError, match="the adapter was trained on"):
        DualEncoder.load(tmp_path / "model")
    (tmp_path / "model" / "query_encoder" / "base.json").unlink()
    (tmp_path / "model" / "passage_encoder" / "base.json").unlink()
    DualEncoder.load(tmp_path / "model")  # other programs' adapters know nothing of their base
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "peft" else found(name)
    )
    with pytest.raises(InputError, match=re.escape(install_command("lora"))):
        adapted(folder)
    with pytest.raises(InputError, match=re.escape(install_command("lora"))):
        DualEncoder.load(tmp_path / "model")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else found(name)
    )
    with pytest.raises(
        InputError,
        match="4-bit quantization: package bitsandbytes is missing. Run: "
        + re.escape(install_command("bitsandbytes")),
    ):
        adapted(folder, "4bit")
    monkeypatch.undo()
    shutil.rmtree(folder)
    with pytest.raises(InputError, match="no such folder"):
        DualEncoder.load(tmp_path / "model")


def settings(tmp_path, **changes):
    return train_config(tmp_path, tmp_path, **{"model.name": "somebody/encoder"} | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.quantize": "4bit"}, "model.quantize is 4bit, but lora.rank is 0; set lora.rank"),
        ({"lora.rank": 4, "model.name": "tiny"}, "lora.rank is above 0, but model.name is 'tiny'"),
    ],
)
def test_wrong_lora_settings_are_refused(changes, sentence, tmp_path):
    with pytest.raises(InputError) as error:
        validate(settings(tmp_path, **changes))
    assert sentence in str(error.value)
