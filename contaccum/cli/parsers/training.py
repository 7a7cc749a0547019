"""The verbs around training: their options and help."""

from jsonargparse import ArgumentParser

from contaccum.cli.parsers.common import ConfigFile, add_settings, new_parser
from contaccum.options import MineSettings, RoundsOptions, StudyOptions


def train_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum train",
        "Train two encoder towers. Every setting can stand in the config file or on the command line, which goes before it.",
        "%(prog)s --config FILE [--method NAME] [--output_dir DIR] [--resume [--allow_changes true]] [--GROUP.FIELD VALUE ...]",
    )
    parser.add_argument("--config", action=ConfigFile, help="YAML file with any of the settings below")
    add_settings(parser, skip={"resume"})
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in output_dir from its newest checkpoint"
    )
    return parser


def rounds_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum rounds",
        "Train, mine hard negatives from data.train with the model, train with them, as often as rounds.count says. "
        "output_dir gets round-0/ (a run), mined-1.jsonl, round-1/ and so on; the last round's model/ is the result. Started "
        "again, it goes on where it stopped; more rounds may be asked for. Every setting of `contaccum train` can be given.",
        "%(prog)s --config FILE --output_dir DIR [--rounds.count N] [--mine.FIELD VALUE ...] [--GROUP.FIELD VALUE ...]",
    )
    parser.add_argument("--config", action=ConfigFile, help="YAML file with any of the settings below")
    parser.add_class_arguments(RoundsOptions, "rounds")
    parser.add_class_arguments(MineSettings, "mine")
    add_settings(parser, skip={"resume", "allow_changes"})
    return parser


def compare_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum compare",
        "Train methods x varied settings x seeds, each run in a process and a folder of its own (output_dir/runs), score all on "
        "the same test data, and write output_dir/report.html, report.md, runs.csv, tests.csv and plots/. Started again, it does "
        "what is missing and nothing else. Every setting of `contaccum train` can be given.",
        "%(prog)s --config FILE --methods a,b,c --seeds 3 [--vary GROUP.FIELD=v1,v2 ...] --output_dir DIR [options]",
    )
    parser.add_argument("--config", action=ConfigFile, help="YAML file with any of the settings of `contaccum train`")
    parser.add_class_arguments(StudyOptions, None, skip={"vary"})
    parser.add_argument(
        "--vary", nargs="+", default=[], metavar="GROUP.FIELD=v1,v2",
        help="settings to vary: every combination is run with every method that reads the setting",
    )  # fmt: skip
    add_settings(parser, unsaid={"resume"})  # stands in every config.yaml; here unfinished runs always go on
    return parser


def plan_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum plan",
        "Take a few real steps of each method and predict the largest micro-batch and bank that fit into a memory budget, peak "
        "memory and time; with --corpus_size also what encoding and indexing a corpus costs. Settings as for train.",
        "%(prog)s --config FILE --memory 11GB [--methods NAME,...] [--corpus_size N] [--GROUP.FIELD VALUE ...]",
    )
    parser.add_argument("--config", action=ConfigFile, help="YAML file with any of the settings below")
    parser.add_argument("--memory", required=True, help="budget of one process, such as 11GB or 24GiB")
    parser.add_argument("--methods", help="names joined by commas; all six when not given")
    parser.add_argument("--corpus_size", type=int, help="passages of a corpus to plan for")
    parser.add_argument("--output", help="JSON file to write the plan to")
    add_settings(parser, skip={"resume"})
    return parser


def verify_parser() -> ArgumentParser:
    parser = new_parser(
        "contaccum verify",
        "Check on a few small steps of your model and data that what should be equal is: grad_cache and in_batch, an empty bank "
        "and the method without one, the kept log-sum-exps and the full matrix, a resumed run and an unbroken one, two "
        "processes and one. Prints a table with the largest differences; exit code 1 when one does not hold.",
        "%(prog)s --config FILE [--method NAME] [--GROUP.FIELD VALUE ...]",
    )
    parser.add_argument("--config", action=ConfigFile, help="YAML file with any of the settings of `contaccum train`")
    add_settings(parser, unsaid={"resume"})  # stands in every config.yaml; here unfinished runs always go on
    return parser


def report_parser() -> ArgumentParser:
    parser = new_parser(
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


def merge_parser() -> ArgumentParser:
    parser = new_parser(
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


def push_parser() -> ArgumentParser:
    parser = new_parser(
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
