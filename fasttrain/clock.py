"""Where a run's wall time goes: waiting for data, copying it to the device, stepping, evaluating, checkpointing."""

import time

from lightning.pytorch.profilers import Profiler

PARTS = ("data_wait", "host_to_device", "step", "evaluation", "checkpoint")


class RunClock(Profiler):
    """Adds up wall seconds by part, from the marks that Lightning sets for its profilers. Costs about 1 us a mark.

    Host clock, without synchronizing: on a GPU the work of a step is launched, not awaited, so its time shows where
    the host first waits for it, which is the step itself when its launch queue is full or its loss is logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._begun: dict[str, float] = {}
        self._evaluating = False
        self._parts: dict[str, str | None] = {}

    def start(self, action_name: str) -> None:
        """Note the begin of one of Lightning's actions, if it belongs to a part."""
        part = self._part(action_name)
        if part is not None and not self._evaluating:
            self._begun[part] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Add the time since the action's begin to its part."""
        part = self._part(action_name)
        if part is not None and (begun := self._begun.pop(part, None)) is not None:
            self.seconds[part] += time.perf_counter() - begun

    def begin_evaluation(self) -> None:
        """From here on everything is evaluation."""
        self._begun["evaluation"] = time.perf_counter()
        self._evaluating = True

    def end_evaluation(self) -> None:
        """End what `begin_evaluation` began."""
        self._evaluating = False
        if (begun := self._begun.pop("evaluation", None)) is not None:
            self.seconds["evaluation"] += time.perf_counter() - begun

    def _part(self, action_name: str) -> str | None:
        if action_name not in self._parts:  # a handful of names, tens of look-ups a step
            self._parts[action_name] = _classify(action_name)
        return self._parts[action_name]


def _classify(action_name: str) -> str | None:
    if action_name.endswith(".train_dataloader_next"):
        return "data_wait"
    if action_name.startswith("[Strategy]") and action_name.endswith(".batch_to_device"):
        return "host_to_device"
    if action_name == "run_training_batch" or action_name.endswith(".wait_for_step"):
        return "step"
    if action_name == "save_checkpoint":
        return "checkpoint"
    return None
