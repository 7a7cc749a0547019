"""Where a data set lies that was named: on disk, in the cache, or to be fetched into it."""

import os
from pathlib import Path

from contaccum.data.download import dpr_file, is_published, resolve_dataset
from contaccum.data.hub import PREFIX, fetch_hub
from contaccum.data.miracl import miracl_folder
from contaccum.data.mteb import mteb_folder
from contaccum.errors import InputError

NANO = {
    "arguana": "ArguAna", "climate-fever": "ClimateFEVER", "dbpedia-entity": "DBPedia", "fever": "FEVER", "fiqa": "FiQA2018",
    "hotpotqa": "HotpotQA", "msmarco": "MSMARCO", "nfcorpus": "NFCorpus", "nq": "NQ", "quora": "QuoraRetrieval",
    "scidocs": "SCIDOCS", "scifact": "SciFact", "webis-touche2020": "Touche2020",
}  # fmt: skip
"""NanoBEIR's sets: BEIR's name and that of the split in the repository."""
NANO_REPOSITORY = "hub:sentence-transformers/NanoBEIR-en"


def resolve(name: str | Path, split: str = "test", repair: bool = False) -> tuple[Path, bool]:
    """The path of a data set, and whether to read it as BEIR's own loader does (``repair``), as every published one is.

    name: a path; ``hub:owner/name`` (see hub.py); a BEIR set such as scifact or cqadupstack/android; ``nanobeir/scifact``; a task
    of MTEB's such as ``mteb/NFCorpus``; a language of MIRACL's such as ``miracl/sw``; or a file of DPR's such as ``dpr/nq-train``
    or ``dpr/psgs_w100``. ``split`` is the one that is read of a set of the Hub.
    """
    text = str(name)
    if os.path.exists(text):  # unlike Path.exists, takes a name too long for a path
        return Path(text), repair
    family, _, member = text.partition("/")
    if family == "nanobeir":
        if member not in NANO:
            raise InputError(
                f"{text}: no set of NanoBEIR has that name, expected nanobeir/ and one of {', '.join(NANO)}"
            )
        text = f"{NANO_REPOSITORY}::Nano{NANO[member]}"
    if text.startswith(PREFIX):
        path = fetch_hub(text, split)
        return path, repair or path.is_dir()
    if family == "dpr" and member:
        return dpr_file(member), repair
    if family == "mteb" and member:
        return mteb_folder(member, split), True
    if family == "miracl" and member:
        return miracl_folder(member), True
    # a path that is not there is named by its reader
    if Path(text).is_absolute() or text.startswith(".") or Path(text).suffix or not text:
        return Path(text), repair
    return resolve_dataset(text), repair or is_published(text)
