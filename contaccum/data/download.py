"""BEIR's data sets and DPR's files by name: found in the cache, or fetched from their servers, checked where there is a checksum,
unpacked safely and kept."""

import gzip
import hashlib
import os
import stat
import zipfile
import zlib
from functools import partial
from pathlib import Path, PurePosixPath

from contaccum.data.transfer import CHUNK, alone, transfer
from contaccum.errors import InputError
from contaccum.files import cache_folder, sweep, whole_folder

BASE_URL = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"

MD5 = {  # of the archives, as BEIR publishes them beside its table of data sets
    "msmarco": "444067daf65d982533ea17ebd59501e4",
    "trec-covid": "ce62140cb23feb9becf6270d0d1fe6d1",
    "nfcorpus": "a89dba18a62ef92f7d323ec890a0d38d",
    "nq": "d4d3d2e48787a744b6f6e691ff534307",
    "hotpotqa": "f412724f78b0d91183a0e86805e16114",
    "fiqa": "17918ed23cd04fb15047f73e6c3bd9d9",
    "arguana": "8ad3e3c2a5867cdced806d6503f29b99",
    "webis-touche2020": "46f650ba5a527fc69e0a6521c5a23563",
    "cqadupstack": "4e41456d7df8ee7760a7f866133bda78",
    "quora": "18fb154900ba42a600f84b839c173167",
    "dbpedia-entity": "c2a39eb420a3164af735795df012ac2c",
    "scidocs": "38121350fc3a4d2f48850f6aff52e4a9",
    "fever": "5a818580227bfb4b35bb6fa46d9b6c03",
    "climate-fever": "8b66f0a9126c521bae2bde127b4dc99d",
    "scifact": "5f7d1de60b170fc8027bb7898e2efca1",
    "germanquad": "95a581c3162d10915a418609bcce851b",
}
UNCHECKED = ("nq-train",)  # on the same server, without a published checksum
LICENSED = ("bioasq", "signal1m", "trec-news", "robust04")  # BEIR may not pass these on
FORUMS = (
    *("android", "english", "gaming", "gis", "mathematica", "physics"),
    *("programmers", "stats", "tex", "unix", "webmasters", "wordpress"),
)

DPR_URL = "https://dl.fbaipublicfiles.com/dpr"
DPR = {
    "psgs_w100": "wikipedia_split/psgs_w100.tsv.gz",
    "nq-train": "data/retriever/biencoder-nq-train.json.gz",
    "nq-dev": "data/retriever/biencoder-nq-dev.json.gz",
    "nq-adv-hn-train": "data/retriever/biencoder-nq-adv-hn-train.json.gz",
    "trivia-train": "data/retriever/biencoder-trivia-train.json.gz",
    "trivia-dev": "data/retriever/biencoder-trivia-dev.json.gz",
    "webq-train": "data/retriever/biencoder-webquestions-train.json.gz",
    "webq-dev": "data/retriever/biencoder-webquestions-dev.json.gz",
    "curatedtrec-train": "data/retriever/biencoder-curatedtrec-train.json.gz",
    "curatedtrec-dev": "data/retriever/biencoder-curatedtrec-dev.json.gz",
    "squad1-train": "data/retriever/biencoder-squad1-train.json.gz",
    "squad1-dev": "data/retriever/biencoder-squad1-dev.json.gz",
    "nq-train-questions": "data/retriever/nq-train.qa.csv",
    "nq-dev-questions": "data/retriever/nq-dev.qa.csv",
    "nq-test-questions": "data/retriever/nq-test.qa.csv",
    "trivia-train-questions": "data/retriever/trivia-train.qa.csv.gz",
    "trivia-dev-questions": "data/retriever/trivia-dev.qa.csv.gz",
    "trivia-test-questions": "data/retriever/trivia-test.qa.csv.gz",
    "webq-test-questions": "data/retriever/webquestions-test.qa.csv",
    "curatedtrec-test-questions": "data/retriever/curatedtrec-test.qa.csv",
    "squad1-test-questions": "data/retriever/squad1-test.qa.csv",
}
"""DPR's files: training data, questions with answers, and the Wikipedia passages. No checksum of them is published; a gzipped one
is tried by its own."""

GIB = 1 << 30
MAX_DOWNLOAD = 16 * GIB  # the largest archive, cqadupstack's, has 5 GiB
MAX_UNPACKED = 64 * GIB
_MAX_ENTRIES = 1000
_MAX_RATIO = 100  # of unpacked to packed bytes; text has 3 to 10, zeros have 1000


def is_published(name_or_folder: str | Path) -> bool:
    """Whether ``resolve_dataset`` would take it for the name of a public data set, and not for a path."""
    name = str(name_or_folder).partition("/")[0]
    return (name in MD5 or name in UNCHECKED) and not os.path.exists(name_or_folder)


def resolve_dataset(
    name_or_folder: str | Path,
    cache: str | Path | None = None,
    *,
    base_url: str = BASE_URL,
    md5: str | None = None,
    max_download: int = MAX_DOWNLOAD,
    max_unpacked: int = MAX_UNPACKED,
) -> Path:
    """A path as it is, or the folder of the BEIR data set of that name, downloaded into ``cache`` if need be.

    ``cqadupstack`` is twelve sets, named ``cqadupstack/android`` and so on. ``md5`` stands in for the published
    checksum of a copy served elsewhere. Raises InputError when the name is not known, the archive cannot be had, is
    larger than the limits (bytes), differs from its checksum or is unsafe to unpack; then nothing is left behind, but
    what came before a connection broke, which the next call continues where there is a checksum to try the whole by.
    """
    if os.path.exists(name_or_folder):  # unlike Path.exists, takes a name too long for a path
        return Path(name_or_folder)
    name, _, forum = str(name_or_folder).partition("/")
    folder = Path(cache or cache_folder() / "beir") / _checked_name(name, forum)
    if not folder.is_dir():
        with alone(folder.parent, "beir"):
            if not folder.is_dir():  # another process may have fetched it while this one waited
                _provide(folder, f"{base_url}/{name}.zip", md5 or MD5.get(name), max_download, max_unpacked)
    return folder / forum


def _provide(folder: Path, url: str, md5: str | None, max_download: int, max_unpacked: int) -> None:
    """Download and unpack a data set, in a cache that is this process's alone meanwhile."""
    archive = folder.with_name(f"{folder.name}.zip")
    if folder.parent.is_dir():
        sweep(folder.parent)
    try:
        transfer(url, archive, partial(_refuse_other, md5) if md5 else None, max_download, folder)
        unpack(archive, folder.name, folder, max_unpacked)
    finally:
        archive.unlink(missing_ok=True)


def dpr_file(name: str, cache: str | Path | None = None, *, base_url: str = DPR_URL) -> Path:
    """The file of DPR's of that name, downloaded into ``cache`` if need be and kept as it came; readers take it gzipped.

    What a broken connection brought is continued by the next call. Raises InputError for a name that is not known, a file that
    cannot be had, and a gzipped one that its own checksum does not fit.
    """
    if name not in DPR:
        raise InputError(f"dpr/{name}: no file of DPR's has that name, expected dpr/ and one of {', '.join(DPR)}")
    file = Path(cache or cache_folder() / "dpr") / Path(DPR[name]).name
    with alone(file.parent, "dpr"):
        if not file.is_file():
            test = _refuse_broken_gzip if file.suffix == ".gz" else None
            transfer(f"{base_url}/{DPR[name]}", file, test, MAX_DOWNLOAD, file)
    return file


def _refuse_broken_gzip(url: str, part: Path) -> None:
    try:
        with gzip.open(part) as file:
            while file.read(CHUNK):
                pass
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{url}: the gzip stream is damaged or cut short ({error})") from error


def _refuse_other(md5: str, url: str, part: Path) -> None:
    if (found := _md5_of(part)) != md5:
        raise InputError(f"{url}: the archive's MD5 is {found}, expected {md5}")


def _checked_name(name: str, forum: str) -> str:
    """The name, if it can be fetched, or InputError saying what to name or do instead."""
    if name in LICENSED:
        raise InputError(
            f"{name}: BEIR's licence keeps it from download; build it as BEIR explains and give its folder"
        )
    if name not in MD5 and name not in UNCHECKED:
        names = ", ".join(sorted([*MD5, *UNCHECKED]))
        raise InputError(
            f"{name}: no such folder, and no data set of that name, expected a path, one of {names}, or a name that begins "
            "with nanobeir/, mteb/, miracl/, dpr/ or hub: (contaccum data fetch --help)"
        )
    if (forum not in FORUMS) if name == "cqadupstack" else forum:
        expected = f"cqadupstack/FORUM, FORUM one of {', '.join(FORUMS)}" if name == "cqadupstack" else repr(name)
        raise InputError(f"{name}{'/' + forum if forum else ''}: not one data set, expected {expected}")
    return name


def _md5_of(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)  # the only checksum that BEIR publishes
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def unpack(archive: Path, name: str, target: Path, limit: int = MAX_UNPACKED) -> None:
    """Unpack the folder ``name`` of a zip archive as ``target``, which appears whole or not at all.

    Refused with InputError: entries that climb (``..``), absolute paths, links, more than ``limit`` bytes or a hundred
    times the archive's own once unpacked (counted, not believed; a first MiB is free), encrypted or damaged entries, and
    an archive without that folder.
    """
    limit = min(limit, _MAX_RATIO * archive.stat().st_size + (1 << 20))
    try:
        with zipfile.ZipFile(archive) as bundle, whole_folder(target) as part:
            entries = [(_safe_path(entry, archive), entry) for entry in _entries(bundle, archive)]
            own = [(path, entry) for path, entry in entries if path.parts[:1] == (name,) and not entry.is_dir()]
            if not own:
                raise InputError(f"{archive}: holds no folder {name!r}, expected BEIR's layout")
            for path, entry in own:
                limit -= _extract(bundle, entry, part.joinpath(*path.parts[1:]), limit, archive)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{archive}: not a zip archive that can be read ({error})") from error


def _entries(bundle: zipfile.ZipFile, archive: Path) -> list[zipfile.ZipInfo]:
    entries = bundle.infolist()
    if len(entries) > _MAX_ENTRIES:
        raise InputError(f"{archive}: has {len(entries)} entries, expected at most {_MAX_ENTRIES}")
    return entries


def _safe_path(entry: zipfile.ZipInfo, archive: Path) -> PurePosixPath:
    """The entry's relative path; anything that could land outside the target, or is no plain file, is refused."""
    path = PurePosixPath(entry.filename)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or ":" in entry.filename:
        raise InputError(
            f"{archive}: its entry {entry.filename!r} would land outside the folder, expected relative paths"
        )
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise InputError(f"{archive}: its entry {entry.filename!r} is a link or device, expected files and folders")
    if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(
            f"{archive}: its entry {entry.filename!r} is encrypted or of a rare compression, expected neither"
        )
    return path


def _extract(bundle: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, limit: int, archive: Path) -> int:
    """Write one entry and return its bytes, which are counted while they come: a header can lie about its size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with bundle.open(entry) as source, open(path, "wb") as file:
        while chunk := source.read(CHUNK):
            if file.tell() + len(chunk) > limit:
                raise InputError(
                    f"{archive}: unpacks to more than the limit on its bytes, expected a data set, not a bomb"
                )
            file.write(chunk)
        return file.tell()
