"""When the regional compile applies, and the plan's door to it."""

from typing import Any, ClassVar

import lightning.pytorch as pl
import torch

from fasttrain.callback_door import CallbackOptimization
from fasttrain.callbacks.compile.cache import compiled_folder, kept_in
from fasttrain.callbacks.compile.callback import RegionalCompile, why_not_in_graph
from fasttrain.callbacks.compile.compiled import CompiledRegions, NotCompilable, first_line
from fasttrain.callbacks.compile.config import CompileConfig
from fasttrain.callbacks.compile.regions import find_regions, why_no_region
from fasttrain.callbacks.compile.tally import total
from fasttrain.callbacks.compile.toolchain import why_not
from fasttrain.comparison import compare_step, measured, verdict_of
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Applies, Context, Refuses, Stage, Verdict


class CompileOptimization(CallbackOptimization[CompileConfig, RegionalCompile]):
    """Compiles what the model consists of once the other optimizations have changed it."""

    name: ClassVar[str] = "compile"
    summary: ClassVar[str] = "repeated blocks, or modules named, by torch.compile, with a cache that outlives the run"
    config_class: ClassVar[type[Any]] = CompileConfig
    stage: ClassVar[Stage] = Stage.CALLBACK
    grade = "same numbers"

    def make_callback(self) -> RegionalCompile:
        """Return the callback, with the configuration as its parameters."""
        return RegionalCompile(**vars(self.config))

    def check(self, context: Context) -> Verdict:
        """Refuse where nothing can be compiled, or where the step measures no faster."""
        config = self.config
        try:
            regions = len(find_regions(context.module, config.modules))
        except OptimizationError as error:
            return Refuses(str(error))
        if not regions:
            return Refuses(why_no_region(context.module))
        if reason := self._why_not(context):
            return Refuses(reason)
        if not config.measure:
            return Applies(f"{regions} regions; not measured, as asked")
        return measured(context, self.name, lambda batch: self._compare(context, batch, regions), _said)

    def _why_not(self, context: Context) -> str | None:
        on_gpu = torch.device(context.hardware.device).type == "cuda"
        if on_gpu and "cuda_graph_step" in context.asked_for and (reason := why_not_in_graph(self.config.mode)):
            return reason
        return why_not(context.hardware, self.config.backend, self.config.mode)

    def _compare(self, context: Context, batch: Any, regions: int) -> Verdict:
        """Measure on copies."""
        config = self.config
        made: list[CompiledRegions] = []

        def compile_copy(copied: pl.LightningModule, batch: Any) -> Any:
            made.append(CompiledRegions(copied, config.modules, mode=config.mode, dynamic=config.dynamic,
                                        fullgraph=config.fullgraph, backend=config.backend))  # fmt: skip
            made[-1].apply()
            return batch

        with kept_in(compiled_folder(config.cache_dir, context.precision)):
            plain, ours = compare_step(context, batch, compile_copy)
        joint = total(made[0].tallies if made else ())
        seconds = f", compiled in {joint.compile_seconds:.1f} s ({joint.start})" if joint.compilations else ""
        return verdict_of(f"{regions} regions", plain.median_ms, ours.median_ms, config.least_gain, seconds)


def _said(error: OptimizationError) -> str:
    """Return what an error says in one line."""
    return error.what if isinstance(error, NotCompilable) else first_line(error)
