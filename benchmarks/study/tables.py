"""The tables of docs/results/small_encoder.md and study_tables.md, made from the packed runs.

    python benchmarks/study/tables.py docs/results/study.jsonl.gz [TABLE...] [--page
    docs/results/study_tables.md]

--page writes the tables into a page, each after the line <!-- table: NAME -->, instead of printing
them.

Mean and standard deviation are over seeds. Tests are paired, against the reference of the table:
`perm` flips signs of the queries' differences, `both` counts seeds and queries as drawn at random
(``over_both``); Holm's correction is over the table's rows. Of a setting with several learning
rates the one best on dev by its mean over seeds is shown, so the test data choose nothing.
"""

import argparse
import gzip
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pack import DEFAULTS

from contaccum.evaluation.significance import compare, holm
from contaccum.experiments.page import Table, number
from contaccum.experiments.run_records import RunGroup, RunRecord

METRIC = "ndcg@10"
RATE = "optim.learning_rate"
SIZE = "batch.global_batch_size"
PARTED = ("switches", "cut")


def read_pack(path: Path) -> dict[str, list[RunRecord]]:
    """Return runs by study."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        queries, *lines = map(json.loads, file)
    studies: dict[str, list[RunRecord]] = {}
    for line in lines:
        # a trial on dev has no scores on test
        names = queries[line["test"]] if line["per_query"] else []
        per_query = {
            name: {METRIC: value} for name, value in zip(names, line["per_query"], strict=True)
        }
        columns = line["log"]
        steps = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        for step in steps:
            query, passage = step.get("query_grad_norm"), step.get("passage_grad_norm")
            step["grad_norm_ratio"] = passage / query if query and passage else None
        config = {**DEFAULTS, **line["config"]} if line["config"] else {}
        metrics = {"mean": line["mean"], "per_query": per_query} if per_query else None
        run = RunRecord(Path(line["run"]), config, steps, line["dev"], metrics, line["environment"])
        studies.setdefault(line["study"], []).append(run)
    for name in PARTED:  # the parts of one question: each is a study, and so are all together
        if found := [
            run for study, runs in studies.items() if study.startswith(f"{name}-") for run in runs
        ]:
            studies[name] = found
    return studies


NAME = re.compile(
    r"(?P<setting>.*?)(?:-learning_rate=(?P<rate>[0-9.]+(?:e-?[0-9]+)?))?(?:-seed[0-9]+)?"
)


def label(run: RunRecord, rate: bool = False) -> str:
    """Return the run's name without seed, and with its learning rate if ``rate``."""
    found = NAME.fullmatch(run.name)
    assert found is not None
    setting = found["setting"].replace("-", " ")
    for name in ("age_decay", "row_weight"):
        value = run.config.get(f"bank.{name}")
        if (
            run.method in ("cont_accum", "cont_cache")
            and value not in (None, DEFAULTS[f"bank.{name}"])
            and name not in setting
        ):
            setting += f" {name}={value:g}" if isinstance(value, float) else f" {name}={value}"
    return f"{setting} lr={found['rate']}" if rate and found["rate"] else setting


def groups(runs: Sequence[RunRecord], rate: bool = False) -> dict[str, RunGroup]:
    found: dict[str, RunGroup] = {}
    for run in sorted(runs, key=lambda run: (label(run, rate), run.seed)):
        name = label(run, rate)
        group = found.setdefault(name, RunGroup(name))
        if all(
            (run.seed, run.config) != (other.seed, other.config) for other in group.runs
        ):  # two parts may share a run
            group.runs.append(run)
    return found


def same_seeds(found: dict[str, RunGroup]) -> dict[str, RunGroup]:
    """Return the groups reduced to the seeds that all of them have."""
    shared = set.intersection(*({run.seed for run in group.runs} for group in found.values()))
    return {
        name: RunGroup(name, runs=[run for run in group.runs if run.seed in shared])
        for name, group in found.items()
    }


def dev_score(runs: Sequence[RunRecord]) -> float:
    scores = [run.evaluations[-1][METRIC] for run in runs if run.evaluations]
    return statistics.mean(scores) if scores else float("nan")


def best_rates(runs: Sequence[RunRecord]) -> dict[str, RunGroup]:
    """Return each setting at the learning rate that is best on dev, over the seeds that all its
    rates have."""
    by_setting: dict[str, dict[str, RunGroup]] = {}
    for name, group in groups(runs, rate=True).items():
        if group.per_query():
            by_setting.setdefault(label(group.runs[0]), {})[name] = group
    chosen = {}
    for setting, tried in by_setting.items():
        shared = same_seeds(tried)
        chosen[setting] = tried[max(tried, key=lambda name: dev_score(shared[name].runs))]
    return chosen


def against(chosen: dict[str, RunGroup], reference: str, times: bool = False) -> Table:
    """Compare every group with the reference over their common seeds: mean, sd, difference, effect
    size, p values."""
    base = chosen[reference]
    found = {}
    for name, group in chosen.items():
        if name != reference:
            found[name] = compare(group.per_query(), base.per_query(), METRIC)
    perm = dict(zip(found, holm([one.p_permutation for one in found.values()]), strict=True))
    shared = {name: one.p_both for name, one in found.items() if one.p_both is not None}
    both = dict(zip(shared, holm(list(shared.values())), strict=True))
    heads = [
        "setting",
        "lr",
        "seeds",
        METRIC,
        "sd",
        f"less {reference}",
        "d",
        "p perm",
        "p both",
        "grad ratio",
    ]
    rows = []
    for name, group in sorted(
        chosen.items(), key=lambda item: -(item[1].mean_and_sd(METRIC)[0] or 0)
    ):
        mean, deviation = group.mean_and_sd(METRIC)
        one = found.get(name)
        row = [
            name, f"{group.setting(RATE):g}" if group.method else "-",
            str(len(group.runs)) if group.method else "-", number(mean), number(deviation),
            "" if one is None else f"{one.difference:+.4f}",
            "" if one is None else f"{one.effect:+.2f}", "" if one is None else p(perm[name]),
            "" if one is None or name not in both else p(both[name]),
            number(group.median("grad_norm_ratio"), ".2f"),
        ]  # fmt: skip
        if times:
            seconds, own = quickest(group), quickest(base)
            row += [
                number(seconds, ".2f"),
                number(seconds / own if seconds and own else None, ".2f"),
                memory(group),
            ]
        rows.append(row)
    return Table([*heads, *(["s/step", f"time / {reference}", "peak MiB"] if times else [])], rows)


def quickest(group: RunGroup) -> float | None:
    """Return the seconds per step of the least disturbed run, because other jobs shared the
    machine."""
    return min((median for run in group.runs if (median := run.median("seconds"))), default=None)


def memory(group: RunGroup) -> str:
    """Return the mean peak over the runs on the first run's device.

    On a CPU, the peak is that of the whole process.
    """
    device = group.runs[0].environment.get("device")
    runs = [run for run in group.runs if run.environment.get("device") == device]
    return number(RunGroup(group.label, runs=runs).mean("peak_mib"), ".0f")


def p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def rates(runs: Sequence[RunRecord]) -> Table:
    """Return the test mean of every setting and learning rate, with standard deviation and seeds in
    parentheses."""
    table: dict[str, dict[float, str]] = {}
    for group in groups(runs, rate=True).values():
        mean, deviation = group.mean_and_sd(METRIC)
        text = f"{mean:.4f} ({'' if deviation is None else f'{deviation:.4f}, '}{len(group.runs)})"
        table.setdefault(label(group.runs[0]), {})[group.setting(RATE)] = text
    heads = sorted({rate for row in table.values() for rate in row})
    rows = [[name, *(row.get(rate, "-") for rate in heads)] for name, row in table.items()]
    return Table(["setting", *(f"{rate:g}" for rate in heads)], rows)


def tuning(runs: Sequence[RunRecord]) -> Table:
    """Return the first seed's dev score at every learning rate."""
    table: dict[str, dict[float, float]] = {}
    for run in runs:
        if run.method and run.seed == 0:
            table.setdefault(label(run), {})[run.config[RATE]] = dev_score([run])
    heads = sorted({rate for row in table.values() for rate in row})
    rows = [[name, *(number(row.get(rate)) for rate in heads)] for name, row in table.items()]
    return Table(["setting", *(f"{rate:g}" for rate in heads)], rows)


Studies = dict[str, list[RunRecord]]


def some(runs: Iterable[RunRecord], pattern: str) -> list[RunRecord]:
    """Return the runs whose label matches."""
    return [run for run in runs if re.fullmatch(pattern, label(run))]


def encoders(studies: Studies, name: str) -> list[RunRecord]:
    """Return the runs of a data set, including those with age decay and other methods."""
    further = ["aged", "all_methods"] if name == "medquad" else [f"{name}-aged"]
    return sum((studies.get(part, []) for part in further), studies[name])


def order(studies: Studies, name: str) -> Table:
    return against(best_rates(encoders(studies, name)), "grad_cache", times=True)


def quality(studies: Studies, name: str) -> Table:
    """Compare quality without times, because only some of these runs had the machine to
    themselves."""
    return against(best_rates(encoders(studies, name)), "grad_cache")


def discounted(studies: Studies, name: str) -> Table:
    """Compare `cont_accum` with age decay with `cont_accum` as published, each at its best learning
    rate."""
    chosen = best_rates(encoders(studies, name))
    return against(
        {setting: group for setting, group in chosen.items() if setting.startswith("cont_accum")},
        "cont_accum",
    )


def encoder_rates(studies: Studies, name: str) -> Table:
    return rates([run for run in encoders(studies, name) if run.method and run.metrics is not None])


def switches(studies: Studies, name: str) -> Table:
    """Compare settings with one change each with the unchanged setting."""
    switched = {
        part.removeprefix(f"{name}-"): runs
        for part, runs in studies.items()
        if part.startswith(f"{name}-")
    }
    rate = next(run.config[RATE] for runs in switched.values() for run in runs)
    runs = [
        run for run in studies["medquad"] if run.method == "cont_accum" and run.config[RATE] == rate
    ]
    for part, own in switched.items():
        runs += [replace(run, folder=Path(f"cont_accum-{part}-seed{run.seed}")) for run in own]
    return against(same_seeds(groups(runs)), "cont_accum")


def longer(studies: Studies, name: str) -> Table:
    """Compare as many updates as fit into the reference's time with the reference."""
    chosen = best_rates(encoders(studies, "scifact" if "scifact" in name else "medquad"))
    found = {
        setting: group
        for setting, group in chosen.items()
        if setting == "grad_cache" or "age_decay" in setting
    }
    runs = [
        replace_name(run, f"max_steps={run.config['optim.max_steps']}", "-seed")
        for run in studies[name]
    ]
    return against(found | groups(runs), "grad_cache")


def chosen_on_dev(runs: Sequence[RunRecord]) -> dict[str, RunGroup]:
    """Return each setting with the N and rate that are best on dev, of those with several seeds,
    and the baselines."""
    chosen: dict[str, RunGroup] = {}
    for name, group in groups(runs, rate=True).items():
        setting = re.sub(r" (global_batch_size|lr)=\S+", "", name)
        if not group.per_query() or (group.method and len(group.runs) == 1):
            continue
        if setting not in chosen or dev_score(group.runs) > dev_score(chosen[setting].runs):
            chosen[setting] = group
    return chosen


def equal_time(studies: Studies, name: str) -> Table:
    """Compare the methods after the same training time."""
    return with_cost(chosen_on_dev(studies[name]))


def equal_cost(studies: Studies, name: str) -> Table:
    """Compare the methods after the same number of forward passes of a pair.

    Runs that share a GPU have no times.
    """
    return with_cost(chosen_on_dev(studies[name]), ("updates", "peak MiB"))


def options(studies: Studies, name: str) -> Table:
    """Compare each option of loss and batch order with the same method without it."""
    found, rows, heads = groups(studies[name]), [], []
    for base in ("grad_cache", "replay"):
        family = {
            label.split(" age_decay")[0]: group
            for label, group in found.items()
            if label.startswith(base)
        }
        table = against(family, base)
        heads, rows = (
            [column.replace(base, "the method alone") for column in table.heads],
            [*rows, *table.rows],
        )
    return Table(heads, rows)


def longer_reference(studies: Studies, name: str) -> Table:
    """Compare the methods after 6,144 forward passes with the reference after 7,168, on another
    device."""
    found = {
        setting: group
        for setting, group in chosen_on_dev(studies[name.replace("7168f", "6144f")]).items()
        if group.method
    }
    return with_cost(
        found | {"grad_cache": chosen_on_dev(studies[name])["grad_cache"]}, ("updates",)
    )


SETS = {"medquad": "MedQuAD", "scifact": "SciFact", "xquad": "XQuAD"}


def all_sets(studies: Studies, _: str) -> Table:
    """Return the differences from the reference after the same training time, with 95 % intervals
    over queries."""
    cells: dict[str, list[str]] = {}
    for study in SETS:
        table = longer_reference(studies, f"{study}-7168f")
        found = chosen_on_dev(studies[f"{study}-6144f"])
        reference = chosen_on_dev(studies[f"{study}-7168f"])["grad_cache"]
        for row in (dict(zip(table.heads, row, strict=True)) for row in table.rows):
            cell = row[METRIC]
            if row["less grad_cache"]:
                ours, theirs = same_seeds(
                    {"": found[row["setting"]], "grad_cache": reference}
                ).values()
                one = compare(ours.per_query(), theirs.per_query(), METRIC)
                tested = row["p both"] if row["p both"].startswith("<") else f"= {row['p both']}"
                cell += f", {one.difference:+.3f} ({one.low:+.3f} to {one.high:+.3f}), p {tested}"
            cells.setdefault(
                row["setting"].removesuffix(" age_decay=1 row_weight=current"), []
            ).append(cell)
    return Table(["setting", *SETS.values()], [[setting, *row] for setting, row in cells.items()])


def strongest(studies: Studies, name: str) -> Table:
    """Compare the methods after 6,144 forward passes with the best `grad_cache` of all learning
    rates and N."""
    found = {
        setting: group for setting, group in chosen_on_dev(studies[name]).items() if group.method
    }
    del found["grad_cache"]
    return with_cost(
        found | {"grad_cache": best_rates(encoders(studies, "medquad"))["grad_cache"]}, ("updates",)
    )


LONGER = {"52s": "75s", "4096f": "7168f"}
"""Budget of the methods -> the larger budget of the reference."""


def less_time(studies: Studies, name: str) -> Table:
    """Compare methods after two thirds of the reference's training time with the reference."""
    own, budget = name.rsplit("-", 1)
    short = {
        setting: group for setting, group in chosen_on_dev(studies[name]).items() if group.method
    }
    reference = chosen_on_dev(studies[f"{own}-{LONGER[budget]}"])["grad_cache"]
    shown = ("updates", "seconds", "peak MiB") if budget.endswith("s") else ("updates",)
    return with_cost(short | {"grad_cache": reference}, shown)


def with_cost(
    found: dict[str, RunGroup], shown: Sequence[str] = ("updates", "seconds", "peak MiB")
) -> Table:
    """Compare every group with the reference, with N and the costs of a run, as means over
    seeds."""
    table = against(found, "grad_cache")
    rows = []
    for row in table.rows:
        group = found[row[0]]
        costs = dict.fromkeys(shown, "-")
        if group.method:
            updates, seconds = (
                f"{group.setting('optim.max_steps'):g}",
                number(group.mean("train_seconds"), ".0f"),
            )
            costs = {"updates": updates, "seconds": seconds, "peak MiB": memory(group)}
        size = f"{group.setting(SIZE):g}" if group.method else "-"
        rows.append([row[0], size, *row[1:-1], *(costs[name] for name in shown)])
    return Table([table.heads[0], "N", *table.heads[1:-1], *shown], rows)


def by_rate(runs: Sequence[RunRecord]) -> dict[float, dict[str, RunGroup]]:
    """Return learning rate -> setting -> runs, from the lowest learning rate."""
    rates = sorted({run.config[RATE] for run in runs if run.method})
    return {
        rate: groups([run for run in runs if run.method and run.config[RATE] == rate])
        for rate in rates
    }


def drift_per_step(group: RunGroup) -> float | None:
    """Return 1 - cosine of stored and present vectors of passages, per step of age: the mean over
    training of the oldest rows."""
    oldest = [step["drift"][0] for run in group.runs for step in run.steps if step.get("drift")]
    return statistics.mean((1 - one["passage"]) / one["age"] for one in oldest) if oldest else None


def large_banks(studies: Studies, name: str) -> Table:
    """Compare banks of several sizes with training without a bank, at each learning rate."""
    rows = []
    for rate, found in by_rate(studies[name]).items():
        table = against(found, "no bank")
        for row in (dict(zip(table.heads, row, strict=True)) for row in table.rows):
            drift = number(drift_per_step(found[row["setting"]]), ".1e")
            rows.append(
                [
                    f"{rate:g}",
                    row["setting"],
                    row["seeds"],
                    row[METRIC],
                    row["less no bank"],
                    row["p perm"],
                    row["p both"],
                    row["grad ratio"],
                    drift,
                ]
            )
    heads = [
        "lr", "setting", "seeds", METRIC, "less no bank", "p perm", "p both", "grad ratio",
        "drift per step",
    ]  # fmt: skip
    return Table(heads, rows)


def hybrid(studies: Studies, name: str) -> Table:
    """Compare the hybrid with and without age decay with the reference."""
    chosen = best_rates(encoders(studies, "medquad") + studies[name])
    wanted = {
        setting: group
        for setting, group in chosen.items()
        if setting.startswith(("grad_cache", "cont_cache"))
    }
    return against(same_seeds(wanted), "grad_cache")


def cuts(studies: Studies, name: str) -> Table:
    """Compare micro-batches by tokens with those by pairs, for each method."""
    tables = []
    for aged in ("", "-aged"):
        runs = [
            replace(run, folder=Path(f"{run.method}-{way}-seed{run.seed}"))
            for way in ("pairs", "tokens")
            for run in studies.get(f"{name}-{way}{aged}", [])
        ]
        found = same_seeds(groups(runs)) if runs else {}
        tables += [against(found, setting) for setting in found if " pairs" in setting]
    heads = ["less by pairs" if head.startswith("less ") else head for head in tables[0].heads]
    return Table(heads, [row for table in tables for row in table.rows])


def heads_order(studies: Studies, name: str) -> Table:
    runs = some(
        studies[name],
        r"grad_\w+|(passage_bank|cont_\w+) size=\d+( age_decay=1 row_weight=current)?",
    )
    return against(best_rates(runs), "grad_cache")


def heads_rates(studies: Studies, name: str) -> Table:
    return rates(
        some(
            studies[name],
            r"grad_\w+|(passage_bank|cont_\w+) size=\d+( age_decay=1 row_weight=current)?",
        )
    )


def heads_switches(studies: Studies, name: str) -> Table:
    """Compare one change each with the unchanged setting at the learning rate 3e-4."""
    plain = {f"cont_accum-size={size}-learning_rate=3e-4" for size in (64, 512)}
    runs = [run for run in studies[name] if re.sub(r"-seed\d+$", "", run.name) in plain]
    runs += some(
        studies[name],
        r"(cont_accum size=\d+|grad_cache) "
        r"(row_weight|visibility|keep|warmup_steps|mask_false|queries).*",
    )
    return against(
        same_seeds(groups([run for run in runs if run.config[RATE] == 3e-4])), "cont_accum size=64"
    )


def heads_age(studies: Studies, name: str) -> Table:
    return rates(
        some(studies[name], r"grad_cache|cont_accum size=(64|512)( (age_decay|row_weight)=.*)?")
    )


def heads_ideas(studies: Studies, name: str) -> Table:
    return rates(some(studies[name], r"idea .*"))


def heads_longer(studies: Studies, name: str) -> Table:
    return rates(some(studies[name], r".* max_steps=96.*"))


def heads_balance(studies: Studies, name: str) -> Table:
    """Correlate |log ratio| of the gradient norms with quality: Spearman's rank correlation over
    settings."""
    from scipy import stats

    rows = []
    chosen = some(studies[name], r"grad_\w+|(passage_bank|cont_\w+) size=\d+")
    for rate in sorted({run.config[RATE] for run in chosen}):
        found = groups([run for run in chosen if run.config[RATE] == rate]).values()
        apart = [abs(math.log(group.median("grad_norm_ratio") or 1.0)) for group in found]
        quality = [group.mean_and_sd(METRIC)[0] or 0.0 for group in found]
        result = stats.spearmanr(apart, quality)
        rows.append(
            [f"{rate:g}", str(len(apart)), f"{result.statistic:+.2f}", p(float(result.pvalue))]
        )
    return Table(
        ["learning rate", "settings", "rank correlation of imbalance and quality", "p"], rows
    )


def heads_drift(studies: Studies, name: str) -> Table:
    """Return how far passages move within four updates, and the share of the common shift."""
    rows = [
        [
            label(run)[len("drift ") :],
            f"{run.config[RATE]:g}",
            number(run.median("drift_passage_cosine"), ".3f"),
            number(run.median("drift_common_share"), ".2f"),
            number(run.score(METRIC)),
        ]
        for run in some(studies[name], r"drift .*")
    ]
    return Table(["setting", "lr", "cosine after 4 updates", "share of one shift", METRIC], rows)


def real_tuning(studies: Studies, name: str) -> Table:
    larger = [replace_name(run, "M=8N", "-learning_rate") for run in studies.get("bank", [])]
    return tuning([*encoders(studies, name), *larger])


def replace_name(run: RunRecord, word: str, before: str) -> RunRecord:
    """Return the run with a word added to its setting."""
    return replace(run, folder=Path(run.name.replace(before, f"-{word}{before}")))


TABLES: dict[str, tuple[Callable[[Studies, str], Table], str]] = {
    "medquad": (order, "medquad"),
    "medquad-rates": (real_tuning, "medquad"),
    "scifact": (quality, "scifact"),
    "scifact-rates": (encoder_rates, "scifact"),
    "tied": (order, "tied"),
    "six": (order, "six"),
    "n128": (quality, "n128"),
    "demo": (quality, "demo"),
    **{f"{study}-discounted": (discounted, study) for study in ("medquad", "scifact", "demo")},
    "switches": (switches, "switches"),
    "cut": (cuts, "cut"),
    "time": (longer, "time-aged"),
    "time-scifact": (longer, "time-scifact-aged"),
    **{f"{study}-75s": (equal_time, f"{study}-75s") for study in ("medquad", "scifact")},
    **{
        f"{study}-6144f": (equal_cost, f"{study}-6144f")
        for study in ("medquad", "scifact", "xquad")
    },
    **{
        f"{study}-7168f": (longer_reference, f"{study}-7168f")
        for study in ("medquad", "scifact", "xquad")
    },
    "medquad-49152f": (large_banks, "medquad-49152f"),
    "masked-49152f": (large_banks, "masked-49152f"),
    "7168f": (all_sets, "medquad-7168f"),
    "medquad-strongest": (strongest, "medquad-6144f"),
    **{
        name: (equal_cost, name)
        for name in (
            "medquad-24576f",
            "scifact-24576f",
            "xquad-24576f",
            "medquad-guide",
            "demo-80000f",
        )
    },
    **{f"{study}-options": (options, f"{study}-options") for study in ("medquad", "scifact")},
    **{f"{study}-52s": (less_time, f"{study}-52s") for study in ("medquad", "scifact")},
    **{
        f"{study}-4096f": (less_time, f"{study}-4096f") for study in ("medquad", "scifact", "xquad")
    },
    "cache-aged": (hybrid, "cache-aged"),
    **{
        f"{study}-{name}": (make, study)
        for study in ("heads-medquad", "heads-scifact")
        for name, make in (
            ("order", heads_order),
            ("rates", heads_rates),
            ("switches", heads_switches),
            ("age", heads_age),
            ("ideas", heads_ideas),
            ("longer", heads_longer),
            ("balance", heads_balance),
            ("drift", heads_drift),
        )
    },
}


MARKED = re.compile(r"(?<=<!-- table: )(\S+)( -->\n\n)((?:\|[^\n]*\n)*)")
"""A table in a page: its name, the end of its comment, its lines. A new table has no lines."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all when none is named"
    )
    parser.add_argument("--page", type=Path, help="Markdown file whose tables are replaced")
    chosen = parser.parse_args()
    studies = read_pack(chosen.pack)

    def made(name: str) -> str:
        make, study = TABLES[name]
        return make(studies, study).markdown()

    if chosen.page is not None:
        new = chosen.page.read_text(encoding="utf-8")
        new = MARKED.sub(
            lambda found: found[1] + found[2] + made(found[1]) + ("\n" if found[3] else "\n\n"), new
        )
        chosen.page.write_text(new, encoding="utf-8")
        return
    for name in chosen.tables or [name for name, (_, study) in TABLES.items() if study in studies]:
        print(f"### {name}\n\n{made(name)}\n")


if __name__ == "__main__":
    main()
