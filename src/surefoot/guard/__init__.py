"""No non-finite step reaches the weights."""
