"""After training: chat and export."""
