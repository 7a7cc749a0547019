"""What well-known families of encoders want where their own folders do not say it: pooling, similarity, prefixes.

The entries are what the models' authors published, as it was known to whoever wrote them here: they were not compared with the
cards named beside them. A folder's own words go first, so check those; what a user asks for goes before both.
"""

import re
from typing import Any

_SEARCH = "Represent this sentence for searching relevant passages: "
_SEARCH_ZH = "为这个句子生成表示以用于检索相关文章："  # noqa: RUF001
_TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"

FAMILIES: list[tuple[str, dict[str, str]]] = [
    # https://huggingface.co/intfloat/multilingual-e5-large-instruct
    (r"multilingual-e5-large-instruct", {"pooling": "mean", "similarity": "cosine", "query_prefix": f"{_TASK} "}),
    # https://huggingface.co/intfloat/e5-base-v2, https://huggingface.co/intfloat/multilingual-e5-base
    (
        r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?",
        {"pooling": "mean", "similarity": "cosine", "query_prefix": "query: ", "passage_prefix": "passage: "},
    ),
    # https://huggingface.co/BAAI/bge-base-en-v1.5
    (r"bge-(small|base|large)-en(-v1\.5)?", {"pooling": "cls", "similarity": "cosine", "query_prefix": _SEARCH}),
    # https://huggingface.co/BAAI/bge-base-zh-v1.5
    (r"bge-(small|base|large)-zh(-v1\.5)?", {"pooling": "cls", "similarity": "cosine", "query_prefix": _SEARCH_ZH}),
    # https://huggingface.co/BAAI/bge-m3
    (r"bge-m3", {"pooling": "cls", "similarity": "cosine"}),
    # https://huggingface.co/thenlper/gte-base
    (r"gte-(small|base|large)", {"pooling": "mean", "similarity": "cosine"}),
    # https://huggingface.co/Alibaba-NLP/gte-modernbert-base, https://huggingface.co/Alibaba-NLP/gte-multilingual-base
    (r"gte-(modernbert-base|multilingual-base|(base|large)-en-v1\.5)", {"pooling": "cls", "similarity": "cosine"}),
    # https://huggingface.co/nomic-ai/nomic-embed-text-v1.5, https://huggingface.co/nomic-ai/modernbert-embed-base
    (
        r"nomic-embed-text-v1(\.5)?|modernbert-embed-base",
        {
            "pooling": "mean",
            "similarity": "cosine",
            "query_prefix": "search_query: ",
            "passage_prefix": "search_document: ",
        },
    ),
    # https://huggingface.co/Snowflake/snowflake-arctic-embed-m, https://huggingface.co/mixedbread-ai/mxbai-embed-large-v1
    (
        r"snowflake-arctic-embed-(xs|s|m|l)|mxbai-embed-large-v1",
        {"pooling": "cls", "similarity": "cosine", "query_prefix": _SEARCH},
    ),
    # decoder-only: https://huggingface.co/Qwen/Qwen3-Embedding-0.6B, whose task is followed by no space
    (r"qwen3-embedding-(0\.6b|4b|8b)", {"pooling": "last", "similarity": "cosine", "query_prefix": _TASK}),
    # https://huggingface.co/intfloat/e5-mistral-7b-instruct, https://huggingface.co/Salesforce/SFR-Embedding-Mistral
    (
        r"e5-mistral-7b-instruct|sfr-embedding-mistral|linq-embed-mistral",
        {"pooling": "last", "similarity": "cosine", "query_prefix": f"{_TASK} "},
    ),
    # https://huggingface.co/facebook/contriever
    (r"(m?contriever)(-msmarco)?", {"pooling": "mean", "similarity": "dot"}),
]
"""Pattern of the last part of a name or path, and its settings; the first that matches counts."""


def family_settings(name: str) -> dict[str, Any]:
    """Settings of the family that a hub name, or a folder of the same name, belongs to; empty for any other."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    return next((dict(values) for pattern, values in FAMILIES if re.fullmatch(pattern, last)), {})
