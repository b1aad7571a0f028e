"""The body: compile regions of a model in place, and put them back. Works in any loop.

`nn.Module.compile` does nearly this, and has all modules of a class share one compiled function: eight shapes of it, in
training and evaluation together, and torch gives up and runs the rest in Python. It also takes the second shape as a
sign that sizes vary. A ResNet's blocks are sixteen of one class. So here a function is compiled for each look of a
module, and for training and evaluation apart; blocks that look alike share it, and compile once.
"""

import hashlib
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fasttrain.callbacks.compile.config import Mode
from fasttrain.callbacks.compile.regions import Region, find_regions
from fasttrain.callbacks.compile.tally import Kind, Tally
from fasttrain.errors import OptimizationError
from fasttrain.optimization import Change
from fasttrain.site_key import module_text

# Outside of training no backward is waited for, and a CUDA graph's outputs are overwritten by the next region's call.
WITHOUT_GRAPHS: dict[Mode, Mode] = {
    "default": "default",
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
    "max-autotune-no-cudagraphs": "max-autotune-no-cudagraphs",
}


class NotCompilable(OptimizationError):
    """A region that the compiler fails on. `what` is the first part of the message, without what to do about it."""

    def __init__(self, region: str, error: BaseException) -> None:
        self.what = f"{region} can't be compiled: {first_line(error)}"
        super().__init__(f"compile: {self.what}. Name other modules in optimizations.compile.modules, or leave it out.")


class CompiledRegions:
    """Compiles regions of a model. Parameters, hooks and the state dict stay as they are; copies are not compiled.

    Hooks are compiled too: register them before the first call.

    Args:
        model: is not compiled itself.
        modules: paths or class names, see `regions.find_regions`.
        mode, dynamic, fullgraph, backend: torch.compile's.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[str] = (),
        *,
        mode: Mode = "default",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        backend: str = "inductor",
    ) -> None:
        self.model, self.modules = model, modules
        self._options: dict[str, Any] = {"mode": mode, "dynamic": dynamic, "fullgraph": fullgraph, "backend": backend}
        self._kinds: dict[tuple[str, bool], Kind] = {}
        self._calls: list[_CompiledCall] = []

    @property
    def tallies(self) -> list[Tally]:
        """What has happened to each region so far."""
        return [call.tally for call in self._calls]

    def apply(self) -> list[Change]:
        """Have every region compiled when it is first called; return which they are.

        Raises:
            OptimizationError: a module that was named is not there, or can't be called.
        """
        regions = find_regions(self.model, self.modules)
        for region in regions:
            call = _CompiledCall(region, self._kind)
            region.module._compiled_call_impl = call
            self._calls.append(call)
        return [Change(region.path, f"{type(region.module).__name__} compiled") for region in regions]

    def undo(self) -> None:
        """Have every region run in Python again."""
        for call in self._calls:
            if call.module._compiled_call_impl is call:
                del call.module._compiled_call_impl
        self._calls.clear()

    def _kind(self, module: nn.Module, look: str, training: bool) -> Kind:
        kind = self._kinds.get((look, training))
        if kind is None:
            name = f"{type(module).__name__}_{_digest(look)}_{'training' if training else 'evaluation'}"
            options = self._options if training else {**self._options, "mode": WITHOUT_GRAPHS[self._options["mode"]]}
            kind = self._kinds[look, training] = Kind(torch.compile(_function(name), **options))
        return kind


class _CompiledCall:
    """Is called in the place of a module's own `__call__`."""

    def __init__(self, region: Region, kind: Callable[[nn.Module, str, bool], Kind]) -> None:
        self.module, self.tally, self._kind = region.module, Tally(region.path), kind
        self._look = module_text(region.module)
        self._by_mode: dict[bool, Kind] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if torch.compiler.is_compiling():  # within something larger that is compiled
            return module._call_impl(*args, **kwargs)
        kind = self._by_mode.get(module.training)
        if kind is None:
            kind = self._by_mode[module.training] = self._kind(module, self._look, module.training)
        try:
            return self.tally.call(kind, module, args, kwargs)
        except Exception as error:
            if not is_compilers(error):
                raise
            raise NotCompilable(f"'{self.tally.path}' ({type(module).__name__})", error) from error


def is_compilers(error: BaseException | None) -> bool:
    """Whether an error is the compiler's own, and not one of the model that it met on its way through it."""
    of_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
    return of_compiler and type(error).__name__ != "TorchRuntimeError"


def first_line(error: BaseException) -> str:
    """Return what an error says first, without its full stop; the compiler's go on for pages."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__).removesuffix(".")


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _function(name: str) -> FunctionType:
    """Return a function with code of its own: torch keeps what it compiles, and which sizes vary, by code and name."""
    code = _run.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, globals(), name)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
