"""The configuration: layers merge in order, every wrong value gets one sentence, and the origin of each is known."""

from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from fasttrain.config import (
    CheckpointConfig,
    Layer,
    RunConfig,
    apply_override,
    leaves,
    load_layer,
    merge,
    origins,
    override_values,
    thaw,
)
from fasttrain.errors import ConfigError, nearest
from fasttrain.judgement import parts, yaml_text


@dataclass(frozen=True)
class Inner:
    size: tuple[int, int] = (800, 600)
    betas: Any = (0.9, 0.99)
    kind: Literal["adam", "sgd"] = "adam"


@dataclass
class Outer:
    count: int = 3
    rate: float | None = 0.1
    name: str = "x"
    on: bool = False
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    rooms: dict[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    anything: Any = None
    limit: int | float | None = None


def schema() -> DictConfig:
    return thaw(OmegaConf.structured(Outer))


def overridden(*items: str) -> Any:
    config = schema()
    for key, value in override_values(items):
        apply_override(config, key, value)
    return OmegaConf.to_object(config)


def layer(values: Any) -> Layer:
    return Layer("mine.yaml", OmegaConf.create(values))


@pytest.mark.parametrize(
    ("item", "path", "expected"),
    [
        ("count=7", "count", 7),
        ("rate=1e-3", "rate", 0.001),
        ("rate=2", "rate", 2.0),
        ("rate=null", "rate", None),
        ("name=3", "name", "3"),
        ("name=a=b", "name", "a=b"),
        ("name='a: [b'", "name", "a: [b"),
        ("name=", "anything", None),
        ("on=true", "on", True),
        ("limit=2", "limit", 2),
        ("limit=0.5", "limit", 0.5),
        ("names=[c, d, e]", "names", ["c", "d", "e"]),
        ("names=[]", "names", []),
        ("names.0=z", "names", ["z", "b"]),
        ("names[1]=z", "names", ["a", "z"]),
        ("inner.size=[1,2]", "inner.size", (1, 2)),
        ("inner.size.0=9", "inner.size", (9, 600)),
        ("inner.size[1]=9", "inner.size", (800, 9)),
        ("inner.betas.1=0.5", "inner.betas", (0.9, 0.5)),
        ("inner.kind=sgd", "inner.kind", "sgd"),
        ("rooms={a: {b: 1}}", "rooms", {"a": {"b": 1}}),
        ("inner={kind: sgd}", "inner", Inner(kind="sgd")),
        ("anything={a: [1, {b: 2}]}", "anything", {"a": [1, {"b": 2}]}),
        (" count =7", "count", 7),
    ],
)
def test_an_override_means_what_it_says(item: str, path: str, expected: Any) -> None:
    value = overridden(item) if path != "anything" or "anything" in item else overridden("anything=")
    for name in path.split("."):
        value = getattr(value, name)
    assert value == expected
    assert type(value) is type(expected)


def test_a_reference_is_looked_up_where_the_value_ends_up() -> None:
    config = schema()
    for key, value in override_values(["inner.size=['${count}', 5]", "name=${count}", "rooms={a: '${rate}'}"]):
        apply_override(config, key, value)
    OmegaConf.resolve(config)
    assert (config.inner.size[0], config.name, config.rooms.a) == (3, "3", 0.1)


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("count", "'count' isn't an override: write key=value, for instance trainer.max_epochs=3."),
        ("=3", "'=3' isn't an override: write key=value, for instance trainer.max_epochs=3."),
        (
            "names=[a",
            "the value in 'names=[a' can't be read: did not find expected ',' or ']'; quote the whole of it in the "
            "shell.",
        ),
        ("cuont=3", "unknown key 'cuont'; did you mean 'count'?"),
        ("inner.kindd=sgd", "unknown key 'inner.kindd'; did you mean 'kind'?"),
        ("iner.kind=sgd", "unknown key 'iner.kind'; did you mean 'inner'?"),
        ("inner.zzz=3", "unknown key 'inner.zzz'; known: betas, kind, size"),
        ("inner={kind: sgd, sizes: 3}", "unknown key 'inner.sizes'; did you mean 'size'?"),
        ("count=abc", "count is abc; an integer is expected."),
        ("count=1.5", "count is 1.5; an integer is expected."),
        ("count=1e3", "count is 1000.0; an integer is expected."),
        ("count=true", "count is true; an integer is expected."),
        ("count=null", "count is null; an integer is expected."),
        ("count=", "count is null; an integer is expected."),
        ("count=[1]", "count is [1]; an integer is expected."),
        ("count={a: 1}", "count is {a: 1}; an integer is expected."),
        ("rate=fast", "rate is fast; a number or null is expected."),
        ("on=perhaps", "on is perhaps; true or false is expected."),
        ("name=[a]", "name is [a]; text is expected."),
        ("names=a", "names is a; a list is expected."),
        ("names={a: 1}", "names is {a: 1}; a list is expected."),
        ("inner=3", "inner is 3; a mapping is expected."),
        ("inner={kind: adamw}", "inner.kind is adamw; one of adam, sgd is expected."),
        ("inner.kind=adamw", "inner.kind is adamw; one of adam, sgd is expected."),
        ("inner.size=[1,2,3]", "inner.size is [1, 2, 3]; a list of 2 is expected."),
        ("inner.size=800", "inner.size is 800; a list of 2 is expected."),
        ("inner.size.0=a", "inner.size.0 is a; an integer is expected."),
        ("limit=half", "limit is half; a number or null is expected."),
        ("limit=true", "limit is true; a number or null is expected."),
        ("count.x=3", "unknown key 'count.x': count is a single value."),
        (
            "names.5=z",
            "there is no item '5' in names, which holds 2 items, numbered from 0; give the whole list: names='[...]'.",
        ),
        (
            "names.first=z",
            "there is no item 'first' in names, which holds 2 items, numbered from 0; give the whole list: "
            "names='[...]'.",
        ),
        (
            "inner.size[2]=1",
            "there is no item '2' in inner.size, which holds 2 items, numbered from 0; give the whole list: "
            "inner.size='[...]'.",
        ),
    ],
)
def test_a_wrong_override_gets_its_sentence(item: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(item)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"cuont": 3}, "mine.yaml: unknown key 'cuont'; did you mean 'count'?"),
        ({"count": 1, "inner": {"kindd": "x"}}, "mine.yaml: unknown key 'inner.kindd'; did you mean 'kind'?"),
        ({"inner": {"size": [1]}}, "mine.yaml: inner.size is [1]; a list of 2 is expected."),
        ({"inner": [1]}, "mine.yaml: inner is [1]; a mapping is expected."),
        ({"inner": "abc"}, "mine.yaml: inner is abc; a mapping is expected."),
        ({"inner": None}, "mine.yaml: inner is null; a mapping is expected."),
        ({"names": {"a": 1}}, "mine.yaml: names is {a: 1}; a list is expected."),
        ({"rooms": ["a"]}, "mine.yaml: rooms is [a]; a mapping is expected."),
        ({"count": {"a": 1}}, "mine.yaml: count is {a: 1}; an integer is expected."),
        ({3: 4}, "mine.yaml: unknown key '3'; known: anything, count, inner, limit, name, names, on, rate, rooms"),
    ],
)
def test_a_wrong_layer_gets_its_sentence(values: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merge(schema(), [layer({"count": 1}), layer(values)])
    assert str(caught.value) == sentence


def test_later_layers_win_and_lists_are_replaced() -> None:
    config = merge(schema(), [layer({"count": 1, "names": ["q"], "inner": {"kind": "sgd"}}), layer({"count": 2})])
    assert (config.count, list(config.names), config.inner.kind, config.rate) == (2, ["q"], "sgd", 0.1)


def test_origins_name_the_last_layer_that_set_each_leaf() -> None:
    base = Layer("base", OmegaConf.create({"count": 1, "inner": {"kind": "sgd"}, "rooms": {"a": {}}}))
    top = Layer("top", OmegaConf.create({"count": 2, "inner": {}, "rooms": {"a": {"b": 1}}}))
    config = merge(schema(), [base, top])
    origin = origins(config, [base, top])
    assert set(origin) == {key for key, _ in leaves(config)}
    assert origin["count"] == "top"
    assert origin["inner.kind"] == "base"
    assert origin["inner.size"] == "default"
    assert origin["rooms.a.b"] == "top"


def test_leaves_keep_lists_whole_and_unresolved() -> None:
    config = OmegaConf.create({"a": {"b": [1, "${c}"], "t": (1, 2)}, "c": None, "e": {}, "m": "???"})
    assert dict(leaves(config)) == {"a.b": [1, "${c}"], "a.t": (1, 2), "c": None, "e": {}, "m": "???"}


def test_thaw_reaches_every_depth() -> None:
    config = OmegaConf.structured(make_dataclass("Holder", [("inner", Inner, field(default_factory=Inner))]))
    thaw(config)
    config.inner.kind = "sgd"
    assert config.inner.kind == "sgd"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: 1\na: 2\n", "line 2: found duplicate key a."),
        (b"a:\n\tb: 1\n", "line 2: found character '\\t' that cannot start any token."),
        (b"a: [1, 2\n", "line 2: did not find expected ',' or ']'."),
        (b"a: caf\xe9\n", "'utf-8' codec can't decode byte 0xe9 in position 6: invalid continuation byte."),
    ],
)
def test_a_file_that_is_no_yaml(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_layer(path)
    # The YAML libraries word a tab's problem differently; the line is what helps.
    assert str(caught.value).startswith(f"{path} can't be read as YAML: {problem.partition(':')[0]}")
    if "\\t" not in problem:
        assert str(caught.value) == f"{path} can't be read as YAML: {problem}"


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match=r"r\.yaml holds a list; a mapping of keys to values was expected\.$"):
        load_layer(path)
    with pytest.raises(ConfigError, match=r"gone\.yaml does not exist\.$"):
        load_layer(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match=r"can't be read as YAML: .*Is a directory"):
        load_layer(tmp_path)


def test_an_empty_file_is_an_empty_layer(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("# nothing yet\n")
    assert load_layer(path).values == {}


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_refuses(seed: int) -> None:
    with pytest.raises(ConfigError, match=f"^seed is {seed}; it must be 0 to 4294967295, NumPy takes no other.$"):
        RunConfig(seed=seed)


@pytest.mark.parametrize("name", ["every_n_steps", "every_n_epochs", "every_n_minutes"])
def test_a_checkpoint_interval_that_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^checkpoint\.{name} is 0; it must be above 0, or null for never\.$"):
        CheckpointConfig(**{name: 0})
    CheckpointConfig(**{name: None})
    CheckpointConfig(**{name: 1})


class Color(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.001, "abc", "true", "3", "a: b", "", [1, "x"], {"a": {"b": None}}, {}, []]
)
def test_yaml_text_is_read_back_as_the_same_value(value: Any) -> None:
    text = yaml_text(value)
    assert "\n" not in text
    assert yaml.safe_load(text) == value


def test_yaml_text_of_what_yaml_has_no_word_for() -> None:
    assert yaml_text((1, 2)) == "[1, 2]"
    assert yaml_text(Color.RED) == "RED"
    assert yaml_text(Path("a/b")) == "a/b"


def test_parts() -> None:
    assert parts("a.b[0].c") == parts("a.b.0.c") == ["a", "b", "0", "c"]
    assert parts("") == []


def test_nearest() -> None:
    assert nearest("max_epoch", ["max_epochs", "seed"]) == "did you mean 'max_epochs'?"
    assert nearest("qqq", ["b", "a"]) == "known: a, b"
    assert nearest("qqq", []) == "none are known here"
