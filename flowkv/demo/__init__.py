"""The demo: one process fills a store and exits, another one answers from it."""
