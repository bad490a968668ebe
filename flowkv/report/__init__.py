"""Reports for people: one HTML file with charts, and terminal output."""
