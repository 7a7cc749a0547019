"""What each verb does with its options: it calls the library and prints what comes back. No logic."""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

from jsonargparse import Namespace

from contaccum.cli.effect import unread_by_evaluate, unread_by_mine, unread_by_search, warn_without_effect
from contaccum.cli.parsers.retrieval import evaluate_parser, mine_parser, search_parser
from contaccum.cli.parsers.training import plan_parser, rounds_parser, train_parser
from contaccum.config import TrainConfig, validate
from contaccum.errors import InputError
from contaccum.launch import is_main, process_place
from contaccum.options import ExploreOptions, MineSettings, ModelChoice, SearchSettings, StudyOptions

Options = TypeVar("Options", ExploreOptions, MineSettings, ModelChoice, SearchSettings, StudyOptions)


def _train(options: Namespace) -> None:
    config = _train_config(options)
    with warnings.catch_warnings():  # a wrong setting is refused before torch is imported; train warns
        warnings.simplefilter("ignore")
        validate(config, process_place()[1])
    from contaccum.training.loop import train

    _show(train(config))


def _train_config(options: Namespace) -> TrainConfig:
    values = train_parser().instantiate(options).as_dict()
    values.pop("config", None)
    return TrainConfig(**values)


def _plan(options: Namespace) -> None:
    values = plan_parser().instantiate(options).as_dict()
    own = {name: values.pop(name) for name in ("config", "memory", "methods", "corpus_size", "output")}
    from contaccum.study.plan import run_plan

    config = TrainConfig(**values)
    methods = own["methods"].split(",") if own["methods"] else None
    print(run_plan(config, own["memory"], methods, own["corpus_size"], own["output"]))


def _encode(options: Namespace) -> None:
    from contaccum import api

    choice, rest = _take(ModelChoice, options.as_dict())
    print(api.encode(choice, rest.pop("input"), **rest))


def _search(options: Namespace) -> None:
    from contaccum import api

    choice, rest = _take(ModelChoice, options.as_dict())
    settings, rest = _take(SearchSettings, rest)
    query, output, split, k = (rest.pop(name) for name in ("query", "output", "split", "k"))
    ways = {"--query": query is not None, "--output": output is not None, "--interactive": rest.pop("interactive")}
    given = [way for way, chosen in ways.items() if chosen]
    if len(given) != 1:
        found = " and ".join(given) or "none of --query, --output and --interactive"
        raise InputError(f"search was given {found}, expected exactly one of them")
    warn_without_effect(unread_by_search, options.as_dict(), search_parser().get_defaults().as_dict())
    if given == ["--output"]:
        with api.joined(choice.timeout_minutes) as group:
            how = {"split": split, "k": 100 if k is None else k, "settings": settings, "output": output}
            api.search(choice, group=group, **how, **rest)
        return _show(output)
    from contaccum.explore.prompt import converse
    from contaccum.retrieval.hits import render_hits

    k = 10 if k is None else k
    if given == ["--interactive"]:
        return converse(choice, split=split, k=k, settings=settings, **rest)
    with api.joined(choice.timeout_minutes) as group:
        hits = api.look(choice, query=query, k=k, settings=settings, group=group, **rest)
    return _show(render_hits(hits))


def _explore(options: Namespace) -> None:
    own, rest = _take(ExploreOptions, options.as_dict())
    choice, rest = _take(ModelChoice, {"model": "", **rest})
    settings, rest = _take(SearchSettings, rest)
    from contaccum.explore.page import explore

    explore(own, choice, settings, **rest)


def _evaluate(options: Namespace) -> None:
    from contaccum import api

    choice, rest = _take(ModelChoice, options.as_dict())
    settings, rest = _take(SearchSettings, rest)
    sources = {name: rest.pop(name) for name in ("data", "questions", "passages", "run", "qrels")}
    given = {name: value for name, value in sources.items() if value is not None}
    if choice.model is None and "run" not in given:
        raise InputError("evaluate was given no --model, expected one (or --run and --qrels)")
    if rest["processes"] < 1:
        raise InputError(f"--processes is {rest['processes']}, expected at least 1")
    if rest["against"] is not None and "run" not in given:
        raise InputError(f"--against {rest['against']} was given without --run, expected two run files")
    if given.keys() not in ({"data"}, {"questions", "passages"}, {"run", "qrels"}):
        found = ", ".join(f"--{name}" for name in given) or "none of them"
        raise InputError(f"expected --data, or --questions and --passages, or --run and --qrels; found {found}")
    warn_without_effect(unread_by_evaluate, options.as_dict(), evaluate_parser().get_defaults().as_dict())
    rest["output"] = rest["output"] if is_main() or api.is_benchmark(given.get("data", "")) else None
    with api.joined(choice.timeout_minutes) as group:
        text = _scores(choice, given, settings, group, rest)
    _show(text)


def _scores(
    choice: ModelChoice, given: Mapping[str, Any], settings: SearchSettings, group: Any, rest: Mapping[str, Any]
) -> str:
    """What ``evaluate`` prints of the sources that were given."""
    from contaccum import api

    searched = {name: rest[name] for name in ("k", "repair", "output", "max_bad_records")} | {
        "settings": settings,
        "group": group,
    }
    level = rest["relevance_level"]
    if given.keys() == {"data"}:
        how = {"split": rest["split"], "strict": rest["strict"], "relevance_level": level}
        if api.is_benchmark(given["data"]):
            return api.render_benchmark(api.evaluate_benchmark(choice, **given, **how, **searched))
        return api.render_metrics(api.evaluate(choice, **given, **how, **searched))
    if given.keys() == {"questions", "passages"}:
        how = {"match": rest["match"], "processes": rest["processes"]}
        return api.render_metrics(api.evaluate_questions(choice, **given, **how, **searched))
    how = {"relevance_level": level, "max_bad_records": rest["max_bad_records"], "strict": rest["strict"]}
    metrics = api.evaluate_run_file(output=rest["output"], **how, **given)
    if rest["against"] is None:
        return api.render_metrics(metrics)
    other = api.evaluate_run_file(rest["against"], given["qrels"], **how)
    tested = api.compare_metrics(metrics, other, rest["metric"])
    return api.render_metrics(metrics) + "\n" + api.render_comparison(tested, rest["metric"], rest["against"])


def _mine(options: Namespace) -> None:
    from contaccum import api

    choice, rest = _take(ModelChoice, options.as_dict())
    mining, rest = _take(MineSettings, rest)
    settings, rest = _take(SearchSettings, rest)
    warn_without_effect(unread_by_mine, options.as_dict(), mine_parser().get_defaults().as_dict())
    with api.joined(choice.timeout_minutes) as group:
        report = api.mine(choice, mining=mining, settings=settings, group=group, **rest)
    if is_main():
        print(api.render_mined(report, rest["output"]))


def _rounds(options: Namespace) -> None:
    values = rounds_parser().instantiate(options).as_dict()
    values.pop("config")
    mining, rounds = values.pop("mine"), values.pop("rounds")
    from contaccum.study.rounds import run_rounds

    _show(run_rounds(TrainConfig(**values), mining, rounds))


def _compare(options: Namespace) -> None:
    from contaccum.study.compare import compare

    study, values = _take(StudyOptions, options.as_dict())
    values.pop("config")

    def configure(changes: Mapping[str, str]) -> TrainConfig:
        changed = copy.deepcopy(values)
        for name, value in changes.items():
            *groups, field = name.split(".")
            reduce(getitem, groups, changed)[field] = value
        return _train_config(train_parser().parse_object(changed))

    print(compare(configure, replace(study, vary=tuple(study.vary))))


def _verify(options: Namespace) -> None:
    from contaccum.study.verify import verify

    verify(_train_config(options), print)


def _report(options: Namespace) -> None:
    from contaccum.study.report import console_report

    print(console_report(options.runs, options.metric, options.against, options.html))


def _merge(options: Namespace) -> None:
    from contaccum import api

    print(api.merge(**options.as_dict()))


def _push(options: Namespace) -> None:
    from contaccum.publish.hub import push

    print(push(**options.as_dict()))


def _doctor(_: Namespace) -> None:
    from contaccum.doctor.examine import doctor

    doctor(print)


def _check(options: Namespace) -> None:
    from contaccum.data.check import check, render

    print(render(check(**options.as_dict())))


def _convert(options: Namespace) -> None:
    from contaccum.data.convert import convert

    convert(**options.as_dict())
    print(options.target)


def _fetch(options: Namespace) -> None:
    from contaccum.data.sources import resolve

    path, _ = resolve(options.name, options.split)
    if not path.exists():
        raise InputError(f"{path}: no such folder or file, expected a path or the name of a published data set")
    print(path)


def _demo(options: Namespace) -> None:
    from contaccum.data.demo import write_demo

    write_demo(options.folder)
    print(options.folder)


VERBS: dict[str, Callable[[Namespace], None]] = {
    "train": _train,
    "encode": _encode,
    "search": _search,
    "explore": _explore,
    "evaluate": _evaluate,
    "mine": _mine,
    "rounds": _rounds,
    "compare": _compare,
    "verify": _verify,
    "plan": _plan,
    "report": _report,
    "merge": _merge,
    "push": _push,
    "doctor": _doctor,
    "data check": _check,
    "data convert": _convert,
    "data fetch": _fetch,
    "data demo": _demo,
}


def _take(kind: type[Options], values: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    """The options that belong to a dataclass, as one, and the rest."""
    names = {field.name for field in fields(kind)}
    own = {name: value for name, value in values.items() if name in names}
    return kind(**own), {name: value for name, value in values.items() if name not in names}


def _show(result: object) -> None:
    """To stdout, from the main process of a launch alone."""
    if is_main():
        print(result)
