"""What holds for every room: checks change nothing and give reasons, names stay, and the room is complete."""

import ast
import copy
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from everything import Data, Module, NothingToDo, made_for
from omegaconf import OmegaConf
from torch import Tensor, nn

import fasttrain
from fasttrain.bench import find_cases
from fasttrain.callbacks import CATALOGUE
from fasttrain.clock import RunClock
from fasttrain.config import TrainerConfig
from fasttrain.environment import Hardware
from fasttrain.measure import StepProbe
from fasttrain.optimization import Applies, Context, ExampleBatch, Optimization, Refuses, Stage
from fasttrain.plan import make_plan, requested
from fasttrain.randomness import random_state
from fasttrain.recorder import RunRecorder
from fasttrain.trainer import make_trainer

ROOMS = Path(fasttrain.__file__).parent / "callbacks"
CPU = Hardware("cpu", "cpu", "a CPU", 2)

every_room = pytest.mark.parametrize("name", CATALOGUE)


def room(name: str) -> Optimization[Any]:
    # The laws are about its check; what inductor makes of a region takes a minute.
    config = {"backend": "aot_eager"} if name == "compile" else {}
    ((optimization,), _) = requested({name: config}, CATALOGUE)
    return optimization


def snapshot(value: Any) -> Any:
    """Return all that a check could change about a module or batch, in a form that `==` compares."""
    if isinstance(value, Tensor):
        return (value.tolist(), value.stride(), value.dtype, value.device, value.requires_grad, value.grad is None)
    if isinstance(value, nn.Module):
        return {
            "state": {key: snapshot(item) for key, item in value.state_dict(keep_vars=True).items()},
            "order": list(value.state_dict()),
            "modes": {path: module.training for path, module in value.named_modules()},
            "types": {path: type(module) for path, module in value.named_modules()},
            "attributes": {path: sorted(vars(module)) for path, module in value.named_modules()},
            "hooks": {path: len(module._forward_hooks) for path, module in value.named_modules()},
        }
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [snapshot(item) for item in value]
    return value


def flags() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "random": snapshot(random_state()),
    }


@pytest.fixture
def each_probe_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever differs from the plain fp32 step measures faster, so that what is optional is chosen."""

    def timed(self: StepProbe, prepare: Any = None, autocast: Any = None, **options: Any) -> list[float]:
        return [100.0 if prepare is None and autocast is None else 50.0]

    monkeypatch.setattr(StepProbe, "sample_ms", timed)


def test_the_catalogue_names_every_room_by_its_own_name() -> None:
    folders = {path.parent.name for path in ROOMS.glob("*/optimization.py")}
    assert set(CATALOGUE) == folders
    for name, cls in CATALOGUE.items():
        assert cls.name == name
        assert cls.__module__ == f"fasttrain.callbacks.{name}.optimization"


@every_room
def test_a_room_is_complete(name: str) -> None:
    folder = ROOMS / name
    for file in ("README.md", "__init__.py", "optimization.py", "reference.py", "bench.py"):
        assert (folder / file).is_file(), f"{name} has no {file}"
    cls = CATALOGUE[name]
    readme = (folder / "README.md").read_text()
    assert f"# {name}" in readme.splitlines()[0]
    assert f"*{cls.grade}*" in readme, "the README states the grade"
    assert f"{name}: " in readme, "the README shows the YAML"
    for field in fields(cls.config_class):
        assert f"`{field.name}`" in readme, f"the README's table lacks {field.name}"
    assert cls.summary
    assert "\n" not in cls.summary
    assert cls.grade in ("same numbers", "same quality")
    assert isinstance(cls.stage, Stage)


@every_room
def test_a_room_has_bench_cases_of_its_own_name(name: str) -> None:
    cases = find_cases([f"fasttrain.callbacks.{name}"])
    assert cases
    assert {case.subject for case in cases} == {name}
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.summary for case in cases)


@every_room
def test_orders_and_conflicts_name_other_rooms(name: str) -> None:
    cls = CATALOGUE[name]
    named = cls.before | cls.after | set(cls.conflicts)
    assert named <= set(CATALOGUE) - {name}
    assert all(cls.conflicts.values()), "a conflict says why"


def documented_fields(cls: type) -> Iterator[str]:
    """Yield the fields of a class, those of its bases too, that a string literal follows."""
    for base in cls.__bases__:
        if is_dataclass(base):
            yield from documented_fields(base)
    (body,) = [node.body for node in ast.parse(inspect.getsource(cls)).body if isinstance(node, ast.ClassDef)]
    for field, after in itertools.pairwise(body):
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and documented:
            yield field.target.id


@every_room
def test_the_configuration_is_a_frozen_dataclass_with_a_line_for_each_field(name: str) -> None:
    cls = CATALOGUE[name].config_class
    assert is_dataclass(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert {field.name for field in fields(cls)} == set(documented_fields(cls))
    assert OmegaConf.to_object(OmegaConf.structured(cls)) == cls(), "every field has a default that YAML can say"


@every_room
def test_a_check_changes_nothing(name: str) -> None:
    torch.manual_seed(7)
    module, example = Module(), ExampleBatch(Data())
    batch = example()
    before = copy.deepcopy((snapshot(module), snapshot(batch), flags()))
    optimization = room(name)
    verdict = optimization.check(Context(module, Data(), CPU, example=example))
    assert isinstance(verdict, (Applies, Refuses))
    after = (snapshot(module), snapshot(example()), flags())
    assert after == before


@every_room
def test_a_check_that_draws_its_own_batch_leaves_the_order_of_samples_alone(name: str) -> None:
    def order(ask: bool) -> list[Any]:
        torch.manual_seed(7)
        module, data = Module(), Data()
        if ask:
            room(name).check(Context(module, data, CPU, example=ExampleBatch(data)))
        return [batch[1].tolist() for batch in data.train_dataloader()]

    assert order(ask=True) == order(ask=False)


@every_room
@pytest.mark.parametrize("with_example", [True, False])
def test_it_refuses_with_a_reason_where_it_cant_act(name: str, with_example: bool) -> None:
    example = ExampleBatch(Data()) if with_example else None
    verdict = room(name).check(Context(NothingToDo(), Data(), CPU, example=example))
    assert isinstance(verdict, Refuses)
    assert len(verdict.reason.split()) > 5, "a reason that a user can act on"
    assert "\n" not in verdict.reason
    assert not verdict.reason.endswith("."), "it is shown behind a dash, and may go on"


@every_room
def test_applied_it_says_what_it_changed_and_names_stay(name: str, each_probe_is_faster: None) -> None:
    module, data = made_for(name)
    names = list(module.state_dict())
    shapes = {key: value.shape for key, value in module.state_dict().items()}
    hardware = Hardware.here()
    plan = make_plan([room(name)], context := Context(module, data, hardware, example=ExampleBatch(data)))
    if not torch.cuda.is_available() and any("need an NVIDIA GPU" in entry.verdict.reason for entry in plan.refused):
        pytest.skip(f"{name} acts on a GPU alone")
    if any("needs several processes" in entry.verdict.reason for entry in plan.refused):
        pytest.skip(f"{name} acts on several processes alone")
    assert plan.applying, plan.record()
    attachments = plan.attach(context)
    records: list[Any] = []
    recorder = RunRecorder(plan, RunClock(), 0.0, records.append)
    config = TrainerConfig(accelerator=hardware.kind, max_steps=2)
    trainer = make_trainer(config, attachments, [recorder], [], enable_progress_bar=False)
    trainer.fit(module, datamodule=next((a.data for a in attachments if a.data), data))
    ((row,),) = [record["optimizations"] for record in records]
    assert row["verdict"] == "applies"
    assert row["changes"], "changed nothing"
    assert all(change["path"] and change["what"] and change["count"] >= 1 for change in row["changes"])
    assert list(module.state_dict()) == names
    assert {key: value.shape for key, value in module.state_dict().items()} == shapes
    made_for(name)[0].load_state_dict(module.state_dict())


@every_room
def test_an_unknown_parameter_is_refused(name: str) -> None:
    from fasttrain.errors import ConfigError

    with pytest.raises(ConfigError, match=rf"^optimizations\.{name}: unknown key 'no_such'; "):
        requested({name: {"no_such": 1}}, CATALOGUE)
