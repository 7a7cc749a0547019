"""Declare every command: its help texts, its options, and the library function that it calls."""

import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contaccum.cli.parser import Command
from contaccum.config import (
    DataPolicy,
    EncoderConfig,
    TrainConfig,
    validate,
)
from contaccum.config.commands import (
    CheckConfig,
    ConvertConfig,
    DemoConfig,
    EncodeConfig,
    EvaluateConfig,
    FetchConfig,
    MergeConfig,
    MineConfig,
    MineFilesConfig,
    PushConfig,
    QueryConfig,
    SearchConfig,
)
from contaccum.config.experiments import AutoConfig, CompareConfig, PlanConfig, ReportConfig
from contaccum.errors import InputError
from contaccum.runtime.checks import refuse_other_file
from contaccum.runtime.launch import is_main, process_place
from contaccum.runtime.progress import announced

LIBRARIES = "loading PyTorch and other libraries"


def _train(config: TrainConfig) -> None:
    # before torch is imported; train() prints the warnings
    validate(config, process_place()[1], warn=False)
    with announced(LIBRARIES):
        from contaccum.training.loop import train
        from contaccum.training.messages import next_steps

    if is_main() and config.resume and not Path(config.output_dir).exists():
        print(f"{config.output_dir}: no run to resume; starting a new run", file=sys.stderr)
    model = train(config)
    if is_main():
        print(model, flush=True)
        print("\n".join(next_steps(config, model)), file=sys.stderr)


def _encode(job: EncodeConfig, encoder: EncoderConfig, policy: DataPolicy) -> None:
    with announced(LIBRARIES):
        from contaccum.retrieval.encode import encode

    form = asdict(job)
    print(encode(encoder, form.pop("input"), form.pop("output"), policy=policy, **form))


def _search(
    task: QueryConfig, encoder: EncoderConfig, settings: SearchConfig, policy: DataPolicy
) -> object:
    with announced(LIBRARIES):
        from contaccum.retrieval.retriever import look, search, words_of
        from contaccum.retrieval.runs import render_passages
        from contaccum.runtime.processes import joined

    task.check()
    k = (100 if task.output else 10) if task.k is None else task.k
    with joined(encoder.timeout_minutes) as group:
        shared: dict[str, Any] = {"k": k, "settings": settings, "policy": policy, "group": group}
        if task.query is None:
            search(encoder, task.data, split=task.split, output=task.output, **shared)
            return task.output
        passages = look(encoder, task.data, task.query, split=task.split, **shared)
    if task.json:
        lines = (
            json.dumps({"rank": rank, **passage._asdict()})
            for rank, passage in enumerate(passages, start=1)
        )
        return "\n".join(lines) or None
    if not passages:
        return "no passage was found"
    if is_main():
        # printed here, because the caller escapes the codes that mark words
        print(render_passages(passages, set(words_of(task.query)), sys.stdout.isatty()))
    return None


def _evaluate(
    task: EvaluateConfig, encoder: EncoderConfig, settings: SearchConfig, policy: DataPolicy
) -> str:
    task.check(encoder, settings)
    if task.run is not None:
        return _evaluate_run_file(task, policy)
    with announced(LIBRARIES):
        from contaccum.evaluation.answers import evaluate_questions
        from contaccum.evaluation.benchmark import benchmark_sets, evaluate_benchmark
        from contaccum.evaluation.evaluate import evaluate
        from contaccum.evaluation.metrics import render_benchmark, render_metrics
        from contaccum.runtime.processes import joined
        from contaccum.training.run_folder import warn_of_training_data

    with joined(encoder.timeout_minutes) as group:
        shared: dict[str, Any] = {
            "k": task.k,
            "settings": settings,
            "policy": policy,
            "output": task.output,
            "group": group,
        }
        if task.questions is not None:
            passages = str(task.passages)
            return render_metrics(
                evaluate_questions(encoder, task.questions, passages, match=task.match, **shared)
            )
        shared |= {"relevance_level": task.relevance_level, "evaluator": task.evaluator}
        data = str(task.data)
        sets = benchmark_sets(data, task.split)
        with group.main_first():
            for each in sets:
                # the texts of a benchmark are not read twice
                texts = policy if len(sets) == 1 else None
                warn_of_training_data(encoder.model, each.data, each.split, texts)
        if len(sets) > 1:
            result = evaluate_benchmark(encoder, data, task.split, **shared)
            return render_benchmark(result, task.metric)
        # "scifact," names one data set
        return render_metrics(evaluate(encoder, sets[0].data, task.split, **shared), task.metric)


def _evaluate_run_file(task: EvaluateConfig, policy: DataPolicy) -> str:
    from contaccum.evaluation.metrics import Metrics, render_metrics, save_metrics
    from contaccum.evaluation.run_files import about_run_file, evaluate_run_file
    from contaccum.evaluation.significance import compare, render_comparison

    run, qrels = str(task.run), str(task.qrels)
    output = task.output if is_main() else None
    refuse_other_file(output, "metrics")
    how = (None, task.relevance_level, policy, task.ignore_identical_ids)

    def measured(file: str) -> Metrics:
        found = evaluate_run_file(file, qrels, *how)
        if task.metric not in found["mean"]:
            raise InputError(f"{file}: has too few passages per query for --metric {task.metric}")
        return found

    metrics = measured(run)
    lines = [render_metrics(metrics, task.metric)]
    if task.against is not None:
        other = measured(task.against)
        tested = compare({0: metrics["per_query"]}, {0: other["per_query"]}, task.metric)
        lines.append(render_comparison(tested, task.metric, task.against))
    # only after the second run was found to be valid
    save_metrics(metrics, output, about_run_file(run, qrels, task.relevance_level))
    return "\n".join(lines)


def _mine(
    job: MineFilesConfig,
    mining: MineConfig,
    encoder: EncoderConfig,
    settings: SearchConfig,
    policy: DataPolicy,
) -> str | None:
    with announced(LIBRARIES):
        from contaccum.retrieval.mine import mine, render_mined
        from contaccum.runtime.processes import joined

    with joined(encoder.timeout_minutes) as group:
        report = mine(
            encoder, **asdict(job), mining=mining, settings=settings, policy=policy, group=group
        )
    if not is_main():
        return None
    model = "MODEL" if encoder.model == "bm25" else shlex.quote(encoder.model)
    return (
        f"{render_mined(report, job.output)}\n"
        f"next: contaccum train --config finetune --data.train {shlex.quote(job.output)} "
        f"--data.hard_negatives 1 --model.name {model} --output_dir DIR"
    )


def _compare(options: CompareConfig, config: TrainConfig) -> object:
    with announced(LIBRARIES):
        from contaccum.experiments.compare import compare

    return compare(config, options)


def _auto(options: AutoConfig, config: TrainConfig) -> str:
    began = time.monotonic()  # the imports count towards --time
    with announced(LIBRARIES):
        from contaccum.experiments.auto import run_auto

    return run_auto(config, options, began)


def _plan(options: PlanConfig, config: TrainConfig) -> object:
    with announced(LIBRARIES):
        from contaccum.experiments.plan import run_plan

    return run_plan(options, config)


def _report(options: ReportConfig) -> object:
    with announced(LIBRARIES):
        from contaccum.experiments.report import console_report

    return console_report(options.runs, options.metric, options.against, options.html)


def _merge(model: MergeConfig) -> object:
    from contaccum.encoder import merge

    return merge(model.model, model.output, model.trust_remote_code, model.start, model.share)


def _push(model: PushConfig) -> object:
    from contaccum.integrations.push import push

    return push(model.path, model.repository, model.private, model.licence, model.dry_run)


def _doctor() -> None:
    from contaccum.doctor import doctor

    doctor(print)


def _check(data: CheckConfig, policy: DataPolicy) -> str:
    from contaccum.data.commands import check, render

    return render(check(data.path, data.split, policy))


def _convert(data: ConvertConfig, policy: DataPolicy) -> str:
    from contaccum.data.commands import convert

    return convert(**asdict(data), policy=policy)


def _fetch(data: FetchConfig) -> object:
    from contaccum.catalog import fetch

    path = fetch(data.name, data.split)
    if not path.exists():
        raise InputError(
            f"{path}: no such folder or file; expected a path or the name of a published data set"
        )
    return path


def _demo(demo: DemoConfig) -> str:
    from contaccum.data.demo import write_demo

    return write_demo(demo.folder)


TRAINING = (
    "method", "batch.global_batch_size", "batch.micro_batch_size", "optim.learning_rate",
    "optim.epochs", "run.precision",
)  # fmt: skip
"""Settings of the training itself that ``--help`` shows."""

COMMANDS = {
    "train": Command(
        _train,
        "train a retriever with one of six training methods",
        "Train a retriever: one encoder for queries and passages, or two, one for each "
        "(--model.tie_towers false). Settings come from config files, and options override them.",
        "%(prog)s --data.train DATA --output_dir DIR [--config FILE] [--model.name MODEL] "
        "[--GROUP.FIELD VALUE ...]",
        (TrainConfig,),
        group="train a model",
        example="contaccum train --config finetune --data.train MY_FOLDER --model.name MODEL "
        "--output_dir runs/mine",
        main={
            "required": ("data.train", "output_dir"),
            "model and data": ("model.name", "data.dev"),
            "training": TRAINING,
            "run": ("config", "resume", "print_config"),
        },
    ),
    "auto": Command(
        _auto,
        "tune, train and evaluate within a time limit",
        "Check the data, and hold out dev queries if there is no dev split. Predict the time of "
        "each stage, and stop at once if --time is too short. Use at most a fifth of --time to "
        "tune method, batch size, bank size and learning rate on dev. Train in the remaining time, "
        "evaluate on the test data, and say whether the trained model is better than the untrained "
        "one and than BM25. A second call continues with the first unfinished stage. Accepts every "
        "setting of `contaccum train`.",
        "%(prog)s --data.train DATA --model.name MODEL --time 30m --output_dir DIR [options]",
        (AutoConfig, TrainConfig),
        skip=("resume", "allow_changes"),
        group="train a model",
        example="contaccum auto --data.train MY_FOLDER --model.name MODEL --time 30m "
        "--output_dir runs/auto",
        main={
            "required": ("data.train", "time", "output_dir"),
            "model and limits": ("model.name", "run.memory_budget"),
            "test": ("test", "test_split"),
            "settings that it does not choose": (
                "model.max_query_length",
                "model.max_passage_length",
            ),
        },
    ),
    "mine": Command(
        _mine,
        "write training data with mined hard negatives",
        "Search passages for every training query, with BM25 or an encoder. Write the training "
        "data with the hard negatives and their scores. Positives of a query, and passages with "
        "the same text, never become negatives of this query.",
        "%(prog)s --model DIR|bm25 --data DATA --output FILE [--range_min N] [--relative_margin X] "
        "[options]",
        (MineFilesConfig, MineConfig, EncoderConfig, SearchConfig, DataPolicy),
        group="train a model",
        example="contaccum mine --model runs/mine/model --data MY_FOLDER --output mined.jsonl "
        "--relative_margin 0.05",
        main={
            "required": ("model", "data", "output"),
            "which negatives": (
                "num_negatives",
                "range_min",
                "range_max",
                "relative_margin",
                "absolute_margin",
                "cross_encoder",
            ),
            "data and speed": ("split", "corpus", "to", "embeddings", "device"),
        },
    ),
    "plan": Command(
        _plan,
        "predict memory and step times",
        "Run a few training steps with a method, or with several. Find the largest micro-batch "
        "that fits into --memory, its peak memory and the time of a step. Accepts every setting of "
        "`contaccum train`.",
        "%(prog)s --data.train DATA [--config FILE] [--method NAME | --methods all] "
        "[--memory 11GB] [--GROUP.FIELD VALUE ...]",
        (PlanConfig, TrainConfig),
        skip=("resume", "allow_changes"),
        group="train a model",
    ),
    "search": Command(
        _search,
        "find passages for the queries of a split, or for one query",
        "Search a corpus for all queries of a split (writes a TREC run file), or for one query.",
        '%(prog)s --model DIR --data BEIR_DIR (--split test --output FILE | --query "TEXT") '
        "[options]",
        (QueryConfig, EncoderConfig, SearchConfig, DataPolicy),
        skip=("strict",),
        group="use a model",
    ),
    "encode": Command(
        _encode,
        "encode a corpus or queries into shards of vectors",
        "Encode a corpus or queries into shards (.npy or Parquet) with a manifest. A restart "
        "encodes only the missing shards. Several processes (torchrun) share the work.",
        "%(prog)s --model DIR --input FILE_OR_BEIR_DIR --output DIR [options]",
        (EncodeConfig, EncoderConfig, DataPolicy),
        skip=("strict",),
        group="use a model",
    ),
    "merge": Command(
        _merge,
        "merge LoRA adapters into a model, or a trained model with its start",
        "Merge the LoRA adapters of MODEL into its weights, and write the result as a model "
        "without adapters. The result computes the same vectors, up to rounding. The weights of a "
        "4-bit encoder become float32. With --start, average the weights of MODEL and of the "
        "encoder that training started from, so that the result keeps more of what that encoder "
        "can do on other data.",
        "%(prog)s MODEL OUTPUT [--start START] [--share X]",
        (MergeConfig,),
        group="use a model",
    ),
    "push": Command(
        _push,
        "write a model card and upload the model to the Hugging Face Hub",
        "Write a trained model's card (README.md in its folder) and upload the folder to the "
        "Hugging Face Hub. An existing card is kept, so you can edit the card after a dry run. Set "
        "the token in HF_TOKEN, or run `hf auth login`.",
        "%(prog)s MODEL_OR_RUN OWNER/NAME [--private] [--licence NAME] [--dry_run]",
        (PushConfig,),
        group="use a model",
    ),
    "evaluate": Command(
        _evaluate,
        "evaluate a retriever, or a run file",
        "Evaluate a retriever on a data set (ndcg, map, recall, precision, mrr) or on a DPR "
        "question file (top-k answer accuracy), or evaluate a run file. For several data sets "
        "(beir, nanobeir, or A,B), print a table with their mean.",
        "%(prog)s (--model DIR (--data DIR_OR_NAME | --questions FILE --passages FILE) | --run "
        "FILE --qrels FILE) [options]",
        (EvaluateConfig, EncoderConfig, SearchConfig, DataPolicy),
        group="measure and compare",
    ),
    "compare": Command(
        _compare,
        "train with several methods, settings and seeds, and compare the results",
        "Train every combination of methods, varied settings and seeds, each in its own process "
        "and its own folder in output_dir/runs. Evaluate all runs on the same test data, and write "
        "report.html and compare.json to output_dir. With "
        "--budget, every run gets as many steps as the budget allows. With --tune, each method "
        "uses the values that are best on dev. A second call runs only what is missing. Accepts "
        "every setting of `contaccum train`.",
        "%(prog)s --data.train DATA [--config FILE] --methods a,b,c [--budget 200000f] "
        "[--tune GROUP.FIELD=v1,v2 ...] --output_dir DIR [options]",
        (CompareConfig, TrainConfig),
        skip=("resume", "allow_changes"),
        group="measure and compare",
        example="contaccum compare --config finetune --methods grad_cache,cont_accum "
        "--data.train MY_FOLDER --model.name MODEL --output_dir runs/compare",
        main={
            "required": ("data.train", "output_dir"),
            "what is compared": ("methods", "settings", "vary", "seeds", "baselines", "against"),
            "fair conditions": ("budget", "tune", "data.dev"),
            "test": ("test", "test_split"),
            "run": (
                "config",
                "model.name",
                "batch.global_batch_size",
                "optim.learning_rate",
                "parallel",
            ),
        },
    ),
    "report": Command(
        _report,
        "compare training runs: table, significance tests, HTML report",
        "Print a table of runs, the best first; runs that differ only in the seed are one row. The "
        "columns are the settings that differ, metric, training time, peak memory, number of "
        "negatives and (with two encoders) gradient-norm ratio, or with --against the differences "
        "and their tests.",
        "%(prog)s RUN [RUN ...] [--metric NAME] [--against RUN] [--html FILE]",
        (ReportConfig,),
        group="measure and compare",
    ),
    "doctor": Command(
        _doctor,
        "diagnose the installation and suggest fixes",
        "Print the version of contaccum and a verdict, then the result of each check: versions, "
        "devices, faiss on CPU and GPU, caches, network. Exit code 1 if a "
        "required part does not work.",
        "%(prog)s [--help]",
    ),
    "data check": Command(
        _check,
        "validate a data set and print its statistics",
        "Validate a data set and print its statistics.",
        "%(prog)s PATH [--split NAME] [--strict] [--repair]",
        (CheckConfig, DataPolicy),
    ),
    "data convert": Command(
        _convert,
        "write a data set in another format",
        "Write a data set in another format.",
        "%(prog)s SOURCE TARGET --to {beir,dpr,jsonl,tevatron} [--split NAME] "
        "[--splits 0.8,0.1,0.1]",
        (ConvertConfig, DataPolicy),
    ),
    "data fetch": Command(
        _fetch,
        "download a data set by its name",
        "Download a data set, unless the cache has it, and print the path. Other commands accept "
        "the name of a data set too.",
        "%(prog)s NAME [--split NAME]",
        (FetchConfig,),
    ),
    "data demo": Command(
        _demo,
        "write a data set of API documentation to try contaccum with",
        "Write a BEIR folder made from the docstrings of the installed numpy, scipy and torch. A "
        "query is the summary of a docstring, and the rest of this docstring is its only relevant "
        "passage. Nothing is downloaded. Equal versions of the packages give equal files.",
        "%(prog)s FOLDER",
        (DemoConfig,),
    ),
}
"""Commands by name, in the order of `contaccum --help`."""
