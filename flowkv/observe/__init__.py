"""What happens, told once: events on one bus, and metrics, traces and timelines made of them."""
