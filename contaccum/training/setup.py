"""From a config to the parts of a run: folder, encoder, data, bank."""

import copy
import hashlib
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedTokenizerBase

from contaccum.config import ModelConfig, TrainConfig, to_yaml
from contaccum.data.collate import Batches, BatchSource
from contaccum.data.dataset import TrainSet
from contaccum.data.sampler import make_sampler
from contaccum.data.stream import StreamSampler, StreamSet
from contaccum.data.stream_batches import StreamSource
from contaccum.data.tokens import JoinedTokens, TextTokens, TokenTable, build_token_table, tokenizer_hash
from contaccum.encoder import Adapters, DualEncoder, EncoderSettings, make_settings
from contaccum.encoder.settings import SETTINGS_FILE
from contaccum.encoder.tiny import tiny_tower
from contaccum.engine import Engine, torch_dtype
from contaccum.errors import InputError
from contaccum.files import is_leftover, read_json, sha256_of, sweep, write_text
from contaccum.launch import is_main
from contaccum.lock import LOCK_FILE, folder_lock
from contaccum.methods.bank import Bank
from contaccum.methods.distillation import Distillation
from contaccum.methods.loss import InfoNCE
from contaccum.methods.matryoshka import Prefixes
from contaccum.methods.objective import Objective
from contaccum.training.fit import MicroBatchSize, halved_pairs, halved_tokens

CONFIG_FILE = "config.yaml"
STEPS_AHEAD = 4  # by which the step that is being prepared may be ahead of the one that is being taken, and that one
MAY_CHANGE = {
    "output_dir", "resume", "allow_changes", "run.save_steps", "run.keep_checkpoints", "run.log_steps", "run.trackers",
    "run.eval_batch_tokens", "run.on_nan", "run.timeout_minutes", "run.bank_check_steps", "run.drift_steps", "run.memory_budget",
    "batch.on_out_of_memory",
}  # fmt: skip
"""Settings that a resumed run may have otherwise: they change no weight that was trained."""
CANNOT_CHANGE = {
    "model.name", "model.passage_name", "model.tie_towers", "model.append_eos", "model.quantize", "model.tiny_layers",
    "model.tiny_width", "model.tiny_vocabulary", "optim.name",
}  # fmt: skip
"""Settings, besides those of ``lora``, that decided what a checkpoint holds: no other value can be read out of it."""
ENCODER_SETTINGS = (
    "pooling", "similarity", "max_query_length", "max_passage_length", "query_prefix", "passage_prefix",
)  # fmt: skip
"""Settings of ``model`` that go before what an encoder's folder says; what is not given is the folder's."""


@contextmanager
def claimed_folder(config: TrainConfig) -> Iterator[None]:
    """Hold the run's folder while the block runs: new or empty, or on resume the same configuration's.

    The main process of a launch holds the lock and sweeps what a killed one left; nobody else writes there.
    """
    run = Path(config.output_dir)
    if run.exists() and not run.is_dir():
        raise InputError(f"output_dir {run} is a file, expected a folder")
    with folder_lock(run) if is_main() else nullcontext():
        held = (
            [path for path in run.iterdir() if path.name != LOCK_FILE and not is_leftover(path.name)]
            if run.is_dir()
            else []
        )
        if held:
            _check_run(config, run)
        if is_main():
            for folder in (run, run / "checkpoints"):
                if folder.is_dir():
                    sweep(folder)
        yield


def _check_run(config: TrainConfig, run: Path) -> None:
    """Refuse to write into a folder that holds anything but this configuration's run."""
    if not config.resume:
        raise InputError(f"output_dir {run} already holds something, expected a new or empty folder, or --resume")
    if not (run / CONFIG_FILE).is_file():
        raise InputError(f"output_dir {run} has no {CONFIG_FILE}, expected the folder of a run to resume")
    changes = config_differences(read_config(run), asdict(config))
    refuse_changes(f"output_dir {run} holds a run with other settings", changes, config.allow_changes)


def refuse_other_checkpoint(config: TrainConfig) -> None:
    """InputError naming the settings that differ from those of the run in output_dir, where its checkpoints allow no other."""
    before, after = flat(read_config(Path(config.output_dir))), flat(asdict(config))
    changes = [
        f"{name} was {before.get(name)} and is {value}"
        for name, value in after.items()
        if before.get(name) != value
        and (
            name in CANNOT_CHANGE
            or name.startswith("lora.")
            # the folder that it would be taken from is the checkpoint's, which says what it was
            or (value is None and name.removeprefix("model.") in ENCODER_SETTINGS)
        )
    ]
    if changes:
        raise InputError(
            f"the checkpoints in {config.output_dir} cannot be gone on with otherwise, also with allow_changes, expected the "
            f"same: {'; '.join(changes)}"
        )


def refuse_changes(where: str, changes: list[str], allowed: bool) -> None:
    """InputError naming the changes since the run was started; where they are allowed, they are printed."""
    if not changes:
        return
    if not allowed:
        raise InputError(f"{where}, expected the same to resume (or --allow_changes true): {'; '.join(changes)}")
    print(f"{where}, which is allowed: {'; '.join(changes)}", file=sys.stderr)


def identity(
    config: ModelConfig, engine: Engine, encoder: DualEncoder, train_set: TrainSet | StreamSet
) -> dict[str, Any]:
    """What must be the same for a resumed run to end as the unbroken one would, besides the settings.

    Weights and tokenizers come from the checkpoint, so the tokenizer differs only where its library reads it otherwise. An
    encoder folder that has other files than when the run was started changes nothing in the run; it is told because the run's
    config then names an encoder that it did not start from.
    """
    towers = (encoder.query_tower, encoder.passage_tower)
    return {
        "world": engine.world,
        "data": train_set.fingerprint,
        "tokenizer": [tokenizer_hash(tower.tokenizer) for tower in towers],
        "encoder": [_files_hash(Path(name)) for name in (config.name, config.passage_name) if name],
    }


def _files_hash(folder: Path) -> str | None:
    """Hash of the files of an encoder's folder; None for a hub name, or where the folder is no longer there."""
    if not folder.is_dir():
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{path.relative_to(folder).as_posix()} {sha256_of(path)}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def identity_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """``name was x and is y`` for everything that differs; an encoder folder that is gone is no longer needed."""
    pairs = [(name, old.get(name), value) for name, value in new.items()]
    return [
        f"{name} was {before} and is {now}"
        for name, before, now in pairs
        if before != now and not (name == "encoder" and None in now)
    ]


def write_config(config: TrainConfig) -> None:
    write_text(Path(config.output_dir) / CONFIG_FILE, to_yaml(config))


def read_config(run: Path, name: str = CONFIG_FILE) -> dict[str, Any]:
    """The settings of a run, as nested mappings."""
    path = run / name
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: could not be read as YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds {type(values).__name__}, expected a run's settings")
    return values


def config_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """``name was x and is y`` for every setting that differs and may not."""
    before, after = flat(old), flat(new)
    return [
        f"{name} was {before.get(name)} and is {after.get(name)}"
        for name in sorted(before.keys() | after.keys())
        if name not in MAY_CHANGE and before.get(name) != after.get(name)
    ]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with names such as group.field."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def build_encoder(
    config: TrainConfig, train_set: TrainSet | StreamSet, device: torch.device | str = "cpu"
) -> DualEncoder:
    """The towers that training starts from."""
    model = config.model
    settings = _encoder_settings(model)
    if model.name != "tiny":
        return load_encoder(
            config,
            model.name,
            device,
            passage_name=model.passage_name,
            tie_towers=model.tie_towers,
            append_eos=model.append_eos,
            adapters=Adapters(config.lora, model.quantize) if config.lora.rank else None,
            **settings,
        )
    chosen = {name: value for name, value in settings.items() if value is not None}
    made = make_settings({**chosen, "tie_towers": model.tie_towers}, "model")
    query = tiny_tower(
        train_set.texts(),
        made.pooling,
        layers=model.tiny_layers,
        width=model.tiny_width,
        vocabulary=model.tiny_vocabulary,
        max_length=max(made.max_query_length, made.max_passage_length),
        seed=config.seed,
    )
    return DualEncoder(query, query if model.tie_towers else copy.deepcopy(query), made).to(device)


def saved_encoder(config: TrainConfig, checkpoint: Path, device: torch.device | str) -> tuple[DualEncoder, list[str]]:
    """The towers of a checkpoint's model, to be trained further, and which of ENCODER_SETTINGS they were saved with otherwise."""
    encoder = load_encoder(config, checkpoint, device, **_encoder_settings(config.model))
    saved = read_json(checkpoint / SETTINGS_FILE)
    return encoder, [name for name in ENCODER_SETTINGS if saved[name] != getattr(encoder.settings, name)]


def _encoder_settings(model: ModelConfig) -> dict[str, Any]:
    return {name: getattr(model, name) for name in ENCODER_SETTINGS}


def load_encoder(config: TrainConfig, name: str | Path, device: torch.device | str, **how: Any) -> DualEncoder:
    """An encoder, to be trained or trained further, from a folder or hub name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # a new adapter's weights
        encoder = DualEncoder.load(name, trust_remote_code=config.model.trust_remote_code, device=device, **how)
    if encoder.adapted and not config.lora.rank:
        raise InputError(
            f"{name} has an adapter, expected an encoder without one to train as a whole (contaccum merge makes it one)"
        )
    return encoder


def apply_switches(encoder: DualEncoder, config: TrainConfig) -> None:
    """Make the encoder, on its device, compute as the config says: dropout, attention, padding, recomputation, compilation."""
    if config.model.dropout is not None:
        encoder.set_dropout(config.model.dropout)
    encoder.set_attention(config.model.attention, config.model.unpad)
    if config.model.quantize == "4bit":
        encoder.set_compute_dtype(torch_dtype(config.run.precision))
    if config.model.pack_linears and config.run.precision == "fp32" and not encoder.pack_linears():
        warnings.warn(f"model.pack_linears has no effect on {encoder.device.type}", stacklevel=2)
    if config.model.gradient_checkpointing:
        encoder.gradient_checkpointing_enable()
    if config.run.compile == "cuda_graphs" and encoder.device.type != "cuda":
        raise InputError(f"run.compile is cuda_graphs on {encoder.device.type}, expected a CUDA device")
    if config.run.compile != "off":
        encoder.compile_backbones(graphs=config.run.compile == "cuda_graphs")


def build_batches(
    config: TrainConfig, engine: Engine, encoder: DualEncoder, train_set: TrainSet | StreamSet
) -> Batches:
    """Tokens, made once, and the order of the examples; of a stream, both as they come."""
    if isinstance(train_set, StreamSet):
        return _streamed(config, engine, encoder, train_set)
    settings = encoder.settings
    query, passage = encoder.query_tower.tokenizer, encoder.passage_tower.tokenizer
    with engine.main_first():
        query_tokens = _tokens(train_set, "query", settings, query)
        passage_tokens = _tokens(train_set, "passage", settings, passage)
    data = config.data
    sampler = make_sampler(
        train_set, config.seed, config.batch.global_batch_size, data.hard_negatives, data.mixture_batches
    )
    return BatchSource(
        train_set,
        sampler,
        query_tokens,
        passage_tokens,
        config.micro_batch_size(engine.world),
        micro_batch_tokens=config.micro_batch_tokens,
        pad_ids=(query.pad_token_id, passage.pad_token_id),
        side=query.padding_side,
        rank=engine.rank,
        world=engine.world,
    )


def _streamed(config: TrainConfig, engine: Engine, encoder: DualEncoder, train_set: StreamSet) -> StreamSource:
    size, settings = config.batch.global_batch_size, encoder.settings
    query, passage = encoder.query_tower.tokenizer, encoder.passage_tower.tokenizer
    # steps that the bank has rows of, which drift is measured on, and those that a smaller micro-batch takes again
    kept = math.ceil(config.bank_size() / size) + STEPS_AHEAD
    return StreamSource(
        StreamSampler(train_set, config.seed, size, config.data.hard_negatives, config.data.shuffle_buffer, kept),
        TextTokens(query, settings.max_query_length, settings.query_prefix),
        TextTokens(passage, settings.max_passage_length, settings.passage_prefix),
        config.micro_batch_size(engine.world),
        micro_batch_tokens=config.micro_batch_tokens,
        pad_ids=(query.pad_token_id, passage.pad_token_id),
        side=query.padding_side,
        rank=engine.rank,
        world=engine.world,
    )


def _tokens(
    train_set: TrainSet, side: str, settings: EncoderSettings, tokenizer: PreTrainedTokenizerBase
) -> TokenTable | JoinedTokens:
    """The tokens of all queries or all passages, each set of a mixture with its own prefix."""
    table, columns = {"query": ("queries", ["text"]), "passage": ("passages", ["title", "text"])}[side]
    usual, length = getattr(settings, f"{side}_prefix"), getattr(settings, f"max_{side}_length")
    tables = []
    for member in train_set.members:
        own = getattr(member, f"{side}_prefix")
        texts, fingerprint = getattr(member.set, table), f"{member.set.fingerprint}/{table}"
        prefix = usual if own is None else own
        tables.append(
            build_token_table(texts, columns, tokenizer, max_length=length, prefix=prefix, fingerprint=fingerprint)
        )
    return tables[0] if len(tables) == 1 else JoinedTokens(tables)


def build_size(config: TrainConfig, engine: Engine, batches: Batches) -> MicroBatchSize:
    """The sizes that a micro-batch may shrink to when memory runs out."""
    if config.traits.whole:
        sizes = [batches.size]
    elif config.micro_batch_tokens is not None:
        sizes = halved_tokens(batches.size, batches.smallest)
    else:
        sizes = halved_pairs(batches.size, config.batch.global_batch_size // engine.world)
    unit = "pairs" if config.micro_batch_tokens is None else "tokens"
    return MicroBatchSize(sizes, unit, grow=config.batch.on_out_of_memory == "grow")


def build_loss(config: TrainConfig, encoder: DualEncoder) -> Objective:
    """What the method minimises; InputError where the encoder is too narrow for a width that is asked for."""
    loss, temperature = config.loss, config.model.temperature
    for width in loss.matryoshka_dims:
        if width >= encoder.dim:
            raise InputError(f"loss.matryoshka_dims has {width}, expected less than the encoder's width {encoder.dim}")
    weights = loss.matryoshka_weights or [1.0] * len(loss.matryoshka_dims)
    prefixes = Prefixes(tuple(loss.matryoshka_dims), tuple(weights), encoder.settings.similarity == "cosine")
    taught = None
    if loss.distillation != "none":  # spelt out for the type checker
        taught = Distillation(loss.distillation, temperature, loss.teacher_temperature, loss.distillation_weight)
    return Objective(InfoNCE(temperature, loss.mask_false_negatives), prefixes, taught)


def build_bank(config: TrainConfig, engine: Engine, encoder: DualEncoder, loss: Objective) -> Bank:
    """The bank that the method uses; of size 0 where it uses none."""
    longest = encoder.settings.max_query_length + (1 + config.data.hard_negatives) * encoder.settings.max_passage_length
    return Bank(
        config.bank_size(),
        encoder.dim,
        loss.info_nce,
        push=config.usual_push(engine.world, longest),
        hard_negatives=config.data.hard_negatives if config.bank.hard_negatives else 0,
        queries=config.bank.queries and config.traits.bank == "pairs",
        row_weight=config.bank.row_weight,
        visibility=config.bank.visibility,
        keep=config.bank.keep,
        warmup_steps=config.bank.warmup_steps,
        age_decay=config.bank.age_decay,
        prefixes=loss.prefixes,
        device=engine.device,
    )
