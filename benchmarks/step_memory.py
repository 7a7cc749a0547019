"""Peak memory and time of a step of one configuration, for benchmarks that run each row in a new process."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.config import TrainConfig, validate
from contaccum.encoder import DualEncoder
from contaccum.methods import METHODS
from contaccum.runtime.engine import Engine
from contaccum.training import parts
from contaccum.training.parts import make_optimizer, trained_parameters

PAIRS, MICRO, QUERY = 8, 4, 16


def make_batches(vocabulary: int, length: int) -> list[MicroBatch]:
    """Return one step of random tokens without padding."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for start in range(0, PAIRS, MICRO):
        texts = [
            torch.randint(5, vocabulary, (MICRO, size), generator=generator)
            for size in (QUERY, length)
        ]
        own = torch.arange(start, start + MICRO).unsqueeze(1)
        tokens = [Tokens(ids, torch.ones_like(ids)) for ids in texts]
        batches.append(MicroBatch(*tokens, RowIds(own, own), [str(i) for i in range(MICRO)]))
    return batches


def measure(request: dict[str, Any]) -> dict[str, float]:
    """Measure one row in this process: ``steps`` steps after a first one, which creates the optimizer's state.

    request: model, the encoder's folder; device; length, tokens of a passage; steps; method;
    changes, settings by name.
    """
    config = make_config(request)
    engine = Engine(device=config.run.device)
    encoder: DualEncoder = parts.build_encoder(config, None, engine.device)  # type: ignore[arg-type]
    parts.apply_switches(encoder.train(), config)
    engine.prepare(encoder, make_optimizer(encoder, config.optim))
    seconds = take_steps(config, engine, encoder, 1 + request["steps"])
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder) / "model")
        saved = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
    return {
        "trained": sum(p.numel() for p in trained_parameters(encoder).values()),
        "peak_mib": engine.peak_memory() / 2**20,
        "step_s": statistics.median(seconds[1:]),
        "saved_mib": saved / 2**20,
    }


def make_config(request: dict[str, Any]) -> TrainConfig:
    config = TrainConfig(method=request["method"], output_dir="-")
    config.data.train, config.batch.global_batch_size, config.batch.micro_batch_size = (
        "-",
        PAIRS,
        MICRO,
    )
    config.model.name, config.run.device = request["model"], request["device"]
    config.model.max_query_length, config.model.max_passage_length = QUERY, request["length"]
    for name, value in request["changes"].items():
        group, field = name.split(".")
        setattr(getattr(config, group), field, value)
    validate(config)
    return config


def take_steps(
    config: TrainConfig, engine: Engine, encoder: DualEncoder, steps: int
) -> list[float]:
    """Return the seconds of each step."""
    loss = parts.build_loss(config, encoder)
    bank = parts.build_bank(config, engine, encoder, loss)
    batches = make_batches(
        encoder.query_tower.backbone.config.vocab_size, config.model.max_passage_length or 0
    )
    engine.reset_peak_memory()
    seconds = []
    for step in range(steps):
        engine.begin_step(step)
        began = time.perf_counter()
        METHODS[config.method](engine, batches, bank, loss)
        norms = engine.gradient_norms()  # waits for the device
        engine.clip(sum(norms), config.optim.max_grad_norm)
        engine.update()
        bank.end_step()
        seconds.append(time.perf_counter() - began)
    return seconds
