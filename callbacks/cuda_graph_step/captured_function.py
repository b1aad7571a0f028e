"""Any function of tensors, captured by input signature: for manual optimization, and for loops without Lightning."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from fasttrain.batches import flatten, map_tensors, tensors_in
from fasttrain.callbacks.cuda_graph_step.culprit import why_capture_failed
from fasttrain.callbacks.cuda_graph_step.loss_scaler import take_over_precision
from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer
from fasttrain.callbacks.cuda_graph_step.pool import GraphPool
from fasttrain.callbacks.cuda_graph_step.recording import EagerRecorder, Recording, recorder_for
from fasttrain.callbacks.cuda_graph_step.self_check import compare_replay
from fasttrain.callbacks.cuda_graph_step.static_inputs import StaticInputs


class _Graph:
    """A captured call.

    Args:
        steps: how often each optimizer steps in it.
    """

    def __init__(
        self, recording: Recording, inputs: StaticInputs, function: Callable[[], Any], steps: list[int]
    ) -> None:
        self.recording, self.inputs, self.function, self.steps = recording, inputs, function, steps
        self.is_checked = False

    def release(self) -> None:
        self.recording.release()


class CapturedFunction:
    """Calls a function eagerly while its input signature is new, then captures it, and replays it from then on.

        class GAN(LightningModule):                              # automatic_optimization = False
            def on_train_start(self):
                self.step = CapturedFunction(self.both_steps, optimizers=self.optimizers())

            def training_step(self, batch, batch_idx):
                self.log_dict(self.step(batch))

    The function may run forward, backward and optimizer steps; what it computes on the host happens at capture only, so
    it logs nothing itself and returns tensors. These are static: the next call overwrites them.

    Args:
        function: of any inputs (tensors in any structure, and values) to tensors in any structure.
        optimizers: every optimizer that it steps, torch's or Lightning's; their learning rates may change between
            calls. With one whose step can't be captured every call runs eagerly, and a warning says why.
        device: of the inputs; that of the optimizers' first parameter if left out.
        precision: the trainer's precision plugin, if the function steps through it under 16-mixed.
        warm_up: eager calls before the first capture.
        eager_first: eager calls of each further signature.
        max_graphs: kept at the same time.
        module: whose buffers the function changes, as batch normalization does; the function's own object, if it is a
            method of a module.
        check: compare the first replay of each graph with the eager call, in outputs, parameters, buffers and optimizer
            state. Not done without a module: what else the function changes would be changed twice.
        stand_in: run the function again instead of replaying a graph; always so without CUDA.
        tell: given the reason why calls run eagerly from then on; a warning says it if this is left out.

    Raises:
        ValueError: neither `device` nor an optimizer to take it from.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        optimizers: Any = (),
        device: torch.device | str | None = None,
        precision: Any = None,
        warm_up: int = 3,
        eager_first: int = 1,
        max_graphs: int = 16,
        module: nn.Module | None = None,
        check: bool = True,
        stand_in: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.function, self._tell = function, tell
        self._given: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        plain = [o.optimizer if isinstance(o, LightningOptimizer) else o for o in self._given]
        if device is None and not plain:
            raise ValueError("give the device of the inputs, or an optimizer whose parameters are on it.")
        self.device = torch.device(device) if device is not None else plain[0].param_groups[0]["params"][0].device
        self.optimizers = [CapturableOptimizer(optimizer, self.device) for optimizer in plain]
        self.pool: GraphPool[_Graph] = GraphPool(max_graphs, warm_up, eager_first)
        owner = getattr(function, "__self__", None)
        self.module = module if module is not None or not isinstance(owner, nn.Module) else owner
        self.check, self.failure = check and self.module is not None, ""
        self._recorder = EagerRecorder() if stand_in else recorder_for(self.device)
        self._generations = [optimizer.generation for optimizer in self.optimizers]
        self._put_precision_back = take_over_precision(precision) if precision is not None else None
        if reason := next(filter(None, (optimizer.problem() for optimizer in self.optimizers)), None):
            self.release()
            self.optimizers = []
            self._give_up(reason, stacklevel=3)

    def __call__(self, *inputs: Any) -> Any:
        """Return what the function returns for these inputs; static tensors once it is replayed."""
        leaves, signature = flatten(inputs)
        if len(self.pool) and self._is_outdated():
            self.pool.clear()
        graph = self.pool.find(signature)
        if graph is not None:
            graph.inputs.copy_from(leaves)
        elif not self.failure and self.pool.is_due(signature):
            graph = self._capture(inputs)
            if graph is not None:
                self.pool.add(signature, graph)
        if graph is None:
            self.pool.count_eager(signature)
            with self._recorder.warm_up(), self._prepared():
                return self.function(*inputs)
        return self._replay(graph)

    def release(self) -> None:
        """Give the graphs' memory back, and the optimizers and the precision plugin as they were."""
        self.pool.clear()
        for optimizer in self.optimizers:
            optimizer.release()
        if self._put_precision_back is not None:
            self._put_precision_back()
            self._put_precision_back = None

    def _is_outdated(self) -> bool:
        generations = [optimizer.generation for optimizer in self.optimizers]
        is_outdated = generations != self._generations or any(o.constants_changed() for o in self.optimizers)
        self._generations = generations
        return is_outdated

    def _capture(self, inputs: tuple[Any, ...]) -> _Graph | None:
        static = StaticInputs(inputs, self.device)
        steps = [0] * len(self._given)

        def function() -> Any:
            with self._counting(steps), self._prepared():
                return self.function(*static.batch)

        random = self._recorder.random_state()
        for optimizer in self.optimizers:
            optimizer.upload()
            optimizer.accept()
        try:
            recording = self._recorder.record(function)
        except Exception as error:
            self._recorder.set_random_state(random)
            self._give_up(f"it can't be captured: {why_capture_failed(error)}")
            return None
        return _Graph(recording, static, function, steps)

    def _replay(self, graph: _Graph) -> Any:
        for optimizer in self.optimizers:
            optimizer.upload()
        if self.check and not graph.is_checked:
            graph.is_checked = True
            result = self._replay_and_check(graph)
        else:
            graph.recording.replay()
            result = graph.recording.outputs
        for optimizer, steps in zip(self._given, graph.steps, strict=True):
            if isinstance(optimizer, LightningOptimizer):
                for _ in range(steps):
                    optimizer._on_before_step()
                    optimizer._on_after_step()
        return result

    def _replay_and_check(self, graph: _Graph) -> Any:
        """Return the replay's outputs, or the eager call's if the replay's can't be trusted."""
        random = self._recorder.random_state()
        outputs: dict[str, Tensor] = {}
        result: list[Any] = []

        def note(of_eager: bool, returned: Any) -> None:
            if of_eager:
                result[:] = [map_tensors(returned, lambda tensor: tensor.detach().clone())]
            for index, tensor in enumerate(tensors_in(returned)):
                static = outputs.setdefault(f"output {index}", torch.empty_like(tensor.detach()))
                static.copy_(tensor.detach())

        def eager() -> None:
            self._recorder.set_random_state(random)
            with self._recorder.warm_up():
                note(True, graph.function())

        def replay() -> None:
            self._recorder.set_random_state(random)
            graph.recording.replay()
            note(False, graph.recording.outputs)

        verdict = compare_replay(lambda: {**self._state(), **outputs}, eager, replay)
        if verdict.unexplained is None:
            return graph.recording.outputs
        self._give_up(f"a replay is not what the eager call computes: {verdict.unexplained}")
        return result[0]

    def _give_up(self, reason: str, stacklevel: int = 4) -> None:
        self.failure = reason
        self.pool.clear()
        if self._tell is not None:
            self._tell(reason)
            return
        warnings.warn(f"CapturedFunction: calls run eagerly, since {reason}.", stacklevel=stacklevel)

    def _state(self) -> dict[str, Tensor]:
        module = self.module
        state = {} if module is None else {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for number, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
            for index, parameter in enumerate(parameters):
                name = f"parameter {index} of optimizer {number}"
                state[name] = parameter.detach()
                values = optimizer.optimizer.state.get(parameter, {})
                state |= {f"{key} of {name}": value for key, value in values.items() if isinstance(value, Tensor)}
        return state

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.prepared())
            yield

    @contextmanager
    def _counting(self, steps: list[int]) -> Iterator[None]:
        """Within, Lightning's optimizers count their steps here, and not in the loop's progress."""
        steps[:] = [0] * len(steps)
        kept = [(o, o._on_before_step, o._on_after_step) for o in self._given if isinstance(o, LightningOptimizer)]

        def counts(index: int) -> Callable[[], None]:
            def count() -> None:
                steps[index] += 1

            return count

        for index, optimizer in enumerate(self._given):
            if isinstance(optimizer, LightningOptimizer):
                optimizer._on_before_step, optimizer._on_after_step = counts(index), _nothing
        try:
            yield
        finally:
            for optimizer, before, after in kept:
                optimizer._on_before_step, optimizer._on_after_step = before, after


def _nothing() -> None:
    pass
