"""Write and read a shard as one Parquet file, which databases and data-frame libraries can read.

The columns are ``id`` (string), ``text`` (string, only on request) and ``embedding`` (fixed-size list of float16 or float32).
"""

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from contaccum.errors import InputError

if TYPE_CHECKING:
    from contaccum.retrieval.shards import Shard


def write_parquet(file: BinaryIO, shard: "Shard") -> None:
    """Write a shard. The column ``text`` is written if the shard has texts."""
    values = pa.array(np.ascontiguousarray(shard.vectors).reshape(-1))
    columns = {"id": pa.array(shard.ids, pa.string())}
    columns |= {} if shard.texts is None else {"text": pa.array(shard.texts, pa.string())}
    columns["embedding"] = pa.FixedSizeListArray.from_arrays(values, shard.vectors.shape[1])
    pq.write_table(pa.table(columns), file, use_dictionary=False)  # if all values differ, a dictionary takes more space


def read_parquet(path: Path, rows: int, dimension: int, dtype: str) -> tuple[list[str], np.ndarray]:
    """Return the ids and the vectors (rows, dimension) of a file that ``write_parquet`` wrote.

    Raises InputError if this is not a Parquet file, or if its columns, types or sizes are wrong.
    """
    kind = pa.list_(pa.from_numpy_dtype(dtype), dimension)
    expected = f"{rows} rows with the columns id (string) and embedding ({dtype}, {dimension} numbers)"
    try:
        with pq.ParquetFile(path) as file:
            found = {field.name: field.type for field in file.schema_arrow}
            if (file.metadata.num_rows, found.get("id"), found.get("embedding")) != (rows, pa.string(), kind):
                raise InputError(
                    f"{path}: has {file.metadata.num_rows} rows with the columns {found}; expected {expected}"
                )
            table = file.read(["id", "embedding"])
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a Parquet file ({error}); expected {expected}") from error
    vectors = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return table["id"].to_pylist(), vectors.reshape(rows, dimension)
