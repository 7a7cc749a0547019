"""Value of mined hard negatives: train, mine with the trained model, train again from the same start, evaluate both.

    python benchmarks/mining.py --data MEDQUAD --model MODEL --json OUT.json

Both trainings of a seed have equal steps, pairs and hard negatives per query (one). The first one
draws them from all passages, the second one from those that the first model found.
``--train_queries`` and ``--passages`` reduce the data: random training queries, every passage
judged for these or for a test query, and random other passages; both trainings and evaluations use
the same reduced data. `--runs DIR` saves the runs and continues them.
"""

import json
import statistics
import tempfile
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import make_parser, publish, table

from contaccum import evaluate, mine, train
from contaccum.config import TrainConfig
from contaccum.config.commands import DataPolicy, EncoderConfig, MineConfig
from contaccum.data.dataset import open_dataset
from contaccum.evaluation.significance import compare
from contaccum.runtime.files import whole_folder, write_text

METRIC = "ndcg@10"


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("--data", required=True, help="BEIR folder with the splits train and test")
    parser.add_argument("--model", required=True, help="encoder folder or hub name")
    parser.add_argument("--method", default="cont_accum")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--global_batch_size", type=int, default=64)
    parser.add_argument(
        "--relative_margin", type=float, default=0.05, help="of the mining's filter"
    )
    parser.add_argument(
        "--num_negatives", type=int, default=5, help="mined for a query, of which a step draws one"
    )
    parser.add_argument("--max_query_length", type=int, default=32)
    parser.add_argument("--max_passage_length", type=int, default=64)
    parser.add_argument(
        "--train_queries", type=int, help="train on so many queries; on all when not given"
    )
    parser.add_argument(
        "--passages", type=int, help="search and mine so many passages; all when not given"
    )
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs")
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.steps = 2, 2
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        runs = given.runs or Path(temporary)
        if given.train_queries or given.passages:
            given.data = str(cut(given, runs / "data"))
        rows = [measure(given, seed, runs) for seed in range(given.seeds)]
        base = score(given, EncoderConfig(given.model, device=given.device, **lengths(given)))[
            "mean"
        ][METRIC]
    before, after = (
        {row["seed"]: row[name]["per_query"] for row in rows} for name in ("before", "after")
    )
    tested = compare(after, before, METRIC)
    show(given, rows, base, asdict(tested))


def cut(given: Any, folder: Path) -> Path:
    """Return a reduced data set of the same layout, equal at every call."""
    if folder.is_dir():
        return folder
    random = np.random.default_rng(0)
    splits = {
        name: open_dataset(given.data, name, DataPolicy(repair=True)).retrieval_set
        for name in ("train", "test")
    }
    train = list(splits["train"].queries)
    if given.train_queries:
        train = sorted(
            random.choice(train, min(given.train_queries, len(train)), replace=False).tolist()
        )
    asked = {"train": train, "test": list(splits["test"].queries)}
    corpus = splits["test"].corpus
    ids = dict.fromkeys(
        key for name in asked for query in asked[name] for key in splits[name].qrels[query]
    )
    others = random.permutation([key for key in corpus["id"] if key not in ids]).tolist()
    ids |= dict.fromkeys(others[: max(0, given.passages - len(ids))] if given.passages else others)
    with whole_folder(folder) as part:
        rows = (
            {"_id": row["id"], "title": row["title"], "text": row["text"]}
            for row in corpus
            if row["id"] in ids
        )
        texts = {query: splits[name].queries[query] for name in asked for query in asked[name]}
        for file, records in (
            ("corpus", rows),
            ("queries", ({"_id": key, "text": text} for key, text in texts.items())),
        ):
            write_text(
                part / f"{file}.jsonl", "".join(json.dumps(record) + "\n" for record in records)
            )
        for name, queries in asked.items():
            judged = (
                (query, key, grade)
                for query in queries
                for key, grade in splits[name].qrels[query].items()
            )
            lines = [f"{query}\t{key}\t{grade}\n" for query, key, grade in judged]
            write_text(
                part / "qrels" / f"{name}.tsv", "".join(["query-id\tcorpus-id\tscore\n", *lines])
            )
    return folder


def lengths(given: Any) -> dict[str, int]:
    return {
        "max_query_length": given.max_query_length,
        "max_passage_length": given.max_passage_length,
    }


def measure(given: Any, seed: int, runs: Path) -> dict[str, Any]:
    """Train and evaluate both models of one seed."""
    before, mined, after = (
        runs / f"seed-{seed}" / name for name in ("before", "mined.jsonl", "after")
    )
    config = TrainConfig(method=given.method, seed=seed, output_dir=str(before), resume=True)
    config.model.name = given.model
    config.model.max_query_length, config.model.max_passage_length = (
        given.max_query_length,
        given.max_passage_length,
    )
    config.data.train, config.data.repair, config.data.hard_negatives = given.data, True, 1
    config.batch.global_batch_size, config.batch.micro_batch_size = given.global_batch_size, 8
    config.bank.size = 4 * given.global_batch_size
    config.optim.learning_rate, config.optim.max_steps, config.optim.warmup_ratio = (
        5e-5,
        given.steps,
        0.1,
    )
    config.run.device, config.run.save_steps = given.device, 0
    model = EncoderConfig(str(train(config)), device=given.device)
    if not mined.exists():
        mining = MineConfig(
            num_negatives=given.num_negatives, relative_margin=given.relative_margin
        )
        mine(model, given.data, str(mined), mining=mining, policy=config.data.policy)
    data = replace(config.data, train=str(mined), repair=False)
    again = train(replace(config, data=data, output_dir=str(after)))
    return {
        "seed": seed,
        "before": score(given, model),
        "after": score(given, EncoderConfig(str(again), device=given.device)),
    }


def score(given: Any, choice: EncoderConfig) -> Any:
    return evaluate(choice, given.data, policy=DataPolicy(repair=True))


def sizes(given: Any) -> str:
    queries = (
        f"{given.train_queries} drawn train queries" if given.train_queries else "all train queries"
    )
    return f"{queries}, {f'{given.passages} passages' if given.passages else 'the whole corpus'}"


def show(given: Any, rows: list[dict[str, Any]], base: float, tested: dict[str, Any]) -> None:
    means = {name: [row[name]["mean"][METRIC] for row in rows] for name in ("before", "after")}
    changes = [
        after - before for before, after in zip(means["before"], means["after"], strict=True)
    ]
    lines = [
        [str(row["seed"]), f"{before:.4f}", f"{after:.4f}", f"{change:+.4f}"]
        for row, before, after, change in zip(
            rows, means["before"], means["after"], changes, strict=True
        )
    ]
    lines.append(
        [
            "mean",
            *(f"{statistics.mean(means[name]):.4f}" for name in means),
            f"{statistics.mean(changes):+.4f}",
        ]
    )
    parts = [
        table(["seed", "random negatives", "mined negatives", "change"], lines),
        f"{METRIC} on {tested['queries']} test queries, {sizes(given)}; `{given.method}`, "
        f"{given.steps} steps of N = {given.global_batch_size}, one hard negative a query, mined "
        f"with a relative margin of {given.relative_margin}. The encoder without training has "
        f"{base:.4f}. Over queries the change of the mean of the seeds is "
        f"{tested['difference']:+.4f} (95 % interval {tested['low']:+.4f} to "
        f"{tested['high']:+.4f}), p = {tested['p_permutation']:.3g} by permutation; over queries "
        f"and seeds p = {tested['p_both']:.3g}.",
    ]
    plain = [{"seed": row["seed"], **{name: row[name]["mean"] for name in means}} for row in rows]
    publish(
        given,
        "Training again with mined negatives",
        parts,
        {"rows": plain, "untrained": base, "test": tested},
    )


if __name__ == "__main__":
    main()
