"""Rules, one small function each: a machine's facts in, a hit or nothing out. Grouped as the failure catalogue is."""
