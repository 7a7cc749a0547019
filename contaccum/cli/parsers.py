"""The parser of each verb: its options and their help. No logic."""

from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from contaccum import __version__
from contaccum.config import GROUPS, TrainConfig
from contaccum.config.file import check_config_file
from contaccum.errors import InputError
from contaccum.options import ExploreOptions, MineSettings, ModelChoice, RoundsOptions, SearchSettings, StudyOptions

set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    add_print_completion_argument=True,
    import_path_denylist=["*"],  # else a value such as {class_path: os.path} would import what it names
    import_path_allowlist=["contaccum.config.settings.MixtureConfig"],  # what a list of settings is made of
)


def make_parser(arguments: list[str] | None = None) -> ArgumentParser:
    """The parser of all verbs; of ``arguments`` where given, which takes a quarter of the time: only the verb that they begin
    with has its options, and the others their names and help."""
    parser = _new(
        "contaccum",
        "Train dense retrievers under a fixed memory budget, and search and evaluate with them.",
        version=__version__,
    )
    every = arguments is None or "--print_completion" in " ".join(arguments)
    chosen = arguments[0] if arguments else ""
    verbs = parser.add_subcommands(metavar="VERB")
    for name, (make, line) in _VERBS.items():
        verbs.add_subcommand(name, make() if every or name == chosen else _new(f"contaccum {name}", ""), help=line)
    data = _new("contaccum data", "Look at data sets and change their form.")
    verbs.add_subcommand("data", data, help="check or convert a data set")
    if every or chosen == "data":
        forms = data.add_subcommands(metavar="VERB")
        forms.add_subcommand("check", _check_parser(), help="validate a data set and print its statistics")
        forms.add_subcommand("convert", _convert_parser(), help="write a data set in another format")
        forms.add_subcommand("fetch", _fetch_parser(), help="download a data set by its name")
        forms.add_subcommand("demo", _demo_parser(), help="write the demo data set")
    return parser


def refuse_whole_groups(arguments: list[str]) -> None:
    """InputError for --GROUP VALUE, by which the library takes a group from a file, a mapping or a class; we take its fields."""
    verb, *options = arguments or [""]
    whole = {option.partition("=")[0] for option in options} & {f"--{group}" for group in GROUPS}
    if whole and verb in ("train", "rounds", "compare", "verify", "plan"):
        name = min(whole)
        raise InputError(f"{name} is a group of settings, expected {name}.FIELD VALUE, or --config FILE")


def _new(prog: str, description: str, usage: str = "%(prog)s [--help] VERB ...", **more: Any) -> ArgumentParser:
    return ArgumentParser(prog=prog, description=description, usage=usage, exit_on_error=False, **more)


class _ConfigFile(ActionConfigFile):
    """A file of settings; what is no such file is refused by name and line, which jsonargparse's own sentences lack."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        check_config_file(values, GROUPS)
        super().__call__(parser, namespace, values, option_string)


def train_parser() -> ArgumentParser:
    parser = _new(
        "contaccum train",
        "Train two encoder towers. Every setting can stand in the config file or on the command line, which goes before it.",
        "%(prog)s --config FILE [--method NAME] [--output_dir DIR] [--resume [--allow_changes true]] [--GROUP.FIELD VALUE ...]",
    )
    parser.add_argument("--config", action=_ConfigFile, help="YAML file with any of the settings below")
    parser.add_class_arguments(TrainConfig, None, skip={"resume"})
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in output_dir from its newest checkpoint"
    )
    return parser


def _compare_parser() -> ArgumentParser:
    parser = _new(
        "contaccum compare",
        "Train methods x varied settings x seeds, each run in a process and a folder of its own (output_dir/runs), score all on "
        "the same test data, and write output_dir/report.html, report.md, runs.csv, tests.csv and plots/. Started again, it does "
        "what is missing and nothing else. Every setting of `contaccum train` can be given.",
        "%(prog)s --config FILE --methods a,b,c --seeds 3 [--vary GROUP.FIELD=v1,v2 ...] --output_dir DIR [options]",
    )
    parser.add_argument("--config", action=_ConfigFile, help="YAML file with any of the settings of `contaccum train`")
    parser.add_class_arguments(StudyOptions, None, skip={"vary"})
    parser.add_argument(
        "--vary", nargs="+", default=[], metavar="GROUP.FIELD=v1,v2",
        help="settings to vary: every combination is run with every method that reads the setting",
    )  # fmt: skip
    parser.add_class_arguments(TrainConfig, None)
    return parser


def _verify_parser() -> ArgumentParser:
    parser = _new(
        "contaccum verify",
        "Check on a few small steps of your model and data that what should be equal is: grad_cache and in_batch, an empty bank "
        "and the method without one, the kept log-sum-exps and the full matrix, a resumed run and an unbroken one, two "
        "processes and one. Prints a table with the largest differences; exit code 1 when one does not hold.",
        "%(prog)s --config FILE [--method NAME] [--GROUP.FIELD VALUE ...]",
    )
    parser.add_argument("--config", action=_ConfigFile, help="YAML file with any of the settings of `contaccum train`")
    parser.add_class_arguments(TrainConfig, None)
    return parser


def plan_parser() -> ArgumentParser:
    parser = _new(
        "contaccum plan",
        "Take a few real steps of each method and predict the largest micro-batch and bank that fit into a memory budget, peak "
        "memory and time; with --corpus_size also what encoding and indexing a corpus costs. Settings as for train.",
        "%(prog)s --config FILE --memory 11GB [--methods NAME,...] [--corpus_size N] [--GROUP.FIELD VALUE ...]",
    )
    parser.add_argument("--config", action=_ConfigFile, help="YAML file with any of the settings below")
    parser.add_argument("--memory", required=True, help="budget of one process, such as 11GB or 24GiB")
    parser.add_argument("--methods", help="names joined by commas; all six when not given")
    parser.add_argument("--corpus_size", type=int, help="passages of a corpus to plan for")
    parser.add_argument("--output", help="JSON file to write the plan to")
    parser.add_class_arguments(TrainConfig, None, skip={"resume"})
    return parser


def _encode_parser() -> ArgumentParser:
    parser = _new(
        "contaccum encode",
        "Encode a corpus or queries into .npy shards with a manifest. Finished shards are kept when it is started again; "
        "under torchrun each process makes its own shards.",
        "%(prog)s --model DIR --input FILE_OR_BEIR_DIR --output DIR [options]",
    )
    parser.add_class_arguments(ModelChoice, None)
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
    _add_repair(parser)
    _add_max_bad_records(parser)
    return parser


def _search_parser() -> ArgumentParser:
    parser = _new(
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
    _add_repair(parser)
    _add_max_bad_records(parser)
    return parser


def _explore_parser() -> ArgumentParser:
    parser = _new(
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
    _add_repair(parser)
    _add_max_bad_records(parser)
    return parser


def _evaluate_parser() -> ArgumentParser:
    parser = _new(
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
    _add_strict(parser)
    _add_repair(parser)
    _add_max_bad_records(parser)
    return parser


def _mine_parser() -> ArgumentParser:
    parser = _new(
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
    _add_strict(parser)
    _add_repair(parser)
    _add_max_bad_records(parser)
    return parser


def rounds_parser() -> ArgumentParser:
    parser = _new(
        "contaccum rounds",
        "Train, mine hard negatives from data.train with the model, train with them, as often as rounds.count says. "
        "output_dir gets round-0/ (a run), mined-1.jsonl, round-1/ and so on; the last round's model/ is the result. Started "
        "again, it goes on where it stopped; more rounds may be asked for. Every setting of `contaccum train` can be given.",
        "%(prog)s --config FILE --output_dir DIR [--rounds.count N] [--mine.FIELD VALUE ...] [--GROUP.FIELD VALUE ...]",
    )
    parser.add_argument("--config", action=_ConfigFile, help="YAML file with any of the settings below")
    parser.add_class_arguments(RoundsOptions, "rounds")
    parser.add_class_arguments(MineSettings, "mine")
    parser.add_class_arguments(TrainConfig, None, skip={"resume", "allow_changes"})
    return parser


def _report_parser() -> ArgumentParser:
    parser = _new(
        "contaccum report",
        "One row a run: metric, time of a step, peak memory, gradient-norm ratio; with --against, tests of the differences from "
        "one of them; with --html, a page with curves, gradient norms, age and drift of the bank, settings and environment.",
        "%(prog)s RUN [RUN ...] [--metric NAME] [--against RUN] [--html FILE]",
    )
    parser.add_argument("runs", nargs="+", help="folders of runs, or metrics.json files")
    parser.add_argument("--metric", default="ndcg@10", help="which metric to show")
    parser.add_argument(
        "--against",
        help="one of the runs, which the others are tested against, query by query; runs that differ in the seed are one",
    )
    parser.add_argument("--html", help="page to write; nothing is loaded from elsewhere (needs the extra `study`)")
    return parser


def _merge_parser() -> ArgumentParser:
    parser = _new(
        "contaccum merge",
        "Add the adapters of a model trained with LoRA to the weights of their base, and write a model without adapters, with "
        "the same vectors to rounding. A base in 4 or 8 bits is widened to float32 first.",
        "%(prog)s MODEL OUTPUT",
    )
    parser.add_argument("model", help="folder of the trained model, or its hub name")
    parser.add_argument("output", help="folder to write; must not exist")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run model code that comes with the base. Only if you trust it"
    )
    return parser


def _push_parser() -> ArgumentParser:
    parser = _new(
        "contaccum push",
        "Write a trained model's card (README.md in its folder: use, settings, training curve, metrics, licence) and send the "
        "folder to the Hugging Face Hub. A card that is there already is sent as it is, so it can be edited after a dry run. "
        "The metrics are those of metrics.json in the run's folder, else of the dev set. The token is the Hub client's: "
        "HF_TOKEN, or `hf auth login`.",
        "%(prog)s MODEL_OR_RUN OWNER/NAME [--private] [--licence NAME] [--dry_run]",
    )
    parser.add_argument("path", help="folder of a trained model, or of its run")
    parser.add_argument("repository", help="where to, as OWNER/NAME; made when it does not exist")
    parser.add_argument("--private", action="store_true", help="make the repository a private one")
    parser.add_argument(
        "--licence", help="licence named in the card, as the Hub names it: apache-2.0, mit, cc-by-4.0, ..."
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="write the card and list what would be sent; send nothing"
    )
    return parser


def _check_parser() -> ArgumentParser:
    parser = _new(
        "contaccum data check",
        "Validate a data set and print its statistics.",
        "%(prog)s PATH [--split NAME] [--strict] [--repair]",
    )
    parser.add_argument("path", help="BEIR folder, corpus, queries, or file of training examples or questions")
    parser.add_argument("--split", help="one split of a BEIR folder; all when not given")
    _add_strict(parser)
    _add_repair(parser)
    _add_max_bad_records(parser)
    return parser


def _convert_parser() -> ArgumentParser:
    parser = _new(
        "contaccum data convert",
        "Write a data set in another format.",
        "%(prog)s SOURCE TARGET --to {beir,dpr,jsonl,tevatron} [--split NAME]",
    )
    parser.add_argument("source", help="data set in any form")
    parser.add_argument("target", help="file or folder to write; must not exist")
    parser.add_argument("--to", choices=["beir", "dpr", "jsonl", "tevatron"], required=True, help="form of the target")
    parser.add_argument("--split", default="train", help="which split of a BEIR folder, read or written")
    _add_strict(parser)
    _add_repair(parser)
    _add_max_bad_records(parser)
    return parser


def _fetch_parser() -> ArgumentParser:
    parser = _new(
        "contaccum data fetch",
        "Download a data set into the cache, unless it is there, and print where it lies. Names work wherever data is asked for.",
        "%(prog)s NAME [--split NAME]",
    )
    parser.add_argument(
        "name",
        help="BEIR's name (scifact, cqadupstack/android), nanobeir/scifact, a retrieval task of MTEB's (mteb/NFCorpus, "
        "mteb/MIRACLRetrieval/sw), a language of MIRACL's (miracl/sw), a file of DPR's (dpr/nq-train, dpr/psgs_w100, "
        "dpr/nq-test-questions), or hub:owner/name; a path is printed as it is",
    )
    parser.add_argument(
        "--split",
        default="train",
        help="which split of a set of the Hub, or of a set of MTEB's whose splits have a corpus each",
    )
    return parser


def _demo_parser() -> ArgumentParser:
    parser = _new("contaccum data demo", "Write the demo data set, the same at every call.", "%(prog)s FOLDER")
    parser.add_argument("folder", help="folder to write; must not exist")
    return parser


def _add_strict(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--strict", action="store_true", help="refuse queries without a positive instead of skipping them"
    )


def _add_repair(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--repair", action="store_true", help="accept repeated ids and empty passages, counted in a warning"
    )


def _add_max_bad_records(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--max_bad_records",
        type=int,
        default=0,
        metavar="N",
        help="leave out up to N records of each file that cannot be read, listed in a file that a warning names (default: 0)",
    )


def _doctor_parser() -> ArgumentParser:
    return _new(
        "contaccum doctor",
        "Try what training and searching need on this machine: versions, devices, faiss on CPU and GPU, import order, "
        "flash-attention, memory, disks, network. Exit code 1 when something that is needed does not work.",
        "%(prog)s [--help]",
    )


_VERBS = {
    "train": (train_parser, "train a retriever by one of six memory methods"),
    "encode": (_encode_parser, "turn a corpus or queries into shards of vectors"),
    "search": (_search_parser, "find passages for a split's queries, or for one query"),
    "explore": (_explore_parser, "see in a browser what retrievers find, side by side"),
    "evaluate": (_evaluate_parser, "score a retriever, or a run file"),
    "mine": (_mine_parser, "write training data with mined hard negatives"),
    "rounds": (rounds_parser, "train, mine with the model, train again"),
    "compare": (_compare_parser, "train methods, settings and seeds, and weigh them"),
    "plan": (plan_parser, "predict what fits into memory, and what a corpus costs"),
    "verify": (_verify_parser, "hold the methods' equivalences on your model, data and device"),
    "report": (_report_parser, "put training runs side by side: table, tests, page"),
    "merge": (_merge_parser, "make plain weights of a model that was trained with LoRA"),
    "push": (_push_parser, "write a model's card and send both to the Hugging Face Hub"),
    "doctor": (_doctor_parser, "say what works on this machine, and what to do about what does not"),
}
"""What makes each verb's parser, and its line in `contaccum --help`; `data`, which has verbs of its own, comes after them."""
