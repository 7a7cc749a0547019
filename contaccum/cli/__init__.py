"""The command line: one subcommand per verb."""

from contaccum.cli.main import main

__all__ = ["main"]
