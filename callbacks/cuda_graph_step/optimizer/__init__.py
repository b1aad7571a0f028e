"""Optimizers prepared for capture: hyperparameters on the device, plain numbers for everybody else."""
