"""Hints for names of settings that do not exist: names from other trainers, and misspelt names."""

import difflib
from collections.abc import Collection

OTHER_TRAINERS = {
    "per_device_train_batch_size": "batch.global_batch_size (pairs per update) or "
    "batch.micro_batch_size (in memory)",
    "train_batch_size": "batch.global_batch_size (pairs per update) or batch.micro_batch_size (in "
    "memory)",
    "gradient_accumulation_steps": "batch.global_batch_size (steps x batch.micro_batch_size x "
    "processes)",
    "per_device_eval_batch_size": "run.eval_batch_tokens (texts x tokens of the longest)",
    "mini_batch_size": "batch.micro_batch_size",
    "gc_q_chunk_size": "batch.micro_batch_size",
    "gc_p_chunk_size": "batch.micro_batch_size",
    "grad_cache": "method grad_cache",
    "num_train_epochs": "optim.epochs",
    "num_epochs": "optim.epochs",
    "lr": "optim.learning_rate",
    "lr_scheduler_type": "optim.schedule",
    "optimizer": "optim.name",
    "adam_epsilon": "optim.adam_eps",
    "gradient_clipping": "optim.max_grad_norm",
    "fp16": "run.precision fp16",
    "bf16": "run.precision bf16",
    "mixed_precision": "run.precision",
    "torch_dtype": "run.precision",
    "torch_compile": "run.compile default",
    "no_cuda": "run.device cpu",
    "use_cpu": "run.device cpu",
    "model_name_or_path": "model.name",
    "base_model": "model.name",
    "scale": "model.temperature (1 / scale)",
    "normalize": "model.similarity cosine",
    "untie_encoder": "model.tie_towers false",
    "attn_implementation": "model.attention",
    "sample_packing": "model.unpad true",
    "prompts": "model.query_prefix and passage_prefix",
    "query_max_len": "model.max_query_length",
    "q_max_len": "model.max_query_length",
    "passage_max_len": "model.max_passage_length",
    "p_max_len": "model.max_passage_length",
    "sequence_len": "model.max_passage_length",
    "max_seq_length": "model.max_passage_length (for queries: max_query_length)",
    "train_n_passages": "data.hard_negatives (train_n_passages - 1)",
    "train_group_size": "data.hard_negatives (train_group_size - 1)",
    "dataset_name": "data.train",
    "train_dir": "data.train",
    "train_file": "data.train",
    "datasets": "data.train",
    "eval_dataset": "data.dev",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "load_in_4bit": "model.quantize 4bit",
    "load_in_8bit": "model.quantize 8bit",
    "save_total_limit": "run.keep_checkpoints",
    "logging_steps": "run.log_steps",
    "eval_strategy": "run.eval_steps",
    "load_best_model_at_end": "run.eval_steps, with data.dev",
    "metric_for_best_model": "run.metric",
    "report_to": "run.trackers",
    "resume_from_checkpoint": "resume, with output_dir of the run",
    "encoded_save_path": "output",
    "top_k": "k",
}
"""Setting of transformers, sentence-transformers, Tevatron or Axolotl -> what to use here."""


def hint(name: str, known: Collection[str], prefix: str = "") -> str:
    """Return the end of an error message about an unknown setting: what to use instead, or nothing.

    known: names of the settings that exist. A setting such as ``run.precision`` of training can
    have the name ``precision`` in another command. prefix: text before each setting, such as
    ``--``.
    """
    last = name.rpartition(".")[2]
    if last in OTHER_TRAINERS and last not in known:
        ours, space, value = OTHER_TRAINERS[last].partition(" ")
        setting = ours.rstrip(",")
        for existing in (setting, setting.rpartition(".")[2]):
            if existing in known:
                return f"; use {prefix}{ours.replace(setting, existing)}{space}{value}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if not near:  # without its group, or in another group
        last_names = {each.rpartition(".")[2] for each in known}
        like = (
            [last]
            if last in last_names
            else difflib.get_close_matches(last, last_names, n=2, cutoff=0.65)
        )
        near = sorted(each for each in known if each.rpartition(".")[2] in like)
    return f"; did you mean {' or '.join(prefix + each for each in near)}?" if near else ""
