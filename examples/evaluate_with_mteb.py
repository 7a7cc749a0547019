"""Evaluate a model of contaccum with MTEB, whose tasks and metrics public leaderboards use.

    pip install '.[sentence-transformers]' mteb
    python examples/evaluate_with_mteb.py --model runs/mine/model --tasks SciFact NFCorpus

MTEB downloads the data of its tasks. --data FOLDER runs the code of a task on your own BEIR folder
instead, without a network. Do not report such scores as those of the task.
"""

import argparse
from typing import Any

import mteb
from datasets import Dataset
from sentence_transformers import SentenceTransformer

from contaccum.data.dataset import open_dataset


def use_folder(task: Any, folder: str) -> None:
    """Let the task use the passages, queries and test judgements of a BEIR folder instead of its
    own."""
    judged = open_dataset(folder, "test").retrieval_set
    passages = [
        {"id": row["id"], "title": row["title"], "text": row["text"]} for row in judged.corpus
    ]
    queries = [{"id": name, "text": text} for name, text in judged.queries.items()]
    data = {
        "corpus": Dataset.from_list(passages),
        "queries": Dataset.from_list(queries),
        "top_ranked": None,
    }
    task.dataset = {"default": {"test": {**data, "relevant_docs": judged.qrels}}}
    task.data_loaded = True


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", required=True, help="folder of a model: runs/NAME/model")
parser.add_argument(
    "--tasks", nargs="+", default=["SciFact"], help="names of retrieval tasks of MTEB"
)
parser.add_argument("--data", help="BEIR folder to use instead of the tasks' own data")
given = parser.parse_args()

tasks = mteb.get_tasks(tasks=given.tasks)
for task in tasks if given.data else ():
    use_folder(task, given.data)
# mteb calls encode_query and encode_document
model = SentenceTransformer(given.model)
found = mteb.evaluate(model, tasks, cache=None, co2_tracker=False)
for result in found.task_results:
    for split, scores in result.scores.items():
        print(f"{result.task_name} {split} ndcg@10 {scores[0]['ndcg_at_10']:.4f}")
