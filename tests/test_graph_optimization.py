"""What the plan says of the graph step, on machines with and without a GPU."""

from typing import Any

import lightning.pytorch as pl
import pytest
from graph_fits import Small, batches, fit
from torch import Tensor

from fasttrain.callbacks.cuda_graph_step import CUDAGraphStepConfig, CUDAGraphStepOptimization
from fasttrain.environment import Hardware
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Context, Refuses

GPU = Hardware("gpu", "cuda:0", "NVIDIA H200", 16, (9, 0), 150 * 10**9)
CPU = Hardware("cpu", "cpu", "a CPU", 2)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return batches(4)


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class LooksAtTheStep(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 if self.global_step < 100 else 2)


def verdict(module: pl.LightningModule, hardware: Hardware, **options: Any) -> Applies | Refuses:
    return CUDAGraphStepOptimization(CUDAGraphStepConfig(**options)).check(Context(module, Data(), hardware))


@pytest.fixture(autouse=True)
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")


def test_it_applies_on_an_nvidia_gpu() -> None:
    answer = verdict(Small(), GPU)
    assert answer == Applies("the whole step captured after 3 eager steps, and checked against an eager one")
    assert "forward and backward captured after 5" in verdict(Small(), GPU, scope="fwd_bwd", warm_up=5).note  # type: ignore[union-attr]


class Reads(pl.Callback):
    """Looks at the gradients on the host: what only the Trainer's list of callbacks tells."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = trainer.global_step


def test_a_hook_that_only_the_trainer_knows_is_named_in_the_error() -> None:
    optimization = CUDAGraphStepOptimization(CUDAGraphStepConfig())
    optimization.callback.stand_in = True
    with pytest.warns(UserWarning, match="steps run eagerly, since Reads.on_after_backward"):
        fit(Small(), batches(4), optimization.callback, callbacks=[Reads()])
    with pytest.raises(
        OptimizationError, match=r"^cuda_graph_step was to be applied and can't be, since Reads.on_after"
    ):
        optimization.applied()


def test_it_refuses_with_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(Small(), CPU) == Refuses("the run is on a CPU, and CUDA graphs need an NVIDIA GPU")
    manual = verdict(Manual(), GPU)
    assert isinstance(manual, Refuses)
    assert "CapturedFunction inside of training_step" in manual.reason
    looks = verdict(LooksAtTheStep(), GPU)
    assert isinstance(looks, Refuses)
    assert "global_step" in looks.reason
    assert "test_graph_optimization.py:" in looks.reason
    assert isinstance(verdict(LooksAtTheStep(), GPU, trusted=("LooksAtTheStep.training_step",)), Applies)
    monkeypatch.setattr("torch.version.cuda", None)  # a build for another maker's GPUs
    assert isinstance(verdict(Small(), GPU), Refuses)
