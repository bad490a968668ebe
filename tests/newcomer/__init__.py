"""Tasks of a newcomer, as the README, the quickstart and the guides tell them."""
