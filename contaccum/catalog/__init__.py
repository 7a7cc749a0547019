"""Download data sets by name from BEIR, DPR, MTEB, MIRACL and the Hugging Face Hub.

``fetch`` is the function to call.
"""

import os
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


def is_published(name: str | Path) -> bool:
    """Return whether ``fetch`` would download this data set.

    A part of the name after a slash may still be wrong.
    """
    from contaccum.catalog.download import MD5

    text = str(name)
    known = text.partition("/")[0] in (*MD5, "dpr", "miracl", "mteb", "nanobeir")
    return (known or text.startswith(HUB_PREFIX)) and not os.path.exists(text)


def check_name(name: str | Path) -> None:
    """Raise InputError if no data set has this name. Download nothing.

    Of a Hub data set, only the form of the name is checked. A path is not checked.
    """
    text = str(name)
    refuse_url(text)
    family, _, member = text.partition("/")
    if os.path.exists(text) or _is_path(text):
        return
    if family == "nanobeir":
        if member not in NANO:
            raise InputError(
                f"{text}: no NanoBEIR set has this name; expected nanobeir/ and one of "
                f"{', '.join(NANO)}"
            )
    elif text.startswith(HUB_PREFIX):
        from contaccum.catalog.hub_sets import HubName

        HubName.of(text)
    elif family == "mteb" and member:
        from contaccum.catalog.pinned import task_and_subset

        task_and_subset(member)
    elif family == "miracl" and member:
        from contaccum.catalog.pinned import check_language

        check_language(member)
    elif family == "dpr" and member:
        from contaccum.catalog.download import check_dpr_name

        check_dpr_name(member)
    else:
        from contaccum.catalog.download import check_beir_name

        check_beir_name(text)


def _is_path(text: str) -> bool:
    """Return whether a text that is no existing path can be no name of a data set, only a path."""
    if text.startswith((HUB_PREFIX, "nanobeir/", "mteb/", "miracl/")):
        return False  # such as mteb/Touche2020Retrieval.v3
    return Path(text).is_absolute() or text.startswith(".") or bool(Path(text).suffix) or not text


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
    text = str(name)
    check_name(text)
    # Path.exists raises an error if the name is too long for a path
    if os.path.exists(text) or _is_path(text):
        return Path(text)  # if a path does not exist, the caller reports the error
    family, _, member = text.partition("/")
    if family == "nanobeir":
        text = f"{NANO_REPOSITORY}::Nano{NANO[member]}"
    if text.startswith(HUB_PREFIX):
        from contaccum.catalog.hub_sets import fetch_hub

        return fetch_hub(text, split)
    if family in ("mteb", "miracl") and member:
        from contaccum.catalog.pinned import miracl_folder, mteb_folder

        return miracl_folder(member) if family == "miracl" else mteb_folder(member, split)
    from contaccum.catalog.download import beir_folder, dpr_file

    return dpr_file(member) if family == "dpr" and member else beir_folder(text)
