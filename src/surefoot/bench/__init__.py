"""How fast this machine is, how fast a job's step runs on it, and where the time goes."""
