"""Events on one bus, and the metrics, traces and timelines made of them."""
