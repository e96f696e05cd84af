"""After training: chat, export, and incidents run again."""
