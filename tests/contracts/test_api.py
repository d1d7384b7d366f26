"""The names that `from shardwise import ...` offers, and that none of them is loaded before it is asked for."""

import subprocess
import sys

import pytest

import shardwise


def test_every_name_has_a_home() -> None:
    assert set(shardwise.__all__) == {*shardwise._HOMES, "__version__"}  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("name", [name for name in shardwise.__all__ if not name.startswith("_")])
def test_every_name_is_there(name: str) -> None:
    assert getattr(shardwise, name) is not None


def test_plan_by_the_api() -> None:
    answer = shardwise.plan(
        shardwise.Job(model=shardwise.model("qwen2.5-7b"), tuning="any"), shardwise.parse_gpus("2xrtx-5090")
    )
    assert isinstance(answer, shardwise.Plan)
    assert answer.recommended is not None
    assert answer.recommended.strategy.tuning in ("lora", "qlora")
    assert "7,615,616,512 parameters" in shardwise.explain(answer)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        getattr(shardwise, "plann")  # noqa: B009  (the name is meant to be missing)


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, shardwise; print([m for m in sys.modules if m.startswith('shardwise.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
