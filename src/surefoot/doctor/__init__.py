"""From a snapshot of a machine to the one cause of its trouble and the fix."""
