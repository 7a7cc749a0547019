"""Write contaccum/catalog/mteb.tsv from the installed MTEB: pip install mteb, then python
scripts/mteb_names.py.

Each line has a task's name, its repository on the Hub, the commit that MTEB pins, and its subsets.
Tasks are skipped that are private, have more than text, or load their data with their own code,
because their repositories have another layout.
"""

from pathlib import Path

from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.get_tasks import get_tasks

OWN_CODE = ("load_data", "dataset_transform")


def plain(task: object) -> bool:
    return (
        isinstance(task, AbsTaskRetrieval)
        and task.metadata.is_public is not False
        and list(task.metadata.modalities) == ["text"]
        and set(task.metadata.dataset) == {"path", "revision"}
        and all(getattr(type(task), name) is getattr(AbsTaskRetrieval, name) for name in OWN_CODE)
    )


tasks = get_tasks(task_types=["Retrieval"], exclude_superseded=False, exclude_aggregate=True)
lines = []
for task in sorted(filter(plain, tasks), key=lambda task: task.metadata.name.casefold()):
    languages = task.metadata.eval_langs
    subsets = ",".join(languages) if isinstance(languages, dict) else ""
    found = (
        task.metadata.name,
        *(task.metadata.dataset[key] for key in ("path", "revision")),
        subsets,
    )
    lines.append("\t".join(found).rstrip())
target = Path(__file__).parent.parent / "contaccum" / "catalog" / "mteb.tsv"
target.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
print(f"{len(lines)} tasks")
