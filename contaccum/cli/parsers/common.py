"""What the parsers of several verbs share."""

from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from contaccum.config import GROUPS
from contaccum.config.file import check_config_file

set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    add_print_completion_argument=True,
    import_path_denylist=["*"],  # else a value such as {class_path: os.path} would import what it names
    import_path_allowlist=["contaccum.config.settings.MixtureConfig"],  # what a list of settings is made of
)


def new_parser(prog: str, description: str, usage: str = "%(prog)s [--help] VERB ...", **more: Any) -> ArgumentParser:
    return ArgumentParser(prog=prog, description=description, usage=usage, exit_on_error=False, **more)


class ConfigFile(ActionConfigFile):
    """A file of settings; what is no such file is refused by name and line, which jsonargparse's own sentences lack."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        check_config_file(values, GROUPS)
        super().__call__(parser, namespace, values, option_string)


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
