"""Options of the commands for search, evaluation, mining, models and data."""

import os
from dataclasses import dataclass
from typing import Literal

from contaccum.config.declare import NonNegativeInt, PositiveInt, Share, setting
from contaccum.config.encoder import EncoderConfig
from contaccum.config.groups import DataPolicy
from contaccum.config.load import check_values
from contaccum.config.run import CUTOFFS, check_metric
from contaccum.errors import InputError

__all__ = ["DataPolicy", "EncoderConfig"]

PAIRS_OF_A_PASS = 32  # of a cross-encoder

TextKind = Literal["passage", "query"]
TrainingKind = Literal["jsonl", "dpr", "tevatron"]
Form = Literal["beir", TrainingKind]
VectorType = Literal["float16", "float32"]
ShardFormat = Literal["npy", "parquet"]
Evaluator = Literal["contaccum", "beir"]
Match = Literal["string", "regex"]


@dataclass(frozen=True)
class SearchConfig:
    """Settings for encoding and searching a corpus."""

    embeddings: str | None = setting(None, metavar="DIR")
    """Folder of the corpus vectors. Existing shards are read (`contaccum encode` can write them in
    float16), and missing shards are computed and written. Default: the cache."""
    cache: bool = True
    """Keep the vectors of the corpus in the cache, in float32, so that later commands with the same
    model and corpus do not encode it again. Larger vectors than 4 GB are not kept; use
    --embeddings. Several processes do not use the cache."""
    batch_tokens: PositiveInt | None = None
    """Maximum number of tokens in one forward pass, including padding. A longer text is encoded
    alone. Default: 16384, or 1024 per thread on a CPU."""
    factory: str = "Flat"
    """Type of the index. `Flat` is exact. Other index_factory strings of faiss, such as
    IVF1024,Flat or HNSW32, are approximate. LSH is not supported."""
    index_dir: str | None = setting(None, metavar="DIR")
    """Folder of an approximate index. The first search writes the index, and later searches read
    it. Default: build the index for each search."""
    backend: Literal["auto", "faiss", "torch"] = "auto"
    """Library for exact search. `auto` is torch on a GPU. On a CPU, a large search first times
    both libraries on a part of the corpus, and uses the faster one."""
    search_params: str = ""
    """Search parameters of an approximate index, such as nprobe=16 or efSearch=128. These
    parameters trade speed for recall."""

    def check(self, processes: int = 1) -> None:
        """Raise InputError if a setting is not allowed, or contradicts another or the processes."""
        check_values(self)
        if self.embeddings and self.index_dir:
            folders = [os.path.realpath(folder) for folder in (self.embeddings, self.index_dir)]
            if os.path.commonpath(folders) in folders:
                raise InputError(
                    f"embeddings {self.embeddings} and index_dir {self.index_dir}: one folder is "
                    "the other or in it, and writing the index would delete the vectors; choose "
                    "another folder for the index"
                )
        if self.factory == "Flat":
            for name in ("search_params", "index_dir"):
                if value := getattr(self, name):
                    raise InputError(
                        f"{name} {value!r} has no effect on the exact index 'Flat'; choose an "
                        "approximate index with --factory"
                    )
        elif processes > 1 or self.backend == "torch":
            raise InputError(
                f"index {self.factory!r} needs one process and faiss, but {processes} were started "
                f"with the backend {self.backend}. Several processes and the backend torch support "
                "only the exact index 'Flat'."
            )


@dataclass(eq=False, repr=False)
class EncodeConfig:
    """Texts to encode, and shards to write."""

    input: str = setting(metavar="DATA")
    """Texts to encode: BEIR folder, name of a data set, corpus.jsonl file, or TSV file of
    passages."""
    output: str = setting(metavar="PATH")
    """Folder for the shards."""
    kind: TextKind | None = None
    """Kind of the texts to encode. Default: query for a file of queries, such as queries.jsonl,
    else passage."""
    shard_size: PositiveInt | None = None
    """Number of texts in one shard. Default: that of the shards in the folder, else 16384."""
    dtype: VectorType = "float32"
    """Data type of the vectors on disk."""
    format: ShardFormat = "npy"
    """Format of the shards. `npy`: memory-mapped vectors, and a JSON list of ids. `parquet`: one
    file with the columns `id` and `embedding`, which databases and data frame libraries can read.
    contaccum can search both."""
    text: bool = setting(False, flag=True)
    """Also store the encoded texts (title and text), in the column `text`. Only with `--format
    parquet`."""
    batch_tokens: PositiveInt | None = None
    """Maximum number of tokens in one forward pass, including padding. A longer text is encoded
    alone. Default: 16384, or 1024 per thread on a CPU."""


@dataclass(eq=False, repr=False)
class QueryConfig:
    """Queries to run, and form of the results."""

    data: str = setting(metavar="DATA")
    """Data set: BEIR folder, name of a data set, or file of training examples."""
    split: str = "test"
    """Split whose queries are run. With --query, only a data set of the Hub uses it."""
    output: str | None = setting(None, metavar="FILE")
    """TREC run file to write."""
    query: str | None = None
    """Text of a single query. The best passages for this query are printed."""
    k: PositiveInt | None = None
    """Number of passages to find for each query. Default: 100 with --output, else 10."""
    json: bool = setting(False, flag=True)
    """Print the passages of --query for programs: one JSON object a line, with the whole text."""

    def check(self) -> None:
        """Raise InputError unless exactly one of --query and --output is given."""
        if (self.query is None) == (self.output is None):
            found = "none" if self.query is None else "both"
            raise InputError(f"search needs exactly one of --query and --output, but got {found}")
        if self.json and self.query is None:
            raise InputError("--json has no effect on --output; it prints the passages of --query")


@dataclass(eq=False, repr=False)
class EvaluateConfig:
    """What to evaluate: a retriever (on a data set or a question file), or a run file."""

    model: str | None = setting(None, metavar="MODEL")
    """Retriever: the folder of a run, of a trained model or of another encoder; a name on the Hub;
    or `bm25`."""
    data: str | None = setting(None, metavar="DATA")
    """Data to evaluate on: BEIR folder, name of a data set, or file of training examples. You can
    give several data sets, separated by commas. `beir` stands for 15 data sets, `nanobeir` for
    13."""
    split: str = "test"
    """Split whose relevance judgements (qrels) are used. In the beir benchmark, msmarco always uses
    dev, as in the literature."""
    relevance_level: PositiveInt = 1
    """Lowest grade that counts as relevant in map, recall, precision and mrr. Use 2 for TREC Deep
    Learning. ndcg uses all grades."""
    evaluator: Evaluator = "contaccum"
    """Code that evaluates --data. `contaccum` is this package. `beir` is the loader, exact search
    and metrics of the BEIR package. It needs the extra `beir`, a BEIR folder and one process. Of
    the options for search and data, it accepts only --batch_tokens."""
    questions: str | None = setting(None, metavar="FILE")
    """DPR question file. Each line has a question, a tab and a list of answers."""
    passages: str | None = setting(None, metavar="DATA")
    """Passages for --questions: a DPR passages file (id, tab, text, tab, title), or any other
    corpus."""
    match: Match = "string"
    """How to find answers in passages: as plain text (`string`), or as regular expressions
    (`regex`)."""
    run: str | None = setting(None, metavar="FILE")
    """TREC run file to evaluate."""
    qrels: str | None = setting(None, metavar="FILE")
    """File of relevance judgements (qrels) for --run."""
    ignore_identical_ids: bool = False
    """Leave out passages of --run with the id of their query, as --data does for BEIR folders.
    Default: they count, as in trec_eval."""
    against: str | None = setting(None, metavar="FILE")
    """Second run file. A significance test compares --run with this file, query by query."""
    metric: str = "ndcg@10"
    """Metric whose confidence interval is printed, and that the significance test compares."""
    k: PositiveInt = 100
    """Number of passages to find for each query."""
    output: str | None = setting(None, metavar="FILE")
    """JSON file to write (metrics.json), with the mean metrics and the metrics of every query. With
    several data sets: a folder that keeps the results of finished data sets."""

    def check(self, encoder: EncoderConfig, settings: SearchConfig) -> None:
        """Raise InputError for options that cannot be combined, and for missing options."""
        names = ("data", "questions", "passages", "run", "qrels")
        given = [name for name in names if getattr(self, name) is not None]
        if self.model is None and "run" not in given:
            raise InputError("evaluate got no --model; give --model, or --run and --qrels")
        if self.against is not None and "run" not in given:
            raise InputError(
                f"--against {self.against} was given without --run; give two run files, --run and "
                "--against"
            )
        if given not in (["data"], ["questions", "passages"], ["run", "qrels"]):
            found = ", ".join(f"--{name}" for name in given) or "neither data nor a run file"
            raise InputError(
                f"evaluate got {found}; give --data, or --questions and --passages, or --run and "
                "--qrels"
            )
        ignored = {
            "data": ("match", "ignore_identical_ids"),
            "questions": (
                "split",
                "relevance_level",
                "evaluator",
                "metric",
                "ignore_identical_ids",
            ),
            "run": ("model", "split", "evaluator", "match", "k"),
        }
        values = {name: getattr(self, name) for name in ignored[given[0]]}
        if self.run is not None:
            values = vars(encoder) | vars(settings) | values
        defaults = vars(EncoderConfig()) | vars(SearchConfig()) | vars(EvaluateConfig)
        for name, value in values.items():
            if value != defaults[name]:
                raise InputError(f"--{name} {value} has no effect on --{given[0]}; leave it out")
        cutoffs = [cutoff for cutoff in CUTOFFS if cutoff <= self.k or self.run is not None]
        if self.metric != EvaluateConfig.metric:
            check_metric("--metric", self.metric, cutoffs)


@dataclass(eq=False, repr=False)
class MineFilesConfig:
    """Training data to find hard negatives for, and file to write."""

    data: str = setting(metavar="DATA")
    """Training data: BEIR folder, name of a data set, or file of training examples."""
    output: str = setting(metavar="PATH")
    """File to write. It must not exist. A second file, NAME.about.json, says how the negatives were
    mined."""
    split: str = "train"
    """Split of a BEIR folder. Negatives are mined for the queries of this split."""
    corpus: str | None = setting(None, metavar="DATA")
    """Corpus in which negatives are searched: BEIR folder, name of a data set, corpus.jsonl file,
    or TSV file of passages. Default: the corpus of --data."""
    to: TrainingKind = "jsonl"
    """Format of the file to write."""


@dataclass(frozen=True)
class MineConfig:
    """How to choose hard negatives from the passages found for a query.

    Known positives, and passages with the same text as a positive or the query, are left out. The
    candidates are the best `range_max` of the other passages. Filters remove duplicates and
    candidates with scores outside the limits. Then the best `range_min` candidates are skipped. The
    options have the same names as in mine_hard_negatives of sentence-transformers.
    """

    num_negatives: PositiveInt = 5
    """Number of hard negatives for each query. A query gets fewer if too few candidates pass the
    filters."""
    range_min: NonNegativeInt = 0
    """Number of candidates to skip after the filters, beginning with the best."""
    range_max: int = 100
    """Number of candidates for each query: the best `range_max` search results after known
    positives are left out."""
    relative_margin: Share | None = None
    """The score of a negative may be at most p - relative_margin x abs(p), where p is the lowest
    score of the query's positives. With 0.05 and a p above 0, this maximum is 95 % of p. Default:
    no limit."""
    absolute_margin: float | None = None
    """The score of a negative may be at most p - absolute_margin, with p as in `relative_margin`.
    Default: no limit."""
    max_score: float | None = None
    """Maximum score of a negative. Default: no limit."""
    min_score: float | None = None
    """Minimum score of a negative. Default: no limit."""
    sampling_strategy: Literal["top", "random"] = "top"
    """How to choose among the remaining candidates: the best candidates (`top`), or a uniform
    random sample (`random`)."""
    cross_encoder: str | None = setting(None, metavar="MODEL")
    """Cross-encoder that scores the candidates again before the filters: folder or name on the Hub.
    Needs the extra `mine`. Default: none."""
    cross_encoder_batch_size: PositiveInt = PAIRS_OF_A_PASS
    """Number of query-passage pairs in one forward pass of the cross-encoder."""
    seed: NonNegativeInt = 0
    """Random seed for `sampling_strategy: random`."""

    def check(self) -> None:
        """Raise InputError if a setting is out of range or if two settings contradict."""
        check_values(self)
        least = self.range_min + self.num_negatives
        if self.range_max < least:
            raise InputError(
                f"range_max is {self.range_max}, expected at least range_min + num_negatives = "
                f"{least}"
            )
        if self.cross_encoder is None and self.cross_encoder_batch_size != PAIRS_OF_A_PASS:
            raise InputError("cross_encoder_batch_size has no effect without cross_encoder")
        if self.sampling_strategy == "top" and self.seed != 0:
            raise InputError("seed has no effect with sampling_strategy top")


@dataclass(eq=False, repr=False)
class MergeConfig:
    """Models to merge, and folder to write."""

    model: str = setting(positional=True)
    """Trained model: folder of a run, folder of a model, or name on the Hub. Without --start, it
    must have a LoRA adapter."""
    output: str = setting(positional=True)
    """Folder to write. It must not exist."""
    start: str | None = setting(None, metavar="MODEL")
    """Encoder that training started from. The result has the average of its weights and those of
    the trained model."""
    share: Share | None = None
    """Share of the trained model in the average with --start. Default: 0.75."""
    trust_remote_code: bool = setting(False, flag=True)
    """Run model code that comes with the encoder. Use this only for sources that you trust."""


@dataclass(eq=False, repr=False)
class PushConfig:
    """Model to upload, and repository to upload to."""

    path: str = setting(positional=True)
    """Folder of a run, or folder of a trained model."""
    repository: str = setting(positional=True)
    """Repository on the Hub, as OWNER/NAME. It is created if it does not exist."""
    private: bool = setting(False, flag=True)
    """Make the repository private."""
    licence: str | None = None
    """Licence that the model card names, as the Hub spells it: apache-2.0, mit, cc-by-4.0, ...
    Default: none."""
    dry_run: bool = setting(False, flag=True)
    """Write the model card and list the files to upload, but upload nothing."""


@dataclass(eq=False, repr=False)
class CheckConfig:
    """Data set to check."""

    path: str = setting(positional=True)
    """What to check: BEIR folder, corpus file, query file, file of training examples, or question
    file."""
    split: str | None = None
    """Split of a BEIR folder to check. Default: all splits."""


@dataclass(eq=False, repr=False)
class ConvertConfig:
    """Data set to convert, and file or folder to write."""

    source: str = setting(positional=True)
    """Data set to read, in any format."""
    target: str = setting(positional=True)
    """File or folder to write. It must not exist."""
    to: Form = setting()
    """Format to write."""
    split: str = "train"
    """Split to read from a BEIR folder, or to write into one. From BEIR to BEIR, the other splits
    of the folder are copied."""
    splits: str | None = setting(None, metavar="TRAIN,DEV,TEST")
    """Divide the queries into the splits train, dev and test, with these shares, such as
    0.8,0.1,0.1. A share of 0 writes no such split. Queries with the same text stay together. Only
    with `--to beir`."""
    seed: NonNegativeInt = 0
    """Random seed of `--splits`."""


@dataclass(eq=False, repr=False)
class FetchConfig:
    """Data set to download."""

    name: str = setting(positional=True)
    """Name of a data set: BEIR (scifact, cqadupstack/android), NanoBEIR (nanobeir/scifact), MTEB
    task (mteb/NFCorpus), MIRACL language (miracl/sw), DPR file (dpr/nq-train, dpr/psgs_w100,
    dpr/nq-test-questions), or any data set on the Hub (hub:owner/name). If you give a path, this
    path is printed."""
    split: str = "train"
    """Split of a Hub data set, or of an MTEB task that has a corpus for each split."""


@dataclass(eq=False, repr=False)
class DemoConfig:
    """Folder for the demo data set."""

    folder: str = setting(positional=True)
    """Folder to write. It must not exist."""
