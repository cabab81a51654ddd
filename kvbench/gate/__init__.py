"""The CI gate: counters, paired timings and absolute limits, their verdict, and what CI shows of it."""
