"""Traffic for a gateway or an engine, and what it shows; speaks to them over HTTP only."""
