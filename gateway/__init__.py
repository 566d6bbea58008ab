"""The HTTP front door: reads a turn, finds its blocks, decides, and relays."""
