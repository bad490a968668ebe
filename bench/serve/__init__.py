"""Many requests at once: throughput, latencies and their spread, beside four baselines.

`python -m bench serve` runs it. All times are measured on this machine, as ratios within one run.
"""
