"""What people read: reports as one HTML file with charts, and what a terminal shows."""
