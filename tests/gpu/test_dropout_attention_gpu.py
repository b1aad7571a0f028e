"""dropout_attention on a GPU: the kernels against the reference given the same mask, and in a captured graph."""

import pytest
import torch

from fasttrain.callbacks.dropout_attention import dropout_attention, make_blocks
from fasttrain.callbacks.dropout_attention.mask import draw_words, keep_mask
from fasttrain.callbacks.dropout_attention.reference import TOLERANCE, attention

pytestmark = pytest.mark.gpu
LENGTHS = [1, 0, 512, 130, 0, 64, 63, 65, 7, 258, 0, 128]


@pytest.fixture(autouse=True)
def _compiled_kernels() -> None:
    kernel = pytest.importorskip("fasttrain.callbacks.dropout_attention.forward_kernel")
    if kernel.INTERPRETED.value:
        pytest.skip("Triton interprets here; set TRITON_INTERPRET=0")


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, 64), (torch.float16, 32), (torch.float16, 16), (torch.bfloat16, 128), (torch.float32, 64)],
    ids=str,
)
def test_result_and_gradients(dtype: torch.dtype, size: int, causal: bool, dropout: float) -> None:
    tokens = sum(LENGTHS)
    cu = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    parts = [torch.randn(tokens, 2, size, device="cuda").to(dtype).requires_grad_() for _ in range(3)]
    words = draw_words(2, tokens, "cuda") if dropout else None
    exact = [part.detach().double().requires_grad_() for part in parts]
    keep = keep_mask(words, dropout) if words else None
    wanted = attention(*exact, LENGTHS, dropout=dropout, keep=keep, causal=causal)
    found = dropout_attention(*parts, make_blocks(cu, tokens), dropout=dropout, causal=causal, words=words)
    upstream = torch.randn_like(found)
    gradients = torch.autograd.grad(found, parts, upstream)
    wanted_gradients = torch.autograd.grad(wanted, exact, upstream.double())
    for a, b in zip((found, *gradients), (wanted, *wanted_gradients), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=TOLERANCE[dtype] * float(1 + b.detach().abs().max()))


def test_each_replay_drops_others_and_a_seed_brings_them_back() -> None:
    cu = torch.tensor([0, 100, 100, 256], device="cuda", dtype=torch.int32)
    parts = [torch.randn(256, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def step() -> list[torch.Tensor]:
        found = dropout_attention(*parts, make_blocks(cu, 256), dropout=0.5)
        return [found, *torch.autograd.grad(found.float().sum(), parts)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replayed() -> list[torch.Tensor]:
        graph.replay()
        return [result.clone() for result in results]

    torch.manual_seed(0)
    first, second = replayed(), replayed()
    torch.manual_seed(0)
    again = replayed()
    for a, b, c in zip(first, second, again, strict=True):
        assert not torch.equal(a, b)
        assert torch.equal(a, c)
    cu.copy_(torch.tensor([0, 10, 200, 256]))
    torch.manual_seed(0)
    assert not torch.equal(replayed()[0], first[0]), "offsets are read by each replay"
