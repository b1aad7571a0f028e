"""What each kind of finding is, and what to write in its place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One way in which a step can't be captured, or would be captured wrongly."""

    what: str
    """What happens there; `{...}` is filled in by the finding."""
    cure: str
    """What to write instead."""
    breaks: bool = True
    """Whether a capture fails."""
    freezes: bool = False
    """Whether a capture succeeds, and its replays would repeat or leave out what is done here."""


KINDS: dict[str, Kind] = {
    "value read on the host": Kind(
        "the host waits for the device to read a number: .item(), float(), int()",
        "keep it a tensor: self.log takes tensors, and sums and comparisons work on the device; read it after the step",
    ),
    "branch on a tensor": Kind(
        "Python asks a tensor for True or False and goes one way; a replay would go that way for ever",
        "compute both and choose: torch.where(condition, a, b); torch.maximum, torch.minimum or clamp in place of "
        "max() and min(); torch._assert_async(condition) in place of assert",
    ),
    "tensor as an index": Kind(
        "a tensor is turned into a Python integer: an index, the end of a slice, a size",
        "index with a 1-d tensor, x.index_select(0, i.view(1)); for x[:n] keep the shape and mask the rest, "
        "torch.where(torch.arange(len(x), device=x.device) < n, x, 0)",
    ),
    "tensor as text": Kind(
        "printing or formatting a tensor reads it on the host",
        "hand the tensor to self.log, or print it after the step, in on_train_batch_end",
    ),
    "copy to the host": Kind(
        "a tensor is copied to the host: .cpu(), .numpy(), .tolist()",
        "compute with torch's functions on the device; what the host must have, copy after the step, in "
        "on_train_batch_end",
    ),
    "copy from the host": Kind(
        "values made on the host are copied to the device: torch.tensor([...], device=...), .to(device) of a host "
        "tensor, a list as an index",
        'make it once, in __init__: self.register_buffer("name", torch.tensor([...]), persistent=False); what follows '
        "from shapes is made on the device by torch.arange, torch.full or torch.zeros with device=x.device",
    ),
    "copy from pinned memory": Kind(
        "a replay copies from the same pinned host memory again, whatever it holds by then",
        "copy it to the device before the step: the batch is; or keep the source alive and write new values into it",
        breaks=False,
    ),
    "boolean indexing": Kind(
        "x[mask] has as many elements as the mask has True, which the host waits to learn",
        "keep the shape: torch.where(mask, x, 0), for a mean torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1); "
        "for x[mask] = y write x = torch.where(mask, y, x)",
    ),
    "nonzero": Kind(
        "the number of indices found depends on the data, and the host waits to learn it",
        "compute with the mask itself, torch.where(mask, x, 0), or take a fixed number of indices: "
        "mask.float().topk(k).indices",
    ),
    "unique": Kind(
        "the number of different values depends on the data, and the host waits to learn it",
        "count into a fixed number of bins: torch.zeros(n, device=x.device).scatter_add_(0, x, weights); a "
        "torchmetrics metric does this to check its arguments: construct it with validate_args=False",
    ),
    "repeat_interleave without output_size": Kind(
        "the number of rows is the sum of the repeats, which the host waits to learn",
        "say it: torch.repeat_interleave(x, repeats, output_size=n) with a Python integer n",
    ),
    "comparison read on the host": Kind(
        "torch.equal and torch.allclose return a Python bool",
        "compare on the device: (a == b).all() or torch.isclose(a, b).all() is a tensor, for torch.where to choose by",
    ),
    "counting into bins": Kind(
        "torch.bincount, and torch.histc without min and max, read the range of the data on the host",
        "give histc min= and max=; in place of bincount torch.zeros(n, device=x.device).scatter_add_(0, x, weights)",
    ),
    "linear algebra check": Kind(
        "{op} reads an error code of the device on the host",
        "use the form that does not check: torch.linalg.cholesky_ex, inv_ex, solve_ex, lu_factor_ex; eigh, svd and "
        "lstsq have none and must stay outside of the captured step",
    ),
    "checked sampling": Kind(
        "{op} checks its deviations on the host",
        "mean + std * torch.randn_like(std), which is rsample() of torch.distributions.Normal in place of sample()",
    ),
    "non-maximum suppression": Kind(
        "torchvision's nms goes through the boxes on the host, and how many are left depends on the data",
        "keep it out of the training step; two-stage detectors need it in there, and can't be captured whole",
    ),
    "lengths read on the host": Kind(
        "ctc_loss copies tensors of lengths to the host",
        "hand over the lengths as tuples of Python integers, where they are the same for every batch; else leave this "
        "loss outside of the captured step",
    ),
    "shape that depends on the data": Kind(
        "the shape of what {op} returns depends on the data, and the host waits to learn it",
        "write it with fixed shapes: masks, torch.where, topk with a fixed k",
    ),
    "hidden synchronization": Kind(
        "{op} waits for the device in its own code",
        "replace it by operations that stay on the device, or move it out of the step",
    ),
    "explicit synchronization": Kind(
        "{op} waits for the device",
        "leave it out; time whole steps from outside, with CUDA events",
    ),
    "generator of its own": Kind(
        "random numbers come from a torch.Generator that the graph does not know, and a capture refuses it",
        "leave generator= out, so that the device's default generator is used, and seed that by torch.manual_seed",
    ),
    "host random numbers": Kind(
        "{op} draws on the host; every replay would use the capture's numbers again",
        "draw on the device: torch.rand(n, device=x.device), torch.randint(high, (n,), device=x.device)",
        breaks=False,
        freezes=True,
    ),
    "host number logged": Kind(
        "self.log is given a number of the host; every replay would log the capture's again",
        "log it after the step, in on_train_batch_end; a tensor of the device is logged anew at each replay",
        breaks=False,
    ),
    "host value changed": Kind(
        "{path} goes from {before} to {after} on the host; a replay leaves it as it is",
        "make it a tensor of the device that the step changes in place, self.register_buffer and .add_(1); or change "
        "it after the step, in on_train_batch_end",
        breaks=False,
        freezes=True,
    ),
    "container changed": Kind(
        "{path} goes from {before} to {after}; a replay leaves it as it is",
        "keep a sum, or the last n values, in a buffer of fixed shape that the step changes in place; or fill it after "
        "the step, in on_train_batch_end",
        breaks=False,
        freezes=True,
    ),
    "tensor replaced": Kind(
        "{path} is bound to a new tensor in each step; after a replay the new value is copied to where the next replay "
        "reads the old one",
        "nothing needs to change; in place it costs no copy: self.average.mul_(0.9).add_(x, alpha=0.1)",
        breaks=False,
    ),
}
