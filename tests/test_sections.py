"""The `module` and `data` sections: the class a path names, its parameters as a schema, and an instance."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import torch
from omegaconf import OmegaConf

from fasttrain.config import Layer, apply_override, override_values
from fasttrain.errors import ConfigError
from fasttrain.sections import import_class, instantiate, schema_of, take_class, take_class_override


@dataclass(frozen=True)
class Config:
    width: int = 8
    size: tuple[int, int] = (1, 2)


class Color(Enum):
    RED = 1
    BLUE = 2


class Keeps:
    def __init__(self, **values: Any) -> None:
        self.values = values


class OneConfig:
    def __init__(self, config: Config) -> None:
        self.config = config


class ConfigAndMore:
    def __init__(self, config: Config, lr: float, other: Config = Config(3)) -> None:
        self.config, self.lr, self.other = config, lr, other


class Foreign:
    """Parameters as users write them, annotated in every way or not at all."""

    def __init__(  # type: ignore[no-untyped-def]
        self,
        count: int = None,  # type: ignore[assignment] # noqa: RUF013
        rate: Optional[float] = None,  # noqa: UP045
        either: Union[int, str] = 3,  # noqa: UP007
        mode: Literal["x", "y"] = "x",
        color: Color = Color.RED,
        folder: Path = Path("."),
        betas=(0.9, 0.99),
        steps: Sequence[int] = (1, 2),
        options: dict = {},  # noqa: B006
        parts: list[int] = [1],  # noqa: B006
        activation: Callable[[Any], Any] = torch.relu,
        dtype: torch.dtype = torch.float32,
        late: "int" = 3,
        *args: int,
        flag: bool = True,
        unknown: "NotImported" = None,  # type: ignore[name-defined] # noqa: F821
    ) -> None:
        self.values = {key: value for key, value in locals().items() if key not in ("self", "args")}


class NoParameters:
    pass


def make(cls: type, *overrides: str) -> Any:
    schema = schema_of(cls)
    holder = OmegaConf.create({"section": {} if schema is None else schema})
    for key, value in override_values(overrides):
        apply_override(holder.section, key, value)
    return instantiate(cls, holder.section, "module")


def test_foreign_defaults_stay_as_they_are() -> None:
    assert make(Foreign).values == Foreign().values


def test_foreign_parameters_by_type() -> None:
    made = make(
        Foreign, "count=5", "rate=1e-2", "either=abc", "mode=y", "color=BLUE", "folder=/tmp", "betas.0=0.5",
        "steps=[3]", "options={a: 1}", "parts.0=7", "flag=false",
    )  # fmt: skip
    assert made.values["count"] == 5
    assert made.values["rate"] == 0.01
    assert made.values["either"] == "abc"
    assert made.values["mode"] == "y"
    assert made.values["color"] is Color.BLUE or made.values["color"] == "BLUE"
    assert Path(made.values["folder"]) == Path("/tmp")
    assert made.values["betas"] == (0.5, 0.99)
    assert list(made.values["steps"]) == [3]
    assert made.values["options"] == {"a": 1}
    assert made.values["parts"] == [7]
    assert made.values["flag"] is False
    assert Foreign().values["parts"] == [1], "the class's own default must not be changed"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("colour=1", "unknown key 'colour'; did you mean 'color'?"),
        ("flag=maybe", "flag is maybe; true or false is expected."),
    ],
)
def test_a_wrong_parameter(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(Foreign, override)
    assert str(caught.value) == sentence


def test_a_config_dataclass_is_the_schema() -> None:
    assert make(OneConfig, "width=3", "size.0=9").config == Config(3, (9, 2))
    with pytest.raises(ConfigError, match=r"^unknown key 'widht'; did you mean 'width'\?$"):
        make(OneConfig, "widht=3")


def test_dataclasses_among_other_parameters() -> None:
    made = make(ConfigAndMore, "lr=0.5", "config.width=4", "other.size.1=7")
    assert (made.config, made.lr, made.other) == (Config(4), 0.5, Config(3, (1, 7)))


def test_a_required_parameter() -> None:
    with pytest.raises(ConfigError, match=r"^module\.lr must be set for ConfigAndMore\.$"):
        make(ConfigAndMore)


def test_arbitrary_keywords() -> None:
    assert schema_of(Keeps) is None
    assert make(Keeps, *()).values == {}
    assert instantiate(Keeps, OmegaConf.create({"a": [1], "b": {"c": 2}}), "module").values == {"a": [1], "b": {"c": 2}}


def test_a_class_without_parameters_takes_none() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key 'a'; none are known here$"):
        make(NoParameters, "a=1")
    assert isinstance(make(NoParameters), NoParameters)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("LitThing", "module: 'LitThing' isn't a dotted path; write it like my_project.models.LitThing."),
        (".LitThing", "module: '.LitThing' isn't a dotted path; write it like my_project.models.LitThing."),
        ("..a.LitThing", "module: '..a.LitThing' isn't a dotted path; write it like my_project.models.LitThing."),
        ("my-project.Lit", "module: 'my-project.Lit' isn't a dotted path; write it like my_project.models.LitThing."),
        ("a/b.py", "module: 'a/b.py' isn't a dotted path; write it like my_project.models.LitThing."),
        (
            "no_such_project.models.Lit",
            "module: there is no module 'no_such_project' for 'no_such_project.models.Lit'; install it or run from "
            "the folder that holds it.",
        ),
        (
            "collections.no_such.Lit",
            "module: there is no module 'collections.no_such' for 'collections.no_such.Lit'; install it or run from "
            "the folder that holds it.",
        ),
        ("collections.OrderdDict", "module: 'collections' has no class 'OrderdDict'; did you mean 'OrderedDict'?"),
        ("collections.namedtuple", "module: 'collections' has no class 'namedtuple'; did you mean 'UserDict'?"),
    ],
)
def test_a_wrong_class_path(path: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_class(path, "module")
    if "namedtuple" in path:  # which class is nearest is Python's affair
        assert str(caught.value).startswith("module: 'collections' has no class 'namedtuple'; ")
    else:
        assert str(caught.value) == sentence


def test_an_import_error_inside_the_users_code_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_absent\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_absent"):
        import_class("needs_more.Lit", "module")
    assert "needs_more" not in sys.modules


def test_take_class_splits_values_from_the_class() -> None:
    taken, path = take_class(Layer("r", OmegaConf.create({"module": {"class": "a.B", "width": 3}})), "module")
    assert (path, taken.values) == ("a.B", {"module": {"width": 3}})
    taken, path = take_class(Layer("r", OmegaConf.create({"module": "a.B"})), "module")
    assert (path, taken.values) == ("a.B", {"module": {}})
    for values in ({}, {"module": None}, {"module": {"width": 3}}):
        before = Layer("r", OmegaConf.create(values))
        taken, path = take_class(before, "module")
        assert (path, taken.values) == (None, before.values)


@pytest.mark.parametrize(
    ("value", "said"), [([1], "module is [1]"), ({"class": [1]}, "module.class is [1]"), (3, "module is 3")]
)
def test_a_class_that_is_no_path(value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        take_class(Layer("r.yaml", OmegaConf.create({"module": value})), "module")
    rest = "the dotted path of a class is expected, like my_project.models.LitThing."
    assert str(caught.value) == f"r.yaml: {said}; {rest}"


def test_take_class_override() -> None:
    items = override_values(["module=a.B", "module.width=3", "data=c.D", "module={class: e.F, width: 4}"])
    path, rest = take_class_override(items, "module")
    assert path == "e.F"
    assert rest == [("module.width", 3), ("data", "c.D"), ("module", {"width": 4})]
    with pytest.raises(ConfigError, match=r"^module is null; the dotted path of a class is expected"):
        take_class_override([("module", None)], "module")
