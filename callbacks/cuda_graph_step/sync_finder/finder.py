"""Every place in a step that would break a capture, or be captured wrongly, found in one ordinary run of it."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.callbacks.cuda_graph_step.sync_finder.cures import KINDS
from fasttrain.callbacks.cuda_graph_step.sync_finder.host_tensors import Call, HostTensors
from fasttrain.callbacks.cuda_graph_step.sync_finder.places import Place, Site, current_site
from fasttrain.callbacks.cuda_graph_step.sync_finder.rules import (
    hidden_kind,
    kind_of_draw,
    kind_of_function,
    kind_of_operator,
    kind_of_warning,
)

UNSEEN_ON_CPU = (
    "Examined on the CPU, where no tensor is on another device: what would be copied to or from a GPU is judged by how "
    "tensors are made (without device= they count as the host's), and a wait inside a GPU kernel's own code by the "
    "operator's name. On a GPU both are observed."
)
WARNING = "called a synchronizing CUDA operation"
# torch.cuda.synchronize, torch.accelerator.synchronize, and the methods of streams and events, as C functions.
EXPLICIT = ("_cuda_synchronize", "_accelerator_synchronizeDevice", "synchronize")


@dataclass(frozen=True)
class Finding:
    """One line that would break a capture, or freeze a value in it."""

    kind: str
    """A key of `cures.KINDS`."""
    where: Place | None
    """File and line, None where the line could not be told."""
    code: str
    """The line's source."""
    user_where: Place | None
    """The line of the user's own code that led there, where `where` is in an installed library."""
    what: str
    cure: str
    count: int
    """How often it happened in the step."""
    breaks: bool
    """Whether the capture fails."""

    @property
    def freezes(self) -> bool:
        """Whether the capture succeeds, and its replays would repeat or leave out what is done here."""
        return KINDS[self.kind].freezes


def find_syncs(step: Callable[[], Any], device: torch.device | str) -> list[Finding]:
    """Run `step`, forward and backward, once, and return what a capture of it would stumble over, in order.

    On a GPU every operator is looked at, and torch's synchronization warnings besides; a place in the backward without
    a line of Python is named by the line of its forward. On a CPU see `UNSEEN_ON_CPU`. What `step` changes stays
    changed.
    """
    return SyncFinder(torch.device(device)).run(step)


def finding(kind: str, site: Site | None, **words: str) -> Finding:
    """Return a finding of a kind; `words` fill in what the kind's sentence leaves open."""
    about = KINDS[kind]
    what = about.what.format(**words) if words else about.what
    where, code, user_where = (site.where, site.code, site.user_where) if site else (None, "", None)
    return Finding(kind, where, code, user_where, what, about.cure, 1, about.breaks)


class SyncFinder:
    """Runs steps and looks on. What it learns of where tensors are stays with it from one run to the next.

    Args:
        device: where the step runs.
        on_host: on a CPU, tensors that would stay on the host if the step ran on a GPU.
    """

    def __init__(self, device: torch.device, on_host: Iterable[Tensor] = ()) -> None:
        self.device = device
        self.host = HostTensors(device, on_host)
        self.function: Call | None = None
        """The function of torch's Python interface that is running."""
        self._found: dict[tuple[str, Place | None], Finding] = {}
        self._warned: dict[Place | None, Finding] = {}
        self._hidden: dict[Place | None, tuple[str, str]] = {}

    def run(self, step: Callable[[], Any]) -> list[Finding]:
        """Run `step` once; return this run's findings, in order, each line once for each kind."""
        self._found, self._warned, self._hidden = {}, {}, {}
        with _forward_lines_kept(), self._waits_noticed(), _Functions(self), _Operators(self):
            self._run_watched(step)
        self._add_what_only_torch_noticed()
        return list(self._found.values())

    def _run_watched(self, step: Callable[[], Any]) -> None:
        step()  # the lines above this function's frame are not the step's

    def report(self, kind: str, what: str = "") -> None:
        """Count a finding of a kind at the line that is running; `what` names the operator."""
        self._add(kind, self.site(), what)

    def site(self) -> Site | None:
        """Return the line that is running."""
        return current_site(SyncFinder._run_watched.__code__)

    def may_wait(self, kind: str, what: str) -> None:
        """Note what it is about, should torch warn of the line that is running."""
        site = self.site()
        self._hidden[site.where if site else None] = (kind, what)

    def _add(self, kind: str, site: Site | None, what: str = "") -> None:
        key = (kind, site.where if site else None)
        known = self._found.get(key)
        self._found[key] = replace(known, count=known.count + 1) if known else finding(kind, site, op=what)

    def _add_what_only_torch_noticed(self) -> None:
        places = {place for _, place in self._found}
        for place, noticed in self._warned.items():
            # Warnings from the backward's own threads may come without a line; what was found is taken for their cause.
            if place not in places and not (place is None and places):
                self._found[noticed.kind, place] = noticed

    @contextmanager
    def _waits_noticed(self) -> Iterator[None]:
        """Let torch warn of every wait for the device that goes through its own code, and notice those by request."""
        if self.device.type != "cuda":
            yield
            return
        mode, profile = torch.cuda.get_sync_debug_mode(), sys.getprofile()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore")
            warnings.filterwarnings("always", message=f".*{WARNING}.*")
            warnings.showwarning = self._on_warning
            torch.cuda.set_sync_debug_mode("warn")
            sys.setprofile(self._on_profile)
            try:
                yield
            finally:
                sys.setprofile(profile)
                torch.cuda.set_sync_debug_mode(mode)

    def _on_warning(self, message: Warning | str, *rest: Any, **others: Any) -> None:
        # Warnings of the backward's threads are issued when it has ended, at the line that called it.
        site = None if self.function is not None and self.function.name in ("backward", "grad") else self.site()
        place = site.where if site else None
        name = f"torch.{self.function.name}" if self.function else "an operator"
        kind, what = self._hidden.get(place, (kind_of_warning(self.function), name))
        known = self._warned.get(place)
        self._warned[place] = replace(known, count=known.count + 1) if known else finding(kind, site, op=what)

    def _on_profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") in EXPLICIT:
            self.report("explicit synchronization", f"{argument.__name__}()".lstrip("_"))


class _Operators(TorchDispatchMode):
    """Looks at every operator, in the backward's threads too: autograd hands the mode on to them."""

    supports_higher_order_operators = True

    def __init__(self, finder: SyncFinder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.finder = finder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        finder, call = self.finder, Call(func.name(), tuple(args), kwargs or {})
        kind = kind_of_operator(call, func.tags, finder.host, finder.function)
        if kind is not None:
            finder.report(kind, _readable(call.name))
        elif not finder.host.follows and (hidden := hidden_kind(call)):
            finder.may_wait(hidden, _readable(call.name))
        result = func(*args, **(kwargs or {}))
        finder.host.follow_operator(call, result, finder.function)
        if kind := kind_of_draw(call, func.tags, result, finder.host):
            finder.report(kind, _readable(call.name))
        return result


class _Functions(TorchFunctionMode):
    """Knows which function of torch's Python interface is running, so that `if x:` and `x.item()` are told apart."""

    def __init__(self, finder: SyncFinder) -> None:
        super().__init__()
        self.finder = finder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        finder, outer = self.finder, self.finder.function
        finder.function = call = Call(getattr(func, "__name__", ""), tuple(args), kwargs or {})
        try:
            result = func(*args, **(kwargs or {}))
            if kind := kind_of_function(call, result, finder.host):
                finder.report(kind, f"torch.{call.name}")
            return finder.host.follow_function(call, result)
        finally:
            finder.function = outer


@contextmanager
def _forward_lines_kept() -> Iterator[None]:
    """Have autograd note for each of its nodes where the forward was called."""
    was_on, checked = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(was_on, checked)


def _readable(operator: str) -> str:
    """Return the operator as it would be written: `aten::_linalg_eigh.default` -> `linalg_eigh`."""
    namespace, _, name = operator.partition(".")[0].rpartition("::")
    name = name.strip("_")
    return name if namespace == "aten" else f"{namespace}.{name}"
