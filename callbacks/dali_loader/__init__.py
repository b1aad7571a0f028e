"""DALI pipelines behind loaders that keep Lightning's contract."""
