"""Runs in MLPerf Training's terms: result files, how they are scored and checked, and what a run would take.

The callback is `fasttrain.mlperf.logger.MLPerfLogger`. Nothing is imported here: a report reads results without torch.
"""
