"""Find and check YAML files of settings, and give hints for names that are not valid.

Files that are too large or contain anything but settings are refused. There are hints for removed settings, settings of other
trainers and misspelt names, in files and on the command line. This module does not import torch.
"""

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from contaccum.config.declare import MAX_DIGITS, shown
from contaccum.errors import InputError

MAX_BYTES = 1 << 20
"""Maximum number of bytes in a file. A file with all settings has about 2,000 bytes."""
MAX_NODES = 10_000
"""Maximum number of values in a file. There are about 100 settings. Each use of a YAML alias counts all values of the alias."""
MAX_DEPTH = 20
READY = Path(__file__).parent.parent / "configs"
"""Folder of the ready-made configs."""
CONFIG_VERSION = 1
"""``format_version`` that a run writes into its config.yaml. This code reads this version and older versions."""
_IMPORTING = {"class_path", "init_args", "config"}  # keys for which jsonargparse imports a class or reads another file

REMOVED: dict[str, tuple[Any, str]] = {
    "model.pack_linears": (False, "To train faster, use model.unpad; encoding on a CPU still packs linear layers"),
    "bank.visibility": ("immediate", "Stored rows are always visible to the next micro-batch"),
    "bank.queries": (True, "Use method passage_bank for a bank without queries"),
    "optim.fused": (True, "AdamW is always fused; use optim.name adamw_8bit to save memory"),
}
"""For each removed setting: the value that is still accepted, because it has no effect, and what to use instead."""
REMOVED_VALUES = {("batch.on_out_of_memory", "grow"): "Use shrink, which keeps the smaller micro-batches"}
"""(Setting, value that it no longer accepts) -> advice on what to use instead."""

_OTHER_TRAINERS = """
per_device_train_batch_size, train_batch_size = batch.global_batch_size {} (pairs per update), {in_memory}
gradient_accumulation_steps = batch.global_batch_size {} x batch.micro_batch_size x number of processes
per_device_eval_batch_size, eval_batch_size = run.eval_batch_tokens|batch_tokens {} x longest passage in tokens
num_train_epochs, num_epochs = optim.epochs {}
lr = optim.learning_rate {}
lr_scheduler_type, lr_scheduler = optim.schedule linear, cosine or constant
optimizer = optim.name adamw or adamw_8bit
adam_epsilon = optim.adam_eps {}
gradient_clipping = optim.max_grad_norm {}
fp16, float16 = run.precision|precision fp16
bf16, bfloat16 = run.precision|precision bf16
mixed_precision, dtype, torch_dtype = run.precision|precision fp32, bf16 or fp16
torch_compile = run.compile default
model_name_or_path, model_name, base_model = model.name|model {}
attn_implementation = model.attention {}
flash_attention = model.attention flash_attention_2
sdp_attention = model.attention sdpa
sample_packing = model.unpad true
normalize = model.similarity|similarity cosine
untie_encoder = model.tie_towers false
append_eos_token = model.append_eos {}
query_max_len, q_max_len, max_query_len = model.max_query_length|max_query_length {}
passage_max_len, p_max_len, max_passage_len, sequence_len, max_seq_length = model.max_passage_length|max_passage_length {}
train_n_passages, train_group_size = data.hard_negatives {} - 1
dataset_name, dataset_path, train_dir, train_data, train_file, datasets = data.train path or name of a data set
eval_dataset, val_set_size, do_eval = data.dev path or name of a data set
grad_cache = method grad_cache
gc_q_chunk_size, gc_p_chunk_size, gc_mini_batch_size, mini_batch_size = batch.micro_batch_size {}
lora_r = lora.rank {}
lora_alpha = lora.alpha {}
lora_dropout = lora.dropout {}
lora_target_modules, lora_target_linear = lora.target_modules [q_proj, v_proj] or similar
adapter, peft_type = lora.rank 16 or another rank above 0
load_in_4bit = model.quantize 4bit
load_in_8bit = model.quantize 8bit
save_total_limit = run.keep_checkpoints {}
logging_steps = run.log_steps {}
save_strategy, saves_per_epoch = run.save_steps number of steps
eval_strategy, evaluation_strategy, evals_per_epoch = run.eval_steps number of steps
metric_for_best_model = run.metric ndcg@10 or another metric
report_to, wandb_project = run.trackers [wandb] or [tensorboard]
resume_from_checkpoint = resume true, with output_dir of the run
encoded_save_path = output {}
top_k, depth = k {}
no_cuda, use_cpu = run.device|device cpu
"""
"""Settings of other trainers (transformers, sentence-transformers, Tevatron, Axolotl). Each line has the names that other
trainers use, `` = ``, our setting, a space, and the value for our setting. ``|`` separates the names that our setting has in
training and in other commands.
``{}`` stands for the value that the user gave, and ``{in_memory}`` for a hint at batch.micro_batch_size."""


class ConfigText(NamedTuple):
    """Settings of a file, in the form that jsonargparse reads."""

    text: str
    """YAML text, without settings of earlier versions that no longer have an effect."""
    places: dict[str, str]
    """Setting -> ``file:line`` where it was read."""


def config_path(name: str | Path) -> str:
    """Return the path of a config file.

    name: a path, which is returned unchanged, or the name of a ready-made config, such as ``finetune`` or ``presets/24gb``.
    Raises InputError for an unknown name. The message lists the names of the ready-made configs.
    """
    text = os.fspath(name)
    ready = {path.relative_to(READY).with_suffix("").as_posix(): str(path) for path in sorted(READY.rglob("*.yaml"))}
    if text in ready and Path(text).is_dir():  # such as the folder that `contaccum data demo demo` wrote
        return ready[text]
    # a path, although the file may not exist
    if os.path.lexists(text) or Path(text).suffix or Path(text).is_absolute() or ":" in text:
        return text
    if text not in ready:
        raise InputError(
            f"{text}: no such file, and no ready-made config has this name; choose one of {', '.join(ready)}"
        )
    return ready[text]


def check_version(found: Any, where: str) -> None:
    """Raise InputError if this version of contaccum cannot read the ``format_version`` found in a config file."""
    if str(found) not in map(str, range(1, CONFIG_VERSION + 1)):
        raise InputError(f"{where}: format_version is {found}; this version of contaccum reads up to {CONFIG_VERSION}")


def check_config_file(path: str | Path, text: str, known: Collection[str] | None) -> ConfigText:
    """Check the text of a YAML file of settings.

    known: names of the allowed settings. None allows any names.

    Raises InputError, with file and line, for the first of these faults: a setting that is not in ``known``, is given twice or
    was removed; a group that is not a mapping; a YAML tag; a key that jsonargparse would interpret; too many values; values that
    are nested too deeply.
    """
    root = _parsed(path, text)
    if root is None:
        raise InputError(f"{path}: is empty, expected YAML with settings")
    if not isinstance(root, yaml.MappingNode):
        raise _error(path, root, f"found {_kind(root)}, expected settings, such as 'seed: 1'")
    found = list(islice(_nodes(path, root), MAX_NODES + 1))
    if len(found) > MAX_NODES:
        raise _error(path, root, f"has more than {MAX_NODES} values, expected settings")
    lines: dict[str, int] = {}
    for name, parent, key, value in found:
        if name in lines:
            raise _error(path, key, f"duplicate setting {name!r} (first in line {lines[name]}); give each setting once")
        lines[name] = key.start_mark.line + 1
        if not isinstance(value, yaml.MappingNode) and any(each.startswith(f"{name}.") for each in known or ()):
            raise _error(path, value, f"{name} is {_kind(value)}, expected a group of settings")
        text = value.value if isinstance(value, yaml.ScalarNode) else _kind(value)
        if name == "format_version":
            check_version(text, f"{path}:{lines[name]}")
            parent.value = [pair for pair in parent.value if pair[0] is not key]
        elif name in REMOVED or (name, text) in REMOVED_VALUES:
            plain = {"true": True, "false": False}.get(text.lower(), text)
            if name not in REMOVED or plain != REMOVED[name][0]:
                refuse_removed(f"{path}:{lines[name]}: ", name, plain)
            parent.value = [pair for pair in parent.value if pair[0] is not key]
        elif "[" in name or known is None:
            continue
        elif not any(each == name or each.startswith(f"{name}.") for each in known):
            raise _error(path, key, f"{name}: no such setting{unknown(name, text, known)}")
    return ConfigText(yaml.serialize(root), {name: f"{path}:{line}" for name, line in lines.items()})


def _parsed(path: str | Path, text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}:{line}: not YAML ({error.problem}), expected YAML with settings") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        found = " ".join(str(error).split())
        raise InputError(f"{path}: not usable YAML ({found}), expected YAML with settings") from error


def _nodes(
    path: str | Path, parent: yaml.Node, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (setting, parent, key, value) for every value below a mapping or list.

    Each use of an alias yields its values again.
    """
    items = parent.value if isinstance(parent, yaml.MappingNode) else [(each, each) for each in parent.value]
    for number, (key, value) in enumerate(items):
        name = f"{prefix}[{number}]"
        if isinstance(parent, yaml.MappingNode):
            if not isinstance(key, yaml.ScalarNode):
                raise _error(path, key, f"found {_kind(key)} as a key, expected the name of a setting")
            if (last := key.value.rpartition(".")[2]) in _IMPORTING or last.startswith("__"):
                raise _error(path, key, f"found the key {key.value!r}, which is not a setting; remove it")
            merged = key.tag == "tag:yaml.org,2002:merge"
            name = f"{prefix}[<<]" if merged else f"{prefix}.{key.value}".lstrip(".")
        if not value.tag.startswith("tag:yaml.org,2002:") or "python" in value.tag:
            raise _error(path, value, f"found the tag {value.tag!r}, expected plain values")
        if value.tag.endswith(":int") and len(value.value) > MAX_DIGITS:
            raise _error(path, value, f"{name} has {len(value.value)} digits, expected at most {MAX_DIGITS}")
        if depth > MAX_DEPTH:
            raise _error(path, value, f"values are nested deeper than {MAX_DEPTH} levels, expected settings")
        yield name, parent, key, value
        if not isinstance(value, yaml.ScalarNode):
            yield from _nodes(path, value, name, depth + 1)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value[:40])
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _error(path: str | Path, node: yaml.Node, sentence: str) -> InputError:
    return InputError(f"{path}:{node.start_mark.line + 1}: {sentence}")


def closest(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return ``; did you mean a or b?`` with the known settings that are most similar to ``name``.

    Return an empty string if no setting is similar.
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if not near:
        last = name.rpartition(".")[2]
        fields = {each.rpartition(".")[2] for each in known}
        like = [last] if last in fields else difflib.get_close_matches(last, fields, n=2, cutoff=0.65)
        near = sorted(each for each in known if each.rpartition(".")[2] in like)
    return f"; did you mean {' or '.join(prefix + each for each in near)}?" if near else ""


def unknown(name: str, value: str, known: Collection[str], prefix: str = "") -> str:
    """Return a hint about what to use instead of a setting that does not exist, or an empty string.

    prefix: text that the hint puts before the names of settings, such as ``--``.
    """
    last = name.rpartition(".")[2]
    in_memory = f"or {prefix}batch.micro_batch_size (pairs in memory)"
    for line in _OTHER_TRAINERS.strip().splitlines():
        theirs, _, ours = line.partition(" = ")
        settings, _, recipe = ours.partition(" ")
        here = [each for each in settings.split("|") if each in known]
        if last in theirs.split(", ") and last not in known and here:
            return f"; use {prefix}{here[0]} with the value {recipe.format(value or 'N', in_memory=in_memory)}"
    if name.partition(".")[0] in ("rounds", "mine"):
        return "; it belongs to the command `contaccum rounds`"
    return closest(name, known, prefix)


def without_removed(values: Mapping[str, Any], where: str | None = None, prefix: str = "") -> dict[str, Any]:
    """Return ``values`` without the removed settings that have their accepted value (see REMOVED).

    where: beginning of the InputError for a removed setting with another value. None: keep such a setting.
    """
    kept: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            kept[key] = without_removed(value, where, f"{name}.")
        elif name not in REMOVED or value != REMOVED[name][0]:
            if where is not None:
                refuse_removed(where, name, value)
            kept[key] = value
    return kept


def refuse_removed(where: str, name: str, value: Any) -> None:
    """Raise InputError if a setting or its value was removed. The message says what to use instead."""
    if name in REMOVED:
        raise InputError(f"{where}{name} is {shown(value)}, but this setting was removed. {REMOVED[name][1]}.")
    if isinstance(value, str) and (instead := REMOVED_VALUES.get((name, value))):
        raise InputError(f"{where}{name} is {value}, but this value was removed. {instead}.")
