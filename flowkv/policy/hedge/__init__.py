"""The shipped default: what serves the traffic at hand best, and never worse than recency."""
