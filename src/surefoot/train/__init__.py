"""The visible training loop and what it stands on."""
