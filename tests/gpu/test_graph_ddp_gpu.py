"""The graph step under DDP over NCCL: the all-reduce is in the graph, and the numbers are those of eager DDP.

One process is enough for that, since NCCL runs its collectives for one rank, too. What takes two GPUs is skipped
where there is one.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_fits import Small, assert_same_state, batches, fit, same_start
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from fasttrain.callbacks import CUDAGraphStep

pytestmark = pytest.mark.gpu

NEVER, STEPS = 10**9, 150
GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1, "max_epochs": 1}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels in a fixed order, so that equal means equal; nothing stays of the process group."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 3}),
        ({"gradient_as_bucket_view": True, "static_graph": True}, {}),
        ({"ddp_comm_hook": bf16_compress_hook}, {"precision": "bf16-mixed"}),
        ({}, {"precision": "16-mixed", "gradient_clip_val": 0.5}),
    ],
)
@pytest.mark.parametrize("scope", ["step", "fwd_bwd"])
def test_replays_average_gradients_as_eager_steps_do(options: Any, settings: Any, scope: str) -> None:
    ours, eager = same_start(Small)
    graph = CUDAGraphStep(on_failure="error", scope=scope)
    trainer = fit(ours, batches(STEPS), graph, strategy=DDPStrategy(**options), **GPU, **settings)
    never = CUDAGraphStep(warm_up=NEVER)
    expected = fit(eager, batches(STEPS), never, strategy=DDPStrategy(**options), **GPU, **settings)
    assert graph.pool.hits > STEPS - 30, graph.notes
    assert_same_state(trainer, expected)


def test_a_capture_at_the_forward_at_which_ddp_would_time_itself() -> None:
    module = Small()
    graph = CUDAGraphStep(on_failure="error", warm_up=99)
    fit(module, batches(STEPS), graph, strategy=DDPStrategy(), **GPU)
    assert graph.pool.hits > 40, graph.notes


LIVE = """
import os, torch, torch.distributed as dist
from torch import nn
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    net = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda(), device_ids=[0])
    x = torch.randn(4, 8, device="cuda")
    for _ in range(12):
        net(x).square().mean().backward()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
    net(x).square().mean().backward()
graph.replay()
print("replayed", flush=True)
"""


def test_a_process_ends_while_its_graph_holds_collectives() -> None:
    done = subprocess.run([sys.executable, "-c", LIVE], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "replayed"


TWO = """
import os, sys, torch
sys.path.insert(0, os.environ["TESTS"])
from graph_fits import Small, batches, fit
from fasttrain.callbacks import CUDAGraphStep
torch.manual_seed(0)
module = Small()
graph = CUDAGraphStep(on_failure="error")
rank = int(os.environ["LOCAL_RANK"])
fit(module, batches(500, seed=rank), graph, accelerator="gpu", devices=2, strategy="ddp", max_epochs=1)
assert graph.pool.hits > 450, graph.notes
torch.save({k: v.cpu() for k, v in module.named_parameters()}, os.environ["ANSWER"] + str(rank))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_the_same_weights_bit_for_bit_after_500_steps(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        own |= {"TESTS": str(Path(__file__).parent.parent), "ANSWER": str(tmp_path / "rank")}
        ranks.append(subprocess.Popen([sys.executable, "-c", TWO], env={**os.environ, **own}))
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (torch.load(tmp_path / f"rank{rank}") for rank in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
