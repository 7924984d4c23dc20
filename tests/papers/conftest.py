"""These tests take thousands of tiny steps and look at values; the shapes are checked by all the other tests."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Two threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="package")
def unchecked_shapes() -> Iterator[None]:
    """Checking every annotation of every step takes five times as long as the step."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
