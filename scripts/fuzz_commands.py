"""Damage files of every kind that the commands read, run a command on each, and look for anything but an answer or a refusal.

    python scripts/fuzz_commands.py --count 2000 --seed 0 --report cases.jsonl [--kinds weights,corpus]

A case copies a small finished project, damages one of its files (bit flips, truncation, a deleted or repeated part; in JSON and
YAML also deleted keys, other types and extreme numbers) and runs a command that reads the file, in a forked process. Outcomes:

    ok           exit code 0
    refused      exit code 2 and a sentence that says why
    silent       exit code 0, although no message names the damaged file, for a file that has a hash: weights, vectors and
                 indexes in any case, manifests if the result differs
    traceback    any other exit code, or a traceback
    unexplained  exit code 2 without a sentence
    leftover     a temporary file is left
    hang, crash  more than --seconds; ended by a signal

The report has one line for each case. A second call with the same report takes the missing cases, and again those that failed.
Exit code 1 if a case failed.
"""

import argparse
import contextlib
import copy
import hashlib
import importlib
import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

PASSED = ("ok", "refused")
STRICT = (".safetensors", ".npy", ".faiss")  # every change must be noticed
RESULTS = ("out.json", "out.trec", "mined.jsonl", "merged", "run/model", "shards", "rounds/round-1/model")
NOTICED = re.compile(r"damaged|changed|skip|invalid|cannot|missing|differ|instead of|again")
TINY = (
    "--model.name tiny --model.tiny_width 32 --model.tiny_layers 1 --model.tiny_vocabulary 300 --model.max_query_length 16 "
    "--model.max_passage_length 16 --batch.global_batch_size 8 --batch.micro_batch_size 4 --run.device cpu"
)
WORDS = ("red", "blue", "fox", "owl", "lives", "in", "the", "valley", "of", "bears", "near", "a", "river")


@dataclass(frozen=True)
class Kind:
    """Files of one kind, the commands that read them, and whether a hash must notice every change."""

    files: tuple[str, ...]  # glob patterns in the project
    commands: tuple[str, ...]
    hashed: bool = False


ST = "evaluate --model st --data data --output out.json"
LORA = "evaluate --model lora/model --data data --output out.json"
MERGE = "merge lora/model merged"
ENCODE = "encode --model run/model --input data --output"
SHARDS = f"{ENCODE} shards --shard_size 20"
INDEX = "--factory IVF4,Flat --index_dir index"
MINE = "mine --model run/model --data data --output mined.jsonl --block_size 1 --range_max 20"
QUESTIONS = "evaluate --model run/model --questions questions.csv --passages passages.tsv"
PUSH = "push run owner/name --dry_run"
TRAIN = f"train --data.train data --method cont_accum --bank.size 16 {TINY} --run.save_steps 2 --optim.max_steps"
TRAIN_NEW = f"{TRAIN} 1 --output_dir new"
CONVERT = "data convert {file} new.jsonl --to jsonl"
EVALUATE = "evaluate --model run/model --data data --output out.json"
RESUME = f"{TRAIN} 6 --output_dir run --resume --allow_changes true"  # more steps than the finished run
SEARCH = "search --model run/model --data data --embeddings shards --output out.trec"
CONFIG = "--config config.yaml --output_dir"
ROUNDS = f"rounds --data.hard_negatives 1 --rounds.count 1 --mine.num_negatives 2 --mine.range_max 20 {CONFIG} rounds"
STUDY = f"compare --methods grad_accum --baselines bm25 --seeds 1 {CONFIG} study"
KINDS = {
    "config": Kind(("config.yaml",), (f"train {CONFIG} new", f"{ROUNDS}-new")),
    "run config": Kind(("run/config.yaml",), (RESUME, "report run")),
    "state.json": Kind(("run/checkpoints/step-00000004/state.json",), (RESUME,), True),
    "checkpoint manifest": Kind(("run/checkpoints/step-00000004/manifest.json",), (RESUME,)),
    "checkpoint tensors": Kind(("run/checkpoints/step-00000004/*.safetensors",), (RESUME,), True),
    "checkpoint model": Kind(("run/checkpoints/step-00000004/model/**/*.safetensors",), (RESUME,), True),
    "log.jsonl": Kind(("run/log.jsonl",), (RESUME, "report run")),
    "metrics.json": Kind(("run/metrics.json",), ("report run", PUSH)),
    "environment.json": Kind(("run/environment.json",), ("report run", PUSH)),
    "lock": Kind(("locked/contaccum.lock",), (f"{TRAIN} 1 --output_dir locked",)),
    "contaccum.json": Kind(("run/model/contaccum.json",), (EVALUATE, PUSH)),
    "model card": Kind(("run/model/README.md",), (PUSH,)),
    "config.json": Kind(("run/model/*/config.json", "st/config.json"), (EVALUATE, ST)),
    "modules.json": Kind(("st/modules.json", "st/*/config.json", "run/model/modules.json"), (ST, EVALUATE)),
    "sentence_bert_config.json": Kind(("st/sentence_bert_config.json", "st/config_sentence_transformers.json"), (ST,)),
    "tokenizer": Kind(("run/model/*/tokenizer_config.json", "run/model/*/tokenizer.json"), (EVALUATE,)),
    "adapter_config.json": Kind(("lora/model/**/adapter_config.json", "lora/model/**/base.json"), (LORA, MERGE)),
    "adapter weights": Kind(("lora/model/**/adapter_model.safetensors",), (LORA, MERGE), True),
    "weights": Kind(("run/model/*/model.safetensors",), (EVALUATE, f"{ENCODE} new"), True),
    "shard manifest": Kind(("shards/*.json",), (SEARCH, SHARDS), True),
    "npy shard": Kind(("shards/*.npy",), (SEARCH, SHARDS), True),
    "faiss index": Kind(("index/*",), (f"{SEARCH} {INDEX}",), True),
    "mine blocks": Kind(("mined.jsonl.mining/*",), (MINE,), True),
    "about.json": Kind(("cache/**/about.json",), (TRAIN_NEW,)),
    "cached tables": Kind(("cache/**/*.npy", "cache/**/*.arrow"), (TRAIN_NEW,)),
    "corpus": Kind(("data/corpus.jsonl",), (EVALUATE, "data check data", SEARCH)),
    "queries": Kind(("data/queries.jsonl",), (EVALUATE, "data check data")),
    "qrels": Kind(("data/qrels/*.tsv",), (EVALUATE, "data check data")),
    "examples": Kind(("examples.jsonl", "dpr.json", "tevatron.jsonl"), ("data check {file}", CONVERT)),
    "questions": Kind(("questions.csv",), (QUESTIONS,)),
    "passages": Kind(("passages.tsv",), (QUESTIONS,)),
    "run file": Kind(("found.trec",), ("evaluate --run found.trec --qrels data/qrels/test.tsv --output out.json",)),
    "rounds": Kind(("rounds/rounds.yaml", "rounds/mined-1.jsonl", "rounds/*.finished"), (ROUNDS,)),
    "study": Kind(("study/runs/*/*.json", "study/runs/*/*.yaml", "study/*.json"), (STUDY,)),
}


def run_command(call: str, output: Path, seconds: float = 600, enough: Callable[[], bool] = lambda: False) -> int:
    """Run the command line in a forked process, with stdout and stderr in ``output``.

    Return the exit status, or 124 for a process that was killed, after ``seconds`` or when ``enough`` returned True.
    """
    child = os.fork()
    if child == 0:
        with open(output, "wb", buffering=0) as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = 70
        try:
            from contaccum.cli import main

            code = main(call.split())
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            output.with_name("imported").write_text("\n".join(sys.modules))
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not enough():
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def write_inputs(folder: Path) -> None:
    """Write a data set in every format, and a config."""
    chosen = random.Random(0)
    text = [" ".join(chosen.choices(WORDS, k=8)) for _ in range(60)]
    (folder / "data" / "qrels").mkdir(parents=True)

    def lines(name: str, records: list[dict]) -> None:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    lines("data/corpus.jsonl", [{"_id": f"p{n}", "title": f"T{n}", "text": text[n]} for n in range(60)])
    lines("data/queries.jsonl", [{"_id": f"q{n}", "text": text[n][:20]} for n in range(30)])
    for split, numbers in (("train", range(20)), ("test", range(20, 30))):
        rows = "".join(f"q{n}\tp{n}\t1\n" for n in numbers)
        (folder / "data" / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)
    lines("examples.jsonl", [{"query": text[n], "pos": [text[n]], "neg": [text[n + 1]]} for n in range(20)])
    contexts = [{"title": "T", "text": text[n], "passage_id": str(n)} for n in range(21)]
    dpr = [{"question": text[n], "answers": ["fox"], "positive_ctxs": [contexts[n]], "hard_negative_ctxs": [contexts[n + 1]]}
           for n in range(20)]  # fmt: skip
    (folder / "dpr.json").write_text(json.dumps(dpr, indent=1))
    lines("tevatron.jsonl", [{"query_id": str(n), "query": text[n], "positive_passages": [{"docid": f"p{n}", "title": "T",
          "text": text[n]}], "negative_passages": []} for n in range(20)])  # fmt: skip
    (folder / "questions.csv").write_text("".join(f"where is {n}?\t['fox', 'owl']\n" for n in range(5)))
    rows = "".join(f"{n}\t{text[n]}\tT{n}\n" for n in range(30))
    (folder / "passages.tsv").write_text("id\ttext\ttitle\n" + rows)
    (folder / "config.yaml").write_text(
        "method: cont_accum\nseed: 1\nmodel: {name: tiny, tiny_width: 32, tiny_layers: 1, tiny_vocabulary: 300}\n"
        "data:\n  train: data\nbatch: {global_batch_size: 8, micro_batch_size: 4}\nbank:\n  size: 16\n"
        "optim: {max_steps: 1, learning_rate: 1.0e-3}\nrun: {device: cpu}\n"
    )


def make_project(folder: Path, kinds: list[str]) -> None:
    """Create the project: data in every format, a run with checkpoints, models, embeddings, an index and unfinished mining."""
    write_inputs(folder)
    for call in (
        f"{TRAIN} 4 --output_dir run",
        f"{TRAIN} 2 --output_dir lora --lora.rank 2 --model.name run/model/query_encoder",
        EVALUATE.replace("out.json", "run/metrics.json"),
        SHARDS,
        SEARCH.replace("out.trec", "found.trec"),
        SEARCH.replace("out.trec", "other.trec") + f" {INDEX}",
        PUSH,
        *([ROUNDS] if "rounds" in kinds else []),
        *([STUDY] if "study" in kinds else []),
    ):
        if run_command(call, folder / "output"):
            raise SystemExit(f"set-up: {call}\n{(folder / 'output').read_text()[-1500:]}")
        preload(folder / "imported")
    shutil.copytree(folder / "run" / "model" / "query_encoder", folder / "st")
    (folder / "locked").mkdir()
    (folder / "locked" / "contaccum.lock").write_text(f"99999999\n{platform.node()}\n")
    stopped = run_command(
        MINE, folder / "output", enough=lambda: len(list(folder.glob("mined.jsonl.mining/[0-9]*.json"))) > 3
    )
    if stopped != 124:
        raise SystemExit("set-up: the mining ended before it could be killed")


def preload(names: Path) -> None:
    """Import the modules that a command imported, so that later forks have them."""
    for name in names.read_text().splitlines():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


# damage


def damage(content: bytes, name: str, chance: random.Random) -> tuple[bytes, str]:
    """Return a damaged copy of a file and what was done to it."""
    structured = name.endswith((".json", ".yaml", ".jsonl", ".md", "manifest.json"))
    if structured and chance.random() < 0.6:
        with contextlib.suppress(ValueError, RecursionError):
            return damage_values(content, name, chance)
    kind = chance.choice(("flip", "flip", "cut", "delete", "repeat", "insert", "empty"))
    at = chance.randrange(max(1, len(content)))
    length = chance.choice((1, 7, 100))
    if kind == "flip":
        changed = bytearray(content or b"\0")
        changed[at % len(changed)] ^= 1 << chance.randrange(8)
        return bytes(changed), f"flip a bit of byte {at}"
    if kind == "cut":
        return content[:at], f"cut at byte {at}"
    if kind == "delete":
        return content[:at] + content[at + length :], f"delete {length} bytes at {at}"
    if kind == "repeat":
        return content[: at + length] + content[at:], f"repeat {length} bytes at {at}"
    piece = chance.choice((b"\0", b"\xff", b"[" * 5000, b"9" * 5000, b'"', b"\n", b"\xed\xa0\x80", b"{}", b"\t"))
    return (b"", "empty") if kind == "empty" else (content[:at] + piece + content[at:], f"insert {piece[:4]!r} at {at}")


VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    10**30,
    2**63,
    "",
    "x",
    "../x",
    "\0",
    [],
    {},
    [[]],
    {"a": None},
    "é" * 300,
    0.5,
)


def damage_values(content: bytes, name: str, chance: random.Random) -> tuple[bytes, str]:
    """Delete a key of a JSON or YAML value or replace a value."""
    import yaml

    text = content.decode()
    front = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL) if name.endswith(".md") else None
    lines = text.splitlines(keepends=True)
    row = chance.randrange(len(lines)) if name.endswith(".jsonl") else None
    source = front[1] if front else text if row is None else lines[row]
    is_yaml = name.endswith((".yaml", ".md"))
    value = yaml.safe_load(source) if is_yaml else json.loads(source)
    places = list(paths(value))
    if not places:
        raise ValueError
    path = chance.choice(places)
    changed = copy.deepcopy(value)
    owner = changed
    for step in path[:-1]:
        owner = owner[step]
    if chance.random() < 0.4:
        del owner[path[-1]]
        done = f"delete {'.'.join(map(str, path))}"
    else:
        owner[path[-1]] = new = chance.choice(VALUES)
        done = f"set {'.'.join(map(str, path))} to {str(new)[:20]!r} ({type(new).__name__})"
    new_text = yaml.safe_dump(changed) if is_yaml else json.dumps(changed)
    if front:
        new_text = f"---\n{new_text}---\n{text[front.end() :]}"
    elif row is not None:
        lines[row] = new_text + "\n"
        new_text = "".join(lines)
    return new_text.encode("utf-8", "surrogatepass"), done


def paths(value: Any, before: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every key and item; at most a few per list."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*before, key)
        yield from paths(item, (*before, key))


# cases


@dataclass(frozen=True)
class Case:
    """One damaged file and the outcome of its command."""

    number: int
    kind: str
    file: str
    done: str
    command: str
    outcome: str
    words: str  # end of the output


class Campaign:
    """Cases on copies of one project. ``pristine`` is the project, ``work`` the copy that the commands see."""

    def __init__(self, scratch: Path, kinds: list[str], seconds: float) -> None:
        self.pristine, self.work, self.seconds = scratch / "pristine", scratch / "work", seconds
        os.environ |= {"CONTACCUM_CACHE": str(self.work / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
        self.work.mkdir()
        os.chdir(self.work)
        make_project(self.work, kinds)
        shutil.copytree(self.work, self.pristine, symlinks=True)
        self.temporary = set(temporary_files(self.work))
        self.expected: dict[str, dict[str, str]] = {}

    def run(self, call: str, file: str = "", content: bytes = b"") -> tuple[int, str]:
        """Run a command in a fresh copy, where ``file`` has another content; return the exit status and the output."""
        os.chdir("/")
        shutil.rmtree(self.work)
        shutil.copytree(self.pristine, self.work, symlinks=True)
        os.chdir(self.work)
        if file:
            (self.work / file).write_bytes(content)
        code = run_command(call, self.work / "output", self.seconds)
        return code, (self.work / "output").read_text(errors="replace")

    def case(self, number: int, kind: str, chance: random.Random) -> Case:
        spec = KINDS[kind]
        files = sorted({path for pattern in spec.files for path in self.pristine.glob(pattern) if path.is_file()})
        file = chance.choice(files)
        name, content = str(file.relative_to(self.pristine)), file.read_bytes()
        changed, done = damage(content, name, chance)
        command = chance.choice(spec.commands).format(file=name)
        if command not in self.expected:  # control: the command works without damage
            code, words = self.run(command)
            if code:
                raise SystemExit(f"{command}: exit code {code} without damage\n{words[-1500:]}")
            self.expected[command] = results(self.work)
        code, words = self.run(command, name, changed)
        found = outcome(code, words)
        if found == "ok" and spec.hashed and changed != content and not noticed(name, words):
            same = {**self.expected[command], name: ""} == {**results(self.work), name: ""}
            found = "silent" if name.endswith(STRICT) or not same else found
        if found in PASSED and set(temporary_files(self.work)) - self.temporary:
            found = "leftover"
        return Case(number, kind, name, done, command, found, words[-1200:])


def temporary_files(folder: Path) -> Iterator[str]:
    from contaccum.runtime.files import is_leftover

    return (str(path.relative_to(folder)) for path in folder.rglob(".*") if is_leftover(path.name))


def results(work: Path) -> dict[str, str]:
    """Return the hashes of the files that the commands write."""
    files = [path for name in RESULTS for path in (work / name, *(work / name).rglob("*")) if path.is_file()]
    return {str(path.relative_to(work)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def noticed(name: str, words: str) -> bool:
    """Return whether a line of the output says that the file, or the checkpoint that it belongs to, is damaged."""
    path = Path(name)
    names = [path.name, *(part for part in path.parts if part.startswith("step-"))]
    return any(NOTICED.search(line) and any(each in line for each in names) for line in words.splitlines())


def outcome(code: int, words: str) -> str:
    if code == 124:
        return "hang"
    if code < 0:
        return "crash"
    if "Traceback (most recent call last)" in words or code not in (0, 2):
        return "traceback"
    if code == 2 and not re.search(r"^contaccum: (?!warning)", words, re.MULTILINE):
        return "unexplained"
    return "refused" if code else "ok"


def read_report(path: Path | None) -> dict[int, Case]:
    """Return the cases of an earlier call, by number."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {case.number: case for case in (Case(**json.loads(line)) for line in lines if line.endswith("}"))}


def run_cases(count: int, seed: int, kinds: list[str], seconds: float, report: Path | None = None) -> list[Case]:
    """Run ``count`` cases over all kinds in turn, without those that passed before, and return all of them."""
    cases = read_report(report)
    missing = [number for number in range(count) if number not in cases or cases[number].outcome not in PASSED]
    if not missing:
        return [cases[number] for number in range(count)]
    with tempfile.TemporaryDirectory() as scratch:
        campaign = Campaign(Path(scratch), kinds, seconds)
        for number in tqdm(missing, unit="case", mininterval=5):
            case = cases[number] = campaign.case(number, kinds[number % len(kinds)], random.Random(f"{seed} {number}"))
            if case.outcome not in PASSED:
                tqdm.write(f"#{number} {case.outcome}: {case.kind}: {case.done} in {case.file}; {case.command}")
                tqdm.write("".join(f"      {line}\n" for line in case.words.strip().splitlines()[-4:]))
            if report:
                with report.open("a") as file:
                    file.write(json.dumps(asdict(case)) + "\n")
        os.chdir("/")
    return [cases[number] for number in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="cases to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of files, separated by commas")
    parser.add_argument(
        "--seconds", type=float, default=60, help="time after which a command hangs; more on a busy machine"
    )
    parser.add_argument("--report", type=Path, help="file to which each case is appended as JSON")
    args = parser.parse_args()
    report = args.report and args.report.absolute()
    cases = run_cases(args.count, args.seed, args.kinds.split(","), args.seconds, report)
    print(json.dumps(Counter(case.outcome for case in cases)))
    return int(any(case.outcome not in PASSED for case in cases))


if __name__ == "__main__":
    sys.exit(main())
