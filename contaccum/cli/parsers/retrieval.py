"""The verbs that encode, search and score: their options and help."""

from jsonargparse import ArgumentParser

from contaccum.cli.parsers.common import add_max_bad_records, add_repair, add_strict, new_parser
from contaccum.options import ExploreOptions, MineSettings, ModelChoice, SearchSettings


def encode_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum encode",
        "Encode a corpus or queries into .npy shards with a manifest. Finished shards are kept when it is started again; "
        "under torchrun each process makes its own shards.",
        "%(prog)s --model DIR --input FILE_OR_BEIR_DIR --output DIR [options]",
    )
    parser.add_class_arguments(ModelChoice, None, skip={"model"})
    parser.add_argument("--model", required=True, help="folder that we trained, any encoder folder, or a hub name")
    parser.add_argument("--input", required=True, help="BEIR folder or name, corpus.jsonl or passages TSV")
    parser.add_argument("--output", required=True, help="folder for the shards")
    parser.add_argument("--kind", choices=["passage", "query"], default="passage", help="which texts of the input")
    parser.add_argument(
        "--dtype", choices=["float16", "float32"], default="float32", help="form of the vectors on disk"
    )
    parser.add_argument("--shard_size", type=int, default=50_000, help="texts in one shard")
    parser.add_argument(
        "--batch_tokens",
        type=int,
        help="tokens in one forward pass, padding counted; 1024 for each thread on a CPU, else 16384 when not given",
    )
    add_repair(parser)
    add_max_bad_records(parser)
    return parser


def search_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum search",
        "Search a corpus: all queries of a split into a TREC run file, one query to look at, or one after another from a prompt.",
        '%(prog)s --model DIR --data BEIR_DIR (--split test --output FILE | --query "TEXT" | --interactive) [options]',
    )
    parser.add_class_arguments(ModelChoice, None)
    parser.add_argument("--data", required=True, help="BEIR folder or name")
    parser.add_argument(
        "--split", default="test", help="whose queries to search for, or whose judged passages a prompt marks"
    )
    parser.add_argument("--output", help="TREC run file to write")
    parser.add_argument("--query", help="one query text; its best passages are printed")
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="read queries from a prompt, or a line each from a pipe, and print the best passages of each; an empty line ends it",
    )
    parser.add_argument("--k", type=int, help="passages per query; 100 for a run, else 10 when not given")
    parser.add_class_arguments(SearchSettings, None)
    add_repair(parser)
    add_max_bad_records(parser)
    return parser


def explore_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum explore",
        "Serve a page that shows the passages of two models for a query side by side, with judged ones and the words that BM25 "
        "matches marked, and the judged queries sorted by what one model loses to the other. What has to be encoded is kept in "
        "the cache; stopped and started again, it goes on. Needs the extra `explore`.",
        "%(prog)s --models DIR [DIR|bm25 ...] --data BEIR_DIR [--split test] [--port N] [options]",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        required=True,
        metavar="DIR",
        help="folders that we trained, encoder folders, hub names, or bm25",
    )
    parser.add_argument(
        "--embeddings", nargs="+", default=[], metavar="DIR",
        help="folders that `contaccum encode` wrote, each used for the model that made it; others are kept in the cache",
    )  # fmt: skip
    parser.add_class_arguments(ExploreOptions, None, skip={"models", "embeddings"})
    parser.add_class_arguments(ModelChoice, None, skip={"model", "timeout_minutes"})
    parser.add_class_arguments(SearchSettings, None, skip={"embeddings", "index_dir"})
    add_repair(parser)
    add_max_bad_records(parser)
    return parser


def evaluate_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum evaluate",
        "Score a retriever on a BEIR folder or name (ndcg, map, recall, precision, mrr), on a DPR question file (top-k answer "
        "accuracy), or score a run file. --data beir and --data nanobeir score all their sets, --data A,B those named, and print "
        "a table with the mean over sets.",
        "%(prog)s (--model DIR (--data DIR_OR_NAME | --questions FILE --passages FILE) | --run FILE --qrels FILE) [options]",
    )
    parser.add_class_arguments(ModelChoice, None, skip={"model"})
    parser.add_argument("--model", help="folder that we trained, any encoder folder, a hub name, or bm25")
    parser.add_argument(
        "--data",
        help="BEIR folder or name, or a file of training examples; several with commas; or beir (15 sets) or nanobeir (13)",
    )
    parser.add_argument(
        "--split", default="test", help="which qrels of the folder; of beir's msmarco always dev, as it is quoted"
    )
    parser.add_argument(
        "--relevance_level",
        type=int,
        default=1,
        help="lowest grade that counts for map, recall, precision and mrr; 2 for TREC's deep learning tracks. ndcg is graded",
    )
    parser.add_argument("--questions", help="DPR question file: question, tab, list of answers")
    parser.add_argument("--passages", help="DPR passages file: id, tab, text, tab, title; or any corpus")
    parser.add_argument(
        "--match", choices=["string", "regex"], default="string", help="how answers are found in passages"
    )
    parser.add_argument("--processes", type=int, default=1, help="processes that look for answers")
    parser.add_argument("--run", help="TREC run file to score")
    parser.add_argument("--qrels", help="judgements for --run: a qrels file")
    parser.add_argument("--against", help="another run file, which --run is tested against, query by query")
    parser.add_argument("--metric", default="ndcg@10", help="which metric is tested")
    parser.add_argument("--k", type=int, default=100, help="passages per query")
    parser.add_argument(
        "--output",
        help="metrics.json to write, with the values of every query; for several sets a folder, where what is finished stays",
    )
    parser.add_class_arguments(SearchSettings, None)
    add_strict(parser)
    add_repair(parser)
    add_max_bad_records(parser)
    return parser


def mine_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum mine",
        "Search for every training query by BM25 or an encoder, and write the training data anew with hard negatives from what "
        "was found, with scores. Passages known to be relevant, by id or by text, are never taken. Started again, it goes on "
        "behind the blocks of queries that are finished.",
        "%(prog)s --model DIR|bm25 --data DATA --output FILE [--range_min N] [--relative_margin X] [options]",
    )
    parser.add_class_arguments(ModelChoice, None)
    parser.add_argument("--data", required=True, help="BEIR folder or name, or a file of training examples")
    parser.add_argument("--split", default="train", help="which qrels of the folder")
    parser.add_argument(
        "--corpus",
        help="passages to mine from, instead of the data's own: BEIR folder or name, corpus.jsonl, passages TSV",
    )
    parser.add_argument(
        "--output",
        required=True,
        help="file to write; must not exist. What was mined stands beside it in NAME.about.json",
    )
    parser.add_argument("--to", choices=["jsonl", "dpr", "tevatron"], default="jsonl", help="form of the file")
    parser.add_class_arguments(MineSettings, None)
    parser.add_class_arguments(SearchSettings, None, skip={"seed"})
    add_strict(parser)
    add_repair(parser)
    add_max_bad_records(parser)
    return parser
