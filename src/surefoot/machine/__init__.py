"""What machine this is, read from the system without importing torch."""
