"""Options of the commands compare, auto, plan and report."""

from dataclasses import dataclass

from contaccum.config.declare import PositiveInt, setting


@dataclass(frozen=True)
class CompareConfig:
    """Runs to compare, and how to compare them."""

    methods: str = ""
    """Training methods to compare, separated by commas. Default: `method` of the config."""
    seeds: PositiveInt = 3
    """Number of runs for each combination of settings, one for each seed. The seeds are consecutive
    numbers, beginning with `seed` of the config."""
    vary: tuple[str, ...] = setting((), metavar="GROUP.FIELD=v1,v2")
    """Settings to vary, with values. For each method, only the settings that the method uses are
    varied, in all combinations."""
    test: str | None = setting(None, metavar="DATA")
    """Test data for all models: BEIR folder or name of a data set. Default: the data set named in
    `data.train`, with the split `test_split`."""
    test_split: str = "test"
    """Split of the test data to use."""
    baselines: str = "bm25,untrained"
    """Baselines that are not trained, separated by commas: `bm25`, and `untrained` (the encoder
    before training). `none`: no baselines."""
    against: str | None = None
    """Row that the significance tests compare with every other row: a training method, a name in
    `--settings`, or a baseline. Default: grad_cache if it is among the methods, else the first
    method."""
    budget: str | None = None
    """Budget of each training run: forward passes of a pair (200000f), or seconds (600s). Every run
    gets as many steps as this budget allows.
    A backward pass counts as 2 forward passes, so a pair costs 3 passes with a one-pass method.
    With `grad_cache` or `cont_cache`, a pair costs 1 + 3 x `replay.share` passes, or 4 - B / N
    passes if `replay.share` is 1 (N pairs in a step, B in a micro-batch; 4 passes with
    micro-batches by tokens). For a budget in seconds, a few steps are measured first. Default:
    `optim.max_steps` or `optim.epochs`."""
    tune: tuple[str, ...] = setting((), metavar="GROUP.FIELD=v1,v2")
    """Settings to tune, with the values to try. For each method, only the settings that the method
    uses are tuned, in all combinations, with the first seed. Then the method uses the combination
    that is best on `data.dev`. Combinations compete in rounds (successive halving): 30 combinations
    cost at most 8 full runs."""
    rungs: PositiveInt | None = None
    """Number of rounds of tuning. The first round trains all combinations. Each later round trains
    only the best quarter, for 3 times as long as the round before. The last round trains with the
    full budget. With 1 round, every combination trains with the full budget. Default: the lowest
    number that leaves at most 3 combinations for the last round."""
    settings: str | None = setting(None, metavar="FILE")
    """YAML file with the entries to compare, instead of `--methods` and `--vary`. The file maps the
    name of each entry to its settings. The key `tune` of an entry maps settings to the values to
    try."""
    keep_weights: bool = True
    """Keep the checkpoints and the model of each evaluated run. The weights of combinations that
    lost in tuning are always deleted."""
    parallel: PositiveInt | None = None
    """Number of runs at the same time. Default: one for each GPU, or one on a CPU."""


@dataclass(frozen=True)
class AutoConfig:
    """Time limit and test data of an automatic training run."""

    time: str = setting(metavar="TIME")
    """Time limit of the whole command, such as 90s, 30m or 2h. It includes measurements, tuning,
    the two baselines, the final training run and its evaluation."""
    test: str | None = setting(None, metavar="DATA")
    """Test data: BEIR folder or name of a data set. Default: the data set named in `data.train`,
    with the split `test_split`. If there is no such split, the dev queries."""
    test_split: str = "test"
    """Split of the test data to use."""


@dataclass(eq=False, repr=False)
class PlanConfig:
    """Memory budget and methods to plan for."""

    memory: str | None = setting(None, metavar="SIZE")
    """Memory that one process may use, such as 11GB or 24GiB: GPU memory, or main memory on a CPU.
    Default: the free GPU memory, or on a CPU 80 % of the free main memory, which is also the most
    that a CPU plans with."""
    methods: str | None = None
    """Training methods to plan for, separated by commas: `in_batch`, `grad_accum`, `grad_cache`,
    `passage_bank`, `cont_accum`, `cont_cache`; or `all`. Default: `method` of the config."""
    output: str | None = setting(None, metavar="FILE")
    """JSON file to write the plan to."""


@dataclass(eq=False, repr=False)
class ReportConfig:
    """Runs to show in a report."""

    runs: tuple[str, ...] = setting(positional=True)
    """Runs to show: run folders or metrics.json files."""
    metric: str = "ndcg@10"
    """Metric to show."""
    against: str | None = setting(None, metavar="RUN")
    """Run that the significance tests compare with the other runs, query by query. Runs whose names
    and settings differ only in the seed count as one run."""
    html: str | None = setting(None, metavar="FILE")
    """HTML file to write. The page is a single file. This option needs the extra `study`."""
