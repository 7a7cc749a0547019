"""Choose the settings whose value is ``auto``: precision, padding and the size of micro-batches.

The chosen values replace ``auto`` in the config of a run, and so in its config.yaml. A resumed run
keeps them, also on another device.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from contaccum.batch import Tokens
from contaccum.config import TrainConfig, parse_bytes
from contaccum.encoder import DualEncoder
from contaccum.encoder.tower import can_unpad
from contaccum.runtime import sharding
from contaccum.runtime.engine import Engine
from contaccum.runtime.half_weights import copied_weights
from contaccum.runtime.launch import process_place
from contaccum.runtime.processes import encoding_device, torch_dtype
from contaccum.runtime.units import counted
from contaccum.training.out_of_memory import out_of_memory
from contaccum.training.run_folder import CONFIG_FILE, flat, read_config

# maximum number of tokens of a pass on a CPU, where passes with more tokens are not faster
CPU_TOKENS = 2048
# maximum on a GPU, where passes with more tokens are hardly faster
GPU_TOKENS = 32_768
PROBE_TOKENS = 8192  # number of tokens of the pass that measures the memory
USED = 0.85  # share of the free memory that passes may use


def with_recorded_choices(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with the values that the run to resume chose when it started.

    Another method chooses its own micro-batches: those of ``in_batch`` are a whole step.
    """
    folder = Path(config.output_dir)
    if not (config.resume and (folder / CONFIG_FILE).is_file()):
        return config
    old = flat(read_config(folder))
    run, model, batch = config.run, config.model, config.batch
    if run.precision == "auto":
        run = replace(run, precision=old["run.precision"])
    if model.unpad == "auto":
        model = replace(model, unpad=old["model.unpad"])
    not_set = batch.micro_batch_size == "auto" and batch.micro_batch_tokens is None
    size = old["batch.micro_batch_size"]
    # not with another number of processes, for example
    fits = size == "auto" or batch.global_batch_size % (size * process_place()[1]) == 0
    if config.method == old["method"] and fits and (not_set or config.spec.single_micro_batch):
        batch = replace(
            batch, micro_batch_size=size, micro_batch_tokens=old["batch.micro_batch_tokens"]
        )
    return replace(config, run=run, model=model, batch=batch)


def choose_before_loading(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with the choices that do not depend on the encoder.

    The precision is bf16 on a GPU that supports it, else fp32. Partial replay has no dropout: new
    noise in the second pass would be that of another loss.
    """
    if config.replay_share < 1:
        model = config.model
        dropout, of_attention = model.dropout or 0.0, model.attention_dropout or 0.0
        config = replace(
            config, model=replace(model, dropout=dropout, attention_dropout=of_attention)
        )
    if config.run.precision != "auto":
        return config
    device = encoding_device(config.run.device)
    bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return replace(config, run=replace(config.run, precision="bf16" if bf16 else "fp32"))


def choose_unpad(config: TrainConfig, encoder: DualEncoder) -> bool:
    """Return whether to compute without padding.

    ``auto`` means: if the encoder and the device can, unless the config chooses an implementation
    of attention that needs padding.
    """
    if config.model.unpad != "auto":
        return config.model.unpad
    return (
        config.model.attention not in ("eager", "sdpa")
        and encoder.device.type in ("cpu", "cuda")
        and all(can_unpad(tower) for tower in encoder.towers)
    )


def choose(config: TrainConfig, engine: Engine, encoder: DualEncoder) -> TrainConfig:
    """Return ``config`` with a choice for padding and for the size of micro-batches.

    The encoder must be on its device, with all its switches.
    """
    model = replace(config.model, unpad=choose_unpad(config, encoder))
    batch = config.batch
    if config.micro_batches_by_memory:
        batch = replace(batch, micro_batch_tokens=token_budget(config, engine, encoder))
    elif config.spec.single_micro_batch:  # ignores both settings
        size = config.micro_batch_size(engine.world)
        batch = replace(batch, micro_batch_size=size, micro_batch_tokens=None)
    elif batch.micro_batch_size == "auto" and batch.micro_batch_tokens is None:
        size = config.micro_batch_size(engine.world)
        batch = replace(batch, micro_batch_size=size)
        fitting = fitting_pairs(config, engine, encoder)
        if fitting > size and engine.is_main:
            print(
                f"micro-batches of {counted(size, 'pair')}; {fitting} would fit, take less time "
                "and give each query more negatives (batch.micro_batch_size)",
                file=sys.stderr,
            )
    return replace(config, model=model, batch=batch)


def token_budget(config: TrainConfig, engine: Engine, encoder: DualEncoder) -> int:
    """Return the maximum number of tokens of a pass: at least those of one pair."""
    budget = CPU_TOKENS
    if engine.device.type == "cuda":
        budget = min(GPU_TOKENS, fitting_tokens(encoder, engine, available_memory(config, engine)))
    return max(budget, longest_pair(config, encoder))


def fitting_pairs(config: TrainConfig, engine: Engine, encoder: DualEncoder) -> int:
    """Return the largest B that fits and divides a process's pairs, or 0 if it is not measured."""
    # with sharded weights, a pass that does not fit would end the run
    if engine.device.type != "cuda" or encoder.shard_group is not None:
        return 0
    tokens = fitting_tokens(encoder, engine, available_memory(config, engine))
    most = tokens // longest_pair(config, encoder)
    pairs = config.batch.global_batch_size // engine.world
    return next((size for size in range(min(most, pairs), 0, -1) if pairs % size == 0), 0)


def available_memory(config: TrainConfig, engine: Engine) -> int:
    """Return how many bytes of GPU memory torch may still use."""
    free, _ = torch.cuda.mem_get_info(engine.device)
    free += torch.cuda.memory_reserved(engine.device)
    if config.run.memory_budget is not None:
        free = min(free, parse_bytes(config.run.memory_budget))
    return free - torch.cuda.memory_allocated(engine.device)


def longest_pair(config: TrainConfig, encoder: DualEncoder) -> int:
    """Return the number of tokens that a query and its passages can have."""
    settings = encoder.settings
    passages = (1 + config.data.hard_negatives) * settings.max_passage_length
    return settings.max_query_length + passages


def fitting_tokens(encoder: DualEncoder, engine: Engine, free: int) -> int:
    """Return how many tokens a training pass may have with ``free`` bytes of GPU memory.

    A pass over texts of full length measures the memory of a token. If memory runs out, it has half
    of the texts. With several processes, the result is that of the process with the least memory.
    """
    length = encoder.settings.max_passage_length
    # gradients, the two moments of AdamW and copies of weights, which do not exist yet
    state = 0
    if engine.copies_weights(encoder):
        half = torch_dtype(engine.precision).itemsize
        state += sum(half * weight.numel() for weight in copied_weights(encoder))
    for parameter in encoder.parameters():
        weights = sharding.local(parameter)
        if parameter.requires_grad and weights.device == engine.device:
            state += 3 * weights.numel() * weights.element_size()
    texts = max(1, PROBE_TOKENS // length)
    used = None
    while used is None:
        try:
            used = memory_of_pass(encoder, engine, texts, length)
        except Exception as error:
            # with sharded weights, the other processes wait for this one
            if not out_of_memory(error) or texts == 1 or encoder.shard_group is not None:
                raise
        if used is None:  # only here, because the traceback keeps the tensors of the failed pass
            encoder.zero_grad()
            engine.free_memory()
            texts //= 2
    fitting = int(USED * (free - state) * texts * length / used)
    return -engine.largest(-fitting)


def memory_of_pass(encoder: DualEncoder, engine: Engine, texts: int, length: int) -> int:
    """Return the peak memory in bytes of a training pass over texts of ``length`` tokens."""
    ids = torch.zeros(texts, length, dtype=torch.long)
    tokens = Tokens(ids, torch.ones_like(ids)).to(engine.device)
    before = torch.cuda.memory_allocated(engine.device)
    engine.reset_peak_memory()
    encoder.train()
    with engine.autocast():
        vectors = encoder.embed(encoder.passage_tower, tokens)
    vectors.sum().backward()
    used = torch.cuda.max_memory_allocated(engine.device) - before
    encoder.zero_grad()
    return used


def choices(config: TrainConfig) -> list[str]:
    """Return a line for each setting that is ``auto``: its value on this machine, and the reason.

    The encoder is not loaded, so a choice that depends on it is described. The last two lines are
    about commands that use the trained model.
    """
    lines = []
    device = encoding_device(config.run.device).type
    if config.run.precision == "auto":
        chosen = choose_before_loading(config).run.precision
        where = "the GPU supports it" if chosen == "bf16" else f"the device is {device}"
        if device == "cuda" and chosen == "fp32":
            where = "the GPU does not support bf16"
        lines.append(f"run.precision: {chosen} ({where})")
    if config.model.unpad == "auto":
        value = "true if the model type allows it, else false"
        if config.model.attention in ("eager", "sdpa"):
            value = f"false (model.attention is {config.model.attention})"
        lines.append(f"model.unpad: {value}")
    if config.micro_batches_by_memory:
        tokens = f"passes of at most {CPU_TOKENS} tokens, where more are not faster on a CPU"
        if device == "cuda":
            tokens = f"measured at the start; passes of at most {GPU_TOKENS} tokens"
        lines.append(f"batch.micro_batch_size of {config.method}: {tokens}; at least one pair")
    elif config.batch.micro_batch_size == "auto" and config.micro_batch_tokens is None:
        size = config.micro_batch_size(1)
        why = (
            "the whole step"
            if config.spec.single_micro_batch
            else "it decides the negatives of a query"
        )
        lines.append(
            f"batch.micro_batch_size of {config.method}: {counted(size, 'pair')} in one process "
            f"({why})"
        )
    precision, backend = "fp32", "the faster of faiss and torch, timed in the first large search"
    if device == "cuda":
        precision = "the first of fp16, bf16 and fp32 whose vectors of 64 passages agree with fp32"
        backend = "torch"
    where = f"(the device is {device})"
    lines.append(f"--precision of encode, search, evaluate and mine: {precision} {where}")
    lines.append(f"--backend of search, evaluate and mine: {backend} {where}")
    return lines


def description(config: TrainConfig) -> str:
    """Return the precision, the padding and the size of micro-batches as a line for the log."""
    padding = "without padding" if config.model.unpad else "with padding"
    size = config.micro_batch_tokens
    micro_batches = (
        f"micro-batches of {counted(int(config.batch.micro_batch_size), 'pair')} "
        "(batch.micro_batch_size)"
        if size is None
        else f"micro-batches of at most {size} tokens (batch.micro_batch_tokens)"
    )
    return f"{config.run.precision}, {padding}, in {micro_batches}"
