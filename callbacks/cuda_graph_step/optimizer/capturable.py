"""A torch optimizer whose step can be captured, while schedulers, callbacks and checkpoints go on seeing plain numbers.

A graph bakes in the Python numbers that its capture read (pytorch/pytorch#106802, #76368). So the parameter groups hold
device tensors while a step runs, plain numbers otherwise, and before each replay the numbers that changed are written
to the device.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fasttrain.callbacks.cuda_graph_step.optimizer.device_numbers import DeviceNumbers
from fasttrain.callbacks.cuda_graph_step.optimizer.dry_step import dry_step_problem
from fasttrain.callbacks.cuda_graph_step.optimizer.group_update import UPDATES
from fasttrain.callbacks.cuda_graph_step.optimizer.recipes import FLAGS, known_class, problem_of_tensors, recipe_for
from fasttrain.errors import OptimizationError

WRITTEN_BY_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Keys that torch's schedulers add to a group for themselves; no optimizer reads them."""


@dataclass(frozen=True)
class PreparedGroup:
    """A parameter group, and what it holds during a step."""

    group: dict[str, Any]
    flags: dict[str, bool]
    values: dict[str, Tensor]
    """Device values by name; empty where the user's own learning rate is a tensor on the device already."""


class CapturableOptimizer:
    """Prepares an optimizer's steps to be captured, on the optimizer itself and only while one runs.

    Each eager step and the capture run inside `prepared()`; before each replay `upload()` is called. The groups and
    their list stay the objects they are. Two tiers:

    - torch's own implementation, with the learning rate on the device and all else baked in;
    - SGD, Adam and AdamW with all their numbers on the device (`use_device_values`), for a momentum that is cycled or
      a weight decay that is scheduled. SGD with dampening always uses it.

    On the CPU nothing can be captured; for an eager stand-in there, the first tier keeps the user's flags and computes
    what the plain optimizer does, bit for bit, since a float64 tensor is read back as the number it was.

    Args:
        optimizer: any torch optimizer. Gets hooks on its state dict, so that whatever is saved is plain, until
            `release`.
        device: where its parameters are.
    """

    changed_inside: tuple[str, ...] = ()
    """Numbers that the last prepared step itself changed on the host; a replay would not change them again."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, torch.empty(0, device=device).device  # "cuda" has an index then
        self._known, self._recipe = known_class(optimizer), recipe_for(optimizer)
        self._uses_device_values = False
        self._generation = 0
        self._swapped: list[tuple[dict[str, Any], str, Any, Any, int]] | None = None
        self._hooks = [
            optimizer.register_load_state_dict_post_hook(lambda _: self._advance()),
            optimizer.register_state_dict_post_hook(lambda _, saved: self.state_for_checkpoint(saved)),
        ]
        self._build()
        self.accept()

    @property
    def is_known(self) -> bool:
        """Whether it is one of torch's capturable classes, so that `problem` needs no dry step."""
        return self._known is not None

    def problem(self) -> str | None:
        """Return a sentence with the reason why the step can't be captured, None if it can.

        An optimizer that is not one of torch's capturable ones takes a dry step on copies of its tensors.
        """
        if self._known is None:
            return dry_step_problem(
                self.optimizer, self.device, lambda twin: CapturableOptimizer(twin, self.device).prepared
            )
        if self._needs_device_values():
            return self.device_values_problem()
        return problem_of_tensors(self.optimizer, self.device, complex_works=self._known is not SGD)

    def device_values_problem(self) -> str | None:
        """Return a sentence with the reason why `use_device_values` is not possible, None if it is."""
        name = type(self.optimizer).__name__
        if self._known not in UPDATES:
            return f"{name} takes nothing but lr from the device; SGD, Adam and AdamW take all their numbers"
        if any(_is_on(self.device, group["lr"]) for group in self.optimizer.param_groups):
            return f"{name}'s lr is a tensor on the device already; give a number"
        return problem_of_tensors(self.optimizer, self.device, complex_works=False)

    def use_device_values(self, use: bool = True) -> None:
        """Have all numbers of SGD, Adam or AdamW on the device from the next step on, or lr only.

        Raises:
            OptimizationError: the optimizer is another one, or of a kind that has no such update.
        """
        if use == self._uses_device_values:
            return
        reason = self.device_values_problem() if use else None
        if reason is not None:
            raise OptimizationError(f"cuda_graph_step: {reason}, or capture without the optimizer (scope: fwd_bwd).")
        self._uses_device_values = use
        self._advance()
        self._build()
        self.accept()

    @property
    def uses_device_values(self) -> bool:
        """Whether all numbers are on the device, not lr only."""
        return self._uses_device_values

    @property
    def honours_found_inf(self) -> bool:
        """Whether a prepared step changes nothing where `optimizer.found_inf` is 1, as torch's fused optimizers do."""
        are_fused = all({**each.group, **each.flags}.get("fused") for each in self._current())
        return self._uses_device_values or (self._known in (SGD, Adam, AdamW) and are_fused)

    @property
    def generation(self) -> int:
        """Another number whenever what was captured no longer holds: state loaded, parameters added, tier changed."""
        self._current()
        return self._generation

    def state_entries(self) -> int:
        """Return how many values the optimizer keeps as state.

        If a capture makes it grow, each replay would make that state anew: an eager step has to come first.
        """
        return sum(len(state) for state in self.optimizer.state.values())

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Run a step within, eagerly or to capture it: the groups hold device values, the state is on the device.

        Afterwards host values are back, also when the step raises. What the step itself wrote to a group is kept, and
        named in `changed_inside`. A capture needs a prepared step before it.
        """
        if self._swapped is not None:
            yield
            return
        if self._needs_device_values():
            self.use_device_values()
        self.upload()
        self._move_state()
        with self._patched():
            self._swapped = self._swap_in()
            try:
                yield
            finally:
                swapped, self._swapped = self._swapped, None
                self._swap_out(swapped)

    def upload(self) -> None:
        """Write the numbers that changed since the last time to the device, without waiting for it.

        Within `prepared()` it does nothing: that has done it.
        """
        if self._swapped is not None:
            return
        self._current()
        numbers = self._host_numbers()
        if not self._numbers.hold(numbers):
            assert not _is_capturing(self.device), "what is written in a capture is baked in"
            self._numbers.write(numbers)

    def accept(self) -> None:
        """Take the numbers that are baked in as they are now; to be called when a step is captured."""
        self._accepted, self._accepted_names = self._constants(), self._constant_names

    def constants_changed(self) -> tuple[str, ...]:
        """Return what is baked in and was another number when it was accepted, in words; mostly nothing."""
        now = self._constants()
        if now == self._accepted:
            return ()
        if len(now) != len(self._accepted):
            return (f"the number of parameter groups from {len(self._accepted)} to {len(now)}",)
        changed = []
        for index, (old, new) in enumerate(zip(self._accepted, now, strict=True)):
            before = dict(zip(self._accepted_names[index], old, strict=True))
            after = dict(zip(self._constant_names[index], new, strict=True))
            changed += [
                f"{name} of parameter group {index} from {before.get(name)} to {after.get(name)}"
                for name in {**before, **after}
                if before.get(name) != after.get(name)
            ]
        return tuple(changed)

    def state_for_checkpoint(self, optimizer_state: dict[str, Any]) -> dict[str, Any]:
        """Return what the plain optimizer's `state_dict()` would have given, for what this one's gave. Mutates nothing.

        State like `step` is on the CPU again, unless the user's own flags have it on the device. A hook does this to
        every `state_dict()` already; done twice it changes nothing.
        """
        host = {(id(group), key): value for group, key, value, *_ in self._swapped or ()}
        groups, state = [], dict(optimizer_state["state"])
        for packed, group in zip(optimizer_state["param_groups"], self.optimizer.param_groups, strict=True):
            plain = {key: host.get((id(group), key), value) for key, value in packed.items()}
            groups.append(plain)
            if not _keeps_state_on_device(plain):
                state |= {index: self._on_host(state[index]) for index in packed["params"] if index in state}
        return {**optimizer_state, "state": state, "param_groups": groups}

    def release(self) -> None:
        """Give the optimizer back as the user made it: state on the host again, no hooks. Not for use any more."""
        for hook in self._hooks:
            hook.remove()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self.optimizer.state and not _keeps_state_on_device(group):
                    self.optimizer.state[parameter] = self._on_host(self.optimizer.state[parameter])
        self._advance()

    def _advance(self) -> None:
        self._generation += 1

    def _current(self) -> list[PreparedGroup]:
        """Return the groups; new ones after state was loaded or a group was added."""
        groups = self.optimizer.param_groups
        if groups is not self._list or [len(group["params"]) for group in groups] != self._sizes:
            self._advance()
            self._build()
        return self._groups

    def _build(self) -> None:
        assert not _is_capturing(self.device), "tensors made in a capture are the graph's"
        self._list = self.optimizer.param_groups
        self._sizes = [len(group["params"]) for group in self._list]
        if self._uses_device_values and self.device_values_problem() is not None:
            self._uses_device_values = False  # a learning rate was loaded that is a tensor
        update = UPDATES[self._known] if self._uses_device_values and self._known else None
        names, self._zeros = (update.names, update.zeros) if update else (("lr",), ())
        self._read = update.read if update else _read_lr
        # torch's CUDA kernels take a learning rate in float32 only; float64 is what a Python number is.
        dtype = torch.float32 if self.device.type == "cuda" and not update else torch.float64
        self._groups = []
        for group in self._list:
            is_ours = "lr" in group and not _is_on(self.device, group["lr"])
            values = {name: torch.zeros((), dtype=dtype, device=self.device) for name in names if is_ours}
            flags = self._recipe.flags_for(group, self.device)
            if update:
                # Nothing is left for torch's kernels to do, and the fused ones see that before they look at found_inf.
                flags |= {"fused": True, "foreach": False}
            self._groups.append(PreparedGroup(group, flags, values))
        self._numbers = DeviceNumbers(list(chain.from_iterable(each.values.values() for each in self._groups)))
        betas = {"betas"} if "beta1" in names else set()
        others = {"params", "param_names", *names, *betas, *FLAGS, *WRITTEN_BY_SCHEDULERS}
        self._baked_in = [sorted(group.keys() - others) for group in self._list]
        self._constant_names = [[*keys, *(f"{zero} == 0" for zero in self._zeros)] for keys in self._baked_in]

    def _host_numbers(self) -> list[float]:
        return list(chain.from_iterable(self._read(each.group) for each in self._groups if each.values))

    def _constants(self) -> list[tuple[Any, ...]]:
        """Return a tuple for each group, in the order of `_constant_names`."""
        groups, zeros = self._current(), self._zeros
        return [
            (*map(each.group.get, keys), *[each.group[zero] == 0 for zero in zeros])
            for each, keys in zip(groups, self._baked_in, strict=True)
        ]

    def _needs_device_values(self) -> bool:
        """Whether the first tier has no right step: see `_fill_buffers`."""
        return (
            self._known is SGD
            and not self._uses_device_values
            and any(group["momentum"] != 0 and group["dampening"] != 0 for group in self.optimizer.param_groups)
        )

    def _swap_in(self) -> list[tuple[dict[str, Any], str, Any, Any, int]]:
        """Put flags and device values into the groups; return group, key, host value, value inside, its version."""
        swapped: list[tuple[dict[str, Any], str, Any, Any, int]] = []
        for each in self._groups:
            inside: dict[str, Any] = dict(each.flags)
            if each.values:
                inside["lr"] = each.values["lr"]
            for key, value in inside.items():
                version = value._version if isinstance(value, Tensor) else 0
                swapped.append((each.group, key, each.group[key], value, version))
                each.group[key] = value
        return swapped

    def _swap_out(self, swapped: list[tuple[dict[str, Any], str, Any, Any, int]]) -> None:
        for group, key, host, inside, version in swapped:
            if group[key] is not inside:
                continue  # the step wrote to it, so that is the host value now
            group[key] = host
            if isinstance(inside, Tensor) and inside._version != version and not _is_capturing(self.device):
                # As by `group["lr"] *= 0.5`; in a capture the same was seen in the eager step before it.
                now, before = inside.item(), inside.new_tensor(float(host)).item()
                group[key] = host if now == before else now
        if self._list is not self.optimizer.param_groups:
            return
        changed = self._numbers.differing(self._host_numbers())
        names = [f"{name} of parameter group {i}" for i, each in enumerate(self._groups) for name in each.values]
        self.changed_inside = tuple(names[index] for index in changed)
        if changed:
            self._numbers.forget()

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Within, the optimizer gathers a group's tensors in our way, and does not warn that it is capturable."""
        attributes: dict[str, Any] = {"_warned_capturable_if_run_uncaptured": True}
        if self._uses_device_values:
            attributes["_init_group"] = self._update_group
        elif self._known is SGD:
            attributes["_init_group"] = self._fill_buffers
        own = vars(self.optimizer)
        before = {name: own[name] for name in attributes if name in own}
        own.update(attributes)
        try:
            yield
        finally:
            for name in attributes:
                own.pop(name, None)
            own.update(before)

    def _update_group(self, group: dict[str, Any], *_: list[Tensor]) -> bool:
        """Do the whole update where torch's step would gather a group's tensors, and leave torch none to update.

        So everything around the update stays torch's own: closure, hooks, profiler, a scheduler's count of steps.
        """
        assert self._known is not None
        values = next(each.values for each in self._groups if each.group is group)
        UPDATES[self._known].update(self.optimizer, group, values)
        return False

    def _fill_buffers(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], buffers: list[Tensor | None]
    ) -> bool:
        """Gather as SGD does, with zeros for missing buffers.

        Without dampening that makes the same first momentum. torch's fused kernel takes either all buffers for new or
        none, and leaves new ones uninitialized in a step that `found_inf` skips.
        """
        gather = type(self.optimizer)._init_group  # type: ignore[attr-defined]
        has_sparse: bool = gather(self.optimizer, group, params, grads, buffers)
        for index, buffer in enumerate(buffers):
            if buffer is None:
                buffers[index] = torch.zeros_like(grads[index])
        return has_sparse

    def _move_state(self) -> None:
        """Put state like `step` beside its parameter; without effect after the first time."""
        if self.device.type == "cpu":
            return
        for each in self._groups:
            is_fused = {**each.group, **each.flags}.get("fused")
            for parameter in each.group["params"]:
                state = self.optimizer.state.get(parameter, {})
                for key in self._recipe.host_state:
                    value = state.get(key)
                    if isinstance(value, Tensor) and value.device != parameter.device:
                        assert not _is_capturing(self.device), "a capture needs a prepared step before it"
                        state[key] = value.to(parameter.device, torch.float32 if is_fused else value.dtype)

    def _on_host(self, state: dict[str, Any]) -> dict[str, Any]:
        moved = {key: state[key].cpu() for key in self._recipe.host_state if isinstance(state.get(key), Tensor)}
        return {**state, **moved}


def cycles_momentum(scheduler: Any) -> bool:
    """Whether a scheduler changes momentum or betas too, as OneCycleLR and CyclicLR do; also one within another."""
    within = getattr(scheduler, "_schedulers", ())  # of SequentialLR and ChainedScheduler
    return bool(getattr(scheduler, "cycle_momentum", False)) or any(map(cycles_momentum, within))


def _read_lr(group: Mapping[str, Any]) -> tuple[float, ...]:
    return (group["lr"],)


def _keeps_state_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _is_on(device: torch.device, value: Any) -> bool:
    return isinstance(value, Tensor) and value.device == device


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
