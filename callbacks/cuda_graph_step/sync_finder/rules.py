"""What a call of an operator, or of a function of torch's Python interface, means for a capture: a kind, or nothing."""

from typing import Any

import torch
from torch import Tensor

from fasttrain.batches import tensors_in
from fasttrain.callbacks.cuda_graph_step.sync_finder.host_tensors import FROM_DATA, TO_HOST, Call, HostTensors

# A scalar is read by whichever function asked for it; by default it is a plain read.
READERS = {
    "__bool__": "branch on a tensor",
    "__contains__": "branch on a tensor",
    "__index__": "tensor as an index",
    "__getitem__": "tensor as an index",
    "__setitem__": "tensor as an index",
    "__format__": "tensor as text",
    "__repr__": "tensor as text",
}
# The host reads a size or a verdict, on any device.
SYNCHRONIZING = {
    "aten::nonzero": "nonzero",
    "aten::argwhere": "nonzero",
    "aten::masked_select": "boolean indexing",
    "aten::_unique": "unique",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::unique_dim_consecutive": "unique",
    "aten::equal": "comparison read on the host",
    "aten::allclose": "comparison read on the host",
    "aten::bincount": "counting into bins",
    "aten::_linalg_check_errors": "linear algebra check",
    "torchvision::nms": "non-maximum suppression",
}
# Kernels for the GPU that wait in their own code, which no other operator shows. On a GPU torch's own warning decides,
# and this says what it was about. Read in PyTorch's sources: DistributionTemplates.h (the check of normal),
# BatchLinearAlgebra.cpp, LossCTC.cpp. multinomial does not wait: seen on an H200 with torch 2.11.
HIDDEN = {
    "aten::normal": "checked sampling",
    "aten::_linalg_eigh": "linear algebra check",
    "aten::linalg_eig": "linear algebra check",
    "aten::_linalg_svd": "linear algebra check",
    "aten::linalg_lstsq": "linear algebra check",
    "aten::_ctc_loss": "lengths read on the host",
}
INDEXING = ("aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index_put",
            "aten::_index_put_impl_")  # fmt: skip
# Their checks of the values are made on a CPU only.
CHECKED_ON_CPU = ("one_hot", "quantile", "nanquantile")
SHAPE_TAGS = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
# Tagged, and all right under conditions that `kind_of_operator` looks at.
CONDITIONAL = frozenset({"aten::repeat_interleave", "aten::item", "aten::one_hot", *INDEXING, *HIDDEN})


def kind_of_operator(call: Call, tags: Any, host: HostTensors, function: Call | None) -> str | None:
    """Return the kind of finding that an operator's call is, a key of `cures.KINDS`; None if it does no harm.

    Args:
        call: named `namespace::operator.overload`.
        tags: the operator's `torch.Tag`s.
        host: tells where tensors are.
        function: the function of the Python interface that called it, if one did.
    """
    name = call.name.partition(".")[0]
    tensors = list(call.tensors())
    if name in ("aten::_to_copy", "aten::copy_"):
        return _kind_of_copy(name, call, host)
    if name == "aten::lift_fresh" and not host.follows and tensors[0] not in host:
        # A list as an index: the functions that make tensors from lists are judged by their arguments.
        return "copy from the host" if function is not None and function.name not in FROM_DATA else None
    if not tensors or host.all_in(tensors):
        return None
    if name == "aten::_local_scalar_dense":
        return _kind_of_read(host, function)
    if name in INDEXING:
        return _kind_of_indexing(call, host)
    if name == "aten::repeat_interleave":
        return None if call.kwargs.get("output_size") is not None else "repeat_interleave without output_size"
    if name == "aten::histc":
        lowest, highest = (*call.args[2:], 0, 0)[:2]
        return "counting into bins" if lowest == highest else None
    if name in SYNCHRONIZING:
        return SYNCHRONIZING[name]
    if host.follows and (hidden := hidden_kind(call)):
        return hidden
    return "shape that depends on the data" if SHAPE_TAGS & set(tags) and name not in CONDITIONAL else None


def hidden_kind(call: Call) -> str | None:
    """Return what an operator's kernel for the GPU would be found for, if it waits for the device in its own code."""
    name, _, overload = call.name.partition(".")
    if name == "aten::normal":
        return HIDDEN[name] if overload in ("Tensor_Tensor", "float_Tensor") else None
    if name == "aten::_ctc_loss":
        return HIDDEN[name] if overload == "Tensor" else None
    return HIDDEN.get(name)


def kind_of_draw(call: Call, tags: Any, result: Any, host: HostTensors) -> str | None:
    """Return what an operator is found for by the random numbers that it drew, if it did; known once it has run."""
    if torch.Tag.nondeterministic_seeded not in tags:
        return None
    if host.all_in(tensors_in([result])):
        return "host random numbers"
    return "generator of its own" if _has_unknown_generator(call, host) else None


def kind_of_function(call: Call, result: Any, host: HostTensors) -> str | None:
    """Return the kind of finding that a function of torch's Python interface is by itself, whatever operators it calls.

    On a CPU these are the copies between host and device, which are no operators there.
    """
    first = call.args[0] if call.args else None
    if call.name in FROM_DATA:
        data = call.args[1] if call.name == "new_tensor" and len(call.args) > 1 else first
        if isinstance(data, (list, tuple)) and any(tensor not in host for tensor in tensors_in(data)):
            return "value read on the host"
        if not isinstance(data, Tensor) and isinstance(result, Tensor) and result not in host:
            return "copy from the host"
    if not host.follows or not isinstance(first, Tensor):
        return None
    if call.name == "__repr__" or call.name in TO_HOST:
        kind = "tensor as text" if call.name == "__repr__" else "copy to the host"
        return None if first in host else kind
    destination = host.destination(call)
    if destination is None or destination == (first in host):
        return None
    return "copy to the host" if destination else "copy from the host"


def kind_of_warning(function: Call | None) -> str:
    """Return the kind for a wait that torch warned of, by the function of the Python interface that was running."""
    if function is None:
        return "hidden synchronization"
    if function.name in FROM_DATA:
        return "copy from the host"
    return "copy to the host" if function.name in TO_HOST else READERS.get(function.name, "hidden synchronization")


def _kind_of_copy(name: str, call: Call, host: HostTensors) -> str | None:
    if name == "aten::copy_":
        source, to_host = call.args[1], call.args[0] in host
        non_blocking = call.args[2] if len(call.args) > 2 else False
    else:
        source, device = call.args[0], call.kwargs.get("device")
        to_host = source in host if device is None or host.follows else torch.device(device).type == "cpu"
        non_blocking = call.kwargs.get("non_blocking", False)
    if to_host == (source in host):
        return None
    if to_host:
        return "copy to the host"
    return "copy from pinned memory" if non_blocking and source.is_pinned() else "copy from the host"


def _kind_of_read(host: HostTensors, function: Call | None) -> str | None:
    if function is None:
        return "value read on the host"
    if host.follows and function.name in CHECKED_ON_CPU:
        classes = function.args[1] if len(function.args) > 1 else function.kwargs.get("num_classes", -1)
        if function.name != "one_hot" or classes != -1:
            return None
    return READERS.get(function.name, "value read on the host")


def _kind_of_indexing(call: Call, host: HostTensors) -> str | None:
    indices = list(tensors_in([call.args[1]]))
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        value = call.args[2] if len(call.args) > 2 else None
        # x[mask] = 0 becomes masked_fill, which does not ask how many there are. Its backward makes such a value of its
        # own, about which nothing is known on a CPU.
        fills = isinstance(value, Tensor) and value.numel() == 1 and len(indices) == 1
        known = fills and (value in host or (host.follows and torch._C._current_autograd_node() is not None))
        return None if known else "boolean indexing"
    moved = any(index in host for index in indices) and call.args[0] not in host
    return "copy from the host" if moved else None


def _has_unknown_generator(call: Call, host: HostTensors) -> bool:
    generator = call.kwargs.get("generator")
    if generator is None:
        return False
    if host.follows:
        return True
    if generator.device.type != "cuda":
        return False
    known: list[Any] = list(torch.cuda.default_generators)
    return all(generator._cdata != each._cdata for each in known)
