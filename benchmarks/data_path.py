"""The data path: opening a data set, tokenising it, and how long an update waits for its micro-batches.

    python benchmarks/data_path.py [--data BEIR_DIR] [--model DIR] [--json OUT] [--quick]

Without --data a set is made: passages of 128 tokens, a question each. First opening reads and checks the JSONL and builds the
memory-mapped tables, the second maps them. Waiting is what `contaccum train` writes to its log: the share of an update's time
in which the next micro-batches were not ready.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from common import make_parser, model_folder, pairs_of_texts, publish, table

from contaccum import train
from contaccum.config import TrainConfig
from contaccum.data.dataset import load_train_set
from contaccum.data.tokens import build_token_table
from contaccum.encoder import Source, load_tower


def make_set(folder: Path, pairs: int, tokenizer: object) -> Path:
    """A BEIR folder of made texts."""
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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", help="BEIR folder with a train split; a made one when not given")
    parser.add_argument("--rows", type=int, default=100_000, help="pairs in the made set")
    parser.add_argument("--pairs", type=int, default=128, help="pairs in an update (N)")
    parser.add_argument("--micro", type=int, default=8, help="pairs in a micro-batch (B)")
    parser.add_argument("--steps", type=int, default=12, help="updates; the first two do not count")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.pairs, args.micro, args.steps = 64, 8, 4, 4
    folder = model_folder(args.model)
    tower = load_tower(Source(str(folder)), "mean")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["CONTACCUM_CACHE"] = str(Path(scratch) / "cache")  # everything is built anew
        data = args.data or str(make_set(Path(scratch) / "data", args.rows, tower.tokenizer))
        first, train_set = timed(lambda: load_train_set(data, "train", 0, False, True))
        second, _ = timed(lambda: load_train_set(data, "train", 0, False, True))

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
        log = [json.loads(line) for line in (Path(scratch) / "run" / "log.jsonl").read_text().splitlines()]
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
