"""Settings that are ``auto``: what is chosen on a CPU, where it is written, and that a resumed run
keeps it."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import tiny_encoder, train_config, weights, write_beir

from contaccum.config import TrainConfig, from_mapping, to_yaml
from contaccum.errors import InputError, Interrupted
from contaccum.runtime.engine import Engine
from contaccum.training import automatic
from contaccum.training.loop import train
from contaccum.training.run_folder import read_config

AUTO = {"batch.micro_batch_size": "auto", "optim.max_steps": 4, "run.save_steps": 2}


def of_run(folder):
    return from_mapping(TrainConfig, read_config(folder))


def test_choices_are_written_and_a_resumed_run_keeps_them(tmp_path, capfd):
    data = write_beir(tmp_path / "data")
    config = train_config(data, tmp_path / "run", "grad_cache", **AUTO)
    assert (config.run.precision, config.model.unpad) == ("auto", "auto")
    train(config)
    found = of_run(tmp_path / "run")
    assert (found.run.precision, found.model.unpad) == ("fp32", True)
    assert found.micro_batch_tokens == automatic.CPU_TOKENS
    assert (
        "fp32, without padding, in micro-batches of at most 2048 tokens" in capfd.readouterr().err
    )
    first = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert first["settings"] == {
        "run.precision": "fp32",
        "model.unpad": True,
        "batch.micro_batch_size": "auto",
        "batch.micro_batch_tokens": 2048,
    }
    # by hand, these values give the same bytes
    by_hand = {"batch.micro_batch_tokens": 2048, "model.unpad": True, "run.precision": "fp32"}
    train(train_config(data, tmp_path / "by hand", "grad_cache", **AUTO, **by_hand))
    assert weights(tmp_path / "by hand") == weights(tmp_path / "run")

    # a run that chose other values, as on another machine, keeps them
    config_file = tmp_path / "run" / "config.yaml"
    config_file.write_text(config_file.read_text().replace("2048", "999"))
    train(replace(config, resume=True, optim=replace(config.optim, max_steps=4)))
    assert of_run(tmp_path / "run").micro_batch_tokens == 999
    # negative control: a value that the command sets is a change
    batch = replace(config.batch, micro_batch_tokens=2048)
    with pytest.raises(InputError, match="micro_batch_tokens was 999 and is 2048"):
        train(replace(config, resume=True, batch=batch))


def chosen(method, **changes):
    config = train_config("data", "run", method, **{"batch.micro_batch_size": "auto", **changes})
    return automatic.choose(config, Engine(device="cpu"), tiny_encoder())


def test_micro_batch_size_by_method():
    for method in ("grad_accum", "cont_accum", "passage_bank"):
        assert chosen(method).batch.micro_batch_size == 8
        assert chosen(method, **{"batch.global_batch_size": 12}).batch.micro_batch_size == 6
        assert chosen(method).micro_batch_tokens is None
    for ignored in ({}, {"batch.micro_batch_size": 4}, {"batch.micro_batch_tokens": 200}):
        in_batch = chosen("in_batch", **ignored)
        assert in_batch.batch.micro_batch_size == 16
        assert "in micro-batches of 16 pairs" in automatic.description(in_batch)
    for method in ("grad_cache", "cont_cache"):
        assert chosen(method).micro_batch_tokens == automatic.CPU_TOKENS
        # a pair has up to 16 + 200 * 16 tokens
        assert chosen(method, **{"data.hard_negatives": 199}).micro_batch_tokens == 3216
        assert chosen(method, **{"batch.micro_batch_size": 4}).micro_batch_tokens is None
        assert chosen(method, **{"batch.micro_batch_tokens": 99}).micro_batch_tokens == 99


def test_a_run_resumed_with_another_method_chooses_its_own_micro_batches(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(chosen("in_batch")))

    def resumed(method, **changes):
        changes = {"batch.micro_batch_size": "auto", "output_dir": str(tmp_path), **changes}
        config = train_config("data", tmp_path, method, resume=True, **changes)
        return automatic.with_recorded_choices(config).batch.micro_batch_size

    assert resumed("grad_cache") == "auto"
    # negative control: the same method, also with the ignored setting that the run started with
    assert resumed("in_batch") == resumed("in_batch", **{"batch.micro_batch_size": 4}) == 16


def test_recorded_pairs_that_several_processes_cannot_hold_are_chosen_again(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(to_yaml(chosen("cont_accum")))
    config = train_config("data", tmp_path, resume=True, **{"batch.micro_batch_size": "auto"})
    found = []
    for world in ("1", "4"):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", "0")
        found.append(automatic.with_recorded_choices(config).batch.micro_batch_size)
    assert found == [8, "auto"]


@pytest.mark.parametrize("method", ["cont_accum", "in_batch"])
def test_a_run_with_chosen_pairs_resumes_and_ends(method, tmp_path, capsys):
    data = write_beir(tmp_path / "data")
    changes = {"batch.micro_batch_size": "auto", "optim.max_steps": 2, "run.save_steps": 1}
    changes |= {"run.keep_checkpoints": None}

    def stop(training):
        training.signals.received = 15

    with pytest.raises(Interrupted):
        train(train_config(data, tmp_path / "run", method, **changes), after_step=stop)
    for said in ("resuming at step 1", "this run has ended; nothing is trained"):
        train(train_config(data, tmp_path / "run", method, resume=True, **changes))
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "unpadded"),
    [
        ({}, True),
        ({"model.attention": "sdpa"}, False),
        ({"model.attention": "eager"}, False),
        ({"model.unpad": False}, False),
        ({"model.unpad": True, "model.attention": "sdpa"}, True),
    ],
)
def test_padding(changes, unpadded):
    assert chosen("grad_accum", **changes).model.unpad is unpadded


def test_padding_stays_if_the_encoder_needs_it():
    config = train_config("data", "run", "grad_accum")
    encoder = tiny_encoder()
    encoder.passage_tower.backbone.config.model_type = "mpnet"
    assert not automatic.choose_unpad(config, encoder)


@pytest.mark.parametrize(
    ("device", "capability", "precision"),
    [("cuda", (8, 0), "bf16"), ("cuda", (7, 5), "fp32"), ("cpu", None, "fp32")],
)
def test_precision(device, capability, precision, monkeypatch):
    monkeypatch.setattr(automatic, "encoding_device", lambda name: torch.device(device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = train_config("data", "run", "grad_accum")
    assert automatic.choose_before_loading(config).run.precision == precision
    config = replace(config, run=replace(config.run, precision="fp16"))
    assert automatic.choose_before_loading(config) is config


def test_tokens_that_fit_are_in_proportion_to_the_memory_of_a_pass(monkeypatch):
    encoder = tiny_encoder()
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    state = 12 * sum(parameter.numel() for parameter in trained)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 50 + 8192 * 10)
    found = automatic.fitting_tokens(encoder, Engine(device="cpu"), state + 1_000_000)
    assert found == 85_000  # 85 % of a million bytes, at 10 bytes a token
    # the copies of the weights of linear layers that a run in bf16 makes
    linear = [layer for layer in encoder.modules() if isinstance(layer, torch.nn.Linear)]
    copies = sum(2 * part.numel() for layer in linear for part in layer.parameters())
    engine = Engine(device="cpu", precision="bf16")
    assert automatic.fitting_tokens(encoder, engine, state + copies + 1_000_000) == 85_000
    assert automatic.fitting_tokens(encoder, engine, state + 1_000_000) < 85_000
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_a_probe_that_does_not_fit_gets_fewer_texts(monkeypatch):
    encoder, tried = tiny_encoder(), []
    embed = encoder.embed

    def small_memory(tower, tokens):
        tried.append(len(tokens.input_ids))
        if tried[-1] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return embed(tower, tokens)

    monkeypatch.setattr(encoder, "embed", small_memory)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 50 + 64 * 16 * 10)
    trained = sum(part.numel() for part in encoder.parameters() if part.requires_grad)
    found = automatic.fitting_tokens(encoder, Engine(device="cpu"), 12 * trained + 1_000_000)
    assert (found, tried) == (85_000, [512, 256, 128, 64])  # of 16 tokens each
    # negative control: another error
    monkeypatch.setattr(encoder, "embed", lambda tower, tokens: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        automatic.fitting_tokens(encoder, Engine(device="cpu"), 0)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"method": "grad_cache"},
            [
                "run.precision: fp32 (the device is cpu)",
                "model.unpad: true if",
                "batch.micro_batch_size of grad_cache: passes",
            ],
        ),
        (
            {"method": "grad_accum", "model.attention": "sdpa", "run.precision": "bf16"},
            [
                "model.unpad: false (model.attention is sdpa)",
                "batch.micro_batch_size of grad_accum: 8 pairs",
            ],
        ),
        (
            {"model.unpad": False, "run.precision": "fp32", "batch.micro_batch_size": 4},
            [],
        ),
    ],
)
def test_choices_are_listed_without_the_encoder(changes, lines):
    method = changes.pop("method", "grad_cache")
    config = train_config("data", "run", method, **{"batch.micro_batch_size": "auto", **changes})
    *found, precision, backend = automatic.choices(config)
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True))
    assert precision == (
        "--precision of encode, search, evaluate and mine: fp32 (the device is cpu)"
    )
    assert backend.startswith("--backend of search, evaluate and mine: the faster of faiss")
