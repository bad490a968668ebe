"""The cache: pages, prefixes, residency, steps, and the `KV` facade over them."""
