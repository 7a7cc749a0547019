"""Several processes that search together give the results of one; gloo on the CPU."""

import json
import re

import pytest
from helpers import open_train_set, train_config, write_beir
from processes import Job, run_jobs

from contaccum.retrieval.runs import read_run
from contaccum.training import parts

QUERIES = 41


@pytest.fixture(scope="module")
def searches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searches")
    data = write_beir(folder / "data", QUERIES)
    with (data / "corpus.jsonl").open("a") as file:
        for number in range(30):  # equal texts in many slices: ties that only ids can break
            file.write(
                json.dumps({"_id": f"twin{number * 7 % 30}", "title": "fox", "text": "a red fox"})
                + "\n"
            )
    model = folder / "model"
    train_set = open_train_set(data)
    parts.build_encoder(train_config(data, folder), train_set).save(model)
    with (folder / "questions.csv").open("w") as file:
        file.writelines(f"where is the fox of valley {n}\t['valley {n}']\n" for n in range(5))
    rows = [f"twin{n}\ta red fox\tfox" for n in range(20)] + [
        f"{n}\tin valley {n}\tfox" for n in range(20)
    ]
    (folder / "passages.tsv").write_text("\n".join(["id\ttext\ttitle", *rows]) + "\n")

    use = ["--model", str(model), "--device", "cpu"]
    on = ["--data", str(data)]
    jobs = {}
    for world in (1, 3):
        few = {"processes": world, "fault": "encodes_few_texts_at_a_time"}
        output = [f"--output={folder}/{world}.trec"]
        jobs[f"search {world}"] = Job(["search", *use, *on, *output, "--k=60"], **few)
        output = [f"--output={folder}/{world}.json"]
        jobs[f"evaluate {world}"] = Job(["evaluate", *use, *on, *output], **few)
        asked = [
            "--questions",
            str(folder / "questions.csv"),
            "--passages",
            str(folder / "passages.tsv"),
        ]
        jobs[f"answers {world}"] = Job(
            ["evaluate", *use, *asked, f"--output={folder}/answers{world}.json"], **few
        )
        jobs[f"look {world}"] = Job(["search", *use, *on, "--query=a red fox", "--k=12"], **few)
    encode = ["encode", *use, f"--input={data}", "--shard_size=7"]
    jobs["encode 1"] = Job([*encode, f"--output={folder}/vectors1"])
    jobs["encode 3"] = Job([*encode, f"--output={folder}/vectors3"], 3)
    kept = [f"--embeddings={folder}/vectors1", "--k=60"]
    jobs["shards 1"] = Job(["search", *use, *on, *kept, f"--output={folder}/shards1.trec"])
    jobs["shards 3"] = Job(["search", *use, *on, *kept, f"--output={folder}/shards3.trec"], 3)
    fresh = [f"--embeddings={folder}/fresh", "--k=60"]
    jobs["fresh 2"] = Job(["search", *use, *on, *fresh, f"--output={folder}/fresh2.trec"], 2)
    for world in (1, 2):
        mine = ["mine", *use, *on, f"--embeddings={folder}/vectors1", "--range_max=20"]
        jobs[f"mine {world}"] = Job([*mine, f"--output={folder}/mined{world}.jsonl"], world)
    jobs["mine in memory"] = Job(["mine", *use, *on, f"--output={folder}/memory.jsonl"], 2)
    jobs["index"] = Job(
        ["search", *use, *on, "--factory=HNSW8", f"--output={folder}/index.trec"], 2
    )
    jobs["bm25 2"] = Job(["search", "--model=bm25", *on, f"--output={folder}/bm25.trec"], 2)
    return folder, run_jobs(jobs, folder / "jobs")


def assert_same_run(found: dict, expected: dict) -> None:
    """Equal scores to rounding.

    Passages may change places only if their scores are equal to rounding.
    """
    assert found.keys() == expected.keys()
    for query, hits in found.items():
        scores, expected_scores = dict(hits), dict(expected[query])
        assert [score for _, score in hits] == pytest.approx(
            [score for _, score in expected[query]], abs=1e-5
        )
        common = scores.keys() & expected_scores.keys()
        assert [scores[key] for key in common] == pytest.approx(
            [expected_scores[key] for key in common], abs=1e-5
        )
        last = expected[query][-1][1]
        assert all(
            expected_scores.get(key, last) < last + 1e-5
            for key in expected_scores.keys() ^ scores.keys()
        )


def test_a_search_in_several_processes_finds_what_one_finds(searches):
    folder, outcomes = searches
    world = 3
    for verb in ("search", "evaluate", "answers"):
        outcomes[f"{verb} {world}"].check()
    assert_same_run(read_run(folder / f"{world}.trec"), read_run(folder / "1.trec"))
    for name in ("{}.json", "answers{}.json"):
        one, several = (
            json.loads((folder / name.format(count)).read_text()) for count in (1, world)
        )
        assert several["mean"] == pytest.approx(one["mean"], abs=1e-6)
        assert several.keys() == one.keys()


def test_the_runs_hold_ties_and_passages_of_every_slice(searches):
    folder, _ = searches
    lines = [line.split() for line in (folder / "1.trec").read_text().splitlines()]
    assert len(lines) == 10 * 60
    assert len({line[2] for line in lines if line[2].startswith("p")}) > 30
    scores = [line[4] for line in lines if line[2].startswith("twin")]
    assert len(set(scores)) < len(scores) / 2


@pytest.mark.parametrize("verb", ["search", "evaluate", "answers", "look"])
def test_the_main_process_alone_prints_what_one_process_prints(verb, searches):
    _, outcomes = searches
    world = 3
    one, several = outcomes[f"{verb} 1"].check(), outcomes[f"{verb} {world}"].check()

    def said(text: str) -> str:
        # rounding decides the order of passages with the same text
        return re.sub(r"twin\d+", "twin", text.replace(f"{world}.trec", "1.trec"))

    assert said(several.out[0]) == said(one.out[0]) != ""
    assert not any(several.out[1:])


def test_processes_share_the_shards_of_a_folder(searches):
    """11 shards among 3; what they find is what one process finds in them."""
    folder, outcomes = searches
    for name in ("encode 1", "encode 3", "shards 1", "shards 3"):
        outcomes[name].check()
    one, three = (sorted((folder / name).iterdir()) for name in ("vectors1", "vectors3"))
    assert [path.name for path in one] == [path.name for path in three]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in three]
    assert_same_run(read_run(folder / "shards3.trec"), read_run(folder / "shards1.trec"))


def test_processes_that_search_make_the_missing_embeddings_together(searches):
    folder, outcomes = searches
    outcomes["fresh 2"].check()
    assert (folder / "fresh" / "manifest.json").is_file()
    assert_same_run(read_run(folder / "fresh2.trec"), read_run(folder / "1.trec"))


def test_an_approximate_index_wants_one_process(searches):
    folder, outcomes = searches
    assert outcomes["index"].codes[0] == 2
    assert "".join(outcomes["index"].err).count("index 'HNSW8' needs one process") == 1
    assert not (folder / "index.trec").exists()


def test_bm25_is_written_once(searches):
    folder, outcomes = searches
    outcome = outcomes["bm25 2"].check()
    assert (folder / "bm25.trec").is_file()
    assert not outcome.out[1]


def test_processes_divide_the_queries_to_mine(searches):
    folder, outcomes = searches
    one, two = outcomes["mine 1"].check(), outcomes["mine 2"].check()
    assert (folder / "mined2.jsonl").read_bytes() == (folder / "mined1.jsonl").read_bytes()
    assert (folder / "mined2.about.json").read_bytes() == (
        folder / "mined1.about.json"
    ).read_bytes()
    assert two.out[0].replace("mined2", "mined1") == one.out[0] != ""
    assert not two.out[1]
    assert outcomes["mine in memory"].codes[0] == 2
    assert "2 processes were started without --embeddings" in "".join(
        outcomes["mine in memory"].err
    )
