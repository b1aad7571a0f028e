"""One call of an evaluation step, replayed where nothing has changed but the tensors' values."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fasttrain.batches import OpaqueLeaf, map_tensors
from fasttrain.callbacks.cuda_graph_step import CapturedFunction
from fasttrain.callbacks.cuda_graph_step.host_state import changed, host_random_state, plain_attributes, random_changed
from fasttrain.callbacks.graph_evaluation.places import Place

WARM_UP = 2
"""Eager calls before the first capture: in the first libraries choose kernels and modules make what they make once."""
MOST_STATES = 4
"""Sets of addresses and modes for which graphs are kept: the weights, averaged ones in their place, and some more."""


class CapturedCall:
    """Stands in for a method while it is installed; what it returns is the caller's own, as ever.

    A graph is kept for each signature of the inputs, under one mode (inference or no gradients, autocast, each
    module's mode) and one set of addresses of parameters and buffers. Weights that change in place are read anew by
    every replay; others that are put in their place have a graph of their own.

    Args:
        place: what it stands in for.
        device: of the inputs.
        max_graphs: kept at the same time.
        check: compare each new graph's first replay with an eager call.
        stand_in: run the method again instead of replaying a graph; for tests.
        tell: given the reason why calls run eagerly from then on.
        busy: calls that are running, of all that are installed together.
    """

    def __init__(
        self,
        place: Place,
        device: torch.device,
        max_graphs: int,
        check: bool,
        stand_in: bool,
        tell: Callable[[str], None],
        busy: list["CapturedCall"],
    ) -> None:
        self.place, self.device, self.reason = place, device, ""
        self.plain: Callable[..., Any] = getattr(place.owner, place.name)
        self._tell, self._busy = tell, busy
        self._states: dict[tuple[Any, ...], int] = {}
        self._attributes = self._plain_attributes()
        self._before: Any = None
        self._captured = CapturedFunction(
            self._run, device=device, warm_up=WARM_UP, max_graphs=max_graphs, module=place.owner, check=check,
            stand_in=stand_in, tell=self._note,
        )  # fmt: skip
        self.pool = self._captured.pool

    def install(self) -> None:
        """Take the method's place, with no graph that has something built in that is otherwise now."""
        owner, name = self.place.owner, self.place.name
        if (path := self.place.hooked()) is not None:
            self.give_up(f"'{path}' is watched by hooks, which a replay would not call")
        attributes, plain = self._plain_attributes(), getattr(owner, name)
        if plain != self.plain or changed(self._attributes, attributes):
            self.pool.clear()
        self.plain, self._attributes = plain, attributes
        self._before = vars(owner).get(name)
        setattr(owner, name, self)

    def remove(self) -> None:
        """Give the method its place back."""
        owner, name = self.place.owner, self.place.name
        if vars(owner).get(name) is not self:
            return
        if self._before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, self._before)

    def release(self) -> None:
        """Give the method its place, and the graphs' memory, back."""
        self.remove()
        self._captured.release()

    def give_up(self, reason: str) -> None:
        """Run eagerly from now on."""
        if not self.reason:
            self.pool.clear()
            self._note(reason)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the method returns."""
        if self.reason or self._busy or torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        replays = self._replays()
        watched = self._host_state() if not replays else None
        self._busy.append(self)
        try:
            result = self._captured(args, kwargs, self._mode())
        except OpaqueLeaf as error:
            self.give_up(f"its input {str(error).removeprefix('batch')}, which a graph can't tell from another")
            return self.plain(*args, **kwargs)
        finally:
            self._busy.remove(self)
        if self._replays() > replays:
            return map_tensors(result, Tensor.clone)
        if watched is not None:
            self._look(watched)
        return result

    def _run(self, args: Any, kwargs: Any, mode: Any) -> Any:
        # Casts of weights that autocast keeps would be built in, and not be made of later weights.
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return self.plain(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(caches)

    def _mode(self) -> tuple[Any, ...]:
        owner, kind = self.place.owner, self.device.type
        addresses = [tensor.data_ptr() for tensor in chain(owner.parameters(), owner.buffers())]
        modules = [(id(module), module.training) for module in owner.modules()]
        state = (tuple(addresses), tuple(modules))
        if state not in self._states and len(self._states) >= MOST_STATES:
            self._states.clear()
            self.pool.clear()
        number = self._states.setdefault(state, len(self._states))
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return number, autocast, torch.is_inference_mode_enabled()

    def _replays(self) -> int:
        return self.pool.hits + self.pool.captures

    def _host_state(self) -> tuple[Any, ...]:
        device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return host_random_state(), device, self._plain_attributes()

    def _look(self, before: tuple[Any, ...]) -> None:
        """Give up where an eager call did on the host what a replay would not do, or drew random numbers."""
        random, device, attributes = before
        drawn = random_changed(random)
        if device is not None and not torch.equal(device, torch.cuda.get_rng_state(self.device)):
            drawn.append(str(self.device))
        if drawn:
            self.give_up(f"it draws random numbers ({', '.join(drawn)}), and an evaluation's are to be the eager ones")
        elif self.pool.warm_steps > 1 and (other := changed(attributes, self._plain_attributes())):
            self.give_up(f"it changes the attribute {other[0]}, which a replay would not")

    def _plain_attributes(self) -> dict[str, Any]:
        modules = [self.place.owner] if self.place.name == "forward" else list(self.place.owner.children())
        return {f"{i}.{path}": value for i, m in enumerate(modules) for path, value in plain_attributes(m).items()}

    def _note(self, reason: str) -> None:
        self.reason = reason
        self._tell(f"{self.place.path} runs eagerly, since {reason}")
