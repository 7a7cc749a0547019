"""Data path: time to open and tokenize a data set, and share of a step spent waiting for micro-batches.

    python benchmarks/data_path.py [--data BEIR_DIR] [--model DIR] [--json OUT] [--quick]

Without --data the script writes a set: passages of 128 tokens with one question each. The first opening reads and checks the
JSONL and builds the memory-mapped tables; the second one maps them. `contaccum train` logs the waiting time.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from common import make_parser, model_folder, pairs_of_texts, publish, table

from contaccum import DualEncoder, train
from contaccum.config import TrainConfig
from contaccum.config.commands import DataPolicy
from contaccum.data.dataset import open_dataset
from contaccum.data.tables import build_token_table
from contaccum.training.log import read_log


def make_set(folder: Path, pairs: int, tokenizer: object) -> Path:
    """Write a BEIR folder of random texts."""
    (folder / "qrels").mkdir(parents=True)
    queries, passages = pairs_of_texts(tokenizer, pairs)
    lines = [json.dumps({"_id": f"p{i}", "title": "", "text": text}) for i, text in enumerate(passages)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "queries.jsonl").write_text(
        "\n".join(json.dumps({"_id": f"q{i}", "text": t}) for i, t in enumerate(queries)) + "\n"
    )
    judged = [f"q{i}\tp{i}\t1" for i in range(pairs)]
    (folder / "qrels" / "train.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *judged]) + "\n")
    return folder


def timed(call: object) -> tuple[float, object]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--data", help="BEIR folder with a train split; a made one when not given")
    parser.add_argument("--rows", type=int, default=100_000, help="pairs in the made set")
    parser.add_argument("--pairs", type=int, default=128, help="pairs in an update (N)")
    parser.add_argument("--micro", type=int, default=8, help="pairs in a micro-batch (B)")
    parser.add_argument("--steps", type=int, default=12, help="updates; the first two do not count")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.pairs, args.micro, args.steps = 64, 8, 4, 4
    return args


def main() -> None:
    args = arguments()
    folder = model_folder(args.model)
    tower = DualEncoder.load(folder, pooling="mean").query_tower
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["CONTACCUM_CACHE"] = str(Path(scratch) / "cache")  # everything is built anew
        data = args.data or str(make_set(Path(scratch) / "data", args.rows, tower.tokenizer))
        first, train_set = timed(lambda: open_dataset(data, "train", DataPolicy(repair=True)).train_set())
        second, _ = timed(lambda: open_dataset(data, "train", DataPolicy(repair=True)).train_set())

        def tokens() -> object:
            mark = f"{train_set.fingerprint}/passages"
            return build_token_table(
                train_set.passages, ["title", "text"], tower.tokenizer, max_length=128, fingerprint=mark
            )

        tokenising, _ = timed(tokens)
        reopening, _ = timed(tokens)
        config = TrainConfig(method="cont_accum", output_dir=str(Path(scratch) / "run"))
        config.model.name, config.model.tie_towers, config.data.train, config.data.repair = folder, True, data, True
        limit = tower.backbone.config.max_position_embeddings
        config.model.max_query_length, config.model.max_passage_length = min(64, limit), min(128, limit)
        config.batch.global_batch_size, config.batch.micro_batch_size = args.pairs, args.micro
        config.bank.size, config.optim.max_steps, config.run.device = args.pairs, args.steps, args.device
        config.run.precision = args.precision
        train(config)
        log = read_log(Path(scratch) / "run")
    shares = [line["waited"] / line["seconds"] for line in log[2:]]
    count = len(train_set.passages)
    rows = [
        ["first opening (read, check, build tables)", f"{first:.2f} s", f"{count / first:,.0f} passages/s"],
        ["second opening (map tables)", f"{second:.3f} s", ""],
        ["tokenising passages, once", f"{tokenising:.2f} s", f"{count / tokenising:,.0f} passages/s"],
        ["opening tokens again", f"{reopening:.3f} s", ""],
        ["update waits for data, median share", f"{statistics.median(shares):.4%}", f"largest {max(shares):.4%}"],
    ]
    figures = {
        "passages": count, "first_opening": first, "second_opening": second, "tokenising": tokenising, "reopening": reopening,
        "waiting_share": {"median": statistics.median(shares), "max": max(shares)},
    }  # fmt: skip
    intro = (
        f"{count:,} passages, {'of ' + args.data if args.data else 'made'}; N = {args.pairs}, B = {args.micro}, "
        f"{len(shares)} updates of `cont_accum`. Target: an update waits for data for at most 1 % of its time."
    )
    publish(args, "The data path", [intro, table(["what", "figure", ""], rows)], figures)


if __name__ == "__main__":
    main()
