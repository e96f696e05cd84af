"""The run directory: log, plots, model card."""
