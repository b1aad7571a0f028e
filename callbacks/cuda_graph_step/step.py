"""A Lightning module's training step as a pool of graphs: run eagerly at first, then captured, checked and replayed."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from fasttrain.batches import OpaqueLeaf, Signature, first_difference, flatten, map_tensors
from fasttrain.callbacks.cuda_graph_step.averaging import captured_averaging
from fasttrain.callbacks.cuda_graph_step.carried import CarriedState
from fasttrain.callbacks.cuda_graph_step.culprit import why_capture_failed
from fasttrain.callbacks.cuda_graph_step.gradients import Gradients, Held
from fasttrain.callbacks.cuda_graph_step.optimizer.capturable import CapturableOptimizer
from fasttrain.callbacks.cuda_graph_step.optimizer_part import OptimizerPart
from fasttrain.callbacks.cuda_graph_step.pool import GraphPool
from fasttrain.callbacks.cuda_graph_step.recording import Recorder, Recording
from fasttrain.callbacks.cuda_graph_step.self_check import compare_replay
from fasttrain.callbacks.cuda_graph_step.static_inputs import StaticInputs
from fasttrain.callbacks.cuda_graph_step.watch import HostWatch, Watch
from fasttrain.epoch_loop import Arguments, DelegatedOptimization, Outputs, Window
from fasttrain.errors import OptimizationError
from fasttrain.step_results import StepLogs, numbers_logged_as_tensors

Key = tuple[Signature, Window]


@dataclass
class StepGraph:
    """One captured step and what belongs to it."""

    recording: Recording
    inputs: StaticInputs
    window: Window
    function: Callable[[], Any]
    """What was captured; run again to check the replay."""
    has_optimizer: bool
    """Whether the optimizer's step was captured with it."""
    checks_left: int
    logs: StepLogs | None = None
    gradients: Held = field(default_factory=list)
    """Gradients in this graph's memory that somebody reads after the replay."""

    def release(self) -> None:
        """Give the memory back."""
        self.recording.release()
        self.logs, self.gradients = None, []


@dataclass(frozen=True)
class StepOptions:
    """How a `GraphedStep` goes about it."""

    checks: int = 2
    """Replays of each new graph that are compared with the eager step."""
    keeps_gradients: bool = False
    """Whether somebody reads `grad` after the step; else the memory serves other graphs."""


class GraphedStep:
    """Runs each training step of a fit, as a graph where it can.

    Args:
        trainer: in a fit; its optimizer is made.
        recorder: does the device's part.
        optimizer: the trainer's optimizer, prepared for capture; None to leave its step out of the graphs.
        pool: of graphs; empty.
        options: how to go about it.
        on_failure: called with a sentence when steps have to run eagerly from now on; may raise.
        on_note: called with a sentence about anything else worth knowing.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        recorder: Recorder,
        optimizer: CapturableOptimizer | None,
        pool: GraphPool[StepGraph],
        options: StepOptions,
        on_failure: Callable[[str], None],
        on_note: Callable[[str], None],
    ) -> None:
        self.trainer, self.recorder, self.pool, self.options = trainer, recorder, pool, options
        self.on_failure, self.on_note = on_failure, on_note
        self.module: Any = trainer.lightning_module
        self.optimizer = OptimizerPart(optimizer, trainer.precision_plugin, self._forget_graphs_without_optimizer)
        self.is_off = False
        self.worst_noise = 0.0
        self.loop = DelegatedOptimization(trainer, self.run)
        self.results = self.loop.results
        self.carried = CarriedState(self.module)
        self.gradients = Gradients(trainer.optimizers[0])
        self.watch = Watch(self.module, trainer.optimizers[0])
        self.host = HostWatch(self.module, trainer.strategy.root_device)
        self.averaging = captured_averaging(trainer, recorder, on_note)
        self._others_had_their_turn = True
        self._last: StepGraph | None = None
        self._mismatch: str | None = None
        self._checks = options.checks if trainer.world_size == 1 else None
        self._steps = 0

    def run(self, batch_idx: int, arguments: Arguments) -> Outputs:
        """Do one step on a batch that is on the device: the delegate of Lightning's optimization."""
        key, leaves = self._key_of(arguments.get("batch"), self.loop.window(batch_idx))
        graph = self.find(*key) if key is not None else None
        captures = key is not None and graph is None and self.pool.is_due(key) and self.optimizer.is_ready(key[1])
        self._agree_on_checks(captures)
        if key is None:
            return self._run_plain(batch_idx, arguments)
        if captures:
            graph = self._capture(key, batch_idx, arguments)
            leaves = []  # the static inputs hold them already
        if graph is None:
            return self._run_eagerly(key, batch_idx, arguments)
        self.replay(graph, leaves, batch_idx)
        return self.outputs(graph, to_keep=True)

    def _key_of(self, batch: Any, window: Window) -> tuple[Key | None, list[Tensor]]:
        """Return a batch's key and tensors; no key where the step is not for a graph."""
        if self.is_off or batch is None or self.loop._skip_backward:  # SWA's last epoch runs forward alone
            return None, []
        try:
            leaves, signature = flatten(batch)
        except OpaqueLeaf as error:
            self.turn_off(f"{error}, which is neither a tensor nor a value that can be compared")
            return None, []
        return (signature, window), leaves

    def find(self, signature: Signature, window: Window) -> StepGraph | None:
        """Return the graph for a batch of this signature, if there is one and what it has built in still holds."""
        if self._mismatch is not None:
            self.turn_off(self._mismatch)
        if self.is_off or self.loop._skip_backward:
            return None
        change = self.watch.glance()
        if self._others_had_their_turn:
            self._others_had_their_turn = False
            change = self.watch.look() or change
        change = change or self.optimizer.change()
        if change is not None and len(self.pool):
            self.on_note(f"{change}, so the step is captured anew")
            self._forget_graphs()
        return self.pool.find((signature, window))

    def replay(self, graph: StepGraph, leaves: list[Tensor], batch_idx: int) -> None:
        """Do the step on a batch's tensors, and everything on the host that goes with it."""
        if leaves:
            graph.inputs.copy_from(leaves)
        self.optimizer.before_replay()
        self.carried.bind()
        self.results.before_replay()
        if graph.window.accumulate > 1:
            self.gradients.bind()
        elif graph.gradients and self._last is not graph:
            self.gradients.point_at(graph.gradients)
        if graph.checks_left:
            self._replay_and_check(graph)
        else:
            graph.recording.replay()
            self.gradients.keep_in(graph.gradients)
        self._last = graph
        self.carried.count_updates()
        if graph.logs is None:  # static from the first replay on
            graph.logs = graph.recording.outputs["logs"]
        self.results.replayed(graph.logs)
        self.loop.count(graph.window, stepped=graph.window.steps and graph.has_optimizer)
        if graph.window.steps and not graph.has_optimizer:
            self.loop.step_optimizer(batch_idx, graph.recording.outputs["outputs"]["loss"])

    def outputs(self, graph: StepGraph, to_keep: bool) -> Outputs:
        """Return what the last replay hands to `on_train_batch_end`; copies, which the next one leaves alone."""
        outputs: Outputs = graph.recording.outputs["outputs"]
        return map_tensors(outputs, lambda tensor: tensor.clone()) if to_keep else outputs

    def expect_changes(self) -> None:
        """Others have had their turn, callbacks or an evaluation: look closely before the next replay."""
        self._others_had_their_turn = True

    def turn_off(self, reason: str) -> None:
        """Run every step eagerly from now on."""
        if not self.is_off:
            self.is_off = True
            self._forget_graphs()
            self.on_failure(reason)

    def release(self) -> None:
        """Give all graphs' memory and Lightning's own loop back. Safe to call twice."""
        self._forget_graphs()
        self.is_off = True
        self.loop.put_back()
        for averaging in self.averaging:
            averaging.put_back()
        self.optimizer.release()

    def _agree_on_checks(self, captures: bool) -> None:
        """With several processes, settle at the first step after the warm-up whether the coming graph is checked.

        An eager step beside a replay calls collectives once more, so that either all processes check or none. At this
        one step all of them can ask; later each captures when it meets a new signature, and nothing is checked.
        """
        self._steps += 1
        if self._checks is not None or self._steps <= self.pool.warm_up:
            return
        together = self.trainer.strategy.reduce_boolean_decision(captures, all=True)
        self._checks = min(self.options.checks, 1) if together else 0
        if self.options.checks and not together:
            self.on_note("the processes don't capture at the same step, so replays are trusted unchecked")

    def _run_plain(self, batch_idx: int, arguments: Arguments) -> Outputs:
        with self.optimizer.prepared():
            return self.loop.run_plain(batch_idx, arguments)

    def _run_eagerly(self, key: Key, batch_idx: int, arguments: Arguments) -> Outputs:
        """Warm up: one step as Lightning does it, watched for what a replay could not repeat."""
        window, numbers, reason = key[1], dict[str, float](), None
        with ExitStack() as stack:
            stack.enter_context(self.recorder.warm_up())
            stack.enter_context(self.optimizer.prepared())
            stack.enter_context(numbers_logged_as_tensors(self.module, numbers))
            if self.gradients.static:
                self.gradients.bind()
                stack.enter_context(self.gradients.zeroed_in_place())
            self.host.before()
            self.carried.before()
            outputs = self.loop.run_plain(batch_idx, arguments)
        try:
            self.carried.after()
            self.host.after(numbers)
            if not outputs:
                raise OptimizationError("training_step returned None, which a captured step can't decide anew")
        except OptimizationError as error:
            reason = str(error)
        self.pool.count_eager(key)
        if self.pool.is_hopeless:
            (one, _), (other, _) = cast(tuple[Key, Key], self.pool.last_keys())
            reason = reason or (
                f"every batch is of another signature: {first_difference(one, other)}; leave out of the batch what the "
                "step does not need, make it a tensor, or pad it to a few sizes (`pad`)"
            )
        self.optimizer.after_eager_step(window)
        self._last = None
        if reason is not None:
            self.turn_off(reason)
        return outputs

    def _device_step(self, batch: Any, batch_idx: int, others: Arguments, window: Window, whole: bool) -> Any:
        """Do a step's work on the device and leave the host as it was: what is captured, and run again to check it."""
        with ExitStack() as stack:
            stack.enter_context(self.loop.progress_kept())
            stack.enter_context(self.carried.metrics_kept())
            if whole:
                stack.enter_context(self.optimizer.prepared())
            if window.accumulate > 1:
                stack.enter_context(self.gradients.zeroed_in_place())
            logs = stack.enter_context(self.results.collecting())
            stack.enter_context(numbers_logged_as_tensors(self.module, {}))
            run = self.loop.run_plain if whole else self.loop.forward_and_backward
            outputs = run(batch_idx, OrderedDict(batch=batch, **others))
            with torch.no_grad():
                self.results.add_up(logs)
                self.carried.carry_over()
        return {"outputs": outputs, "logs": dict(logs)}

    def _capture(self, key: Key, batch_idx: int, arguments: Arguments) -> StepGraph | None:
        """Capture this key's step; None where that failed and the step is to run eagerly."""
        window, whole = key[1], self.optimizer.is_in
        inputs = StaticInputs(arguments["batch"], self.trainer.strategy.root_device)
        self.results.settle()
        self.results.batch_size = None  # Lightning would take the last batch's
        self.results.prepare()
        if window.accumulate > 1:
            self.gradients.make_static()
        self.optimizer.before_capture()
        self.carried.bind()

        others = OrderedDict((name, value) for name, value in arguments.items() if name != "batch")

        def function() -> Any:
            return self._device_step(inputs.batch, batch_idx, others, window, whole)

        random = self.recorder.random_state()
        entries = self.optimizer.state_entries()
        try:
            recording = self.recorder.record(function)
            if self.optimizer.state_entries() > entries:
                raise OptimizationError("the optimizer made state in the capture, which every replay would make anew")
        except Exception as error:
            self.carried.bind(as_they_were=True)
            self.gradients.drop()
            self.gradients.bind()
            self.recorder.set_random_state(random)
            self.optimizer.abandon_step()
            self._capture_failed(error)
            return None
        if not len(self.pool):
            self.watch.look()  # eager steps have set anew what is static now
        graph = StepGraph(recording, inputs, window, function, whole, self._checks or 0)
        if self.trainer.world_size > 1:
            self._checks = 0
        if window.accumulate == 1:
            if not whole or self.options.keeps_gradients:
                graph.gradients = self.gradients.held()
            else:
                self.gradients.drop()
        self.pool.add(key, graph)
        for name, number in self.host.numbers_to_tell():
            self.on_note(
                f"self.log({name!r}) is given a Python number, and replays go on logging {number:g}; log a tensor, or "
                "log it in on_train_batch_end"
            )
        return graph

    def _capture_failed(self, error: Exception) -> None:
        reason = why_capture_failed(error)
        if self.optimizer.is_in:
            self.optimizer.leave_out(f"the whole step can't be captured: {reason}")
        else:
            self.turn_off(f"the step can't be captured: {reason}; `fasttrain doctor` names every such place")

    def _replay_and_check(self, graph: StepGraph) -> None:
        random = self.recorder.random_state()
        device = self.trainer.strategy.root_device
        loss = torch.zeros((), device=device, dtype=torch.float64)

        def eager() -> None:
            self.recorder.set_random_state(random)
            with self.recorder.warm_up():
                result = graph.function()
            loss.copy_(result["outputs"]["loss"])
            self.gradients.keep_in(graph.gradients)
            if graph.window.accumulate == 1 and not graph.gradients:
                self.gradients.drop()

        def replay() -> None:
            self.recorder.set_random_state(random)
            graph.recording.replay()
            self.gradients.keep_in(graph.gradients)
            loss.copy_(graph.recording.outputs["outputs"]["loss"])

        graph.checks_left -= 1
        verdict = compare_replay(
            lambda: {"the loss": loss, **self._state(graph)},
            eager,
            replay,
            anyone=lambda flag: bool(self.trainer.strategy.reduce_boolean_decision(flag, all=False)),
        )
        self.worst_noise = max(self.worst_noise, verdict.worst_noise)
        if not verdict.was_made:
            graph.checks_left = 0
            self.on_note("there is no memory to compare a replay with the eager step, so it is trusted unchecked")
        if not graph.checks_left:
            self.recorder.trim()
        if verdict.unexplained is not None:
            # The eager step's result stands; what the graph hands out is still read once, so it goes at the next step.
            self._mismatch = f"a replay is not what the eager step computes: {verdict.unexplained}"

    def _state(self, graph: StepGraph) -> Mapping[str, Tensor]:
        """Return every tensor that a step changes, by a name that means something to the user."""
        state: dict[str, Tensor] = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for parameter, values in self.trainer.optimizers[0].state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    state[f"{names.get(id(parameter), 'parameter')} ({key} of the optimizer)"] = value
        for parameter, gradient in graph.gradients or self.gradients.static:
            state[f"{names.get(id(parameter), 'parameter')} (gradient)"] = gradient
        state |= {f"the sum of {key}": value for key, value in self.results.static_tensors.items()}
        state |= {f"the attribute {path}": value for path, value in self.carried.static.items()}
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        for name in ("_scale", "_growth_tracker"):
            if isinstance(value := getattr(scaler, name, None), Tensor):
                state[f"the loss scaler's {name.strip('_')}"] = value
        return state

    def _forget_graphs_without_optimizer(self, reason: str) -> None:
        self.on_note(f"the optimizer's step is left outside of the graph, since {reason}")
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        self.results.settle()
        self.gradients.forget()
        self.pool.clear()
        for averaging in self.averaging:
            averaging.forget()
        self._last, self._mismatch = None, None
