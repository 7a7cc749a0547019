"""The verbs of `contaccum data`: their options and help."""

from jsonargparse import ArgumentParser

from contaccum.cli.parsers.common import add_max_bad_records, add_repair, add_strict, new_parser


def check_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum data check",
        "Validate a data set and print its statistics.",
        "%(prog)s PATH [--split NAME] [--strict] [--repair]",
    )
    parser.add_argument("path", help="BEIR folder, corpus, queries, or file of training examples or questions")
    parser.add_argument("--split", help="one split of a BEIR folder; all when not given")
    add_strict(parser)
    add_repair(parser)
    add_max_bad_records(parser)
    return parser


def convert_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum data convert",
        "Write a data set in another format.",
        "%(prog)s SOURCE TARGET --to {beir,dpr,jsonl,tevatron} [--split NAME]",
    )
    parser.add_argument("source", help="data set in any form")
    parser.add_argument("target", help="file or folder to write; must not exist")
    parser.add_argument("--to", choices=["beir", "dpr", "jsonl", "tevatron"], required=True, help="form of the target")
    parser.add_argument("--split", default="train", help="which split of a BEIR folder, read or written")
    add_strict(parser)
    add_repair(parser)
    add_max_bad_records(parser)
    return parser


def fetch_parser() -> ArgumentParser:
    parser = new_parser(
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


def demo_parser() -> ArgumentParser:
    parser = new_parser("contaccum data demo", "Write the demo data set, the same at every call.", "%(prog)s FOLDER")
    parser.add_argument("folder", help="folder to write; must not exist")
    return parser
