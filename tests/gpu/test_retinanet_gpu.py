"""RetinaNet's step on a GPU: the CPU's numbers, no wait for the host, and capture as one graph."""

import pytest
import torch
from torch import Tensor

from fasttrain.recipes.retinanet.model import RawPredictions, RetinaNet, RetinaNetConfig

pytestmark = pytest.mark.gpu

CONFIG = RetinaNetConfig(num_classes=5, backbone="resnet18", image_size=(128, 160), fpn_channels=64)
BATCH, MAX_BOXES = 4, 8


def batch(device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (BATCH, 3, *CONFIG.image_size), generator=generator, dtype=torch.uint8)
    corner = torch.rand(BATCH, MAX_BOXES, 2, generator=generator) * 80
    boxes = torch.cat([corner, corner + 10 + 40 * torch.rand(BATCH, MAX_BOXES, 2, generator=generator)], dim=2)
    labels = torch.randint(0, 5, (BATCH, MAX_BOXES), generator=generator)
    labels[0] = -1  # an image without boxes
    labels[1, 3:] = -1
    boxes[labels < 0] = 0
    return images.to(device), boxes.to(device), labels.to(device)


def model(device: str) -> RetinaNet:
    torch.manual_seed(0)
    return RetinaNet(CONFIG).to(device)


def loss_of(net: RetinaNet, images: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
    return torch.stack(list(net.loss(net(images), boxes, labels).values())).sum()


@pytest.fixture
def _exact_fp32() -> object:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("_exact_fp32")
def test_losses_and_gradients_equal_the_cpus() -> None:
    results = {}
    for device in ("cpu", "cuda"):
        net = model(device)
        losses = net.loss(net(batch(device)[0]), *batch(device)[1:])
        torch.stack(list(losses.values())).sum().backward()
        gradients = {name: p.grad.cpu() for name, p in net.named_parameters() if p.grad is not None}
        results[device] = ({name: float(value) for name, value in losses.items()}, gradients)
    assert results["cuda"][0] == pytest.approx(results["cpu"][0], rel=1e-4)
    for name, gradient in results["cpu"][1].items():
        scale = gradient.abs().max().clamp(min=1e-6)
        # Sums of some ten thousand terms in another order; batch norm's backward subtracts nearly equal means.
        assert (results["cuda"][1][name] - gradient).abs().max() / scale < 5e-3, name


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_the_step_never_waits_for_the_host(precision: torch.dtype) -> None:
    net, inputs = model("cuda"), batch("cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=precision is torch.bfloat16):
        loss_of(net, *inputs).backward()  # cuDNN and cuBLAS make their handles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss_of(net, *inputs).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_step_is_captured_whole() -> None:
    net, inputs = model("cuda"), batch("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            net.zero_grad(set_to_none=True)
            loss_of(net, *inputs).backward()
    torch.cuda.current_stream().wait_stream(stream)
    net.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = loss_of(net, *inputs)
        loss.backward()
    # Frozen statistics would make two passes equal; trained ones move, so they are put back for the comparison.
    saved = {name: buffer.clone() for name, buffer in net.named_buffers()}
    graph.replay()
    captured = loss.clone()
    for name, buffer in net.named_buffers():
        buffer.copy_(saved[name])
    assert torch.allclose(captured, loss_of(net, *inputs), rtol=1e-5)


def test_detections_equal_the_cpus() -> None:
    net = model("cpu").eval()
    generator = torch.Generator().manual_seed(1)
    anchors = len(net.anchors)
    # Random predictions, not the untrained model's: its scores are nearly equal, and their order is rounding's.
    predictions = RawPredictions(
        torch.randn(BATCH, anchors, CONFIG.num_classes, generator=generator) * 2 - 4,
        torch.randn(BATCH, anchors, 4, generator=generator) * 0.2,
    )
    found = net.detect(predictions)
    net.cuda()
    on_gpu = net.detect(RawPredictions(*(part.cuda() for part in predictions)))
    assert torch.equal(found.count, on_gpu.count.cpu())
    assert found.count.sum() > 0
    assert torch.equal(found.labels, on_gpu.labels.cpu())
    assert torch.allclose(found.scores, on_gpu.scores.cpu(), atol=1e-6)
    assert torch.allclose(found.boxes, on_gpu.boxes.cpu(), atol=1e-3)
