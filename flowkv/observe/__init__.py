"""Events on a bus, and the metrics, traces and timelines made of them."""
