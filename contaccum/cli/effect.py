"""Options of the verbs that search and score which change nothing beside others that were given."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from contaccum.options import ModelChoice, SearchSettings

Unread = Iterator[tuple[str, Collection[str]]]
"""What stands beside them, and options that are not read there."""
CHOICE = {field.name for field in fields(ModelChoice)} - {"model", "timeout_minutes"}
SEARCH = {field.name for field in fields(SearchSettings)}
LEXICAL = "with --model bm25"


def warn_without_effect(
    unread: Callable[[Mapping[str, Any]], Unread], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Warn of each option that differs from its default where it is not read; each is named once."""
    told: set[str] = set()
    for beside, names in unread(given):
        found = [name for name in given if name in names and name not in told and given[name] != defaults[name]]
        told.update(found)
        for name in found:
            warnings.warn(f"--{name} has no effect {beside}", stacklevel=2)


def unread_by_search(given: Mapping[str, Any]) -> Unread:
    if given["query"] is not None:
        yield "with --query", {"split"}
    if given["model"] == "bm25":
        yield LEXICAL, CHOICE | SEARCH


def unread_by_evaluate(given: Mapping[str, Any]) -> Unread:
    if given["run"] is not None:
        yield "with --run", {"model", "k", "split", "repair"} | CHOICE | SEARCH
    if given["questions"] is None:
        yield "without --questions", {"match", "processes"}
    else:
        yield "with --questions", {"split", "relevance_level", "strict"}
    if given["against"] is None:
        yield "without --against", {"metric"}
    if given["model"] == "bm25":
        yield LEXICAL, CHOICE | SEARCH


def unread_by_mine(given: Mapping[str, Any]) -> Unread:
    reranks = given["cross_encoder"] is not None
    if not reranks:
        yield "without --cross_encoder", {"cross_encoder_batch_size"}
    if given["model"] == "bm25":  # seed is the negatives' too
        yield LEXICAL, (CHOICE | SEARCH) - {"seed"} - ({"device", "trust_remote_code"} if reranks else set())
