"""What happens, told once: events on one bus, metrics counted from them, reports to read."""
