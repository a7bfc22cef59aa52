"""What the packages offer is exactly what they say: `__all__` is complete, and every name in it is there."""

from __future__ import annotations

import importlib
import inspect
import types

import pytest

PUBLIC = {
    "engine": {
        "LLM",
        "AsyncLLM",
        "CompletionOutput",
        "EngineArgs",
        "EngineCore",
        "RequestOutput",
        "SamplingParams",
        "__version__",
    },
    "engine.scheduler": {
        "Action",
        "ConfigError",
        "DuplicateError",
        "Plan",
        "PreemptionMode",
        "ProtocolError",
        "QueueCounts",
        "RefusedError",
        "ScheduledSequence",
        "Scheduler",
        "SchedulerConfig",
        "SchedulerError",
        "SequenceGroup",
        "Status",
    },
}


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_the_public_names_are_exactly_these(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package])
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("package", [*sorted(PUBLIC), "engine.errors"])
def test_nothing_public_is_left_out_of_all(package: str) -> None:
    module = importlib.import_module(package)
    ours = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.partition(".")[0] in ("engine", "kernels", "spec")
    }
    assert ours <= set(module.__all__)


def test_every_public_class_and_function_says_what_it_is() -> None:
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert (value.__doc__ or "").strip(), f"{package}.{name} has no docstring"
                assert not (value.__doc__ or "").startswith(f"{name}("), f"{package}.{name}: a generated docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import engine

    with pytest.raises(AttributeError, match="has no attribute 'LLMEngine'"):
        engine.LLMEngine  # noqa: B018
