"""The command ``data demo``: a data set of API documentation, made from installed packages.

A docstring's summary is the query, and the rest of the docstring is the only relevant passage.
Modules with the same name, such as scipy.linalg.blas and scipy.sparse.linalg.blas, are in the same
split, because they often have similar docstrings. The source files are parsed, not imported, so
that the pairs depend only on the versions of the packages: not on the device, the platform or the
version of Python.

The texts belong to the authors of numpy, scipy and torch (BSD licences).
"""

import ast
import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from contaccum.errors import InputError
from contaccum.runtime.files import whole_folder

PACKAGES = ("numpy", "scipy", "torch")
SKIPPED_FOLDERS = {"tests", "test", "testing", "distutils"}
"""Folders with test code. numpy.distutils is installed only for some versions of Python."""
PUBLIC_FOLDERS = {"_core"}
"""Folders with functions for users, although their names start with an underscore."""
DOCSTRING_FUNCTIONS = {"add_newdoc", "add_docstr", "_add_docstr", "add_docstr_all"}
"""Functions that set the docstring of an object that is written in C."""
DEV_PERCENT, TEST_PERCENT = 8, 12
MIN_QUERY_WORDS, MAX_QUERY_WORDS, MIN_PASSAGE_WORDS = 4, 40, 20

SIGNATURE = re.compile(r"^[\w.]+\s*\(.*\)\s*(->.*|--)?$", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[^.\s]{3}\.)\s")
FORMAT_FIELD = re.compile(r"(?<!\{)\{\w+\}(?!\})")
PERCENT_FIELD = re.compile(r"%\(\w+\)s")
"""Fields of templates, which the packages fill at import."""
MARKUP = re.compile(r":\w+:`~?([^`]*)`|`+([^`]*)`+")
"""Names and code in reStructuredText, such as :func:`~torch.abs` and ``x``."""


def source_files(package: str) -> Iterator[tuple[str, Path]]:
    """Yield (name of the module, path) for the Python files of a package, sorted by name."""
    spec = find_spec(package)
    assert spec is not None, package  # contaccum depends on all PACKAGES
    assert spec.origin is not None, package
    root = Path(spec.origin).parent
    modules = []
    for path in root.rglob("*.py"):
        module = path.relative_to(root.parent).with_suffix("")
        folders = module.parts[:-1]
        private = any(name.startswith("_") and name not in PUBLIC_FOLDERS for name in folders)
        if not private and not SKIPPED_FOLDERS.intersection(folders):
            modules.append((".".join(module.parts).removesuffix(".__init__"), path))
    yield from sorted(modules)


def literal(node: ast.expr) -> str | None:
    """Return the text of an expression of string literals, or None for another expression.

    Calls of str.format only lose the fields, because their values need an import of the package.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = literal(node.left), literal(node.right)
        return None if left is None or right is None else left + right
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "format"
    ):
        template = literal(node.func.value)
        return template and FORMAT_FIELD.sub("", template).replace("{{", "{").replace("}}", "}")
    return None


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of public functions, classes and methods, in the order of the source."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith("_"):
                continue
            found = ast.get_docstring(node)
            if found is not None:
                yield found
            if isinstance(node, ast.ClassDef):
                yield from docstrings(node)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in DOCSTRING_FUNCTIONS:
                for argument in node.args:
                    # ("method", "docstring") for a method of a class
                    last = (
                        argument.elts[-1]
                        if isinstance(argument, ast.Tuple) and argument.elts
                        else argument
                    )
                    text = literal(last)
                    if text is not None and "\n" in text:
                        yield inspect.cleandoc(text)
        else:
            yield from docstrings(node)


def pair(docstring: str) -> tuple[str, str] | None:
    """Divide a docstring into query and passage.

    Return None if one of them is too short or too long.
    """
    text = MARKUP.sub(r"\1\2", PERCENT_FIELD.sub("", docstring))
    paragraphs = re.split(r"\n\s*\n", text.strip())
    if SIGNATURE.match(paragraphs[0]):
        del paragraphs[0]
    if not paragraphs:
        return None
    first, *others = SENTENCE_END.split(" ".join(paragraphs[0].split()), maxsplit=1)
    query = first.strip()
    passage = " ".join(" ".join([*others, *paragraphs[1:]]).split())
    if (
        not MIN_QUERY_WORDS <= len(query.split()) <= MAX_QUERY_WORDS
        or len(passage.split()) < MIN_PASSAGE_WORDS
    ):
        return None
    if normalised(query) in normalised(passage):
        return None
    return query, passage


def normalised(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def split_of(module: str) -> str:
    """Return the split of a module. It depends only on the last part of the module's name."""
    name = module.rpartition(".")[2].strip("_")
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    if number < TEST_PERCENT:
        return "test"
    return "dev" if number < TEST_PERCENT + DEV_PERCENT else "train"


def make_pairs() -> list[tuple[str, str, str]]:
    """Return (module, query, passage) for every docstring.

    Of equal queries or passages, keep the first.
    """
    pairs: list[tuple[str, str, str]] = []
    seen: set[str] = set()
    for package in PACKAGES:
        for module, path in source_files(package):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escape sequences
                tree = ast.parse(path.read_bytes())
            for docstring in docstrings(tree):
                found = pair(docstring)
                if found is None:
                    continue
                keys = {f"query {normalised(found[0])}", f"passage {normalised(found[1])}"}
                if not keys & seen:
                    seen |= keys
                    pairs.append((module, *found))
    return pairs


def write_demo(folder: str | Path) -> str:
    """Write the demo data set: a BEIR folder with the splits train, dev and test.

    Return the sizes of the data set, the versions that it was made from, and the SHA-256 of its
    files. Equal versions give equal files. Raise InputError if ``folder`` exists.
    """
    if Path(folder).exists():
        raise InputError(f"{folder}: already exists; choose a new folder")
    pairs = make_pairs()
    files = {"corpus.jsonl": "", "queries.jsonl": ""}
    files |= {
        f"qrels/{split}.tsv": "query-id\tcorpus-id\tscore\n" for split in ("train", "dev", "test")
    }
    for number, (module, query, passage) in enumerate(pairs):
        files["corpus.jsonl"] += (
            json.dumps({"_id": f"p{number}", "title": "", "text": passage}) + "\n"
        )
        record = {"_id": f"q{number}", "text": query, "metadata": {"module": module}}
        files["queries.jsonl"] += json.dumps(record) + "\n"
        files[f"qrels/{split_of(module)}.tsv"] += f"q{number}\tp{number}\t1\n"
    checksum = hashlib.sha256()
    with whole_folder(folder) as unfinished:
        (unfinished / "qrels").mkdir()
        for name, text in files.items():
            (unfinished / name).write_bytes(text.encode())
            checksum.update(text.encode())
    # the part after + is the build, such as cpu
    versions = [f"{package} {version(package).partition('+')[0]}" for package in PACKAGES]
    splits = [split_of(module) for module, _, _ in pairs]
    counts = [f"{splits.count(split)} {split}" for split in ("train", "dev", "test")]
    return (
        f"{folder}: {len(pairs)} passages and queries ({', '.join(counts)}) from the API "
        f"documentation of {', '.join(versions)}\nsha256 {checksum.hexdigest()}"
    )
