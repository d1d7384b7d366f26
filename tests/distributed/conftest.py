"""One pool of processes for all tests here: starting torch is the dear part."""

from collections.abc import Iterator

import pytest
from checkpoint_pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Processes that become worlds of 1 to 4 ranks: `ranks.run(size, function, *arguments)`."""
    with Pool() as pool:
        yield pool
