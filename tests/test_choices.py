"""Choice by measurement: what makes two sites the same, which alternative wins, the file, and the plan that asks it."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scaled_blocks import Blocks, BlocksData, FusedScaled, Scaled, ScaledOptimization, ScaledPatches, timing
from torch import nn

from fasttrain.choices import ALTERNATIVES, BUDGET_SHORT, Choices, Measured
from fasttrain.choices_file import choices_path, load_choices, save_choice
from fasttrain.environment import Hardware
from fasttrain.errors import DataError, OptimizationError
from fasttrain.optimization import Applies, Context, ExampleBatch, Refuses
from fasttrain.patches import PatchConfig
from fasttrain.site_key import Call, call_of, module_text, precision_text, room_text, site_key, tensor_text
from fasttrain.step_calls import StepCalls, copied


def measured(plain: float = 1.0, compile: float | None = 1.0, ours: float | None = 1.0, **changes: Any) -> Measured:
    times = {"plain": plain, "compile": compile, "ours": ours}
    values: dict[str, Any] = {
        "room": "scaled", "precision": "32-true", "module": "Scaled()", "calls": ("float32[8, 8] grad",),
        "times": {name: timing(ms) for name, ms in times.items() if ms is not None}, "missing": {}, "how": "calls",
        "seen": "blocks: first", "date": "2026-11-30", "by": "0.1.0",
    }  # fmt: skip
    return Measured(**{**values, **changes})


def call(*shape: int) -> Call:
    return call_of([torch.zeros(shape)], {}, "")


# What a site is


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, 3), "float32[2, 3]"),
        (torch.zeros(2, 3, requires_grad=True), "float32[2, 3] grad"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.half).to(memory_format=torch.channels_last),
         "float16[2, 3, 4, 4] channels_last"),
        (torch.zeros(3, 2).t(), "float32[2, 3] strides [1, 2]"),
        (torch.zeros((), dtype=torch.int64), "int64[]"),
    ],
)  # fmt: skip
def test_a_tensor_is_told_by_dtype_shape_layout_and_gradient(tensor: torch.Tensor, text: str) -> None:
    assert tensor_text(tensor) == text


def test_a_call_is_told_by_its_arguments_and_mode() -> None:
    x = torch.zeros(2, 3)
    one = call_of([x], {"scale": 2}, "autocast bfloat16")
    assert str(one) == "float32[2, 3], autocast bfloat16"
    assert one == call_of([torch.ones(2, 3)], {"scale": 2}, "autocast bfloat16")
    assert one != call_of([x], {"scale": 3}, "autocast bfloat16")
    assert one != call_of([x], {"scale": 2}, "")
    assert one != call_of([x, x], {"scale": 2}, "autocast bfloat16")
    assert call_of([x, object()], {}, "") == call_of([x, object()], {}, ""), "no address is in it"


def _bn(**options: Any) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(4, **options), nn.ReLU())


@pytest.mark.parametrize(
    "other",
    [
        _bn(eps=1e-3), _bn(affine=False), nn.Sequential(nn.BatchNorm2d(5), nn.ReLU()), _bn().eval(), _bn().double(),
        nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True)), nn.Sequential(nn.BatchNorm2d(4), nn.GELU()),
        _bn().requires_grad_(False),
    ],
    ids=["value", "parameters", "shape", "mode", "dtype", "argument", "class", "frozen"],
)  # fmt: skip
def test_modules_that_compute_in_another_way_are_other_sites(other: nn.Module) -> None:
    assert module_text(other) != module_text(_bn())


def test_modules_of_other_values_and_layouts_are_the_same_site() -> None:
    one, other = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    assert module_text(one) == module_text(other) == module_text(copy.deepcopy(one))
    assert module_text(Scaled(4)) == module_text(Scaled(4))
    assert module_text(Scaled(4)) != module_text(Scaled(4, power=2)), "a plain attribute counts"
    assert "0x" not in module_text(nn.TransformerEncoderLayer(8, 2, activation=nn.GELU()))
    assert "lazy" in module_text(nn.LazyLinear(3))


def test_the_key_names_room_precision_and_digest() -> None:
    key = site_key("scaled", Scaled(8), [call(8, 8)], "32-true")
    room, precision, digest = key.split(" ")
    assert (room, precision, len(digest)) == ("scaled", "32-true", 16)
    assert key == site_key("scaled", Scaled(8), [call(8, 8)], "32-true")
    for other in (
        site_key("other", Scaled(8), [call(8, 8)], "32-true"),
        site_key("scaled", Scaled(8), [call(8, 8)], "bf16-mixed"),
        site_key("scaled", Scaled(8), [call(4, 8)], "32-true"),
        site_key("scaled", Scaled(8), [call(8, 8), call(8, 8)], "32-true"),
    ):
        assert other != key


def test_a_rooms_parameters_are_part_of_its_name_where_they_change_what_it_does() -> None:
    assert room_text("scaled", PatchConfig(measure=False)) == "scaled"
    assert room_text("tiered", type("C", (), {})()) == "tiered"
    config = type("C", (), {})()
    config.measure, config.tier = True, "fast"
    assert room_text("tiered", config) == "tiered {'tier': 'fast'}"


def test_fp32_products_of_another_precision_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert precision_text("32-true") == "32-true"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert precision_text("32-true") == "32-true, float32 matmul high"


# What a step calls


def test_the_calls_of_a_step_are_recorded_without_a_trace() -> None:
    model = Blocks()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = torch.get_rng_state()
    calls = StepCalls(model, ExampleBatch(BlocksData()), "cpu", "bf16-mixed")
    seen = calls()
    assert [str(c) for c in seen["first"]] == ["float32[8, 8] grad, autocast bfloat16"]
    assert [c.inputs for c in seen["shared"]] == [("float32[4, 8] grad",), ("float32[8, 8] grad",)]
    assert seen["wide"][0].inputs == ("bfloat16[4, 16] grad",), "the linear layer before it ran under autocast"
    assert "unused" not in seen
    assert calls() is seen, "the step runs once"

    copied_model, arguments = calls.arguments(["wide", "unused"])
    (wide,) = arguments["wide"]
    assert wide.positional[0].dtype == wide.autocast == torch.bfloat16
    assert wide.positional[0].requires_grad
    assert wide.positional[0].is_leaf
    assert arguments["unused"] == []
    assert not any(module._forward_pre_hooks for module in copied_model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "64-true"])
def test_a_true_precision_is_that_of_weights_and_inputs(precision: str) -> None:
    dtype = {"16-true": "float16", "bf16-true": "bfloat16", "64-true": "float64"}[precision]
    seen = StepCalls(Blocks(), ExampleBatch(BlocksData()), "cpu", precision)()
    assert seen["first"][0].inputs == (f"{dtype}[8, 8] grad",)


def test_images_and_weights_are_in_the_format_of_the_run() -> None:
    class Image(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

        def training_step(self, batch: Any) -> torch.Tensor:
            with torch.no_grad():
                self.conv[1](batch)
            return self.conv(batch).sum()

    def calls(**options: Any) -> Any:
        return StepCalls(Image(), lambda: torch.zeros(2, 3, 8, 8), "cpu", **options)()

    assert str(calls()["conv.0"][0]) == "float32[2, 3, 8, 8]"
    assert str(calls(channels_last=True)["conv.0"][0]) == "float32[2, 3, 8, 8] channels_last"
    assert [str(c) for c in calls(channels_last=True)["conv.1"]] == [
        "float32[2, 3, 8, 8] channels_last, no gradients recorded", "float32[2, 4, 6, 6] channels_last grad",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2), torch.arange(24.0).reshape(4, 6)[1:3, ::2],
        torch.arange(3.0)[:, None].expand(3, 4), torch.zeros(0, 3), torch.tensor(3),
        torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last).requires_grad_(),
    ],
    ids=["transposed", "with gaps", "overlapping", "empty", "scalar", "channels_last"],
)  # fmt: skip
def test_a_copy_has_values_strides_and_need_of_a_gradient(tensor: torch.Tensor) -> None:
    made = copied(tensor, "cpu")
    assert torch.equal(made, tensor)
    assert made.stride() == tensor.stride()
    assert (made.requires_grad, made.is_leaf) == (tensor.requires_grad, True)
    assert made.data_ptr() != tensor.data_ptr() or not tensor.numel()


# The choice


def test_plain_wins_unless_another_is_faster_by_more_than_noise() -> None:
    assert measured(1, 1, 1).winner() == "plain"
    assert measured(1, 0.99, 0.985).winner() == "plain"
    assert measured(1, 0.97, 0.96).winner() == "ours"
    assert measured(1, 0.95, 0.96).winner() == "compile"
    assert measured(1, 0.95, 0.96).winner(("plain", "ours")) == "ours"
    assert measured(1, 0.5, None).winner() == "compile"
    assert measured(1, 0.5, 1.2).winner(("plain", "ours")) == "plain"
    noisy = measured(times={"plain": timing(1, spread=0.2), "ours": timing(0.9)})
    assert noisy.winner() == "plain", "plain itself was as fast at times"
    assert replace(noisy, times={"plain": timing(1, spread=0.05), "ours": timing(0.9)}).winner() == "ours"


ms = st.floats(1e-4, 1e4)


@given(plain=ms, compile=st.none() | ms, ours=st.none() | ms)
@settings(max_examples=50, deadline=None)
def test_no_alternative_is_faster_than_the_winner_by_more_than_noise(
    plain: float, compile: float | None, ours: float | None
) -> None:
    entry = measured(plain, compile, ours)
    winner = entry.winner()
    assert winner in entry.times
    assert all(t.median_ms >= entry.times[winner].median_ms * 0.979 for t in entry.times.values())
    assert entry.saved_ms(winner) >= 0


def choices(entries: dict[str, Measured], calls: Any = None) -> Choices:
    def by_path() -> dict[str, list[Call]]:
        return {"first": [call(8, 8)], "alike": [call(8, 8)], "wide": [call(8, 16)], "shared": [call(4, 8)]}

    return Choices(lambda: entries, calls or by_path, "32-true")


def known(**by_path: Measured) -> dict[str, Measured]:
    """Return entries for the sites of Blocks, under the calls of `choices`."""
    asked, model = choices({}), Blocks()
    keys = {path: asked.key("scaled", path, getattr(model, path)) for path in by_path}
    assert None not in keys.values()
    return {str(keys[path]): entry for path, entry in by_path.items()}


def sites() -> list[tuple[str, nn.Module]]:
    return [(site.path, site.plain) for site in ScaledPatches().sites(Blocks())]


def test_a_decision_is_by_site_and_of_what_the_run_has() -> None:
    entries = known(
        first=measured(1, 1, 0.5), wide=measured(1, 0.4, 0.5, date="2026-11-28"), shared=measured(1, 0.5, 1.5)
    )
    decision = choices(entries).decide("scaled", sites(), compiled=False)
    assert decision is not None
    assert decision.ours == ("first", "alike", "wide")
    assert decision.left == ("shared",)
    assert decision.unknown == ("unused",)
    assert decision.share == "3 of 5 sites, by measurement of 2026-11-28 to 2026-11-30 (1 not measured)"
    assert decision.about_compiler == (
        "; torch.compile would be the fastest at 2 sites: ask for the optimization `compile`"
    )
    compiled = choices(entries).decide("scaled", sites(), compiled=True)
    assert compiled is not None
    assert compiled.ours == ("first", "alike")
    assert compiled.left == ("wide", "shared")
    assert compiled.about_compiler == "; 2 sites left to torch.compile, which is the fastest there"


def test_nothing_known_is_no_decision_and_runs_nothing() -> None:
    def fail() -> Any:
        raise AssertionError("the step need not run")

    others = {"other 32-true 0": measured(room="other"), "scaled 16 0": measured(precision="16-mixed")}
    assert choices({}, fail).decide("scaled", sites(), False) is None
    assert choices(others, fail).decide("scaled", sites(), False) is None
    assert choices({"scaled 32-true 0": measured()}).decide("scaled", sites(), False) is None, "another model's"


def test_a_choice_without_time_for_the_compiler_is_worth_measuring_again() -> None:
    assert measured().is_complete
    assert measured(missing={"compile": "RuntimeError: no compiler"}).is_complete
    assert not measured(missing={"compile": BUDGET_SHORT}).is_complete


# The file


def test_the_file_is_named_for_the_machine_and_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    path = choices_path("NVIDIA H200 (MIG 1g/2)")
    assert path == tmp_path / "choices" / f"NVIDIA-H200-MIG-1g-2_torch-{torch.__version__}_cudnn-91900.json"
    monkeypatch.delenv("FASTTRAIN_CACHE")
    assert choices_path("x").parent == Path.home() / ".cache" / "fasttrain" / "choices"


def test_what_is_saved_is_loaded_beside_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "choices.json"
    assert load_choices(path) == {}
    one, other = measured(1, 2, 0.5), measured(3, None, 4, missing={"compile": "no"}, calls=("a", "b"))
    save_choice(path, "one", one)
    save_choice(path, "other", measured())
    save_choice(path, "other", other)
    assert load_choices(path) == {"one": one, "other": other}
    content = json.loads(path.read_text())
    assert content["sites"]["one"]["winner"] == "ours"
    assert content["torch"] == torch.__version__
    assert [file.name for file in path.parent.iterdir()] == ["choices.json"], "no temporary file stays"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'format'"),
        ('{"format": 1, "sites": {"a": {"times": {}}}}', "ValueError"),
        ('{"format": 1, "sites": {"a": {"times": {"plain": {"median_ms": 1}}}}}', "TypeError"),
    ],
)
def test_a_damaged_file_is_named_with_the_cure(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "choices.json"
    path.write_text(text)
    with pytest.raises(DataError, match=why) as caught:
        load_choices(path)
    assert str(caught.value).startswith(f"the measured choices in {path} are damaged (")
    assert str(caught.value).endswith("); delete the file, and `fasttrain tune` measures them anew.")


def test_a_file_of_another_format_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    path.write_text('{"format": 0, "whatever": 1}')
    assert load_choices(path) == {}
    save_choice(path, "one", measured())
    assert list(load_choices(path)) == ["one"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't be read"):
        load_choices(tmp_path / "file" / "choices.json")
    (tmp_path / "folder" / "choices.json").mkdir(parents=True)
    with pytest.raises(DataError, match="can't be read"):
        load_choices(tmp_path / "folder" / "choices.json")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent" / "x")
    with pytest.raises(DataError, match="FASTTRAIN_CACHE"):
        save_choice(tmp_path / "dangling" / "choices.json", "one", measured())


# The plan


def context(asked: Choices | None, **options: Any) -> Context:
    data = BlocksData()
    values: dict[str, Any] = {"example": ExampleBatch(data), "choices": asked, **options}
    return Context(Blocks(), data, Hardware.cpu(), **values)


def no_step(*_: Any) -> Any:
    raise AssertionError("the step need not be timed")


ALL_KNOWN = {"first": measured(1, 1, 0.5), "wide": measured(1, 1, 1), "shared": measured(1, 0.5, 1)}


def room_with(**by_path: Measured) -> tuple[ScaledOptimization, Context]:
    asked = choices(known(**by_path))
    model_context = context(asked)
    del model_context.module.unused
    return ScaledOptimization(PatchConfig()), model_context


def test_a_site_that_ours_won_is_patched_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.patches.compared_ms", no_step)
    room, asked = room_with(**ALL_KNOWN)
    assert room.check(asked) == Applies(
        "2 of 4 sites, by measurement of 2026-11-30; torch.compile would be the fastest at 1 site: ask for the "
        "optimization `compile`"
    )
    before = list(asked.module.state_dict())
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=room.attach(asked).callbacks,
    )  # fmt: skip
    trainer.fit(asked.module, asked.data)
    kinds = {path: type(asked.module.get_submodule(path)) for path in ("first", "alike", "wide", "shared")}
    assert kinds == {"first": FusedScaled, "alike": FusedScaled, "wide": Scaled, "shared": Scaled}
    assert [change.path for change in room.applied()] == ["first", "alike"]
    assert list(asked.module.state_dict()) == before


def test_sites_that_another_optimization_took_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    room, asked = room_with(**ALL_KNOWN)
    room.check(asked)
    asked.module.first = asked.module.alike = nn.Identity()
    with pytest.raises(OptimizationError) as caught:
        room.callback.setup(pl.Trainer(accelerator="cpu", logger=False), asked.module, "fit")
    assert str(caught.value) == (
        "scaled: another optimization has taken its 2 sites ('alike' for instance); leave it out."
    )


def test_where_nothing_is_faster_the_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.patches.compared_ms", no_step)
    room, asked = room_with(**{**ALL_KNOWN, "first": measured(1, 1, 2)})
    verdict = room.check(asked)
    assert isinstance(verdict, Refuses)
    assert verdict.reason.startswith("it is the fastest at 0 of 4 sites, by measurement of 2026-11-30; torch.compile")
    assert verdict.reason.endswith("; `fasttrain tune` with --again measures anew")


@pytest.mark.parametrize(("step_ms", "patched"), [(0.5, {"first", "alike", "shared"}), (1.0, {"first", "alike"})])
def test_sites_that_were_not_measured_are_decided_by_the_step(
    monkeypatch: pytest.MonkeyPatch, step_ms: float, patched: set[str]
) -> None:
    asked_for: list[Any] = []

    def compared(context: Context, batch: Any, patches: Any, only: Any) -> tuple[float, float]:
        asked_for.append(only)
        return 1.0, step_ms

    monkeypatch.setattr("fasttrain.patches.compared_ms", compared)
    room, asked = room_with(first=measured(1, 1, 0.5), wide=measured(1, 1, 1))
    verdict = room.check(asked)
    assert isinstance(verdict, Applies)
    assert verdict.note.startswith("2 of 4 sites, by measurement of 2026-11-30 (1 not measured); ")
    assert (
        "and the rest: 1 sites; measured 0.5 ms" if step_ms < 1 else "not the rest: not faster here"
    ) in verdict.note
    assert asked_for == [("shared",)]
    assert room.callback.only == patched


@pytest.mark.parametrize(
    "asked",
    [None, choices({}), choices({"scaled 32-true 0": measured()})],
    ids=["no choices", "empty file", "file of another model"],
)
def test_where_the_file_has_nothing_the_step_decides_over_all_sites(
    monkeypatch: pytest.MonkeyPatch, asked: Choices | None
) -> None:
    monkeypatch.setattr("fasttrain.patches.compared_ms", lambda *_: (1.0, 0.5))
    room = ScaledOptimization(PatchConfig())
    assert room.check(context(asked)) == Applies("5 sites; measured 0.5 ms a step against 1 (2.00 times)")
    assert room.callback.only is None


def test_measure_false_looks_at_no_measurement() -> None:
    room = ScaledOptimization(PatchConfig(measure=False))
    assert room.check(context(choices(known(**ALL_KNOWN)))) == Applies("5 sites; not measured, as asked")
    assert room.callback.only is None


def test_a_step_that_cannot_be_run_is_said_by_the_rooms_own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OptimizationError("the step could not be measured outside of a Trainer (KeyError: 'x')")

    monkeypatch.setattr("fasttrain.patches.compared_ms", fail)
    verdict = ScaledOptimization(PatchConfig()).check(context(choices(known(**ALL_KNOWN), fail)))
    assert verdict == Refuses(
        "the step could not be measured outside of a Trainer (KeyError: 'x'); set optimizations.scaled.measure=false "
        "to use it unmeasured"
    )


def test_the_alternatives_are_in_the_order_of_the_table() -> None:
    assert ALTERNATIVES == ("plain", "compile", "ours")
