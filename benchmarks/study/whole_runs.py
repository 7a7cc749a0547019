"""Runs of the study with whole encoders, as docs/results/whole_encoders.md planned them.

    python benchmarks/study/whole_runs.py SETS MODEL OUT [--workers 15] [--minutes 60]

SETS holds the BEIR folders api (contaccum data demo), medquad and scifact, and api-dev400 and
medquad-dev400: the dev queries with their judged passages and 400 others (cut.py). MODEL is
all-MiniLM-L6-v2. Each run appends a line to OUT/whole.jsonl, from which a later call continues. N
and the learning rate of a row are chosen in three rungs of 60, 240 and 900 CPU seconds. What an
update costs was measured on one thread of an AMD EPYC, methods in turn.
"""

import argparse
import json
import multiprocessing
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import torch

from contaccum import DualEncoder, TrainConfig, train
from contaccum.config import with_changes
from contaccum.config.commands import DataPolicy, EncoderConfig, MineConfig, SearchConfig
from contaccum.data.dataset import open_dataset
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.evaluation.evaluate import evaluate
from contaccum.retrieval.mine import mine
from contaccum.runtime.processes import encoding_device

AGED = {"bank.size": 64, "bank.age_decay": 1.0, "bank.row_weight": "current"}
ROWS: dict[str, dict[str, Any]] = {
    "grad_cache": {"method": "grad_cache"},
    "replay_bank": {"method": "cont_cache", "replay.share": 0.5, **AGED},
    "cont_accum_aged": {"method": "cont_accum", **AGED},
    "replay": {"method": "grad_cache", "replay.share": 0.5},
    "cont_accum": {"method": "cont_accum"},  # as published: M = N
    "grad_accum": {"method": "grad_accum"},
    "bank": {"method": "cont_cache", **AGED},
}
ONE_PASS = ("cont_accum", "cont_accum_aged", "grad_accum")
GRID = [(pairs, rate) for pairs in (16, 32, 64) for rate in (5e-5, 1e-4, 2e-4, 4e-4)]
OTHER = {"api": "medquad", "medquad": "api"}
MICRO = 8  # pairs in memory
UPDATE, PAIR, SECOND_PASS, HALF_REPLAYED = 0.2474, 0.0942, 0.0482, 0.0751
"""CPU seconds: an update without its pairs; a pair with one pass, its second pass, and a pair of
which half is replayed."""
TOKENS = {"api": (17.1, 113.0), "medquad": (14.4, 117.6)}  # mean tokens of query and passage
LENGTHS = {"max_query_length": 64, "max_passage_length": 128}
Choice = tuple[int, float]
"""N and learning rate."""
Job = dict[str, Any]
Done = dict[str, Job]


def seconds_of_update(row: str, pairs: int, data: str, negatives: int) -> float:
    query, passage = TOKENS[data]
    pairs = pairs * (query + (1 + negatives) * passage) / (query + passage)
    if row in ONE_PASS:
        return UPDATE + PAIR * pairs
    if "replay.share" in ROWS[row]:
        return UPDATE + HALF_REPLAYED * pairs
    # the last micro-batch keeps its graph
    return UPDATE + (PAIR + SECOND_PASS) * pairs - SECOND_PASS * MICRO


def job(data: str, row: str, choice: Choice, seconds: int, seed: int, negatives: int = 0) -> Job:
    """Return a run. Runs of at least 900 s are evaluated on all sets, others on dev only."""
    pairs, rate = choice
    name = row + (f"+H{negatives}" if negatives else "")
    sets = [f"{data}-dev400/dev"]
    if seconds >= 900:
        sets += [f"{data}/test", "scifact/test", f"{OTHER[data]}/test"]
    return {
        "name": f"{data}-{name}-N{pairs}-lr{rate:g}-{seconds}s-seed{seed}",
        "row": name, "set": data, "seed": seed, "budget_cpu_s": seconds,
        "updates": max(1, round(seconds / seconds_of_update(row, pairs, data, negatives))),
        "settings": {
            **ROWS[row], "batch.global_batch_size": pairs, "optim.learning_rate": rate,
            # methods with two passes have the same gradients in larger micro-batches
            "batch.micro_batch_size": MICRO if row in ONE_PASS else min(pairs, 128),
            "data.hard_negatives": negatives,
            # cont_cache pushes all pairs of an update at once, so the bank holds as many
            **({"bank.size": max(pairs, 64)} if ROWS[row]["method"] == "cont_cache" else {}),
        },
        "evaluate": sets,
    }  # fmt: skip


def dev_score(job: Job, done: Done) -> float:
    """Return the dev score of a finished run, or -1 if it failed."""
    scores = done[job["name"]].get("scores")
    return scores[f"{job['set']}-dev400/dev"]["ndcg@10"] if scores else -1.0


def neighbours(row: str, best: Choice, tried: list[Choice]) -> list[Choice]:
    """Return choices beyond the edges of the grid if the best choice is at an edge."""
    pairs, rate = best
    rates = [other for size, other in tried if size == pairs]
    sizes = [size for size, _ in tried]
    more = []
    if rate == max(rates) and rate < 1.6e-3:
        more.append((pairs, rate * 2))
    if rate == min(rates) and rate > 2.5e-5:
        more.append((pairs, rate / 2))
    if pairs == max(sizes) and pairs < 128:
        more += [(pairs * 2, rate), (pairs * 2, rate * 2)]
    if pairs == min(sizes) and pairs > 8 and row in ONE_PASS:
        more += [(pairs // 2, rate), (pairs // 2, rate / 2)]
    return [choice for choice in more if choice not in tried]


def rungs(data: str, row: str, done: Done) -> tuple[list[Job], Choice | None]:
    """Return the jobs of the three rungs that can be known now, and the choice that won."""
    choices = list(GRID)
    while True:
        first = {choice: job(data, row, choice, 60, 0) for choice in choices}
        jobs = list(first.values())
        if any(each["name"] not in done for each in jobs):
            return jobs, None
        order = sorted(choices, key=lambda choice: -dev_score(first[choice], done))
        more = neighbours(row, order[0], choices)
        if not more:
            break
        choices += more
    second = {choice: job(data, row, choice, 240, 0) for choice in order[: max(3, len(order) // 4)]}
    jobs += second.values()
    if any(each["name"] not in done for each in second.values()):
        return jobs, None
    order = sorted(second, key=lambda choice: -dev_score(second[choice], done))
    third = {
        choice: [job(data, row, choice, 900, seed) for seed in range(3)] for choice in order[:2]
    }
    jobs += [third[choice][seed] for seed in range(3) for choice in third]
    if any(each["name"] not in done for each in jobs):
        return jobs, None
    return jobs, max(third, key=lambda choice: sum(dev_score(run, done) for run in third[choice]))


def larger(data: str, row: str, done: Done) -> Iterator[Job]:
    """Yield the runs of 3,600 s with N = 512: one seed of each rate, three of the best."""
    first = [job(data, row, (512, rate), 3600, 0) for rate in (1e-4, 2e-4, 4e-4, 8e-4)]
    yield from first
    if all(each["name"] in done for each in first):
        best = max(first, key=lambda each: dev_score(each, done))
        rate = best["settings"]["optim.learning_rate"]
        yield from (job(data, row, (512, rate), 3600, seed) for seed in (1, 2))


def baselines() -> Iterator[Job]:
    """Yield the evaluations of models that are not trained."""
    for data in OTHER:
        for row in ("untrained", "bm25"):
            yield {"name": f"{data}-{row}", "row": row, "set": data, "seed": 0,
                   "evaluate": job(data, "grad_cache", GRID[0], 900, 0)["evaluate"]}  # fmt: skip


def plan(done: Done) -> Iterator[Job]:
    """Yield the jobs that can be known now, the most important first."""
    yield from baselines()
    for row in ROWS:
        for data in OTHER:
            jobs, choice = rungs(data, row, done)
            yield from jobs
            if choice:
                yield from (job(data, row, choice, 900, seed) for seed in (3, 4))
        if row != "replay_bank":  # mined negatives for the two main rows, when both are known
            continue
        for data in OTHER:
            yield {"name": f"{data}-mine", "row": "mine", "set": data, "evaluate": []}
            if f"{data}-mine" not in done:
                continue
            for main in ("grad_cache", "replay_bank"):
                _, choice = rungs(data, main, done)
                if choice:
                    pairs, rate = choice
                    yield from (
                        job(data, main, (pairs, rate * factor), 900, seed, count)
                        for seed in range(3)
                        for count in (1, 3)
                        for factor in (1, 0.5)
                    )
    for row in ("grad_cache", "replay_bank", "cont_accum_aged", "replay"):
        for data in OTHER:
            _, choice = rungs(data, row, done)
            if choice:
                yield from (job(data, row, choice, 3600, seed) for seed in range(3))
    for row in ("grad_cache", "replay_bank"):
        for data in OTHER:
            yield from larger(data, row, done)


def mined_file(out: Path, data: str) -> Path:
    return out / f"{data}-mined.jsonl"


@cache
def judged_set(folder: Path, split: str) -> RetrievalSet:
    """Return a set for evaluation, read once in each process."""
    return open_dataset(str(folder), split, DataPolicy(repair=True)).retrieval_set


def documents_of(sets: Path) -> Job:
    """Return a line with the document of every test query, in the order of sorted query ids.

    A document is a module of the API docs, and a page of MedQuAD.
    """
    found = {}
    for data in OTHER:
        queries = [json.loads(line) for line in (sets / data / "queries.jsonl").open("rb")]
        module_of = {each["_id"]: each.get("metadata", {}).get("module") for each in queries}
        found[f"{data}/test"] = [
            module_of[key] or key.rsplit("-", 2)[0]
            for key in sorted(judged_set(sets / data, "test").queries)
        ]
    return {"name": "documents", "row": "documents", "documents": found}


def run(job: Job, sets: Path, model: Path, out: Path, device: str) -> Job:
    """Make one run in a process of the pool; return the job with its scores, or with its error."""
    torch.set_num_threads(1)
    mined, folder = mined_file(out, job["set"]), out / "runs" / job["name"]
    settings, data = SearchConfig(cache=False), str(sets / job["set"])
    try:
        if job["row"] == "mine":
            mined.unlink(missing_ok=True)
            mining = MineConfig(num_negatives=7, relative_margin=0.05)
            encoder = EncoderConfig(model=str(model), device=device, **LENGTHS)
            mine(
                encoder,
                data,
                mined,
                mining=mining,
                settings=settings,
                policy=DataPolicy(repair=True),
            )
            return job
        trained = str(model)
        if "settings" in job:
            shutil.rmtree(folder, ignore_errors=True)
            changes = {
                **job["settings"], "model.name": model, "output_dir": folder, "run.device": device,
                "data.train": mined if job["settings"]["data.hard_negatives"] else data,
                "optim.max_steps": job["updates"], "seed": job["seed"],
            }  # fmt: skip
            config = TrainConfig.from_config("study/whole")
            trained = str(train(with_changes(config, {k: str(v) for k, v in changes.items()})))
        loaded: DualEncoder | str = "bm25"
        if job["row"] != "bm25":
            loaded = DualEncoder.load(trained, **({} if "settings" in job else LENGTHS))
            loaded = loaded.to(encoding_device(device))
        scores = {}
        for name in job["evaluate"]:
            folder_name, split = name.split("/")
            judged = judged_set(sets / folder_name, split)
            found = evaluate(loaded, judged, k=100, settings=settings)
            per_query = found["per_query"]
            scores[name] = {
                "ndcg@10": round(found["mean"]["ndcg@10"], 5), "queries": len(per_query),
                "per_query": [round(per_query[key]["ndcg@10"], 4) for key in sorted(per_query)],
            }  # fmt: skip
        return {**job, "scores": scores}
    except Exception as error:  # one failed run must not end the others
        return {**job, "failed": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("sets", "model", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--workers", type=int, default=15, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=60, help="no run starts after this time")
    parser.add_argument("--device", default="auto", help="auto or cpu")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="only runs of these rows")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file, end = args.out / "whole.jsonl", time.monotonic() + 60 * args.minutes
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    done: Done = {row["name"]: row for row in map(json.loads, lines)}
    for data in OTHER:  # whole.jsonl may come from another machine, without the mined passages
        if not mined_file(args.out, data).exists():
            done.pop(f"{data}-mine", None)
    if "documents" not in done:
        with file.open("a", encoding="utf-8") as results:
            results.write(json.dumps(documents_of(args.sets)) + "\n")
    running: dict[Future[Job], str] = {}
    where = (args.sets.resolve(), args.model.resolve(), args.out.resolve(), args.device)
    pool = ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn"))
    with pool, file.open("a", encoding="utf-8") as results:
        while True:
            for each in plan(done):
                if len(running) == args.workers or time.monotonic() > end:
                    break
                if args.rows and each["row"] not in args.rows:
                    continue
                if each["name"] not in done and each["name"] not in running.values():
                    running[pool.submit(run, each, *where)] = each["name"]
            if not running:
                break
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                row = ended.result()
                done[running.pop(ended)] = row
                results.write(json.dumps(row, separators=(",", ":")) + "\n")
                results.flush()
                dev = {name: found["ndcg@10"] for name, found in row.get("scores", {}).items()}
                print(row["name"], dev, row.get("failed", ""), flush=True)


if __name__ == "__main__":
    main()
