"""What the gateway says of itself: metrics, logs, and the record of its decisions."""
