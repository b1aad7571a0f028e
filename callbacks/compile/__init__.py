"""Regional torch.compile: parts of a model compiled in place, cached between runs, with what it cost told."""

from fasttrain.callbacks.compile.callback import RegionalCompile
from fasttrain.callbacks.compile.compiled import CompiledRegions
from fasttrain.callbacks.compile.config import CompileConfig
from fasttrain.callbacks.compile.optimization import CompileOptimization

__all__ = ["CompileConfig", "CompileOptimization", "CompiledRegions", "RegionalCompile"]
