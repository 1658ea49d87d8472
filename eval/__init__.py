"""Experiment file → runs → metrics with confidence intervals → report."""
