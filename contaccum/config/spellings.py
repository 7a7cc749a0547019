"""Hints for names of settings that are not valid: removed settings, settings of other trainers, and misspelt names."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from contaccum.config.declare import shown
from contaccum.errors import InputError

REMOVED: dict[str, tuple[Any, str]] = {
    "model.pack_linears": (False, "Training no longer packs linear layers. To train faster, use model.unpad"),
    "bank.visibility": ("immediate", "Stored rows are always visible to the next micro-batch"),
    "bank.queries": (True, "Use method passage_bank for a bank without queries"),
    "optim.fused": (True, "AdamW always uses its fused kernel. To save memory, set optim.name to adamw_8bit"),
}
"""Removed setting -> (its old default, which is still accepted and ignored; advice for users who gave another value)."""
REMOVED_VALUES = {("batch.on_out_of_memory", "grow"): "Use shrink, which only makes micro-batches smaller"}
"""(Setting, value that it no longer accepts) -> advice on what to use instead."""

_OTHER_TRAINERS = """
per_device_train_batch_size, train_batch_size = batch.global_batch_size {} (pairs per update), {in_memory}
gradient_accumulation_steps = batch.global_batch_size {} x batch.micro_batch_size x number of processes
per_device_eval_batch_size, eval_batch_size = run.eval_batch_tokens|batch_tokens {} x longest passage in tokens
num_train_epochs, num_epochs = optim.epochs {}
lr = optim.learning_rate {}
scale = model.temperature 1 / {}
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
query_max_len, q_max_len, max_query_len = model.max_query_length|max_query_length {}
passage_max_len, p_max_len, max_passage_len, sequence_len = model.max_passage_length|max_passage_length {}
max_seq_length = model.max_passage_length|max_passage_length {} (for queries: max_query_length)
prompts = model.query_prefix|query_prefix text before each query (for passages: passage_prefix)
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
load_best_model_at_end = run.eval_steps number of steps, with data.dev
metric_for_best_model = run.metric ndcg@10 or another metric
report_to, wandb_project = run.trackers [wandb] or [tensorboard]
resume_from_checkpoint = resume true, with output_dir of the run
encoded_save_path = output {}
top_k, depth = k {}
no_cuda, use_cpu = run.device|device cpu
"""
"""Settings of other trainers (transformers, sentence-transformers, Tevatron, Axolotl). Each line has the form
``THEIR_NAMES = OUR_SETTING VALUE``. THEIR_NAMES are separated by commas. If our setting has one name in training and another in
other commands, OUR_SETTING is ``TRAINING_NAME|OTHER_NAME``. In VALUE, ``{}`` stands for the value that the user gave. Example:
``lr: 0.1`` gives the hint ``use optim.learning_rate with the value 0.1``. ``{in_memory}`` stands for the text
``or batch.micro_batch_size (pairs in memory)``."""


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
    """Return a hint about what to use instead of a setting that does not exist.

    Return an empty string if there is no hint. value: text that the user gave for ``name``. prefix: text before each name of a
    setting in the hint, such as ``--``.
    """
    last = name.rpartition(".")[2]
    in_memory = f"or {prefix}batch.micro_batch_size (pairs in memory)"
    for line in _OTHER_TRAINERS.strip().splitlines():
        theirs, _, ours = line.partition(" = ")
        settings, _, recipe = ours.partition(" ")
        here = [each for each in settings.split("|") if each in known]
        if last in theirs.split(", ") and last not in known and here:
            hint = f"; use {prefix}{here[0]} with the value {recipe.format(value or 'N', in_memory=in_memory)}"
            # on the command line, a setting outside the groups that can be true is an option without a value
            return hint.replace(" with the value true", "") if prefix and "." not in here[0] else hint
    return closest(name, known, prefix)


def is_ignored(name: str, value: Any) -> bool:
    """Return whether ``name`` is a removed setting and ``value`` its old default. Such a setting is ignored (see ``REMOVED``)."""
    return name in REMOVED and value == REMOVED[name][0]


def without_removed(values: Mapping[str, Any], where: str | None = None, prefix: str = "") -> dict[str, Any]:
    """Return ``values`` without the settings that no longer exist and have their old default (see ``REMOVED``).

    Raises InputError if such a setting has another value, or if a setting has a value that no longer exists. The message begins
    with ``where``. If ``where`` is None, no error is raised, and both are kept. prefix: name of the group that contains
    ``values``, and a dot, such as ``bank.``.
    """
    kept: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            kept[key] = without_removed(value, where, f"{name}.")
        elif not is_ignored(name, value):
            if where is not None:
                refuse_removed(where, name, value)
            kept[key] = value
    return kept


def refuse_removed(where: str, name: str, value: Any) -> None:
    """Raise InputError if a setting or its value was removed. The message begins with ``where`` and says what to use."""
    if name in REMOVED:
        raise InputError(f"{where}{name} is {shown(value)}, but this setting was removed. {REMOVED[name][1]}.")
    if isinstance(value, str) and (instead := REMOVED_VALUES.get((name, value))):
        raise InputError(f"{where}{name} is {value}, but this value was removed. {instead}.")
