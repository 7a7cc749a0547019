"""The parser of each verb: its options and their help. No logic."""

import difflib
from dataclasses import fields

from jsonargparse import ArgumentParser

from contaccum import __version__
from contaccum.cli.parsers.common import new_parser
from contaccum.cli.parsers.data import check_parser, convert_parser, demo_parser, fetch_parser
from contaccum.cli.parsers.retrieval import encode_parser, evaluate_parser, explore_parser, mine_parser, search_parser
from contaccum.cli.parsers.training import (
    compare_parser,
    merge_parser,
    plan_parser,
    push_parser,
    report_parser,
    rounds_parser,
    train_parser,
    verify_parser,
)
from contaccum.config import GROUPS, TrainConfig
from contaccum.errors import InputError


def make_parser(arguments: list[str] | None = None) -> ArgumentParser:
    """The parser of all verbs; of ``arguments`` where given, which is quicker: only the verb that they begin
    with has its options, and the others their names and help."""
    parser = new_parser(
        "contaccum",
        "Train dense retrievers under a fixed memory budget, and search and evaluate with them.",
        version=__version__,
    )
    every = arguments is None or "--print_completion" in " ".join(arguments)
    chosen = arguments[0] if arguments else ""
    verbs = parser.add_subcommands(metavar="VERB")
    for name, (make, line) in _VERBS.items():
        verbs.add_subcommand(
            name, make() if every or name == chosen else new_parser(f"contaccum {name}", ""), help=line
        )
    data = new_parser("contaccum data", "Look at data sets and change their form.")
    verbs.add_subcommand("data", data, help="check or convert a data set")
    if every or chosen == "data":
        forms = data.add_subcommands(metavar="VERB")
        forms.add_subcommand("check", check_parser(), help="validate a data set and print its statistics")
        forms.add_subcommand("convert", convert_parser(), help="write a data set in another format")
        forms.add_subcommand("fetch", fetch_parser(), help="download a data set by its name")
        forms.add_subcommand("demo", demo_parser(), help="write the demo data set")
    return parser


def refuse_whole_groups(arguments: list[str]) -> None:
    """InputError for --GROUP VALUE, by which the library takes a group from a file, a mapping or a class; we take its fields."""
    verb, *options = arguments or [""]
    whole = {option.partition("=")[0] for option in options} & {f"--{group}" for group in GROUPS}
    if whole and verb in TRAINING:
        name = min(whole)
        raise InputError(f"{name} is a group of settings, expected {name}.FIELD VALUE, or --config FILE")


def settings_like(arguments: list[str], sentence: str) -> str:
    """What to look at, behind a sentence on options that no parser knows: `--batch_size` is near `--batch.micro_batch_size`."""
    _, _, unknown = sentence.partition("unrecognized arguments: ")
    if not unknown or arguments[0] not in TRAINING:
        return ""
    whole = TrainConfig()
    options = [(field.name, f"--{group}.{field.name}") for group in GROUPS for field in fields(getattr(whole, group))]
    names = {name for name, _ in options}
    near: list[str] = []
    for word in (word.partition("=")[0].lstrip("-").rpartition(".")[2] for word in unknown.split() if word[:2] == "--"):
        like = [word] if word in names else difflib.get_close_matches(word, names, n=2, cutoff=0.65)
        near += [option for name, option in options if name in like]
    return f"; see {', '.join(dict.fromkeys(near))}" if near else ""


def doctor_parser() -> ArgumentParser:
    return new_parser(
        "contaccum doctor",
        "Try what training and searching need on this machine: versions, devices, faiss on CPU and GPU, import order, "
        "flash-attention, memory, disks, network. Exit code 1 when something that is needed does not work.",
        "%(prog)s [--help]",
    )


TRAINING = ("train", "rounds", "compare", "verify", "plan")
"""The verbs that take every setting of a training run."""

_VERBS = {
    "train": (train_parser, "train a retriever by one of six memory methods"),
    "encode": (encode_parser, "turn a corpus or queries into shards of vectors"),
    "search": (search_parser, "find passages for a split's queries, or for one query"),
    "explore": (explore_parser, "see in a browser what retrievers find, side by side"),
    "evaluate": (evaluate_parser, "score a retriever, or a run file"),
    "mine": (mine_parser, "write training data with mined hard negatives"),
    "rounds": (rounds_parser, "train, mine with the model, train again"),
    "compare": (compare_parser, "train methods, settings and seeds, and weigh them"),
    "plan": (plan_parser, "predict what fits into memory, and what a corpus costs"),
    "verify": (verify_parser, "hold the methods' equivalences on your model, data and device"),
    "report": (report_parser, "put training runs side by side: table, tests, page"),
    "merge": (merge_parser, "make plain weights of a model that was trained with LoRA"),
    "push": (push_parser, "write a model's card and send both to the Hugging Face Hub"),
    "doctor": (doctor_parser, "say what works on this machine, and what to do about what does not"),
}
"""What makes each verb's parser, and its line in `contaccum --help`; `data`, which has verbs of its own, comes after them."""
