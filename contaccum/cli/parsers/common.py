"""What the parsers of several verbs share."""

import argparse
from collections.abc import Collection
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from contaccum.config import GROUPS, TrainConfig
from contaccum.config.file import check_config_file

set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    add_print_completion_argument=True,
    import_path_denylist=["*"],  # else a value such as {class_path: os.path} would import what it names
    import_path_allowlist=["contaccum.config.settings.MixtureConfig"],  # what a list of settings is made of
)


def new_parser(prog: str, description: str, usage: str = "%(prog)s [--help] VERB ...", **more: Any) -> ArgumentParser:
    usage = usage.replace("%(prog)s", prog)  # the library would put the main parser's own usage in between
    return ArgumentParser(prog=prog, description=description, usage=usage, exit_on_error=False, **more)


class ConfigFile(ActionConfigFile):
    """A file of settings; what is no such file is refused by name and line, which jsonargparse's own sentences lack."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        check_config_file(values, GROUPS)
        super().__call__(parser, namespace, values, option_string)


def add_settings(parser: ArgumentParser, skip: Collection[str] = (), unsaid: Collection[str] = ()) -> None:
    """All settings of a training run but ``skip``; of ``unsaid`` the help says nothing."""
    parser.add_class_arguments(TrainConfig, None, skip=set(skip))
    for action in parser._actions:
        # a group as a whole is refused (refuse_whole_groups)
        if type(action).__name__ == "_ActionConfigLoad" or action.dest in unsaid:
            action.help = argparse.SUPPRESS


def add_strict(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--strict", action="store_true", help="refuse queries without a positive instead of skipping them"
    )


def add_repair(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--repair", action="store_true", help="accept repeated ids and empty passages, counted in a warning"
    )


def add_max_bad_records(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--max_bad_records",
        type=int,
        default=0,
        metavar="N",
        help="leave out up to N records of each file that cannot be read, listed in a file that a warning names (default: 0)",
    )
