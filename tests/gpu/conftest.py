"""Tests on real cards. They share the harness of tests/distributed and are left out where there is no card."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test here, and skips it without enough cards."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            needed = 4 if "four" in item.name else 2
            if torch.cuda.device_count() < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA cards"))
