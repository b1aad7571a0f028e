"""conv_bias_relu by Apex, where that is asked for: believed after a trial, and after each shape was right once."""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fasttrain import proving
from fasttrain.callbacks import CATALOGUE
from fasttrain.callbacks.conv_bias_relu import FusedConvBiasReLU, conv_bias_relu, in_apex
from fasttrain.callbacks.conv_bias_relu.geometry import Geometry
from fasttrain.callbacks.conv_bias_relu.modules import ConvBias, ConvBiasReLU
from fasttrain.callbacks.conv_bias_relu.reference import TOLERANCE, reference
from fasttrain.errors import ConfigError
from fasttrain.plan import requested
from fasttrain.proving import Proof, Trial

LAST = torch.channels_last
PLAIN = Geometry((1, 1), (1, 1), (1, 1), 1)


@pytest.fixture(autouse=True)
def fake_apex(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An Apex in plain PyTorch, which nothing is known of yet."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_apex"))
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("FAKE_APEX", "")
    monkeypatch.setattr(in_apex, "_right", {})
    in_apex.is_proven.cache_clear()
    proving._proof.cache_clear()
    yield
    in_apex.is_proven.cache_clear()
    proving._proof.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """The trials that were asked for; all succeed, without a process of their own."""
    asked: list[Trial] = []

    def prove(trial: Trial) -> Proof:
        asked.append(trial)
        return Proof(True, "")

    monkeypatch.setattr(in_apex, "prove", prove)
    return asked


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of x that Apex was called with."""
    shapes: list[tuple[int, ...]] = []
    plain = in_apex.conv_bias_relu

    def counted(x: Tensor, *others: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return plain(x, *others)

    monkeypatch.setattr(in_apex, "conv_bias_relu", counted)
    return shapes


def work(dtype: torch.dtype = torch.float16, channels: int = 8, outputs: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    tensors = torch.randn(2, channels, 6, 5), torch.randn(outputs, channels, 3, 3) / 9, torch.randn(outputs)
    return [t.to(dtype, memory_format=LAST if t.dim() == 4 else None).requires_grad_() for t in tensors]


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def assert_right(y: Tensor, *tensors: Tensor, geometry: Geometry = PLAIN) -> None:
    exact = [t.detach().double().requires_grad_() for t in tensors]
    wanted = reference(*exact, geometry, True)  # type: ignore[arg-type]
    assert off(y, wanted) < TOLERANCE[y.dtype]
    dy = torch.randn(y.shape, dtype=y.dtype)  # contiguous, which Apex's backward would refuse
    gradients = torch.autograd.grad(y, tensors, dy), torch.autograd.grad(wanted, exact, dy.double())
    for one, other in zip(*gradients, strict=True):
        assert off(one, other) < 0.05


def test_proven_it_computes(trials: list[Trial], calls: list[tuple[int, ...]]) -> None:
    x, weight, bias = work()
    assert_right(conv_bias_relu(x, weight, bias, padding=1, tier="apex"), x, weight, bias)
    assert trials == [in_apex.TRIAL]
    assert calls == [(2, 8, 6, 5)] * 2, "once for this shape, to be compared, and once to compute"
    conv_bias_relu(x, weight, bias, padding=1, tier="apex")
    assert len(calls) == 3
    stride = conv_bias_relu(x, weight, bias, stride=2, padding=1, tier="apex")
    assert_right(stride, x, weight, bias, geometry=PLAIN._replace(stride=(2, 2)))
    assert len(calls) == 5
    assert len(trials) == 1


def test_under_autocast_the_parameters_get_gradients_in_their_own_dtype(
    trials: list[Trial], calls: list[tuple[int, ...]]
) -> None:
    x, weight, bias = work(torch.float32)
    with torch.autocast("cpu", torch.float16):
        y = conv_bias_relu(x, weight, bias, padding=1, tier="apex")
    assert y.dtype == torch.float16
    assert len(calls) == 2
    assert_right(y, x, weight, bias)


def test_auto_does_not_try_it(trials: list[Trial]) -> None:
    x, weight, bias = work()
    assert_right(conv_bias_relu(x, weight, bias, padding=1), x, weight, bias)
    assert trials == []


@pytest.mark.parametrize(
    ("dtype", "channels", "outputs", "options"),
    [
        (torch.bfloat16, 8, 16, {}),
        (torch.float32, 8, 16, {}),
        (torch.float16, 6, 16, {}),
        (torch.float16, 8, 12, {}),
        (torch.float16, 8, 16, {"dilation": 2}),
        (torch.float16, 8, 16, {"stride": (1, 2)}),
        (torch.float16, 8, 16, {"padding": (1, 2)}),
    ],
)
def test_what_it_is_not_made_for_is_left_to_auto(
    trials: list[Trial], dtype: torch.dtype, channels: int, outputs: int, options: dict[str, Any]
) -> None:
    x, weight, bias = work(dtype, channels, outputs)
    y = conv_bias_relu(x, weight, bias, tier="apex", **options)
    assert_right(
        y, x, weight, bias, geometry=Geometry.of(*({"stride": 1, "padding": 0, "dilation": 1} | options).values(), 1)
    )
    assert trials == []


def test_a_shape_it_gets_wrong_is_left_to_auto_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, trials: list[Trial], calls: list[tuple[int, ...]]
) -> None:
    x, weight, bias = work()
    for accident in ("wrong", "wrong backward", "raise"):
        monkeypatch.setenv("FAKE_APEX", accident)
        monkeypatch.setattr(in_apex, "_right", {})
        calls.clear()
        with pytest.warns(
            UserWarning, match=r"wrong for x of \(2, 8, 6, 5\) and a weight of \(16, 8, 3, 3\) here, thou"
        ):
            y = conv_bias_relu(x, weight, bias, padding=1, tier="apex")
        assert_right(y, x, weight, bias)
        assert_right(conv_bias_relu(x, weight, bias, padding=1, tier="apex"), x, weight, bias)
        assert len(calls) == 1


def test_what_is_no_refusal_is_raised(monkeypatch: pytest.MonkeyPatch, trials: list[Trial]) -> None:
    monkeypatch.setenv("FAKE_APEX", "memory")
    with pytest.raises(torch.OutOfMemoryError):
        conv_bias_relu(*work(), padding=1, tier="apex")  # type: ignore[misc]
    assert in_apex._right == {}


def test_in_a_capture_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, trials: list[Trial]) -> None:
    x, weight, bias = work()
    with monkeypatch.context() as patch:
        patch.setattr(in_apex, "is_capturing", lambda x: True)
        assert_right(conv_bias_relu(x, weight, bias, padding=1, tier="apex"), x, weight, bias)
        assert trials == []
    conv_bias_relu(x, weight, bias, padding=1, tier="apex")
    assert len(trials) == 1


def test_under_torch_compile_nothing_is_tried(trials: list[Trial]) -> None:
    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return conv_bias_relu(x, weight, bias, padding=1, tier="apex")

    tensors = work()
    assert_right(torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors), *tensors)
    assert trials == []


class Detector(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(*callbacks: pl.Callback) -> Detector:
    module = Detector()
    data = DataLoader(TensorDataset(torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))), batch_size=2)
    pl.Trainer(
        accelerator="cpu", callbacks=list(callbacks), logger=False, max_epochs=2, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    ).fit(module, data)  # fmt: skip
    return module


def told(action: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    return result, [str(w.message) for w in caught if "conv_bias_relu" in str(w.message)]


def test_training_goes_on_with_the_next_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_APEX", "segfault")
    plain = trained()
    ours, messages = told(lambda: trained(FusedConvBiasReLU(tier="apex")))
    assert messages == [
        "conv_bias_relu: tier='apex' was asked for, and can't be had: Apex's ConvBiasReLU ended its process by SIGSEGV "
        "(Segmentation fault); 'auto' goes on."
    ]
    assert [type(layer) for layer in ours.net.children()] == [ConvBiasReLU, nn.Identity, ConvBias]
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    assert ours.losses[-1] < ours.losses[0]
    assert "apex" not in sys.modules, "what ends a process must not be imported here"
    _, messages = told(lambda: conv_bias_relu(*work(), padding=1, tier="apex"))  # type: ignore[misc]
    assert messages == [], "told once"


def test_the_plan_hands_the_tier_to_every_site() -> None:
    ((room,), _) = requested({"conv_bias_relu": {"tier": "torch"}}, CATALOGUE)
    module = Detector()
    room.callback.setup(None, module, "fit")  # type: ignore[attr-defined]
    assert [layer._tier for layer in (module.net[0], module.net[2])] == ["torch", "torch"]
    with pytest.raises(ConfigError, match=r"conv_bias_relu: tier is apx; one of auto, cudnn, cudnn_graph, "):
        requested({"conv_bias_relu": {"tier": "apx"}}, CATALOGUE)
