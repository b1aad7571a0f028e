"""Find a recipe, resolve it for a machine, and build what it names."""

import copy
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from fasttrain.callbacks import CATALOGUE
from fasttrain.config import CONFIGS
from fasttrain.environment import Hardware
from fasttrain.errors import ConfigError
from fasttrain.recipe import build, find_recipe, recipe_names, resolve

CPU = Hardware("cpu", "cpu", "a CPU", 2)
# In `compile`'s regions other rooms' modules run as plain operators; the others are for users who know that they want
# them. Dropout's numbers are the same for one mask only.
BY_NAME_ONLY = {
    "compile", "async_scoring", "dali_loader", "evaluation_cache", "evaluation_ranks", "fp8_linear", "frozen_stem",
    "graph_evaluation", "sequence_packing",
}  # fmt: skip
FULL: dict[str, Any] = {name: {} for name in CATALOGUE if name not in BY_NAME_ONLY}
EXACT: dict[str, Any] = {
    name: {} for name in FULL if CATALOGUE[name].grade == "same numbers" and name != "layer_norm_dropout"
}
GPU = Hardware("gpu", "cuda:0", "a GPU", 16, (9, 0), 140 * 2**30)

SHAPES = """
recipe: mine
module: {class: shapes.model.LitClassifier, width: 4}
data: shapes.data.LitShapes
"""
PRESETS = """
trainer: {max_epochs: 9}
preset_for: {cpu: small, gpu: full}
presets:
  small: {trainer: {max_epochs: 2}, data: {size: 8}, seed: 5}
  full: {trainer: {precision: bf16-mixed}}
"""


@pytest.fixture
def write(tmp_path: Path, foreign_project: Path) -> Any:
    def to_file(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return to_file


def refused(path: Path, overrides: Iterable[str] = (), hardware: Hardware = CPU) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(path, overrides, hardware)
    return str(caught.value)


def test_layers_in_order(write: Any) -> None:
    path = write(SHAPES + PRESETS)
    on_cpu, on_gpu = resolve(path, [], CPU), resolve(path, [], GPU)
    assert (on_cpu.config.trainer.max_epochs, on_cpu.config.data.size, on_cpu.config.preset) == (2, 8, "small")
    assert on_cpu.config.trainer.accelerator == "cpu"
    assert (on_gpu.config.trainer.max_epochs, on_gpu.config.data.size, on_gpu.config.preset) == (9, 16, "full")
    assert (on_gpu.config.trainer.accelerator, on_gpu.config.trainer.benchmark) == ("gpu", True)
    assert on_cpu.config.module.width == 4
    assert resolve(path, ["trainer.max_epochs=1", "preset=full"], CPU).config.trainer.max_epochs == 1


def test_origins(write: Any) -> None:
    path = write(SHAPES + PRESETS)
    origin = resolve(path, ["module.lr=0.1", "data.size=12", "module.betas.0=0.5"], CPU).origin
    assert origin["module.class"] == origin["data.class"] == "mine.yaml"
    assert origin["module.width"] == origin["recipe"] == "mine.yaml"
    assert origin["module.lr"] == origin["data.size"] == origin["module.betas"] == "command line"
    assert origin["module.dropout"] == "default"
    assert origin["trainer.max_epochs"] == origin["seed"] == origin["preset"] == "preset small"
    assert origin["trainer.accelerator"] == origin["hardware"] == "hardware cpu"
    assert origin["loggers"] == "configs/base"
    other = resolve(path, ["data=shapes.data.LitShapes", "hardware=gpu"], CPU)
    assert other.origin["data.class"] == "command line"
    assert other.config.hardware == "gpu"
    assert other.config.preset == "full"


def test_the_note_says_which_preset_and_how_to_choose_another(write: Any) -> None:
    path = write(SHAPES + PRESETS)
    assert resolve(path, [], CPU).preset_note == ("no GPU here (2 CPU cores): preset 'small' (preset=full overrides)")
    assert resolve(path, [], GPU).preset_note == "a GPU, 140 GiB: preset 'full' (preset=small overrides)"
    assert resolve(path, ["preset=small"], GPU).preset_note is None
    assert resolve(write(SHAPES), [], GPU).preset_note is None


def test_the_name_defaults_to_the_files(write: Any) -> None:
    path = write(SHAPES.replace("recipe: mine", ""), "cells.yaml")
    assert resolve(path, [], CPU).config.recipe == "cells"


def test_sets_of_optimizations(write: Any) -> None:
    own = write(SHAPES + "optimizations: {precision: {least_gain: 0.5}}")
    assert resolve(own, [], CPU).config.optimizations == {"precision": {"least_gain": 0.5}}
    assert resolve(own, ["optimizations=exact"], CPU).config.optimizations == EXACT
    assert resolve(own, ["optimizations=none"], CPU).config.optimizations == {}
    assert resolve(own, ["optimizations.precision=false"], CPU).config.optimizations == {"precision": False}
    assert resolve(own, ["optimizations.channels_last.measure=false"], CPU).config.optimizations == {
        "precision": {"least_gain": 0.5},
        "channels_last": {"measure": False},
    }
    both = resolve(own, ["optimizations=full", "optimizations.precision.least_gain=0.2"], CPU)
    assert both.config.optimizations == {**FULL, "precision": {"least_gain": 0.2}}
    assert both.origin["optimizations.precision.least_gain"] == "command line"
    assert both.origin["optimizations.channels_last"] == "optimizations full"


def test_a_set_named_in_a_recipe_or_preset(write: Any) -> None:
    named = write(SHAPES + "optimizations: exact")
    assert resolve(named, [], CPU).config.optimizations == EXACT
    inside = write(SHAPES + "optimizations: {precision: {}}\npreset: a\npresets: {a: {optimizations: exact}}")
    assert resolve(inside, [], CPU).config.optimizations == EXACT


def test_none_on_the_command_line_wins_over_a_preset(write: Any) -> None:
    path = write(SHAPES + "preset: a\npresets: {a: {optimizations: {precision: {}}}}")
    assert resolve(path, ["optimizations=none"], CPU).config.optimizations == {}


@pytest.mark.parametrize("room", ["true", "null", "false"])
def test_an_override_below_a_room_that_is_only_switched(write: Any, room: str) -> None:
    path = write(SHAPES + f"optimizations: {{channels_last: {room}}}")
    found = resolve(path, ["optimizations.channels_last.measure=false"], CPU).config.optimizations
    assert found == {"channels_last": {"measure": False}}


def test_a_target_from_the_command_line_alone(write: Any) -> None:
    resolved = resolve(write(SHAPES), ["target.metric=val_acc", "target.value=0.5"], CPU)
    assert resolved.run.target is not None
    assert (resolved.run.target.metric, resolved.run.target.value, resolved.run.target.mode) == ("val_acc", 0.5, "max")


def test_references(write: Any) -> None:
    path = write(SHAPES.replace("data: shapes.data.LitShapes", "data: {class: shapes.data.LitShapes, size: '${seed}'}"))
    assert resolve(path, ["seed=12"], CPU).config.data.size == 12
    assert resolve(path, ["data.count=${data.size}", "seed=7"], CPU).config.data.count == 7
    assert refused(path, ["seed=${nope}"]) == "mine.yaml: seed: Interpolation key 'nope' not found."
    assert refused(path, ["module.width=${data}"]).startswith("mine.yaml: ")


@pytest.mark.parametrize(
    ("more", "overrides", "sentence"),
    [
        ("", ["preset=full"], "preset=full: mine.yaml has no presets."),
        (PRESETS, ["preset=ful"], "preset=ful: mine.yaml has no such preset; did you mean 'full'?"),
        (PRESETS, ["preset=[a]"], "preset=[a]: mine.yaml has no such preset; known: full, small"),
        ("presets: [a]", [], "mine.yaml: presets is [a]; a mapping of names is expected."),
        ("presets: {a: 3}", [], "mine.yaml: presets.a is 3; a mapping of values is expected."),
        ("preset_for: cpu", [], "mine.yaml: preset_for is cpu; a mapping of names is expected."),
        ("preset_for: {cpuu: a}", [], "mine.yaml: preset_for.cpuu: unknown hardware; did you mean 'cpu'?"),
        (
            "preset_for: {cpu: b}\npresets: {a: {}}",
            [],
            "mine.yaml: preset_for.cpu is b, no such preset; known: a",
        ),
        (
            "preset: a\npresets: {a: {trainer: {max_epocs: 3}}}",
            [],
            "preset a: unknown key 'trainer.max_epocs'; did you mean 'max_epochs'?",
        ),
        ("", ["hardware=tpu"], "hardware=tpu: there is no such file in configs/hardware; did you mean 'gpu'?"),
        ("", ["hardware=[a]"], "hardware=[a]: there is no such file in configs/hardware; known: cpu, gpu"),
        ("", ["optimizations=exac"], "optimizations=exac: no such set in configs/optimizations; did you mean 'exact'?"),
        ("", ["optimizations=null"], "optimizations is null; a mapping is expected."),
        ("optimizations: [a]", [], "mine.yaml: optimizations is [a]; a mapping is expected."),
        ("target: {metric: val_acc}", [], "mine.yaml: target.value must be set."),
        ("", ["target.value=1"], "mine.yaml: target.metric must be set."),
        ("", ["target.mode=maximum"], "target.mode is maximum; one of max, min is expected."),
        ("", ["trainer.max_epochs=abc"], "trainer.max_epochs is abc; an integer or null is expected."),
        ("", ["trainer.max_epoch=3"], "unknown key 'trainer.max_epoch'; did you mean 'max_epochs'?"),
        ("", ["refused_optimizations=raise"], "refused_optimizations is raise; one of report, error is expected."),
        ("", ["module=3"], "module is 3; the dotted path of a class is expected, like my_project.models.LitThing."),
        (
            "",
            ["module=shapes.model.LitClasifier"],
            "module: 'shapes.model' has no class 'LitClasifier'; did you mean 'LitClassifier'?",
        ),
        ("", ["module=shapes.data.LitShapes"], "mine.yaml: unknown key 'module.width'; known: batch_size, count, size"),
        ("", ["seed=-1"], "seed is -1; it must be 0 to 4294967295, NumPy takes no other."),
        (
            "",
            ["checkpoint.every_n_steps=0"],
            "checkpoint.every_n_steps is 0; it must be above 0, or null for never.",
        ),
    ],
)
def test_what_is_refused(write: Any, more: str, overrides: list[str], sentence: str) -> None:
    assert refused(write(SHAPES + more), overrides) == sentence


def test_a_recipe_without_classes(write: Any) -> None:
    assert refused(write("")) == "mine.yaml: no 'module' is given; name a class: module: my_project.module.LitThing."
    without_data = write("module: shapes.model.LitClassifier")
    assert refused(without_data) == "mine.yaml: no 'data' is given; name a class: data: my_project.data.LitThing."


def test_a_reference_where_a_choice_is_needed_at_once(write: Any) -> None:
    said = refused(write(SHAPES + "hardware: ${oc.env:NOT_SET_ANYWHERE}"))
    assert said.startswith("mine.yaml: ")
    assert "Environment variable 'NOT_SET_ANYWHERE' not found" in said


def test_the_saved_configuration_gives_the_same_values(write: Any, tmp_path: Path) -> None:
    first = resolve(
        write(SHAPES + PRESETS + "target: {metric: val_acc, value: 0.5}"),
        ["optimizations=full", "optimizations.precision.least_gain=0.2", "module.betas=[0.1,0.2]", "loggers=[csv]"],
        GPU,
    )
    saved = write(first.to_yaml(), "config.yaml")
    for machine in (GPU, CPU):
        again = resolve(saved, [], machine)
        assert OmegaConf.to_container(again.config) == OmegaConf.to_container(first.config)
        assert again.classes == first.classes
        assert again.preset_note is None
        assert again.to_yaml() == first.to_yaml()


def test_choices_over_a_saved_configuration(write: Any) -> None:
    saved = write(resolve(write(SHAPES + PRESETS), [], GPU).to_yaml(), "config.yaml")
    moved = resolve(saved, ["hardware=cpu"], CPU)
    assert (moved.config.trainer.accelerator, moved.config.hardware, moved.config.preset) == ("cpu", "cpu", "full")
    assert resolve(saved, ["optimizations=exact"], CPU).config.optimizations == EXACT
    assert refused(saved, ["preset=small"]) == (
        "preset=small: config.yaml is a finished configuration, in which every value is settled; presets are chosen "
        "where its recipe is named."
    )


def test_paths_and_enums_are_saved(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_paths.py").write_text(
        "import enum, pathlib\n"
        "import lightning as L\n"
        "class Kind(enum.Enum):\n    A = 1\n    B = 2\n"
        "class Data(L.LightningDataModule):\n"
        "    def __init__(self, folder: pathlib.Path = pathlib.Path('a/b'), kind: Kind = Kind.A):\n"
        "        super().__init__()\n        self.folder, self.kind = folder, kind\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(SHAPES.replace("shapes.data.LitShapes", "{class: with_paths.Data, kind: B}"))
    again = write(resolve(path, [], CPU).to_yaml(), "config.yaml")
    data: Any = build(resolve(again, [], CPU)).data
    assert (data.folder, data.kind.name) == (Path("a/b"), "B")


def test_build_makes_the_same_weights_whatever_came_before(write: Any) -> None:
    resolved = resolve(write(SHAPES), ["seed=4"], CPU)
    first = build(resolved).module
    random.random(), np.random.rand(), torch.rand(3)
    second = build(resolved).module
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    other = build(resolve(write(SHAPES), ["seed=5"], CPU)).module
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


class KnowingData(pl.LightningDataModule):
    """Tells what only the data knows."""

    def __init__(self, classes: int = 7) -> None:
        super().__init__()
        self.classes = classes
        self.prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def facts(self) -> dict[str, Any]:
        assert self.prepared
        return {"width": self.classes, "betas": [0.1, 0.2], "unrelated": 1}


def test_facts_of_the_data_replace_defaults_but_nothing_written(write: Any) -> None:
    text = f"recipe: mine\nmodule: shapes.model.LitClassifier\ndata: {__name__}.KnowingData\n"
    resolved = resolve(write(text), [], CPU)
    module: Any = build(resolved).module
    assert module.net[0].out_channels == 7
    assert resolved.origin["module.width"] == resolved.origin["module.betas"] == "data"
    assert "width: 7" in resolved.to_yaml()
    written = resolve(write(text), ["module.width=3"], CPU)
    module = build(written).module
    assert module.net[0].out_channels == 3
    assert written.origin["module.width"] == "command line"


def test_classes_of_the_wrong_kind(write: Any) -> None:
    swapped = "module: shapes.data.LitShapes\ndata: shapes.data.LitShapes"
    with pytest.raises(ConfigError, match=r"^module: shapes\.data\.LitShapes is not a LightningModule\.$"):
        build(resolve(write(swapped), [], CPU))
    swapped = "module: shapes.model.LitClassifier\ndata: shapes.model.LitClassifier"
    with pytest.raises(ConfigError, match=r"^data: shapes\.model\.LitClassifier is .*not a LightningDataModule\.$"):
        build(resolve(write(swapped), [], CPU))


def test_find_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = recipe_names()
    assert "retinanet" in shipped
    assert find_recipe("retinanet") == find_recipe("retinanet.yaml") == shipped["retinanet"]
    assert find_recipe("recipes/retinanet.yaml") == shipped["retinanet"]
    (tmp_path / "mine.yaml").write_text(SHAPES)
    assert find_recipe("mine.yaml") == Path("mine.yaml")
    (tmp_path / "folder").mkdir()
    for name, sentence in {
        "retinanett": "there is no recipe 'retinanett'; did you mean 'retinanet'?",
        "other.yaml": f"there is no recipe file 'other.yaml'; shipped recipes: {', '.join(shipped)}.",
        "folder": f"'folder' is a folder; a recipe is a YAML file, or one of: {', '.join(shipped)}.",
        "trainer.max_epochs=3": "'trainer.max_epochs=3' stands where the recipe is named; write it after the recipe.",
    }.items():
        with pytest.raises(ConfigError) as caught:
            find_recipe(name)
        assert str(caught.value) == sentence


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", sorted(recipe_names()))
def test_every_shipped_recipe_resolves(name: str, machine: Hardware) -> None:
    resolved = resolve(find_recipe(name), [], machine)
    assert resolved.config.recipe == name
    assert resolved.config.summary, "`fasttrain list` shows it"
    assert resolved.run.target is not None


def test_every_fragment_is_a_layer_of_its_kind(write: Any) -> None:
    path = write(SHAPES)
    for file in (CONFIGS / "optimizations").glob("*.yaml"):
        resolve(path, [f"optimizations={file.stem}"], CPU)
    for file in (CONFIGS / "hardware").glob("*.yaml"):
        assert resolve(path, [f"hardware={file.stem}"], CPU).config.hardware == file.stem


def test_resolving_twice_changes_nothing(write: Any) -> None:
    path = write(SHAPES + PRESETS)
    first = copy.deepcopy(resolve(path, ["optimizations=exact"], CPU).config)
    assert resolve(path, ["optimizations=exact"], CPU).config == first
