"""Download data sets by name from BEIR, DPR, MTEB, MIRACL and the Hugging Face Hub.

``fetch`` is the function to call.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path

from contaccum.errors import InputError
from contaccum.runtime.files import refuse_url

NANO = {
    "arguana": "ArguAna", "climate-fever": "ClimateFEVER", "dbpedia-entity": "DBPedia",
    "fever": "FEVER", "fiqa": "FiQA2018", "hotpotqa": "HotpotQA", "msmarco": "MSMARCO",
    "nfcorpus": "NFCorpus", "nq": "NQ", "quora": "QuoraRetrieval", "scidocs": "SCIDOCS",
    "scifact": "SciFact", "webis-touche2020": "Touche2020",
}  # fmt: skip
"""NanoBEIR data sets: name in BEIR -> name of the split on the Hub. The prefix Nano of the split
name is left out."""
NANO_REPOSITORY = "hub:sentence-transformers/NanoBEIR-en"
HUB_PREFIX = "hub:"


def table(file: str) -> list[list[str]]:
    """Read a TSV file of this package. Return a list of cells for each line."""
    text = resources.files("contaccum.catalog").joinpath(file).read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()]


def fetch(name: str | Path, split: str = "test") -> Path:
    """Return the local path of a data set; download the data set into the cache if necessary.

    name: one of these:

    - a local path
    - a Hub data set: ``hub:owner/name`` (see hub_sets.py)
    - a BEIR data set: ``scifact``, ``cqadupstack/android``
    - a NanoBEIR data set: ``nanobeir/scifact``
    - an MTEB task: ``mteb/NFCorpus``
    - a MIRACL language: ``miracl/sw``
    - a DPR file: ``dpr/nq-train``, ``dpr/psgs_w100``

    split: split of a Hub data set or MTEB task, ignored for others.

    Raises InputError if the name is unknown or the download fails.
    """
    return find(name)(split)


def find(name: str | Path) -> Callable[[str], Path]:
    """Return a function that downloads a data set, given its split, and returns its path.

    Raise InputError if no data set has this name. Of a Hub data set, only the form of the name is
    checked. A path is not checked.
    """
    text = os.path.expanduser(str(name))
    refuse_url(text)
    family, _, member = text.partition("/")
    # Path.exists raises an error if the name is too long for a path
    if os.path.exists(text) or _is_path(text):
        return lambda split: Path(text)  # if a path does not exist, the caller reports the error
    if family == "nanobeir":
        if member not in NANO:
            raise InputError(
                f"{text}: no NanoBEIR set has this name; expected nanobeir/ and one of "
                f"{', '.join(NANO)}"
            )
        text = f"{NANO_REPOSITORY}::Nano{NANO[member]}"
    if text.startswith(HUB_PREFIX):
        from contaccum.catalog.hub_sets import HubName, fetch_hub

        return partial(fetch_hub, HubName.of(text))
    if family in ("mteb", "miracl") and member:
        from contaccum.catalog import pinned

        if family == "mteb":
            return partial(pinned.mteb_folder, *pinned.task_and_subset(member))
        pinned.check_language(member)
        return lambda split: pinned.miracl_folder(member)
    from contaccum.catalog import download

    if family == "dpr" and member:
        download.check_dpr_name(member)
        return lambda split: download.dpr_file(member)
    download.check_beir_name(text)
    return lambda split: download.beir_folder(text)


def source_of(name: str, split: str) -> tuple[str, str, str]:
    """Return the path or name, the configuration and the split that are read. Download nothing.

    The split of a Hub name replaces ``split``, and the split of a file is empty. Two names of the
    same set on the Hub may differ.
    """
    text, configuration = os.path.expanduser(name), ""
    if text.startswith(HUB_PREFIX) and not os.path.exists(text):
        from contaccum.catalog.hub_sets import HubName

        hub = HubName.of(text)
        text, configuration = hub.repository, hub.configuration or ""
        split = hub.split or split
    elif text.startswith(("dpr/", "nanobeir/")) and not os.path.exists(text):
        split = ""  # each has only one
    elif text.startswith("mteb/") and not os.path.exists(text):
        text = text.casefold()  # capitals make no difference
    return os.path.realpath(text), configuration, "" if os.path.isfile(text) else split


def unread_splits(name: str, split: str) -> list[str]:
    """Return the splits of a table that are not read, such as that of test.csv.

    split: split that is read if the name has none. Empty for other data, and if the name has one.
    """
    if not name.startswith(HUB_PREFIX) or os.path.exists(name):
        return []
    from contaccum.catalog.hub_sets import HubName

    return HubName.of(name).unread_splits(split)


def _is_path(text: str) -> bool:
    """Return whether a text that is no existing path can be no name of a data set, only a path."""
    if text.startswith((HUB_PREFIX, "nanobeir/", "mteb/", "miracl/")):
        return False  # such as mteb/Touche2020Retrieval.v3
    return Path(text).is_absolute() or text.startswith(".") or bool(Path(text).suffix) or not text
