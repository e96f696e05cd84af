"""From this machine to a training environment: an ordered plan, run and verified step by step."""
