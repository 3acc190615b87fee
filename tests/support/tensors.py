"""Inputs and outputs of models, as tests write them."""

from collections.abc import Sequence

from farm.runner.documents import TensorInfo


def tensor(name: str, dtype: str, shape: Sequence[int | str | None] | None) -> TensorInfo:
    """An input or output of a model."""
    return {"name": name, "dtype": dtype, "shape": shape}
