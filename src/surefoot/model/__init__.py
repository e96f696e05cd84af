"""Load, adapt and shape the model."""
