"""The whole training step as a CUDA graph: captured once for each input signature, checked, and replayed."""

from fasttrain.callbacks.cuda_graph_step.callback import CUDAGraphStep
from fasttrain.callbacks.cuda_graph_step.captured_function import CapturedFunction
from fasttrain.callbacks.cuda_graph_step.config import CUDAGraphStepConfig, PadConfig
from fasttrain.callbacks.cuda_graph_step.optimization import CUDAGraphStepOptimization

__all__ = ["CUDAGraphStep", "CUDAGraphStepConfig", "CUDAGraphStepOptimization", "CapturedFunction", "PadConfig"]
